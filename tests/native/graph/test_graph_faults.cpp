// What ends a graph executor's step early, or for good: abort, errors of launches and of the stream, a device that
// hangs, falls silent or answers nonsense. Then whole engines on it: what a client gets to see.
#include <string_view>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine_fixture.h"
#include "graph_fixture.h"

namespace {

using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::prompt_of;
using ull::test::says;
using Tokens = std::vector<int32_t>;

// Every later step fails at once, and nothing is launched.
void check_unusable(GraphRig& rig) {
  const uint64_t launched = rig.device.launched();
  const Tokens tokens = prompt_of(5);
  for (int i = 0; i < 3; ++i) {
    CHECK(rig.executor.start_round(rig.step(tokens, 5)) == Status::kExecutorFailed);
    CHECK(rig.prefill(tokens) == Status::kExecutorFailed);
    CHECK(rig.executor.poll(rig.result) == Status::kExecutorFailed);
  }
  CHECK_EQ(rig.device.launched(), launched);
}

// ---- abort --------------------------------------------------------------------------------------------------------

TEST(an_abort_skips_what_has_not_begun) {
  GraphRig rig;
  HeldRound held(rig.device);
  const Tokens prompt = prompt_of(256);
  CHECK(rig.executor.start_prefill({prompt.data(), 256, 0, rig.pages.data()}) == Status::kOk);
  std::thread([&] { rig.executor.abort(); }).join();
  CHECK(rig.executor.poll(rig.result) == Status::kPending);  // the chunk that runs is waited for
  held.release();
  CHECK(rig.finish() == Status::kAborted);
  const auto records = rig.rest();
  CHECK_EQ(records.size(), 4U);
  CHECK(count_of(records, RoundMode::kPrefill, RoundStatus::kSkipped) >= 3);
  CHECK(rig.complete(prompt, 10) == rig.model.continuation(prompt, 10));
}

TEST(an_aborted_round_can_be_run_again) {
  GraphRig rig({.round_us = 200});
  Tokens tokens = prompt_of(1);
  const Tokens expected = rig.model.continuation(tokens, 30);
  int aborted = 0;
  for (int i = 0; i < 30;) {
    CHECK(rig.executor.start_round(rig.step(tokens, 100)) == Status::kOk);
    if (aborted < 20) rig.executor.abort();
    const Status status = rig.finish();
    if (status == Status::kAborted) {
      ++aborted;
      if (aborted % 2 == 0) CHECK(rig.executor.start_round(rig.step(tokens, 100)) == Status::kOk);
      if (aborted % 2 == 0) CHECK(rig.finish() == Status::kOk);
      if (aborted % 2 != 0) continue;
    }
    tokens.push_back(rig.result.tokens[0].token);
    ++i;
  }
  CHECK(aborted >= 10);
  CHECK((Tokens{tokens.begin() + 1, tokens.end()} == expected));
}

TEST(an_abort_between_steps_is_for_nobody) {
  GraphRig rig;
  rig.executor.abort();
  const Tokens prompt = prompt_of(3);
  CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
}

TEST(aborts_from_another_thread_never_change_a_token) {
  GraphRig rig;
  std::atomic<bool> done{false};
  std::thread other([&] {
    // Ever less often: a machine on which each step takes longer than that comes to an end too.
    for (int us = 200; !done; us = std::min(us + 10, 5000)) {
      rig.executor.abort();
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
  });
  for (int turn = 0; turn < 10; ++turn) {
    Tokens tokens = prompt_of(200, turn);
    const Tokens expected = rig.model.continuation(tokens, 60);
    Status status = Status::kAborted;
    while (status == Status::kAborted) status = rig.prefill({tokens.begin(), tokens.end() - 1});
    CHECK(status == Status::kOk);
    for (int left = 60; left > 0;) {
      CHECK(rig.executor.start_round(rig.step(tokens, left)) == Status::kOk);
      status = rig.finish();
      if (status == Status::kAborted) continue;
      REQUIRE(status == Status::kOk);
      tokens.push_back(rig.result.tokens[0].token);
      --left;
    }
    CHECK((Tokens{tokens.end() - 60, tokens.end()} == expected));
  }
  done = true;
  other.join();
}

// ---- failures -----------------------------------------------------------------------------------------------------

TEST(a_launch_that_fails_ends_the_executor) {
  for (const uint64_t later : {0U, 1U, 7U}) {
    GraphRig rig;
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { script.launch_error_at = next + later; });
    Tokens tokens = prompt_of(1);
    CHECK(rig.decode(tokens, 20) == Status::kExecutorFailed);
    CHECK(says(rig.executor.failure(), "cuGraphLaunch failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"));
    CHECK(rig.executor.restart_helps());  // the stream itself is well
    check_unusable(rig);
  }
}

TEST(an_error_that_stays_says_that_the_gpu_must_be_looked_at) {
  for (const uint64_t later : {0U, 1U, 6U}) {
    GraphRig rig;
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) {
      script.stream_error_at = next + later;
      script.silent_at = next + later;
    });
    Tokens tokens = prompt_of(1);
    CHECK(rig.decode(tokens, 20) == Status::kExecutorFailed);
    CHECK(says(rig.executor.failure(), "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"));
    CHECK(!rig.executor.restart_helps());
    check_unusable(rig);
  }
}

