#include "draft/chain_drafter.h"

#include <algorithm>
#include <utility>

namespace ull {

ChainDrafter::ChainDrafter(int vocabulary, int context, int common)
    : vocabulary_(vocabulary), context_(context), common_(common), bias_(kMaxLogitBias) {}

Status ChainDrafter::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  if (step.speculation != DrafterKind::kDraft && step.speculation != DrafterKind::kAuto) return Status::kOk;
  // A gap (a cached prefix that was never drafted) is left to propose(), which knows the tokens.
  if (step.drafted == nullptr || step.drafted->model < step.start) return Status::kOk;
  const int32_t end = step.start + step.count;
  const int32_t begin = step.drafted->model;
  if (begin >= end) return Status::kOk;
  const Status status = read(step.tokens + (begin - step.start), end - begin, begin, step.pages, abort);
  if (status == Status::kOk) step.drafted->model = end;
  return status;
}

int ChainDrafter::confidence(const DraftContext& context) noexcept {
  return temperature_confidence(context.sampling->temperature);
}

int32_t ChainDrafter::first_missing(const DraftContext& context) noexcept {
  return context.drafted == nullptr ? 0 : std::clamp(context.drafted->model, 0, context.position);
}

int ChainDrafter::missed(const DraftContext& context) const noexcept {
  if (context.drafted == nullptr || context.position >= context_) return 0;
  const int32_t gap = context.position - first_missing(context);
  return gap > kSmallGap ? gap : 0;
}

Status ChainDrafter::catch_up(const DraftContext& context) noexcept {
  const int32_t gap = missed(context);
  if (gap == 0) return Status::kOk;
  const int32_t valid = context.position - gap;
  const Status status = read(context.history + valid, gap, valid, context.pages, *context.abort);
  if (status == Status::kOk) context.drafted->model = context.position;
  return status;
}

const Sampling& ChainDrafter::common_sampling(const Sampling& sampling) noexcept {
  sampling_ = sampling;
  sampling_.bias = bias_.data();
  sampling_.bias_count = 0;
  for (int i = 0; i < std::min(sampling.bias_count, kMaxLogitBias); ++i) {
    if (sampling.bias[i].token < common_) {
      bias_[static_cast<size_t>(sampling_.bias_count++)] = sampling.bias[i];
    }
  }
  return sampling_;
}

int ChainDrafter::begin_chain(const DraftContext& context, const TreePlan& plan) noexcept {
  chain_ = fed_ = 0;
  candidates_.want(plan, kMaxDepth);
  return std::max(std::min(candidates_.depth, context_ - context.position), 0);
}

void ChainDrafter::reached_root(const DraftContext& context) noexcept {
  drafted_ = context.drafted;
  position_ = context.position;
  if (drafted_ != nullptr) drafted_->model = position_;
}

void ChainDrafter::observe(const DraftOutcome& outcome) noexcept {
  const int chain = std::exchange(chain_, 0);
  if (chain == 0 || !outcome.proposed || outcome.position != position_) return;
  int agreed = 0;  // tokens of the chain that were emitted
  while (agreed < std::min<int>(chain, outcome.count)) {
    const bool accepted = outcome.emitted[agreed] == candidates_.tokens[agreed + 1][0];
    learn(agreed + 1, accepted);
    if (!accepted) break;
    ++agreed;
  }
  // The token emitted last is in neither cache as far as the sequence knows.
  if (drafted_ != nullptr) drafted_->model = position_ + std::min(1 + std::min(agreed, fed_), outcome.count);
}

}  // namespace ull
