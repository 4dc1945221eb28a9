// A head whose acceptance is replayed: it drafts what the answer was, as often as its tables say.
#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "testing/replayed_acceptance.h"

namespace {

using ull::DraftContext;
using ull::DraftTree;
using ull::ReplayedAcceptance;

constexpr int kVocabulary = 100;
constexpr int kContext = 256;
constexpr int kPrompt = 8;

// Drafts zeros, as deep as it is asked for, and a second branch.
class Zeros final : public ull::Drafter {
 public:
  explicit Zeros(int depth) : depth_(depth) {}
  [[nodiscard]] ull::DrafterKind kind() const noexcept override { return ull::DrafterKind::kEagle; }
  [[nodiscard]] ull::Status propose(const DraftContext&, const ull::TreePlan& plan, DraftTree& tree) noexcept override {
    ++proposals;
    for (int depth = 0, node = 0; depth < std::min(plan.depth, depth_); ++depth) node = tree.add(node, 0, 0.5F);
    (void)tree.add(0, 1, 0.5F);
    return ull::Status::kOk;
  }
  void observe(const ull::DraftOutcome& outcome) noexcept override { observed += outcome.count; }
  [[nodiscard]] int max_depth() const noexcept override { return depth_; }
  [[nodiscard]] int max_rank() const noexcept override { return 8; }
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return 10 * depth; }

  int proposals = 0;
  int observed = 0;

 private:
  int depth_;
};

// A text whose answer is known: token p % 90 at position p.
struct Rig {
  explicit Rig(ReplayedAcceptance::Tables tables, int head_depth = 8) {
    auto made = std::make_unique<Zeros>(head_depth);
    head = made.get();
    drafter = std::make_unique<ReplayedAcceptance>(std::move(made), std::move(tables), kVocabulary, kContext);
    for (int position = 0; position < kContext; ++position) text.push_back(position % 90);
  }

  // Positions behind the prompt up to `end` are answered.
  void answer(int end = kContext) { drafter->observe({text.data() + kPrompt, end - kPrompt, kPrompt - 1, false}); }

  [[nodiscard]] DraftContext at(int position, uint64_t seed = 0) {
    sampling.seed = seed;
    DraftContext context{};
    context.history = text.data();
    context.position = position;
    context.sampling = &sampling;
    return context;
  }

  // How many of the chain's tokens are right, up to the first that is not.
  int propose(int position, int depth, uint64_t seed = 0) {
    const DraftContext context = at(position, seed);
    tree.reset(text[static_cast<size_t>(position)], kVocabulary, 64, 63);
    ull::TreePlan plan;
    plan.count = depth + 1;
    plan.depth = depth;
    CHECK(drafter->propose(context, plan, tree) == ull::Status::kOk);
    CHECK(tree.is_chain());
    int right = 0;
    while (right + 1 < tree.count() && tree.token(right + 1) == text[static_cast<size_t>(position + right + 1)]) {
      ++right;
    }
    for (int node = right + 2; node < tree.count(); ++node) {
      CHECK(tree.token(node) != text[static_cast<size_t>(position + node)]);  // behind what is wrong nothing is right
    }
    return right;
  }

  Zeros* head = nullptr;
  std::unique_ptr<ReplayedAcceptance> drafter;
  std::vector<int32_t> text;
  ull::Sampling sampling;
  DraftTree tree;
};

TEST(it_proposes_nothing_before_it_has_seen_an_answer) {
  Rig rig({{1.0F, 1.0F}});
  CHECK_EQ(rig.drafter->confidence(rig.at(kPrompt - 1)), -1);
  rig.answer(20);
  CHECK(rig.drafter->confidence(rig.at(kPrompt - 1)) >= 0);  // the root is the prompt's
  CHECK(rig.drafter->confidence(rig.at(18)) >= 0);
  CHECK_EQ(rig.drafter->confidence(rig.at(19)), -1);  // what follows is not known
  rig.text[12] = 3;
  CHECK_EQ(rig.drafter->confidence(rig.at(12)), -1);  // another text
  CHECK_EQ(rig.head->observed, 20 - kPrompt);
}

