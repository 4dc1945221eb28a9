#include "graph/redraws.h"

#include <algorithm>

namespace ull::graph {
namespace {

// The round ends with its first `count` tokens.
void cut(RoundResult& result, int32_t count) noexcept {
  result.count = count;
  result.accepted = count - 1;
}

}  // namespace

bool copy_token(const gpu::EmittedToken& from, int vocabulary, RoundToken& token) noexcept {
  if (from.token < 0 || from.token >= vocabulary || from.top_count < 0 || from.top_count > kMaxTopLogprobs) {
    return false;
  }
  token.token = from.token;
  token.logprob = from.logprob;
  token.top_count = from.top_count;
  for (int rank = 0; rank < from.top_count; ++rank) token.top[rank] = {from.top[rank].token, from.top[rank].logprob};
  return true;
}

Redraws::Redraws(const GraphProgram& program, RoundQueue& queue, const Setting& setting, const Text& text) noexcept
    : program_(program), queue_(queue), setting_(setting), text_(text) {}

void Redraws::begin() noexcept {
  taken_ = asked_ = answered_ = 0;
  redrawn_ = first_asked_ = 0;
}

gpu::RoundRequest& Redraws::request(void* graph, int count, int32_t position) noexcept {
  gpu::RoundRequest& request = queue_.next_request(graph);
  request.mode = gpu::RoundMode::kRedraw;
  request.count = count;
  request.position = position;
  request.max_tokens = count;
  return request;
}

Status Redraws::rehearse() noexcept {
  const int words = (program_.vocabulary + 31) / 32;
  std::fill_n(program_.mask, words, ~uint32_t{0});
  gpu::RoundRequest& masked = request(program_.redraw, 1, 0);
  masked.tokens[0] = -1;
  masked.parents[0] = 0;
  if (queue_.launch(program_.redraw, setting_, text_) != Status::kOk) return Status::kExecutorFailed;
  gpu::RoundRequest& wanted = request(program_.redraws, gpu::kTreeTokens, 0);
  std::fill_n(wanted.tokens, gpu::kTreeTokens, 0);
  std::fill_n(wanted.parents, gpu::kTreeTokens, uint8_t{0});
  if (queue_.launch(program_.redraws, setting_, text_) != Status::kOk) return Status::kExecutorFailed;
  return queue_.drain();
}

// ---- constraints --------------------------------------------------------------------------------------------------

Status Redraws::walk(const RoundStep& step, const gpu::RoundResult& answer, RoundResult& result) noexcept {
  TokenConstraint& constraint = *step.constraint;
  if (redrawn_ == 0) {
    bool whole = false;
    while (!whole && taken_ < result.count && constraint.take(result.tokens[taken_].token)) {
      ++taken_;
      whole = constraint.complete();
    }
    if (whole || taken_ == result.count) {
      cut(result, taken_);
      return Status::kOk;
    }
    const uint32_t* mask = constraint.failure() == nullptr ? constraint.mask() : nullptr;
    if (mask == nullptr) return end_early(result);
    const Status status = draw(answer.tokens[taken_].node, step.position + step.forced + taken_, mask);
    return status == Status::kOk ? Status::kPending : status;
  }
  if (pending()) return queue_.watch();
  const gpu::RoundResult& redrawn = queue_.result(redrawn_);
  // The logits are finite, since the round has drawn from them.
  if (redrawn.status == gpu::RoundStatus::kNotFinite) {
    return queue_.fail("every token that a constraint allows is banned", /*restart_helps=*/true);
  }
  RoundToken& token = result.tokens[taken_];
  if (redrawn.status != gpu::RoundStatus::kOk || redrawn.count != 1 ||
      !copy_token(redrawn.tokens[0], program_.vocabulary, token) || !allowed(token.token)) {
    return queue_.fail("the device gave an impossible answer to a draw under a mask", /*restart_helps=*/true);
  }
  if (!constraint.take(token.token)) return end_early(result);
  cut(result, ++taken_);
  return Status::kOk;
}

// The constraint has failed. What came before stands; the round that starts here will fail.
Status Redraws::end_early(RoundResult& result) const noexcept {
  if (taken_ == 0) return Status::kExecutorFailed;
  cut(result, taken_);
  return Status::kOk;
}

// The mapped mask is free: of the steps before no draw is under way.
Status Redraws::draw(int node, int32_t position, const uint32_t* mask) noexcept {
  std::copy_n(mask, (program_.vocabulary + 31) / 32, program_.mask);
  gpu::RoundRequest& masked = request(program_.redraw, 1, position);
  masked.tokens[0] = -1;
  masked.parents[0] = static_cast<uint8_t>(node);
  if (queue_.launch(program_.redraw, setting_, text_) != Status::kOk) return Status::kExecutorFailed;
  redrawn_ = queue_.launched();
  return Status::kOk;
}

bool Redraws::allowed(int32_t token) const noexcept { return (program_.mask[token / 32] >> (token % 32) & 1U) != 0; }

void Redraws::give_back(const RoundStep& step) noexcept {
  if (taken_ > 0) step.constraint->give_back(taken_);
  taken_ = 0;
}

// ---- scores -------------------------------------------------------------------------------------------------------

void Redraws::ask(const ScoreStep& step) noexcept {
  while (asked_ < step.query_count && queue_.has_slot()) {
    const int count = std::min(step.query_count - asked_, gpu::kTreeTokens);
    gpu::RoundRequest& wanted = request(program_.redraws, count, step.position);
    for (int i = 0; i < count; ++i) {
      const ScoreQuery& query = step.queries[asked_ + i];
      wanted.tokens[i] = query.token;
      wanted.parents[i] = static_cast<uint8_t>(query.node);
    }
    if (queue_.launch(program_.redraws, setting_, text_) != Status::kOk) return;
    if (first_asked_ == 0) first_asked_ = queue_.launched();
    asked_ += count;
  }
}

Status Redraws::collect(const ScoreStep& step) noexcept {
  while (answered_ < asked_) {
    const uint64_t sequence = first_asked_ + static_cast<uint64_t>(answered_ / gpu::kTreeTokens);
    if (sequence > queue_.seen()) return Status::kPending;
    const gpu::RoundResult& answer = queue_.result(sequence);
    const int count = std::min(step.query_count - answered_, gpu::kTreeTokens);
    if (answer.status == gpu::RoundStatus::kNotFinite) {
      return queue_.fail("a logit is not finite", /*restart_helps=*/true);
    }
    bool valid = answer.status == gpu::RoundStatus::kOk && answer.count == count;
    for (int i = 0; i < count && valid; ++i) {
      const gpu::EmittedToken& scored = answer.tokens[i];
      valid = scored.token == step.queries[answered_ + i].token && scored.top_count == step.top_count;
      step.logprobs[answered_ + i] = scored.logprob;
      TokenLogprob* top = step.top + static_cast<ptrdiff_t>(answered_ + i) * step.top_count;
      for (int rank = 0; rank < step.top_count && valid; ++rank) {
        const int32_t token = scored.top[rank].token;
        valid = token >= 0 && token < program_.vocabulary;
        top[rank] = {token, scored.top[rank].logprob};
      }
    }
    if (!valid) return queue_.fail("the device gave an impossible answer to scores", /*restart_helps=*/true);
    answered_ += count;
  }
  return answered_ == step.query_count ? Status::kOk : Status::kPending;
}

}  // namespace ull::graph
