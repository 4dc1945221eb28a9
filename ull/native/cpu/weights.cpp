#include "cpu/weights.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "draft/medusa_tree.h"

namespace ull::cpu {

namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

bool has_drafters(const ModelSpec& spec) {
  return spec.medusa != nullptr || spec.draft != nullptr || spec.eagle != nullptr || spec.dflash != nullptr;
}

// A model that drafts, whose fields stand in the section `name`.
void validate_as(const std::string& name, const ModelSpec& spec) {
  try {
    validate(spec);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + "." + error.what());
  }
}

void validate_eagle(const ModelSpec& target) {
  const EagleSpec& spec = *target.eagle;
  require(!has_drafters(spec.model), "eagle: must not have drafters of its own");
  validate_as("eagle", spec.model);
  require(spec.model.layers == 1, "eagle.layers: must be 1");
  require(spec.model.kv_format != Format::kF8, "eagle.kv_dtype: must be bf16 or f32");
  require(spec.model.hidden <= kMaxDimension / 2, "eagle.hidden: must be at most 2^23");
  require(spec.model.context >= target.context, "eagle.context: must not be shorter than the target's");
  require(!spec.taps.empty() && spec.taps.size() <= static_cast<size_t>(kMaxDimension / target.hidden),
          "eagle.taps: must name 1 layer or more, of 2^24 values together");
  for (const int layer : spec.taps) {
    require(layer >= 0 && layer <= target.layers, "eagle.taps: must be 0 to the target's number of layers");
  }
  require(spec.own_embedding || spec.model.hidden == target.hidden,
          "eagle.own_embedding: must be true where eagle.hidden is not the target's hidden");
  require(spec.mapped || spec.model.vocabulary == target.vocabulary,
          "eagle.mapped: must be true where eagle.vocabulary is not the target's");
}

void validate_dflash(const ModelSpec& target) {
  const DflashSpec& spec = *target.dflash;
  require(!has_drafters(spec.model), "dflash: must not have drafters of its own");
  validate_as("dflash", spec.model);
  require(spec.model.kv_format != Format::kF8, "dflash.kv_dtype: must be bf16 or f32");
  require(!spec.taps.empty() && spec.taps.size() <= static_cast<size_t>(kMaxDimension / target.hidden),
          "dflash.taps: must name 1 layer or more, of 2^24 values together");
  for (const int layer : spec.taps) {
    require(layer >= 0 && layer <= target.layers, "dflash.taps: must be 0 to the target's number of layers");
  }
  require(spec.block >= 2 && spec.block <= kMaxDflashBlock, "dflash.block: must be 2 to 32");
  require(spec.mask_token >= 0 && spec.mask_token < target.vocabulary,
          "dflash.mask_token: must be a token of the target's vocabulary");
  require(spec.model.context >= target.context, "dflash.context: must not be shorter than the target's");
  require(spec.own_embedding || spec.model.hidden == target.hidden,
          "dflash.own_embedding: must be true where dflash.hidden is not the target's hidden");
  require(spec.own_lm_head || spec.model.hidden == target.hidden,
          "dflash.own_lm_head: must be true where dflash.hidden is not the target's hidden");
  require(spec.own_lm_head || spec.model.vocabulary == target.vocabulary,
          "dflash.own_lm_head: must be true where dflash.vocabulary is not the target's");
  require(spec.model.vocabulary <= target.vocabulary, "dflash.vocabulary: must not be larger than the target's");
  require(spec.own_lm_head || !spec.mapped, "dflash.mapped: must be false without an lm_head of its own");
  require(spec.markov >= 0 && spec.markov <= kMaxMarkovRank, "dflash.markov: must be 0 to 4096");
  require(!spec.gated || spec.markov > 0, "dflash.markov_kind: must be plain without a Markov term");
  require(!spec.confidence_reads_markov || (spec.confidence && spec.markov > 0),
          "dflash.confidence_reads_markov: must be false without a confidence head or a Markov term");
}

AlignedArray<float> powers_of_two(TensorLoader& load, const std::string& name, int length) {
  AlignedArray<float> values = load.vector(name, length, /*allow_bf16=*/false);
  for (int i = 0; i < length; ++i) {
    int exponent = 0;
    const float value = values[static_cast<size_t>(i)];
    if (!std::isfinite(value) || std::frexp(value, &exponent) != 0.5F) {
      throw std::invalid_argument("tensor " + name + ": " + std::to_string(value) + " at " + std::to_string(i) +
                                  " is not a power of two");
    }
  }
  return values;
}

}  // namespace

