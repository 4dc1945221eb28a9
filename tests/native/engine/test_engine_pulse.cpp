// What the engine does while an executor computes inside start_*(): it counts progress, and looks at commands and
// deadlines, once per layer.
#include "engine_fixture.h"

namespace {

using ull::FinishReason;
using ull::test::Harness;
using ull::test::ids;

constexpr int64_t kMillisecond = 1'000'000;
const std::vector<int32_t> kPrompt = ids("once upon a time");  // 16 tokens

TEST(every_layer_is_progress) {
  Harness engine({.tokens = ids("a"), .prefill_chunk = 10, .layers = 7});
  engine.submit(Harness::request(1, kPrompt, 3));
  engine.wait(1);
  engine.engine.stop();
  const int64_t steps = 2 + 3;
  CHECK_EQ(engine.executor.steps(), steps);
  CHECK_EQ(engine.executor.beats(), 7 * steps);
  CHECK_EQ(engine.engine.stats().progress, static_cast<uint64_t>(7 * steps + steps + 1));  // and the request's end
}

TEST(a_deadline_ends_the_step_that_it_falls_into) {
  for (const int64_t hang_step : {0, 1}) {  // while prefilling, while decoding
    Harness engine({.tokens = ids("a"), .layers = 4, .hang_step = hang_step});
    auto request = Harness::request(1, kPrompt, 100);
    request.timeout_ns = ull::monotonic_ns() + 1000 * kMillisecond;  // the hanging step has begun long before
    engine.submit(request);
    CHECK(engine.wait(1).outcome.reason == FinishReason::kTimeout);
    CHECK(engine.results[1].timeline.done_ns >= request.timeout_ns);
    CHECK_EQ(engine.executor.steps(), hang_step + 1);
    engine.submit(Harness::request(2, kPrompt, 3));
    CHECK_EQ(engine.wait(2).text(), "aaa");
  }
}

TEST(a_cancel_ends_the_step_in_flight) {
  Harness engine({.tokens = ids("a"), .layers = 4, .hang_step = 0});
  engine.submit(Harness::request(1, kPrompt, 100));
  engine.wait_for_steps(1);
  CHECK(engine.cancel(1));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  CHECK_EQ(engine.executor.steps(), 1);
}

// Whatever the executor: one that computes in start_*(), and one that is polled.
TEST(queued_requests_end_while_anothers_step_runs) {
  for (const int layers : {0, 4}) {
    Harness engine({.tokens = ids("a"), .layers = layers, .hang_step = 0});
    engine.submit(Harness::request(1, kPrompt, 100));
    engine.wait_for_steps(1);
    auto late = Harness::request(2, kPrompt, 100);
    late.timeout_ns = ull::monotonic_ns() + 20 * kMillisecond;
    engine.submit(late);
    engine.submit(Harness::request(3, kPrompt, 100));
    CHECK(engine.wait(2).outcome.reason == FinishReason::kTimeout);
    CHECK(engine.results[2].timeline.done_ns >= late.timeout_ns);
    CHECK(engine.cancel(3));
    CHECK(engine.wait(3).outcome.reason == FinishReason::kCancelled);
    for (const uint64_t id : {2, 3}) CHECK_EQ(engine.results[id].timeline.started_ns, 0);
    CHECK_EQ(engine.results[1].finals, 0);
    CHECK_EQ(engine.executor.steps(), 1);
    CHECK(engine.cancel(1));
    CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
  }
}

TEST(stopping_ends_the_step_in_flight) {
  Harness engine({.tokens = ids("a"), .layers = 4, .hang_step = 0});
  engine.submit(Harness::request(1, kPrompt, 100));
  engine.wait_for_steps(1);
  engine.engine.stop();
  CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
}

// Cancels its request when a step is about to begin: after the engine's last look, before the step forgets an abort
// that was meant for another.
class CancellingExecutor final : public ull::ScriptedExecutor {
 public:
  using ScriptedExecutor::ScriptedExecutor;
  [[nodiscard]] ull::Status start_prefill(const ull::PrefillStep& step) noexcept override {
    CHECK(engine->cancel(Harness::request(1, {}, 0).identity, 1));
    return ScriptedExecutor::start_prefill(step);
  }
  ull::Engine* engine = nullptr;
};

TEST(a_cancel_between_two_looks_is_not_lost) {
  for (const int layers : {0, 4}) {
    CancellingExecutor executor({.tokens = ids("a"), .vocabulary = 128, .layers = layers, .hang_step = 0});
    const ull::test::AsciiVocabulary vocabulary;
    ull::Engine engine(executor, vocabulary.path(), {});
    executor.engine = &engine;
    engine.start();
    (void)engine.submit(Harness::request(1, kPrompt, 100));
    ull::EngineEvent event;
    while (!engine.shared().events.try_pop(event)) std::this_thread::yield();
    CHECK(event.final);
    CHECK(engine.shared().slot(event.slot).outcome.reason == FinishReason::kCancelled);
    CHECK_EQ(executor.steps(), 1);
  }
}

}  // namespace
