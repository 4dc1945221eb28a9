// What proposes draft tokens. To add a drafter: derive from Drafter, allocate in the constructor or prepare(), add
// candidates to the tree in propose(), and have an executor make it where it prepares.
//
// What a drafter gets and may rely on:
//  - DraftContext: the sequence's tokens, its page table (the draft model's KV uses the same page numbers), the
//    request's sampling, and `hidden`, the lm_head's input (final norm applied, not scaled) of position - 1, i.e. of
//    the node whose draw is the root. Medusa head i (from 0) then predicts position + 1 + i, which is depth i + 1 of
//    the tree. `hidden` is null where it is unknown (a round right after a full prefix-cache hit).
//  - The coupling: rank candidates for depth d by adjusted draft logit + gumbel(seed, position + d, token),
//    at temperature 0 by the logit.
//  - TreePlan: the shape wanted. Candidate `plan.ranks[i]` below plan node `plan.parents[i]`. Use
//    tree.add(node_of[plan.parents[i]], token) and keep node_of[i]; -1 propagates. A chain drafter gets plans whose
//    alternatives hang off the rank-0 chain only (branches() == false).
// A draft that is wrong costs time, never output. Nothing here allocates, locks or throws after prepare().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "draft/tree.h"
#include "executor/executor.h"
#include "executor/token_counts.h"

namespace ull {

inline constexpr int kConfidenceClasses = 4;

struct DraftContext {
  const int32_t* history;  // [position + 1]; history[position] is the root
  int32_t position;        // of the root; depth d stands at position + d
  const int32_t* pages;    // page table; covers position + the tree's greatest depth
  const Sampling* sampling;
  Drafted* drafted;     // in/out; may be null: nothing is
  const float* hidden;  // [target hidden] of position - 1, or null
  const std::atomic<bool>* abort;
  // Of the text up to the root, for requests with penalties; null for others. What a drafter adds it takes back.
  TokenCounts* counts = nullptr;
  int32_t prompt_tokens = 0;  // of the history; what follows them was generated
};

// What became of a round, whoever proposed its tree.
struct DraftOutcome {
  const int32_t* emitted;  // [count] the tokens of positions position + 1 .. position + count
  int32_t count;
  int32_t position;  // of the root
  bool proposed;     // this drafter was asked, whatever of its proposal was verified
};

// The class of Drafter::confidence() of a drafter that knows no better: acceptance falls with the temperature.
[[nodiscard]] constexpr int temperature_confidence(float temperature) noexcept {
  return temperature <= 0.0F ? 0 : temperature < 0.5F ? 1 : temperature < 0.9F ? 2 : 3;
}

class Drafter {
 public:
  virtual ~Drafter() = default;

  [[nodiscard]] virtual DrafterKind kind() const noexcept = 0;
  // Allocates what is left to allocate and measures its costs. May throw.
  virtual void prepare() {}
  // See Executor::set_pulse(); for a drafter with layers of its own to compute.
  virtual void set_pulse(Pulse* pulse) noexcept { (void)pulse; }
  // Follows the target's copy of a page's first tokens, in a cache of its own.
  virtual void copy_page(const CopyStep& step) noexcept { (void)step; }
  // Follows the target's prefill of one chunk. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] virtual Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
    (void)step, (void)abort;
    return Status::kOk;
  }
  // At the beginning of every round of a request that may use this drafter: a chance to read what has piled up, before
  // it is lost. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] virtual Status keep_up(const DraftContext& context) noexcept {
    (void)context;
    return Status::kOk;
  }
  // How good the next proposal will be, as a class 0 .. kConfidenceClasses - 1 with statistics of its own; -1: there is
  // nothing to propose. Called before every plan; must be cheap.
  [[nodiscard]] virtual int confidence(const DraftContext& context) noexcept {
    (void)context;
    return 0;
  }
  // A drafter with a cache of its own that may fall behind the sequence: estimated nanoseconds of reading `tokens` that
  // it has missed, how many it would have to read before it can propose (0 where propose() does that in passing), and
  // doing so. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] virtual bool catches_up() const noexcept { return false; }
  [[nodiscard]] virtual double catch_up_ns(int tokens) const noexcept {
    (void)tokens;
    return 0.0;
  }
  [[nodiscard]] virtual int missed(const DraftContext& context) const noexcept {
    (void)context;
    return 0;
  }
  [[nodiscard]] virtual Status catch_up(const DraftContext& context) noexcept {
    (void)context;
    return Status::kOk;
  }
  // Adds candidates to `tree`, which has its root and limits, following `plan`. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] virtual Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept = 0;
  // On a device: the round that verifies this drafter's tree has been launched, and more will follow it. A chance to
  // have the next proposal begun behind it, before the host has seen what was accepted.
  virtual void run_behind() noexcept {}
  // Told after every round of a request that may use this drafter.
  virtual void observe(const DraftOutcome& outcome) noexcept { (void)outcome; }

  // Greatest depth and rank + 1 that it can propose, and whether it has alternatives below every node.
  [[nodiscard]] virtual int max_depth() const noexcept { return kMaxTreeTokens - 1; }
  [[nodiscard]] virtual int max_rank() const noexcept { return 1; }
  [[nodiscard]] virtual bool branches() const noexcept { return false; }
  // Whether it says in each round how likely its candidates are (DraftTree::add()), and stops where it is unsure. It
  // gets plans of more nodes than pay on average; what does not pay in this round is not verified.
  [[nodiscard]] virtual bool foresees() const noexcept { return false; }
  // What it keeps in memory.
  [[nodiscard]] virtual int64_t weight_bytes() const noexcept { return 0; }
  [[nodiscard]] virtual int64_t kv_bytes() const noexcept { return 0; }
  // Estimated nanoseconds of propose() for a tree of that depth.
  [[nodiscard]] virtual int64_t cost_ns(int depth) const noexcept = 0;
};

// Makes one for each executor that is prepared; empty: there is none.
using MakeDrafter = std::function<std::unique_ptr<Drafter>()>;
// Is given each that an executor has made, and gives back what is to stand in its place; empty: all stay.
using ReplaceDrafter = std::function<std::unique_ptr<Drafter>(std::unique_ptr<Drafter>)>;

}  // namespace ull
