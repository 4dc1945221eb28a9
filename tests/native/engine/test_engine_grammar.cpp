// Constraints through the engine: what is forced and what is drawn, how completions end, and who frees what.
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>

#include "engine_fixture.h"
#include "scripted_constraint.h"

namespace {

using ull::FinishReason;
using ull::LogitBias;
using ull::Priority;
using ull::ScriptedExecutor;
using ull::Submission;
using ull::test::Harness;
using ull::test::ids;
using ull::test::one_of;
using ull::test::Result;
using ull::test::Rule;
using ull::test::ScriptedConstraint;
using ull::test::some_tokens_until;
using ull::test::Tokens;

const std::vector<int32_t> kPrompt = ids("once upon a time there was");

Submission constrained(uint64_t id, const Rule& rule, int max_tokens, int fails_behind = -1) {
  Submission request = Harness::request(id, kPrompt, max_tokens);
  request.constraint = std::make_shared<ScriptedConstraint>(rule, fails_behind);
  return request;
}

ScriptedExecutor::Options script(int forced_tokens, int tokens_per_round) {
  return {.from_past = true,
          .tokens_per_round = tokens_per_round,
          .context = 512,
          .page_count = 32,
          .prefill_chunk = 32,
          .forced_tokens = forced_tokens};
}

// What an engine answers that draws each token in a round of its own.
Result drawn_one_by_one(const Submission& request) {
  Harness engine(script(0, 1));
  engine.submit(request);
  return engine.wait(request.id);
}

void check_same(const Result& result, const Result& expected) {
  CHECK_EQ(result.text(), expected.text());
  CHECK(result.outcome.reason == expected.outcome.reason);
  CHECK_EQ(result.silent_last, expected.silent_last);
  CHECK_EQ(result.finals, 1);
}

TEST(what_is_forced_is_what_would_have_been_drawn) {
  int forced = 0;
  for (const int length : {0, 1, 2, 5, 9, 14, 20, 27, 39}) {
    const Rule rule = some_tokens_until(static_cast<size_t>(length), 128);
    for (const int max_tokens : {1, 7, 100}) {
      const Result expected = drawn_one_by_one(constrained(1, rule, max_tokens));
      CHECK_EQ(expected.tokens.size(), static_cast<size_t>(std::min(length, max_tokens)));
      CHECK(expected.outcome.reason == (length <= max_tokens ? FinishReason::kStop : FinishReason::kLength));
      CHECK_EQ(expected.outcome.forced_tokens, 0);
      for (const int most : {0, 1, 5, 31}) {
        for (const int per_round : {1, 4, 20}) {
          Harness engine(script(most, per_round));
          engine.submit(constrained(1, rule, max_tokens));
          const Result& result = engine.wait(1);
          check_same(result, expected);
          if (most == 0) CHECK_EQ(result.outcome.forced_tokens, 0);
          forced += result.outcome.forced_tokens;
          // The next request finds its pages as they should be.
          engine.submit(constrained(2, rule, max_tokens));
          check_same(engine.wait(2), expected);
        }
      }
    }
  }
  CHECK(forced > 100);
}

TEST(what_is_forced_takes_no_rounds) {
  Harness engine(script(31, 1));
  engine.submit(constrained(1, one_of({"all of it is forced: a", "all of it is forced: b"}), 100));
  const Result& result = engine.wait(1);
  CHECK_EQ(result.text().substr(0, 21), "all of it is forced: ");
  CHECK_EQ(result.outcome.forced_tokens, 21);
  CHECK_EQ(result.outcome.masks, result.outcome.completion_tokens - 21);  // of the one that was drawn
  CHECK(result.timeline.first_token_ns > 0);
  engine.submit(constrained(2, one_of({"nothing else"}), 100));
  CHECK_EQ(engine.wait(2).text(), "nothing else");
  CHECK_EQ(engine.results[2].outcome.masks, 0);
  engine.engine.stop();
  CHECK_EQ(engine.engine.stats().counters.rounds, 1U);
  CHECK_EQ(engine.engine.stats().counters.completion_tokens, 34U);
}

// An executor that reads in parts of 16 wants the last one whole, and the 8 tokens that are forced behind the prompt
// are of it.
TEST(what_is_forced_belongs_to_the_last_part_of_a_prompt) {
  const Rule rule = one_of({"forced: a", "forced: b"});
  const std::pair<int, unsigned> cases[] = {{1, 0},  {2, 0},  {8, 0},  {9, 1}, {16, 1},
                                            {24, 1}, {25, 2}, {40, 2}, {41, 3}};
  for (const auto& [length, read_before] : cases) {
    const Tokens prompt(static_cast<size_t>(length), 'x');
    Submission request = Harness::request(1, prompt, 20);
    request.constraint = std::make_shared<ScriptedConstraint>(rule);
    const Result expected = drawn_one_by_one(request);
    ScriptedExecutor::Options options = script(15, 1);
    options.prefill_chunk = options.part = 16;
    Harness engine(options);
    request.constraint = std::make_shared<ScriptedConstraint>(rule);
    engine.submit(request);
    const Result& result = engine.wait(1);
    check_same(result, expected);
    CHECK_EQ(result.outcome.forced_tokens, 8);
    engine.engine.stop();
    CHECK_EQ(engine.engine.stats().counters.prefill_chunks, read_before);
    CHECK_EQ(engine.engine.stats().counters.rounds, 1U);
  }
}

TEST(stops_end_a_completion_in_the_middle_of_what_is_forced) {
  const Rule rule = one_of({"abc, then a long and fixed part, then x", "abc, then a long and fixed part, then y"});
  for (const std::string& stop : {std::string("fixed"), std::string("a"), std::string("n x"), std::string("n y")}) {
    Submission request = constrained(1, rule, 100);
    request.stops = {stop};
    const Result expected = drawn_one_by_one(request);
    for (const int most : {3, 31}) {
      Harness engine(script(most, 4));
      request.constraint = std::make_shared<ScriptedConstraint>(rule);
      engine.submit(request);
      check_same(engine.wait(1), expected);
    }
  }
  for (const int32_t stop_id : {'f', 'a', 'y', 'x'}) {
    Submission request = constrained(1, rule, 100);
    request.stop_ids = {stop_id};
    const Result expected = drawn_one_by_one(request);
    Harness engine(script(31, 4));
    request.constraint = std::make_shared<ScriptedConstraint>(rule);
    engine.submit(request);
    check_same(engine.wait(1), expected);
  }
}

// Penalties and logprobs look at each token, bans may forbid it: then what is forced is drawn.
TEST(what_looks_at_every_token_has_every_token_drawn) {
  const Rule rule = some_tokens_until(30, 128);
  const LogitBias ban{1, -std::numeric_limits<float>::infinity()};
  for (int kind = 0; kind < 3; ++kind) {
    Submission request = constrained(1, rule, 100);
    if (kind == 0) request.sampling.top_logprobs = 0;
    if (kind == 1) request.sampling.bias = &ban;
    if (kind == 1) request.sampling.bias_count = 1;
    Harness engine(script(31, 4));
    engine.submit(request);
    const Result& result = engine.wait(1);
    CHECK_EQ(result.outcome.forced_tokens > 0, kind == 2);
    if (kind == 0) CHECK_EQ(result.logprobs.size(), result.tokens.size());
  }
}

TEST(a_suspended_request_goes_on_where_its_constraint_stands) {
  const Rule rule = some_tokens_until(200, 128);
  const Result expected = drawn_one_by_one(constrained(1, rule, 150));
  for (const int most : {0, 31}) {
    auto slow = script(most, 3);
    slow.round_ns = 100'000;
    slow.page_count = 8;  // of which the other takes those of the first: it reads its text again
    Harness engine(slow);
    Submission request = constrained(1, rule, 150);
    request.priority = Priority::kBatch;
    engine.submit(request);
    for (uint64_t other = 2; other < 6; ++other) {
      while (engine.results[1].tokens.size() < 20 * other && engine.results[1].finals == 0) (void)engine.pump();
      const std::vector<int32_t> prompt(400, static_cast<int32_t>('a' + other));
      Submission urgent = Harness::request(other, prompt, 20);
      urgent.constraint = std::make_shared<ScriptedConstraint>(some_tokens_until(10, 128));
      urgent.priority = Priority::kRealtime;
      engine.submit(urgent);
      CHECK_EQ(engine.wait(other).tokens.size(), 10U);
    }
    check_same(engine.wait(1), expected);
  }
}

// One of the failures of other servers: a matcher that got stuck.
TEST(a_constraint_that_fails_ends_its_request_and_no_other) {
  const Rule rule = some_tokens_until(40, 128);
  const Result whole = drawn_one_by_one(constrained(1, rule, 100));
  for (const int most : {0, 5, 31}) {
    for (const int behind : {0, 1, 13, 39}) {
      Harness engine(script(most, 4));
      engine.submit(constrained(1, rule, 100, behind));
      engine.submit(constrained(2, rule, 100));
      const Result& result = engine.wait(1);
      CHECK(result.outcome.reason == FinishReason::kError);
      CHECK_EQ(std::string(result.outcome.error_code), "grammar_failed");
      CHECK_EQ(std::string(result.outcome.error_message), "it was told to");
      CHECK_EQ(result.text(), whole.text().substr(0, static_cast<size_t>(behind)));
      CHECK(engine.wait(2).tokens == whole.tokens);
      CHECK_EQ(std::string(engine.engine.health()), "ok");
    }
  }
}

// One of the failures of other servers: a mask that went out of step and killed the engine.
TEST(a_mask_that_is_out_of_step_ends_its_request_and_no_other) {
  struct OutOfStep final : ScriptedConstraint {
    using ScriptedConstraint::ScriptedConstraint;
    bool take(int32_t token) noexcept override { return text.size() < 3 && ScriptedConstraint::take(token); }
    int32_t forced(int32_t*, int32_t) noexcept override { return 0; }
  };
  const Rule rule = some_tokens_until(40, 128);
  Harness engine(script(31, 4));
  Submission request = Harness::request(1, kPrompt, 100);
  request.constraint = std::make_shared<OutOfStep>(rule);
  engine.submit(request);
  engine.submit(constrained(2, rule, 100));
  const Result& result = engine.wait(1);
  CHECK(result.outcome.reason == FinishReason::kError);
  CHECK_EQ(std::string(result.outcome.error_code), "grammar_failed");
  CHECK_EQ(result.tokens.size(), 3U);
  CHECK_EQ(engine.wait(2).tokens.size(), 40U);
  CHECK_EQ(std::string(engine.engine.health()), "ok");
}

TEST(what_is_forced_but_not_taken_ends_its_request_and_no_other) {
  struct Liar final : ScriptedConstraint {
    using ScriptedConstraint::ScriptedConstraint;
    bool take(int32_t) noexcept override { return false; }
  };
  Harness engine(script(31, 4));
  Submission request = Harness::request(1, kPrompt, 100);
  request.constraint = std::make_shared<Liar>(one_of({"abc"}));
  engine.submit(request);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kError);
  CHECK(engine.results[1].tokens.empty());
  CHECK_EQ(std::string(engine.engine.health()), "ok");
}

