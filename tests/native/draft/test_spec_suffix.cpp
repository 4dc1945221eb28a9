// The suffix drafter: what it proposes against counts of a plain search, and what becomes of outputs that have ended.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "draft/suffix.h"

namespace {

using ull::DraftContext;
using ull::DraftTree;
using ull::PastOutputs;
using ull::SuffixDrafter;
using Tokens = std::vector<int32_t>;

constexpr int kVocabulary = 1000;

DraftContext context_of(const Tokens& history, int prompt = 0) {
  DraftContext context{};
  context.history = history.data();
  context.position = static_cast<int>(history.size()) - 1;
  context.prompt_tokens = prompt;
  return context;
}

DraftTree propose(SuffixDrafter& drafter, const Tokens& history, int nodes, int depth = 63,
                  int vocabulary = kVocabulary) {
  const DraftContext context = context_of(history);
  DraftTree tree;
  tree.reset(history.back(), vocabulary, 64, depth);
  ull::TreePlan plan;
  plan.count = nodes;
  plan.depth = std::min(nodes - 1, depth);
  if (drafter.confidence(context) >= 0) CHECK(drafter.propose(context, plan, tree) == ull::Status::kOk);
  CHECK(tree.count() <= nodes);
  return tree;
}

Tokens drafted(const DraftTree& tree) { return {tree.tokens() + 1, tree.tokens() + tree.count()}; }

// A request of `drafter`: `output` token by token behind `prompt`, a round each.
void generate(SuffixDrafter& drafter, Tokens history, const Tokens& output) {
  const auto prompt = static_cast<int>(history.size());
  for (const int32_t token : output) {
    const DraftContext context = context_of(history, prompt);
    (void)drafter.confidence(context);
    drafter.observe({&token, 1, context.position, false});
    history.push_back(token);
  }
}

TEST(what_followed_the_longest_match_comes_first) {
  SuffixDrafter drafter(256);
  const DraftTree tree = propose(drafter, {1, 2, 3, 7, 8, 9, 5, 2, 3, 4, 4, 1, 2, 3}, 4);
  CHECK_EQ(tree.token(1), 7);
  CHECK_EQ(tree.parent(1), 0);
  CHECK_EQ(drafter.match_length(), 3);
  CHECK_EQ(propose(drafter, {1, 2, 3, 7, 8, 9, 5, 2, 3, 4, 4, 6, 2, 3}, 2).token(1), 4);  // the latest of two equals
  CHECK(drafted(propose(drafter, {1, 2, 3}, 3)).empty());
  CHECK(drafted(propose(drafter, {1}, 3)).empty());
}

TEST(what_followed_more_often_comes_before_what_did_so_last) {
  SuffixDrafter drafter(256);
  const DraftTree tree = propose(drafter, {1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2}, 3);
  CHECK_EQ(tree.token(1), 3);
  CHECK_EQ(tree.token(2), 4);
  CHECK_EQ(tree.parent(2), 0);  // an alternative, not what follows: two places are not sure of 3's follower
}

TEST(a_loop_is_unrolled) {
  SuffixDrafter drafter(256);
  const Tokens expected{2, 3, 1, 2, 3, 1, 2};
  CHECK(drafted(propose(drafter, {1, 2, 3, 1, 2, 3, 1, 2, 3, 1}, 8)) == expected);
}

TEST(the_length_of_the_match_limits_how_far_it_is_followed) {
  Tokens history;
  for (int i = 0; i < 60; ++i) history.push_back(100 + i);
  history.push_back(100);
  SuffixDrafter one(256);
  CHECK_EQ(propose(one, history, 64).deepest(), 2 * SuffixDrafter::kReach);
  history.push_back(101);
  SuffixDrafter two(256);
  CHECK_EQ(propose(two, history, 64).deepest(), 3 * SuffixDrafter::kReach);
}

TEST(another_history_is_read_anew) {
  SuffixDrafter drafter(256);
  CHECK_EQ(propose(drafter, {1, 2, 3, 1, 2}, 2).token(1), 3);
  CHECK_EQ(propose(drafter, {4, 5, 6, 4, 5}, 2).token(1), 6);
  CHECK_EQ(propose(drafter, {1, 2, 9, 1, 2}, 2).token(1), 9);
  CHECK(drafted(propose(drafter, {1, 2, 9}, 2)).empty());  // shorter than before
}

TEST(nothing_outside_the_vocabulary_or_the_plan_is_proposed) {
  std::mt19937 random(9);
  auto past = std::make_shared<PastOutputs>(200);
  for (int i = 0; i < 300; ++i) past->append(static_cast<int32_t>(random() % 12) - 1);
  SuffixDrafter drafter(512, past);
  Tokens history;
  while (history.size() < 500) {
    history.push_back(static_cast<int32_t>(random() % 10));
    const int nodes = 2 + static_cast<int>(random() % 63);
    const int depth = 1 + static_cast<int>(random() % 20);
    const DraftTree tree = propose(drafter, history, nodes, depth, 7);
    CHECK(tree.deepest() <= depth);
    for (int node = 1; node < tree.count(); ++node) CHECK(tree.token(node) >= 0 && tree.token(node) < 7);
  }
}

// The tokens that followed `history`'s newest ones anywhere, by their votes.
std::map<int32_t, double> votes(const Tokens& history) {
  std::vector<std::pair<int, int>> found;  // common, place
  const int position = static_cast<int>(history.size()) - 1;
  for (int place = 0; place < position; ++place) {
    int common = 0;
    while (common < ull::SuffixIndex::kLongest && common <= place &&
           history[static_cast<size_t>(place - common)] == history[static_cast<size_t>(position - common)]) {
      ++common;
    }
    if (common > 0) found.push_back({common, place});
  }
  std::sort(found.rbegin(), found.rend());
  std::map<int32_t, double> counted;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [common, place] = found[i];
    counted[history[static_cast<size_t>(place) + 1]] += common * common / (1.0 + 0.05 * static_cast<double>(i));
  }
  return counted;
}

