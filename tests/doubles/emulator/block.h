// Thread blocks under emulation: their threads are fibers, of which one runs at a time until it meets a barrier, a
// warp collective, an mbarrier or an atomic; who runs next is drawn from the launch's seed. One block runs after
// another, or all at once where they wait for each other. One launch at a time in a process (launch() holds a lock), so
// all state is global.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "launcher.h"
#include "records.h"

namespace ull::emulator {

inline constexpr int kMostThreads = 1024;
inline constexpr int kWarpLanes = 32;
inline constexpr int kMostWarps = kMostThreads / kWarpLanes;
inline constexpr int kNamedBarriers = 16;  // 0 is block_barrier()

enum class Wait : uint8_t { kNone, kCollective, kBarrier, kCopies, kPredecessor, kDevice };

struct Warp;
struct Block;

struct Thread {
  Fiber fiber;
  int index;  // in the block
  int lane;
  Warp* warp;
  bool waited;  // has called wait_for_predecessor()
  Wait wait;    // what it waits for, for messages; with:
  Site site;
  const uint64_t* barrier;  // kCopies: the mbarrier
  const uint32_t* count;    // kDevice: the arrivals that are awaited
  uint32_t parity;          // kCopies: the phase awaited; kBarrier: the barrier's id; kDevice: how many arrivals
};

enum class Collective : uint8_t { kWarpBarrier, kShuffle, kShuffleXor, kBallot, kMma };

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

// A named barrier of the block.
struct Barrier {
  int arrived = 0;
  int count = 0;
  Site site{};                        // of the last arrival
  uint32_t waiting[kMostWarps] = {};  // lanes
  uint32_t came[kMostWarps] = {};     // those and the ones that only arrived
  Handover handed;                    // by the latter
};

struct BulkCopy {
  unsigned char* shared;
  const unsigned char* global;
  uint32_t bytes;
  uint64_t* barrier;
  Site site;
};

struct Region {
  void* address;
  uint64_t bytes;
};

struct Block {
  int x, y;
  uint16_t number;  // of the grid, modulo 2^16
  int live;         // threads that have not ended
  bool waited;
  bool released;
  unsigned char* shared;
  std::vector<BulkCopy> copies;
  std::map<const uint64_t*, Mbarrier> mbarriers;
  std::shared_ptr<Order> order;  // of its threads, and:
  std::vector<Word> shadow;      // of its shared memory, by word, where kernels report what they access
  uint32_t runnable_warps;
  Barrier barriers[kNamedBarriers];
  Warp warps[kMostWarps];
  Thread thread[kMostThreads];
};

// The launch under way.
struct Grid {
  const char* kernel;
  const void* params;
  uint64_t params_bytes;
  void (*body)(const void* params);
  bool meets;     // its blocks wait for each other: all of them run at once
  bool complete;  // and all have asked for the predecessor's results
  int grid_x, grid_y;
  int threads;
  uint32_t shared_bytes;
  uint64_t random;
  Fiber launcher;
  std::string error;            // of the first failure
  std::vector<Block*> blocks;   // that run: one, or all
  std::vector<Region> written;  // by the predecessor: 0xFF until the block has called wait_for_predecessor()
  std::vector<std::vector<unsigned char>> hidden_contents;  // of `written`, until then
  std::vector<Region> constants;                            // that no kernel writes
  std::vector<Region> host_reads;                           // once store_release_system() has told the host
  std::vector<UllPrefetch> prefetches;                      // that were asked for
};

extern Grid grid;
extern Block* block;  // whose thread runs
extern Thread* self;  // the thread that runs

// Runs grid.blocks, whose positions and shared memory have been filled in; false with grid.error set if that failed.
bool run_blocks();
void show_hidden_regions();

// Ends the launch with an error that says where.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_at(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

uint32_t draw();  // 32 random bits
void wake(Thread& thread);
void suspend(Wait wait, Site site);  // until somebody wakes this thread
void let_others_run();
// One time in eight. For operations whose order between threads is not fixed.
void maybe_let_others_run();

// What this lane brings to its next collective: filled in before meet_warp().
Operand& my_operand();
// Meets the other lanes of the warp. Returns all lanes' operands (for mma: with the results in c), which stay valid
// until this lane's next collective.
const Operand* meet_warp(Collective collective, Site site);
void meet_barrier(int id, int count, Site site);
void arrive_barrier(int id, int count, Site site);
void predecessor_complete(Site site);
void arrive_device(uint32_t* count, uint32_t by);
void await_device(const uint32_t* count, uint32_t at_least, Site site);

// Bulk copies (copies.cpp).
void perform_one_copy();      // a random one of those under way
void maybe_perform_copies();  // now and then

void multiply(Operand (&operands)[kWarpLanes]);  // mma.cpp

}  // namespace ull::emulator
