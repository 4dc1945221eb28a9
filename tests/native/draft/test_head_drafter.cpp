// When a head reads which entries of its cache, and from where on it attends to them.
#include "draft/head_drafter.h"

#include <atomic>
#include <utility>
#include <vector>

#include "check.h"

using namespace ull;

namespace {

constexpr int kContext = 2048;
constexpr int kRing = 512;
const std::atomic<bool> kNever{false};

struct Reading {
  int begin, count, from;
  bool last;
  int32_t first_token;
};

// A head of the kind that reads one token ahead. It does nothing but note what it is told to read.
class NotedHead final : public HeadDrafter {
 public:
  explicit NotedHead(const TapTags& tags) : HeadDrafter(DrafterKind::kEagle, tags, /*lookahead=*/1, kContext) {}

  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan&, DraftTree&) noexcept override {
    return reach_root(context, &from);
  }
  [[nodiscard]] int64_t cost_ns(int) const noexcept override { return 1; }

  std::vector<Reading> readings;
  int32_t from = -1;            // of the last proposal
  Status answer = Status::kOk;  // of the next reading

 private:
  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, int from, const int32_t*, bool last,
                            const std::atomic<bool>&) noexcept override {
    readings.push_back({start, count, from, last, tokens[0]});
    return std::exchange(answer, Status::kOk);
  }
};

// A sequence whose target has run on its first positions; the head serves it alone.
struct Rig {
  Rig() {
    for (int i = 0; i < kContext; ++i) tokens.push_back(i % 97);
    for (int i = 0; i < kContext / kPageTokens; ++i) pages.push_back(i);
  }

  void ran(int begin, int end) {
    for (int i = begin; i < end; ++i) {
      tags.put(i, tokens[static_cast<size_t>(i)], pages[static_cast<size_t>(i / kPageTokens)]);
    }
  }
  [[nodiscard]] DraftContext at(int root) {
    return {.history = tokens.data(),
            .position = root,
            .pages = pages.data(),
            .sampling = &sampling,
            .drafted = &drafted,
            .hidden = nullptr,
            .abort = &kNever};
  }
  // A round at a root that emits one token.
  void round(int root, bool proposed) {
    ran(root, root + 1);
    head.observe({&tokens[static_cast<size_t>(root) + 1], 1, root, proposed});
  }
  [[nodiscard]] std::vector<Reading> read() { return std::exchange(head.readings, {}); }
  [[nodiscard]] std::vector<Reading> propose(int root) {
    DraftTree tree;
    CHECK(head.propose(at(root), {}, tree) == Status::kOk);
    return read();
  }

  std::vector<int32_t> tokens, pages;
  Sampling sampling;
  Drafted drafted;
  TapTags tags{kRing};
  NotedHead head{tags};
};

TEST(a_prompt_is_read_but_for_its_last_entry) {
  Rig rig;
  rig.ran(0, 200);
  PrefillStep step{.tokens = rig.tokens.data(), .count = 200, .start = 0, .pages = rig.pages.data()};
  step.drafted = &rig.drafted;
  step.history = rig.tokens.data();
  CHECK(rig.head.prefill(step, kNever) == Status::kOk);
  CHECK(rig.read().empty());  // of a request that does not speculate
  step.speculation = DrafterKind::kAuto;
  CHECK(rig.head.prefill(step, kNever) == Status::kOk);
  const auto readings = rig.read();
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, 0);
  CHECK_EQ(readings[0].count, 199);
  CHECK_EQ(readings[0].first_token, rig.tokens[1]);
  CHECK(!readings[0].last);
  CHECK_EQ(rig.drafted.eagle.through, 199);
}

TEST(a_proposal_reads_the_entry_before_its_root_whether_it_is_there_or_not) {
  Rig rig;
  rig.ran(0, 100);
  auto readings = rig.propose(100);
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, 0);
  CHECK_EQ(readings[0].count, 100);
  CHECK(readings[0].last);
  CHECK_EQ(rig.head.from, 0);
  readings = rig.propose(100);
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, 99);
  CHECK_EQ(readings[0].count, 1);
  CHECK_EQ(readings[0].first_token, rig.tokens[100]);
  CHECK(rig.propose(101).empty());  // the target has not run on that position
  CHECK_EQ(rig.head.from, 101);
  CHECK_EQ(rig.head.confidence(rig.at(101)), -1);
  CHECK_EQ(rig.head.confidence(rig.at(100)), 0);
  CHECK_EQ(rig.head.confidence(rig.at(0)), -1);
}

