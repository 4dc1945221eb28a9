// An operand b of warpgroups' products: core matrices in shared memory, see arch::core_matrices().
#pragma once

#include "block.h"

namespace ull::emulator {

inline constexpr int kCoreBytes = 128;  // of a core matrix: 8 columns of 8 f16
inline constexpr int kRowBytes = 16;    // of a column in it

struct CoreMatrices {
  const unsigned char* first;
  uint32_t k_stride, n_stride;  // bytes
  int groups;                   // of 8 columns

  const unsigned char* core(int group, int half) const {  // half: of the 16 values of k
    return first + static_cast<size_t>(group) * n_stride + static_cast<size_t>(half) * k_stride;
  }
  const unsigned char* end() const { return core(groups - 1, 1) + kCoreBytes; }
  bool meets(const unsigned char* from, uint64_t bytes) const;
};

// Those that a descriptor names. Ends the launch if it is none, or names what lies outside the block's shared memory.
CoreMatrices core_matrices_of(uint64_t descriptor, int groups, Site site);

}  // namespace ull::emulator
