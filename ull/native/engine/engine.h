// An engine: one executor, its request slots, and the threads that run them. The control plane's one thread submits,
// cancels and drains; the io thread (io/io.h) delivers what the engine thread reports.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/idle.h"
#include "engine/forecast.h"
#include "engine/loop.h"
#include "engine/shared.h"
#include "engine/vocabulary.h"
#include "engine/watchdog.h"
#include "executor/executor.h"

namespace ull {

inline constexpr int kMaxQueueDepth = 65536;
inline constexpr int kMaxSessions = 1024;

struct EngineOptions {
  int queue_depth = 64;  // requests that may wait while one runs
  int client_share = 0;  // of them and the one that runs, how many may be one client's; 0: half of queue_depth
  int core = -1;         // core of the engine thread; -1: any
  // Whether the engine thread gives its core away after every announcement and layer, for those who carry the tokens
  // on; none: where it has no core of its own.
  std::optional<bool> cooperative = std::nullopt;
  IdleMode idle = IdleMode::kAdaptive;
  int64_t watchdog_ms = 2000;  // busy without progress for longer: stalled
  int max_prompt = 0;          // tokens; 0: as many as leave room for one
  int max_sessions = 16;       // conversations whose KV stays resident
  bool prefix_cache = true;
  int64_t aging_ms = 2000;         // a request that waits for so long counts as one priority more urgent
  int64_t slow_cycle_us = 10'000;  // decode cycles longer than this are counted
};

// A request as the control plane hands it over; copied by submit().
struct Submission {
  std::span<const uint8_t> identity;  // 1 .. kMaxIdentity bytes that name the client
  uint64_t id = 0;                    // chosen by the client; unique among its requests in flight
  std::span<const int32_t> tokens;    // the prompt
  int32_t max_tokens = 0;             // 0: only read the prompt
  Sampling sampling;
  std::optional<DrafterKind> speculation;  // none: the engine's default
  int32_t max_tree = 0;                    // 1 .. kMaxTreeTokens; 0: the engine's default
  std::vector<std::string> stops;
  std::vector<int32_t> stop_ids;
  std::vector<std::string> warnings;  // for its done frame
  Priority priority = Priority::kInteractive;
  int64_t timeout_ns = 0;   // CLOCK_MONOTONIC; 0: none
  int64_t deadline_ns = 0;  // likewise; what cannot be done by then is refused
  bool hold = false;        // nothing is delivered before commit()
  int32_t rolled_back_tokens = 0;
  bool returns_tokens = false;
  bool told_by_control = false;                 // see RequestSlot
  std::shared_ptr<TokenConstraint> constraint;  // null: none; the request's alone
  // Token ids of the labels, of which the answer is one; empty: it generates. max_tokens and what concerns drafts are
  // then of no account.
  std::vector<std::vector<int32_t>> choices;
  uint64_t pin = 0;  // its KV stays under this number, in place of what did before, until unpin(); 0: as all others'
  int64_t received_ns = 0;
  int64_t admitted_ns = 0;
  bool prompt_logprobs = false;  // how likely each of its tokens is, see PromptLogprobs, ...
  int prompt_top_logprobs = 0;   // ... and so many of the likeliest in its place, at most kMaxPromptTopLogprobs
  bool rehearsal = false;        // the daemon's own, before it is ready: nobody counts it, and nothing of it stays
};

// A submission that cannot be served, whatever the engine's state; `field` names what is wrong.
class InvalidRequest : public std::invalid_argument {
 public:
  InvalidRequest(const char* field_name, const std::string& reason)
      : std::invalid_argument(std::string(field_name) + ": " + reason), field(field_name) {}
  const char* field;
};

// Every place in the queue is taken, or every one that the client may take: try again later.
class QueueFull : public std::runtime_error {
 public:
  QueueFull(const std::string& reason, int waiting, int64_t expected)
      : std::runtime_error(reason), queue_length(waiting), expected_ns(expected) {}
  int queue_length;     // requests that wait
  int64_t expected_ns;  // nanoseconds until there is a place; an estimate
};

// The request would not be done by its deadline, or another one not by its own that was accepted before.
class DeadlineUnreachable : public std::runtime_error {
 public:
  DeadlineUnreachable(const std::string& reason, int64_t expected)
      : std::runtime_error(reason), expected_ns(expected) {}
  int64_t expected_ns;  // CLOCK_MONOTONIC: when it would be done
};

// The engine takes no requests: not started, draining, stopped or failed.
class EngineClosed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct EngineStats {
  EngineCounters counters;
  uint64_t submitted = 0;
  uint64_t refused = 0;  // by QueueFull
  uint64_t progress = 0;
  uint64_t stalls = 0;        // times the watchdog found the engine stalled
  uint64_t late_threads = 0;  // times a thread gave no sign of life when asked for one
  int queue_length = 0;       // submitted and waiting
  bool running = false;       // a request is being served
  int slots_used = 0;         // requests whose end has not reached the control plane
  int page_count = 0;

