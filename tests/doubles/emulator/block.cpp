#include "block.h"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "cluster.h"
#include "copies.h"
#include "order.h"
#include "shadow.h"
#include "warpgroup.h"

namespace ull::emulator {

__attribute__((visibility("hidden"))) Grid grid;
__attribute__((visibility("hidden"))) Block* block;
__attribute__((visibility("hidden"))) Thread* self;

namespace {

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kWarpBarrier:
      return "warp_barrier";
    case Collective::kShuffle:
      return "shuffle";
    case Collective::kShuffleXor:
      return "shuffle_xor";
    case Collective::kBallot:
      return "ballot";
    case Collective::kMma:
      return "mma";
    case Collective::kWarpgroupWait:
      return "warpgroup_wait";
    case Collective::kClusterBarrier:
      return "cluster_barrier";
  }
  return "";
}

std::string describe(const Thread& thread) {
  char text[200] = "";
  const char* file = thread.site.file == nullptr ? "" : file_name(thread.site.file);
  if (thread.wait == Wait::kCollective) {
    snprintf(text, sizeof(text), "%s at %s:%d", name_of(thread.warp->collective), file, thread.site.line);
  } else if (thread.wait == Wait::kBarrier && thread.parity == 0) {
    snprintf(text, sizeof(text), "block_barrier at %s:%d", file, thread.site.line);
  } else if (thread.wait == Wait::kBarrier) {
    const Barrier& barrier = thread.warp->block->barriers[thread.parity];
    snprintf(text, sizeof(text), "named_barrier %u at %s:%d (%d of %d arrived)", thread.parity, file, thread.site.line,
             barrier.arrived, barrier.count);
  } else if (thread.wait == Wait::kCluster) {
    Block& mine = *thread.warp->block;
    snprintf(text, sizeof(text), "cluster_barrier at %s:%d (%d of %d arrived)", file, thread.site.line,
             block_of_rank(0, mine).at_cluster, live_in_cluster(mine));
  } else if (thread.wait == Wait::kCopies) {
    snprintf(text, sizeof(text), "barrier_wait at %s:%d for parity %u of the mbarrier at shared + %td", file,
             thread.site.line, thread.parity,
             reinterpret_cast<const unsigned char*>(thread.barrier) - thread.warp->block->shared);
  } else if (thread.wait == Wait::kPredecessor) {
    snprintf(text, sizeof(text), "wait_for_predecessor at %s:%d, which not all blocks have called", file,
             thread.site.line);
  } else if (thread.wait == Wait::kDevice) {
    snprintf(text, sizeof(text), "await_device at %s:%d (%u of %u arrived)", file, thread.site.line, *thread.count,
             thread.parity);
  }
  return text;
}

[[noreturn]] void fail_deadlock() {
  std::map<std::string, std::pair<int, int>> waits;  // description -> threads, first thread
  int ended = 0;
  for (const Block* each : grid.blocks) {
    for (int i = 0; i < grid.threads; ++i) {
      const Thread& thread = each->thread[i];
      if ((thread.warp->exited >> thread.lane & 1U) != 0) {
        ++ended;
        continue;
      }
      auto& entry = waits.try_emplace(describe(thread), 0, i).first->second;
      ++entry.first;
    }
  }
  std::string text;
  for (const auto& [description, count] : waits) {
    text += "; " + std::to_string(count.first) + " threads (first: " + std::to_string(count.second) + ") wait in " +
            description;
  }
  fail("deadlock: %d threads have ended%s", ended, text.c_str());
}

// One of the bits of `mask`, which is not 0; five random bits decide.
int pick_bit(uint32_t mask, uint32_t random) {
  const int rotation = static_cast<int>(random & 31U);
  return (std::countr_zero(std::rotr(mask, rotation)) + rotation) & 31;
}

// Mostly a lane of the same warp: stays in the cache, and warps do run apart from each other on the chip.
Thread* draw_thread() {
  if (block->runnable_warps == 0) return nullptr;
  const uint32_t random = draw();
  const Warp* warp = self->warp;
  if (warp->block != block || warp->runnable == 0 || (random & 15U) == 0) {
    warp = &block->warps[pick_bit(block->runnable_warps, random >> 4)];
  }
  return &block->thread[warp->index * kWarpLanes + pick_bit(warp->runnable, random >> 9)];
}

