// Products of warpgroups beside those of warps, for tests/kernels/test_warpgroup.py.
#include "arch.cuh"

namespace arch = ull::arch;

struct ProductParams {
  const uint16_t* a;    // [steps, 64 * warpgroups, 16] f16
  const uint16_t* b;    // [steps, columns, 16] f16: of each column its 16 values of k
  float* by_warps;      // [64 * warpgroups, columns], added to, by mma()
  float* by_warpgroup;  // the same, by warpgroup_mma()
  int32_t steps;
  int32_t k_stride, n_stride;  // bytes from one core matrix to the next in shared memory
};

// The lane's fragments: in arch::mma's words g = lane / 4 and t = lane % 4.
ULL_DEVICE uint32_t pair_at(const uint16_t* values) { return *reinterpret_cast<const uint32_t*>(values); }
ULL_DEVICE void load_a(uint32_t (&a)[4], const uint16_t* rows) {
  const uint16_t* at = rows + arch::lane() / 4 * 16 + arch::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) a[i] = pair_at(at + i % 2 * 8 * 16 + i / 2 * 8);
}
ULL_DEVICE void load_b(uint32_t (&b)[2], const uint16_t* columns) {
  const uint16_t* at = columns + arch::lane() / 4 * 16 + arch::lane() % 4 * 2;
  for (int i = 0; i < 2; ++i) b[i] = pair_at(at + i * 8);
}
template <int kGroups>
ULL_DEVICE float* sum_at(float* sums, int group, int i) {
  const int row = arch::warp() * 16 + arch::lane() / 4 + i / 2 * 8;
  return sums + row * 8 * kGroups + group * 8 + arch::lane() % 4 * 2 + i % 2;
}

// b of a step as core matrices: a column's 8 values of k are one of their rows of 16 bytes. No loop, no branch: with
// one among products in flight, the assembler would make them wait for each other.
template <int kGroups>
ULL_DEVICE void store_b(const ProductParams& params, int step, unsigned char* stage) {
  constexpr int kRows = 2 * 8 * kGroups;
  const auto* b = reinterpret_cast<const arch::Vector4*>(params.b + step * 8 * kGroups * 16);
#pragma unroll
  for (int first = 0; first < kRows; first += 128) {
    const int i = first + arch::thread(), column = i / 2, half = i % 2;
    unsigned char* core = stage + half * params.k_stride + column / 8 * params.n_stride;
    if (arch::thread() < 128 && i < kRows) arch::store_shared(core + column % 8 * 16, b[i]);
  }
}

template <int kGroups>
ULL_DEVICE void load_sums(float (&sums)[kGroups][4], float* from) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) sums[i / 4][i % 4] = *sum_at<kGroups>(from, i / 4, i % 4);
}
template <int kGroups>
ULL_DEVICE void store_sums(const float (&sums)[kGroups][4], float* to) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) *sum_at<kGroups>(to, i / 4, i % 4) = sums[i / 4][i % 4];
}

template <int kGroups>
ULL_DEVICE void multiply_by_warps(const ProductParams& params) {
  float sums[kGroups][4];
  load_sums(sums, params.by_warps);
#pragma unroll 1
  for (int step = 0; step < params.steps; ++step) {
    uint32_t a[4];
    load_a(a, params.a + (step * arch::threads() / 2 + arch::warp() * 16) * 16);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t b[2];
      load_b(b, params.b + (step * kGroups + group) * 8 * 16);
      arch::mma(sums[group], a, b);
    }
  }
  store_sums(sums, params.by_warps);
}

// One of the two stages in shared memory, each of which holds b of a step.
template <int kGroups>
ULL_DEVICE unsigned char* stage_at(const ProductParams& params, int i) {
  return arch::shared_memory() + i * (params.k_stride + (kGroups - 1) * params.n_stride + 128);
}
ULL_DEVICE uint64_t b_at(const ProductParams& params, const unsigned char* stage) {
  return arch::core_matrices(stage, static_cast<uint32_t>(params.k_stride), static_cast<uint32_t>(params.n_stride));
}
template <int kGroups>
ULL_DEVICE void bring_step(const ProductParams& params, int step, unsigned char* stage, uint32_t (&a)[4]) {
  load_a(a, params.a + (step * arch::threads() / 2 + arch::warp() * 16) * 16);
  store_b<kGroups>(params, step, stage);
  arch::fence_bulk_copies();
  arch::block_barrier();
}

// Steps are even, and at least two. One product is in flight while the next one's operands are loaded; each of two
// stages in shared memory holds every other b.
template <int kGroups>
ULL_DEVICE void multiply_by_warpgroups(const ProductParams& params) {
  float sums[kGroups][4];
  load_sums(sums, params.by_warpgroup);
  uint32_t a[2][4];
  int step = 0;
  do {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned char* stage = stage_at<kGroups>(params, i);
      arch::warpgroup_wait<1>(sums);
      arch::block_barrier();  // all warps have multiplied what is in this stage
      bring_step<kGroups>(params, step + i, stage, a[i]);
      arch::warpgroup_fence();
      arch::warpgroup_mma(sums, a[i], b_at(params, stage));
      arch::warpgroup_commit();
    }
    step += 2;
  } while (step < params.steps);
  arch::warpgroup_wait<0>(sums);
  store_sums(sums, params.by_warpgroup);
}

