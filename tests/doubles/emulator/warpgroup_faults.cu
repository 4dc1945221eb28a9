// What warpgroups may do wrong with their products, for tests/kernels/test_warpgroup.py. Numbers are small integers, so
// that every sum is exact.
#include "arch.cuh"

namespace arch = ull::arch;

inline constexpr int kGroups = 4;  // of 8 columns
inline constexpr int kStages = 3;
inline constexpr int kStageBytes = 2 * kGroups * 128;  // b of a step: core matrices, [group][half of k]

struct FaultParams {
  const uint16_t* a;  // [steps, rows, 16] f16
  const void* b;      // [steps] kStageBytes
  float* c;           // [rows, 8 kGroups]
  int32_t steps;
  int32_t fault;  // 0: the kernel is right
};

using Sums = float[kGroups][4];

ULL_DEVICE void load_a(uint32_t (&a)[4], const FaultParams& params, int step, int rows) {
  const uint16_t* at = params.a + ((step * rows + arch::warp() * 16) + arch::lane() / 4) * 16 + arch::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const uint32_t*>(at + i % 2 * 8 * 16 + i / 2 * 8);
}
ULL_DEVICE void clear(Sums& sums) {
  for (int i = 0; i < 4 * kGroups; ++i) sums[i / 4][i % 4] = 0.0F;
}
ULL_DEVICE void store_sums(const Sums& sums, const FaultParams& params) {
  for (int i = 0; i < 4 * kGroups; ++i) {
    const int row = arch::warp() * 16 + arch::lane() / 4 + i % 4 / 2 * 8;
    params.c[row * 8 * kGroups + i / 4 * 8 + arch::lane() % 4 * 2 + i % 2] = sums[i / 4][i % 4];
  }
}
ULL_DEVICE uint64_t operand_at(const unsigned char* stage) { return arch::core_matrices(stage, 128, 256); }

// Two warpgroups multiply what a warp brings through a ring, with one group of products in flight while they load the
// next a. Faults: 1 warp 6 leaves a product out; 2 no fence; 3 the fence stands before the commit; 4 the sums are
// stored before the last wait; 5 every step has the same registers for a; 6 a stage is released before its product is
// waited for; 7 the last product is not committed; 8 nor waited for; 9 nobody waits for the copies; 10 the sums change
// in flight; 11 the last wait is called with other registers; 12 warp 3 commits where the others fence; 13 warp 7 ends
// early; 14 lane 9 does not wait; 15 warp 2 has another descriptor; 16 half of the sums takes another product; 17 half
// of the lanes has other registers; 18 warp 1 ends early, and the others never wait.
ULL_KERNEL(ring_products, FaultParams, 288, 1) {
  unsigned char* stages = arch::shared_memory();
  auto* full = reinterpret_cast<arch::Barrier*>(stages + kStages * kStageBytes);
  arch::Barrier* empty = full + kStages;
  if (arch::thread() == 0) {
    for (int i = 0; i < kStages; ++i) {
      arch::barrier_init(&full[i], 1);
      arch::barrier_init(&empty[i], 8);
    }
    arch::fence_barrier_init();
  }
  arch::block_barrier();
  arch::wait_for_predecessor();
  const int fault = params.fault, warp = arch::warp();
  if (warp == 8) {
    for (int step = 0; step < params.steps && arch::lane() == 0; ++step) {
      const int stage = step % kStages;
      arch::barrier_wait(&empty[stage], static_cast<uint32_t>(step / kStages + 1) & 1U);
      arch::barrier_arrive_expect(&full[stage], kStageBytes);
      arch::bulk_copy(stages + stage * kStageBytes, static_cast<const unsigned char*>(params.b) + step * kStageBytes,
                      kStageBytes, &full[stage]);
    }
    return;
  }
  const auto release = [&](int step) {
    arch::warp_barrier();
    if (arch::lane() == 0) arch::barrier_arrive(&empty[step % kStages]);
  };
  if (fault == 13 && warp == 7) return;
  Sums sums, others;
  clear(sums);
  clear(others);
  uint32_t a[2][4];
  for (int step = 0; step < params.steps; ++step) {
    const bool last = step == params.steps - 1;
    const int stage = step % kStages;
    uint32_t (&mine)[4] = a[fault == 5 ? 0 : step % 2];
    if (fault == 18 && last && warp == 1) return;
    if (fault != 9) arch::barrier_wait(&full[stage], static_cast<uint32_t>(step / kStages) & 1U);
    load_a(mine, params, step, 128);
    uint64_t b = operand_at(stages + stage * kStageBytes);
    if (fault == 15 && warp == 2) b = operand_at(stages + (stage ^ 1) * kStageBytes);
    if (fault == 12 && warp == 3) arch::warpgroup_commit();
    if (fault != 2 && (fault != 12 || warp != 3) && fault != 3) arch::warpgroup_fence();
    if (fault == 3 && step == 0) arch::warpgroup_fence();
    if (fault != 1 || warp != 6 || !last) {
      arch::warpgroup_mma(fault == 17 && arch::lane() < 16 && step == 4 ? others : sums, mine, b);
    }
    if (fault == 3) arch::warpgroup_fence();
    if (fault == 16) arch::warpgroup_mma(reinterpret_cast<float (&)[2][4]>(sums), mine, b);
    if (fault != 7 || !last) arch::warpgroup_commit();
    if (fault == 10 && last) sums[1][2] += 1.0F;
    if (fault == 6) release(step);
    if (fault != 14 || arch::lane() != 9) arch::warpgroup_wait<1>(sums);
    if (fault != 6 && step > 0) release(step - 1);
  }
  if (fault == 4) store_sums(sums, params);
  if (fault == 11) {
    arch::warpgroup_wait<0>(others);
  } else if (fault != 8 && fault != 18) {
    arch::warpgroup_wait<0>(sums);
  }
  if (fault != 6) release(params.steps - 1);
  if (fault != 4) store_sums(sums, params);
}

