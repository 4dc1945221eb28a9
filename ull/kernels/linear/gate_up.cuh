// silu(gate) * up of the normed residual: shape and epilogue. A row tile is eight gate rows and the eight up rows that
// belong to them.
#pragma once

#include "exponential.cuh"
#include "linear/rows.cuh"

namespace ull::gpu {

using GateUp = LinearShape<2 * round_up(kIntermediate, kRowUnit / 2), kHidden, kWeightBits, true>;

// silu(gate) * up in the unit in which it is kept as f16.
ULL_DEVICE float activated(float gate, float up) { return silu(gate) * up * kMlpScale; }

inline constexpr int kGateUpColumns = kRowUnit / 2;  // of a row tile

// Zeros in the padding of a token's last step. column: of the last row tile's, that of the same place in a tile.
template <auto kIndex, typename Columns>
ULL_DEVICE void pad_activations(uint16_t* output, int token, int column) {
  for (int pad = column + kGateUpColumns; pad < round_up(kIntermediate, kColumnUnit); pad += kGateUpColumns) {
    *reinterpret_cast<Columns*>(output + kIndex(token, pad)) = {};
  }
}

// A row tile's sums as activations from `first_token` on, of the tokens below `count`. kIndex(token, column): where
// they lie. No branch stands among them, so that the groups' long chains of instructions run beside each other.
template <auto kIndex, int kGroups, typename Params>
ULL_DEVICE void store_activations(const Params& params, int tile, int first_token, int count,
                                  const float (&sums)[kGroups][4]) {
  // A lane has gate and up of column g for tokens 2t, 2t + 1; with its neighbour it makes pairs of columns.
  const int g = arch::lane() / 4, row = tile * kRowUnit + g, column = tile * kGateUpColumns + g / 2 * 2;
  const int token = first_token + 2 * (arch::lane() % 4) + g % 2;
  const bool odd = g % 2 != 0;
  const float gate_scale = params.scale[row], up_scale = params.scale[row + 8];
  const float gate_bias = params.bias == nullptr ? 0.0F : params.bias[row];
  const float up_bias = params.bias == nullptr ? 0.0F : params.bias[row + 8];
  auto* output = static_cast<uint16_t*>(params.output);
  uint16_t* own = output + kIndex(token, column);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      y[i] = activated(scaled(sums[group][i], gate_scale, gate_bias), scaled(sums[group][2 + i], up_scale, up_bias));
    }
    const float received = arch::shuffle_xor(odd ? y[0] : y[1], 4);
    const uint32_t pair = arch::f32x2_to_f16x2(odd ? received : y[0], odd ? y[1] : received);
    auto* to = reinterpret_cast<uint32_t*>(own + group * kIndex(kGroupTokens, 0));
    if (token + group * kGroupTokens < count) *to = pair;
  }
  if (kIntermediate % kColumnUnit == 0 || tile != GateUp::kRowTiles - 1) return;
  const int end = smaller(count, first_token + kGroups * kGroupTokens);
  for (int at = token; at < end; at += kGroupTokens) pad_activations<kIndex, uint32_t>(output, at, column);
}

// Epilogue: f16 activations times kMlpScale.
struct GateUpEpilogue {
  static constexpr int kItems =
      kGateUpColumns;  // a column each: its activation is a long chain of dependent instructions
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
    auto* output = static_cast<uint16_t*>(params.output);
    const int column = tile * kGateUpColumns + item;
    output[round_index<1>(token, column)] = static_cast<uint16_t>(arch::f32x2_to_f16x2(activated(gate, up), 0.0F));
    if (kIntermediate % kColumnUnit == 0 || tile != GateUp::kRowTiles - 1) return;
    pad_activations<round_index<1>, uint16_t>(output, token, column);
  }

  template <int kGroups>
  ULL_DEVICE static void finish_tile(const LinearParams& params, int tile, int count, const float (&sums)[kGroups][4]) {
    store_activations<round_index<kGroups * kGroupTokens>>(params, tile, 0, count, sums);
  }
};

}  // namespace ull::gpu
