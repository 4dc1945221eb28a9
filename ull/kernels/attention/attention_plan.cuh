// Attention's division of labour: what a block holds in shared memory, and which rows and positions are its own.
//
// A row is one query head of one node; the rows of a kv head are row = node * group + head in the group. Positions are
// taken in splits of 256, and what a split yields for a row (output, maximum, sum) does not depend on who computes it
// with which other rows. Splits are merged in ascending order within spans of 8 splits, spans in ascending order too:
// that order is fixed by position, so a block that walks through a whole span merges it on its own.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/kv_format.cuh"
#include "linear/activations.cuh"
#include "model.cuh"

namespace ull::gpu {

inline constexpr int kAttentionThreads = 256;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;
inline constexpr int kSpanSplits = 8;
inline constexpr int kMostParts = kTreeTokens * kGroup / 16;    // of a kv head's rows, each with a counter
inline constexpr int kHalf = kSplitTokens / kAttentionWarps;    // positions whose scores one warp computes
inline constexpr int kSplitTiles = kSplitTokens / kPageTokens;  // tiles, the steps of the online softmax
inline constexpr float kNoMaximum = -1e30F;                     // below every score, yet finite
inline constexpr float kMaskedScore = __builtin_bit_cast(float, 0xFF800000U);  // -infinity: its weight is 0

static_assert(kHalf == 32 && kPageTokens == 64);
static_assert(kHeadDim <= 128, "a warp holds the keys of 32 positions in registers");

// Output dimensions: warp w owns kWarpDims of them, lane column g of its n-tile n is dimension w * kWarpDims + g *
// kValueTiles + n.
inline constexpr int kWarpDims = round_up(round_up(kHeadDim, kAttentionWarps) / kAttentionWarps, 8);
inline constexpr int kValueTiles = kWarpDims / 8;
inline constexpr int kValueWarps = kHeadDim / kWarpDims;
static_assert(kHeadDim % kWarpDims == 0 && kValueTiles <= 2);

// Shared memory of the variant for kTile tokens, in bytes from its start. (For one token: attention_one.cuh.)
template <int kTile>
struct AttentionShared {
  // Leaves room for a block of the next kernel on the multiprocessor, which loads its weights there: the smallest tile,
  // and what has few splits of its own, by parts of 16 rows where each of them may have a multiprocessor.
  static constexpr bool kFewRows = kInCores<kTile> && kTile <= 32 && kKvHeads * ((kTile * kGroup + 15) / 16) <= 132;
  static constexpr bool kNarrow = kTile == 8 || kFewRows;
  static constexpr int kPartShift = kTile * kGroup <= 16 || kFewRows ? 4 : kTile * kGroup <= 32 || kNarrow ? 5 : 6;
  static constexpr int kPartRows = 1 << kPartShift;
  static constexpr int kStepTiles = kNarrow ? 1 : 2;  // m-tiles of 16 rows that are under way together
  static constexpr int kStepRows = 16 * kStepTiles;
  static constexpr int kHeadRow = padded_row_bytes(kHeadDim, kKeyProducts);  // query, key, value
  static constexpr int kProbabilityRow = padded_row_bytes(kSplitTokens, kKvProducts);
  static constexpr int kTreeScoreRow = 4 * (kTile + (kTile % 16 == 0 ? 8 : 0));
  static constexpr int kDepths = round_up(kTile + 16, 4);

