// The graph executor on a played device: rounds, continuations, prompts, settings.
#include <limits>

#include "graph_fixture.h"

namespace {

using ull::Sampling;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::AbortedRound;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

TEST(a_completion_is_the_model_s) {
  GraphRig rig;
  for (const int length : {1, 2, 64, 65, 130, 300}) {
    const Tokens prompt = prompt_of(length, length);
    CHECK(rig.complete(prompt, 100) == rig.model.continuation(prompt, 100));
  }
}

TEST(every_plain_round_but_the_first_is_a_continuation) {
  GraphRig rig;
  Tokens tokens = prompt_of(1);
  CHECK(rig.decode(tokens, 200) == Status::kOk);
  const auto records = rig.rest();
  CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 1);
  CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), 199);
  CHECK_EQ(records.size(), 200U);  // none after the last token
  // A new version only for a new page.
  CHECK(records.back().setting - records.front().setting <= 200 / 64 + 1);
}

TEST(the_next_round_is_launched_before_the_last_is_read) {
  GraphRig rig;
  HeldRound held(rig.device);
  const Tokens tokens = prompt_of(1);
  CHECK(rig.executor.start_round(rig.step(tokens, 10)) == Status::kOk);
  CHECK(rig.executor.poll(rig.result) == Status::kPending);
  CHECK_EQ(rig.device.launched(), held.sequence() + 1);  // itself and the one after it, though it has not begun
  held.release();
  CHECK(rig.finish() == Status::kOk);
}

TEST(the_last_round_of_a_request_is_followed_by_none) {
  GraphRig rig;
  Tokens tokens = prompt_of(1);
  CHECK(rig.decode(tokens, 1) == Status::kOk);
  CHECK_EQ(rig.rest().size(), 1U);
}

TEST(a_continuation_that_is_not_wanted_changes_nothing) {
  GraphRig rig;
  // The request ends early (at a stop text, say): a continuation is under way. The next has other tokens, other
  // sampling, the same pages.
  for (int turn = 0; turn < 50; ++turn) {
    Tokens tokens = prompt_of(70 + turn, turn);
    rig.sampling.seed = static_cast<uint64_t>(turn);
    const Tokens expected = rig.model.continuation(tokens, 20, rig.sampling);
    CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
    for (int i = 0; i < 20; ++i) {
      CHECK(rig.executor.start_round(rig.step(tokens, 100)) == Status::kOk);
      CHECK(rig.finish() == Status::kOk);
      REQUIRE(rig.result.count == 1);
      tokens.push_back(rig.result.tokens[0].token);
    }
    CHECK((Tokens{tokens.end() - 20, tokens.end()} == expected));
  }
  const auto records = rig.rest();
  CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 50);
}

