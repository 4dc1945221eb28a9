// Attention of a chunk: which rows and tiles a block has, and how its shared memory is laid out.
//
// A row is one query head of one token; the rows of a kv head are row = token * group + head in the group. A block has
// 128 of them, 64 for each of two warpgroups, and walks through all the pages that one of its rows sees, a tile of 64
// positions after another. A third warpgroup brings the tiles, as f16 operands of the products.
//
// Every output is what ull_attention_64 makes of it, bit for bit: the same products in the same order, the same splits
// and spans (attention_plan.cuh). Tiles that a row does not see are left out or masked. Both are the same: such a tile
// adds zeros, and its corrections and weights are 1.
#pragma once

#include "attention/tile_rows.cuh"
#include "attention/tiles.cuh"
#include "chunk/layout.cuh"

namespace ull::gpu {

inline constexpr int kRowWarpgroups = 2;
inline constexpr int kBlockRows = kRowWarpgroups * kWarpgroupRows;
inline constexpr int kChunkAttentionThreads = 128 * kRowWarpgroups + 128;
inline constexpr int kTileRegisters = 104;  // of a thread that brings tiles; what it gives up the others get
inline constexpr int kRowRegisters = 200;
static_assert(kTileRegisters + kRowWarpgroups * kRowRegisters <= 504, "what a launch of that many threads has");

// Shared memory: the ring's slots, then for each warp what it keeps of its rows, then the barriers.
inline constexpr int kKeptSets = 2;
inline constexpr int kSetBytes = 16 * kHeadDim * 4;  // a warp's rows, once: f32
static_assert(kQueryBytes <= kKeptSets * kSetBytes);
inline constexpr int kChunkBarriersAt = kRingBytes + 4 * kRowWarpgroups * kKeptSets * kSetBytes;
inline constexpr int kChunkAttentionBytes = kChunkBarriersAt + kRingBarrierBytes;
static_assert(kChunkAttentionBytes <= kWideBytes);
using ChunkRing = TileRing<kRowWarpgroups, kChunkBarriersAt>;

// ---- a block's share ------------------------------------------------------------------------------------------------

struct ChunkShare {
  ChunkExtent chunk;
  int kv_head;
  int row;   // the block's first one
  int rows;  // of the kv head
  int window;

  // Of a row's token; rows beyond the last one look at what that one does.
  ULL_DEVICE int position(int at) const { return chunk.base + smaller(at, rows - 1) / kGroup; }
  // The largest of 16 rows from row `at` on.
  ULL_DEVICE int last_position(int at) const { return position(at + 15); }
  ULL_DEVICE int first_visible(int at) const {  // first_seen(), which as a call makes more code of this kernel
    return window > 0 && at >= window ? at - window + 1 : 0;
  }
  // The tiles that `count` rows from row `at` on look at: none where there is no such row.
  ULL_DEVICE int first_tile(int at) const { return first_visible(position(at)) / kPageTokens; }
  ULL_DEVICE int end_tile(int at, int count) const {
    return at < rows ? position(at + count - 1) / kPageTokens + 1 : first_tile(at);
  }
};

// The last tokens see most: the first blocks have them. False: there is nothing for this block.
ULL_DEVICE bool make_chunk_share(ChunkShare& share, const ChunkExtent& chunk, int window) {
  const int rows = chunk.count * kGroup;
  const int block = (rows + kBlockRows - 1) / kBlockRows - 1 - arch::block_x();
  share = {chunk, arch::block_y(), block * kBlockRows, rows, window};
  return block >= 0;
}

}  // namespace ull::gpu
