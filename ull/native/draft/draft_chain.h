// The ranked tokens from which a draft model fills the planner's tree: a chain of the best, alternatives beside it.
#pragma once

#include <cstdint>

#include "draft/tree.h"

namespace ull {

struct DraftChain {
  static constexpr int kMaxRanks = 4;

  int depth = 0;                              // depths [1, depth] have candidates
  int counts[kMaxTreeTokens];                 // [depth d] how many
  int32_t tokens[kMaxTreeTokens][kMaxRanks];  // [depth d][rank]
  float chances[kMaxTreeTokens];              // [depth d] of the chain's token, given the one before it, if known

  // Ranks wanted at each depth: 1 + the greatest of the plan's -> counts, clipped to kMaxRanks. depth = min(plan.depth,
  // most).
  void want(const TreePlan& plan, int most) noexcept {
    depth = plan.depth < most ? plan.depth : most;
    for (int d = 1; d <= depth; ++d) {
      counts[d] = 1;
      chances[d] = DraftTree::kUnknown;
    }
    for (int i = 1; i < plan.count; ++i) {
      const int d = plan.depths[i];
      const int wanted = plan.ranks[i] + 1 < kMaxRanks ? plan.ranks[i] + 1 : kMaxRanks;
      if (d <= depth && counts[d] < wanted) counts[d] = wanted;
    }
  }

  // Adds the plan's nodes whose parents are the root or the chain of rank 0 below it: what follows another is unknown.
  void fill(const TreePlan& plan, DraftTree& tree) const noexcept {
    int node_of[kMaxTreeTokens] = {0};
    bool on_chain[kMaxTreeTokens] = {true};
    for (int i = 1; i < plan.count; ++i) {
      const int parent = plan.parents[i], d = plan.depths[i], rank = plan.ranks[i];
      on_chain[i] = on_chain[parent] && rank == 0;
      node_of[i] = -1;
      if (d > depth || rank >= counts[d] || !on_chain[parent] || node_of[parent] < 0) continue;
      node_of[i] = tree.add(node_of[parent], tokens[d][rank], chance(d, rank));
    }
  }

 private:
  // Each alternative gets half of what those before it leave.
  [[nodiscard]] float chance(int d, int rank) const noexcept {
    if (chances[d] < 0.0F || rank == 0) return chances[d];
    float left = 1.0F - chances[d];
    for (int i = 1; i <= rank; ++i) left *= 0.5F;
    return left;
  }
};

}  // namespace ull
