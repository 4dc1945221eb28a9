#include "testing/scripted_executor.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/cpu.h"

namespace ull {
namespace {

constexpr uint32_t kNoTokens = 2166136261U;  // FNV-1a of nothing
constexpr int32_t kSpoilt = -2;              // in the cache: what nobody may look at

constexpr uint32_t with(uint32_t hash, int32_t token) noexcept {
  return (hash ^ static_cast<uint32_t>(token)) * 16777619U;
}

uint32_t hash_of(std::span<const int32_t> past) noexcept {
  uint32_t hash = kNoTokens;
  for (const int32_t each : past) hash = with(hash, each);
  return hash;
}

float logprob_of(uint32_t hash) noexcept { return -static_cast<float>(hash >> 20) / 256.0F; }

}  // namespace

ScriptedExecutor::ScriptedExecutor(Options options) : options_(std::move(options)) {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  };
  require(!options_.tokens.empty(), "tokens: must not be empty");
  require(options_.tokens_per_round >= 1 && options_.tokens_per_round <= kMaxTokensPerRound,
          "tokens_per_round: must be 1 to 65");
  require(options_.vocabulary >= 1, "vocabulary: must be positive");
  require(options_.context >= 2, "context: must be at least 2");
  require(options_.page_count >= 1, "page_count: must be positive");
  require(options_.prefill_chunk >= 1, "prefill_chunk: must be positive");
  require(options_.layers >= 0, "layers: must not be negative");
  require(options_.forced_tokens >= 0, "forced_tokens: must not be negative");
  require(options_.score_nodes >= 0 && options_.score_nodes <= kMaxTreeTokens, "score_nodes: must be 0 to 64");
  require(options_.round_ns >= 0 && options_.prefill_token_ns >= 0, "round_ns, prefill_token_ns: must not be negative");
}

void ScriptedExecutor::prepare() {
  cache_.assign(static_cast<size_t>(options_.page_count) * kPageTokens, -1);
  info_.vocabulary = options_.vocabulary;
  info_.context = options_.context;
  info_.page_count = options_.page_count;
  info_.prefill_chunk = options_.prefill_chunk;
  info_.tokens_per_round = options_.tokens_per_round;
  info_.reuse = options_.reuse;
  info_.forced_tokens = options_.forced_tokens;
  info_.prefill_draws = options_.prefill_draws;
  info_.copies_pages = options_.copies_pages;
  info_.score_nodes = options_.score_nodes;
  info_.constraints = options_.constraints;
  info_.kv_bytes = static_cast<int64_t>(cache_.size() * sizeof(int32_t));
  info_.name = "scripted";
}

Status ScriptedExecutor::start_prefill(const PrefillStep& step) noexcept {
  kind_ = Kind::kOther;
  for (int i = 0; i < step.count; ++i) cached(step.pages, step.start + i) = step.tokens[i];
  return start(options_.prefill_token_ns * step.count);
}

Status ScriptedExecutor::start_round(const RoundStep& step) noexcept {
  kind_ = Kind::kRound;
  round_ = step;
  return start(options_.round_ns);
}

Status ScriptedExecutor::start_copy(const CopyStep& step) noexcept {
  kind_ = Kind::kOther;
  if (!options_.copies_pages) return Status::kExecutorFailed;
  const auto page = [&](int32_t index) { return cache_.begin() + static_cast<ptrdiff_t>(index) * kPageTokens; };
  std::copy_n(page(step.from_page), step.tokens, page(step.to_page));
  return start(0);
}

Status ScriptedExecutor::start_scores(const ScoreStep& step) noexcept {
  if (step.count < 1 || step.count > options_.score_nodes) return Status::kExecutorFailed;
  kind_ = Kind::kScores;
  scores_ = step;
  return start(options_.round_ns);
}

Status ScriptedExecutor::start(int64_t cost_ns) noexcept {
  const int64_t step = steps_.load(std::memory_order_relaxed);
  aborted_.store(false, std::memory_order_relaxed);
  steps_.store(step + 1, std::memory_order_release);  // who sees it may abort
  if (step == options_.fail_step) failed_.store(true, std::memory_order_relaxed);
  if (failed_.load(std::memory_order_relaxed)) return Status::kExecutorFailed;
  hanging_ = step == options_.hang_step;
  ready_ns_ = cost_ns > 0 && options_.layers == 0 ? monotonic_ns() + cost_ns : 0;
  if (options_.layers > 0) computed_ = compute(cost_ns);
  return Status::kOk;
}

// One layer after another, like an executor without a device. A step that hangs has layers without end.
Status ScriptedExecutor::compute(int64_t cost_ns) noexcept {
  for (int layer = 0; layer < options_.layers; layer += hanging_ ? 0 : 1) {
    const int64_t end = monotonic_ns() + cost_ns / options_.layers;
    while (monotonic_ns() < end) cpu_relax();
    beats_.fetch_add(1, std::memory_order_release);
    if (pulse_ != nullptr && !pulse_->beat()) return Status::kAborted;
  }
  return Status::kOk;
}

bool ScriptedExecutor::in_flight() const noexcept {
  return hanging_ || steps_.load(std::memory_order_relaxed) > held_from_.load(std::memory_order_acquire) ||
         (ready_ns_ != 0 && monotonic_ns() < ready_ns_);
}

Status ScriptedExecutor::wait() noexcept {
  if (options_.layers > 0) return computed_;
  while (in_flight()) {
    if (!options_.ignore_abort && aborted_.load(std::memory_order_acquire)) return Status::kAborted;
    if (!options_.blocking) return Status::kPending;
    cpu_relax();
  }
  return Status::kOk;
}

