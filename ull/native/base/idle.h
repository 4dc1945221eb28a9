// How a thread waits when it has nothing to do. kSpin: never sleeps (isolated cores). kAdaptive: spins for a moment
// after the last work, then sleeps until it is woken, so that an idle daemon costs no CPU time.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace ull {

enum class IdleMode : uint8_t { kSpin, kAdaptive };

inline constexpr int64_t kIdleSpinNs = 50'000;  // adaptive: how long a thread spins before it sleeps

// Throws std::invalid_argument unless `name` is "spin" or "adaptive".
[[nodiscard]] inline IdleMode parse_idle_mode(std::string_view name) {
  if (name == "spin") return IdleMode::kSpin;
  if (name == "adaptive") return IdleMode::kAdaptive;
  throw std::invalid_argument("idle: expected 'spin' or 'adaptive'");
}

}  // namespace ull
