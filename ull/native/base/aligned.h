// A fixed-size array whose storage starts on a cache line, is zeroed and touched when it is made, and uses huge pages
// where the kernel offers them. Not for the hot path: construction allocates and may throw std::bad_alloc.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "base/cpu.h"

namespace ull {

inline constexpr size_t kHugePage = size_t{2} << 20;  // bytes

template <typename T>
class AlignedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  AlignedArray() = default;

  // touch: write zeros now, so that every page is resident. Without it the kernel hands out zero pages when first used.
  explicit AlignedArray(size_t count, bool touch = true) : count_(count) {
    if (count == 0) return;
    const size_t alignment = count * sizeof(T) >= kHugePage ? kHugePage : size_t{kCacheLine};
    const size_t bytes = (count * sizeof(T) + alignment - 1) / alignment * alignment;
    data_ = static_cast<T*>(std::aligned_alloc(alignment, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    if (alignment == kHugePage) (void)madvise(data_, bytes, MADV_HUGEPAGE);
    if (touch) std::memset(static_cast<void*>(data_), 0, bytes);
  }

  AlignedArray(AlignedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  AlignedArray& operator=(AlignedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;
  ~AlignedArray() { std::free(data_); }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] size_t size() const noexcept { return count_; }
  [[nodiscard]] T& operator[](size_t index) noexcept { return data_[index]; }
  [[nodiscard]] const T& operator[](size_t index) const noexcept { return data_[index]; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace ull
