#include "block.h"

#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace ull::emulator {

__attribute__((visibility("hidden"))) Block block;
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
  }
  return "";
}

const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

std::string describe(const Thread& thread) {
  char text[200] = "";
  const char* file = thread.site.file == nullptr ? "" : file_name(thread.site.file);
  if (thread.wait == Wait::kCollective) {
    snprintf(text, sizeof(text), "%s at %s:%d", name_of(thread.warp->collective), file, thread.site.line);
  } else if (thread.wait == Wait::kBarrier && thread.parity == 0) {
    snprintf(text, sizeof(text), "block_barrier at %s:%d", file, thread.site.line);
  } else if (thread.wait == Wait::kBarrier) {
    const Barrier& barrier = block.barriers[thread.parity];
    snprintf(text, sizeof(text), "named_barrier %u at %s:%d (%d of %d arrived)", thread.parity, file, thread.site.line,
             barrier.arrived, barrier.count);
  } else if (thread.wait == Wait::kCopies) {
    snprintf(text, sizeof(text), "barrier_wait at %s:%d for parity %u of the mbarrier at shared + %td", file,
             thread.site.line, thread.parity, reinterpret_cast<const unsigned char*>(thread.barrier) - block.shared);
  }
  return text;
}

[[noreturn]] void fail_deadlock() {
  std::map<std::string, std::pair<int, int>> waits;  // description -> threads, first thread
  int ended = 0;
  for (int i = 0; i < block.threads; ++i) {
    const Thread& thread = block.thread[i];
    if ((thread.warp->exited >> thread.lane & 1U) != 0) {
      ++ended;
      continue;
    }
    auto& entry = waits.try_emplace(describe(thread), 0, i).first->second;
    ++entry.first;
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
  if (block.runnable_warps == 0) return nullptr;
  const uint32_t random = draw();
  int warp = self->warp->index;
  if ((block.runnable_warps >> warp & 1U) == 0 || (random & 15U) == 0) {
    warp = pick_bit(block.runnable_warps, random >> 4);
  }
  return &block.thread[warp * kWarpLanes + pick_bit(block.warps[warp].runnable, random >> 9)];
}

Thread* next_thread() {
  maybe_perform_copies();
  Thread* next = draw_thread();
  while (next == nullptr && !block.copies.empty()) {
    perform_one_copy();
    next = draw_thread();
  }
  return next;
}

void park(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.runnable &= ~(1U << thread.lane);
  if (warp.runnable == 0) block.runnable_warps &= ~(1U << warp.index);
}

void wake_lanes(Warp& warp, uint32_t lanes) {
  warp.runnable |= lanes;
  if (warp.runnable != 0) block.runnable_warps |= 1U << warp.index;
}

void release_barrier(Barrier& barrier) {
  for (int w = 0; w < block.threads / kWarpLanes; ++w) {
    wake_lanes(block.warps[w], barrier.waiting[w]);
    barrier.waiting[w] = 0;
  }
  barrier.arrived = 0;
  barrier.count = 0;
}

void thread_main() {
  fiber_entered();
  block.body(block.params);
  Thread& thread = *self;
  Warp& warp = *thread.warp;
  warp.exited |= 1U << thread.lane;
  park(thread);
  --block.live;
  if (warp.arrived != 0) {
    fail_at(warp.site, "lane %d ends while other lanes of warp %d wait for it in %s", thread.lane, warp.index,
            name_of(warp.collective));
  }
  Barrier& all = block.barriers[0];
  if (all.arrived != 0 && all.arrived == block.live) release_barrier(all);
  Thread* next = next_thread();
  if (next == nullptr) {
    if (block.live != 0) fail_deadlock();
    fiber_leave(thread.fiber, block.launcher);
  }
  self = next;
  fiber_leave(thread.fiber, next->fiber);
}

void prepare_threads() {
  block.runnable_warps = 0;
  block.live = block.threads;
  memset(block.barriers, 0, sizeof(block.barriers));
  for (int w = 0; w < block.threads / kWarpLanes; ++w) {
    Warp& warp = block.warps[w];
    warp.index = w;
    warp.runnable = warp.exited = warp.arrived = 0;
    warp.turn = 0;
    wake_lanes(warp, ~0U);
  }
  for (int i = 0; i < block.threads; ++i) {
    Thread& thread = block.thread[i];
    thread.index = i;
    thread.lane = i % kWarpLanes;
    thread.warp = &block.warps[i / kWarpLanes];
    thread.wait = Wait::kNone;
    fiber_prepare(thread.fiber, thread_main);
  }
}

void hide_regions() {
  block.hidden_contents.resize(block.hidden.size());
  for (size_t i = 0; i < block.hidden.size(); ++i) {
    auto* data = static_cast<unsigned char*>(block.hidden[i].address);
    block.hidden_contents[i].assign(data, data + block.hidden[i].bytes);
    memset(data, 0xFF, block.hidden[i].bytes);
  }
}

std::string format_text(const char* format, va_list arguments) {
  char text[4000];
  vsnprintf(text, sizeof(text), format, arguments);
  return text;
}

void record_error(Site site, const std::string& text) {
  block.error =
      std::string(block.kernel) + ", block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ")";
  if (self != nullptr) {
    block.error += ", warp " + std::to_string(self->warp->index) + ", lane " + std::to_string(self->lane);
  }
  if (site.file != nullptr) block.error += ", " + std::string(file_name(site.file)) + ":" + std::to_string(site.line);
  block.error += ": ";
  block.error += text;
}

}  // namespace

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_error({nullptr, 0}, format_text(format, arguments));
  va_end(arguments);
  fiber_leave(self->fiber, block.launcher);
}

