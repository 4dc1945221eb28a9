#include "cpu/eagle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "base/clock.h"
#include "base/gumbel.h"

namespace ull::cpu {
namespace {

constexpr int kPassRows = 64;      // most entries of a pass
constexpr int kLastRows = 8;       // of the pass that a proposal begins with; those before it have no outputs
constexpr int kTimedRuns = 5;      // the fastest counts
constexpr float kAbsent = -1e30F;  // logit of what the head's vocabulary lacks: behind every other, yet finite
// A level of so many times one node's cost is as wide as it may be: its other nodes are the less likely ones.
constexpr int64_t kWorthWidth = 2;

int own_half(const ModelSpec& spec) { return (spec.intermediate + kTileRows - 1) / kTileRows * kTileRows; }

AlignedArray<float> matrix_of(int rows, int columns) {
  return AlignedArray<float>(static_cast<size_t>(rows) * static_cast<size_t>(columns));
}

PageLayout page_layout(const ModelSpec& spec) {
  return {1, spec.kv_heads, spec.head_dim, format_bytes(spec.kv_format)};
}

const float* data_or_null(const AlignedArray<float>& values) { return values.size() == 0 ? nullptr : values.data(); }

}  // namespace

int widest_columns(const EagleSpec& spec, int target_hidden) noexcept {
  const ModelSpec& model = spec.model;
  return std::max(
      {static_cast<int>(spec.taps.size()) * target_hidden, 2 * model.hidden, model.query_rows(), model.intermediate});
}

EagleHead::EagleHead(Model& model)
    : model_(model),
      spec_(*model.spec().eagle),
      hidden_(static_cast<size_t>(spec_.model.hidden)),
      target_hidden_(static_cast<size_t>(model.spec().hidden)),
      rows_(std::min(kPassRows, model.chunk())),
      cache_(page_layout(spec_.model), model.cache().pages(), spec_.model.kv_format, /*trees=*/true),
      attention_(spec_.model, model.kernels(), cache_, *model.team(), spec_.model.context),
      taps_(matrix_of(rows_, static_cast<int>(spec_.taps.size()) * model.spec().hidden)),
      states_(matrix_of(rows_, spec_.model.hidden)),
      input_(matrix_of(rows_, 2 * spec_.model.hidden)),
      residual_(matrix_of(rows_, spec_.model.hidden)),
      qkv_(matrix_of(rows_, spec_.model.qkv_rows())),
      attended_(matrix_of(rows_, spec_.model.query_rows())),
      added_(matrix_of(rows_, spec_.model.hidden)),
      gate_up_(matrix_of(rows_, 2 * own_half(spec_.model))),
      gated_(matrix_of(rows_, spec_.model.intermediate)) {
  try {
    load(model.spec());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("eagle: ") + error.what());
  }
}

