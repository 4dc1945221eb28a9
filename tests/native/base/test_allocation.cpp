// The engine thread allocates nothing between two tokens: operator new and malloc are counted per thread.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "cpu/cpu_executor.h"
#include "engine_fixture.h"
#include "exec_model.h"
#include "fake_device.h"
#include "graph/graph_executor.h"
#include "medusa_file.h"

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

// Starts counting with the first request's first step and keeps the count at each round, all on the engine thread.
class Counting : public ull::Executor {
 public:
  explicit Counting(ull::Executor& executor) : executor_(executor) {}

  void prepare() override { executor_.prepare(); }
  void set_pulse(ull::Pulse* pulse) noexcept override { executor_.set_pulse(pulse); }
  [[nodiscard]] const ull::ExecutorInfo& info() const noexcept override { return executor_.info(); }
  [[nodiscard]] ull::Status start_prefill(const ull::PrefillStep& step) noexcept override {
    counting = true;
    return executor_.start_prefill(step);
  }
  [[nodiscard]] ull::Status start_round(const ull::RoundStep& step) noexcept override {
    counting = true;
    rounds.fetch_add(1, std::memory_order_relaxed);
    seen.store(allocations, std::memory_order_release);
    return executor_.start_round(step);
  }
  [[nodiscard]] ull::Status start_copy(const ull::CopyStep& step) noexcept override {
    return executor_.start_copy(step);
  }
  [[nodiscard]] ull::Status start_scores(const ull::ScoreStep& step) noexcept override {
    counting = true;
    passes.fetch_add(1, std::memory_order_relaxed);
    seen.store(allocations, std::memory_order_release);
    return executor_.start_scores(step);
  }
  [[nodiscard]] ull::Status poll(ull::RoundResult& result) noexcept override { return executor_.poll(result); }
  void abort() noexcept override { executor_.abort(); }

  std::atomic<uint64_t> seen{0};  // allocations up to the newest round or pass
  std::atomic<int> rounds{0};
  std::atomic<int> passes{0};  // that score

 private:
  ull::Executor& executor_;
};

TEST(the_hook_counts) {
  counting = true;
  const uint64_t before = allocations;
  // Called by name: a compiler may leave out the allocation of a new-expression.
  operator delete(operator new(sizeof(int)));
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
  operator delete(operator new(sizeof(int)));
  CHECK_EQ(allocations, after);
}

enum class Rounds { kOnePerToken, kFewer, kAny };

// Plain, with stop strings, with logprobs and a bias, sampled; then a second turn on a cached prefix, while a request
// waits. `tokens` each.
void decode_everything(ull::Executor& executor, int tokens, Rounds expected = Rounds::kOnePerToken) {
  const ull::test::AsciiVocabulary vocabulary;
  Counting counted(executor);
  ull::Engine engine(counted, vocabulary.path(), {});
  engine.start();
  const std::vector<int32_t> prompt(150, 'C');  // so long that a chunk is read before the first round
  const ull::LogitBias bias{5, -1.0F};
  uint64_t id = 0;
  for (int variant = 0; variant < 5; ++variant) {
    auto request = Harness::request(++id, prompt, tokens);
    if (variant == 1) request.stops = {"\x01\x01\x01\x02", "never"};
    if (variant == 2) {
      request.sampling.top_logprobs = 20;
      request.sampling.bias = &bias;
      request.sampling.bias_count = 1;
    }
    if (variant == 3) {
      request.sampling.temperature = 1.0F;
      request.sampling.top_k = 20;
      request.sampling.top_p = 0.95F;
      request.sampling.min_p = 0.01F;
      if (executor.info().penalties) {
        request.sampling.repetition_penalty = 1.2F;
        request.sampling.frequency_penalty = 0.1F;
      }
    }
    (void)engine.submit(request);
    if (variant == 4) (void)engine.submit(Harness::request(++id, prompt, 10));
    int left = variant == 4 ? 2 : 1;
    while (left > 0) {
      ull::EngineEvent event;
      if (!engine.shared().events.try_pop(event)) {
        std::this_thread::yield();
        continue;
      }
      ull::RequestSlot& slot = engine.shared().slot(event.slot);
      for (int32_t record = event.logprobs; record >= 0;) record = engine.shared().give_back(slot, record);
      if (!event.final) continue;
      --left;
      CHECK(slot.outcome.reason == ull::FinishReason::kLength);
      slot.enter(ull::SlotState::kFree);
    }
  }
  engine.stop();
  const int most_rounds = 5 * tokens + 10;
  if (expected == Rounds::kOnePerToken) CHECK_EQ(counted.rounds.load(), most_rounds);
  if (expected == Rounds::kFewer) CHECK(counted.rounds.load() < most_rounds);
  CHECK_EQ(counted.seen.load(), 0U);
}

