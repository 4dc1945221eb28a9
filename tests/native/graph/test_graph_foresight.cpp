// What is launched before its request is known: rounds and passes of requests that speculate wait on the stream, get
// their request, or are sent away; and whatever becomes of them, the tokens are the plain ones.
#include <memory>
#include <vector>

#include "head_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Status;
using ull::gpu::RoundMode;
using ull::graph::GraphOptions;
using ull::test::FakeDevice;
using ull::test::FakeHead;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::HeadRig;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

const GraphOptions kAlways{.adaptive = false};
// So long a round takes that the host is back in poll() before it ends, nearly always: also on a busy machine.
constexpr int kRoundUs = 1000;

// Decodes so many tokens, which must be the model's; what waits at the end is sent away.
void complete(GraphRig& rig, int count) {
  const Tokens prompt = prompt_of(60);
  CHECK(rig.complete(prompt, count) == rig.model.continuation(prompt, count, rig.sampling));
  (void)rig.rest();
}

TEST(a_round_that_speculates_waits_for_its_request_on_the_stream) {
  GraphRig plain({.round_us = kRoundUs});
  complete(plain, 80);
  CHECK_EQ(plain.device.asked_late() + plain.device.sent_away(), 0);  // continuations serve those
  for (const auto kind : {DrafterKind::kSuffix, DrafterKind::kMedusa}) {
    GraphRig rig({.round_us = kRoundUs, .medusa_heads = 4}, kAlways);
    rig.speculation = kind;
    rig.max_tree = 12;
    complete(rig, 80);
    // The first rounds teach what comes next.
    CHECK(rig.device.asked_late() >= rig.rounds / 8);
    CHECK(rig.device.sent_away() <= rig.rounds / 4 + 2);
  }
}

TEST(a_drafter_that_rests_costs_no_launch_between_rounds) {
  GraphRig rig({.round_us = kRoundUs, .medusa_heads = 4, .medusa_rank = -1});
  rig.speculation = DrafterKind::kMedusa;
  complete(rig, 150);
  CHECK(rig.device.asked_late() >= rig.rounds / 8);
}

TEST(the_levels_of_a_tree_wait_for_their_requests) {
  HeadRig rig(DrafterKind::kEagle, {.rank = 0}, {.round_us = kRoundUs}, kAlways);
  complete(rig, 120);
  CHECK(rig.head().asked_late() >= rig.rounds / 4);  // more than one level a round
  CHECK(rig.device.asked_late() >= rig.rounds / 8);
}

TEST(passes_and_rounds_of_a_dflash_head_wait_for_their_requests) {
  for (const bool nodes : {false, true}) {
    HeadRig rig(DrafterKind::kDflash, {.rank = 0, .nodes = nodes}, {.round_us = kRoundUs}, kAlways);
    complete(rig, 120);
    CHECK(rig.device.asked_late() >= rig.rounds / 8);
    if (nodes) CHECK(rig.head().asked_late() >= rig.rounds / 4);
  }
}

TEST(the_chain_of_a_draft_model_waits_for_its_request) {
  GraphRig rig({.round_us = kRoundUs}, kAlways, FakeDevice::Script{});
  rig.speculation = DrafterKind::kDraft;
  rig.max_tree = 4;
  complete(rig, 120);
  (void)GraphRig::rest(*rig.draft_device);
  CHECK(rig.draft_device->asked_late() >= rig.rounds / 8);
  CHECK(rig.device.asked_late() >= rig.rounds / 8);
}

// Until something waits on the target's stream.
void wait_for_one(GraphRig& rig, Tokens& text) {
  for (int i = 0; i < 9 || (!rig.device.waits() && i < 50); ++i) {
    CHECK(rig.advance(text, rig.executor.info().tokens_per_round) == Status::kOk);
  }
}

// Until a round fails; it does so soon.
Status wait_for_failure(GraphRig& rig, Tokens& text) {
  Status status = Status::kOk;
  for (int i = 0; i < 20 && status == Status::kOk; ++i) status = rig.advance(text, 4);
  return status;
}

