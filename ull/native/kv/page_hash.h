// Names of full pages of text: a page's name depends on all tokens up to its end, so that two texts which have the same
// name for a page have, but for a collision of 64 bits, the same beginning. Who acts on equal names compares tokens.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kv/page.h"

namespace ull {

// The name of the page with these kPageTokens tokens behind a page with the name `before` (0: there is none).
[[nodiscard]] inline uint64_t page_hash(uint64_t before, const int32_t* tokens) noexcept {
  uint64_t hash = before ^ 0x9E3779B97F4A7C15U;
  for (int i = 0; i < kPageTokens; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0xD6E8FEB86659FD93U;
    hash ^= hash >> 32;
  }
  return hash;
}

// Which pages of text are in the KV cache, for a guess by other threads: a counting filter, which the engine's thread
// alone writes. A page may seem to be there that is not, or no longer.
class CachedPages {
 public:
  CachedPages() : counts_(std::make_unique<std::atomic<uint16_t>[]>(kCounts)) {}

  void add(uint64_t hash) noexcept {
    count(hash).store(static_cast<uint16_t>(load(hash) + 1), std::memory_order_relaxed);
  }
  void remove(uint64_t hash) noexcept {
    count(hash).store(static_cast<uint16_t>(load(hash) - 1), std::memory_order_relaxed);
  }
  // How many of the text's first tokens are probably in the cache, in full pages.
  [[nodiscard]] int likely(std::span<const int32_t> text) const noexcept {
    uint64_t hash = 0;
    int tokens = 0;
    for (; static_cast<size_t>(tokens) + kPageTokens <= text.size(); tokens += kPageTokens) {
      hash = page_hash(hash, text.data() + tokens);
      if (load(hash) == 0) break;
    }
    return tokens;
  }

 private:
  static constexpr size_t kCounts = size_t{1} << 16;

  [[nodiscard]] std::atomic<uint16_t>& count(uint64_t hash) const noexcept { return counts_[hash % kCounts]; }
  [[nodiscard]] uint16_t load(uint64_t hash) const noexcept { return count(hash).load(std::memory_order_relaxed); }

  std::unique_ptr<std::atomic<uint16_t>[]> counts_;
};

}  // namespace ull
