// Attention of a round of one token: every row sees the pages below `base` and the token itself, so there is no tree,
// and nothing to commit: its key and value go straight into the page, at `base`. Each output is computed as
// attention.cuh computes that of a tree of one node, bit for bit.
//
// All that earlier graphs and begin() wrote is asked for before the wait for qkv (see wait_for_predecessor() in
// arch.cuh): request() asks, finish() does the rest.
//
// A block takes all rows of its kv head, so only one block of a kv head reads the page in which it writes.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_ahead.cuh"
#include "attention/attention_heads.cuh"
#include "attention/attention_merge.cuh"
#include "attention/attention_plan.cuh"
#include "attention/attention_scores.cuh"
#include "attention/attention_values.cuh"
#include "attention/kv_format.cuh"
#include "model.cuh"

namespace ull::gpu {

template <>
struct AttentionShared<1> {
  static constexpr int kHalves = kGroup <= 8 ? 1 : 2;  // of an m-tile of 16 rows that hold any
  static constexpr int kStepRows = 8 * kHalves;        // under way together
  static constexpr int kPartRows = round_up(kGroup, kStepRows);
  static constexpr int kHeadRow = padded_row_bytes(kHeadDim, kKeyProducts);  // query
  static constexpr int kProbabilityRow = padded_row_bytes(kSplitTokens, kKvProducts);

  // In the kernel of all layers the values of a split's last page wait in registers, 16 of each thread, as keys do: its
  // shared memory is a stage of the ring there (layers.cu). FP8 pages leave room for more stages anyway.
  static constexpr int kHeldTiles = kKvBits == 16 ? 1 : 0;

  static constexpr int kQuery = 0;                                             // [part rows][head row] f16
  static constexpr int kOwnKey = kQuery + kPartRows * kHeadRow;                // [head_dim] f16, or e4m3
  static constexpr int kOwnValue = kOwnKey + kHeadDim * kKvBytes;              // [head_dim] as in the pages
  static constexpr int kProbability = kOwnValue + kHeadDim * kKvBytes;         // [step rows][probability row] f16
  static constexpr int kMaximum = kProbability + kStepRows * kProbabilityRow;  // [step rows][8 halves] f32
  static constexpr int kSum = kMaximum + kStepRows * 32;                       // [step rows][8 halves] f32
  static constexpr int kCorrection = kSum + kStepRows * 32;                    // [step rows][4 tiles] f32
  static constexpr int kSplitMaximum = kCorrection + kStepRows * 16;           // [step rows] f32
  static constexpr int kSpanStatistics = kSplitMaximum + kStepRows * 4;        // [2][part rows] maximum, sum
  static constexpr int kSpanOutput = kSpanStatistics + 2 * kPartRows * 8;      // [part rows][head_dim] f32
  static constexpr int kArrived = kSpanOutput + kPartRows * kHeadDim * 4;  // [4] barriers: a page's values are there
  static constexpr int kLast = kArrived + kSplitTiles * 8;                 // 1: this block merges
  static constexpr int kValue = round_up(kLast + 8, 128);                  // [4 pages][head_dim][64] as in the pages
  static constexpr int kBytes = kValue + kSplitTiles * kKvHeadBytes;
  static constexpr int kLoopBytes = kBytes - kHeldTiles * kKvHeadBytes;
  static_assert(kBytes <= 227 * 1024, "so many query heads that share a kv head do not fit into shared memory");
};

// No division by what is known only at run time: lanes are few, and more than one split a lane is rare.
ULL_DEVICE AttentionPlan plan_of_one(int base, int window, int blocks) {
  AttentionPlan plan;
  plan.count = plan.parts = 1;
  plan.base = plan.last = base;
  plan.first_visible = first_seen(base, window);
  plan.first_split = plan.first_visible / kSplitTokens;
  plan.end_split = base / kSplitTokens + 1;
  plan.own_first = plan.first_split;
  plan.page_per_lane = 1;
  plan.rows = plan.part_rows = kGroup;
  plan.lanes = blocks;
  plan.per_lane = 1;
  for (int covered = blocks; covered < plan.splits(); covered += blocks) ++plan.per_lane;
  return plan;
}

// A lane's 16 stored bytes of a row of values: its element `index`, the token's own, becomes `own`, and those behind it
// 0. Whatever index is: there may be none of either.
ULL_DEVICE void end_row(arch::Vector4& row, int index, uint32_t own) {
  constexpr int kWordElements = 4 / kKvBytes;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int element = index - kWordElements * w;
    if (element >= kWordElements) continue;
    row.word[w] = element < 0 ? 0 : (row.word[w] & ((1U << (element * kKvBits)) - 1U)) | own << (element * kKvBits);
  }
}

