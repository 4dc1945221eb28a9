#include "exec/cpu/draft_model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/gumbel.h"

namespace ull::cpu {
namespace {

constexpr int kTimedSteps = 12;   // the fastest counts
constexpr int kTimedChunks = 3;   // the fastest counts
constexpr int kTimedTokens = 64;  // of a chunk

ModelOptions draft_options(const Model& target) {
  ModelOptions options;
  options.isa = target.kernels().name;
  options.chunk = target.chunk();
  options.pages = target.cache().pages();
  return options;
}

ModelSpec named_draft(const Model& target) {
  if (target.spec().draft == nullptr) throw std::invalid_argument("missing");
  return *target.spec().draft;
}

}  // namespace

int LeadStatistics::classify(float lead) noexcept {
  // Even steps up to a lead that hardly ever fails.
  constexpr float kClassesPerUnit = 3.0F;
  return static_cast<int>(std::clamp(lead * kClassesPerUnit, 0.0F, static_cast<float>(kClasses - 1)));
}

void LeadStatistics::record(int lead_class, bool accepted) noexcept {
  tried_[lead_class] += 1.0F;
  accepted_[lead_class] += accepted ? 1.0F : 0.0F;
  if (tried_[lead_class] <= kMemory) return;
  accepted_[lead_class] *= kMemory / tried_[lead_class];
  tried_[lead_class] = kMemory;
}

DraftModel::DraftModel(const Model& target, bool coupled) try
    : model_(named_draft(target), draft_options(target), target.team()),
      common_(std::min(model_.spec().vocabulary, target.spec().vocabulary)),
      sampler_(model_.kernels(), common_),
      coupled_(coupled),
      logits_(static_cast<size_t>(model_.spec().vocabulary)),
      tokens_(static_cast<size_t>(model_.chunk())),
      bias_(kMaxLogitBias) {
} catch (const std::invalid_argument& error) {
  throw std::invalid_argument(std::string("draft: ") + error.what());
}

void DraftModel::prepare() {
  // Page 0 serves as scratch: no session exists yet.
  const int32_t page = 0;
  const std::atomic<bool> never{false};
  sampling_ = {};
  sampling_.temperature = 1.0F;
  step_ns_ = std::numeric_limits<int64_t>::max();
  const int steps = std::min({kTimedSteps, kPageTokens, model_.spec().context});
  for (int position = 0; position < steps; ++position) {
    const int64_t begin = monotonic_ns();
    const int32_t token = 0;
    if (feed(&token, 1, position, &page, /*logits=*/true, never) != Status::kOk) break;
    (void)sampler_.rank(logits_.data(), position + 1, sampling_, 2, candidates_.tokens[1]);
    step_ns_ = std::min(step_ns_, monotonic_ns() - begin);
  }
  const int chunk = std::min({kTimedTokens, kPageTokens, model_.chunk(), model_.spec().context});
  const std::vector<int32_t> tokens(static_cast<size_t>(chunk), 0);
  int64_t fastest = std::numeric_limits<int64_t>::max();
  for (int run = 0; run < kTimedChunks; ++run) {
    const int64_t begin = monotonic_ns();
    if (feed(tokens.data(), chunk, 0, &page, /*logits=*/false, never) != Status::kOk) break;
    fastest = std::min(fastest, monotonic_ns() - begin);
  }
  read_ns_ = static_cast<double>(fastest) / chunk;
}

Status DraftModel::feed(const int32_t* tokens, int count, int start, const int32_t* pages, bool logits,
                        const std::atomic<bool>& abort) noexcept {
  for (int done = 0; done < count;) {
    const int chunk = std::min(count - done, model_.chunk());
    for (int i = 0; i < chunk; ++i) {
      // The target's vocabulary may have more rows: a token that the draft does not know stands as token 0.
      const int32_t token = tokens[done + i];
      tokens_[static_cast<size_t>(i)] = token < model_.spec().vocabulary ? token : 0;
    }
    const bool last = done + chunk == count;
    const Status status = model_.forward({tokens_.data(), chunk, start + done, pages,
                                          logits && last ? LogitsOf::kLast : LogitsOf::kNone, logits_.data()},
                                         abort);
    if (status != Status::kOk) return status;
    done += chunk;
  }
  return Status::kOk;
}

Status DraftModel::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  if (step.speculation != Speculation::kDraft && step.speculation != Speculation::kAuto) return Status::kOk;
  // A gap (a cached prefix that was never drafted) is left to propose(), which knows the tokens.
  if (step.drafted == nullptr || *step.drafted < step.start) return Status::kOk;
  const int32_t end = step.start + step.count;
  const int32_t begin = *step.drafted;
  if (begin >= end) return Status::kOk;
  const Status status =
      feed(step.tokens + (begin - step.start), end - begin, begin, step.pages, /*logits=*/false, abort);
  if (status == Status::kOk) *step.drafted = end;
  return status;
}