// One product of a warpgroup, whose b the threads store. Faults: 1 no fence_bulk_copies(); 2 no barrier; 3 no fence of
// the other warps; 4 a thread stores to b before it waits; 5 another warp stores there behind its own wait; 6 the sums
// are read in flight; 7 a is changed in flight; 8 a is written behind the fence; 9 the sums are, too; 10 a bulk copy to
// b begins behind a wait of one warp; 11 the same in flight; 12 the bulk copy begins behind a barrier, but nobody waits
// for it before the product.
ULL_KERNEL(stored_product, FaultParams, 128, 1) {
  unsigned char* b = arch::shared_memory();
  auto* barrier = reinterpret_cast<arch::Barrier*>(b + kStageBytes);
  const auto* source = static_cast<const arch::Vector4*>(params.b);
  const int me = arch::thread(), fault = params.fault;
  if (me == 0) {
    arch::barrier_init(barrier, 1);
    arch::fence_barrier_init();
  }
  arch::block_barrier();
  arch::wait_for_predecessor();
  const auto copy = [&] {
    arch::barrier_arrive_expect(barrier, kStageBytes);
    arch::bulk_copy(b, params.b, kStageBytes, barrier);
  };
  Sums sums;
  clear(sums);
  uint32_t a[4];
  load_a(a, params, 0, 64);
  if (fault == 12) {
    if (me == 0) copy();
    arch::block_barrier();
  } else if (me < kStageBytes / 16) {
    arch::store_shared(b + me * 16, source[me]);
  }
  if (fault != 1 && (fault != 3 || arch::warp() == 0)) arch::fence_bulk_copies();
  if (fault != 2) arch::block_barrier();
  arch::warpgroup_fence();
  if (fault == 8) a[0] = 0x3C003C00U;
  if (fault == 9) sums[0][0] = 1.0F;
  arch::warpgroup_mma(sums, a, operand_at(b));
  arch::warpgroup_commit();
  if (fault == 4 && me == 40) arch::store_shared(b + 64, source[0]);
  if (fault == 6) params.c[me] = sums[1][0];
  if (fault == 7) a[1] = 0;
  if (fault == 11 && me == 0) copy();
  arch::warpgroup_wait<0>(sums);
  if (fault == 5 && me == 40) arch::store_shared(b + 64, source[0]);
  if (fault == 10 && me == 0) copy();
  arch::block_barrier();
  // Now it may be overwritten: by threads, and when they have fenced by copies.
  if (me == 77) arch::store_shared(b, source[0]);
  arch::fence_bulk_copies();
  arch::block_barrier();
  if (me == 0 && fault < 10) copy();
  arch::barrier_wait(barrier, 0);
  store_sums(sums, params);
}

// A product without its wait for the warps' other half: faults of descriptors and of the block. Faults: 1 k_stride is
// no multiple of 16; 2 n_stride is too large; 3 the address is not aligned; 4 nor in shared memory; 5 core matrices
// overlap along k; 6 along n; 7 the last one lies outside; 8 swizzled patterns overlap along n; 9 a base offset; 10 bit
// 15; 11 a swizzled row is not the pattern's first; 12 the last pattern lies outside.
ULL_KERNEL(described_product, FaultParams, 128, 1) {
  arch::wait_for_predecessor();
  const unsigned char* shared = arch::shared_memory();
  const int fault = params.fault;
  Sums sums;
  clear(sums);
  uint32_t a[4] = {};
  const unsigned char* first = fault == 3 ? shared + 8 : fault == 4 ? shared - 16 : fault == 11 ? shared + 32 : shared;
  const uint32_t k_stride = fault == 1 ? 136 : fault == 5 ? 64 : 128;
  const uint32_t n_stride = fault == 2 ? 1U << 18 : fault == 6 ? 0 : fault == 7 ? 272 : fault == 12 ? 512 : 256;
  const uint64_t swizzle = fault == 8 ? 1 : fault == 12 ? 2 : fault == 11 ? 3 : 0;
  const uint64_t more = swizzle << 62 | (fault == 9 ? 1ULL << 50 : fault == 10 ? 1ULL << 15 : 0);
  const uint64_t b = arch::core_matrices(first, k_stride, n_stride) | more;
  arch::warpgroup_fence();
  arch::warpgroup_mma(sums, a, b);
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(sums);
}

// A warpgroup is 128 threads from a multiple of 128 on.
ULL_KERNEL(fenced_warps, FaultParams, 192, 1) {
  arch::wait_for_predecessor();
  if (arch::thread() >= params.steps) return;
  arch::warpgroup_fence();
}
