// The software side of ull/kernels/arch.cuh: every name of its CUDA branch with the same meaning, for the emulator of
// tests/doubles/emulator (see block.h for how a block runs, thread.h for what is asked of it). Kernels include
// arch.cuh, never this.
//
// It is stricter than the chip: all 32 lanes must reach the same line for a warp collective, a barrier that is never
// met is an error, and so is a block that ends without wait_for_predecessor(). Addresses of 16-byte accesses are
// checked; mbarriers are fenced before bulk copies see them, and bulk copies waited for before their block ends; for
// clusters see cluster.h. What threads do between two of the operations below is never interleaved: that a barrier or a
// fence is missing there shows where kernels are compiled to report their loads and stores (shadow.h), whatever the
// order.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <type_traits>

#include "numbers.h"
#include "thread.h"

extern "C" float fmaf(float a, float b, float c) noexcept;  // all that kernels need of <cmath>

#define ULL_DEVICE inline
// Functions whose own loads and stores are not the kernel's.
#define ULL_UNSEEN __attribute__((no_sanitize("thread")))
#define ULL_OFFSETOF(Type, member) __builtin_offsetof(Type, member)

#define ULL_KERNEL(name, Params, threads, blocks_per_sm) \
  ULL_EMULATED_KERNEL(name, Params, threads, blocks_per_sm, false, 1, 1)
#define ULL_GRID_KERNEL(name, Params, threads) ULL_EMULATED_KERNEL(name, Params, threads, 1, true, 1, 1)
#define ULL_CLUSTER_KERNEL(name, Params, threads, cluster_y) \
  ULL_EMULATED_KERNEL(name, Params, threads, 1, false, 1, cluster_y)
#define ULL_ROW_CLUSTER_KERNEL(name, Params, threads, blocks_per_sm, cluster_x) \
  ULL_EMULATED_KERNEL(name, Params, threads, blocks_per_sm, false, cluster_x, 1)