// A stored number, but 0 for NaN: it is multiplied with probabilities that must not notice, as store_tree() says.
ULL_DEVICE uint32_t finite_or_zero(uint32_t stored) {
  const bool is_nan = kKvBits == 16 ? (stored & 0x7FFFU) > 0x7F80U : (stored & 0x7FU) == 0x7FU;
  return is_nan ? 0 : stored;
}

// What one block does. All is in registers or shared memory: an object does not outlive its kernel's step.
template <bool kInLoop>
class AttentionOfOne {
  using Shared = AttentionShared<1>;
  static constexpr int kHalves = Shared::kHalves;
  static constexpr int kOwnHeads = kGroup + 2;  // the token's: key, value, queries
  static constexpr int kHeadsAtOnce = kAttentionThreads / kHeadLanes;
  static constexpr int kKey = 0, kFirstQuery = 2;                                        // heads; the value is between
  static constexpr int kCopiedTiles = kSplitTiles - (kInLoop ? Shared::kHeldTiles : 0);  // into shared memory

 public:
  ULL_DEVICE AttentionOfOne(const AttentionParams& params, const AttentionPlace& place)
      : params_(params), place_(place) {}

  // Asks for what no kernel of this round writes: false if the block has nothing to do, which may be said of a round
  // that is skipped too.
  ULL_DEVICE bool request() {
    static_assert(ULL_OFFSETOF(Round, count) == 12 && ULL_OFFSETOF(Round, base) == 16);
    // Most blocks begin with the split of their own number: asking for its pages at once saves a trip to memory.
    const int guess = place_.x < params_.splits ? place_.x : 0;
    const arch::Vector4 guessed = load_split_pages(params_, guess);
    const arch::Vector4 head = arch::load_global(params_.round);
    const arch::Vector4 more = arch::load_global(reinterpret_cast<const unsigned char*>(params_.round) + 16);
    if (head.word[3] == 0) return false;
    plan_ = plan_of_one(static_cast<int>(more.word[0]), params_.window, place_.blocks);
    share_ = make_share(plan_, place_.kv_head, 0, place_.x);
    if (share_.splits() <= 0) return false;
    const arch::Vector4 pages = share_.first_split == guess ? guessed : load_split_pages(params_, share_.first_split);
    load_keys_of(share_.first_split, pages);
    if (arch::thread() < kCopiedTiles) arch::barrier_init(arrived() + arch::thread(), 1);
    arch::fence_barrier_init();
    copy_values_of(share_.first_split, pages);
    hold_values_of(share_.first_split, pages);

    const int last = share_.end_split - 1;
    const arch::Vector4 last_pages = last == share_.first_split ? pages : load_split_pages(params_, last);
    own_page_ = head_of_page(params_, place_.kv_head, word_of(last_pages, plan_.base / kPageTokens % kSplitTiles));
    if (part() < kHeadParts) {
      turn_ = load_turn(params_.rope + static_cast<size_t>(plan_.base) * kHeadDim, part());
      if constexpr (kQkNorm) weight_ = load_head(own_head() == kKey ? params_.k_norm : params_.q_norm, part());
    }
    if constexpr (kKvBits == 8) {
      key_scale_ = params_.kv_scale[place_.kv_head];
      value_scale_ = params_.kv_scale[kKvHeads + place_.kv_head];
    }
    if constexpr (!kInLoop) prepare(keys_);
    return true;
  }

