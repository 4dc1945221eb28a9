// The tree that an EAGLE head grows, against the best of a tree that is complete.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "draft/eagle_tree.h"

using namespace ull;

namespace {

// Candidates of every text: as many as it says, with scores that depend on the text alone.
struct Source {
  unsigned seed;
  int ranks;

  [[nodiscard]] int candidates(const std::vector<int32_t>& way, int32_t* tokens, float* scores) const {
    std::seed_seq mixed(way.begin(), way.end());
    std::vector<uint32_t> words(2);
    mixed.generate(words.begin(), words.end());
    std::mt19937 random(words[0] + seed * 977U);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    const int count = 2 + static_cast<int>(random() % static_cast<unsigned>(ranks - 1));  // 1 would tie with its parent
    for (int i = 0; i < count; ++i) {
      tokens[i] = static_cast<int32_t>(random() % 50U) * ranks + i;
      scores[i] = normal(random);
    }
    std::sort(scores, scores + count, std::greater<>());
    return count;
  }
};

struct Known {
  std::vector<int32_t> way;
  double reach;
};

// Every text up to `depth`, with its likelihood.
std::vector<Known> complete(const Source& source, int depth) {
  std::vector<Known> all{{{}, 1.0}};
  for (size_t at = 0; at < all.size(); ++at) {
    if (static_cast<int>(all[at].way.size()) == depth) continue;
    int32_t tokens[kEagleRanks];
    float scores[kEagleRanks];
    const int count = source.candidates(all[at].way, tokens, scores);
    double total = 0.0;
    for (int i = 0; i < count; ++i) total += std::exp(static_cast<double>(scores[i]));
    for (int i = 0; i < count; ++i) {
      Known next = all[at];
      next.way.push_back(tokens[i]);
      next.reach *= std::exp(static_cast<double>(scores[i])) / total;
      all.push_back(next);
    }
  }
  return all;
}

std::vector<int32_t> way_of(const EagleTree& tree, int node) {
  std::vector<int32_t> way;
  for (int at = node; at != 0; at = tree.parent(at)) way.insert(way.begin(), tree.token(at));
  return way;
}

// Grows it; how many levels the head ran on, and on how many nodes.
struct Runs {
  int levels = 0;
  int nodes = 0;
  int widest = 0;
};
Runs grow(const Source& source, EagleTree& tree) {
  Runs runs;
  int32_t tokens[kEagleRanks];
  float scores[kEagleRanks];
  tree.add_candidates(0, tokens, scores, source.candidates({}, tokens, scores));
  int nodes[kMaxEagleWidth];
  while (const int count = tree.next_level(nodes)) {
    ++runs.levels;
    runs.nodes += count;
    runs.widest = std::max(runs.widest, count);
    for (int i = 0; i < count; ++i) {
      CHECK_EQ(tree.depth(nodes[i]), runs.levels);
      CHECK(i == 0 || tree.reach(nodes[i]) <= tree.reach(nodes[i - 1]));
      const int found = source.candidates(way_of(tree, nodes[i]), tokens, scores);
      tree.add_candidates(nodes[i], tokens, scores, found);
    }
  }
  return runs;
}

std::set<std::vector<int32_t>> ways(const DraftTree& draft) {
  std::set<std::vector<int32_t>> all;
  std::vector<std::vector<int32_t>> of_node(1);
  for (int node = 1; node < draft.count(); ++node) {
    of_node.push_back(of_node[static_cast<size_t>(draft.parent(node))]);
    of_node.back().push_back(draft.token(node));
    all.insert(of_node.back());
  }
  return all;
}

DraftTree draft_of(const EagleTree& tree, int nodes = kMaxTreeTokens, int depth = kMaxTreeTokens) {
  DraftTree draft;
  draft.reset(1, 1000, nodes, depth);
  tree.finish(draft);
  return draft;
}

}  // namespace