// Of the block `block`; its copies go on if nothing else can.
Thread* next_thread_of_block() {
  if (block->live == 0) return nullptr;
  maybe_perform_copies();
  Thread* next = draw_thread();
  while (next == nullptr && !block->copies.empty()) {
    perform_one_copy();
    next = draw_thread();
  }
  return next;
}

// Mostly of the same block. If there is none, `block` is the one of `self` as before.
Thread* next_thread() {
  if (grid.blocks.size() == 1) return next_thread_of_block();
  const uint32_t random = draw();
  if ((random & 63U) != 0) {
    if (Thread* next = next_thread_of_block()) return next;
  }
  for (size_t i = 0; i < grid.blocks.size(); ++i) {
    block = grid.blocks[((random >> 6) + i) % grid.blocks.size()];
    if (Thread* next = next_thread_of_block()) return next;
  }
  block = self->warp->block;
  return nullptr;
}

void park(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.runnable &= ~(1U << thread.lane);
  if (warp.runnable == 0) block->runnable_warps &= ~(1U << warp.index);
}

void wake_lanes(Warp& warp, uint32_t lanes) {
  warp.runnable |= lanes;
  if (warp.runnable != 0) warp.block->runnable_warps |= 1U << warp.index;
}

// `last`: the thread that came last, if it did not end instead.
void release_barrier(Barrier& barrier, const Thread* last) {
  std::vector<int> met;
  for (int i = 0; reports && i < grid.threads; ++i) {
    if ((barrier.waiting[i / kWarpLanes] >> i % kWarpLanes & 1U) != 0) met.push_back(i);
  }
  if (reports && last != nullptr) met.push_back(last->index);
  if (!met.empty()) threads_meet(met, barrier.handed);
  for (int w = 0; w < grid.threads / kWarpLanes; ++w) wake_lanes(block->warps[w], barrier.waiting[w]);
  barrier = {};
}

void lanes_meet(const Warp& warp) {
  std::vector<int> lanes(kWarpLanes);
  std::iota(lanes.begin(), lanes.end(), warp.index * kWarpLanes);
  threads_meet(lanes, {});
}

void thread_main() {
  fiber_entered();
  grid.body(grid.params);
  end_products();
  Thread& thread = *self;
  Warp& warp = *thread.warp;
  warp.exited |= 1U << thread.lane;
  park(thread);
  --block->live;
  if (warp.arrived != 0) {
    fail_at(warp.site, "lane %d ends while other lanes of warp %d wait for it in %s", thread.lane, warp.index,
            name_of(warp.collective));
  }
  Barrier& all = block->barriers[0];
  if (all.arrived != 0 && all.arrived == block->live) release_barrier(all, nullptr);
  end_in_cluster();
  Thread* next = next_thread();
  if (next == nullptr) {
    for (const Block* each : grid.blocks) {
      if (each->live != 0) fail_deadlock();
    }
  } else {
    self = next;
  }
  thread.fiber.is_done = true;
  fiber_leave(thread.fiber, next == nullptr ? grid.launcher : next->fiber);
}

void prepare_threads() {
  block->runnable_warps = 0;
  block->live = grid.threads;
  for (Barrier& barrier : block->barriers) barrier = {};
  for (int w = 0; w < grid.threads / kWarpLanes; ++w) {
    Warp& warp = block->warps[w];
    warp.block = block;
    warp.index = w;
    warp.runnable = warp.exited = warp.arrived = 0;
    warp.turn = 0;
    wake_lanes(warp, ~0U);
  }
  for (int i = 0; i < grid.threads; ++i) {
    Thread& thread = block->thread[i];
    thread.index = i;
    thread.lane = i % kWarpLanes;
    thread.warp = &block->warps[i / kWarpLanes];
    thread.wait = Wait::kNone;
    thread.waited = false;
    fiber_prepare(thread.fiber, thread_main);
  }
}

void hide_regions() {
  grid.hidden_contents.resize(grid.written.size());
  for (size_t i = 0; i < grid.written.size(); ++i) {
    auto* data = static_cast<unsigned char*>(grid.written[i].address);
    grid.hidden_contents[i].assign(data, data + grid.written[i].bytes);
    memset(data, 0xFF, grid.written[i].bytes);
  }
}

std::string format_text(const char* format, va_list arguments) {
  char text[4000];
  vsnprintf(text, sizeof(text), format, arguments);
  return text;
}

