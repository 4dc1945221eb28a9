// The engine loop when things go wrong: cancel, deadline, failure, hang, shutdown. Always exactly one final event.
#include <sys/socket.h>
#include <sys/un.h>
#include <cmath>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/notify.h"
#include "engine_fixture.h"

namespace {

using ull::FinishReason;
using ull::test::Harness;
using ull::test::ids;

constexpr int64_t kMillisecond = 1'000'000;
const std::vector<int32_t> kPrompt = ids("once upon a time");

TEST(cancel_of_a_running_request) {
  Harness engine({.tokens = ids("a"), .round_ns = kMillisecond});
  engine.submit(Harness::request(1, kPrompt, 3000));
  while (engine.results[1].tokens.empty()) (void)engine.pump();
  CHECK(engine.cancel(1));
  (void)engine.cancel(1);  // twice: still one end
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  CHECK(engine.results[1].tokens.size() < 3000);
  CHECK(!engine.cancel(1));
  CHECK(!engine.cancel(99));
  engine.submit(Harness::request(2, kPrompt, 3));
  CHECK(engine.wait(2).outcome.reason == FinishReason::kLength);
  CHECK_EQ(engine.results[1].finals, 1);
}

TEST(cancel_before_the_start) {
  Harness engine({.tokens = ids("a"), .hang_step = 0});
  for (uint64_t id = 1; id <= 3; ++id) engine.submit(Harness::request(id, kPrompt, 3));
  engine.wait_for_steps(1);
  CHECK(engine.cancel(2));
  CHECK(engine.wait(2).outcome.reason == FinishReason::kCancelled);  // at once, while 1 is still hanging
  CHECK_EQ(engine.results[2].timeline.started_ns, 0);
  CHECK_EQ(engine.results[1].finals, 0);
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  CHECK(engine.wait(3).outcome.reason == FinishReason::kLength);
}

TEST(a_request_that_ends_before_it_begins_is_counted_at_once) {
  Harness engine({.tokens = ids("a")});
  auto late = Harness::request(1, kPrompt, 3);
  late.timeout_ns = 1;
  engine.submit(late);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kTimeout);
  while (engine.engine.stats().counters.timeout == 0) std::this_thread::yield();
}

TEST(cancel_during_prefill_keeps_what_was_computed) {
  for (const bool blocking : {false, true}) {
    // The second of three chunks takes forever.
    Harness engine({.from_past = true, .prefill_chunk = 64, .blocking = blocking, .hang_step = 1});
    const std::vector<int32_t> prompt(150, 'p');
    engine.submit(Harness::request(1, prompt, 10));
    engine.wait_for_steps(2);
    CHECK(engine.cancel(1));
    CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
    CHECK(engine.results[1].tokens.empty());
    CHECK_EQ(engine.results[1].timeline.prefilled_ns, 0);
    engine.submit(Harness::request(2, prompt, 10));
    CHECK_EQ(engine.wait(2).outcome.cached_tokens, 64);
    engine.submit(Harness::request(3, prompt, 10));
    CHECK(engine.wait(3).tokens == engine.wait(2).tokens);
  }
}

// A copy that does not come to its end leaves nothing that could be taken for what was to be copied.
TEST(cancel_during_a_copy) {
  for (const int layers : {0, 4}) {
    Harness cold({.from_past = true}, {.prefix_cache = false});
    Harness engine({.from_past = true, .layers = layers, .hang_step = 1 + 200});
    std::vector<int32_t> prompt(100, 'p');
    engine.submit(Harness::request(1, prompt, 200));  // a chunk, and the rounds
    engine.wait(1);
    prompt[90] = 'q';
    engine.submit(Harness::request(2, prompt, 10));
    engine.wait_for_steps(1 + 200 + 1);
    CHECK(engine.cancel(2));
    CHECK(engine.wait(2).outcome.reason == FinishReason::kCancelled);
    for (const uint64_t id : {3, 4}) {
      for (Harness* each : {&cold, &engine}) each->submit(Harness::request(id, prompt, 10));
      CHECK(engine.wait(id).tokens == cold.wait(id).tokens);
      CHECK_EQ(engine.wait(id).outcome.cached_tokens, id == 3 ? 90 : 99);
    }
  }
}

