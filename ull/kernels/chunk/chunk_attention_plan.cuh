// Attention of a chunk: which rows and tiles a block has, and how its shared memory is laid out.
//
// A row is one query head of one token; the rows of a kv head are row = token * group + head in the group. A block has
// 128 of them (a part), 64 for each of two warpgroups, and walks through the pages that one of its rows sees, a tile of
// 64 positions after another. A third warpgroup brings the tiles, as f16 operands of the products.
//
// Few tokens behind a long cache have few parts. Then several blocks, its lanes, share a part's splits out: each leaves
// what it has of them in memory, and for 16 rows whichever lane's warp is the last to finish merges it.
//
// Every output is what ull_attention_64 makes of it, bit for bit: the same products in the same order, the same splits
// and spans (attention_plan.cuh). Tiles that a row does not see are left out or masked. Both are the same: such a tile
// adds zeros (if its values are numbers), and its corrections and weights are 1.
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
using Quad = Floats<4>;  // a lane's outputs of two dimensions of its two rows, or both rows' statistics
inline constexpr int kQuads = 32 * (kDimGroups + 1);  // a warp's rows, once
inline constexpr int kSetBytes = 16 * kQuads;
static_assert(kQueryBytes <= kKeptSets * kSetBytes);
inline constexpr int kChunkBarriersAt = kRingBytes + 4 * kRowWarpgroups * kKeptSets * kSetBytes;
inline constexpr int kChunkAttentionBytes = kChunkBarriersAt + kRingBarrierBytes;
static_assert(kChunkAttentionBytes <= kWideBytes);
using ChunkRing = TileRing<kRowWarpgroups, kChunkBarriersAt>;

// ---- a block's share ------------------------------------------------------------------------------------------------

inline constexpr int kMostBlocks = kChunkTokens * kGroup / kBlockRows;  // of a kv head
inline constexpr int kFewestSharedSplits = 4;                           // fewer are not worth being merged from memory

struct ChunkShare {
  ChunkExtent chunk;
  int kv_head;
  int row;   // the block's first one
  int rows;  // of the kv head
  int window;
  int first_split;  // that the part looks at, and the last
  int last_split;
  int per_lane;  // splits of a lane; the last one has what is left, at most one more
  int lanes;
  int lane;  // the block's own

  ULL_DEVICE int parts() const { return (rows + kBlockRows - 1) / kBlockRows; }
  ULL_DEVICE int lane_first(int at) const { return first_split + at * per_lane; }
  ULL_DEVICE int lane_end(int at) const { return at + 1 == lanes ? last_split + 1 : lane_first(at + 1); }

  // Of a row's token; rows beyond the last one look at what that one does.
  ULL_DEVICE int position(int at) const { return chunk.base + smaller(at, rows - 1) / kGroup; }
  // The largest of 16 rows from row `at` on.
  ULL_DEVICE int last_position(int at) const { return position(at + 15); }
  ULL_DEVICE int first_visible(int at) const {  // first_seen(), which as a call makes more code of this kernel
    return window > 0 && at >= window ? at - window + 1 : 0;
  }
  // The lane's tiles, of which there is one at least.
  ULL_DEVICE int first_tile() const {
    return larger(first_visible(position(row)) / kPageTokens, kSplitTiles * lane_first(lane));
  }
  ULL_DEVICE int end_tile() const {
    return smaller(position(row + kBlockRows - 1) / kPageTokens + 1, kSplitTiles * lane_end(lane));
  }
};

// The last tokens see most: the first blocks have them, and those that have nothing are the last ones. blocks: of a kv
// head that parts and lanes may take. False: there is nothing for this block.
ULL_DEVICE bool make_chunk_share(ChunkShare& share, const ChunkExtent& chunk, int window, int blocks) {
  const AttentionPlace place = attention_place();
  share = {chunk, place.kv_head, 0, chunk.count * kGroup, window, 0, 0, 1, 1, 0};
  const int parts = share.parts();
  if (parts == 0) return false;
  share.lane = place.x / parts;
  share.row = (parts - 1 - (place.x - share.lane * parts)) * kBlockRows;
  share.first_split = share.first_visible(share.position(share.row)) / kSplitTokens;
  share.last_split = share.position(share.row + kBlockRows - 1) / kSplitTokens;
  const int before = share.last_split - share.first_split;
  const int lanes = before + 1 < kFewestSharedSplits ? 1 : larger(blocks / parts, 1);
  share.per_lane = lanes == 1 ? before + 1 : (before - 1) / lanes + 1;
  share.lanes = lanes == 1 ? 1 : (before - 1) / share.per_lane + 1;
  return share.lane < share.lanes;
}

// ---- what lanes leave -----------------------------------------------------------------------------------------------
// [kv_heads][blocks][results][warps][kQuads]. A warp leaves a result of each span whose splits it has from the first
// one on, and of every other split one of its own.

// The results of a warp's rows, in the order in which they are merged, of all lanes.
class ChunkResults {
 public:
  ULL_DEVICE explicit ChunkResults(const ChunkShare& share) : share_(share), split_(share.first_split) {}

  ULL_DEVICE bool exists() const { return split_ <= share_.last_split; }
  // The split behind the result's last one.
  ULL_DEVICE int end() const {
    if (first_of_span(split_, share_.first_split) < share_.lane_first(lane_)) return split_ + 1;
    return smaller(split_ / kSpanSplits * kSpanSplits + kSpanSplits, share_.lane_end(lane_));
  }
  ULL_DEVICE void next() {
    split_ = end();
    ++number_;
    if (split_ < share_.lane_end(lane_)) return;
    ++lane_;
    number_ = 0;
  }
  ULL_DEVICE int lane() const { return lane_; }
  ULL_DEVICE int number() const { return number_; }  // of the lane's results

 private:
  const ChunkShare& share_;
  int lane_ = 0, split_, number_ = 0;
};

}  // namespace ull::gpu