void fail_at(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_error(site, format_text(format, arguments));
  va_end(arguments);
  fiber_leave(self->fiber, block.launcher);
}

uint32_t draw() {  // PCG32 (O'Neill 2014)
  block.random = block.random * 6364136223846793005ULL + 1442695040888963407ULL;
  const auto shifted = static_cast<uint32_t>(((block.random >> 18) ^ block.random) >> 27);
  return std::rotr(shifted, static_cast<int>(block.random >> 59));
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
  warp.arrived = 0;
  warp.turn ^= 1;
  wake_lanes(warp, ~0U);
  let_others_run();
  return operands;
}

void meet_barrier(int id, int count, Site site) {
  Barrier& barrier = block.barriers[id & (kNamedBarriers - 1)];
  if (id != 0) {
    if (id < 1 || id >= kNamedBarriers) fail_at(site, "named_barrier %d: ids are 1 to %d", id, kNamedBarriers - 1);
    if (count <= 0 || count % kWarpLanes != 0 || count > block.threads) {
      fail_at(site, "named_barrier %d of %d threads: must be a multiple of 32, at most %d", id, count, block.threads);
    }
    if (barrier.arrived != 0 && barrier.count != count) {
      fail_at(site, "named_barrier %d of %d threads, but others are there for one of %d", id, count, barrier.count);
    }
  }
  barrier.count = count;
  ++barrier.arrived;
  if (barrier.arrived == (id == 0 ? block.live : count)) {
    release_barrier(barrier);
    let_others_run();
    return;
  }
  barrier.waiting[self->warp->index] |= 1U << self->lane;
  self->parity = static_cast<uint32_t>(id);
  suspend(Wait::kBarrier, site);
}

void predecessor_complete() {
  show_hidden_regions();
  block.waited = true;
  let_others_run();
}

void show_hidden_regions() {
  for (size_t i = 0; i < block.hidden_contents.size(); ++i) {
    memcpy(block.hidden[i].address, block.hidden_contents[i].data(), block.hidden[i].bytes);
  }
  block.hidden_contents.clear();
}

bool run_block() {
  block.error.clear();
  block.waited = block.released = false;
  block.copies.clear();
  prepare_threads();
  hide_regions();
  self = &block.thread[0];
  self = draw_thread();
  fiber_switch(block.launcher, self->fiber);
  if (!block.error.empty()) return false;
  self = nullptr;
  if (!block.copies.empty()) {
    record_error(block.copies.back().site, "the block ends while a bulk copy is under way");
  } else if (!block.waited) {
    record_error({nullptr, 0}, "the block ends without wait_for_predecessor()");
  }
  return block.error.empty();
}

}  // namespace ull::emulator
