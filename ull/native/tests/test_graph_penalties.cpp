// Penalties on the graph executor: the device looks at the session's own text, whatever came before or in between.
#include "graph_fixture.h"

namespace {

using ull::Sampling;
using ull::Speculation;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::GraphRig;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

Sampling penalizing(float frequency = 0.5F, uint64_t seed = 3) {
  Sampling sampling;
  sampling.seed = seed;
  sampling.frequency_penalty = frequency;
  return sampling;
}

TEST(penalties_are_offered) {
  GraphRig rig;
  CHECK(rig.executor.info().penalties);
  rig.sampling = penalizing();
  const Tokens tokens = prompt_of(1);
  ull::RoundStep step = rig.step(tokens, 4);
  step.history = nullptr;
  CHECK(rig.executor.start_round(step) == Status::kExecutorFailed);
}

TEST(plain_rounds_run_ahead_with_penalties_too) {
  GraphRig rig;
  rig.sampling = penalizing();
  const Tokens prompt = prompt_of(90);
  CHECK(rig.complete(prompt, 200) == rig.model.continuation(prompt, 200, rig.sampling));
  const auto records = rig.rest();
  CHECK(count_of(records, RoundMode::kContinue, RoundStatus::kOk) > 150);
}

TEST(requests_take_turns) {
  GraphRig rig;
  for (int turn = 0; turn < 24; ++turn) {
    rig.sampling = {};
    if (turn % 3 != 0) rig.sampling = penalizing(turn % 4 == 1 ? 0.5F : -0.25F, static_cast<uint64_t>(turn / 6));
    const Tokens prompt = prompt_of(20 + 13 * (turn % 5), turn % 2);
    CHECK(rig.complete(prompt, 30) == rig.model.continuation(prompt, 30, rig.sampling));
  }
}

// The same text, pages, seed and penalties, but another part of it is the prompt.
TEST(the_next_turn_s_prompt_holds_what_was_generated) {
  GraphRig rig;
  rig.sampling = penalizing();
  Tokens text = prompt_of(70);
  const Tokens first = rig.complete(text, 40);
  text.insert(text.end(), first.begin(), first.end());
  const Tokens expected = rig.model.continuation(text, 40, rig.sampling);
  rig.prompt_tokens = static_cast<int>(text.size());
  Tokens decoded = text;
  CHECK(rig.decode(decoded, 40) == Status::kOk);
  CHECK((Tokens{decoded.begin() + static_cast<std::ptrdiff_t>(text.size()), decoded.end()}) == expected);
}

TEST(trees_look_at_each_node_s_own_text) {
  for (const auto speculation : {Speculation::kNgram, Speculation::kMedusa, Speculation::kAuto}) {
    GraphRig rig({.model = {100, 5}, .medusa_heads = 4}, {.adaptive = false});
    rig.sampling = penalizing();
    rig.speculation = speculation;
    rig.max_tree = 12;
    const Tokens prompt = prompt_of(60);
    CHECK(rig.complete(prompt, 150) == rig.model.continuation(prompt, 150, rig.sampling));
    CHECK(rig.rounds < 120);
  }
}

TEST(rounds_that_nobody_takes_leave_nothing_in_the_text) {
  GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
  rig.sampling = penalizing();
  Tokens tokens = prompt_of(40);
  rig.prompt_tokens = 40;
  const Tokens expected = rig.model.continuation(tokens, 300, rig.sampling);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  for (int turn = 0; tokens.size() < 300; ++turn) {
    rig.speculation = turn % 4 == 3 ? Speculation::kMedusa : Speculation::kNone;
    if (turn % 13 == 7 && tokens.size() > 60) tokens.resize(tokens.size() - 5);  // as a request that is run again
    CHECK(rig.executor.start_round(rig.step(tokens, 30)) == Status::kOk);
    if (turn % 5 == 2) rig.executor.abort();
    const Status status = rig.finish();
    if (status == Status::kAborted) continue;
    REQUIRE(status == Status::kOk);
    for (int i = 0; i < rig.result.count; ++i) tokens.push_back(rig.result.tokens[i].token);
  }
  CHECK(std::equal(tokens.begin() + 40, tokens.end(), expected.begin()));
}

}  // namespace
