// The thread team: everybody runs, barriers order memory, oversubscription only slows it down.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check.h"
#include "cpu/thread_team.h"

using ull::cpu::ThreadTeam;

TEST(every_member_runs_once_per_job) {
  for (const int members : {1, 2, 3, 8}) {
    ThreadTeam team(members, {});
    CHECK_EQ(team.size(), members);
    std::vector<int> calls(static_cast<size_t>(members));  // plain ints: run() must order them
    for (int job = 0; job < 300; ++job) {
      team.run([&](int member) { ++calls[static_cast<size_t>(member)]; });
    }
    for (const int count : calls) CHECK_EQ(count, 300);
  }
}

TEST(barriers_make_every_member_see_every_write) {
  for (const int members : {2, 4, 7}) {
    ThreadTeam team(members, {});
    std::vector<int64_t> values(static_cast<size_t>(members), 1);
    std::vector<int> wrong(static_cast<size_t>(members));
    constexpr int kRounds = 500;
    team.run([&](int member) {
      int64_t expected = members;
      for (int round = 0; round < kRounds; ++round) {
        int64_t sum = 0;
        for (const int64_t value : values) sum += value;
        wrong[static_cast<size_t>(member)] += sum != expected;
        team.barrier();  // all have read
        ++values[static_cast<size_t>(member)];
        expected += members;
        team.barrier();  // all have written
      }
    });
    for (const int count : wrong) CHECK_EQ(count, 0);
    for (const int64_t value : values) CHECK_EQ(value, kRounds + 1);
  }
}

TEST(members_that_fell_asleep_wake_for_the_next_job) {
  ThreadTeam team(3, {});
  std::atomic<int> calls{0};
  for (int job = 0; job < 3; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // far beyond the spin limit
    team.run([&](int member) {
      if (member == job) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the others sleep in the barrier
      calls.fetch_add(1, std::memory_order_relaxed);
      team.barrier();
    });
  }
  CHECK_EQ(calls.load(std::memory_order_relaxed), 9);
}

TEST(teams_come_and_go_without_a_job) {
  for (int i = 0; i < 50; ++i) ThreadTeam team(4, {});
  CHECK_EQ(ThreadTeam(2, {}).pinned(), 0);
}

TEST(wrong_sizes_are_refused) {
  const int cores[] = {0};
  CHECK_THROWS(ThreadTeam(0, {}), std::invalid_argument);
  CHECK_THROWS(ThreadTeam(2, cores), std::invalid_argument);
}

TEST(pinning_is_counted_and_a_core_that_does_not_exist_is_survived) {
  const int first[] = {-1, 0}, absent[] = {-1, 100'000};
  for (const auto& cores : {first, absent}) {
    ThreadTeam team(2, {cores, 2});
    int sum = 0;
    team.run([&](int member) {
      team.barrier();
      if (member == 0) sum = 1;
    });
    CHECK_EQ(sum, 1);
    CHECK_EQ(team.pinned(), cores == first ? 1 : 0);
  }
}

#if defined(__x86_64__)
TEST(denormals_survive_a_caller_that_flushes_them) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040U);  // flush to zero, denormals are zero
  ThreadTeam team(2, {});
  volatile float tiny = 1e-40F;
  float halves[2] = {};
  team.run([&](int member) { halves[member] = tiny * 0.5F; });
  const unsigned after = _mm_getcsr();
  _mm_setcsr(saved);
  CHECK(halves[0] > 0.0F);
  CHECK(halves[1] > 0.0F);
  CHECK_EQ(after & 0x8040U, 0x8040U);  // the caller's setting is restored
}
#endif
