// The executor that needs no GPU. Steps run to their end inside start_*(), on the calling thread and its team; poll()
// hands over the outcome.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "cpu/model.h"
#include "cpu/speculator.h"
#include "cpu/taps.h"
#include "draft/drafter.h"
#include "draft/past_outputs.h"
#include "executor/executor.h"

namespace ull::cpu {

struct SpeculationOptions {
  DrafterKind drafter = DrafterKind::kNone;  // of requests that name none
  int max_tree = kMaxTreeTokens;             // of requests that set none
  bool adaptive = true;                      // false: always the widest tree that is allowed
  bool coupled = true;                       // false, for comparisons: drafts are ranked without the request's noise
  MakeDrafter in_place_of_draft_model = nullptr;
  MakeDrafter in_place_of_suffix = nullptr;
  ReplaceDrafter replace_drafter = nullptr;
  std::shared_ptr<PastOutputs> past_outputs = nullptr;  // of the suffix drafter; null: none
};

class CpuExecutor final : public Executor {
 public:
  // Checks nothing and allocates nothing: prepare() does.
  CpuExecutor(ModelSpec spec, ModelOptions options, SpeculationOptions speculation = {});

  void prepare() override;
  void set_pulse(Pulse* pulse) noexcept override;
  [[nodiscard]] const ExecutorInfo& info() const noexcept override { return info_; }
  [[nodiscard]] Status start_prefill(const PrefillStep& step) noexcept override;
  [[nodiscard]] Status start_round(const RoundStep& step) noexcept override;
  [[nodiscard]] Status start_copy(const CopyStep& step) noexcept override;
  [[nodiscard]] Status start_scores(const ScoreStep& step) noexcept override;
  [[nodiscard]] Status poll(RoundResult& result) noexcept override;
  void abort() noexcept override { abort_.store(true, std::memory_order_relaxed); }

 private:
  [[nodiscard]] bool valid(const int32_t* tokens, int count, int start) const noexcept;
  [[nodiscard]] bool valid(const ScoreStep& step) const noexcept;
  // What the model offers to them: team() and Model(spec, options, team), so that they share one thread team;
  // multiply() for any packed matrix, scale and bias applied; head_logits() for the shared lm_head; forward() for a
  // draft model; normed_row() for the last accepted node's hidden state. Sampler::rank() ranks candidates.
  [[nodiscard]] std::vector<std::unique_ptr<Drafter>> make_drafters();

  ModelSpec spec_;
  ModelOptions options_;
  SpeculationOptions speculation_;
  std::string name_;
  ExecutorInfo info_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<TapRing> taps_;  // null: no drafter reads hidden states
  std::unique_ptr<Speculator> speculator_;
  Status outcome_ = Status::kOk;  // of the step in flight
  bool is_round_ = false;
  RoundResult round_;
  alignas(kCacheLine) std::atomic<bool> abort_{false};  // set by any thread; the rest belongs to the engine's
};

}  // namespace ull::cpu