// The host looks at the device after the round behind has failed: what the one before it answered is not lost.
TEST(an_answer_from_before_the_failure_is_delivered) {
  static std::atomic<bool> looks_late{false};
  ull::graph::Driver driver = FakeDevice::driver();
  driver.query = [](void* stream) {
    int state = FakeDevice::driver().query(stream);
    while (looks_late && (state == ull::graph::kSuccess || state == ull::graph::kNotReady)) {
      std::this_thread::yield();
      state = FakeDevice::driver().query(stream);
    }
    return state;
  };
  FakeDevice device({.round_us = 20'000});
  ull::graph::GraphExecutor executor(device.program(), driver, {});
  executor.prepare();
  device.arm([](FakeDevice::Script& script, uint64_t next) { script.stream_error_at = script.silent_at = next + 1; });
  Tokens tokens = prompt_of(1);
  const Tokens expected = FakeModel{}.continuation(tokens, 1);
  const int32_t page = 0;
  const ull::Sampling sampling;
  looks_late = true;
  CHECK(executor.start_round({tokens[0], 0, &page, &sampling, 20, tokens.data()}) == Status::kOk);
  ull::RoundResult result;
  Status status = Status::kPending;
  while (status == Status::kPending) status = executor.poll(result);
  CHECK(status == Status::kOk && result.count == 1 && result.tokens[0].token == expected[0]);
  tokens.push_back(expected[0]);
  status = executor.start_round({tokens[1], 1, &page, &sampling, 19, tokens.data()});
  while (status == Status::kOk || status == Status::kPending) status = executor.poll(result);
  CHECK(status == Status::kExecutorFailed && !executor.restart_helps());
  looks_late = false;
}

TEST(a_device_that_hangs_is_given_up) {
  for (const bool aborted : {false, true}) {
    GraphRig rig({}, {.watchdog_ms = 1000});
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { script.hang_at = next + 3; });
    Tokens tokens = prompt_of(1);
    if (aborted) {
      CHECK(rig.decode(tokens, 3) == Status::kOk);
      CHECK(rig.executor.start_round(rig.step(tokens, 5)) == Status::kOk);
      rig.executor.abort();
      CHECK(rig.finish() == Status::kExecutorFailed);
    } else {
      CHECK(rig.decode(tokens, 20) == Status::kExecutorFailed);
      CHECK_EQ(tokens.size(), 4U);
    }
    CHECK(says(rig.executor.failure(), "the device has not answered round"));
    CHECK(!rig.executor.restart_helps());
    check_unusable(rig);
  }
}

TEST(a_slow_device_is_waited_for) {
  GraphRig rig({}, {.watchdog_ms = 1000});
  rig.device.arm([](FakeDevice::Script& script, uint64_t) { script.round_us = 300'000; });
  const Tokens prompt = prompt_of(250);  // 4 chunks, more than the limit together
  CHECK(rig.complete(prompt, 2) == rig.model.continuation(prompt, 2));
}

TEST(a_round_that_ends_without_an_answer_is_a_failure) {
  GraphRig rig({}, {.watchdog_ms = 60'000});
  rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { script.silent_at = next + 2; });
  Tokens tokens = prompt_of(1);
  CHECK(rig.decode(tokens, 3) == Status::kExecutorFailed);
  CHECK(says(rig.executor.failure(), "without an answer"));
  check_unusable(rig);
}

TEST(nonsense_is_not_passed_on) {
  const std::vector<std::function<void(ull::gpu::RoundResult&)>> absurdities = {
      [](auto& answer) { answer.count = 0; },
      [](auto& answer) { answer.count = 2; },
      [](auto& answer) { answer.count = -1; },
      [](auto& answer) { answer.tokens[0].token = 100; },
      [](auto& answer) { answer.tokens[0].token = -1; },
      [](auto& answer) { answer.tokens[0].top_count = 21; },
  };
  for (const auto& absurdity : absurdities) {
    GraphRig rig;
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) {
      script.absurd_at = next + 4;
      script.absurdity = absurdity;
    });
    Tokens tokens = prompt_of(1);
    CHECK(rig.decode(tokens, 20) == Status::kExecutorFailed);
    CHECK_EQ(tokens.size(), 5U);
    CHECK(says(rig.executor.failure(), "impossible answer"));
    CHECK(rig.executor.restart_helps());
  }
}

TEST(logits_that_are_not_finite_end_the_executor) {
  GraphRig rig;
  rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { script.not_finite_at = next + 4; });
  Tokens tokens = prompt_of(1);
  CHECK(rig.decode(tokens, 20) == Status::kExecutorFailed);
  CHECK_EQ(tokens.size(), 5U);
  CHECK(says(rig.executor.failure(), "not finite"));
}

TEST(a_device_that_fails_while_it_is_prepared_is_reported) {
  for (const uint64_t at : {1U, 30U}) {
    FakeDevice device({.launch_error_at = at});
    ull::graph::GraphExecutor executor(device.program(), FakeDevice::driver(), {});
    CHECK_THROWS(executor.prepare(), std::runtime_error);
    CHECK(says(executor.failure(), "CUDA_ERROR_OUT_OF_MEMORY"));
  }
}

TEST(settling_waits_for_the_device) {
  FakeDevice device({.round_us = 3000});
  {
    ull::graph::GraphExecutor executor(device.program(), FakeDevice::driver(), {});
    executor.prepare();
    const Tokens tokens = prompt_of(1);
    const std::vector<int32_t> pages(16, 0);
    const ull::Sampling greedy;
    ull::RoundStep step{tokens[0], 0, pages.data(), &greedy, 50};
    CHECK(executor.start_round(step) == Status::kOk);
    executor.settle();
    CHECK_EQ(FakeDevice::driver().query(&device), ull::graph::kSuccess);
    CHECK(executor.start_round(step) == Status::kOk);
  }  // and so does the destructor
  CHECK_EQ(FakeDevice::driver().query(&device), ull::graph::kSuccess);
}

// ---- engines ------------------------------------------------------------------------------------------------------

struct GraphEngine {
  explicit GraphEngine(FakeDevice::Script script, ull::graph::GraphOptions graph_options = {},
                       ull::EngineOptions options = {})
      : device(ascii(std::move(script))),
        executor(device.program(), FakeDevice::driver(), graph_options),
        engine(executor, vocabulary.path(), options) {
    engine.warm_up();
    engine.start();
  }

  static FakeDevice::Script ascii(FakeDevice::Script script) {
    script.model.vocabulary = 128;
    return script;
  }

  [[nodiscard]] static ull::Submission request(uint64_t id, std::span<const int32_t> prompt, int max_tokens) {
    return ull::test::Harness::request(id, prompt, max_tokens);
  }

  // Waits for a request's final event; its tokens and outcome.
  ull::test::Result wait(uint64_t id) {
    while (results[id].finals == 0) {
      ull::EngineEvent event;
      if (!engine.shared().events.try_pop(event)) {
        std::this_thread::yield();
        continue;
      }
      ull::RequestSlot& slot = engine.shared().slot(event.slot);
      ull::test::Result& result = results[slot.id];
      result.tokens.insert(result.tokens.end(), slot.completion() + event.index,
                           slot.completion() + event.index + event.count);
      if (!event.final) continue;
      ++result.finals;
      result.outcome = slot.outcome;
      slot.enter(ull::SlotState::kFree);
    }
    return results[id];
  }

  ull::test::AsciiVocabulary vocabulary;
  FakeDevice device;
  ull::graph::GraphExecutor executor;
  ull::Engine engine;
  std::map<uint64_t, ull::test::Result> results;
};

TEST(sessions_share_few_pages_without_seeing_each_other) {
  // 6 pages; requests of up to 4 that end by length, by a stop id, by a stop text and by cancellation, so that wasted
  // rounds are under way while their pages change hands.
  GraphEngine rig({.context = 256, .page_count = 6}, {}, {.max_sessions = 4});
  const ull::test::FakeModel model{128};
  for (uint64_t id = 1; id <= 120; ++id) {
    const Tokens prompt = prompt_of(30 + static_cast<int>(id * 37 % 130), static_cast<int>(id % 5));
    ull::Submission request = GraphEngine::request(id, prompt, 60);
    request.sampling.seed = id % 3;
    const Tokens expected = model.continuation(prompt, 60, request.sampling);
    size_t most = 60;
    if (id % 4 == 1) {
      request.stop_ids = {expected[30]};
      most = static_cast<size_t>(std::find(expected.begin(), expected.end(), expected[30]) - expected.begin()) + 1;
    }
    if (id % 4 == 2) request.stops = {std::string(1, static_cast<char>('a' + id % 26))};
    (void)rig.engine.submit(request);
    if (id % 4 == 3) rig.engine.cancel(request.identity, id);
    const ull::test::Result result = rig.wait(id);
    CHECK(result.outcome.reason != ull::FinishReason::kError);
    CHECK(result.tokens.size() <= most);
    if (id % 4 < 2) CHECK_EQ(result.tokens.size(), most);
    CHECK(std::equal(result.tokens.begin(), result.tokens.end(), expected.begin()));
  }
  rig.engine.stop();
}

// As many as the weights are read: of a prompt one for 64 tokens, or for a chunk, and then one for each token.
void check_rounds(GraphEngine& rig, std::initializer_list<std::pair<int, int>> cases) {
  const ull::test::FakeModel model{128};
  uint64_t id = 0;
  for (const auto& [length, rounds] : cases) {
    for (const int count : {1, 20}) {
      (void)GraphRig::rest(rig.device);
      const Tokens prompt = prompt_of(length, static_cast<int>(++id) * 7);
      ull::Submission request = GraphEngine::request(id, prompt, count);
      (void)rig.engine.submit(request);
      CHECK(rig.wait(id).tokens == model.continuation(prompt, count));
      const auto records = GraphRig::rest(rig.device);
      CHECK_EQ(records.size(), static_cast<size_t>(rounds + count - 1));
      CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), count - 1);  // each queued ahead
    }
  }
  rig.engine.stop();
}

