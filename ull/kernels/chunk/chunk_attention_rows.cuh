// What a warp does for its 16 rows of a chunk's attention behind each split: it merges splits and spans, and stores the
// outputs in the end. Between splits a lane keeps what it has of its rows in shared memory that no other lane looks at.
#pragma once

#include "attention/tile_rows.cuh"
#include "chunk/chunk_attention_plan.cuh"

namespace ull::gpu {

// What a warp keeps outputs and statistics of: the span under way, and all spans before it.
inline constexpr int kSpanSet = 0;
inline constexpr int kTotalSet = 1;

class ChunkRows : public TileRows<ChunkAttentionParams, ChunkShare, kKeptSets * kSetBytes> {
 public:
  // split: the first one that the warp looks at.
  ULL_DEVICE ChunkRows(const ChunkAttentionParams& params, const ChunkShare& share, int row, int split)
      : TileRows(params, share, row), span_first_(split) {}

  // Merges a split into its span, and a span that ends with it into what came before. ends: it is the last one that the
  // rows look at: `outputs` and `split` are then of all.
  ULL_DEVICE void merge_split(RowOutputs& outputs, LaneStatistics& split, int number, bool ends) {
    merge_kept(outputs, split, kSpanSet, number == span_first_);
    if (number % kSpanSplits != kSpanSplits - 1 && !ends) return keep(outputs, split, kSpanSet);
    merge_kept(outputs, split, kTotalSet, is_first_span_);
    span_first_ = number + 1;
    is_first_span_ = false;
    if (!ends) keep(outputs, split, kTotalSet);
  }

  // Stores the rows' outputs: f16 activations.
  ULL_DEVICE void store(const RowOutputs& outputs, const LaneStatistics& total) const {
    auto* output = static_cast<uint16_t*>(params_.output);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_row = row(r);
      if (own_row >= share_.rows) continue;
      const int token = own_row / kGroup, head = share_.kv_head * kGroup + own_row % kGroup;
      const float factor = output_factor(params_, share_.kv_head, total[r].sum);
#pragma unroll
      for (int first = 0; first < kDimGroups; first += 4) {  // 32 dimensions, of which a lane has one quarter
        arch::Vector4 eight;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&own)[4] = outputs[(first + i) / kPieceGroups][(first + i) % kPieceGroups];
          eight.word[i] = arch::f32x2_to_f16x2(own[2 * r] * factor, own[2 * r + 1] * factor);
        }
        const int column = head * kHeadDim + 8 * first + 2 * (arch::lane() % 4);
        arch::store_global(output + chunk_index<kAttentionWidth>(token, column), eight);
      }
    }
  }

 private:
  int span_first_;  // the first split of the span under way
  bool is_first_span_ = true;
  LaneStatistics kept_statistics_[kKeptSets] = {};

  // Where the warp keeps a set, 16 bytes of each lane for a group of dimensions.
  ULL_DEVICE static Floats<4>* kept_quads(int set) {
    return reinterpret_cast<Floats<4>*>(own_memory() + set * kSetBytes) + arch::lane();
  }

  // outputs = what is kept in the set, if there is anything, merged with `outputs`.
  ULL_DEVICE void merge_kept(RowOutputs& outputs, LaneStatistics& statistics, int set, bool is_empty) {
    MergeWeights weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowStatistics before = kept_statistics_[set][r];
      if (is_empty) before = {kNoMaximum, 0.0F};
      weights[r] = merge(before, statistics[r]);
      statistics[r] = before;
    }
    const auto merge_all = [&](auto kept_before) {
#pragma unroll
      for (int group = 0; group < kDimGroups; ++group) {
        float (&own)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
        const Floats<4> before = kept_before(group);
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = merged(weights[i / 2], before.value[i], own[i]);
      }
    };
    if (is_empty) {
      merge_all([](int) { return Floats<4>{}; });
    } else {
      merge_all([&](int group) { return kept_quads(set)[32 * group]; });
    }
  }

  ULL_DEVICE void keep(const RowOutputs& outputs, const LaneStatistics& statistics, int set) {
#pragma unroll
    for (int r = 0; r < 2; ++r) kept_statistics_[set][r] = statistics[r];
#pragma unroll
    for (int group = 0; group < kDimGroups; ++group) {
      const float (&own)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
      kept_quads(set)[32 * group] = {{own[0], own[1], own[2], own[3]}};
    }
  }
};

}  // namespace ull::gpu
