// Medusa heads on the graph executor: drafted by a graph of their own, verified like any other tree.
#include "graph_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::AbortedRound;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

int drafts_of(const std::vector<FakeDevice::Record>& records) {
  for (const auto& record : records) {
    if (record.mode == RoundMode::kMedusa && record.status == RoundStatus::kOk) CHECK_EQ(record.emitted, 1);
  }
  return count_of(records, RoundMode::kMedusa, RoundStatus::kOk);
}

TEST(heads_are_offered_with_what_they_cost) {
  GraphRig rig({.medusa_heads = 3});
  const ull::ExecutorInfo& info = rig.executor.info();
  CHECK(info.drafters[static_cast<int>(DrafterKind::kMedusa)]);
  CHECK(info.draft_ns[static_cast<int>(DrafterKind::kMedusa)] > 0);
  CHECK_EQ(info.drafter_weight_bytes, int64_t{70});
  CHECK_EQ(info.weight_bytes, int64_t{1070});
  GraphRig without;
  CHECK(!without.executor.info().drafters[static_cast<int>(DrafterKind::kMedusa)]);
  FakeDevice device({});
  const auto drafting = [&] {
    ull::graph::GraphExecutor(device.program(), FakeDevice::driver(), {.drafter = DrafterKind::kMedusa});
  };
  CHECK_THROWS(drafting(), std::invalid_argument);
}

TEST(heads_change_the_speed_not_the_tokens) {
  for (const int right : {-1, 0, 2}) {
    for (const auto speculation : {DrafterKind::kMedusa, DrafterKind::kAuto}) {
      GraphRig rig({.medusa_heads = 4, .medusa_rank = right}, {.adaptive = false});
      rig.speculation = speculation;
      rig.max_tree = 16;
      for (int turn = 0; turn < 4; ++turn) {
        rig.sampling.seed = static_cast<uint64_t>(turn);
        const Tokens prompt = prompt_of(90, turn);
        CHECK(rig.complete(prompt, 100) == rig.model.continuation(prompt, 100, rig.sampling));
      }
      const auto records = rig.rest();
      const int drafts = drafts_of(records);
      CHECK(drafts > 0);
      if (speculation != DrafterKind::kMedusa) continue;
      // The first round of a turn follows a prompt, whose hidden state is not kept; then four heads and the bonus.
      if (right == 0) CHECK_EQ(rig.rounds, 4 * (1 + (99 + 4) / 5));
      if (right < 0) CHECK_EQ(rig.rounds, 400);
      // None before a round that may emit one token only, which is the last of those where nothing is accepted.
      if (right <= 0) CHECK_EQ(drafts, rig.rounds - 4 - (right < 0 ? 4 : 0));
    }
  }
}

TEST(a_round_says_that_the_heads_drafted_it) {
  GraphRig rig({.medusa_heads = 2, .medusa_rank = 1}, {.adaptive = false});
  rig.speculation = DrafterKind::kMedusa;
  rig.max_tree = 12;
  Tokens tokens = prompt_of(1);
  for (int round = 0; round < 20; ++round) {
    CHECK(rig.advance(tokens, 20) == Status::kOk);
    CHECK(rig.result.drafter == (round == 0 ? DrafterKind::kNone : DrafterKind::kMedusa));
    if (round > 0) {
      CHECK_EQ(rig.result.tree_tokens, 12);
      CHECK_EQ(rig.result.depth, 2);
      CHECK_EQ(static_cast<int>(rig.result.ranks[0]), 1);
    }
  }
}

// So that their answer is under way when the host reads the round; the next proposal takes it.
TEST(heads_are_launched_behind_the_round_that_they_drafted) {
  GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
  rig.speculation = DrafterKind::kMedusa;
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 30) == Status::kOk);  // plain: nobody drafted it
  (void)rig.rest();
  for (int round = 0; round < 5; ++round) {
    rig.executor.rest();  // no round waits
    HeldRound held(rig.device, round == 0 ? 1 : 0);
    CHECK(rig.executor.start_round(rig.step(tokens, 30)) == Status::kOk);
    CHECK_EQ(rig.device.launched(), held.sequence() + 1);
    held.release();
    CHECK(rig.finish() == Status::kOk);
    CHECK_EQ(rig.result.count, 4);
    for (int i = 0; i < rig.result.count; ++i) tokens.push_back(rig.result.tokens[i].token);
  }
  const auto records = rig.rest();
  CHECK_EQ(records.size(), size_t{1 + 5 * 2});
  CHECK_EQ(drafts_of(records), 6);
  CHECK((Tokens{tokens.begin() + 1, tokens.end()}) ==
        rig.model.continuation({tokens[0]}, static_cast<int>(tokens.size()) - 1));
}

