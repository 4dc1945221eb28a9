// Trees on the graph executor: whatever is drafted, the tokens are those of the model.
#include "graph_fixture.h"
#include "testing/scripted_drafter.h"

namespace {

using ull::DrafterKind;
using ull::ScriptedDrafter;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

const FakeModel kRepeating{100, 17};

TEST(suffixes_are_offered_and_nothing_that_the_device_lacks) {
  GraphRig rig;
  const ull::ExecutorInfo& info = rig.executor.info();
  CHECK(info.drafters[static_cast<int>(DrafterKind::kSuffix)] && info.drafters[static_cast<int>(DrafterKind::kAuto)]);
  CHECK(!info.drafters[static_cast<int>(DrafterKind::kMedusa)] &&
        !info.drafters[static_cast<int>(DrafterKind::kDraft)]);
  FakeDevice device({});
  ull::graph::GraphProgram program = device.program();
  std::fill(program.rounds + 1, program.rounds + ull::kCostSizes, nullptr);
  ull::graph::GraphExecutor narrow(program, FakeDevice::driver(), {});
  narrow.prepare();
  CHECK(!narrow.info().drafters[static_cast<int>(DrafterKind::kSuffix)]);
  CHECK_EQ(narrow.info().tokens_per_round, 2);
}

TEST(suffixes_change_the_speed_not_the_tokens) {
  for (const bool adaptive : {true, false}) {
    for (const auto speculation : {DrafterKind::kSuffix, DrafterKind::kAuto}) {
      GraphRig rig({.model = kRepeating, .round_us = adaptive ? 100 : 0}, {.adaptive = adaptive});
      rig.speculation = speculation;
      for (int turn = 0; turn < 4; ++turn) {
        rig.sampling.seed = static_cast<uint64_t>(turn);
        const Tokens prompt = prompt_of(90, turn);
        CHECK(rig.complete(prompt, 200) == rig.model.continuation(prompt, 200, rig.sampling));
      }
      if (!adaptive) CHECK(rig.rounds < 4 * 200 * 3 / 4);
      const auto records = rig.rest();
      CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), 0);  // of speculating requests there is none
      const bool trees = std::any_of(records.begin(), records.end(), [](const auto& record) {
        return record.mode == RoundMode::kTake && record.emitted > 1;
      });
      CHECK(trees || adaptive);  // which goes by the time that rounds take here
    }
  }
}

