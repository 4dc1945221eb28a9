// exp and log as one sequence of IEEE single-precision operations, so that every instruction set (and the GPU) gives
// the same bits. Written once over a set of vector operations S (cpu/kernels/simd_*.h); ScalarMath is the one-lane set.
// Coefficients: Cephes expf.c and logf.c (S. Moshier). Relative error below 2e-7.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/inline.h"

namespace ull {

// One lane of the operations that the functions below need. Always inlined: files compiled for different instruction
// sets include this, and the linker must not choose one copy for all.
struct ScalarMath {
  using F = float;
  using I = uint32_t;
  using M = bool;
  ULL_HOST_DEVICE static ULL_INLINE F set(float value) { return value; }
  ULL_HOST_DEVICE static ULL_INLINE F add(F a, F b) { return a + b; }
  ULL_HOST_DEVICE static ULL_INLINE F sub(F a, F b) { return a - b; }
  ULL_HOST_DEVICE static ULL_INLINE F mul(F a, F b) { return a * b; }
  ULL_HOST_DEVICE static ULL_INLINE F fma(F a, F b, F c) { return ::fmaf(a, b, c); }
  ULL_HOST_DEVICE static ULL_INLINE F max(F a, F b) { return a > b ? a : b; }  // b if either is NaN, as x86 does
  ULL_HOST_DEVICE static ULL_INLINE F min(F a, F b) { return a < b ? a : b; }
  ULL_HOST_DEVICE static ULL_INLINE M less(F a, F b) { return a < b; }
  ULL_HOST_DEVICE static ULL_INLINE F select(M mask, F yes, F no) { return mask ? yes : no; }
  ULL_HOST_DEVICE static ULL_INLINE I bits(F a) {
    I result;
    memcpy(&result, &a, sizeof(result));
    return result;
  }
  ULL_HOST_DEVICE static ULL_INLINE F from_bits(I a) {
    F result;
    memcpy(&result, &a, sizeof(result));
    return result;
  }
  ULL_HOST_DEVICE static ULL_INLINE I iset(uint32_t value) { return value; }
  ULL_HOST_DEVICE static ULL_INLINE I iadd(I a, I b) { return a + b; }
  ULL_HOST_DEVICE static ULL_INLINE I isub(I a, I b) { return a - b; }
  template <int kBits>
  ULL_HOST_DEVICE static ULL_INLINE I shift_left(I a) {
    return a << kBits;
  }
  template <int kBits>
  ULL_HOST_DEVICE static ULL_INLINE I shift_right_signed(I a) {
    return static_cast<I>(static_cast<int32_t>(a) >> kBits);
  }
  ULL_HOST_DEVICE static ULL_INLINE F to_float(I a) { return static_cast<float>(static_cast<int32_t>(a)); }
};

// e^x; 0 below -86 (no denormals), saturates above 88; NaN stays NaN.
template <class S>
ULL_HOST_DEVICE ULL_INLINE typename S::F exp_lanes(typename S::F x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const auto is_zero = S::less(x, S::set(-86.0F));
  x = S::min(S::set(88.0F), S::max(S::set(-86.0F), x));
  const auto rounded = S::fma(x, S::set(1.44269504F), S::set(kRound));  // log2(e)
  const auto n = S::sub(rounded, S::set(kRound));
  auto r = S::fma(n, S::set(-0.693359375F), x);
  r = S::fma(n, S::set(2.12194440e-4F), r);
  auto p = S::set(1.9875691500e-4F);
  p = S::fma(p, r, S::set(1.3981999507e-3F));
  p = S::fma(p, r, S::set(8.3334519073e-3F));
  p = S::fma(p, r, S::set(4.1665795894e-2F));
  p = S::fma(p, r, S::set(1.6666665459e-1F));
  p = S::fma(p, r, S::set(5.0000001201e-1F));
  p = S::add(S::fma(p, S::mul(r, r), r), S::set(1.0F));
  const auto exponent = S::template shift_left<23>(S::isub(S::bits(rounded), S::iset(0x4B400000U)));
  return S::select(is_zero, S::set(0.0F), S::from_bits(S::iadd(S::bits(p), exponent)));
}

// ln(x) for normal positive x; undefined otherwise.
template <class S>
ULL_HOST_DEVICE ULL_INLINE typename S::F log_lanes(typename S::F x) {
  // x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
  const auto e_bits = S::template shift_right_signed<23>(S::isub(S::bits(x), S::iset(0x3F3504F3U)));
  const auto m = S::from_bits(S::isub(S::bits(x), S::template shift_left<23>(e_bits)));
  const auto e = S::to_float(e_bits);
  const auto f = S::sub(m, S::set(1.0F));
  const auto z = S::mul(f, f);
  auto p = S::set(7.0376836292e-2F);
  p = S::fma(p, f, S::set(-1.1514610310e-1F));
  p = S::fma(p, f, S::set(1.1676998740e-1F));
  p = S::fma(p, f, S::set(-1.2420140846e-1F));
  p = S::fma(p, f, S::set(1.4249322787e-1F));
  p = S::fma(p, f, S::set(-1.6668057665e-1F));
  p = S::fma(p, f, S::set(2.0000714765e-1F));
  p = S::fma(p, f, S::set(-2.4999993993e-1F));
  p = S::fma(p, f, S::set(3.3333331174e-1F));
  auto y = S::mul(S::mul(p, f), z);
  y = S::fma(e, S::set(-2.12194440e-4F), y);
  y = S::fma(z, S::set(-0.5F), y);
  return S::fma(e, S::set(0.693359375F), S::add(f, y));
}

// Standard Gumbel noise from 32 random bits: -ln(-ln(u)), u = ((bits >> 9) + 0.5) * 2^-23, exact in single precision
// and never 0 or 1.
template <class S>
ULL_HOST_DEVICE ULL_INLINE typename S::F gumbel_from_unit(typename S::F bits_shifted_by_9) {
  const auto u = S::mul(S::add(bits_shifted_by_9, S::set(0.5F)), S::set(0x1.0p-23F));
  const auto positive = S::sub(S::set(0.0F), log_lanes<S>(u));
  return S::sub(S::set(0.0F), log_lanes<S>(positive));
}

}  // namespace ull
