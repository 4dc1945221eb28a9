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

// Those of a chunk of a prompt: [tile of 128 tokens][K / 32 steps][4 quarters][128 tokens][8 columns]. A step's columns
// are taken by two products of 16 in the order in which the weights are packed (Weights in linear.cuh): lane t's
// fragments are columns 8t + 4j .. 8t + 4j + 3 of product j. So quarter 2j + h of a step holds, of all t, columns 8t +
// 4j + 2h and the next one: what the tensor cores call k = 8h .. 8h + 7.
//
// Elements from the start to (token, column) of activations of width kColumns. Two columns from an even one on are
// neighbours.
template <int kColumns>
ULL_HOST_DEVICE constexpr int chunk_index(int token, int column) {
  constexpr int kSteps = round_up(kColumns, kColumnUnit) / kColumnUnit;
  const int within = column % kColumnUnit, step = token / kChunkTile * kSteps + column / kColumnUnit;
  return ((4 * step + within % 8 / 2) * kChunkTile + token % kChunkTile) * 8 + within / 8 * 2 + column % 2;
}

// round->count, from L2: an earlier kernel may write the Round while this one has already begun.
ULL_DEVICE int token_count(const Round* round) {
  static_assert(ULL_OFFSETOF(Round, count) == 12);
  return static_cast<int>(arch::load_global(round).word[3]);
}

}  // namespace ull::gpu
