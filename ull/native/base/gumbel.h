// The noise of the one sampling rule: a Gumbel variate for every (seed, position, token id). Counter:
// (token >> 2, position, 0, 0), key: the seed; the token's low two bits choose the Philox word.
#pragma once

#include <cstdint>

#include "base/float_math.h"
#include "base/philox.h"

namespace ull {

ULL_HOST_DEVICE [[nodiscard]] inline float gumbel(uint64_t seed, int32_t position, int32_t token) noexcept {
  const PhiloxWords words = philox4x32({{static_cast<uint32_t>(token) >> 2, static_cast<uint32_t>(position), 0, 0}},
                                       static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return gumbel_from_unit<ScalarMath>(static_cast<float>(words.word[token & 3] >> 9));
}

}  // namespace ull
