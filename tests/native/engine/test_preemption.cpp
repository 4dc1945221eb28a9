// Requests that come between: what is suspended goes on where it was, with the same tokens, whatever comes and goes.
#include <random>

#include "engine_fixture.h"

namespace {

using ull::FinishReason;
using ull::Priority;
using ull::Reuse;
using ull::Submission;
using ull::test::Harness;
using ull::test::ids;

constexpr int64_t kMillisecond = 1'000'000;
const std::vector<int32_t> kPrompt = ids("once upon a time there was");

Submission urgent(uint64_t id, std::span<const int32_t> prompt, int max_tokens, Priority priority) {
  Submission request = Harness::request(id, prompt, max_tokens);
  request.priority = priority;
  return request;
}

// What an engine that has nothing else to do answers.
std::vector<int32_t> alone(ull::ScriptedExecutor::Options script, std::span<const int32_t> prompt, int max_tokens) {
  Harness engine(std::move(script));
  engine.submit(Harness::request(1, prompt, max_tokens));
  return engine.wait(1).tokens;
}

TEST(a_realtime_request_comes_between_two_rounds) {
  const ull::ScriptedExecutor::Options script{.from_past = true, .context = 1024, .page_count = 64};
  const auto expected = alone(script, kPrompt, 400);
  const auto other = ids("what comes between");
  const auto between = alone(script, other, 20);
  Harness engine(script);
  engine.submit_within(urgent(1, kPrompt, 400, Priority::kBatch), 6, urgent(2, other, 20, Priority::kRealtime));
  CHECK(engine.wait(2).tokens == between);
  CHECK_EQ(engine.results[1].finals, 0);
  CHECK(engine.wait(1).tokens == expected);
  engine.engine.stop();
  const ull::EngineCounters counters = engine.engine.stats().counters;
  CHECK_EQ(counters.suspensions, 1U);
  CHECK_EQ(counters.prefill_chunks, 2U);  // one each: nothing was read twice
}

TEST(a_realtime_request_comes_between_two_chunks) {
  const std::vector<int32_t> long_prompt(900, 'x');
  const ull::ScriptedExecutor::Options script{
      .from_past = true, .context = 1024, .page_count = 64, .prefill_chunk = 64};
  const auto expected = alone(script, long_prompt, 8);
  Harness engine(script);
  engine.submit_within(urgent(1, long_prompt, 8, Priority::kInteractive), 1,
                       urgent(2, kPrompt, 8, Priority::kRealtime));
  engine.wait(2);
  CHECK_EQ(engine.results[1].finals, 0);
  CHECK(engine.wait(1).tokens == expected);
  CHECK_EQ(engine.results[1].outcome.cached_tokens, 0);
  engine.engine.stop();
  CHECK_EQ(engine.engine.stats().counters.prefill_chunks, 16U);  // 15 and 1
}

TEST(an_equal_request_waits) {
  Harness engine({.from_past = true});
  engine.submit_within(urgent(1, kPrompt, 100, Priority::kInteractive), 2,
                       urgent(2, kPrompt, 2, Priority::kInteractive));
  engine.wait(2);
  CHECK_EQ(engine.results[1].finals, 1);
}

TEST(three_priorities_nest) {
  const ull::ScriptedExecutor::Options script{.from_past = true, .context = 1024, .page_count = 64};
  const std::vector<int32_t> prompts[] = {ids("realtime"), ids("interactive"), ids("batch")};
  Harness engine(script);
  engine.executor.hold_from(2);
  for (int i = 2; i >= 0; --i) {
    const int64_t held = engine.executor.steps() + 2;  // behind its chunk and its first round
    engine.submit(urgent(static_cast<uint64_t>(i), prompts[i], 300, static_cast<Priority>(i)));
    engine.executor.hold_from(held);
    engine.wait_for_steps(held + 1);
  }
  engine.executor.let_go();
  for (uint64_t id = 0; id < 3; ++id) {
    CHECK(engine.wait(id).tokens == alone(script, prompts[id], 300));
    for (uint64_t later = id + 1; later < 3; ++later) CHECK_EQ(engine.results[later].finals, 0);
  }
}

// Pages for one long text only: the suspended one gives its own up, reads its text again, and says the same.
TEST(pages_of_a_suspended_request_are_taken_and_it_says_the_same) {
  const ull::ScriptedExecutor::Options script{.from_past = true, .context = 512, .page_count = 8};
  const std::vector<int32_t> first(300, 'a'), second(400, 'b');
  const auto expected = alone(script, first, 150);
  for (const int forced : {0, 31}) {
    auto with = script;
    with.forced_tokens = forced;
    Harness engine(with);
    engine.submit_within(urgent(1, first, 150, Priority::kBatch), 22, urgent(2, second, 50, Priority::kRealtime));
    CHECK_EQ(engine.wait(2).tokens.size(), 50U);
    CHECK(engine.wait(1).tokens == expected);
    CHECK(engine.results[1].outcome.reason == FinishReason::kLength);
  }
}

// Where rounds write what a prefill would not, nobody goes on from what a suspended request has come to.
TEST(what_a_suspended_request_holds_is_shared_only_where_it_may_be_reused) {
  for (const Reuse reuse : {Reuse::kPrompt, Reuse::kNothing}) {
    const ull::ScriptedExecutor::Options script{.from_past = true, .context = 512, .page_count = 32, .reuse = reuse};
    const std::vector<int32_t> first(100, 'a');
    const auto beginning = alone(script, first, 80);
    std::vector<int32_t> second = first;
    second.insert(second.end(), beginning.begin(), beginning.end());
    const auto expected = alone(script, second, 20);
    Harness engine(script);
    engine.submit_within(urgent(1, first, 300, Priority::kBatch), 90, urgent(2, second, 20, Priority::kRealtime));
    CHECK(engine.wait(2).tokens == expected);
    CHECK_EQ(engine.results[2].outcome.cached_tokens, 0);
    CHECK_EQ(engine.results[1].finals, 0);
  }
}

// Where rounds write what a prefill would not, nothing can be computed again: who does not fit beside it waits.
TEST(where_nothing_can_be_computed_again_a_request_waits_for_pages) {
  for (const Reuse reuse : {Reuse::kPrompt, Reuse::kNothing}) {
    const ull::ScriptedExecutor::Options script{.from_past = true, .context = 512, .page_count = 8, .reuse = reuse};
    const std::vector<int32_t> first(300, 'a'), second(400, 'b'), third(60, 'c');
    const auto expected = alone(script, first, 100);
    Harness engine(script);
    engine.submit_within(urgent(1, first, 100, Priority::kBatch), 22, urgent(2, second, 50, Priority::kRealtime));
    engine.wait(2);
    CHECK_EQ(engine.results[1].finals, 1);
    CHECK(engine.wait(1).tokens == expected);
    // One that fits does come between.
    const int64_t within = engine.executor.steps() + 22;
    engine.submit_within(urgent(3, first, 100, Priority::kBatch), within, urgent(4, third, 4, Priority::kRealtime));
    engine.wait(4);
    CHECK_EQ(engine.results[3].finals, 0);
    CHECK(engine.wait(3).tokens == expected);
  }
}

TEST(a_suspended_request_can_be_cancelled_and_runs_late) {
  Harness engine({.from_past = true, .hang_step = 6});
  engine.submit_within(urgent(1, kPrompt, 300, Priority::kBatch), 3, urgent(2, kPrompt, 300, Priority::kRealtime));
  engine.wait_for_steps(7);  // hangs, and is the second's
  auto late = urgent(3, kPrompt, 300, Priority::kBatch);
  late.timeout_ns = ull::monotonic_ns() + kMillisecond;
  engine.submit(late);
  CHECK(engine.wait(3).outcome.reason == FinishReason::kTimeout);
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  CHECK(engine.cancel(2));
  CHECK(engine.wait(2).outcome.reason == FinishReason::kCancelled);
  engine.engine.stop();
  CHECK(engine.engine.drained());
}

TEST(a_deadline_ends_a_request_with_what_it_has) {
  Harness engine({.from_past = true, .round_ns = 2 * kMillisecond});
  auto request = Harness::request(1, kPrompt, 30);
  request.deadline_ns = ull::monotonic_ns() + 20 * kMillisecond;  // nothing is known of rounds yet: it is accepted
  engine.submit(request);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kDeadline);
  CHECK(engine.results[1].tokens.size() < 30);
}

