// What the sampler's kernels share. They follow cpu/sampler.cpp: bias, temperature, top-k, top-p, min-p, then
// argmax with Gumbel noise; a smaller token id wins a tie. A launch's grid is (slices, nodes): a node's logits are cut
// into slices, each block reduces one, and what blocks find is merged by maxima and integer sums, so that the order in
// which they finish cannot matter.
#pragma once

#include "base/float_math.h"
#include "base/philox.h"
#include "scores.cuh"

namespace ull::gpu::sample {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kLogitRow = round_up(kVocabulary, kRowUnit);  // floats from one node's logits to the next's
inline constexpr int kChunk = 2048;                                // logits that a block loads at once
inline constexpr int kQuads = kChunk / 4 / kThreads;               // of a thread, of four logits each
inline constexpr int kMostBlocks = 512;                            // of a launch
inline constexpr int kTokenBits = 20;
static_assert(kVocabulary <= 1 << 19);  // so that masses of 2^-44 cannot overflow

// Scores apart by more cannot be turned round by the noise, which lies between -2.82 and 16.64.
inline constexpr float kHopeless = -20.0F;

// Histograms of top-k and top-p: buckets of 1/64 in the adjusted logit; the last holds everything below -32, whose mass
// rounds to 0 and which cannot win.
inline constexpr int kBuckets = 2048;
inline constexpr float kBucketsPerUnit = 64.0F;
inline constexpr int kLastBucket = kBuckets - 1;
inline constexpr int kListed = 8192;  // tokens that a node's list holds

// ---- scratch: fixed size, nothing in it outlives a round -----------------------------------------------------------

struct alignas(16) DrawPart {  // of a slice
  uint64_t best;               // scores: packed(score, token); 0: none
  uint64_t total;              // sum of mass(raw logit - raw maximum), of ull_sample_draw
};

struct alignas(16) NodeScratch {
  uint32_t drawn;     // blocks that have finished ull_sample_draw
  uint32_t filtered;  // and ull_sample_filter
  uint32_t listed;    // tokens listed; more than kListed: the list is incomplete, look at the whole row
  float log_total;    // log of the sum of exp(raw logit - raw maximum)
};

struct Scratch {
  NodeScratch nodes[kTreeTokens];
  ScanPart scans[kMostBlocks];  // [node][slice], or of a round of one token [block of the head]
  DrawPart draws[kMostBlocks];  // [node][slice]
  uint64_t alternatives[kMostBlocks][kAlternatives];
  uint32_t counts[kTreeTokens][kBuckets];
  uint64_t masses[kTreeTokens][kBuckets];
  uint64_t listed[kTreeTokens][kListed];  // order(magnitude, token)
};
static_assert(sizeof(Scratch) == 5866496);            // ull/gpu/geometry/sampling.py: SCRATCH_BYTES
static_assert(ULL_OFFSETOF(Scratch, scans) == 1024);  // MAXIMA_AT

// ---- numbers -------------------------------------------------------------------------------------------------------

// exp(adjusted) in units of 2^-44: exact from 2^-21 up.
ULL_DEVICE uint64_t mass(float adjusted) { return static_cast<uint64_t>(exp_lanes<ScalarMath>(adjusted) * 0x1.0p44F); }

// Adjusted logits are at most 0: the smaller magnitude is the better.
ULL_DEVICE uint32_t magnitude(float adjusted) { return arch::float_bits(adjusted) & 0x7FFFFFFFU; }
ULL_DEVICE float adjusted_of(uint32_t magnitude) { return -arch::bits_float(magnitude); }
// The smaller is the better: by magnitude, then by token id.
ULL_DEVICE uint64_t order(uint32_t magnitude, int token) {
  return (static_cast<uint64_t>(magnitude) << kTokenBits) | static_cast<uint32_t>(token);
}
ULL_DEVICE int bucket(uint32_t magnitude) {
  const float scaled = arch::bits_float(magnitude) * kBucketsPerUnit;
  return scaled < static_cast<float>(kLastBucket) ? static_cast<int>(scaled) : kLastBucket;
}

// The noise of tokens 4 * quad .. 4 * quad + 3.
ULL_DEVICE void gumbel_quad(uint64_t seed, int32_t position, int quad, float (&noise)[4]) {
  const PhiloxWords words = philox4x32({{static_cast<uint32_t>(quad), static_cast<uint32_t>(position), 0, 0}},
                                       static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    noise[j] = gumbel_from_unit<ScalarMath>(static_cast<float>(words.word[j] >> 9));
  }
}
// Of one token; as base/gumbel.h, without an array indexed at run time.
ULL_DEVICE float gumbel_of(uint64_t seed, int32_t position, int token) {
  float noise[4];
  gumbel_quad(seed, position, token >> 2, noise);
  const float low = (token & 1) != 0 ? noise[1] : noise[0], high = (token & 1) != 0 ? noise[3] : noise[2];
  return (token & 2) != 0 ? high : low;
}

// ---- what a node's draw asks for -----------------------------------------------------------------------------------

struct Wish {
  bool sampled;  // temperature above 0
  bool listing;  // top-k or top-p: needs the histogram
  int top_k;     // 0: off
  float inverse_temperature;
  float top_p;  // 1: off
  float min_p;  // 0: off
  uint64_t seed;
  int32_t position;  // of the token to draw
  int top_logprobs;  // -1: no logprobs
};

// Whether the node is sampled: not where it is none, nor in a prefill, nor where what follows is forced.
ULL_DEVICE bool is_drawn(const Round* round, int node) {
  return node < round->count && node >= round->first_draw && round->draws != 0;
}

ULL_DEVICE Wish wish_of(const Round* round, const State* state, int node) {
  constexpr float kMostInverseTemperature = 1e30F;  // as cpu/sampler.cpp
  const Sampling& sampling = state->sampling;
  Wish wish;
  wish.sampled = sampling.temperature > 0.0F;
  wish.top_k = sampling.top_k > 0 && sampling.top_k < kVocabulary ? sampling.top_k : 0;
  wish.top_p = sampling.top_p;
  wish.min_p = sampling.min_p;
  wish.listing = wish.sampled && (wish.top_k > 0 || wish.top_p < 1.0F);
  const float inverse = arch::reciprocal(sampling.temperature);
  wish.inverse_temperature = inverse < kMostInverseTemperature ? inverse : kMostInverseTemperature;
  wish.seed = sampling.seed;
  wish.position = round->base + round->depths[node] + 1;
  wish.top_logprobs = sampling.top_logprobs < kAlternatives ? sampling.top_logprobs : kAlternatives;
  return wish;
}

// Where a draw looks. A round that draws again (RoundMode::kRedraw) looks at logits of the round before.
struct Source {
  int row;      // of the logits
  int wanted;   // the token whose log-probability is asked for; -1: one is drawn
  bool masked;  // among the tokens that the mask allows
};

ULL_DEVICE Source source_of(const Round* round, int node) {
  if (round->mode != RoundMode::kRedraw) return {node, -1, false};
  const int32_t wanted = round->tokens[node];
  return {round->rows[node], wanted, wanted < 0};
}

ULL_DEVICE Wish wish_of(const Round* round, const State* state, int node, const Source& source) {
  Wish wish = wish_of(round, state, node);
  if (source.wanted >= 0) {
    wish.sampled = wish.listing = false;
    if (wish.top_logprobs < 0) wish.top_logprobs = 0;
  }
  return wish;
}

// The slice of the vocabulary that this block looks at.
struct Slice {
  int first;
  int last;
};

ULL_DEVICE Slice slice_of(int block, int blocks) {
  const int length = round_up((kVocabulary + blocks - 1) / blocks, 4);
  const int first = block * length;
  const int last = first + length < kVocabulary ? first + length : kVocabulary;
  return {first, last};
}

// ---- the block -----------------------------------------------------------------------------------------------------

inline constexpr int kChosen = 3 * kBuckets / 2;  // packed logits that fit where the histogram stands

// Where a running sum reaches its target.
struct Crossing {
  int32_t at;             // bucket (or digit)
  uint32_t count;         // tokens in it
  uint32_t count_before;  // tokens before it
  uint64_t mass;          // of its tokens
  uint64_t mass_before;   // of the tokens before it
};

// What stage_adjustment() has found.
struct alignas(16) Adjustment {
  int32_t bias_count;
  int32_t way_count;  // tokens of the node's way, if penalties look at it
  bool penalises;
  float repetition;
  float frequency;
  float presence;
  const uint32_t* mask;  // what is not in it is banned; null: nothing is
};

struct alignas(16) Shared {
  uint64_t partial[2][kWarps];
  uint64_t least;  // of best_of()
  uint64_t sorted[kAlternatives];
  Crossing crossing;
  uint32_t last_block;
  uint32_t chosen_count;
  LogitBias biases[kBiases];
  float dense[kChunk];         // the biases of the chunk under way; else 0
  uint32_t added[kChunk / 4];  // a byte per token of the chunk: how often the node's way from the root holds it; else 0
  int32_t way[kTreeTokens];    // the tokens of that way, the root left out
  Adjustment adjustment;
  union {
    struct {
      uint32_t counts[kBuckets];
      uint32_t low[kBuckets];  // masses, in two halves: shared memory adds 32 bits at a time
      uint32_t high[kBuckets];
    };
    uint64_t chosen[kChosen];
  };
};
// ull/gpu/geometry/sampling.py: the scan needs nothing of the union.
static_assert(sizeof(Shared) == 43632 && ULL_OFFSETOF(Shared, counts) == 19056);

struct Sum {
  ULL_DEVICE uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

// Two values of each thread become the block's, in every thread.
template <typename First, typename Second>
ULL_DEVICE void block_reduce(Shared& shared, uint64_t& first, First combine_first, uint64_t& second,
                             Second combine_second) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    first = combine_first(first, arch::shuffle_xor(first, mask));
    second = combine_second(second, arch::shuffle_xor(second, mask));
  }
  arch::block_barrier();
  if (arch::lane() == 0) {
    shared.partial[0][arch::warp()] = first;
    shared.partial[1][arch::warp()] = second;
  }
  arch::block_barrier();
  first = shared.partial[0][0];
  second = shared.partial[1][0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    first = combine_first(first, shared.partial[0][i]);
    second = combine_second(second, shared.partial[1][i]);
  }
}

