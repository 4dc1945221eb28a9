// Prompt lookup against a plain search over the whole history.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "testing/ngram.h"

namespace {

using ull::DraftContext;
using ull::DraftTree;
using ull::NgramDrafter;

DraftContext context_of(const std::vector<int32_t>& history) {
  DraftContext context{};
  context.history = history.data();
  context.position = static_cast<int>(history.size()) - 1;
  return context;
}

std::vector<int32_t> propose(NgramDrafter& drafter, const std::vector<int32_t>& history, int depth) {
  const DraftContext context = context_of(history);
  DraftTree tree;
  tree.reset(history.back(), 1000, 64, 63);
  ull::TreePlan plan;
  plan.count = depth + 1;
  plan.depth = depth;
  if (drafter.confidence(context) >= 0) CHECK(drafter.propose(context, plan, tree) == ull::Status::kOk);
  CHECK(tree.is_chain());
  return {tree.tokens() + 1, tree.tokens() + tree.count()};
}

TEST(what_followed_the_longest_match_is_proposed) {
  NgramDrafter drafter(256);
  const std::vector<int32_t> expected{7, 8, 9};
  CHECK(propose(drafter, {1, 2, 3, 7, 8, 9, 5, 2, 3, 4, 4, 1, 2, 3}, 3) == expected);
  CHECK_EQ(drafter.match_length(), 3);
  CHECK(propose(drafter, {1, 2, 3, 7, 8, 9, 5, 2, 3, 4, 4, 6, 2, 3}, 1) == std::vector<int32_t>{4});  // the latest
  CHECK(propose(drafter, {1, 2, 3}, 3).empty());
  CHECK(propose(drafter, {1}, 3).empty());
}

TEST(a_loop_is_unrolled) {
  NgramDrafter drafter(256);
  const std::vector<int32_t> expected{2, 3, 1, 2, 3, 1, 2};
  CHECK(propose(drafter, {1, 2, 3, 1, 2, 3, 1, 2, 3, 1}, 7) == expected);
}

TEST(another_history_is_indexed_anew) {
  NgramDrafter drafter(256);
  CHECK(propose(drafter, {1, 2, 3, 1, 2}, 1) == std::vector<int32_t>{3});
  CHECK(propose(drafter, {4, 5, 6, 4, 5}, 1) == std::vector<int32_t>{6});
  CHECK(propose(drafter, {1, 2, 9, 1, 2}, 1) == std::vector<int32_t>{9});
  CHECK(propose(drafter, {1, 2, 9}, 1).empty());  // shorter than before
}

// The longest common past of `position` with any earlier place, as far as the drafter tells.
int longest_match(const std::vector<int32_t>& history) {
  const int position = static_cast<int>(history.size()) - 1;
  int best = 0;
  for (int place = 1; place < position; ++place) {
    int common = 0;
    while (common <= place && common < NgramDrafter::kLongest &&
           history[static_cast<size_t>(place - common)] == history[static_cast<size_t>(position - common)]) {
      ++common;
    }
    best = std::max(best, common);
  }
  return best >= NgramDrafter::kShortest ? best : 0;
}

TEST(matches_are_the_longest_there_are) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    NgramDrafter drafter(512);
    std::vector<int32_t> history;
    const unsigned letters = 12 + random() % 8;  // few enough to repeat, enough that no pair stands in 64 places
    for (int i = 0; i < 300; ++i) {
      if (i > 40 && random() % 4 == 0) {
        const size_t from = random() % (history.size() - 20);
        for (size_t k = 0; k < 12; ++k) history.push_back(history[from + k]);
      }
      history.push_back(static_cast<int32_t>(random() % letters));
      if (history.size() >= 512) break;
      (void)drafter.confidence(context_of(history));
      CHECK_EQ(drafter.match_length(), longest_match(history));
    }
  }
}

TEST(confidence_grows_with_the_match) {
  NgramDrafter drafter(256);
  int last = -1;
  for (int length = 2; length <= 10; ++length) {
    std::vector<int32_t> history;
    for (int i = 0; i < length; ++i) history.push_back(10 + i);
    history.push_back(1);
    for (int i = 0; i < length; ++i) history.push_back(10 + i);
    const int confidence = drafter.confidence(context_of(history));
    CHECK_EQ(drafter.match_length(), length);
    CHECK(confidence >= last);
    last = confidence;
  }
  CHECK_EQ(last, ull::kConfidenceClasses - 1);
}

}  // namespace
