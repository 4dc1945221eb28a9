// y = W x for up to 64 tokens: the shared ground of the kernels that stream the weights (qkv, o, gate_up, down, head).
//
// Packed weights: [row tile of 16][step of 32 columns][lane 0..31][16 bytes], 16-bit ones [..][step][2][lane][16
// bytes]; each 16 bytes are a lane's A fragments (see Weights). Slice s of kSlices is steps s * steps / 8 .. (s + 1) *
// steps / 8, a contiguous part of each row tile. Every output is the sum of its slices in ascending order, each a chain
// of mma over the slice's steps: the same for every number of tokens and every grid.
//
// linear_narrow.cuh serves up to 8 tokens, a warp per slice; linear_wide.cuh 16 and more, a warp per row tile.
#pragma once

#include "linear/norm.cuh"

namespace ull::gpu {

inline constexpr int kComputeWarps = 8;
// Shared memory of a block: two fit on a multiprocessor, so that the next kernel's can fill their rings, and one small
// block beside them, or two; or nearly all of it. See ull/gpu/geometry/linear.py.
inline constexpr int kNarrowBytes = 110 * 1024 + 768;
inline constexpr int kBesideNormBytes = kNarrowBytes - 128;
inline constexpr int kWideBytes = 224 * 1024;
inline constexpr int kBarrierBytes = sizeof(arch::Barrier);

// kNorms: the input is the residual, normed on the way.
template <int kRows_, int kColumns_, int kBits_, bool kNorms_>
struct LinearShape {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kBits = kBits_;
  static constexpr bool kNorms = kNorms_;
  static constexpr int kPaddedRows = round_up(kRows, kRowUnit);
  static constexpr int kRowTiles = kPaddedRows / kRowUnit;
  static constexpr int kSteps = round_up(kColumns, kColumnUnit) / kColumnUnit;
  static constexpr int kSliceSteps = (kSteps + kSlices - 1) / kSlices;  // of the longest slice
  static constexpr int kStepBytes = kRowUnit * kColumnUnit * kBits / 8;

  ULL_HOST_DEVICE static constexpr int slice_begin(int slice) { return slice * kSteps / kSlices; }

  // The share of the row tiles that `block` has, of so many.
  ULL_DEVICE static int first_tile(int block, int blocks) { return block * kRowTiles / blocks; }
  // This block's, where all of the grid share them.
  ULL_DEVICE static int first_tile() { return first_tile(arch::block_x(), arch::grid_x()); }
  ULL_DEVICE static int last_tile() { return first_tile(arch::block_x() + 1, arch::grid_x()); }
};

// A lane's share of one step of a row tile. 8 bit: for mma j = 0, 1 the bytes are (row g: columns k, k + 1), (row g +
// 8: the same), (row g: k + 2, k + 3), (row g + 8: the same) with k = 8t + 4j; 16 bit: the same order, mma j's at 512 *
// j.
template <int kBits>
struct Weights {
  uint32_t word[kBits / 2];

  ULL_DEVICE void load(const unsigned char* step) {
#pragma unroll
    for (int j = 0; j < kBits / 8; ++j) {
      const arch::Vector4 v = arch::load_shared(step + j * 512 + arch::lane() * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[4 * j + i] = v.word[i];
    }
  }

  // Mma j's A operand.
  ULL_DEVICE void operand(int j, uint32_t (&a)[4]) const {
    if constexpr (kBits == 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) arch::e4m3x4_to_f16x2(word[2 * j + half], a[2 * half], a[2 * half + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = word[4 * j + i];
    }
  }
};

// sums += one step of a row tile, for every group of tokens.
template <int kBits, int kGroups>
ULL_DEVICE void multiply_step(float (&sums)[kGroups][4], const Weights<kBits>& weights,
                              const arch::Vector4 (&activations)[kGroups]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t a[4];
    weights.operand(j, a);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t b[2] = {activations[group].word[2 * j], activations[group].word[2 * j + 1]};
      arch::mma(sums[group], a, b);
    }
  }
}

// The same of kTiles row tiles and one group: the row tiles' mma take turns.
template <int kBits, int kTiles, int kSums>
ULL_DEVICE void multiply_in_turn(float (&sums)[kSums][1][4], const Weights<kBits> (&weights)[kTiles],
                                 const arch::Vector4& activations) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t b[2] = {activations.word[2 * j], activations.word[2 * j + 1]};
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      uint32_t a[4];
      weights[r].operand(j, a);
      arch::mma(sums[r][0], a, b);
    }
  }
}

}  // namespace ull::gpu
