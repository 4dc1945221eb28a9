// Watches the engine thread's progress from a thread of its own, outside the GIL. If the engine is busy and its
// progress counter stands still for longer than the limit, the engine is stalled (counted; cleared when it moves on).
// Keeps the service manager's watchdog quiet (WATCHDOG=1) only while progress moves or the engine has nothing to do.
#pragma once

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
  void run() noexcept;
  void look(int64_t now) noexcept;

  EngineShared& shared_;
  const int64_t limit_ns_;
  const int64_t service_ns_;  // period that the service manager asked for; 0: none
  uint64_t seen_progress_ = 0;
  int64_t moved_ns_ = 0;  // when progress was last seen to move, or the engine to be idle
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ull
