// The planner against a simulated executor whose acceptance and costs are known.
#include <algorithm>
#include <random>

#include "check.h"
#include "spec/planner.h"

namespace {

using ull::Planner;
using ull::Speculation;
using ull::TreePlan;

class Simulated final : public ull::Drafter {
 public:
  Simulated(Speculation kind, int64_t step_ns, int ranks, bool branching)
      : kind_(kind), step_ns_(step_ns), ranks_(ranks), branching_(branching) {}
  [[nodiscard]] Speculation kind() const noexcept override { return kind_; }
  [[nodiscard]] ull::Status propose(const ull::DraftContext&, const TreePlan&, ull::DraftTree&) noexcept override {
    return ull::Status::kOk;
  }
  [[nodiscard]] int max_rank() const noexcept override { return ranks_; }
  [[nodiscard]] bool branches() const noexcept override { return branching_; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return step_ns_ * depth; }

 private:
  Speculation kind_;
  int64_t step_ns_;
  int ranks_;
  bool branching_;
};

// v(T) rises by `slope` of a plain round per token.
ull::VerifyCosts costs(double slope) {
  ull::VerifyCosts table;
  for (int i = 0; i < ull::kCostSizes; ++i) table.body_ns[i] = 1e6 * (1.0 + slope * (ull::kCostTokens[i] - 1));
  return table;
}

struct Run {
  double nanoseconds = 0;
  int tokens = 0;
  int rounds = 0;
  int widest = 0;
  [[nodiscard]] double speedup(double plain_ns) const { return tokens * plain_ns / nanoseconds; }
};

// Decodes `tokens` tokens where the chain's next token is right with probability `chance`.
Run simulate(Planner& planner, const Simulated& drafter, double chance, int tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  Run run;
  while (run.tokens < tokens) {
    const Planner::Limits limits{100, 64, 63};
    TreePlan plan;
    const double worth = planner.plan(drafter, 0, limits, plan);
    const bool drafts = planner.approves(drafter, worth, plan, limits);
    int accepted = 0;
    if (drafts) {
      while (accepted < plan.depth && uniform(random) < chance) ++accepted;
      for (int depth = 1; depth <= std::min(accepted + 1, plan.depth); ++depth) {
        planner.learn(drafter.kind(), 0, depth, 1, depth <= accepted ? 0 : -1);
      }
      run.nanoseconds +=
          planner.verify_ns(plan.count, 100, accepted + 1) + static_cast<double>(drafter.cost_ns(plan.depth));
      run.widest = std::max(run.widest, plan.count);
    } else {
      run.nanoseconds += planner.plain_ns(100);
    }
    planner.settle(drafts ? &drafter : nullptr, drafts ? &plan : nullptr, limits, accepted + 1);
    run.tokens += accepted + 1;
    ++run.rounds;
  }
  return run;
}

TEST(unpredictable_text_costs_at_most_three_percent) {
  for (const double slope : {0.02, 0.2, 0.7}) {
    for (const int64_t draft_ns : {int64_t{1000}, int64_t{100'000}, int64_t{600'000}}) {
      const Simulated drafter(Speculation::kDraft, draft_ns, 1, false);
      Planner planner;
      planner.set_costs(costs(slope));
      for (int request = 0; request < 4; ++request) {
        const Run run = simulate(planner, drafter, request == 2 ? 0.02 : 0.0, 500, 1);
        CHECK(run.speedup(1e6) > 0.97);
      }
    }
  }
}

TEST(text_that_stops_being_predictable_costs_little) {
  const Simulated drafter(Speculation::kDraft, 50'000, 1, false);
  Planner planner;
  planner.set_costs(costs(0.1));
  CHECK(simulate(planner, drafter, 0.9, 2000, 1).speedup(1e6) > 1.5);
  CHECK(simulate(planner, drafter, 0.0, 1000, 2).speedup(1e6) > 0.97);
  CHECK(simulate(planner, drafter, 0.9, 4000, 3).speedup(1e6) > 1.3);  // and it recovers
}

TEST(predictable_text_is_drafted_as_far_as_it_pays) {
  const Simulated drafter(Speculation::kDraft, 1000, 1, false);
  Planner cheap, dear;
  cheap.set_costs(costs(0.01));
  dear.set_costs(costs(0.3));
  const Run far = simulate(cheap, drafter, 0.9, 3000, 1);
  const Run near = simulate(dear, drafter, 0.9, 3000, 1);
  CHECK(far.speedup(1e6) > 4.0);
  CHECK(near.speedup(1e6) > 1.5);
  CHECK(far.widest > near.widest);
}

TEST(a_tree_that_costs_what_it_brings_is_not_drafted) {
  const Simulated drafter(Speculation::kDraft, 1000, 1, false);
  Planner planner;
  planner.set_costs(costs(1.0));
  CHECK(simulate(planner, drafter, 0.9, 1000, 1).speedup(1e6) > 0.97);
}

TEST(plans_respect_their_limits) {
  for (const bool adaptive : {true, false}) {
    for (const bool branching : {true, false}) {
      for (const int nodes : {1, 2, 5, 64}) {
        for (const int depth : {0, 1, 3, 63}) {
          const Simulated drafter(Speculation::kMedusa, 10, 4, branching);
          Planner planner(adaptive);
          planner.set_costs(costs(0.001));
          TreePlan plan;
          (void)planner.plan(drafter, 0, {10, nodes, depth}, plan);
          CHECK(plan.count >= 1 && plan.count <= nodes);
          CHECK(plan.depth <= depth);
          for (int i = 1; i < plan.count; ++i) {
            CHECK(plan.parents[i] < i);
            CHECK_EQ(plan.depths[i], plan.depths[plan.parents[i]] + 1);
            CHECK(plan.ranks[i] < 4);
            if (!branching) {  // alternatives hang off the chain of rank 0
              for (int above = plan.parents[i]; above > 0; above = plan.parents[above]) CHECK_EQ(plan.ranks[above], 0);
            }
          }
        }
      }
    }
  }
}

TEST(ranks_that_are_accepted_are_preferred) {
  const Simulated drafter(Speculation::kMedusa, 10, 4, true);
  Planner planner;
  planner.set_costs(costs(0.02));
  for (int i = 0; i < 200; ++i) planner.learn(Speculation::kMedusa, 0, 1, 4, i % 2 == 0 ? 2 : 0);
  CHECK(planner.acceptance(Speculation::kMedusa, 0, 1, 2) > 0.4);
  CHECK(planner.acceptance(Speculation::kMedusa, 0, 1, 1) < 0.1);
  CHECK(planner.acceptance(Speculation::kMedusa, 0, 2, 0) > 0.3);  // untouched
}

}  // namespace
