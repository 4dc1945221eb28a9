// RMSNorm of the residual rows, one plan for the norm kernels and for the prologue of the linear kernels: thread i of
// 256 sums the squares of elements 4i .. 4i+3, then 1024 further on, and so on; a shuffle tree in each warp; the eight
// warps' sums in ascending order.
#pragma once

#include "linear/activations.cuh"

namespace ull::gpu {

inline constexpr int kNormThreads = 256;
inline constexpr int kNormWarps = kNormThreads / 32;
inline constexpr int kResidualStride = round_up(kHidden, kRowUnit);
inline constexpr int kNormVectors = (kHidden + 4 * kNormThreads - 1) / (4 * kNormThreads);  // per thread and row
static_assert(kHidden % 4 == 0);

// The share of a row of H floats that one of the 256 threads has; zeros beyond the row.
struct RowShare {
  arch::Vector4 vector[kNormVectors];
};

ULL_DEVICE int row_column(int index, int thread = arch::thread()) { return 4 * (index * kNormThreads + thread); }

// A row that an earlier kernel wrote.
ULL_DEVICE void load_row(RowShare& share, const float* row, int thread = arch::thread()) {
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int column = row_column(i, thread);
    share.vector[i] = {};
    if (column < kHidden) share.vector[i] = arch::load_global(row + column);
  }
}

// The norm's weights, which no kernel writes.
ULL_DEVICE void load_norm_weight(RowShare& share, const float* weight, int thread = arch::thread()) {
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int column = row_column(i, thread);
    share.vector[i] = {};
    if (column < kHidden) share.vector[i] = *reinterpret_cast<const arch::Vector4*>(weight + column);
  }
}

// The sum of the row's squares over this warp's share, in every lane.
ULL_DEVICE float warp_square_sum(const RowShare& share) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = arch::bits_float(share.vector[i].word[j]);
      sum = ::fmaf(x, x, sum);
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += arch::shuffle_xor(sum, mask);
  return sum;
}

// 1 / rms of a row from its warps' sums.
ULL_DEVICE float inverse_rms(const float* warp_sums) {
  float sum = warp_sums[0];
#pragma unroll
  for (int i = 1; i < kNormWarps; ++i) sum += warp_sums[i];
  return arch::reciprocal_sqrt(::fmaf(sum, 1.0F / kHidden, kRmsEpsilon));
}

// Four normed elements as f16.
ULL_DEVICE arch::Vector2 normed(const arch::Vector4& x, const arch::Vector4& weight, float inverse) {
  float y[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) y[j] = arch::bits_float(x.word[j]) * inverse * arch::bits_float(weight.word[j]);
  return {arch::f32x2_to_f16x2(y[0], y[1]), arch::f32x2_to_f16x2(y[2], y[3])};
}

// Keeps rows of the residual for the heads that read this layer's taps: in a round of one token (kTokens 1) at their
// position's place in the ring, in others at the token's in the scratch.
template <int kTokens>
class KeepTaps {
 public:
  // taps: this layer's; null: nobody reads them. count: of tokens that are there.
  ULL_DEVICE KeepTaps(float* taps, const Round* round, int count) : taps_(taps), count_(count) {
    if constexpr (kTaps > 0 && kTokens == 1) {
      static_assert(ULL_OFFSETOF(Round, base) == 16);
      if (taps == nullptr) return;
      const auto base = arch::load_global(reinterpret_cast<const char*>(round) + 16).word[0];
      taps_ += static_cast<int>(base % kTapSlots) * kStride;
    }
  }

  ULL_DEVICE void operator()(int token, int column, const arch::Vector4& four) const {
    if constexpr (kTaps > 0) {
      if (taps_ == nullptr || token >= count_ || column >= kHidden) return;
      arch::store_global(taps_ + (kTokens == 1 ? 0 : token) * kStride + column, four);
    }
  }

 private:
  static constexpr int kStride = kTaps * kResidualStride;  // floats from one position's rows to the next one's
  float* taps_;
  int count_;
};

struct KeepNothing {
  ULL_DEVICE void operator()(int, int, const arch::Vector4&) const {}
};

// Norms `count` rows: `load(share, token)` brings one, `store(token, column, four f16)` takes every column, padding
// included, and `keep(token, column, four)` what it was before. `sums` is shared memory of [count][kNormWarps].
// kRowsAtOnce rows' loads are in flight together.
template <int kRowsAtOnce, typename Load, typename Store, typename Keep = KeepNothing>
ULL_DEVICE void norm_rows(const RowShare& weight, int count, float* sums, const Load& load, const Store& store,
                          const Keep& keep = {}) {
  const int warp = arch::warp();
  for (int first = 0; first < count; first += kRowsAtOnce) {
    RowShare rows[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (first + r < count) load(rows[r], first + r);
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (first + r < count) {
        const float sum = warp_square_sum(rows[r]);
        if (arch::lane() == 0) sums[(first + r) * kNormWarps + warp] = sum;
      }
    }
    arch::block_barrier();
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (first + r < count) {
        const float inverse = inverse_rms(sums + (first + r) * kNormWarps);
#pragma unroll
        for (int i = 0; i < kNormVectors; ++i) {
          if (row_column(i) < round_up(kHidden, kColumnUnit)) {
            store(first + r, row_column(i), normed(rows[r].vector[i], weight.vector[i], inverse));
            keep(first + r, row_column(i), rows[r].vector[i]);
          }
        }
      }
    }
  }
}

}  // namespace ull::gpu
