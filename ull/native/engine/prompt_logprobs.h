// How likely the tokens of a request's prompt are, each behind those before it, and which would have been the likeliest
// there: the passes that score them, and what they have found. The first token has none.
//
// Each pass is a chain of prompt tokens that stand in the cache already, and asks what follows each of them. The passes
// walk the prompt once, from its beginning to its last token but one, whatever the cache had of it; so the questions,
// and with them every bit of the answers, do not depend on what was cached, nor on who came between two passes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "executor/executor.h"

namespace ull {

// Of the likeliest tokens in a prompt token's place: all of a long prompt are kept until the client has them.
inline constexpr int kMaxPromptTopLogprobs = 5;

class PromptLogprobs {
 public:
  // prompt_tokens: 1 or more. score_nodes: most nodes of a pass, 1 .. kMaxTreeTokens. top_count: how many of the
  // likeliest, 0 .. kMaxPromptTopLogprobs. Allocates everything: four bytes a token, and eight for each of its
  // likeliest.
  PromptLogprobs(int32_t prompt_tokens, int score_nodes, int top_count = 0);

  // What will have been found in the end: one number less than the prompt has tokens.
  [[nodiscard]] int32_t size() const noexcept { return static_cast<int32_t>(values_.size()); }
  [[nodiscard]] int passes() const noexcept { return passes_behind(0); }
  // Of the pass over position `from` and those that follow it.
  [[nodiscard]] int passes_behind(int32_t from) const noexcept { return (size() - from + widest_ - 1) / widest_; }
  [[nodiscard]] int widest() const noexcept { return widest_; }  // nodes of the widest pass
  [[nodiscard]] int top_count() const noexcept { return top_count_; }

  // The first pass that has not been made, which may be asked for again: over `prompt`, which `pages` hold but for its
  // last token. What it finds is written here.
  [[nodiscard]] ScoreStep next_step(const int32_t* prompt, const int32_t* pages) noexcept;
  // That pass has been made. False if what it has found are no log-probabilities.
  [[nodiscard]] bool accept() noexcept;
  [[nodiscard]] bool scored() const noexcept { return found() == size(); }  // no pass is left

  // Numbers that have been found: those of the prompt's tokens [1, 1 + found()). Any thread, for guesses; who is told
  // of them by an event may read them.
  [[nodiscard]] int32_t found() const noexcept { return found_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::span<const float> values() const noexcept { return values_; }   // [size()] of token i + 1
  [[nodiscard]] std::span<const TokenLogprob> top() const noexcept { return top_; }  // [size()][top_count()] likewise

 private:
  [[nodiscard]] int32_t next_count() const noexcept { return std::min(widest_, size() - found()); }

  std::vector<float> values_;  // [prompt_tokens - 1] natural logarithms
  const int top_count_;
  std::vector<TokenLogprob> top_;  // [prompt_tokens - 1][top_count_] likeliest first
  const int32_t widest_;
  std::vector<uint8_t> parents_;     // [widest_] of a chain
  std::vector<ScoreQuery> queries_;  // [widest_] of the next pass
  std::atomic<int32_t> found_{0};
};

}  // namespace ull
