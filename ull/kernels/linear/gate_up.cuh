// silu(gate) * up of the normed residual: shape and epilogue. A row tile is eight gate rows and the eight up rows that
// belong to them.
#pragma once

#include "exponential.cuh"
#include "linear/rows.cuh"

namespace ull::gpu {

using GateUp = LinearShape<2 * round_up(kIntermediate, kRowUnit / 2), kHidden, kWeightBits, true>;

inline constexpr int kGateUpColumns = kRowUnit / 2;  // of a row tile

// Scale and bias of a column's two rows.
struct GateUpScale {
  float gate_scale, gate_bias, up_scale, up_bias;
};

// Params: LinearParams, or a chunk's.
template <typename Params>
ULL_DEVICE GateUpScale load_gate_up_scale(const Params& params, int tile, int column) {
  const int row = tile * kRowUnit + column;
  GateUpScale scale{params.scale[row], 0.0F, params.scale[row + 8], 0.0F};
  if (params.bias != nullptr) {
    scale.gate_bias = params.bias[row];
    scale.up_bias = params.bias[row + 8];
  }
  return scale;
}

// silu(gate) * up of a column's sums, in the unit in which it is kept as f16.
ULL_DEVICE float activated(const GateUpScale& scale, float gate, float up) {
  return silu(scaled(gate, scale.gate_scale, scale.gate_bias)) * scaled(up, scale.up_scale, scale.up_bias) * kMlpScale;
}

// A row tile's sums as pairs of columns: take(group, pair). scale: of the lane's column. A lane has gate and up of
// column g for tokens 2t, 2t + 1; with its neighbour it makes the pair of columns 2 * (g / 2), + 1 of token 2t + g % 2.
// No branch stands here, so that the groups' long chains of instructions run beside each other.
template <int kGroups, typename Take>
ULL_DEVICE void activate_pairs(const GateUpScale& scale, const float (&sums)[kGroups][4], const Take& take) {
  const bool odd = arch::lane() / 4 % 2 != 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = activated(scale, sums[group][i], sums[group][2 + i]);
    const float received = arch::shuffle_xor(odd ? y[0] : y[1], 4);
    take(group, arch::f32x2_to_f16x2(odd ? received : y[0], odd ? y[1] : received));
  }
}
ULL_DEVICE int pair_column() { return arch::lane() / 8 * 2; }
ULL_DEVICE int pair_token() { return 2 * (arch::lane() % 4) + arch::lane() / 4 % 2; }

// Epilogue: f16 activations times kMlpScale.
struct GateUpEpilogue {
  static constexpr int kItems =
      kGateUpColumns;  // a column each: its activation is a long chain of dependent instructions
  using Operands = GateUpScale;

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int, int item) {
    return load_gate_up_scale(params, tile, item);
  }

  template <typename Sums>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sums& sums) {
    const float y = activated(operands, sums.one(item), sums.one(8 + item));
    const int column = tile * kGateUpColumns + item;
    static_cast<uint16_t*>(params.output)[round_index<1>(token, column)] =
        static_cast<uint16_t>(arch::f32x2_to_f16x2(y, 0.0F));
    pad<1, uint16_t>(params, tile, token, column);
  }

  ULL_DEVICE static GateUpScale load_tile(const LinearParams& params, int tile) {
    return load_gate_up_scale(params, tile, arch::lane() / 4);
  }

  template <int kGroups>
  ULL_DEVICE static void finish_tile(const LinearParams& params, const GateUpScale& scale, int tile, int count,
                                     const float (&sums)[kGroups][4]) {
    constexpr int kTokens = kGroups * kGroupTokens;
    const int column = tile * kGateUpColumns + pair_column();
    uint16_t* own = static_cast<uint16_t*>(params.output) + round_index<kTokens>(pair_token(), column);
    activate_pairs(scale, sums, [&](int group, uint32_t pair) {
      auto* to = reinterpret_cast<uint32_t*>(own + group * round_index<kTokens>(kGroupTokens, 0));
      if (pair_token() + group * kGroupTokens < count) *to = pair;
    });
    for (int token = pair_token(); token < count; token += kGroupTokens) {
      pad<kTokens, uint32_t>(params, tile, token, column);
    }
  }

 private:
  // Zeros in the padding of a token's last step, behind some columns of the last row tile.
  template <int kTokens, typename Columns>
  ULL_DEVICE static void pad(const LinearParams& params, int tile, int token, int column) {
    if (kIntermediate % kColumnUnit == 0 || tile != GateUp::kRowTiles - 1) return;
    auto* output = static_cast<uint16_t*>(params.output);
    for (int at = column + kGateUpColumns; at < round_up(kIntermediate, kColumnUnit); at += kGateUpColumns) {
      *reinterpret_cast<Columns*>(output + round_index<kTokens>(token, at)) = {};
    }
  }
};

}  // namespace ull::gpu
