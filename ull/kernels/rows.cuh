// What becomes of a linear layer's row sums: f32 outputs, or an addition to the residual.
#pragma once

#include "linear.cuh"

namespace ull::gpu {

// sum * scale + bias, for four rows.
struct RowScale {
  arch::Vector4 scale;
  arch::Vector4 bias;
};

ULL_DEVICE RowScale load_row_scale(const LinearParams& params, int row) {
  RowScale result{*reinterpret_cast<const arch::Vector4*>(params.scale + row), {}};
  if (params.bias != nullptr) result.bias = *reinterpret_cast<const arch::Vector4*>(params.bias + row);
  return result;
}

// `unit`, a power of two, undoes the unit in which the activations are kept.
ULL_DEVICE Four scaled(const Four& sum, const RowScale& rows, float unit = 1.0F) {
  Four result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.value[i] =
        ::fmaf(sum.value[i], arch::bits_float(rows.scale.word[i]) * unit, arch::bits_float(rows.bias.word[i]));
  }
  return result;
}

ULL_DEVICE void store_four(float* address, const Four& four) {
  arch::store_global(address, {arch::float_bits(four.value[0]), arch::float_bits(four.value[1]),
                               arch::float_bits(four.value[2]), arch::float_bits(four.value[3])});
}

// f32 [64, rows rounded up to 16].
template <int kRows>
struct StoreRows {
  static constexpr int kItems = kRowUnit / 4;
  using Operands = RowScale;

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int, int item) {
    return load_row_scale(params, tile * kRowUnit + 4 * item);
  }

  template <typename Plan>
  ULL_DEVICE static void store(const LinearParams& params, const Operands& operands, const float* partial, int tile,
                               int token, int item) {
    float* row = static_cast<float*>(params.output) + static_cast<int64_t>(token) * round_up(kRows, kRowUnit);
    store_four(row + tile * kRowUnit + 4 * item, scaled(sum_slices<Plan>(partial, token, 4 * item), operands));
  }
};

// Added to the f32 residual [64, H]. The activations are in units of 1 / kUnit.
template <int kUnit>
struct AddRows {
  static constexpr int kItems = kRowUnit / 4;
  struct Operands {
    RowScale rows;
    arch::Vector4 residual;
  };

  ULL_DEVICE static float* address(const LinearParams& params, int tile, int token, int item) {
    return static_cast<float*>(params.output) + token * kResidualStride + tile * kRowUnit + 4 * item;
  }

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int token, int item) {
    return {load_row_scale(params, tile * kRowUnit + 4 * item), arch::load_global(address(params, tile, token, item))};
  }

  template <typename Plan>
  ULL_DEVICE static void store(const LinearParams& params, const Operands& operands, const float* partial, int tile,
                               int token, int item) {
    Four four = scaled(sum_slices<Plan>(partial, token, 4 * item), operands.rows, kUnit);
#pragma unroll
    for (int i = 0; i < 4; ++i) four.value[i] = arch::bits_float(operands.residual.word[i]) + four.value[i];
    store_four(address(params, tile, token, item), four);
  }
};

}  // namespace ull::gpu
