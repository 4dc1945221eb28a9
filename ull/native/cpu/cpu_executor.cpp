#include "cpu/cpu_executor.h"

#include <algorithm>
#include <utility>

#include "cpu/dflash.h"
#include "cpu/draft_model.h"
#include "cpu/eagle.h"
#include "cpu/medusa.h"
#include "draft/suffix.h"

namespace ull::cpu {
namespace {

constexpr int kMoreTaps = 2 * kMaxTreeTokens;  // positions that wait while nobody drafts, beside a chunk of a prompt

}  // namespace

CpuExecutor::CpuExecutor(ModelSpec spec, ModelOptions options, SpeculationOptions speculation)
    : spec_(std::move(spec)), options_(std::move(options)), speculation_(std::move(speculation)) {}

void CpuExecutor::prepare() {
  speculator_.reset();  // it refers to the model
  validate(spec_);
  ModelOptions options = options_;
  options.trees = true;
  if (options.chunk >= 1) options.chunk = std::max(options.chunk, kMaxTreeTokens);
  options.taps = tapped_layers(spec_);
  if (spec_.eagle != nullptr) options.widest = std::max(options.widest, widest_columns(*spec_.eagle, spec_.hidden));
  model_ = std::make_unique<Model>(spec_, options);
  taps_.reset();
  if (!options.taps.empty()) {
    taps_ = std::make_unique<TapRing>(options.taps, spec_.hidden, options.chunk + kMoreTaps);
  }
  info_ = ExecutorInfo{};
  name_ = std::string("cpu/") + model_->kernels().name;
  info_.vocabulary = spec_.vocabulary;
  info_.context = spec_.context;
  info_.page_count = model_->cache().pages();
  info_.prefill_chunk = options_.chunk;
  info_.tokens_per_round = kMaxTokensPerRound;
  info_.weight_bytes = model_->weights().bytes();
  info_.kv_bytes = model_->cache().bytes();
  info_.forced_tokens = options_.chunk - 1;
  info_.copies_pages = true;
  info_.penalties = true;
  info_.score_nodes = kMaxTreeTokens;
  info_.constraints = true;
  info_.name = name_.c_str();
  info_.default_drafter = speculation_.drafter;
  info_.default_max_tree = speculation_.max_tree;
  speculator_ = std::make_unique<Speculator>(*model_, make_drafters(), speculation_.adaptive, taps_.get());
  speculator_->prepare(info_);
}

void CpuExecutor::set_pulse(Pulse* pulse) noexcept {
  if (model_ == nullptr) return;
  model_->set_pulse(pulse);
  speculator_->set_pulse(pulse);
}

std::vector<std::unique_ptr<Drafter>> CpuExecutor::make_drafters() {
  std::vector<std::unique_ptr<Drafter>> drafters;
  if (speculation_.in_place_of_suffix) {
    drafters.push_back(speculation_.in_place_of_suffix());
  } else {
    drafters.push_back(std::make_unique<SuffixDrafter>(spec_.context, speculation_.past_outputs, speculation_.coupled));
  }
  if (spec_.medusa != nullptr) drafters.push_back(std::make_unique<MedusaDrafter>(*model_, speculation_.coupled));
  if (spec_.eagle != nullptr) {
    drafters.push_back(std::make_unique<EagleDrafter>(*model_, *taps_, speculation_.coupled));
  }
  if (spec_.dflash != nullptr) {
    drafters.push_back(std::make_unique<DflashDrafter>(*model_, *taps_, speculation_.coupled));
  }
  if (speculation_.in_place_of_draft_model) {
    drafters.push_back(speculation_.in_place_of_draft_model());
  } else if (spec_.draft != nullptr) {
    drafters.push_back(std::make_unique<DraftModel>(*model_, speculation_.coupled));
  }
  if (speculation_.replace_drafter) {
    for (auto& drafter : drafters) drafter = speculation_.replace_drafter(std::move(drafter));
  }
  return drafters;
}

bool CpuExecutor::valid(const int32_t* tokens, int count, int start) const noexcept {
  if (model_ == nullptr || count < 1 || count > model_->chunk() || start < 0 || start + count > info_.context) {
    return false;
  }
  return std::all_of(tokens, tokens + count, [&](int32_t token) { return token >= 0 && token < info_.vocabulary; });
}

bool CpuExecutor::valid(const ScoreStep& step) const noexcept {
  if (step.count > kMaxTreeTokens || !valid(step.tokens, step.count, step.position) || step.query_count < 1 ||
      step.top_count < 0 || step.top_count > std::min(kMaxTopLogprobs, info_.vocabulary)) {
    return false;
  }
  for (int node = 0; node < step.count; ++node) {
    if (step.parents[node] >= std::max(node, 1)) return false;
  }
  return std::all_of(step.queries, step.queries + step.query_count, [&](const ScoreQuery& query) {
    return query.node >= 0 && query.node < step.count && query.token >= 0 && query.token < info_.vocabulary;
  });
}

Status CpuExecutor::start_prefill(const PrefillStep& step) noexcept {
  if (step.count > info_.prefill_chunk || !valid(step.tokens, step.count, step.start)) return Status::kExecutorFailed;
  abort_.store(false, std::memory_order_relaxed);
  is_round_ = false;
  outcome_ = model_->forward({.tokens = step.tokens,
                              .count = step.count,
                              .start = step.start,
                              .pages = step.pages,
                              .logits_of = LogitsOf::kNone,
                              .logits = nullptr,
                              .tapped = speculator_->taps(step.speculation)},
                             abort_);
  if (outcome_ == Status::kOk) outcome_ = speculator_->prefill(step, abort_);
  return Status::kOk;
}

Status CpuExecutor::start_round(const RoundStep& step) noexcept {
  if (!valid(&step.token, 1, step.position) || step.max_tokens < 1) return Status::kExecutorFailed;
  if (step.forced < 0 || step.forced > info_.forced_tokens) return Status::kExecutorFailed;
  if (step.forced > 0 && (step.history == nullptr || step.history[step.position] != step.token ||
                          !valid(step.history + step.position, step.forced + 1, step.position))) {
    return Status::kExecutorFailed;
  }
  abort_.store(false, std::memory_order_relaxed);
  is_round_ = true;
  outcome_ = speculator_->round(step, abort_, round_);
  return Status::kOk;
}

Status CpuExecutor::start_copy(const CopyStep& step) noexcept {
  const auto is_page = [&](int32_t page) { return page >= 0 && page < info_.page_count; };
  if (model_ == nullptr || !is_page(step.from_page) || !is_page(step.to_page) || step.from_page == step.to_page ||
      step.tokens < 1 || step.tokens > kPageTokens) {
    return Status::kExecutorFailed;
  }
  is_round_ = false;
  model_->copy_page(step);
  speculator_->copy_page(step);
  outcome_ = Status::kOk;
  return Status::kOk;
}

Status CpuExecutor::start_scores(const ScoreStep& step) noexcept {
  if (!valid(step)) return Status::kExecutorFailed;
  abort_.store(false, std::memory_order_relaxed);
  is_round_ = false;
  outcome_ = speculator_->score(step, abort_);
  return Status::kOk;
}

Status CpuExecutor::poll(RoundResult& result) noexcept {
  if (outcome_ == Status::kOk && is_round_) {
    result.count = round_.count;
    result.drafter = round_.drafter;
    result.tree_tokens = round_.tree_tokens;
    result.depth = round_.depth;
    result.accepted = round_.accepted;
    std::copy_n(round_.ranks, round_.accepted, result.ranks);
    std::copy_n(round_.tokens, round_.count, result.tokens);
  }
  return outcome_;
}

}  // namespace ull::cpu
