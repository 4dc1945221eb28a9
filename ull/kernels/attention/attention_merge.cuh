// What a split yields, and how splits become the attention output: merged in ascending order within spans of 8 splits,
// then span by span. A block merges the spans that are all its own as it goes; whoever is the last of a part's blocks
// to finish merges the rest. Where that happens cannot change a bit.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_plan.cuh"
#include "attention/attention_values.cuh"
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
  const MergeWeights weights{{weight(first.maximum, maximum), weight(second.maximum, maximum)}};
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
static_assert(8 % kLaneDims == 0, "or some pair's next one is not kOutputStride further");
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

// Output of a row from dimension `dim` on: f16 activations, in pairs, one kOutputStride behind another.
template <int kTile>
inline constexpr int kOutputStride = kPairStride<kTile> / 2;
template <int kTile>
ULL_DEVICE uint32_t* output_pair(const AttentionParams& params, int kv_head, int row, int dim) {
  const int node = row / kGroup;
  const int head = kv_head * kGroup + row % kGroup;
  return static_cast<uint32_t*>(params.output) + round_index<kTile>(node, head * kHeadDim + dim) / 2;
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
    uint32_t* to = output_pair<kTile>(params, share.kv_head, share.row + row, lane_dim());
    for (int i = 0; i < kValueTiles; ++i) {
      to[i * kOutputStride<kTile>] = arch::f32x2_to_f16x2(own.value[2 * i] * factor, own.value[2 * i + 1] * factor);
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
    *last = arch::atomic_add(counter, own) + own == static_cast<uint32_t>(plan.own_splits()) ? 1U : 0U;
    if (*last != 0) *counter = 0;
    arch::fence_device();
  }
  arch::block_barrier();
  return *last != 0;
}

// Whether a split's place in memory holds a result: whoever has all splits of a span leaves one, in the first's place.
template <int kTile>
ULL_DEVICE bool has_result(const AttentionPlan& plan, int split) {
  if (split < plan.first_split || split >= plan.end_split) return false;
  const int first = plan.span_first(split);
  if (split == first) return true;
  const bool of_pages = kInCores<kTile> && split < plan.own_first;
  const int origin = of_pages ? plan.first_split : plan.own_first;
  if (first < origin) return true;  // two kernels have the span
  const int per_lane = of_pages ? plan.page_per_lane : plan.per_lane;
  const auto before = static_cast<uint32_t>(first - origin) % static_cast<uint32_t>(per_lane);
  const int lane = first - static_cast<int>(before);  // first split of the lane that has `first`
  const int end = of_pages ? smaller(lane + per_lane, plan.own_first) : lane + per_lane;
  return !plan.has_span(lane, end, split);
}

// Merges the results of eight neighbouring lanes one after another into `all`: of the lanes in `present`, which agree
// on `all`. Returns the weights with which the own of `lane`, this one, is merged.
ULL_DEVICE MergeWeights merge_lanes(RowStatistics& all, const RowStatistics& own, uint32_t present, int lane) {
  const int first = lane / kSpanSplits * kSpanSplits;
  RowStatistics before = all;
#pragma unroll
  for (int i = 0; i < kSpanSplits; ++i) {
    if (first + i == lane) before.maximum = all.maximum;
    const float maximum = arch::shuffle(own.maximum, first + i);
    if ((present >> i & 1U) != 0) all.maximum = all.maximum > maximum ? all.maximum : maximum;
  }
  const MergeWeights weights = merge(before, own);
#pragma unroll
  for (int i = 0; i < kSpanSplits; ++i) {
    const float sum = arch::shuffle(merged(weights, all.sum, own.sum), first + i);
    if ((present >> i & 1U) != 0) all.sum = sum;
  }
  return weights;
}

// What the last block of a part does. Weights depend on the row alone: for as many rows and splits as fit into shared
// memory they are computed first, and then all dimensions are merged with them.
//
// kInLoop: the kernel does this again and again. Then what is written only sometimes must be given a value first, or
// the compiler keeps its registers for it all the way round.
template <int kTile, bool kInLoop>
class PartMerge {
  using Shared = AttentionShared<kTile>;
  static constexpr int kQuads = kHeadDim / 4;
  // Results that a thread has under way: more where there are registers for them.
  static constexpr int kBatch = kInCores<kTile> && Shared::kPartRows == 64 ? 16 : 8;
  static constexpr int kUnits = kTile == 1 ? 1 : 2;                     // statistics that a lane has under way
  static constexpr int kUnitsAtOnce = kAttentionThreads / kSpanSplits;  // eight lanes take a span of a row
  static constexpr int kWarpUnits = 32 / kSpanSplits;
  static constexpr uint32_t kSplitOutputs = kTreeTokens * kGroup * kHeadDim;  // of a kv head in memory

