// Clusters of two blocks, right and with faults, for tests/kernels/test_clusters.py.
#include "arch.cuh"
#include "probe.h"

namespace arch = ull::arch;

inline constexpr int kBlocks = 2;  // of a cluster
inline constexpr int kBoth = 3;    // their ranks, as bits

// ---- a ring that both fill ------------------------------------------------------------------------------------------

inline constexpr int kSlots = 2;
inline constexpr int kColumns = 64;  // int32 of a stage
inline constexpr int kStageBytes = 4 * kColumns;
inline constexpr int kShareBytes = kStageBytes / kBlocks;  // that a block brings to both
inline constexpr int kConsumers = kColumns / 32;           // warps of a block; one more brings

struct Ring {
  unsigned char* stages;
  arch::Barrier* full;
  arch::Barrier* empty;
};

// What differs from a right kernel: 1 a block_barrier() stands where the cluster's should; 2 no fence_barrier_init();
// 3 a warp releases a stage in its own block alone; 4 a block announces its own share alone; 5 consumers wait for the
// other parity; 6 a warp releases a stage in a third block; 7 a multicast goes to one; 8 all stages are released, also
// the last ones, which nobody waits for; 9 the same with a cluster_barrier() behind them, which is right; 10 a warp
// waits for a stage that does not come, where all others meet; 11 a lane does not come where the others meet; 12 the
// second block ends at once; 13 nobody waits for a slot to be empty; 14 a share is no multiple of 16 bytes; 15 nobody
// waits for the last stage; 16 the second block's threads store to a slot first; 17 one of them does so when its
// barriers are known; 18 shares are announced that do not come.
ULL_DEVICE void bring(const ProbeParams& params, const Ring& ring, int i) {
  const int fault = params.fault, slot = i % kSlots, share = arch::cluster_rank() * kShareBytes;
  if (fault != 13) arch::barrier_wait(ring.empty + slot, static_cast<uint32_t>(i / kSlots + 1) & 1U);
  arch::barrier_arrive_expect(ring.full + slot, fault == 4 ? kShareBytes : fault == 18 ? 2 * kStageBytes : kStageBytes);
  const auto* source =
      static_cast<const unsigned char*>(params.input) + (arch::block_x() * params.count + i) * kStageBytes + share;
  arch::bulk_copy_multicast(ring.stages + slot * kStageBytes + share, source, kShareBytes - (fault == 14 ? 8 : 0),
                            ring.full + slot, fault == 7 ? 5 : kBoth);
}

ULL_DEVICE void release(const ProbeParams& params, const Ring& ring, int i) {
  const int fault = params.fault, rank = arch::lane();
  const bool waited_for = i + kSlots < params.count || fault == 8 || fault == 9;
  arch::warp_barrier();
  if (rank >= kBlocks || !waited_for || (fault == 3 && rank != arch::cluster_rank())) return;
  arch::barrier_arrive_in(fault == 6 ? kBlocks : rank, ring.empty + i % kSlots);
}

// output[y][x][column] = (y + 1) * the sum of `count` stages' numbers in that column. input: [x][count][column].
ULL_CLUSTER_KERNEL(share_stages, ProbeParams, 32 * (kConsumers + 1), kBlocks) {
  unsigned char* shared = arch::shared_memory();
  const Ring ring = {shared, reinterpret_cast<arch::Barrier*>(shared + kSlots * kStageBytes),
                     reinterpret_cast<arch::Barrier*>(shared + kSlots * kStageBytes) + kSlots};
  const int fault = params.fault, rank = arch::cluster_rank();
  if (fault == 16 && rank == 1) reinterpret_cast<int32_t*>(shared)[arch::thread()] = 1;
  if (arch::thread() == 0) {
    for (int i = 0; i < kSlots; ++i) {
      arch::barrier_init(ring.full + i, 1);
      arch::barrier_init(ring.empty + i, kConsumers * (fault == 3 ? 1 : kBlocks));
    }
    if (fault != 2) arch::fence_barrier_init();
  }
  if (fault == 16) arch::fence_bulk_copies();
  if (fault == 1) {
    arch::block_barrier();
  } else {
    arch::cluster_barrier();
  }
  arch::wait_for_predecessor();
  if (fault == 12 && rank == 1) return;
  if (fault == 17 && rank == 1 && arch::warp() == 1) reinterpret_cast<int32_t*>(shared)[arch::lane()] = 1;
  int32_t sum = 0;
  if (arch::warp() == kConsumers) {
    for (int i = 0; i < params.count && arch::lane() == 0; ++i) bring(params, ring, i);
  } else {
    for (int i = 0; i < params.count; ++i) {
      const uint32_t parity = static_cast<uint32_t>(i / kSlots) & 1U;
      if (fault == 15 && i == params.count - 1) break;
      arch::barrier_wait(ring.full + i % kSlots, fault == 5 ? parity ^ 1U : parity);
      sum += reinterpret_cast<const int32_t*>(ring.stages + i % kSlots * kStageBytes)[arch::thread()];
      release(params, ring, i);
    }
    const int block = arch::block_y() * arch::grid_x() + arch::block_x();
    static_cast<int32_t*>(params.output)[block * kColumns + arch::thread()] = sum * (arch::block_y() + 1);
  }
  if (fault < 9 || fault > 11) return;
  arch::warp_barrier();
  if (fault == 10 && rank == 1 && arch::warp() == 0) {
    arch::barrier_wait(ring.full, static_cast<uint32_t>((params.count + 1) / kSlots) & 1U);
  }
  if (fault == 11 && arch::lane() == 3) return;
  arch::cluster_barrier();
}

