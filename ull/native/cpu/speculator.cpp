#include "cpu/speculator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/clock.h"

namespace ull::cpu {
namespace {

constexpr size_t kBatchBytes = size_t{64} << 20;  // most memory for logits beside the first row
constexpr int64_t kMeasureNs = 200'000'000;       // no sweep over the sizes begins after this long
constexpr int kSweeps = 10;
constexpr int64_t kShortNs = 20'000'000;
constexpr double kUnmeasured = 1e15;     // nanoseconds
constexpr int kMeasuredPosition = 1024;  // where attention's share is measured

int batch_rows(int vocabulary) {
  const size_t rows = kBatchBytes / (static_cast<size_t>(vocabulary) * sizeof(float));
  return static_cast<int>(std::clamp<size_t>(rows, 1, kMaxTreeTokens));
}

// Runs it and keeps the least that it has ever taken, in nanoseconds. What is short runs once more: then the caches
// hold what they hold between two rounds of one size, and not what a larger size has left in them.
template <typename Run>
void time_into(double& least, const Run& run) {
  const int64_t start = monotonic_ns();
  run();
  const int64_t end = monotonic_ns();
  least = std::min(least, static_cast<double>(std::max<int64_t>(end - start, 1)));
  if (end - start > kShortNs) return;
  run();
  least = std::min(least, static_cast<double>(std::max<int64_t>(monotonic_ns() - end, 1)));
}

// Makes measured costs plausible: more tokens never cost less, and never more than two passes over half as many.
void straighten(double (&costs)[kCostSizes]) {
  for (int i = 1; i < kCostSizes; ++i) costs[i] = std::clamp(costs[i], costs[i - 1], 2.0 * costs[i - 1]);
}

}  // namespace

Speculator::Speculator(Model& model, std::vector<std::unique_ptr<Drafter>> drafters, bool adaptive, TapRing* taps)
    : model_(model),
      sampler_(model.kernels(), model.spec().vocabulary),
      proposer_(std::move(drafters), {model.spec().vocabulary, model.spec().context, model.chunk(), adaptive}),
      counts_(model.spec().vocabulary, model.spec().context),
      batch_rows_(batch_rows(model.spec().vocabulary)),
      keeps_hidden_(model.spec().medusa != nullptr),
      taps_(taps),
      logits_(static_cast<size_t>(batch_rows_) * static_cast<size_t>(model.spec().vocabulary)),
      hidden_(static_cast<size_t>(model.spec().hidden)) {}

void Speculator::prepare(ExecutorInfo& info) { proposer_.prepare(measure(info), info); }

VerifyCosts Speculator::measure(ExecutorInfo& info) {
  const int32_t tokens[kMaxTreeTokens] = {};
  const std::atomic<bool> never{false};
  const int held = std::min(model_.spec().context, tokens_in(model_.cache().pages()));
  std::vector<int32_t> pages(static_cast<size_t>(pages_for(held)));
  for (size_t page = 0; page < pages.size(); ++page) pages[page] = static_cast<int32_t>(page);
  const int far = std::clamp(held - kMaxTreeTokens, 0, kMeasuredPosition);
  int sizes = 0;
  while (sizes < kCostSizes && kCostTokens[sizes] <= std::min(held, model_.chunk())) ++sizes;
  VerifyCosts costs;
  double distant[kCostSizes];
  std::fill_n(costs.body_ns, kCostSizes, kUnmeasured);
  std::fill_n(costs.logits_ns, kCostSizes, kUnmeasured);
  std::fill_n(distant, kCostSizes, kUnmeasured);
  const int64_t start = monotonic_ns();
  // Sweeps, so that a disturbance of the machine does not fall on one size alone.
  for (int sweep = 0; sweep < kSweeps && (sweep == 0 || monotonic_ns() - start < kMeasureNs); ++sweep) {
    for (int i = 0; i < sizes; ++i) {
      const int count = kCostTokens[i];
      const auto body = [&](int position) {
        (void)model_.forward({tokens, count, position, pages.data(), LogitsOf::kNone, nullptr}, never);
      };
      time_into(costs.body_ns[i], [&] { body(0); });
      time_into(distant[i], [&] { body(far); });
      if (count <= batch_rows_) {
        time_into(costs.logits_ns[i], [&] { model_.project_rows(0, count, logits_.data()); });
      }
    }
  }
  straighten(costs.body_ns);
  straighten(distant);
  straighten(costs.logits_ns);
  for (int i = 0; i < kCostSizes; ++i) {
    if (far > 0) costs.body_position_ns[i] = std::max(0.0, distant[i] - costs.body_ns[i]) / far;
    if (i < sizes) info.verify_ns[i] = static_cast<int64_t>(costs.body_ns[i] + costs.logits_ns[i]);
  }
  return costs;
}

DraftContext Speculator::context(const RoundStep& step, const std::atomic<bool>& abort) noexcept {
  const int last = step.position - 1;
  const bool known = step.history != nullptr && hidden_position_ >= 0 && hidden_position_ == last &&
                     hidden_token_ == step.history[last] && hidden_page_ == step.pages[last / kPageTokens];
  return {.history = step.history,
          .position = step.position,
          .pages = step.pages,
          .sampling = step.sampling,
          .drafted = step.drafted,
          .hidden = known ? hidden_.data() : nullptr,
          .abort = &abort,
          .counts = penalises_ ? &counts_ : nullptr,
          .prompt_tokens = step.prompt_tokens};
}

void Speculator::remember_hidden(int row, int position, int32_t token, const int32_t* pages) noexcept {
  if (!keeps_hidden_) return;
  model_.normed_row(row, hidden_.data());
  hidden_position_ = position;
  hidden_token_ = token;
  hidden_page_ = pages[position / kPageTokens];
}

bool Speculator::taps(DrafterKind speculation) const noexcept {
  return taps_ != nullptr && (speculation == DrafterKind::kEagle || speculation == DrafterKind::kDflash ||
                              speculation == DrafterKind::kAuto);
}

void Speculator::keep_taps(const int32_t* tokens, int count, int start, const int32_t* pages) noexcept {
  for (int row = 0; row < count; ++row) {
    taps_->put(start + row, tokens[row], pages[(start + row) / kPageTokens], model_.tapped(row));
  }
}

Status Speculator::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  if (step.speculation == DrafterKind::kNone) return Status::kOk;
  remember_hidden(step.count - 1, step.start + step.count - 1, step.tokens[step.count - 1], step.pages);
  if (taps(step.speculation)) keep_taps(step.tokens, step.count, step.start, step.pages);
  return proposer_.prefill(step, abort);
}