void EagleHead::load(const ModelSpec& target) {
  const ModelSpec& own = spec_.model;
  const int taps = static_cast<int>(spec_.taps.size());
  TensorLoader load(own.path, own.tensors, WeightStorage::kResident, memory_);
  if (spec_.tap_norm == EagleSpec::TapNorm::kAll) {
    tap_norms_.push_back(load.vector("tap_norm", taps * target.hidden, true));
  } else if (spec_.tap_norm == EagleSpec::TapNorm::kEach) {
    for (int i = 0; i < taps; ++i) {
      tap_norms_.push_back(load.vector("tap_norm." + std::to_string(i), target.hidden, true));
    }
  }
  fc_ = load.matrix("fc", own.hidden, taps * target.hidden);
  embedding_norm_ = load.vector("layers.0.attn_norm", own.hidden, true);
  hidden_norm_ = load.vector("layers.0.hidden_norm", own.hidden, true);
  layer_.qkv = load.matrix("layers.0.qkv", own.qkv_rows(), 2 * own.hidden);
  if (own.qk_norm) {
    layer_.query_norm = load.vector("layers.0.q_norm", own.head_dim, true);
    layer_.key_norm = load.vector("layers.0.k_norm", own.head_dim, true);
  }
  layer_.output = load.matrix("layers.0.o", own.hidden, own.query_rows());
  layer_.mlp_norm = load.vector("layers.0.mlp_norm", own.hidden, true);
  layer_.gate_up = load.matrix("layers.0.gate_up", 2 * own_half(own), own.hidden);
  layer_.down = load.matrix("layers.0.down", own.hidden, own.intermediate);
  norm_ = load.vector("norm", own.hidden, true);
  lm_head_ = load.matrix("lm_head", own.vocabulary, own.hidden);
  if (spec_.own_embedding) embedding_ = load.rows("embed.weight", target.vocabulary, own.hidden);
  if (!spec_.mapped) return;
  const AlignedArray<float> stored = load.vector("d2t", own.vocabulary, false);  // 32-bit integers
  for (int i = 0; i < own.vocabulary; ++i) {
    const auto token = std::bit_cast<int32_t>(stored[static_cast<size_t>(i)]);
    if (token < 0 || token >= target.vocabulary) {
      throw std::invalid_argument("tensor d2t: " + std::to_string(token) + " at " + std::to_string(i) +
                                  " is not a token of the target, which has " + std::to_string(target.vocabulary));
    }
    names_.push_back(token);
  }
}

void EagleHead::normalise(const float* x, const AlignedArray<float>& weight, float* out) const noexcept {
  model_.kernels().normalise(x, weight.data(), spec_.model.hidden, spec_.model.rms_epsilon, 1.0F, out, 1);
}

void EagleHead::read_taps(const TapRing& ring, int start, int count) noexcept {
  const Kernels& kernels = model_.kernels();
  const float epsilon = spec_.model.rms_epsilon;
  const size_t taps = spec_.taps.size();
  for (int row = 0; row < count; ++row) {
    float* to = taps_.data() + static_cast<size_t>(row) * taps * target_hidden_;
    for (size_t i = 0; i < taps; ++i) {
      const float* from = ring.state(start + row, spec_.taps[i]);
      float* tap = to + i * target_hidden_;
      if (spec_.tap_norm == EagleSpec::TapNorm::kEach) {
        kernels.normalise(from, tap_norms_[i].data(), static_cast<int>(target_hidden_), epsilon, 1.0F, tap, 1);
      } else {
        std::copy_n(from, target_hidden_, tap);
      }
    }
    if (spec_.tap_norm == EagleSpec::TapNorm::kAll) {
      kernels.normalise(to, tap_norms_[0].data(), static_cast<int>(taps * target_hidden_), epsilon, 1.0F, to, 1);
    }
  }
  model_.multiply(fc_, taps_.data(), count, states_.data(), hidden_);
}

void EagleHead::run(const Pass& pass) noexcept {
  prepare_input(pass);
  model_.multiply(layer_.qkv, input_.data(), pass.count, qkv_.data(), static_cast<size_t>(spec_.model.qkv_rows()));
  attend(pass);
  add_product(layer_.output, attended_.data(), pass.count);
  feed_forward(pass.count);
}

void EagleHead::keep(const Pass& pass) noexcept {
  prepare_input(pass);
  model_.multiply(layer_.qkv, input_.data(), pass.count, qkv_.data(), static_cast<size_t>(spec_.model.qkv_rows()),
                  spec_.model.query_rows() / kTileRows);
  const AttentionStep step = attention_step(pass);
  const auto body = [&](int member) { attention_.store(member, step); };
  model_.team()->run(body);
}

void EagleHead::prepare_input(const Pass& pass) noexcept {
  for (int row = 0; row < pass.count; ++row) {
    const size_t at = static_cast<size_t>(row) * hidden_;
    float* input = input_.data() + 2 * at;
    float* embedding = added_.data() + at;
    if (embedding_.data != nullptr) {
      embedding_.read(pass.tokens[row], embedding);
    } else {
      model_.weights().embed(pass.tokens[row], embedding);
    }
    normalise(embedding, embedding_norm_, input);
    normalise(states_.data() + at, hidden_norm_, input + hidden_);
    std::copy_n(spec_.norm_before_residual ? input + hidden_ : states_.data() + at, hidden_, residual_.data() + at);
  }
}

