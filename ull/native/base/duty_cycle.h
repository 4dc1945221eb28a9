// What a thread does with its time, cycle by cycle of its loop (after Aeron's duty-cycle trackers). The thread itself
// writes, any thread reads; a reader may see one figure newer than another.
//
// A cycle is the time from one look at everything that may want the thread to the next. A long one is a stall, whoever
// has caused it: the thread's own work, or the scheduler, which ran somebody else on its core.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/cpu.h"
#include "base/histogram.h"

namespace ull {

class DutyCycle {
 public:
  // Cycles longer than `stall_ns` are stalls.
  explicit DutyCycle(int64_t stall_ns) noexcept : stall_ns_(stall_ns) {}

  // The thread: a cycle ends at `now` and the next begins. `worked`: there was something to do.
  void end_cycle(int64_t now, bool worked) noexcept {
    const int64_t took = began_ns_ == 0 ? 0 : now - began_ns_;
    began_ns_ = now;
    add(cycles_, 1);
    if (worked) add(working_ns_, took);
    if (took > longest_ns_.load(std::memory_order_relaxed)) longest_ns_.store(took, std::memory_order_relaxed);
    if (took > stall_ns_) add(stalls_, 1);
  }

  // The thread: it has slept until `now`, which is part of no cycle.
  void end_sleep(int64_t now) noexcept {
    began_ns_ = now;
    add(sleeps_, 1);
  }

  [[nodiscard]] NamedCounts named() const {
    return {{"cycles", read(cycles_)},
            {"working_ns", read(working_ns_)},
            {"longest_ns", read(longest_ns_)},
            {"stalls", read(stalls_)},
            {"stall_ns", static_cast<uint64_t>(stall_ns_)},
            {"sleeps", read(sleeps_)}};
  }

 private:
  using Count = std::atomic<int64_t>;

  // One writer: a plain load and store is enough and costs no locked instruction.
  static void add(Count& count, int64_t value) noexcept {
    count.store(count.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }
  static uint64_t read(const Count& count) noexcept {
    return static_cast<uint64_t>(count.load(std::memory_order_relaxed));
  }

  const int64_t stall_ns_;
  alignas(kCacheLine) int64_t began_ns_ = 0;  // when the cycle began; 0: none has
  Count cycles_{0};
  Count working_ns_{0};
  Count longest_ns_{0};
  Count stalls_{0};
  Count sleeps_{0};
};

}  // namespace ull
