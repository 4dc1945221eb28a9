#include "exec/cpu/weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace ull::cpu {
namespace {

constexpr size_t kAlignment = 64;  // bytes; every tensor starts and ends on a multiple of it

size_t aligned_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

const char* format_name(Format format) {
  return format == Format::kF8 ? "F8_E4M3" : format == Format::kBf16 ? "BF16" : "F32";
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

float widen_bf16(const uint8_t* p) {
  return std::bit_cast<float>(static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24);
}

// E4M3 has one NaN per sign (0x7F, 0xFF); the decoder would read it as 480.
bool has_f8_nan(const uint8_t* data, size_t bytes) {
  uint8_t found = 0;
  for (size_t i = 0; i < bytes; ++i) found |= static_cast<uint8_t>((data[i] & 0x7F) == 0x7F);
  return found != 0;
}

class File {
 public:
  explicit File(const std::string& path) : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status{};
    if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) {
      const int error = errno;
      close_file();
      throw std::invalid_argument("path: cannot open " + path + ": " + std::strerror(error));
    }
    size_ = static_cast<size_t>(status.st_size);
  }
  ~File() { close_file(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] int descriptor() const { return descriptor_; }

  void read(size_t offset, size_t bytes, uint8_t* out) const {
    while (bytes > 0) {
      const ssize_t count = pread(descriptor_, out, bytes, static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw std::invalid_argument("path: cannot read " + path_ + " at byte " + std::to_string(offset));
      offset += static_cast<size_t>(count);
      out += count;
      bytes -= static_cast<size_t>(count);
    }
  }

 private:
  void close_file() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  std::string path_;
  int descriptor_;
  size_t size_ = 0;
};

}  // namespace

void validate(const ModelSpec& spec) {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
  };
  constexpr int kLimit = 1 << 24;
  const auto sane = [](int value) { return value >= 1 && value <= kLimit; };
  require(sane(spec.hidden), "hidden: must be 1 to 2^24");
  require(sane(spec.layers), "layers: must be 1 to 2^24");
  require(sane(spec.kv_heads), "kv_heads: must be 1 to 2^24");
  require(sane(spec.heads) && spec.heads % spec.kv_heads == 0, "heads: must be a multiple of kv_heads");
  require(sane(spec.head_dim) && spec.head_dim % 2 == 0 && spec.head_dim <= 1024, "head_dim: must be even, 2 to 1024");
  require(static_cast<int64_t>(spec.heads) * spec.head_dim <= kLimit, "heads * head_dim: must be at most 2^24");
  require(sane(spec.intermediate), "intermediate: must be 1 to 2^24");
  require(sane(spec.vocabulary), "vocabulary: must be 1 to 2^24");
  require(sane(spec.context), "context: must be 1 to 2^24 tokens");
  require(spec.rms_epsilon >= 0.0F && spec.rms_epsilon < 1.0F, "rms_epsilon: must be in [0, 1)");
  require(spec.kv_format != Format::kF8, "kv_dtype: must be bf16 or f32");
  require(spec.inv_freq.size() == static_cast<size_t>(spec.head_dim / 2), "inv_freq: must hold head_dim / 2 values");
  require(spec.windows.size() == static_cast<size_t>(spec.layers), "windows: must hold one value per layer");
  for (const int window : spec.windows) require(window >= 0, "windows: must not be negative");
}

// Finds tensors by name, checks them, and puts them where they belong.
class ModelWeights::Loader {
 public:
  Loader(const ModelSpec& spec, WeightStorage storage, ModelWeights& weights)
      : spec_(spec), weights_(weights), file_(spec.path) {
    if (storage == WeightStorage::kMapped) {
      void* mapping = mmap(nullptr, file_.size(), PROT_READ, MAP_PRIVATE, file_.descriptor(), 0);
      if (mapping == MAP_FAILED) throw std::invalid_argument("path: cannot map " + spec.path);
      weights.mapping_ = std::unique_ptr<uint8_t, UnmapFile>(static_cast<uint8_t*>(mapping), UnmapFile{file_.size()});
      return;
    }
    size_t total = 0;
    for (const auto& [name, tensor] : spec.tensors) {
      check_extent(name, tensor);
      if (tensor.shape.size() > 1) total += aligned_up(static_cast<size_t>(tensor.bytes));
    }
    weights.arena_ = AlignedArray<uint8_t>(total, /*touch=*/false);  // reading fills it
  }