Status ScriptedExecutor::poll(RoundResult& result) noexcept {
  if (const Status status = wait(); status != Status::kOk) return status;
  if (kind_ == Kind::kRound) return give_round(result);
  if (kind_ == Kind::kScores) give_scores();
  return Status::kOk;
}

Status ScriptedExecutor::give_round(RoundResult& result) noexcept {
  for (int i = 0; i < round_.forced; ++i)
    cached(round_.pages, round_.position + i) = round_.history[round_.position + i];
  const int32_t last = round_.root();
  const bool prefills = options_.prefill_draws && round_.ends_prompt(),
             writes_alike = prefills || options_.reuse == Reuse::kAll;
  const int most = round_.forced > 0 || prefills ? 1 : std::min(options_.tokens_per_round, round_.max_tokens);
  int32_t token = round_.forced > 0 ? round_.history[last] : round_.token;
  result.count = 0;
  for (int i = 0; i < most; ++i) {
    const int position = last + i;
    cached(round_.pages, position) = writes_alike ? token : token + options_.vocabulary;
    token = next_token(round_.pages, position + 1);
    if (round_.constraint != nullptr && !round_.constraint->take(token)) {
      token = allowed_token(round_.pages, position + 1, *round_.constraint);
      if (token < 0 || !round_.constraint->take(token)) return i > 0 ? Status::kOk : Status::kExecutorFailed;
    }
    RoundToken& out = result.tokens[result.count++];
    out.token = token;
    if (round_.sampling->top_logprobs >= 0) {
      out.logprob = -0.5F;
      out.top_count = round_.sampling->top_logprobs;
      for (int rank = 0; rank < out.top_count; ++rank) {
        out.top[rank] = {(token + rank) % options_.vocabulary, -0.5F - static_cast<float>(rank)};
      }
    }
    if (round_.constraint != nullptr && round_.constraint->complete()) break;
  }
  return Status::kOk;
}

void ScriptedExecutor::give_scores() noexcept {
  const uint32_t past = hash_of_past(scores_.pages, scores_.position);
  const bool kept = stands_in_cache(scores_);
  uint32_t hashes[kMaxTreeTokens];
  for (int node = 0; node < scores_.count; ++node) {
    hashes[node] = with(node == 0 ? past : hashes[scores_.parents[node]], scores_.tokens[node]);
    if (!kept) cached(scores_.pages, scores_.position + node) = kSpoilt;
  }
  for (int i = 0; i < scores_.query_count; ++i) {
    const ScoreQuery& query = scores_.queries[i];
    scores_.logprobs[i] = logprob_of(with(hashes[query.node], query.token));
    TokenLogprob* top = scores_.top + static_cast<ptrdiff_t>(i) * scores_.top_count;
    for (int rank = 0; rank < scores_.top_count; ++rank) top[rank] = top_of(hashes[query.node], rank);
  }
}

// Whether the tree is a chain of just the tokens that the cache holds at its positions.
bool ScriptedExecutor::stands_in_cache(const ScoreStep& step) noexcept {
  for (int node = 0; node < step.count; ++node) {
    if (node > 0 && step.parents[node] != node - 1) return false;
    if (cached(step.pages, step.position + node) != step.tokens[node]) return false;
  }
  return options_.reuse == Reuse::kAll;
}

float ScriptedExecutor::scripted_logprob(std::span<const int32_t> past, int32_t token) noexcept {
  return logprob_of(with(hash_of(past), token));
}

TokenLogprob ScriptedExecutor::top_of(uint32_t hash, int rank) const noexcept {
  const auto token = (hash + static_cast<uint32_t>(rank)) % static_cast<uint32_t>(options_.vocabulary);
  return {static_cast<int32_t>(token), -0.5F - static_cast<float>(rank)};
}

TokenLogprob ScriptedExecutor::scripted_top(std::span<const int32_t> past, int rank) const noexcept {
  return top_of(hash_of(past), rank);
}

int32_t& ScriptedExecutor::cached(const int32_t* pages, int position) noexcept {
  const auto page = static_cast<size_t>(pages[position / kPageTokens]);
  return cache_[page * kPageTokens + static_cast<size_t>(position % kPageTokens)];
}

// The token that stands at `position`, given the cache of all positions before it.
int32_t ScriptedExecutor::next_token(const int32_t* pages, int position) noexcept {
  if (!options_.from_past) return options_.tokens[static_cast<size_t>(position) % options_.tokens.size()];
  return static_cast<int32_t>(hash_of_past(pages, position) % static_cast<uint32_t>(options_.vocabulary));
}

// The token that stands there instead: of those that the constraint allows, the first one from a place on that depends
// on the past; -1 if the constraint has failed.
int32_t ScriptedExecutor::allowed_token(const int32_t* pages, int position, TokenConstraint& constraint) noexcept {
  const uint32_t* mask = constraint.mask();
  if (mask == nullptr) return -1;
  const uint32_t past = options_.from_past ? hash_of_past(pages, position) : static_cast<uint32_t>(position);
  const auto vocabulary = static_cast<uint32_t>(options_.vocabulary);
  const uint32_t from = past * 2654435761U % vocabulary;
  const uint32_t words = (vocabulary + 31) / 32;
  for (uint32_t i = 0; i <= words; ++i) {  // the first word once more, for what is before `from`
    const uint32_t word = (from / 32 + i) % words;
    const uint32_t bits = i == 0 ? mask[word] >> (from % 32) << (from % 32) : mask[word];
    if (bits != 0) return static_cast<int32_t>(word * 32) + std::countr_zero(bits);
  }
  return -1;
}

uint32_t ScriptedExecutor::hash_of_past(const int32_t* pages, int position) noexcept {
  uint32_t hash = kNoTokens;
  for (int past = 0; past < position; ++past) hash = with(hash, cached(pages, past));
  return hash;
}

}  // namespace ull