TEST(a_round_says_what_was_drafted) {
  GraphRig rig({.model = {100, 5}}, {.adaptive = false});
  rig.speculation = DrafterKind::kSuffix;
  Tokens tokens = prompt_of(1);
  int drafted = 0;
  while (tokens.size() < 400) {
    CHECK(rig.executor.start_round(rig.step(tokens, 20)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    const ull::RoundResult& result = rig.result;
    CHECK_EQ(result.accepted, result.count - 1);
    CHECK(result.count <= 20 && result.accepted <= result.depth);
    if (result.tree_tokens > 1) {
      ++drafted;
      CHECK(result.drafter == DrafterKind::kSuffix);
      CHECK(result.depth > 0 && result.depth < result.tree_tokens);
      for (int i = 0; i < result.accepted; ++i) CHECK(result.ranks[i] < result.tree_tokens - 1);
    } else {
      CHECK(result.drafter == DrafterKind::kNone && result.depth == 0 && result.accepted == 0);
    }
    for (int i = 0; i < result.count; ++i) tokens.push_back(result.tokens[i].token);
  }
  CHECK(drafted > 10);
  CHECK((Tokens{tokens.begin() + 1, tokens.end()}) ==
        rig.model.continuation({tokens[0]}, static_cast<int>(tokens.size()) - 1));
}

TEST(trees_of_every_shape_are_verified) {
  using Mode = ScriptedDrafter::Mode;
  for (const Mode mode : {Mode::kRight, Mode::kWrong, Mode::kRandom, Mode::kMixed, Mode::kDuplicates, Mode::kBeyond}) {
    for (const int widest : {2, 5, 8, 33, 64}) {
      const Tokens prompt = prompt_of(70, widest);
      const FakeModel model{100};
      const Tokens expected = model.continuation(prompt, 150);
      Tokens truth = prompt;
      truth.insert(truth.end(), expected.begin(), expected.end());
      ull::graph::GraphOptions options{.adaptive = false};
      options.in_place_of_draft_model = ull::scripted_drafter(mode, truth, 100, 7);
      GraphRig rig({.model = model}, options);
      rig.speculation = DrafterKind::kDraft;
      rig.max_tree = widest;
      CHECK(rig.complete(prompt, 150) == expected);
      if (mode == Mode::kWrong) CHECK_EQ(rig.rounds, 150);
      if (mode == Mode::kRight) CHECK_EQ(rig.rounds, (150 + widest - 1) / widest);
      for (const auto& record : rig.rest()) CHECK(record.count <= (record.mode == RoundMode::kPrefill ? 64 : widest));
    }
  }
}

// Of those that hold it: 16 nodes take less than 8 here.
TEST(a_tree_takes_the_cheapest_graph) {
  ull::graph::GraphOptions options{.adaptive = false};
  const Tokens prompt = prompt_of(1);
  Tokens truth = prompt;
  const Tokens more = FakeModel{100}.continuation(prompt, 60);
  truth.insert(truth.end(), more.begin(), more.end());
  options.in_place_of_draft_model = ull::scripted_drafter(ScriptedDrafter::Mode::kRight, truth, 100, 7);
  GraphRig rig({.graph_us = {100, 200, 300, 1000, 400, 500, 600}}, options);
  rig.speculation = DrafterKind::kDraft;
  const std::pair<int, int> cases[] = {{2, 2}, {3, 4}, {4, 4}, {5, 16}, {8, 16}, {9, 16}, {17, 32}, {33, 64}};
  for (const auto& [nodes, graph] : cases) {
    rig.max_tree = nodes;
    Tokens tokens = prompt;
    CHECK(rig.advance(tokens, 60) == Status::kOk);
    const auto records = rig.rest();
    REQUIRE(records.size() == 1);
    CHECK_EQ(records[0].count, nodes);
    CHECK_EQ(records[0].graph, graph);
  }
  CHECK(rig.executor.info().verify_ns[3] > rig.executor.info().verify_ns[4]);  // what was measured is not hidden
}

// Behind a long cache 16 nodes take less than 8 here, and before it more.
TEST(a_tree_takes_the_graph_that_is_the_cheapest_where_it_stands) {
  for (const int length : {1, 200, 800, 900}) {
    ull::graph::GraphOptions options{.adaptive = false};
    const Tokens prompt = prompt_of(length);
    Tokens truth = prompt;
    const Tokens more = FakeModel{100}.continuation(prompt, 60);
    truth.insert(truth.end(), more.begin(), more.end());
    options.in_place_of_draft_model = ull::scripted_drafter(ScriptedDrafter::Mode::kRight, truth, 100, 7);
    GraphRig rig({.graph_us = {100, 200, 300, 400, 2400, 2500, 2600}, .far_us = {0, 0, 0, 4000, 0, 0, 0}}, options);
    rig.speculation = DrafterKind::kDraft;
    rig.max_tree = 8;
    Tokens tokens = prompt;
    if (length > 1) CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    (void)rig.rest();
    CHECK(rig.advance(tokens, 60) == Status::kOk);
    const auto records = rig.rest();
    REQUIRE(records.size() == 1);
    CHECK_EQ(records[0].count, 8);
    CHECK_EQ(records[0].graph, length < 500 ? 8 : 16);
  }
}

TEST(a_stop_within_a_tree_ends_the_round) {
  const Tokens prompt = prompt_of(40);
  const FakeModel model{100};
  const Tokens expected = model.continuation(prompt, 30);
  Tokens truth = prompt;
  truth.insert(truth.end(), expected.begin(), expected.end());
  ull::graph::GraphOptions options{.adaptive = false};
  options.in_place_of_draft_model = ull::scripted_drafter(ScriptedDrafter::Mode::kRight, truth, 100, 7);
  GraphRig rig({}, options);
  rig.speculation = DrafterKind::kDraft;
  rig.stops = {expected[9]};
  const int end = static_cast<int>(std::find(expected.begin(), expected.end(), expected[9]) - expected.begin()) + 1;
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  CHECK(rig.executor.start_round(rig.step(prompt, 30)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.count, end);
  CHECK(rig.result.tree_tokens > end);
}

TEST(requests_with_and_without_speculation_take_turns) {
  GraphRig rig({.model = kRepeating}, {.adaptive = false});
  Tokens tokens = prompt_of(40);
  const Tokens expected = rig.model.continuation(tokens, 300);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  for (int turn = 0; tokens.size() < 300; ++turn) {
    rig.speculation = turn % 2 == 0 ? DrafterKind::kNone : DrafterKind::kSuffix;
    // One step at a time with more to come: a continuation is in flight when the tree is asked for.
    const Status status = rig.advance(tokens, 30, turn % 7 == 3);
    if (status != Status::kAborted) REQUIRE(status == Status::kOk);
  }
  CHECK(std::equal(tokens.begin() + 40, tokens.end(), expected.begin()));
}

TEST(trees_end_with_the_context) {
  GraphRig rig({.model = {100, 3}, .context = 128}, {.adaptive = false});
  rig.speculation = DrafterKind::kSuffix;
  const Tokens prompt = prompt_of(20);
  CHECK(rig.complete(prompt, 108) == rig.model.continuation(prompt, 108));
}

TEST(nonsense_about_a_tree_is_not_passed_on) {
  const auto truth = [] {
    Tokens tokens = prompt_of(1);
    const Tokens more = FakeModel{100}.continuation(tokens, 60);
    tokens.insert(tokens.end(), more.begin(), more.end());
    return tokens;
  }();
  for (int kind = 0; kind < 3; ++kind) {
    ull::graph::GraphOptions options{.adaptive = false};
    options.in_place_of_draft_model = ull::scripted_drafter(ScriptedDrafter::Mode::kRight, truth, 100, 7);
    GraphRig rig({}, options);
    rig.speculation = DrafterKind::kDraft;
    rig.max_tree = 8;
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) {
      script.absurd_at = next;
      script.absurdity = [kind](ull::gpu::RoundResult& answer) {
        if (kind == 0) answer.count = 9;                                             // deeper than the tree
        if (kind == 1) answer.tokens[2].token = (answer.tokens[2].token + 1) % 100;  // off the tree
        if (kind == 2) answer.count = 66;
      };
    });
    const Tokens tokens = prompt_of(1);
    CHECK(rig.executor.start_round(rig.step(tokens, 50)) == Status::kOk);
    CHECK(rig.finish() == Status::kExecutorFailed);
    CHECK(rig.executor.failure() != nullptr);
  }
}

}  // namespace
