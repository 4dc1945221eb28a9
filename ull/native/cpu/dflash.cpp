#include "cpu/dflash.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "base/clock.h"
#include "base/float_math.h"
#include "base/gumbel.h"

namespace ull::cpu {
namespace {

constexpr int kChunk = 64;          // context entries that are made at once
constexpr float kUnknown = -1e30F;  // the logit of a token that the head does not know: finite
constexpr int kTimedRuns = 5;       // per depth; the fastest counts
constexpr int kTimedPosition = 256;
constexpr float kMostInverseTemperature = 1e6F;

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

// x . a row of bf16, in sixteen partial sums.
float dot(const float* x, const RowTable& table, int32_t token) noexcept {
  constexpr int kPartials = 16;
  const int count = table.columns;
  const uint8_t* row = table.data + static_cast<size_t>(token) * static_cast<size_t>(count) * 2;
  float partial[kPartials] = {};
  int i = 0;
  for (; i + kPartials <= count; i += kPartials) {
    for (int j = 0; j < kPartials; ++j) partial[j] += x[i + j] * widen_bf16(row + 2 * (i + j));
  }
  for (; i < count; ++i) partial[i % kPartials] += x[i] * widen_bf16(row + 2 * i);
  float sum = 0.0F;
  for (const float value : partial) sum += value;
  return sum;
}

bool belongs_to_body(const DflashSpec& spec, const std::string& name) {
  if (name.starts_with("lm_head.")) return spec.own_lm_head;
  if (name == "embed.weight") return spec.own_embedding;
  return name == "norm" || name.starts_with("layers.");
}

ModelSpec body_spec(const DflashSpec& spec) {
  ModelSpec body = spec.model;
  body.body = true;
  std::erase_if(body.tensors, [&](const auto& entry) { return !belongs_to_body(spec, entry.first); });
  for (const char* name : {"lm_head.weight", "embed.weight"}) {
    const bool own = name[0] == 'l' ? spec.own_lm_head : spec.own_embedding;
    if (own && !body.tensors.contains(name)) throw std::invalid_argument(std::string("tensor ") + name + ": missing");
  }
  return body;
}

ModelOptions body_options(const Model& target) {
  const DflashSpec& spec = *target.spec().dflash;
  ModelOptions options;
  options.isa = target.kernels().name;
  options.chunk = kChunk;
  options.pages = target.cache().pages();
  options.widest = std::max(static_cast<int>(spec.taps.size()) * target.spec().hidden, spec.model.hidden + spec.markov);
  return options;
}

}  // namespace

static_assert(kChunk >= kMaxDflashBlock);

DflashHead::DflashHead(Model& target) try
    : target_(target), spec_(*target.spec().dflash), body_(body_spec(spec_), body_options(target), target.team()) {
  load_more();
  map_tokens();
  const size_t hidden = static_cast<size_t>(spec_.model.hidden), block = static_cast<size_t>(spec_.block);
  const size_t taps = spec_.taps.size() * static_cast<size_t>(target.spec().hidden);
  const size_t depths = static_cast<size_t>(this->depths()), rank = static_cast<size_t>(spec_.markov);
  mask_ = AlignedArray<float>(hidden);
  tapped_ = AlignedArray<float>(kChunk * taps);
  context_ = AlignedArray<float>(kChunk * hidden);
  hidden_ = AlignedArray<float>(block * hidden);
  states_ = AlignedArray<float>(block * hidden);
  if (scattered_) own_logits_ = AlignedArray<float>(depths * static_cast<size_t>(vocabulary()));
  logits_ = AlignedArray<float>(depths * static_cast<size_t>(target.spec().vocabulary));
  std::fill_n(logits_.data(), logits_.size(), kUnknown);
  gate_input_ = AlignedArray<float>(hidden + rank);
  factor_ = AlignedArray<float>(rank);
  (spec_.own_embedding ? body_ : target_).weights().embed(spec_.mask_token, mask_.data());
} catch (const std::invalid_argument& error) {
  throw std::invalid_argument(std::string("dflash: ") + error.what());
}

void DflashHead::load_more() {
  const int hidden = spec_.model.hidden;
  Tensors tensors = spec_.model.tensors;
  std::erase_if(tensors, [&](const auto& entry) {
    return belongs_to_body(spec_, entry.first) || entry.first.starts_with("lm_head.") || entry.first == "embed.weight";
  });
  TensorLoader load(spec_.model.path, tensors, WeightStorage::kResident, memory_);
  fc_ = load.matrix("fc", hidden, static_cast<int>(spec_.taps.size()) * target_.spec().hidden);
  hidden_norm_ = load.vector("hidden_norm", hidden, true);
  if (spec_.markov > 0) {
    markov_embedding_ = load.rows("markov.embed", target_.spec().vocabulary, spec_.markov);
    markov_head_ = load.rows("markov.head", vocabulary(), spec_.markov);
    for (const char* name : {"markov.embed", "markov.head"}) {
      if (tensors.at(name).format == Format::kBf16) continue;
      throw std::invalid_argument(std::string("tensor ") + name + ": dtype must be BF16");
    }
  }
  if (spec_.gated) markov_gate_ = load.matrix("markov.gate", spec_.markov, hidden + spec_.markov);
  if (spec_.confidence) {
    const int width = hidden + (spec_.confidence_reads_markov ? spec_.markov : 0);
    confidence_ = load.vector("confidence.weight", width, true);
    confidence_bias_ = load.vector("confidence.bias", 1, true)[0];
  }
  if (spec_.mapped) tokens_ = load.integers("d2t", vocabulary());
  if (!spec_.own_embedding) return;
  const int64_t rows = spec_.model.tensors.at("embed.weight").shape[0];
  if (rows < target_.spec().vocabulary) {
    throw std::invalid_argument("tensor embed.weight: " + std::to_string(rows) + " rows, but the target has " +
                                std::to_string(target_.spec().vocabulary) + " tokens");
  }
}

void DflashHead::map_tokens() {
  scattered_ = spec_.mapped || vocabulary() != target_.spec().vocabulary;
  own_.assign(static_cast<size_t>(target_.spec().vocabulary), -1);
  if (!spec_.mapped) {
    for (int32_t token = 0; token < vocabulary(); ++token) tokens_.push_back(token);
  }
  for (int32_t own = 0; own < vocabulary(); ++own) {
    const int32_t token = tokens_[static_cast<size_t>(own)];
    if (token < 0 || token >= target_.spec().vocabulary || own_[static_cast<size_t>(token)] >= 0) {
      throw std::invalid_argument("tensor d2t: entry " + std::to_string(own) + " is " + std::to_string(token) +
                                  ", which is no token of the target's or stands there twice");
    }
    own_[static_cast<size_t>(token)] = own;
  }
}

Status DflashHead::read(const TapRing& ring, int count, int start, const int32_t* pages,
                        const std::atomic<bool>& abort) noexcept {
  const size_t width = static_cast<size_t>(target_.spec().hidden), hidden = static_cast<size_t>(spec_.model.hidden);
  for (int done = 0; done < count;) {
    if (body_.interrupted(abort)) return Status::kAborted;
    const int rows = std::min(count - done, kChunk);
    float* to = tapped_.data();
    for (int row = 0; row < rows; ++row) {
      for (const int layer : spec_.taps) to = std::copy_n(ring.state(start + done + row, layer), width, to);
    }
    body_.multiply(fc_, tapped_.data(), rows, context_.data(), hidden);
    for (int row = 0; row < rows; ++row) {
      float* x = context_.data() + static_cast<size_t>(row) * hidden;
      body_.kernels().normalise(x, hidden_norm_.data(), spec_.model.hidden, spec_.model.rms_epsilon, 1.0F, x, 1);
    }
    body_.store(context_.data(), rows, start + done, pages);
    done += rows;
  }
  return Status::kOk;
}

Status DflashHead::run(int32_t root, int count, int start, int first, const int32_t* pages,
                       const std::atomic<bool>& abort) noexcept {
  const size_t hidden = static_cast<size_t>(spec_.model.hidden);
  (spec_.own_embedding ? body_ : target_).weights().embed(root, hidden_.data());
  for (int slot = 1; slot < count; ++slot) {
    std::copy_n(mask_.data(), hidden, hidden_.data() + static_cast<size_t>(slot) * hidden);
  }
  const Status status = body_.run_block(hidden_.data(), count, start, first, pages, abort);
  for (int slot = 0; slot < count && status == Status::kOk; ++slot) {
    const size_t row = static_cast<size_t>(slot) * hidden;
    body_.kernels().normalise(hidden_.data() + row, body_.weights().norm().data(), spec_.model.hidden,
                              spec_.model.rms_epsilon, 1.0F, states_.data() + row, 1);
  }
  return status;
}

const float* DflashHead::state(int depth) const noexcept {
  const int slot = spec_.anchor_predicts ? depth - 1 : depth;
  return states_.data() + static_cast<size_t>(slot) * static_cast<size_t>(spec_.model.hidden);
}

void DflashHead::predict(int count) noexcept {
  Model& model = spec_.own_lm_head ? body_ : target_;
  const size_t width = static_cast<size_t>(vocabulary());
  float* out = scattered_ ? own_logits_.data() : logits_.data();
  for (int done = 0; done < count;) {
    const int rows = std::min(count - done, model.chunk());
    model.head_logits(state(done + 1), rows, out + static_cast<size_t>(done) * width);
    done += rows;
  }
  for (int depth = 1; depth <= count && scattered_; ++depth) {
    const float* own = own_logits_.data() + static_cast<size_t>(depth - 1) * width;
    float* to = logits(depth);
    for (size_t i = 0; i < width; ++i) to[tokens_[i]] = own[i];
  }
}

const float* DflashHead::markov_factor(int depth, int32_t parent) noexcept {
  const int rank = spec_.markov;
  if (!spec_.gated) {
    markov_embedding_.read(parent, factor_.data());
    return factor_.data();
  }
  float* embedding = std::copy_n(state(depth), spec_.model.hidden, gate_input_.data());
  markov_embedding_.read(parent, embedding);
  body_.multiply(markov_gate_, gate_input_.data(), 1, factor_.data(), static_cast<size_t>(rank));
  for (int i = 0; i < rank; ++i) {
    float& value = factor_[static_cast<size_t>(i)];
    value = sigmoid(value) * embedding[i];
  }
  return factor_.data();
}

float DflashHead::markov_term(const float* factor, int32_t token) const noexcept {
  return dot(factor, markov_head_, own_[static_cast<size_t>(token)]);
}

float DflashHead::confidence(int depth, int32_t parent) const noexcept {
  const float* x = state(depth);
  float sum = confidence_bias_;
  for (int k = 0; k < spec_.model.hidden; ++k) sum += x[k] * confidence_[static_cast<size_t>(k)];
  if (spec_.confidence_reads_markov) sum += dot(confidence_.data() + spec_.model.hidden, markov_embedding_, parent);
  return sigmoid(sum);
}

DflashDrafter::DflashDrafter(Model& target, const TapRing& ring, bool coupled, int64_t most_exact)
    : HeadDrafter(DrafterKind::kDflash, ring.tags(), /*lookahead=*/0, target.spec().context),
      head_(target),
      ring_(ring),
      sampler_(target.kernels(), target.spec().vocabulary),
      vocabulary_(target.spec().vocabulary),
      context_(target.spec().context),
      pages_(target.cache().pages()),
      coupled_(coupled),
      exact_(head_.has_markov() && static_cast<int64_t>(vocabulary_) * head_.markov_rank() <= most_exact
                 ? static_cast<size_t>(vocabulary_)
                 : 0) {}

// Depths that double are measured; costs between them are interpolated. What a disturbance of the machine adds to one
// is taken off again: a deeper draft never costs less.
void DflashDrafter::prepare() {
  std::vector<int> measured;
  for (int depth = 1; depth < head_.depths(); depth *= 2) measured.push_back(depth);
  measured.push_back(head_.depths());
  for (const int depth : measured) cost_ns_[depth] = time_depth(depth);
  for (size_t i = measured.size() - 1; i > 0; --i) {
    const int low = measured[i - 1], high = measured[i];
    cost_ns_[low] = std::min(cost_ns_[low], cost_ns_[high]);
    for (int d = low + 1; d < high; ++d) {
      cost_ns_[d] = cost_ns_[low] + (cost_ns_[high] - cost_ns_[low]) * (d - low) / (high - low);
    }
  }
}

// The first pages serve as scratch: no sequence exists yet. A round reads what the one before has accepted.
int64_t DflashDrafter::time_depth(int depth) noexcept {
  const std::atomic<bool> never{false};
  const int held = std::min(context_, tokens_in(pages_));
  const int block = std::min(head_.block(), held);
  const int start = std::min(held - block, kTimedPosition);
  std::vector<int32_t> pages(static_cast<size_t>(pages_for(held)));
  for (size_t page = 0; page < pages.size(); ++page) pages[page] = static_cast<int32_t>(page);
  sampling_ = {};
  sampling_.temperature = 1.0F;
  counts_ = nullptr;
  position_ = start;
  wanted_ = kRanks;
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int run = 0; run < kTimedRuns; ++run) {
    const int64_t begin = monotonic_ns();
    const int accepted = std::min(2, start);
    if (head_.read(ring_, accepted, start - accepted, pages.data(), never) != Status::kOk) break;
    if (head_.run(0, block, start, 0, pages.data(), never) != Status::kOk) break;
    head_.predict(depth);
    for (int d = 1; d <= depth; ++d) {
      rank(d);
      score(d, /*parent=*/0, of_node_[0]);
    }
    best = std::min(best, monotonic_ns() - begin);
  }
  return best;
}