// The sum over the threads before this one.
ULL_DEVICE uint64_t sum_before(Shared& shared, uint64_t value) {
  uint64_t through = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t below = arch::shuffle(through, arch::lane() < distance ? 0 : arch::lane() - distance);
    if (arch::lane() >= distance) through += below;
  }
  arch::block_barrier();
  if (arch::lane() == 31) shared.partial[0][arch::warp()] = through;
  arch::block_barrier();
  uint64_t before = through - value;
  for (int i = 0; i < arch::warp(); ++i) before += shared.partial[0][i];
  return before;
}

// True for the last of a node's blocks to come here; what the others have written is visible to it: their first threads
// at any time, the rest before a barrier, as block_reduce() and best_of() hold one.
template <typename Block>
ULL_DEVICE bool is_last_block(Block& shared, uint32_t* arrivals) {
  if (arch::thread() == 0) {
    arch::fence_device();
    shared.last_block = arch::atomic_add(arrivals, 1U) + 1 == static_cast<uint32_t>(arch::grid_x()) ? 1 : 0;
    arch::fence_device();
  }
  arch::block_barrier();
  return shared.last_block != 0;
}

// Adds to an entry of the masses in shared memory.
ULL_DEVICE void add_mass(Shared& shared, int at, uint64_t units) {
  if (units == 0) return;
  const uint32_t low = static_cast<uint32_t>(units);
  const uint32_t carry = arch::atomic_add(&shared.low[at], low) + low < low ? 1U : 0U;
  const uint32_t high = static_cast<uint32_t>(units >> 32) + carry;
  if (high > 0) arch::atomic_add(&shared.high[at], high);
}
ULL_DEVICE uint64_t mass_at(const Shared& shared, int at) {
  return shared.low[at] | (static_cast<uint64_t>(shared.high[at]) << 32);
}