TEST(a_small_draft_is_the_best_of_all_that_there_could_be) {
  static EagleTree tree;
  for (unsigned seed = 0; seed < 300; ++seed) {
    const int depth = 1 + static_cast<int>(seed % 5), nodes = 2 + static_cast<int>(seed % 8);
    const Source source{seed, 3};
    std::vector<Known> all = complete(source, depth);
    tree.begin(nodes, depth);
    const Runs runs = grow(source, tree);
    CHECK(runs.levels < depth);
    const DraftTree draft = draft_of(tree);
    std::sort(all.begin() + 1, all.end(), [](const Known& a, const Known& b) { return a.reach > b.reach; });
    std::set<std::vector<int32_t>> best;
    for (size_t i = 1; i < all.size() && static_cast<int>(i) < nodes; ++i) best.insert(all[i].way);
    CHECK(ways(draft) == best);
  }
}

TEST(a_wide_draft_takes_the_best_that_is_known_in_the_order_of_ranks) {
  static EagleTree tree;
  for (unsigned seed = 0; seed < 100; ++seed) {
    const int width = 1 + static_cast<int>(seed % 8);
    const Source source{seed, kEagleRanks};
    tree.begin(kMaxTreeTokens, kMaxEagleDepth, width);
    const Runs runs = grow(source, tree);
    CHECK(runs.widest <= width);
    CHECK(tree.count() <= EagleTree::kCapacity);
    const DraftTree draft = draft_of(tree);
    std::vector<float> reaches;
    for (int node = 1; node < tree.count(); ++node) reaches.push_back(tree.reach(node));
    std::sort(reaches.begin(), reaches.end(), std::greater<>());
    double best = 0.0, taken = 0.0;
    for (size_t i = 0; i < reaches.size() && i + 1 < kMaxTreeTokens; ++i) best += static_cast<double>(reaches[i]);
    const auto held = ways(draft);
    for (int node = 1; node < tree.count(); ++node) {
      if (held.contains(way_of(tree, node))) taken += static_cast<double>(tree.reach(node));
    }
    CHECK_EQ(draft.count(), std::min(tree.count(), kMaxTreeTokens));
    CHECK(std::abs(best - taken) < 1e-6);
    // Below each node, a candidate comes with all that are better.
    for (int node = 0; node < draft.count(); ++node) {
      int32_t tokens[kEagleRanks];
      float scores[kEagleRanks];
      std::vector<int32_t> way;
      for (int at = node; at != 0; at = draft.parent(at)) way.insert(way.begin(), draft.token(at));
      (void)source.candidates(way, tokens, scores);
      for (int child = node + 1; child < draft.count(); ++child) {
        if (draft.parent(child) == node) CHECK_EQ(draft.token(child), tokens[draft.rank(child)]);
      }
    }
  }
}

TEST(the_draft_s_own_limits_hold) {
  static EagleTree tree;
  const Source source{5, 4};
  tree.begin(40, 5);
  (void)grow(source, tree);
  CHECK_EQ(draft_of(tree, 7).count(), 7);
  CHECK(draft_of(tree, 64, 2).deepest() <= 2);
  tree.begin(1, 5);
  CHECK_EQ(grow(source, tree).nodes, 0);
  CHECK_EQ(draft_of(tree).count(), 1);
  tree.begin(40, 1);
  CHECK_EQ(grow(source, tree).nodes, 0);
  CHECK_EQ(draft_of(tree).deepest(), 1);
  tree.begin(40, 5);
  int nodes[kMaxEagleWidth];
  CHECK_EQ(tree.next_level(nodes), 0);  // a head that knows nothing
  CHECK_EQ(draft_of(tree).count(), 1);
}

TEST(scores_that_are_no_numbers_and_dropped_candidates_do_no_harm) {
  static EagleTree tree;
  const float infinity = std::numeric_limits<float>::infinity();
  const int32_t tokens[] = {5, 6, 7};
  const float scores[][3] = {{infinity, infinity, 1.0F}, {-1e30F, -1e30F, 5.0F}, {0.0F, 9.0F, -1.0F}};
  for (const auto& of_node : scores) {
    tree.begin(8, 2);
    tree.add_candidates(0, tokens, of_node, 3);
    for (int node = 1; node < 4; ++node) {
      CHECK(tree.reach(node) >= 0.0F && tree.reach(node) <= 1.0F);
      CHECK(node == 1 || tree.reach(node) <= tree.reach(node - 1));  // one that a filter put behind stays there
    }
    CHECK_EQ(draft_of(tree).token(1), 5);
  }
}
