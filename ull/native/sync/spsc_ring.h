// A bounded queue between exactly one producer thread and one consumer thread; wait-free, no allocation after
// construction. After rigtorp/SPSCQueue: each side's index stands on its own cache line beside a cached copy of the
// other side's, so that an uncontended operation touches no foreign line.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>

#include "base/cpu.h"

namespace ull {

template <typename T>
class SpscRing {
  static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>);

 public:
  // Holds at least `capacity` elements (rounded up to a power of two).
  explicit SpscRing(size_t capacity)
      : mask_(std::bit_ceil(capacity < 2 ? size_t{2} : capacity) - 1), elements_(std::make_unique<T[]>(mask_ + 1)) {}
  SpscRing(const SpscRing&) = delete;
  SpscRing& operator=(const SpscRing&) = delete;

  [[nodiscard]] size_t capacity() const noexcept { return mask_ + 1; }

  // Producer. False if the push would leave fewer than `keep` elements' room (0: if the ring is full).
  [[nodiscard]] bool try_push(const T& element, size_t keep = 0) noexcept {
    const size_t tail = producer_.index.load(std::memory_order_relaxed);
    if (tail - producer_.other + keep > mask_) {
      producer_.other = consumer_.index.load(std::memory_order_acquire);
      if (tail - producer_.other + keep > mask_) return false;
    }
    elements_[tail & mask_] = element;
    producer_.index.store(tail + 1, std::memory_order_release);
    return true;
  }

  // Consumer. False if the ring is empty.
  [[nodiscard]] bool try_pop(T& element) noexcept {
    const size_t head = consumer_.index.load(std::memory_order_relaxed);
    if (head == consumer_.other) {
      consumer_.other = producer_.index.load(std::memory_order_acquire);
      if (head == consumer_.other) return false;
    }
    element = elements_[head & mask_];
    consumer_.index.store(head + 1, std::memory_order_release);
    return true;
  }

  // Consumer.
  [[nodiscard]] bool empty() const noexcept {
    return consumer_.index.load(std::memory_order_relaxed) == producer_.index.load(std::memory_order_acquire);
  }

 private:
  // One side of the ring: its own index (counts elements ever moved, wraps at 2^64) and what it last saw of the other.
  struct alignas(kCacheLine) Side {
    std::atomic<size_t> index{0};
    size_t other = 0;
  };
  static_assert(sizeof(Side) == kCacheLine && alignof(Side) == kCacheLine);
  static_assert(std::atomic<size_t>::is_always_lock_free);

  const size_t mask_;
  const std::unique_ptr<T[]> elements_;  // [mask_ + 1]
  Side producer_;
  Side consumer_;
};

}  // namespace ull
