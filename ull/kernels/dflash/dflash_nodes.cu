// What a DFlash head of DSpark's kind (arXiv 2607.05147) knows of the token before: a term of low rank, which is added
// to the logits of the block's entry for a node's children, and the chance that one of them is accepted. The term reads
// the whole vocabulary, once for all nodes of a pass.
#include "dflash/dflash.cuh"
#include "exponential.cuh"
#include "linear/head_rows.cuh"
#include "linear/linear_narrow.cuh"

namespace ull::gpu {
namespace {

inline constexpr int kLogitRow = round_up(kVocabulary, kRowUnit);
inline constexpr int kNodes = kGroupTokens;  // most nodes of a pass that are ranked
static_assert(kHidden % kColumnUnit == 0, "the embedding begins at a whole step");

// Epilogue: a factor, which is the embedding so far, times the gate.
struct GateEpilogue {
  static constexpr int kItems = kRowUnit / 4;
  struct Operands {
    RowScale rows;
    arch::Vector4 x;  // eight of a node's columns, the item's four among them
  };

  ULL_DEVICE static int column(int tile, int item) { return tile * kRowUnit + 4 * item; }

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int token, int item) {
    const auto* factors = static_cast<const uint16_t*>(params.output);
    return {load_row_scale(params.scale, params.bias, column(tile, item)),
            arch::load_global(factors + activation_index(token, column(tile, item) / 8 * 8))};
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    const Four y = scaled(sum(4 * item), operands.rows);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = item % 2 == 0 ? operands.x.word[i / 2] : operands.x.word[2 + i / 2];
      x[i] = arch::f16_to_f32(static_cast<uint16_t>(pair >> (i % 2 * 16))) * sigmoid(y.value[i]);
    }
    auto* output = static_cast<uint16_t*>(params.output) + activation_index(token, column(tile, item));
    *reinterpret_cast<arch::Vector2*>(output) = {arch::f32x2_to_f16x2(x[0], x[1]), arch::f32x2_to_f16x2(x[2], x[3])};
  }
};

// Epilogue: the logits of the entry for a node's children, and its Markov term: f32 [nodes, V].
struct MarkovEpilogue {
  static constexpr int kItems = kRowUnit / 4;
  struct Operands {
    RowScale rows;
    arch::Vector4 logits;
  };

  ULL_DEVICE static Operands load(const LinearParams& params, int tile, int token, int item) {
    const Ranked ranked(params.round);
    if (token >= ranked.count) return {};
    const int row = tile * kRowUnit + 4 * item, entry = Ranked::entry(ranked.depth(params.round, token));
    return {load_row_scale(params.scale, nullptr, row),
            arch::load_global(params.residual + static_cast<int64_t>(entry) * kLogitRow + row)};
  }

  template <typename Sum>
  ULL_DEVICE static void finish(const LinearParams& params, const Operands& operands, int tile, int token, int item,
                                const Sum& sum) {
    float* row = static_cast<float*>(params.output) + static_cast<int64_t>(token) * kLogitRow;
    store_four(row + tile * kRowUnit + 4 * item,
               added(load_four(operands.logits), scaled(sum(4 * item), operands.rows)));
  }
};

using Gate = NarrowPlan<LinearShape<kRank, kHidden + kRank, kWeightBits, false>, kNodes>;
using Markov = NarrowPlan<LinearShape<kVocabulary, kRank, 16, false>, kNodes>;

}  // namespace

// What the ranked rows begin with: the embedding of a node's token, the state for its children, which is the norm of
// the entry's residual, and the chance that one of them is accepted. One block per row.
ULL_KERNEL(ull_dflash_nodes, DflashNodesParams, kNormThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  Round* round = params.round;
  const Ranked ranked(round);
  const int index = arch::block_x();
  if (index >= ranked.count) return;
  const int entry = Ranked::entry(ranked.depth(round, index)), node = ranked.first + index;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  float sum = 0.0F;
  if constexpr (kConfident || kGated) {
    RowShare row, weight;
    load_norm_weight(weight, params.norm_weight);
    load_row(row, params.residual + entry * kResidualStride);
    normalise(row, weight, sums);
    if (kGated && !ranked.block) store_input(RoundRow{params.gate_input, index}, 0, row);
    if constexpr (kConfident) {
      load_norm_weight(weight, params.confidence);
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum = ::fmaf(arch::bits_float(row.vector[i].word[j]), arch::bits_float(weight.vector[i].word[j]), sum);
        }
      }
    }
  }
  if (kMarkov && !ranked.block) {
    const auto* table = static_cast<const uint16_t*>(params.embedding);
    const uint16_t* embedding = table + static_cast<int64_t>(round->tokens[node]) * kRank;
#pragma unroll 1
    for (int column = arch::thread(); column < round_up(kRank, kColumnUnit); column += kNormThreads) {
      const float value = column < kRank ? arch::bf16_to_f32(embedding[column]) : 0.0F;
      const auto stored = static_cast<uint16_t>(arch::f32x2_to_f16x2(value, 0.0F));
      static_cast<uint16_t*>(params.factors)[activation_index(index, column)] = stored;
      if constexpr (kGated)
        static_cast<uint16_t*>(params.gate_input)[activation_index(index, kHidden + column)] = stored;
      if (kConfidenceReadsMarkov && column < kRank) sum = ::fmaf(value, params.confidence[kHidden + column], sum);
    }
  }
  float chance = 1.0F;
  if constexpr (kConfident) chance = sigmoid(block_sum(sum, sums) + params.confidence_bias[0]);
  if (arch::thread() != 0) return;
  EmittedToken& drawn = round->drawn[node];
  drawn.token = -1;  // what is ranked, ull_dflash_rank says
  drawn.logprob = chance;
  drawn.top_count = 0;
  drawn.node = ranked.block ? entry : node;
}

ULL_KERNEL(ull_dflash_gate, LinearParams, kNarrowThreads, Gate::kBlocks) { linear_narrow<Gate, GateEpilogue>(params); }

ULL_KERNEL(ull_dflash_markov, LinearParams, kNarrowThreads, Markov::kBlocks) {
  linear_narrow<Markov, MarkovEpilogue>(params);
}

}  // namespace ull::gpu