void record_error(Site site, const std::string& text) {
  grid.error =
      std::string(grid.kernel) + ", block (" + std::to_string(block->x) + ", " + std::to_string(block->y) + ")";
  if (self != nullptr) {
    grid.error += ", warp " + std::to_string(self->warp->index) + ", lane " + std::to_string(self->lane);
  }
  if (site.file != nullptr) grid.error += ", " + std::string(file_name(site.file)) + ":" + std::to_string(site.line);
  grid.error += ": ";
  grid.error += text;
}

}  // namespace

const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

int block_x() { return block->x; }
int block_y() { return block->y; }
int grid_x() { return grid.grid_x; }
int grid_y() { return grid.grid_y; }
int threads() { return grid.threads; }
unsigned char* shared_memory() { return block->shared; }
void release_dependents() { block->released = true; }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_error({nullptr, 0}, format_text(format, arguments));
  va_end(arguments);
  fiber_leave(self->fiber, grid.launcher);
}

void fail_at(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_error(site, format_text(format, arguments));
  va_end(arguments);
  fiber_leave(self->fiber, grid.launcher);
}

uint32_t draw() {  // PCG32 (O'Neill 2014)
  grid.random = grid.random * 6364136223846793005ULL + 1442695040888963407ULL;
  const auto shifted = static_cast<uint32_t>(((grid.random >> 18) ^ grid.random) >> 27);
  return std::rotr(shifted, static_cast<int>(grid.random >> 59));
}

void wake(Thread& thread) { wake_lanes(*thread.warp, 1U << thread.lane); }

void let_others_run() {
  Thread* next = next_thread();
  if (next == nullptr) fail_deadlock();
  if (next == self) return;
  Thread* previous = std::exchange(self, next);
  fiber_switch(previous->fiber, next->fiber);
}

void maybe_let_others_run() {
  if ((draw() & 7U) == 0) let_others_run();
}

void suspend(Wait wait, Site site) {
  Thread& thread = *self;
  thread.wait = wait;
  thread.site = site;
  park(thread);
  let_others_run();
  thread.wait = Wait::kNone;
}

Operand& my_operand() {
  const Thread& thread = *self;
  return thread.warp->operands[thread.warp->turn][thread.lane];
}

const Operand* meet_warp(Collective collective, Site site) {
  Thread& thread = *self;
  Warp& warp = *thread.warp;
  if (warp.exited != 0) {
    fail_at(site, "%s, but lane %d of the warp has ended", name_of(collective), std::countr_zero(warp.exited));
  }
  if (warp.arrived == 0) {
    warp.collective = collective;
    warp.site = site;
  } else if (warp.collective != collective || warp.site.line != site.line) {
    fail_at(site, "%s, but lane %d of the warp is in %s at %s:%d", name_of(collective), std::countr_zero(warp.arrived),
            name_of(warp.collective), file_name(warp.site.file), warp.site.line);
  }
  Operand(&operands)[kWarpLanes] = warp.operands[warp.turn];
  warp.arrived |= 1U << thread.lane;
  if (warp.arrived != ~0U) {
    suspend(Wait::kCollective, site);
    return operands;
  }
  if (collective == Collective::kMma) multiply(operands);
  if (collective == Collective::kWarpgroupWait) finish_products(operands, site);
  if (collective == Collective::kWarpBarrier && reports) lanes_meet(warp);
  warp.arrived = 0;
  warp.turn ^= 1;
  wake_lanes(warp, ~0U);
  let_others_run();
  return operands;
}

namespace {

// Counts this thread.
Barrier& come_to_barrier(int id, int count, Site site) {
  Barrier& barrier = block->barriers[id & (kNamedBarriers - 1)];
  if (id != 0) {
    if (id < 1 || id >= kNamedBarriers) fail_at(site, "named_barrier %d: ids are 1 to %d", id, kNamedBarriers - 1);
    if (count <= 0 || count % kWarpLanes != 0 || count > grid.threads) {
      fail_at(site, "named_barrier %d of %d threads: must be a multiple of 32, at most %d", id, count, grid.threads);
    }
    if (barrier.arrived != 0 && barrier.count != count) {
      fail_at(site, "named_barrier %d of %d threads, but others are there for one of %d", id, count, barrier.count);
    }
  }
  uint32_t& came = barrier.came[self->warp->index];
  if ((came >> self->lane & 1U) != 0) {
    fail_at(site, "thread %d arrives twice at named_barrier %d, where %d of %d are", self->index, id, barrier.arrived,
            count);
  }
  came |= 1U << self->lane;
  barrier.count = count;
  barrier.site = site;
  ++barrier.arrived;
  return barrier;
}

}  // namespace

