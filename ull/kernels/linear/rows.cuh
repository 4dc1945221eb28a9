// What becomes of a linear layer's row sums: f32 outputs, or an addition to the residual.
#pragma once

#include "linear/linear.cuh"

namespace ull::gpu {

// Four consecutive rows of one token.
struct Four {
  float value[4];
};

ULL_DEVICE Four load_four(const arch::Vector4& v) {
  return {arch::bits_float(v.word[0]), arch::bits_float(v.word[1]), arch::bits_float(v.word[2]),
          arch::bits_float(v.word[3])};
}

ULL_DEVICE arch::Vector4 bits_of(const Four& four) {
  return {arch::float_bits(four.value[0]), arch::float_bits(four.value[1]), arch::float_bits(four.value[2]),
          arch::float_bits(four.value[3])};
}

ULL_DEVICE void store_four(float* address, const Four& four) { arch::store_global(address, bits_of(four)); }
ULL_DEVICE void store_four_if(bool stores, float* address, const Four& four) {
  arch::store_global_if(stores, address, bits_of(four));
}

// Transposes 4 x 4: of the four lanes with the same t and g / 4, lane i gets element i of all. So the lane holds rows
// quad_row() .. + 3 of token 2t + quad_token() of the group.
ULL_DEVICE Four quad(const float (&c)[4]) {
  const int lane = arch::lane();
  Four four{c[0], c[1], c[2], c[3]};
  float (&v)[4] = four.value;
#pragma unroll
  for (int bit = 0; bit < 2; ++bit) {
    const bool high = (lane >> (2 + bit) & 1) != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int low_index = bit == 0 ? 2 * k : k;
      const int high_index = low_index + 1 + bit;
      const float received = arch::shuffle_xor(high ? v[low_index] : v[high_index], 4 << bit);
      v[low_index] = high ? received : v[low_index];
      v[high_index] = high ? v[high_index] : received;
    }
  }
  return four;
}
ULL_DEVICE int quad_row() { return (arch::lane() >> 3 & 1) * 8 + (arch::lane() >> 4 & 1) * 4; }
ULL_DEVICE int quad_token() { return 2 * (arch::lane() % 4) + (arch::lane() >> 2 & 1); }

// Scale and bias of four rows.
struct RowScale {
  arch::Vector4 scale;
  arch::Vector4 bias;
};

ULL_DEVICE RowScale load_row_scale(const float* scale, const float* bias, int row) {
  RowScale result{*reinterpret_cast<const arch::Vector4*>(scale + row), {}};
  if (bias != nullptr) result.bias = *reinterpret_cast<const arch::Vector4*>(bias + row);
  return result;
}

ULL_DEVICE Four added(const Four& a, const Four& b) {
  return {a.value[0] + b.value[0], a.value[1] + b.value[1], a.value[2] + b.value[2], a.value[3] + b.value[3]};
}

// `unit`, a power of two, undoes the unit in which the activations are kept.
ULL_DEVICE float scaled(float sum, float scale, float bias, float unit = 1.0F) {
  return ::fmaf(sum, scale * unit, bias);
}

ULL_DEVICE Four scaled(const Four& sum, const RowScale& rows, float unit = 1.0F) {
  Four result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.value[i] =
        scaled(sum.value[i], arch::bits_float(rows.scale.word[i]), arch::bits_float(rows.bias.word[i]), unit);
  }
  return result;
}

// The slices' sums that a split layer of kRows padded rows left, on their way.
struct SliceSums {
  arch::Vector4 slice[kSlices];

  template <int kRows, int kTokens = kTreeTokens>
  ULL_DEVICE void load(const float* partial, int token, int row) {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      slice[i] = arch::load_global(partial + (static_cast<int64_t>(i) * kTokens + token) * kRows + row);
    }
  }

  ULL_DEVICE Four total() const {
    Four result = load_four(slice[0]);
#pragma unroll
    for (int i = 1; i < kSlices; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) result.value[j] += arch::bits_float(slice[i].word[j]);
    }
    return result;
  }
};

// The thread's share of a token's residual plus the sums that o or down left in slices, of kTokens tokens; the residual
// gets them too. `params`: as NormParams has them. kAtOnce: vectors whose eight slices are on their way together; one
// is enough where all threads of a multiprocessor load.
template <int kTokens, int kAtOnce = 1, typename Params>
ULL_DEVICE void load_finished_row(const Params& params, RowShare& row, int token, int thread = arch::thread()) {
  float* residual = params.residual + int64_t{token} * kResidualStride;
  load_row(row, residual, thread);
#pragma unroll
  for (int first = 0; first < kNormVectors; first += kAtOnce) {
    if (row_column(first, thread) < kHidden) {
      SliceSums sums[kAtOnce];
      RowScale rows[kAtOnce];
      const auto is_there = [&](int i) {
        return i == 0 || (first + i < kNormVectors && row_column(first + i, thread) < kHidden);
      };
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = row_column(first + i, thread);
        if (!is_there(i)) continue;
        sums[i].template load<kResidualStride, kTokens>(params.partial, token, column);
        rows[i] = load_row_scale(params.scale, params.bias, column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!is_there(i)) continue;
        const int column = row_column(first + i, thread);
        arch::Vector4& vector = row.vector[first + i];
        vector = bits_of(added(load_four(vector), scaled(sums[i].total(), rows[i], params.unit)));
        arch::store_global(residual + column, vector);
      }
    }
  }
}

// Epilogue: f32 [64, rows rounded up to 16]. The activations are in units of 1 / kUnit.
template <int kRows, int kUnit = 1>
struct StoreRows {
  static constexpr int kItems = kRowUnit / 4;
  using Operands = RowScale;

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int, int item) {
    return load_row_scale(params.scale, params.bias, tile * kRowUnit + 4 * item);
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    float* row = static_cast<float*>(params.output) + static_cast<int64_t>(token) * round_up(kRows, kRowUnit);
    store_four(row + tile * kRowUnit + 4 * item, scaled(sum(4 * item), operands, kUnit));
  }

  ULL_DEVICE static RowScale load_tile(const LinearParams& params, int tile) {
    return load(params, tile, 0, quad_row() / 4);
  }

  template <int kGroups>
  ULL_DEVICE static void finish_tile(const LinearParams& params, const RowScale& rows, int tile, int count,
                                     const float (&sums)[kGroups][4]) {
    const int item = quad_row() / 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const Four four = quad(sums[group]);
      const int token = group * kGroupTokens + quad_token();
      if (token < count) finish(params, rows, tile, token, item, [&](int) { return four; });
    }
  }
};

// Epilogue: added to the f32 residual [64, H]. The activations are in units of 1 / kUnit.
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
    return {load_row_scale(params.scale, params.bias, tile * kRowUnit + 4 * item),
            arch::load_global(address(params, tile, token, item))};
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    store_four(address(params, tile, token, item),
               added(load_four(operands.residual), scaled(sum(4 * item), operands.rows, kUnit)));
  }
};

}  // namespace ull::gpu