TEST(a_hole_is_passed_over_if_it_is_small) {
  for (const int hole : {1, 12, 13, 40}) {
    Rig rig;
    rig.ran(0, 100);
    (void)rig.propose(100);
    rig.ran(100 + hole, 150 + hole);
    const auto readings = rig.propose(150 + hole);
    REQUIRE(readings.size() == 1);
    CHECK_EQ(readings[0].begin, 100 + hole);
    CHECK_EQ(readings[0].count, 50);
    CHECK_EQ(readings[0].from, hole <= 12 ? 0 : 100 + hole);  // an eighth of what lies before it
    CHECK_EQ(rig.head.from, readings[0].from);
    CHECK_EQ(rig.drafted.eagle.through, 150 + hole);
  }
}

TEST(small_holes_add_up) {
  Rig rig;
  rig.ran(0, 100);
  (void)rig.propose(100);
  int end = 100;
  std::vector<int> begins;  // of what is attended to, behind one hole of ten after another
  for (int hole = 0; hole < 4; ++hole) {
    rig.ran(end + 10, end + 20);
    end += 20;
    begins.push_back(rig.propose(end)[0].from);
  }
  CHECK((begins == std::vector<int>{0, 130, 150, 170}));
}

TEST(what_was_not_read_is_read_the_next_time) {
  for (const Status status : {Status::kAborted, Status::kExecutorFailed}) {
    Rig rig;
    rig.ran(0, 100);
    rig.head.answer = status;
    DraftTree tree;
    CHECK(rig.head.propose(rig.at(100), {}, tree) == status);
    CHECK_EQ(rig.drafted.eagle.through, 0);
    (void)rig.read();
    const auto readings = rig.propose(100);
    REQUIRE(readings.size() == 1);
    CHECK_EQ(readings[0].count, 100);
    CHECK_EQ(rig.drafted.eagle.through, 100);
  }
}

TEST(what_piles_up_is_read_before_it_is_lost) {
  Rig rig;
  rig.ran(0, 100);
  (void)rig.propose(100);
  for (int root = 100; root < 163; root += 3) {  // rounds that another drafter's trees make of three tokens each
    CHECK(rig.head.keep_up(rig.at(root)) == Status::kOk);
    CHECK(rig.read().empty());
    rig.round(root, false);
    rig.ran(root, root + 3);
  }
  CHECK(rig.head.keep_up(rig.at(163)) == Status::kOk);
  CHECK(rig.read().empty());
  rig.ran(163, 164);  // of a request that may not use the head
  CHECK(rig.head.keep_up(rig.at(164)) == Status::kOk);
  const auto readings = rig.read();
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, 100);
  CHECK_EQ(readings[0].count, 64);
  CHECK(!readings[0].last);
  CHECK_EQ(rig.drafted.eagle.through, 164);
}

TEST(a_head_that_is_not_asked_rests_and_begins_anew) {
  Rig rig;
  rig.ran(0, 100);
  (void)rig.propose(100);
  rig.round(100, true);
  int root = 101;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i, ++root) {
      CHECK(rig.head.keep_up(rig.at(root)) == Status::kOk);
      rig.round(root, false);
    }
  };
  rounds(64);
  CHECK(rig.read().empty());  // it rests before so many have piled up
  rounds(300);
  CHECK(rig.read().empty());
  CHECK_EQ(rig.head.confidence(rig.at(root)), 0);  // it may be asked still
  auto readings = rig.propose(root);
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, root - 16);
  CHECK_EQ(readings[0].count, 16);
  CHECK_EQ(readings[0].from, root - 16);
  CHECK_EQ(rig.head.from, root - 16);
  rig.round(root++, true);
  readings = rig.propose(root);
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, root - 1);
  CHECK_EQ(readings[0].from, root - 17);
  rounds(64 + 10);
  CHECK(rig.read().empty());
}

// As many as the rest begins with, or fewer: nothing is lost.
TEST(a_rest_that_missed_little_loses_nothing) {
  Rig rig;
  rig.ran(0, 100);
  (void)rig.propose(100);
  for (int i = 0; i < 70; ++i) rig.head.observe({rig.tokens.data(), 1, 100, false});
  rig.ran(100, 116);
  const auto readings = rig.propose(116);
  REQUIRE(readings.size() == 1);
  CHECK_EQ(readings[0].begin, 100);
  CHECK_EQ(readings[0].from, 0);
}

}  // namespace