TEST(a_request_takes_as_few_rounds_as_it_can) {
  GraphEngine rig({});
  check_rounds(rig, {{1, 1}, {17, 1}, {64, 1}, {100, 2}, {640, 10}});
}

// What a prompt is read by is chosen by measured costs: these are far enough apart for a machine that is busy.
TEST(a_request_with_a_long_prompt_takes_few_rounds_where_a_graph_reads_a_chunk) {
  GraphEngine rig({.prefill_us = 10'000, .chunk_us = 20'000, .chunks = true});
  check_rounds(rig, {{1, 1}, {64, 1}, {100, 2}, {300, 2}, {576, 2}, {577, 3}, {640, 3}, {900, 3}});
}

// A cancelled request's chunk is skipped or waited for; the next one's begins with what is left in the cache.
TEST(a_request_that_is_cancelled_while_it_reads_chunks_leaves_nothing_behind) {
  GraphEngine rig({.chunk_us = 500, .chunks = true});
  const ull::test::FakeModel model{128};
  for (uint64_t id = 1; id <= 20; id += 2) {
    const Tokens prompt = prompt_of(950, static_cast<int>(id));
    const ull::Submission request = GraphEngine::request(id, prompt, 20),
                          next = GraphEngine::request(id + 1, prompt, 20);
    (void)rig.engine.submit(request);
    std::this_thread::sleep_for(std::chrono::microseconds(id * 60));
    rig.engine.cancel(request.identity, id);
    CHECK_EQ(rig.wait(id).finals, 1);
    (void)rig.engine.submit(next);
    CHECK(rig.wait(id + 1).tokens == model.continuation(prompt, 20));
  }
  rig.engine.stop();
}

