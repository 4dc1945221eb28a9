// A log-linear histogram of durations: 16 buckets per power of two, so a percentile is within 6.25% of the truth.
// One thread records, any thread reads; a reader may miss the newest few records, never sees a torn one.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace ull {

// Named counters, for those who report them.
using NamedCounts = std::vector<std::pair<const char*, uint64_t>>;

class Histogram {
 public:
  void record(int64_t nanoseconds) noexcept {
    const uint64_t value = nanoseconds > 0 ? static_cast<uint64_t>(nanoseconds) : 0;
    std::atomic<uint64_t>& bucket = buckets_[index_of(value)];
    // One writer: a plain load and store is enough and costs no locked instruction.
    bucket.store(bucket.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (value > max_.load(std::memory_order_relaxed)) max_.store(value, std::memory_order_relaxed);
    sum_.store(sum_.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }

  [[nodiscard]] uint64_t count() const noexcept {
    uint64_t total = 0;
    for (const auto& bucket : buckets_) total += bucket.load(std::memory_order_relaxed);
    return total;
  }

  [[nodiscard]] uint64_t max() const noexcept { return max_.load(std::memory_order_relaxed); }

  [[nodiscard]] uint64_t sum() const noexcept { return sum_.load(std::memory_order_relaxed); }

  // Pairs of a bucket's largest value (ns) and its count, for those that hold any, in ascending order.
  [[nodiscard]] std::vector<std::pair<uint64_t, uint64_t>> buckets() const {
    std::vector<std::pair<uint64_t, uint64_t>> held;
    for (size_t index = 0; index < buckets_.size(); ++index) {
      const uint64_t count = buckets_[index].load(std::memory_order_relaxed);
      if (count > 0) held.emplace_back(upper_bound(index), count);
    }
    return held;
  }

  // The value (ns) that a `share` in (0, 1] of the records do not exceed, rounded up to its bucket's end.
  [[nodiscard]] uint64_t quantile(double share) const noexcept {
    const uint64_t total = count();
    if (total == 0) return 0;
    const auto wanted = static_cast<uint64_t>(share * static_cast<double>(total - 1)) + 1;
    uint64_t seen = 0;
    for (size_t index = 0; index < buckets_.size(); ++index) {
      seen += buckets_[index].load(std::memory_order_relaxed);
      if (seen < wanted) continue;
      // The last bucket holds everything beyond it too.
      return index + 1 < buckets_.size() && upper_bound(index) < max() ? upper_bound(index) : max();
    }
    return max();
  }

  [[nodiscard]] NamedCounts named() const {
    return {{"count", count()},      {"p50", quantile(0.50)},   {"p90", quantile(0.90)},
            {"p99", quantile(0.99)}, {"p999", quantile(0.999)}, {"max", max()}};
  }

 private:
  static constexpr int kSubBits = 4;
  static constexpr uint64_t kSub = 1U << kSubBits;
  static constexpr int kOctaves = 40;  // up to 2^43 ns: two hours

  static constexpr size_t index_of(uint64_t value) noexcept {
    if (value < kSub) return static_cast<size_t>(value);
    const int shift = std::bit_width(value) - 1 - kSubBits;
    const size_t index = static_cast<size_t>(shift + 1) * kSub + static_cast<size_t>((value >> shift) - kSub);
    return index < kOctaves * kSub ? index : kOctaves * kSub - 1;
  }

  static constexpr uint64_t upper_bound(size_t index) noexcept {
    if (index < kSub) return index;
    const size_t shift = index / kSub - 1;
    return ((index % kSub + kSub + 1) << shift) - 1;
  }

  std::array<std::atomic<uint64_t>, kOctaves * kSub> buckets_{};
  std::atomic<uint64_t> max_{0};
  std::atomic<uint64_t> sum_{0};
};

}  // namespace ull