TEST(what_cannot_be_done_in_time_is_refused) {
  Harness engine({.from_past = true, .context = 2048, .page_count = 64, .round_ns = kMillisecond});
  engine.submit(Harness::request(1, kPrompt, 20));
  engine.wait(1);
  const auto expected_of = [&](Submission request) -> int64_t {
    try {
      engine.submit(request);
    } catch (const ull::DeadlineUnreachable& error) {
      return error.expected_ns;
    }
    return 0;
  };
  while (engine.engine.stats().counters.length < 1) std::this_thread::yield();
  auto request = Harness::request(2, kPrompt, 1000);
  const int64_t now = ull::monotonic_ns();
  request.deadline_ns = now + 100 * kMillisecond;
  const int64_t expected = expected_of(request);
  CHECK(expected - now >= 900 * kMillisecond);  // rounds take a millisecond at least
  request.max_tokens = 5;
  request.deadline_ns = ull::monotonic_ns() + 60'000 * kMillisecond;
  CHECK_EQ(expected_of(request), 0);
  CHECK_EQ(engine.wait(2).tokens.size(), 5U);
  CHECK(engine.results[2].timeline.expected_done_ns >= engine.results[2].timeline.expected_first_ns);
  CHECK(engine.results[2].timeline.expected_first_ns > now);

  // What was accepted is not made late by another of the same priority; a more urgent one does not wait for it.
  auto first = Harness::request(3, kPrompt, 1500);
  first.priority = Priority::kBatch;
  engine.submit(first);
  engine.wait_for_steps(30);
  const auto other = ids("promised");
  auto promised = Harness::request(4, other, 1000);
  promised.deadline_ns = ull::monotonic_ns() + 600'000 * kMillisecond;
  engine.submit(promised);
  auto sooner = Harness::request(5, other, 20);
  sooner.deadline_ns = ull::monotonic_ns() + 2'000 * kMillisecond;
  sooner.priority = Priority::kRealtime;
  CHECK_EQ(expected_of(sooner), 0);
  CHECK_EQ(engine.wait(5).tokens.size(), 20U);
  for (const uint64_t id : {3, 4}) CHECK(engine.cancel(id));
  for (const uint64_t id : {3, 4}) engine.wait(id);
}

