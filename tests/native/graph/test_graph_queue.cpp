// The queue of rounds by itself: what is waited for, what an abort leaves, when the driver is asked about the device.
#include "graph_fixture.h"

namespace {

using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::says;

constexpr int64_t kMs = 1'000'000;
std::atomic<int> entered{0};
std::atomic<int> asked{0};

// Counts calls.
ull::graph::Driver counting_driver() {
  entered = asked = 0;
  ull::graph::Driver driver = FakeDevice::driver();
  driver.set_context = [](void* context) {
    ++entered;
    return FakeDevice::driver().set_context(context);
  };
  driver.query = [](void* stream) {
    ++asked;
    return FakeDevice::driver().query(stream);
  };
  return driver;
}

struct QueueRig {
  explicit QueueRig(const FakeDevice::Script& script = {}) : device(script) {
    const int32_t page = 0;
    setting.take(ull::Sampling{}, nullptr, 0, &page, 1);
    queue.set_watchdog(60'000 * kMs);
  }

  // A plain round of one token at position 0.
  void launch() {
    ull::gpu::RoundRequest& request = queue.next_request(program.rounds[0]);
    request.mode = RoundMode::kTake;
    request.count = request.max_tokens = 1;
    request.position = request.tokens[0] = request.parents[0] = 0;
    CHECK(queue.launch(program.rounds[0], setting, text) == Status::kOk);
  }

  FakeDevice device;
  ull::graph::GraphProgram program = device.program();
  ull::graph::Driver driver = counting_driver();
  ull::graph::Setting setting{program.pages, 16};
  ull::graph::Text text{program.text, 1024};
  ull::graph::Foresight foresight;
  ull::graph::RoundQueue queue{program, driver, foresight};
};

TEST(a_round_is_awaited_and_none_behind_it) {
  QueueRig rig;
  HeldRound held(rig.device, /*more=*/2);
  for (int i = 0; i < 4; ++i) rig.launch();
  CHECK(rig.queue.await(1) == Status::kOk);
  CHECK_EQ(rig.queue.seen(), 1U);
  CHECK(rig.queue.await(2) == Status::kOk);
  CHECK(!rig.queue.idle());
  held.release();
  CHECK(rig.queue.await(4) == Status::kOk);
  CHECK(rig.queue.idle());
  CHECK(rig.queue.await(4) == Status::kOk);
}

TEST(nothing_is_under_way_after_an_abort) {
  QueueRig rig;
  HeldRound held(rig.device, /*more=*/1, &FakeDevice::Script::begun);
  for (int i = 0; i < 4; ++i) rig.launch();
  std::atomic<bool> abort{false};
  std::thread other([&] {
    while (!held.reached()) std::this_thread::yield();
    abort = true;
    while (rig.device.cancelled() < 4) std::this_thread::yield();
    held.release();
  });
  CHECK(rig.queue.await(2, abort) == Status::kAborted);
  CHECK(rig.queue.idle());
  other.join();
  const auto records = GraphRig::rest(rig.device);
  CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 2);  // the one that had begun ends
  CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kSkipped), 2);
  rig.launch();
  CHECK(rig.queue.await(5, abort) == Status::kAborted);  // also where the abort came before
  CHECK(rig.queue.idle());
}

TEST(a_failure_ends_the_wait) {
  QueueRig rig;
  HeldRound held(rig.device);
  rig.launch();
  (void)rig.queue.fail("for the test", /*restart_helps=*/true);
  CHECK(rig.queue.await(1) == Status::kExecutorFailed);
}

TEST(a_thread_enters_once) {
  QueueRig rig;
  CHECK_EQ(entered.load(), 0);
  for (int i = 0; i < 3; ++i) CHECK(rig.queue.enter() == Status::kOk);
  CHECK_EQ(entered.load(), 1);
  std::thread([&] {
    for (int i = 0; i < 3; ++i) CHECK(rig.queue.enter() == Status::kOk);
  }).join();
  CHECK_EQ(entered.load(), 2);
  CHECK(rig.queue.enter() == Status::kOk);
  CHECK_EQ(entered.load(), 3);
}

// Watches for so long; all of it is pending.
void watch_for(QueueRig& rig, int64_t nanoseconds) {
  const int64_t start = ull::monotonic_ns();
  while (ull::monotonic_ns() - start < nanoseconds) CHECK(rig.queue.watch() == Status::kPending);
}

TEST(the_driver_is_not_asked_about_what_is_on_time) {
  QueueRig rig;
  HeldRound held(rig.device);
  rig.queue.set_watchdog(600'000 * kMs, /*round_ns=*/10'000 * kMs);
  rig.launch();
  watch_for(rig, 60 * kMs);
  CHECK_EQ(asked.load(), 0);
  rig.queue.set_watchdog(600'000 * kMs);  // by what is usual, the round is overdue
  rig.queue.restart_watchdog();
  watch_for(rig, 200 * kMs);
  CHECK(asked > 0 && asked <= 20);
  held.release();
  CHECK(rig.queue.await(1) == Status::kOk);
}

TEST(an_executor_knows_how_long_its_rounds_take) {
  FakeDevice device({.context = 20, .page_count = 1, .round_us = 60'000});
  ull::graph::GraphProgram program = device.program();
  std::fill(program.rounds + 1, program.rounds + ull::kCostSizes, nullptr);
  ull::graph::GraphExecutor executor(program, counting_driver(), {.watchdog_ms = 60'000});
  executor.prepare();
  asked = 0;
  const int32_t page = 0;
  const ull::Sampling greedy;
  std::vector<int32_t> tokens = {1};
  ull::RoundResult result;
  for (int i = 0; i < 5; ++i) {
    CHECK(executor.start_round({tokens.back(), i, &page, &greedy, 10, tokens.data()}) == Status::kOk);
    while (executor.poll(result) == Status::kPending) ull::cpu_relax();
    tokens.push_back(result.tokens[0].token);
  }
  CHECK_EQ(asked.load(), 0);
  CHECK_EQ(entered.load(), 1);
}

// However long rounds take by themselves.
TEST(an_error_is_told_from_a_hang_within_the_watchdog_s_time) {
  for (const bool hangs : {false, true}) {
    QueueRig rig;
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) {
      (hangs ? script.hang_at : script.stream_error_at) = next;
      script.silent_at = next;
    });
    rig.queue.set_watchdog(1000 * kMs, /*round_ns=*/600'000 * kMs);
    rig.launch();
    CHECK(rig.queue.await(1) == Status::kExecutorFailed);
    CHECK(says(rig.queue.failure(), hangs ? "has not answered round 1" : "CUDA_ERROR_ILLEGAL_ADDRESS"));
    CHECK(!rig.queue.restart_helps());
  }
}

}  // namespace
