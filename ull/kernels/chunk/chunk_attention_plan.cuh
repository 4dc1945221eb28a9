// Attention of a chunk: which rows and tiles a block has, how tiles lie in shared memory, and the ring through which
// they come.
//
// A row is one query head of one token; the rows of a kv head are row = token * group + head in the group. A block has
// 128 of them, 64 for each of two warpgroups, and walks through all the pages that one of its rows sees, a tile of 64
// positions after another. A third warpgroup brings the tiles, as f16 operands of the products.
//
// Every output is what ull_attention_64 makes of it, bit for bit: the same products in the same order, the same splits
// and spans (attention_plan.cuh). Tiles that a row does not see are left out or masked. Both are the same: such a tile
// adds zeros, and its corrections and weights are 1.
#pragma once

#include "attention/attention_plan.cuh"
#include "attention/kv_format.cuh"
#include "chunk/layout.cuh"
#include "linear/linear.cuh"

namespace ull::gpu {

static_assert(!kMayLack && !kBlock, "heads read no chunks");

inline constexpr int kRowWarpgroups = 2;
inline constexpr int kWarpgroupRows = 64;
inline constexpr int kBlockRows = kRowWarpgroups * kWarpgroupRows;
inline constexpr int kChunkAttentionThreads = 128 * kRowWarpgroups + 128;
inline constexpr int kTileRegisters = 104;  // of a thread that brings tiles; what it gives up the others get
inline constexpr int kRowRegisters = 200;
static_assert(kTileRegisters + kRowWarpgroups * kRowRegisters <= 504, "what a launch of that many threads has");

// ---- operands in shared memory --------------------------------------------------------------------------------------
// A tile's keys are the operand b of its scores, [head_dim / 16 products][2 halves of k][8 groups of 8 positions] core
// matrices, and its values that of the weighted sums, [4 products][2 halves of k][head_dim / 8 groups]. Which elements
// of k a product takes is what kv_format.cuh says; a core matrix is thus one register of mma()'s b, lane by lane.
//
// Column c of group n of the scores is position 4p * (c / 2) + 2 * (n % 2p) + c % 2 of unit n / 2p, with p products a
// unit. So a lane's scores of groups 2i and 2i + 1 are those of the positions that it has as operand a of product i.

inline constexpr int kTileGroups = kPageTokens / 8;     // of a tile's positions
inline constexpr int kTileProducts = kPageTokens / 16;  // of its weighted sums
inline constexpr int kDimGroups = kHeadDim / 8;
inline constexpr int kDimProducts = kHeadDim / 16;             // of its scores
inline constexpr int kPieceGroups = kDimGroups & -kDimGroups;  // a power of two, which products take
inline constexpr int kPieces = kDimGroups / kPieceGroups;      // that a row's outputs come in
inline constexpr int kSlotBytes = 2 * kPageTokens * kHeadDim;  // of a tile's keys, or of its values
static_assert(kDimProducts == kKeySteps * kKeyProducts);

ULL_DEVICE unsigned char* key_core(unsigned char* slot, int product, int half, int group) {
  return slot + ((2 * product + half) * kTileGroups + group) * kCoreBytes;
}
ULL_DEVICE unsigned char* value_core(unsigned char* slot, int product, int half, int group) {
  return slot + ((2 * product + half) * kDimGroups + group) * kCoreBytes;
}

// The position within a tile that columns 2 * pair and, + 1, 2 * pair + 1 of a group are.
ULL_DEVICE constexpr int column_position(int group, int pair) {
  return group / (2 * kKvProducts) * kValueUnit + 4 * kKvProducts * pair + 2 * (group % (2 * kKvProducts));
}

// ---- a block's share ------------------------------------------------------------------------------------------------

struct ChunkShare {
  ChunkExtent chunk;
  int kv_head;
  int row;   // the block's first one
  int rows;  // of the kv head
  int window;

  // Of a row's token; rows beyond the last one look at what that one does.
  ULL_DEVICE int position(int at) const { return chunk.base + smaller(at, rows - 1) / kGroup; }
  ULL_DEVICE int first_visible(int at) const {  // from position `at`
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

// ---- the ring -------------------------------------------------------------------------------------------------------

// Shared memory: the slots, then for each warp what it keeps of its 16 rows, then the barriers.
inline constexpr int kSlots = 4;
inline constexpr int kKeptBytes = 16 * kHeadDim * 4;  // a warp's rows, once: f32
inline constexpr int kKeptAt = kSlots * kSlotBytes;
inline constexpr int kRingBarriersAt = kKeptAt + 4 * kRowWarpgroups * 2 * kKeptBytes;
inline constexpr int kChunkAttentionBytes = kRingBarriersAt + 2 * kSlots * kBarrierBytes;
static_assert(kChunkAttentionBytes <= kWideBytes);

// Item 2i is the keys of the block's tile i, item 2i + 1 its values.
class TileRing {
 public:
  // By all threads; the barriers are ready when it returns.
  ULL_DEVICE explicit TileRing(unsigned char* shared)
      : shared_(shared), full_(reinterpret_cast<arch::Barrier*>(shared + kRingBarriersAt)), empty_(full_ + kSlots) {
    if (arch::thread() == 0) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        arch::barrier_init(full_ + i, 4);
        arch::barrier_init(empty_ + i, 4 * kRowWarpgroups);
      }
      arch::fence_barrier_init();
    }
    arch::block_barrier();
  }

  ULL_DEVICE unsigned char* slot(int item) const { return shared_ + item % kSlots * kSlotBytes; }

  // By the warps that bring items: waits until the slot may be written (at once the first time round); says that the
  // warp has written its part.
  ULL_DEVICE void wait_empty(int item) const { arch::barrier_wait(empty_ + item % kSlots, (item / kSlots + 1) % 2); }
  ULL_DEVICE void publish(int item) const {
    arch::fence_bulk_copies();
    arch::warp_barrier();
    if (arch::lane() == 0) arch::barrier_arrive(full_ + item % kSlots);
  }

  // By the warps that multiply: waits for the item; says that the warp's products have read it.
  ULL_DEVICE void wait(int item) const { arch::barrier_wait(full_ + item % kSlots, item / kSlots % 2); }
  ULL_DEVICE void release(int item) const {
    arch::warp_barrier();
    if (arch::lane() == 0) arch::barrier_arrive(empty_ + item % kSlots);
  }

 private:
  unsigned char* shared_;
  arch::Barrier* full_;
  arch::Barrier* empty_;
};

}  // namespace ull::gpu
