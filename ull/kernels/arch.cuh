// What the kernels need of the chip, and the only file with PTX (sm_90a). With ULL_EMULATOR the same names come from
// tests/doubles/emulator, which runs a block's threads as fibers on the CPU. Kernels use nothing of CUDA but what is
// here.
#pragma once

#include <cstdint>

#ifndef ULL_TRACE
#define ULL_TRACE 0  // see trace.cuh
#endif
#ifdef ULL_EMULATOR
#include "emulated_arch.h"
#else

#define ULL_DEVICE __device__ __forceinline__
#if ULL_TRACE
namespace ull::trace {
ULL_DEVICE void wait_returned();
}
#endif
// NVRTC has no <cstddef>, and its older versions no __builtin_offsetof either.
#define ULL_OFFSETOF(Type, member) __INTADDR__(&((Type*)0)->member)

// Defines a kernel that takes one parameter struct: ULL_KERNEL(name, Params, threads, blocks_per_sm) { ... params ... }
#define ULL_KERNEL(name, Params, threads, blocks_per_sm) \
  ULL_DEFINE_KERNEL(name, Params, __launch_bounds__(threads, blocks_per_sm))
#if ULL_TRACE
#define ULL_DEFINE_KERNEL(name, Params, bounds)                                   \
  ULL_DEVICE void name##_traced(const Params& params);                            \
  extern "C" __global__ void bounds name(const __grid_constant__ Params params) { \
    ::ull::trace::begin();                                                        \
    name##_traced(params);                                                        \
    ::ull::trace::end(::ull::trace::hash(#name), params);                         \
  }                                                                               \
  ULL_DEVICE void name##_traced(const Params& params)
#else
#define ULL_DEFINE_KERNEL(name, Params, bounds) \
  extern "C" __global__ void bounds name(const __grid_constant__ Params params)
#endif

// The same for a kernel whose blocks wait for each other by await_device(): the grid is at most one block per
// multiprocessor, so that all run at once.
#define ULL_GRID_KERNEL(name, Params, threads) ULL_KERNEL(name, Params, threads, 1)

// The same for a kernel of clusters: cluster_y blocks, one above the other in the grid, run at once on neighbouring
// multiprocessors and may reach each other's shared memory. The grid's y is a multiple of cluster_y (at most 8, which
// is portable). The size is the kernel's own: a launch names none, and may have every other attribute.
#define ULL_CLUSTER_KERNEL(name, Params, threads, cluster_y) \
  ULL_DEFINE_KERNEL(name, Params, __cluster_dims__(1, cluster_y, 1) __launch_bounds__(threads, 1))
// The same of cluster_x blocks side by side: the grid's x is a multiple of it.
#define ULL_ROW_CLUSTER_KERNEL(name, Params, threads, blocks_per_sm, cluster_x) \
  ULL_DEFINE_KERNEL(name, Params, __cluster_dims__(cluster_x, 1, 1) __launch_bounds__(threads, blocks_per_sm))

namespace ull::arch {

// ---- who am I ---------------------------------------------------------------------------------------------------

ULL_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
ULL_DEVICE int threads() { return static_cast<int>(blockDim.x); }
ULL_DEVICE int lane() { return static_cast<int>(threadIdx.x & 31); }
ULL_DEVICE int warp() { return static_cast<int>(threadIdx.x >> 5); }
ULL_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
ULL_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
ULL_DEVICE int grid_x() { return static_cast<int>(gridDim.x); }
ULL_DEVICE int grid_y() { return static_cast<int>(gridDim.y); }
ULL_DEVICE int multiprocessor() {  // that the block runs on
  int value;
  asm volatile("mov.u32 %0, %smid;" : "=r"(value));
  return value;
}

// The block's dynamic shared memory, aligned to 128 bytes.
ULL_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char ull_shared[];
  return ull_shared;
}
// Where it lies in the window of shared memory, in bytes: what PTX takes for an address there.
ULL_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers ---------------------------------------------------------------------------------------------------

ULL_DEVICE void block_barrier() { __syncthreads(); }
// Of `count` threads (a multiple of 32) that name the same id (1 .. 15).
ULL_DEVICE void named_barrier(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
// The same for a warp that only arrives: what it did before is seen by those that wait there.
ULL_DEVICE void named_arrive(int id, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }
ULL_DEVICE void warp_barrier() { __syncwarp(); }

// Between blocks of a launch: what came before arrive_device() (also other threads', seen through a barrier) is seen by
// what comes behind a fence_device() behind the await_device() of another thread. `count` only grows while somebody
// waits. The wait itself orders nothing: each acquire would empty L1, and one is enough.
ULL_DEVICE void arrive_device(uint32_t* count, uint32_t by = 1) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(by) : "memory");
}
ULL_DEVICE void await_device(const uint32_t* count, uint32_t at_least) {
  uint32_t value;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  } while (value < at_least);
}

