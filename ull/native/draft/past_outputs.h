// What an engine has generated, for the suffix drafter: the newest tokens of requests that have ended, the oldest
// forgotten first. The engine's thread appends; any other may take a copy at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "draft/suffix_index.h"

namespace ull {

class PastOutputs {
 public:
  static constexpr int kMostTokens = 1 << 24;
  static constexpr int32_t kBoundary = -1;  // stands between two outputs: no token, so nothing matches across it

  // capacity: tokens that are kept, at least 1. Allocates.
  explicit PastOutputs(int capacity);

  // The engine's thread, or before there is one. Anything negative is a boundary.
  void append(int32_t token) noexcept;
  [[nodiscard]] const SuffixIndex& index() const noexcept { return index_; }

  // Any thread: the newest tokens, at most `capacity`, boundaries among them. Allocates.
  [[nodiscard]] std::vector<int32_t> copy() const;
  [[nodiscard]] uint64_t appended() const noexcept { return appended_.load(std::memory_order_relaxed); }
  [[nodiscard]] int capacity() const noexcept { return capacity_; }

 private:
  const int capacity_;
  SuffixIndex index_;                                   // the engine's thread's
  const std::unique_ptr<std::atomic<int32_t>[]> text_;  // [capacity + 1] a ring, for copy()
  std::atomic<uint64_t> appended_{0};                   // tokens of it since the beginning
};

}  // namespace ull