  [[nodiscard]] bool has(const std::string& name) const { return spec_.tensors.contains(name); }

  // The tensor's bytes, in the arena or the mapping.
  const uint8_t* place(const std::string& name, const TensorInfo& tensor) {
    if (weights_.mapping_ != nullptr) return weights_.mapping_.get() + tensor.offset;
    uint8_t* data = weights_.arena_.data() + used_;
    const size_t bytes = static_cast<size_t>(tensor.bytes);
    file_.read(static_cast<size_t>(tensor.offset), bytes, data);
    used_ += aligned_up(bytes);
    if (tensor.format == Format::kF8 && has_f8_nan(data, bytes)) {
      throw std::invalid_argument("tensor " + name + ": holds NaN");
    }
    return data;
  }

  const TensorInfo& find(const std::string& name, const std::vector<int64_t>& shape) const {
    const auto found = spec_.tensors.find(name);
    if (found == spec_.tensors.end()) throw std::invalid_argument("tensor " + name + ": missing");
    const TensorInfo& tensor = found->second;
    check_extent(name, tensor);
    if (tensor.shape != shape) {
      throw std::invalid_argument("tensor " + name + ": shape " + shape_text(tensor.shape) + ", expected " +
                                  shape_text(shape));
    }
    return tensor;
  }

  // A one-dimensional tensor as f32, its padding included.
  AlignedArray<float> vector(const std::string& name, int length, bool allow_bf16) {
    const auto found = spec_.tensors.find(name);
    if (found == spec_.tensors.end()) throw std::invalid_argument("tensor " + name + ": missing");
    const Format format = found->second.format;
    if (format == Format::kF8 || (format == Format::kBf16 && !allow_bf16)) {
      throw std::invalid_argument("tensor " + name + ": dtype " + format_name(format) + " is not supported here");
    }
    const size_t element = format_bytes(format);
    const size_t stored = aligned_up(static_cast<size_t>(length) * element) / element;
    const TensorInfo& tensor = find(name, {static_cast<int64_t>(stored)});
    std::vector<uint8_t> raw(static_cast<size_t>(tensor.bytes));
    file_.read(static_cast<size_t>(tensor.offset), raw.size(), raw.data());
    AlignedArray<float> values(stored);
    for (size_t i = 0; i < stored; ++i) {
      if (format == Format::kBf16) {
        values[i] = widen_bf16(raw.data() + 2 * i);
      } else {
        std::memcpy(&values[i], raw.data() + 4 * i, sizeof(float));
      }
    }
    weights_.bytes_ += static_cast<int64_t>(stored * sizeof(float));
    return values;
  }

  // X.weight with its X.scale and, where present, X.bias. `rows`: logical; tile_rows: stored, a multiple of 32.
  Matrix matrix(const std::string& name, int rows, int tile_rows, int columns) {
    Matrix matrix;
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.tiles = tile_rows / kTileRows;
    const TensorInfo& tensor = find(name + ".weight", {matrix.tiles, columns, kTileRows});
    matrix.format = tensor.format;
    matrix.data = place(name + ".weight", tensor);
    weights_.bytes_ += tensor.bytes;
    if (matrix.format == Format::kF8) {
      matrix.scale = vector(name + ".scale", tile_rows, /*allow_bf16=*/false);
      for (size_t i = 0; i < matrix.scale.size(); ++i) matrix.scale[i] *= kF8OutputScale;
    }
    if (has(name + ".bias")) matrix.bias = vector(name + ".bias", tile_rows, /*allow_bf16=*/true);
    return matrix;
  }

  Matrix matrix(const std::string& name, int rows, int columns) {
    return matrix(name, rows, (rows + kTileRows - 1) / kTileRows * kTileRows, columns);
  }

