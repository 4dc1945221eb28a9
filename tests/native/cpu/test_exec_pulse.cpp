// The cpu executor beats its engine's pulse once per layer, drafters' layers included, and ends when the pulse says so.
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "cpu/cpu_executor.h"
#include "medusa_file.h"

using namespace ull;
using namespace ull::cpu;

namespace {

const int32_t kPages[] = {0, 1, 2, 3, 4, 5, 6, 7};

// Says at one beat, from 1, that the step is to end.
class CountingPulse final : public Pulse {
 public:
  [[nodiscard]] bool beat() noexcept override { return ++beats != end_at; }
  int beats = 0;
  int end_at = 0;  // 0: never
};

class Bench {
 public:
  Bench(const ModelSpec& spec, int threads) : executor_(spec, options(threads), {.adaptive = false}) {
    executor_.prepare();
    executor_.set_pulse(&pulse);
    for (int i = 0; i < 100; ++i) history_.push_back(i * 37 % 80);
  }
  ~Bench() { executor_.set_pulse(nullptr); }

  // Both for a request of that drafter; as if nothing were in the cache yet.
  Status prefill(DrafterKind speculation) {
    pulse.beats = 0;
    drafted_ = {};
    const PrefillStep step{history_.data(), 64, 0, kPages, &drafted_, speculation};
    return executor_.start_prefill(step) == Status::kOk ? executor_.poll(result) : Status::kExecutorFailed;
  }
  Status round(DrafterKind speculation) {
    pulse.beats = 0;
    RoundStep step{history_[64], 64, kPages, &greedy_, 8};
    step.history = history_.data();
    step.speculation = speculation;
    step.max_tree = 4;
    step.drafted = &drafted_;
    return executor_.start_round(step) == Status::kOk ? executor_.poll(result) : Status::kExecutorFailed;
  }

  CountingPulse pulse;
  RoundResult result;

 private:
  static ModelOptions options(int threads) {
    ModelOptions options;
    options.threads = threads;
    options.chunk = 64;
    return options;
  }
  CpuExecutor executor_;
  std::vector<int32_t> history_;
  const Sampling greedy_;
  Drafted drafted_;
};

// A step has `beats` of them, and ends at each of them if it is told to.
template <typename Step>
void check_beats(CountingPulse& pulse, int beats, const Step& step) {
  pulse.end_at = 0;
  CHECK(step() == Status::kOk);
  CHECK_EQ(pulse.beats, beats);
  for (pulse.end_at = 1; pulse.end_at <= beats; ++pulse.end_at) {
    CHECK(step() == Status::kAborted);
    CHECK_EQ(pulse.beats, pulse.end_at);
  }
  CHECK(step() == Status::kOk);  // nothing of it is left
}

TEST(every_layer_of_the_target_beats) {
  const check::ModelFile model(5);
  for (const int threads : {1, 2}) {
    Bench bench(model.spec, threads);
    check_beats(bench.pulse, 5, [&] { return bench.prefill(DrafterKind::kNone); });
    check_beats(bench.pulse, 5, [&] { return bench.round(DrafterKind::kNone); });
  }
}

TEST(every_layer_of_a_draft_model_beats) {
  const check::ModelFile model(3);
  auto draft = std::make_shared<ModelSpec>(model.spec);
  draft->layers = 2;
  draft->windows.resize(2);
  ModelSpec spec = model.spec;
  spec.draft = draft;
  Bench bench(spec, 1);
  check_beats(bench.pulse, 3 + 2, [&] { return bench.prefill(DrafterKind::kDraft); });
  // A chain of three tokens: the root and two more are fed.
  check_beats(bench.pulse, 3 * 2 + 3, [&] {
    bench.pulse.end_at = -bench.pulse.end_at;  // not in the prefill
    CHECK(bench.prefill(DrafterKind::kDraft) == Status::kOk);
    bench.pulse.end_at = -bench.pulse.end_at;
    return bench.round(DrafterKind::kDraft);
  });
  CHECK_EQ(bench.result.depth, 3);
}

TEST(medusa_heads_beat) {
  const check::MedusaFile file(2, 1, /*own_lm_head=*/false, /*fp8=*/false);
  Bench bench(file.model.spec, 1);
  CHECK(bench.prefill(DrafterKind::kMedusa) == Status::kOk);
  check_beats(bench.pulse, 1 + 3, [&] {
    bench.pulse.end_at = -bench.pulse.end_at;
    CHECK(bench.prefill(DrafterKind::kMedusa) == Status::kOk);
    bench.pulse.end_at = -bench.pulse.end_at;
    return bench.round(DrafterKind::kMedusa);
  });
  CHECK(bench.result.drafter == DrafterKind::kMedusa);
}

}  // namespace