TEST(heads_are_not_launched_behind_what_may_end_the_request) {
  GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
  rig.speculation = DrafterKind::kMedusa;
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  CHECK(rig.advance(tokens, 4) == Status::kOk);  // all that its tree may bring
  CHECK_EQ(rig.rest().size(), size_t{3});
  // One that stops where nobody knew it would: its heads find nothing to do, and are nobody's.
  rig.stops = {rig.model.continuation(tokens, 2).back()};
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  CHECK_EQ(rig.result.count, 2);
  const auto records = rig.rest();
  CHECK(records.back().mode == RoundMode::kMedusa && records.back().status == RoundStatus::kSkipped);
}

TEST(what_came_between_two_rounds_leaves_no_hidden_state) {
  GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
  Tokens tokens = prompt_of(40);
  const Tokens expected = rig.model.continuation(tokens, 300);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  for (int turn = 0; tokens.size() < 300; ++turn) {
    rig.speculation = turn % 5 == 4 ? DrafterKind::kNone : DrafterKind::kMedusa;
    const Status status = rig.advance(tokens, 30, turn % 11 == 3);
    if (status != Status::kAborted) REQUIRE(status == Status::kOk);
  }
  CHECK(std::equal(tokens.begin() + 40, tokens.end(), expected.begin()));
  CHECK(drafts_of(rig.rest()) > 20);
}

TEST(an_abort_skips_the_heads) {
  GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
  rig.speculation = DrafterKind::kMedusa;
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 20) == Status::kOk);
  {
    AbortedRound aborted(rig.executor, rig.device, 0);
    CHECK(rig.executor.start_round(rig.step(tokens, 20)) == Status::kOk);
    CHECK(rig.finish() == Status::kAborted);
  }
  CHECK_EQ(count_of(rig.rest(), RoundMode::kMedusa, RoundStatus::kOk), 0);
  CHECK(rig.advance(tokens, 20) == Status::kOk);
  CHECK(rig.advance(tokens, 20) == Status::kOk);
  CHECK((Tokens{tokens.begin() + 1, tokens.end()}) ==
        rig.model.continuation({tokens[0]}, static_cast<int>(tokens.size()) - 1));
}

TEST(nonsense_from_the_heads_is_not_passed_on) {
  for (int kind = 0; kind < 4; ++kind) {
    GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
    rig.speculation = DrafterKind::kMedusa;
    Tokens tokens = prompt_of(1);
    CHECK(rig.executor.start_round(rig.step(tokens, 20)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    tokens.push_back(rig.result.tokens[0].token);
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) {
      script.absurd_at = next;
      script.absurdity = [kind](ull::gpu::RoundResult& answer) {
        if (kind == 0) answer.count = 4;
        if (kind == 1) answer.tokens[1].top[2].token = 100;
        if (kind == 2) answer.tokens[2].top_count = 11;
        if (kind == 3) answer.tokens[0].top_count = 0;
      };
    });
    CHECK(rig.executor.start_round(rig.step(tokens, 50)) == Status::kExecutorFailed);
    CHECK(rig.executor.failure() != nullptr && rig.executor.restart_helps());
  }
}

TEST(heads_that_never_answer_are_a_failure) {
  GraphRig rig({.medusa_heads = 3}, {.watchdog_ms = 500, .adaptive = false});
  rig.speculation = DrafterKind::kMedusa;
  Tokens tokens = prompt_of(1);
  CHECK(rig.executor.start_round(rig.step(tokens, 20)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  tokens.push_back(rig.result.tokens[0].token);
  rig.device.arm([](FakeDevice::Script& script, uint64_t next) { script.hang_at = next; });
  CHECK(rig.executor.start_round(rig.step(tokens, 50)) == Status::kExecutorFailed);
  CHECK(rig.executor.failure() != nullptr && !rig.executor.restart_helps());
}

}  // namespace
