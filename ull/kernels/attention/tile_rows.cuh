// What a warp does for its 16 rows with tiles of the pages: scores, probabilities, and weighted sums of the values. A
// lane has rows g and g + 8, as mma() deals them out.
#pragma once

#include <cmath>

#include "attention/attention_heads.cuh"
#include "attention/attention_merge.cuh"
#include "attention/attention_scores.cuh"
#include "attention/tiles.cuh"

namespace ull::gpu {

using TileScores = float[kTileGroups][4];            // as the products leave them: see column_position()
using TileWeights = uint32_t[kTileProducts][4];      // the probabilities as operands a
using RowQueries = uint32_t[kDimProducts][4];        // the queries as operands a
using RowOutputs = float[kPieces][kPieceGroups][4];  // dimensions 8 * group + 2t, + 1 of row g, then of row g + 8
using LaneStatistics = RowStatistics[2];             // of the lane's two rows

inline constexpr int kQueryRow = padded_row_bytes(kHeadDim, kKeyProducts);
inline constexpr int kQueryBytes = 16 * kQueryRow;  // of a warp

// Share: the block's, with what it says of rows and positions. kWarpBytes: of shared memory that each warp has to
// itself behind the ring's slots, where its queries lie once they are prepared.
template <typename Params, typename Share, int kWarpBytes>
class TileRows {
 public:
  // row: the warp's first one, among the kv head's.
  ULL_DEVICE TileRows(const Params& params, const Share& share, int row) : params_(params), share_(share), row_(row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) position_[r] = share.position(this->row(r));
    first_position_ = share.position(row);
    last_position_ = share.last_position(row);
    unit_ = kKvBits == 8 ? params.kv_scale[share.kv_head] : 1.0F;
  }

  // ---- queries ------------------------------------------------------------------------------------------------------

  // QK norm, rotary embedding and conversion of the warp's queries, as prepare_heads(). Those of rows that there are
  // not are 0. Some rows at a time, whose loads are under way together.
  ULL_DEVICE void prepare_queries() const {
    constexpr int kAside = 32 / kHeadLanes;  // rows beside each other in a warp
    constexpr int kBatch = smaller(4, 16 / kAside);
    unsigned char* rows = own_memory();
    const int part = arch::lane() % kHeadLanes;
#pragma unroll 1
    for (int first = arch::lane() / kHeadLanes; first < 16; first += kBatch * kAside) {
      HeadPart x[kBatch] = {};
      HeadTurn turn[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = row_ + first + i * kAside, head = share_.kv_head * kGroup + row % kGroup;
        if (row >= share_.rows || part >= kHeadParts) continue;
        x[i] = load_head(params_.qkv + int64_t{row / kGroup} * kQkvWidth + head * kHeadDim, part);
        turn[i] = load_turn(params_.rope + int64_t{share_.position(row)} * kHeadDim, part);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool active = row_ + first + i * kAside < share_.rows && part < kHeadParts;
        if constexpr (kQkNorm) {
          const float sum = square_sum(x[i]);
          if (active) normalise_head(x[i], sum, load_head(params_.q_norm, part));
        }
        if (active) rotate_head(x[i], turn[i]);
        if (part < kHeadParts) store_query(rows + (first + i * kAside) * kQueryRow, x[i], part);
      }
    }
    arch::warp_barrier();
  }

  ULL_DEVICE static void load_queries(RowQueries& queries) {
    const unsigned char* row = own_memory() + arch::lane() / 4 * kQueryRow;
#pragma unroll
    for (int product = 0; product < kDimProducts; product += 2) {
      const int step = product / kKeyProducts, m = product % kKeyProducts;
      const unsigned char* at = row + row_offset(kKeyProducts, step, arch::lane() % 4, m);
      const arch::Vector4 low = arch::load_shared(at), high = arch::load_shared(at + 8 * kQueryRow);
      row_operand(queries[product], low, high, m);
      row_operand(queries[product + 1], low, high, m + 1);
    }
  }

  // ---- a tile -------------------------------------------------------------------------------------------------------

  // Masks what the rows do not see. position: the tile's first one.
  ULL_DEVICE void choose(TileScores& scores, int position) const {
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
  ULL_DEVICE void weigh(TileWeights& weights, RowOutputs& outputs, LaneStatistics& split,
                        const TileScores& scores) const {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float maximum = scores[0][2 * r];
#pragma unroll
      for (int i = 1; i < 2 * kTileGroups; ++i) maximum = ::fmaxf(maximum, scores[i / 2][2 * r + i % 2]);
      maximum = ::fmaxf(maximum, arch::shuffle_xor(maximum, 1));
      maximum = ::fmaxf(maximum, arch::shuffle_xor(maximum, 2));
      maximum = ::fmaxf(split[r].maximum, maximum * unit_);
      correction[r] = weight(split[r].maximum, maximum);
      float sum[2];  // of eight neighbouring positions
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        sum[eight] = 0.0F;
#pragma unroll
        for (int group = 4 * eight; group < 4 * eight + 4; ++group) {
          const float low = weight(scores[group][2 * r], maximum, unit_);
          const float high = weight(scores[group][2 * r + 1], maximum, unit_);
          sum[eight] += low;
          sum[eight] += high;
          weights[group / 2][r + group % 2 * 2] = arch::f32x2_to_f16x2(low, high);
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

  ULL_DEVICE static void begin_split(RowOutputs& outputs, LaneStatistics& split) {
#pragma unroll
    for (RowStatistics& row : split) row = {kNoMaximum, 0.0F};
#pragma unroll
    for (int i = 0; i < 4 * kDimGroups; ++i) outputs[i / 4 / kPieceGroups][i / 4 % kPieceGroups][i % 4] = 0.0F;
  }

 protected:
  const Params& params_;
  const Share& share_;
  int row_;
  int position_[2];     // of the lane's rows
  int first_position_;  // of the warp's
  int last_position_;
  float unit_;  // of the scores, the keys' scale: a power of two, by which nothing is rounded

  // The lane's, among the kv head's.
  ULL_DEVICE int row(int r) const { return row_ + arch::lane() / 4 + 8 * r; }

  // The warp's own memory, behind the ring's slots.
  ULL_DEVICE static unsigned char* own_memory() {
    return arch::shared_memory() + kRingBytes + arch::warp() * kWarpBytes;
  }

 private:
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
};

// Begins the scores of the warpgroup's rows with a tile's keys: it is their first product that writes them.
ULL_DEVICE void multiply_tile_keys(TileScores& scores, const RowQueries& queries, const unsigned char* slot) {
  const uint64_t keys = arch::core_matrices(slot, kTileGroups * kCoreBytes, kCoreBytes);
  arch::warpgroup_mma<arch::kBegins>(scores, queries[0], keys);
#pragma unroll
  for (int product = 1; product < kDimProducts; ++product) {
    const int offset = 2 * product * kTileGroups * kCoreBytes;
    arch::warpgroup_mma(scores, queries[product], keys + static_cast<uint64_t>(offset / 16));
  }
}

// Begins outputs += weighted sums of a tile's values.
ULL_DEVICE void multiply_tile_values(RowOutputs& outputs, const TileWeights& weights, const unsigned char* slot) {
  const uint64_t values = arch::core_matrices(slot, kDimGroups * kCoreBytes, kCoreBytes);
#pragma unroll
  for (int product = 0; product < kTileProducts; ++product) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int offset = (2 * product * kDimGroups + piece * kPieceGroups) * kCoreBytes;
      arch::warpgroup_mma(outputs[piece], weights[product], values + static_cast<uint64_t>(offset / 16));
    }
  }
}

}  // namespace ull::gpu
