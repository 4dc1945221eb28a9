// An executor without a model, for tests and benchmarks of everything around one. It keeps a real KV cache of token
// ids in the pages it is given and reads a round's past back through the page table, so that a page that is missing,
// stale or written by another sequence shows.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "executor/executor.h"

namespace ull {

class ScriptedExecutor : public Executor {
 public:
  struct Options {
    std::vector<int32_t> tokens = {0};  // the token at position p is tokens[p % tokens.size()], ...
    bool from_past = false;             // ... or, if true, a hash of all tokens before it: pages must be right
    int tokens_per_round = 1;
    int vocabulary = 32'000;
    int context = 4096;
    int page_count = 128;
    int prefill_chunk = 256;
    int64_t round_ns = 0;          // time that a round takes
    int64_t prefill_token_ns = 0;  // time that prefill takes per token
    bool blocking = false;         // poll() waits for the step to end, instead of saying kPending
    int layers = 0;                // above 0: steps are computed inside start_*(), with so many beats of the pulse
    int64_t fail_step = -1;        // this step (from 0, of any kind) fails, as do all after
    int64_t hang_step = -1;        // this step never ends unless it is aborted
    bool ignore_abort = false;
    std::string failure = {};          // why it has failed, once it has; empty: it cannot say
    bool restart_helps = false;        // after that
    Reuse reuse = Reuse::kAll;         // unless kAll, rounds write other values than prefill does
    int forced_tokens = 0;             // most prompt tokens that a round takes behind the first
    bool prefill_draws = false;        // the round that ends a prompt writes what prefill does, whatever `reuse` says
    int part = 0;                      // a first round takes what whole parts of so many leave; 0: as many as it may
    bool copies_pages = true;          // false: offers no start_copy()
    int score_nodes = kMaxTreeTokens;  // most nodes of a pass that scores, which takes round_ns; 0: offers none
    bool constraints = true;  // a token that a constraint refuses is drawn again, by a hash of the text before it
  };

  // Throws std::invalid_argument naming the option.
  explicit ScriptedExecutor(Options options);

  void prepare() override;
  void set_pulse(Pulse* pulse) noexcept override { pulse_ = pulse; }
  [[nodiscard]] const ExecutorInfo& info() const noexcept override { return info_; }
  [[nodiscard]] int first_forced(int count, int start) const noexcept override {
    return options_.part > 0 ? (count - 1) % options_.part : Executor::first_forced(count, start);
  }
  [[nodiscard]] Status start_prefill(const PrefillStep& step) noexcept override;
  [[nodiscard]] Status start_round(const RoundStep& step) noexcept override;
  [[nodiscard]] Status start_copy(const CopyStep& step) noexcept override;
  // How likely a token is behind others is a hash of them all; these are no probabilities. It spoils the positions from
  // the root on, which are nobody's, unless they hold the chain that is scored.
  [[nodiscard]] Status start_scores(const ScoreStep& step) noexcept override;
  [[nodiscard]] Status poll(RoundResult& result) noexcept override;
  void abort() noexcept override { aborted_.store(true, std::memory_order_release); }
  [[nodiscard]] const char* failure() const noexcept override {
    return failed_.load(std::memory_order_relaxed) && !options_.failure.empty() ? options_.failure.c_str() : nullptr;
  }
  [[nodiscard]] bool restart_helps() const noexcept override {
    return failed_.load(std::memory_order_relaxed) && options_.restart_helps;
  }

  // Steps from `step` on (from 0, of any kind, not computed inside start_*()) do not end before let_go(), unless they
  // are aborted. Any thread, before that step or within it.
  void hold_from(int64_t step) noexcept { held_from_.store(step, std::memory_order_release); }
  void let_go() noexcept { hold_from(kNever); }

  [[nodiscard]] int64_t steps() const noexcept { return steps_.load(std::memory_order_acquire); }
  [[nodiscard]] int64_t beats() const noexcept { return beats_.load(std::memory_order_acquire); }

  // As start_scores() says, of `token` behind `past`.
  [[nodiscard]] static float scripted_logprob(std::span<const int32_t> past, int32_t token) noexcept;
  // Which token it calls the likeliest there, but for `rank` others.
  [[nodiscard]] TokenLogprob scripted_top(std::span<const int32_t> past, int rank) const noexcept;

 private:
  enum class Kind { kRound, kScores, kOther };
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  [[nodiscard]] Status start(int64_t cost_ns) noexcept;
  [[nodiscard]] Status wait() noexcept;
  [[nodiscard]] bool in_flight() const noexcept;
  [[nodiscard]] Status compute(int64_t cost_ns) noexcept;
  [[nodiscard]] TokenLogprob top_of(uint32_t hash, int rank) const noexcept;
  [[nodiscard]] int32_t& cached(const int32_t* pages, int position) noexcept;
  [[nodiscard]] int32_t next_token(const int32_t* pages, int position) noexcept;
  [[nodiscard]] int32_t allowed_token(const int32_t* pages, int position, TokenConstraint& constraint) noexcept;
  [[nodiscard]] uint32_t hash_of_past(const int32_t* pages, int position) noexcept;
  [[nodiscard]] Status give_round(RoundResult& result) noexcept;
  void give_scores() noexcept;
  [[nodiscard]] bool stands_in_cache(const ScoreStep& step) noexcept;

  const Options options_;
  ExecutorInfo info_;
  std::vector<int32_t> cache_;  // [page_count, kPageTokens] token fed at each position; -1: never written
  std::atomic<bool> aborted_{false};
  std::atomic<int64_t> steps_{0};  // started
  std::atomic<int64_t> held_from_{kNever};
  std::atomic<int64_t> beats_{0};  // of the pulse
  Pulse* pulse_ = nullptr;
  std::atomic<bool> failed_{false};
  bool hanging_ = false;
  int64_t ready_ns_ = 0;           // when the step in flight ends; 0: at once
  Status computed_ = Status::kOk;  // what became of it, where it is computed inside start_*()
  Kind kind_ = Kind::kOther;       // of the step in flight
  RoundStep round_{};
  ScoreStep scores_{};
};

}  // namespace ull
