// The engine loop's ordinary life: finish reasons, queue, sessions, speculation, counters, submission checks.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "engine_fixture.h"

namespace {

using ull::DrafterKind;
using ull::FinishReason;
using ull::test::Harness;
using ull::test::ids;

constexpr int kMillisecond = 1'000'000;

// With this script the completion of a 26 n token prompt is "abcdefgh...".
std::vector<int32_t> alphabet() { return ids("abcdefghijklmnopqrstuvwxyz"); }
const std::vector<int32_t> kPrompt = ids("once upon a time there was");  // 26 tokens

TEST(a_request_runs_to_its_length) {
  Harness engine({.tokens = alphabet()});
  auto request = Harness::request(1, kPrompt, 5);
  request.received_ns = 11;
  request.admitted_ns = 12;
  engine.submit(request);
  const auto& result = engine.wait(1);
  CHECK_EQ(result.text(), "abcde");
  CHECK(result.outcome.reason == FinishReason::kLength);
  CHECK_EQ(result.outcome.cached_tokens, 0);
  CHECK(result.outcome.error_code == nullptr);
  const ull::Timeline& timeline = result.timeline;
  CHECK_EQ(timeline.received_ns, 11);
  CHECK_EQ(timeline.admitted_ns, 12);
  CHECK(timeline.started_ns > 0);
  CHECK(timeline.started_ns <= timeline.prefilled_ns);
  CHECK(timeline.prefilled_ns <= timeline.first_token_ns);
  CHECK(timeline.first_token_ns <= timeline.last_token_ns);
  CHECK(timeline.last_token_ns <= timeline.done_ns);
}

TEST(a_full_context_ends_with_length) {
  Harness engine({.tokens = alphabet(), .context = 64, .page_count = 4});
  engine.submit(Harness::request(1, kPrompt, 1000));
  CHECK_EQ(engine.wait(1).tokens.size(), 64U - 26U);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kLength);
  engine.submit(Harness::request(2, std::vector<int32_t>(63, 'x'), 1000));
  CHECK_EQ(engine.wait(2).tokens.size(), 1U);
}

TEST(fewer_pages_than_context_bound_the_context) {
  Harness engine({.tokens = alphabet(), .context = 4096, .page_count = 2});
  CHECK_EQ(engine.engine.context(), 128);
  engine.submit(Harness::request(1, kPrompt, 1000));
  CHECK_EQ(engine.wait(1).tokens.size(), 128U - 26U);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kLength);
}

TEST(a_stop_id_ends_the_request_and_has_no_text) {
  Harness engine({.tokens = alphabet()});
  auto request = Harness::request(1, kPrompt, 100);
  request.stop_ids = {'x', 'd'};
  engine.submit(request);
  CHECK_EQ(engine.wait(1).text(), "abcd");
  CHECK(engine.wait(1).outcome.reason == FinishReason::kStop);
  CHECK(engine.wait(1).silent_last);
}

TEST(a_stop_string_over_token_borders_ends_exactly_there) {
  for (const int tokens_per_round : {1, 3, 65}) {
    Harness engine({.tokens = alphabet(), .tokens_per_round = tokens_per_round});
    auto request = Harness::request(1, kPrompt, 100);
    request.stops = {"zzz", "fgh"};
    engine.submit(request);
    const auto& result = engine.wait(1);
    CHECK_EQ(result.text(), "abcdefgh");
    CHECK(result.outcome.reason == FinishReason::kStop);
    CHECK(!result.silent_last);
  }
}

TEST(a_stop_in_the_last_allowed_token_is_a_stop) {
  Harness engine({.tokens = alphabet(), .tokens_per_round = 4});
  auto request = Harness::request(1, kPrompt, 4);
  request.stop_ids = {'d'};
  engine.submit(request);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kStop);
}

