// The tensor core's m16n8k16 product in software: the products are exact, their sum and c are added in double in
// ascending k, and rounded once to f32. The chip keeps fewer bits while it adds (and truncates), so that its last bits
// differ; what holds on both is that the same operands give the same bits in every column.
#include <cstring>

#include "block.h"
#include "numbers.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ull::emulator {

namespace {

// g = lane / 4, t = lane % 4, see arch::mma. Pairs along k are adjacent in its fragments.
void gather(const Operand (&operands)[kWarpLanes], Matrices& m) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    const Operand& o = operands[lane];
    set_a(m, lane, o.a);
    for (int i = 0; i < 2; ++i) {
      m.b[2 * t + 8 * i][g] = static_cast<uint16_t>(o.b[i]);
      m.b[2 * t + 8 * i + 1][g] = static_cast<uint16_t>(o.b[i] >> 16);
    }
    memcpy(&m.c[g][2 * t], &o.c[0], 8);
    memcpy(&m.c[g + 8][2 * t], &o.c[2], 8);
  }
}

void scatter(const Matrices& m, Operand (&operands)[kWarpLanes]) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    memcpy(&operands[lane].c[0], &m.c[g][2 * t], 8);
    memcpy(&operands[lane].c[2], &m.c[g + 8][2 * t], 8);
  }
}

void product(Matrices& m) {
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      const double a = f16_to_f32(m.a[row][k]);
      for (int column = 0; column < 8; ++column) sum[column] += a * f16_to_f32(m.b[k][column]);
    }
    for (int column = 0; column < 8; ++column) {
      m.c[row][column] = static_cast<float>(sum[column] + static_cast<double>(m.c[row][column]));
    }
  }
}

#ifdef __x86_64__
#define ULL_AVX2 __attribute__((target("avx2,fma,f16c")))
#define ULL_AVX512 __attribute__((target("avx512f,avx2,fma,f16c")))

struct Widened {
  alignas(64) double a[16][16];
  alignas(64) double b[16][8];
};

ULL_AVX2 void widen(const uint16_t* from, double* to) {  // 8
  const __m256 values = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  _mm256_store_pd(to, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
  _mm256_store_pd(to + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
}

ULL_AVX2 void widen(const Matrices& m, Widened& to) {
  for (int i = 0; i < 16; ++i) {
    widen(&m.a[i][0], &to.a[i][0]);
    widen(&m.a[i][8], &to.a[i][8]);
    widen(m.b[i], to.b[i]);
  }
}

// The same bits: a product of two f16 is exact in double, so fma rounds as the addition does.
ULL_AVX2 void product_avx2(Matrices& m) {
  Widened w;
  widen(m, w);
  for (int row = 0; row < 16; row += 4) {
    __m256d sum[4][2] = {};
    for (int k = 0; k < 16; ++k) {
      const __m256d b0 = _mm256_load_pd(&w.b[k][0]);
      const __m256d b1 = _mm256_load_pd(&w.b[k][4]);
      for (int i = 0; i < 4; ++i) {
        const __m256d a = _mm256_broadcast_sd(&w.a[row + i][k]);
        sum[i][0] = _mm256_fmadd_pd(a, b0, sum[i][0]);
        sum[i][1] = _mm256_fmadd_pd(a, b1, sum[i][1]);
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        float* c = &m.c[row + i][4 * half];
        _mm_store_ps(c, _mm256_cvtpd_ps(_mm256_add_pd(sum[i][half], _mm256_cvtps_pd(_mm_load_ps(c)))));
      }
    }
  }
}

// (maskz: g++ 12 warns of the plain conversions.)
ULL_AVX512 void product_avx512(Matrices& m) {
  Widened w;
  widen(m, w);
  for (int row = 0; row < 16; row += 8) {
    __m512d sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      const __m512d b = _mm512_load_pd(w.b[k]);
      for (int i = 0; i < 8; ++i) sum[i] = _mm512_fmadd_pd(_mm512_set1_pd(w.a[row + i][k]), b, sum[i]);
    }
    for (int i = 0; i < 8; ++i) {
      float* c = m.c[row + i];
      _mm256_store_ps(
          c, _mm512_maskz_cvtpd_ps(0xFF, _mm512_add_pd(sum[i], _mm512_maskz_cvtps_pd(0xFF, _mm256_load_ps(c)))));
    }
  }
}

using Product = void (*)(Matrices&);

Product widest_product() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return product;
  return __builtin_cpu_supports("avx512f") ? product_avx512 : product_avx2;
}
#endif

}  // namespace

void set_a(Matrices& m, int lane, const uint32_t (&a)[4]) {
  const int g = lane / 4;
  const int t = lane % 4;
  memcpy(&m.a[g][2 * t], &a[0], 4);
  memcpy(&m.a[g + 8][2 * t], &a[1], 4);
  memcpy(&m.a[g][2 * t + 8], &a[2], 4);
  memcpy(&m.a[g + 8][2 * t + 8], &a[3], 4);
}

void multiply(Matrices& m) {
#ifdef __x86_64__
  static const Product widest = widest_product();
  widest(m);
#else
  product(m);
#endif
}

void multiply(Operand (&operands)[kWarpLanes]) {
  Matrices m;
  gather(operands, m);
  multiply(m);
  scatter(m, operands);
}

}  // namespace ull::emulator
