// The round's own heads: QK norm, rotary embedding and conversion of the queries, keys and values that a block needs,
// into shared memory; and from one block of each kv head into the tree scratch.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_plan.cuh"
#include "attention/kv_format.cuh"
#include "exponential.cuh"
#include "model.cuh"

namespace ull::gpu {

// Lane `part` of a head holds elements 4 part .. 4 part + 3 of its first half and of its second, which the rotary
// embedding pairs with them.
inline constexpr int kHeadParts = kHeadDim / 8;
inline constexpr int kHeadLanes = kHeadParts <= 4 ? 4 : kHeadParts <= 8 ? 8 : 16;
static_assert(kHeadParts <= 16);

struct HeadPart {
  float low[4];
  float high[4];
};

ULL_DEVICE void load_floats(float (&to)[4], const float* from) {
  const arch::Vector4 loaded = arch::load_global(from);
  for (int i = 0; i < 4; ++i) to[i] = arch::bits_float(loaded.word[i]);
}

ULL_DEVICE HeadPart load_head(const float* head, int part) {
  HeadPart x;
  load_floats(x.low, head + 4 * part);
  load_floats(x.high, head + kHeadDim / 2 + 4 * part);
  return x;
}

// The sum of the head's squares, in every lane of it. All lanes of the warp take part.
ULL_DEVICE float square_sum(const HeadPart& x) {
  float sum = 0.0F;
  for (const float value : x.low) sum = ::fmaf(value, value, sum);
  for (const float value : x.high) sum = ::fmaf(value, value, sum);
  for (int mask = kHeadLanes / 2; mask > 0; mask /= 2) sum += arch::shuffle_xor(sum, mask);
  return sum;
}

// RMS norm over the head, whose squares' sum is `sum`.
ULL_DEVICE void normalise_head(HeadPart& x, float sum, const HeadPart& weight) {
  const float inverse = arch::reciprocal_sqrt(::fmaf(sum, 1.0F / kHeadDim, kRmsEpsilon));
  for (int i = 0; i < 4; ++i) {
    x.low[i] = x.low[i] * inverse * weight.low[i];
    x.high[i] = x.high[i] * inverse * weight.high[i];
  }
}

// A lane's part of a position's rotation: cos, sin of each of its four pairs of elements.
struct HeadTurn {
  float pair[2][4];
};

// rope: [head_dim / 2] cos, sin of the position.
ULL_DEVICE HeadTurn load_turn(const float* rope, int part) {
  HeadTurn turn;
  load_floats(turn.pair[0], rope + 8 * part);
  load_floats(turn.pair[1], rope + 8 * part + 4);
  return turn;
}

ULL_DEVICE void rotate_head(HeadPart& x, const HeadTurn& turn) {
  for (int i = 0; i < 4; ++i) {
    const float cosine = turn.pair[i / 2][i % 2 * 2];
    const float sine = turn.pair[i / 2][i % 2 * 2 + 1];
    const float low = ::fmaf(x.low[i], cosine, -(x.high[i] * sine));
    x.high[i] = ::fmaf(x.high[i], cosine, x.low[i] * sine);
    x.low[i] = low;
  }
}

// The query as f16, times 1 / sqrt(head_dim), and times log2(e): weight() in attention_scores.cuh says why.
ULL_DEVICE void store_query(unsigned char* row, const HeadPart& x, int part) {
  constexpr float kRoot = kHeadDim == 128  ? 0.08838834764F
                          : kHeadDim == 96 ? 0.1020620726F
                          : kHeadDim == 64 ? 0.125F
                                           : 0.1767766953F;
  constexpr float kScale = kRoot * kLog2E;
  for (int half = 0; half < 2; ++half) {
    const float (&v)[4] = half == 0 ? x.low : x.high;
    auto* to = reinterpret_cast<arch::Vector2*>(row + half * kHeadDim + 8 * part);
    *to = {{arch::f32x2_to_f16x2(v[0] * kScale, v[1] * kScale), arch::f32x2_to_f16x2(v[2] * kScale, v[3] * kScale)}};
  }
}

// A key or value: as stored into `tree` if it is not null, as f16 of that into `row`. NaN becomes 0 in `row` if
// `finite`: a value is also multiplied with probabilities 0 of the node's ancestors, which must not notice. (A node
// whose value is NaN has NaN for a score as well.)
ULL_DEVICE void store_tree(unsigned char* row, unsigned char* tree, const HeadPart& x, int part, float inverse_scale,
                           bool finite) {
  for (int half = 0; half < 2; ++half) {
    float v[4];
    for (int i = 0; i < 4; ++i) v[i] = (half == 0 ? x.low[i] : x.high[i]) * inverse_scale;
    if (tree != nullptr) {
      *reinterpret_cast<StoredQuad*>(tree + (half * kHeadDim / 2 + 4 * part) * kKvBytes) = to_stored(v);
    }
    for (float& value : v) value = finite && value != value ? 0.0F : value;
    *reinterpret_cast<arch::Vector2*>(row + half * kHeadDim + 8 * part) = to_f16(to_stored(v));
  }
}

// Heads of a thread whose loads are on their way together: as many as there are registers for.
template <int kTile>
inline constexpr int kHeadsAtOnce = AttentionShared<kTile>::kNarrow ? (kQkNorm ? 1 : 2) : 4;

// A head of the round, of which a lane has a part.
template <int kTile>
struct RoundHead {
  using Shared = AttentionShared<kTile>;

