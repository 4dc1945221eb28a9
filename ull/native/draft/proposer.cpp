#include "draft/proposer.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace ull {
namespace {

constexpr int kShadowNodes = 8;
constexpr int kShadowDepth = 4;

}  // namespace

Proposer::Proposer(std::vector<std::unique_ptr<Drafter>> drafters, const Options& options)
    : options_(options), drafters_(std::move(drafters)), planner_(options.adaptive) {
  for (const auto& drafter : drafters_) {
    if (drafter->kind() == DrafterKind::kSuffix && options_.adaptive) suffix_ = drafter.get();
  }
  shadow_plan_.count = kShadowNodes;
  shadow_plan_.depth = kShadowDepth;
}

void Proposer::prepare(const VerifyCosts& costs, ExecutorInfo& info) {
  planner_.set_costs(costs);
  for (const auto& drafter : drafters_) {
    drafter->prepare();
    if (drafter->catches_up()) planner_.grant(drafter->catch_up_ns(options_.context));
    const auto kind = static_cast<size_t>(drafter->kind());
    info.drafters[kind] = true;
    info.drafters[static_cast<size_t>(DrafterKind::kAuto)] = true;
    info.draft_ns[kind] = drafter->cost_ns(1);
    info.drafter_weight_bytes += drafter->weight_bytes();
    info.drafter_kv_bytes += drafter->kv_bytes();
  }
  info.weight_bytes += info.drafter_weight_bytes;
  info.kv_bytes += info.drafter_kv_bytes;
}

void Proposer::set_pulse(Pulse* pulse) noexcept {
  for (const auto& drafter : drafters_) drafter->set_pulse(pulse);
}

void Proposer::copy_page(const CopyStep& step) noexcept {
  for (const auto& drafter : drafters_) drafter->copy_page(step);
}

Status Proposer::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  for (const auto& drafter : drafters_) {
    if (!serves(*drafter, step.speculation)) continue;
    // It reads along where it is going to draft, as far as the reserve goes.
    if (!planner_.pays(worths_[static_cast<size_t>(drafter->kind())])) continue;
    if (!planner_.affords(drafter->catch_up_ns(step.count), step.speculation)) continue;
    const int64_t start = monotonic_ns();
    if (const Status status = drafter->prefill(step, abort); status != Status::kOk) return status;
    if (drafter->catches_up()) planner_.spend(static_cast<double>(monotonic_ns() - start), step.speculation);
  }
  return Status::kOk;
}

Status Proposer::propose(const RoundStep& step, const DraftContext& now) noexcept {
  start_ns_ = monotonic_ns();
  const Status status = choose(step, now);
  proposed_ns_ = monotonic_ns();
  return status;
}

Status Proposer::choose(const RoundStep& step, const DraftContext& now) noexcept {
  chosen_.drafter = nullptr;
  const int room = options_.context - 1 - step.position;
  limits_.position = step.position;
  limits_.wanted = step.speculation;
  limits_.depth = std::min({step.max_tokens - 1, room, kMaxTreeTokens - 1});
  limits_.nodes = std::min({step.max_tree > 0 ? step.max_tree : kMaxTreeTokens, kMaxTreeTokens, options_.most_nodes});
  tree_.reset(step.token, options_.vocabulary, limits_.nodes, limits_.depth);
  if (step.forced > 0 || step.speculation == DrafterKind::kNone || step.history == nullptr || limits_.depth < 1 ||
      limits_.nodes < 2) {
    return Status::kOk;
  }
  for (const auto& drafter : drafters_) {
    if (!serves(*drafter, step.speculation)) continue;
    if (const Status status = drafter->keep_up(now); status != Status::kOk) return status;
    option_.drafter = drafter.get();
    option_.confidence = drafter->confidence(now);
    if (option_.confidence < 0) continue;
    option_.worth = planner_.plan(*drafter, option_.confidence, limits_, option_.plan);
    worths_[static_cast<size_t>(drafter->kind())] = option_.worth;
    if (drafter.get() == suffix_ && shadow_node_ < 0) cast_shadow(option_, now);
    const bool drafts = planner_.approves(*drafter, option_.worth, option_.plan, limits_) &&
                        planner_.affords(drafter->catch_up_ns(drafter->missed(now)), step.speculation);
    if (!drafts && !step.rehearsal) continue;
    if (chosen_.drafter == nullptr || option_.worth > chosen_.worth) chosen_ = option_;
  }
  if (chosen_.drafter == nullptr) return Status::kOk;
  if (chosen_.drafter->missed(now) > 0) {
    if (const Status status = catch_up(*chosen_.drafter, now, step.speculation); status != Status::kOk) return status;
  }
  const Status status = chosen_.drafter->propose(now, chosen_.plan, tree_);
  if (tree_.count() == 1) chosen_.drafter = nullptr;
  return status;
}

