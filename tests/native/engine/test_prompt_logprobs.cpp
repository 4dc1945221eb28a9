// Log-probabilities of a prompt's tokens: the passes, what they find however the prompt was cached or cut, and who
// comes between them.
#include <algorithm>
#include <cmath>

#include "engine_fixture.h"

namespace {

using ull::FinishReason;
using ull::Priority;
using ull::PromptLogprobs;
using ull::Reuse;
using ull::ScoreStep;
using ull::ScriptedExecutor;
using ull::Submission;
using ull::test::Harness;
using ull::test::ids;

constexpr int64_t kMillisecond = 1'000'000;

// A text of so many tokens, no two pages of which are the same.
std::vector<int32_t> text(size_t tokens) {
  std::vector<int32_t> all;
  for (size_t i = 0; i < tokens; ++i) all.push_back(static_cast<int32_t>((i * 7 + i / 64) % 96 + 32));
  return all;
}

Submission score(uint64_t id, std::span<const int32_t> prompt, int max_tokens = 0,
                 Priority priority = Priority::kInteractive) {
  Submission request = Harness::request(id, prompt, max_tokens);
  request.prompt_logprobs = true;
  request.priority = priority;
  return request;
}

// What the script says of the first `count` tokens behind the prompt's first.
std::vector<float> scripted(std::span<const int32_t> prompt, size_t count) {
  std::vector<float> values;
  for (size_t i = 1; i <= count; ++i) {
    values.push_back(ScriptedExecutor::scripted_logprob(prompt.first(i), prompt[i]));
  }
  return values;
}

void check_all(Harness& engine, uint64_t id, std::span<const int32_t> prompt) {
  const auto& result = engine.wait(id);
  CHECK(result.outcome.reason == FinishReason::kLength);
  CHECK(result.prompt_logprobs == scripted(prompt, prompt.size() - 1));
}

uint64_t passes(size_t prompt, size_t score_nodes) { return (prompt - 1 + score_nodes - 1) / score_nodes; }

TEST(the_passes_walk_the_prompt_once) {
  const std::vector<int32_t> prompt = text(200);
  for (const size_t tokens : {1U, 2U, 3U, 64U, 65U, 66U, 129U, 200U}) {
    for (const int nodes : {1, 16, 64}) {
      PromptLogprobs logprobs(static_cast<int32_t>(tokens), nodes);
      CHECK_EQ(static_cast<size_t>(logprobs.size()), tokens - 1);
      CHECK_EQ(static_cast<size_t>(logprobs.passes()), passes(tokens, static_cast<size_t>(nodes)));
      int made = 0;
      while (!logprobs.scored()) {
        const int32_t page = 0;
        const ScoreStep step = logprobs.next_step(prompt.data(), &page);
        CHECK_EQ(step.position, logprobs.found());
        CHECK_EQ(step.tokens, prompt.data() + step.position);
        CHECK(step.count >= 1 && step.count <= nodes && step.count <= logprobs.widest());
        CHECK_EQ(step.count, step.query_count);
        for (int i = 0; i < step.count; ++i) {
          CHECK_EQ(static_cast<int>(step.parents[i]), std::max(0, i - 1));
          CHECK_EQ(step.queries[i].node, i);
          CHECK_EQ(step.queries[i].token, prompt[static_cast<size_t>(step.position + i + 1)]);
          step.logprobs[i] = static_cast<float>(-step.position - i);
        }
        CHECK(logprobs.accept());
        ++made;
      }
      CHECK_EQ(made, logprobs.passes());
      CHECK_EQ(logprobs.passes_behind(logprobs.found()), 0);
      for (int32_t i = 0; i < logprobs.size(); ++i) {
        CHECK_EQ(logprobs.values()[static_cast<size_t>(i)], static_cast<float>(-i));
      }
    }
  }
}

TEST(what_is_no_logprob_is_not_accepted) {
  for (const float answer : {NAN, INFINITY, -INFINITY}) {
    for (const bool of_top : {false, true}) {
      PromptLogprobs logprobs(3, 64, 2);
      const auto prompt = ids("abc");
      const int32_t page = 0;
      const ScoreStep step = logprobs.next_step(prompt.data(), &page);
      for (int i = 0; i < 2; ++i) step.logprobs[i] = -1.0F;
      for (int i = 0; i < 4; ++i) step.top[i] = {i, -1.0F};
      (of_top ? step.top[3].logprob : step.logprobs[1]) = answer;
      CHECK(!logprobs.accept());
      CHECK_EQ(logprobs.found(), 0);
    }
  }
}

// Each token's lie together, pass behind pass, whatever a pass takes.
TEST(the_likeliest_tokens_are_kept_beside) {
  const std::vector<int32_t> prompt = text(150);
  for (const int top_count : {0, 1, 5}) {
    for (const int nodes : {1, 16, 64}) {
      Harness engine({.from_past = true, .score_nodes = nodes});
      Submission request = score(1, prompt, 3);
      request.prompt_top_logprobs = top_count;
      engine.submit(request);
      check_all(engine, 1, prompt);
      const std::vector<ull::TokenLogprob>& top = engine.results[1].prompt_top;
      CHECK_EQ(top.size(), (prompt.size() - 1) * static_cast<size_t>(top_count));
      for (size_t i = 0; i < top.size(); ++i) {
        const auto ranks = static_cast<size_t>(top_count);
        const auto past = std::span(prompt).first(i / ranks + 1);
        const ull::TokenLogprob expected = engine.executor.scripted_top(past, static_cast<int>(i % ranks));
        CHECK_EQ(top[i].token, expected.token);
        CHECK_EQ(top[i].logprob, expected.logprob);
      }
    }
  }
}

// Cold, from the cache, and behind what has generated from it; whatever a chunk, a pass and a first round take.
TEST(every_token_has_its_own_however_the_prompt_is_cached_and_cut) {
  for (const size_t tokens : {1U, 2U, 64U, 65U, 200U}) {
    const std::vector<int32_t> prompt = text(tokens);
    for (const auto& [chunk, forced, nodes] : {std::tuple(256, 0, 64), std::tuple(48, 31, 64), std::tuple(7, 31, 5)}) {
      Harness engine({.from_past = true, .prefill_chunk = chunk, .forced_tokens = forced, .score_nodes = nodes});
      Harness plain({.from_past = true});
      plain.submit(Harness::request(1, prompt, 20));
      for (uint64_t id = 1; id < 6; ++id) {
        const int max_tokens = id % 2 == 0 ? 20 : 0;
        engine.submit(score(id, prompt, max_tokens));
        check_all(engine, id, prompt);
        CHECK(max_tokens == 0 ? engine.results[id].tokens.empty() : engine.results[id].tokens == plain.wait(1).tokens);
      }
      // What it leaves in the cache is what a prefill leaves.
      engine.submit(Harness::request(6, prompt, 20));
      CHECK(engine.wait(6).tokens == plain.wait(1).tokens);
      engine.engine.stop();
      const ull::EngineCounters counters = engine.engine.stats().counters;
      CHECK_EQ(counters.score_passes, 5 * passes(tokens, static_cast<size_t>(nodes)));
      CHECK_EQ(counters.scored_tokens, 5 * (tokens - 1));
    }
  }
}

TEST(a_realtime_request_comes_between_two_passes) {
  const std::vector<int32_t> prompt = text(400);
  for (const int max_tokens : {0, 10}) {
    Harness engine({.from_past = true, .score_nodes = 32});
    engine.submit_within(score(1, prompt, max_tokens, Priority::kBatch), 4,
                         score(2, ids("what comes between"), 3, Priority::kRealtime));
    check_all(engine, 2, ids("what comes between"));
    CHECK_EQ(engine.results[1].finals, 0);
    check_all(engine, 1, prompt);
    CHECK_EQ(engine.results[1].tokens.size(), static_cast<size_t>(max_tokens));
    engine.engine.stop();
    const ull::EngineCounters counters = engine.engine.stats().counters;
    CHECK(counters.suspensions >= 1);
    CHECK_EQ(counters.scored_tokens, prompt.size() - 1 + ids("what comes between").size() - 1);  // nothing twice
  }
}

// Pages for one long text only: the request gives its own up between two passes, reads its prompt again, and goes on.
TEST(a_request_whose_pages_are_taken_between_two_passes_finds_the_same) {
  const std::vector<int32_t> first = text(300), second(400, 'b');
  for (const int forced : {0, 31}) {
    Harness engine({.from_past = true, .context = 512, .page_count = 8, .forced_tokens = forced, .score_nodes = 16});
    Submission urgent = Harness::request(2, second, 20);
    urgent.priority = Priority::kRealtime;
    engine.submit_within(score(1, first, 5, Priority::kBatch), 5, urgent);
    CHECK_EQ(engine.wait(2).tokens.size(), 20U);
    CHECK_EQ(engine.results[1].finals, 0);
    check_all(engine, 1, first);
    Harness alone({.from_past = true});
    alone.submit(Harness::request(1, first, 5));
    CHECK(alone.wait(1).tokens == engine.results[1].tokens);
    engine.engine.stop();
    CHECK_EQ(engine.engine.stats().counters.scored_tokens, first.size() - 1);
  }
}

TEST(what_a_cancelled_or_late_request_has_found_is_the_beginning) {
  const std::vector<int32_t> prompt = text(900);
  for (const bool late : {false, true}) {
    Harness engine({.from_past = true, .round_ns = 5 * kMillisecond, .score_nodes = 16});
    Submission request = score(1, prompt, 5);
    if (late) request.timeout_ns = ull::monotonic_ns() + 40 * kMillisecond;
    engine.submit(request);
    if (!late) {
      engine.wait_for_steps(7);
      CHECK(engine.cancel(1));
    }
    const auto& result = engine.wait(1);
    CHECK(result.outcome.reason == (late ? FinishReason::kTimeout : FinishReason::kCancelled));
    CHECK(result.prompt_logprobs.size() < prompt.size() - 1);
    CHECK(result.prompt_logprobs == scripted(prompt, result.prompt_logprobs.size()));
    CHECK(result.tokens.empty());
    engine.submit(score(2, ids("and then")));
    check_all(engine, 2, ids("and then"));
  }
}

TEST(a_request_is_cancelled_within_a_pass) {
  Harness engine({.hang_step = 2, .score_nodes = 16});
  engine.submit(score(1, text(100)));
  engine.wait_for_steps(3);
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  CHECK_EQ(engine.results[1].prompt_logprobs.size(), 16U);
}

TEST(a_pass_that_fails_ends_the_request) {
  Harness engine({.fail_step = 3, .failure = "it broke", .score_nodes = 16});
  engine.submit(score(1, text(100), 5));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kError);
  CHECK_EQ(std::string(engine.results[1].outcome.error_message), "it broke");
  CHECK_EQ(engine.results[1].prompt_logprobs.size(), 32U);
}

