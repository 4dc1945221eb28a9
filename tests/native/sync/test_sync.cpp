// The rings, the seqlock, the waker, the agent, the histogram, the duty cycle: alone, and between two threads (under
// ThreadSanitizer in CI).
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string_view>
#include <thread>

#include "base/duty_cycle.h"
#include "base/histogram.h"
#include "base/idle.h"
#include "base/thread.h"
#include "check.h"
#include "sync/agent.h"
#include "sync/seqlock.h"
#include "sync/spsc_ring.h"
#include "sync/waker.h"

namespace {

TEST(ring_is_bounded_and_first_in_first_out) {
  ull::SpscRing<int> ring(5);
  CHECK_EQ(ring.capacity(), 8U);
  int value = 0;
  CHECK(!ring.try_pop(value));
  for (int round = 0; round < 5; ++round) {  // wraps
    for (int i = 0; i < 8; ++i) CHECK(ring.try_push(i));
    CHECK(!ring.try_push(8));
    CHECK(!ring.empty());
    for (int i = 0; i < 8; ++i) {
      REQUIRE(ring.try_pop(value));
      CHECK_EQ(value, i);
    }
    CHECK(ring.empty());
  }
}

TEST(ring_keeps_room_when_asked) {
  ull::SpscRing<int> ring(8);
  for (int i = 0; i < 5; ++i) CHECK(ring.try_push(i, 3));
  CHECK(!ring.try_push(5, 3));
  for (int i = 5; i < 8; ++i) CHECK(ring.try_push(i));
  int value = 0;
  CHECK(ring.try_pop(value));
  CHECK(!ring.try_push(9, 1));
  CHECK(ring.try_push(9));
}

TEST(ring_between_threads_loses_and_reorders_nothing) {
  constexpr uint64_t kCount = 300'000;
  struct Pair {
    uint64_t a;
    uint64_t b;
  };
  ull::SpscRing<Pair> ring(64);
  std::thread producer([&] {
    for (uint64_t i = 0; i < kCount; ++i) {
      while (!ring.try_push({i, ~i})) std::this_thread::yield();
    }
  });
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    Pair pair{};
    while (!ring.try_pop(pair)) std::this_thread::yield();
    wrong += pair.a != i || pair.b != ~i ? 1 : 0;
  }
  producer.join();
  CHECK_EQ(wrong, 0U);
  CHECK(ring.empty());
}

TEST(seqlock_is_never_torn) {
  struct Value {
    uint64_t words[9];
  };
  ull::Seqlock<Value> lock;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    Value value{};
    for (uint64_t i = 1; !stop.load(std::memory_order_relaxed); ++i) {
      for (size_t w = 0; w < 9; ++w) value.words[w] = i * (w + 1);
      lock.store(value);
      if (i % 64 == 0) std::this_thread::yield();
    }
  });
  uint64_t torn = 0;
  uint64_t latest = 0;
  while (latest < 1000) {
    const Value value = lock.load();
    for (size_t w = 0; w < 9; ++w) torn += value.words[w] != value.words[0] * (w + 1) ? 1 : 0;
    CHECK(value.words[0] >= latest);
    latest = value.words[0];
  }
  stop.store(true, std::memory_order_relaxed);
  writer.join();
  CHECK_EQ(torn, 0U);
}

