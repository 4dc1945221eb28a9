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
  Format kv_format = Format::kBf16;
  std::vector<float> inv_freq;    // [head_dim / 2] radians per position, rope scaling applied
  float attention_factor = 1.0F;  // on cosines and sines of the rotary embedding
  std::vector<int> windows;       // [layers] tokens a query sees, itself included; 0: all
  std::string path;               // weights.safetensors
  std::map<std::string, TensorInfo> tensors;
  // What a bundle may add for speculative decoding; null: it does not.
  std::shared_ptr<const MedusaSpec> medusa;
  std::shared_ptr<const ModelSpec> draft;  // names of tensors without the prefix "draft."

  [[nodiscard]] int query_rows() const noexcept { return heads * head_dim; }
  [[nodiscard]] int kv_rows() const noexcept { return kv_heads * head_dim; }
  [[nodiscard]] int qkv_rows() const noexcept { return query_rows() + 2 * kv_rows(); }
  [[nodiscard]] int group() const noexcept { return heads / kv_heads; }
};

// Checks the dimensions, those of medusa and draft included.
void validate(const ModelSpec& spec);

}  // namespace ull::cpu
