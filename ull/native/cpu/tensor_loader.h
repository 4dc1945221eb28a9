// Tensors of a bundle's weights file, checked and put where the kernels want them: every matrix in one arena of huge
// pages, or, for a single pass over a model (evaluate), in the mapped file. Small tensors (norms, scales, biases) are
// always copied, as f32. At load time only.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/aligned.h"
#include "cpu/kernels/kernels.h"
#include "cpu/model_shape.h"

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
  // The 32 scales or biases of a tile, or null.
  [[nodiscard]] const float* tile_scale(int tile) const noexcept { return tile_values(scale, tile); }
  [[nodiscard]] const float* tile_bias(int tile) const noexcept { return tile_values(bias, tile); }

 private:
  [[nodiscard]] static const float* tile_values(const AlignedArray<float>& values, int tile) noexcept {
    return values.size() == 0 ? nullptr : values.data() + static_cast<size_t>(tile) * kTileRows;
  }
};

// Vectors by number, one after another: an embedding.
struct RowTable {
  Format format = Format::kF32;  // or kBf16
  int columns = 0;
  const uint8_t* data = nullptr;  // [rows][columns]

  // Row `row` -> out [columns], as f32.
  void read(int row, float* out) const noexcept;
};

enum class WeightStorage : uint8_t { kResident, kMapped };

struct UnmapFile {
  size_t bytes = 0;
  void operator()(uint8_t* mapping) const noexcept;
};

// Two little-endian bytes -> float.
[[nodiscard]] inline float widen_bf16(const uint8_t* p) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24);
}

// What keeps loaded matrices alive.
struct TensorMemory {
  AlignedArray<uint8_t> arena;                  // kResident
  std::unique_ptr<uint8_t, UnmapFile> mapping;  // kMapped: the file
  int64_t bytes = 0;                            // of all tensors loaded
};

// Finds tensors by name, checks them, and puts them where they belong. Throws std::invalid_argument for a missing,
// misshapen or truncated tensor and for a file that cannot be read.
class TensorLoader {
 public:
  // `tensors` and `memory` must outlive the loader.
  TensorLoader(const std::string& path, const std::map<std::string, TensorInfo>& tensors, WeightStorage storage,
               TensorMemory& memory);
  ~TensorLoader();
  TensorLoader(const TensorLoader&) = delete;
  TensorLoader& operator=(const TensorLoader&) = delete;

  [[nodiscard]] bool has(const std::string& name) const { return tensors_.contains(name); }
  [[nodiscard]] const TensorInfo& find(const std::string& name, const std::vector<int64_t>& shape) const;
  // The tensor's bytes, in the arena or the mapping.
  const uint8_t* place(const std::string& name, const TensorInfo& tensor);
  // A one-dimensional tensor as f32, its padding included.
  AlignedArray<float> vector(const std::string& name, int length, bool allow_bf16);
  // A one-dimensional tensor of i32, without its padding.
  std::vector<int32_t> integers(const std::string& name, int length);
  // X.weight with its X.scale and, where present, X.bias. `rows`: logical; tile_rows: stored, a multiple of 32.
  Matrix matrix(const std::string& name, int rows, int tile_rows, int columns);
  Matrix matrix(const std::string& name, int rows, int columns);
  // A tensor of `rows` rows in bf16 or f32; some may have been added to pad its bytes.
  RowTable rows(const std::string& name, int rows, int columns);

 private:
  class File;

  void check_extent(const std::string& name, const TensorInfo& tensor) const;

  const std::string& path_;
  const std::map<std::string, TensorInfo>& tensors_;
  TensorMemory& memory_;
  std::unique_ptr<File> file_;
  size_t used_ = 0;  // bytes of the arena
};

}  // namespace ull::cpu
