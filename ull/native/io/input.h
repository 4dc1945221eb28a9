// What a connection has received and not yet passed on: the beginning of a message, and at most a chunk of what
// follows. Grows only as bytes arrive, so that a lying length costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace ull {

class Input {
 public:
  static constexpr size_t kChunk = 4096;  // bytes that are read ahead

  // The first `bytes` are needed before anything can be done with them; more than there are.
  void want(size_t bytes) noexcept { wanted_ = bytes; }
  // Room for the next read: at least one byte, never beyond a long message's end. Empty if memory is short.
  [[nodiscard]] std::span<uint8_t> room() noexcept;
  void add(size_t bytes) noexcept { filled_ += bytes; }
  void drop(size_t bytes) noexcept;  // the first `bytes`; a large buffer is given back once it is empty

  [[nodiscard]] std::span<const uint8_t> bytes() const noexcept { return {bytes_.get() + begin_, filled_}; }
  [[nodiscard]] size_t filled() const noexcept { return filled_; }
  // Bytes allocated beyond the chunk, and those that room() would add.
  [[nodiscard]] size_t large() const noexcept { return capacity_ > kChunk ? capacity_ - kChunk : 0; }
  [[nodiscard]] size_t growth() const noexcept { return capacity_ == 0 ? 0 : capacity_wanted() - capacity_; }

 private:
  [[nodiscard]] size_t capacity_wanted() const noexcept;

  std::unique_ptr<uint8_t[]> bytes_;
  size_t capacity_ = 0;
  size_t begin_ = 0;  // of what is filled
  size_t filled_ = 0;
  size_t wanted_ = 0;
};

}  // namespace ull