TEST(a_deadline_ends_a_running_request) {
  Harness engine({.tokens = ids("a"), .hang_step = 3});
  auto running = Harness::request(1, kPrompt, 1000);
  running.timeout_ns = ull::monotonic_ns() + 500 * kMillisecond;
  engine.submit(running);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kTimeout);
  CHECK_EQ(engine.results[1].tokens.size(), 2U);
  CHECK(engine.results[1].timeline.done_ns >= running.timeout_ns);
  auto late = Harness::request(3, kPrompt, 1000);
  late.timeout_ns = ull::monotonic_ns() - 1;
  engine.submit(late);
  CHECK(engine.wait(3).outcome.reason == FinishReason::kTimeout);
  CHECK(engine.results[3].tokens.empty());
}

TEST(an_executor_failure_ends_every_request_and_refuses_more) {
  for (const int64_t step : {0, 4}) {  // while prefilling, while decoding
    Harness engine({.tokens = ids("a"), .round_ns = kMillisecond, .fail_step = step});
    for (uint64_t id = 1; id <= 5; ++id) {
      // The engine may fail before the last is submitted.
      try {
        engine.submit(Harness::request(id, kPrompt, 1000));
      } catch (const ull::EngineClosed&) {
        engine.results[id].finals = 1;
        engine.results[id].outcome.reason = FinishReason::kError;
      }
    }
    for (uint64_t id = 1; id <= 5; ++id) CHECK(engine.wait(id).outcome.reason == FinishReason::kError);
    CHECK_EQ(std::string_view(engine.results[1].outcome.error_code), "internal");
    CHECK_EQ(std::string_view(engine.engine.health()), "failed");
    CHECK_THROWS(engine.engine.submit(Harness::request(9, kPrompt, 3)), ull::EngineClosed);
    for (uint64_t id = 1; id <= 5; ++id) CHECK_EQ(engine.results[id].finals, 1);
    engine.engine.stop();
    CHECK_EQ(engine.engine.stats().counters.sessions, 0U);  // what a failed executor wrote is not kept
  }
}

// Returns what no executor should.
class LyingExecutor : public ull::ScriptedExecutor {
 public:
  explicit LyingExecutor(int lie) : ScriptedExecutor({.tokens = {1}, .vocabulary = 128}), lie_(lie) {}
  [[nodiscard]] ull::Status poll(ull::RoundResult& result) noexcept override {
    const ull::Status status = ScriptedExecutor::poll(result);
    if (lie_ == 0) result.count = 0;
    if (lie_ == 1) result.count = 4;
    if (lie_ == 2) result.tokens[0].token = 128;
    if (lie_ == 3) result.tokens[0].token = -1;
    return status;
  }

 private:
  const int lie_;
};

TEST(impossible_results_are_failures) {
  for (int lie = 0; lie < 4; ++lie) {
    const ull::test::AsciiVocabulary vocabulary;
    LyingExecutor executor(lie);
    ull::Engine engine(executor, vocabulary.path(), {});
    engine.start();
    (void)engine.submit(Harness::request(1, std::vector<int32_t>{'x'}, 3));
    ull::EngineEvent event;
    while (!engine.shared().events.try_pop(event)) std::this_thread::yield();
    CHECK(event.final);
    CHECK_EQ(event.count, 0);
    CHECK(engine.shared().slot(event.slot).outcome.reason == FinishReason::kError);
    CHECK_EQ(std::string_view(engine.health()), "failed");
  }
}

// Finds log-probabilities that are none.
class LyingScorer : public ull::ScriptedExecutor {
 public:
  LyingScorer() : ScriptedExecutor({.vocabulary = 128}) {}
  [[nodiscard]] ull::Status start_scores(const ull::ScoreStep& step) noexcept override {
    logprobs_ = step.logprobs;
    return ScriptedExecutor::start_scores(step);
  }
  [[nodiscard]] ull::Status poll(ull::RoundResult& result) noexcept override {
    const ull::Status status = ScriptedExecutor::poll(result);
    if (logprobs_ != nullptr) logprobs_[0] = NAN;
    return status;
  }

