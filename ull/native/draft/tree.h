// A round's draft: a tree of tokens that may follow the token to be fed. Fixed capacity, no allocation.
//
// Node 0 is the root, the fed token. A parent comes before its children; siblings hold different tokens, in the order
// in which they were added (their rank). Only tokens of the vocabulary are taken.
//
// A drafter that knows how likely a candidate is says so: its chance to be the draw, given that its parent is visited.
// The planner corrects these chances by what became of them, and cuts the tree to the size that pays in this round. So
// such a drafter adds its likeliest nodes first.
#pragma once

#include <cstdint>

#include "executor/executor.h"

namespace ull {

class DraftTree {
 public:
  // An empty draft below `root`. max_nodes (1 .. kMaxTreeTokens) counts the root; max_depth may be 0.
  void reset(int32_t root, int vocabulary, int max_nodes, int max_depth) noexcept {
    vocabulary_ = vocabulary;
    max_nodes_ = max_nodes < kMaxTreeTokens ? max_nodes : kMaxTreeTokens;
    max_depth_ = max_depth;
    count_ = 1;
    deepest_ = 0;
    chain_ = true;
    tokens_[0] = root;
    parents_[0] = 0;
    depths_[0] = 0;
    ranks_[0] = 0;
    children_[0] = 0;
    chances_[0] = 1.0F;
  }

  // The node of `token` below `parent`: a new one, or the one that is there. -1 if the tree is full, the node would lie
  // too deep, or the token is outside the vocabulary. chance: given the parent, 0 .. 1; kUnknown: the drafter cannot
  // say.
  int add(int parent, int32_t token, float chance = kUnknown) noexcept {
    if (token < 0 || token >= vocabulary_ || parent < 0 || parent >= count_) return -1;
    if (const int existing = child(parent, token); existing >= 0) return existing;
    if (count_ >= max_nodes_ || depths_[parent] >= max_depth_) return -1;
    const int node = count_++;
    tokens_[node] = token;
    parents_[node] = static_cast<uint8_t>(parent);
    depths_[node] = static_cast<uint8_t>(depths_[parent] + 1);
    ranks_[node] = children_[parent]++;
    children_[node] = 0;
    chances_[node] = chance;
    if (depths_[node] > deepest_) deepest_ = depths_[node];
    chain_ = chain_ && parent == node - 1;
    return node;
  }

  // Leaves its first `count` nodes, at least the root.
  void cut(int count) noexcept {
    if (count < 1) count = 1;
    for (; count_ > count; --count_) --children_[parents_[count_ - 1]];
    deepest_ = 0;
    chain_ = true;
    for (int node = 1; node < count_; ++node) {
      if (depths_[node] > deepest_) deepest_ = depths_[node];
      chain_ = chain_ && parents_[node] == node - 1;
    }
  }

  // The child of `parent` that holds `token`, or -1.
  [[nodiscard]] int child(int parent, int32_t token) const noexcept {
    for (int node = parent + 1; node < count_ && children_[parent] > 0; ++node) {
      if (parents_[node] == parent && tokens_[node] == token) return node;
    }
    return -1;
  }

  [[nodiscard]] int count() const noexcept { return count_; }
  [[nodiscard]] int max_depth() const noexcept { return max_depth_; }
  [[nodiscard]] int deepest() const noexcept { return deepest_; }
  [[nodiscard]] bool is_chain() const noexcept { return chain_; }             // node i + 1 is node i's child
  [[nodiscard]] const int32_t* tokens() const noexcept { return tokens_; }    // [count]
  [[nodiscard]] const uint8_t* parents() const noexcept { return parents_; }  // [count], the root's is 0
  [[nodiscard]] const uint8_t* depths() const noexcept { return depths_; }    // [count]
  [[nodiscard]] int token(int node) const noexcept { return tokens_[node]; }
  [[nodiscard]] int parent(int node) const noexcept { return parents_[node]; }
  [[nodiscard]] int depth(int node) const noexcept { return depths_[node]; }
  [[nodiscard]] int children(int node) const noexcept { return children_[node]; }
  [[nodiscard]] int rank(int node) const noexcept { return ranks_[node]; }
  [[nodiscard]] float chance(int node) const noexcept { return chances_[node]; }  // as its drafter said, or kUnknown

  static constexpr float kUnknown = -1.0F;

 private:
  int32_t tokens_[kMaxTreeTokens];
  uint8_t parents_[kMaxTreeTokens];
  uint8_t depths_[kMaxTreeTokens];
  uint8_t ranks_[kMaxTreeTokens];
  uint8_t children_[kMaxTreeTokens];  // how many
  float chances_[kMaxTreeTokens];     // given the parent
  int vocabulary_ = 0;
  int max_nodes_ = 1;
  int max_depth_ = 0;
  int count_ = 0;
  int deepest_ = 0;
  bool chain_ = true;
};

// Each node's way from the root, by depth.
struct TreePaths {
  int count = 0;
  uint8_t depths[kMaxTreeTokens];
  uint8_t path[kMaxTreeTokens][kMaxTreeTokens];  // [node][depth 0 .. depths[node]]; the last is the node itself

  void assign(const DraftTree& tree) noexcept { assign(tree.parents(), tree.count()); }
  // parents: [nodes], nodes 1 .. kMaxTreeTokens; parents[i] < i, and the root's is 0.
  void assign(const uint8_t* parents, int nodes) noexcept {
    count = nodes;
    for (int node = 0; node < count; ++node) {
      const int parent = parents[node];
      depths[node] = static_cast<uint8_t>(node == 0 ? 0 : depths[parent] + 1);
      for (int depth = 0; depth < depths[node]; ++depth) path[node][depth] = path[parent][depth];
      path[node][depths[node]] = static_cast<uint8_t>(node);
    }
  }
};

// The shape that the planner wants: node i (0 is the root) is the candidate of rank `ranks[i]` below plan node
// `parents[i]`; parents come first. A drafter that has fewer candidates leaves nodes out.
struct TreePlan {
  int count = 1;  // nodes, root included; 1: do not speculate
  int depth = 0;  // of the deepest node
  uint8_t parents[kMaxTreeTokens] = {};
  uint8_t ranks[kMaxTreeTokens] = {};
  uint8_t depths[kMaxTreeTokens] = {};
  float expected = 1.0F;  // tokens that the round is expected to emit
  // A chain, which pays per depth, stops below a node that survives with less probability: another depth costs more
  // than it brings (tokens per ns of this plan * ns of one more depth). 0: never.
  float least_survival = 0.0F;
};

}  // namespace ull
