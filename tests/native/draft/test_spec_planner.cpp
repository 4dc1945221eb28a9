// The planner against a simulated executor whose acceptance and costs are known.
#include <algorithm>
#include <cmath>
#include <random>

#include "check.h"
#include "draft/planner.h"

namespace {

using ull::DrafterKind;
using ull::Planner;
using ull::TreePlan;

class Simulated final : public ull::Drafter {
 public:
  Simulated(DrafterKind kind, int64_t step_ns, int ranks, bool branching)
      : kind_(kind), step_ns_(step_ns), ranks_(ranks), branching_(branching) {}
  [[nodiscard]] DrafterKind kind() const noexcept override { return kind_; }
  [[nodiscard]] ull::Status propose(const ull::DraftContext&, const TreePlan&, ull::DraftTree&) noexcept override {
    return ull::Status::kOk;
  }
  [[nodiscard]] int max_rank() const noexcept override { return ranks_; }
  [[nodiscard]] bool branches() const noexcept override { return branching_; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return step_ns_ * depth; }
  [[nodiscard]] bool catches_up() const noexcept override { return kind_ == DrafterKind::kDraft; }
  [[nodiscard]] double catch_up_ns(int tokens) const noexcept override { return 0.2 * tokens * step_ns_; }

 private:
  DrafterKind kind_;
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
  int drafted = 0;  // rounds
  [[nodiscard]] double speedup(double plain_ns) const { return tokens * plain_ns / nanoseconds; }
};

// How the machine differs from the planner's table.
struct Machine {
  ull::VerifyCosts costs;
  double plain_factor = 1.0;    // plain rounds take this many times the table's time
  double drafted_factor = 1.0;  // and drafted ones this many
  double interrupted = 0.0;     // chance that something else takes 4 ms of a millisecond's work
};

// Decodes `tokens` tokens where the chain's next token is right with probability `chance`.
Run simulate(Planner& planner, const Simulated& drafter, double chance, int tokens, unsigned seed,
             const Machine& machine) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  Planner table;  // never learns
  table.set_costs(machine.costs);
  Run run;
  while (run.tokens < tokens) {
    const Planner::Limits limits{100, 64, 63};
    TreePlan plan;
    const double worth = planner.plan(drafter, 0, limits, plan);
    const ull::Payer payer = planner.approves(drafter, worth, plan, limits);
    const bool drafts = payer != ull::Payer::kNobody;
    int accepted = 0;
    if (drafts) {
      while (accepted < plan.depth && uniform(random) < chance) ++accepted;
      for (int depth = 1; depth <= std::min(accepted + 1, plan.depth); ++depth) {
        planner.learn(drafter.kind(), 0, depth, 1, depth <= accepted ? 0 : -1);
      }
      run.widest = std::max(run.widest, plan.count);
    }
    const double drafting = drafts ? static_cast<double>(drafter.cost_ns(plan.depth)) : 0.0;
    double round = drafts ? (table.verify_ns(plan.count, 100, accepted + 1) + drafting) * machine.drafted_factor
                          : table.plain_ns(100) * machine.plain_factor;
    if (uniform(random) < machine.interrupted * round / 1e6) round += 4e6;
    run.nanoseconds += round;
    planner.record(drafts ? &drafter : nullptr, drafts ? &plan : nullptr, limits,
                   {accepted + 1, round, drafting, payer});
    run.tokens += accepted + 1;
    ++run.rounds;
  }
  return run;
}

Run simulate(Planner& planner, const Simulated& drafter, double chance, int tokens, unsigned seed, double slope) {
  return simulate(planner, drafter, chance, tokens, seed, {costs(slope)});
}

TEST(unpredictable_text_costs_at_most_three_percent) {
  for (const double slope : {0.02, 0.2, 0.7}) {
    for (const int64_t draft_ns : {int64_t{1000}, int64_t{100'000}, int64_t{600'000}}) {
      const Simulated drafter(DrafterKind::kDraft, draft_ns, 1, false);
      Planner planner;
      planner.set_costs(costs(slope));
      for (int request = 0; request < 4; ++request) {
        const Run run = simulate(planner, drafter, request == 2 ? 0.02 : 0.0, 500, 1, slope);
        CHECK(run.speedup(1e6) > 0.97);
      }
    }
  }
}