Status Proposer::catch_up(Drafter& drafter, const DraftContext& now, DrafterKind wanted) noexcept {
  const int64_t start = monotonic_ns();
  const Status status = drafter.catch_up(now);
  const int64_t took = monotonic_ns() - start;
  planner_.spend(static_cast<double>(took), wanted);
  start_ns_ += took;
  return status;
}

void Proposer::learn(const RoundStep& step, const RoundResult& result) noexcept {
  if (step.rehearsal) return;
  // A round without speculation is recorded too: it tells what plain ones take. One with forced tokens does not.
  chosen_.plan.count = tree_.count();  // a drafter may have had less to propose than was planned
  chosen_.plan.depth = tree_.deepest();
  if (step.forced == 0) {
    planner_.record(chosen_.drafter, chosen_.drafter == nullptr ? nullptr : &chosen_.plan, limits_,
                    {result.count, static_cast<double>(monotonic_ns() - start_ns_),
                     static_cast<double>(proposed_ns_ - start_ns_), chosen_.worth});
  }
  if (step.speculation == DrafterKind::kNone) return;
  int32_t emitted[kMaxTokensPerRound];
  for (int i = 0; i < result.count; ++i) emitted[i] = result.tokens[i].token;
  for (const auto& drafter : drafters_) {
    if (serves(*drafter, step.speculation))
      drafter->observe({emitted, result.count, step.position + step.forced, drafter.get() == chosen_.drafter});
  }
  if (chosen_.drafter == nullptr) {
    follow_shadow(step, emitted[0]);
    return;
  }
  shadow_node_ = -1;
  for (int depth = 1, node = 0; node >= 0 && depth <= result.count; ++depth) {
    const int ranks = tree_.children(node);
    const int hit = tree_.child(node, emitted[depth - 1]);
    if (ranks > 0) {
      planner_.learn(chosen_.drafter->kind(), chosen_.confidence, depth, ranks, hit < 0 ? -1 : tree_.rank(hit));
    }
    node = hit;
  }
}

void Proposer::cast_shadow(const Option& option, const DraftContext& now) noexcept {
  shadow_.reset(now.history[now.position], options_.vocabulary, kShadowNodes, kShadowDepth);
  if (option.drafter->propose(now, shadow_plan_, shadow_) != Status::kOk || shadow_.count() == 1) return;
  shadow_node_ = 0;
  shadow_position_ = now.position + 1;
  shadow_confidence_ = option.confidence;
}

void Proposer::follow_shadow(const RoundStep& step, int32_t token) noexcept {
  if (shadow_node_ < 0) return;
  if (shadow_position_ != step.position + step.forced + 1) {  // another sequence's
    shadow_node_ = -1;
    return;
  }
  const int hit = shadow_.child(shadow_node_, token);
  planner_.learn(DrafterKind::kSuffix, shadow_confidence_, shadow_.depth(shadow_node_) + 1,
                 shadow_.children(shadow_node_), hit < 0 ? -1 : shadow_.rank(hit));
  shadow_node_ = hit >= 0 && shadow_.children(hit) > 0 ? hit : -1;
  ++shadow_position_;
}

}  // namespace ull
