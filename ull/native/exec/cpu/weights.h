// The weights of a model, ready for the kernels: every matrix in one arena of huge pages, or, for a single pass over
// the model (evaluate), in the mapped file. Small tensors (norms, scales, biases) are always copied, as f32.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/aligned.h"
#include "exec/cpu/kernels.h"
#include "exec/cpu/model_spec.h"

namespace ull::cpu {

// A linear layer, packed in row tiles (kernels.h).
struct Matrix {
  Format format = Format::kF32;
  int rows = 0;     // logical rows; tiles * 32 are stored
  int columns = 0;  // K
  int tiles = 0;
  const uint8_t* data = nullptr;  // [tiles][columns][32]
  AlignedArray<float> scale;      // [tiles * 32] kF8 only: the stored scale times kF8OutputScale
  AlignedArray<float> bias;       // [tiles * 32] or empty

  [[nodiscard]] size_t tile_bytes() const noexcept {
    return static_cast<size_t>(columns) * kTileRows * format_bytes(format);
  }
  [[nodiscard]] size_t bytes() const noexcept { return static_cast<size_t>(tiles) * tile_bytes(); }
  // What x is multiplied by before it meets this matrix.
  [[nodiscard]] float input_scale() const noexcept { return format == Format::kF8 ? kF8InputScale : 1.0F; }
};

struct LayerWeights {
  AlignedArray<float> attention_norm;  // [hidden]
  AlignedArray<float> mlp_norm;        // [hidden]
  AlignedArray<float> query_norm;      // [head_dim] or empty
  AlignedArray<float> key_norm;        // [head_dim] or empty
  Matrix qkv;                          // rows: query heads, key heads, value heads
  Matrix output;                       // [hidden, heads * head_dim]
  Matrix gate_up;                      // tiles alternate: 32 gate rows, the 32 up rows that belong to them
  Matrix down;                         // [hidden, intermediate]
};

enum class WeightStorage : uint8_t { kResident, kMapped };

struct UnmapFile {
  size_t bytes = 0;
  void operator()(uint8_t* mapping) const noexcept;
};

class ModelWeights {
 public:
  // Throws std::invalid_argument for a missing, misshapen or truncated tensor and for a file that cannot be read.
  ModelWeights(const ModelSpec& spec, WeightStorage storage);

  [[nodiscard]] const LayerWeights& layer(int index) const noexcept { return layers_[static_cast<size_t>(index)]; }
  [[nodiscard]] const AlignedArray<float>& norm() const noexcept { return norm_; }
  [[nodiscard]] const Matrix& lm_head() const noexcept { return lm_head_; }
  [[nodiscard]] int64_t bytes() const noexcept { return bytes_; }

  // out[hidden] = the embedding of `token`.
  void embed(int token, float* out) const noexcept;

  // kMapped: tells the kernel that a layer's (or the lm_head's) pages are no longer needed.
  void drop_layer(int index) const noexcept;
  void drop(const Matrix& matrix) const noexcept;

 private:
  class Loader;

  std::vector<LayerWeights> layers_;
  AlignedArray<float> norm_;
  Matrix lm_head_;
  int hidden_ = 0;
  Format embedding_format_ = Format::kF32;
  const uint8_t* embedding_ = nullptr;           // [vocabulary][hidden]; null: gather from lm_head_
  AlignedArray<uint8_t> arena_;                  // kResident
  std::unique_ptr<uint8_t, UnmapFile> mapping_;  // kMapped: the file
  int64_t bytes_ = 0;
};

}  // namespace ull::cpu
