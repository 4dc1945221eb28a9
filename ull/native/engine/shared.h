// What the control, engine, io and watchdog threads of one engine share: rings, agents, and single atomics. Everything
// is allocated here, once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/event_fd.h"
#include "base/histogram.h"
#include "engine/costs.h"
#include "engine/request.h"
#include "sync/agent.h"
#include "sync/beat.h"
#include "sync/seqlock.h"
#include "sync/spsc_ring.h"
#include "sync/trace_ring.h"

namespace ull {

inline constexpr int kCountedDepths = 16;

// Counted by the engine thread, published whole through a seqlock. Durations in nanoseconds.
struct EngineCounters {
  uint64_t started = 0;  // requests taken from the queue to run
  uint64_t stopped = 0;  // ended with finish reason stop, ...
  uint64_t length = 0;
  uint64_t cancelled = 0;
  uint64_t timeout = 0;
  uint64_t deadline = 0;
  uint64_t error = 0;
  uint64_t prompt_tokens = 0;  // of started requests
  uint64_t cached_tokens = 0;  // of those, found in a resident session
  uint64_t prefix_hits = 0;    // started requests that found any
  uint64_t completion_tokens = 0;
  uint64_t prefill_chunks = 0;
  uint64_t rounds = 0;
  uint64_t score_passes = 0;     // over trees of labels; they are no rounds
  uint64_t scored_tokens = 0;    // nodes of those trees
  uint64_t drafted_tokens = 0;   // proposed and verified
  uint64_t accepted_tokens = 0;  // of those
  uint64_t rounds_by_drafter[kDrafterKinds] = {};
  uint64_t drafted_by_drafter[kDrafterKinds] = {};
  uint64_t accepted_by_drafter[kDrafterKinds] = {};
  uint64_t accepted_by_depth[kCountedDepths] = {};  // [d] rounds whose draft was accepted to depth d + 1 or deeper
  uint64_t repeated_steps = 0;                      // steps run again because an abort for an earlier request hit them
  uint64_t logprob_waits = 0;     // times a request waited for the io thread to give back logprob records
  uint64_t longest_cycle_ns = 0;  // longest time from one round's tokens to the next's, within a request
  uint64_t slow_cycles = 0;       // cycles longer than the threshold
  uint64_t pages_used = 0;
  uint64_t sessions = 0;     // resident
  uint64_t suspensions = 0;  // times a request had to wait for a more urgent one
};

inline constexpr uint32_t kNoSlot = UINT32_MAX;
inline constexpr size_t kMaxUnpins = 1024;    // under way
inline constexpr int kLogprobRecords = 8192;  // tokens with logprobs between the engine and io threads
// One request may hold half of them, so that a client that reads slowly leaves enough for the next.
inline constexpr int kLogprobRecordsPerRequest = kLogprobRecords / 2;

struct EngineShared {
  // slot_count requests of up to `context` tokens each, prompt and completion together.
  EngineShared(int slot_count, int context)
      : slots(static_cast<size_t>(slot_count)),
        slot_memory(std::make_unique<RequestSlot[]>(slots)),
        submitted(slots),
        unpins(kMaxUnpins),
        events(2 * slots + 1024),
        logprobs(std::make_unique<LogprobRecord[]>(kLogprobRecords)),
        free_logprobs(kLogprobRecords) {
    for (size_t i = 0; i < slots; ++i) {
      slot_memory[i].tokens = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(context));
    }
    for (int32_t record = 0; record < kLogprobRecords; ++record) (void)free_logprobs.try_push(record);
  }

  // Io thread: gives a request's record back and returns the next of its chain.
  int32_t give_back(RequestSlot& request, int32_t record) noexcept {
    const int32_t next = logprobs[static_cast<size_t>(record)].next;
    (void)free_logprobs.try_push(record);  // has room for every record
    request.logprobs_returned.fetch_add(1, std::memory_order_relaxed);
    return next;
  }

  [[nodiscard]] RequestSlot& slot(uint32_t index) noexcept { return slot_memory[index]; }

  const size_t slots;
  const std::unique_ptr<RequestSlot[]> slot_memory;  // [slots]
  SpscRing<uint32_t> submitted;                      // control -> engine: slot indices
  SpscRing<uint64_t> unpins;                         // control -> engine: pins that are given up
  SpscRing<EngineEvent> events;                      // engine -> io
  const std::unique_ptr<LogprobRecord[]> logprobs;   // [kLogprobRecords]
  SpscRing<int32_t> free_logprobs;                   // io -> engine: indices into logprobs
  Agent engine_agent{10'000'000};                    // looks at commands at least once per layer or round
  Agent io_agent{1'000'000};
  EventFd control_call;  // the control plane is to tick, and to look at the engine's health
  Beat control_beat;

  // Bumped by whoever has something for the engine thread to look at.
  alignas(kCacheLine) std::atomic<uint32_t> calls{0};
  std::atomic<uint32_t> running{kNoSlot};  // slot that the engine thread works on
  std::atomic<bool> unpin_all{false};
  std::atomic<uint32_t> releases{0};  // bumped when a held request is to be delivered or dropped
  std::atomic<bool> stopping{false};
  alignas(kCacheLine) std::atomic<int32_t> in_flight{0};  // submitted and not ended
  std::atomic<bool> failed{false};                        // the executor must not be used again
  std::atomic<bool> stalled{false};                       // set by the watchdog
  std::atomic<uint64_t> stalls{0};
  std::atomic<uint64_t> late_threads{0};  // times that a thread gave no sign of life when the watchdog asked for one
  // Bumped by the engine thread with every step that it completes, and with every layer of one that computes on it.
  alignas(kCacheLine) std::atomic<uint64_t> progress{0};
  std::atomic<uint64_t> rehearsed_progress{0};  // of it, what the daemon's own requests have made
  Seqlock<EngineCounters> counters;
  Seqlock<StepCosts> costs;
  Histogram round_ns;  // time from one round's tokens to the next's
  TraceRing steps;     // the engine thread's
  TraceRing frames;    // the io thread's
};

}  // namespace ull
