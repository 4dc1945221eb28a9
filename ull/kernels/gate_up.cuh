// silu(gate) * up of the normed residual: shape and epilogue. A row tile is eight gate rows and the eight up rows that
// belong to them.
#pragma once

#include "base/float_math.h"
#include "rows.cuh"

namespace ull::gpu {

using GateUp = LinearShape<2 * round_up(kIntermediate, kRowUnit / 2), kHidden, kWeightBits, true>;

// silu(gate) * up in the unit in which it is kept as f16.
ULL_DEVICE float activated(float gate, float up) {
  return gate * arch::reciprocal(1.0F + exp_lanes<ScalarMath>(-gate)) * up * kMlpScale;
}

// Epilogue: f16 activations times kMlpScale.
struct GateUpEpilogue {
  static constexpr int kItems = 2;
  static constexpr int kTileColumns = kRowUnit / 2;
  struct Operands {
    RowScale gate;
    RowScale up;
  };

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int, int item) {
    const int row = tile * kRowUnit + 4 * item;
    return {load_row_scale(params.scale, params.bias, row), load_row_scale(params.scale, params.bias, row + 8)};
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    const Four gate = scaled(sum(4 * item), operands.gate);
    const Four up = scaled(sum(8 + 4 * item), operands.up);
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = activated(gate.value[i], up.value[i]);
    store(params, tile, token, 4 * item,
          arch::Vector2{arch::f32x2_to_f16x2(y[0], y[1]), arch::f32x2_to_f16x2(y[2], y[3])});
  }

  // A lane has gate and up of column g for tokens 2t, 2t + 1; with its neighbour it makes pairs of columns.
  template <int kGroups>
  ULL_DEVICE static void finish_tile(const LinearParams& params, int tile, int count, const float (&sums)[kGroups][4]) {
    const int g = arch::lane() / 4;
    const int row = tile * kRowUnit + g;
    const float gate_scale = params.scale[row];
    const float up_scale = params.scale[row + 8];
    const float gate_bias = params.bias == nullptr ? 0.0F : params.bias[row];
    const float up_bias = params.bias == nullptr ? 0.0F : params.bias[row + 8];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[i] = activated(scaled(sums[group][i], gate_scale, gate_bias), scaled(sums[group][2 + i], up_scale, up_bias));
      }
      const bool odd = g % 2 != 0;
      const float received = arch::shuffle_xor(odd ? y[0] : y[1], 4);
      const uint32_t pair = odd ? arch::f32x2_to_f16x2(received, y[1]) : arch::f32x2_to_f16x2(y[0], received);
      const int token = group * kGroupTokens + 2 * (arch::lane() % 4) + g % 2;
      if (token < count) store(params, tile, token, g / 2 * 2, pair);
    }
  }

  // Some of the tile's columns, and zeros in the last step's padding.
  template <typename Columns>
  ULL_DEVICE static void store(const LinearParams& params, int tile, int token, int column, Columns columns) {
    auto* output = static_cast<uint16_t*>(params.output);
    const int first = tile * kTileColumns + column;
    *reinterpret_cast<Columns*>(output + activation_index(token, first)) = columns;
    if (tile == GateUp::kRowTiles - 1) {
      for (int pad = first + kTileColumns; pad < round_up(kIntermediate, kColumnUnit); pad += kTileColumns) {
        *reinterpret_cast<Columns*>(output + activation_index(token, pad)) = {};
      }
    }
  }
};

}  // namespace ull::gpu