  // Once qkv is there.
  ULL_DEVICE void finish() {
    prepare_own_heads();
    arch::block_barrier();
    if constexpr (!kInLoop) trace::mark(trace::kFirstUsed);
#pragma unroll 1
    for (int split = share_.first_split; split < share_.end_split; ++split) {
      const bool more = split + 1 < share_.end_split;
      const arch::Vector4 pages = load_split_pages(params_, more ? split + 1 : split);
      if (!kInLoop && split != share_.first_split) prepare(keys_);
      if (split == plan_.end_split - 1) insert_own_key(split);
#pragma unroll
      for (int row = 0; row < Shared::kPartRows; row += Shared::kStepRows) {
        ScoreFragment<1> scores{};
        multiply(scores, split, row);
        if (more && row + Shared::kStepRows >= Shared::kPartRows) load_keys_of(split + 1, pages);
        choose(scores, split);
        arch::block_barrier();
        weigh(scores);
        arch::block_barrier();
        if constexpr (!kInLoop) trace::mark(trace::kLastUsed);
        if (arch::warp() >= kValueWarps) continue;
        SumFragment<1> sums{};
        sum_values(sums, split);
        take(sums, split, row);
      }
      if (!more) break;
      arch::block_barrier();  // nobody reads this split's values any more
      copy_values_of(split + 1, pages);
      hold_values_of(split + 1, pages);
    }
    if (plan_.splits() == 1) return;
    if (is_last_lane<1>(params_, plan_, share_)) merge_part<1, kInLoop>(params_, plan_, share_);
  }

  // After a barrier behind finish(), where another block's work follows: for request() to use the same shared memory.
  ULL_DEVICE static void end() {
    if (arch::thread() < kCopiedTiles) arch::barrier_invalidate(arrived() + arch::thread());
  }

 private:
  ULL_DEVICE static int part() { return arch::thread() % kHeadLanes; }
  ULL_DEVICE static int own_head() { return arch::thread() / kHeadLanes; }  // of the first kHeadsAtOnce
  ULL_DEVICE static unsigned char* at(int offset) { return arch::shared_memory() + offset; }
  ULL_DEVICE static arch::Barrier* arrived() { return reinterpret_cast<arch::Barrier*>(at(Shared::kArrived)); }
  ULL_DEVICE static int warp_position(int split) { return split * kSplitTokens + arch::warp() * kHalf; }
  ULL_DEVICE bool publishes() const { return share_.end_split == plan_.end_split; }

  // Of positions below `base`: the row of that one is written meanwhile.
  ULL_DEVICE void load_keys_of(int split, const arch::Vector4& pages) {
    const int first = warp_position(split);
    if (!plan_.in_pages(first, kHalf)) return;
    load_keys(keys_, head_of_page(params_, place_.kv_head, word_of(pages, arch::warp() / 2)), arch::warp() % 2,
              plan_.base - first);
  }

  // The first threads ask for a page each, and for nothing where no row looks: `arrived` completes in every split.
  ULL_DEVICE void copy_values_of(int split, const arch::Vector4& pages) const {
    const int page = arch::thread();
    if (page >= kCopiedTiles) return;
    arch::Barrier* barrier = arrived() + page;
    if (!plan_.in_pages(split * kSplitTokens + page * kPageTokens, kPageTokens)) return arch::barrier_arrive(barrier);
    arch::barrier_arrive_expect(barrier, kKvHeadBytes);
    arch::bulk_copy_stream(at(Shared::kValue + page * kKvHeadBytes),
                           head_of_page(params_, place_.kv_head, word_of(pages, page)) + kKvLayerBytes / 2,
                           kKvHeadBytes, barrier);
  }

