// The rounds under way on the device: launched in order on one stream, answered in order through the mapped result
// blocks. Every round takes the next sequence number and with it the request and result block of its slot, which are
// its own until its result has been seen.
//
// The stream's order is what makes a round that nobody wants any more harmless: it reads and writes nothing that a
// round launched before it still needs, and whatever it has written to a page was written before any round that is
// launched after it runs. It writes KV only where a token that was not accepted would stand: at the position after the
// session's last token. That is in a page that its session alone held when it was launched (full pages alone are
// shared); if the page is another session's by now, that session writes a position before it reads it, and does so with
// rounds that come later in the stream.
//
// One thread at a time calls this, but for failure() and restart_helps(). Nothing allocates, locks or throws.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/cpu.h"
#include "base/status.h"
#include "exec/graph/driver.h"
#include "exec/graph/program.h"
#include "exec/graph/setting.h"
#include "exec/graph/text.h"
#include "kernels/params.h"

namespace ull::graph {

class RoundQueue {
 public:
  // The device has answered no round yet.
  RoundQueue(const GraphProgram& program, const Driver& driver);

  // Before anything else on a thread: makes the stream's context this thread's. kOk or kExecutorFailed.
  [[nodiscard]] Status enter() noexcept;

  [[nodiscard]] bool has_slot() const noexcept { return launched_ - seen_ < gpu::kRoundSlots; }
  [[nodiscard]] bool idle() const noexcept { return launched_ == seen_; }
  [[nodiscard]] uint64_t launched() const noexcept { return launched_; }  // sequence of the newest round
  [[nodiscard]] uint64_t seen() const noexcept { return seen_; }          // of the newest that has been answered

  // Whether the page table may be written: no round under way reads the mapped one.
  [[nodiscard]] bool setting_is_free(const Setting& setting) const noexcept {
    return idle() || device_setting_ == setting.version();
  }

  // The block of the next round; has_slot(). The caller fills mode, count, position, max_tokens, tokens and parents.
  [[nodiscard]] gpu::RoundRequest& next_request() noexcept { return program_.requests[slot(launched_ + 1)]; }
  // Launches it. kOk or kExecutorFailed.
  [[nodiscard]] Status launch(void* graph, const Setting& setting, const Text& text) noexcept;

  // Takes the next answer, if it is there, and moves seen() on.
  [[nodiscard]] bool take_answer() noexcept;
  // Of a round that has been seen, until its slot is used again.
  [[nodiscard]] const gpu::RoundResult& result(uint64_t sequence) const noexcept {
    return program_.results[slot(sequence)];
  }

  // Rounds launched so far that have not begun are skipped, the last of them within the time of one round.
  void cancel() noexcept;
  [[nodiscard]] bool cancelled(uint64_t sequence) const noexcept { return sequence <= cancelled_through_; }

  // Waits, spinning, until every round has been answered. kOk or kExecutorFailed.
  [[nodiscard]] Status wait() noexcept;
  // The same, and until the stream is empty: the last kernel has ended, not only answered.
  [[nodiscard]] Status drain() noexcept;

  // From now on nothing need have happened yet.
  void restart_watchdog() noexcept;
  // Called while answers are awaited: looks at the device now and then. kPending, or kExecutorFailed if it reports an
  // error or has answered nothing for the watchdog's time.
  [[nodiscard]] Status watch() noexcept;
  void set_watchdog(int64_t limit_ns) noexcept { limit_ns_ = limit_ns; }

  // The first failure stays: nothing is launched after it.
  Status fail(const char* what, bool restart_helps) noexcept;
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }
  [[nodiscard]] const char* failure() const noexcept {
    return failed_.load(std::memory_order_acquire) ? failure_ : nullptr;
  }
  [[nodiscard]] bool restart_helps() const noexcept {
    return failed_.load(std::memory_order_acquire) && restart_helps_;
  }

 private:
  [[nodiscard]] static size_t slot(uint64_t sequence) noexcept { return sequence % gpu::kRoundSlots; }
  Status fail(const char* call, Driver::Result error) noexcept;

  const GraphProgram& program_;
  const Driver& driver_;
  uint64_t launched_ = 0;
  uint64_t seen_ = 0;
  uint64_t cancelled_through_ = 0;
  uint32_t device_setting_ = 0;  // version that the device had copied when it last answered
  int64_t limit_ns_ = 0;
  int64_t progress_ns_ = 0;  // when a round was last answered, or the watchdog restarted
  int64_t looked_ns_ = 0;    // when the stream was last asked
  uint32_t polls_ = 0;
  bool restart_helps_ = false;
  char failure_[192] = {};
  alignas(kCacheLine) std::atomic<bool> failed_{false};  // published after failure_ and restart_helps_
};

}  // namespace ull::graph
