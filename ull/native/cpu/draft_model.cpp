#include "cpu/draft_model.h"

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

const ModelSpec& named_draft(const Model& target) {
  if (target.spec().draft == nullptr) throw std::invalid_argument("missing");
  return *target.spec().draft;
}

int common_vocabulary(const Model& target) {
  return std::min(named_draft(target).vocabulary, target.spec().vocabulary);
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
    : ChainDrafter(named_draft(target).vocabulary, named_draft(target).context, common_vocabulary(target)),
      model_(named_draft(target), draft_options(target), target.team()),
      sampler_(model_.kernels(), common_vocabulary(target)),
      coupled_(coupled),
      logits_(static_cast<size_t>(model_.spec().vocabulary)),
      tokens_(static_cast<size_t>(model_.chunk())) {
} catch (const std::invalid_argument& error) {
  throw std::invalid_argument(std::string("draft: ") + error.what());
}

void DraftModel::prepare() {
  // Page 0 serves as scratch: no sequence exists yet.
  const int32_t page = 0;
  const std::atomic<bool> never{false};
  Sampling sampling;
  sampling.temperature = 1.0F;
  step_ns_ = std::numeric_limits<int64_t>::max();
  const int steps = std::min({kTimedSteps, kPageTokens, model_.spec().context});
  for (int position = 0; position < steps; ++position) {
    const int64_t begin = monotonic_ns();
    const int32_t token = 0;
    if (feed(&token, 1, position, &page, /*logits=*/true, never) != Status::kOk) break;
    (void)sampler_.rank(logits_.data(), position + 1, sampling, 2, candidates_.tokens[1]);
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
    for (int i = 0; i < chunk; ++i) tokens_[static_cast<size_t>(i)] = known(tokens[done + i]);
    const bool last = done + chunk == count;
    const Status status = model_.forward({tokens_.data(), chunk, start + done, pages,
                                          logits && last ? LogitsOf::kLast : LogitsOf::kNone, logits_.data()},
                                         abort);
    if (status != Status::kOk) return status;
    done += chunk;
  }
  return Status::kOk;
}

bool DraftModel::rank(const DraftContext& context, const Sampling& sampling, int d) noexcept {
  const int wanted = candidates_.counts[d];
  int32_t* tokens = candidates_.tokens[d];
  const int32_t position = context.position + d;
  const int found = sampler_.rank(logits_.data(), position, sampling, std::max(wanted, 2), tokens, context.counts);
  candidates_.counts[d] = std::min(found, wanted);
  if (found < 2) {
    leads_[d] = LeadStatistics::classify(found == 1 ? 1e9F : 0.0F);
    return found > 0;
  }
  const auto adjusted = [&](int32_t token) {
    return Sampler::adjusted(logits_[static_cast<size_t>(token)], token, sampling, context.counts);
  };
  float lead = adjusted(tokens[0]) - adjusted(tokens[1]);
  if (sampling.temperature > 0.0F) {
    lead = lead / sampling.temperature + gumbel(sampling.seed, position, tokens[0]) -
           gumbel(sampling.seed, position, tokens[1]);
  }
  leads_[d] = LeadStatistics::classify(lead);
  return true;
}

Status DraftModel::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  const int depth = begin_chain(context, plan);
  if (depth < 1) return Status::kOk;
  Sampling sampling = common_sampling(*context.sampling);
  if (!coupled_) sampling.temperature = 0.0F;

  // What the target has seen since the last draft, up to and with the root.
  const int32_t root = context.position, missing = first_missing(context);
  Status status =
      feed(context.history + missing, root + 1 - missing, missing, context.pages, /*logits=*/true, *context.abort);
  if (status != Status::kOk) return status;
  reached_root(context);

  candidates_.depth = 0;
  float survival = 1.0F;
  for (int d = 1; d <= depth && rank(context, sampling, d); ++d) {
    chain_ = candidates_.depth = d;
    candidates_.chances[d] = statistics_.acceptance(leads_[d]);
    survival *= candidates_.chances[d];
    if (d == depth || survival < plan.least_survival) break;
    // An error leaves the counts with the chain in them; they are made anew for the round that is run instead.
    status = feed(&candidates_.tokens[d][0], 1, root + d, context.pages, /*logits=*/true, *context.abort);
    if (status != Status::kOk) return status;
    fed_ = d;
    if (context.counts != nullptr) context.counts->add(candidates_.tokens[d][0]);
  }
  for (int d = 1; d <= fed_ && context.counts != nullptr; ++d) context.counts->take_back();
  candidates_.fill(plan, tree);
  return Status::kOk;
}

}  // namespace ull::cpu
