// Whether the products of warpgroups add as those of warps do, bit for bit, on this chip: no document says so, and that
// a prompt's bits do not depend on how it is read stands on it. A block multiplies random operands both ways, for eight
// tokens and for as many as a tile has, in chains that are added to zeros, as the linear layers do, and in chains that
// begin their sums, as attention does, and counts outputs that differ.
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

// Two f16 of any sign and mantissa, with exponents of 2^-6 .. 2^9, or a quarter of them 2^-14 .. 2^1 and subnormal:
// sums lose bits, cancel, and stay finite.
ULL_DEVICE uint32_t operand_pair(uint32_t seed) {
  const uint32_t bits = mixed(seed) & 0xBFFFBFFFU;
  return mixed(~seed) % 4 == 0 ? bits : bits + 0x24002400U;
}

// Outputs of the warp that differ: a chain for kGroups times eight tokens, by operands in shared memory ([product] the
// core matrices of both halves of 16 columns), against warps' products.
template <int kGroups>
ULL_DEVICE uint32_t differences_of(const uint32_t (&a)[kChain][4], unsigned char* shared, uint32_t flaw) {
  constexpr int kHalfBytes = kGroups * kCoreBytes;  // of a product
  float sums[kGroups][4], begun[kGroups][4];
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) sums[i / 4][i % 4] = 0.0F;
  const auto b_of = [&](int k) { return arch::core_matrices(shared + 2 * k * kHalfBytes, kHalfBytes, kCoreBytes); };
  uint32_t first[4] = {a[0][0] ^ flaw, a[0][1], a[0][2], a[0][3]};
  arch::warpgroup_fence();
  arch::warpgroup_mma(sums, first, b_of(0));
#pragma unroll
  for (int k = 1; k < kChain; ++k) arch::warpgroup_mma(sums, a[k], b_of(k));
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(sums);
  arch::warpgroup_fence();
  arch::warpgroup_mma<arch::kBegins>(begun, first, b_of(0));
#pragma unroll
  for (int k = 1; k < kChain; ++k) arch::warpgroup_mma(begun, a[k], b_of(k));
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(begun);
  uint32_t differences = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float expected[4] = {};
#pragma unroll
    for (int k = 0; k < kChain; ++k) {
      const auto* b = reinterpret_cast<const uint32_t*>(shared + 2 * k * kHalfBytes + group * kCoreBytes);
      arch::mma(expected, a[k], {b[arch::lane()], b[kHalfBytes / 4 + arch::lane()]});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      differences += arch::float_bits(sums[group][i]) != arch::float_bits(expected[i]) ? 1U : 0U;
      differences += arch::float_bits(begun[group][i]) != arch::float_bits(expected[i]) ? 1U : 0U;
    }
  }
  return differences;
}

}  // namespace

ULL_KERNEL(ull_chunk_probe, ChunkProbeParams, kThreads, 1) {
  constexpr int kMostGroups = kChunkTile / kCoreTokens;
  arch::release_dependents();
  arch::wait_for_predecessor();
  unsigned char* shared = arch::shared_memory();
  const int me = arch::thread();
  const uint32_t flaw = params.flaw != 0 ? 1U : 0U;
  uint32_t differences = 0;
#pragma unroll 1
  for (int round = 0; round < params.rounds; ++round) {
    const uint32_t seed = mixed(static_cast<uint32_t>(arch::block_x() * params.rounds + round)) ^ params.seed;
    for (int i = me; i < kChain * 2 * kMostGroups * kCoreBytes / 4; i += kThreads) {
      reinterpret_cast<uint32_t*>(shared)[i] = operand_pair(seed + static_cast<uint32_t>(i));
    }
    arch::fence_bulk_copies();
    arch::block_barrier();
    uint32_t a[kChain][4];
#pragma unroll
    for (int k = 0; k < kChain; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][i] = operand_pair(~seed + static_cast<uint32_t>((me * kChain + k) * 4 + i));
    }
    differences += differences_of<1>(a, shared, flaw) + differences_of<kMostGroups>(a, shared, flaw);
    arch::block_barrier();  // nobody reads the operands any more
  }
  if (differences != 0) arch::atomic_add(params.differences, differences);
}

}  // namespace ull::gpu
