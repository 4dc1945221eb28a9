// Rounds with forced tokens on the graph executor: a prompt's end and the first token in one pass over the weights, be
// it a round of all of them or a prompt's last chunk.
#include <cmath>

#include "graph_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Sampling;
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

// Prefill, a first round with `forced` tokens and rounds after it: `count` tokens behind the prompt.
Tokens complete(GraphRig& rig, const Tokens& prompt, int count, int forced) {
  rig.drafted.model = 0;
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1 - forced}) == Status::kOk);
  Tokens tokens = prompt;
  tokens.reserve(prompt.size() + 500);
  const int most = std::min(count, rig.executor.info().tokens_per_round);
  CHECK(rig.executor.start_round(rig.first_step(tokens, forced, most)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK(rig.result.count == 1 && rig.result.tree_tokens == 1 && rig.result.depth == 0 && rig.result.accepted == 0);
  CHECK(rig.result.drafter == DrafterKind::kNone);
  tokens.push_back(rig.result.tokens[0].token);
  rig.rounds = 1;
  CHECK(rig.decode(tokens, count - 1) == Status::kOk);
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

// What the engine does: as much of the prompt's end as one round takes.
int most_forced(const GraphRig& rig, const Tokens& prompt) {
  return std::min(static_cast<int>(prompt.size()) - 1, rig.executor.info().forced_tokens);
}

TEST(they_are_offered_where_rounds_write_what_a_prefill_does) {
  const auto offered = [](auto change, FakeDevice::Script script = {}) {
    FakeDevice device(script);
    ull::graph::GraphProgram program = device.program();
    change(program);
    ull::graph::GraphExecutor executor(program, FakeDevice::driver(), {});
    executor.prepare();
    return executor.info().forced_tokens;
  };
  using Program = ull::graph::GraphProgram;
  CHECK_EQ(offered([](Program&) {}), 63);
  CHECK_EQ(offered([](Program& program) { program.reuse = ull::Reuse::kPrompt; }), 0);
  CHECK_EQ(offered([](Program& program) { program.reuse = ull::Reuse::kNothing; }), 0);
  CHECK_EQ(offered([](Program& program) { std::fill(program.rounds + 3, program.rounds + 7, nullptr); }), 3);
  CHECK_EQ(offered([](Program&) {}, {.context = 20, .page_count = 1}), 19);
}

TEST(a_short_prompt_takes_one_pass_over_the_weights) {
  GraphRig rig;
  const std::pair<int, int> cases[] = {{1, 1}, {2, 1}, {17, 1}, {64, 1}, {65, 2}, {100, 2}, {128, 2}, {300, 5}};
  for (const auto& [length, passes] : cases) {
    const Tokens prompt = prompt_of(length);
    CHECK(complete(rig, prompt, 1, most_forced(rig, prompt)) == rig.model.continuation(prompt, 1));
    CHECK_EQ(rig.rest().size(), static_cast<size_t>(passes));
  }
}

// What it takes along it reads as a chunk; the rest is as without.
FakeDevice::Script last_chunks(FakeDevice::Script script = {}) {
  script.context = 2048;
  script.chunks = script.last_chunks = true;
  return script;
}

TEST(more_than_a_round_holds_are_a_chunk) {
  GraphRig rig(last_chunks());
  CHECK_EQ(rig.executor.info().forced_tokens, 511);
  for (const auto& [length, forced] : {std::pair{64, 63}, {65, 64}, {130, 129}, {512, 511}, {1000, 487}, {1100, 300}}) {
    const Tokens prompt = prompt_of(length, length);
    CHECK(complete(rig, prompt, 1, forced) == rig.model.continuation(prompt, 1));
    const auto records = rig.rest();
    CHECK_EQ(records.size(), static_cast<size_t>(1 + (length - forced + 510) / 512));
    const FakeDevice::Record& last = records.back();
    CHECK(last.mode == RoundMode::kTake && last.status == RoundStatus::kOk && last.emitted == 1);
    CHECK_EQ(last.count, forced + 1);
    CHECK_EQ(last.position, length - 1 - forced);
    CHECK_EQ(last.graph, forced + 1 > 64 ? 512 : 64);
    if (forced + 1 > 64) CHECK((last.prompt == Tokens{prompt.end() - 1 - forced, prompt.end()}));
  }
}

// Where chunks alone read prompts, since they have other bits than rounds, one that draws reads their end, however
// short it is.
FakeDevice::Script fast_chunks(FakeDevice::Script script = {}) {
  script.fast = true;
  return last_chunks(script);
}

TEST(a_prompt_that_chunks_alone_read_ends_in_one) {
  for (const DrafterKind speculation : {DrafterKind::kNone, DrafterKind::kSuffix, DrafterKind::kMedusa}) {
    GraphRig rig(fast_chunks({.model = {100, 5}, .medusa_heads = 3}), {.adaptive = false});
    CHECK(rig.executor.info().reuse == ull::Reuse::kPrompt && rig.executor.info().prefill_draws);
    CHECK(rig.executor.info().forced_tokens == 0 && rig.executor.info().prompt_forced() == 511);
    rig.speculation = speculation;
    for (const int length : {1, 2, 64, 65, 300, 512, 513, 1100}) {
      const Tokens prompt = prompt_of(length, length);
      const int forced = rig.executor.first_forced(length, 0);
      CHECK_EQ(forced, (length - 1) % 512);
      CHECK(complete(rig, prompt, 40, forced) == rig.model.continuation(prompt, 40));
      const auto records = rig.rest();
      const auto parts = static_cast<size_t>((length + 511) / 512);
      REQUIRE(records.size() > parts);
      for (size_t i = 0; i < records.size(); ++i) {
        CHECK_EQ(records[i].graph == 512, i < parts);
        CHECK_EQ(records[i].mode == RoundMode::kPrefill, i + 1 < parts);
      }
      const FakeDevice::Record& last = records[parts - 1];
      CHECK(last.mode == RoundMode::kTake && last.position == length - 1 - forced && last.emitted == 1);
      CHECK((last.prompt == Tokens{prompt.end() - 1 - forced, prompt.end()}));
    }
  }
}

// What is queued behind one request would feed the same token at the same position, but as a round.
TEST(a_continuation_is_not_taken_for_the_end_of_a_prompt_that_chunks_alone_read) {
  GraphRig rig(fast_chunks());
  Tokens tokens = prompt_of(1);
  rig.prompt_tokens = 1;
  CHECK(rig.advance(tokens, 10) == Status::kOk);
  CHECK(rig.executor.start_round(rig.first_step(tokens, 0, 10)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.tokens[0].token, rig.model.continuation(tokens, 1)[0]);
  int chunks = 0;
  for (const FakeDevice::Record& record : rig.rest()) chunks += record.graph == 512 ? 1 : 0;
  CHECK_EQ(chunks, 2);
}

// Behind a chunk that draws all goes on as behind a round of one token.
TEST(what_follows_a_chunk_is_what_follows_a_round) {
  const ull::LogitBias bans[] = {{4, -INFINITY}, {17, -INFINITY}};
  for (int kind = 0; kind < 5; ++kind) {
    GraphRig rig(last_chunks({.burst_rounds = kind == 4 ? 2 : 0}));
    rig.sampling.seed = 5;
    if (kind == 1) rig.sampling.temperature = 0.8F, rig.sampling.top_logprobs = 3;
    if (kind == 2) rig.sampling.bias = bans, rig.sampling.bias_count = 2;
    if (kind == 3) rig.sampling.frequency_penalty = 0.5F;
    for (const int length : {65, 200, 512, 900}) {
      const Tokens prompt = prompt_of(length, length);
      const Tokens expected = rig.model.continuation(prompt, 70, rig.sampling);
      CHECK(complete(rig, prompt, 70, std::min(length - 1, 511)) == expected);
      CHECK_EQ(rig.result.tokens[0].top_count, kind == 1 ? 3 : 0);
      const auto records = rig.rest();
      CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), 69);
    }
  }
}

// It is read while what comes before it may yet be under way, with a page table of its own.
TEST(a_chunk_that_draws_waits_for_the_page_table) {
  GraphRig rig(last_chunks());
  HeldRound held(rig.device, /*more=*/2);
  Tokens tokens = prompt_of(1);
  for (const int most : {2, 100}) CHECK(rig.advance(tokens, most) == Status::kOk);
  const uint64_t launched = rig.device.launched();
  std::reverse(rig.pages.begin(), rig.pages.end());
  const Tokens prompt = prompt_of(400, 5);
  CHECK(rig.executor.start_round(rig.first_step(prompt, 399, 1)) == Status::kOk);
  for (int i = 0; i < 1000; ++i) CHECK(rig.executor.poll(rig.result) == Status::kPending);
  CHECK_EQ(rig.device.launched(), launched);
  held.release();
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.tokens[0].token, rig.model.continuation(prompt, 1)[0]);
}