// Of clusters (ULL_CLUSTER_KERNEL, ULL_ROW_CLUSTER_KERNEL), which are Hopper's and later. The block's place in its own,
// from 0 on; it is block_y(), or block_x(), modulo their size.
ULL_DEVICE int cluster_rank() {
  int value;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(value));
  return value;
}
// All threads of all blocks of the cluster meet, the lanes of a warp together, except those that have ended. What came
// before it is seen behind it, as with block_barrier(). It stands
// - behind fence_barrier_init(), before another block of the cluster may arrive on an mbarrier or copy to the block,
//   where cluster_start() is not enough;
// - at the end of a block that has not waited for all that others send it, arrivals too: these must not come later.
ULL_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same at the start of a kernel, behind fence_barrier_init(): of what came before it mbarriers alone are seen
// behind it, initialised. It waits for no store on its way to memory, as cluster_barrier() does.
ULL_DEVICE void cluster_start() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A remark in the kernel's PTX, and no instruction: each of so many warps has a ring of stages, which hold so many
// bytes of weights each. `make kernels-report` reads it.
template <int kWarps, int kStages, int kBytes>
ULL_DEVICE void remark_ring() {
  asm volatile("// ring: %0 warps, %1 stages, %2 bytes" ::"n"(kWarps), "n"(kStages), "n"(kBytes));
}

// Programmatic dependent launch: lets the next kernel's blocks start; waits for the previous kernel's results. Before
// the wait a kernel may read weights, which no kernel writes; and one that comes behind embed, whose launch does not
// overlap with begin() (ull/gpu/rounds.py says why that is enough), what begin() or an earlier round wrote: by
// load_global() or bulk copies, past L1. Nothing else, and nobody writes before it. Before Hopper kernels never
// overlap.
#if __CUDA_ARCH__ >= 900
ULL_DEVICE void release_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
ULL_DEVICE void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if ULL_TRACE
  trace::wait_returned();
#endif
}
#else
ULL_DEVICE void release_dependents() {}
ULL_DEVICE void wait_for_predecessor() {}
#endif

// ---- warp -------------------------------------------------------------------------------------------------------

// All 32 lanes take part.
template <typename T>
ULL_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFU, value, mask);
}
template <typename T>
ULL_DEVICE T shuffle(T value, int source_lane) {
  return __shfl_sync(0xFFFFFFFFU, value, source_lane);
}
ULL_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xFFFFFFFFU, predicate); }
ULL_DEVICE int count_bits(uint32_t bits) { return __popc(bits); }  // those that are 1

// ---- tensor cores -----------------------------------------------------------------------------------------------

// c[16 x 8] += a[16 x 16] * b[16 x 8], f16 operands, f32 accumulators. With g = lane / 4 and t = lane % 4:
//   a[0] = rows g,     k 2t, 2t+1      a[1] = rows g + 8, k 2t, 2t+1
//   a[2] = rows g,     k 2t+8, 2t+9    a[3] = rows g + 8, k 2t+8, 2t+9
//   b[0] = k 2t, 2t+1, column g        b[1] = k 2t+8, 2t+9, column g
//   c[0], c[1] = row g, columns 2t, 2t+1      c[2], c[3] = row g + 8, columns 2t, 2t+1
ULL_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- products of warpgroups ---------------------------------------------------------------------------------------
// wgmma, which Hopper alone has: for other architectures a kernel that uses it traps, unless it stands in an #if
// ULL_WARPGROUP_MMA. All 128 threads of a warpgroup (128 i .. 128 i + 127 of the block) take part in all of them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ULL_WARPGROUP_MMA 1
#else
#define ULL_WARPGROUP_MMA 0
#endif