int DraftModel::confidence(const DraftContext& context) noexcept {
  // Acceptance falls with the temperature.
  const float temperature = context.sampling->temperature;
  return temperature <= 0.0F ? 0 : temperature < 0.5F ? 1 : temperature < 0.9F ? 2 : 3;
}

void DraftModel::adopt(const Sampling& sampling) noexcept {
  sampling_ = sampling;
  if (!coupled_) sampling_.temperature = 0.0F;
  sampling_.bias = bias_.data();
  sampling_.bias_count = 0;
  for (int i = 0; i < std::min(sampling.bias_count, kMaxLogitBias); ++i) {
    if (sampling.bias[i].token < common_) {
      bias_[static_cast<size_t>(sampling_.bias_count++)] = sampling.bias[i];
    }
  }
}

bool DraftModel::rank(const DraftContext& context, int d) noexcept {
  const int wanted = candidates_.counts[d];
  int32_t* tokens = candidates_.tokens[d];
  const int32_t position = context.position + d;
  const int found = sampler_.rank(logits_.data(), position, sampling_, std::max(wanted, 2), tokens, context.counts);
  candidates_.counts[d] = std::min(found, wanted);
  if (found < 2) {
    leads_[d] = LeadStatistics::classify(found == 1 ? 1e9F : 0.0F);
    return found > 0;
  }
  const auto adjusted = [&](int32_t token) {
    return Sampler::adjusted(logits_[static_cast<size_t>(token)], token, sampling_, context.counts);
  };
  float lead = adjusted(tokens[0]) - adjusted(tokens[1]);
  if (sampling_.temperature > 0.0F) {
    lead = lead / sampling_.temperature + gumbel(sampling_.seed, position, tokens[0]) -
           gumbel(sampling_.seed, position, tokens[1]);
  }
  leads_[d] = LeadStatistics::classify(lead);
  return true;
}

int DraftModel::missed(const DraftContext& context) const noexcept {
  if (context.drafted == nullptr || context.position >= model_.spec().context) return 0;
  const int32_t gap = context.position - std::clamp(*context.drafted, 0, context.position);
  return gap > kSmallGap ? gap : 0;
}

Status DraftModel::catch_up(const DraftContext& context) noexcept {
  const int32_t gap = missed(context);
  if (gap == 0) return Status::kOk;
  const int32_t valid = context.position - gap;
  const Status status = feed(context.history + valid, gap, valid, context.pages, /*logits=*/false, *context.abort);
  if (status == Status::kOk) *context.drafted = context.position;
  return status;
}

Status DraftModel::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  chain_ = 0;
  candidates_.want(plan, kMaxDepth);
  const int32_t root = context.position;
  const int depth = std::min(candidates_.depth, model_.spec().context - root);
  if (depth < 1) return Status::kOk;
  adopt(*context.sampling);

  // What the target has seen since the last draft, up to and with the root.
  const int32_t valid = context.drafted == nullptr ? 0 : std::clamp(*context.drafted, 0, root);
  Status status =
      feed(context.history + valid, root + 1 - valid, valid, context.pages, /*logits=*/true, *context.abort);
  if (status != Status::kOk) return status;
  // The root counts once the target has it too: observe().
  if (context.drafted != nullptr) *context.drafted = root;

  drafted_ = context.drafted;
  position_ = root;
  fed_ = candidates_.depth = 0;
  float survival = 1.0F;
  for (int d = 1; d <= depth && rank(context, d); ++d) {
    chain_ = candidates_.depth = d;
    survival *= statistics_.acceptance(leads_[d]);
    if (d == depth || survival < plan.least_survival) break;
    // An error leaves the counts with the chain in them; they are made anew for the round that is run instead.
    status = feed(&candidates_.tokens[d][0], 1, root + d, context.pages, /*logits=*/true, *context.abort);
    if (status != Status::kOk) return status;
    fed_ = d;
    if (context.counts != nullptr) context.counts->add(candidates_.tokens[d][0]);
  }
  for (int d = 1; d <= fed_ && context.counts != nullptr; ++d) context.counts->take_back();
  candidates_.fill_chain(plan, tree);
  return Status::kOk;
}

void DraftModel::observe(const DraftOutcome& outcome) noexcept {
  const int chain = std::exchange(chain_, 0);
  if (chain == 0 || !outcome.proposed || outcome.position != position_) return;
  int agreed = 0;  // tokens of the chain that were emitted
  while (agreed < std::min<int>(chain, outcome.count)) {
    const bool accepted = outcome.emitted[agreed] == candidates_.tokens[agreed + 1][0];
    statistics_.record(leads_[agreed + 1], accepted);
    if (!accepted) break;
    ++agreed;
  }
  // The token emitted last is in neither cache as far as the session knows.
  if (drafted_ != nullptr) *drafted_ = position_ + std::min(1 + std::min(agreed, fed_), outcome.count);
}

}  // namespace ull::cpu