TEST(they_take_the_cheapest_graph) {
  GraphRig rig({.graph_us = {100, 200, 300, 1000, 400, 500, 600}, .prefill_us = 800});
  for (const auto& [forced, graph] : {std::pair{1, 2}, {3, 4}, {4, 16}, {7, 16}, {16, 32}, {63, 64}}) {
    const Tokens prompt = prompt_of(forced + 1);
    (void)complete(rig, prompt, 1, forced);
    const auto records = rig.rest();
    REQUIRE(records.size() == 1);
    CHECK_EQ(records[0].graph, graph);
    CHECK_EQ(records[0].count, forced + 1);
  }
}

TEST(the_tokens_are_those_of_a_prefill_and_a_plain_round) {
  const ull::LogitBias bans[] = {{4, -INFINITY}, {17, -INFINITY}};
  for (int kind = 0; kind < 4; ++kind) {
    GraphRig rig;
    rig.sampling.seed = 5;
    if (kind == 1) rig.sampling.temperature = 0.8F, rig.sampling.top_logprobs = 3;
    if (kind == 2) rig.sampling.bias = bans, rig.sampling.bias_count = 2;
    if (kind == 3) rig.sampling.frequency_penalty = 0.5F;
    for (const int length : {2, 40, 64, 65, 130}) {
      for (const int forced : {1, 7, 63}) {
        if (forced >= length) continue;
        const Tokens prompt = prompt_of(length, length + forced);
        const Tokens expected = rig.model.continuation(prompt, 70, rig.sampling);
        CHECK(complete(rig, prompt, 70, forced) == expected);
        CHECK_EQ(rig.result.tokens[0].top_count, kind == 1 ? 3 : 0);
      }
    }
  }
}