AttentionStep EagleHead::attention_step(const Pass& pass) noexcept {
  return {.qkv = qkv_.data(),
          .qkv_stride = spec_.model.qkv_rows(),
          .start = pass.start,
          .pages = pass.pages,
          .cache_layer = 0,
          .window = spec_.model.windows[0],
          .query_norm = data_or_null(layer_.query_norm),
          .key_norm = data_or_null(layer_.key_norm),
          .panels = {pass.count, pass.count, 1},  // row by row
          .out = attended_.data(),
          .out_scale = 1.0F,
          .tree = pass.tree,
          .first_node = pass.first_node,
          .first = pass.from};
}

void EagleHead::attend(const Pass& pass) noexcept {
  const AttentionStep step = attention_step(pass);
  attention_.reset();
  const auto body = [&](int member) { attention_.run(member, step); };
  model_.team()->run(body);
}

void EagleHead::add_product(const Matrix& matrix, const float* x, int count) noexcept {
  model_.multiply(matrix, x, count, added_.data(), hidden_);
  for (size_t i = 0; i < static_cast<size_t>(count) * hidden_; ++i) residual_[i] += added_[i];
}

void EagleHead::feed_forward(int count) noexcept {
  const Kernels& kernels = model_.kernels();
  const int intermediate = spec_.model.intermediate;
  const size_t stored = static_cast<size_t>(2 * own_half(spec_.model));
  for (int row = 0; row < count; ++row) {
    const size_t at = static_cast<size_t>(row) * hidden_;
    normalise(residual_.data() + at, layer_.mlp_norm, added_.data() + at);
  }
  model_.multiply(layer_.gate_up, added_.data(), count, gate_up_.data(), stored);
  for (int row = 0; row < count; ++row) {
    const float* from = gate_up_.data() + static_cast<size_t>(row) * stored;  // 32 of the gate, 32 of what it gates
    float* to = gated_.data() + static_cast<size_t>(row) * static_cast<size_t>(intermediate);
    for (int i = 0; i < intermediate; i += kTileRows, from += 2 * kTileRows) {
      alignas(64) float gate[kTileRows], up[kTileRows];
      std::copy_n(from, kTileRows, gate);
      std::copy_n(from + kTileRows, kTileRows, up);
      kernels.silu_multiply(gate, up, 1.0F, gate);
      std::copy_n(gate, std::min(kTileRows, intermediate - i), to + i);
    }
  }
  add_product(layer_.down, gated_.data(), count);
}

void EagleHead::output(int row, float* out) const noexcept {
  const float* residual = residual_.data() + static_cast<size_t>(row) * hidden_;
  if (spec_.norm_output) {
    normalise(residual, norm_, out);
  } else {
    std::copy_n(residual, hidden_, out);
  }
}

void EagleHead::project(int row, int count, float* logits) noexcept {
  for (int i = 0; i < count; ++i) {
    const float* residual = residual_.data() + static_cast<size_t>(row + i) * hidden_;
    normalise(residual, norm_, added_.data() + static_cast<size_t>(i) * hidden_);
  }
  model_.multiply(lm_head_, added_.data(), count, logits, static_cast<size_t>(spec_.model.vocabulary));
}

EagleDrafter::EagleDrafter(Model& model, const TapRing& taps, bool coupled)
    : HeadDrafter(DrafterKind::kEagle, taps.tags(), /*lookahead=*/1, model.spec().context),
      model_(model),
      taps_(taps),
      head_(model),
      sampler_(model.kernels(), model.spec().vocabulary),
      coupled_(coupled),
      width_(std::min(kMaxEagleWidth, head_.rows())),
      logits_(matrix_of(kMaxEagleWidth, head_.spec().model.vocabulary)),
      named_(head_.names().empty() ? 0 : static_cast<size_t>(model.spec().vocabulary)),
      outputs_(matrix_of(kMaxEagleEntries, head_.spec().model.hidden)) {
  std::fill_n(named_.data(), named_.size(), kAbsent);
}