  // The last page's values of the warp's dimensions, where some row looks.
  ULL_DEVICE void hold_values_of(int split, const arch::Vector4& pages) {
    constexpr int kPage = kCopiedTiles;
    if constexpr (kPage < kSplitTiles) {
      static_assert(kPage == kSplitTiles - 1);
      if (arch::warp() >= kValueWarps) return;
      if (!plan_.in_pages(split * kSplitTokens + kPage * kPageTokens, kPageTokens)) return;
      const unsigned char* values = head_of_page(params_, place_.kv_head, word_of(pages, kPage)) + kKvLayerBytes / 2;
#pragma unroll
      for (int unit = 0; unit < kTileUnits; ++unit) {
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) held_[unit][n] = arch::load_global(values + value_offset(n, unit));
      }
    }
  }

  // Of a unit of the page. Selects, as registers have no addresses.
  ULL_DEVICE arch::Vector4 held_value(int n, int unit) const {
    arch::Vector4 value = held_[0][n];
#pragma unroll
    for (int other = 1; other < kTileUnits; ++other) {
#pragma unroll
      for (int w = 0; w < 4; ++w) value.word[w] = unit == other ? held_[other][n].word[w] : value.word[w];
    }
    return value;
  }

  // QK norm, rotary embedding and conversion of the token's heads: queries into shared memory, and in the block that
  // reaches `base` the key into shared memory and its page, and the value into shared memory.
  ULL_DEVICE void prepare_own_heads() {
    HeadPart x = load_own_head(own_head());
#pragma unroll 1
    for (int head = own_head();;) {
      if constexpr (kQkNorm) {
        const float sum = square_sum(x);
        if (head != kKey + 1) normalise_head(x, sum, weight_);
      }
      if (has_own_head(head)) {
        if (head != kKey + 1) rotate_head(x, turn_);
        if (head >= kFirstQuery) {
          store_query(at(Shared::kQuery) + (head - kFirstQuery) * Shared::kHeadRow, x, part());
        } else {
          store_own(x, head == kKey);
        }
      }
      if constexpr (kOwnHeads <= kHeadsAtOnce) return;
      head += kHeadsAtOnce;
      if (head - own_head() >= kOwnHeads) return;
      x = load_own_head(head);
      if (kQkNorm && part() < kHeadParts) weight_ = load_head(params_.q_norm, part());
    }
  }
  ULL_DEVICE bool has_own_head(int head) const {
    return part() < kHeadParts && head < kOwnHeads && (head >= kFirstQuery || publishes());
  }
  ULL_DEVICE HeadPart load_own_head(int head) const {
    const int column = head < kFirstQuery ? kHeads + head * kKvHeads + place_.kv_head
                                          : place_.kv_head * kGroup + head - kFirstQuery;  // in heads
    return has_own_head(head) ? load_head(params_.qkv + column * kHeadDim, part()) : HeadPart{};
  }
  ULL_DEVICE void store_own(const HeadPart& x, bool is_key) const {
    const float inverse_scale = kKvBits == 8 ? arch::reciprocal(is_key ? key_scale_ : value_scale_) : 1.0F;
    unsigned char* row = own_page_ + plan_.base % kPageTokens * (kHeadDim * kKvBytes);
    for (int half = 0; half < 2; ++half) {
      float v[4];
      for (int i = 0; i < 4; ++i) v[i] = (half == 0 ? x.low[i] : x.high[i]) * inverse_scale;
      StoredQuad stored = to_stored(v);
      const int offset = (half * kHeadDim / 2 + 4 * part()) * kKvBytes;
      if (is_key) {
        *reinterpret_cast<StoredQuad*>(row + offset) = stored;
        if constexpr (kKvBits == 16 && !kInLoop) {  // as prepare() makes them
          for (uint32_t& word : stored.word) word = bf16x2_to_f16x2(word);
        }
      }
      *reinterpret_cast<StoredQuad*>(at(is_key ? Shared::kOwnKey : Shared::kOwnValue) + offset) = stored;
    }
  }

  // Into the fragment that holds the keys around `base`. Selects, not branches: registers have no addresses.
  ULL_DEVICE void insert_own_key(int split) {
    const int index = plan_.base - warp_position(split);  // of the warp's 32
    if (index < 0 || index >= kHalf) return;
    const bool is_mine = arch::lane() / 4 == index / 8 * 2 + index % 2;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const arch::Vector4 own = arch::load_shared(at(Shared::kOwnKey) + key_offset(step, arch::lane() % 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_here = is_mine && index % 8 / 2 == j;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          uint32_t& key = keys_.loaded[j][step].word[word];
          key = is_here ? own.word[word] : key;
        }
      }
    }
  }

  ULL_DEVICE void multiply(ScoreFragment<1>& scores, int split, int row) const {
    const int position = warp_position(split);
    if (position > plan_.base || position + kHalf <= plan_.first_visible) return;
    multiply_keys<kHalves, !kInLoop>(scores.score[0], at(Shared::kQuery) + (row + arch::lane() / 4) * Shared::kHeadRow,
                                     Shared::kHeadRow, keys_, key_scale_);
  }

  // Masks what nobody sees, and leaves the rows' maxima in shared memory.
  ULL_DEVICE void choose(ScoreFragment<1>& scores, int split) const {
    const int g = arch::lane() / 4;
    const int t = arch::lane() % 4;
    const int position = warp_position(split);
    if (position + kHalf > plan_.base + 1 || position < plan_.first_visible) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int own = position + 8 * t + i;
        const bool visible = own <= plan_.base && own >= plan_.first_visible;
#pragma unroll
        for (int r = 0; r < kHalves; ++r) {
          float& s = scores.score[0][i / 2][2 * r + i % 2];
          s = visible ? s : kMaskedScore;
        }
      }
    }
    float maximum[kHalves];
    row_maxima(maximum, scores.score[0]);
    if (t != 0) return;
    auto* maxima = reinterpret_cast<float*>(at(Shared::kMaximum));
