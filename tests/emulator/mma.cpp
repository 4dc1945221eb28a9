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

// The operands of the whole warp, as matrices.
struct Matrices {
  alignas(32) float a[16][16];
  alignas(32) double b[16][8];
  alignas(32) double c[16][8];
};

void unpack(uint32_t pair, float& low, float& high) {
  low = f16_to_f32(static_cast<uint16_t>(pair));
  high = f16_to_f32(static_cast<uint16_t>(pair >> 16));
}

// The fragments of arch::mma: g = lane / 4, t = lane % 4.
void gather(const Operand (&operands)[kWarpLanes], Matrices& m) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    const Operand& o = operands[lane];
    unpack(o.a[0], m.a[g][2 * t], m.a[g][2 * t + 1]);
    unpack(o.a[1], m.a[g + 8][2 * t], m.a[g + 8][2 * t + 1]);
    unpack(o.a[2], m.a[g][2 * t + 8], m.a[g][2 * t + 9]);
    unpack(o.a[3], m.a[g + 8][2 * t + 8], m.a[g + 8][2 * t + 9]);
    for (int half = 0; half < 2; ++half) {
      float low;
      float high;
      unpack(o.b[half], low, high);
      m.b[2 * t + 8 * half][g] = low;
      m.b[2 * t + 8 * half + 1][g] = high;
    }
  }
}

void scatter(const Matrices& m, Operand (&operands)[kWarpLanes]) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    float (&c)[4] = operands[lane].c;
    for (int i = 0; i < 4; ++i)
      c[i] = static_cast<float>(m.c[g + 8 * (i / 2)][2 * t + i % 2] + static_cast<double>(c[i]));
  }
}

void product(Matrices& m) {
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sum[column] += static_cast<double>(m.a[row][k]) * m.b[k][column];
    }
    memcpy(m.c[row], sum, sizeof(sum));
  }
}

#ifdef __x86_64__
// The same bits: a product of two f16 is exact in double, so fma rounds as the addition does.
__attribute__((target("avx2,fma"))) void product_avx2(Matrices& m) {
  for (int row = 0; row < 16; row += 4) {
    __m256d sum[4][2] = {};
    for (int k = 0; k < 16; ++k) {
      const __m256d b0 = _mm256_load_pd(&m.b[k][0]);
      const __m256d b1 = _mm256_load_pd(&m.b[k][4]);
      for (int i = 0; i < 4; ++i) {
        const __m256d a = _mm256_set1_pd(static_cast<double>(m.a[row + i][k]));
        sum[i][0] = _mm256_fmadd_pd(a, b0, sum[i][0]);
        sum[i][1] = _mm256_fmadd_pd(a, b1, sum[i][1]);
      }
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_store_pd(&m.c[row + i][0], sum[i][0]);
      _mm256_store_pd(&m.c[row + i][4], sum[i][1]);
    }
  }
}
#endif

}  // namespace

void multiply(Operand (&operands)[kWarpLanes]) {
  Matrices m;
  gather(operands, m);
#ifdef __x86_64__
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) {
    product_avx2(m);
    return scatter(m, operands);
  }
#endif
  product(m);
  scatter(m, operands);
}

}  // namespace ull::emulator
