// Weights that L2 is asked for before a ring has room for them, so that the memory does not idle while the rings are
// full and the kernel before has not finished. ULL_AHEAD_KIB says how much for each multiprocessor; how much is best,
// and whether it is anything, only a measurement can tell (bench/h200/ahead.py).
//
// What is asked for has to come through to its use: weights pass L2 as what leaves it first, so what waits there while
// a long layer streams by is gone again. Hence only o and gate_up look ahead, which wait for short steps, and attention
// for them, whose neighbours have no weights to bring. With ULL_AHEAD_ALL the others do as well.
#pragma once

#include "arch.cuh"
#include "linear/linear.cuh"

namespace ull::gpu {

inline constexpr int kAheadBytes = ULL_AHEAD_KIB * 1024;                   // of a block, beyond its ring
inline constexpr int kAheadOfLongBytes = ULL_AHEAD_ALL ? kAheadBytes : 0;  // behind a layer that takes long

// Asks for the first kAheadBytes of what blocks of a linear layer will read: of blocks first, first + stride, ... of
// `blocks` that share its row tiles. By one thread.
template <typename Shape>
ULL_DEVICE void prefetch_shares(const void* weights, int first, int stride, int blocks) {
  constexpr int kTileBytes = Shape::kSteps * Shape::kStepBytes;
  if (weights == nullptr) return;
  const int of = smaller(blocks, Shape::kRowTiles);
  for (int block = first; block < of; block += stride) {
    const int tile = block * Shape::kRowTiles / of;
    const int tiles = (block + 1) * Shape::kRowTiles / of - tile;
    const int64_t bytes = static_cast<int64_t>(tiles) * kTileBytes;
    arch::bulk_prefetch_stream(static_cast<const unsigned char*>(weights) + static_cast<int64_t>(tile) * kTileBytes,
                               static_cast<uint32_t>(bytes < kAheadBytes ? bytes : kAheadBytes));
  }
}

}  // namespace ull::gpu
