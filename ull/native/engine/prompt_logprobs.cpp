#include "engine/prompt_logprobs.h"

#include <cmath>

namespace ull {

PromptLogprobs::PromptLogprobs(int32_t prompt_tokens, int score_nodes, int top_count)
    : values_(static_cast<size_t>(prompt_tokens - 1)),
      top_count_(top_count),
      top_(values_.size() * static_cast<size_t>(top_count)),
      widest_(std::max(1, std::min(score_nodes, prompt_tokens - 1))),
      parents_(static_cast<size_t>(widest_)),
      queries_(static_cast<size_t>(widest_)) {
  for (size_t node = 1; node < parents_.size(); ++node) parents_[node] = static_cast<uint8_t>(node - 1);
}

ScoreStep PromptLogprobs::next_step(const int32_t* prompt, const int32_t* pages) noexcept {
  const int32_t position = found();
  const int32_t count = next_count();
  for (int32_t node = 0; node < count; ++node) {
    queries_[static_cast<size_t>(node)] = {.node = node, .token = prompt[position + node + 1]};
  }
  return {.tokens = prompt + position,
          .parents = parents_.data(),
          .count = count,
          .position = position,
          .pages = pages,
          .queries = queries_.data(),
          .query_count = count,
          .logprobs = values_.data() + position,
          .top_count = top_count_,
          .top = top_.data() + static_cast<ptrdiff_t>(position) * top_count_};
}

bool PromptLogprobs::accept() noexcept {
  const auto first = values_.begin() + found();
  const int32_t count = next_count();
  if (!std::all_of(first, first + count, [](float value) { return std::isfinite(value); })) return false;
  const auto likeliest = top_.begin() + static_cast<ptrdiff_t>(found()) * top_count_;
  if (!std::all_of(likeliest, likeliest + static_cast<ptrdiff_t>(count) * top_count_,
                   [](const TokenLogprob& each) { return std::isfinite(each.logprob); })) {
    return false;
  }
  found_.store(found() + count, std::memory_order_relaxed);
  return true;
}

}  // namespace ull