Status Speculator::round(const RoundStep& step, const std::atomic<bool>& abort, RoundResult& result) noexcept {
  penalises_ = step.sampling->penalises() && step.history != nullptr;
  if (penalises_) counts_.follow(step.history, step.position + step.forced + 1, step.prompt_tokens);
  if (step.forced > 0) return forced_round(step, abort, result);
  if (const Status status = proposer_.propose(step, context(step, abort)); status != Status::kOk) return status;
  if (const Status status = verify(step, abort); status != Status::kOk) return status;
  if (const Status status = accept(step, result); status != Status::kOk) return status;
  proposer_.learn(step, result);
  return Status::kOk;
}

// The prompt's end and the token behind it in one pass. Nothing is learnt from what it takes, and a draft model reads
// its tokens with the proposal that follows, so that they do not hold up the first token.
Status Speculator::forced_round(const RoundStep& step, const std::atomic<bool>& abort, RoundResult& result) noexcept {
  const int last = step.position + step.forced;
  const Status status = model_.forward({step.history + step.position, step.forced + 1, step.position, step.pages,
                                        LogitsOf::kLast, logits_.data(), taps(step.speculation)},
                                       abort);
  if (status != Status::kOk) return status;
  result.count = 0;
  if (const Status drawn = draw(step, logits_.data(), last + 1, result.tokens[0]); drawn != Status::kOk) return drawn;
  if (step.speculation != DrafterKind::kNone) remember_hidden(step.forced, last, step.history[last], step.pages);
  if (taps(step.speculation)) {
    keep_taps(step.history + step.position, step.forced + 1, step.position, step.pages);
  }
  result.count = result.tree_tokens = 1;
  result.drafter = DrafterKind::kNone;
  result.depth = result.accepted = 0;
  return Status::kOk;
}

// Only the rows that are asked for go through the lm_head, as many at a time as there is room for their logits.
Status Speculator::score(const ScoreStep& step, const std::atomic<bool>& abort) noexcept {
  bool asked[kMaxTreeTokens] = {};
  for (int i = 0; i < step.query_count; ++i) asked[step.queries[i].node] = true;
  paths_.assign(step.parents, step.count);
  Status status = model_.forward({.tokens = step.tokens,
                                  .count = step.count,
                                  .start = step.position,
                                  .pages = step.pages,
                                  .logits_of = LogitsOf::kNone,
                                  .logits = nullptr,
                                  .tree = &paths_},
                                 abort);
  int first = 0;
  while (status == Status::kOk) {
    while (first < step.count && !asked[first]) ++first;
    int end = first;
    while (end < step.count && asked[end] && end - first < batch_rows_) ++end;
    if (first == end) break;
    model_.project_rows(first, end - first, logits_.data());
    status = score_rows(step, first, end);
    if (status == Status::kOk && end < step.count && model_.interrupted(abort)) status = Status::kAborted;
    first = end;
  }
  return status;
}

