// Weighted sums of a split's values: each warp takes kWarpDims of the head's dimensions and all 256 positions, in
// ascending order, up to two m-tiles of 16 rows at a time.
//
// A unit is what one 16-byte load of each lane covers: 32 positions of bf16, 64 of e4m3. Up to `base` all nodes share
// the values of the pages. From the unit of `base` on every node has values of its own; nodes of one m-tile that lie on
// one path are multiplied together, and the other nodes' rows of that product are dropped.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_plan.cuh"
#include "attention/attention_scores.cuh"
#include "attention/kv_format.cuh"
#include "model.cuh"

namespace ull::gpu {

inline constexpr int kValueUnits = kSplitTokens / kValueUnit;  // 8 or 4
inline constexpr int kTileUnits = kPageTokens / kValueUnit;    // 2 or 1

// The warp's values of a unit, n-tile n, from shared memory. values: of the split, [4 pages][head_dim][64].
ULL_DEVICE int value_dim(int n) { return arch::warp() * kWarpDims + arch::lane() / 4 * kValueTiles + n; }
ULL_DEVICE int value_offset(int n, int unit) {  // in bytes
  return unit / kTileUnits * kKvHeadBytes + value_dim(n) * (kPageTokens * kKvBytes) + 64 * (unit % kTileUnits) +
         16 * (arch::lane() % 4);
}
ULL_DEVICE arch::Vector4 load_stored_value(const unsigned char* values, int n, int unit) {
  return arch::load_shared(values + value_offset(n, unit));
}
ULL_DEVICE arch::Vector4 load_value(const unsigned char* values, int n, int unit) {
  arch::Vector4 value = load_stored_value(values, n, unit);
  prepare(value);
  return value;
}

// Sums of a lane: sum[m-tile][n-tile][0, 1: row g; 2, 3: row g + 8], columns 2t, 2t + 1.
template <int kTiles>
struct SumFragment {
  float sum[kTiles][kValueTiles][4];
};

// Rescales an m-tile's sums at a tile of positions. corrections: row g, [4 tiles].
template <int kHalves = 2>
ULL_DEVICE void rescale(float (&sum)[kValueTiles][4], const unsigned char* corrections, int tile) {
#pragma unroll
  for (int r = 0; r < kHalves; ++r) {
    const float correction = reinterpret_cast<const float*>(corrections + 8 * r * 16)[tile];
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      sum[n][2 * r] = ::fmaf(sum[n][2 * r], correction, 0.0F);
      sum[n][2 * r + 1] = ::fmaf(sum[n][2 * r + 1], correction, 0.0F);
    }
  }
}

// A unit's probabilities of rows g and g + 8, two products in each vector.
struct UnitRows {
  arch::Vector4 low[kKvProducts / 2];
  arch::Vector4 high[kKvProducts / 2];
};

// probabilities: row g of the m-tile; kHalves: 1 if nobody wants rows 8 to 15.
template <int kHalves>
ULL_DEVICE UnitRows load_unit_rows(const unsigned char* probabilities, int row_bytes, int unit) {
  UnitRows rows{};
#pragma unroll
  for (int m = 0; m < kKvProducts; m += 2) {
    const unsigned char* at = probabilities + row_offset(kKvProducts, unit, arch::lane() % 4, m);
    rows.low[m / 2] = arch::load_shared(at);
    if constexpr (kHalves == 2) rows.high[m / 2] = arch::load_shared(at + 8 * row_bytes);
  }
  return rows;
}

// values: the unit's, prepared.
ULL_DEVICE void multiply_unit(float (&sum)[kValueTiles][4], const UnitRows& rows,
                              const arch::Vector4 (&values)[kValueTiles]) {
#pragma unroll
  for (int product = 0; product < kKvProducts; ++product) {
    uint32_t a[4];
    row_operand(a, rows.low[product / 2], rows.high[product / 2], product);
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      uint32_t b[2];
      operand(b, values[n], product);
      arch::mma(sum[n], a, b);
    }
  }
}

template <int kHalves = 2>
ULL_DEVICE void multiply_values(float (&sum)[kValueTiles][4], const unsigned char* probabilities, int row_bytes,
                                const arch::Vector4 (&values)[kValueTiles], int unit) {
  multiply_unit(sum, load_unit_rows<kHalves>(probabilities, row_bytes, unit), values);
}

// The same of a unit that lies in the pages as a whole. values: of the split.
ULL_DEVICE void multiply_page_values(float (&sum)[kValueTiles][4], const unsigned char* probabilities, int row_bytes,
                                     const unsigned char* values, int unit) {
  arch::Vector4 loaded[kValueTiles];
#pragma unroll
  for (int n = 0; n < kValueTiles; ++n) loaded[n] = load_value(values, n, unit);
  multiply_values(sum, probabilities, row_bytes, loaded, unit);
}