// Describes an operand b in shared memory: core matrices of 8 columns (tokens) by 16 bytes (8 values of k), each 128
// contiguous bytes, a column's 16 bytes behind the one's before it; no swizzle. `shared`: the first one, aligned to 16.
// k_stride and n_stride: bytes from one core matrix to the next along k and along n, multiples of 16 below 2^18. A
// product takes two core matrices along k and kGroups along n.
//
// The PTX ISA (its chapter of wgmma, "Matrix Descriptor Format" and "Strides") calls b K-major: its "leading dimension
// byte offset" is without swizzle the one between the two columns of 16 bytes, which is k_stride; its "stride dimension
// byte offset" is the one from 8 rows of its transpose to the next 8, which is n_stride. All are in units of 16 bytes:
// bits 0 .. 13 address, 16 .. 29 leading, 32 .. 45 stride; 49 .. 51 (base offset) and 62 .. 63 (swizzle) are 0.
// An address is encoded as (x & 0x3FFFF) >> 4: in a cluster the bits above hold the block's rank.
// Another operand a multiple of 16 bytes further: the descriptor plus a sixteenth of them.
ULL_DEVICE uint64_t core_matrices(const void* shared, uint32_t k_stride, uint32_t n_stride) {
  return static_cast<uint64_t>((shared_address(shared) & 0x3FFFFU) >> 4) | static_cast<uint64_t>(k_stride >> 4) << 16 |
         static_cast<uint64_t>(n_stride >> 4) << 32;
}

inline constexpr bool kBegins = true;  // of warpgroup_mma()

#if ULL_WARPGROUP_MMA
// Moves registers between warpgroups, all four warps of one together: from now on its threads have so many each, a
// multiple of 8 from 24 to 240. Those that give some up do so first, those that want more wait for them.
template <int kRegisters>
ULL_DEVICE void give_registers_up() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
ULL_DEVICE void want_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Before the first product of a group, and behind what has written the a, or read or written the c, of any of them.
ULL_DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// What was begun since the last one is a group, which can be waited for.
ULL_DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are not finished, the last ones. Only then may c be touched, if no product of
// those adds to it, and every a of the groups that are finished. The compiler moves no access to c across it.
template <int kPending, int kGroups>
ULL_DEVICE void warpgroup_wait(float (&c)[kGroups][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
  }
}

