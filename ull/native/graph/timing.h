// How long things on the device take, measured while the executor is prepared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace ull::graph {

inline constexpr int64_t kPrepareNs = 60'000'000'000;  // the watchdog's limit until everything has run once
inline constexpr int kMeasuredRuns = 20;
inline constexpr int64_t kMeasureNs = 200'000'000;  // none is begun after this long

// At least 1. durations: not empty; their order changes.
[[nodiscard]] inline int64_t median_ns(std::vector<int64_t>& durations) {
  const auto middle = durations.begin() + static_cast<std::ptrdiff_t>(durations.size() / 2);
  std::nth_element(durations.begin(), middle, durations.end());
  return std::max<int64_t>(*middle, 1);
}

// Calls run() again and again; how long a call takes.
template <typename Run>
[[nodiscard]] int64_t median_duration_ns(const Run& run) {
  std::vector<int64_t> durations;
  const int64_t start = monotonic_ns();
  while (durations.size() < kMeasuredRuns && (durations.empty() || monotonic_ns() - start < kMeasureNs)) {
    const int64_t begin = monotonic_ns();
    run();
    durations.push_back(monotonic_ns() - begin);
  }
  return median_ns(durations);
}

}  // namespace ull::graph