// Page 0 serves as scratch: no sequence exists yet.
void EagleDrafter::prepare() {
  const int32_t page = 0, token = 0;
  const std::atomic<bool> never{false};
  if (model_.spec().context < 2) return;  // no room for a draft
  root_ns_ = std::numeric_limits<int64_t>::max();
  for (int run = 0; run < kTimedRuns; ++run) {
    const int64_t begin = monotonic_ns();
    (void)read(&token, 1, 0, 0, &page, /*last=*/true, never);
    Sampling sampling;
    sampling.temperature = 1.0F;
    tree_.begin(kMaxTreeTokens, 2);
    rank({.history = &token,
          .position = 1,
          .pages = &page,
          .sampling = &sampling,
          .drafted = nullptr,
          .hidden = nullptr,
          .abort = &never},
         sampling, 0, 0);
    root_ns_ = std::min(root_ns_, monotonic_ns() - begin);
  }
  const int64_t narrow = time_level(1);
  level_ns_ = narrow;
  int widest = 1;
  for (int width = 2; width <= std::min(kMaxEagleWidth, head_.rows()); width *= 2) {
    const int64_t wide = time_level(width);
    if (wide > kWorthWidth * narrow) break;
    widest = width;
    level_ns_ = std::max(level_ns_, wide);
  }
  width_ = widest;
}

int64_t EagleDrafter::time_level(int width) noexcept {
  const int32_t page = 0;
  const int32_t token = 0;
  const std::atomic<bool> never{false};
  Sampling sampling;
  sampling.temperature = 1.0F;
  const DraftContext context{.history = &token,
                             .position = 1,
                             .pages = &page,
                             .sampling = &sampling,
                             .drafted = nullptr,
                             .hidden = nullptr,
                             .abort = &never};
  int32_t tokens[kEagleRanks] = {};
  float scores[kEagleRanks] = {};
  int nodes[kMaxEagleWidth];
  int64_t fastest = std::numeric_limits<int64_t>::max();
  for (int run = 0; run < kTimedRuns; ++run) {
    tree_.begin(kMaxTreeTokens, kMaxEagleDepth, width);
    tree_.add_candidates(0, tokens, scores, kEagleRanks);
    entries_ = 1;
    const int64_t begin = monotonic_ns();
    const int count = tree_.next_level(nodes);
    run_level(nodes, count, 1, 0, &page);
    for (int i = 0; i < count; ++i) rank(context, sampling, nodes[i], i);
    fastest = std::min(fastest, monotonic_ns() - begin);
  }
  return fastest;
}

int64_t EagleDrafter::cost_ns(int depth) const noexcept {
  return depth < 1 ? 0 : root_ns_ + (std::min(depth, kMaxEagleDepth) - 1) * level_ns_;
}

Status EagleDrafter::read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                          const std::atomic<bool>& abort) noexcept {
  const int in_last = last ? std::min({count, kLastRows, head_.rows()}) : 0;
  for (int done = 0; done < count;) {
    if (model_.interrupted(abort)) return Status::kAborted;
    const int before_last = count - in_last - done;
    const int rows = before_last > 0 ? std::min(before_last, head_.rows()) : in_last;
    const EagleHead::Pass pass{
        .tokens = tokens + done, .count = rows, .start = start + done, .from = from, .pages = pages};
    head_.read_taps(taps_, start + done, rows);
    done += rows;
    if (before_last > 0) {
      head_.keep(pass);
      continue;
    }
    head_.run(pass);
    head_.output(rows - 1, outputs_.data());
    head_.project(rows - 1, 1, logits_.data());
  }
  return Status::kOk;
}

