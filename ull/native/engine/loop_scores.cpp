// Passes that score: over the tokens of the prompt, and over the labels of which the answer is one. Nothing of a pass
// stays in the cache, so that what has been found is all there is to keep if another request comes between two passes.
#include <algorithm>

#include "base/clock.h"
#include "engine/loop.h"

namespace ull {

// Between prefill and what generates: the passes over the prompt, all of which but the last token is in the cache.
EngineLoop::Ending EngineLoop::score_prompt() noexcept {
  RequestSlot& request = *run_->request;
  PromptLogprobs& logprobs = *request.prompt_logprobs;
  int64_t now = run_->step_ns;
  while (!logprobs.scored()) {
    if (const Ending ending = run_pass(logprobs.next_step(request.tokens.get(), run_->sequence->page_table()), now)) {
      return ending;
    }
    if (!logprobs.accept()) return impossible_result();
    if (const Ending ending = check_commands(now)) return ending;
    const bool last = logprobs.scored() && request.max_tokens == 0;
    if (!last && outranked(now)) return {.suspended = true};
  }
  run_->step_ns = now;
  return request.max_tokens > 0 ? Ending{} : Ending{FinishReason::kLength};
}

// In the place of rounds: the passes over the labels' tree, each behind the prompt but its last token.
EngineLoop::Ending EngineLoop::score() noexcept {
  RequestSlot& request = *run_->request;
  Choices& choices = *request.choices;
  Sequence& sequence = *run_->sequence;
  const int32_t position = sequence.size();
  int64_t now = run_->step_ns;
  while (!choices.scored()) {
    if (!reserve(position + choices.widest())) return {FinishReason::kError, kInternal, "the KV cache is full"};
    const ScoreStep step = choices.next_step(request.tokens[position], position, sequence.page_table());
    if (const Ending ending = run_pass(step, now)) return ending;
    if (!choices.accept()) return impossible_result();
    if (const Ending ending = check_commands(now)) return ending;
    if (!choices.scored() && outranked(now)) return {.suspended = true};
  }
  answer(now);
  return {FinishReason::kStop};
}

// The chosen label is the completion, all at once.
void EngineLoop::answer(int64_t now) noexcept {
  RequestSlot& request = *run_->request;
  request.choices->choose(request.sampling, request.prompt_tokens);
  const std::span<const int32_t> label = request.choices->label(request.choices->choice());
  std::ranges::copy(label, request.tokens.get() + request.prompt_tokens);
  run_->completed = static_cast<int32_t>(label.size());
  run_->unannounced_ns = request.timeline.first_token_ns = request.timeline.last_token_ns = now;
  run_->silent_last = request.stops_at(label.back());
  counters(request).completion_tokens += label.size();
}

}  // namespace ull
