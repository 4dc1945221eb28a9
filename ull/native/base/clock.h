// The one clock of every timestamp that ull reports: CLOCK_MONOTONIC, nanoseconds (Python: time.monotonic_ns()).
#pragma once

#include <ctime>

#include <cstdint>

namespace ull {

[[nodiscard]] inline int64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace ull
