// Chooses the shape of each round's draft: the tree whose expected tokens per nanosecond are the most, from measured
// costs and from how often candidates of each rank at each depth have been accepted lately; or no tree at all.
//
// The costs are those of the warm-up, corrected by how long plain and drafted rounds really take. What asking a drafter
// has really brought of late counts beside what its plan promises.
//
// A loss account keeps it honest where its estimates are wrong: a round that took longer than the plain rounds it saved
// is paid from credit, every round earns 0.75% of its time, and a tree is only drafted if its worst outcome is covered.
// Another 0.5% goes to probes, a few at a time, which draft what does not seem to pay, or what credit does not cover
// any more, to notice when it does again. What they lose is their own; what they gain is credit. So text that cannot be
// predicted costs at most these shares, what there was before and the deciding itself, and a drafter that begins to pay
// is back after the rounds that fill the probes once. Requests for one drafter by name neither earn for those for
// another nor spend what these have earned.
//
// Once a drafter has proposed, size() cuts the tree to what pays by its own chances for this very round. They are
// corrected by how often candidates of such a chance have been accepted.
//
// A draft model that must first read what it has missed is paid from a second account, the reserve: 0.5% of every
// round's time, and what its drafts gained. One that does not pay is therefore left behind, and reads on when the
// reserve covers it.
//
// Everything is arithmetic on fixed tables: nothing allocates, locks or throws.
#pragma once

#include <cstdint>

#include "draft/drafter.h"
#include "draft/tree.h"

namespace ull {

// Nanoseconds for kCostTokens[i] tokens at once.
struct VerifyCosts {
  double body_ns[kCostSizes] = {1, 1, 1, 1, 1, 1, 1};  // all layers, on an empty cache
  double body_position_ns[kCostSizes] = {};            // more per position before the root
  double logits_ns[kCostSizes] = {};                   // lm_head over all of them
  bool stepped = false;                                // a size between two of them costs what the larger does
};

// A running mean of measured over estimated time. What takes several times as long as it should was interrupted by the
// machine and says nothing, unless it does so several times in a row.
class TimeRatio {
 public:
  [[nodiscard]] double value() const noexcept { return value_; }
  // Learns from a measured time that was expected to be `expected`, by this ratio; most: samples that count. Returns
  // the time to go by: `expected` where the measured one says nothing.
  double learn(double measured, double expected, double most) noexcept;
  // The same where `expected` does not go by it.
  double learn(double measured, double expected) noexcept;

 private:
  double value_ = 1.0;
  double samples_ = 1.0;  // the estimate counts as one
  int interrupted_ = 0;   // in a row
};

// What pays for drafting a round, if anything does.
enum class Payer : uint8_t { kNobody, kCredit, kProbes };

class Planner {
 public:
  // adaptive: false: a tree of the most nodes allowed, whatever it costs.
  explicit Planner(bool adaptive = true);

  void set_costs(const VerifyCosts& costs) noexcept { costs_ = costs; }

  struct Limits {
    int position;  // of the root
    int nodes;     // root included
    int depth;
    DrafterKind wanted = DrafterKind::kAuto;  // by the request: each has accounts of its own
  };

  // The most that one drafter whose confidence() was `confidence` is to propose, and the worth of asking it in tokens
  // per nanosecond relative to a plain round's.
  double plan(const Drafter& drafter, int confidence, const Limits& limits, TreePlan& plan) const noexcept;
  // Whether drafting is expected to be faster than not to.
  [[nodiscard]] bool pays(double worth) const noexcept;
  // Who pays for drafting a plan of that worth: credit if it pays, probes to find out.
  [[nodiscard]] Payer approves(const Drafter& drafter, double worth, const TreePlan& plan,
                               const Limits& limits) const noexcept;
  // How many of a proposal's first nodes are worth verifying, root included, where drafting is worth that much. All of
  // them if its drafter did not say how likely they are.
  [[nodiscard]] int size(const Drafter& drafter, int confidence, const DraftTree& tree, const Limits& limits,
                         double worth) const noexcept;

  // A node at `depth` - 1 was visited whose children had ranks 0 .. ranks - 1; the draw was the one of rank `hit`, or
  // none of them (-1).
  void learn(DrafterKind drafter, int confidence, int depth, int ranks, int hit) noexcept;
  // A node was visited of which the drafter had said that this child is the draw with `chance`.
  void learn_chance(DrafterKind drafter, float chance, bool hit) noexcept;

  // What a round brought and took.
  struct Outcome {
    int emitted;
    double nanoseconds;            // all of it, without catching up
    double drafting_nanoseconds;   // of these, before the verification began
    Payer payer = Payer::kCredit;  // of a drafted round
    int confidence = 0;            // of a drafted round
  };
  // After every round: `drafter` and `plan` are null for one in which nobody was asked. A plan of the root alone: what
  // was proposed was not worth verifying.
  void record(const Drafter* drafter, const TreePlan* plan, const Limits& limits, const Outcome& outcome) noexcept;

