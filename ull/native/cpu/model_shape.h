// What a bundle says about a model: its dimensions and where its tensors lie. Plain data, checked by validate() and
// by ModelWeights; errors are std::invalid_argument naming the field or tensor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace ull::cpu {

inline constexpr int kMaxDflashBlock = 32;  // positions of a DFlash head's pass
inline constexpr int kMaxMarkovRank = 4096;
inline constexpr int kMaxDimension = 1 << 24;  // of what a model counts, the tokens of its context among them

struct TensorInfo {
  int64_t offset = 0;  // bytes from the start of the file, a multiple of 64
  int64_t bytes = 0;
  Format format = Format::kF32;
  std::vector<int64_t> shape;
};

// Medusa heads of a model: tensors medusa.{head}.{layer}.weight [hidden, hidden] with .bias, and for heads with an
// lm_head of their own medusa.{head}.lm_head.weight [vocabulary, hidden].
struct MedusaSpec {
  int heads = 0;
  int layers = 0;            // residual blocks per head
  bool own_lm_head = false;  // version 1; version 2 shares the model's
  std::map<std::string, TensorInfo> tensors;
};

struct EagleSpec;
struct DflashSpec;

struct ModelSpec {
  int hidden = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;  // even
  int intermediate = 0;
  int vocabulary = 0;  // rows of the embedding
  int context = 0;     // tokens a sequence may hold
  float rms_epsilon = 0.0F;
  bool qk_norm = false;
  Format kv_format = Format::kBf16;  // kF8: as a GPU's FP8 pages hold them (kv_cache.h), with layers.I.kv_scale
  std::vector<float> inv_freq;       // [head_dim / 2] radians per position, rope scaling applied
  float attention_factor = 1.0F;     // on cosines and sines of the rotary embedding
  std::vector<int> windows;          // [layers] tokens a query sees, itself included; 0: all
  std::string path;                  // weights.safetensors
  std::map<std::string, TensorInfo> tensors;
  bool body = false;  // the layers and final norm of a head: embedding and lm_head may be missing
  // What a bundle may add for speculative decoding; null: it does not.
  std::shared_ptr<const MedusaSpec> medusa;
  std::shared_ptr<const ModelSpec> draft;  // names of tensors without the prefix "draft."
  std::shared_ptr<const EagleSpec> eagle;
  std::shared_ptr<const DflashSpec> dflash;

  [[nodiscard]] int query_rows() const noexcept { return heads * head_dim; }
  [[nodiscard]] int kv_rows() const noexcept { return kv_heads * head_dim; }
  [[nodiscard]] int qkv_rows() const noexcept { return query_rows() + 2 * kv_rows(); }
  [[nodiscard]] int group() const noexcept { return heads / kv_heads; }
  [[nodiscard]] Format page_format() const noexcept { return kv_format == Format::kF8 ? Format::kBf16 : kv_format; }
};

// An EAGLE-3 head. `model`: its own dimensions, one layer, `vocabulary` the rows of its lm_head; names of tensors
// without the prefix "eagle.":
//   fc.weight [hidden, taps * target hidden]; tap_norm.I [target hidden] or tap_norm [taps * target hidden]
//   layers.0.attn_norm [hidden] of the embedding, layers.0.hidden_norm [hidden] of the hidden state,
//   layers.0.qkv [qkv_rows, 2 * hidden] embedding first, .o, .mlp_norm, .gate_up, .down as a model's
//   norm [hidden], lm_head [vocabulary, hidden], embed.weight [target vocabulary, hidden] if own_embedding
//   d2t [vocabulary] i32: the target's token of its own token, if mapped
struct EagleSpec {
  ModelSpec model;
  std::vector<int> taps;
  bool norm_before_residual = false;
  bool norm_output = false;
  enum class TapNorm : uint8_t { kNone, kEach, kAll } tap_norm = TapNorm::kNone;
  bool own_embedding = false;
  bool mapped = false;
};

// A DFlash or DSpark head, likewise with the prefix "dflash.":
//   fc.weight [hidden, taps * target hidden], hidden_norm [hidden] of its output
//   layers.I.attn_norm, .qkv, .q_norm, .k_norm, .o, .mlp_norm, .gate_up, .down as a model's with QK norm
//   norm [hidden]; lm_head [vocabulary, hidden] if own_lm_head; embed.weight and d2t as an EAGLE head's
//   markov.embed [target vocabulary, rank] and markov.head [vocabulary, rank], both row by row in bf16; for the gated
//   kind markov.gate [rank, hidden + rank]
//   confidence.weight [hidden (+ rank)] f32, confidence.bias [1] f32
struct DflashSpec {
  ModelSpec model;
  std::vector<int> taps;
  int block = 0;
  int32_t mask_token = 0;
  bool anchor_predicts = false;
  bool own_embedding = false;
  bool own_lm_head = false;
  bool mapped = false;
  int markov = 0;  // rank; 0: there is no Markov term
  bool gated = false;
  bool confidence = false;
  bool confidence_reads_markov = false;
};

// Checks the dimensions, those of what drafts included.
void validate(const ModelSpec& spec);

}  // namespace ull::cpu
