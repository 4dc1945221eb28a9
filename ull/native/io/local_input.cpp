#include "io/local_input.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace ull {

std::optional<uint32_t> LocalInput::length() const noexcept {
  if (filled_ < kHeader) return std::nullopt;
  const uint8_t* const at = bytes_.get();
  return at[0] | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}

bool LocalInput::complete() const noexcept {
  const std::optional<uint32_t> announced = length();
  return announced && filled_ >= kHeader + *announced;
}

size_t LocalInput::wanted() const noexcept {
  if (capacity_ == 0) return kChunk;
  if (filled_ < capacity_) return capacity_;
  return std::min(kHeader + size_t{length().value_or(kChunk)}, 2 * capacity_);
}

size_t LocalInput::growth() const noexcept { return capacity_ == 0 ? 0 : wanted() - capacity_; }

std::span<uint8_t> LocalInput::room() noexcept {
  const size_t capacity = wanted();
  if (capacity != capacity_) {
    std::unique_ptr<uint8_t[]> larger(new (std::nothrow) uint8_t[capacity]);
    if (larger == nullptr) return {};
    if (filled_ > 0) std::memcpy(larger.get(), bytes_.get(), filled_);
    bytes_ = std::move(larger);
    capacity_ = capacity;
  }
  return {bytes_.get() + filled_, capacity_ - filled_};
}

void LocalInput::drop(size_t bytes) noexcept {
  filled_ -= bytes;
  if (filled_ == 0 && capacity_ > kChunk) {
    bytes_.reset();
    capacity_ = 0;
  } else if (filled_ > 0) {
    std::memmove(bytes_.get(), bytes_.get() + bytes, filled_);
  }
}

}  // namespace ull
