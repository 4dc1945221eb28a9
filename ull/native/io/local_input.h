// What a connection of the local transport has received and not yet passed on: a message's u32 length (little endian),
// its payload, and at most a chunk of what follows. Grows only as bytes arrive, so that a lying length costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace ull {

class LocalInput {
 public:
  static constexpr size_t kHeader = 4;    // bytes of a message's length
  static constexpr size_t kChunk = 4096;  // bytes that are read ahead

  // Room for the next read: at least one byte, never beyond a long message's end. Empty if memory is short.
  [[nodiscard]] std::span<uint8_t> room() noexcept;
  void add(size_t bytes) noexcept { filled_ += bytes; }
  // Whether room() would allocate beyond the chunk.
  [[nodiscard]] size_t growth() const noexcept;

  [[nodiscard]] std::span<const uint8_t> bytes() const noexcept { return {bytes_.get(), filled_}; }
  [[nodiscard]] std::optional<uint32_t> length() const noexcept;  // the announced one, as soon as it is known
  [[nodiscard]] bool complete() const noexcept;
  [[nodiscard]] std::span<const uint8_t> payload() const noexcept { return bytes().subspan(kHeader, *length()); }
  void drop(size_t bytes) noexcept;  // the first `bytes`; a large buffer is given back once it is empty

  [[nodiscard]] size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] size_t filled() const noexcept { return filled_; }

 private:
  [[nodiscard]] size_t wanted() const noexcept;  // capacity that the next read needs

  std::unique_ptr<uint8_t[]> bytes_;
  size_t capacity_ = 0;
  size_t filled_ = 0;
};

}  // namespace ull
