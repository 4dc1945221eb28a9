// The tree that Medusa heads grow: as many nodes as the plan has, those most likely to be accepted. A path's likelihood
// is the product of its candidates' shares among their rivals, which are the heads' own scores through a softmax.
#pragma once

#include <cstdint>

#include "draft/growth.h"
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
    float shares[kMaxMedusaHeads + 1][kMedusaRanks];
    for (int d = 1; d <= depth; ++d) share_out(scores[d], counts[d], 1.0F, shares[d]);
    ull::grow(nodes, tree, [&](int node) -> Branch {
      const int d = tree.depth(node) + 1;
      if (d > depth) return {};
      return {counts[d], tokens[d], shares[d]};
    });
  }
};

}  // namespace ull
