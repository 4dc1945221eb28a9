// Watches the engine, io and control threads from a thread of its own, outside the GIL.
//
// If the engine is busy and its progress counter stands still for longer than the limit, the engine is stalled
// (counted, shown by health; cleared when it moves on). And each thread is asked for a sign of life: it is woken if it
// sleeps, until it has ticked its Beat. The service manager's watchdog is fed (WATCHDOG=1) only once all of them have,
// so that a thread that hangs gets the daemon restarted; which one it is, standard error and the service manager's
// status say.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "engine/shared.h"

namespace ull {

class Watchdog {
 public:
  Watchdog(EngineShared& shared, int64_t limit_ms);
  ~Watchdog() { stop(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void start();
  void stop() noexcept;

 private:
  // One watched thread; what it had ticked when it was last asked.
  struct Watched {
    const char* name;
    const Beat* beat;
    uint64_t seen = 0;
    bool late = false;  // and has been said to be
  };

  void run() noexcept;
  void look(int64_t now) noexcept;
  void look_at_progress(int64_t now) noexcept;
  void look_at_threads(int64_t now) noexcept;
  [[nodiscard]] bool has_ticked(const Watched& thread) const noexcept;
  void ask(int64_t now) noexcept;
  void wake_threads() noexcept;

  EngineShared& shared_;
  const int64_t limit_ns_;
  const int64_t service_ns_;     // within which the service manager wants to hear of us; 0: it does not
  const int64_t period_ns_;      // between two looks
  const int64_t ask_ns_;         // between two questions
  const int64_t patience_ns_;    // a thread that takes longer to tick is late
  uint64_t seen_progress_ = 0;   // at the last look
  uint64_t asked_progress_ = 0;  // at the last question
  int64_t moved_ns_ = 0;         // when progress was last seen to move, or the engine to be idle
  int64_t asked_ns_ = 0;
  std::array<Watched, 3> threads_;  // the engine's first
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ull