// One of the failures of other servers: a terminated matcher that is asked again.
TEST(a_constraint_that_is_complete_is_asked_no_more) {
  struct Watched final : ScriptedConstraint {
    using ScriptedConstraint::ScriptedConstraint;
    bool take(int32_t token) noexcept override {
      CHECK(!complete());
      return ScriptedConstraint::take(token);
    }
  };
  for (const int most : {0, 31}) {
    for (const int per_round : {1, 4}) {
      for (const Rule& rule : {some_tokens_until(0, 128), some_tokens_until(9, 128), one_of({"abc", "abd"})}) {
        Harness engine(script(most, per_round));
        Submission request = Harness::request(1, kPrompt, 100);
        request.constraint = std::make_shared<Watched>(rule);
        engine.submit(request);
        CHECK(engine.wait(1).outcome.reason == FinishReason::kStop);
      }
    }
  }
}

TEST(bans_that_leave_nothing_end_the_request_and_no_other) {
  std::vector<LogitBias> bans;
  for (const int32_t token : {'a', 'b', 'c'}) bans.push_back({token, -std::numeric_limits<float>::infinity()});
  for (const int count : {2, 3}) {
    Harness engine(script(31, 4));
    Submission request = constrained(1, one_of({"xa", "xb", "xc"}), 100);
    request.sampling.bias = bans.data();
    request.sampling.bias_count = count;
    engine.submit(request);
    engine.submit(constrained(2, one_of({"xa", "xb", "xc"}), 100));
    const Result& result = engine.wait(1);
    CHECK(result.outcome.reason == (count == 3 ? FinishReason::kError : FinishReason::kStop));
    if (count == 3) CHECK_EQ(std::string(result.outcome.error_code), "grammar_failed");
    CHECK(engine.wait(2).outcome.reason == FinishReason::kStop);
    CHECK_EQ(std::string(engine.engine.health()), "ok");
  }
}

