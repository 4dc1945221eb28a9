// The tree that an EAGLE head grows, level by level: the head is run on the likeliest nodes of a level, each of which
// gets candidates, and in the end the likeliest of all candidates become the draft. A path's likelihood is the product
// of its candidates' shares among their rivals, which are the head's own scores through a softmax. The order of calls:
// begin, add_candidates of the root, then next_level and add_candidates of each node that it names until it names none,
// then finish.
//
// Fixed arrays, nothing allocates; both executors use it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/float_math.h"
#include "draft/tree.h"

namespace ull {

inline constexpr int kMaxEagleDepth = 8;  // of a draft
inline constexpr int kMaxEagleWidth = 8;  // nodes of a level that the head is run on
inline constexpr int kEagleRanks = 10;    // candidates of a node
inline constexpr int kMaxEagleEntries = 1 + (kMaxEagleDepth - 1) * kMaxEagleWidth;  // the root's and the levels'
static_assert(kMaxEagleEntries <= kMaxTreeTokens);

class EagleTree {
 public:
  static constexpr int kCapacity = 1 + kMaxEagleEntries * kEagleRanks;  // nodes that it may know

  // A draft of up to `nodes` nodes, its root included, and of that depth. The head runs on no more than `width` nodes
  // of a level.
  void begin(int nodes, int depth, int width = kMaxEagleWidth) noexcept {
    nodes_ = std::clamp(nodes, 1, kMaxTreeTokens);
    depth_ = std::clamp(depth, 0, kMaxEagleDepth);
    width_ = std::clamp(width, 1, kMaxEagleWidth);
    count_ = 1;
    level_ = 1;
    reaches_[0] = 1.0F;
    parents_[0] = 0;
    depths_[0] = 0;
    tokens_[0] = -1;
  }

  // What may follow `node`, which is 0, the root, or one that next_level() has just named; best first. A score is the
  // adjusted logit over the temperature plus the noise. chance: that one of them is the draw.
  void add_candidates(int node, const int32_t* tokens, const float* scores, int count, float chance = 1.0F) noexcept {
    count = depths_[node] < depth_ ? std::min(count, kEagleRanks) : 0;
    float shares[kEagleRanks];
    float total = 0.0F, behind = 0.0F;
    for (int rank = 0; rank < count; ++rank) {
      // A filter may put one with a better score behind the others.
      const float lead = scores[rank] - scores[0];
      if (rank > 0) behind = lead < behind ? lead : lead >= behind ? behind : kNever;
      shares[rank] = behind > kNever ? exp_lanes<ScalarMath>(behind) : 0.0F;
      total += shares[rank];
    }
    for (int rank = 0; rank < count && count_ < kCapacity; ++rank) {
      tokens_[count_] = tokens[rank];
      parents_[count_] = static_cast<int16_t>(node);
      depths_[count_] = static_cast<uint8_t>(depths_[node] + 1);
      reaches_[count_] = reaches_[node] * chance * (shares[rank] / total);
      ++count_;
    }
  }

  // The nodes of the deepest level that the head is to be run on, likeliest first -> out [kMaxEagleWidth]; 0: the tree
  // is complete. A node is left out if what follows it cannot get among the draft's nodes any more.
  [[nodiscard]] int next_level(int* out) noexcept {
    if (level_ >= depth_ || nodes_ < 2) return 0;
    const float least = least_reach();
    int found = 0;
    while (found < width_) {
      int best = -1;
      for (int node = 1; node < count_; ++node) {
        if (depths_[node] != level_ || !(reaches_[node] > least)) continue;
        if (best >= 0 && !(reaches_[node] > reaches_[best])) continue;
        if (std::find(out, out + found, node) == out + found) best = node;
      }
      if (best < 0) break;
      out[found++] = best;
    }
    ++level_;
    return found;
  }

  // Adds the likeliest nodes, with their shares as chances, to a draft that has its root. Siblings go in the order of
  // their ranks.
  void finish(DraftTree& draft) const noexcept {
    int16_t places[kCapacity];  // in the draft; -1: not there
    std::fill_n(places, count_, int16_t{-1});
    places[0] = 0;
    for (int added = 1; added < nodes_; ++added) {
      int best = -1;
      for (int node = 1; node < count_; ++node) {
        if (places[node] < 0 && reaches_[node] > 0.0F && (best < 0 || reaches_[node] > reaches_[best])) best = node;
      }
      if (best < 0) return;
      const int parent = parents_[best];
      const int place = draft.add(places[parent], tokens_[best], reaches_[best] / reaches_[parent]);
      if (place < 0) return;
      places[best] = static_cast<int16_t>(place);
    }
  }

  [[nodiscard]] int count() const noexcept { return count_; }  // nodes that are known, the root included
  [[nodiscard]] int32_t token(int node) const noexcept { return tokens_[node]; }
  [[nodiscard]] int parent(int node) const noexcept { return parents_[node]; }
  [[nodiscard]] int depth(int node) const noexcept { return depths_[node]; }
  [[nodiscard]] float reach(int node) const noexcept { return reaches_[node]; }

 private:
  static constexpr float kNever = -80.0F;  // a candidate so far behind the best has no share

  // What a node must exceed to be among the draft's, which has room for two or more: 0 while there is room left.
  [[nodiscard]] float least_reach() const noexcept {
    if (count_ < nodes_) return 0.0F;
    float best[kMaxTreeTokens];  // descending
    int held = 0;
    const int wanted = nodes_ - 1;
    for (int node = 1; node < count_; ++node) {
      if (held == wanted && !(reaches_[node] > best[held - 1])) continue;
      int at = held < wanted ? held++ : held - 1;
      for (; at > 0 && best[at - 1] < reaches_[node]; --at) best[at] = best[at - 1];
      best[at] = reaches_[node];
    }
    return best[held - 1];
  }

  int nodes_ = 1;
  int depth_ = 0;
  int width_ = kMaxEagleWidth;
  int count_ = 1;
  int level_ = 1;  // the next to be run on
  int32_t tokens_[kCapacity];
  int16_t parents_[kCapacity];
  uint8_t depths_[kCapacity];
  float reaches_[kCapacity];
};

}  // namespace ull
