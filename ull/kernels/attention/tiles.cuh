// Tiles of the pages as operands of warpgroups' products: how they lie in shared memory, and the ring through which
// they come. A tile is a page's 64 positions: of a kv head its keys, or its values, as f16.
//
// A tile's keys are the operand b of its scores, [head_dim / 16 products][2 halves of k][8 groups of 8 positions] core
// matrices, and its values that of the weighted sums, [4 products][2 halves of k][head_dim / 8 groups]. Which elements
// of k a product takes is what kv_format.cuh says; a core matrix is thus one register of mma()'s b, lane by lane.
//
// Column c of group n of the scores is position 4p * (c / 2) + 2 * (n % 2p) + c % 2 of unit n / 2p, with p products a
// unit. So a lane's scores of groups 2i and 2i + 1 are those of the positions that it has as operand a of product i.
#pragma once

#include "attention/attention_plan.cuh"
#include "attention/kv_format.cuh"
#include "linear/linear.cuh"

namespace ull::gpu {

static_assert(!kMayLack && !kBlock, "heads have no such kernels");

inline constexpr int kWarpgroupRows = 64;
inline constexpr int kTileGroups = kPageTokens / 8;     // of a tile's positions
inline constexpr int kTileProducts = kPageTokens / 16;  // of its weighted sums
inline constexpr int kDimGroups = kHeadDim / 8;
inline constexpr int kDimProducts = kHeadDim / 16;             // of its scores
inline constexpr int kPieceGroups = kDimGroups & -kDimGroups;  // a power of two, which products take
inline constexpr int kPieces = kDimGroups / kPieceGroups;      // that a row's outputs come in
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

inline constexpr int kSlots = 4;
inline constexpr int kSlotBytes = 2 * kPageTokens * kHeadDim;  // of a tile's keys, or of its values
inline constexpr int kRingBytes = kSlots * kSlotBytes;         // from the start of shared memory
inline constexpr int kRingBarrierBytes = 2 * kSlots * kBarrierBytes;

// Item 2i is the keys of the block's tile i, item 2i + 1 its values. Four warps bring them, and those of kWarpgroups
// multiply. The barriers lie kBarriersAt the start of shared memory.
template <int kWarpgroups, int kBarriersAt>
class TileRing {
 public:
  // By all threads; the barriers are ready when it returns.
  ULL_DEVICE explicit TileRing(unsigned char* shared)
      : shared_(shared), full_(reinterpret_cast<arch::Barrier*>(shared + kBarriersAt)), empty_(full_ + kSlots) {
    if (arch::thread() == 0) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        arch::barrier_init(full_ + i, 4);
        arch::barrier_init(empty_ + i, 4 * kWarpgroups);
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