struct WaitingRig : GraphRig {
  WaitingRig() : GraphRig({.round_us = kRoundUs}, kAlways) {
    speculation = DrafterKind::kSuffix;
    max_tree = 4;
    prompt_tokens = 60;
    CHECK(prefill({text.begin(), text.end() - 1}) == Status::kOk);
    wait_for_one(*this, text);
    sent_away = device.sent_away();
    CHECK(device.waits());
  }
  // What is decoded from here on is right.
  void go_on() {
    const Tokens expected = model.continuation({text.begin(), text.begin() + 60}, static_cast<int>(text.size()) - 20);
    CHECK(decode(text, 40) == Status::kOk);
    CHECK(std::equal(text.begin() + 60, text.end(), expected.begin()));
    (void)rest();
  }

  Tokens text = prompt_of(60);
  int sent_away = 0;
};

TEST(a_request_that_has_ended_leaves_nothing_waiting) {
  WaitingRig rig;
  rig.executor.rest();
  (void)GraphRig::rest(rig.device);  // the stream is empty
  CHECK_EQ(rig.device.sent_away(), rig.sent_away + 1);
  rig.go_on();
}

TEST(a_stop_token_leaves_nothing_waiting) {
  GraphRig rig({.round_us = kRoundUs}, kAlways);
  rig.speculation = DrafterKind::kSuffix;
  rig.max_tree = 4;
  Tokens text = prompt_of(60);
  rig.stops = {rig.model.continuation(text, 30).back()};
  CHECK(rig.prefill({text.begin(), text.end() - 1}) == Status::kOk);
  do {
    CHECK(rig.advance(text, rig.executor.info().tokens_per_round) == Status::kOk);
  } while (text.back() != rig.stops[0]);
  (void)GraphRig::rest(rig.device);
}

