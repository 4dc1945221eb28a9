// The engine thread: takes the most urgent request, prefills its prompt, decodes rounds or scores choices, reports what
// happened. See loop.cpp, which reads top to bottom; loop_scores.cpp has the passes that score, loop_exchange.cpp what
// it tells others and hears from them. Between two steps a more urgent request may come first: what one request has
// come to lies in its Run, and it goes on from there.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/idle.h"
#include "engine/run_constraint.h"
#include "engine/schedule.h"
#include "engine/shared.h"
#include "engine/vocabulary.h"
#include "executor/executor.h"
#include "kv/prefix_cache.h"
#include "sync/agent.h"

namespace ull {

class EngineLoop final : private Pulse {
 public:
  struct Options {
    int context = 0;           // tokens, prompt and completion together
    int core = -1;             // core of the engine thread; -1: any
    bool cooperative = false;  // gives its core away for a moment wherever others may be waiting for it
    IdleMode idle = IdleMode::kAdaptive;
    int64_t slow_cycle_ns = 10'000'000;  // cycles longer than this are counted
    int64_t aging_ns = 2'000'000'000;    // see Schedule
    PrefixCache::Options cache;
  };

  EngineLoop(EngineShared& shared, Executor& executor, const Vocabulary& vocabulary, const Options& options);

  // The body of the engine thread; returns once shared.stopping is set and every accepted request has ended.
  void run() noexcept;

  // Before run(): what is known of the steps' costs already.
  [[nodiscard]] StepCosts& costs() noexcept { return costs_; }
  // For guesses by other threads.
  [[nodiscard]] const CachedPages& cached() const noexcept { return cache_.cached(); }

 private:
  static constexpr const char* kInternal = "internal";  // the error's code where the engine is at fault

  // A request that has begun.
  struct Run {
    RequestSlot* request = nullptr;
    uint32_t slot = kNoSlot;
    Sequence* sequence = nullptr;  // null: it has none yet, or has lost it while it was suspended
    TextAssembler text;            // finds the stop strings; the io thread has its own
    RunConstraint constraint;      // the request's, if it has one
    bool forces = false;           // what it forces is not drawn
    int64_t last_round_ns = 0;
    int64_t step_ns = 0;         // when the present step could begin
    int32_t completed = 0;       // completion tokens accepted
    int32_t announced = 0;       // of those, told to the io thread
    int64_t unannounced_ns = 0;  // when token `announced` was accepted
    int32_t first_logprob = -1;  // chain of the unannounced tokens' records
    int32_t last_logprob = -1;
    int32_t logprobs_taken = 0;
    bool silent_last = false;
    uint64_t progress_before = 0;

    // Tokens of its text: the prompt, and what has followed.
    [[nodiscard]] int32_t text_tokens() const noexcept { return request->prompt_tokens + completed; }
  };

  // Why the work on a request ends; kNone: it goes on.
  struct Ending {
    FinishReason reason = FinishReason::kNone;
    const char* error_code = nullptr;
    const char* error_message = nullptr;
    bool suspended = false;  // it does not end: a more urgent one comes first
    [[nodiscard]] explicit operator bool() const noexcept { return reason != FinishReason::kNone || suspended; }
  };

  [[nodiscard]] bool do_work() noexcept;
  void idle() noexcept;

  void serve(Priority priority) noexcept;
  void begin(uint32_t slot) noexcept;
  void suspend() noexcept;
  [[nodiscard]] bool outranked(int64_t now) noexcept;
  [[nodiscard]] bool may_begin(uint32_t slot) noexcept;
  [[nodiscard]] Ending open_sequence() noexcept;
  [[nodiscard]] bool reserve(int32_t tokens) noexcept;
  [[nodiscard]] Ending prefill() noexcept;
  [[nodiscard]] Ending decode() noexcept;
  [[nodiscard]] Ending begin_completion() noexcept;
  [[nodiscard]] Ending accept_round(const RoundStep& step) noexcept;
  [[nodiscard]] Ending accept_token(int32_t token) noexcept;
  [[nodiscard]] int32_t look_ahead(int32_t most) noexcept;
  [[nodiscard]] Ending accept_forced(int32_t most) noexcept;
  void count_round() noexcept;
  void trace(TraceKind kind, int64_t begin_ns, int64_t end_ns, int32_t count) noexcept;
  [[nodiscard]] Ending run_pass(const ScoreStep& step, int64_t& now) noexcept;
  [[nodiscard]] Ending score_prompt() noexcept;
  [[nodiscard]] Ending score() noexcept;
  void answer(int64_t now) noexcept;
  void announce() noexcept;
  void end_run(Run& run, const Ending& ending) noexcept;
  [[nodiscard]] int reusable_tokens(const Run& run) const noexcept;
  void end(uint32_t slot, const Ending& ending, const EngineEvent& last) noexcept;

  template <typename Start>
  [[nodiscard]] Ending run_step(Start&& start) noexcept;
  [[nodiscard]] Status wait_for_step() noexcept;
  [[nodiscard]] bool take_record(int32_t& record) noexcept;
  [[nodiscard]] Ending take_logprob(const RoundToken& token) noexcept;

  [[nodiscard]] bool beat() noexcept override;
  [[nodiscard]] Ending check_commands(int64_t now) noexcept;
  [[nodiscard]] Ending interruption(const RequestSlot& request, int64_t now) const noexcept;
  [[nodiscard]] Ending executor_failure() const noexcept;
  [[nodiscard]] Ending impossible_result() noexcept;
  [[nodiscard]] Ending constraint_failure() const noexcept;
  void look_around(int64_t now) noexcept;
  void publish() noexcept;
  [[nodiscard]] Run& run_of(Priority priority) noexcept { return runs_[static_cast<size_t>(priority)]; }
  // Where what this request does is counted.
  [[nodiscard]] EngineCounters& counters(const RequestSlot& request) noexcept {
    return request.rehearsal ? rehearsed_ : counters_;
  }

  EngineShared& shared_;
  Agent& agent_;
  Executor& executor_;
  const Vocabulary& vocabulary_;
  const Options options_;
  PrefixCache cache_;
  Schedule schedule_;
  std::array<Run, kPriorities> runs_;  // what has begun, by priority
  Run* run_ = nullptr;                 // what is worked on, of these
  int32_t most_forced_ = 0;            // tokens that a round may take behind the first
  std::vector<int32_t> forced_;        // [most_forced_] what a constraint forces
  int64_t abort_grace_ns_ = 0;         // how long an aborted step may still take
  RoundResult result_;
  EngineCounters counters_;
  StepCosts costs_;
  int unlearnt_rounds_ = 0;   // before the next that is learnt from
  EngineCounters rehearsed_;  // in the place of counters_, for requests that nobody counts
  uint32_t seen_calls_ = 0;
  int64_t next_limit_ns_ = 0;  // when a request may next have to end because of the time
  int64_t idle_since_ns_ = 0;
  int64_t published_ns_ = 0;
  bool unpublished_ = false;  // a request has ended since
};

}  // namespace ull
