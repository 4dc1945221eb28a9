// The engine thread allocates nothing between two tokens: operator new and malloc are counted per thread.
#include <atomic>
#include <cstdlib>
#include <new>

#include "engine_fixture.h"

namespace {

// Counts while the executor's thread is in the middle of a request.
thread_local bool counting = false;
thread_local uint64_t allocations = 0;

void count() noexcept { allocations += counting ? 1 : 0; }

}  // namespace

// Not inlined: GCC would see new end in malloc and delete in free, and take them for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t size) {
  count();
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void* operator new[](size_t size) { return operator new(size); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

// The sanitizers bring a malloc of their own; under them operator new alone is counted.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ULL_COUNTS_MALLOC 1
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* malloc(size_t size) {
  count();
  return __libc_malloc(size);
}
void* calloc(size_t elements, size_t size) {
  count();
  return __libc_calloc(elements, size);
}
void* realloc(void* memory, size_t size) {
  count();
  return __libc_realloc(memory, size);
}
}
#endif

namespace {

using ull::test::Harness;
using ull::test::ids;

// Starts counting with a request's first step and keeps the count at each round, all on the engine thread.
class CountingExecutor : public ull::ScriptedExecutor {
 public:
  using ScriptedExecutor::ScriptedExecutor;

  [[nodiscard]] ull::Status start_prefill(const ull::PrefillStep& step) noexcept override {
    counting = true;
    return ScriptedExecutor::start_prefill(step);
  }
  [[nodiscard]] ull::Status start_round(const ull::RoundStep& step) noexcept override {
    counting = true;
    rounds.fetch_add(1, std::memory_order_relaxed);
    seen.store(allocations, std::memory_order_release);
    return ScriptedExecutor::start_round(step);
  }

  std::atomic<uint64_t> seen{0};
  std::atomic<int> rounds{0};
};

TEST(the_hook_counts) {
  counting = true;
  const uint64_t before = allocations;
  delete new int;
#ifdef ULL_COUNTS_MALLOC
  void* volatile memory = std::malloc(16);
  memory = std::realloc(memory, 32);
  std::free(memory);
  CHECK_EQ(allocations - before, 4U);  // operator new counts itself and its malloc
#else
  CHECK_EQ(allocations - before, 1U);
#endif
  counting = false;
  const uint64_t after = allocations;
  delete new int;
  CHECK_EQ(allocations, after);
}

TEST(decoding_allocates_nothing) {
  const ull::test::AsciiVocabulary vocabulary;
  CountingExecutor executor({.tokens = ids("abcdefgh"), .tokens_per_round = 1, .vocabulary = 128, .context = 4096});
  ull::Engine engine(executor, vocabulary.path(), {});
  engine.start();
  std::vector<int32_t> prompt(500, 'p');
  uint64_t id = 0;
  // Plain, with stop strings, with logprobs, then a second turn: a cached prefix, new requests in the queue meanwhile.
  for (int variant = 0; variant < 4; ++variant) {
    auto request = Harness::request(++id, prompt, 2000);
    if (variant == 1) request.stops = {"aaaa", "hgfe"};
    if (variant == 2) request.sampling.top_logprobs = 20;
    (void)engine.submit(request);
    if (variant == 3) (void)engine.submit(Harness::request(++id, prompt, 10));
    int left = variant == 3 ? 2 : 1;
    while (left > 0) {
      ull::EngineEvent event;
      if (!engine.shared().events.try_pop(event)) {
        std::this_thread::yield();
        continue;
      }
      for (int32_t record = event.logprobs; record >= 0;) {
        record = engine.shared().give_back(engine.shared().slot(event.slot), record);
      }
      if (!event.final) continue;
      --left;
      engine.shared().slot(event.slot).state.store(ull::SlotState::kFree, std::memory_order_release);
    }
  }
  engine.stop();
  CHECK_EQ(executor.rounds.load(), 4 * 2000 + 10);
  CHECK_EQ(executor.seen.load(), 0U);
}

}  // namespace