  bool active, is_query, is_value;
  int number, node;  // of the block's heads: its queries, then the keys of all nodes, then their values
  HeadPart x;
  HeadTurn turn;

  ULL_DEVICE void load(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share, int head,
                       int heads, int part) {
    const int own = head - share.rows, row = share.row + head;
    number = head;
    active = head < heads && part < kHeadParts;
    is_query = own < 0;
    is_value = own >= plan.count;
    node = is_query ? row / kGroup : is_value ? own - plan.count : own;
    x = {};
    if (!active) return;
    const int column = is_query ? share.kv_head * kGroup + row % kGroup
                                : kHeads + share.kv_head + (is_value ? kKvHeads : 0);  // in heads
    x = load_head(params.qkv + static_cast<size_t>(node) * kQkvWidth + column * kHeadDim, part);
    if (is_value) return;
    const auto* depths = reinterpret_cast<const int32_t*>(arch::shared_memory() + Shared::kDepth);
    const int position = plan.base + (kBlock ? params.round->depths[node] : depths[node]);
    turn = load_turn(params.rope + static_cast<size_t>(position) * kHeadDim, part);
  }

  // By all lanes of the warp. publishes: the block writes the tree.
  ULL_DEVICE void store(const AttentionParams& params, const AttentionShare& share, bool publishes, int part) {
    unsigned char* shared = arch::shared_memory();
    if constexpr (kQkNorm) {
      const float sum = square_sum(x);
      if (active && !is_value) normalise_head(x, sum, load_head(is_query ? params.q_norm : params.k_norm, part));
    }
    if (!active) return;
    if (!is_value) rotate_head(x, turn);
    if (is_query) return store_query(shared + Shared::kQuery + number * Shared::kHeadRow, x, part);
    const float inverse_scale =
        kKvBits == 8 ? arch::reciprocal(params.kv_scale[(is_value ? kKvHeads : 0) + share.kv_head]) : 1.0F;
    unsigned char* tree = static_cast<unsigned char*>(is_value ? params.tree_values : params.tree_keys) +
                          (share.kv_head * kTreeTokens + node) * kHeadDim * kKvBytes;
    store_tree(shared + (is_value ? Shared::kTreeValue : Shared::kTreeKey) + node * Shared::kHeadRow,
               publishes ? tree : nullptr, x, part, inverse_scale, is_value);
  }
};

// Queries of the block's rows; with_tree: also keys and values of all nodes, which one block publishes: the one of part
// 0 that has the last split. Behind prepare_paths() and a barrier.
template <int kTile>
ULL_DEVICE void prepare_heads(const AttentionParams& params, const AttentionPlan& plan, const AttentionShare& share,
                              bool with_tree) {
  constexpr int kAtOnce = kHeadsAtOnce<kTile>, kStride = kAttentionThreads / kHeadLanes;
  const int own = arch::thread() / kHeadLanes, part = arch::thread() % kHeadLanes;
  const int heads = share.rows + (with_tree ? 2 * plan.count : 0);
  const bool publishes = share.part == 0 && share.end_split == plan.end_split;
#pragma unroll 1
  for (int first = 0; first < heads; first += kAtOnce * kStride) {
    RoundHead<kTile> round_heads[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      round_heads[i].load(params, plan, share, first + i * kStride + own, heads, part);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) round_heads[i].store(params, share, publishes, part);
  }
}

// Depths of the nodes (-1 beyond the last) and their paths: of a block the last one's, for all see as far. Before the
// wait, too.
template <int kTile>
ULL_DEVICE void prepare_paths(const Round* round, const AttentionPlan& plan) {
  using Shared = AttentionShared<kTile>;
  unsigned char* shared = arch::shared_memory();
  auto* depths = reinterpret_cast<int32_t*>(shared + Shared::kDepth);
#pragma unroll 1
  for (int node = arch::thread(); node < Shared::kDepths; node += kAttentionThreads) {
    depths[node] = node < plan.count ? (kBlock ? plan.count - 1 : depth_of_node(round, node)) : -1;
  }
  constexpr int kWords = kTreeTokens / 4;
  auto* words = reinterpret_cast<uint32_t*>(shared + Shared::kPath);
#pragma unroll 1
  for (int i = arch::thread(); i < plan.count * kWords; i += kAttentionThreads) {
    const int end = kBlock ? plan.count - 1 : i / kWords;
    const int place = static_cast<int>(ULL_OFFSETOF(Round, path)) + 4 * (end * kWords + i % kWords);
    words[i] = static_cast<uint32_t>(word_of_round(round, place));
  }
}

}  // namespace ull::gpu