// How a node's raw logits are changed before anything is drawn: by penalties of its text, then by biases, of which a
// mask bans what it does not hold (null: there is none). To be called before each_quad(), which takes the answer:
// whether they are. kNodes: of a tree's node, whose text goes on from the root's, the first draw's, by the node's way.
// Duplicates among the biased ids are refused upstream.
template <bool kNodes>
ULL_DEVICE bool stage_adjustment(Shared& shared, const Round* round, const State* state, int node,
                                 const uint32_t* mask = nullptr) {
  const int bias_count = state->sampling.bias_count, me = arch::thread();
  const bool penalises = state->sampling.penalises != 0;
  if (bias_count == 0 && !penalises && mask == nullptr) return false;
  for (int i = me; i < bias_count; i += kThreads) shared.biases[i] = state->biases[i];
  for (int i = me; i < kChunk; i += kThreads) shared.dense[i] = 0.0F;
  for (int i = me; i < kChunk / 4; i += kThreads) shared.added[i] = 0;
  int way_count = 0;
  if constexpr (kNodes) {
    const int root = round->first_draw;  // which stands at that depth: what comes before it is a chain
    if (penalises) way_count = round->depths[node] - root;
    const uint32_t step = static_cast<uint32_t>(me);
    if (me < way_count) shared.way[step] = round->tokens[round->path[node][root + static_cast<int>(step) + 1]];
  }
  if (me == 0) {
    shared.adjustment = {bias_count,
                         way_count,
                         penalises,
                         state->sampling.repetition_penalty,
                         state->sampling.frequency_penalty,
                         state->sampling.presence_penalty,
                         mask};
  }
  arch::block_barrier();
  return true;
}

