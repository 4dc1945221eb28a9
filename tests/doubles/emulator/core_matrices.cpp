#include "core_matrices.h"

namespace ull::emulator {

namespace {

constexpr uint32_t kMostStride = 1U << 18;
constexpr uint64_t kUnusedBits = 0x3FFFC000C000C000ULL;  // of a descriptor: its base offset is among them
constexpr int kRowOfSwizzle[] = {0, 128, 64, 32};        // bytes, by the descriptor's bits 62 and 63

}  // namespace

const unsigned char* CoreMatrices::piece(int index) const {
  if (swizzled == 0) {
    return first + static_cast<size_t>(index / 2) * n_stride + static_cast<size_t>(index % 2) * k_stride;
  }
  const int column = index % kPatternColumns, half = index / kPatternColumns % 2;
  const auto group = static_cast<uint32_t>(index / (2 * kPatternColumns));
  const auto at = static_cast<uint32_t>(first - shared) + group * n_stride +
                  static_cast<uint32_t>(column * swizzled + half * kRowBytes);
  const uint32_t moved = static_cast<uint32_t>(swizzled / kRowBytes - 1) << 4;  // bits of an address
  return shared + (at ^ (at >> 3 & moved));
}

const unsigned char* CoreMatrices::begin() const { return swizzled == 0 ? first : first - (first - shared) % swizzled; }

const unsigned char* CoreMatrices::end() const {
  if (swizzled == 0) return piece(pieces() - 1) + kCoreBytes;
  return begin() + static_cast<size_t>(groups - 1) * n_stride + kPatternColumns * swizzled;
}

bool CoreMatrices::meets(const unsigned char* from, uint64_t bytes) const {
  if (from >= end() || from + bytes <= begin()) return false;
  for (int i = 0; i < pieces(); ++i) {
    if (from < piece(i) + piece_bytes() && piece(i) < from + bytes) return true;
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
    fail_at(site, "the descriptor %#018llx: bits 14, 15, 30, 31 and 46 to 61, a base offset among them, must be 0",
            static_cast<unsigned long long>(descriptor));
  }
  const auto part = [descriptor](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3FFFU) << 4; };
  const int swizzled = kRowOfSwizzle[descriptor >> 62];
  const CoreMatrices matrices = {block->shared, block->shared + part(0), part(16), part(32), groups, swizzled};
  if (swizzled == 0) {
    if (matrices.k_stride < kCoreBytes || (groups > 1 && matrices.n_stride < kCoreBytes)) {
      fail_at(site, "core matrices every %u bytes along k and %u along n overlap: each has 128", matrices.k_stride,
              matrices.n_stride);
    }
  } else {
    const auto pattern = static_cast<uint32_t>(kPatternColumns * swizzled);
    if (part(0) % pattern + kProductBytes > static_cast<uint32_t>(swizzled)) {
      fail_at(site,
              "rows of %d bytes, swizzled, at shared + %u: their first %d must begin at a multiple of %u, and the "
              "32 bytes of a product lie in the first",
              swizzled, part(0), kPatternColumns, pattern);
    }
    if (groups > 1 && (matrices.n_stride == 0 || matrices.n_stride % pattern != 0)) {
      fail_at(site, "rows of %d bytes, swizzled, every %u bytes along n: must be a multiple of %u", swizzled,
              matrices.n_stride, pattern);
    }
  }
  if (matrices.end() > block->shared + grid.shared_bytes) {
    fail_at(site, "reads shared + %td to shared + %td, outside the block's %u bytes", matrices.begin() - block->shared,
            matrices.end() - block->shared, grid.shared_bytes);
  }
  return matrices;
}

}  // namespace ull::emulator