 private:
  float* logprobs_ = nullptr;
};

TEST(impossible_scores_are_failures) {
  const ull::test::AsciiVocabulary vocabulary;
  LyingScorer executor;
  ull::Engine engine(executor, vocabulary.path(), {});
  engine.start();
  const std::vector<int32_t> prompt = {'x'};
  auto request = Harness::request(1, prompt, 0);
  request.choices = {{'a'}, {'b'}};
  (void)engine.submit(request);
  ull::EngineEvent event;
  while (!engine.shared().events.try_pop(event)) std::this_thread::yield();
  CHECK(event.final);
  CHECK_EQ(event.count, 0);
  CHECK_EQ(std::string_view(engine.shared().slot(event.slot).outcome.error_message),
           "the executor returned an impossible result");
  CHECK_EQ(std::string_view(engine.health()), "failed");
}

TEST(a_hang_is_seen_by_the_watchdog_and_forgotten_when_it_ends) {
  Harness engine({.tokens = ids("a"), .hang_step = 3}, {.watchdog_ms = 40});
  CHECK_EQ(std::string_view(engine.engine.health()), "ok");
  engine.submit(Harness::request(1, kPrompt, 1000));
  engine.wait_for_steps(4);  // it hangs now; a busy machine may have held it up before
  while (std::string_view(engine.engine.health()) != "stalled") std::this_thread::yield();
  const uint64_t stalls = engine.engine.stats().stalls;
  CHECK(stalls > 0);
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  while (std::string_view(engine.engine.health()) != "ok") std::this_thread::yield();
  CHECK_EQ(engine.engine.stats().stalls, stalls);
}

TEST(an_executor_that_ignores_abort_has_failed) {
  Harness engine({.tokens = ids("a"), .hang_step = 2, .ignore_abort = true});
  engine.submit(Harness::request(1, kPrompt, 1000));
  engine.submit(Harness::request(2, kPrompt, 1000));
  engine.wait_for_steps(3);
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kError);
  CHECK(engine.wait(2).outcome.reason == FinishReason::kError);
  CHECK_EQ(std::string_view(engine.engine.health()), "failed");
}

// Its passes are slow, as it says, and none of them ends before its time.
class SlowExecutor : public ull::ScriptedExecutor {
 public:
  SlowExecutor()
      : ScriptedExecutor({.vocabulary = 128, .prefill_token_ns = 160 * kMillisecond, .ignore_abort = true}) {}
  void prepare() override {
    ScriptedExecutor::prepare();
    info_ = ScriptedExecutor::info();
    info_.verify_ns[0] = 200 * kMillisecond;
  }
  [[nodiscard]] const ull::ExecutorInfo& info() const noexcept override { return info_; }

 private:
  ull::ExecutorInfo info_;
};

TEST(an_aborted_step_may_take_as_long_as_the_executor_is_slow) {
  const ull::test::AsciiVocabulary vocabulary;
  SlowExecutor executor;
  ull::Engine engine(executor, vocabulary.path(), {});
  engine.start();
  const auto request = Harness::request(1, kPrompt, 3);  // a chunk of 2.4 s
  (void)engine.submit(request);
  while (executor.steps() == 0) std::this_thread::yield();
  CHECK(engine.cancel(request.identity, 1));
  ull::EngineEvent event;
  while (!engine.shared().events.try_pop(event)) std::this_thread::yield();
  CHECK(event.final);
  CHECK(engine.shared().slot(event.slot).outcome.reason == FinishReason::kCancelled);
  while (std::string_view(engine.health()) == "stalled") std::this_thread::yield();  // until the watchdog looks again
  CHECK_EQ(std::string_view(engine.health()), "ok");
}

