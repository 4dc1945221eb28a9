// Lets a thread sleep on an eventfd and be woken by others, at the price of one atomic exchange per push while it is
// awake: the fd is written only if the sleeper has announced itself.
//
// No wake-up is lost: sleeper and waker both do a read-modify-write on `state_`, so one comes first. If the sleeper's
// does, the waker sees kSleeping and writes the fd. If the waker's does, the sleeper's exchange synchronises with it
// and the sleeper's look at its queues, which comes after, sees what was pushed. (A Dekker handshake without fences,
// which ThreadSanitizer does not model.)
#pragma once

#include <atomic>
#include <cstdint>

#include "base/cpu.h"

namespace ull {

class Waker {
 public:
  Waker();  // throws std::system_error if the process has no file descriptors left
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  // Any thread, after its push. Costs a system call only if the sleeper sleeps.
  void wake() noexcept {
    if (state_.exchange(kAwake, std::memory_order_acq_rel) == kSleeping) signal();
  }

  // The sleeper: announce(), look at every queue once more, then wait on fd() (or wait()), then awake().
  void announce() noexcept { state_.exchange(kSleeping, std::memory_order_acq_rel); }
  void wait() noexcept;
  void awake() noexcept;  // withdraws the announcement and drains the fd

  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  enum State : uint32_t { kAwake, kSleeping };
  void signal() noexcept;

  alignas(kCacheLine) std::atomic<uint32_t> state_{kAwake};
  int fd_;
};

}  // namespace ull
