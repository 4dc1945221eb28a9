// Medusa heads (Cai et al., arXiv 2401.10774) on the last accepted token's normed hidden state: x <- x + SiLU(W x + b)
// per layer, then an lm_head, the model's (version 2) or each head's own (version 1). All heads are one matrix, one
// below the other, so that a layer is one launch. To the linear kernels head i is token i: of a row that is one head's,
// they compute every token's product, which costs nothing beside the weights, and keep the head's.
#include "exponential.cuh"
#include "linear/linear_narrow.cuh"

namespace ull::gpu {
namespace {

inline constexpr int kMedusaHeads = ULL_MEDUSA_HEADS;
inline constexpr bool kOwnHeads = ULL_MEDUSA_OWN_HEADS != 0;
static_assert(kMedusaHeads >= 1 && kMedusaHeads <= kGroupTokens, "one group of tokens holds all heads");
static_assert(kHidden % kColumnUnit == 0, "heads begin at whole row tiles");

// A head's rows, of which there are kRows, for that head's token alone.
template <int kRows>
struct HeadRows {
  static constexpr int kTiles = kRows / kRowUnit;
  static_assert(kRows % kRowUnit == 0);

  ULL_DEVICE static bool belongs(int tile, int token) { return tile / kTiles == token; }
  ULL_DEVICE static int row(int tile, int item) { return tile % kTiles * kRowUnit + 4 * item; }
};

// Epilogue: f16 activations x + SiLU(y) of the f16 input x.
struct BlockEpilogue {
  using Rows = HeadRows<kHidden>;
  static constexpr int kItems = kRowUnit / 4;
  struct Operands {
    RowScale rows;
    arch::Vector4 x;  // eight of a token's columns, the item's four among them
  };

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int token, int item) {
    if (!Rows::belongs(tile, token)) return {};
    const auto* input = static_cast<const uint16_t*>(params.activations);
    return {load_row_scale(params.scale, params.bias, tile * kRowUnit + 4 * item),
            arch::load_global(input + activation_index(token, Rows::row(tile, item) / 8 * 8))};
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    if (!Rows::belongs(tile, token)) return;
    const Four y = scaled(sum(4 * item), operands.rows);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = operands.x.word[i / 2], high = operands.x.word[2 + i / 2];
      const uint32_t pair = item % 2 == 0 ? low : high;
      x[i] = arch::f16_to_f32(static_cast<uint16_t>(pair >> (i % 2 * 16))) + silu(y.value[i]);
    }
    auto* output = static_cast<uint16_t*>(params.output) + activation_index(token, Rows::row(tile, item));
    *reinterpret_cast<arch::Vector2*>(output) = {arch::f32x2_to_f16x2(x[0], x[1]), arch::f32x2_to_f16x2(x[2], x[3])};
  }
};

// Epilogue: f32 logits [heads, V], of lm_heads of their own.
struct OwnLogits {
  using Rows = HeadRows<round_up(kVocabulary, kRowUnit)>;
  static constexpr int kItems = kRowUnit / 4;
  using Operands = RowScale;

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int token, int item) {
    if (!Rows::belongs(tile, token)) return {};
    return load_row_scale(params.scale, nullptr, tile * kRowUnit + 4 * item);
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    if (!Rows::belongs(tile, token)) return;
    float* row = static_cast<float*>(params.output) + static_cast<int64_t>(token) * round_up(kVocabulary, kRowUnit);
    store_four(row + Rows::row(tile, item), scaled(sum(4 * item), operands));
  }
};

template <bool kOwn>
struct LogitsOf {  // of the model's lm_head
  using Shape = LinearShape<kVocabulary, kHidden, kHeadBits, false>;
  using Epilogue = StoreRows<kVocabulary>;
};
template <>
struct LogitsOf<true> {
  using Shape = LinearShape<kMedusaHeads * round_up(kVocabulary, kRowUnit), kHidden, kWeightBits, false>;
  using Epilogue = OwnLogits;
};

using BlockPlan = NarrowPlan<LinearShape<kMedusaHeads * kHidden, kHidden, kWeightBits, false>, kGroupTokens>;
using Logits = LogitsOf<kOwnHeads>;
using LogitsPlan = NarrowPlan<Logits::Shape, kGroupTokens>;

}  // namespace

// The last accepted token's row of the residual, normed: one block.
ULL_KERNEL(ull_medusa_start, MedusaStartParams, kNormThreads, 1) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.norm_weight);
  arch::wait_for_predecessor();
  if (token_count(params.round) == 0) return;
  static_assert(ULL_OFFSETOF(State, node) == 28);
  const int node = static_cast<int>(arch::load_global(reinterpret_cast<const char*>(params.state) + 16).word[3]);
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  auto* output = static_cast<uint16_t*>(params.normed);
  norm_rows<1>(
      weight, 1, sums, [&](RowShare& row, int) { load_row(row, params.residual + node * kResidualStride); },
      [&](int, int column, arch::Vector2 four) {
#pragma unroll
        for (int head = 0; head < kMedusaHeads; ++head) {
          *reinterpret_cast<arch::Vector2*>(output + activation_index(head, column)) = four;
        }
      });
}

ULL_KERNEL(ull_medusa_block, LinearParams, kNarrowThreads, BlockPlan::kBlocks) {
  linear_narrow<BlockPlan, BlockEpilogue>(params);
}

ULL_KERNEL(ull_medusa_head, LinearParams, kNarrowThreads, LogitsPlan::kBlocks) {
  linear_narrow<LogitsPlan, Logits::Epilogue>(params);
}

}  // namespace ull::gpu
