#include "cpu/tensor_loader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/allocation.h"

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

// E4M3 has one NaN per sign (0x7F, 0xFF); the decoder would read it as 480.
bool has_f8_nan(const uint8_t* data, size_t bytes) {
  uint8_t found = 0;
  for (size_t i = 0; i < bytes; ++i) found |= static_cast<uint8_t>((data[i] & 0x7F) == 0x7F);
  return found != 0;
}

}  // namespace

class TensorLoader::File {
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

TensorLoader::TensorLoader(const std::string& path, const std::map<std::string, TensorInfo>& tensors,
                           WeightStorage storage, TensorMemory& memory)
    : path_(path), tensors_(tensors), memory_(memory), file_(std::make_unique<File>(path)) {
  if (storage == WeightStorage::kMapped) {
    void* mapping = mmap(nullptr, file_->size(), PROT_READ, MAP_PRIVATE, file_->descriptor(), 0);
    if (mapping == MAP_FAILED) throw std::invalid_argument("path: cannot map " + path);
    memory.mapping = std::unique_ptr<uint8_t, UnmapFile>(static_cast<uint8_t*>(mapping), UnmapFile{file_->size()});
    return;
  }
  size_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    check_extent(name, tensor);
    if (tensor.shape.size() > 1) total += aligned_up(static_cast<size_t>(tensor.bytes));
  }
  memory.arena = allocate_for("weights", static_cast<double>(total), [&] {
    return AlignedArray<uint8_t>(total, /*touch=*/false);  // reading fills it
  });
}

TensorLoader::~TensorLoader() = default;

const uint8_t* TensorLoader::place(const std::string& name, const TensorInfo& tensor) {
  if (memory_.mapping != nullptr) return memory_.mapping.get() + tensor.offset;
  uint8_t* data = memory_.arena.data() + used_;
  const size_t bytes = static_cast<size_t>(tensor.bytes);
  file_->read(static_cast<size_t>(tensor.offset), bytes, data);
  used_ += aligned_up(bytes);
  if (tensor.format == Format::kF8 && has_f8_nan(data, bytes)) {
    throw std::invalid_argument("tensor " + name + ": holds NaN");
  }
  return data;
}

const TensorInfo& TensorLoader::find(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw std::invalid_argument("tensor " + name + ": missing");
  const TensorInfo& tensor = found->second;
  check_extent(name, tensor);
  if (tensor.shape != shape) {
    throw std::invalid_argument("tensor " + name + ": shape " + shape_text(tensor.shape) + ", expected " +
                                shape_text(shape));
  }
  return tensor;
}

AlignedArray<float> TensorLoader::vector(const std::string& name, int length, bool allow_bf16) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw std::invalid_argument("tensor " + name + ": missing");
  const Format format = found->second.format;
  if (format == Format::kF8 || (format == Format::kBf16 && !allow_bf16)) {
    throw std::invalid_argument("tensor " + name + ": dtype " + format_name(format) + " is not supported here");
  }
  const size_t element = format_bytes(format);
  const size_t stored = aligned_up(static_cast<size_t>(length) * element) / element;
  const TensorInfo& tensor = find(name, {static_cast<int64_t>(stored)});
  std::vector<uint8_t> raw(static_cast<size_t>(tensor.bytes));
  file_->read(static_cast<size_t>(tensor.offset), raw.size(), raw.data());
  AlignedArray<float> values(stored);
  for (size_t i = 0; i < stored; ++i) {
    if (format == Format::kBf16) {
      values[i] = widen_bf16(raw.data() + 2 * i);
    } else {
      std::memcpy(&values[i], raw.data() + 4 * i, sizeof(float));
    }
  }
  memory_.bytes += static_cast<int64_t>(stored * sizeof(float));
  return values;
}

std::vector<int32_t> TensorLoader::integers(const std::string& name, int length) {
  const AlignedArray<float> words = vector(name, length, /*allow_bf16=*/false);  // four bytes each, whatever they mean
  std::vector<int32_t> values(static_cast<size_t>(length));
  std::memcpy(values.data(), words.data(), values.size() * sizeof(int32_t));
  return values;
}

Matrix TensorLoader::matrix(const std::string& name, int rows, int tile_rows, int columns) {
  Matrix matrix;
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.tiles = tile_rows / kTileRows;
  const TensorInfo& tensor = find(name + ".weight", {matrix.tiles, columns, kTileRows});
  matrix.format = tensor.format;
  matrix.data = place(name + ".weight", tensor);
  memory_.bytes += tensor.bytes;
  if (matrix.format == Format::kF8) {
    matrix.scale = vector(name + ".scale", tile_rows, /*allow_bf16=*/false);
    for (size_t i = 0; i < matrix.scale.size(); ++i) matrix.scale[i] *= kF8OutputScale;
  }
  if (has(name + ".bias")) matrix.bias = vector(name + ".bias", tile_rows, /*allow_bf16=*/true);
  return matrix;
}

Matrix TensorLoader::matrix(const std::string& name, int rows, int columns) {
  return matrix(name, rows, (rows + kTileRows - 1) / kTileRows * kTileRows, columns);
}

RowTable TensorLoader::rows(const std::string& name, int rows, int columns) {
  const auto found = tensors_.find(name);
  const bool stored = found != tensors_.end() && !found->second.shape.empty();
  const TensorInfo& tensor =
      find(name, {stored ? std::max<int64_t>(found->second.shape[0], rows) : int64_t{rows}, columns});
  if (tensor.format == Format::kF8) throw std::invalid_argument("tensor " + name + ": dtype F8_E4M3 is not supported");
  const uint8_t* data = place(name, tensor);
  memory_.bytes += tensor.bytes;
  return {tensor.format, columns, data};
}

void RowTable::read(int row, float* out) const noexcept {
  const size_t element = format_bytes(format);
  const uint8_t* from = data + static_cast<size_t>(row) * static_cast<size_t>(columns) * element;
  if (format == Format::kF32) {
    std::memcpy(out, from, static_cast<size_t>(columns) * element);
    return;
  }
  for (int k = 0; k < columns; ++k, from += element) out[k] = widen_bf16(from);
}

void TensorLoader::check_extent(const std::string& name, const TensorInfo& tensor) const {
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
  if (static_cast<size_t>(tensor.offset) + static_cast<size_t>(tensor.bytes) > file_->size()) {
    throw std::invalid_argument("tensor " + name + ": reaches beyond the end of " + path_ + ", which is truncated");
  }
}

void UnmapFile::operator()(uint8_t* mapping) const noexcept { munmap(mapping, bytes); }

}  // namespace ull::cpu
