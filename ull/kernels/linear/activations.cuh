// f16 activations between kernels: [K / 32 steps][64 tokens][32 columns], the last step padded with zeros. A step of
// eight tokens is the tensor cores' B operand as it lies in memory: lane 4g + t reads its 16 bytes, columns 8t .. 8t +
// 7 of token g, at 16 * lane. So shared memory needs no padding, and bulk copies bring whole operands.
#pragma once

#include "model.cuh"

namespace ull::gpu {

inline constexpr int kGroupTokens = 8;                              // columns of one mma
inline constexpr int kTokenStepBytes = 2 * kColumnUnit;             // one token's columns of one step
inline constexpr int kGroupBytes = kGroupTokens * kTokenStepBytes;  // one step's B operand
inline constexpr int kActivationStepBytes = kTreeTokens * kTokenStepBytes;

// Elements from the start to (token, column).
ULL_HOST_DEVICE constexpr int activation_index(int token, int column) {
  return (column / kColumnUnit * kTreeTokens + token) * kColumnUnit + column % kColumnUnit;
}

// round->count, from L2: an earlier kernel may write the Round while this one has already begun.
ULL_DEVICE int token_count(const Round* round) {
  static_assert(ULL_OFFSETOF(Round, count) == 12);
  return static_cast<int>(arch::load_global(round).word[3]);
}

}  // namespace ull::gpu