#if ULL_TRACE
namespace ull::trace {
inline void wait_returned();
}
#define ULL_BODY(name, params)                            \
  {                                                       \
    ::ull::trace::begin();                                \
    name(params);                                         \
    ::ull::trace::end(::ull::trace::hash(#name), params); \
  }
#else
#define ULL_BODY(name, params) name(params)
#endif
#define ULL_EMULATED_KERNEL(name, Params, threads, blocks_per_sm, meets, cluster_x, cluster_y)                \
  static void name(const Params& params);                                                                     \
  static const ::ull::emulator::Registration ull_registration_##name(                                         \
      #name, sizeof(Params), threads, meets, cluster_x, cluster_y,                                            \
      [](const void* params) { ULL_BODY(name, *static_cast<const Params*>(params)); });                       \
  static_assert((threads) % 32 == 0 && (threads) <= 1024 && (blocks_per_sm) >= 1, "launch bounds of " #name); \
  static_assert((cluster_x) >= 1 && (cluster_x) <= 8, "clusters of " #name);                                  \
  static_assert((cluster_y) >= 1 && (cluster_y) <= 8, "clusters of " #name);                                  \
  static void name([[maybe_unused]] const Params& params)

namespace ull::emulator {

// Adds a kernel to the list that the launcher looks in. meets: its blocks wait for each other; cluster_x, cluster_y:
// blocks of a cluster, in a row or above one another.
struct Registration {
  Registration(const char* name, size_t params_bytes, int most_threads, bool meets, int cluster_x, int cluster_y,
               void (*body)(const void* params));
};

}  // namespace ull::emulator

// The caller's place in the kernel, as default arguments.
#define ULL_SITE_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define ULL_SITE \
  ::ull::emulator::Site { file, line }

namespace ull::arch {

// ---- who am I ---------------------------------------------------------------------------------------------------

ULL_UNSEEN inline int thread() { return emulator::self->index; }
ULL_UNSEEN inline int threads() { return emulator::threads(); }
ULL_UNSEEN inline int lane() { return emulator::self->lane; }
ULL_UNSEEN inline int warp() { return emulator::self->warp->index; }
ULL_UNSEEN inline int block_x() { return emulator::block_x(); }
ULL_UNSEEN inline int block_y() { return emulator::block_y(); }
ULL_UNSEEN inline int grid_x() { return emulator::grid_x(); }
ULL_UNSEEN inline int grid_y() { return emulator::grid_y(); }
ULL_UNSEEN inline int multiprocessor() { return (block_y() * grid_x() + block_x()) % 132; }
ULL_UNSEEN inline unsigned char* shared_memory() { return emulator::shared_memory(); }
inline uint32_t shared_address(const void* pointer) {  // as on the chip, the block's rank stands above its own bits
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulator::shared_memory()) +
         (static_cast<uint32_t>(emulator::cluster_rank()) << 24);
}

// ---- barriers ---------------------------------------------------------------------------------------------------

inline void block_barrier(ULL_SITE_PARAMETERS) { emulator::meet_barrier(0, 0, ULL_SITE); }
inline void named_barrier(int id, int count, ULL_SITE_PARAMETERS) {
  if (id == 0) emulator::fail_at(ULL_SITE, "named_barrier 0 is block_barrier()");
  emulator::meet_barrier(id, count, ULL_SITE);
}
inline void named_arrive(int id, int count, ULL_SITE_PARAMETERS) { emulator::arrive_barrier(id, count, ULL_SITE); }
inline void warp_barrier(ULL_SITE_PARAMETERS) { emulator::meet_warp(emulator::Collective::kWarpBarrier, ULL_SITE); }

ULL_UNSEEN inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_barrier(ULL_SITE_PARAMETERS) { emulator::meet_cluster(true, ULL_SITE); }
inline void cluster_start(ULL_SITE_PARAMETERS) { emulator::meet_cluster(false, ULL_SITE); }

template <int kWarps, int kStages, int kBytes>
inline void remark_ring() {}
ULL_UNSEEN inline void release_dependents() { emulator::release_dependents(); }
inline void wait_for_predecessor(ULL_SITE_PARAMETERS) {
  emulator::predecessor_complete(ULL_SITE);
#if ULL_TRACE
  trace::wait_returned();
#endif
}

inline void arrive_device(uint32_t* count, uint32_t by = 1) { emulator::arrive_device(count, by); }
inline void await_device(const uint32_t* count, uint32_t at_least, ULL_SITE_PARAMETERS) {
  emulator::await_device(count, at_least, ULL_SITE);
}

// ---- warp -------------------------------------------------------------------------------------------------------

template <typename T>
ULL_UNSEEN inline T exchange(T value, int source_lane, emulator::Collective collective, emulator::Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "what __shfl_sync takes");
  memcpy(&emulator::my_operand().value, &value, sizeof(T));
  const emulator::Operand* operands = emulator::meet_warp(collective, site);
  T result;
  memcpy(&result, &operands[source_lane & 31].value, sizeof(T));
  return result;
}
template <typename T>
inline T shuffle_xor(T value, int mask, ULL_SITE_PARAMETERS) {
  return exchange(value, lane() ^ mask, emulator::Collective::kShuffleXor, ULL_SITE);
}
template <typename T>
inline T shuffle(T value, int source_lane, ULL_SITE_PARAMETERS) {
  return exchange(value, source_lane, emulator::Collective::kShuffle, ULL_SITE);
}
ULL_UNSEEN inline uint32_t ballot(bool predicate, ULL_SITE_PARAMETERS) {
  emulator::my_operand().value = predicate ? 1 : 0;
  const emulator::Operand* operands = emulator::meet_warp(emulator::Collective::kBallot, ULL_SITE);
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<uint32_t>(operands[i].value) << i;
  return result;
}
ULL_UNSEEN inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }

// ---- tensor cores -----------------------------------------------------------------------------------------------

ULL_UNSEEN inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], ULL_SITE_PARAMETERS) {
  emulator::Operand& mine = emulator::my_operand();
  memcpy(mine.a, a, sizeof(a));
  memcpy(mine.b, b, sizeof(b));
  memcpy(mine.c, c, sizeof(c));
  memcpy(c, emulator::meet_warp(emulator::Collective::kMma, ULL_SITE)[lane()].c, sizeof(c));
}

// See arch.cuh. A product is computed when it is waited for; until then its accumulators are poisoned, and who changes
// them, its a or its b, or begins a bulk copy to its b, ends the launch (warpgroup.h).
#define ULL_WARPGROUP_MMA 1

