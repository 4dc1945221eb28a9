#include "base/termination.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <limits>
#include <mutex>
#include <system_error>

#include "base/clock.h"
#include "base/event_fd.h"
#include "base/notify.h"
#include "base/thread.h"

namespace ull {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// What the handler and the thread share. It is never freed: a signal may come while the process ends.
struct State {
  std::atomic<uint32_t> asked{0};
  std::atomic<uint32_t> hangups{0};
  std::atomic<int> last_signal{0};
  EventFd news;      // for the control plane
  EventFd reckoner;  // for the thread that ends the process
  std::mutex mutex;
  int64_t first_ns = kNever;   // patience after the first signal
  int64_t second_ns = kNever;  // ... and after the second
  int64_t limit_ns = kNever;   // when the process ends whatever happens
  int patience_status = 0;
  int limit_status = 0;
};

State* state = nullptr;

extern "C" void on_signal(int number) {
  const int saved = errno;
  if (number == SIGHUP) {
    state->hangups.fetch_add(1, std::memory_order_relaxed);
  } else {
    state->last_signal.store(number, std::memory_order_relaxed);
    state->asked.fetch_add(1, std::memory_order_release);
  }
  state->news.raise();
  state->reckoner.raise();
  errno = saved;
}

[[noreturn]] void end(int status, int64_t now, int64_t since_ns) noexcept {
  std::array<char, 128> text;
  const double seconds = static_cast<double>(now - since_ns) / 1e9;
  (void)std::snprintf(text.data(), text.size(), "ulld: not stopped after %.0f s: ending the process, status %d",
                      seconds, status);
  complain(text.data());
  _exit(status);
}

// Ends the process when its time is up. Signals' times count from when this thread hears of them.
void reckon() noexcept {
  name_current_thread("ull-signals");
  int64_t first_heard = 0;
  int64_t second_heard = 0;
  for (;;) {
    const int64_t now = monotonic_ns();
    const uint32_t asked = state->asked.load(std::memory_order_acquire);
    if (asked > 0 && first_heard == 0) first_heard = now;
    if (asked > 1 && second_heard == 0) second_heard = now;
    int64_t deadline = kNever;
    {
      const std::lock_guard lock(state->mutex);
      const auto after = [](int64_t start, int64_t time) {
        return start == 0 || time == kNever ? kNever : start + time;
      };
      const int64_t patience = std::min(after(first_heard, state->first_ns), after(second_heard, state->second_ns));
      deadline = std::min(patience, state->limit_ns);
      if (now >= patience) end(state->patience_status, now, first_heard);
      if (now >= state->limit_ns) end(state->limit_status, now, first_heard == 0 ? now : first_heard);
    }
    const int64_t wait_ms = deadline == kNever ? -1 : (deadline - now) / 1'000'000 + 1;
    pollfd item{state->reckoner.fd(), POLLIN, 0};
    (void)poll(&item, 1, static_cast<int>(std::min<int64_t>(wait_ms, 3'600'000)));
    state->reckoner.clear();
  }
}

}  // namespace

Termination::Termination() {
  if (state == nullptr) {
    state = new State;
    start_thread(reckon).detach();
  }
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
    if (sigaction(number, &action, nullptr) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
  }
}

uint32_t Termination::asked() const noexcept { return state->asked.load(std::memory_order_acquire); }

uint32_t Termination::hangups() const noexcept { return state->hangups.load(std::memory_order_relaxed); }

int Termination::last_signal() const noexcept { return state->last_signal.load(std::memory_order_relaxed); }

int Termination::fd() const noexcept { return state->news.fd(); }

void Termination::clear() noexcept { state->news.clear(); }

void Termination::set_patience(int64_t first_ms, int64_t second_ms, int status) noexcept {
  {
    const std::lock_guard lock(state->mutex);
    state->first_ns = first_ms * 1'000'000;
    state->second_ns = second_ms * 1'000'000;
    state->patience_status = status;
  }
  state->reckoner.raise();
}

void Termination::end_within(int64_t time_ms, int status) noexcept {
  {
    const std::lock_guard lock(state->mutex);
    state->limit_ns = monotonic_ns() + time_ms * 1'000'000;
    state->limit_status = status;
  }
  state->reckoner.raise();
}

}  // namespace ull