  // Where the values were: the pages that are shared memory of attention's in every kernel.
  static constexpr int kRows = Shared::kPartRows < 64 ? Shared::kPartRows : 64;
  static constexpr int kFitting = (3 * kKvHeadBytes - 12 * kRows - 4) / (9 * kRows + 4) / kSpanSplits * kSpanSplits;
  static constexpr int kSplits = kFitting < 64 ? kFitting : 64;
  static constexpr int kSpans = kSplits / kSpanSplits;
  static_assert(kSpans >= 1 && kSpans <= kSpanSplits, "eight lanes take the spans of a row");
  static constexpr int kWeights = Shared::kValue;                      // [rows][splits] of results into their spans
  static constexpr int kSpanWeights = kWeights + 8 * kRows * kSplits;  // [rows][spans] statistics, then weights
  static constexpr int kTotals = kSpanWeights + 8 * kRows * kSpans;    // [rows] statistics
  static constexpr int kFactors = kTotals + 8 * kRows;                 // [rows] f32
  static constexpr int kResults = kFactors + 4 * kRows;  // [splits] uint32: 2 * split + whether it ends a span
  static constexpr int kCount = kResults + 4 * kSplits;  // of results
  static_assert(kCount + 4 <= Shared::kValue + 3 * kKvHeadBytes);

 public:
  ULL_DEVICE PartMerge(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share)
      : params_(params), plan_(plan), share_(share), thread_(arch::shuffle(arch::thread(), arch::lane())) {}

  ULL_DEVICE void run() {
    const int rows = kTile == 1 ? kGroup : share_.rows;
#pragma unroll 1
    for (first_row_ = 0; first_row_ < rows; first_row_ += kRows) {
      rows_ = rows - first_row_ < kRows ? rows - first_row_ : kRows;
      const int first_split = plan_.first_split / kSpanSplits * kSpanSplits;
#pragma unroll 1
      for (base_ = first_split; base_ < plan_.end_split; base_ += kSplits) {
        const int splits = plan_.end_split - base_ < kSplits ? plan_.end_split - base_ : kSplits;
        spans_ = (splits - 1) / kSpanSplits + 1;
        is_first_ = base_ == first_split;
        is_last_ = base_ + kSplits >= plan_.end_split;
        if (warp() == kAttentionWarps - 1) list_results();
#pragma unroll 1
        for (int of_spans = 0; of_spans < 2; ++of_spans) {
          weigh(of_spans == 1);
          arch::block_barrier();
        }
        merge_outputs();
        arch::block_barrier();
      }
    }
  }

 private:
  ULL_DEVICE int lane() const { return thread_ % 32; }
  ULL_DEVICE int warp() const { return thread_ / 32; }
  ULL_DEVICE static unsigned char* at(int offset) { return arch::shared_memory() + offset; }
  ULL_DEVICE static MergeWeights* weights(int row) {
    return reinterpret_cast<MergeWeights*>(at(kWeights)) + row * kSplits;
  }
  ULL_DEVICE static MergeWeights* span_weights(int row) {
    return reinterpret_cast<MergeWeights*>(at(kSpanWeights)) + row * kSpans;
  }
  ULL_DEVICE static RowStatistics* span_statistics(int row) {
    return reinterpret_cast<RowStatistics*>(at(kSpanWeights)) + row * kSpans;
  }
  ULL_DEVICE static RowStatistics* total(int row) { return reinterpret_cast<RowStatistics*>(at(kTotals)) + row; }
  ULL_DEVICE static float* factor(int row) { return reinterpret_cast<float*>(at(kFactors)) + row; }
  ULL_DEVICE static uint32_t* result(int index) { return reinterpret_cast<uint32_t*>(at(kResults)) + index; }

  // Of a row of these; split: from `base_` on.
  ULL_DEVICE size_t partial(int row, int split) const {
    return partial_row(params_, share_.kv_head, base_ + split, share_.row + first_row_ + row);
  }
  ULL_DEVICE RowStatistics load_statistics(int row, int split) const {
    const size_t from = partial(row, split);
    const arch::Vector4 pair = arch::load_global(partial_statistics(params_, from - from % 2));  // and its neighbour's
    return {arch::bits_float(from % 2 == 0 ? pair.word[0] : pair.word[2]),
            arch::bits_float(from % 2 == 0 ? pair.word[1] : pair.word[3])};
  }

  // What a lane has of what eight merge together: a result of a span, or a span of a row.
  struct Unit {
    int row;
    int member;  // the lane's split or span
    bool present;
    bool leads;  // the first of the eight
    RowStatistics own;
  };

  ULL_DEVICE Unit load_unit(int unit, bool of_spans) const {
    const int span = static_cast<int>(static_cast<uint32_t>(unit) / static_cast<uint32_t>(rows_));
    Unit found{unit - span * rows_, kSpanSplits * span + lane() % kSpanSplits, false, false, {}};
    if (span >= (of_spans ? 1 : spans_)) return found;
    found.leads = lane() % kSpanSplits == 0;
    found.present = of_spans ? found.member < spans_ : has_result<kTile>(plan_, base_ + found.member);
    if (!found.present) return found;
    found.own = of_spans ? span_statistics(found.row)[found.member] : load_statistics(found.row, found.member);
    return found;
  }