inline uint64_t core_matrices(const void* shared, uint32_t k_stride, uint32_t n_stride, ULL_SITE_PARAMETERS) {
  return emulator::describe_core_matrices(shared, k_stride, n_stride, ULL_SITE);
}
template <int kRegisters>
inline void give_registers_up() {}
template <int kRegisters>
inline void want_registers() {}
inline void warpgroup_fence(ULL_SITE_PARAMETERS) { emulator::fence_products(ULL_SITE); }
inline void warpgroup_commit(ULL_SITE_PARAMETERS) { emulator::commit_products(ULL_SITE); }
template <int kPending, int kGroups>
ULL_UNSEEN inline void warpgroup_wait(float (&c)[kGroups][4], ULL_SITE_PARAMETERS) {
  static_assert(kPending >= 0, "groups of products");
  emulator::wait_for_products(kPending, c[0], kGroups, ULL_SITE);
}
inline constexpr bool kBegins = true;
template <bool kBegin = false, int kGroups>
ULL_UNSEEN inline void warpgroup_mma(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b, ULL_SITE_PARAMETERS) {
  static_assert(kGroups > 0 && kGroups <= 32 && (kGroups & (kGroups - 1)) == 0, "8, 16, 32, 64, 128 or 256 columns");
  emulator::begin_product(emulator::Factors::kF16, kBegin, c[0], kGroups, a, b, ULL_SITE);
}
template <bool kBegin = false, int kGroups>
ULL_UNSEEN inline void warpgroup_mma_e4m3(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b,
                                          ULL_SITE_PARAMETERS) {
  static_assert(kGroups > 0 && kGroups <= 32 && (kGroups & (kGroups - 1)) == 0, "8, 16, 32, 64, 128 or 256 columns");
  emulator::begin_product(emulator::Factors::kE4m3, kBegin, c[0], kGroups, a, b, ULL_SITE);
}

// ---- number formats ---------------------------------------------------------------------------------------------

ULL_UNSEEN inline void e4m3x4_to_f16x2(uint32_t four, uint32_t& low, uint32_t& high) {
  const auto two = [](uint32_t pair) {
    return emulator::kE4m3.f16[pair & 255U] | static_cast<uint32_t>(emulator::kE4m3.f16[pair >> 8 & 255U]) << 16;
  };
  low = two(four);
  high = two(four >> 16);
}
inline uint32_t f32x2_to_f16x2(float low, float high) {
  return emulator::f32_to_f16_saturating(low) | static_cast<uint32_t>(emulator::f32_to_f16_saturating(high)) << 16;
}
inline float f16_to_f32(uint16_t value) { return emulator::f16_to_f32(value); }
inline uint16_t f32_to_bf16(float value) { return emulator::f32_to_bf16(value); }
inline float bf16_to_f32(uint16_t value) { return emulator::bf16_to_f32(value); }
inline uint32_t low_halves(uint32_t first, uint32_t second) { return (first & 0xFFFFU) | second << 16; }
inline uint32_t high_halves(uint32_t first, uint32_t second) { return first >> 16 | (second & 0xFFFF0000U); }
inline uint32_t f32x2_to_e4m3x2(float low, float high) {
  return emulator::f32_to_e4m3_saturating(low) | static_cast<uint32_t>(emulator::f32_to_e4m3_saturating(high)) << 8;
}
inline uint32_t float_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline float bits_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float reciprocal_sqrt(float value) { return 1.0F / __builtin_sqrtf(value); }
inline float reciprocal(float value) { return 1.0F / value; }
inline float divide(float a, float b) { return a / b; }
inline float fast_exp2(float x) { return emulator::normal_or_zero(__builtin_exp2f(x)); }
inline float fast_reciprocal(float x) { return emulator::normal_or_zero(1.0F / emulator::normal_or_zero(x)); }

// ---- memory -----------------------------------------------------------------------------------------------------

struct alignas(16) Vector4 {  // 16 bytes
  uint32_t word[4];
};
struct alignas(8) Vector2 {  // 8 bytes
  uint32_t word[2];
};

inline void check_vector(const void* address, emulator::Site site) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    emulator::fail_at(site, "misaligned 16-byte access at %p", address);
}
inline Vector4 load_stream(const void* address, ULL_SITE_PARAMETERS) {
  check_vector(address, ULL_SITE);
  Vector4 result;
  memcpy(&result, address, sizeof(result));
  return result;
}
ULL_UNSEEN inline Vector4 load_global(const void* address, ULL_SITE_PARAMETERS) {
  check_vector(address, ULL_SITE);
  emulator::watch_past_l1(address, sizeof(Vector4), __builtin_return_address(0));
  Vector4 result;
  memcpy(&result, address, sizeof(result));
  return result;
}
inline Vector4 load_shared(const void* address, ULL_SITE_PARAMETERS) { return load_stream(address, file, line); }
inline void store_shared(void* address, const Vector4& value, ULL_SITE_PARAMETERS) {
  check_vector(address, ULL_SITE);
  memcpy(address, &value, sizeof(value));
}
inline void store_global(void* address, const Vector4& value, ULL_SITE_PARAMETERS) {
  store_shared(address, value, file, line);
}
inline void store_global_if(bool stores, void* address, const Vector4& value, ULL_SITE_PARAMETERS) {
  if (stores) store_global(address, value, file, line);
}

