// A thread's sign of life, for the watchdog (engine/watchdog.h).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/cpu.h"

namespace ull {

class Beat {
 public:
  // The thread itself, at least whenever it is woken. From its first tick on it is watched.
  void tick() noexcept { count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  // The thread itself, before it ends: it is watched no longer.
  void end() noexcept { count_.store(0, std::memory_order_relaxed); }

  [[nodiscard]] uint64_t count() const noexcept { return count_.load(std::memory_order_relaxed); }  // 0: not watched

 private:
  alignas(kCacheLine) std::atomic<uint64_t> count_{0};
};

}  // namespace ull
