// What a bundle says about a model: its dimensions and where its tensors lie. Plain data, checked by validate() and
// by ModelWeights; errors are std::invalid_argument naming the field or tensor.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "exec/cpu/kernels.h"

namespace ull::cpu {

struct TensorInfo {
  int64_t offset = 0;  // bytes from the start of the file, a multiple of 64
  int64_t bytes = 0;
  Format format = Format::kF32;
  std::vector<int64_t> shape;
};

struct ModelSpec {
  int hidden = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;  // even
  int intermediate = 0;
  int vocabulary = 0;  // rows of the embedding
  int context = 0;     // tokens a session may hold
  float rms_epsilon = 0.0F;
  bool qk_norm = false;
  Format kv_format = Format::kBf16;
  std::vector<float> inv_freq;  // [head_dim / 2] radians per position, rope scaling applied
  std::vector<int> windows;     // [layers] tokens a query sees, itself included; 0: all
  std::string path;             // weights.safetensors
  std::map<std::string, TensorInfo> tensors;

  [[nodiscard]] int query_rows() const noexcept { return heads * head_dim; }
  [[nodiscard]] int kv_rows() const noexcept { return kv_heads * head_dim; }
  [[nodiscard]] int qkv_rows() const noexcept { return query_rows() + 2 * kv_rows(); }
  [[nodiscard]] int group() const noexcept { return heads / kv_heads; }
};

void validate(const ModelSpec& spec);

}  // namespace ull::cpu