// Four accumulators, and the names of the operands that they are.
#define ULL_C1(mode, i) mode(c[i][0]), mode(c[i][1]), mode(c[i][2]), mode(c[i][3])
#define ULL_C2(mode, i) ULL_C1(mode, i), ULL_C1(mode, i + 1)
#define ULL_C4(mode, i) ULL_C2(mode, i), ULL_C2(mode, i + 2)
#define ULL_C8(mode, i) ULL_C4(mode, i), ULL_C4(mode, i + 4)
#define ULL_C16(mode, i) ULL_C8(mode, i), ULL_C8(mode, i + 8)
#define ULL_C32(mode, i) ULL_C16(mode, i), ULL_C16(mode, i + 16)
#define ULL_NAMES_10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define ULL_NAMES_4 "%0,%1,%2,%3"
#define ULL_NAMES_8 ULL_NAMES_4 ",%4,%5,%6,%7"
#define ULL_NAMES_16 ULL_NAMES_10() ",%10,%11,%12,%13,%14,%15"
#define ULL_NAMES_30 ULL_NAMES_10() "," ULL_NAMES_10(1) "," ULL_NAMES_10(2)
#define ULL_NAMES_32 ULL_NAMES_30 ",%30,%31"
#define ULL_NAMES_60 ULL_NAMES_30 "," ULL_NAMES_10(3) "," ULL_NAMES_10(4) "," ULL_NAMES_10(5)
#define ULL_NAMES_64 ULL_NAMES_60 ",%60,%61,%62,%63"
#define ULL_NAMES_90 ULL_NAMES_60 "," ULL_NAMES_10(6) "," ULL_NAMES_10(7) "," ULL_NAMES_10(8)
#define ULL_NAMES_120 ULL_NAMES_90 "," ULL_NAMES_10(9) "," ULL_NAMES_10(10) "," ULL_NAMES_10(11)
#define ULL_NAMES_128 ULL_NAMES_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
// mode, adds: what the accumulators are to the product, and whether it adds to them. flags: neither a nor b is negated,
// and of f16, b is not transposed.
#define ULL_WGMMA(mode, types, adds, flags, groups, columns, registers, a0, a1, a2, a3, descriptor) \
  if constexpr (kGroups == groups) {                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns types " {" ULL_NAMES_##registers      \
                 "}, "                                                                              \
                 "{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #descriptor adds flags ";"              \
                 : ULL_C##groups(mode, 0)                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                             \
  }
#define ULL_WGMMAS(mode, types, adds, flags)                           \
  ULL_WGMMA(mode, types, adds, flags, 1, 8, 4, 4, 5, 6, 7, 8)          \
  ULL_WGMMA(mode, types, adds, flags, 2, 16, 8, 8, 9, 10, 11, 12)      \
  ULL_WGMMA(mode, types, adds, flags, 4, 32, 16, 16, 17, 18, 19, 20)   \
  ULL_WGMMA(mode, types, adds, flags, 8, 64, 32, 32, 33, 34, 35, 36)   \
  ULL_WGMMA(mode, types, adds, flags, 16, 128, 64, 64, 65, 66, 67, 68) \
  ULL_WGMMA(mode, types, adds, flags, 32, 256, 128, 128, 129, 130, 131, 132)
// An accumulator that is added to is read and written; one that begins is written alone, while operands are still read.
#define ULL_EITHER_WGMMA(types, flags)     \
  if constexpr (kBegin) {                  \
    ULL_WGMMAS("=&f", types, ", 0", flags) \
  } else {                                 \
    ULL_WGMMAS("+f", types, ", 1", flags)  \
  }

// c[64 x 8 kGroups] += a[64 x 16] * b[16 x 8 kGroups], f16 operands, f32 accumulators; with kBegins c = a * b, as
// though added to zeros. Warp w of the four has rows 16 w .. 16 w + 15: its a and each c[group] are the fragments of
// mma(), and so are the sums bit for bit. It is asynchronous: see warpgroup_wait(). What threads have stored where b
// lies needs their fence_bulk_copies(), then a barrier, before it; what bulk copies have brought only their mbarrier.
//
// Where the assembler cannot keep products in flight it waits for each, and its log says "serialized". NVRTC 13.5 does
// so where a branch or a loop stands between a wait for a part of them and the code that writes the next a: there one
// conditional instruction is fine, and a loop around it all must be entered at least once.
template <bool kBegin = false, int kGroups>
ULL_DEVICE void warpgroup_mma(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kGroups > 0 && kGroups <= 32 && (kGroups & (kGroups - 1)) == 0, "8, 16, 32, 64, 128 or 256 columns");
  ULL_EITHER_WGMMA("k16.f32.f16.f16", ", 1, 1, 0")
}
// The same of e4m3 operands, c[64 x 8 kGroups] += a[64 x 32] * b[32 x 8 kGroups], at twice the rate. A lane has, with
// g = lane / 4 and t = lane % 4, k = 4t .. 4t + 3 of row g, of row g + 8, and k = 16 + 4t .. of both; a core matrix of
// b 16 values of k. The sum keeps fewer bits than those of f16 (about 13 behind its largest term's, DeepSeek-V3, arXiv
// 2412.19437, 3.3.2): long ones are to be added up elsewhere, part by part.
template <bool kBegin = false, int kGroups>
ULL_DEVICE void warpgroup_mma_e4m3(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kGroups > 0 && kGroups <= 32 && (kGroups & (kGroups - 1)) == 0, "8, 16, 32, 64, 128 or 256 columns");
  ULL_EITHER_WGMMA("k32.f32.e4m3.e4m3", ", 1, 1")
}

