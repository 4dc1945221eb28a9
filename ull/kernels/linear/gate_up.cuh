// silu(gate) * up of the normed residual: shape and epilogue. A row tile is eight gate rows and the eight up rows that
// belong to them.
#pragma once

#include "base/float_math.h"
#include "linear/rows.cuh"

namespace ull::gpu {

using GateUp = LinearShape<2 * round_up(kIntermediate, kRowUnit / 2), kHidden, kWeightBits, true>;

// silu(gate) * up in the unit in which it is kept as f16.
ULL_DEVICE float activated(float gate, float up) {
  return gate * arch::reciprocal(1.0F + exp_lanes<ScalarMath>(-gate)) * up * kMlpScale;
}

// Epilogue: f16 activations times kMlpScale.
struct GateUpEpilogue {
  static constexpr int kTileColumns = kRowUnit / 2;
  static constexpr int kItems =
      kTileColumns;  // a column each: its activation is a long chain of dependent instructions
  struct Operands {
    float gate_scale, gate_bias, up_scale, up_bias;
  };

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int, int item) {
    const int row = tile * kRowUnit + item;
    Operands operands{params.scale[row], 0.0F, params.scale[row + 8], 0.0F};
    if (params.bias != nullptr) {
      operands.gate_bias = params.bias[row];
      operands.up_bias = params.bias[row + 8];
    }
    return operands;
  }

  template <typename Sums>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sums& sums) {
    const float gate = scaled(sums.one(item), operands.gate_scale, operands.gate_bias);
    const float up = scaled(sums.one(8 + item), operands.up_scale, operands.up_bias);
    store<1>(params, tile, token, item, static_cast<uint16_t>(arch::f32x2_to_f16x2(activated(gate, up), 0.0F)));
  }

  // A lane has gate and up of column g for tokens 2t, 2t + 1; with its neighbour it makes pairs of columns.
  template <int kGroups>
  ULL_DEVICE static void finish_tile(const LinearParams& params, int tile, int count, const float (&sums)[kGroups][4]) {
    const int g = arch::lane() / 4;
    const Operands rows = load(params, tile, 0, g);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[i] = activated(scaled(sums[group][i], rows.gate_scale, rows.gate_bias),
                         scaled(sums[group][2 + i], rows.up_scale, rows.up_bias));
      }
      const bool odd = g % 2 != 0;
      const float received = arch::shuffle_xor(odd ? y[0] : y[1], 4);
      const uint32_t pair = odd ? arch::f32x2_to_f16x2(received, y[1]) : arch::f32x2_to_f16x2(y[0], received);
      const int token = group * kGroupTokens + 2 * (arch::lane() % 4) + g % 2;
      if (token < count) store<kGroups * kGroupTokens>(params, tile, token, g / 2 * 2, pair);
    }
  }

  // Some of the tile's columns, and zeros in the last step's padding. kTokens: of the round's kernels.
  template <int kTokens, typename Columns>
  ULL_DEVICE static void store(const LinearParams& params, int tile, int token, int column, Columns columns) {
    auto* output = static_cast<uint16_t*>(params.output);
    const int first = tile * kTileColumns + column;
    *reinterpret_cast<Columns*>(output + round_index<kTokens>(token, first)) = columns;
    if (tile == GateUp::kRowTiles - 1) {
      for (int pad = first + kTileColumns; pad < round_up(kIntermediate, kColumnUnit); pad += kTileColumns) {
        *reinterpret_cast<Columns*>(output + round_index<kTokens>(token, pad)) = {};
      }
    }
  }
};

}  // namespace ull::gpu
