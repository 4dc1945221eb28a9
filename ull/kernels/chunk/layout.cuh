// How the activations of a chunk of a prompt (activations.cuh) lie in bytes. Eight tokens of a quarter are a core
// matrix of the tensor cores, and a tile's step is one bulk copy.
#pragma once

#include "linear/activations.cuh"
#include "model.cuh"

namespace ull::gpu {

inline constexpr int kQuarterBytes = kChunkTile / kCoreTokens * kCoreBytes;  // of a tile's step
inline constexpr int kChunkStepBytes = 4 * kQuarterBytes;                    // of a tile
static_assert(kChunkStepBytes == kChunkTile * kTokenStepBytes);

// ---- e4m3 activations (kFastPrefill)
// --------------------------------------------------------------------------------- A product takes a step's 32 columns
// in two halves of 16, each a core matrix along k: of both byte 4t + i of a token is column 8t + 4 * half + i, the
// order in which the weights are packed (Weights in linear.cuh).
inline constexpr int kFastHalfBytes = kChunkTile * 16;  // of a tile's step
inline constexpr int kFastStepBytes = 2 * kFastHalfBytes;

// Bytes from the start to (token, column) of activations of width kColumns. Four columns from a multiple of 4 on are
// neighbours.
template <int kColumns>
ULL_HOST_DEVICE constexpr int fast_chunk_index(int token, int column) {
  constexpr int kSteps = round_up(kColumns, kColumnUnit) / kColumnUnit;
  const int within = column % kColumnUnit, step = token / kChunkTile * kSteps + column / kColumnUnit;
  return ((2 * step + within / 4 % 2) * kChunkTile + token % kChunkTile) * 16 + within / 8 * 4 + column % 4;
}

}  // namespace ull::gpu