#undef ULL_C1
#undef ULL_C2
#undef ULL_C4
#undef ULL_C8
#undef ULL_C16
#undef ULL_C32
#undef ULL_NAMES_10
#undef ULL_NAMES_4
#undef ULL_NAMES_8
#undef ULL_NAMES_16
#undef ULL_NAMES_30
#undef ULL_NAMES_32
#undef ULL_NAMES_60
#undef ULL_NAMES_64
#undef ULL_NAMES_90
#undef ULL_NAMES_120
#undef ULL_NAMES_128
#undef ULL_WGMMA
#undef ULL_WGMMAS
#undef ULL_EITHER_WGMMA
#else
template <int kRegisters>
ULL_DEVICE void give_registers_up() {}
template <int kRegisters>
ULL_DEVICE void want_registers() {}
ULL_DEVICE void warpgroup_fence() { asm volatile("trap;"); }
ULL_DEVICE void warpgroup_commit() { asm volatile("trap;"); }
template <int kPending, int kGroups>
ULL_DEVICE void warpgroup_wait(float (&c)[kGroups][4]) {
  asm volatile("trap;");
}
template <bool kBegin = false, int kGroups>
ULL_DEVICE void warpgroup_mma(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("trap;");
}
template <bool kBegin = false, int kGroups>
ULL_DEVICE void warpgroup_mma_e4m3(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("trap;");
}
#endif

// ---- number formats ---------------------------------------------------------------------------------------------
// Pairs are packed as on the chip: the first element in the low half.

// Four e4m3 -> two pairs of f16, exact.
ULL_DEVICE void e4m3x4_to_f16x2(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high)
      : "r"(four));
}
// Rounds to nearest even; beyond the range of f16 it saturates to +-65504. NaN stays NaN.
ULL_DEVICE uint32_t f32x2_to_f16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
ULL_DEVICE float f16_to_f32(uint16_t value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
}
ULL_DEVICE uint16_t f32_to_bf16(float value) {  // to nearest even
  uint16_t result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
ULL_DEVICE float bf16_to_f32(uint16_t value) { return __uint_as_float(static_cast<uint32_t>(value) << 16); }
// The low halves of two words, and the high ones: `second`'s in the high half.
ULL_DEVICE uint32_t low_halves(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x5410); }
ULL_DEVICE uint32_t high_halves(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x7632); }
// Two f32 -> two e4m3 (to nearest even, saturating to +-448), in the low 16 bits.
ULL_DEVICE uint32_t f32x2_to_e4m3x2(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}
ULL_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
ULL_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
// 1 / sqrt(value), 1 / value and a / b, correctly rounded, so that every machine agrees.
ULL_DEVICE float reciprocal_sqrt(float value) { return __fdiv_rn(1.0F, __fsqrt_rn(value)); }
ULL_DEVICE float reciprocal(float value) { return __fdiv_rn(1.0F, value); }
ULL_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
// 2^x and 1 / x, an instruction each where others take a dozen: within 2^-22 of the result, where the emulator rounds
// to nearest. Numbers below 2^-126 are 0, of what is given and of what comes. 2^0 is 1, NaN stays NaN.
ULL_DEVICE float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
ULL_DEVICE float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ---- memory -----------------------------------------------------------------------------------------------------

// A cache policy: createpolicy.fractional.L2::evict_first with fraction 1.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ULL;

struct alignas(16) Vector4 {  // 16 bytes
  uint32_t word[4];
};
struct alignas(8) Vector2 {  // 8 bytes
  uint32_t word[2];
};

// Read-only for the whole round and read once: keeps out of L1 and leaves L2 first.
ULL_DEVICE Vector4 load_stream(const void* address) {
  Vector4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address), "l"(kEvictFirst));
  return v;
}
// Written by an earlier kernel (or block): goes to L2, never to a stale L1 line.
ULL_DEVICE Vector4 load_global(const void* address) {
  Vector4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address)
               : "memory");
  return v;
}
// From shared memory.
ULL_DEVICE Vector4 load_shared(const void* address) { return *static_cast<const Vector4*>(address); }
ULL_DEVICE void store_shared(void* address, const Vector4& value) { *static_cast<Vector4*>(address) = value; }
ULL_DEVICE void store_global(void* address, const Vector4& value) { *static_cast<Vector4*>(address) = value; }
// If `stores`. Of an assignment behind a condition the compiler may make four, a word each.
ULL_DEVICE void store_global_if(bool stores, void* address, const Vector4& value) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.v4.u32 [%1], {%2,%3,%4,%5};\n}" ::"r"(uint32_t{stores}),
      "l"(address), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
      : "memory");
}