TEST(a_prompt_of_one_token_needs_no_prefill) {
  Harness engine({.tokens = alphabet()});
  engine.submit(Harness::request(1, std::vector<int32_t>{'q'}, 3));
  CHECK_EQ(engine.wait(1).text(), "bcd");
  CHECK_EQ(engine.executor.steps(), 3);
}

TEST(prefill_is_chunked) {
  Harness engine({.tokens = alphabet(), .prefill_chunk = 10});
  engine.submit(Harness::request(1, kPrompt, 1));
  engine.wait(1);
  CHECK_EQ(engine.executor.steps(), 3 + 1);
}

// The executor's tokens are a hash of everything before them, read through the page table: cached, cold, chunked and
// speculative runs must all agree.
TEST(cached_and_cold_requests_give_the_same_tokens) {
  const auto prompt = [](int count, int variant) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back((i * 7 + (i > 150 ? variant : 0)) % 128);
    return tokens;
  };
  for (const bool copies : {true, false}) {
    Harness cold({.from_past = true, .context = 1024}, {.prefix_cache = false});
    Harness warm({.from_past = true,
                  .tokens_per_round = 7,
                  .context = 1024,
                  .page_count = 40,
                  .prefill_chunk = 33,
                  .copies_pages = copies});
    uint64_t id = 0;
    int cached = 0;
    const auto both = [&](const std::vector<int32_t>& tokens) {
      ++id;
      for (Harness* engine : {&cold, &warm}) engine->submit(Harness::request(id, tokens, 90));
      CHECK(cold.wait(id).tokens == warm.wait(id).tokens);
      CHECK_EQ(cold.wait(id).outcome.cached_tokens, 0);
      cached = warm.wait(id).outcome.cached_tokens;
      auto conversation = tokens;
      conversation.insert(conversation.end(), warm.wait(id).tokens.begin(), warm.wait(id).tokens.end());
      return conversation;
    };
    auto first = both(prompt(300, 0));
    CHECK_EQ(cached, 0);
    first.push_back('!');
    (void)both(first);
    CHECK_EQ(cached, 300 + 90 - 1);
    (void)both(prompt(300, 0));
    CHECK_EQ(cached, 299);
    const auto second = both(prompt(500, 5));  // shares 151 tokens: two full pages, and 23 of the next
    CHECK_EQ(cached, copies ? 151 : 128);
    (void)both(first);
    CHECK_EQ(cached, 389);
    (void)both(second);
    CHECK_EQ(cached, 589);
    for (int variant = 10; variant < 40; ++variant) (void)both(prompt(200 + 10 * variant, variant));
    (void)both(second);
    CHECK(warm.engine.stats().counters.prefix_hits > 20);
  }
}

// Answers of any length to the same question: it is prefilled once.
TEST(the_same_short_prompt_is_warm_from_the_second_time_on) {
  Harness engine({.from_past = true, .context = 512, .page_count = 64});
  uint64_t id = 0;
  for (const int tokens : {200, 5, 5, 90, 5}) {
    engine.submit(Harness::request(++id, kPrompt, tokens));
    CHECK_EQ(engine.wait(id).outcome.cached_tokens, id == 1 ? 0 : 25);
  }
  for (uint64_t other = 2; other <= id; ++other) {
    for (size_t i = 0; i < 5; ++i) CHECK_EQ(engine.results[other].tokens[i], engine.results[1].tokens[i]);
  }
}

