#include "exec/cpu/speculator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/clock.h"

namespace ull::cpu {
namespace {

constexpr size_t kBatchBytes = size_t{64} << 20;  // most memory for logits beside the first row
constexpr int kShadowDepth = 4;
constexpr int64_t kMeasureNs = 200'000'000;  // no sweep over the sizes begins after this long
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

Speculator::Speculator(Model& model, std::vector<std::unique_ptr<Drafter>> drafters, bool adaptive)
    : model_(model),
      sampler_(model.kernels(), model.spec().vocabulary),
      drafters_(std::move(drafters)),
      planner_(adaptive),
      counts_(model.spec().vocabulary, model.spec().context),
      batch_rows_(batch_rows(model.spec().vocabulary)),
      logits_(static_cast<size_t>(batch_rows_) * static_cast<size_t>(model.spec().vocabulary)),
      hidden_(static_cast<size_t>(model.spec().hidden)) {
  for (const auto& drafter : drafters_) {
    if (drafter->kind() == Speculation::kNgram && adaptive) ngram_ = drafter.get();
    keeps_hidden_ = keeps_hidden_ || drafter->kind() == Speculation::kMedusa;
  }
  shadow_plan_.count = kShadowDepth + 1;
  shadow_plan_.depth = kShadowDepth;
}

void Speculator::prepare(ExecutorInfo& info) {
  measure(info);
  for (const auto& drafter : drafters_) {
    drafter->prepare();
    if (drafter->catches_up()) planner_.grant(drafter->catch_up_ns(model_.spec().context));
    const auto kind = static_cast<size_t>(drafter->kind());
    info.drafters[kind] = true;
    info.drafters[static_cast<size_t>(Speculation::kAuto)] = true;
    info.draft_ns[kind] = drafter->cost_ns(1);
    info.drafter_weight_bytes += drafter->weight_bytes();
    info.drafter_kv_bytes += drafter->kv_bytes();
  }
  info.weight_bytes += info.drafter_weight_bytes;
  info.kv_bytes += info.drafter_kv_bytes;
}

void Speculator::measure(ExecutorInfo& info) {
  const int32_t tokens[kMaxTreeTokens] = {};
  const std::atomic<bool> never{false};
  const int held = std::min(model_.spec().context, model_.cache().pages() * kPageTokens);
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
  planner_.set_costs(costs);
}

bool Speculator::serves(const Drafter& drafter, Speculation wanted) const noexcept {
  return wanted == drafter.kind() || wanted == Speculation::kAuto;
}

DraftContext Speculator::context(const RoundStep& step, const std::atomic<bool>& abort) noexcept {
  const int last = step.position - 1;
  const bool known = hidden_position_ >= 0 && hidden_position_ == last && hidden_token_ == step.history[last] &&
                     hidden_page_ == step.pages[last / kPageTokens];
  return {step.history, step.position,
          step.pages,   step.sampling,
          step.drafted, known ? hidden_.data() : nullptr,
          &abort,       penalizes_ ? &counts_ : nullptr};
}

void Speculator::remember_hidden(int row, int position, int32_t token, const int32_t* pages) noexcept {
  if (!keeps_hidden_) return;
  model_.normed_row(row, hidden_.data());
  hidden_position_ = position;
  hidden_token_ = token;
  hidden_page_ = pages[position / kPageTokens];
}

Status Speculator::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  if (step.speculation == Speculation::kNone) return Status::kOk;
  remember_hidden(step.count - 1, step.start + step.count - 1, step.tokens[step.count - 1], step.pages);
  for (const auto& drafter : drafters_) {
    if (!serves(*drafter, step.speculation)) continue;
    // It reads along where it is going to draft, as far as the reserve goes.
    if (!planner_.pays(worths_[static_cast<size_t>(drafter->kind())])) continue;
    if (!planner_.affords(drafter->catch_up_ns(step.count), step.speculation)) continue;
    const int64_t start = monotonic_ns();
    if (const Status status = drafter->prefill(step, abort); status != Status::kOk) return status;
    if (drafter->catches_up()) planner_.spend(static_cast<double>(monotonic_ns() - start), step.speculation);
  }
  return Status::kOk;
}

Status Speculator::catch_up(Drafter& drafter, const DraftContext& now, Speculation wanted) noexcept {
  const int64_t start = monotonic_ns();
  const Status status = drafter.catch_up(now);
  const int64_t took = monotonic_ns() - start;
  planner_.spend(static_cast<double>(took), wanted);
  round_start_ns_ += took;
  return status;
}

Status Speculator::round(const RoundStep& step, const std::atomic<bool>& abort, RoundResult& result) noexcept {
  round_start_ns_ = monotonic_ns();
  penalizes_ = step.sampling->penalizes() && step.history != nullptr;
  if (penalizes_) counts_.follow(step.history, step.position + 1, step.prompt_tokens);
  if (const Status status = draft(step, abort); status != Status::kOk) return status;
  if (const Status status = verify(step, abort); status != Status::kOk) return status;
  if (const Status status = accept(step, result); status != Status::kOk) return status;
  learn(step, result);
  return Status::kOk;
}

Status Speculator::draft(const RoundStep& step, const std::atomic<bool>& abort) noexcept {
  chosen_.drafter = nullptr;
  const int room = model_.spec().context - 1 - step.position;
  limits_.position = step.position;
  limits_.wanted = step.speculation;
  limits_.depth = std::min({step.max_tokens - 1, room, kMaxTreeTokens - 1});
  limits_.nodes = std::min({step.max_tree > 0 ? step.max_tree : kMaxTreeTokens, kMaxTreeTokens, model_.chunk()});
  tree_.reset(step.token, model_.spec().vocabulary, limits_.nodes, limits_.depth);
  if (step.speculation == Speculation::kNone || step.history == nullptr || limits_.depth < 1 || limits_.nodes < 2) {
    return Status::kOk;
  }
  const DraftContext now = context(step, abort);
  for (const auto& drafter : drafters_) {
    if (!serves(*drafter, step.speculation)) continue;
    option_.drafter = drafter.get();
    option_.confidence = drafter->confidence(now);
    if (option_.confidence < 0) continue;
    option_.worth = planner_.plan(*drafter, option_.confidence, limits_, option_.plan);
    worths_[static_cast<size_t>(drafter->kind())] = option_.worth;
    if (drafter.get() == ngram_ && shadow_node_ < 0) {
      shadow_.reset(step.token, model_.spec().vocabulary, kShadowDepth + 1, kShadowDepth);
      if (drafter->propose(now, shadow_plan_, shadow_) == Status::kOk && shadow_.count() > 1) {
        shadow_node_ = 0;
        shadow_position_ = step.position + 1;
        shadow_confidence_ = option_.confidence;
      }
    }
    const bool drafts = planner_.approves(*drafter, option_.worth, option_.plan, limits_) &&
                        planner_.affords(drafter->catch_up_ns(drafter->missed(now)), step.speculation);
    if (!drafts && !step.rehearsal) continue;
    if (chosen_.drafter == nullptr || option_.worth > chosen_.worth) chosen_ = option_;
  }
  if (chosen_.drafter == nullptr) return Status::kOk;
  if (chosen_.drafter->missed(now) > 0) {
    if (const Status status = catch_up(*chosen_.drafter, now, step.speculation); status != Status::kOk) return status;
  }
  const Status status = chosen_.drafter->propose(now, chosen_.plan, tree_);
  if (tree_.count() == 1) chosen_.drafter = nullptr;
  return status;
}

// A chain is written to the cache where it will stand if it is accepted; other trees go to the tree page.
Status Speculator::verify(const RoundStep& step, const std::atomic<bool>& abort) noexcept {
  verify_start_ns_ = monotonic_ns();
  const int count = tree_.count();
  const bool plain = count == 1;
  batched_ =
      plain || (count <= batch_rows_ && planner_.batches_logits(count, static_cast<double>(chosen_.plan.expected)));
  const bool chain = tree_.is_chain();
  if (!chain) paths_.assign(tree_);
  return model_.forward({tree_.tokens(), count, step.position, step.pages,
                         plain      ? LogitsOf::kLast
                         : batched_ ? LogitsOf::kAll
                                    : LogitsOf::kNone,
                         logits_.data(), chain ? nullptr : &paths_},
                        abort);
}

Status Speculator::accept(const RoundStep& step, RoundResult& result) noexcept {
  const size_t row = static_cast<size_t>(model_.spec().vocabulary);
  result.count = 0;
  int node = 0;
  for (int next = 0; next >= 0;) {
    node = next;
    float* logits = logits_.data() + (batched_ ? static_cast<size_t>(node) * row : 0);
    if (!batched_) model_.project_rows(node, 1, logits);
    RoundToken& token = result.tokens[result.count];
    const Status status = sampler_.sample(logits, step.position + result.count + 1, *step.sampling, token,
                                          penalizes_ ? &counts_ : nullptr);
    if (status != Status::kOk) {
      // What came before stands; the round that starts here will fail as it would have without a draft.
      if (result.count == 0) return status;
      node = tree_.parent(node);
      break;
    }
    ++result.count;
    if (penalizes_) counts_.add(token.token);
    next = tree_.child(node, token.token);
    if (next >= 0) result.ranks[result.count - 1] = static_cast<uint8_t>(tree_.rank(next));
  }
  if (!tree_.is_chain()) {
    for (int depth = 0; depth <= tree_.depth(node); ++depth) {
      model_.keep_node(paths_.path[node][depth], step.position + depth, step.pages);
    }
  }
  if (step.speculation != Speculation::kNone) {
    remember_hidden(node, step.position + tree_.depth(node), tree_.token(node), step.pages);
  }
  result.drafter = chosen_.drafter == nullptr ? Speculation::kNone : chosen_.drafter->kind();
  result.tree_tokens = tree_.count();
  result.depth = tree_.deepest();
  result.accepted = result.count - 1;
  return Status::kOk;
}

void Speculator::learn(const RoundStep& step, const RoundResult& result) noexcept {
  if (step.rehearsal) return;
  // A round without speculation is settled too: it tells what plain ones take.
  chosen_.plan.count = tree_.count();  // a drafter may have had less to propose than was planned
  chosen_.plan.depth = tree_.deepest();
  planner_.settle(chosen_.drafter, chosen_.drafter == nullptr ? nullptr : &chosen_.plan, limits_,
                  {result.count, static_cast<double>(monotonic_ns() - round_start_ns_),
                   static_cast<double>(verify_start_ns_ - round_start_ns_), chosen_.worth});
  if (step.speculation == Speculation::kNone) return;
  int32_t emitted[kMaxTokensPerRound];
  for (int i = 0; i < result.count; ++i) emitted[i] = result.tokens[i].token;
  for (const auto& drafter : drafters_) {
    if (serves(*drafter, step.speculation))
      drafter->observe({emitted, result.count, step.position, drafter.get() == chosen_.drafter});
  }
  if (chosen_.drafter == nullptr) {
    follow_shadow(step, result);
    return;
  }
  shadow_node_ = -1;
  for (int depth = 1, node = 0; node >= 0 && depth <= result.count; ++depth) {
    int ranks = 0;
    for (int other = node + 1; other < tree_.count(); ++other) ranks += tree_.parent(other) == node ? 1 : 0;
    const int hit = tree_.child(node, emitted[depth - 1]);
    if (ranks > 0) {
      planner_.learn(chosen_.drafter->kind(), chosen_.confidence, depth, ranks, hit < 0 ? -1 : tree_.rank(hit));
    }
    node = hit;
  }
}

void Speculator::follow_shadow(const RoundStep& step, const RoundResult& result) noexcept {
  if (shadow_node_ < 0) return;
  if (shadow_position_ != step.position + 1) {  // another session's
    shadow_node_ = -1;
    return;
  }
  const int hit = shadow_.child(shadow_node_, result.tokens[0].token);
  planner_.learn(Speculation::kNgram, shadow_confidence_, shadow_.depth(shadow_node_) + 1, 1, hit < 0 ? -1 : 0);
  shadow_node_ = hit >= 0 && shadow_.depth(hit) < shadow_.deepest() ? hit : -1;
  ++shadow_position_;
}

}  // namespace ull::cpu
