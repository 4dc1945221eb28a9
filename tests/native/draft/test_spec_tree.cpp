// The draft tree: what its builder takes and what it drops.
#include <random>
#include <set>
#include <utility>

#include "check.h"
#include "draft/tree.h"

namespace {

using ull::DraftTree;

TEST(a_tree_starts_as_its_root) {
  DraftTree tree;
  tree.reset(7, 10, 64, 63);
  CHECK_EQ(tree.count(), 1);
  CHECK_EQ(tree.token(0), 7);
  CHECK_EQ(tree.deepest(), 0);
  CHECK(tree.is_chain());
  CHECK_EQ(tree.child(0, 7), -1);
}

TEST(siblings_are_ranked_and_distinct) {
  DraftTree tree;
  tree.reset(0, 10, 64, 63);
  const int first = tree.add(0, 3);
  const int second = tree.add(0, 4);
  CHECK_EQ(tree.add(0, 3), first);  // a duplicate is the node that is there
  CHECK_EQ(tree.count(), 3);
  CHECK_EQ(tree.rank(first), 0);
  CHECK_EQ(tree.rank(second), 1);
  const int below = tree.add(second, 3);  // the same token below another parent is another node
  CHECK_EQ(below, 3);
  CHECK_EQ(tree.depth(below), 2);
  CHECK_EQ(tree.child(second, 3), below);
  CHECK_EQ(tree.child(first, 3), -1);
  CHECK(!tree.is_chain());
}

TEST(tokens_outside_the_vocabulary_are_dropped) {
  DraftTree tree;
  tree.reset(0, 10, 64, 63);
  for (const int32_t token : {-1, 10, INT32_MAX, INT32_MIN}) CHECK_EQ(tree.add(0, token), -1);
  CHECK_EQ(tree.add(0, 9), 1);
  CHECK_EQ(tree.add(-1, 1), -1);  // below a node that was dropped
  CHECK_EQ(tree.add(5, 1), -1);
}

TEST(width_and_depth_are_limited) {
  DraftTree tree;
  tree.reset(0, 100, 4, 2);
  const int one = tree.add(0, 1);
  const int two = tree.add(one, 2);
  CHECK_EQ(tree.add(two, 3), -1);  // too deep
  CHECK_EQ(tree.add(0, 3), 3);
  CHECK_EQ(tree.add(0, 4), -1);  // full
  CHECK_EQ(tree.add(0, 3), 3);   // yet what is there is found
  tree.reset(0, 100, 1000, 1000);
  for (int i = 0; i < 200; ++i) (void)tree.add(0, i % 100);
  CHECK_EQ(tree.count(), ull::kMaxTreeTokens);
}

TEST(random_trees_keep_their_order) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    DraftTree tree;
    tree.reset(0, 5, 64, 1 + static_cast<int>(random() % 63));
    for (int i = 0; i < 200; ++i) {
      (void)tree.add(static_cast<int>(random() % static_cast<unsigned>(tree.count())), static_cast<int>(random() % 7));
    }
    std::set<std::pair<int, int>> seen;
    bool chain = true;
    ull::TreePaths paths;
    paths.assign(tree);
    for (int node = 1; node < tree.count(); ++node) {
      CHECK(tree.parent(node) < node);
      CHECK_EQ(tree.depth(node), tree.depth(tree.parent(node)) + 1);
      CHECK(seen.insert({tree.parent(node), tree.token(node)}).second);
      CHECK_EQ(paths.path[node][tree.depth(node)], node);
      CHECK_EQ(paths.path[node][tree.depth(node) - 1], tree.parent(node));
      CHECK_EQ(paths.path[node][0], 0);
      chain = chain && tree.parent(node) == node - 1;
    }
    CHECK_EQ(tree.is_chain(), chain);
  }
}

TEST(a_tree_that_is_cut_is_one_that_never_had_more) {
  DraftTree tree;
  tree.reset(7, 10, 8, 4);
  const int first = tree.add(0, 1, 0.75F);
  const int below = tree.add(first, 2, 0.5F);
  CHECK_EQ(tree.add(0, 3), 3);
  CHECK_EQ(tree.add(below, 4), 4);
  CHECK(!tree.is_chain());
  CHECK_EQ(tree.chance(first), 0.75F);
  CHECK_EQ(tree.chance(3), DraftTree::kUnknown);
  tree.cut(3);
  CHECK_EQ(tree.count(), 3);
  CHECK_EQ(tree.deepest(), 2);
  CHECK(tree.is_chain());
  CHECK_EQ(tree.child(0, 3), -1);
  CHECK_EQ(tree.child(below, 4), -1);
  const int again = tree.add(0, 3);
  CHECK_EQ(tree.rank(again), 1);
  tree.cut(0);
  CHECK_EQ(tree.count(), 1);
  CHECK_EQ(tree.deepest(), 0);
  CHECK_EQ(tree.child(0, 1), -1);
}

}  // namespace