TEST(a_prompt_alone_is_read_and_found_again) {
  for (const int forced : {0, 31}) {
    Harness engine({.from_past = true, .context = 512, .page_count = 16, .forced_tokens = forced});
    const std::vector<int32_t> prompt(200, 'p');
    engine.submit(Harness::request(1, prompt, 0));
    CHECK_EQ(engine.wait(1).tokens.size(), 0U);
    CHECK(engine.results[1].outcome.reason == FinishReason::kLength);
    auto longer = prompt;
    longer.push_back('q');
    engine.submit(Harness::request(2, longer, 3));
    engine.wait(2);
    CHECK_EQ(engine.results[2].outcome.cached_tokens, 200);
    engine.submit(Harness::request(3, prompt, 3));
    engine.wait(3);
    CHECK_EQ(engine.results[3].outcome.cached_tokens, 199);
  }
}

TEST(a_pinned_prompt_stays_until_it_is_let_go) {
  Harness engine({.from_past = true, .context = 256, .page_count = 8}, {.max_sessions = 4});
  const std::vector<int32_t> system(120, 's');
  auto pinned = Harness::request(1, system, 0);
  pinned.pin = 7;
  engine.submit(pinned);
  engine.wait(1);
  const auto crowd = [&](uint64_t first) {
    for (uint64_t id = first; id < first + 6; ++id) {
      const std::vector<int32_t> other(250, static_cast<int32_t>('a' + id % 20));
      engine.submit(Harness::request(id, other, 4));
      engine.wait(id);
      CHECK_EQ(engine.results[id].tokens.size(), 4U);
    }
  };
  crowd(2);
  auto turn = system;
  turn.push_back('t');
  engine.submit(Harness::request(20, turn, 3));
  CHECK_EQ(engine.wait(20).outcome.cached_tokens, 120);
  engine.engine.unpin(7);
  crowd(21);
  engine.submit(Harness::request(40, turn, 3));
  CHECK_EQ(engine.wait(40).outcome.cached_tokens, 0);
}

