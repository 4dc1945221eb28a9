// A block's threads, and what a kernel asks of the emulator on behalf of the one that runs: all that emulated_arch.h
// needs. Every kernel is compiled dozens of times, and parsing the C++ library's containers would take as long as
// compiling it: there are none here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fiber.h"

namespace ull::emulator {

// A line of a kernel, for messages.
struct Site {
  const char* file;
  int line;
};

inline constexpr int kMostThreads = 1024;
inline constexpr int kWarpLanes = 32;
inline constexpr int kMostWarps = kMostThreads / kWarpLanes;

enum class Wait : uint8_t { kNone, kCollective, kBarrier, kCluster, kCopies, kPredecessor, kDevice };

struct Warp;
struct Block;

struct Thread {
  Fiber fiber;
  int index;  // in the block
  int lane;
  Warp* warp;
  bool waited;          // has called wait_for_predecessor()
  bool meets_in_order;  // at a cluster's barrier
  Wait wait;            // what it waits for, for messages; with:
  Site site;
  const uint64_t* barrier;  // kCopies: the mbarrier
  const uint32_t* count;    // kDevice: the arrivals that are awaited
  uint32_t parity;          // kCopies: the phase awaited; kBarrier: the barrier's id; kDevice: how many arrivals
};

enum class Collective : uint8_t { kWarpBarrier, kShuffle, kShuffleXor, kBallot, kMma, kWarpgroupWait, kClusterBarrier };

// What one lane brings to a collective and takes from it.
struct Operand {
  uint64_t value;
  uint32_t a[4];
  uint32_t b[2];
  float c[4];
};

struct Warp {
  Block* block;
  int index;
  uint32_t runnable;  // one bit per lane
  uint32_t exited;
  uint32_t arrived;  // at the collective under way:
  Collective collective;
  Site site;
  // Two sets, used in turn: a lane may bring operands to the next collective while others still read this one's
  // results.
  Operand operands[2][kWarpLanes];
  int turn;
};

extern Thread* self;  // the thread that runs

// Of the block and the grid that it runs in. (pure: until the next of the operations below)
#define ULL_PURE __attribute__((pure))
ULL_PURE int block_x();
ULL_PURE int block_y();
ULL_PURE int grid_x();
ULL_PURE int grid_y();
ULL_PURE int threads();
ULL_PURE int cluster_rank();
ULL_PURE unsigned char* shared_memory();
#undef ULL_PURE

// Ends the launch with an error that says where.
[[noreturn]] void fail_at(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// One time in eight. For operations whose order between threads is not fixed.
void maybe_let_others_run();

// What this lane brings to its next collective: filled in before meet_warp().
Operand& my_operand();
// Meets the other lanes of the warp. Returns all lanes' operands (for mma: with the results in c), which stay valid
// until this lane's next collective.
const Operand* meet_warp(Collective collective, Site site);
void meet_barrier(int id, int count, Site site);
void arrive_barrier(int id, int count, Site site);
void meet_cluster(bool in_order, Site site);  // what came before it is seen behind it, or not
void predecessor_complete(Site site);
void arrive_device(uint32_t* count, uint32_t by);
void await_device(const uint32_t* count, uint32_t at_least, Site site);
void release_dependents();

// mbarriers, and the bulk copies that complete on them (copies.cpp).
void init_mbarrier(uint64_t* barrier, int arrivals, Site site);
void fence_mbarriers();  // that this thread has initialised
void invalidate_mbarrier(uint64_t* barrier, Site site);
void arrive_mbarrier(uint64_t* barrier, uint32_t bytes, Site site);
void arrive_mbarrier_in(int rank, uint64_t* barrier, Site site);  // of the block of that rank in the cluster
void wait_mbarrier(const uint64_t* barrier, uint32_t parity, Site site);
void begin_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Site site);
// As a bulk copy of a word to the block of that rank in the cluster.
void begin_store_in(int rank, void* shared, uint32_t word, uint64_t* barrier, Site site);
// To each block of the cluster whose bit is in `ranks`.
void begin_multicast(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint32_t ranks, Site site);
void prefetch(const void* global, uint32_t bytes, Site site);  // reads it: what cannot be read must not be fetched

// Products of warpgroups (warpgroup.cpp).
uint64_t describe_core_matrices(const void* shared, uint32_t k_stride, uint32_t n_stride, Site site);
void fence_products(Site site);
enum class Factors : uint8_t { kF16, kE4m3 };  // of a product: 16 of f16 for each output, or 32 of e4m3
// c: [groups][4], a: [4].
void begin_product(Factors factors, bool begins, float* c, int groups, const uint32_t* a, uint64_t b, Site site);
void commit_products(Site site);
void wait_for_products(int pending, float* c, int groups, Site site);

// What happened before what (order.cpp).
void fence_order();          // fence_device()
void fence_copies_order();   // fence_bulk_copies()
void fence_sources_order();  // fence_bulk_sources()

// Who loaded and stored what (shadow.cpp).
void watch_atomic(const void* address, uint32_t bytes, const void* instruction);
void watch_past_l1(const void* address, uint32_t bytes, const void* instruction);  // of a load
void publish(uint64_t* address, uint64_t value);                                   // store_release_system()
uint64_t read_from_host(const uint64_t* address);                                  // load_acquire_system()

}  // namespace ull::emulator
