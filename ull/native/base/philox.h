// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four 32-bit words for a
// counter of 128 bits and a key of 64. Stateless, so any thread, vector lane or GPU can draw any number. Plain C++
// without intrinsics: the CUDA kernels include this file too.
#pragma once

#include <cstdint>

#include "base/inline.h"

namespace ull {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53U;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57U;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9U;  // golden ratio
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85U;  // sqrt(3) - 1
inline constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

ULL_HOST_DEVICE [[nodiscard]] constexpr PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0,
                                                               uint32_t key1) noexcept {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

}  // namespace ull
