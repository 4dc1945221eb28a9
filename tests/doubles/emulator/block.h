// Thread blocks under emulation: their threads are fibers, of which one runs at a time until it meets a barrier, a
// warp collective, an mbarrier or an atomic; who runs next is drawn from the launch's seed. One block runs after
// another, or all at once where they wait for each other, as those of a cluster do. One launch at a time in a process
// (launch() holds a lock), so all state is global.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launcher.h"
#include "records.h"
#include "thread.h"

namespace ull::emulator {

inline constexpr int kNamedBarriers = 16;  // 0 is block_barrier()

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
  uint32_t phase;  // of it, counted from 1
  Site site;
};

struct Region {
  void* address;
  uint64_t bytes;
};

struct Warpgroups;  // see warpgroup.h

struct Block {
  int x, y;
  uint16_t number;  // of the grid, modulo 2^16
  int live;         // threads that have not ended
  bool waited;
  bool released;
  unsigned char* shared;
  int at_cluster;                // of the cluster's first block: threads that have come to cluster_barrier(),
  uint32_t meetings;             // and how often all have met there
  std::vector<BulkCopy> copies;  // under way
  std::vector<BulkCopy> landed;  // that nobody has waited for yet
  std::deque<uint32_t> words;    // that others of the cluster have stored: what such copies read
  std::map<const uint64_t*, Mbarrier> mbarriers;
  std::shared_ptr<Warpgroups> warpgroups;  // null: none of its threads has come to an operation of theirs
  std::shared_ptr<Order> order;            // of its threads, and:
  std::vector<Word> shadow;                // of its shared memory, by word, where kernels report what they access
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
  int cluster;    // blocks of a cluster, which run at once too
  bool in_row;    // side by side, instead of one above the other
  bool complete;  // all blocks that run have asked for the predecessor's results
  int grid_x, grid_y;
  int threads;
  uint32_t shared_bytes;
  uint64_t random;
  Fiber launcher;
  std::string error;            // of the first failure
  std::vector<Block*> blocks;   // that run: one, those of a cluster by their ranks, or all
  std::vector<Region> written;  // by the predecessor: 0xFF until the block has called wait_for_predecessor()
  std::vector<std::vector<unsigned char>> hidden_contents;  // of `written`, until then
  std::vector<Region> constants;                            // that no kernel writes
  std::vector<Region> earlier;                              // that kernels wrote which have ended
  std::vector<Region> host_reads;                           // once store_release_system() has told the host
  std::vector<UllPrefetch> prefetches;                      // that were asked for
};

extern Grid grid;
extern Block* block;  // whose thread runs

// Runs grid.blocks, whose positions and shared memory have been filled in; false with grid.error set if that failed.
bool run_blocks();
void show_hidden_regions();

// Ends the launch; fail_at() says where.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

uint32_t draw();  // 32 random bits
void wake(Thread& thread);
void suspend(Wait wait, Site site);  // until somebody wakes this thread
void let_others_run();

// Bulk copies (copies.cpp).
void perform_one_copy();      // a random one of those under way
void maybe_perform_copies();  // now and then

// The tensor cores' product (mma.cpp).
void multiply(Operand (&operands)[kWarpLanes]);
// The operands of a whole warp, as matrices; c is added to.
struct Matrices {
  alignas(64) uint16_t a[16][16];
  alignas(64) uint16_t b[16][8];  // [k][column]
  alignas(64) float c[16][8];
};
void set_a(Matrices& m, int lane, const uint32_t (&a)[4]);  // a lane's fragment
void multiply(Matrices& m);

const char* file_name(const char* path);  // without its folders

}  // namespace ull::emulator