#pragma unroll
    for (int r = 0; r < kHalves; ++r) maxima[(g + 8 * r) * kAttentionWarps + arch::warp()] = maximum[r];
  }

  // Probabilities, their sums and the corrections of the running maximum, into shared memory.
  ULL_DEVICE void weigh(const ScoreFragment<1>& scores) const {
    const int t = arch::lane() % 4;
    const int warp = arch::warp();
#pragma unroll
    for (int r = 0; r < kHalves; ++r) {
      const int row = 8 * r + arch::lane() / 4;
      const RunningMaximum maximum = running_maximum(at(Shared::kMaximum) + row * 4 * kAttentionWarps);
      const float sum =
          store_probabilities(scores.score[0], r, maximum.now,
                              at(Shared::kProbability) + row * Shared::kProbabilityRow + 2 * kHalf * warp + 16 * t);
      if (t != 0) continue;
      reinterpret_cast<float*>(at(Shared::kSum))[row * kAttentionWarps + warp] = sum;
      if (warp % 2 == 0) {
        reinterpret_cast<float*>(at(Shared::kCorrection))[row * kSplitTiles + warp / 2] =
            weight(maximum.before, maximum.now);
      }
      if (warp == kAttentionWarps - 1) reinterpret_cast<float*>(at(Shared::kSplitMaximum))[row] = maximum.now;
    }
  }

  // Weighted sums of the values, of the warp's dimensions.
  ULL_DEVICE void sum_values(SumFragment<1>& sums, int split) const {
    const unsigned char* probabilities = at(Shared::kProbability) + arch::lane() / 4 * Shared::kProbabilityRow;
    const unsigned char* corrections = at(Shared::kCorrection) + arch::lane() / 4 * 4 * kSplitTiles;
    const int first = split * kSplitTokens;
#pragma unroll 1
    for (int unit = 0; unit < kValueUnits; ++unit) {
      const int position = first + unit * kValueUnit;
      // A page that lies in the cache as a whole.
      if (unit % kTileUnits == 0 && unit < kTileUnits * kCopiedTiles && position >= plan_.first_visible &&
          position + kPageTokens <= plan_.base) {
        arch::barrier_wait(arrived() + unit / kTileUnits, (split - share_.first_split) % 2);
        rescale<kHalves>(sums.sum[0], corrections, unit / kTileUnits);
        multiply_page<kHalves>(sums.sum[0], probabilities, Shared::kProbabilityRow, at(Shared::kValue),
                               unit / kTileUnits);
        unit += kTileUnits - 1;
        continue;
      }
      if (position > plan_.base || position + kValueUnit <= plan_.first_visible) continue;
      const int page = unit / kTileUnits;
      const bool comes = first + page * kPageTokens < plan_.base;  // from the page
      const bool is_copied = kCopiedTiles == kSplitTiles || page < kCopiedTiles;
      if (comes && is_copied) arch::barrier_wait(arrived() + page, (split - share_.first_split) % 2);
      if (unit % kTileUnits == 0) rescale<kHalves>(sums.sum[0], corrections, page);
      arch::Vector4 values[kValueTiles] = {};
      if (comes) {
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          values[n] = is_copied ? load_stored_value(at(Shared::kValue), n, unit) : held_value(n, unit % kTileUnits);
        }
      }
      if (position + kValueUnit > plan_.base) end_values(values, plan_.base - position);
#pragma unroll
      for (arch::Vector4& value : values) prepare(value);
      multiply_values<kHalves>(sums.sum[0], probabilities, Shared::kProbabilityRow, values, unit);
    }
  }

  // The token's own value, at `index` of the unit, into the fragment and the page: no copy of that reads it any more.
  ULL_DEVICE void end_values(arch::Vector4 (&values)[kValueTiles], int index) const {
    const int t = arch::lane() % 4;
    unsigned char* page = own_page_ + kKvLayerBytes / 2 + plan_.base % kPageTokens * kKvBytes;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const unsigned char* from = at(Shared::kOwnValue) + value_dim(n) * kKvBytes;
      unsigned char* to = page + value_dim(n) * (kPageTokens * kKvBytes);
      uint32_t own;
      if constexpr (kKvBits == 16) {
        own = *reinterpret_cast<const uint16_t*>(from);
        if (t == 0) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(own);
      } else {
        own = *from;
        if (t == 0) *to = static_cast<unsigned char>(own);
      }
      end_row(values[n], index - 4 * kKvProducts * t, finite_or_zero(own));
    }
  }

  ULL_DEVICE void take(const SumFragment<1>& sums, int split, int first_row) const {
#pragma unroll
    for (int r = 0; r < kHalves; ++r) {
      const int step_row = 8 * r + arch::lane() / 4;
      if (first_row + step_row >= kGroup) continue;
      Floats<kLaneDims> own;
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) own.value[d] = sums.sum[0][d % kValueTiles][2 * r + d / kValueTiles];
      take_row<1>(params_, plan_, share_, split, first_row + step_row, step_row, own);
    }
  }

  const AttentionParams& params_;
  AttentionPlace place_;
  AttentionPlan plan_{};
  AttentionShare share_{};
  KeyFragment keys_{};
  arch::Vector4 held_[kTileUnits][kValueTiles] = {};  // values of the split's last page, if not copied
  HeadTurn turn_{};                                   // of `base`
  HeadPart weight_{};                                 // of the first head that the thread has a part of
  unsigned char* own_page_ = nullptr;  // keys of the kv head in the page of `base`, in the block that publishes
  float key_scale_ = 1.0F;
  float value_scale_ = 1.0F;
};

// The kernel.
ULL_DEVICE void attend_one(const AttentionParams& params) {
  arch::release_dependents();
  prefetch_output(params);
  AttentionOfOne<false> block(params, attention_place());
  const bool works = block.request();
  arch::wait_for_predecessor();
  if (works) {
    block.finish();
  } else {
    prefetch_gate_up(params);
  }
}

}  // namespace ull::gpu