TEST(stop_ends_everything) {
  for (const bool hanging : {false, true}) {
    Harness engine({.tokens = ids("a"), .round_ns = kMillisecond, .hang_step = hanging ? 2 : -1});
    for (uint64_t id = 1; id <= 3; ++id) engine.submit(Harness::request(id, kPrompt, 100'000));
    engine.wait_for_steps(3);
    engine.engine.stop();
    engine.engine.stop();
    for (uint64_t id = 1; id <= 3; ++id) {
      CHECK(engine.wait(id).outcome.reason == FinishReason::kCancelled);
      CHECK_EQ(std::string_view(engine.results[id].outcome.error_code), "draining");
    }
    CHECK(engine.engine.drained());
    CHECK_THROWS(engine.engine.submit(Harness::request(9, kPrompt, 3)), ull::EngineClosed);
  }
}

// stop() around the moment of falling asleep: a lost wake-up would hang the test.
TEST(stop_wakes_an_engine_that_falls_asleep) {
  const ull::test::AsciiVocabulary vocabulary;
  for (int attempt = 0; attempt < 600; ++attempt) {
    ull::ScriptedExecutor executor({.tokens = {1}, .vocabulary = 128, .context = 64, .page_count = 1});
    ull::Engine engine(executor, vocabulary.path(), {.queue_depth = 0, .max_sessions = 1});
    engine.start();
    (void)engine.submit(Harness::request(1, kPrompt, 1));
    ull::EngineEvent event;
    while (!engine.shared().events.try_pop(event)) {
    }
    const int64_t end = ull::monotonic_ns() + ull::kIdleSpinNs - 5'000 + attempt % 100 * 100;
    while (ull::monotonic_ns() < end) {
    }
    engine.stop();
  }
}

TEST(draining_finishes_what_was_accepted) {
  Harness engine({.tokens = ids("a"), .round_ns = kMillisecond});
  for (uint64_t id = 1; id <= 3; ++id) engine.submit(Harness::request(id, kPrompt, 5));
  engine.engine.drain();
  CHECK_THROWS(engine.engine.submit(Harness::request(4, kPrompt, 5)), ull::EngineClosed);
  CHECK(!engine.engine.drained());
  for (uint64_t id = 1; id <= 3; ++id) CHECK_EQ(engine.wait(id).tokens.size(), 5U);
  CHECK(engine.engine.drained());
}

TEST(an_engine_that_was_not_started_takes_nothing) {
  Harness engine({.tokens = ids("a")}, {}, /* start= */ false);
  CHECK_THROWS(engine.engine.submit(Harness::request(1, kPrompt, 5)), ull::EngineClosed);
}

// Aborts hit whichever request runs; those that were not cancelled must not notice.
TEST(stray_aborts_change_nothing) {
  Harness engine({.from_past = true, .tokens_per_round = 3, .round_ns = 20'000, .prefill_token_ns = 500});
  const std::vector<int32_t> prompt(200, 'p');
  engine.submit(Harness::request(1, prompt, 100));
  const auto expected = engine.wait(1).tokens;
  for (uint64_t id = 2; id < 12; ++id) {
    engine.submit(Harness::request(id, prompt, 100));
    while (engine.results[id].finals == 0) {
      engine.executor.abort();
      (void)engine.pump();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    CHECK(engine.results[id].outcome.reason == FinishReason::kLength);
    CHECK(engine.results[id].tokens == expected);
  }
  CHECK(engine.engine.stats().counters.repeated_steps > 0);
}

// Random submissions, cancels and deadlines: every accepted request ends exactly once, and tokens are always right.
TEST(storm) {
  Harness engine({.from_past = true, .tokens_per_round = 2, .context = 512, .page_count = 24, .round_ns = 3'000},
                 {.queue_depth = 8, .max_sessions = 4});
  std::mt19937 random(5);
  const auto below = [&](uint32_t limit) { return random() % limit; };
  std::map<uint64_t, std::vector<int32_t>> prompts;
  std::map<std::vector<int32_t>, std::vector<int32_t>> truth;
  for (uint64_t id = 1; id <= 1000; ++id) {
    std::vector<int32_t> prompt(1 + below(300), static_cast<int32_t>(below(3)));
    auto request = Harness::request(id, prompt, static_cast<int>(1 + below(60)));
    if (below(5) == 0) request.timeout_ns = ull::monotonic_ns() + below(400'000);
    if (below(5) == 0) request.stop_ids = {static_cast<int32_t>(below(128))};
    while (prompts.count(id) == 0) {
      try {
        engine.submit(request);
        prompts[id] = prompt;
      } catch (const ull::QueueFull&) {
        while (!engine.pump()) std::this_thread::yield();
      }
    }
    if (below(3) == 0) (void)engine.cancel(id - below(3));
    for (uint32_t i = below(40); i-- > 0;) (void)engine.pump();
  }
  for (const auto& [id, prompt] : prompts) engine.wait(id);
  while (engine.pump()) {
  }
  for (const auto& [id, prompt] : prompts) {
    const auto& result = engine.results[id];
    CHECK_EQ(result.finals, 1);
    CHECK(result.outcome.reason != FinishReason::kError);
    // All completions of one prompt are prefixes of one another.
    auto& known = truth[prompt];
    const size_t common = std::min(known.size(), result.tokens.size());
    CHECK(std::equal(known.begin(), known.begin() + static_cast<std::ptrdiff_t>(common), result.tokens.begin()));
    if (result.tokens.size() > known.size()) known = result.tokens;
  }
  engine.engine.stop();
  const ull::EngineCounters counters = engine.engine.stats().counters;
  const uint64_t ended = counters.stopped + counters.length + counters.cancelled + counters.timeout + counters.error;
  CHECK_EQ(ended, prompts.size());
  CHECK(engine.engine.drained());
}

// A notification socket in the abstract namespace, like systemd's.
TEST(the_service_manager_is_fed_only_while_the_engine_moves) {
  const int receiver = socket(AF_UNIX, SOCK_DGRAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "ull-test-notify-" + std::to_string(getpid());
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  REQUIRE(bind(receiver, reinterpret_cast<const sockaddr*>(&address), size) == 0);
  setenv("NOTIFY_SOCKET", ("@" + name).c_str(), 1);
  setenv("WATCHDOG_USEC", "40000", 1);
  setenv("WATCHDOG_PID", std::to_string(getpid()).c_str(), 1);
  const auto receive = [&](bool wait) {
    char text[64];
    const ssize_t length = recv(receiver, text, sizeof(text), wait ? 0 : MSG_DONTWAIT);
    return length < 0 ? std::string() : std::string(text, static_cast<size_t>(length));
  };
  // A busy machine may make the engine late, which is said too.
  const auto hear_of_life = [&] {
    while (receive(true) != "WATCHDOG=1") {
    }
  };
  CHECK_EQ(ull::service_watchdog_usec(), 40'000);
  CHECK(ull::notify_service_manager("READY=1"));
  CHECK_EQ(receive(true), "READY=1");
  {
    Harness engine({.tokens = ids("a"), .hang_step = 3}, {.watchdog_ms = 60});
    hear_of_life();  // idle
    engine.submit(Harness::request(1, kPrompt, 1000));
    engine.wait_for_steps(4);  // from here on nothing moves
    while (!receive(false).empty()) {
    }
    while (std::string_view(engine.engine.health()) != "stalled") std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    int fed = 0;
    for (std::string said = receive(false); !said.empty(); said = receive(false)) fed += said == "WATCHDOG=1" ? 1 : 0;
    CHECK(fed <= 2);  // by looks that saw the last steps; then silence, so that the service is restarted
    CHECK(engine.cancel(1));
    engine.wait(1);
    hear_of_life();
  }
  setenv("WATCHDOG_PID", "1", 1);
  CHECK_EQ(ull::service_watchdog_usec(), 0);  // meant for another process
  unsetenv("WATCHDOG_USEC");
  CHECK_EQ(ull::service_watchdog_usec(), 0);
  unsetenv("NOTIFY_SOCKET");
  CHECK(!ull::notify_service_manager("READY=1"));
  setenv("NOTIFY_SOCKET", "relative", 1);
  CHECK(!ull::notify_service_manager("READY=1"));
  unsetenv("NOTIFY_SOCKET");
  close(receiver);
}

}  // namespace