TEST(held_and_rehearsed_requests_are_scored_too) {
  const std::vector<int32_t> prompt = text(100);
  Harness engine({.from_past = true});
  Submission held = score(1, prompt, 3);
  held.hold = true;
  engine.submit(held);
  check_all(engine, 1, prompt);
  Submission rehearsal = score(2, prompt, 3);
  rehearsal.rehearsal = true;
  engine.submit(rehearsal);
  check_all(engine, 2, prompt);
  engine.engine.stop();
  CHECK_EQ(engine.engine.stats().counters.score_passes, 2U);
}

TEST(it_goes_with_choices_and_with_logprobs) {
  const std::vector<int32_t> prompt = text(100);
  Harness engine({.from_past = true});
  Submission chooses = score(1, prompt);
  chooses.choices = {ids("yes"), ids("no")};
  engine.submit(chooses);
  const auto& chosen = engine.wait(1);
  CHECK(chosen.outcome.reason == FinishReason::kStop);
  CHECK(chosen.prompt_logprobs == scripted(prompt, 99));
  Submission alone = Harness::request(2, prompt, 0);
  alone.choices = chooses.choices;
  engine.submit(alone);
  CHECK(engine.wait(2).tokens == chosen.tokens);
  Submission sampled = score(3, prompt, 9);
  sampled.sampling.top_logprobs = 2;
  engine.submit(sampled);
  check_all(engine, 3, prompt);
  CHECK_EQ(engine.results[3].logprobs.size(), 9U);
}