// ---- what blocks tell each other ------------------------------------------------------------------------------------

// output[block_y] = the input of the cluster's other block, which that has stored in output[grid_y + block_y].
// Faults: 1 a block_barrier() stands where the cluster's should; 2 the other block's arrival on an mbarrier does, which
// tells of no stores.
ULL_CLUSTER_KERNEL(tell_neighbour, ProbeParams, 64, kBlocks) {
  auto* barrier = reinterpret_cast<arch::Barrier*>(arch::shared_memory());
  if (arch::thread() == 0) {
    arch::barrier_init(barrier, 1);
    arch::fence_barrier_init();
  }
  arch::cluster_barrier();
  arch::wait_for_predecessor();
  const int me = arch::block_y(), other = me ^ 1, fault = params.fault;
  auto* output = static_cast<uint32_t*>(params.output);
  if (arch::thread() == 0) output[arch::grid_y() + me] = static_cast<const uint32_t*>(params.input)[me];
  if (fault == 1) {
    arch::block_barrier();
  } else if (fault == 2) {
    if (arch::thread() == 0) arch::barrier_arrive_in(arch::cluster_rank() ^ 1, barrier);
    arch::barrier_wait(barrier, 0);
  } else {
    arch::cluster_barrier();
  }
  if (arch::thread() == 33) output[me] = output[arch::grid_y() + other];
}

// output[block_y][0, 1] = the cluster's two inputs, of which each block has stored its own in both. Faults: 1 a
// block_barrier() stands where the cluster's should; 2 more bytes come than are announced; 3 nobody waits for them; 4 a
// third block gets one; 5 a word does not lie at a multiple of its size; 6 it lies behind the block's memory; 7 the
// block has ended.
ULL_CLUSTER_KERNEL(store_in_both, ProbeParams, 32, kBlocks) {
  auto* words = reinterpret_cast<float*>(arch::shared_memory());
  auto* arrived = reinterpret_cast<arch::Barrier*>(arch::shared_memory() + 8);
  const int fault = params.fault, rank = arch::cluster_rank(), lane = arch::lane();
  if (lane == 0) {
    arch::barrier_init(arrived, 1);
    arch::fence_barrier_init();
    arch::barrier_arrive_expect(arrived, fault == 2 ? 4 : 8);
  }
  if (fault == 1) {
    arch::block_barrier();
  } else {
    arch::cluster_barrier();
  }
  arch::wait_for_predecessor();
  if (fault == 7 && rank == 1) return;
  const float own = static_cast<const float*>(params.input)[arch::block_y()];
  float* to = fault == 6 ? words + 8 : words + rank;
  if (fault == 5) to = reinterpret_cast<float*>(reinterpret_cast<char*>(to) + 2);
  if (lane < kBlocks + (fault == 4 ? 1 : 0)) arch::store_async_in(lane, to, own, arrived);
  if (fault == 3) return;
  arch::barrier_wait(arrived, 0);
  if (lane < kBlocks) static_cast<float*>(params.output)[arch::block_y() * kBlocks + lane] = words[lane];
}

// All threads of the cluster meet `count` times, and each time another one adds 1 to what the block beside has stored:
// output[2][block_y], in turn. Fault 1: the second time a warp of the first block does not come.
ULL_CLUSTER_KERNEL(meet_often, ProbeParams, 64, kBlocks) {
  arch::wait_for_predecessor();
  auto* output = static_cast<uint32_t*>(params.output);
  const int me = arch::block_y(), blocks = arch::grid_y();
  for (int i = 0; i < params.count; ++i) {
    const uint32_t before = i == 0 ? static_cast<uint32_t>(me) : output[(i + 1) % 2 * blocks + (me ^ 1)];
    if (arch::thread() == i % 64) output[i % 2 * blocks + me] = before + 1;
    if (params.fault == 1 && i == 1 && arch::cluster_rank() == 0 && arch::warp() == 1) arch::named_barrier(1, 64);
    arch::cluster_barrier();
  }
}