// Answers what is asked of nodes [first, end), whose logits are in hand.
Status Speculator::score_rows(const ScoreStep& step, int first, int end) noexcept {
  const auto row = [&](int node) {
    return logits_.data() + static_cast<size_t>(node - first) * static_cast<size_t>(model_.spec().vocabulary);
  };
  LogNormaliser normalisers[kMaxTreeTokens];
  for (int node = first; node < end; ++node) {
    if (const Status status = sampler_.normalise(row(node), normalisers[node]); status != Status::kOk) return status;
  }
  for (int i = 0; i < step.query_count; ++i) {
    const ScoreQuery& query = step.queries[i];
    if (query.node < first || query.node >= end) continue;
    const LogNormaliser& normaliser = normalisers[query.node];
    step.logprobs[i] = normaliser.logprob(row(query.node)[query.token]);
    TokenLogprob* top = step.top + static_cast<ptrdiff_t>(i) * step.top_count;
    sampler_.list_likeliest(row(query.node), normaliser, step.top_count, top);
  }
  return Status::kOk;
}

// A chain is written to the cache where it will stand if it is accepted; other trees go to the tree page.
Status Speculator::verify(const RoundStep& step, const std::atomic<bool>& abort) noexcept {
  const DraftTree& tree = proposer_.tree();
  const int count = tree.count();
  const bool plain = count == 1;
  batched_ = plain || (count <= batch_rows_ && proposer_.batches_logits());
  const bool chain = tree.is_chain();
  if (!chain) paths_.assign(tree);
  return model_.forward({.tokens = tree.tokens(),
                         .count = count,
                         .start = step.position,
                         .pages = step.pages,
                         .logits_of = plain      ? LogitsOf::kLast
                                      : batched_ ? LogitsOf::kAll
                                                 : LogitsOf::kNone,
                         .logits = logits_.data(),
                         .tapped = taps(step.speculation),
                         .tree = chain ? nullptr : &paths_},
                        abort);
}

Status Speculator::draw(const RoundStep& step, float* logits, int32_t position, RoundToken& token) noexcept {
  const TokenCounts* counts = penalises_ ? &counts_ : nullptr;
  const Status status = sampler_.sample(logits, position, *step.sampling, token, counts);
  if (status != Status::kOk || step.constraint == nullptr || step.constraint->take(token.token)) return status;
  const uint32_t* mask = step.constraint->mask();
  if (mask == nullptr) return Status::kExecutorFailed;
  const Status again = sampler_.sample(logits, position, *step.sampling, token, counts, mask);
  if (again != Status::kOk) return again;
  return step.constraint->take(token.token) ? Status::kOk : Status::kExecutorFailed;
}

Status Speculator::accept(const RoundStep& step, RoundResult& result) noexcept {
  const DraftTree& tree = proposer_.tree();
  const size_t row = static_cast<size_t>(model_.spec().vocabulary);
  result.count = 0;
  int node = 0;
  for (int next = 0; next >= 0;) {
    node = next;
    float* logits = logits_.data() + (batched_ ? static_cast<size_t>(node) * row : 0);
    if (!batched_) model_.project_rows(node, 1, logits);
    RoundToken& token = result.tokens[result.count];
    const Status status = draw(step, logits, step.position + result.count + 1, token);
    if (status != Status::kOk) {
      // What came before stands; the round that starts here will fail as it would have without a draft.
      if (result.count == 0) return status;
      node = tree.parent(node);
      break;
    }
    ++result.count;
    if (penalises_) counts_.add(token.token);
    if (step.constraint != nullptr && step.constraint->complete()) break;
    next = tree.child(node, token.token);
    if (next >= 0) result.ranks[result.count - 1] = static_cast<uint8_t>(tree.rank(next));
  }
  if (!tree.is_chain()) {
    for (int depth = 0; depth <= tree.depth(node); ++depth) {
      model_.keep_node(paths_.path[node][depth], step.position + depth, step.pages);
    }
  }
  if (taps(step.speculation)) {
    // The way back from the last accepted node; a chain has no paths.
    for (int at = node, depth = tree.depth(node); depth >= 0; --depth, at = tree.parent(at)) {
      const int position = step.position + depth;
      taps_->put(position, tree.token(at), step.pages[position / kPageTokens], model_.tapped(at));
    }
  }
  if (step.speculation != DrafterKind::kNone) {
    remember_hidden(node, step.position + tree.depth(node), tree.token(node), step.pages);
  }
  result.drafter = proposer_.drafter();
  result.tree_tokens = tree.count();
  result.depth = tree.deepest();
  result.accepted = result.count - 1;
  return Status::kOk;
}

}  // namespace ull::cpu