TEST(rounds_run_ahead_behind_them) {
  for (const bool penalises : {false, true}) {
    GraphRig rig;
    if (penalises) rig.sampling.presence_penalty = 0.5F;
    const Tokens prompt = prompt_of(60);
    CHECK(complete(rig, prompt, 40, 59) == rig.model.continuation(prompt, 40, rig.sampling));
    const auto records = rig.rest();
    CHECK_EQ(records.size(), 40U);
    CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), 39);
  }
  GraphRig rig;
  HeldRound held(rig.device);
  const Tokens prompt = prompt_of(60);
  CHECK(rig.executor.start_round(rig.first_step(prompt, 59, 10)) == Status::kOk);
  CHECK(rig.executor.poll(rig.result) == Status::kPending);
  CHECK_EQ(rig.device.launched(), held.sequence() + 1);
  held.release();
  CHECK(rig.finish() == Status::kOk);
}

// A round is queued that would feed the same token at the same position, and no more.
TEST(a_continuation_is_not_taken_for_one_with_forced_tokens) {
  GraphRig rig;
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 10) == Status::kOk);
  Tokens prompt = tokens;
  for (const int32_t token : {50, 51, 52}) prompt.push_back(token);
  CHECK(rig.executor.start_round(rig.first_step(prompt, 3, 10)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.tokens[0].token, rig.model.continuation(prompt, 1)[0]);
}

