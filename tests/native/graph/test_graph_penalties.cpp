// Penalties on the graph executor: the device looks at the sequence's own text, whatever came before or in between.
#include "graph_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Sampling;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::GraphRig;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

Sampling penalising(float frequency = 0.5F, uint64_t seed = 3) {
  Sampling sampling;
  sampling.seed = seed;
  sampling.frequency_penalty = frequency;
  return sampling;
}

TEST(penalties_are_offered) {
  GraphRig rig;
  CHECK(rig.executor.info().penalties);
  rig.sampling = penalising();
  const Tokens tokens = prompt_of(1);
  ull::RoundStep step = rig.step(tokens, 4);
  step.history = nullptr;
  CHECK(rig.executor.start_round(step) == Status::kExecutorFailed);
}

TEST(plain_rounds_run_ahead_with_penalties_too) {
  GraphRig rig;
  rig.sampling = penalising();
  const Tokens prompt = prompt_of(90);
  CHECK(rig.complete(prompt, 200) == rig.model.continuation(prompt, 200, rig.sampling));
  const auto records = rig.rest();
  CHECK(count_of(records, RoundMode::kContinue, RoundStatus::kOk) > 150);
  CHECK(count_of(records, RoundMode::kTake, RoundStatus::kOk) < 10);  // the host need not say what the text is again
}

TEST(requests_take_turns) {
  GraphRig rig;
  for (int turn = 0; turn < 24; ++turn) {
    rig.sampling = {};
    if (turn % 3 != 0) rig.sampling = penalising(turn % 4 == 1 ? 0.5F : -0.25F, static_cast<uint64_t>(turn / 6));
    const Tokens prompt = prompt_of(20 + 13 * (turn % 5), turn % 2);
    CHECK(rig.complete(prompt, 30) == rig.model.continuation(prompt, 30, rig.sampling));
  }
}

// The same text, pages, seed and penalties, but another part of it is the prompt.
TEST(the_next_turn_s_prompt_holds_what_was_generated) {
  GraphRig rig;
  rig.sampling = penalising();
  Tokens text = prompt_of(70);
  const Tokens first = rig.complete(text, 40);
  text.insert(text.end(), first.begin(), first.end());
  const Tokens expected = rig.model.continuation(text, 40, rig.sampling);
  rig.prompt_tokens = static_cast<int>(text.size());
  Tokens decoded = text;
  CHECK(rig.decode(decoded, 40) == Status::kOk);
  CHECK((Tokens{decoded.begin() + static_cast<std::ptrdiff_t>(text.size()), decoded.end()}) == expected);
}

TEST(texts_of_one_length_are_told_apart) {
  GraphRig rig;
  rig.sampling = penalising();
  for (const int first : {0, 5, 0}) {
    const Tokens prompt = prompt_of(50, first);
    CHECK(rig.complete(prompt, 3) == rig.model.continuation(prompt, 3, rig.sampling));
  }
}