void validate(const ModelSpec& spec) {
  const auto sane = [](int value) { return value >= 1 && value <= kMaxDimension; };
  require(sane(spec.hidden), "hidden: must be 1 to 2^24");
  require(sane(spec.layers), "layers: must be 1 to 2^24");
  require(sane(spec.kv_heads), "kv_heads: must be 1 to 2^24");
  require(sane(spec.heads) && spec.heads % spec.kv_heads == 0, "heads: must be a multiple of kv_heads");
  require(sane(spec.head_dim) && spec.head_dim % 2 == 0 && spec.head_dim <= 1024, "head_dim: must be even, 2 to 1024");
  require(static_cast<int64_t>(spec.heads) * spec.head_dim <= kMaxDimension, "heads * head_dim: must be at most 2^24");
  require(sane(spec.intermediate), "intermediate: must be 1 to 2^24");
  require(sane(spec.vocabulary), "vocabulary: must be 1 to 2^24");
  require(sane(spec.context), "context: must be 1 to 2^24 tokens");
  require(spec.rms_epsilon >= 0.0F && spec.rms_epsilon < 1.0F, "rms_epsilon: must be in [0, 1)");
  require(spec.inv_freq.size() == static_cast<size_t>(spec.head_dim / 2), "inv_freq: must hold head_dim / 2 values");
  require(std::isfinite(spec.attention_factor) && spec.attention_factor > 0.0F,
          "attention_factor: must be above 0 and finite");
  require(spec.windows.size() == static_cast<size_t>(spec.layers), "windows: must hold one value per layer");
  for (const int window : spec.windows) require(window >= 0, "windows: must not be negative");
  if (spec.medusa != nullptr) {
    require(spec.medusa->heads >= 1 && spec.medusa->heads <= kMaxMedusaHeads, "medusa.heads: must be 1 to 12");
    require(spec.medusa->layers >= 1 && spec.medusa->layers <= kMaxMedusaLayers, "medusa.layers: must be 1 to 16");
  }
  if (spec.eagle != nullptr) validate_eagle(spec);
  if (spec.dflash != nullptr) validate_dflash(spec);
  if (spec.draft != nullptr) {
    require(!has_drafters(*spec.draft), "draft: must not have drafters of its own");
    validate_as("draft", *spec.draft);
    require(spec.draft->context >= spec.context, "draft.context: must not be shorter than the target's");
  }
}

ModelWeights::ModelWeights(const ModelSpec& spec, WeightStorage storage) : hidden_(spec.hidden) {
  validate(spec);
  TensorLoader load(spec.path, spec.tensors, storage, memory_);
  for (int i = 0; i < spec.layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    LayerWeights layer;
    layer.attention_norm = load.vector(prefix + "attn_norm", spec.hidden, true);
    layer.mlp_norm = load.vector(prefix + "mlp_norm", spec.hidden, true);
    if (spec.qk_norm) {
      layer.query_norm = load.vector(prefix + "q_norm", spec.head_dim, true);
      layer.key_norm = load.vector(prefix + "k_norm", spec.head_dim, true);
    }
    if (spec.kv_format == Format::kF8) layer.kv_scale = powers_of_two(load, prefix + "kv_scale", 2 * spec.kv_heads);
    layer.qkv = load.matrix(prefix + "qkv", spec.qkv_rows(), spec.hidden);
    layer.output = load.matrix(prefix + "o", spec.hidden, spec.query_rows());
    const int half = (spec.intermediate + kTileRows - 1) / kTileRows * kTileRows;
    layer.gate_up = load.matrix(prefix + "gate_up", 2 * spec.intermediate, 2 * half, spec.hidden);
    layer.down = load.matrix(prefix + "down", spec.hidden, spec.intermediate);
    layers_.push_back(std::move(layer));
  }
  norm_ = load.vector("norm", spec.hidden, true);
  if (!spec.body || load.has("lm_head.weight")) lm_head_ = load.matrix("lm_head", spec.vocabulary, spec.hidden);
  if (load.has("embed.weight")) {
    embedding_ = load.rows("embed.weight", spec.vocabulary, spec.hidden);
  } else if (!spec.body && lm_head_.format == Format::kF8) {
    throw std::invalid_argument("tensor embed.weight: missing, and an F8_E4M3 lm_head cannot stand in for it");
  }
}

void ModelWeights::embed(int token, float* out) const noexcept {
  if (embedding_.data != nullptr) {
    embedding_.read(token, out);
    return;
  }
  const Format format = lm_head_.format;
  const size_t element = format_bytes(format);
  const int r = token % kTileRows;
  const int position = format == Format::kF32 ? r : r < kTileRows / 2 ? 2 * r : 2 * (r - kTileRows / 2) + 1;
  const uint8_t* row = lm_head_.data + static_cast<size_t>(token / kTileRows) * lm_head_.tile_bytes() +
                       static_cast<size_t>(position) * element;
  for (int k = 0; k < hidden_; ++k, row += kTileRows * element) {
    if (format == Format::kBf16) {
      out[k] = widen_bf16(row);
    } else {
      std::memcpy(out + k, row, sizeof(float));
    }
  }
}

void ModelWeights::drop_layer(int index) const noexcept {
  const LayerWeights& weights = layer(index);
  for (const Matrix* matrix : {&weights.qkv, &weights.output, &weights.gate_up, &weights.down}) drop(*matrix);
}

void ModelWeights::drop(const Matrix& matrix) const noexcept {
  if (memory_.mapping == nullptr) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(matrix.data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(matrix.data) + matrix.bytes();
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // read-only file pages: nothing is lost
}

}  // namespace ull::cpu