TEST(text_that_stops_being_predictable_costs_little) {
  const Simulated drafter(DrafterKind::kDraft, 50'000, 1, false);
  Planner planner;
  planner.set_costs(costs(0.1));
  CHECK(simulate(planner, drafter, 0.9, 2000, 1, 0.1).speedup(1e6) > 1.5);
  CHECK(simulate(planner, drafter, 0.0, 1000, 2, 0.1).speedup(1e6) > 0.97);
  CHECK(simulate(planner, drafter, 0.9, 4000, 3, 0.1).speedup(1e6) > 1.3);  // and it recovers
}

TEST(predictable_text_is_drafted_as_far_as_it_pays) {
  const Simulated drafter(DrafterKind::kDraft, 1000, 1, false);
  Planner cheap, dear;
  cheap.set_costs(costs(0.01));
  dear.set_costs(costs(0.3));
  const Run far = simulate(cheap, drafter, 0.9, 3000, 1, 0.01);
  const Run near = simulate(dear, drafter, 0.9, 3000, 1, 0.3);
  CHECK(far.speedup(1e6) > 4.0);
  CHECK(near.speedup(1e6) > 1.5);
  CHECK(far.widest > near.widest);
}

TEST(a_tree_that_costs_what_it_brings_is_not_drafted) {
  const Simulated drafter(DrafterKind::kDraft, 1000, 1, false);
  Planner planner;
  planner.set_costs(costs(1.0));
  CHECK(simulate(planner, drafter, 0.9, 1000, 1, 1.0).speedup(1e6) > 0.97);
}

// What a speedup is measured against: the tokens as plain rounds on that machine.
double plain_time(const Machine& machine) {
  Planner table;
  table.set_costs(machine.costs);
  const double plain = table.plain_ns(100) * machine.plain_factor;
  return plain + machine.interrupted * plain / 1e6 * 4e6;
}

TEST(a_table_that_flatters_drafting_is_found_out) {
  // As measured on a busy machine: a plain round took two thirds of what the table says, a drafted one more than it
  // says, so that drafting loses whatever is accepted of one token in two.
  const Simulated drafter(DrafterKind::kMedusa, 100'000, 4, true);
  for (const double chance : {0.0, 0.3, 0.5}) {
    Planner planner;
    planner.set_costs(costs(0.2));
    const Machine machine{costs(0.2), 0.65, 1.15};
    CHECK(simulate(planner, drafter, chance, 3000, 1, machine).speedup(plain_time(machine)) > 0.97);
  }
}

TEST(a_table_that_talks_drafting_down_is_found_out) {
  const Simulated drafter(DrafterKind::kMedusa, 100'000, 4, true);
  Planner planner;
  planner.set_costs(costs(1.0));
  const Machine machine{costs(1.0), 1.5, 0.7};
  CHECK(simulate(planner, drafter, 0.8, 4000, 1, machine).speedup(plain_time(machine)) > 1.2);
}

TEST(interruptions_of_the_machine_are_not_charged_to_drafts) {
  const Simulated drafter(DrafterKind::kMedusa, 10'000, 4, true);
  Planner planner;
  planner.set_costs(costs(0.1));
  const Machine machine{costs(0.1), 1.0, 1.0, 0.1};
  CHECK(simulate(planner, drafter, 0.8, 4000, 1, machine).speedup(plain_time(machine)) > 2.0);
  CHECK(simulate(planner, drafter, 0.0, 20'000, 2, machine).speedup(plain_time(machine)) > 0.96);
}

TEST(deciding_to_ask_nobody_costs_no_credit) {
  Planner planner;
  planner.set_costs(costs(0.1));
  const Planner::Limits limits{100, 64, 63};
  for (int round = 0; round < 1000; ++round) planner.record(nullptr, nullptr, limits, {1, 1.05e6, 5e4});
  CHECK(planner.credit_rounds(limits) > 7.9);          // all that it may hold
  CHECK(std::abs(planner.plain_ns(100) - 1e6) < 1e4);  // what a round without speculation takes, not what these took
}

TEST(a_proposal_that_is_not_verified_is_charged_whole_though_it_took_longer_than_a_round) {
  const Simulated drafter(DrafterKind::kDflash, 2'000'000, 4, true);
  Planner planner;
  planner.set_costs(costs(0.1));
  const Planner::Limits limits{100, 64, 63};
  for (int round = 0; round < 1000; ++round) planner.record(nullptr, nullptr, limits, {1, 1e6, 0.0});
  const double before = planner.credit_rounds(limits);
  TreePlan root;
  root.depth = 1;
  planner.record(&drafter, &root, limits, {1, 3e6, 2e6});
  CHECK(std::abs(before - planner.credit_rounds(limits) - 2.0) < 0.05);
}

TEST(drafters_asked_for_by_name_do_not_spend_what_others_earn) {
  Planner planner;
  planner.set_costs(costs(0.1));
  const Planner::Limits earning{100, 64, 63, DrafterKind::kNone}, other{100, 64, 63, DrafterKind::kMedusa};
  for (int round = 0; round < 200; ++round) planner.record(nullptr, nullptr, earning, {1, 1e6, 0.0});
  planner.record(nullptr, nullptr, other, {1, 1e6, 0.0});
  CHECK(planner.credit_rounds(earning) > 3.0);
  CHECK(planner.credit_rounds(other) < 2.1);
}

TEST(the_reserve_pays_for_catching_up_and_is_refilled_slowly) {
  const Simulated drafter(DrafterKind::kDraft, 100'000, 1, false);
  Planner planner;
  planner.set_costs(costs(0.1));
  const Planner::Limits limits{100, 64, 63};
  const double context = drafter.catch_up_ns(1000);
  planner.grant(context);
  const auto affords = [&](double nanoseconds) { return planner.affords(nanoseconds, limits.wanted); };
  CHECK(affords(context) && !affords(context * 1.01));
  planner.spend(drafter, context, context, limits.wanted);
  CHECK(affords(0.0));  // nothing to catch up with
  CHECK(!affords(drafter.catch_up_ns(1)));
  for (int round = 0; round < 100; ++round) planner.record(nullptr, nullptr, limits, {1, 1e6, 0.0});
  CHECK(affords(0.49e6) && !affords(0.51e6));  // 0.5% of the time
  TreePlan plan;
  plan.count = 5, plan.depth = 4;
  for (int round = 0; round < 100; ++round) planner.record(&drafter, &plan, limits, {5, 1.8e6, 4e5});
  CHECK(affords(context));  // gains pay for it, up to the first grant
  CHECK(!affords(context * 1.01));
}

TEST(plans_respect_their_limits) {
  for (const bool adaptive : {true, false}) {
    for (const bool branching : {true, false}) {
      for (const int nodes : {1, 2, 5, 64}) {
        for (const int depth : {0, 1, 3, 63}) {
          const Simulated drafter(DrafterKind::kMedusa, 10, 4, branching);
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
  const Simulated drafter(DrafterKind::kMedusa, 10, 4, true);
  Planner planner;
  planner.set_costs(costs(0.02));
  for (int i = 0; i < 200; ++i) planner.learn(DrafterKind::kMedusa, 0, 1, 4, i % 2 == 0 ? 2 : 0);
  CHECK(planner.acceptance(DrafterKind::kMedusa, 0, 1, 2) > 0.4);
  CHECK(planner.acceptance(DrafterKind::kMedusa, 0, 1, 1) < 0.1);
  CHECK(planner.acceptance(DrafterKind::kMedusa, 0, 2, 0) > 0.3);  // untouched
}

// A draft model on a machine as it was measured: by the table two tokens cost 1.04 of one and a drafted one 0.14, but
// really, between other work, 1.25 and 0.27. In each round it is sure, or it is not, and says so.
struct DraftModel final : public ull::Drafter {
  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kDraft; }
  [[nodiscard]] ull::Status propose(const ull::DraftContext&, const TreePlan&, ull::DraftTree&) noexcept override {
    return ull::Status::kOk;
  }
  [[nodiscard]] int max_depth() const noexcept override { return 16; }
  [[nodiscard]] int max_rank() const noexcept override { return 4; }
  [[nodiscard]] bool foresees() const noexcept override { return tells; }
  [[nodiscard]] bool catches_up() const noexcept override { return true; }
  [[nodiscard]] double catch_up_ns(int tokens) const noexcept override { return 8e3 * tokens; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return 50'000 * depth; }

  bool tells = true;
};

class MeasuredMachine {
 public:
  static constexpr double kPlain = 345e3;

  explicit MeasuredMachine(unsigned seed) : random_(seed) {
    ull::VerifyCosts table;
    constexpr double kTable[ull::kCostSizes] = {286e3, 297e3, 462e3, 768e3, 1500e3, 2940e3, 5880e3};
    std::copy_n(kTable, ull::kCostSizes, table.body_ns);
    planner.set_costs(table);
    planner.grant(drafter.catch_up_ns(1024));
  }

  // Decodes `tokens` tokens of a request that the drafter has read, or `unread` tokens of which it has not. sure: how
  // often it is; it is right 93% of the time then, and else 35%.
  Run decode(double sure, int tokens, int unread = 0) {
    std::uniform_real_distribution<double> uniform;
    std::normal_distribution<double> noise(1.0, 0.05);
    Run run;
    while (run.tokens < tokens) {
      const Planner::Limits limits{300, 64, 63, DrafterKind::kDraft};
      TreePlan plan;
      const double worth = planner.plan(drafter, 0, limits, plan);
      const ull::Payer payer = planner.approves(drafter, worth, plan, limits);
      if (payer == ull::Payer::kNobody || !planner.affords(drafter.catch_up_ns(unread), DrafterKind::kDraft)) {
        const double plain = kPlain * noise(random_);
        run.nanoseconds += plain + 1e3;
        planner.record(nullptr, nullptr, limits, {1, plain + 1e3, 1e3});
        ++run.tokens, ++run.rounds, unread += unread > 0 ? 1 : 0;
        continue;
      }
      const double reading = drafter.catch_up_ns(unread);
      planner.spend(drafter, reading, reading, DrafterKind::kDraft);
      unread = 0;
      ull::DraftTree tree;
      tree.reset(0, 1000, 64, 63);
      bool right[ull::kMaxTreeTokens] = {true};
      float survival = 1.0F, chances[ull::kMaxTreeTokens];
      for (int depth = 1; depth <= plan.depth && survival >= plan.least_survival; ++depth) {
        const float chance = uniform(random_) < sure ? 0.93F : 0.35F;
        right[depth] = uniform(random_) < static_cast<double>(chance);
        chances[depth] = drafter.tells ? chance : ull::DraftTree::kUnknown;
        (void)tree.add(depth - 1, depth, chances[depth]);
        survival *= drafter.tells ? chance : 1.0F;
      }
      const int proposed = tree.count();
      const double drafting = 45e3 + 48e3 * (proposed - 1);
      tree.cut(planner.size(drafter, 0, tree, limits, worth));
      int accepted = 0;
      while (accepted + 1 < tree.count() && right[accepted + 1]) ++accepted;
      for (int depth = 1; depth <= std::min(accepted + 1, proposed - 1); ++depth) {
        planner.learn_chance(DrafterKind::kDraft, chances[depth], right[depth]);
        planner.learn(DrafterKind::kDraft, 0, depth, 1, right[depth] ? 0 : -1);
      }
      const double round = (drafting + kPlain * (1.0 + 0.25 * (tree.count() - 1))) * noise(random_);
      plan.depth = proposed - 1;
      plan.count = tree.count();
      planner.record(&drafter, &plan, limits, {accepted + 1, round, drafting, payer});
      run.nanoseconds += round + reading;
      run.tokens += accepted + 1;
      ++run.rounds, ++run.drafted;
      run.widest = std::max(run.widest, tree.count());
    }
    return run;
  }

  Planner planner;
  DraftModel drafter;

 private:
  std::mt19937 random_;
};

// Whether the draft model pays does not depend on what came before, once the rounds are over that fill the probes and
// pay for what it has not read: 3 plain rounds at 0.5%, and 400 tokens of 8 us at 0.5%, of 345 us each.
constexpr int kWarmUp = 3000;

TEST(a_draft_model_that_pays_is_drafted_whatever_came_before) {
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    for (const bool tells : {true, false}) {
      MeasuredMachine fresh(seed), disappointed(seed), behind(seed);
      for (MeasuredMachine* machine : {&fresh, &disappointed, &behind}) machine->drafter.tells = tells;
      (void)disappointed.decode(0.0, 4000);
      (void)behind.decode(0.0, 3000);
      behind.planner.spend(behind.drafter, behind.drafter.catch_up_ns(1024), behind.drafter.catch_up_ns(1024),
                           DrafterKind::kDraft);
      (void)behind.decode(0.75, kWarmUp, 400);
      for (MeasuredMachine* machine : {&fresh, &disappointed, &behind}) {
        (void)machine->decode(0.75, kWarmUp);
        const Run run = machine->decode(0.75, 4000);
        CHECK(run.drafted > 0.75 * run.rounds);
        CHECK(run.speedup(MeasuredMachine::kPlain) > (tells ? 1.25 : 1.1));
      }
    }
  }
}

TEST(a_draft_model_that_does_not_pay_costs_its_shares_at_most) {
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    for (const double sure : {0.0, 0.2}) {
      MeasuredMachine machine(seed);
      (void)machine.decode(0.9, 2000);  // what was gained before is part of what may be lost
      (void)machine.decode(sure, 1000);
      CHECK(machine.decode(sure, 4000, 400).speedup(MeasuredMachine::kPlain) > 0.975);
    }
  }
}

TEST(credit_that_is_gone_does_not_keep_what_pays_from_drafting) {
  const Simulated drafter(DrafterKind::kDraft, 50'000, 1, false);
  Planner planner;
  planner.set_costs(costs(0.1));
  const Planner::Limits limits{100, 64, 63, DrafterKind::kDraft};
  // What is proposed and not verified takes more than the rounds earn: no number of them would bring the credit back.
  TreePlan root;
  root.depth = 1;
  for (int round = 0; round < 1000; ++round) planner.record(&drafter, &root, limits, {1, 1.02e6, 2e4});
  CHECK(planner.credit_rounds(limits) < -1.9);
  TreePlan plan;
  const double worth = planner.plan(drafter, 0, limits, plan);
  CHECK(planner.pays(worth));
  CHECK(planner.approves(drafter, worth, plan, limits) == ull::Payer::kProbes);
  for (int round = 0; round < 20; ++round) {
    planner.record(&drafter, &plan, limits, {plan.count, 1e6 + 1e5 * plan.count, 5e4, ull::Payer::kProbes});
  }
  CHECK(planner.credit_rounds(limits) > 2.0);  // what probes gain is credit
  CHECK(planner.approves(drafter, planner.plan(drafter, 0, limits, plan), plan, limits) == ull::Payer::kCredit);
}

TEST(what_asking_brought_counts_beside_what_plans_promise) {
  const Simulated drafter(DrafterKind::kMedusa, 50'000, 4, true);
  Planner planner;
  planner.set_costs(costs(0.1));
  const Planner::Limits limits{100, 64, 63, DrafterKind::kMedusa};
  TreePlan plan;
  const double promised = planner.plan(drafter, 0, limits, plan);
  CHECK(planner.pays(promised));
  TreePlan root;
  root.depth = plan.depth;
  for (int round = 0; round < 30; ++round) {  // asked, and nothing was worth verifying
    planner.record(&drafter, &root, limits, {1, 1.2e6, 2e5, ull::Payer::kCredit, 0});
  }
  CHECK(!planner.pays(planner.plan(drafter, 0, limits, plan)));
  CHECK_EQ(planner.plan(drafter, 1, limits, plan) >= promised, true);  // of another class nothing is known
}

// A chain of `depth` tokens, each accepted with that chance by its drafter.
ull::DraftTree chain(int depth, float chance) {
  ull::DraftTree tree;
  tree.reset(0, 1000, 64, 63);
  for (int node = 0; node < depth; ++node) (void)tree.add(node, node + 1, chance);
  return tree;
}

TEST(a_proposal_is_cut_to_what_pays_in_this_round) {
  const Simulated drafter(DrafterKind::kDraft, 50'000, 1, false);
  Planner planner;
  planner.set_costs(costs(0.25));
  const Planner::Limits limits{100, 64, 63};
  const auto size = [&](const ull::DraftTree& tree, double worth) {
    return planner.size(drafter, 0, tree, limits, worth);
  };
  CHECK_EQ(size(chain(8, 1.0F), 1.0), 9);
  CHECK_EQ(size(chain(8, 0.1F), 1.0), 1);  // another token costs a quarter of a round
  CHECK_EQ(size(chain(8, 0.6F), 1.0), 3);  // 0.6 and 0.36 pay, 0.216 does not
  CHECK_EQ(size(chain(8, 0.6F), 1.6), 2);  // where rounds bring more, less of it does
  CHECK_EQ(size(chain(8, ull::DraftTree::kUnknown), 1.0), 9);
  CHECK_EQ(Planner(false).size(drafter, 0, chain(8, 0.1F), limits, 1.0), 9);
}

TEST(the_chances_that_drafters_say_are_corrected) {
  const Simulated drafter(DrafterKind::kMedusa, 50'000, 1, false);
  Planner planner;
  planner.set_costs(costs(0.25));
  const Planner::Limits limits{100, 64, 63};
  for (int i = 0; i < 300; ++i) {
    planner.learn_chance(DrafterKind::kMedusa, 0.9F, i % 10 == 0);  // boasts
    planner.learn_chance(DrafterKind::kMedusa, 0.1F, i % 10 != 0);  // is modest
  }
  CHECK(std::abs(planner.corrected(DrafterKind::kMedusa, 0.9F) - 0.1) < 0.1);
  CHECK(std::abs(planner.corrected(DrafterKind::kMedusa, 0.1F) - 0.9) < 0.1);
  CHECK(std::abs(planner.corrected(DrafterKind::kMedusa, 0.5F) - 0.5) < 1e-6);
  CHECK(std::abs(planner.corrected(DrafterKind::kDraft, 0.9F) - 0.9) < 1e-6);  // each has its own
  CHECK_EQ(planner.size(drafter, 0, chain(4, 0.9F), limits, 1.0), 1);
  CHECK_EQ(planner.size(drafter, 0, chain(4, 0.1F), limits, 1.0), 5);
}

}  // namespace