TEST(a_constrained_request_is_cancelled_as_any_other) {
  Harness engine(script(31, 2));
  engine.executor.hold_from(6);
  engine.submit(constrained(1, some_tokens_until(400, 128), 400));
  engine.wait_for_steps(7);
  CHECK(engine.cancel(1));
  const Result cancelled = engine.wait(1);
  CHECK(cancelled.outcome.reason == FinishReason::kCancelled);
  CHECK(cancelled.tokens.size() >= 10);
  engine.executor.let_go();
  engine.submit(constrained(2, some_tokens_until(400, 128), 60));
  const Result& whole = engine.wait(2);
  const size_t common = std::min(whole.tokens.size(), cancelled.tokens.size());
  CHECK(std::equal(whole.tokens.begin(), whole.tokens.begin() + static_cast<ptrdiff_t>(common),
                   cancelled.tokens.begin()));
}

// A step that was hit by an abort meant for another request is run again, from where the constraint stands.
TEST(an_aborted_round_is_run_again) {
  const Rule rule = some_tokens_until(60, 128);
  const Result expected = drawn_one_by_one(constrained(1, rule, 100));
  auto slow = script(31, 2);
  slow.round_ns = 50'000;
  Harness engine(slow);
  engine.submit(constrained(1, rule, 100));
  while (engine.results[1].finals == 0) {
    engine.executor.abort();
    (void)engine.pump();
  }
  check_same(engine.results[1], expected);
}