// Puts the biases and the way of tokens [chunk, last) into `dense` and `added`, or takes them back.
ULL_DEVICE void spread(Shared& shared, int chunk, int last, bool put) {
  arch::block_barrier();
  for (int i = arch::thread(); i < shared.adjustment.bias_count; i += kThreads) {
    const int at = shared.biases[i].token - chunk;
    if (at >= 0 && at < kChunk && at < last - chunk) shared.dense[at] = put ? shared.biases[i].bias : 0.0F;
  }
  if (arch::thread() < shared.adjustment.way_count) {
    const int at = shared.way[arch::thread()] - chunk;
    if (at >= 0 && at < kChunk) {
      const uint32_t one = 1U << (at % 4 * 8);
      arch::atomic_add(&shared.added[at / 4], put ? one : 0U - one);
    }
  }
  arch::block_barrier();
}

// As executor/sampling.h: the logit of a token that the text holds `counted` (a word of the counts) times, and `added`
// more.
ULL_DEVICE float penalised(const Shared& shared, float logit, uint32_t counted, uint32_t added) {
  if (counted == 0 && added == 0) return logit;
  const float repetition = shared.adjustment.repetition;
  logit = logit > 0.0F ? arch::divide(logit, repetition) : logit * repetition;
  const uint32_t generated = counted / kGenerated + added;
  if (generated == 0) return logit;
  const float frequency = shared.adjustment.frequency * static_cast<float>(static_cast<int32_t>(generated));
  logit -= frequency;
  return logit - shared.adjustment.presence;
}

ULL_DEVICE void load_quad(const float* row, int token, float (&logits)[4]) {
  const arch::Vector4 raw = arch::load_global(row + token);
#pragma unroll
  for (int j = 0; j < 4; ++j) logits[j] = arch::bits_float(raw.word[j]);
}

