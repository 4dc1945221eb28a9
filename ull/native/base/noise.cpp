#include "base/noise.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "base/clock.h"
#include "base/thread.h"

namespace ull {

namespace {

void watch_clock(int64_t duration_ns, std::span<const int64_t> bounds, NoiseReport& report) noexcept {
  const int64_t begin = monotonic_ns();
  int64_t last = begin;
  int64_t shortest = std::numeric_limits<int64_t>::max();
  while (last - begin < duration_ns) {
    const int64_t now = monotonic_ns();
    const int64_t gap = now - last;
    last = now;
    ++report.reads;
    shortest = std::min(shortest, gap);
    report.longest_ns = std::max(report.longest_ns, gap);
    if (gap < bounds.front()) continue;
    ++report.gaps;
    report.gaps_ns += gap;
    const auto above = std::upper_bound(bounds.begin(), bounds.end(), gap);
    ++report.by_size[static_cast<size_t>(above - bounds.begin()) - 1];
  }
  report.observed_ns = last - begin;
  report.shortest_ns = report.reads > 0 ? shortest : 0;
}

}  // namespace

NoiseReport measure_noise(int core, int64_t duration_ns, std::span<const int64_t> bounds) {
  if (bounds.empty() || !std::is_sorted(bounds.begin(), bounds.end())) {
    throw std::invalid_argument("bounds: must be ascending, and at least one");
  }
  NoiseReport report{.by_size = std::vector<uint64_t>(bounds.size())};
  bool pinned = false;
  std::thread reader = start_thread([&] {
    name_current_thread("ull-noise");
    pinned = pin_current_thread(core);
    if (pinned) watch_clock(duration_ns, bounds, report);
  });
  reader.join();
  if (!pinned) throw std::invalid_argument("core " + std::to_string(core) + " is not available here");
  return report;
}

}  // namespace ull