  // The reserve: whether it covers work of that estimate for such requests, and what the work took. It is filled once
  // by grant(), which is also the most that it holds.
  void grant(double nanoseconds) noexcept;
  [[nodiscard]] bool affords(double nanoseconds, DrafterKind wanted) const noexcept {
    return !adaptive_ || nanoseconds <= 0.0 || nanoseconds <= account(wanted).reserve_ns;
  }
  // expected: what affords() was asked for; an interruption of the machine is not charged.
  void spend(const Drafter& drafter, double nanoseconds, double expected, DrafterKind wanted) noexcept {
    if (expected <= 0.0) return;
    account(wanted).reserve_ns -= reading_ratios_[static_cast<int>(drafter.kind())].learn(nanoseconds, expected);
  }

  // The chance that the candidate of `rank` at `depth` is the draw, given that its parent was visited.
  [[nodiscard]] double acceptance(DrafterKind drafter, int confidence, int depth, int rank) const noexcept;
  // What a drafter's chance has meant of late.
  [[nodiscard]] double corrected(DrafterKind drafter, float chance) const noexcept;
  [[nodiscard]] double plain_ns(int position) const noexcept { return verify_ns(1, position, 1.0); }
  // Verifying `tokens` nodes, of which `visited` are expected to be sampled, on the machine as it is now.
  [[nodiscard]] double verify_ns(int tokens, int position, double visited) const noexcept;
  // Whether the logits of all nodes at once are cheaper than those of the visited ones, one after another.
  [[nodiscard]] bool batches_logits(int tokens, double visited) const noexcept;
  [[nodiscard]] double credit_rounds(const Limits& limits) const noexcept {
    return account(limits.wanted).credit_ns / plain_ns(limits.position);
  }

 private:
  static constexpr int kDepths = 16;
  static constexpr int kRanks = 10;
  static constexpr int kSaidClasses = 16;  // of the chances that drafters say

  struct Chance {
    float prior = 0.0F;
    float hits = 0.0F;   // decayed
    float tried = 0.0F;  // decayed
  };

  // What rounds brought in which a drafter was asked: decayed sums, in plain rounds.
  struct Yield {
    double tokens = 0.0;
    double cost = 0.0;
  };

  [[nodiscard]] static int said_class(float chance) noexcept;
  [[nodiscard]] static int depth_index(int depth) noexcept { return (depth < kDepths ? depth : kDepths) - 1; }
  // What drafting may still lose.
  struct Account {
    bool opened = false;  // the first credit has been given
    double credit_ns = 0.0;
    double probes_ns = 0.0;
    bool probing = false;  // until probes_ns is used up
    double reserve_ns = 0.0;
    int since_plain = 0;  // rounds
  };

  [[nodiscard]] Account& account(DrafterKind wanted) noexcept { return accounts_[static_cast<int>(wanted)]; }
  [[nodiscard]] const Account& account(DrafterKind wanted) const noexcept {
    return accounts_[static_cast<int>(wanted)];
  }
  // The smallest measured size that holds `tokens`.
  [[nodiscard]] static int size_index(int tokens) noexcept;
  // One of the tables of costs_ at `tokens`.
  [[nodiscard]] double cost_of(const double* values, int tokens) const noexcept;
  // As measured at warm-up.
  [[nodiscard]] double measured_ns(int tokens, int position, double visited) const noexcept;
  // A round that drafts and verifies `plan`.
  [[nodiscard]] double round_ns(const Drafter& drafter, const TreePlan& plan, int position,
                                double visited) const noexcept;
  [[nodiscard]] double credit_ns(const Limits& limits) const noexcept;
  // What a tree of a request may lose at most: a part of what there is.
  [[nodiscard]] double at_stake(const Limits& limits) const noexcept;
  // Lets a plan have more nodes than pay on average, for a drafter that says in each round which of them do.
  void widen(const Drafter& drafter, const Limits& limits, TreePlan& plan) const noexcept;
  [[nodiscard]] double worst_loss(const Drafter& drafter, const TreePlan& plan, int position) const noexcept;

  const bool adaptive_;
  VerifyCosts costs_;
  Chance chances_[kDrafterKinds][kConfidenceClasses][kDepths][kRanks];
  Chance said_[kDrafterKinds][kSaidClasses];
  Yield yields_[kDrafterKinds][kConfidenceClasses];
  TimeRatio plain_ratio_;                                // of plain rounds to costs_
  TimeRatio drafted_ratios_[kDrafterKinds][kCostSizes];  // of drafted rounds to costs_ * plain_ratio_, by size
  TimeRatio drafting_ratios_[kDrafterKinds];             // of proposals that were not verified to cost_ns()
  TimeRatio reading_ratios_[kDrafterKinds];              // of catching up to catch_up_ns()
  Account accounts_[kDrafterKinds];
  double most_reserve_ns_ = 0.0;
};

}  // namespace ull
