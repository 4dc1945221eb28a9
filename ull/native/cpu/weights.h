// The weights of a model, ready for the kernels (tensor_loader.h says where they lie).
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "cpu/kernels/kernels.h"
#include "cpu/model_shape.h"
#include "cpu/tensor_loader.h"

namespace ull::cpu {

struct LayerWeights {
  AlignedArray<float> attention_norm;  // [hidden]
  AlignedArray<float> mlp_norm;        // [hidden]
  AlignedArray<float> query_norm;      // [head_dim] or empty
  AlignedArray<float> key_norm;        // [head_dim] or empty
  AlignedArray<float> kv_scale;        // [2 * kv_heads] of FP8 keys, then values, or empty
  Matrix qkv;                          // rows: query heads, key heads, value heads
  Matrix output;                       // [hidden, heads * head_dim]
  Matrix gate_up;                      // tiles alternate: 32 gate rows, the 32 up rows that belong to them
  Matrix down;                         // [hidden, intermediate]
};

class ModelWeights {
 public:
  // Throws std::invalid_argument for a missing, misshapen or truncated tensor and for a file that cannot be read.
  ModelWeights(const ModelSpec& spec, WeightStorage storage);

  [[nodiscard]] const LayerWeights& layer(int index) const noexcept { return layers_[static_cast<size_t>(index)]; }
  [[nodiscard]] const AlignedArray<float>& norm() const noexcept { return norm_; }
  [[nodiscard]] const Matrix& lm_head() const noexcept { return lm_head_; }
  [[nodiscard]] int64_t bytes() const noexcept { return memory_.bytes; }

  // out[hidden] = the embedding of `token`.
  void embed(int token, float* out) const noexcept;

  // kMapped: tells the kernel that a layer's (or the lm_head's) pages are no longer needed.
  void drop_layer(int index) const noexcept;
  void drop(const Matrix& matrix) const noexcept;

 private:
  std::vector<LayerWeights> layers_;
  AlignedArray<float> norm_;
  Matrix lm_head_;
  int hidden_ = 0;
  RowTable embedding_;  // [vocabulary][hidden]; without data: gather from lm_head_
  TensorMemory memory_;
};

}  // namespace ull::cpu
