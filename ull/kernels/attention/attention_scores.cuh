// Scores and probabilities of one split: each warp takes 32 of its 256 positions, for up to two m-tiles of 16 rows.
//
// Fragments, with g = lane / 4 and t = lane % 4: row g (and g + 8) of an m-tile; column c of n-tile j is position
// 8 * (c / 2) + 2 * j + c % 2 of the warp's 32, so that a lane ends up with the neighbouring positions 8t .. 8t + 7.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_plan.cuh"
#include "attention/kv_format.cuh"
#include "exponential.cuh"
#include "model.cuh"

namespace ull::gpu {

// A warp's keys, in registers: column g of n-tile j.
struct KeyFragment {
  arch::Vector4 loaded[4][kKeySteps];
};

// Scores of a lane: score[m-tile][n-tile j][0, 1: row g; 2, 3: row g + 8], positions 8t + 2j, 8t + 2j + 1.
template <int kTiles>
struct ScoreFragment {
  float score[kTiles][4][4];
};

// keys: a page's keys of the kv head, [64][head_dim]; of the half, `count` are wanted.
ULL_DEVICE void load_keys(KeyFragment& keys, const unsigned char* page_keys, int half_of_page, int count = kHalf) {
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  const int first = half_of_page * kHalf + g / 2 * 8 + g % 2;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (first - half_of_page * kHalf + 2 * j >= count) continue;
      keys.loaded[j][step] =
          arch::load_global(page_keys + (first + 2 * j) * (kHeadDim * kKvBytes) + key_offset(step, t));
    }
  }
}

ULL_DEVICE void prepare(KeyFragment& keys) {
#pragma unroll
  for (auto& row : keys.loaded) {
#pragma unroll
    for (arch::Vector4& loaded : row) prepare(loaded);
  }
}

// A operand of product m from rows of f16, 16 bytes of row g and of row g + 8 having been loaded.
ULL_DEVICE void row_operand(uint32_t (&a)[4], const arch::Vector4& low, const arch::Vector4& high, int m) {
  a[0] = low.word[m % 2 * 2];
  a[1] = high.word[m % 2 * 2];
  a[2] = low.word[m % 2 * 2 + 1];
  a[3] = high.word[m % 2 * 2 + 1];
}

// query: row g of the m-tile, f16 in shared memory; scale: of the stored keys; kHalves: 1 if nobody wants rows 8 to 15.
template <int kHalves = 2, bool kPrepared = true>
ULL_DEVICE void multiply_keys(float (&score)[4][4], const unsigned char* query, int row_bytes, const KeyFragment& keys,
                              float scale) {
#pragma unroll
  for (auto& tile : score) {
#pragma unroll
    for (float& s : tile) s = 0.0F;
  }
  const int t = arch::lane() % 4;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    arch::Vector4 prepared[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      prepared[j] = keys.loaded[j][step];
      if constexpr (!kPrepared) prepare(prepared[j]);
    }
#pragma unroll
    for (int m = 0; m < kKeyProducts; m += 2) {
      const unsigned char* at = query + row_offset(kKeyProducts, step, t, m);
      const arch::Vector4 low = arch::load_shared(at);
      arch::Vector4 high{};
      if constexpr (kHalves == 2) high = arch::load_shared(at + 8 * row_bytes);
#pragma unroll
      for (int product = m; product < m + 2; ++product) {
        uint32_t a[4];
        row_operand(a, low, high, product);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t b[2];
          key_operand(b, prepared[j], product, t);
          arch::mma(score[j], a, b);
        }
      }
    }
  }
#pragma unroll
  for (auto& tile : score) {
#pragma unroll
    for (float& s : tile) s *= scale;
  }
}

// Scores of an m-tile with the nodes of n-tile `node_tile`, in shared memory: the same sums in the same order as with
// keys from pages. query: row g; scale: of the stored keys; scores: row g, [nodes] f32.
template <int kTile>
ULL_DEVICE void multiply_tree_keys(const unsigned char* query, int node_tile, float scale, unsigned char* scores) {
  using Shared = AttentionShared<kTile>;
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  const unsigned char* keys = arch::shared_memory() + Shared::kTreeKey + (8 * node_tile + g) * Shared::kHeadRow;
  float c[4] = {};
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
    for (int m = 0; m < kKeyProducts; m += 2) {
      const int offset = row_offset(kKeyProducts, step, t, m);
      const arch::Vector4 low = arch::load_shared(query + offset);
      const arch::Vector4 high = arch::load_shared(query + offset + 8 * Shared::kHeadRow);
      const arch::Vector4 key = arch::load_shared(keys + offset);
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        uint32_t a[4];
        row_operand(a, low, high, product);
        const uint32_t b[2] = {key.word[2 * product], key.word[2 * product + 1]};
        arch::mma(c, a, b);
      }
    }
  }
  for (int r = 0; r < 2; ++r) {
    auto* to = reinterpret_cast<float*>(scores + 8 * r * Shared::kTreeScoreRow) + 8 * node_tile + 2 * t;
    to[0] = c[2 * r] * scale;
    to[1] = c[2 * r + 1] * scale;
  }
}

