// Matrix products over a vector set S. Included once per instruction set, so everything is in an unnamed namespace:
// a function compiled for AVX-512 must never be the one that the linker keeps for everybody.
#pragma once

#include <utility>

#include "base/inline.h"
#include "cpu/kernels/kernels.h"

namespace ull::cpu {
namespace {

inline constexpr int kPrefetchBytes = 1536;  // ahead of a weight stream; measured flat between 1 and 4 KiB

template <class S, Format kFormat>
ULL_INLINE void decode(const uint8_t* p, typename S::F& low, typename S::F& high) {
  if constexpr (kFormat == Format::kF8) {
    S::decode_f8(p, low, high);
  } else if constexpr (kFormat == Format::kBf16) {
    S::decode_bf16(p, low, high);
  } else {
    low = S::load(reinterpret_cast<const float*>(p));
    high = S::load(reinterpret_cast<const float*>(p) + kLanes);
  }
}

// One register block: kTiles tiles x (rows 16 kFirstHalf .. 16 (kFirstHalf + kHalves)) x kTokens tokens.
// x[k * kStep + token * kTokenStep].
template <class S, Format kFormat, int kTiles, int kFirstHalf, int kHalves, int kTokens, int kStep, int kTokenStep>
ULL_INLINE void multiply_block(const uint8_t* weights, size_t tile_bytes, int count, const float* x, float* sums,
                               size_t sums_tile, bool resume) {
  using F = typename S::F;
  constexpr size_t kBytes = kTileRows * format_bytes(kFormat);  // one k of one tile
  constexpr bool kStreams = kTokens <= 3 && kFormat != Format::kF32;
  F sum[kTiles][kHalves][kTokens];
#pragma GCC unroll 16
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 16
    for (int half = 0; half < kHalves; ++half) {
#pragma GCC unroll 16
      for (int token = 0; token < kTokens; ++token) {
        const float* from = sums + tile * sums_tile + token * kTileRows + (kFirstHalf + half) * kLanes;
        sum[tile][half][token] = resume ? S::load(from) : S::zero();
      }
    }
  }
  const auto step = [&](const uint8_t* w, const float* x_k) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int tile = 0; tile < kTiles; ++tile) {
      F weight[2];
      decode<S, kFormat>(w + tile * tile_bytes, weight[0], weight[1]);
#pragma GCC unroll 16
      for (int token = 0; token < kTokens; ++token) {
        const F activation = S::set(x_k[token * kTokenStep]);
#pragma GCC unroll 16
        for (int half = 0; half < kHalves; ++half) {
          sum[tile][half][token] = S::fma(weight[kFirstHalf + half], activation, sum[tile][half][token]);
        }
      }
    }
  };
  const uint8_t* w = weights;
  int k = 0;
  if constexpr (kStreams) {
    // Two k at a time: one cache line of kF8. Near the end of the tiles the prefetch skips to the next group of tiles.
    const int near_end = count - static_cast<int>(kPrefetchBytes / kBytes);
    for (; k + 2 <= count; k += 2, w += 2 * kBytes) {
      const size_t ahead = kPrefetchBytes + (k < near_end ? 0 : (kTiles - 1) * tile_bytes);
#pragma GCC unroll 16
      for (int tile = 0; tile < kTiles; ++tile) {
        __builtin_prefetch(w + tile * tile_bytes + ahead);
        if constexpr (2 * kBytes > 64) __builtin_prefetch(w + tile * tile_bytes + ahead + 64);
      }
      step(w, x + k * kStep);
      step(w + kBytes, x + (k + 1) * kStep);
    }
  }
  for (; k < count; ++k, w += kBytes) step(w, x + k * kStep);
#pragma GCC unroll 16
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 16
    for (int half = 0; half < kHalves; ++half) {
#pragma GCC unroll 16
      for (int token = 0; token < kTokens; ++token) {
        S::store(sums + tile * sums_tile + token * kTileRows + (kFirstHalf + half) * kLanes, sum[tile][half][token]);
      }
    }
  }
}

