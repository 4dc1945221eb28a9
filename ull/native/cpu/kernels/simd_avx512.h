// Sixteen single-precision lanes in one AVX-512 register. Include only from *_avx512.cpp.
#pragma once

// GCC 12's AVX-512 intrinsics warn about their own deliberately undefined registers (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace ull::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  static constexpr const char* kName = "avx512";
  static constexpr int kWholeTileTokens =
      12;  // widest panel whose sums for a whole tile (2 F a token) fit 32 registers
  static constexpr int kHalfTileTokens = 12;
  static constexpr int kDecodeTiles = 4;  // tiles at once for one token: 8 chains cover the latency of an FMA

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static F select(M mask, F yes, F no) { return _mm512_mask_blend_ps(mask, no, yes); }
  static I iselect(M mask, I yes, I no) { return _mm512_mask_blend_epi32(mask, no, yes); }

  // Over all lanes, by the fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
  static float add_lanes(F a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float max_lanes(F a) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  static I bits(F a) { return _mm512_castps_si512(a); }
  static F from_bits(I a) { return _mm512_castsi512_ps(a); }
  static I iset(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static I iload(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void istore(uint32_t* p, I a) { _mm512_storeu_si512(p, a); }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  template <int kBits>
  static I shift_left(I a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  static I shift_right(I a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  static I shift_right_signed(I a) {
    return _mm512_srai_epi32(a, kBits);
  }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }

  // 32 x 32 -> 64 bit products, split into high and low words.
  static void multiply_wide(I a, uint32_t b, I& high, I& low) {
    const I factor = _mm512_set1_epi64(b);
    const I even = _mm512_mul_epu32(a, factor);
    const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  }

  // Transposes the 4 x 4 blocks that the four registers form within each group of four lanes.
  static void transpose4(I& a, I& b, I& c, I& d) {
    const I ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    const I cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    a = _mm512_unpacklo_epi64(ab_low, cd_low);
    b = _mm512_unpackhi_epi64(ab_low, cd_low);
    c = _mm512_unpacklo_epi64(ab_high, cd_high);
    d = _mm512_unpackhi_epi64(ab_high, cd_high);
  }

  // 32 packed elements -> rows 0..15 and rows 16..31 (see Format in kernels.h).
  static void decode_f8(const uint8_t* p, F& low, F& high) {
    const I words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const I mask = _mm512_set1_epi32(static_cast<int>(0x87F00000U));
    low = from_bits(_mm512_and_si512(_mm512_slli_epi32(words, 20), mask));
    high = from_bits(_mm512_and_si512(_mm512_slli_epi32(words, 4), mask));
  }
  static void decode_bf16(const uint8_t* p, F& low, F& high) {
    const I pairs = _mm512_loadu_si512(p);
    low = from_bits(_mm512_slli_epi32(pairs, 16));
    high = from_bits(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
  }
};

}  // namespace
}  // namespace ull::cpu
