#include "core_matrices.h"

namespace ull::emulator {

namespace {

constexpr uint32_t kMostStride = 1U << 18;
constexpr uint64_t kUnusedBits = 0xFFFFC000C000C000ULL;  // of a descriptor: base offset and swizzle are among them

}  // namespace

bool CoreMatrices::meets(const unsigned char* from, uint64_t bytes) const {
  if (from >= end() || from + bytes <= first) return false;
  for (int i = 0; i < 2 * groups; ++i) {
    if (from < core(i / 2, i % 2) + kCoreBytes && core(i / 2, i % 2) < from + bytes) return true;
  }
  return false;
}

uint64_t describe_core_matrices(const void* shared, uint32_t k_stride, uint32_t n_stride, Site site) {
  const auto offset = static_cast<const unsigned char*>(shared) - block->shared;
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(grid.shared_bytes) || offset % kRowBytes != 0) {
    fail_at(site, "core matrices at shared + %td: must be aligned to 16 and within the block's %u bytes", offset,
            grid.shared_bytes);
  }
  if (k_stride % kRowBytes != 0 || n_stride % kRowBytes != 0 || k_stride >= kMostStride || n_stride >= kMostStride) {
    fail_at(site, "core matrices every %u bytes along k and %u along n: must be multiples of 16 below 2^18", k_stride,
            n_stride);
  }
  return static_cast<uint64_t>(offset) >> 4 | static_cast<uint64_t>(k_stride >> 4) << 16 |
         static_cast<uint64_t>(n_stride >> 4) << 32;
}

CoreMatrices core_matrices_of(uint64_t descriptor, int groups, Site site) {
  if ((descriptor & kUnusedBits) != 0) {
    fail_at(site, "the descriptor %#018llx: bits 14, 15, 30, 31, 46 to 48 and from 49 on, for swizzles, must be 0",
            static_cast<unsigned long long>(descriptor));
  }
  const auto part = [descriptor](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3FFFU) << 4; };
  const CoreMatrices matrices = {block->shared + part(0), part(16), part(32), groups};
  if (matrices.k_stride < kCoreBytes || (groups > 1 && matrices.n_stride < kCoreBytes)) {
    fail_at(site, "core matrices every %u bytes along k and %u along n overlap: each has 128", matrices.k_stride,
            matrices.n_stride);
  }
  if (matrices.end() > block->shared + grid.shared_bytes) {
    fail_at(site, "reads shared + %td to shared + %td, outside the block's %u bytes", matrices.first - block->shared,
            matrices.end() - block->shared, grid.shared_bytes);
  }
  return matrices;
}

}  // namespace ull::emulator
