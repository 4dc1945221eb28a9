#include "cpu/thread_team.h"

#include <algorithm>
#include <cfenv>
#include <stdexcept>

#include "base/clock.h"
#include "base/thread.h"

namespace ull::cpu {
namespace {

// How long a member spins before it sleeps. With cores of their own, members spin for about as long as the kernel takes
// to wake a thread. Without, the kernel may put two of them on one core, where the spinner keeps the one it waits for
// from running (measured on a busy 2-core machine: 4.4 ms per token with 50 us, 0.7 ms with 10 us).
constexpr int64_t kPinnedSpinNs = 50'000;
constexpr int64_t kFreeSpinNs = 10'000;

// How many pauses take `duration` nanoseconds on this machine (a pause is 10 to 140 cycles).
int spins_of(int64_t duration) {
  constexpr int kSample = 1000;
  const int64_t begin = monotonic_ns();
  for (int i = 0; i < kSample; ++i) cpu_relax();
  const int64_t elapsed = std::max<int64_t>(monotonic_ns() - begin, 1);
  return static_cast<int>(std::clamp<int64_t>(duration * kSample / elapsed, 20, 20'000));
}

// The default floating-point environment for a scope: no flushing of denormals, round to nearest.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_{};
};

}  // namespace

ThreadTeam::ThreadTeam(int members, std::span<const int> cores)
    : members_(members), spins_(spins_of(cores.empty() ? kFreeSpinNs : kPinnedSpinNs)) {
  if (members < 1) throw std::invalid_argument("threads: must be at least 1");
  if (!cores.empty() && static_cast<int>(cores.size()) != members) {
    throw std::invalid_argument("cores: give none, or one per thread");
  }
  threads_.reserve(static_cast<size_t>(members - 1));
  for (int member = 1; member < members; ++member) {
    const int core = cores.empty() ? -1 : cores[static_cast<size_t>(member)];
    threads_.push_back(start_thread([this, member, core] { work(member, core); }));
  }
}

ThreadTeam::~ThreadTeam() {
  stopping_ = true;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

uint32_t ThreadTeam::await_change(const std::atomic<uint32_t>& word, uint32_t old) const noexcept {
  for (int i = 0; i < spins_; ++i) {
    const uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    cpu_relax();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

void ThreadTeam::barrier() noexcept {
  if (members_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
    arrived_.store(0, std::memory_order_relaxed);  // ordered before the release below
    generation_.store(generation + 1, std::memory_order_release);
    generation_.notify_all();
  } else {
    await_change(generation_, generation);
  }
}

void ThreadTeam::run_erased(Function function, void* context) noexcept {
  const DefaultFloatEnvironment environment;
  function_ = function;
  context_ = context;
  if (members_ > 1) {
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
  }
  function(context, 0);
  barrier();
}

void ThreadTeam::work(int member, int core) noexcept {
  std::fesetenv(FE_DFL_ENV);
  name_current_thread("ull-team");
  if (core >= 0 && pin_current_thread(core)) pinned_.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t seen = 0;;) {
    seen = await_change(job_, seen);
    if (stopping_) return;
    function_(context_, member);
    barrier();
  }
}

}  // namespace ull::cpu
