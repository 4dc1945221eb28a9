// The rounds under way on the device: launched in order on one stream, answered in order through the mapped result
// blocks. Every round takes the next sequence number and with it the request and result block of its slot, which are
// its own until its result has been seen.
//
// The stream's order is what makes a round that nobody wants any more harmless: it reads and writes nothing that a
// round launched before it still needs, and whatever it has written to a page was written before any round that is
// launched after it runs. It writes KV only where a token that was not accepted would stand: at the position after the
// sequence's last token. That is in a page that its sequence alone held when it was launched (full pages alone are
// shared); if the page is another sequence's by now, that sequence writes a position before it reads it, and does so
// with rounds that come later in the stream. Copies of pages stand in that order too.
//
// A graph may be launched before its request is known (foresight.h): it waits on the stream, its number is the next
// one, and the next launch of the same graph gives it its request.
//
// One thread at a time calls this, but for failure() and restart_helps(). Nothing allocates, locks or throws.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "base/cpu.h"
#include "base/status.h"
#include "graph/driver.h"
#include "graph/foresight.h"
#include "graph/program.h"
#include "graph/setting.h"
#include "graph/text.h"
#include "kernels/params.h"

namespace ull::graph {

class RoundQueue {
 public:
  // The device has answered no round yet. foresight: of the stream, which must outlive it.
  RoundQueue(const RoundBlocks& program, const Driver& driver, Foresight& foresight);

  [[nodiscard]] Foresight& foresight() const noexcept { return foresight_; }

  // Before anything else on a thread: makes the stream's context this thread's, which it then stays. kOk or
  // kExecutorFailed.
  [[nodiscard]] Status enter() noexcept;

  // One that waits has a slot, too, and may yet be sent away.
  [[nodiscard]] bool has_slots(int rounds) const noexcept {
    const uint64_t waiting = foresight_.waits(*this) ? 1 : 0;
    return launched_ + waiting + static_cast<uint64_t>(rounds) <= seen_ + gpu::kRoundSlots;
  }
  [[nodiscard]] bool has_slot() const noexcept { return has_slots(1); }
  [[nodiscard]] bool idle() const noexcept { return launched_ == seen_; }
  // Nothing that was asked for is under way; what was sent away may be.
  [[nodiscard]] bool rests() const noexcept { return seen_ >= asked_; }
  // Sequence of the newest round, but for one that waits; and of the newest that was not sent away.
  [[nodiscard]] uint64_t launched() const noexcept { return launched_; }
  [[nodiscard]] uint64_t asked() const noexcept { return asked_; }
  // Of a round that has been seen, until its slot is used again: whether it was sent away.
  [[nodiscard]] bool was_sent_away(uint64_t sequence) const noexcept {
    return program_.requests[slot(sequence)].sequence == kSentAway;
  }
  [[nodiscard]] uint64_t seen() const noexcept { return seen_; }  // of the newest that has been answered

  // Whether the page table may be written: no round under way reads the mapped one.
  [[nodiscard]] bool setting_is_free(const Setting& setting) const noexcept {
    return rests() || device_setting_ == setting.version();
  }

  // The block of the next round, or of one that many behind it in a burst; has_slots(). graph: with which it will be
  // launched; another one that waits on the stream is sent away. The caller fills mode, count, position, max_tokens,
  // tokens and parents, and `forced` and `first` where they are not 0.
  [[nodiscard]] gpu::RoundRequest& next_request(void* graph, int behind = 0) noexcept {
    if (!foresight_.waits(*this, graph)) foresight_.send_away();
    gpu::RoundRequest& request = program_.requests[slot(launched_ + 1 + static_cast<uint64_t>(behind))];
    request.forced = request.first = 0;
    return request;
  }
  // Where its tokens go if it is a chunk: [kChunkTokens], once next_request() has named it.
  [[nodiscard]] int32_t* next_chunk() const noexcept {
    return program_.chunks + slot(launched_ + 1) * gpu::kChunkTokens;
  }
  // Launches it, or as many as the graph holds. kOk or kExecutorFailed.
  [[nodiscard]] Status launch(void* graph, const Setting& setting, const Text& text, int rounds = 1) noexcept;

  // Copies a page of the cache to another one: behind what has been launched, before what will be. kOk or
  // kExecutorFailed.
  [[nodiscard]] Status copy_page(int32_t from, int32_t to) noexcept;

  // Takes the next answer, if it is there, and moves seen() on.
  [[nodiscard]] bool take_answer() noexcept;
  // Of a round that has been seen, until its slot is used again.
  [[nodiscard]] const gpu::RoundResult& result(uint64_t sequence) const noexcept {
    return program_.results[slot(sequence)];
  }

  // Rounds launched so far that have not begun are skipped, the last of them within the time of one round.
  void cancel() noexcept;
  [[nodiscard]] bool cancelled(uint64_t sequence) const noexcept { return sequence <= cancelled_through_; }

  // Waits, spinning, until round `through` has been answered; later ones may be under way. Once `abort` is set, rounds
  // that have not begun are skipped and all others are waited for. kOk; kAborted: nothing is under way any more;
  // kExecutorFailed.
  [[nodiscard]] Status await(uint64_t through, const std::atomic<bool>& abort = kNever) noexcept;
  // Until every round has been answered and the stream is empty: the last kernel has ended, not only answered.
  [[nodiscard]] Status drain() noexcept;

  // From now on nothing need have happened yet.
  void restart_watchdog() noexcept;
  // Called while answers are awaited: asks the driver about the device once a round is overdue, and then now and then.
  // kPending, or kExecutorFailed if it reports an error or has answered nothing for the watchdog's time.
  [[nodiscard]] Status watch() noexcept;
  // limit_ns: without an answer for longer, the device has failed. round_ns: what the dearest round takes; 0: unknown.
  void set_watchdog(int64_t limit_ns, int64_t round_ns = 0) noexcept;

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
  friend class Foresight;
  inline static const std::atomic<bool> kNever{false};
  static constexpr uint64_t kSentAway = 0;  // in a block's sequence: no round's number

  // The next round's graph, which waits for its request; has_slot(). It may fail.
  void launch_waiting(void* graph) noexcept;
  // Has it skipped.
  void send_away() noexcept;

  [[nodiscard]] static size_t slot(uint64_t sequence) noexcept { return sequence % gpu::kRoundSlots; }
  Status fail(const char* call, Driver::Result error) noexcept;

  const RoundBlocks& program_;
  const Driver& driver_;
  Foresight& foresight_;
  uint64_t launched_ = 0;
  uint64_t asked_ = 0;
  uint64_t seen_ = 0;
  uint64_t cancelled_through_ = 0;
  uint32_t device_setting_ = 0;  // version that the device had copied when it last answered
  std::thread::id entered_;      // whose context is the stream's
  int64_t limit_ns_ = 0;
  int64_t overdue_ns_ = 0;   // without an answer for so long, the driver is asked
  int64_t progress_ns_ = 0;  // when a round was last answered, or the watchdog restarted; 0: not looked at since
  int64_t ask_ns_ = 0;       // when the stream is to be asked next
  uint32_t polls_ = 0;
  bool restart_helps_ = false;
  char failure_[192] = {};
  alignas(kCacheLine) std::atomic<bool> failed_{false};  // published after failure_ and restart_helps_
};

}  // namespace ull::graph