// Of clusters in a row: each block brings its 16 bytes of input[block_y][block_x] to both, which store what has come in
// output[block_y][block_x][2].
ULL_ROW_CLUSTER_KERNEL(share_row, ProbeParams, 32, 1, kBlocks) {
  unsigned char* shared = arch::shared_memory();
  auto* barrier = reinterpret_cast<arch::Barrier*>(shared + kBlocks * 16);
  if (arch::thread() == 0) {
    arch::barrier_init(barrier, 1);
    arch::fence_barrier_init();
  }
  arch::cluster_barrier();
  arch::wait_for_predecessor();
  const int place = arch::block_y() * arch::grid_x() + arch::block_x();
  if (arch::thread() == 0) {
    arch::fence_bulk_sources();
    arch::barrier_arrive_expect(barrier, kBlocks * 16);
    arch::bulk_copy_multicast(shared + arch::cluster_rank() * 16, static_cast<const char*>(params.input) + place * 16,
                              16, barrier, (1U << kBlocks) - 1);
  }
  arch::barrier_wait(barrier, 0);
  if (arch::thread() < kBlocks) {
    char* to = static_cast<char*>(params.output) + (place * kBlocks + arch::thread()) * 16;
    arch::store_global(to, arch::load_shared(shared + arch::thread() * 16));
  }
}

// ---- products of what another block brings --------------------------------------------------------------------------

inline constexpr int kGroups = 4;                        // of 8 columns
inline constexpr int kOperandBytes = 2 * kGroups * 128;  // core matrices, [group][half of k]

// Sums of two products with the same b, which the first block brings to both, each time. input: a [64, 16] f16, then b;
// output: f32 [block_y][64, 8 kGroups]. Faults: 1 b comes again when the first block alone has used it; 2 the second
// block releases it before its product is waited for; 3 that of an operand that is swizzled.
ULL_CLUSTER_KERNEL(share_operand, ProbeParams, 128, kBlocks) {
  unsigned char* b = arch::shared_memory();
  auto* full = reinterpret_cast<arch::Barrier*>(b + kOperandBytes);
  arch::Barrier* empty = full + 1;
  const int fault = params.fault, rank = arch::cluster_rank();
  const bool early = fault == 2 || fault == 3;
  if (arch::thread() == 0) {
    arch::barrier_init(full, 1);
    arch::barrier_init(empty, 4 * kBlocks);
    arch::fence_barrier_init();
  }
  arch::cluster_barrier();
  arch::wait_for_predecessor();
  const auto* input = static_cast<const unsigned char*>(params.input);
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) {
    const int row = arch::warp() * 16 + arch::lane() / 4 + i % 2 * 8;
    a[i] = *reinterpret_cast<const uint32_t*>(input + row * 32 + arch::lane() % 4 * 4 + i / 2 * 16);
  }
  const auto release = [&] {
    arch::warp_barrier();
    if (arch::lane() == 0) arch::barrier_arrive_in(0, empty);
  };
  const auto bring = [&] {
    arch::barrier_arrive_expect(full, kOperandBytes);
    if (rank == 0) arch::bulk_copy_multicast(b, input + 64 * 32, kOperandBytes, full, kBoth);
  };
  float sums[kGroups][4] = {};
  for (int i = 0; i < 2; ++i) {
    if (arch::thread() == 0) {
      if (i == 1 && rank == 0 && fault != 1) arch::barrier_wait(empty, 0);
      bring();
    }
    if (early && rank == 0 && i == 1) arch::cluster_barrier();
    arch::barrier_wait(full, static_cast<uint32_t>(i));
    const uint64_t described = arch::core_matrices(b, 128, 256) | (fault == 3 ? 3ULL << 62 : 0);
    arch::warpgroup_fence();
    arch::warpgroup_mma(sums, a, described);
    arch::warpgroup_commit();
    if (early && rank == 1 && i == 0) {
      release();
      arch::cluster_barrier();
    }
    arch::warpgroup_wait<0>(sums);
    if (i == 0 && (!early || rank == 0)) release();
  }
  if (rank == 0 && arch::thread() == 0) arch::barrier_wait(empty, 0);
  auto* output = static_cast<float*>(params.output) + arch::block_y() * 64 * 8 * kGroups;
  for (int i = 0; i < 4 * kGroups; ++i) {
    const int row = arch::warp() * 16 + arch::lane() / 4 + i % 4 / 2 * 8;
    output[row * 8 * kGroups + i / 4 * 8 + arch::lane() % 4 * 2 + i % 2] = sums[i / 4][i % 4];
  }
}
