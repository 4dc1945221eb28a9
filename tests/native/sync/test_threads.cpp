// The runtime's own threads, as the kernel sees them.
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "base/thread.h"
#include "cpu/thread_team.h"
#include "engine_fixture.h"

namespace {
thread_local int yields = 0;
}

// Takes the C library's place.
extern "C" int sched_yield() noexcept {
  ++yields;
  return static_cast<int>(syscall(SYS_sched_yield));
}

namespace {

using ull::test::Harness;

struct Task {
  std::string name;
  uint64_t blocked = 0;  // signal n is bit n - 1
};

std::vector<Task> own_tasks() {
  std::vector<Task> tasks;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(entry.path() / "status");
    Task task;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Name:\t")) task.name = line.substr(6);
      if (line.starts_with("SigBlk:\t")) task.blocked = std::stoull(line.substr(8), nullptr, 16);
    }
    if (task.name.starts_with("ull-")) tasks.push_back(task);
  }
  return tasks;
}

constexpr bool blocks(uint64_t mask, int signal) { return (mask >> (signal - 1) & 1) != 0; }

// Python's main thread is to get the signals; a fault still ends the process at once, with a trace.
TEST(own_threads_take_no_signals_but_faults) {
  Harness engine({.tokens = {1}});
  const ull::cpu::ThreadTeam team(3, {});
  const std::set<std::string> expected{"ull-engine", "ull-watchdog", "ull-team"};
  std::vector<Task> tasks;
  const auto names = [&] {
    std::set<std::string> found;
    for (const Task& task : tasks) found.insert(task.name);
    return found;
  };
  do {
    tasks = own_tasks();  // a thread gives itself its name
  } while (names() != expected || tasks.size() < 4);
  for (const Task& task : tasks) {
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD, SIGALRM, SIGUSR1}) CHECK(blocks(task.blocked, signal));
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) CHECK(!blocks(task.blocked, signal));
  }
}

TEST(starting_a_thread_leaves_the_callers_signals_as_they_were) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  ull::start_thread([] {}).join();
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int signal = 1; signal < 32; ++signal) CHECK_EQ(sigismember(&before, signal), sigismember(&after, signal));
}

// Notes how often the engine thread has given its core away when a round starts.
class YieldCounting final : public ull::ScriptedExecutor {
 public:
  using ScriptedExecutor::ScriptedExecutor;
  [[nodiscard]] ull::Status start_round(const ull::RoundStep& step) noexcept override {
    if (first_ < 0) first_ = yields;
    since_first = yields - first_;
    return ScriptedExecutor::start_round(step);
  }
  int since_first = 0;

 private:
  int first_ = -1;
};

// How often the engine thread yields from the first of five rounds to the last.
int yields_of(const ull::ScriptedExecutor::Options& script, const ull::EngineOptions& options) {
  YieldCounting executor(script);
  const ull::test::AsciiVocabulary vocabulary;
  ull::Engine engine(executor, vocabulary.path(), options);
  engine.start();
  (void)engine.submit(Harness::request(1, std::vector<int32_t>{1}, 5));
  while (engine.stats().counters.length == 0) std::this_thread::yield();
  engine.stop();
  return executor.since_first;
}

TEST(an_engine_without_a_core_of_its_own_gives_way) {
  const ull::ScriptedExecutor::Options layered{.tokens = {1}, .vocabulary = 128, .layers = 4};
  constexpr int kPerRound = 4 + 1;  // each layer, and the announcement
  CHECK_EQ(yields_of(layered, {.core = -1}), 4 * kPerRound);
  CHECK_EQ(yields_of(layered, {.core = -1, .cooperative = false}), 0);
  CHECK_EQ(yields_of(layered, {.core = 0}), 0);
  CHECK_EQ(yields_of(layered, {.core = 0, .cooperative = true}), 4 * kPerRound);
  const ull::ScriptedExecutor::Options polled{.tokens = {1}, .vocabulary = 128, .round_ns = 5'000'000};
  CHECK(yields_of(polled, {.core = -1}) > 4);  // while it waits, too: on a busy machine a yield may last a round
  CHECK_EQ(yields_of(polled, {.core = 0}), 0);
}

}  // namespace