TEST(constraints_are_freed_by_the_control_thread) {
  struct Owned final : ScriptedConstraint {
    Owned(const Rule& rule, std::atomic<int>& alive) : ScriptedConstraint(rule), alive_(alive) { ++alive_; }
    ~Owned() override {
      CHECK(std::this_thread::get_id() == owner_);
      --alive_;
    }
    std::atomic<int>& alive_;
    const std::thread::id owner_ = std::this_thread::get_id();
  };
  std::atomic<int> alive{0};
  {
    Harness engine(script(31, 4));
    const auto submit = [&](uint64_t id) {
      Submission request = Harness::request(id, kPrompt, 20);
      request.constraint = std::make_shared<Owned>(some_tokens_until(10, 128), alive);
      engine.submit(request);
      engine.wait(id);
    };
    submit(1);
    CHECK_EQ(alive.load(), 1);
    submit(2);  // which frees that of the first
    CHECK_EQ(alive.load(), 1);
    engine.engine.free_ended();
    CHECK_EQ(alive.load(), 0);
    submit(3);
  }
  CHECK_EQ(alive.load(), 0);
}

TEST(an_executor_without_constraints_has_them_refused) {
  auto without = script(0, 1);
  without.constraints = false;
  Harness engine(without);
  CHECK_THROWS(engine.submit(constrained(1, some_tokens_until(3, 128), 5)), ull::InvalidRequest);
}

}  // namespace