void meet_barrier(int id, int count, Site site) {
  Barrier& barrier = come_to_barrier(id, count, site);
  if (barrier.arrived == (id == 0 ? block->live : count)) {
    release_barrier(barrier, self);
    let_others_run();
    return;
  }
  barrier.waiting[self->warp->index] |= 1U << self->lane;
  self->parity = static_cast<uint32_t>(id);
  suspend(Wait::kBarrier, site);
}

// A release: those who wait there acquire it.
void arrive_barrier(int id, int count, Site site) {
  if (id == 0) fail_at(site, "named_arrive 0 is nobody's");
  Barrier& barrier = come_to_barrier(id, count, site);
  hand_over(barrier.handed);
  if (barrier.arrived == count) release_barrier(barrier, nullptr);
  maybe_let_others_run();
}

// Where blocks run at once, the predecessor is complete when all of them have asked for it.
void predecessor_complete(Site site) {
  block->waited = self->waited = true;
  if (reports) my_order().waited = true;
  if (grid.blocks.size() > 1 && !grid.complete) {
    for (const Block* each : grid.blocks) {
      if (!each->waited) return suspend(Wait::kPredecessor, site);
    }
    grid.complete = true;
    for (Block* each : grid.blocks) {
      for (int i = 0; i < grid.threads; ++i) {
        if (each->thread[i].wait == Wait::kPredecessor) wake(each->thread[i]);
      }
    }
  }
  show_hidden_regions();
  let_others_run();
}

void arrive_device(uint32_t* count, uint32_t by) {
  maybe_let_others_run();
  release_order(count);
  *count += by;
  for (Block* each : grid.blocks) {
    for (int i = 0; i < grid.threads; ++i) {
      Thread& thread = each->thread[i];
      if (thread.wait == Wait::kDevice && thread.count == count && *count >= thread.parity) wake(thread);
    }
  }
}

void await_device(const uint32_t* count, uint32_t at_least, Site site) {
  if (!grid.meets) fail_at(site, "await_device in a kernel that is no ULL_GRID_KERNEL");
  if (*count >= at_least) {
    maybe_let_others_run();
  } else {
    self->count = count;
    self->parity = at_least;
    suspend(Wait::kDevice, site);
  }
  await_order(count);
}

void show_hidden_regions() {
  for (size_t i = 0; i < grid.hidden_contents.size(); ++i) {
    memcpy(grid.written[i].address, grid.hidden_contents[i].data(), grid.written[i].bytes);
  }
  grid.hidden_contents.clear();
}

bool run_blocks() {
  grid.error.clear();
  grid.complete = false;
  for (Block* each : grid.blocks) {
    block = each;
    block->waited = block->released = false;
    block->at_cluster = 0;
    block->meetings = 0;
    block->copies.clear();
    block->landed.clear();
    block->words.clear();
    block->mbarriers.clear();
    block->warpgroups.reset();
    prepare_threads();
    begin_order(*block);
    begin_shadow(*block);
  }
  hide_regions();
  self = &block->thread[0];
  self = draw_thread();
  fiber_switch(grid.launcher, self->fiber);
  if (!grid.error.empty()) return false;
  self = nullptr;
  for (Block* each : grid.blocks) {
    block = each;
    const Barrier* open = std::find_if(std::begin(block->barriers), std::end(block->barriers),
                                       [](const Barrier& barrier) { return barrier.arrived != 0; });
    if (const Site* site = unfinished_copy()) {
      record_error(*site, "the block ends while a bulk copy is under way: nobody has waited for it");
    } else if (const Site* arrival = unfinished_arrival()) {
      record_error(*arrival, "the block ends, and has not waited for this arrival of another block of the cluster");
    } else if (open != std::end(block->barriers)) {
      record_error(open->site, "the block ends with " + std::to_string(open->arrived) + " of " +
                                   std::to_string(open->count) + " threads at named_barrier " +
                                   std::to_string(open - block->barriers));
    } else if (!block->waited) {
      record_error({nullptr, 0}, "the block ends without wait_for_predecessor()");
    }
    if (!grid.error.empty()) return false;
  }
  return true;
}

}  // namespace ull::emulator
