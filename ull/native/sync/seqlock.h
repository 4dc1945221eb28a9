// A value that one thread publishes and any thread reads whole, without ever making the writer wait.
// The words are relaxed atomics, so a reader that races with the writer is defined behaviour; the sequence tells it
// to try again (Boehm, "Can seqlocks get along with programming language memory models?", 2012, with RMW-free reads:
// the acquire loads of the words order them before the second look at the sequence).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <thread>
#include <type_traits>

#include "base/cpu.h"

namespace ull {

template <typename T>
class Seqlock {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);

 public:
  // The one writer.
  void store(const T& value) noexcept {
    const auto words = std::bit_cast<std::array<uint64_t, kWords>>(value);
    const uint64_t sequence = sequence_.load(std::memory_order_relaxed);
    sequence_.store(sequence + 1, std::memory_order_relaxed);
    // Release: whoever reads one of these words and then the sequence sees at least the odd value above.
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
    sequence_.store(sequence + 2, std::memory_order_release);
  }

  // Any thread. One that is kept waiting gives its core away now and then: the writer that it has interrupted in the
  // middle of a store() may be waiting for just that core.
  [[nodiscard]] T load() const noexcept {
    std::array<uint64_t, kWords> words;
    for (int attempt = 1;; ++attempt) {
      const uint64_t before = sequence_.load(std::memory_order_acquire);
      for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
      const uint64_t after = sequence_.load(std::memory_order_relaxed);
      if (before == after && before % 2 == 0) break;
      if (attempt % kAttemptsPerYield == 0) {
        std::this_thread::yield();
      } else {
        cpu_relax();
      }
    }
    return std::bit_cast<T>(words);
  }

 private:
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);
  static constexpr int kAttemptsPerYield = 64;  // a store() takes less than that many looks

  alignas(kCacheLine) std::atomic<uint64_t> sequence_{0};
  std::array<std::atomic<uint64_t>, kWords> words_{};
};

}  // namespace ull
