#include "executor/token_counts.h"

#include <algorithm>

#include "executor/executor.h"

namespace ull {

TokenCounts::TokenCounts(int vocabulary, int context)
    : generated_(static_cast<size_t>(vocabulary)),
      prompted_(static_cast<size_t>(vocabulary)),
      distinct_(static_cast<size_t>(vocabulary)),
      text_(static_cast<size_t>(context) + kMaxTokensPerRound + kMaxTreeTokens) {}

// All of it is compared: a stale count would change the output.
void TokenCounts::follow(const int32_t* history, int count, int prompt) noexcept {
  if (prompt != prompt_ || text_count_ > count || !std::equal(history, history + text_count_, text_.data())) clear();
  prompt_ = prompt;
  while (text_count_ < count) add(history[text_count_]);
}

void TokenCounts::add(int32_t token) noexcept {
  if (static_cast<size_t>(text_count_) == text_.size()) return;
  const bool in_prompt = text_count_ < prompt_;
  text_[static_cast<size_t>(text_count_++)] = token;
  if (!known(token)) return;
  const size_t at = static_cast<size_t>(token);
  if (!holds(token)) distinct_[static_cast<size_t>(distinct_count_++)] = token;
  if (in_prompt) {
    prompted_[at] = 1;
  } else {
    ++generated_[at];
  }
}

void TokenCounts::take_back() noexcept {
  if (text_count_ <= prompt_) return;
  const int32_t token = text_[static_cast<size_t>(--text_count_)];
  if (!known(token)) return;
  --generated_[static_cast<size_t>(token)];
  if (!holds(token)) --distinct_count_;  // it was new when it was added, and so it is the last
}

void TokenCounts::clear() noexcept {
  for (int i = 0; i < distinct_count_; ++i) {
    generated_[static_cast<size_t>(distinct_[static_cast<size_t>(i)])] = 0;
    prompted_[static_cast<size_t>(distinct_[static_cast<size_t>(i)])] = 0;
  }
  distinct_count_ = text_count_ = 0;
}

}  // namespace ull
