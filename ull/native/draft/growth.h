// Grows a tree along its likeliest paths. A path's chance is its parent's times the candidate's share among its rivals;
// a node's candidates are asked for when nothing that is known is likelier than the node itself, so that those of most
// leaves are never asked for. The tree is the one that asking for all of them would give.
#pragma once

#include <cstdint>

#include "base/float_math.h"
#include "draft/tree.h"

namespace ull {

// The candidates below one node, best first.
struct Branch {
  int count = 0;
  const int32_t* tokens = nullptr;  // [count]
  const float* shares = nullptr;    // [count] the chance of each, given the node; all valid until the tree has grown
};

// Adds nodes to a tree that has its root alone, until it has `nodes` or there is nothing left. expand(node) -> Branch:
// the candidates below a node. Called at most once for a node.
template <typename Expand>
void grow(int nodes, DraftTree& tree, Expand expand) noexcept {
  float chances[kMaxTreeTokens] = {1.0F};
  bool expanded[kMaxTreeTokens] = {};
  int next[kMaxTreeTokens] = {};
  Branch branches[kMaxTreeTokens];
  while (tree.count() < nodes) {
    int best = -1;
    float most = 0.0F;
    for (int node = 0; node < tree.count(); ++node) {
      const Branch& branch = branches[node];
      if (expanded[node] && next[node] >= branch.count) continue;
      const float chance = expanded[node] ? chances[node] * branch.shares[next[node]] : chances[node];
      if (chance > most) {
        most = chance;
        best = node;
      }
    }
    if (best < 0) return;
    if (!expanded[best]) {
      branches[best] = expand(best);
      expanded[best] = true;
      continue;
    }
    const int rank = next[best]++;
    const int node = tree.add(best, branches[best].tokens[rank], branches[best].shares[rank]);
    if (node < 0) return;
    chances[node] = most;
  }
}

// Scores, the largest first, -> shares that add up to `total`: a softmax.
inline void share_out(const float* scores, int count, float total, float* shares) noexcept {
  float sum = 0.0F;
  for (int i = 0; i < count; ++i) {
    shares[i] = exp_lanes<ScalarMath>(scores[i] - scores[0]);
    sum += shares[i];
  }
  for (int i = 0; i < count; ++i) shares[i] *= total / sum;
}

}  // namespace ull
