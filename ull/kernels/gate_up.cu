// silu(gate) * up of the normed residual. A row tile is eight gate rows and the eight up rows that belong to them.
#include "base/float_math.h"
#include "rows.cuh"

namespace ull::gpu {

using GateUp = LinearShape<2 * round_up(kIntermediate, kRowUnit / 2), kHidden, kWeightBits, true>;

ULL_DEVICE float silu(float x) { return x * arch::reciprocal(1.0F + exp_lanes<ScalarMath>(-x)); }

// f16 activations times kMlpScale.
struct GateUpEpilogue {
  static constexpr int kItems = 2;
  struct Operands {
    RowScale gate;
    RowScale up;
  };

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int, int item) {
    return {load_row_scale(params, tile * kRowUnit + 4 * item),
            load_row_scale(params, tile * kRowUnit + kRowUnit / 2 + 4 * item)};
  }

  template <typename Plan>
  ULL_DEVICE static void store(const LinearParams& params, const Operands& operands, const float* partial, int tile,
                               int token, int item) {
    const Four gate = scaled(sum_slices<Plan>(partial, token, 4 * item), operands.gate);
    const Four up = scaled(sum_slices<Plan>(partial, token, kRowUnit / 2 + 4 * item), operands.up);
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = silu(gate.value[i]) * up.value[i] * kMlpScale;
    const int column = tile * kRowUnit / 2 + 4 * item;
    store_columns(params, token, column, {arch::f32x2_to_f16x2(y[0], y[1]), arch::f32x2_to_f16x2(y[2], y[3])});
    if (tile == GateUp::kRowTiles - 1) {  // the padding of the last step
      for (int pad = column + kRowUnit / 2; pad < round_up(kIntermediate, kColumnUnit); pad += kRowUnit / 2) {
        store_columns(params, token, pad, {});
      }
    }
  }

  ULL_DEVICE static void store_columns(const LinearParams& params, int token, int column, arch::Vector2 four) {
    *reinterpret_cast<arch::Vector2*>(static_cast<uint16_t*>(params.output) + activation_index(token, column)) = four;
  }
};

template <int kTokens>
using Plan = LinearPlan<GateUp, kTokens>;

ULL_KERNEL(ull_gate_up_1, LinearParams, kLinearThreads, Plan<1>::kBlocks) { linear<Plan<1>, GateUpEpilogue>(params); }
ULL_KERNEL(ull_gate_up_8, LinearParams, kLinearThreads, Plan<8>::kBlocks) { linear<Plan<8>, GateUpEpilogue>(params); }
ULL_KERNEL(ull_gate_up_16, LinearParams, kLinearThreads, Plan<16>::kBlocks) {
  linear<Plan<16>, GateUpEpilogue>(params);
}
ULL_KERNEL(ull_gate_up_32, LinearParams, kLinearThreads, Plan<32>::kBlocks) {
  linear<Plan<32>, GateUpEpilogue>(params);
}
ULL_KERNEL(ull_gate_up_64, LinearParams, kLinearThreads, Plan<64>::kBlocks) {
  linear<Plan<64>, GateUpEpilogue>(params);
}

}  // namespace ull::gpu