  [[nodiscard]] NamedCounts named() const;  // all of it but those below
  // Counts by what proposed; "none": plain rounds.
  [[nodiscard]] static NamedCounts by_drafter(const uint64_t (&counts)[kDrafterKinds]);
  [[nodiscard]] NamedCounts finished() const;  // ended requests by finish reason
};

class Engine {
 public:
  // Prepares the executor and allocates everything. Throws std::invalid_argument, std::runtime_error (the vocabulary)
  // or whatever the executor throws.
  Engine(Executor& executor, const std::string& vocabulary_path, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs a full prefill chunk, a pass that scores, then a few rounds without a draft and with each drafter, so that
  // code, weights and pages are touched before the first request. Before start(). Throws std::runtime_error if the
  // executor fails.
  void warm_up();
  void start();
  // Ends every request that has not ended (finish reason cancelled), then the threads. Idempotent.
  void stop() noexcept;

  // Returns a handle, unique over the engine's life. Throws InvalidRequest, QueueFull, DeadlineUnreachable or
  // EngineClosed.
  uint64_t submit(const Submission& submission);
  // True if that client has such a request and it had not ended.
  // `shed`: its client did not ask for it, the daemon is being stopped and does not wait for it.
  bool cancel(std::span<const uint8_t> identity, uint64_t id, bool shed = false) noexcept;
  // Ends a request that is held, without a word to its client. False if that client has no such one.
  bool withdraw(std::span<const uint8_t> identity, uint64_t id) noexcept;
  // Releases what a request that was submitted with `hold` has brought. False if that client has no such request that
  // is held.
  bool commit(std::span<const uint8_t> identity, uint64_t id) noexcept;
  // What was pinned by that number no longer is.
  void unpin(uint64_t pin) noexcept;
  void drain() noexcept { draining_ = true; }
  // True once every accepted request has ended and its end has been told to the control plane.
  [[nodiscard]] bool drained() const noexcept;

  [[nodiscard]] EngineStats stats() const noexcept;
  // Time from one round's tokens to the next's, within a request.
  [[nodiscard]] const Histogram& round_ns() const noexcept { return shared_->round_ns; }
  [[nodiscard]] const char* health() const noexcept;  // "ok", "stalled" or "failed"
  // Why the executor has failed; null while it has not, or cannot say.
  [[nodiscard]] const char* failure() const noexcept { return executor_.failure(); }
  [[nodiscard]] int context() const noexcept { return context_; }
  [[nodiscard]] int max_prompt() const noexcept { return max_prompt_; }
  [[nodiscard]] const ExecutorInfo& executor_info() const noexcept { return executor_.info(); }

  // For the io thread: any thread may cancel a slot that it holds.
  [[nodiscard]] EngineShared& shared() noexcept { return *shared_; }
  [[nodiscard]] const Vocabulary& vocabulary() const noexcept { return vocabulary_; }
  void cancel_slot(uint32_t slot) noexcept;

  // What a moment has of requests: looked at apart, one that begins between the looks would be in neither.
  struct Occupancy {
    bool running;  // a request is being served
    int waiting;   // submitted, and not that one
  };
  [[nodiscard]] Occupancy occupancy() const noexcept;
  [[nodiscard]] int queue_length() const noexcept { return occupancy().waiting; }
  [[nodiscard]] int client_share() const noexcept;  // requests that one client may have waiting or running

  // For the control plane: readable when it is to call beat(), which is its sign of life, and to look at health().
  [[nodiscard]] int control_call() const noexcept { return shared_->control_call.fd(); }
  void beat() noexcept {
    shared_->control_call.clear();
    shared_->control_beat.tick();
  }
  // Frees what ended requests have left, as submit() does; for the thread that submits, now and then.
  void free_ended() noexcept;
  // The control plane ends, and is watched no longer.
  void end_beat() noexcept { shared_->control_beat.end(); }

 private:
  void end_threads() noexcept;
  void release() noexcept;
  void check(const Submission& submission) const;
  [[nodiscard]] std::unique_ptr<Choices> choices_of(const Submission& submission) const;
  void check_room(std::span<const uint8_t> client);
  void foresee(RequestSlot& slot);
  [[nodiscard]] uint32_t find(std::span<const uint8_t> identity, uint64_t id) const noexcept;
  [[nodiscard]] uint32_t free_slot() const noexcept;

  Executor& executor_;
  const Vocabulary vocabulary_;
  const EngineOptions options_;
  int context_ = 0;  // tokens a request may have, prompt and completion together
  int max_prompt_ = 0;
  std::unique_ptr<EngineShared> shared_;
  std::unique_ptr<EngineLoop> loop_;
  std::unique_ptr<Forecast> forecast_;
  std::unique_ptr<Watchdog> watchdog_;
  std::thread thread_;
  bool started_ = false;
  bool draining_ = false;
  uint64_t submitted_ = 0;
  uint64_t rehearsed_ = 0;  // of them
  uint64_t refused_ = 0;
  int unfreed_ = 0;  // constraints and log-probabilities of prompts that slots hold, or have held
};

}  // namespace ull