TEST(decoding_allocates_nothing) {
  ull::ScriptedExecutor executor({.tokens = ids("abcdefgh"), .vocabulary = 128, .context = 4096});
  decode_everything(executor, 2000);
}

TEST(decoding_on_the_cpu_executor_allocates_nothing) {
  const ull::check::ModelFile model;
  ull::cpu::ModelOptions options;
  options.threads = 2;
  options.pages = 32;
  ull::cpu::CpuExecutor executor(model.spec, options);
  decode_everything(executor, 350);
}

TEST(scoring_prompts_and_labels_allocates_nothing) {
  const ull::check::ModelFile model;
  ull::cpu::ModelOptions options;
  options.threads = 2;
  ull::cpu::CpuExecutor executor(model.spec, options);
  const ull::test::AsciiVocabulary vocabulary;
  Counting counted(executor);
  ull::Engine engine(counted, vocabulary.path(), {});
  engine.start();
  const std::vector<int32_t> prompt(100, 'C');
  const auto end = [&](ull::Submission request) {
    (void)engine.submit(request);
    ull::EngineEvent event;
    while (!engine.shared().events.try_pop(event) || !event.final) std::this_thread::yield();
    ull::RequestSlot& slot = engine.shared().slot(event.slot);
    CHECK(slot.outcome.error_code == nullptr);
    slot.enter(ull::SlotState::kFree);
  };
  auto request = Harness::request(1, prompt, 0);
  request.sampling.temperature = 1.0F;
  for (int32_t i = 0; i < 200; ++i) request.choices.push_back({i % 80, (i + 7) % 80, i % 7, i / 80});
  end(request);
  auto scored = Harness::request(3, prompt, 2);
  scored.prompt_logprobs = true;
  end(scored);
  end(Harness::request(2, prompt, 1));  // a round looks at what was counted behind the last pass
  engine.stop();
  CHECK(counted.passes.load() > 3);  // two of them over the prompt
  CHECK_EQ(counted.seen.load(), 0U);
}

TEST(replaying_graphs_allocates_nothing) {
  ull::test::FakeDevice device({.model = {128}, .context = 1024, .chunks = true});
  ull::graph::GraphExecutor executor(device.program(), ull::test::FakeDevice::driver(), {});
  decode_everything(executor, 400);
  for (const bool adaptive : {true, false}) {
    ull::test::FakeDevice again({.model = {128, 9}, .context = 1024});
    ull::graph::GraphExecutor drafting(again.program(), ull::test::FakeDevice::driver(),
                                       {.drafter = ull::DrafterKind::kSuffix, .adaptive = adaptive});
    decode_everything(drafting, 400, adaptive ? Rounds::kAny : Rounds::kFewer);
    ull::test::FakeDevice target({.model = {128}, .context = 1024}), draft({.model = {128}, .context = 1024});
    ull::graph::GraphExecutor chained(ull::test::program_with_draft(target, draft), ull::test::FakeDevice::driver(),
                                      {.drafter = ull::DrafterKind::kDraft, .adaptive = adaptive});
    decode_everything(chained, 400, adaptive ? Rounds::kAny : Rounds::kFewer);
  }
}

TEST(drafting_allocates_nothing) {
  const ull::check::MedusaFile file(3, 2, /*own_lm_head=*/false, /*fp8=*/true);
  auto draft = std::make_shared<ull::cpu::ModelSpec>(file.model.spec);
  draft->medusa = nullptr;
  ull::cpu::ModelSpec spec = file.model.spec;
  spec.draft = draft;
  ull::cpu::ModelOptions options;
  options.threads = 2;
  for (const auto drafter :
       {ull::DrafterKind::kSuffix, ull::DrafterKind::kMedusa, ull::DrafterKind::kDraft, ull::DrafterKind::kAuto}) {
    for (const bool adaptive : {false, true}) {
      ull::cpu::SpeculationOptions speculation;
      speculation.drafter = drafter;
      speculation.adaptive = adaptive;
      ull::cpu::CpuExecutor executor(spec, options, speculation);
      decode_everything(executor, 150, adaptive ? Rounds::kAny : Rounds::kFewer);
    }
  }
}

}  // namespace
