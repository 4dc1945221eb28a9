#include "engine/watchdog.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/notify.h"
#include "base/thread.h"

namespace ull {

Watchdog::Watchdog(EngineShared& shared, int64_t limit_ms)
    : shared_(shared), limit_ns_(limit_ms * 1'000'000), service_ns_(service_watchdog_usec() * 1'000) {}

void Watchdog::start() {
  moved_ns_ = monotonic_ns();
  thread_ = std::thread([this] { run(); });
}

void Watchdog::stop() noexcept {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Watchdog::run() noexcept {
  name_current_thread("ull-watchdog");
  int64_t period = limit_ns_ / 4;
  if (service_ns_ > 0) period = std::min(period, service_ns_ / 2);
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::nanoseconds(period), [this] { return stopping_; })) look(monotonic_ns());
}

void Watchdog::look(int64_t now) noexcept {
  const uint64_t progress = shared_.progress.load(std::memory_order_relaxed);
  const bool idle = shared_.in_flight.load(std::memory_order_acquire) == 0;
  const bool alive = idle || progress != seen_progress_;
  seen_progress_ = progress;
  if (alive) {
    moved_ns_ = now;
    shared_.stalled.store(false, std::memory_order_relaxed);
  } else if (now - moved_ns_ >= limit_ns_ && !shared_.stalled.exchange(true, std::memory_order_relaxed)) {
    shared_.stalls.fetch_add(1, std::memory_order_relaxed);
  }
  if (service_ns_ > 0 && alive && !shared_.failed.load(std::memory_order_relaxed)) {
    notify_service_manager("WATCHDOG=1");
  }
}

}  // namespace ull