// Splits a panel into register blocks: whole tiles while the sums fit, half tiles beyond, some tokens at a time.
template <class S, Format kFormat, int kTiles, int kTokens, int kStep, int kTokenStep>
ULL_INLINE void multiply_tokens(const uint8_t* weights, size_t tile_bytes, int count, const float* x, float* sums,
                                size_t sums_tile, bool resume) {
  if constexpr (kTokens <= S::kWholeTileTokens) {
    multiply_block<S, kFormat, kTiles, 0, 2, kTokens, kStep, kTokenStep>(weights, tile_bytes, count, x, sums, sums_tile,
                                                                         resume);
  } else if constexpr (kTokens <= S::kHalfTileTokens) {
    multiply_block<S, kFormat, kTiles, 0, 1, kTokens, kStep, kTokenStep>(weights, tile_bytes, count, x, sums, sums_tile,
                                                                         resume);
    multiply_block<S, kFormat, kTiles, 1, 1, kTokens, kStep, kTokenStep>(weights, tile_bytes, count, x, sums, sums_tile,
                                                                         resume);
  } else {
    constexpr int kFirst = kTokens > 2 * S::kHalfTileTokens ? S::kHalfTileTokens : (kTokens + 1) / 2;
    multiply_tokens<S, kFormat, kTiles, kFirst, kStep, kTokenStep>(weights, tile_bytes, count, x, sums, sums_tile,
                                                                   resume);
    multiply_tokens<S, kFormat, kTiles, kTokens - kFirst, kStep, kTokenStep>(
        weights, tile_bytes, count, x + kFirst * kTokenStep, sums + kFirst * kTileRows, sums_tile, resume);
  }
}

template <class S, Format kFormat, int kTiles, int kWidth>
void multiply_panel(const uint8_t* weights, size_t tile_bytes, int count, const float* x, float* sums, size_t sums_tile,
                    bool resume) noexcept {
  multiply_tokens<S, kFormat, kTiles, kWidth, kWidth, 1>(weights, tile_bytes, count, x, sums, sums_tile, resume);
}

template <class S, Format kFormat, int kWidth>
void multiply_page_rows(const uint8_t* weights, size_t tile_bytes, int count, const float* x, float* sums,
                        size_t sums_tile, bool resume) noexcept {
  multiply_tokens<S, kFormat, 1, kWidth, 1, kPageKeys>(weights, tile_bytes, count, x, sums, sums_tile, resume);
}

template <class S, Format kFormat>
void unpack_tile(const uint8_t* weights, int count, float* out) noexcept {
  for (int k = 0; k < count; ++k) {
    typename S::F low, high;
    decode<S, kFormat>(weights + k * kTileRows * format_bytes(kFormat), low, high);
    S::store(out + k * kTileRows, low);
    S::store(out + k * kTileRows + kLanes, high);
  }
}

// Tiles at once: enough independent chains to cover the latency of a multiply-add, no more than the registers hold.
template <class S, int kWidth>
constexpr int tile_group() {
  if (kWidth == 1) return S::kDecodeTiles;
  return 2 * kWidth <= S::kWholeTileTokens && kWidth <= 4 ? 2 : 1;
}

template <class S, Format kFormat, int kWidth>
constexpr void fill_width(Kernels& table) {
  auto& functions = table.multiply[static_cast<int>(kFormat)][kWidth - 1];
  functions[0] = multiply_panel<S, kFormat, 1, kWidth>;
  if constexpr (tile_group<S, kWidth>() >= 2) functions[1] = multiply_panel<S, kFormat, 2, kWidth>;
  if constexpr (tile_group<S, kWidth>() >= 4) functions[2] = multiply_panel<S, kFormat, 4, kWidth>;
  if constexpr (kFormat != Format::kF8) {
    table.multiply_rows[static_cast<int>(kFormat)][kWidth - 1] = multiply_page_rows<S, kFormat, kWidth>;
  }
}

template <class S, Format kFormat, int... kWidths>
constexpr void fill_format(Kernels& table, std::integer_sequence<int, kWidths...>) {
  (fill_width<S, kFormat, kWidths + 1>(table), ...);
  table.unpack[static_cast<int>(kFormat)] = unpack_tile<S, kFormat>;
}

template <class S>
constexpr void fill_matrix_kernels(Kernels& table) {
  const auto widths = std::make_integer_sequence<int, kMaxPanel>();
  fill_format<S, Format::kF8>(table, widths);
  fill_format<S, Format::kBf16>(table, widths);
  fill_format<S, Format::kF32>(table, widths);
}

}  // namespace
}  // namespace ull::cpu