ULL_DEVICE uint32_t atomic_add(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
ULL_DEVICE uint64_t atomic_add(uint64_t* address, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
ULL_DEVICE uint32_t atomic_max(uint32_t* address, uint32_t value) { return atomicMax(address, value); }
ULL_DEVICE uint64_t atomic_max(uint64_t* address, uint64_t value) {
  return atomicMax(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
ULL_DEVICE uint32_t atomic_or(uint32_t* address, uint32_t value) { return atomicOr(address, value); }

// What came before it (also other threads', seen through a barrier) is visible on the device to whoever synchronises
// with what comes after it. __threadfence() would order more, and cost more.
ULL_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// To and from mapped host memory.
ULL_DEVICE void store_release_system(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
ULL_DEVICE uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
// Between two looks at what the host may write.
ULL_DEVICE void pause() { asm volatile("nanosleep.u32 20;"); }
ULL_DEVICE uint64_t timer_ns() {  // the device's nanosecond clock
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
ULL_DEVICE uint64_t clock_ticks() {  // of the multiprocessor, as fine as can be
  uint64_t value;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(value));
  return value;
}

// ---- bulk copies into shared memory, completing on an mbarrier ----------------------------------------------------

using Barrier = uint64_t;  // in shared memory, aligned to 8

// One thread initialises, then fence_barrier_init(), then all meet at block_barrier().
ULL_DEVICE void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
ULL_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// By one thread, when nobody waits any more: before its memory is used for anything else, or initialised again.
ULL_DEVICE void barrier_invalidate(Barrier* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// By every thread before a block_barrier(), after which bulk copies may write where threads have read or written.
ULL_DEVICE void fence_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
ULL_DEVICE void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives on the mbarrier that the block `rank` of the cluster, which may be the own one, has at the same place; if not
// `when`, it does nothing. The condition is the instructions' own: no branch, whatever the compiler makes of an if. Who
// waits there knows that this thread's loads of shared memory and its products have ended, so that bulk copies may
// write where they read. Stores it does not see: a release for other blocks would wait for the whole device.
ULL_DEVICE void barrier_arrive_in(int rank, Barrier* barrier, bool when = true) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      ".reg .b32 there;\n"
      "setp.ne.u32 arrives, %2, 0;\n"
      "@arrives mapa.shared::cluster.u32 there, %0, %1;\n"
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank), "r"(static_cast<uint32_t>(when))
      : "memory");
}
// Stores `value` at the same place in the block `rank` of the cluster, which may be the own one, and does not wait for
// it: there it completes, as a bulk copy of its bytes would, on the mbarrier at the same place.
ULL_DEVICE void store_async_in(int rank, float* shared, float value, Barrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [barrier];\n"
      "}" ::"r"(shared_address(shared)),
      "r"(shared_address(barrier)), "r"(rank), "r"(float_bits(value))
      : "memory");
}
// Arrives and announces `bytes` that bulk copies, or store_async_in(), will bring in this phase.
ULL_DEVICE void barrier_arrive_expect(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits until the phase of that parity (0 for the first) has completed.
ULL_DEVICE void barrier_wait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// By a thread that is about to start bulk copies of what an earlier kernel has stored.
ULL_DEVICE void fence_bulk_sources() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Copies `bytes` (a multiple of 16; both addresses aligned to 16) and counts them on the barrier.
ULL_DEVICE void bulk_copy(void* shared, const void* global, uint32_t bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// The same of what is read once, like weights: it leaves L2 first.
ULL_DEVICE void bulk_copy_stream(void* shared, const void* global, uint32_t bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// The same of what several blocks of a cluster read: it comes from L2 once, to the same place in each block `rank`
// whose bit 1 << rank is in `ranks`, and counts there on the mbarrier at the same place as `barrier`.
ULL_DEVICE void bulk_copy_multicast(void* shared, const void* global, uint32_t bytes, Barrier* barrier,
                                    uint32_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(ranks))
      : "memory");
}

// Has L2 fetch `bytes` (a multiple of 16, from an address aligned to 16) of what is read once, for a bulk copy that
// comes soon. Nothing completes, and nothing waits for it.
ULL_DEVICE void bulk_prefetch_stream(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global), "r"(bytes),
               "l"(kEvictFirst)
               : "memory");
}

}  // namespace ull::arch

#endif  // ULL_EMULATOR

#include "trace.cuh"