TEST(a_cancelled_request_pins_nothing) {
  Harness engine({.from_past = true, .context = 256, .page_count = 8, .hang_step = 1}, {.max_sessions = 4});
  const std::vector<int32_t> prompt(120, 's');
  auto pinned = Harness::request(1, prompt, 20);
  pinned.pin = 7;
  engine.submit(pinned);
  engine.wait_for_steps(2);
  engine.engine.unpin(7);  // its session is closed
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  const std::vector<int32_t> full(255, 'f'), another(255, 'g');
  engine.submit(Harness::request(2, full, 1));
  engine.wait(2);
  engine.submit(Harness::request(3, another, 1));  // takes the place of what the first has left
  engine.wait(3);
  auto turn = prompt;
  turn.push_back('t');
  engine.submit(Harness::request(4, turn, 1));
  CHECK_EQ(engine.wait(4).outcome.cached_tokens, 0);
}

// Random requests of all priorities, some held to their limits, cancelled or pinned, few pages: every one ends exactly
// once, and all completions of one prompt are prefixes of one another.
TEST(storm) {
  for (const Reuse reuse : {Reuse::kAll, Reuse::kPrompt}) {
    Harness engine({.from_past = true,
                    .tokens_per_round = 2,
                    .context = 512,
                    .page_count = 24,
                    .prefill_chunk = 32,
                    .round_ns = 3'000,
                    .reuse = reuse,
                    .forced_tokens = 7},
                   {.queue_depth = 12, .client_share = 12, .max_sessions = 4, .aging_ms = 1});
    std::mt19937 random(7);
    const auto below = [&](uint32_t limit) { return random() % limit; };
    std::map<uint64_t, std::vector<int32_t>> prompts;
    std::map<std::vector<int32_t>, std::vector<int32_t>> truth;
    for (uint64_t id = 1; id <= 1500; ++id) {
      std::vector<int32_t> prompt(1 + below(200), static_cast<int32_t>(below(3)));
      auto request = Harness::request(id, prompt, static_cast<int>(below(60)));
      request.priority = static_cast<Priority>(below(ull::kPriorities));
      if (below(6) == 0) request.timeout_ns = ull::monotonic_ns() + below(400'000);
      if (below(6) == 0) request.deadline_ns = ull::monotonic_ns() + 20 * kMillisecond + below(400'000);
      if (below(6) == 0) request.pin = 1 + below(3);
      if (below(10) == 0) engine.engine.unpin(1 + below(3));
      while (prompts.count(id) == 0) {
        try {
          engine.submit(request);
          prompts[id] = prompt;
        } catch (const ull::QueueFull&) {
          while (!engine.pump()) std::this_thread::yield();
        } catch (const ull::DeadlineUnreachable& error) {
          CHECK(error.expected_ns > 0);
          request.deadline_ns = 0;
        }
      }
      if (below(3) == 0) (void)engine.cancel(id - below(5));
      for (uint32_t i = below(40); i-- > 0;) (void)engine.pump();
    }
    for (const auto& [id, prompt] : prompts) engine.wait(id);
    for (const auto& [id, prompt] : prompts) {
      const auto& result = engine.results[id];
      CHECK_EQ(result.finals, 1);
      CHECK(result.outcome.reason != FinishReason::kError);
      auto& known = truth[prompt];
      const size_t common = std::min(known.size(), result.tokens.size());
      CHECK(std::equal(known.begin(), known.begin() + static_cast<std::ptrdiff_t>(common), result.tokens.begin()));
      if (result.tokens.size() > known.size()) known = result.tokens;
    }
    engine.engine.stop();
    const ull::EngineCounters counters = engine.engine.stats().counters;
    CHECK(counters.suspensions > 0);
    CHECK(engine.engine.drained());
  }
}

}  // namespace