int DflashDrafter::max_rank() const noexcept { return std::min(kRanks, head_.vocabulary()); }

int64_t DflashDrafter::cost_ns(int depth) const noexcept { return cost_ns_[std::clamp(depth, 0, head_.depths())]; }

Status DflashDrafter::read(const int32_t*, int count, int start, int, const int32_t* pages, bool,
                           const std::atomic<bool>& abort) noexcept {
  return head_.read(ring_, count, start, pages, abort);
}

Status DflashDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  depth_ = 0;
  if (head_.body().interrupted(*context.abort)) return Status::kAborted;
  if (context.drafted == nullptr || context.history == nullptr) return Status::kOk;
  const int block = std::min({head_.block(), tree.max_depth() + 1, context_ - context.position});
  const int depth = std::min({plan.depth, head_.depths() - head_.block() + block, tree.max_depth()});
  if (depth < 1) return Status::kOk;
  int32_t from = context.position;
  if (const Status status = reach_root(context, &from); status != Status::kOk) return status;
  if (from >= context.position) return Status::kOk;
  const Status status =
      head_.run(context.history[context.position], block, context.position, from, context.pages, *context.abort);
  if (status != Status::kOk) return status;

  sampling_ = *context.sampling;
  if (!coupled_) sampling_.temperature = 0.0F;
  counts_ = context.counts;
  position_ = context.position;
  wanted_ = std::min(plan.count - 1, kRanks);
  depth_ = depth;
  head_.predict(depth_);
  for (int d = 1; d <= depth_; ++d) depths_[d].ranked = false;
  grow(plan.count, tree, [&](int node) { return expand(tree, node); });
  return Status::kOk;
}

