// One thread of ours that goes through cycles, as it is to itself and to the others: they wake it, hear its sign of
// life and read its duty cycle; it waits by its idle mode, and gives way where it has no core of its own.
#pragma once

#include <sched.h>

#include <cstdint>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/duty_cycle.h"
#include "base/idle.h"
#include "base/thread.h"
#include "sync/beat.h"
#include "sync/waker.h"

namespace ull {

class Agent {
 public:
  struct Options {
    const char* name;          // at most 15 characters
    int core = -1;             // -1: any
    bool cooperative = false;  // gives its core away for a moment wherever others may be waiting for it
    IdleMode idle = IdleMode::kAdaptive;
  };

  // Cycles longer than `stall_ns` are stalls. Throws std::system_error if the process has no file descriptors left.
  explicit Agent(int64_t stall_ns) : duty_(stall_ns) {}

  // Any thread, after its push.
  void wake() noexcept { waker_.wake(); }
  [[nodiscard]] const Beat& beat() const noexcept { return beat_; }
  [[nodiscard]] const DutyCycle& duty() const noexcept { return duty_; }

  // The rest is the thread's own. First; an agent that cannot be pinned still works.
  void begin(const Options& options) noexcept {
    options_ = options;
    name_current_thread(options.name);
    (void)pin_current_thread(options.core);
  }
  // Last: it is watched no longer.
  void end() noexcept { beat_.end(); }

  // At least whenever it is woken.
  void tick() noexcept { beat_.tick(); }
  // `worked`: the cycle that ends at `now` found something to do.
  void end_cycle(int64_t now, bool worked) noexcept { duty_.end_cycle(now, worked); }
  // Those who carry a token to its client may be waiting for this core, and the scheduler lets them wait until this
  // thread sleeps, or for its next tick, milliseconds away. 0.6 us if nobody is.
  void give_way() noexcept {
    if (options_.cooperative) sched_yield();
  }

  [[nodiscard]] bool sleeps() const noexcept { return options_.idle != IdleMode::kSpin; }
  // Whether it has spun for long enough.
  [[nodiscard]] static bool spun(int64_t idle_ns) noexcept { return idle_ns >= kIdleSpinNs; }
  // What wait() is to poll, beside what else it waits for.
  [[nodiscard]] int fd() const noexcept { return waker_.fd(); }
  // Sleeps in wait() if nothing_new(), a last look at all that others push, says so. When it is awake again.
  template <typename NothingNew, typename Wait>
  int64_t sleep(NothingNew&& nothing_new, Wait&& wait) noexcept {
    waker_.announce();
    if (nothing_new()) wait();
    waker_.awake();
    const int64_t now = monotonic_ns();
    duty_.end_sleep(now);
    return now;
  }
  // The same where it waits for nothing but wake().
  template <typename NothingNew>
  int64_t sleep(NothingNew&& nothing_new) noexcept {
    return sleep(nothing_new, [this] { waker_.wait(); });
  }

 private:
  Waker waker_;
  DutyCycle duty_;
  Beat beat_;
  alignas(kCacheLine) Options options_{};
};

}  // namespace ull
