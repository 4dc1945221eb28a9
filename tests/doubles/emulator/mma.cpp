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

// The operands of the whole warp, as matrices. Pairs along k are adjacent in the fragments of arch::mma.
struct Matrices {
  alignas(32) uint16_t a16[16][16];
  alignas(32) uint16_t b16[8][16];  // [column][k]
  alignas(32) double a[16][16];
  alignas(32) double b[16][8];  // [k][column]
  alignas(32) double sum[16][8];
};

// g = lane / 4, t = lane % 4, see arch::mma.
void gather(const Operand (&operands)[kWarpLanes], Matrices& m) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    const Operand& o = operands[lane];
    memcpy(&m.a16[g][2 * t], &o.a[0], 4);
    memcpy(&m.a16[g + 8][2 * t], &o.a[1], 4);
    memcpy(&m.a16[g][2 * t + 8], &o.a[2], 4);
    memcpy(&m.a16[g + 8][2 * t + 8], &o.a[3], 4);
    memcpy(&m.b16[g][2 * t], &o.b[0], 4);
    memcpy(&m.b16[g][2 * t + 8], &o.b[1], 4);
  }
}

void scatter(const Matrices& m, Operand (&operands)[kWarpLanes]) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    float (&c)[4] = operands[lane].c;
    for (int i = 0; i < 4; ++i) {
      c[i] = static_cast<float>(m.sum[g + 8 * (i / 2)][2 * t + i % 2] + static_cast<double>(c[i]));
    }
  }
}

void product(Matrices& m) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) m.a[row][k] = f16_to_f32(m.a16[row][k]);
  }
  for (int column = 0; column < 8; ++column) {
    for (int k = 0; k < 16; ++k) m.b[k][column] = f16_to_f32(m.b16[column][k]);
  }
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sum[column] += m.a[row][k] * m.b[k][column];
    }
    memcpy(m.sum[row], sum, sizeof(sum));
  }
}

#ifdef __x86_64__
#define ULL_AVX2 __attribute__((target("avx2,fma,f16c")))

ULL_AVX2 void widen(const uint16_t* from, double* to) {  // 16
  for (int i = 0; i < 16; i += 4) {
    const __m128 single = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i)));
    _mm256_store_pd(to + i, _mm256_cvtps_pd(single));
  }
}

// The same bits: a product of two f16 is exact in double, so fma rounds as the addition does.
ULL_AVX2 void product_avx2(Matrices& m) {
  for (int row = 0; row < 16; ++row) widen(m.a16[row], m.a[row]);
  for (int column = 0; column < 8; ++column) {
    alignas(32) double values[16];
    widen(m.b16[column], values);
    for (int k = 0; k < 16; ++k) m.b[k][column] = values[k];
  }
  for (int row = 0; row < 16; row += 4) {
    __m256d sum[4][2] = {};
    for (int k = 0; k < 16; ++k) {
      const __m256d b0 = _mm256_load_pd(&m.b[k][0]);
      const __m256d b1 = _mm256_load_pd(&m.b[k][4]);
      for (int i = 0; i < 4; ++i) {
        const __m256d a = _mm256_broadcast_sd(&m.a[row + i][k]);
        sum[i][0] = _mm256_fmadd_pd(a, b0, sum[i][0]);
        sum[i][1] = _mm256_fmadd_pd(a, b1, sum[i][1]);
      }
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_store_pd(&m.sum[row + i][0], sum[i][0]);
      _mm256_store_pd(&m.sum[row + i][4], sum[i][1]);
    }
  }
}
#endif

}  // namespace

void multiply(Operand (&operands)[kWarpLanes]) {
  Matrices m;
  gather(operands, m);
#ifdef __x86_64__
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) {
    product_avx2(m);
    return scatter(m, operands);
  }
#endif
  product(m);
  scatter(m, operands);
}

}  // namespace ull::emulator