Branch DflashDrafter::expand(const DraftTree& tree, int node) noexcept {
  const int d = tree.depth(node) + 1;
  if (d > depth_) return {};
  Children& children = head_.has_markov() ? of_node_[node] : of_depth_[d];
  if (head_.has_markov() || !depths_[d].ranked) {
    if (exact_.size() > 0) {
      rank_exactly(d, tree.token(node), children);
    } else {
      if (!depths_[d].ranked) rank(d);
      score(d, tree.token(node), children);
    }
    children.count = std::min(children.count, wanted_);
    const float accepted = head_.has_confidence() ? head_.confidence(d, tree.token(node)) : 1.0F;
    share_out(children.scores, children.count, accepted, children.shares);
  }
  return {children.count, children.tokens, children.shares};
}

void DflashDrafter::rank(int depth) noexcept {
  Depth& ranked = depths_[depth];
  const int32_t position = position_ + depth;
  float* logits = head_.logits(depth);
  int32_t tokens[kMaxRanks];
  const int wanted = head_.has_markov() ? kRescored : wanted_;
  const int found = sampler_.rank(logits, position, sampling_, wanted, tokens, counts_);
  ranked.ranked = true;
  ranked.count = 0;
  for (int i = 0; i < found; ++i) {
    const int32_t token = tokens[i];
    if (!head_.knows(token)) continue;
    ranked.candidates[ranked.count++] = {
        .token = token,
        .logit = logits[token],
        .bias = Sampler::adjusted(0.0F, token, sampling_, nullptr),
        .noise = sampling_.temperature > 0.0F ? gumbel(sampling_.seed, position, token) : 0.0F};
  }
}

