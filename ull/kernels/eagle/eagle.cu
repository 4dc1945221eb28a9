// What an EAGLE-3 head (Li et al., arXiv 2503.01840) does before the attention of its one layer. An entry of a pass is
// made of the embedding of the token behind it and of a hidden state: entries before Round::first_draw have the
// target's, its taps through fc, and those behind them what the pass before has left for the entry above. So that
// entries keep their numbers, a pass repeats all of its proposal's; the layer's weights cost the same for one as
// for 64.
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {
namespace {

inline constexpr int kTargetHidden = ULL_EAGLE_TARGET_HIDDEN;
inline constexpr int kRead = ULL_EAGLE_TAPS;  // layers whose taps an entry is made of
inline constexpr bool kNormsEach = ULL_EAGLE_TAP_NORM == 1;
inline constexpr bool kNormsAll = ULL_EAGLE_TAP_NORM == 2;
inline constexpr bool kNormBeforeResidual = ULL_EAGLE_NORM_BEFORE_RESIDUAL != 0;
inline constexpr bool kNormOutput = ULL_EAGLE_NORM_OUTPUT != 0;
static_assert(kRead >= 1 && kRead <= kMostTaps);
static_assert(kTargetHidden % kColumnUnit == 0 && kHidden % kColumnUnit == 0, "parts of a row begin at whole steps");
static_assert(kTaps == 1, "the head keeps its own output");

using Fc = LinearShape<kHidden, kRead * kTargetHidden, kWeightBits, false>;
using FcEpilogue = StoreRows<kHidden, static_cast<int>(1.0F / kMlpScale)>;
using EagleQkv = LinearShape<kQkvWidth, 2 * kHidden, kWeightBits, false>;

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

ULL_DEVICE void load_embedding(RowShare& share, const void* table, int32_t token) {
  const auto* row = static_cast<const uint16_t*>(table) + static_cast<int64_t>(token) * kHidden;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    share.vector[i] = {};
    if (row_column(i) >= kHidden) continue;
    const auto four = *reinterpret_cast<const uint64_t*>(row + row_column(i));
    const auto low = static_cast<uint32_t>(four), high = static_cast<uint32_t>(four >> 32);
    share.vector[i] = {{low << 16, low & 0xFFFF0000U, high << 16, high & 0xFFFF0000U}};  // bf16 -> f32
  }
}

// Into columns first .. first + H - 1 of an entry's f16 activations.
ULL_DEVICE void store_input(void* input, int entry, int first, const RowShare& row) {
  auto* to = static_cast<uint16_t*>(input);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    if (row_column(i) >= kHidden) continue;
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = arch::bits_float(row.vector[i].word[j]);
    *reinterpret_cast<arch::Vector2*>(to + activation_index(entry, first + row_column(i))) = {
        arch::f32x2_to_f16x2(x[0], x[1]), arch::f32x2_to_f16x2(x[2], x[3])};
  }
}

template <int kTokens>
using NarrowFc = NarrowPlan<Fc, kTokens>;
template <int kTokens>
using WideFc = WidePlan<Fc, kTokens, false>;
template <int kTokens>
using NarrowQkv = NarrowPlan<EagleQkv, kTokens>;
template <int kTokens>
using WideQkv = WidePlan<EagleQkv, kTokens, true>;

}  // namespace

// The taps of an entry, one behind another, as f16 activations times kMlpScale, for their range. One block per entry.
ULL_KERNEL(ull_eagle_taps, EagleTapsParams, kNormThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int entry = arch::block_x();
  if (entry >= params.round->count || entry >= params.round->first_draw) return;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  const int slot = (params.round->base + entry) % kTapSlots;
  const float* position = params.ring + static_cast<int64_t>(slot) * params.ring_taps * kTargetHidden;
  auto* output = static_cast<uint16_t*>(params.output);
  float inverse = 1.0F;
  if constexpr (kNormsAll) {
    float total = 0.0F;
    for (int tap = 0; tap < kRead; ++tap) total += tap_square_sum(position + params.taps[tap] * kTargetHidden, sums);
    inverse = inverse_rms_of(total, kRead * kTargetHidden);
  }
  for (int tap = 0; tap < kRead; ++tap) {
    const float* row = position + params.taps[tap] * kTargetHidden;
    if constexpr (kNormsEach) inverse = inverse_rms_of(tap_square_sum(row, sums), kTargetHidden);
    for (int column = 4 * arch::thread(); column < kTargetHidden; column += 4 * kNormThreads) {
      const arch::Vector4 four = arch::load_global(row + column);
      const int to = tap * kTargetHidden + column;
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = arch::bits_float(four.word[j]) * inverse;
        if constexpr (kNormsEach || kNormsAll) y[j] *= params.norm_weight[to + j];
        y[j] *= kMlpScale;
      }
      *reinterpret_cast<arch::Vector2*>(output + activation_index(entry, to)) = {arch::f32x2_to_f16x2(y[0], y[1]),
                                                                                 arch::f32x2_to_f16x2(y[2], y[3])};
    }
  }
}

// The entries' hidden states from their taps.
ULL_KERNEL(ull_eagle_fc_8, LinearParams, kNarrowThreads, NarrowFc<8>::kBlocks) {
  linear_narrow<NarrowFc<8>, FcEpilogue>(params);
}
ULL_KERNEL(ull_eagle_fc_64, LinearParams, WideFc<64>::kBoundThreads, WideFc<64>::kBlocks) {
  linear_wide<WideFc<64>, FcEpilogue>(params);
}

// The layer's input, the normed embedding and the normed hidden state side by side, and the residual. One block per
// entry.
ULL_KERNEL(ull_eagle_input, EagleInputParams, kNormThreads, 2) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.embedding_norm);
  arch::wait_for_predecessor();
  const Round* round = params.round;
  const int entry = arch::block_x();
  if (entry >= round->count) return;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  RowShare row;
  load_embedding(row, params.table, round->tokens[entry]);
  normalise(row, weight, sums);
  store_input(params.input, entry, 0, row);

  if (entry < round->first_draw) {
    load_row(row, params.states + entry * kResidualStride);
  } else {
    load_row(row, params.outputs + round->path[entry][round->depths[entry] - 1] * kResidualStride);
    if constexpr (kNormOutput) {
      load_norm_weight(weight, params.output_norm);
      normalise(row, weight, sums);
    }
  }
  float* residual = params.residual + entry * kResidualStride;
  const auto keep = [&] {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      if (row_column(i) < kHidden) arch::store_global(residual + row_column(i), row.vector[i]);
    }
  };
  if constexpr (!kNormBeforeResidual) keep();
  load_norm_weight(weight, params.hidden_norm);
  normalise(row, weight, sums);
  if constexpr (kNormBeforeResidual) keep();
  store_input(params.input, entry, kHidden, row);
}

// Queries, keys and values of that; from 16 entries on ull_qkv_sum_* finishes them.
ULL_KERNEL(ull_eagle_qkv_8, LinearParams, kNarrowThreads, NarrowQkv<8>::kBlocks) {
  linear_narrow<NarrowQkv<8>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_eagle_qkv_16, LinearParams, WideQkv<16>::kBoundThreads, WideQkv<16>::kBlocks) {
  linear_wide<WideQkv<16>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_eagle_qkv_32, LinearParams, WideQkv<32>::kBoundThreads, WideQkv<32>::kBlocks) {
  linear_wide<WideQkv<32>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_eagle_qkv_64, LinearParams, WideQkv<64>::kBoundThreads, WideQkv<64>::kBlocks) {
  linear_wide<WideQkv<64>, QkvEpilogue>(params);
}

}  // namespace ull::gpu