// A prompt's end that is fed with the first round leaves the tokens, the cache and the books as they were; only steps
// become fewer.
TEST(a_prompt_s_end_and_its_first_token_take_one_step) {
  const auto steps_of = [](Harness& engine, uint64_t id, const std::vector<int32_t>& prompt, int tokens) {
    const int64_t before = engine.executor.steps();
    engine.submit(Harness::request(id, prompt, tokens));
    engine.wait(id);
    return engine.executor.steps() - before;
  };
  for (const int chunk : {10, 64}) {
    Harness plain({.from_past = true, .context = 512, .prefill_chunk = chunk}, {.prefix_cache = false});
    for (const int forced : {1, 7, 63}) {
      Harness engine(
          {.from_past = true, .tokens_per_round = 3, .context = 512, .prefill_chunk = chunk, .forced_tokens = forced});
      uint64_t id = 0;
      for (const int length : {1, 2, 8, 9, 17, 64, 65, 74, 75, 128, 129, 200}) {
        std::vector<int32_t> prompt(static_cast<size_t>(length));
        for (int i = 0; i < length; ++i) prompt[static_cast<size_t>(i)] = (i * 7 + length) % 128;
        ++id;
        (void)steps_of(plain, 100 * static_cast<uint64_t>(forced) + id, prompt, 20);
        const auto& expected = plain.results[100 * static_cast<uint64_t>(forced) + id];
        const int prefilled = std::max(0, length - 1 - forced);
        const int rounds = length == 1 ? 7 : 1 + 7;  // 20 tokens, 3 at a time; of them one behind the prompt
        CHECK_EQ(steps_of(engine, id, prompt, 20), (prefilled + chunk - 1) / chunk + rounds);
        CHECK(engine.results[id].tokens == expected.tokens);
        CHECK(engine.results[id].timeline.prefilled_ns >= engine.results[id].timeline.started_ns);
        CHECK(engine.results[id].timeline.prefilled_ns <= engine.results[id].timeline.first_token_ns);
        // Again, warm; and as the next turn.
        ++id;
        (void)steps_of(engine, id, prompt, 20);
        CHECK(engine.results[id].tokens == expected.tokens);
        CHECK_EQ(engine.results[id].outcome.cached_tokens, length - 1);
        auto turn = prompt;
        turn.insert(turn.end(), expected.tokens.begin(), expected.tokens.end());
        turn.push_back('!');
        ++id;
        (void)steps_of(engine, id, turn, 5);
        CHECK_EQ(engine.results[id].outcome.cached_tokens, length + 19);
        (void)steps_of(plain, 100'000 + 100 * static_cast<uint64_t>(forced) + id, turn, 5);
        CHECK(engine.results[id].tokens == plain.results[100'000 + 100 * static_cast<uint64_t>(forced) + id].tokens);
      }
    }
  }
}

// Where rounds write what a prefill would not, nothing of a prompt is left to them but its last token.
TEST(a_round_takes_no_prompt_where_it_writes_other_values) {
  for (const ull::Reuse reuse : {ull::Reuse::kPrompt, ull::Reuse::kNothing}) {
    Harness engine({.tokens = alphabet(), .prefill_chunk = 10, .reuse = reuse, .forced_tokens = 63});
    engine.submit(Harness::request(1, kPrompt, 1));
    engine.wait(1);
    CHECK_EQ(engine.executor.steps(), 3 + 1);
  }
}

// Unless the one that ends a prompt writes what a prefill would: it takes a chunk.
TEST(the_round_that_ends_a_prompt_takes_a_chunk_where_it_prefills) {
  for (const ull::Reuse reuse : {ull::Reuse::kPrompt, ull::Reuse::kNothing}) {
    Harness engine({.tokens = alphabet(), .prefill_chunk = 10, .reuse = reuse, .prefill_draws = true});
    for (const auto& [length, steps] : {std::pair{1, 1}, {10, 1}, {11, 2}, {27, 3}, {31, 4}}) {
      const int64_t before = engine.executor.steps();
      const auto id = static_cast<uint64_t>(length);
      const std::vector<int32_t> prompt(static_cast<size_t>(length), length);
      engine.submit(Harness::request(id, prompt, 4));
      CHECK_EQ(engine.wait(id).tokens.size(), 4U);
      CHECK_EQ(engine.executor.steps() - before, steps + 3);
    }
  }
}

// The executor's rounds write other values than its prefill: what they wrote must never serve a later request, and all
// that a prefill wrote may.
void only_what_prefill_wrote_is_reused(bool prefill_draws) {
  const auto prompt = [](int count) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(i * 7 % 128);
    return tokens;
  };
  Harness cold({.from_past = true, .context = 1024, .reuse = ull::Reuse::kNothing, .prefill_draws = prefill_draws});
  Harness warm({.from_past = true,
                .tokens_per_round = 5,
                .context = 1024,
                .page_count = 40,
                .prefill_chunk = 33,
                .reuse = ull::Reuse::kPrompt,
                .prefill_draws = prefill_draws});
  uint64_t id = 0;
  const auto cached_of = [&](const std::vector<int32_t>& tokens) {
    ++id;
    for (Harness* engine : {&cold, &warm}) engine->submit(Harness::request(id, tokens, 70));
    CHECK(cold.wait(id).tokens == warm.wait(id).tokens);
    CHECK_EQ(cold.wait(id).outcome.cached_tokens, 0);
    return warm.wait(id).outcome.cached_tokens;
  };
  CHECK_EQ(cached_of(prompt(200)), 0);
  auto turn = prompt(200);
  turn.insert(turn.end(), warm.wait(1).tokens.begin(), warm.wait(1).tokens.end());
  turn.push_back('!');
  CHECK_EQ(cached_of(turn), 199);
  CHECK_EQ(cached_of(turn), 270);  // the generated tokens are the second turn's prompt: prefill wrote them
  CHECK_EQ(cached_of(prompt(120)), 119);
  CHECK_EQ(cached_of(prompt(1)), 0);
  CHECK_EQ(cached_of(turn), 270);
  CHECK_EQ(cold.engine.stats().counters.sessions, 0U);
}

TEST(only_what_prefill_wrote_is_reused_where_rounds_differ) {
  for (const bool prefill_draws : {false, true}) only_what_prefill_wrote_is_reused(prefill_draws);
}

// Two conversations that together fill the pool: neither may be evicted for pages that a round could not need.
TEST(a_round_reserves_no_more_pages_than_it_can_write) {
  Harness engine({.tokens = alphabet(), .context = 512, .page_count = 4});
  const std::vector<int32_t> first(100, 'x');
  const std::vector<int32_t> second(100, 'y');
  engine.submit(Harness::request(1, first, 27));
  engine.wait(1);
  engine.submit(Harness::request(2, second, 27));
  engine.wait(2);
  engine.submit(Harness::request(3, first, 1));
  CHECK_EQ(engine.wait(3).outcome.cached_tokens, 99);
  engine.submit(Harness::request(4, second, 1));
  CHECK_EQ(engine.wait(4).outcome.cached_tokens, 99);
}

TEST(requests_are_served_in_order_of_arrival) {
  Harness engine({.tokens = alphabet(), .round_ns = 50'000});
  for (uint64_t id = 1; id <= 20; ++id) engine.submit(Harness::request(id, kPrompt, 3));
  for (uint64_t id = 1; id <= 20; ++id) CHECK_EQ(engine.wait(id).text(), "abc");
  for (uint64_t id = 2; id <= 20; ++id) {
    CHECK(engine.results[id].timeline.started_ns >= engine.results[id - 1].timeline.done_ns);
  }
}

const std::vector<uint8_t> kOthers[] = {{'A'}, {'B'}, {'C', 0, 1}};

ull::Submission request_of(int client, uint64_t id) {
  auto request = Harness::request(id, kPrompt, 3);
  request.identity = kOthers[client];
  return request;
}

// What a submission is refused with; empty if it is not.
std::string refusal(Harness& engine, const ull::Submission& request) {
  try {
    engine.submit(request);
  } catch (const ull::QueueFull& error) {
    return error.what();
  }
  return "";
}

TEST(clients_take_turns) {
  Harness engine({.tokens = alphabet(), .hang_step = 0});
  engine.submit(request_of(0, 1));
  engine.wait_for_steps(1);
  const std::pair<int, uint64_t> arrivals[] = {{0, 2}, {0, 3}, {0, 4}, {1, 5}, {1, 6}, {2, 7}, {0, 8}, {1, 9}};
  for (const auto& [client, id] : arrivals) engine.submit(request_of(client, id));
  CHECK(engine.engine.cancel(kOthers[0], 1));
  for (uint64_t id = 1; id <= 9; ++id) engine.wait(id);
  int64_t last = 0;
  for (const uint64_t id : {1, 5, 7, 2, 6, 3, 9, 4, 8}) {
    CHECK(engine.results[id].timeline.started_ns > last);
    last = engine.results[id].timeline.started_ns;
  }
}

// Who asks again as soon as it is answered waits for one request of the client with many, each time.
TEST(a_client_with_many_requests_lets_others_in_after_each) {
  Harness engine({.tokens = alphabet(), .round_ns = 200'000}, {.queue_depth = 100, .client_share = 100});
  for (uint64_t id = 1; id <= 60; ++id) engine.submit(request_of(0, id));
  for (uint64_t id = 101; id <= 110; ++id) {
    engine.submit(request_of(1, id));
    const int64_t asked_ns = ull::monotonic_ns();
    engine.wait(id);
    int between = 0;
    for (uint64_t other = 1; other <= 60; ++other) {
      const int64_t started_ns = engine.results[other].timeline.started_ns;
      between += started_ns > asked_ns && started_ns < engine.results[id].timeline.started_ns ? 1 : 0;
    }
    CHECK(between <= 1);
  }
  for (uint64_t id = 1; id <= 60; ++id) engine.wait(id);
}

TEST(a_client_may_take_its_share_of_the_queue) {
  for (const int share : {0, 3}) {
    Harness engine({.tokens = alphabet(), .hang_step = 0}, {.queue_depth = 6, .client_share = share});
    CHECK_EQ(engine.engine.client_share(), 3);
    for (uint64_t id = 1; id <= 3; ++id) engine.submit(request_of(0, id));
    engine.wait_for_steps(1);
    CHECK_EQ(refusal(engine, request_of(0, 4)),
             "this client's share of the queue is taken: 3 of its requests wait, run or are held");
    for (uint64_t id = 5; id <= 7; ++id) CHECK_EQ(refusal(engine, request_of(1, id)), "");
    CHECK_EQ(refusal(engine, request_of(2, 8)), "");
    CHECK_EQ(refusal(engine, request_of(2, 9)), "the queue is full");
    CHECK_EQ(engine.engine.stats().refused, 2U);
    CHECK(engine.engine.cancel(kOthers[0], 2));
    engine.wait(2);
    CHECK_EQ(refusal(engine, request_of(0, 4)), "");
    CHECK(engine.engine.cancel(kOthers[0], 1));
    for (const uint64_t id : {1, 3, 4, 5, 6, 7, 8}) engine.wait(id);
  }
  Harness least({.tokens = alphabet()}, {.queue_depth = 0});
  CHECK_EQ(least.engine.client_share(), 1);
  CHECK_EQ(refusal(least, request_of(0, 1)), "");
  least.wait(1);
}

TEST(a_full_queue_refuses) {
  Harness engine({.tokens = alphabet(), .hang_step = 0}, {.queue_depth = 3, .client_share = 4});
  for (uint64_t id = 1; id <= 4; ++id) engine.submit(Harness::request(id, kPrompt, 3));
  engine.wait_for_steps(1);
  CHECK_EQ(refusal(engine, Harness::request(5, kPrompt, 3)), "the queue is full");
  CHECK_EQ(engine.engine.stats().refused, 1U);
  CHECK(engine.cancel(1));
  for (uint64_t id = 1; id <= 4; ++id) engine.wait(id);
  engine.submit(Harness::request(5, kPrompt, 3));
  CHECK_EQ(engine.wait(5).text(), "abc");
  CHECK(engine.engine.drained());
}

TEST(logprobs_come_with_every_token_even_when_records_run_short) {
  Harness engine({.tokens = alphabet(), .tokens_per_round = 5, .context = 20'000, .page_count = 400});
  auto request = Harness::request(1, kPrompt, 19'000);  // more than there are records
  request.sampling.top_logprobs = 2;
  engine.submit(request);
  CHECK_EQ(engine.wait(1).tokens.size(), 19'000U);
  CHECK_EQ(engine.wait(1).logprobs.size(), 19'000U);
}

// A full ring must not hold the engine up, nor lose a token: what could not be announced goes with the next event.
TEST(an_io_thread_that_sleeps_through_a_request_loses_nothing) {
  Harness engine({.tokens = alphabet(), .context = 30'000, .page_count = 600});
  engine.submit(Harness::request(1, kPrompt, 29'000));
  const auto has_ended = [&engine] {
    const ull::EngineStats stats = engine.engine.stats();
    return stats.counters.started > 0 && !stats.running && stats.queue_length == 0;
  };
  while (!has_ended()) std::this_thread::yield();
  CHECK_EQ(engine.wait(1).tokens.size(), 29'000U);
  for (size_t i = 0; i < 29'000; ++i) REQUIRE(engine.results[1].tokens[i] == alphabet()[i % 26]);
}

TEST(a_request_waits_or_runs_until_it_has_ended) {
  Harness engine({.tokens = alphabet()});
  for (uint64_t id = 1; id <= 2'000; ++id) {
    engine.submit(Harness::request(id, kPrompt, 1));
    const auto idle = [&engine] {
      const auto [running, waiting] = engine.engine.occupancy();
      return !running && waiting == 0;
    };
    while (!idle()) {
    }
    ull::EngineShared& shared = engine.engine.shared();
    for (uint32_t slot = 0; slot < shared.slots; ++slot) {
      const ull::SlotState state = shared.slot(slot).state.load();
      REQUIRE(state == ull::SlotState::kFree || state == ull::SlotState::kEnded);
    }
    engine.wait(id);
  }
}

TEST(counters_add_up) {
  Harness engine({.tokens = alphabet(), .tokens_per_round = 2});
  for (uint64_t id = 1; id <= 3; ++id) {
    engine.submit(Harness::request(id, kPrompt, 10));
    engine.wait(id);
  }
  engine.engine.stop();
  const ull::EngineStats stats = engine.engine.stats();
  CHECK_EQ(stats.submitted, 3U);
  CHECK_EQ(stats.counters.started, 3U);
  CHECK_EQ(stats.counters.length, 3U);
  CHECK_EQ(stats.counters.prompt_tokens, 78U);
  CHECK_EQ(stats.counters.cached_tokens, 50U);
  CHECK_EQ(stats.counters.prefix_hits, 2U);
  CHECK_EQ(stats.counters.completion_tokens, 30U);
  CHECK_EQ(stats.counters.rounds, 15U);
  CHECK_EQ(stats.counters.prefill_chunks, 1U);
  CHECK_EQ(stats.counters.sessions, 1U);
  CHECK_EQ(stats.queue_length, 0);
  CHECK_EQ(engine.engine.round_ns().count(), 12U);
  CHECK_EQ(stats.counters.longest_cycle_ns, engine.engine.round_ns().max());
}

TEST(slow_cycles_are_counted) {
  Harness engine({.tokens = alphabet(), .round_ns = 3 * kMillisecond}, {.slow_cycle_us = 1000});
  engine.submit(Harness::request(1, kPrompt, 4));
  engine.wait(1);
  engine.engine.stop();
  CHECK_EQ(engine.engine.stats().counters.slow_cycles, 3U);
  CHECK(engine.engine.stats().counters.longest_cycle_ns >= 3U * kMillisecond);
}

TEST(warming_up_leaves_no_trace) {
  Harness engine({.from_past = true, .context = 300, .page_count = 8}, {}, /* start= */ false);
  engine.engine.warm_up();
  CHECK(engine.executor.steps() > 1);
  Harness forcing({.context = 300, .page_count = 8, .forced_tokens = 20}, {}, false);
  forcing.engine.warm_up();
  CHECK_EQ(forcing.executor.steps(), engine.executor.steps() + 1);
  engine.engine.start();
  CHECK_THROWS(engine.engine.warm_up(), std::logic_error);
  CHECK_THROWS(engine.engine.start(), std::logic_error);
  engine.submit(Harness::request(1, std::vector<int32_t>(100, 0), 5));
  CHECK_EQ(engine.wait(1).outcome.cached_tokens, 0);

  Harness failing({.fail_step = 1}, {}, false);
  CHECK_THROWS(failing.engine.warm_up(), std::runtime_error);
  Harness tiny({.context = 2, .page_count = 1}, {}, false);
  tiny.engine.warm_up();
}

// An executor that says it has some drafters, and keeps what it is asked for.
class Recording : public ull::Executor {
 public:
  void prepare() override {
    scripted_.prepare();
    info_ = scripted_.info();
    for (const DrafterKind kind : {DrafterKind::kSuffix, DrafterKind::kDraft, DrafterKind::kAuto}) {
      info_.drafters[static_cast<size_t>(kind)] = true;
    }
  }
  [[nodiscard]] const ull::ExecutorInfo& info() const noexcept override { return info_; }
  [[nodiscard]] ull::Status start_prefill(const ull::PrefillStep& step) noexcept override {
    prefilled = step.speculation;
    return scripted_.start_prefill(step);
  }
  [[nodiscard]] ull::Status start_round(const ull::RoundStep& step) noexcept override {
    ++rounds[static_cast<size_t>(step.speculation)];
    right = right && step.rehearsal && step.history[step.position] == step.token && step.drafted != nullptr &&
            step.position + step.max_tokens < info_.context;
    return scripted_.start_round(step);
  }
  [[nodiscard]] ull::Status start_scores(const ull::ScoreStep& step) noexcept override {
    widest = std::max(widest, step.count);
    right = right && step.position + step.count <= info_.context;
    return scripted_.start_scores(step);
  }
  [[nodiscard]] ull::Status poll(ull::RoundResult& result) noexcept override { return scripted_.poll(result); }
  void abort() noexcept override { scripted_.abort(); }

  int32_t widest = 0;  // pass that scored
  DrafterKind prefilled = DrafterKind::kNone;
  int rounds[ull::kDrafterKinds] = {};
  bool right = true;

 private:
  ull::ScriptedExecutor scripted_{{.tokens_per_round = 7, .context = 320, .page_count = 5}};
  ull::ExecutorInfo info_;
};

TEST(warming_up_runs_rounds_with_every_drafter) {
  Recording executor;
  const ull::test::AsciiVocabulary vocabulary;
  ull::Engine engine(executor, vocabulary.path(), {});
  engine.warm_up();
  CHECK(executor.right);
  CHECK_EQ(executor.widest, executor.info().score_nodes);
  CHECK(executor.prefilled == DrafterKind::kAuto);
  for (const DrafterKind kind : {DrafterKind::kNone, DrafterKind::kSuffix, DrafterKind::kDraft}) {
    CHECK(executor.rounds[static_cast<size_t>(kind)] > 0);
  }
  CHECK_EQ(executor.rounds[static_cast<size_t>(DrafterKind::kMedusa)], 0);
  CHECK_EQ(executor.rounds[static_cast<size_t>(DrafterKind::kAuto)], 0);
}

TEST(submissions_are_checked) {
  Harness engine({.tokens = alphabet(), .context = 128}, {.max_prompt = 100});
  const auto refused = [&](auto&& spoil, std::string_view field) {
    auto request = Harness::request(1, kPrompt, 5);
    spoil(request);
    try {
      (void)engine.engine.submit(request);
      ull::check::fail(__FILE__, __LINE__, "accepted a bad " + std::string(field));
    } catch (const ull::InvalidRequest& error) {
      CHECK_EQ(std::string_view(error.field), field);
    }
  };
  using ull::Submission;
  const std::vector<int32_t> long_prompt(101, 'x');
  const std::vector<int32_t> foreign{1, 128};
  const std::vector<int32_t> negative{-1};
  const ull::LogitBias foreign_bias{128, 0};
  const ull::LogitBias nan_bias{1, std::nanf("")};
  refused([](Submission& r) { r.identity = {}; }, "identity");
  refused([](Submission& r) { r.tokens = {}; }, "token_ids");
  refused([&](Submission& r) { r.tokens = long_prompt; }, "token_ids");
  refused([&](Submission& r) { r.tokens = foreign; }, "token_ids");
  refused([&](Submission& r) { r.tokens = negative; }, "token_ids");
  refused([](Submission& r) { r.max_tokens = -1; }, "max_tokens");
  refused([](Submission& r) { r.sampling.temperature = -1; }, "temperature");
  refused([](Submission& r) { r.sampling.temperature = std::nanf(""); }, "temperature");
  refused([](Submission& r) { r.sampling.top_k = -1; }, "top_k");
  refused([](Submission& r) { r.sampling.top_p = 0; }, "top_p");
  refused([](Submission& r) { r.sampling.top_p = std::nanf(""); }, "top_p");
  refused([](Submission& r) { r.sampling.min_p = 1.5; }, "min_p");
  refused([](Submission& r) { r.sampling.top_logprobs = 21; }, "logprobs");
  refused([](Submission& r) { r.sampling.bias_count = ull::kMaxLogitBias + 1; }, "logit_bias");
  refused([&](Submission& r) { r.sampling.bias = &foreign_bias, r.sampling.bias_count = 1; }, "logit_bias");
  refused([&](Submission& r) { r.sampling.bias = &nan_bias, r.sampling.bias_count = 1; }, "logit_bias");
  refused([](Submission& r) { r.stop_ids.assign(33, 1); }, "stop_ids");
  refused([](Submission& r) { r.stops.assign(17, "x"); }, "stop");
  refused([](Submission& r) { r.warnings.assign(9, "x"); }, "warnings");
  refused([](Submission& r) { r.warnings = {std::string(65, 'x')}; }, "warnings");
  refused([](Submission& r) { r.stops = {""}; }, "stop");
  CHECK_EQ(engine.engine.stats().submitted, 0U);
  engine.submit(Harness::request(1, kPrompt, 5));
  CHECK_EQ(engine.wait(1).text(), "abcde");
}

TEST(options_are_checked) {
  const auto refused = [](const ull::EngineOptions& options) {
    CHECK_THROWS(Harness({.tokens = {1}}, options), std::invalid_argument);
  };
  refused({.queue_depth = -1});
  refused({.client_share = -1});
  refused({.core = -2});
  refused({.watchdog_ms = 0});
  refused({.max_prompt = -1});
  refused({.max_sessions = 0});
  refused({.slow_cycle_us = 0});
  CHECK_THROWS(ull::ScriptedExecutor({.tokens = {}}), std::invalid_argument);
  CHECK_THROWS(ull::ScriptedExecutor({.tokens_per_round = 66}), std::invalid_argument);
}

TEST(requests_of_the_same_id_are_told_apart_by_their_client) {
  Harness engine({.tokens = alphabet(), .hang_step = 0});
  const uint8_t other[] = {'o'};
  auto mine = Harness::request(1, kPrompt, 3);
  auto theirs = mine;
  theirs.identity = other;
  engine.submit(mine);
  engine.wait_for_steps(1);
  (void)engine.engine.submit(theirs);
  CHECK_THROWS(engine.engine.submit(mine), ull::InvalidRequest);
  CHECK(engine.engine.cancel(other, 1));
  while (engine.results[1].finals == 0) (void)engine.pump();
  CHECK(engine.results[1].outcome.reason == FinishReason::kCancelled);
  CHECK_EQ(engine.results[1].timeline.started_ns, 0);  // theirs, which never ran; mine still hangs
  engine.results.clear();
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).timeline.started_ns > 0);
}

}  // namespace
