// Whether the products of warpgroups add as those of warps do, bit for bit, on this chip: no document says so, and that
// a prompt's bits do not depend on how it is read stands on it. A block multiplies random operands both ways, in chains
// that are added to zeros, as the linear layers do, and in chains that begin their sums, as attention does, and counts
// outputs that differ.
#include "chunk/layout.cuh"

namespace ull::gpu {
namespace {

constexpr int kThreads = 128;  // a warpgroup
constexpr int kChain = 8;      // products whose sums go into one another

// 32 bits that look random (Murmur3's finaliser).
ULL_DEVICE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  return x ^ (x >> 16);
}

// Two f16 of any sign and mantissa, the exponents 2^-6 .. 2^9: sums lose bits, cancel, and stay finite.
ULL_DEVICE uint32_t operand_pair(uint32_t seed) { return (mixed(seed) & 0xBFFFBFFFU) + 0x24002400U; }

}  // namespace

ULL_KERNEL(ull_chunk_probe, ChunkProbeParams, kThreads, 4) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  unsigned char* shared = arch::shared_memory();  // of each product two core matrices
  const int lane = arch::lane(), me = arch::thread();
  uint32_t differences = 0;
#pragma unroll 1
  for (int round = 0; round < params.rounds; ++round) {
    const uint32_t seed = mixed(static_cast<uint32_t>(arch::block_x() * params.rounds + round)) ^ params.seed;
    for (int i = me; i < kChain * 2 * kCoreBytes / 4; i += kThreads) {
      reinterpret_cast<uint32_t*>(shared)[i] = operand_pair(seed + static_cast<uint32_t>(i));
    }
    arch::fence_bulk_copies();
    arch::block_barrier();
    float expected[4] = {}, sums[1][4] = {}, begun[1][4];
    uint32_t a[kChain][4];
#pragma unroll
    for (int k = 0; k < kChain; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][i] = operand_pair(~seed + static_cast<uint32_t>((me * kChain + k) * 4 + i));
      const auto* b = reinterpret_cast<const uint32_t*>(shared + 2 * k * kCoreBytes);
      arch::mma(expected, a[k], {b[lane], b[kCoreBytes / 4 + lane]});
    }
    if (params.flaw != 0) a[0][0] ^= 1U;
    const auto b_of = [&](int k) { return arch::core_matrices(shared + 2 * k * kCoreBytes, kCoreBytes, kCoreBytes); };
    arch::warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kChain; ++k) arch::warpgroup_mma(sums, a[k], b_of(k));
    arch::warpgroup_mma<arch::kBegins>(begun, a[0], b_of(0));
#pragma unroll
    for (int k = 1; k < kChain; ++k) arch::warpgroup_mma(begun, a[k], b_of(k));
    arch::warpgroup_commit();
    arch::warpgroup_wait<0>(sums);
    arch::warpgroup_wait<0>(begun);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      differences += arch::float_bits(sums[0][i]) != arch::float_bits(expected[i]) ? 1U : 0U;
      differences += arch::float_bits(begun[0][i]) != arch::float_bits(expected[i]) ? 1U : 0U;
    }
    arch::block_barrier();  // nobody reads the operands any more
  }
  if (differences != 0) arch::atomic_add(params.differences, differences);
}

}  // namespace ull::gpu
