// What a warp does for its 16 rows of a chunk's attention: scores of a tile, probabilities, weighted sums of the
// values, and the merge of splits and spans. A lane has rows g and g + 8, as mma() deals them out, and keeps what it
// has of them between splits in shared memory that no other lane looks at.
#pragma once

#include "attention/attention_heads.cuh"
#include "attention/attention_merge.cuh"
#include "attention/attention_scores.cuh"
#include "chunk/chunk_attention_plan.cuh"

namespace ull::gpu {

using TileScores = float[kTileGroups][4];            // as the products leave them: see column_position()
using TileWeights = uint32_t[kTileProducts][4];      // the probabilities as operands a
using RowQueries = uint32_t[kDimProducts][4];        // the queries as operands a
using RowOutputs = float[kPieces][kPieceGroups][4];  // dimensions 8 * group + 2t, + 1 of row g, then of row g + 8
using LaneStatistics = RowStatistics[2];             // of the lane's two rows

inline constexpr int kQueryRow = padded_row_bytes(kHeadDim, kKeyProducts);
static_assert(16 * kQueryRow <= 2 * kKeptBytes);

// For exp_lanes() of numbers up to 0, and of NaN, which need no bounds: below -86 it chooses 0 in the end.
struct NonPositiveMath : ScalarMath {
  ULL_HOST_DEVICE static ULL_INLINE F max(F, F b) { return b; }
  ULL_HOST_DEVICE static ULL_INLINE F min(F, F b) { return b; }
};

// What a warp keeps outputs and statistics of: the span under way, and all spans before it.
inline constexpr int kSpanSet = 0;
inline constexpr int kTotalSet = 1;

class ChunkRows {
 public:
  // row: the warp's first one, among the kv head's; split: the first one that it looks at.
  ULL_DEVICE ChunkRows(const ChunkAttentionParams& params, const ChunkShare& share, int row, int split)
      : params_(params), share_(share), row_(row), span_first_(split) {
    const int g = arch::lane() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) position_[r] = share.position(row + g + 8 * r);
    first_position_ = share.position(row);
    last_position_ = share.position(row + 15);
    key_scale_ = kKvBits == 8 ? params.kv_scale[share.kv_head] : 1.0F;
  }

  // ---- queries ------------------------------------------------------------------------------------------------------

  // QK norm, rotary embedding and conversion of the warp's queries, as prepare_heads(). Those of rows that there are
  // not are 0.
  ULL_DEVICE void load_queries(RowQueries& queries) const {
    unsigned char* rows = kept(kSpanSet);
    const int part = arch::lane() % kHeadLanes;
#pragma unroll 1
    for (int i = arch::lane() / kHeadLanes; i < 16; i += 32 / kHeadLanes) {
      const int row = row_ + i, token = row / kGroup, head = share_.kv_head * kGroup + row % kGroup;
      const bool active = row < share_.rows && part < kHeadParts;
      HeadPart x{};
      if (active) x = load_head(params_.qkv + int64_t{token} * kQkvWidth + head * kHeadDim, part);
      if constexpr (kQkNorm) {
        const float sum = square_sum(x);
        if (active) normalise_head(x, sum, load_head(params_.q_norm, part));
      }
      if (active) rotate_head(x, load_turn(params_.rope + int64_t{share_.position(row)} * kHeadDim, part));
      if (part < kHeadParts) store_query(rows + i * kQueryRow, x, part);
    }
    arch::warp_barrier();
    const unsigned char* row = rows + arch::lane() / 4 * kQueryRow;
#pragma unroll
    for (int product = 0; product < kDimProducts; product += 2) {
      const int step = product / kKeyProducts, m = product % kKeyProducts;
      const unsigned char* at = row + row_offset(kKeyProducts, step, arch::lane() % 4, m);
      const arch::Vector4 low = arch::load_shared(at), high = arch::load_shared(at + 8 * kQueryRow);
      row_operand(queries[product], low, high, m);
      row_operand(queries[product + 1], low, high, m + 1);
    }
    arch::warp_barrier();  // the lanes keep other things there from now on
  }

  // ---- a tile -------------------------------------------------------------------------------------------------------