TEST(what_it_will_take_is_known_from_earlier_ones) {
  const std::vector<int32_t> prompt = text(200);
  Harness engine({.round_ns = 5 * kMillisecond, .score_nodes = 16});
  for (uint64_t id = 1; id < 4; ++id) {
    engine.submit(score(id, prompt));
    engine.wait(id);
  }
  const int64_t half = static_cast<int64_t>(passes(200, 16)) * 5 * kMillisecond / 2;
  const int64_t now = ull::monotonic_ns();
  Submission late = score(4, prompt);
  late.deadline_ns = now + half;
  CHECK_THROWS(engine.submit(late), ull::DeadlineUnreachable);
  late.deadline_ns = now + 60'000 * kMillisecond;
  engine.submit(late);
  CHECK(engine.wait(4).outcome.reason == FinishReason::kLength);
  CHECK(engine.results[4].timeline.expected_first_ns - now >= half);
}

TEST(it_is_refused_where_passes_would_change_what_the_cache_holds) {
  for (const auto& [reuse, nodes] :
       {std::pair(Reuse::kPrompt, 64), std::pair(Reuse::kNothing, 64), std::pair(Reuse::kAll, 0)}) {
    Harness engine({.reuse = reuse, .score_nodes = nodes});
    std::string field;
    try {
      engine.submit(score(1, text(10)));
    } catch (const ull::InvalidRequest& error) {
      field = error.field;
    }
    CHECK_EQ(field, "prompt_logprobs");
    CHECK(!engine.executor.info().scores_prompts());
  }
}

TEST(what_an_ended_request_has_found_is_freed) {
  Harness engine({});
  for (uint64_t id = 1; id < 4; ++id) engine.submit(score(id, text(100)));
  for (uint64_t id = 1; id < 4; ++id) engine.wait(id);
  engine.engine.free_ended();
  for (uint32_t i = 0; i < engine.engine.shared().slots; ++i) {
    CHECK(engine.engine.shared().slot(i).prompt_logprobs == nullptr);
  }
}

}  // namespace