TEST(as_many_of_its_tokens_are_right_as_the_table_says) {
  const std::vector<float> table{0.9F, 0.8F, 0.5F, 0.7F};
  Rig rig({table});
  rig.answer();
  constexpr int kRounds = 20'000;
  int reached[5] = {}, accepted[5] = {};
  for (int round = 0; round < kRounds; ++round) {
    const int right = rig.propose(kPrompt + round % 100, 4);
    for (int depth = 1; depth <= 4; ++depth) {
      reached[depth] += right >= depth - 1 ? 1 : 0;
      accepted[depth] += right >= depth ? 1 : 0;
    }
  }
  for (int depth = 1; depth <= 4; ++depth) {
    const double rate = static_cast<double>(accepted[depth]) / reached[depth];
    CHECK(std::abs(rate - static_cast<double>(table[static_cast<size_t>(depth - 1)])) < 0.02);
    CHECK_EQ(rig.tree.chance(depth), table[static_cast<size_t>(depth - 1)]);  // as a head says that is sure of them
  }
  CHECK_EQ(rig.head->proposals, kRounds);
}

TEST(a_seed_names_its_table) {
  Rig rig({{1.0F, 1.0F}, {0.0F, 0.0F}, {1.0F, 0.0F}});
  rig.answer();
  CHECK_EQ(rig.propose(20, 2, 0), 2);
  CHECK_EQ(rig.propose(20, 2, 1), 0);
  CHECK_EQ(rig.propose(20, 2, 2), 1);
  CHECK_EQ(rig.propose(20, 2, 3), 2);
}

TEST(a_chain_is_as_deep_as_the_plan_the_head_and_the_answer_allow) {
  Rig rig({{1.0F, 1.0F, 1.0F, 1.0F, 1.0F}}, 3);
  rig.answer(40);
  CHECK_EQ(rig.drafter->max_depth(), 3);
  CHECK_EQ(rig.drafter->max_rank(), 1);
  CHECK_EQ(rig.propose(20, 2), 2);
  CHECK_EQ(rig.propose(20, 7), 3);
  CHECK_EQ(rig.propose(38, 3), 1);
  CHECK_EQ(rig.tree.count(), 2);
  Rig shallow({{1.0F}}, 3);
  shallow.answer();
  CHECK_EQ(shallow.drafter->max_depth(), 1);
  CHECK_EQ(shallow.propose(20, 3), 1);
}

TEST(the_last_token_of_the_vocabulary_is_not_drafted_as_one_beyond_it) {
  Rig rig({{0.0F, 0.0F, 0.0F}});
  rig.text[21] = kVocabulary - 1;
  rig.answer();
  CHECK_EQ(rig.propose(20, 3), 0);
  CHECK_EQ(rig.tree.count(), 4);
}

TEST(it_takes_the_place_of_its_kind_alone) {
  const ull::ReplaceDrafter replace =
      ull::replayed_acceptance({{ull::DrafterKind::kDflash, {{1.0F}}}}, kVocabulary, kContext);
  auto made = std::make_unique<Zeros>(3);
  const ull::Drafter* head = made.get();
  CHECK(replace(std::move(made)).get() == head);
  const ull::ReplaceDrafter other =
      ull::replayed_acceptance({{ull::DrafterKind::kEagle, {{1.0F}}}}, kVocabulary, kContext);
  const auto replaced = other(std::make_unique<Zeros>(3));
  CHECK_EQ(replaced->max_depth(), 1);
  CHECK_EQ(replaced->cost_ns(2), 20);
  CHECK(replaced->branches() && replaced->foresees());
}

TEST(tables_that_say_nothing_are_refused) {
  const auto make = [](ReplayedAcceptance::Tables tables) {
    return ull::replayed_acceptance({{ull::DrafterKind::kEagle, std::move(tables)}}, kVocabulary, kContext);
  };
  CHECK_THROWS(make({}), std::invalid_argument);
  CHECK_THROWS(make({{}}), std::invalid_argument);
  CHECK_THROWS(make({{0.5F}, {0.5F, 0.5F}}), std::invalid_argument);
  CHECK_THROWS(make({{1.1F}}), std::invalid_argument);
  CHECK_THROWS(make({{NAN}}), std::invalid_argument);
  CHECK_THROWS(make({std::vector<float>(64, 0.5F)}), std::invalid_argument);
}

}  // namespace
