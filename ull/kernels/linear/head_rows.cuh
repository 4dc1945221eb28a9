// Rows that heads which draft from the target's hidden states are made of: taps, which fc turns into one vector of a
// position, and rows of the residual with a norm of their own.
#pragma once

#include "linear/rows.cuh"

namespace ull::gpu {

enum class TapNorm { kNone = 0, kEach = 1, kAll = 2 };  // of a position's taps: by RMSNorm each, or as one vector

// fc: from a position's kRead taps, in units of 1 / kMlpScale.
template <int kTargetHidden, int kRead>
using TapsLinear = LinearShape<kHidden, kRead * kTargetHidden, kWeightBits, false>;
inline constexpr int kTapsUnit = static_cast<int>(1.0F / kMlpScale);
using TapsEpilogue = StoreRows<kHidden, kTapsUnit>;

// The last rows of a layer's qkv, from kColumns columns. The queries' rows before them are whole row tiles.
inline constexpr int kKvRows = kQkvWidth - kAttentionWidth;
static_assert(kAttentionWidth % kRowUnit == 0 && kKvRows % kRowUnit == 0);
template <int kColumns>
using KvLinear = LinearShape<kKvRows, kColumns, kWeightBits, false>;

// The block's sum of a value of each thread, in every thread. `sums`: kNormWarps floats of shared memory.
ULL_DEVICE float block_sum(float value, float* sums) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += arch::shuffle_xor(value, mask);
  arch::block_barrier();
  if (arch::lane() == 0) sums[arch::warp()] = value;
  arch::block_barrier();
  float total = sums[0];
#pragma unroll
  for (int i = 1; i < kNormWarps; ++i) total += sums[i];
  return total;
}

template <int kTargetHidden>
ULL_DEVICE float tap_square_sum(const float* row, float* sums) {
  float sum = 0.0F;
#pragma unroll 1
  for (int column = 4 * arch::thread(); column < kTargetHidden; column += 4 * kNormThreads) {
    const arch::Vector4 four = arch::load_global(row + column);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = ::fmaf(arch::bits_float(four.word[j]), arch::bits_float(four.word[j]), sum);
  }
  return block_sum(sum, sums);
}

ULL_DEVICE float inverse_rms_of(float square_sum, int columns) {
  return arch::reciprocal_sqrt(::fmaf(square_sum, 1.0F / static_cast<float>(columns), kRmsEpsilon));
}

// Where an entry's f16 activations go, four columns from a multiple of 4 on at once: of a round's entry,
struct RoundRow {
  void* activations;
  int entry;

  ULL_DEVICE void store(int column, const float (&x)[4]) const {
    auto* to = static_cast<uint16_t*>(activations) + activation_index(entry, column);
    *reinterpret_cast<arch::Vector2*>(to) = {arch::f32x2_to_f16x2(x[0], x[1]), arch::f32x2_to_f16x2(x[2], x[3])};
  }
};
// and of a chunk's, kColumns wide.
template <int kColumns>
struct ChunkRow {
  void* activations;
  int token;

  ULL_DEVICE void store(int column, const float (&x)[4]) const {
    auto* row = static_cast<uint16_t*>(activations);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      *reinterpret_cast<uint32_t*>(row + chunk_index<kColumns>(token, column + j)) =
          arch::f32x2_to_f16x2(x[j], x[j + 1]);
    }
  }
};

// The taps of a position, one behind another, as f16 activations times kMlpScale, for their range.
template <int kTargetHidden, int kRead, TapNorm kNorm, typename Params, typename Row>
ULL_DEVICE void store_taps(const Params& params, int at, const Row& to) {
  static_assert(kRead >= 1 && kRead <= kMostTaps);
  static_assert(kTargetHidden % kColumnUnit == 0, "parts of a row begin at whole steps");
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  const float* position = params.ring + static_cast<int64_t>(at % kTapSlots) * params.ring_taps * kTargetHidden;
  float inverse = 1.0F;
  if constexpr (kNorm == TapNorm::kAll) {
    float total = 0.0F;
    for (int tap = 0; tap < kRead; ++tap) {
      total += tap_square_sum<kTargetHidden>(position + params.taps[tap] * kTargetHidden, sums);
    }
    inverse = inverse_rms_of(total, kRead * kTargetHidden);
  }
  for (int tap = 0; tap < kRead; ++tap) {
    const float* row = position + params.taps[tap] * kTargetHidden;
    if constexpr (kNorm == TapNorm::kEach) {
      inverse = inverse_rms_of(tap_square_sum<kTargetHidden>(row, sums), kTargetHidden);
    }
    for (int column = 4 * arch::thread(); column < kTargetHidden; column += 4 * kNormThreads) {
      const arch::Vector4 four = arch::load_global(row + column);
      const int first = tap * kTargetHidden + column;
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = arch::bits_float(four.word[j]) * inverse;
        if constexpr (kNorm != TapNorm::kNone) y[j] *= params.norm_weight[first + j];
        y[j] *= kMlpScale;
      }
      to.store(first, y);
    }
  }
}

// A kernel of a round: entries before Round::first_draw have taps. One block per entry, kNormWarps floats of shared
// memory.
template <int kTargetHidden, int kRead, TapNorm kNorm>
ULL_DEVICE void read_taps(const TapsParams& params) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int entry = arch::block_x();
  if (entry >= params.round->count || entry >= params.round->first_draw) return;
  store_taps<kTargetHidden, kRead, kNorm>(params, params.round->base + entry, RoundRow{params.output, entry});
}

// The same of a chunk.
template <int kTargetHidden, int kRead, TapNorm kNorm>
ULL_DEVICE void read_chunk_taps(const ChunkTapsParams& params) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const ChunkExtent chunk = chunk_extent(params.chunk);
  const int token = arch::block_x();
  if (token >= chunk.count) return;
  store_taps<kTargetHidden, kRead, kNorm>(params, chunk.base + token,
                                          ChunkRow<kRead * kTargetHidden>{params.output, token});
}

// A row, which becomes its norm.
ULL_DEVICE void normalise(RowShare& row, const RowShare& weight, float* sums) {
  const float sum = warp_square_sum(row);
  arch::block_barrier();
  if (arch::lane() == 0) sums[arch::warp()] = sum;
  arch::block_barrier();
  const float inverse = inverse_rms(sums);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = arch::bits_float(row.vector[i].word[j]) * inverse;
      row.vector[i].word[j] = arch::float_bits(x * arch::bits_float(weight.vector[i].word[j]));
    }
  }
}

// Into columns first .. first + H - 1.
template <typename Row>
ULL_DEVICE void store_input(const Row& to, int first, const RowShare& row) {
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    if (row_column(i) >= kHidden) continue;
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = arch::bits_float(row.vector[i].word[j]);
    to.store(first + row_column(i), x);
  }
}

}  // namespace ull::gpu