  static constexpr int kValue = 0;                                    // [4 pages][head_dim][64] as in the pages
  static constexpr int kQuery = kValue + kSplitTiles * kKvHeadBytes;  // [part rows][head row] f16
  static constexpr int kTreeKey = kQuery + kPartRows * kHeadRow;      // [tile][head row] f16
  static constexpr int kTreeValue = kTreeKey + kTile * kHeadRow;      // [tile][head row] f16
  static constexpr int kProbability = kTreeValue + kTile * kHeadRow;  // [step rows][probability row] f16
  static constexpr int kTreeScore = kProbability + kStepRows * kProbabilityRow;  // [step rows][tile] f32
  static constexpr int kMaximum = kTreeScore + kStepRows * kTreeScoreRow;        // [step rows][8 halves] f32
  static constexpr int kSum = kMaximum + kStepRows * 32;                         // [step rows][8 halves] f32
  static constexpr int kCorrection = kSum + kStepRows * 32;                      // [step rows][4 tiles] f32
  static constexpr int kSplitMaximum = kCorrection + kStepRows * 16;             // [step rows] f32
  static constexpr int kSpanStatistics = kSplitMaximum + kStepRows * 4;          // [2][part rows] maximum, sum
  static constexpr int kSpanOutput = kSpanStatistics + 2 * kPartRows * 8;        // [part rows][head_dim] f32
  static constexpr int kPath = kSpanOutput + kPartRows * kHeadDim * 4;           // [tile][64] nodes
  static constexpr int kDepth = kPath + kTile * kTreeTokens;  // [depths] int32, -1 beyond the last node
  static constexpr int kArrived = kDepth + kDepths * 4;       // [4] barriers: a page's values are there
  static constexpr int kLast = kArrived + kSplitTiles * 8;    // 1: this block merges
  static constexpr int kWork = kLast + 8;                     // AttentionWork, read from here for lack of registers
  static constexpr int kBytes = kWork + 76;
};

// The first position that one at `position` sees. window: 0: all.
ULL_DEVICE int first_seen(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// The first split of the span of `split` that is looked at, where `first_split` is the first of all.
ULL_DEVICE int first_of_span(int split, int first_split) {
  return larger(split / kSpanSplits * kSpanSplits, first_split);
}

// The splits that ull_attention_pages takes, for rounds whose products are warpgroups' (attention_pages.cu): from the
// first one that is looked at to `end`, which lie in the pages as a whole, each lane's `per_lane` behind one another.
struct PageSplits {
  int end;
  int per_lane;
};

inline constexpr int kPageRows = 64;         // rows of such a block
inline constexpr int kFewestPageSplits = 4;  // fewer are not worth a launch that waits for the one before it

ULL_DEVICE int page_parts(int rows) { return (rows + kPageRows - 1) / kPageRows; }

// blocks: of such a launch that share a kv head; 0: there is none.
ULL_DEVICE PageSplits page_splits(int blocks, int rows, int first_split, int base) {
  const int splits = base / kSplitTokens - first_split;
  if (blocks == 0 || rows == 0 || splits < kFewestPageSplits) return {first_split, 1};
  const int lanes = blocks / page_parts(rows);
  const int even = (splits - 1) / lanes + 1;
  // A lane merges the spans that are all its own: rather a few lanes less than twice as many results.
  const int per_lane = even <= kSpanSplits / 2 ? even : round_up(even, kSpanSplits);
  return {first_split + splits, per_lane};
}

// What all blocks agree on.
struct AttentionPlan {
  int count;          // nodes
  int base;           // position of node 0
  int last;           // the deepest node's position
  int first_visible;  // to any node
  int first_split;
  int end_split;
  int own_first;      // splits before it are ull_attention_pages'
  int page_per_lane;  // of that one's lanes
  int rows;           // of a kv head
  int part_rows;      // rows of a block
  int parts;
  int lanes;     // blocks that share the own splits of a part
  int per_lane;  // splits of a lane, one after another

  ULL_DEVICE int splits() const { return end_split - first_split; }
  ULL_DEVICE int own_splits() const { return end_split - own_first; }
  // Whether [position, position + size) has positions that are in the pages and seen by some node.
  ULL_DEVICE bool in_pages(int position, int size) const { return position < base && position + size > first_visible; }
  // Whether it has such and lies in the pages as a whole.
  ULL_DEVICE bool all_in_pages(int position, int size) const {
    return position + size <= base && position + size > first_visible;
  }
  // First split of the span of `split` that is looked at, and the last.
  ULL_DEVICE int span_first(int split) const { return first_of_span(split, first_split); }
  ULL_DEVICE int span_last(int split) const {
    const int last_one = split / kSpanSplits * kSpanSplits + kSpanSplits - 1;
    return last_one < end_split ? last_one : end_split - 1;
  }
  // Whether a lane that has [first, end), `split` among them, has all splits of that one's span, and merges them.
  ULL_DEVICE bool has_span(int first, int end, int split) const {
    return span_first(split) >= first && span_last(split) < end;
  }
};

// Which of the blocks that share a kv head's rows and positions one is.
struct AttentionPlace {
  int x;
  int blocks;
  int kv_head;
};

// Lane by lane: where not all blocks of the grid fit on the chip at once, as beside qkv's, those that have something to
// do begin first. What is left over of them is a lane that has nothing to do.
ULL_DEVICE AttentionPlace attention_place() {
  const int number = arch::block_y() * arch::grid_x() + arch::block_x();
  return {number / kKvHeads, arch::grid_x() * arch::grid_y() / kKvHeads, number % kKvHeads};
}

// The n-th of a vector's words: selects, as registers have no addresses.
ULL_DEVICE uint32_t word_of(const arch::Vector4& v, int index) {
  const uint32_t low = index % 2 == 0 ? v.word[0] : v.word[1];
  const uint32_t high = index % 2 == 0 ? v.word[2] : v.word[3];
  return index < 2 ? low : high;
}

// The round's word at a byte's place, past L1, where begin's may not be yet: see wait_for_predecessor() in arch.cuh.
ULL_DEVICE int word_of_round(const Round* round, int place) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(round);
  return static_cast<int>(word_of(arch::load_global(bytes + place / 16 * 16), place % 16 / 4));
}

ULL_DEVICE int depth_of_node(const Round* round, int node) {
  return word_of_round(round, static_cast<int>(ULL_OFFSETOF(Round, depths)) + 4 * node);
}

// Called by whole warps; before the wait, too. blocks: that share a kv head; page_blocks: the same of
// ull_attention_pages.
template <int kTile>
ULL_DEVICE AttentionPlan make_plan(const Round* round, int window, int blocks, int page_blocks) {
  using Shared = AttentionShared<kTile>;
  AttentionPlan plan;
  plan.count = word_of_round(round, ULL_OFFSETOF(Round, count));
  plan.base = word_of_round(round, ULL_OFFSETOF(Round, base));
  int depth = 0;
#pragma unroll
  for (int first = 0; first < kTile; first += 32) {  // not up to count: that would be one load behind another
    const int node = first + arch::lane();
    const int own = kTile % 32 == 0 || node < kTile ? depth_of_node(round, node) : 0;
    if (node < plan.count && own > depth) depth = own;
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    const int other = arch::shuffle_xor(depth, mask);
    depth = depth < other ? other : depth;
  }
  plan.last = plan.base + depth;
  plan.first_visible = first_seen(plan.base, window);
  if constexpr (kMayLack) {
    const int first = word_of_round(round, ULL_OFFSETOF(Round, first));
    if (plan.first_visible < first) plan.first_visible = first < plan.base ? first : plan.base;
  }
  plan.first_split = plan.first_visible / kSplitTokens;
  plan.end_split = plan.last / kSplitTokens + 1;
  plan.rows = plan.count * kGroup;
  plan.own_first = plan.first_split;
  plan.page_per_lane = 1;
  if constexpr (kInCores<kTile>) {
    const PageSplits pages = page_splits(page_blocks, plan.rows, plan.first_split, plan.base);
    plan.own_first = pages.end;
    plan.page_per_lane = pages.per_lane;
  }
  // Few rows a block as long as there are blocks for it; many when the splits alone keep all blocks busy.
  const int splits = plan.own_splits();
  int shift = 4;
  while (shift < Shared::kPartShift && (((plan.rows - 1) >> shift) + 1) * splits > blocks) ++shift;
  plan.part_rows = 1 << shift;
  plan.parts = ((plan.rows - 1) >> shift) + 1;
  plan.lanes = plan.parts <= 1 ? blocks : blocks / plan.parts;  // there is room for all parts
  plan.per_lane = splits <= plan.lanes ? 1 : (splits - 1) / plan.lanes + 1;
  return plan;
}

// A block's share.
struct AttentionShare {
  int kv_head;
  int part;
  int row;   // the first of its rows
  int rows;  // how many
  int first_split;
  int end_split;