// A round is queued that would go on with the old request's idea of what the prompt is.
TEST(a_continuation_of_another_request_s_text_is_not_taken) {
  GraphRig rig;
  rig.sampling = penalising();
  Tokens tokens = prompt_of(1);
  rig.prompt_tokens = 1;
  CHECK(rig.executor.start_round(rig.step(tokens, 20)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  tokens.push_back(rig.result.tokens[0].token);
  const Tokens expected = rig.model.continuation(tokens, 1, rig.sampling);
  rig.prompt_tokens = 2;
  CHECK(rig.executor.start_round(rig.step(tokens, 20)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.tokens[0].token, expected[0]);
}

// It has written the device's text behind its root, and nobody knows what.
TEST(an_aborted_round_of_another_request_has_run_all_the_same) {
  GraphRig rig;
  rig.sampling = penalising(0.5F, 3);
  const Tokens prompt = prompt_of(40);
  Tokens tokens = prompt;
  const Tokens expected = rig.complete(prompt, 30);
  tokens.insert(tokens.end(), expected.begin(), expected.end());
  const Tokens early(tokens.begin(), tokens.begin() + 45);
  rig.sampling = penalising(0.5F, 4);
  CHECK(rig.executor.start_round(rig.step(early, 2)) == Status::kOk);
  while (FakeDevice::driver().query(&rig.device) == ull::graph::kNotReady) std::this_thread::yield();
  rig.executor.abort();
  CHECK(rig.finish() == Status::kAborted);
  rig.sampling = penalising(0.5F, 3);
  Tokens again(tokens.begin(), tokens.begin() + 60);
  CHECK(rig.prefill({again.begin() + 40, again.end() - 1}, 40) == Status::kOk);  // its cache is the other's by now
  CHECK(rig.decode(again, 10) == Status::kOk);
  CHECK(again == tokens);
}

// Requests in one slot: their histories lie at one address.
TEST(a_slot_s_next_request_has_a_text_of_its_own) {
  GraphRig rig;
  rig.sampling = penalising();
  rig.prompt_tokens = 50;
  Tokens slot(300);
  for (const auto& [first, count] : {std::pair{0, 9}, {5, 1}, {0, 4}, {7, 30}, {7, 2}, {3, 12}}) {
    const Tokens prompt = prompt_of(50, first);
    const Tokens expected = rig.model.continuation(prompt, count, rig.sampling);
    std::copy(prompt.begin(), prompt.end(), slot.begin());
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    for (size_t i = 0; i < expected.size(); ++i) {
      ull::RoundStep step = rig.step(slot, 40);
      step.position = static_cast<int32_t>(prompt.size() + i) - 1;
      step.token = slot[static_cast<size_t>(step.position)];
      CHECK(rig.executor.start_round(step) == Status::kOk);
      CHECK(rig.finish() == Status::kOk);
      CHECK_EQ(rig.result.tokens[0].token, expected[i]);
      slot[prompt.size() + i] = expected[i];
    }
  }
}

TEST(a_text_tells_what_is_still_the_history_s) {
  Tokens mapped(100);
  ull::graph::Text text(mapped.data(), 100);
  Tokens history = prompt_of(60), other = history;
  const auto add = [&](std::initializer_list<int32_t> tokens) {
    for (const int32_t token : tokens) text.add(token);
  };
  CHECK(!text.holds(history.data(), 10, 10));
  text.take(history.data(), 10, 10);
  CHECK(text.holds(history.data(), 10, 10));
  text.begin(10);
  add({history[10], history[11], history[12], history[13]});
  CHECK(text.holds(history.data(), 14, 10));
  CHECK(!text.holds(history.data(), 14, 9));  // another request's prompt
  history[2] = 77;                            // no request does that: what has been compared is not compared again
  CHECK(text.holds(history.data(), 14, 10));
  CHECK(!text.holds(history.data(), 13, 10));  // but that goes back
  CHECK(!text.holds(history.data(), 10, 10));  // and here a request begins
  history[2] = other[2];
  CHECK(text.holds(history.data(), 13, 10));
  text.begin(13);
  add({history[13], 78, history[15]});
  CHECK(!text.holds(history.data(), 16, 10));  // not what was emitted
  CHECK(!text.holds(history.data(), 17, 10));  // nor all of it
  CHECK(text.holds(history.data(), 14, 10));
  other[3] = 79;
  CHECK(!text.holds(other.data(), 14, 10));  // another's, as long
  CHECK(text.holds(history.data(), 14, 10));
}

TEST(trees_look_at_each_node_s_own_text) {
  for (const auto speculation : {DrafterKind::kSuffix, DrafterKind::kMedusa, DrafterKind::kAuto}) {
    GraphRig rig({.model = {100, 5}, .medusa_heads = 4}, {.adaptive = false});
    rig.sampling = penalising();
    rig.speculation = speculation;
    rig.max_tree = 12;
    const Tokens prompt = prompt_of(60);
    CHECK(rig.complete(prompt, 150) == rig.model.continuation(prompt, 150, rig.sampling));
    CHECK(rig.rounds < 120);
  }
}

TEST(rounds_that_nobody_takes_leave_nothing_in_the_text) {
  GraphRig rig({.medusa_heads = 3}, {.adaptive = false});
  rig.sampling = penalising();
  Tokens tokens = prompt_of(40);
  rig.prompt_tokens = 40;
  const Tokens expected = rig.model.continuation(tokens, 300, rig.sampling);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  for (int turn = 0; tokens.size() < 300; ++turn) {
    rig.speculation = turn % 4 == 3 ? DrafterKind::kMedusa : DrafterKind::kNone;
    // As a request that is run again.
    if (turn % 13 == 7 && tokens.size() > 60) tokens.erase(tokens.end() - 5, tokens.end());
    const Status status = rig.advance(tokens, 30, turn % 5 == 2);
    if (status != Status::kAborted) REQUIRE(status == Status::kOk);
  }
  CHECK(std::equal(tokens.begin() + 40, tokens.end(), expected.begin()));
}

}  // namespace
