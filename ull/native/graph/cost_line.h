// What a graph takes behind any number of positions, by what it took behind none and behind `far`.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ull::graph {

struct CostLine {
  double first_ns = 0.0;     // at position 0; 0: unknown
  double position_ns = 0.0;  // more for each position before it

  // far: 0, or far_ns 0: the time is the same everywhere.
  [[nodiscard]] static CostLine through(int64_t near_ns, int64_t far_ns, int far) noexcept {
    const bool sloped = far > 0 && far_ns > 0;
    const auto longer = static_cast<double>(far_ns - near_ns);
    return {static_cast<double>(near_ns), sloped ? std::max(longer, 0.0) / far : 0.0};
  }

  [[nodiscard]] bool known() const noexcept { return first_ns > 0.0; }
  [[nodiscard]] double at(double position) const noexcept { return first_ns + position * position_ns; }
};

}  // namespace ull::graph
