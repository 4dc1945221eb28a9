#include "engine/watchdog.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/clock.h"
#include "base/notify.h"
#include "base/thread.h"

namespace ull {
namespace {

constexpr int64_t kAskNs = 5'000'000'000;  // between two questions where no service manager wants to know

void say_late(const char* thread, int64_t time_ns) noexcept {
  std::array<char, 128> text;
  constexpr const char* kFormat = "%sthe %s has given no sign of life for %.1f s";
  const double seconds = static_cast<double>(time_ns) / 1e9;
  (void)std::snprintf(text.data(), text.size(), kFormat, "STATUS=", thread, seconds);
  notify_service_manager(text.data());
  (void)std::snprintf(text.data(), text.size(), kFormat, "ulld: ", thread, seconds);
  complain(text.data());
}

}  // namespace

Watchdog::Watchdog(EngineShared& shared, int64_t limit_ms)
    : shared_(shared),
      limit_ns_(limit_ms * 1'000'000),
      service_ns_(service_watchdog_usec() * 1'000),
      period_ns_(service_ns_ > 0 ? std::min(limit_ns_ / 4, service_ns_ / 8) : limit_ns_ / 4),
      ask_ns_(service_ns_ > 0 ? service_ns_ * 3 / 8 : kAskNs),  // a look later is half of the service manager's period
      patience_ns_(2 * ask_ns_),
      threads_{{{"engine thread", &shared.engine_agent.beat()},
                {"io thread", &shared.io_agent.beat()},
                {"control plane", &shared.control_beat}}} {}

void Watchdog::start() {
  moved_ns_ = monotonic_ns();
  ask(moved_ns_);
  thread_ = start_thread([this] { run(); });
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
  const std::chrono::nanoseconds period(period_ns_);
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, period, [this] { return stopping_; })) look(monotonic_ns());
}

void Watchdog::look(int64_t now) noexcept {
  look_at_progress(now);
  if (shared_.failed.load(std::memory_order_relaxed)) shared_.control_call.raise();
  look_at_threads(now);
}

void Watchdog::look_at_progress(int64_t now) noexcept {
  const uint64_t progress = shared_.progress.load(std::memory_order_relaxed);
  const bool idle = shared_.in_flight.load(std::memory_order_acquire) == 0;
  if (idle || progress != seen_progress_) {
    moved_ns_ = now;
    shared_.stalled.store(false, std::memory_order_relaxed);
  } else if (now - moved_ns_ >= limit_ns_ && !shared_.stalled.load(std::memory_order_relaxed)) {
    shared_.stalls.fetch_add(1, std::memory_order_relaxed);
    shared_.stalled.store(true, std::memory_order_release);  // whoever sees it finds it counted
  }
  seen_progress_ = progress;
}

void Watchdog::look_at_threads(int64_t now) noexcept {
  bool all = true;
  for (Watched& thread : threads_) {
    if (has_ticked(thread)) {
      thread.late = false;
      continue;
    }
    all = false;
    if (thread.late || now - asked_ns_ < patience_ns_) continue;
    thread.late = true;
    shared_.late_threads.fetch_add(1, std::memory_order_relaxed);
    say_late(thread.name, now - asked_ns_);
  }
  // One that was awake when it was asked may have gone to sleep since, without another tick.
  if (!all) return wake_threads();
  if (now - asked_ns_ < ask_ns_) return;
  const bool failed = shared_.failed.load(std::memory_order_relaxed);
  if (service_ns_ > 0 && !failed) notify_service_manager("WATCHDOG=1");
  ask(now);
}

// An engine that works need not come to its idle loop: steps that end, and layers, are signs of life too.
bool Watchdog::has_ticked(const Watched& thread) const noexcept {
  const uint64_t count = thread.beat->count();
  if (count == 0 || count != thread.seen) return true;
  return thread.beat == &shared_.engine_agent.beat() &&
         shared_.progress.load(std::memory_order_relaxed) != asked_progress_;
}

void Watchdog::ask(int64_t now) noexcept {
  for (Watched& thread : threads_) thread.seen = thread.beat->count();
  asked_progress_ = shared_.progress.load(std::memory_order_relaxed);
  asked_ns_ = now;
  wake_threads();
}

void Watchdog::wake_threads() noexcept {
  shared_.engine_agent.wake();
  shared_.io_agent.wake();
  shared_.control_call.raise();
}

}  // namespace ull