  ULL_DEVICE int splits() const { return end_split - first_split; }
};

ULL_DEVICE AttentionShare make_share(const AttentionPlan& plan, int kv_head, int part, int lane) {
  AttentionShare share;
  share.kv_head = kv_head;
  share.part = part;
  share.row = part * plan.part_rows;
  share.rows = plan.rows - share.row < plan.part_rows ? plan.rows - share.row : plan.part_rows;
  share.first_split = plan.own_first + lane * plan.per_lane;
  share.end_split =
      share.first_split + plan.per_lane < plan.end_split ? share.first_split + plan.per_lane : plan.end_split;
  return share;
}

// The page table's entries for a split.
ULL_DEVICE arch::Vector4 load_split_pages(const AttentionParams& params, int split) {
  return arch::load_global(params.pages + split * kSplitTiles);
}

// A page's keys of a kv head; its values lie kKvLayerBytes / 2 further.
ULL_DEVICE unsigned char* head_of_page(const AttentionParams& params, int kv_head, uint32_t page) {
  return static_cast<unsigned char*>(params.page_pool) + params.layer_offset + kv_head * kKvHeadBytes +
         static_cast<int64_t>(page) * params.page_bytes;
}

struct AttentionWork {
  AttentionPlan plan;
  AttentionShare share;
};
static_assert(sizeof(AttentionWork) == 76, "see AttentionShared");

}  // namespace ull::gpu