// Bans those of tokens token .. token + 3 that the mask does not hold.
ULL_DEVICE void ban_quad(const uint32_t* mask, int token, float (&logits)[4]) {
  const arch::Vector4 words = arch::load_global(mask + token / kMaskTokens * (kMaskTokens / 32));
  const int at = token % kMaskTokens / 32;
  const uint32_t low = (at & 1) != 0 ? words.word[1] : words.word[0];
  const uint32_t high = (at & 1) != 0 ? words.word[3] : words.word[2];
  const uint32_t bits = ((at & 2) != 0 ? high : low) >> (token % 32);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if ((bits >> j & 1U) == 0) logits[j] = arch::bits_float(0xFF800000U);  // -inf
  }
}

// Of tokens chunk + at .. chunk + at + 3, as stage_adjustment() and spread() have laid down.
ULL_DEVICE void adjust_quad(const Shared& shared, const uint32_t* text_counts, int chunk, int at, float (&logits)[4]) {
  if (shared.adjustment.penalises) {
    const arch::Vector4 counted = arch::load_global(text_counts + chunk + at);
    const uint32_t added = shared.added[at / 4];
#pragma unroll
    for (int j = 0; j < 4; ++j) logits[j] = penalised(shared, logits[j], counted.word[j], added >> (8 * j) & 0xFFU);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) logits[j] += shared.dense[at + j];
  if (shared.adjustment.mask != nullptr) ban_quad(shared.adjustment.mask, chunk + at, logits);
}

// A thread's logits of one chunk.
struct Loaded {
  arch::Vector4 quad[kQuads];
};

ULL_DEVICE Loaded load_chunk(const float* row, int chunk, int last) {
  Loaded loaded;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int token = chunk + 4 * (arch::thread() + q * kThreads);
    if (token < last) loaded.quad[q] = arch::load_global(row + token);
  }
  return loaded;
}

// visit(token, raw, biased: after penalties and biases) for each group of four logits from `token` on; those at the
// slice's end and beyond are not logits. `first`: the slice's first chunk, which a kernel loads before it waits for
// other things.
template <typename Visit>
ULL_DEVICE void each_quad(Shared& shared, const float* row, Slice slice, Loaded first, bool adjusts,
                          const uint32_t* text_counts, Visit visit) {
  if (adjusts) {  // one group at a time: registers are few
    for (int chunk = slice.first; chunk < slice.last; chunk += kChunk) {
      spread(shared, chunk, slice.last, true);
#pragma unroll 1
      for (int at = 4 * arch::thread(); at < kChunk && chunk + at < slice.last; at += 4 * kThreads) {
        float raw[4], biased[4];
        load_quad(row, chunk + at, raw);
#pragma unroll
        for (int j = 0; j < 4; ++j) biased[j] = raw[j];
        adjust_quad(shared, text_counts, chunk, at, biased);
        visit(chunk + at, raw, biased);
      }
      spread(shared, chunk, slice.last, false);
    }
    return;
  }
  Loaded loaded = first;
  for (int chunk = slice.first; chunk < slice.last; chunk += kChunk) {
    if (chunk > slice.first) loaded = load_chunk(row, chunk, slice.last);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int at = 4 * (arch::thread() + q * kThreads);
      if (chunk + at >= slice.last) continue;
      float raw[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) raw[j] = arch::bits_float(loaded.quad[q].word[j]);
      visit(chunk + at, raw, raw);
    }
  }
}

// The better of `best` and the scores of a quad, of which the first `valid` are logits.
ULL_DEVICE uint64_t score_quad(uint64_t best, const float (&adjusted)[4], int token, int valid, const Wish& wish) {
  bool hopeful = false;
#pragma unroll
  for (int j = 0; j < 4; ++j) hopeful = hopeful || (j < valid && adjusted[j] >= kHopeless);
  if (!hopeful) return best;
  float noise[4];
  gumbel_quad(wish.seed, wish.position, token / 4, noise);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= valid || !(adjusted[j] >= kHopeless)) continue;
    if (wish.min_p > 0.0F && exp_lanes<ScalarMath>(adjusted[j]) < wish.min_p) continue;
    best = Larger()(best, packed(adjusted[j] + noise[j], token + j));
  }
  return best;
}

