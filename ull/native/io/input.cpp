#include "io/input.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace ull {

// What is read ahead of a message is moved to the front before the buffer grows.
size_t Input::capacity_wanted() const noexcept {
  if (capacity_ == 0) return kChunk;
  if (filled_ < capacity_) return capacity_;
  return std::min(std::max(wanted_, filled_ + 1), 2 * capacity_);
}

std::span<uint8_t> Input::room() noexcept {
  if (const size_t capacity = capacity_wanted(); capacity != capacity_) {
    std::unique_ptr<uint8_t[]> larger(new (std::nothrow) uint8_t[capacity]);
    if (larger == nullptr) return {};
    if (filled_ > 0) std::memcpy(larger.get(), bytes_.get() + begin_, filled_);
    bytes_ = std::move(larger);
    capacity_ = capacity;
    begin_ = 0;
  } else if (begin_ + filled_ == capacity_) {
    std::memmove(bytes_.get(), bytes_.get() + begin_, filled_);
    begin_ = 0;
  }
  return {bytes_.get() + begin_ + filled_, capacity_ - begin_ - filled_};
}

void Input::drop(size_t bytes) noexcept {
  begin_ += bytes;
  filled_ -= bytes;
  if (filled_ > 0) return;
  begin_ = 0;
  if (capacity_ <= kChunk) return;
  bytes_.reset();
  capacity_ = 0;
}

}  // namespace ull
