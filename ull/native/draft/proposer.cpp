#include "draft/proposer.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace ull {
namespace {

constexpr int kShadowNodes = 8;
constexpr int kShadowDepth = 4;
constexpr int kPlanStands = 16;  // rounds after the one that it was made for

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
    if (!planner_.pays(planned_[static_cast<size_t>(drafter->kind())].option.worth)) continue;
    if (!planner_.affords(drafter->catch_up_ns(step.count), step.speculation)) continue;
    const int64_t start = monotonic_ns();
    if (const Status status = drafter->prefill(step, abort); status != Status::kOk) return status;
    if (!drafter->catches_up()) continue;
    planner_.spend(*drafter, static_cast<double>(monotonic_ns() - start), drafter->catch_up_ns(step.count),
                   step.speculation);
  }
  return Status::kOk;
}

Status Proposer::propose(const RoundStep& step, const DraftContext& now, bool reads) noexcept {
  start_ns_ = monotonic_ns();
  reads_ = reads || step.forced > 0;
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
  if (reads_ || step.speculation == DrafterKind::kNone || step.history == nullptr || limits_.depth < 1 ||
      limits_.nodes < 2) {
    return Status::kOk;
  }
  ++rounds_;
  for (const auto& drafter : drafters_) {
    if (!serves(*drafter, step.speculation)) continue;
    if (const Status status = drafter->keep_up(now); status != Status::kOk) return status;
    const int confidence = drafter->confidence(now);
    if (confidence < 0) continue;
    plan(*drafter, confidence);
    Option& option = planned_[static_cast<size_t>(drafter->kind())].option;
    if (drafter.get() == suffix_ && shadow_node_ < 0) cast_shadow(option, now);
    option.payer = planner_.approves(*drafter, option.worth, option.plan, limits_);
    const bool drafts = option.payer != Payer::kNobody &&
                        planner_.affords(drafter->catch_up_ns(drafter->missed(now)), step.speculation);
    if ((drafts || step.rehearsal) && better(option)) chosen_ = option;
  }
  if (chosen_.drafter == nullptr) return Status::kOk;
  asked_[static_cast<size_t>(chosen_.drafter->kind())] = rounds_;
  if (chosen_.drafter->missed(now) > 0) {
    if (const Status status = catch_up(*chosen_.drafter, now, step.speculation); status != Status::kOk) return status;
  }
  const Status status = chosen_.drafter->propose(now, chosen_.plan, tree_);
  if (tree_.count() == 1) chosen_.drafter = nullptr;
  if (chosen_.drafter == nullptr || step.rehearsal) return status;
  proposed_ = tree_;
  tree_.cut(planner_.size(*chosen_.drafter, chosen_.confidence, tree_, limits_, chosen_.worth));
  return status;
}

void Proposer::plan(Drafter& drafter, int confidence) noexcept {
  Planned& planned = planned_[static_cast<size_t>(drafter.kind())];
  Option& option = planned.option;
  const bool stands = planned.rounds > 0 && option.confidence == confidence &&
                      planned.limits.wanted == limits_.wanted && planned.limits.nodes == limits_.nodes &&
                      option.plan.depth <= limits_.depth;
  if (stands) {
    --planned.rounds;
    return;
  }
  option.drafter = &drafter;
  option.confidence = confidence;
  option.worth = planner_.plan(drafter, confidence, limits_, option.plan);
  planned.limits = limits_;
  planned.rounds = kPlanStands;
}

// A probe is to find out what estimates do not say: it goes before what they do, and drafters take turns at it.
bool Proposer::better(const Option& option) const noexcept {
  if (chosen_.drafter == nullptr) return true;
  const auto asked = [&](const Option& one) { return asked_[static_cast<size_t>(one.drafter->kind())]; };
  if (option.payer != chosen_.payer) return option.payer == Payer::kProbes;
  if (option.payer == Payer::kProbes) return asked(option) < asked(chosen_);
  return option.worth > chosen_.worth;
}

Status Proposer::catch_up(Drafter& drafter, const DraftContext& now, DrafterKind wanted) noexcept {
  const int64_t start = monotonic_ns();
  const double expected = drafter.catch_up_ns(drafter.missed(now));
  const Status status = drafter.catch_up(now);
  const int64_t took = monotonic_ns() - start;
  planner_.spend(drafter, static_cast<double>(took), expected, wanted);
  start_ns_ += took;
  return status;
}

void Proposer::learn(const RoundStep& step, const RoundResult& result) noexcept {
  if (step.rehearsal) return;
  // A round without speculation is recorded too: it tells what plain ones take. One that reads a prompt's end does not.
  if (chosen_.drafter != nullptr) {
    chosen_.plan.count = tree_.count();  // a drafter may have had less to propose than was planned
    chosen_.plan.depth = proposed_.deepest();
  }
  if (!reads_) {
    planner_.record(chosen_.drafter, chosen_.drafter == nullptr ? nullptr : &chosen_.plan, limits_,
                    {result.count, static_cast<double>(monotonic_ns() - start_ns_),
                     static_cast<double>(proposed_ns_ - start_ns_), chosen_.payer, chosen_.confidence});
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
  planned_[static_cast<size_t>(chosen_.drafter->kind())].rounds = 0;
  learn_proposal(emitted, result.count);
}

void Proposer::learn_proposal(const int32_t* emitted, int count) noexcept {
  const DrafterKind kind = chosen_.drafter->kind();
  for (int depth = 1, node = 0; node >= 0 && depth <= count; ++depth) {
    const int hit = proposed_.child(node, emitted[depth - 1]);
    int ranks = 0;
    for (int other = node + 1; other < proposed_.count(); ++other) {
      if (proposed_.parent(other) != node) continue;
      ++ranks;
      planner_.learn_chance(kind, proposed_.chance(other), other == hit);
    }
    if (ranks > 0) planner_.learn(kind, chosen_.confidence, depth, ranks, hit < 0 ? -1 : proposed_.rank(hit));
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
  planned_[static_cast<size_t>(DrafterKind::kSuffix)].rounds = 0;
  shadow_node_ = hit >= 0 && shadow_.children(hit) > 0 ? hit : -1;
  ++shadow_position_;
}

}  // namespace ull