  // Scales the scores, and masks what the rows do not see. position: the tile's first one.
  ULL_DEVICE void choose(TileScores& scores, int position) const {
    if constexpr (kKvBits == 8) {
#pragma unroll
      for (int i = 0; i < 4 * kTileGroups; ++i) scores[i / 4][i % 4] *= key_scale_;
    }
    const bool all_before = position + kPageTokens - 1 <= first_position_;
    if (all_before && share_.first_visible(last_position_) <= position) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // How far the row sees, and from where on, counted from the lane's first position of the tile.
      const int own = position_[r] - position - column_position(0, arch::lane() % 4);
      const int first = share_.first_visible(position_[r]) - position_[r] + own;
#pragma unroll
      for (int i = 0; i < 2 * kTileGroups; ++i) {
        const int at = column_position(i / 2, 0) + i % 2;
        float& score = scores[i / 2][2 * r + i % 2];
        if (at > own || at < first) score = kMaskedScore;
      }
    }
  }

  // Turns the scores into probabilities, adds them to the split's statistics, and corrects what the split has summed so
  // far for the new maximum.
  ULL_DEVICE static void weigh(TileWeights& weights, RowOutputs& outputs, LaneStatistics& split,
                               const TileScores& scores) {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float maximum = kNoMaximum;
#pragma unroll
      for (int i = 0; i < 2 * kTileGroups; ++i) maximum = ::fmaxf(maximum, scores[i / 2][2 * r + i % 2]);
      maximum = ::fmaxf(maximum, arch::shuffle_xor(maximum, 1));
      maximum = ::fmaxf(maximum, arch::shuffle_xor(maximum, 2));
      maximum = ::fmaxf(split[r].maximum, maximum);
      correction[r] = exp_lanes<NonPositiveMath>(split[r].maximum - maximum);
      float sum[2];  // of eight neighbouring positions
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        sum[eight] = 0.0F;
#pragma unroll
        for (int group = 4 * eight; group < 4 * eight + 4; ++group) {
          const float low = exp_lanes<NonPositiveMath>(scores[group][2 * r] - maximum);
          const float high = exp_lanes<NonPositiveMath>(scores[group][2 * r + 1] - maximum);
          sum[eight] += low;
          sum[eight] += high;
          weights[group / 2][r + group % 2 * 2] = arch::f32x2_to_f16x2_in_range(low, high);
        }
      }
      split[r].sum = ::fmaf(split[r].sum, correction[r], tile_sum(sum));
      split[r].maximum = maximum;
    }
#pragma unroll
    for (int i = 0; i < 4 * kDimGroups; ++i) {
      float& output = outputs[i / 4 / kPieceGroups][i / 4 % kPieceGroups][i % 4];
      output = ::fmaf(output, correction[i % 4 / 2], 0.0F);
    }
  }

  // ---- splits -------------------------------------------------------------------------------------------------------

  ULL_DEVICE static void begin_split(RowOutputs& outputs, LaneStatistics& split) {
#pragma unroll
    for (RowStatistics& row : split) row = {kNoMaximum, 0.0F};
#pragma unroll
    for (int i = 0; i < 4 * kDimGroups; ++i) outputs[i / 4 / kPieceGroups][i / 4 % kPieceGroups][i % 4] = 0.0F;
  }

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
      const int row = row_ + arch::lane() / 4 + 8 * r;
      if (row >= share_.rows) continue;
      const int token = row / kGroup, head = share_.kv_head * kGroup + row % kGroup;
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
  const ChunkAttentionParams& params_;
  const ChunkShare& share_;
  int row_;
  int position_[2];     // of the lane's rows
  int first_position_;  // of the warp's
  int last_position_;
  float key_scale_;
  int span_first_;  // the first split of the span under way
  bool is_first_span_ = true;
  LaneStatistics kept_statistics_[2] = {};  // of the sets

  // Where the warp keeps a set, 16 bytes of each lane for a group of dimensions.
  ULL_DEVICE static unsigned char* kept(int set) {
    return arch::shared_memory() + kKeptAt + (2 * arch::warp() + set) * kKeptBytes;
  }
  ULL_DEVICE static Floats<4>* kept_quads(int set) { return reinterpret_cast<Floats<4>*>(kept(set)) + arch::lane(); }

  // A tile's sum of a row, of all lanes that have the row: as store_probabilities() and split_statistics() add.
  ULL_DEVICE static float tile_sum(const float (&sum)[2]) {
    if constexpr (kKvProducts == 4) {  // a lane's 16 positions are neighbours
      const float lane = sum[0] + sum[1];
      const float half = lane + arch::shuffle_xor(lane, 1);
      return half + arch::shuffle_xor(half, 2);
    } else {
      float half[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        half[i] = sum[i] + arch::shuffle_xor(sum[i], 1);
        half[i] += arch::shuffle_xor(half[i], 2);
      }
      return half[0] + half[1];
    }
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