// The same of a page: what is loaded of all its units is on its way together.
template <int kHalves>
ULL_DEVICE void multiply_page(float (&sum)[kValueTiles][4], const unsigned char* probabilities, int row_bytes,
                              const unsigned char* values, int page) {
  arch::Vector4 loaded[kTileUnits][kValueTiles];
  UnitRows rows[kTileUnits];
#pragma unroll
  for (int i = 0; i < kTileUnits; ++i) {
    const int unit = page * kTileUnits + i;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) loaded[i][n] = load_stored_value(values, n, unit);
    rows[i] = load_unit_rows<kHalves>(probabilities, row_bytes, unit);
  }
#pragma unroll
  for (int i = 0; i < kTileUnits; ++i) {
#pragma unroll
    for (arch::Vector4& value : loaded[i]) prepare(value);
    multiply_unit(sum, rows[i], loaded[i]);
  }
}

// The lane's values of a node at four positions from index `index` of its path on (below 0: from `paged`, the unit in
// the pages; beyond the node's depth: 0), as operands.
template <int kTile>
ULL_DEVICE void gather_values(uint32_t (&b)[kValueTiles][2], const arch::Vector4 (&paged)[kValueTiles], int product,
                              int index, const unsigned char* path, int depth) {
  using Shared = AttentionShared<kTile>;
  const unsigned char* own =
      arch::shared_memory() + Shared::kTreeValue + 2 * (arch::warp() * kWarpDims + arch::lane() / 4 * kValueTiles);
#pragma unroll
  for (int n = 0; n < kValueTiles; ++n) operand(b[n], paged[n], product);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (index + i < 0) continue;
    uint32_t pair = 0;  // of n-tiles 0 and 1
    if (index + i <= depth) {
      const unsigned char* value = own + path[index + i] * Shared::kHeadRow;
      pair = kValueTiles == 2 ? *reinterpret_cast<const uint32_t*>(value) : *reinterpret_cast<const uint16_t*>(value);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const uint32_t value = pair >> (16 * n) & 0xFFFFU;
      b[n][i / 2] = i % 2 == 0 ? (b[n][i / 2] & 0xFFFF0000U) | value : (b[n][i / 2] & 0xFFFFU) | value << 16;
    }
  }
}

// One unit of positions of which some are at or beyond `base`. row: global row of the m-tile's row 0.
template <int kTile>
ULL_DEVICE void multiply_path_values(float (&sum)[kValueTiles][4], const unsigned char* probabilities,
                                     const unsigned char* values, const AttentionPlan& plan, int row, int unit,
                                     int unit_position) {
  using Shared = AttentionShared<kTile>;
  const unsigned char* shared = arch::shared_memory();
  const auto* depths = reinterpret_cast<const int32_t*>(shared + Shared::kDepth);
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  const int first = row / kGroup;
  const int last_row = row + 15 < plan.rows ? row + 15 : plan.rows - 1;
  arch::Vector4 paged[kValueTiles] = {};
  if (unit_position < plan.base) {
    for (int n = 0; n < kValueTiles; ++n) paged[n] = load_value(values, n, unit);
  }
  uint32_t pending = (2U << (last_row / kGroup - first)) - 1U;  // nodes of the m-tile
#pragma unroll 1
  for (int end = last_row / kGroup; end >= first; --end) {
    if ((pending >> (end - first) & 1U) == 0) continue;
    const unsigned char* path = shared + Shared::kPath + end * kTreeTokens;
    const int depth = depths[end];
    uint32_t members = kBlock ? pending : 0;  // of the path to `end`
#pragma unroll 1
    for (int node = first; node <= end && !kBlock; ++node) {
      if (depths[node] <= depth && path[depths[node]] == node) members |= 1U << (node - first);
    }
    members &= pending;
    pending &= ~members;
    const bool is_member[2] = {row + g <= last_row && (members >> ((row + g) / kGroup - first) & 1U) != 0,
                               row + g + 8 <= last_row && (members >> ((row + g + 8) / kGroup - first) & 1U) != 0};
    float own[kValueTiles][4];
#pragma unroll
    for (int i = 0; i < 4 * kValueTiles; ++i) own[i / 4][i % 4] = sum[i / 4][i % 4];
#pragma unroll
    for (int m = 0; m < kKvProducts; m += 2) {
      const unsigned char* at = probabilities + row_offset(kKvProducts, unit, t, m);
      const arch::Vector4 low = arch::load_shared(at);
      const arch::Vector4 high = arch::load_shared(at + 8 * Shared::kProbabilityRow);
#pragma unroll
      for (int product = m; product < m + 2; ++product) {
        uint32_t a[4];
        row_operand(a, low, high, product);
        uint32_t b[kValueTiles][2];
        gather_values<kTile>(b, paged, product, unit_position + 4 * kKvProducts * t + 4 * product - plan.base, path,
                             depth);
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) arch::mma(own[n], a, b[n]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kValueTiles; ++i) {
      if (is_member[i % 4 / 2]) sum[i / 4][i % 4] = own[i / 4][i % 4];
    }
  }
}

}  // namespace ull::gpu