  // The weights of results, and the statistics of spans; then the weights of spans, and the statistics of rows.
  ULL_DEVICE void weigh(bool of_spans) const {
    const int units = of_spans ? rows_ : rows_ * spans_;
#pragma unroll 1
    for (int first = kWarpUnits * warp(); first < units; first += kUnits * kUnitsAtOnce) {
      Unit unit[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        unit[i] = load_unit(first + i * kUnitsAtOnce + lane() / kSpanSplits, of_spans);
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const Unit& own = unit[i];
        const uint32_t present = arch::ballot(own.present) >> (lane() / kSpanSplits * kSpanSplits);
        RowStatistics all{kNoMaximum, 0.0F};
        if (of_spans && !is_first_ && own.present) all = *total(own.row);
        const MergeWeights own_weights = merge_lanes(all, own.own, present, lane());
        if (own.present) *((of_spans ? span_weights(own.row) : weights(own.row)) + own.member) = own_weights;
        arch::warp_barrier();  // all lanes have read the row's total
        if (!own.leads) continue;
        *(of_spans ? total(own.row) : span_statistics(own.row) + own.member / kSpanSplits) = all;
        if (of_spans && is_last_) *factor(own.row) = output_factor(params_, share_.kv_head, all.sum);
      }
    }
  }

  // By a warp: where outputs are, in the order in which they are merged.
  ULL_DEVICE void list_results() const {
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < kSpanSplits * spans_; first += 32) {
      const int split = first + lane();
      const bool present = split < kSpanSplits * spans_ && has_result<kTile>(plan_, base_ + split);
      const uint32_t all = arch::ballot(present);
      const int index = count + arch::count_bits(all & ((1U << lane()) - 1U));
      const uint32_t behind = (all >> lane() / kSpanSplits * kSpanSplits & 0xFFU) >> (split % kSpanSplits + 1);
      if (present) *result(index) = 2U * static_cast<uint32_t>(split) + (behind == 0 ? 1U : 0U);
      count += arch::count_bits(all);
    }
    if (lane() == 0) *reinterpret_cast<int32_t*>(at(kCount)) = count;
  }

  // Each thread takes a quad of a row's dimensions. Between these splits and the next its total waits where the block
  // had its span.
  ULL_DEVICE void merge_outputs() const {
    const int count = *reinterpret_cast<const int32_t*>(at(kCount));
#pragma unroll 1
    for (int i = thread_; i < rows_ * kQuads; i += kAttentionThreads) {
      const int row = i / kQuads;
      const int dim = 4 * (i - row * kQuads);
      const float* from_split = partial_output(params_, partial(row, 0)) + dim;
      auto* kept = reinterpret_cast<Floats<4>*>(at(Shared::kSpanOutput) + 4 * ((first_row_ + row) * kHeadDim + dim));
      Floats<4> all{};
      if (!is_first_) all = *kept;
      Floats<4> span{};
#pragma unroll 1
      for (int from = 0; from < count; from += kBatch) {
        arch::Vector4 outputs[kBatch];
        uint32_t results[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if constexpr (kInLoop) {
            outputs[k] = {};
            results[k] = 0;
          }
          if (from + k >= count) continue;
          results[k] = *result(from + k);
          outputs[k] = arch::load_global(from_split + results[k] / 2 * kSplitOutputs);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (from + k >= count) continue;
          const auto split = results[k] / 2;
          const MergeWeights own = weights(row)[split];
          for (int d = 0; d < 4; ++d) span.value[d] = merged(own, span.value[d], arch::bits_float(outputs[k].word[d]));
          if (results[k] % 2 == 0) continue;
          const MergeWeights into = span_weights(row)[split / kSpanSplits];
          for (int d = 0; d < 4; ++d) all.value[d] = merged(into, all.value[d], span.value[d]);
          span = {};
        }
      }
      if (!is_last_) {
        *kept = all;
        continue;
      }
      uint32_t* to = output_pair<kTile>(params_, share_.kv_head, share_.row + first_row_ + row, dim);
      for (int d = 0; d < 2; ++d) {
        to[d * kOutputStride<kTile>] =
            arch::f32x2_to_f16x2(all.value[2 * d] * *factor(row), all.value[2 * d + 1] * *factor(row));
      }
    }
  }

  const AttentionParams& params_;
  const AttentionPlan plan_;
  const AttentionShare share_;
  // From a shuffle, which stays where it is: what follows from threadIdx would be kept in registers all the way round a
  // kernel's loop.
  const int thread_;
  int first_row_ = 0;  // of those under way, of the block's
  int rows_ = 0;
  int base_ = 0;  // first split of those under way, of a whole span
  int spans_ = 0;
  bool is_first_ = false;  // of the rows' splits
  bool is_last_ = false;
};

// By all threads of the last block of a part, behind a barrier.
template <int kTile, bool kInLoop = false>
ULL_DEVICE void merge_part(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share) {
  PartMerge<kTile, kInLoop>(params, plan, share).run();
}

}  // namespace ull::gpu
