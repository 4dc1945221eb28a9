#include "exec/cpu/cpu_executor.h"

#include <utility>

namespace ull::cpu {

CpuExecutor::CpuExecutor(ModelSpec spec, ModelOptions options) : spec_(std::move(spec)), options_(std::move(options)) {}

void CpuExecutor::prepare() {
  model_ = std::make_unique<Model>(spec_, options_);
  sampler_ = std::make_unique<Sampler>(model_->kernels(), spec_.vocabulary);
  logits_ = AlignedArray<float>(static_cast<size_t>(spec_.vocabulary));
  name_ = std::string("cpu/") + model_->kernels().name;
  info_.vocabulary = spec_.vocabulary;
  info_.context = spec_.context;
  info_.page_count = model_->cache().pages();
  info_.prefill_chunk = model_->chunk();
  info_.weight_bytes = model_->weights().bytes();
  info_.kv_bytes = model_->cache().bytes();
  info_.name = name_.c_str();
}

bool CpuExecutor::valid(const int32_t* tokens, int count, int start) const noexcept {
  if (model_ == nullptr || count < 1 || count > info_.prefill_chunk || start < 0 || start + count > info_.context) {
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= info_.vocabulary) return false;
  }
  return true;
}

Status CpuExecutor::start_prefill(const PrefillStep& step) noexcept {
  if (!valid(step.tokens, step.count, step.start)) return Status::kExecutorFailed;
  abort_.store(false, std::memory_order_relaxed);
  emitted_ = 0;
  outcome_ = model_->forward({step.tokens, step.count, step.start, step.pages, LogitsOf::kNone, nullptr}, abort_);
  return Status::kOk;
}

Status CpuExecutor::start_round(const RoundStep& step) noexcept {
  if (!valid(&step.token, 1, step.position) || step.max_tokens < 1) return Status::kExecutorFailed;
  abort_.store(false, std::memory_order_relaxed);
  emitted_ = 0;
  outcome_ = model_->forward({&step.token, 1, step.position, step.pages, LogitsOf::kLast, logits_.data()}, abort_);
  if (outcome_ == Status::kOk) {
    outcome_ = sampler_->sample(logits_.data(), step.position + 1, *step.sampling, token_);
    emitted_ = outcome_ == Status::kOk ? 1 : 0;
  }
  return Status::kOk;
}

Status CpuExecutor::poll(RoundResult& result) noexcept {
  if (outcome_ == Status::kOk && emitted_ == 1) {
    result.tokens[0] = token_;
    result.count = 1;
  }
  return outcome_;
}

}  // namespace ull::cpu