// The waker's thread may be held up between its withdrawal of the announcement and its write.
TEST(a_signal_that_comes_late_ends_one_sleep_and_no_more) {
  ull::Waker waker;
  const auto readable = [&] {
    pollfd item{waker.fd(), POLLIN, 0};
    return poll(&item, 1, 0) == 1;
  };
  waker.announce();
  waker.awake();  // something else has ended the sleep
  const uint64_t one = 1;
  CHECK_EQ(write(waker.fd(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  waker.announce();
  CHECK(readable());
  waker.awake();
  waker.announce();
  CHECK(!readable());
  waker.awake();
}

// A wake before the announcement: what was written before the one is there to be read after the other. Only
// ThreadSanitizer can see that it is not, on a machine whose every exchange is a full barrier.
TEST(what_was_written_before_a_wake_is_read_after_the_announcement) {
  ull::Waker waker;
  int written = 0;
  std::atomic<bool> woken{false};
  std::thread other([&] {
    written = 42;
    waker.wake();
    woken.store(true, std::memory_order_relaxed);
  });
  while (!woken.load(std::memory_order_relaxed)) std::this_thread::yield();
  waker.announce();
  CHECK_EQ(written, 42);
  waker.awake();
  other.join();
}

// Two threads hand a token to and fro, each sleeping until it comes. A lost wake-up would hang the test.
TEST(waker_loses_no_wake_up) {
  constexpr int kTurns = 20'000;
  ull::SpscRing<int> there(4);
  ull::SpscRing<int> back(4);
  ull::Waker there_waker;
  ull::Waker back_waker;
  const auto receive = [](ull::SpscRing<int>& ring, ull::Waker& waker) {
    int value = 0;
    while (!ring.try_pop(value)) {
      waker.announce();
      if (ring.empty()) waker.wait();
      waker.awake();
    }
    return value;
  };
  std::thread echo([&] {
    for (int i = 0; i < kTurns; ++i) {
      const int value = receive(there, there_waker);
      (void)back.try_push(value + 1);
      back_waker.wake();
    }
  });
  int wrong = 0;
  for (int i = 0; i < kTurns; ++i) {
    (void)there.try_push(i);
    there_waker.wake();
    wrong += receive(back, back_waker) == i + 1 ? 0 : 1;
  }
  echo.join();
  CHECK_EQ(wrong, 0);
}

TEST(an_agent_waits_only_where_its_last_look_finds_nothing) {
  ull::Agent agent(1'000'000);
  int waits = 0;
  const auto wait = [&] { ++waits; };
  CHECK(agent.sleep([] { return false; }, wait) > 0);
  CHECK_EQ(waits, 0);
  CHECK(agent.sleep([] { return true; }, wait) > 0);
  CHECK_EQ(waits, 1);
  // Woken behind its last look: a sleep that did not end at once would hang the test.
  CHECK(agent.sleep([&] {
    agent.wake();
    return true;
  }) > 0);
  for (const auto& [name, count] : agent.duty().named()) {
    if (std::string_view(name) == "sleeps") CHECK_EQ(count, 3U);
  }
}

TEST(histogram_quantiles_are_within_a_sixteenth) {
  ull::Histogram histogram;
  CHECK_EQ(histogram.quantile(0.5), 0U);
  for (int64_t value = 1; value <= 100'000; ++value) histogram.record(value);
  histogram.record(-5);  // a clock that stood still counts as 0
  CHECK_EQ(histogram.count(), 100'001U);
  CHECK_EQ(histogram.max(), 100'000U);
  for (const double share : {0.01, 0.5, 0.9, 0.99, 0.999}) {
    const double exact = share * 100'000;
    const auto found = static_cast<double>(histogram.quantile(share));
    CHECK(found >= exact - 1 && found <= exact * 1.0625 + 1);
  }
  CHECK_EQ(histogram.quantile(1.0), 100'000U);
  histogram.record(INT64_MAX);  // beyond the last bucket: kept as the maximum
  CHECK_EQ(histogram.quantile(1.0), static_cast<uint64_t>(INT64_MAX));
}

TEST(a_duty_cycle_counts_work_and_stalls_but_no_sleep) {
  ull::DutyCycle duty(100);
  duty.end_cycle(1'000, false);  // the first has no beginning
  duty.end_cycle(1'040, true);
  duty.end_cycle(1'050, false);
  duty.end_sleep(9'000);
  duty.end_cycle(9'100, true);
  duty.end_cycle(9'201, true);
  const ull::NamedCounts expected{{"cycles", 5}, {"working_ns", 241}, {"longest_ns", 101},
                                  {"stalls", 1}, {"stall_ns", 100},   {"sleeps", 1}};
  const ull::NamedCounts found = duty.named();
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK_EQ(std::string_view(found[i].first), std::string_view(expected[i].first));
    CHECK_EQ(found[i].second, expected[i].second);
  }
}

TEST(thread_options_are_checked) {
  CHECK(ull::parse_idle_mode("spin") == ull::IdleMode::kSpin);
  CHECK(ull::parse_idle_mode("adaptive") == ull::IdleMode::kAdaptive);
  CHECK_THROWS(ull::parse_idle_mode("busy"), std::invalid_argument);
  CHECK(ull::pin_current_thread(-1));
  CHECK(!ull::pin_current_thread(1'000'000));
}

}  // namespace
