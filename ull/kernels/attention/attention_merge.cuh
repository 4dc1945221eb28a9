// What a split yields, and how splits become the attention output: merged in ascending order within spans of 8 splits,
// then span by span. A block merges the spans that are all its own as it goes; whoever is the last of a part's blocks
// to finish merges the rest. Where that happens cannot change a bit.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_plan.cuh"
#include "attention/attention_values.cuh"
#include "base/float_math.h"
#include "linear/activations.cuh"
#include "model.cuh"

namespace ull::gpu {

struct RowStatistics {
  float maximum;
  float sum;
};

// Output of two sets of positions = first's * weight[0] + second's * weight[1].
struct MergeWeights {
  float weight[2];
};

ULL_DEVICE MergeWeights merge(RowStatistics& first, const RowStatistics& second) {
  const float maximum = first.maximum > second.maximum ? first.maximum : second.maximum;
  const MergeWeights weights{
      {exp_lanes<ScalarMath>(first.maximum - maximum), exp_lanes<ScalarMath>(second.maximum - maximum)}};
  first.sum = ::fmaf(second.sum, weights.weight[1], first.sum * weights.weight[0]);
  first.maximum = maximum;
  return weights;
}

ULL_DEVICE float merged(const MergeWeights& weights, float first, float second) {
  return ::fmaf(second, weights.weight[1], first * weights.weight[0]);
}

// What the outputs of a row are multiplied by in the end. Params: AttentionParams, or a chunk's.
template <typename Params>
ULL_DEVICE float output_factor(const Params& params, int kv_head, float sum) {
  const float inverse = arch::reciprocal(sum);
  return kKvBits == 8 ? inverse * params.kv_scale[kKvHeads + kv_head] : inverse;
}

// The neighbouring dimensions that a lane holds of each row, and the first of them.
inline constexpr int kLaneDims = 2 * kValueTiles;
ULL_DEVICE int lane_dim() { return arch::warp() * kWarpDims + arch::lane() % 4 * kLaneDims; }

template <int kDims>
struct alignas(4 * kDims) Floats {
  float value[kDims];
};

// ---- partial results in memory --------------------------------------------------------------------------------------
// [kv_heads][splits][64 * group] rows: head_dim outputs each, then, behind all of those, maximum and sum each.

ULL_DEVICE size_t partial_row(const AttentionParams& params, int kv_head, int split, int row) {
  return (static_cast<size_t>(kv_head) * static_cast<size_t>(params.splits) + static_cast<size_t>(split)) *
             (kTreeTokens * kGroup) +
         static_cast<size_t>(row);
}
ULL_DEVICE float* partial_output(const AttentionParams& params, size_t row) { return params.partial + row * kHeadDim; }
ULL_DEVICE float* partial_statistics(const AttentionParams& params, size_t row) {
  return params.partial + partial_row(params, kKvHeads, 0, 0) * kHeadDim + 2 * row;
}

// Output of a row from dimension `dim` on: f16 activations, in pairs. Dimensions of one step of 32 lie side by side.
ULL_DEVICE uint32_t* output_pair(const AttentionParams& params, int kv_head, int row, int dim) {
  const int node = row / kGroup;
  const int head = kv_head * kGroup + row % kGroup;
  return static_cast<uint32_t*>(params.output) + activation_index(node, head * kHeadDim + dim) / 2;
}

// ---- after each split -----------------------------------------------------------------------------------------------

// Maximum and sum of a row over a split. step_row: of the rows under way.
template <int kTile>
ULL_DEVICE RowStatistics split_statistics(int step_row) {
  using Shared = AttentionShared<kTile>;
  const unsigned char* shared = arch::shared_memory();
  const auto* sums = reinterpret_cast<const float*>(shared + Shared::kSum) + step_row * kAttentionWarps;
  const auto* corrections = reinterpret_cast<const float*>(shared + Shared::kCorrection) + step_row * kSplitTiles;
  RowStatistics own{reinterpret_cast<const float*>(shared + Shared::kSplitMaximum)[step_row], 0.0F};
#pragma unroll
  for (int tile = 0; tile < kSplitTiles; ++tile) {
    own.sum = ::fmaf(own.sum, corrections[tile], sums[2 * tile] + sums[2 * tile + 1]);
  }
  return own;
}

// Takes a lane's outputs of one row of a split: into the result if there is but one split, into the block's span if
// that is all its own, else into memory. row: of the block's rows; step_row: of those under way.
template <int kTile>
ULL_DEVICE void take_row(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share,
                         int split, int row, int step_row, Floats<kLaneDims> own) {
  using Shared = AttentionShared<kTile>;
  unsigned char* shared = arch::shared_memory();
  RowStatistics statistics = split_statistics<kTile>(step_row);
  if (plan.splits() == 1) {
    const float factor = output_factor(params, share.kv_head, statistics.sum);
    uint32_t* to = output_pair(params, share.kv_head, share.row + row, lane_dim());
    for (int i = 0; i < kValueTiles; ++i) {
      to[i] = arch::f32x2_to_f16x2(own.value[2 * i] * factor, own.value[2 * i + 1] * factor);
    }
    return;
  }
  const bool keeps_statistics = arch::warp() == 0 && arch::lane() % 4 == 0;
  int slot = split;
  if (plan.has_span(share.first_split, share.end_split, split)) {
    auto* span = reinterpret_cast<Floats<kLaneDims>*>(shared + Shared::kSpanOutput + 4 * (row * kHeadDim + lane_dim()));
    // Two copies in turn: warp 0 writes one while slower warps still read the other.
    auto* span_statistics = reinterpret_cast<RowStatistics*>(shared + Shared::kSpanStatistics) + row;
    slot = plan.span_first(split);
    if (split != slot) {
      RowStatistics before = span_statistics[(split - 1) % 2 * Shared::kPartRows];
      const MergeWeights weights = merge(before, statistics);
      for (int i = 0; i < kLaneDims; ++i) own.value[i] = merged(weights, span->value[i], own.value[i]);
      statistics = before;
    }
    if (split != plan.span_last(split)) {
      *span = own;
      if (keeps_statistics) span_statistics[split % 2 * Shared::kPartRows] = statistics;
      return;
    }
  }
  const size_t to = partial_row(params, share.kv_head, slot, share.row + row);
  *reinterpret_cast<Floats<kLaneDims>*>(partial_output(params, to) + lane_dim()) = own;
  if (keeps_statistics)
    *reinterpret_cast<Floats<2>*>(partial_statistics(params, to)) = {{statistics.maximum, statistics.sum}};
}

// ---- in the end -----------------------------------------------------------------------------------------------------

// Counts this block's splits; true for the last block of its part. The counter is left at 0 for the next layer.
template <int kTile>
ULL_DEVICE bool is_last_lane(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share) {
  auto* last = reinterpret_cast<volatile uint32_t*>(arch::shared_memory() + AttentionShared<kTile>::kLast);
  arch::block_barrier();
  if (arch::thread() == 0) {
    arch::fence_device();
    uint32_t* counter = params.counters + share.kv_head * kMostParts + share.part;
    const auto own = static_cast<uint32_t>(share.splits());
    *last = arch::atomic_add(counter, own) + own == static_cast<uint32_t>(plan.splits()) ? 1U : 0U;
    if (*last != 0) *counter = 0;
    arch::fence_device();
  }
  arch::block_barrier();
  return *last != 0;
}

inline constexpr int kMergeBatch = 8;  // partial results that a thread has under way

// One quad of dimensions of one row: the outputs of all splits.
struct MergedQuad {
  RowStatistics statistics;
  float value[4];
};

ULL_DEVICE void merge_quad(MergedQuad& first, const MergedQuad& second) {
  const MergeWeights weights = merge(first.statistics, second.statistics);
  for (int i = 0; i < 4; ++i) first.value[i] = merged(weights, first.value[i], second.value[i]);
}

// row: of the kv head. kInLoop: the kernel does this again and again. Then what is written only sometimes must be given
// a value first, or the compiler keeps its registers for it all the way round.
template <bool kInLoop>
ULL_DEVICE MergedQuad merge_splits(const AttentionParams& params, const AttentionPlan& plan, int kv_head, int row,
                                   int dim) {
  constexpr MergedQuad kNothing{{kNoMaximum, 0.0F}, {}};
  MergedQuad total = kNothing;
  MergedQuad span = kNothing;
  int lane_end = plan.first_split + plan.per_lane;  // of the lane that had the split
#pragma unroll 1
  for (int split = plan.first_split; split < plan.end_split;) {
    arch::Vector4 outputs[kMergeBatch];
    arch::Vector4 statistics[kMergeBatch];  // of this row and its neighbour
    int next[kMergeBatch];                  // split after the one that this result ends with
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      next[i] = split;
      if constexpr (kInLoop) outputs[i] = statistics[i] = {};
      if (split >= plan.end_split) continue;
      const size_t from = partial_row(params, kv_head, split, row);
      outputs[i] = arch::load_global(partial_output(params, from) + dim);
      statistics[i] = arch::load_global(partial_statistics(params, from - from % 2));
      while (lane_end <= split) lane_end += plan.per_lane;
      split = plan.has_span(lane_end - plan.per_lane, lane_end, split) ? plan.span_last(split) + 1 : split + 1;
      next[i] = split;
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      if (i > 0 && next[i] == next[i - 1]) continue;  // beyond the end
      MergedQuad own;
      own.statistics.maximum = arch::bits_float(row % 2 == 0 ? statistics[i].word[0] : statistics[i].word[2]);
      own.statistics.sum = arch::bits_float(row % 2 == 0 ? statistics[i].word[1] : statistics[i].word[3]);
      for (int d = 0; d < 4; ++d) own.value[d] = arch::bits_float(outputs[i].word[d]);
      merge_quad(span, own);
      if (next[i] % kSpanSplits == 0 || next[i] == plan.end_split) {
        merge_quad(total, span);
        span = kNothing;
      }
    }
  }
  return total;
}

template <bool kInLoop>
ULL_DEVICE void merge_part(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share) {
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int i = arch::thread(); i < share.rows * kQuads; i += kAttentionThreads) {
    const int row = share.row + i / kQuads;
    const int dim = i % kQuads * 4;
    const MergedQuad total = merge_splits<kInLoop>(params, plan, share.kv_head, row, dim);
    const float factor = output_factor(params, share.kv_head, total.statistics.sum);
    uint32_t* to = output_pair(params, share.kv_head, row, dim);
    for (int d = 0; d < 2; ++d) {
      to[d] = arch::f32x2_to_f16x2(total.value[2 * d] * factor, total.value[2 * d + 1] * factor);
    }
  }
}

}  // namespace ull::gpu