TEST(other_steps_come_before_what_waits) {
  {
    WaitingRig rig;
    CHECK(rig.prefill({5, 6, 7}, 500) == Status::kOk);
    CHECK_EQ(rig.device.sent_away(), rig.sent_away + 1);
    rig.go_on();
  }
  {
    WaitingRig rig;
    CHECK(rig.executor.start_copy({.from_page = rig.pages[0], .to_page = rig.pages[9], .tokens = 10}) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    rig.go_on();
  }
  {
    WaitingRig rig;  // another graph
    rig.speculation = DrafterKind::kNone;
    rig.go_on();
  }
  {
    WaitingRig rig;
    rig.sampling.temperature = 1.0F;  // another setting, perhaps the same graph
    rig.sampling.seed = 0;
    rig.go_on();
  }
}

TEST(an_abort_while_something_waits_leaves_nothing_under_way) {
  WaitingRig rig;
  for (int turn = 0; turn < 20; ++turn) {
    const Status status = rig.advance(rig.text, 4, /*aborted=*/true);
    CHECK(status == Status::kAborted || status == Status::kOk);
    if (status == Status::kAborted) (void)GraphRig::rest(rig.device);
  }
  rig.go_on();
}

TEST(an_executor_settles_and_ends_while_something_waits) {
  {
    WaitingRig rig;
    rig.executor.settle();
    CHECK(FakeDevice::driver().query(&rig.device) == ull::graph::kSuccess);
  }
  const WaitingRig rig;  // its destructor settles
}

TEST(nothing_waits_for_a_host_that_has_given_up) {
  WaitingRig rig;
  rig.device.arm([](FakeDevice::Script& script, uint64_t next) { script.stream_error_at = next - 1; });
  CHECK(wait_for_failure(rig, rig.text) == Status::kExecutorFailed);
  CHECK(rig.executor.failure() != nullptr);
}

TEST(a_round_without_an_answer_is_noticed_though_another_waits_behind_it) {
  WaitingRig rig;
  rig.device.arm([](FakeDevice::Script& script, uint64_t next) { script.silent_at = next - 1; });
  CHECK(wait_for_failure(rig, rig.text) == Status::kExecutorFailed);
  CHECK(ull::test::says(rig.executor.failure(), "without an answer"));
}

TEST(a_launch_ahead_that_fails_fails_the_executor) {
  GraphRig rig({.round_us = kRoundUs}, kAlways);
  rig.speculation = DrafterKind::kSuffix;
  rig.max_tree = 4;
  Tokens text = prompt_of(60);
  CHECK(rig.prefill({text.begin(), text.end() - 1}) == Status::kOk);
  for (int i = 0; i < 8; ++i) CHECK(rig.advance(text, 4) == Status::kOk);
  rig.device.arm([](FakeDevice::Script& script, uint64_t next) { script.launch_error_at = next; });
  Status status = Status::kOk;
  for (int i = 0; i < 4 && status == Status::kOk; ++i) status = rig.advance(text, 4);
  CHECK(status == Status::kExecutorFailed);
  CHECK(ull::test::says(rig.executor.failure(), "cuGraphLaunch"));
}

TEST(a_pass_that_cannot_be_launched_ahead_fails_the_executor) {
  HeadRig rig(DrafterKind::kEagle, {.rank = 0}, {.round_us = kRoundUs}, kAlways);
  Tokens text = prompt_of(60);
  CHECK(rig.read(text, 0, 59) == Status::kOk);
  for (int i = 0; i < 8; ++i) CHECK(rig.advance(text, rig.executor.info().tokens_per_round) == Status::kOk);
  rig.head().arm([](FakeHead::Script& script, uint64_t next) { script.launch_error_at = next + 1; });
  Status status = Status::kOk;
  for (int i = 0; i < 4 && status == Status::kOk; ++i) status = rig.advance(text, 20);
  CHECK(status == Status::kExecutorFailed);
  CHECK(ull::test::says(rig.executor.failure(), "cuGraphLaunch"));
}

// A burst's requests are known when it is launched.
TEST(bursts_are_not_foreseen) {
  for (const bool speculates_last : {false, true}) {
    GraphRig rig({.round_us = kRoundUs, .burst_rounds = 3}, kAlways);
    rig.max_tree = 4;
    Tokens text = prompt_of(60);
    const Tokens expected = rig.model.continuation(text, 240);
    CHECK(rig.prefill({text.begin(), text.end() - 1}) == Status::kOk);
    for (int turn = 0; turn < 24; ++turn) {
      rig.speculation = turn % 3 == 2 || (speculates_last && turn > 12) ? DrafterKind::kSuffix : DrafterKind::kNone;
      for (int i = 0; i < 2; ++i) CHECK(rig.advance(text, rig.executor.info().tokens_per_round) == Status::kOk);
      if (turn % 4 == 0) rig.executor.rest();
    }
    CHECK(std::equal(text.begin() + 60, text.end(), expected.begin()));
    (void)rig.rest();
  }
}

// Requests of all kinds, with everything that may come between: the tokens are the plain ones.
TEST(whatever_comes_between_the_tokens_are_the_plain_ones) {
  for (int seed = 0; seed < 12; ++seed) {
    GraphRig rig({.model = {100, seed % 3 == 0 ? 0 : 5},
                  .round_us = seed % 2 == 0 ? 0 : 60,
                  .burst_rounds = seed % 3 == 1 ? 3 : 0,
                  .medusa_heads = 4},
                 {.adaptive = seed % 4 < 2});
    Tokens text = prompt_of(60, 1 + seed);
    const Tokens expected = rig.model.continuation(text, 400);
    CHECK(rig.prefill({text.begin(), text.end() - 1}) == Status::kOk);
    uint32_t random = static_cast<uint32_t>(seed) * 2654435761U + 1;
    const auto chance = [&](uint32_t one_in) {
      random = random * 1664525U + 1013904223U;
      return (random >> 8) % one_in == 0;
    };
    while (text.size() < 400) {
      if (chance(10)) {
        constexpr DrafterKind kKinds[] = {DrafterKind::kNone, DrafterKind::kSuffix, DrafterKind::kMedusa,
                                          DrafterKind::kAuto};
        rig.speculation = kKinds[(random >> 16) % 4];
        rig.max_tree = 1 << (random >> 20) % 5;
      }
      if (chance(15)) rig.executor.rest();
      if (chance(25))
        CHECK(rig.prefill({text.end() - 3, text.end() - 1}, static_cast<int>(text.size()) - 3) == Status::kOk);
      const Status status = rig.advance(text, chance(6) ? 1 : rig.executor.info().tokens_per_round, chance(12));
      CHECK(status == Status::kOk || status == Status::kAborted);
    }
    CHECK(std::equal(text.begin() + 60, text.end(), expected.begin()));
    (void)rig.rest();
  }
}

}  // namespace