TEST(a_stop_behind_them_ends_the_device_s_rounds) {
  for (const int forced : {29, 299}) {  // a round, and a chunk
    GraphRig rig(last_chunks());
    const Tokens prompt = prompt_of(forced + 1);
    rig.stops = {rig.model.continuation(prompt, 1)[0]};
    CHECK(rig.executor.start_round(rig.first_step(prompt, forced, 10)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    CHECK_EQ(rig.result.tokens[0].token, rig.stops[0]);
    CHECK_EQ(count_of(rig.rest(), RoundMode::kContinue, RoundStatus::kOk), 0);
  }
}

TEST(drafts_go_on_behind_them) {
  const auto drafted = [](DrafterKind speculation, GraphRig& rig) {
    rig.speculation = speculation;
    rig.max_tree = 8;
    for (int turn = 0; turn < 3; ++turn) {
      rig.sampling = {};
      rig.sampling.seed = static_cast<uint64_t>(turn);
      if (turn == 2) rig.sampling.repetition_penalty = 1.3F;
      const Tokens prompt = prompt_of(40 + 30 * turn, turn);
      const Tokens expected = rig.model.continuation(prompt, 90, rig.sampling);
      CHECK(complete(rig, prompt, 90, most_forced(rig, prompt)) == expected);
      CHECK(rig.rounds < 80);
    }
    CHECK(rig.result.drafter != DrafterKind::kNone || rig.result.count == 1);
  };
  const ull::graph::GraphOptions always{.adaptive = false};
  GraphRig ngram({.model = {100, 5}}, always);
  drafted(DrafterKind::kSuffix, ngram);
  GraphRig medusa({.medusa_heads = 4}, always);
  drafted(DrafterKind::kMedusa, medusa);
  GraphRig draft({}, always, FakeDevice::Script{.model = {.flaw = 4}});
  drafted(DrafterKind::kDraft, draft);
  GraphRig behind_chunks(last_chunks({.medusa_heads = 4}), always);
  drafted(DrafterKind::kMedusa, behind_chunks);
  GraphRig missed(last_chunks(), always, FakeDevice::Script{.model = {.flaw = 4}, .context = 2048});
  drafted(DrafterKind::kDraft, missed);
}

// They read the hidden state of the last token that was fed.
TEST(heads_draft_right_behind_them) {
  for (const int forced : {49, 149}) {
    GraphRig rig(last_chunks({.medusa_heads = 3}), {.adaptive = false});
    rig.speculation = DrafterKind::kMedusa;
    Tokens tokens = prompt_of(forced + 1);
    const Tokens expected = rig.model.continuation(tokens, 5);
    CHECK(rig.executor.start_round(rig.first_step(tokens, forced, 20)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    tokens.push_back(rig.result.tokens[0].token);
    CHECK(rig.advance(tokens, 20) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kMedusa);
    CHECK((Tokens{tokens.begin() + forced + 1, tokens.end()} == expected));
    const auto records = rig.rest();
    REQUIRE(records.size() == 4);
    CHECK(records[1].mode == RoundMode::kMedusa && records[1].emitted == 1);
    CHECK(records[3].mode == RoundMode::kMedusa && records[3].emitted == 1);  // behind the round that they drafted
  }
}

TEST(an_aborted_one_can_be_run_again) {
  for (const int forced : {39, 139}) {
    for (const bool late : {false, true}) {  // it is skipped, or has run all the same and left its text behind
      GraphRig rig(last_chunks());
      rig.sampling.frequency_penalty = 0.5F;
      const Tokens prompt = prompt_of(61 + forced);
      const Tokens expected = rig.model.continuation(prompt, 20, rig.sampling);
      CHECK(rig.prefill({prompt.begin(), prompt.begin() + 60}) == Status::kOk);
      if (late) {
        CHECK(rig.executor.start_round(rig.first_step(prompt, forced, 2)) == Status::kOk);
        while (FakeDevice::driver().query(&rig.device) == ull::graph::kNotReady) std::this_thread::yield();
        rig.executor.abort();
        CHECK(rig.finish() == Status::kAborted);
      } else {
        AbortedRound aborted(rig.executor, rig.device, 0);
        CHECK(rig.executor.start_round(rig.first_step(prompt, forced, 2)) == Status::kOk);
        CHECK(rig.finish() == Status::kAborted);
      }
      CHECK(complete(rig, prompt, 20, forced) == expected);
    }
  }
}

// Each way in which a round can fail ends the executor with what a round's failure says.
TEST(a_chunk_that_draws_fails_as_a_round_does) {
  for (const auto& [at, what] : {std::pair{&FakeDevice::Script::skipped_at, "an impossible answer to a round"},
                                 std::pair{&FakeDevice::Script::not_finite_at, "a logit is not finite"}}) {
    GraphRig rig(last_chunks());
    rig.device.arm([&, at = at](FakeDevice::Script& script, uint64_t next) { script.*at = next; });
    const Tokens prompt = prompt_of(200);
    CHECK(rig.executor.start_round(rig.first_step(prompt, 199, 1)) == Status::kOk);
    CHECK(rig.finish() == Status::kExecutorFailed);
    CHECK(ull::test::says(rig.executor.failure(), what));
  }
}

TEST(nothing_is_forced_but_a_prompt_s_end_where_chunks_alone_read_it) {
  GraphRig rig(fast_chunks());
  const Tokens prompt = prompt_of(600);
  for (const int forced : {0, 1, 63, 64, 511, 512}) {
    for (const bool ends : {true, false}) {
      ull::RoundStep step = rig.first_step(prompt, forced, 1);
      if (!ends) --step.prompt_tokens;
      const bool taken = rig.executor.start_round(step) == Status::kOk;
      CHECK_EQ(taken, forced == 0 || (ends && forced < 512));
      if (taken) CHECK(rig.finish() == Status::kOk);
    }
  }
}

TEST(what_cannot_be_forced_is_refused) {
  GraphRig rig({.context = 128});
  const Tokens prompt = prompt_of(100);
  const auto refused = [&](auto change) {
    ull::RoundStep step = rig.first_step(prompt, 10, 1);
    change(step);
    return rig.executor.start_round(step) == Status::kExecutorFailed;
  };
  using Step = ull::RoundStep;
  CHECK(refused([](Step& step) { step.forced = -1; }));
  CHECK(refused([](Step& step) { step.forced = 64; }));
  CHECK(refused([](Step& step) { step.history = nullptr; }));
  CHECK(refused([](Step& step) { step.position = -1; }));
  CHECK(refused([](Step& step) { step.position = 118; }));
  CHECK(refused([](Step& step) { step.max_tokens = 0; }));
  Tokens odd = prompt;
  odd[95] = 100;
  CHECK(refused([&](Step& step) { step.history = odd.data(); }));
  rig.sampling.presence_penalty = 0.5F;
  CHECK(refused([](Step& step) { step.prompt_tokens = 99; }));  // of a text whose end was generated
  CHECK(rig.executor.failure() == nullptr);
  CHECK(complete(rig, prompt, 3, 10) == rig.model.continuation(prompt, 3, rig.sampling));
}

}  // namespace
