// Chooses the shape of each round's draft: the tree whose expected tokens per nanosecond are the most, from measured
// costs and from how often candidates of each rank at each depth have been accepted lately; or no tree at all.
//
// A loss account keeps it honest where its estimates are wrong: a round that brought less than plain rounds would have
// brought is paid from credit, plain rounds earn 1.5% of their time, and a tree is only drafted if its worst outcome is
// covered. So text that cannot be predicted costs at most that share and the credit that was there. With credit to
// spare it now and then drafts what does not seem to pay, so that it notices when it does again.
//
// Everything is arithmetic on fixed tables: nothing allocates, locks or throws.
#pragma once

#include <cstdint>

#include "spec/drafter.h"
#include "spec/tree.h"

namespace ull {

// Nanoseconds for kCostTokens[i] tokens at once.
struct VerifyCosts {
  double body_ns[kCostSizes] = {1, 1, 1, 1, 1, 1, 1};  // all layers, on an empty cache
  double body_position_ns[kCostSizes] = {};            // more per position before the root
  double logits_ns[kCostSizes] = {};                   // lm_head over all of them
};

class Planner {
 public:
  // adaptive: false, for tests: a tree of the most nodes allowed, whatever it costs.
  explicit Planner(bool adaptive = true);

  void set_costs(const VerifyCosts& costs) noexcept { costs_ = costs; }

  struct Limits {
    int position;  // of the root
    int nodes;     // root included
    int depth;
  };

  // A shape for one drafter whose confidence() was `confidence`, and its worth in tokens per nanosecond relative to a
  // plain round's.
  double plan(const Drafter& drafter, int confidence, const Limits& limits, TreePlan& plan) const noexcept;
  // Whether a plan of that worth is to be drafted: it pays, or there is credit for finding out.
  [[nodiscard]] bool approves(const Drafter& drafter, double worth, const TreePlan& plan,
                              const Limits& limits) const noexcept;

  // A node at `depth` - 1 was visited whose children had ranks 0 .. ranks - 1; the draw was the one of rank `hit`, or
  // none of them (-1).
  void learn(Speculation drafter, int confidence, int depth, int ranks, int hit) noexcept;
  // After every round: `plan` is null for a plain one.
  void settle(const Drafter* drafter, const TreePlan* plan, const Limits& limits, int emitted) noexcept;

  // The chance that the candidate of `rank` at `depth` is the draw, given that its parent was visited.
  [[nodiscard]] double acceptance(Speculation drafter, int confidence, int depth, int rank) const noexcept;
  [[nodiscard]] double plain_ns(int position) const noexcept { return verify_ns(1, position, 1.0); }
  // Verifying `tokens` nodes, of which `visited` are expected to be sampled.
  [[nodiscard]] double verify_ns(int tokens, int position, double visited) const noexcept;
  // Whether the logits of all nodes at once are cheaper than those of the visited ones, one after another.
  [[nodiscard]] bool batches_logits(int tokens, double visited) const noexcept;
  [[nodiscard]] double credit_rounds(int position) const noexcept { return credit_ns_ / plain_ns(position); }

 private:
  static constexpr int kDepths = 16;
  static constexpr int kRanks = 10;

  struct Chance {
    float prior = 0.0F;
    float hits = 0.0F;   // decayed
    float tried = 0.0F;  // decayed
  };

  [[nodiscard]] static int depth_index(int depth) noexcept { return (depth < kDepths ? depth : kDepths) - 1; }
  [[nodiscard]] double worst_loss(const Drafter& drafter, const TreePlan& plan, int position) const noexcept;

  const bool adaptive_;
  VerifyCosts costs_;
  Chance chances_[kSpeculations][kConfidenceClasses][kDepths][kRanks];
  double credit_ns_ = 0.0;
  bool opened_ = false;  // the first credit has been given
};

}  // namespace ull
