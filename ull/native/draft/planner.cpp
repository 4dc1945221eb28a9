#include "draft/planner.h"

#include <algorithm>
#include <cmath>

namespace ull {
namespace {

constexpr double kEarned = 0.0075;     // of the time of every round, by credit
constexpr double kProbed = 0.005;      // and by probes
constexpr double kFirstCredit = 2.0;   // plain rounds
constexpr double kMostCredit = 8.0;    // plain rounds
constexpr double kMargin = 1.02;       // a tree must be worth this many plain rounds
constexpr double kAtStake = 0.5;       // of the credit, by a tree of more than one token
constexpr double kProbeStart = 3.0;    // plain rounds of probes: fewer are not begun with
constexpr double kProbeEnd = 0.5;      // plain rounds
constexpr double kReserved = 0.005;    // of the time of every round, for catching up
constexpr double kOutlier = 2.5;       // a round that takes longer than it should by this factor was interrupted ...
constexpr int kInterruptions = 3;      // ... unless so many in a row do
constexpr double kPlainMemory = 64.0;  // plain rounds whose time counts
constexpr double kRareMemory = 12.0;   // where they are rare
constexpr double kDraftMemory = 32.0;  // drafted rounds of a drafter and size whose time counts
// Where drafting gains less than this factor, one round in so many is plain: the times that are compared must be of the
// same hour. It costs at most 1/3 of 1/48 of the time.
constexpr double kClearWorth = 1.5;
constexpr int kPlainEvery = 48;
constexpr float kPriorWeight = 3.0F;   // observations that a prior counts for
constexpr float kMemory = 0.97F;       // what is left of an observation after the next one
constexpr double kLeastReach = 0.01;   // a node less likely than this is not considered
constexpr double kPlanWeight = 6.0;    // plain rounds that a plan's worth counts for, beside what rounds brought
constexpr double kYieldMemory = 0.97;  // what is left of a round after the next one
constexpr float kSaidWeight = 6.0F;    // observations that what a drafter says counts for
constexpr float kSaidMemory = 0.99F;
constexpr int kWider = 4;  // nodes that a plan may have beyond what pays on average, or as many again

// First guesses, by drafter and, for the suffix drafter, by how sure it is.
float first_chance(int drafter, int confidence, int depth, int rank) {
  constexpr float kSuffix[kConfidenceClasses] = {0.1F, 0.3F, 0.6F, 0.85F};
  float chance = 0.6F;
  if (static_cast<DrafterKind>(drafter) == DrafterKind::kSuffix) {
    chance = depth == 1 ? kSuffix[confidence] : std::min(0.9F, kSuffix[confidence] + 0.15F);
  }
  for (int i = 0; i < rank; ++i) chance *= 0.3F;
  return chance;
}

// values[i] belongs to kCostTokens[i] tokens.
double interpolate(const double* values, int tokens) noexcept {
  int upper = 0;
  while (upper < kCostSizes - 1 && kCostTokens[upper] < tokens) ++upper;
  if (upper == 0 || tokens >= kCostTokens[upper]) return values[upper];
  const double share = static_cast<double>(tokens - kCostTokens[upper - 1]) /
                       static_cast<double>(kCostTokens[upper] - kCostTokens[upper - 1]);
  return values[upper - 1] + share * (values[upper] - values[upper - 1]);
}

}  // namespace

double TimeRatio::learn(double measured, double expected, double most) noexcept {
  if (measured <= kOutlier * expected) {
    interrupted_ = 0;
  } else if (++interrupted_ < kInterruptions) {
    return expected;
  }
  measured = std::min(measured, kOutlier * expected);
  samples_ = std::min(samples_ + 1.0, most);
  value_ += (value_ * measured / expected - value_) / samples_;
  return measured;
}

double TimeRatio::learn(double measured, double expected) noexcept {
  return learn(measured, expected * value_, kDraftMemory);
}

Planner::Planner(bool adaptive) : adaptive_(adaptive) {
  for (int drafter = 0; drafter < kDrafterKinds; ++drafter) {
    for (int confidence = 0; confidence < kConfidenceClasses; ++confidence) {
      for (int depth = 1; depth <= kDepths; ++depth) {
        for (int rank = 0; rank < kRanks; ++rank) {
          chances_[drafter][confidence][depth - 1][rank].prior = first_chance(drafter, confidence, depth, rank);
        }
      }
    }
  }
}

int Planner::size_index(int tokens) noexcept {
  int size = 0;
  while (size < kCostSizes - 1 && kCostTokens[size] < tokens) ++size;
  return size;
}

double Planner::cost_of(const double* values, int tokens) const noexcept {
  return costs_.stepped ? values[size_index(tokens)] : interpolate(values, tokens);
}

double Planner::measured_ns(int tokens, int position, double visited) const noexcept {
  const double all = cost_of(costs_.logits_ns, tokens);
  return cost_of(costs_.body_ns, tokens) + position * cost_of(costs_.body_position_ns, tokens) +
         std::min(all, visited * costs_.logits_ns[0]);
}

double Planner::verify_ns(int tokens, int position, double visited) const noexcept {
  return measured_ns(tokens, position, visited) * plain_ratio_.value();
}

double Planner::round_ns(const Drafter& drafter, const TreePlan& plan, int position, double visited) const noexcept {
  const double measured = measured_ns(plan.count, position, visited) + static_cast<double>(drafter.cost_ns(plan.depth));
  return measured * plain_ratio_.value() *
         drafted_ratios_[static_cast<int>(drafter.kind())][size_index(plan.count)].value();
}

bool Planner::batches_logits(int tokens, double visited) const noexcept {
  return cost_of(costs_.logits_ns, tokens) < visited * costs_.logits_ns[0];
}

double Planner::acceptance(DrafterKind drafter, int confidence, int depth, int rank) const noexcept {
  const Chance& known = chances_[static_cast<int>(drafter)][confidence][depth_index(depth)][std::min(rank, kRanks - 1)];
  return static_cast<double>((known.hits + kPriorWeight * known.prior) / (known.tried + kPriorWeight));
}

int Planner::said_class(float chance) noexcept {
  return std::clamp(static_cast<int>(chance * kSaidClasses), 0, kSaidClasses - 1);
}

double Planner::corrected(DrafterKind drafter, float chance) const noexcept {
  const Chance& known = said_[static_cast<int>(drafter)][said_class(chance)];
  return static_cast<double>((known.hits + kSaidWeight * chance) / (known.tried + kSaidWeight));
}

void Planner::learn_chance(DrafterKind drafter, float chance, bool hit) noexcept {
  if (!(chance >= 0.0F)) return;
  Chance& known = said_[static_cast<int>(drafter)][said_class(chance)];
  known.hits = known.hits * kSaidMemory + (hit ? 1.0F : 0.0F);
  known.tried = known.tried * kSaidMemory + 1.0F;
}

// The proposal is there and paid for. So another node is worth its cost if it brings as many tokens as rounds bring in
// that time: at the drafter's worth, or a plain round's.
int Planner::size(const Drafter& drafter, int confidence, const DraftTree& tree, const Limits& limits,
                  double worth) const noexcept {
  if (!adaptive_ || tree.count() == 1 || tree.chance(1) < 0.0F) return tree.count();
  const double per_ns = std::max(worth, 1.0) / plain_ns(limits.position);
  double reach[kMaxTreeTokens] = {1.0};
  double expected = 1.0;
  double best = 1.0 - per_ns * plain_ns(limits.position);
  int size = 1;
  for (int node = 1; node < tree.count(); ++node) {
    const double chance = tree.chance(node) >= 0.0F
                              ? corrected(drafter.kind(), tree.chance(node))
                              : acceptance(drafter.kind(), confidence, tree.depth(node), tree.rank(node));
    reach[node] = reach[tree.parent(node)] * chance;
    expected += reach[node];
    const double ratio = drafted_ratios_[static_cast<int>(drafter.kind())][size_index(node + 1)].value();
    const double value = expected - per_ns * verify_ns(node + 1, limits.position, expected) * ratio;
    if (value > best) {
      best = value;
      size = node + 1;
    }
  }
  return size;
}

// Grows the tree by the node most likely to be reached and keeps the size with the best worth.
double Planner::plan(const Drafter& drafter, int confidence, const Limits& limits, TreePlan& plan) const noexcept {
  const DrafterKind kind = drafter.kind();
  const int nodes = std::min(limits.nodes, kMaxTreeTokens);
  const int depth = std::min(limits.depth, drafter.max_depth());
  const double plain = plain_ns(limits.position);
  double reach[kMaxTreeTokens] = {1.0};
  uint8_t next_rank[kMaxTreeTokens] = {};
  bool on_chain[kMaxTreeTokens] = {true};
  plan = TreePlan{};
  TreePlan best;
  double best_worth = 0.0;
  while (plan.count < nodes) {
    int parent = -1;
    double most = adaptive_ ? kLeastReach : 0.0;
    for (int node = 0; node < plan.count; ++node) {
      if (plan.depths[node] >= depth || next_rank[node] >= drafter.max_rank()) continue;
      if (!drafter.branches() && !on_chain[node]) continue;
      const double chance = reach[node] * acceptance(kind, confidence, plan.depths[node] + 1, next_rank[node]);
      if (chance > most) {
        most = chance;
        parent = node;
      }
    }
    if (parent < 0) break;
    const int node = plan.count++;
    plan.parents[node] = static_cast<uint8_t>(parent);
    plan.ranks[node] = next_rank[parent]++;
    plan.depths[node] = static_cast<uint8_t>(plan.depths[parent] + 1);
    plan.depth = std::max<int>(plan.depth, plan.depths[node]);
    plan.expected += static_cast<float>(most);
    reach[node] = most;
    on_chain[node] = on_chain[parent] && plan.ranks[node] == 0;
    next_rank[node] = 0;
    const double expected = static_cast<double>(plan.expected);
    const double worth = expected * plain / round_ns(drafter, plan, limits.position, expected);
    const bool covered = worst_loss(drafter, plan, limits.position) <= at_stake(limits);
    if (!adaptive_ || best.count == 1 || (worth > best_worth && covered)) {
      best = plan;
      best_worth = worth;
    } else if (worth < 0.8 * best_worth || !covered) {
      break;
    }
  }
  plan = best;
  if (!adaptive_ || plan.count < 2) return best_worth;
  if (drafter.foresees()) widen(drafter, limits, plan);
  const double node_ns = (verify_ns(plan.count, limits.position, 1.0) - plain) / (plan.count - 1);
  const auto depth_ns = static_cast<double>(drafter.cost_ns(plan.depth) - drafter.cost_ns(plan.depth - 1));
  const Yield& yield = yields_[static_cast<int>(kind)][confidence];
  // The suffix drafter's guesses are scored in rounds that verify none, too: these say more than rounds long past.
  const double worth = kind == DrafterKind::kSuffix
                           ? best_worth
                           : (yield.tokens + kPlanWeight * best_worth) / (yield.cost + kPlanWeight);
  // One that branches proposes what it has, and is cut: nothing at all would cost a proposal that nobody accounts for.
  if (!drafter.branches()) {
    plan.least_survival = static_cast<float>(std::max(worth, 1.0) / plain * (depth_ns + node_ns));
  }
  return worth;
}

// Adds to the chain of rank 0: a drafter that branches takes from a plan no more than its size and depth.
void Planner::widen(const Drafter& drafter, const Limits& limits, TreePlan& plan) const noexcept {
  const int nodes = std::min({limits.nodes, kMaxTreeTokens, plan.count + std::max(kWider, plan.count)});
  const int depth = std::min(limits.depth, drafter.max_depth());
  int end = 0;  // of the chain
  for (int node = 1; node < plan.count; ++node) {
    if (plan.parents[node] == end && plan.ranks[node] == 0) end = node;
  }
  while (plan.count < nodes) {
    const bool deeper = plan.depths[end] < depth;
    if (!deeper && !drafter.branches()) return;
    TreePlan wider = plan;
    const int node = wider.count++;
    // Beyond the depth that there is, a node counts for the size alone.
    wider.parents[node] = static_cast<uint8_t>(deeper ? end : wider.parents[end]);
    wider.ranks[node] = static_cast<uint8_t>(deeper ? 0 : wider.ranks[node - 1] + 1);
    wider.depths[node] = static_cast<uint8_t>(wider.depths[wider.parents[node]] + 1);
    wider.depth = std::max<int>(wider.depth, wider.depths[node]);
    if (worst_loss(drafter, wider, limits.position) > at_stake(limits)) return;
    plan = wider;
    if (deeper) end = node;
  }
}

bool Planner::pays(double worth) const noexcept { return !adaptive_ || worth >= kMargin; }

double Planner::credit_ns(const Limits& limits) const noexcept {
  const Account& own = account(limits.wanted);
  return own.opened ? std::max(own.credit_ns, 0.0) : kFirstCredit * plain_ns(limits.position);
}

// A single wrong guess shall not cost all that there is: smaller trees go on after it.
double Planner::at_stake(const Limits& limits) const noexcept {
  return kAtStake * std::max(credit_ns(limits), account(limits.wanted).probes_ns);
}

double Planner::worst_loss(const Drafter& drafter, const TreePlan& plan, int position) const noexcept {
  return round_ns(drafter, plan, position, 1.0) - plain_ns(position);
}

Payer Planner::approves(const Drafter& drafter, double worth, const TreePlan& plan,
                        const Limits& limits) const noexcept {
  if (plan.count < 2) return Payer::kNobody;
  if (!adaptive_) return Payer::kCredit;
  const Account& own = account(limits.wanted);
  if (worth < kClearWorth && own.since_plain >= kPlainEvery) return Payer::kNobody;
  const double loss = worst_loss(drafter, plan, limits.position);
  if (pays(worth) && loss <= credit_ns(limits)) return Payer::kCredit;
  // The suffix drafter's guesses are scored without being verified: what does not seem to pay needs no probes.
  if (!pays(worth) && drafter.kind() == DrafterKind::kSuffix) return Payer::kNobody;
  return own.probing && loss <= own.probes_ns ? Payer::kProbes : Payer::kNobody;
}

void Planner::learn(DrafterKind drafter, int confidence, int depth, int ranks, int hit) noexcept {
  for (int rank = 0; rank < std::min(ranks, kRanks); ++rank) {
    Chance& known = chances_[static_cast<int>(drafter)][confidence][depth_index(depth)][rank];
    known.hits = known.hits * kMemory + (rank == hit ? 1.0F : 0.0F);
    known.tried = known.tried * kMemory + 1.0F;
  }
}

void Planner::record(const Drafter* drafter, const TreePlan* plan, const Limits& limits,
                     const Outcome& outcome) noexcept {
  Account& own = account(limits.wanted);
  const double plain = plain_ns(limits.position);
  if (!own.opened) {
    own.opened = true;
    own.credit_ns = kFirstCredit * plain;
    own.probes_ns = kProbeStart * plain;
  }
  double cost = plain;
  double gain = 0.0;
  const bool verified = plan != nullptr && plan->count > 1;
  if (verified) {
    // As many nodes are visited as tokens emitted.
    TimeRatio& ratio = drafted_ratios_[static_cast<int>(drafter->kind())][size_index(plan->count)];
    cost = ratio.learn(outcome.nanoseconds, round_ns(*drafter, *plan, limits.position, outcome.emitted), kDraftMemory);
    gain = outcome.emitted * plain - cost;
    ++own.since_plain;
  } else {
    // A proposal that is not verified is a loss; the rest is what a round without speculation takes. Deciding to ask
    // nobody is none: it takes its time whatever comes of it, and an account that paid for it could never be filled.
    (void)plain_ratio_.learn(outcome.nanoseconds - outcome.drafting_nanoseconds, plain,
                             own.since_plain > kPlainEvery / 2 ? kRareMemory : kPlainMemory);
    if (drafter != nullptr) {
      gain = -drafting_ratios_[static_cast<int>(drafter->kind())].learn(
          outcome.drafting_nanoseconds, static_cast<double>(drafter->cost_ns(plan->depth)) * plain_ratio_.value());
    }
    own.since_plain = 0;
  }
  if (drafter != nullptr) {
    Yield& yield = yields_[static_cast<int>(drafter->kind())][outcome.confidence];
    yield.tokens = yield.tokens * kYieldMemory + outcome.emitted;
    yield.cost = yield.cost * kYieldMemory + (outcome.emitted * plain - gain) / plain;
    if (drafter->catches_up()) own.reserve_ns += gain;
  }
  const double most = kMostCredit * plain;
  const bool probe = drafter != nullptr && outcome.payer == Payer::kProbes;
  const double least = -kFirstCredit * plain;  // below it an error of the estimates would lock drafting out
  own.credit_ns = std::clamp(own.credit_ns + (probe ? std::max(gain, 0.0) : gain) + kEarned * cost, least, most);
  own.probes_ns = std::clamp(own.probes_ns + (probe ? std::min(gain, 0.0) : 0.0) + kProbed * cost, least, most);
  own.probing = own.probes_ns >= (own.probing ? kProbeEnd : kProbeStart) * plain;
  own.reserve_ns = std::min(own.reserve_ns + kReserved * cost, most_reserve_ns_);
}

void Planner::grant(double nanoseconds) noexcept {
  most_reserve_ns_ = nanoseconds;
  for (Account& own : accounts_) own.reserve_ns = nanoseconds;
}

}  // namespace ull
