// Powers of e where a kernel takes thousands: the weights of attention, the gates of MLPs. The chip computes powers of
// two, an instruction each, so exponents come times log2(e). Who samples has exp_lanes() of base/float_math.h, which
// every machine computes to the same bits.
#pragma once

#include "arch.cuh"

namespace ull::gpu {

inline constexpr float kLog2E = 1.44269504F;

// 1 / (1 + e^-x); NaN stays NaN.
ULL_DEVICE float sigmoid(float x) { return arch::fast_reciprocal(1.0F + arch::fast_exp2(x * -kLog2E)); }
ULL_DEVICE float silu(float x) { return x * sigmoid(x); }

}  // namespace ull::gpu
