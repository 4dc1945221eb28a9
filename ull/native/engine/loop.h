// The engine thread: takes a request, prefills its prompt, decodes rounds, reports what happened. See loop.cpp, which
// reads top to bottom.
#pragma once

#include <cstdint>

#include "base/idle.h"
#include "engine/queue.h"
#include "engine/shared.h"
#include "engine/vocabulary.h"
#include "executor/executor.h"
#include "kv/session.h"
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
    SessionCache::Options sessions;
  };

  EngineLoop(EngineShared& shared, Executor& executor, const Vocabulary& vocabulary, const Options& options);

  // The body of the engine thread; returns once shared.stopping is set and every accepted request has ended.
  void run() noexcept;

 private:
  // The request being served.
  struct Run {
    RequestSlot* request = nullptr;
    uint32_t slot = kNoSlot;
    Session* session = nullptr;
    TextAssembler text;  // finds the stop strings; the io thread has its own
    int64_t last_round_ns = 0;
    int32_t completed = 0;       // completion tokens accepted
    int32_t announced = 0;       // of those, told to the io thread
    int64_t unannounced_ns = 0;  // when token `announced` was accepted
    int32_t first_logprob = -1;  // chain of the unannounced tokens' records
    int32_t last_logprob = -1;
    int32_t logprobs_taken = 0;
    bool silent_last = false;
  };

  // Why a request ends; kNone: it goes on.
  struct Ending {
    FinishReason reason = FinishReason::kNone;
    const char* error_code = nullptr;
    const char* error_message = nullptr;
    [[nodiscard]] explicit operator bool() const noexcept { return reason != FinishReason::kNone; }
  };

  [[nodiscard]] bool do_work() noexcept;
  void idle() noexcept;

  void serve(uint32_t slot) noexcept;
  [[nodiscard]] Ending take_over() noexcept;
  [[nodiscard]] Ending prefill() noexcept;
  [[nodiscard]] Ending decode() noexcept;
  [[nodiscard]] Ending accept_round(const RoundStep& step) noexcept;
  void count_round() noexcept;
  void announce() noexcept;
  void end_running(const Ending& ending) noexcept;
  [[nodiscard]] int reusable_tokens() const noexcept;
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
  void look_around(int64_t now) noexcept;
  void publish() noexcept;
  // Where what this request does is counted.
  [[nodiscard]] EngineCounters& counters(const RequestSlot& request) noexcept {
    return request.rehearsal ? rehearsed_ : counters_;
  }

  EngineShared& shared_;
  Agent& agent_;
  Executor& executor_;
  const Vocabulary& vocabulary_;
  const Options options_;
  SessionCache sessions_;
  RequestQueue queue_;
  Run run_;
  int32_t most_forced_ = 0;  // prompt tokens that a round may take behind the first
  RoundResult result_;
  EngineCounters counters_;
  EngineCounters rehearsed_;  // in the place of counters_, for requests that nobody counts
  uint32_t seen_calls_ = 0;
  int64_t idle_since_ns_ = 0;
  int64_t published_ns_ = 0;
};

}  // namespace ull