ULL_DEVICE uint64_t low_half(const arch::Vector4& v) { return v.word[0] | (static_cast<uint64_t>(v.word[1]) << 32); }
ULL_DEVICE uint64_t high_half(const arch::Vector4& v) { return v.word[2] | (static_cast<uint64_t>(v.word[3]) << 32); }

// ---- the best few -----------------------------------------------------------------------------------------------

// The `wanted` largest of what each(visit) offers, one after another and distinct over all threads -> out, sorted, 0
// where there are fewer. At least `wanted` of the threads' own maxima reach the wanted-th largest of these, so only
// items from there on are compared with one another: about as many as wanted.
template <typename Each>
ULL_DEVICE void best_of(Shared& shared, int wanted, uint64_t* out, Each each) {
  uint64_t mine = 0;
  each([&](uint64_t item) { mine = Larger()(mine, item); });
  arch::block_barrier();
  shared.chosen[arch::thread()] = mine;
  if (arch::thread() == 0) {
    shared.least = 0;
    shared.chosen_count = 0;
  }
  arch::block_barrier();
  int larger = 0;
  for (int i = 0; i < kThreads; ++i) larger += shared.chosen[i] > mine ? 1 : 0;
  if (larger == wanted - 1 && mine > 0) shared.least = mine;
  arch::block_barrier();
  const uint64_t least = shared.least;
  each([&](uint64_t item) {
    if (item < least || item == 0) return;
    const uint32_t at = arch::atomic_add(&shared.chosen_count, 1U);
    if (at < kChosen) shared.chosen[at] = item;
  });
  arch::block_barrier();
  const int count = static_cast<int>(shared.chosen_count);
  for (int i = arch::thread(); i < wanted; i += kThreads) {
    if (i >= count) out[i] = 0;
  }
  for (int i = arch::thread(); i < count; i += kThreads) {
    int rank = 0;
    for (int j = 0; j < count && rank < wanted; ++j) rank += shared.chosen[j] > shared.chosen[i] ? 1 : 0;
    if (rank < wanted) out[rank] = shared.chosen[i];
  }
  arch::block_barrier();
}

// The best of all slices' lists of a node -> shared.sorted.
ULL_DEVICE void merge_lists(Shared& shared, const Scratch& scratch, int node, int slices, int wanted) {
  const uint64_t* lists = &scratch.alternatives[node * slices][0];
  best_of(shared, wanted, shared.sorted, [&](auto visit) {
    for (int i = arch::thread(); i < slices * kAlternatives / 2; i += kThreads) {
      const arch::Vector4 pair = arch::load_global(lists + 2 * i);
      const int rank = 2 * i % kAlternatives;
      if (rank < wanted) visit(low_half(pair));
      if (rank + 1 < wanted) visit(high_half(pair));
    }
  });
}

// ---- the scan's finding -------------------------------------------------------------------------------------------

// What the scan found for a node.
struct Scanned {
  bool valid;     // finite, and not everything is banned
  int token;      // the best biased logit's
  float best;     // its value
  float maximum;  // of the raw logits
};

ULL_DEVICE Scanned merge_scans(Shared& shared, const Scratch& scratch, int node, int slices) {
  uint64_t best = 0, maximum = 0;
  for (int i = arch::thread(); i < slices; i += kThreads) {
    const arch::Vector4 part = arch::load_global(&scratch.scans[node * slices + i]);
    best = Larger()(best, low_half(part));
    maximum = Larger()(maximum, high_half(part));  // poison, the upper word, outdoes everything
  }
  block_reduce(shared, best, Larger(), maximum, Larger());
  const bool banned = best >> 32 <= ordered(arch::bits_float(0xFF800000U));  // -inf
  return {(maximum >> 32) == 0 && !banned, token_of(best), value_of(best), unordered(static_cast<uint32_t>(maximum))};
}

}  // namespace ull::gpu::sample
