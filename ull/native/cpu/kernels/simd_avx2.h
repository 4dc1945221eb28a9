// Sixteen single-precision lanes in two AVX2 registers (with FMA). Include only from *_avx2.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace ull::cpu {
namespace {

struct Avx2 {
  struct F {
    __m256 a, b;  // lanes 0..7, 8..15
  };
  struct I {
    __m256i a, b;
  };
  using M = F;
  static constexpr const char* kName = "avx2";
  static constexpr int kWholeTileTokens = 2;  // 16 registers: 8 hold sums, 4 weights
  static constexpr int kHalfTileTokens = 6;   // 12 hold sums, 2 weights, 1 an activation
  static constexpr int kDecodeTiles = 2;

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static M less(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
  static F select(M mask, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, mask.a), _mm256_blendv_ps(no.b, yes.b, mask.b)};
  }
  static I iselect(M mask, I yes, I no) { return bits(select(mask, from_bits(yes), from_bits(no))); }

  // Over all lanes, by the fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
  static float add_lanes(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float max_lanes(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  static I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
  static F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
  static I iset(uint32_t value) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(value));
    return {all, all};
  }
  static I iload(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
  }
  static void istore(uint32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
  }
  static I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
  static I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
  template <int kBits>
  static I shift_left(I x) {
    return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
  }
  template <int kBits>
  static I shift_right(I x) {
    return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
  }
  template <int kBits>
  static I shift_right_signed(I x) {
    return {_mm256_srai_epi32(x.a, kBits), _mm256_srai_epi32(x.b, kBits)};
  }
  static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

  // 32 x 32 -> 64 bit products, split into high and low words.
  static void multiply_wide(__m256i a, uint32_t b, __m256i& high, __m256i& low) {
    const __m256i factor = _mm256_set1_epi64x(b);
    const __m256i even = _mm256_mul_epu32(a, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }
  static void multiply_wide(I x, uint32_t b, I& high, I& low) {
    multiply_wide(x.a, b, high.a, low.a);
    multiply_wide(x.b, b, high.b, low.b);
  }

  // Transposes the 4 x 4 blocks that the four registers form within each group of four lanes.
  static void transpose4(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
    const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
    a = _mm256_unpacklo_epi64(ab_low, cd_low);
    b = _mm256_unpackhi_epi64(ab_low, cd_low);
    c = _mm256_unpacklo_epi64(ab_high, cd_high);
    d = _mm256_unpackhi_epi64(ab_high, cd_high);
  }
  static void transpose4(I& x, I& y, I& z, I& w) {
    transpose4(x.a, y.a, z.a, w.a);
    transpose4(x.b, y.b, z.b, w.b);
  }

  // 32 packed elements -> rows 0..15 and rows 16..31 (see Format in kernels.h).
  static void decode_f8(const uint8_t* p, F& low, F& high) {
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87F00000U));
    low = {_mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(first, 20), mask)),
           _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(second, 20), mask))};
    high = {_mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(first, 4), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(second, 4), mask))};
  }
  static void decode_bf16(const uint8_t* p, F& low, F& high) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000U));
    low = {_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(second, 16))};
    high = {_mm256_castsi256_ps(_mm256_and_si256(first, mask)), _mm256_castsi256_ps(_mm256_and_si256(second, mask))};
  }
};

}  // namespace
}  // namespace ull::cpu