template <typename T>
ULL_UNSEEN inline T change_atomically(T* address, T (*change)(T old, T value), T value) {
  emulator::maybe_let_others_run();
  emulator::watch_atomic(address, sizeof(T), __builtin_return_address(0));
  const T old = *address;  // one thread runs at a time
  *address = change(old, value);
  return old;
}
template <typename T>
inline T added(T old, T value) {
  return static_cast<T>(old + value);
}
template <typename T>
inline T larger(T old, T value) {
  return old > value ? old : value;
}
inline uint32_t atomic_add(uint32_t* address, uint32_t value) { return change_atomically(address, added, value); }
inline uint64_t atomic_add(uint64_t* address, uint64_t value) { return change_atomically(address, added, value); }
inline uint32_t atomic_max(uint32_t* address, uint32_t value) { return change_atomically(address, larger, value); }
inline uint64_t atomic_max(uint64_t* address, uint64_t value) { return change_atomically(address, larger, value); }
inline uint32_t atomic_or(uint32_t* address, uint32_t value) {
  return change_atomically(address, +[](uint32_t old, uint32_t bits) { return old | bits; }, value);
}

inline void fence_device() { emulator::fence_order(); }
inline void store_release_system(uint64_t* address, uint64_t value) { emulator::publish(address, value); }
inline uint64_t load_acquire_system(const uint64_t* address) { return emulator::read_from_host(address); }
inline void pause() { sched_yield(); }
inline uint64_t timer_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000U + static_cast<uint64_t>(now.tv_nsec);
}
inline uint64_t clock_ticks() { return timer_ns(); }

// ---- bulk copies into shared memory, completing on an mbarrier ----------------------------------------------------

using Barrier = uint64_t;

inline void barrier_init(Barrier* barrier, int arrivals, ULL_SITE_PARAMETERS) {
  emulator::init_mbarrier(barrier, arrivals, ULL_SITE);
}
inline void fence_barrier_init() { emulator::fence_mbarriers(); }
inline void barrier_invalidate(Barrier* barrier, ULL_SITE_PARAMETERS) {
  emulator::invalidate_mbarrier(barrier, ULL_SITE);
}
inline void fence_bulk_copies() { emulator::fence_copies_order(); }
inline void barrier_arrive(Barrier* barrier, ULL_SITE_PARAMETERS) { emulator::arrive_mbarrier(barrier, 0, ULL_SITE); }
inline void barrier_arrive_in(int rank, Barrier* barrier, bool when = true, ULL_SITE_PARAMETERS) {
  if (when) emulator::arrive_mbarrier_in(rank, barrier, ULL_SITE);
}
inline void store_async_in(int rank, float* shared, float value, Barrier* barrier, ULL_SITE_PARAMETERS) {
  emulator::begin_store_in(rank, shared, float_bits(value), barrier, ULL_SITE);
}
inline void barrier_arrive_expect(Barrier* barrier, uint32_t bytes, ULL_SITE_PARAMETERS) {
  emulator::arrive_mbarrier(barrier, bytes, ULL_SITE);
}
inline void barrier_wait(Barrier* barrier, uint32_t parity, ULL_SITE_PARAMETERS) {
  emulator::wait_mbarrier(barrier, parity, ULL_SITE);
}
inline void fence_bulk_sources() { emulator::fence_sources_order(); }
inline void bulk_copy(void* shared, const void* global, uint32_t bytes, Barrier* barrier, ULL_SITE_PARAMETERS) {
  emulator::begin_copy(shared, global, bytes, barrier, ULL_SITE);
}
inline void bulk_copy_stream(void* shared, const void* global, uint32_t bytes, Barrier* barrier, ULL_SITE_PARAMETERS) {
  emulator::begin_copy(shared, global, bytes, barrier, ULL_SITE);
}
inline void bulk_copy_multicast(void* shared, const void* global, uint32_t bytes, Barrier* barrier, uint32_t ranks,
                                ULL_SITE_PARAMETERS) {
  emulator::begin_multicast(shared, global, bytes, barrier, ranks, ULL_SITE);
}
inline void bulk_prefetch_stream(const void* global, uint32_t bytes, ULL_SITE_PARAMETERS) {
  emulator::prefetch(global, bytes, ULL_SITE);
}

}  // namespace ull::arch

#undef ULL_SITE
#undef ULL_SITE_PARAMETERS