void DflashDrafter::rank_exactly(int depth, int32_t parent, Children& children) noexcept {
  const float* logits = head_.logits(depth);
  const float* factor = head_.markov_factor(depth, parent);
  for (int32_t token = 0; token < vocabulary_; ++token) {
    exact_[static_cast<size_t>(token)] =
        head_.knows(token) ? logits[token] + head_.markov_term(factor, token) : kUnknown;
  }
  const int32_t position = position_ + depth;
  const int found = sampler_.rank(exact_.data(), position, sampling_, wanted_, children.tokens, counts_);
  children.count = 0;
  for (int i = 0; i < found; ++i) {
    const int32_t token = children.tokens[i];
    if (!head_.knows(token)) continue;
    float score = Sampler::adjusted(exact_[static_cast<size_t>(token)], token, sampling_, counts_);
    if (sampling_.temperature > 0.0F) {
      score = score * std::min(1.0F / sampling_.temperature, kMostInverseTemperature) +
              gumbel(sampling_.seed, position, token);
    }
    // What the filters have dropped stands behind what they have not, whatever its score.
    if (children.count > 0) score = std::min(score, children.scores[children.count - 1]);
    children.tokens[children.count] = token;
    children.scores[children.count++] = score;
  }
}

void DflashDrafter::score(int depth, int32_t parent, Children& children) noexcept {
  const Depth& ranked = depths_[depth];
  const float* factor = head_.has_markov() ? head_.markov_factor(depth, parent) : nullptr;
  const float scale =
      sampling_.temperature > 0.0F ? std::min(1.0F / sampling_.temperature, kMostInverseTemperature) : 1.0F;
  children.count = ranked.count;
  struct Scored {
    int32_t token;
    float adjusted;
    float score;
  } scored[kRescored];
  for (int i = 0; i < ranked.count; ++i) {
    const Candidate& candidate = ranked.candidates[i];
    float logit = candidate.logit;
    if (factor != nullptr) logit += head_.markov_term(factor, candidate.token);
    if (counts_ != nullptr && sampling_.penalises() && counts_->holds(candidate.token)) {
      logit = sampling_.penalised(logit, counts_->generated(candidate.token));
    }
    const float adjusted = (logit + candidate.bias) * scale;
    scored[i] = {candidate.token, adjusted, adjusted + candidate.noise};
  }
  // rank() has put them in order; only a Markov term changes it.
  if (factor != nullptr) {
    std::sort(scored, scored + ranked.count, [](const Scored& a, const Scored& b) {
      return a.score > b.score || (!(a.score < b.score) && a.token < b.token);
    });
  }
  for (int i = 0; i < ranked.count; ++i) {
    children.tokens[i] = scored[i].token;
    children.adjusted[i] = scored[i].adjusted;
    children.scores[i] = scored[i].score;
  }
  if (factor != nullptr) filter(children);
  // What the filters have dropped stands behind what they have not, whatever its score.
  for (int i = 1; i < ranked.count; ++i) {
    children.scores[i] = std::min(children.scores[i], children.scores[i - 1]);
  }
}

