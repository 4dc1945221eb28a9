// The executor that needs no GPU. Steps run to their end inside start_*(), on the calling thread and its team; poll()
// hands over the outcome.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "exec/cpu/model.h"
#include "exec/cpu/sampler.h"
#include "exec/executor.h"

namespace ull::cpu {

class CpuExecutor final : public Executor {
 public:
  // Checks nothing and allocates nothing: prepare() does.
  CpuExecutor(ModelSpec spec, ModelOptions options);

  void prepare() override;
  [[nodiscard]] const ExecutorInfo& info() const noexcept override { return info_; }
  [[nodiscard]] Status start_prefill(const PrefillStep& step) noexcept override;
  [[nodiscard]] Status start_round(const RoundStep& step) noexcept override;
  [[nodiscard]] Status poll(RoundResult& result) noexcept override;
  void abort() noexcept override { abort_.store(true, std::memory_order_relaxed); }

 private:
  [[nodiscard]] bool valid(const int32_t* tokens, int count, int start) const noexcept;

  ModelSpec spec_;
  ModelOptions options_;
  std::string name_;
  ExecutorInfo info_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Sampler> sampler_;
  AlignedArray<float> logits_;    // [vocabulary]
  Status outcome_ = Status::kOk;  // of the step in flight
  int emitted_ = 0;               // tokens of the round in flight: 0 or 1
  RoundToken token_{};
  alignas(kCacheLine) std::atomic<bool> abort_{false};  // set by any thread; the rest belongs to the engine's
};

}  // namespace ull::cpu
