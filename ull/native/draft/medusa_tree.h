// The tree that Medusa heads grow: as many nodes as the plan has, those most likely to be accepted. A path's likelihood
// is the product of its candidates' shares among their rivals, which are the heads' own scores through a softmax.
#pragma once

#include <cstdint>

#include "base/float_math.h"
#include "draft/tree.h"

namespace ull {

inline constexpr int kMaxMedusaHeads = 12;
inline constexpr int kMaxMedusaLayers = 16;  // residual blocks of a head
inline constexpr int kMedusaRanks = 10;      // candidates of a head

// What each head proposes, best first: head d - 1 of depth d. A score is the adjusted logit plus the noise.
struct MedusaCandidates {
  int depth = 0;  // heads that propose
  int counts[kMaxMedusaHeads + 1] = {};
  int32_t tokens[kMaxMedusaHeads + 1][kMedusaRanks];
  float scores[kMaxMedusaHeads + 1][kMedusaRanks];

  // Adds them to a tree that has its root, until it has `nodes` nodes or there is nothing left.
  void grow(int nodes, DraftTree& tree) const noexcept {
    float share[kMaxMedusaHeads + 1][kMedusaRanks];
    for (int d = 1; d <= depth; ++d) {
      float total = 0.0F;
      for (int rank = 0; rank < counts[d]; ++rank) {
        share[d][rank] = exp_lanes<ScalarMath>(scores[d][rank] - scores[d][0]);
        total += share[d][rank];
      }
      for (int rank = 0; rank < counts[d]; ++rank) share[d][rank] /= total;
    }
    float reach[kMaxTreeTokens] = {1.0F};
    uint8_t next_rank[kMaxTreeTokens] = {};
    while (tree.count() < nodes) {
      int parent = -1;
      float most = 0.0F;
      for (int node = 0; node < tree.count(); ++node) {
        const int d = tree.depth(node) + 1;
        if (d > depth || next_rank[node] >= counts[d]) continue;
        const float chance = reach[node] * share[d][next_rank[node]];
        if (chance > most) {
          most = chance;
          parent = node;
        }
      }
      if (parent < 0) return;
      const int d = tree.depth(parent) + 1;
      const int rank = next_rank[parent]++;
      const int node = tree.add(parent, tokens[d][rank], share[d][rank]);
      if (node < 0) return;
      reach[node] = most;
      next_rank[node] = 0;
    }
  }
};

}  // namespace ull
