// Starting, naming and pinning of the runtime's own threads. Names and cores are best effort: a thread that cannot be
// pinned still works.
#pragma once

#include <sched.h>

#include <csignal>
#include <thread>
#include <utility>

namespace ull {

inline constexpr int kMaxCore = CPU_SETSIZE - 1;  // a core's highest number

// Blocks the calling thread's signals, but for those that a fault of its own raises, for as long as it lives.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Starts a thread that no signal of the process ever interrupts: these are the main thread's business. Throws
// std::system_error.
template <typename Body>
[[nodiscard]] std::thread start_thread(Body&& body) {
  const SignalsBlocked inherited;  // a thread is born with its creator's mask
  return std::thread(std::forward<Body>(body));
}

// Shown by top and gdb; at most 15 characters.
void name_current_thread(const char* name) noexcept;

// Pins the calling thread to `core`; negative: leaves it as it is. Returns false if the kernel refused.
[[nodiscard]] bool pin_current_thread(int core) noexcept;

}  // namespace ull