TEST(a_step_that_differs_from_the_continuation_is_run_as_asked) {
  GraphRig rig;
  Tokens tokens = prompt_of(1);
  CHECK(rig.decode(tokens, 5) == Status::kOk);
  const auto round = [&](const Tokens& history, int most) {
    CHECK(rig.executor.start_round(rig.step(history, most)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    CHECK_EQ(rig.result.tokens[0].token,
             rig.model.next(history, rig.sampling.seed, rig.sampling.bias, rig.sampling.bias_count));
  };
  round(tokens, 9);
  round(tokens, 9);  // the same position again
  Tokens other = tokens;
  other.push_back(11);  // not the token that was drawn
  round(other, 9);
  tokens.push_back(rig.model.next(tokens, 0, rig.sampling.bias, 0));
  round(tokens, 9);
  tokens.push_back(rig.result.tokens[0].token);
  rig.sampling.seed = 5;
  round(tokens, 9);
  tokens.push_back(rig.result.tokens[0].token);
  const ull::LogitBias ban{rig.model.next(tokens, 5, rig.sampling.bias, 0), -std::numeric_limits<float>::infinity()};
  rig.sampling.bias = &ban;
  rig.sampling.bias_count = 1;
  round(tokens, 9);
  tokens.push_back(rig.result.tokens[0].token);
  round(tokens, 9);
  const auto records = rig.rest();
  // The step before the loop and the last one were adopted, the others asked for anew.
  CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 7);
}

TEST(a_stop_ends_the_device_s_rounds) {
  GraphRig rig;
  Tokens tokens = prompt_of(1);
  const Tokens expected = rig.model.continuation(tokens, 40);
  rig.stops = {expected[20]};
  const auto first = static_cast<size_t>(std::find(expected.begin(), expected.end(), expected[20]) - expected.begin());
  for (size_t i = 0; i <= first; ++i) {
    CHECK(rig.executor.start_round(rig.step(tokens, 100)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    tokens.push_back(rig.result.tokens[0].token);
    CHECK_EQ(tokens.back(), expected[i]);
  }
  const auto records = rig.rest();
  const int ran =
      count_of(records, RoundMode::kTake, RoundStatus::kOk) + count_of(records, RoundMode::kContinue, RoundStatus::kOk);
  CHECK_EQ(ran, static_cast<int>(first) + 1);  // what is queued behind the stop is skipped
  // Whoever goes on all the same gets the right token.
  CHECK(rig.decode(tokens, 5) == Status::kOk);
  CHECK((Tokens{tokens.end() - 5, tokens.end()} == Tokens{expected.begin() + static_cast<std::ptrdiff_t>(first) + 1,
                                                          expected.begin() + static_cast<std::ptrdiff_t>(first) + 6}));
}

TEST(settings_reach_the_device_only_when_they_change) {
  GraphRig rig;
  std::vector<ull::LogitBias> biases;
  for (int32_t token = 0; token < 50; ++token) biases.push_back({token, -1.0F});
  const Tokens prompt = prompt_of(3);
  for (int turn = 0; turn < 12; ++turn) {
    rig.sampling.bias = biases.data();
    rig.sampling.bias_count = turn % 3 * 25;
    rig.sampling.seed = static_cast<uint64_t>(turn % 2);
    rig.sampling.top_logprobs = turn % 4 == 0 ? 20 : -1;
    CHECK(rig.complete(prompt, 10) == rig.model.continuation(prompt, 10, rig.sampling));
    CHECK_EQ(rig.result.tokens[0].top_count, turn % 4 == 0 ? 20 : 0);
    if (turn % 4 == 0) CHECK_EQ(rig.result.tokens[0].top[0].token, rig.result.tokens[0].token);
  }
  const auto changed = rig.rest().back().setting;
  for (int turn = 0; turn < 5; ++turn) (void)rig.complete(prompt, 10);
  CHECK_EQ(rig.rest().back().setting, changed);
  std::rotate(rig.pages.begin(), rig.pages.begin() + 1, rig.pages.end());
  CHECK(rig.complete(prompt, 10) == rig.model.continuation(prompt, 10, rig.sampling));
  CHECK_EQ(rig.rest().back().setting, changed + 1);
}

TEST(a_prompt_is_run_in_chunks_of_the_most_tokens) {
  GraphRig rig;
  CHECK_EQ(rig.executor.info().prefill_chunk % ull::kMaxTreeTokens, 0);
  CHECK(rig.prefill(prompt_of(600)) == Status::kOk);
  const auto records = rig.rest();
  CHECK_EQ(count_of(records, RoundMode::kPrefill, RoundStatus::kOk), 10);  // 256, 256 and 88 tokens
  int tokens = 0;
  for (const auto& record : records) tokens += record.count;
  CHECK_EQ(tokens, 600);
}

// By the graph's size.
constexpr std::array<int, ull::kCostSizes> kGraphUs = {100, 200, 300, 1000, 400, 1000, 800};

// The graph of the only round that the device has run.
int graph_of_one(GraphRig& rig) {
  const auto records = rig.rest();
  CHECK_EQ(records.size(), 1U);
  return records.back().graph;
}

TEST(a_chunk_takes_the_cheapest_graph_that_holds_it) {
  GraphRig rig({.graph_us = kGraphUs, .prefill_us = 500});
  const std::pair<int, int> cases[] = {{1, 1}, {2, 2}, {3, 4}, {4, 4}, {5, 16}, {8, 16}, {16, 16}, {17, 0}, {64, 0}};
  for (const auto& [count, graph] : cases) {
    CHECK(rig.prefill(prompt_of(count)) == Status::kOk);
    CHECK_EQ(graph_of_one(rig), graph);
  }
  CHECK(rig.prefill(prompt_of(67)) == Status::kOk);  // what is left over is a small one
  CHECK_EQ(rig.rest().back().graph, 4);
}

TEST(a_prompt_s_graph_is_a_round_s_only_where_they_write_the_same_bits) {
  for (const ull::Reuse reuse : {ull::Reuse::kAll, ull::Reuse::kPrompt, ull::Reuse::kNothing}) {
    FakeDevice device({.round_us = 100, .prefill_us = 100});
    ull::graph::GraphProgram program = device.program();
    program.reuse = reuse;
    ull::graph::GraphExecutor executor(program, FakeDevice::driver(), {});
    executor.prepare();
    (void)GraphRig::rest(device);
    const int32_t token = 5, page = 0;
    CHECK(executor.start_prefill({&token, 1, 0, &page}) == Status::kOk);
    ull::RoundResult result;
    while (executor.poll(result) == Status::kPending) std::this_thread::yield();
    CHECK_EQ(GraphRig::rest(device).back().graph == 0, reuse != ull::Reuse::kAll);
  }
}

TEST(a_prompt_follows_a_continuation_that_is_still_under_way) {
  GraphRig rig({.round_us = 300});
  for (int turn = 0; turn < 8; ++turn) {
    Tokens tokens = prompt_of(1, turn);
    CHECK(rig.executor.start_round(rig.step(tokens, 50)) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    std::reverse(rig.pages.begin(), rig.pages.end());  // the page table changes while a round is in flight
    const Tokens prompt = prompt_of(257 + turn, turn);
    CHECK(rig.complete(prompt, 3) == rig.model.continuation(prompt, 3));
  }
}

TEST(the_page_table_is_not_written_while_a_round_may_read_it) {
  GraphRig rig;
  HeldRound held(rig.device, /*more=*/2);
  Tokens tokens = prompt_of(1);
  for (const int most : {2, 100}) {  // the continuation behind the second round is the first to see a second page
    CHECK(rig.advance(tokens, most) == Status::kOk);
  }
  const uint64_t launched = rig.device.launched();
  std::reverse(rig.pages.begin(), rig.pages.end());
  const Tokens prompt = prompt_of(256);
  CHECK(rig.executor.start_prefill({prompt.data(), 256, 0, rig.pages.data()}) == Status::kOk);
  for (int i = 0; i < 1000; ++i) CHECK(rig.executor.poll(rig.result) == Status::kPending);
  CHECK_EQ(rig.device.launched(), launched);
  held.release();
  CHECK(rig.finish() == Status::kOk);
  CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
}

// A round that is not wanted any more has begun, and is about to read its page table. The next request's prefix is in
// pages that this one would write to if it saw the new table.
TEST(a_round_s_setting_is_not_replaced_while_it_reads_it) {
  GraphRig rig;
  const Tokens prompt = prompt_of(130, 4);
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  const auto own = rig.pages;
  std::rotate(rig.pages.begin(), rig.pages.begin() + 5, rig.pages.end());
  HeldRound held(rig.device, /*more=*/2, &FakeDevice::Script::begun);
  Tokens tokens = prompt_of(1);
  for (const int most : {2, 100}) {  // the continuation behind the second round is the first to see a second page
    CHECK(rig.advance(tokens, most) == Status::kOk);
  }
  while (!held.reached()) std::this_thread::yield();
  const uint64_t launched = rig.device.launched();
  rig.pages = own;
  rig.sampling.seed = 9;
  CHECK(rig.executor.start_round(rig.step(prompt, 10)) == Status::kOk);
  for (int i = 0; i < 1000; ++i) CHECK(rig.executor.poll(rig.result) == Status::kPending);
  CHECK_EQ(rig.device.launched(), launched);
  held.release();
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.tokens[0].token, rig.model.continuation(prompt, 1, rig.sampling)[0]);
}

// A round that was skipped has not looked at its request: what it brought is brought again.
TEST(biases_reach_the_device_though_the_round_that_brought_them_was_skipped) {
  GraphRig rig;
  Tokens tokens = prompt_of(1);
  CHECK(rig.decode(tokens, 2) == Status::kOk);
  std::vector<ull::LogitBias> bans;
  for (int32_t token = 1; token < 100; ++token) bans.push_back({token, -std::numeric_limits<float>::infinity()});
  rig.sampling.bias = bans.data();
  rig.sampling.bias_count = 99;
  {
    AbortedRound aborted(rig.executor, rig.device, 0);
    CHECK(rig.executor.start_round(rig.step(tokens, 5)) == Status::kOk);
    CHECK(rig.finish() == Status::kAborted);
  }
  CHECK(rig.advance(tokens, 5) == Status::kOk);
  CHECK_EQ(tokens.back(), 0);
}

TEST(steps_that_cannot_be_are_refused) {
  GraphRig rig;
  const Tokens prompt = prompt_of(10);
  Tokens bad = prompt;
  bad.back() = 100;
  CHECK(rig.executor.start_round(rig.step(bad, 1)) == Status::kExecutorFailed);
  CHECK(rig.executor.start_round(rig.step(prompt, 0)) == Status::kExecutorFailed);
  CHECK(rig.executor.start_prefill({bad.data(), 10, 0, rig.pages.data()}) == Status::kExecutorFailed);
  CHECK(rig.executor.start_prefill({prompt.data(), 0, 0, rig.pages.data()}) == Status::kExecutorFailed);
  CHECK(rig.executor.start_prefill({prompt.data(), 10, 1020, rig.pages.data()}) == Status::kExecutorFailed);
  CHECK(rig.executor.start_prefill({prompt.data(), 10, -1, rig.pages.data()}) == Status::kExecutorFailed);
  CHECK(rig.executor.failure() == nullptr);
  CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
}

TEST(the_context_is_used_to_its_last_position) {
  GraphRig rig({.context = 128});
  const Tokens prompt = prompt_of(20);
  CHECK(rig.complete(prompt, 108) == rig.model.continuation(prompt, 108));
}

TEST(costs_are_measured) {
  GraphRig rig({.round_us = 50});
  for (const int64_t nanoseconds : rig.executor.info().verify_ns) CHECK(nanoseconds >= 50'000);
  GraphRig small({.context = 20, .page_count = 1});
  CHECK_EQ(small.executor.info().verify_ns[ull::kCostSizes - 1], 0);  // 64 tokens do not fit
  CHECK(small.executor.info().verify_ns[4] > 0);
}

TEST(the_widest_tree_is_what_the_program_holds) {
  FakeDevice device({});
  ull::graph::GraphProgram program = device.program();
  std::fill(program.rounds + 3, program.rounds + ull::kCostSizes, nullptr);
  program.reuse = ull::Reuse::kPrompt;
  ull::graph::GraphExecutor executor(program, FakeDevice::driver(), {});
  executor.prepare();
  CHECK_EQ(executor.info().tokens_per_round, 4);
  CHECK(executor.info().verify_ns[2] > 0);
  CHECK_EQ(executor.info().verify_ns[3], 0);
  CHECK(executor.info().reuse == ull::Reuse::kPrompt);
}

TEST(programs_that_cannot_be_are_refused) {
  using ull::graph::GraphExecutor;
  using ull::graph::GraphProgram;
  FakeDevice device({});
  const auto refused = [&](void (*spoil)(GraphProgram&), const char* field) {
    GraphProgram program = device.program();
    spoil(program);
    try {
      const GraphExecutor executor(program, FakeDevice::driver(), {});
      ull::check::fail(__FILE__, __LINE__, std::string(field) + " was taken");
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).starts_with(field));
    }
  };
  refused([](GraphProgram& program) { program.rounds[0] = nullptr; }, "graphs");
  refused([](GraphProgram& program) { program.prefill = nullptr; }, "prefill");
  refused([](GraphProgram& program) { program.stream = nullptr; }, "stream");
  refused([](GraphProgram& program) { program.context = nullptr; }, "context");
  refused([](GraphProgram& program) { program.requests = nullptr; }, "requests");
  refused([](GraphProgram& program) { program.control = reinterpret_cast<ull::gpu::HostControl*>(8); }, "control");
  refused([](GraphProgram& program) { program.results = nullptr; }, "results");
  refused([](GraphProgram& program) { program.pages = nullptr; }, "pages");
  refused([](GraphProgram& program) { program.vocabulary = 0; }, "vocabulary");
  refused([](GraphProgram& program) { program.context_tokens = 1; }, "context_tokens");
  refused([](GraphProgram& program) { program.page_count = 0; }, "page_count");
  refused([](GraphProgram& program) { program.name.clear(); }, "name");
  CHECK_THROWS(GraphExecutor(device.program(), FakeDevice::driver(), {.watchdog_ms = 0}), std::invalid_argument);
  CHECK_THROWS(GraphExecutor(device.program(), FakeDevice::driver(), {.drafter = ull::DrafterKind::kMedusa}),
               std::invalid_argument);
  CHECK_THROWS(GraphExecutor(device.program(), FakeDevice::driver(), {.max_tree = 65}), std::invalid_argument);
}

TEST(a_driver_that_is_not_there_is_named) {
  try {
    (void)ull::graph::load_driver("libcuda-that-is-not-there.so.1");
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("libcuda-that-is-not-there.so.1") != std::string::npos);
  }
  CHECK_THROWS(ull::graph::load_driver("libc.so.6"), std::runtime_error);  // no driver at all
}

}  // namespace