 private:
  void check_extent(const std::string& name, const TensorInfo& tensor) const {
    int64_t elements = 1;
    for (const int64_t extent : tensor.shape) {
      if (extent < 0 || (extent > 0 && elements > (int64_t{1} << 46) / extent)) {
        throw std::invalid_argument("tensor " + name + ": shape " + shape_text(tensor.shape) + " is impossible");
      }
      elements *= extent;
    }
    if (elements * static_cast<int64_t>(format_bytes(tensor.format)) != tensor.bytes) {
      throw std::invalid_argument("tensor " + name + ": " + std::to_string(tensor.bytes) + " bytes do not fit shape " +
                                  shape_text(tensor.shape) + " of " + format_name(tensor.format));
    }
    if (tensor.offset < 0 || tensor.offset % static_cast<int64_t>(kAlignment) != 0) {
      throw std::invalid_argument("tensor " + name + ": offset " + std::to_string(tensor.offset) +
                                  " is not a multiple of 64");
    }
    if (static_cast<size_t>(tensor.offset) + static_cast<size_t>(tensor.bytes) > file_.size()) {
      throw std::invalid_argument("tensor " + name + ": reaches beyond the end of " + spec_.path +
                                  ", which is truncated");
    }
  }

  const ModelSpec& spec_;
  ModelWeights& weights_;
  File file_;
  size_t used_ = 0;  // bytes of the arena
};

ModelWeights::ModelWeights(const ModelSpec& spec, WeightStorage storage) : hidden_(spec.hidden) {
  validate(spec);
  Loader load(spec, storage, *this);
  for (int i = 0; i < spec.layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    LayerWeights layer;
    layer.attention_norm = load.vector(prefix + "attn_norm", spec.hidden, true);
    layer.mlp_norm = load.vector(prefix + "mlp_norm", spec.hidden, true);
    if (spec.qk_norm) {
      layer.query_norm = load.vector(prefix + "q_norm", spec.head_dim, true);
      layer.key_norm = load.vector(prefix + "k_norm", spec.head_dim, true);
    }
    layer.qkv = load.matrix(prefix + "qkv", spec.qkv_rows(), spec.hidden);
    layer.output = load.matrix(prefix + "o", spec.hidden, spec.query_rows());
    const int half = (spec.intermediate + kTileRows - 1) / kTileRows * kTileRows;
    layer.gate_up = load.matrix(prefix + "gate_up", 2 * spec.intermediate, 2 * half, spec.hidden);
    layer.down = load.matrix(prefix + "down", spec.hidden, spec.intermediate);
    layers_.push_back(std::move(layer));
  }
  norm_ = load.vector("norm", spec.hidden, true);
  lm_head_ = load.matrix("lm_head", spec.vocabulary, spec.hidden);
  if (load.has("embed.weight")) {
    // Rows may have been added to pad the tensor's bytes.
    const auto& stored = spec.tensors.at("embed.weight").shape;
    const int64_t rows = stored.empty() ? 0 : std::max<int64_t>(stored[0], spec.vocabulary);
    const TensorInfo& tensor = load.find("embed.weight", {rows, spec.hidden});
    if (tensor.format == Format::kF8)
      throw std::invalid_argument("tensor embed.weight: dtype F8_E4M3 is not supported");
    embedding_format_ = tensor.format;
    embedding_ = load.place("embed.weight", tensor);
    bytes_ += tensor.bytes;
  } else if (lm_head_.format == Format::kF8) {
    throw std::invalid_argument("tensor embed.weight: missing, and an F8_E4M3 lm_head cannot stand in for it");
  }
}

void UnmapFile::operator()(uint8_t* mapping) const noexcept { munmap(mapping, bytes); }

void ModelWeights::embed(int token, float* out) const noexcept {
  const bool gather = embedding_ == nullptr;
  const Format format = gather ? lm_head_.format : embedding_format_;
  const size_t element = format_bytes(format);
  const uint8_t* row = embedding_ + static_cast<size_t>(token) * static_cast<size_t>(hidden_) * element;
  size_t step = element;
  if (gather) {
    const int r = token % kTileRows;
    const int position = format == Format::kF32 ? r : r < kTileRows / 2 ? 2 * r : 2 * (r - kTileRows / 2) + 1;
    row = lm_head_.data + static_cast<size_t>(token / kTileRows) * lm_head_.tile_bytes() +
          static_cast<size_t>(position) * element;
    step = kTileRows * element;
  }
  for (int k = 0; k < hidden_; ++k, row += step) {
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
  if (mapping_ == nullptr) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(matrix.data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(matrix.data) + matrix.bytes();
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // read-only file pages: nothing is lost
}

}  // namespace ull::cpu
