// Chooses who drafts a round and what, and learns from what became of it: the part of speculation that does not depend
// on how an executor verifies. Each executor has one; it draws, accepts and keeps the cache itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "draft/drafter.h"
#include "draft/planner.h"
#include "draft/tree.h"
#include "executor/executor.h"

namespace ull {

class Proposer {
 public:
  struct Options {
    int vocabulary = 0;
    int context = 0;
    int most_nodes = kMaxTreeTokens;  // of a tree that the executor can verify
    bool adaptive = true;             // false: always the widest tree that is allowed
  };

  // drafters: at most one of each kind. Allocates everything but what the drafters allocate in prepare().
  Proposer(std::vector<std::unique_ptr<Drafter>> drafters, const Options& options);

  // Prepares the drafters -> info.drafters, draft_ns and what they add to its bytes. costs: of the executor's rounds.
  void prepare(const VerifyCosts& costs, ExecutorInfo& info);

  // For drafters that compute on the engine's thread, see Executor::set_pulse().
  void set_pulse(Pulse* pulse) noexcept;

  // With the target's copy.
  void copy_page(const CopyStep& step) noexcept;
  // After the target's prefill of a chunk. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept;

  // Begins a round: fills tree(), with the root alone for a plain one, and for one that `reads` a prompt's end: what
  // that takes says nothing of others. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] Status propose(const RoundStep& step, const DraftContext& now, bool reads = false) noexcept;
  [[nodiscard]] const DraftTree& tree() const noexcept { return tree_; }
  // Who proposed it; kNone: a plain round.
  [[nodiscard]] DrafterKind drafter() const noexcept {
    return chosen_.drafter == nullptr || tree_.count() == 1 ? DrafterKind::kNone : chosen_.drafter->kind();
  }
  // Whether the logits of all its nodes at once are cheaper than those of the visited ones, one after another.
  [[nodiscard]] bool batches_logits() const noexcept {
    return planner_.batches_logits(tree_.count(), static_cast<double>(chosen_.plan.expected));
  }

  // The round has been launched and is not the request's last, whatever it accepts.
  void launched() noexcept {
    if (drafter() != DrafterKind::kNone) chosen_.drafter->run_behind();
  }

  // Ends the round that propose() began, with what it emitted.
  void learn(const RoundStep& step, const RoundResult& result) noexcept;

 private:
  // What a drafter could do in a round.
  struct Option {
    Drafter* drafter = nullptr;
    int confidence = -1;
    double worth = 0.0;
    TreePlan plan;
    Payer payer = Payer::kNobody;
  };
  // A drafter's last plan stands while nothing has been learnt of it, for some rounds.
  struct Planned {
    Option option;
    Planner::Limits limits{};
    int rounds = 0;  // for which it stands yet
  };

  [[nodiscard]] static bool serves(const Drafter& drafter, DrafterKind wanted) noexcept {
    return wanted == drafter.kind() || wanted == DrafterKind::kAuto;
  }
  [[nodiscard]] Status choose(const RoundStep& step, const DraftContext& now) noexcept;
  // Lets a drafter read what it has missed, paid from the planner's reserve.
  [[nodiscard]] Status catch_up(Drafter& drafter, const DraftContext& now, DrafterKind wanted) noexcept;
  void plan(Drafter& drafter, int confidence) noexcept;
  // Whether an option is to be preferred to the one chosen so far.
  [[nodiscard]] bool better(const Option& option) const noexcept;
  // Learns from each node of the proposal that the emitted tokens led past, verified or not.
  void learn_proposal(const int32_t* emitted, int count) noexcept;
  void cast_shadow(const Option& option, const DraftContext& now) noexcept;
  void follow_shadow(const RoundStep& step, int32_t token) noexcept;

  const Options options_;
  const std::vector<std::unique_ptr<Drafter>> drafters_;
  Planner planner_;
  Planned planned_[kDrafterKinds];
  uint64_t rounds_ = 0;                 // that were proposed for
  uint64_t asked_[kDrafterKinds] = {};  // the last of them in which each drafter was

  // The round in flight.
  DraftTree proposed_;  // all of it
  DraftTree tree_;      // what of it is verified
  Option chosen_;
  Planner::Limits limits_{};
  int64_t start_ns_ = 0;     // moved on by what catching up took
  bool reads_ = false;       // the round reads a prompt's end
  int64_t proposed_ns_ = 0;  // when propose() returned

  // What the suffix drafter would have drafted in plain rounds, followed for its statistics alone.
  Drafter* suffix_ = nullptr;
  DraftTree shadow_;
  TreePlan shadow_plan_;     // how many nodes: the drafter gives them their shape
  int shadow_node_ = -1;     // -1: no shadow
  int shadow_position_ = 0;  // of the next token to compare with
  int shadow_confidence_ = 0;
};

}  // namespace ull
