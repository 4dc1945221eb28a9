// f16 activations between kernels: [K / 32 steps][64 tokens][32 columns], the last step padded with zeros. A step of
// eight tokens is a warp's B operand as it lies in memory: lane 4g + t reads its 16 bytes, columns 8t .. 8t + 7 of
// token g, at 16 * lane. So shared memory needs no padding, and bulk copies bring whole operands. What warpgroups
// multiply lies otherwise: see core_index().
#pragma once

#include "model.cuh"

namespace ull::gpu {

inline constexpr int kGroupTokens = 8;                              // columns of one mma
inline constexpr int kTokenStepBytes = 2 * kColumnUnit;             // one token's columns of one step
inline constexpr int kGroupBytes = kGroupTokens * kTokenStepBytes;  // one step's B operand
inline constexpr int kActivationStepBytes = kTreeTokens * kTokenStepBytes;
inline constexpr int kCoreTokens = 8;                // rows of a core matrix, the tensor cores' unit of an operand in
inline constexpr int kCoreBytes = 16 * kCoreTokens;  // shared memory: 8 columns each, 128 contiguous bytes

// Elements from the start to (token, column).
ULL_HOST_DEVICE constexpr int activation_index(int token, int column) {
  return (column / kColumnUnit * kTreeTokens + token) * kColumnUnit + column % kColumnUnit;
}

// The same where warpgroups multiply, which take kTokens together: [K / 32 steps][4 quarters][kTokens][8 columns]. A
// step's columns are taken by two products of 16 in the order in which the weights are packed (Weights in linear.cuh):
// lane t's fragments are columns 8t + 4j .. 8t + 4j + 3 of product j. So quarter 2j + h of a step holds, of all t,
// columns 8t + 4j + 2h and the next one: what the tensor cores call k = 8h .. 8h + 7. Two columns from an even one on
// are neighbours; the next two lie a quarter further, until eight are through.
template <int kTokens>
ULL_HOST_DEVICE constexpr int core_index(int token, int column) {
  const int within = column % kColumnUnit;
  return ((column / kColumnUnit * 4 + within % 8 / 2) * kTokens + token) * 8 + within / 8 * 2 + column % 2;
}

// Whether the kernels of a round of up to kTokens take them so.
template <int kTokens>
inline constexpr bool kInCores = kWarpgroupTrees && kTokens > 8;

// Those of a round.
template <int kTokens>
ULL_HOST_DEVICE constexpr int round_index(int token, int column) {
  return kInCores<kTokens> ? core_index<kTokens>(token, column) : activation_index(token, column);
}
// Elements from a pair of columns to the next one, of the eight from a multiple of 8 on.
template <int kTokens>
inline constexpr int kPairStride = kInCores<kTokens> ? 8 * kTokens : 2;

// Those of a chunk of a prompt, of width kColumns: tiles of 128 tokens, one behind another.
template <int kColumns>
ULL_HOST_DEVICE constexpr int chunk_index(int token, int column) {
  return token / kChunkTile * (round_up(kColumns, kColumnUnit) * kChunkTile) +
         core_index<kChunkTile>(token % kChunkTile, column);
}

// round->count, which begin() wrote. embed does not overlap with that, so what comes behind it may read it, past L1,
// before it waits.
ULL_DEVICE int token_count(const Round* round) {
  static_assert(ULL_OFFSETOF(Round, count) == 12);
  return static_cast<int>(arch::load_global(round).word[3]);
}

// A chunk's first position and its number of tokens, which begin_chunk() wrote. embed does not overlap with that, so
// what comes behind it may read them before it waits.
struct ChunkExtent {
  int base;
  int count;
};

ULL_DEVICE ChunkExtent chunk_extent(const Chunk* chunk) {
  static_assert(ULL_OFFSETOF(Chunk, base) == 8 && ULL_OFFSETOF(Chunk, count) == 12);
  const arch::Vector4 head = arch::load_global(chunk);
  return {static_cast<int>(head.word[2]), static_cast<int>(head.word[3])};
}

}  // namespace ull::gpu