// Top-k, top-p and min-p over these few: what the target's filters drop can only be guessed at.
void DflashDrafter::filter(Children& children) const noexcept {
  const bool top_k = sampling_.top_k > 0 && sampling_.top_k < children.count;
  if (sampling_.temperature <= 0.0F || (!top_k && sampling_.top_p >= 1.0F && sampling_.min_p <= 0.0F)) return;
  const int count = children.count;
  int order[kRescored];  // by logit
  for (int i = 0; i < count; ++i) order[i] = i;
  std::sort(order, order + count, [&](int a, int b) {
    return children.adjusted[a] > children.adjusted[b] || (!(children.adjusted[a] < children.adjusted[b]) && a < b);
  });
  float weights[kRescored];
  const int kept_at_most = top_k ? sampling_.top_k : count;
  float total = 0.0F;
  for (int i = 0; i < kept_at_most; ++i) {
    weights[i] = exp_lanes<ScalarMath>(children.adjusted[order[i]] - children.adjusted[order[0]]);
    total += weights[i];
  }
  bool kept[kRescored] = {};
  float before = 0.0F;
  for (int i = 0; i < kept_at_most; ++i) {
    kept[order[i]] = before < sampling_.top_p * total && weights[i] >= sampling_.min_p;
    before += weights[i];
  }
  Children ordered;
  const auto append = [&](int i) {
    ordered.tokens[ordered.count] = children.tokens[i];
    ordered.scores[ordered.count++] = children.scores[i];
  };
  for (int i = 0; i < count; ++i) {
    if (kept[i]) append(i);
  }
  for (int i = 0; i < count; ++i) {
    if (!kept[order[i]]) append(order[i]);
  }
  std::copy_n(ordered.tokens, count, children.tokens);
  std::copy_n(ordered.scores, count, children.scores);
}

}  // namespace ull::cpu