void EagleDrafter::run_level(const int* nodes, int count, int root, int from, const int32_t* pages) noexcept {
  const size_t hidden = static_cast<size_t>(head_.spec().model.hidden);
  int32_t tokens[kMaxEagleWidth];
  const int first = entries_;
  for (int i = 0; i < count; ++i) {
    const int parent = entry_of_[tree_.parent(nodes[i])];
    tokens[i] = tree_.token(nodes[i]);
    std::copy_n(outputs_.data() + static_cast<size_t>(parent) * hidden, hidden, head_.state(i));
    entry_of_[nodes[i]] = static_cast<int16_t>(entries_);
    parents_[entries_++] = static_cast<uint8_t>(parent);
  }
  paths_.assign(parents_, entries_);
  head_.run({.tokens = tokens,
             .count = count,
             .start = root - 1,
             .from = from,
             .pages = pages,
             .tree = &paths_,
             .first_node = first});
  for (int i = 0; i < count; ++i) head_.output(i, outputs_.data() + static_cast<size_t>(first + i) * hidden);
  head_.project(0, count, logits_.data());
}

void EagleDrafter::rank(const DraftContext& context, const Sampling& sampling, int node, int row) noexcept {
  const size_t own = static_cast<size_t>(head_.spec().model.vocabulary);
  const int32_t position = context.position + tree_.depth(node) + 1;
  float* logits = logits_.data() + static_cast<size_t>(row) * own;
  if (!head_.names().empty()) {
    for (size_t i = 0; i < own; ++i) named_[static_cast<size_t>(head_.names()[i])] = logits[i];
    logits = named_.data();
  }
  int32_t way[kMaxEagleDepth];
  int steps = 0;
  if (context.counts != nullptr) {
    for (int at = node; at != 0; at = tree_.parent(at)) way[steps++] = tree_.token(at);
    for (int i = steps - 1; i >= 0; --i) context.counts->add(way[i]);
  }
  int32_t tokens[kEagleRanks];
  float scores[kEagleRanks];
  int count = sampler_.rank(logits, position, sampling, kEagleRanks, tokens, context.counts);
  // What the head's vocabulary lacks comes last, unless a bias bans all that it has.
  const auto absent = [&](int32_t token) { return logits[token] <= kAbsent; };
  count = static_cast<int>(std::remove_if(tokens, tokens + count, absent) - tokens);
  for (int i = 0; i < count; ++i) {
    scores[i] = Sampler::adjusted(logits[tokens[i]], tokens[i], sampling, context.counts);
    if (sampling.temperature > 0.0F) {
      scores[i] = scores[i] / sampling.temperature + gumbel(sampling.seed, position, tokens[i]);
    }
  }
  for (int i = 0; i < steps; ++i) context.counts->take_back();
  tree_.add_candidates(node, tokens, scores, count);
}

Status EagleDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (context.drafted == nullptr || plan.depth < 1 || plan.count < 2) return Status::kOk;
  int32_t from = 0;
  if (const Status status = reach_root(context, &from); status != Status::kOk) return status;
  const int32_t root = context.position, last = root - 1;
  if (from == root) return Status::kOk;
  Sampling sampling = *context.sampling;
  if (!coupled_) sampling.temperature = 0.0F;
  head_.cache().copy_token(context.pages[last / kPageTokens], last % kPageTokens, head_.cache().tree_page(), 0);
  entries_ = 1;
  tree_.begin(plan.count, std::min(plan.depth, model_.spec().context - 1 - root), width_);
  rank(context, sampling, 0, 0);
  int nodes[kMaxEagleWidth];
  while (const int count = tree_.next_level(nodes)) {
    if (model_.interrupted(*context.abort)) return Status::kAborted;
    run_level(nodes, count, root, from, context.pages);
    for (int i = 0; i < count; ++i) rank(context, sampling, nodes[i], i);
  }
  tree_.finish(tree);
  return Status::kOk;
}

}  // namespace ull::cpu
