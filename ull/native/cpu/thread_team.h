// A small team of threads that run one function together. Member 0 is the thread that calls run(); the others are
// started once, pinned, and wait. Nothing allocates after construction. Waiting spins for a bounded time, then sleeps
// in the kernel, so a machine with more threads than cores slows down but does not collapse.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "base/cpu.h"

namespace ull::cpu {

class ThreadTeam {
 public:
  // members: threads in all, at least 1. cores: empty, or one core per member; cores[0] belongs to the calling thread,
  // which pins itself. Throws std::invalid_argument for a wrong count, std::system_error if a thread cannot start.
  ThreadTeam(int members, std::span<const int> cores);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  [[nodiscard]] int size() const noexcept { return members_; }
  [[nodiscard]] int pinned() const noexcept { return pinned_.load(std::memory_order_relaxed); }

  // Calls body(member) on every member and returns when all have returned. Denormals are kept and rounding is to
  // nearest in all of them, whatever the calling thread had set.
  template <typename Body>
  void run(const Body& body) noexcept {
    run_erased([](void* context, int member) { (*static_cast<const Body*>(context))(member); },
               const_cast<Body*>(&body));
  }

  // Within run(): returns once every member has called it; what each wrote before is visible to all after.
  void barrier() noexcept;

 private:
  using Function = void (*)(void* context, int member);

  void run_erased(Function function, void* context) noexcept;
  void work(int member, int core) noexcept;
  // Returns the new value of `word` once it differs from `old`.
  uint32_t await_change(const std::atomic<uint32_t>& word, uint32_t old) const noexcept;

  const int members_;
  const int spins_;  // pauses before a waiting member sleeps
  std::atomic<int> pinned_{0};
  Function function_ = nullptr;  // of the current run(); published by job_
  void* context_ = nullptr;
  bool stopping_ = false;
  std::vector<std::thread> threads_;

  alignas(kCacheLine) std::atomic<uint32_t> job_{0};         // counts run() calls
  alignas(kCacheLine) std::atomic<int> arrived_{0};          // members waiting in the barrier
  alignas(kCacheLine) std::atomic<uint32_t> generation_{0};  // counts completed barriers
};

}  // namespace ull::cpu
