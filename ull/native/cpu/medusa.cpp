#include "cpu/medusa.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/clock.h"
#include "base/gumbel.h"

namespace ull::cpu {
namespace {

constexpr int kTimedRuns = 5;  // per depth; the fastest counts

alignas(64) constexpr float kOnes[kTileRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

}  // namespace

MedusaHeads::MedusaHeads(Model& model) : model_(model) {
  const MedusaSpec& spec = *model.spec().medusa;
  const int hidden = model.spec().hidden;
  TensorLoader load(model.spec().path, spec.tensors, WeightStorage::kResident, memory_);
  for (int i = 0; i < spec.heads; ++i) {
    const std::string prefix = "medusa." + std::to_string(i) + ".";
    Head head;
    for (int j = 0; j < spec.layers; ++j)
      head.blocks.push_back(load.matrix(prefix + std::to_string(j), hidden, hidden));
    if (spec.own_lm_head) head.lm_head = load.matrix(prefix + "lm_head", model.spec().vocabulary, hidden);
    heads_.push_back(std::move(head));
  }
  for (auto& states : states_) {
    states = AlignedArray<float>(static_cast<size_t>(spec.heads) * static_cast<size_t>(hidden));
  }
  for (int member = 0; member < model.team()->size(); ++member) {
    scaled_.emplace_back(static_cast<size_t>(hidden));
  }
}

void MedusaHeads::run(const float* hidden, int count, float* logits) noexcept {
  const ModelSpec& spec = model_.spec();
  const size_t width = static_cast<size_t>(spec.hidden), vocabulary = static_cast<size_t>(spec.vocabulary);
  const int layers = static_cast<int>(heads_.front().blocks.size());
  for (int i = 0; i < count; ++i) std::copy_n(hidden, width, states_[0].data() + static_cast<size_t>(i) * width);
  const auto body = [&](int member) {
    for (int layer = 0; layer < layers; ++layer) {
      if (layer > 0) model_.team()->barrier();
      block(member, layer, count, states_[layer % 2].data(), states_[(layer + 1) % 2].data());
    }
  };
  model_.team()->run(body);
  const float* x = states_[layers % 2].data();
  if (spec.medusa->own_lm_head) {
    for (int i = 0; i < count; ++i, x += width, logits += vocabulary) {
      model_.multiply(heads_[static_cast<size_t>(i)].lm_head, x, 1, logits, vocabulary);
    }
    return;
  }
  for (int i = 0; i < count;) {  // all heads at once: the lm_head is read once
    const int rows = std::min(count - i, model_.chunk());
    model_.head_logits(x + static_cast<size_t>(i) * width, rows, logits + static_cast<size_t>(i) * vocabulary);
    i += rows;
  }
}

void MedusaHeads::block(int member, int layer, int count, const float* x, float* next) noexcept {
  const int tiles = heads_.front().blocks.front().tiles;
  const int64_t items = static_cast<int64_t>(tiles) * count;
  const int begin = static_cast<int>(items * member / model_.team()->size());
  const int end = static_cast<int>(items * (member + 1) / model_.team()->size());
  const size_t width = static_cast<size_t>(model_.spec().hidden);
  for (int item = begin; item < end;) {
    const int head = item / tiles;
    const int stop = std::min(end, (head + 1) * tiles);
    const size_t row = static_cast<size_t>(head) * width;
    block_tiles(member, heads_[static_cast<size_t>(head)].blocks[static_cast<size_t>(layer)], item - head * tiles,
                stop - head * tiles, x + row, next + row);
    item = stop;
  }
}

void MedusaHeads::block_tiles(int member, const Matrix& matrix, int first, int end, const float* x,
                              float* next) noexcept {
  const Kernels& kernels = model_.kernels();
  float* scaled = scaled_[static_cast<size_t>(member)].data();
  for (int k = 0; k < matrix.columns; ++k) scaled[k] = x[k] * matrix.input_scale();
  for (int tile = first; tile < end;) {
    const int tiles = std::min(kMaxTileGroup, end - tile);
    alignas(64) float sums[kMaxTileGroup * kTileRows];
    multiply_tiles(kernels, matrix.format, 1, tiles, matrix.data + static_cast<size_t>(tile) * matrix.tile_bytes(),
                   matrix.tile_bytes(), matrix.columns, scaled, sums, kTileRows, /*resume=*/false);
    for (int t = 0; t < tiles; ++t, ++tile) {
      alignas(64) float row[kTileRows];
      kernels.finish_tile(sums + t * kTileRows, matrix.tile_scale(tile), matrix.tile_bias(tile), row);
      kernels.silu_multiply(row, kOnes, 1.0F, row);
      const int rows = std::min(kTileRows, matrix.rows - tile * kTileRows);
      for (int i = 0; i < rows; ++i) next[tile * kTileRows + i] = x[tile * kTileRows + i] + row[i];
    }
  }
}

MedusaDrafter::MedusaDrafter(Model& model, bool coupled)
    : model_(model),
      heads_(model),
      sampler_(model.kernels(), model.spec().vocabulary),
      hidden_(model.spec().hidden),
      vocabulary_(model.spec().vocabulary),
      coupled_(coupled),
      logits_(static_cast<size_t>(heads_.heads()) * static_cast<size_t>(model.spec().vocabulary)) {}

void MedusaDrafter::prepare() {
  const AlignedArray<float> hidden(static_cast<size_t>(hidden_));
  Sampling sampling;
  sampling.temperature = 1.0F;
  for (int depth = 1; depth <= heads_.heads(); ++depth) {
    int64_t best = std::numeric_limits<int64_t>::max();
    for (int run = 0; run < kTimedRuns; ++run) {
      const int64_t begin = monotonic_ns();
      heads_.run(hidden.data(), depth, logits_.data());
      for (int d = 1; d <= depth; ++d) {
        (void)sampler_.rank(logits_.data(), d, sampling, 2, candidates_.tokens[d]);
      }
      best = std::min(best, monotonic_ns() - begin);
    }
    cost_ns_[depth] = best;
  }
}

int MedusaDrafter::confidence(const DraftContext& context) noexcept {
  return context.hidden == nullptr ? -1 : temperature_confidence(context.sampling->temperature);
}

Status MedusaDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (model_.interrupted(*context.abort)) return Status::kAborted;
  candidates_.depth = std::min(plan.depth, heads_.heads());
  if (context.hidden == nullptr || candidates_.depth < 1) return Status::kOk;
  heads_.run(context.hidden, candidates_.depth, logits_.data());
  Sampling sampling = *context.sampling;
  if (!coupled_) sampling.temperature = 0.0F;
  for (int d = 1; d <= candidates_.depth; ++d) {
    float* logits = logits_.data() + static_cast<size_t>(d - 1) * static_cast<size_t>(vocabulary_);
    const int position = context.position + d;
    candidates_.counts[d] = sampler_.rank(logits, position, sampling, std::min(plan.count, kMedusaRanks),
                                          candidates_.tokens[d], context.counts);
    for (int rank = 0; rank < candidates_.counts[d]; ++rank) {
      const int32_t token = candidates_.tokens[d][rank];
      float& score = candidates_.scores[d][rank];
      score = Sampler::adjusted(logits[token], token, sampling, context.counts);
      if (sampling.temperature > 0.0F) score = score / sampling.temperature + gumbel(sampling.seed, position, token);
    }
  }
  candidates_.grow(plan.count, tree);
  return Status::kOk;
}

int64_t MedusaDrafter::cost_ns(int depth) const noexcept { return cost_ns_[std::clamp(depth, 0, heads_.heads())]; }

}  // namespace ull::cpu