// Replaces the scores of positions from `base` on by those with the row's own path, and masks what the row does not
// see. row: global row of row g; position: of the lane's first score; tree_scores: row g.
template <int kTile>
ULL_DEVICE void choose_scores(float (&score)[4][4], const AttentionPlan& plan, int row, int position, int window,
                              const unsigned char* tree_scores) {
  using Shared = AttentionShared<kTile>;
  const unsigned char* shared = arch::shared_memory();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int node = (row + 8 * r) / kGroup;
    const int depth = reinterpret_cast<const int32_t*>(shared + Shared::kDepth)[node];
    const unsigned char* path = shared + Shared::kPath + smaller(node, plan.count - 1) * kTreeTokens;
    const auto* own = reinterpret_cast<const float*>(tree_scores + 8 * r * Shared::kTreeScoreRow);
    int first_visible = window > 0 ? plan.base + (kBlock ? node : depth) - window + 1 : 0;
    if constexpr (kMayLack) first_visible = first_visible > plan.first_visible ? first_visible : plan.first_visible;
    // Without a branch: what is loaded is on its way together.
    float of_path[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) of_path[i] = own[path[larger(smaller(position + i - plan.base, depth), 0)]];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& s = score[i / 2][2 * r + i % 2];
      s = position + i >= plan.base ? of_path[i] : s;
      s = position + i - plan.base > depth || position + i < first_visible ? kMaskedScore : s;
    }
  }
}

// What a score weighs against the row's maximum, or a former maximum against a later one: e^(score - maximum), where
// both come times log2(e), since queries do (store_query()). Of equal ones exactly 1. unit: of the score.
ULL_DEVICE float weight(float score, float maximum, float unit = 1.0F) {
  return arch::fast_exp2(::fmaf(score, unit, -maximum));
}

// Maxima of rows g and g + 8 (or of row g alone) over the warp's positions. All lanes take part.
template <int kHalves>
ULL_DEVICE void row_maxima(float (&maximum)[kHalves], const float (&score)[4][4]) {
#pragma unroll
  for (int r = 0; r < kHalves; ++r) {
    float m = kNoMaximum;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = score[i / 2][2 * r + i % 2];
      m = s > m ? s : m;
    }
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const float other = arch::shuffle_xor(m, mask);
      m = other > m ? other : m;
    }
    maximum[r] = m;
  }
}

// The running maximum of a row at the warp's tile (and before that tile), from the maxima of all halves.
struct RunningMaximum {
  float before;
  float now;
};

ULL_DEVICE RunningMaximum running_maximum(const unsigned char* row_maxima) {
  const arch::Vector4 halves[2] = {arch::load_shared(row_maxima), arch::load_shared(row_maxima + 16)};
  const int tile = arch::warp() / 2;
  RunningMaximum m{kNoMaximum, kNoMaximum};
#pragma unroll
  for (int i = 0; i < kSplitTiles; ++i) {
    const float low = arch::bits_float(halves[i / 2].word[i % 2 * 2]);
    const float high = arch::bits_float(halves[i / 2].word[i % 2 * 2 + 1]);
    const float tile_maximum = low > high ? low : high;
    if (i < tile) m.before = tile_maximum > m.before ? tile_maximum : m.before;
    if (i <= tile) m.now = tile_maximum > m.now ? tile_maximum : m.now;
  }
  return m;
}

// Turns the scores of row g + 8 r into probabilities (f16, into `to`: the lane's 8 positions) and returns their sum
// over the warp's positions. All lanes take part.
ULL_DEVICE float store_probabilities(const float (&score)[4][4], int r, float maximum, unsigned char* to) {
  float p[8];
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    p[i] = weight(score[i / 2][2 * r + i % 2], maximum);
    sum += p[i];
  }
  arch::store_shared(to, {{arch::f32x2_to_f16x2(p[0], p[1]), arch::f32x2_to_f16x2(p[2], p[3]),
                           arch::f32x2_to_f16x2(p[4], p[5]), arch::f32x2_to_f16x2(p[6], p[7])}});
  sum += arch::shuffle_xor(sum, 1);
  sum += arch::shuffle_xor(sum, 2);
  return sum;
}

}  // namespace ull::gpu