// Two steps, of which the first product begins the sums: whatever they were.
template <int kGroups>
ULL_DEVICE void begin_sums(const ProductParams& params) {
  float sums[kGroups][4];
  load_sums(sums, params.by_warpgroup);
  uint32_t a[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) bring_step<kGroups>(params, i, stage_at<kGroups>(params, i), a[i]);
  arch::warpgroup_fence();
  arch::warpgroup_mma<arch::kBegins>(sums, a[0], b_at(params, stage_at<kGroups>(params, 0)));
  arch::warpgroup_mma(sums, a[1], b_at(params, stage_at<kGroups>(params, 1)));
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(sums);
  store_sums(sums, params.by_warpgroup);
}

// Of e4m3, 32 values of k in a step, each step waited for: a [steps, 64, 32], b [steps, columns, 32].
template <int kGroups>
ULL_DEVICE void multiply_e4m3(const ProductParams& params) {
  float sums[kGroups][4];
  load_sums(sums, params.by_warpgroup);
  const int g = arch::warp() * 16 + arch::lane() / 4, t = arch::lane() % 4;
#pragma unroll 1
  for (int step = 0; step < params.steps; ++step) {
    const auto* rows = reinterpret_cast<const unsigned char*>(params.a) + step * 64 * 32;
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = *reinterpret_cast<const uint32_t*>(rows + (g + i % 2 * 8) * 32 + i / 2 * 16 + 4 * t);
    }
    const auto* b = reinterpret_cast<const arch::Vector4*>(params.b) + step * 8 * kGroups * 2;
    for (int i = arch::thread(); i < 2 * 8 * kGroups; i += arch::threads()) {
      const int column = i / 2;
      unsigned char* core = arch::shared_memory() + i % 2 * params.k_stride + column / 8 * params.n_stride;
      arch::store_shared(core + column % 8 * 16, b[i]);
    }
    arch::fence_bulk_copies();
    arch::block_barrier();
    arch::warpgroup_fence();
    arch::warpgroup_mma_e4m3(sums, a,
                             arch::core_matrices(arch::shared_memory(), static_cast<uint32_t>(params.k_stride),
                                                 static_cast<uint32_t>(params.n_stride)));
    arch::warpgroup_commit();
    arch::warpgroup_wait<0>(sums);
    arch::block_barrier();
  }
  store_sums(sums, params.by_warpgroup);
}

struct SwizzledParams {
  const uint16_t* a;           // [steps, 64, 16] f16
  const arch::Vector4* image;  // b of all steps as it lies in shared memory, from a multiple of 1024 on
  float* sums;                 // [64, 32]
  uint64_t layout;             // of descriptors: strides and swizzle
  int32_t pieces;              // of the image, 16 bytes each
  int32_t steps, step_bytes;   // from a step's b to the next one's
  int32_t overwritten;         // piece that is, by itself negated, while the first product is in flight; -1: none
};

ULL_DEVICE void multiply_swizzled(const SwizzledParams& params) {
  constexpr uint32_t kUnit = 1024;  // of the largest pattern
  unsigned char* shared = arch::shared_memory();
  shared += (kUnit - arch::shared_address(shared) % kUnit) % kUnit;
  for (int i = arch::thread(); i < params.pieces; i += arch::threads()) {
    arch::store_shared(shared + 16 * i, params.image[i]);
  }
  arch::fence_bulk_copies();
  arch::block_barrier();
  float sums[4][4];
  load_sums(sums, params.sums);
#pragma unroll 1
  for (int step = 0; step < params.steps; ++step) {
    uint32_t a[4];
    load_a(a, params.a + (step * 64 + arch::warp() * 16) * 16);
    arch::warpgroup_fence();
    arch::warpgroup_mma(sums, a, params.layout | arch::core_matrices(shared + step * params.step_bytes, 0, 0));
    arch::warpgroup_commit();
    if (step == 0 && params.overwritten >= 0 && arch::thread() == 0) {
      arch::Vector4 piece = params.image[params.overwritten];
      for (uint32_t& word : piece.word) word = ~word;
      arch::store_shared(shared + 16 * params.overwritten, piece);
    }
    arch::warpgroup_wait<0>(sums);
  }
  store_sums(sums, params.sums);
}

#if ULL_WARPGROUP_MMA
ULL_KERNEL(swizzled_products_4, SwizzledParams, 128, 1) {
  arch::wait_for_predecessor();
  multiply_swizzled(params);
}
ULL_KERNEL(e4m3_products_1, ProductParams, 128, 1) {
  arch::wait_for_predecessor();
  multiply_e4m3<1>(params);
}
ULL_KERNEL(e4m3_products_16, ProductParams, 128, 1) {
  arch::wait_for_predecessor();
  multiply_e4m3<16>(params);
}
ULL_KERNEL(begun_products_8, ProductParams, 256, 1) {
  arch::wait_for_predecessor();
  begin_sums<8>(params);
}
#define PRODUCTS(groups)                                 \
  ULL_KERNEL(products_##groups, ProductParams, 256, 1) { \
    arch::wait_for_predecessor();                        \
    multiply_by_warps<groups>(params);                   \
    multiply_by_warpgroups<groups>(params);              \
  }
PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(4)
PRODUCTS(8)
PRODUCTS(16)
PRODUCTS(32)
#undef PRODUCTS
#endif