TEST(the_first_tokens_come_in_the_order_of_their_votes) {
  std::mt19937 random(3);
  int compared = 0;
  for (int round = 0; round < 20; ++round) {
    SuffixDrafter drafter(512);
    Tokens history;
    for (int i = 0; i < 300; ++i) {
      if (i > 40 && random() % 4 == 0) {
        const size_t from = random() % (history.size() - 20);
        for (size_t k = 0; k < 12; ++k) history.push_back(history[from + k]);
      }
      history.push_back(static_cast<int32_t>(random() % 40));
      if (history.size() >= 400) break;
      const auto counted = votes(history);
      if (counted.empty() || std::count(history.begin(), history.end(), history.back()) > 30) continue;
      const DraftTree tree = propose(drafter, history, 64, 1);
      CHECK_EQ(tree.count() - 1, static_cast<int>(counted.size()));
      for (int node = 2; node < tree.count(); ++node) {
        CHECK(counted.at(tree.token(node - 1)) > counted.at(tree.token(node)) - 1e-3);
      }
      compared += tree.count() > 2 ? 1 : 0;
    }
  }
  CHECK(compared > 500);
}

TEST(confidence_grows_with_the_match) {
  int last = -1;
  for (int length = 1; length <= 12; ++length) {
    SuffixDrafter drafter(256);
    Tokens history;
    for (int i = 0; i < length; ++i) history.push_back(10 + i);
    history.push_back(1);
    for (int i = 0; i < length; ++i) history.push_back(10 + i);
    const int confidence = drafter.confidence(context_of(history));
    CHECK_EQ(drafter.match_length(), length);
    CHECK(confidence >= last);
    CHECK(length > 1 || confidence == 0);
    last = confidence;
  }
  CHECK_EQ(last, ull::kConfidenceClasses - 1);
}

TEST(ended_outputs_are_remembered_without_their_prompts) {
  auto past = std::make_shared<PastOutputs>(100);
  SuffixDrafter drafter(256, past);
  generate(drafter, {1, 2, 3}, {10, 11, 12, 13});
  CHECK(past->copy().empty());  // it may still go on
  generate(drafter, {7, 8}, {20, 21, 22});
  CHECK((past->copy() == Tokens{10, 11, 12, -1}));  // nobody reads the last token, which nothing follows
  const DraftTree tree = propose(drafter, {5, 6, 11}, 3);
  CHECK((drafted(tree) == Tokens{12}));
  CHECK((past->copy() == Tokens{10, 11, 12, -1, 20, 21, -1}));
}

TEST(a_conversation_s_next_turn_is_another_output) {
  auto past = std::make_shared<PastOutputs>(100);
  SuffixDrafter drafter(256, past);
  generate(drafter, {1, 2}, {10, 11, 12});
  generate(drafter, {1, 2, 10, 11, 12, 50, 51}, {20, 21, 22});
  (void)propose(drafter, {9, 9}, 2);
  CHECK((past->copy() == Tokens{10, 11, -1, 20, 21, -1}));
}

// Rounds of a rehearsal are not observed; nor does a request that others interrupt tell its beginning twice.
TEST(only_observed_rounds_are_remembered_and_those_once) {
  auto past = std::make_shared<PastOutputs>(100);
  SuffixDrafter drafter(256, past);
  Tokens rehearsed{1, 2};
  for (const int32_t token : {3, 4, 5}) {
    (void)drafter.confidence(context_of(rehearsed, 2));
    rehearsed.push_back(token);
  }
  (void)propose(drafter, {9, 9}, 2);
  CHECK(past->copy().empty());
  Tokens first{1, 2};
  for (const int32_t token : {30, 31, 32, 33, 34, 35}) {
    const DraftContext context = context_of(first, 2);
    (void)drafter.confidence(context);
    drafter.observe({&token, 1, context.position, false});
    first.push_back(token);
    if (token == 32) generate(drafter, {7, 8}, {60, 61, 62});
  }
  (void)propose(drafter, {9, 9}, 2);
  (void)propose(drafter, {9, 9}, 2);
  (void)propose(drafter, {9, 9}, 2);
  CHECK((past->copy() == Tokens{30, 31, -1, 60, 61, -1, 32, 33, 34, -1}));
}

// However long the texts are, a round reads and moves no more than it may, and catches up with the next ones.
TEST(long_texts_are_read_and_moved_a_piece_at_a_time) {
  auto past = std::make_shared<PastOutputs>(8192);
  SuffixDrafter drafter(16384, past);
  Tokens history(10'000), output(1000);
  for (int i = 0; i < 10'000; ++i) history[static_cast<size_t>(i)] = 1 + i / 2 % 997;
  for (int i = 0; i < 1000; ++i) output[static_cast<size_t>(i)] = i % 900;
  generate(drafter, history, output);
  uint64_t before = past->appended();
  CHECK_EQ(before, 0U);
  int rounds = 0;
  for (Tokens next{5}; past->appended() < 1000 && rounds < 50; ++rounds) {
    (void)drafter.confidence(context_of(next));
    CHECK(past->appended() - before <= SuffixDrafter::kMostMoved + 1);
    before = past->appended();
    next.push_back(5);
  }
  CHECK_EQ(rounds, 4);
  const Tokens kept = past->copy();
  CHECK_EQ(kept.size(), output.size());
  CHECK(std::equal(output.begin(), output.end() - 1, kept.begin()));
  CHECK_EQ(kept.back(), PastOutputs::kBoundary);
}

}  // namespace
