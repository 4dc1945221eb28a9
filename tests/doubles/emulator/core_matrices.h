// An operand b of warpgroups' products in shared memory: core matrices, see arch::core_matrices(), or rows that are
// swizzled, as the PTX ISA describes both ("Asynchronous Warpgroup Level Matrix Shared Memory Layout").
//
// Swizzled, a column's values of k lie in a row of 128, 64 or 32 bytes, rows one behind the other, and of each row's
// pieces of 16 bytes those change places whose addresses differ in bits 4 to 6, to 5, or in 4: by bits 7 to 9, to 8, or
// 7. (Of addresses in shared memory, which begins at a multiple of 1024 here; on a chip a kernel has to see to that.)
// Eight rows are a pattern, the next eight columns' is n_stride bytes further, and k_stride means nothing. A product
// takes 32 bytes of each row.
#pragma once

#include "block.h"

namespace ull::emulator {

inline constexpr int kCoreBytes = 128;     // of a core matrix: 8 columns of 8 f16
inline constexpr int kRowBytes = 16;       // of a column in it
inline constexpr int kProductBytes = 32;   // of a column in a product
inline constexpr int kPatternColumns = 8;  // of a core matrix, and of a swizzle's pattern

struct CoreMatrices {
  const unsigned char* shared;  // of the block that has them
  const unsigned char* first;
  uint32_t k_stride, n_stride;  // bytes
  int groups;                   // of 8 columns
  int swizzled;                 // bytes of a row that is; 0: none is

  // What lies together, in the order [group][half of the values of k][column].
  int pieces() const { return groups * (swizzled == 0 ? 2 : 2 * kPatternColumns); }
  int piece_bytes() const { return swizzled == 0 ? kCoreBytes : kRowBytes; }
  const unsigned char* piece(int index) const;
  // All of them lie in [begin, end).
  const unsigned char* begin() const;
  const unsigned char* end() const;
  bool meets(const unsigned char* from, uint64_t bytes) const;
};

// Those that a descriptor names. Ends the launch if it is none, or names what lies outside the block's shared memory.
CoreMatrices core_matrices_of(uint64_t descriptor, int groups, Site site);

}  // namespace ull::emulator