TEST(a_request_ends_with_the_device_s_reason) {
  struct Fault {
    uint64_t FakeDevice::Script::* at;
    const char* what;
    bool restart;
  };
  for (const Fault& fault : {Fault{&FakeDevice::Script::launch_error_at, "CUDA_ERROR_OUT_OF_MEMORY", true},
                             Fault{&FakeDevice::Script::stream_error_at, "CUDA_ERROR_ILLEGAL_ADDRESS", false},
                             Fault{&FakeDevice::Script::hang_at, "has not answered", false},
                             Fault{&FakeDevice::Script::not_finite_at, "not finite", true}}) {
    GraphEngine rig({}, {.watchdog_ms = fault.at == &FakeDevice::Script::hang_at ? 1000 : 60'000});
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { script.*fault.at = next + 5; });
    const Tokens prompt = prompt_of(3);
    (void)rig.engine.submit(GraphEngine::request(1, prompt, 100));
    std::string refusal;  // the engine may have failed before the second is submitted
    try {
      (void)rig.engine.submit(GraphEngine::request(2, prompt, 100));
    } catch (const ull::EngineClosed& closed) {
      refusal = closed.what();
    }
    const ull::test::Result result = rig.wait(1);
    CHECK(result.outcome.reason == ull::FinishReason::kError);
    CHECK(result.tokens.size() < 10);
    CHECK(std::equal(result.tokens.begin(), result.tokens.end(),
                     ull::test::FakeModel{128}.continuation(prompt, 10).begin()));
    CHECK(says(result.outcome.error_message, fault.what));
    if (refusal.empty()) {
      const ull::test::Result queued = rig.wait(2);
      CHECK(queued.outcome.reason == ull::FinishReason::kError && queued.tokens.empty());
      CHECK(says(queued.outcome.error_message, fault.what));
      CHECK_EQ(queued.finals, 1);
    } else {
      CHECK(says(refusal.c_str(), fault.what));
    }
    CHECK_EQ(std::string(rig.engine.health()), "failed");
    CHECK(says(rig.engine.failure(), fault.what));
    CHECK_EQ(rig.executor.restart_helps(), fault.restart);
    CHECK_EQ(rig.results[1].finals, 1);
    rig.engine.stop();
  }
}

}  // namespace
