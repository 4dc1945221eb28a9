// What host and kernels share: the mapped blocks through which rounds are asked for and answered, the state that stays
// on the device between rounds, and one parameter struct per kernel. Plain C++ of fixed layout: the core fills the
// mapped blocks, ull/gpu fills the kernel parameters (its ctypes mirrors are checked against these), the kernels read
// both.
#pragma once

#include <cstdint>

namespace ull::gpu {

inline constexpr int kInterface = 16;     // raised with every change of what stands here: see device_layout.py
inline constexpr int kTreeTokens = 64;    // nodes of the widest tree, root included
inline constexpr int kRoundSlots = 4;     // mapped request and result blocks, used in turn
inline constexpr int kStopTokens = 32;    // token ids that end a request
inline constexpr int kBiases = 1024;      // logit biases of a request
inline constexpr int kAlternatives = 20;  // alternatives reported per token
inline constexpr int kMedusaRanks = 10;   // candidates that a Medusa head proposes
inline constexpr int kPageTokens = 64;    // tokens per KV page
inline constexpr int kMaskTokens = 128;   // a mask of tokens is padded to so many bits
inline constexpr int kSplitTokens = 256;  // positions that one attention split covers, aligned; part of the numerics
inline constexpr int kMostTaps = 8;       // layers whose residual a head reads
inline constexpr int kTapSlots = 512;     // positions whose tapped rows of the residual are kept
inline constexpr int kChunkTokens = 512;  // of a prompt, the most that one graph reads
inline constexpr int kChunkTile = 128;    // of those, the tokens that a block multiplies
inline constexpr int kChunkParts = kChunkTokens / kChunkTile;
inline constexpr int kSlices = 8;            // K slices of a linear layer; part of the numerics
inline constexpr float kMlpScale = 0.0625F;  // silu(gate) * up is kept as f16 times this, for its range

enum class RoundMode : uint32_t {
  kTake = 0,      // the request block says tokens, position and tree
  kContinue = 1,  // a plain round after the last one: token and position come from the device's state
  kPrefill = 2,   // a chain of prompt tokens: fills the cache, draws nothing
  kMedusa = 3,    // Medusa heads on the last accepted token: node i is what head i says of position + 1 + i
  kRedraw = 4,    // draws from logits that the last round has left: draw i from those of its node parents[i]
  kEagle = 5,  // entries of an EAGLE head, a tree: the first `forced` are a chain whose hidden states are the target's
               // and whose KV is kept; what follows the last `max_tokens` entries is ranked. At position -1: those that
               // the target's last round has left to be made, up to `count`
  kDflashContext = 6,  // positions whose taps the ring holds: keys and values of a DFlash head, which are kept
  kDflashBlock = 7,    // a DFlash head's block from the root on: all entries see each other; what the first
                       // `max_tokens` that predict say is ranked
  kDflashNodes = 8,  // nodes of a draft tree, the root first: what follows the last `max_tokens` is ranked by the last
                     // block's logits and the head's Markov term
};

enum class RoundStatus : uint32_t {
  kOk = 0,
  kSkipped = 1,    // cancelled, or the round that it continues had ended the request: nothing was done
  kNotFinite = 2,  // a logit was not finite, or every token was banned; of kRedraw's draws any one's
};

struct LogitBias {
  int32_t token;
  float bias;
};

struct Sampling {
  float temperature;  // 0: greedy
  int32_t top_k;      // 0: off
  float top_p;        // 1: off
  float min_p;        // 0: off
  uint64_t seed;
  int32_t top_logprobs;  // -1: none wanted; 0: the chosen token's; n: and n alternatives
  int32_t bias_count;
  float repetition_penalty;  // 1: off
  float frequency_penalty;   // 0: off
  float presence_penalty;    // 0: off
  int32_t penalises;         // 1: one of them is on
};

// In the sequence of a block whose graph has been launched before the host knows what to ask (`awaited`). The round
// waits until the sequence is its number alone, which the host stores last, with release; or another, or it is
// cancelled: then it is skipped.
inline constexpr uint64_t kAwaited = uint64_t{1} << 63;

// Host -> device, in mapped host memory: round number `sequence` is asked for in slot sequence % kRoundSlots. Written
// before the graph is launched, unless the round waits for it, and not again before its result has been seen.
struct alignas(64) RoundRequest {
  uint64_t sequence;  // from 1, one more each round
  RoundMode mode;
  int32_t count;     // nodes (kTake, kDflashNodes), prompt tokens (kPrefill), heads (kMedusa), draws (kRedraw) or
                     // entries (of the other heads); 1 for kContinue; of a kTake whose graph reads a chunk: tokens
  int32_t position;  // of the root, of the first token that is forced or a prompt's, or of the node that kRedraw draws
                     // behind; of heads (not kDflashNodes) -1: they are behind a round of which the host knows
                     // nothing yet
  int32_t max_tokens;  // emit at most this many
  uint32_t setting;    // version of sampling, biases, stops and pages: the device copies them when it changes
  int32_t page_count;
  int32_t stop_count;
  uint32_t text;          // version of the host's text, of a request with penalties: the device reads a new one
  int32_t prompt_tokens;  // of the text: what follows them was generated
  int32_t forced;         // kTake: the first so many nodes, below `count`, are a chain of prompt tokens and accepted as
                          // they are: the tree's root, from which on nodes are drawn, is the one behind them. Of a
                          // chunk: all but the last
  int32_t first;          // kEagle, kDflashBlock: the pages lack positions before it
  int32_t awaited;  // 1: nothing else here is to be believed before the round has waited; known when it is launched
  int32_t tokens[kTreeTokens];   // kRedraw: the tokens whose log-probabilities are wanted; or one draw, of a token -1:
                                 // by the rule, as though all tokens that the mask does not allow were banned
  uint8_t parents[kTreeTokens];  // parents[i] < i; parents[0] = 0; kRedraw: any node of the last round
  Sampling sampling;
  int32_t stops[kStopTokens];
  LogitBias biases[kBiases];
};

// Also in mapped host memory; `pages` follows as [context / kPageTokens] int32, then `text` as [context] int32: the
// tokens up to the root of the round that brings a new version of it (its first draw, where tokens are forced). Then
// `mask` as [V rounded up to kMaskTokens / 32] uint32: bit token % 32 of word token / 32 allows a token to a kRedraw.
// Last `chunks` as [kRoundSlots][kChunkTokens] int32: the tokens of a kPrefill or a kTake whose graph reads a chunk,
// and which counts up to kChunkTokens.
struct alignas(64) HostControl {
  uint64_t cancelled_through;  // rounds up to this sequence are skipped
};

struct TokenLogprob {
  int32_t token;
  float logprob;  // of a head's candidates: the score by which they are ranked
};

struct EmittedToken {
  int32_t token;
  float logprob;  // of a DFlash head's candidates: the chance that one of them is accepted where it says so, else 1
  int32_t top_count;
  int32_t node;  // whose draw it is
  TokenLogprob top[kAlternatives];
};

// Device -> host, in mapped host memory. `sequence` is stored last, with release.
struct alignas(64) RoundResult {
  uint64_t sequence;
  RoundStatus status;
  int32_t count;      // tokens emitted
  uint64_t begin_ns;  // device clock: the round's first and last kernel
  uint64_t end_ns;    // stored again by a round's commit(), after `sequence`: complete once the next round has answered
  int32_t stopped;    // 1: the last token is one of the stops; rounds that continue this one are skipped
  int32_t padding[7];
  EmittedToken tokens[kTreeTokens + 1];
};

// The round under way, on the device. begin() writes the first part, the sampler the draws.
struct Round {
  uint64_t sequence;
  RoundMode mode;
  int32_t count;  // nodes; 0: every kernel returns at once
  int32_t base;   // position of node 0: positions before it are in the pages
  int32_t max_tokens;
  int32_t draws;       // 1: nodes are sampled (neither a prefill nor Medusa's)
  int32_t first_draw;  // the first of them: those before it are forced tokens, and part of the text; of entries of
                       // heads, the first that has no taps
  uint64_t begin_ns;
  int32_t tokens[kTreeTokens];
  int32_t depths[kTreeTokens];             // position of node i: base + depths[i]
  uint8_t path[kTreeTokens][kTreeTokens];  // [node][depth]: its way from the root, path[i][depths[i]] = i
  uint8_t rows[kTreeTokens];               // of kRedraw: which row of the logits a draw looks at
  EmittedToken drawn[kTreeTokens];         // each node's draw
  int32_t accepted_count;                  // nodes whose KV goes to the pages: at base + 0, 1, ...
  uint8_t accepted[kTreeTokens];           // those nodes, by depth
  int32_t first;                           // of a head: positions before it are not attended to
};

// A chunk of a prompt under way, on the device: what Round is to a round. begin_chunk() writes it.
struct alignas(16) Chunk {
  uint64_t sequence;
  int32_t base;   // position of the first token: positions before it are in the pages
  int32_t count;  // tokens; 0: every kernel returns at once
  int32_t tokens[kChunkTokens];
};

// What stays between rounds.
struct State {
  uint64_t sequence;  // of the next round
  int32_t token;      // that a continuing round feeds
  int32_t position;   // of that token
  int32_t stopped;    // 1: the last round cannot be continued: it stopped, was skipped, failed, or filled or drew again
  uint32_t setting;   // version that `sampling`, biases, stops and the page table below were copied from
  int32_t stop_count;
  int32_t node;  // of the last round that emitted: the last accepted one, whose row of the residual the heads read
  Sampling sampling;
  uint32_t text;    // version that the device's text and its counts began with
  int32_t counted;  // tokens of the text that are counted, from position 0
  int32_t prompt_tokens;
  int32_t unused;
  int32_t stops[kStopTokens];
  LogitBias biases[kBiases];
};

// A word of the counts: 2 * how often the completion holds the token, + 1 if the prompt does.
inline constexpr uint32_t kPrompted = 1;
inline constexpr uint32_t kGenerated = 2;

// ---- kernel parameters ------------------------------------------------------------------------------------------
// Widths: H hidden, A heads * head_dim, Q = A + 2 * kv_heads * head_dim, I intermediate, V vocabulary. f16 activations
// of width K lie as [K / 32][64 tokens][32] (activations.cuh), f32 outputs have rows of N rounded up to 16.
//
// Taps: rows of the residual as it enters certain layers, or leaves the last, for heads that draft from them. A
// position has one row of each tapped layer, [taps][H] f32 with H rounded up to 16. A round of one token leaves its
// rows in the ring, [kTapSlots] positions at slot position % kTapSlots; another one in a scratch of [64] nodes, from
// where commit() copies the accepted nodes' to the ring.

struct BeginParams {
  Round* round;
  State* state;
  const RoundRequest* requests;  // [kRoundSlots] mapped
  const HostControl* control;    // mapped
  const int32_t* host_pages;     // mapped
  int32_t* pages;                // [context / kPageTokens]
  uint32_t* counters;            // [counter_count] arrival counters, zeroed
  const int32_t* host_text;      // mapped
  int32_t* text;                 // [context + kTreeTokens + 1] tokens by position, of a request with penalties
  uint32_t* text_counts;         // [V rounded up to 16] how often the text up to the root holds each token
  const uint32_t* host_mask;     // mapped
  uint32_t* mask;                // [V rounded up to kMaskTokens / 32] what a kRedraw may draw
  const Round* target;           // of a head: the model's that it drafts for; else null
  const State* target_state;     // likewise
  const int32_t* host_chunks;    // mapped: [kRoundSlots][kChunkTokens] the tokens of a chunk
  Chunk* chunk;
  int32_t counter_count;
  int32_t page_capacity;
  int32_t text_capacity;  // context
  int32_t padding;
};

struct EmbedParams {
  const Round* round;
  const void* table;  // [V, H] bf16
  float* residual;    // [64, H]
};

struct NormParams {  // for tiles of 16 tokens and more; below, the linear kernels normalise on their own
  const Round* round;
  float* residual;           // [64, H]
  const float* norm_weight;  // [H]
  void* normed;              // H f16 activations
  const float* partial;      // [kSlices, 64, H] what o or down leave to be added to the residual first, or null
  const float* scale;        // [H] of that layer
  const float* bias;         // [H] of that layer, or null
  float* taps;               // this layer's rows of the ring (one token) or of the scratch; null: not tapped
  float unit;                // 1 for o, 1 / kMlpScale for down
};

struct LinearParams {
  const Round* round;
  const void* weights;       // packed, see linear.cuh
  const float* scale;        // [N]
  const float* bias;         // [N] or null
  const float* residual;     // [64, H] input of a normalising kernel; of dflash_markov: the last block's logits
  const float* norm_weight;  // [H]
  const void* activations;   // f16: input of o and down, and normed input of the others for 16 tokens and more
  void* output;              // qkv: f32 [64, Q]; o, down: f32 residual [64, H], added to; gate_up: f16 activations;
                             // head: f32 logits [64, V]
  float* partial;            // [kSlices, 64, N]: from 16 tokens on, qkv, o and down leave each slice's sums here and
                             // write no output: qkv_sum or the next norm finishes them
  void* maxima;              // head of one token: a ScanPart (scores.cuh) of each block; null: nobody wants them
  float* taps;               // of a normalising kernel: as NormParams'
};

struct AttentionParams {
  const Round* round;
  const float* qkv;       // [64, Q] with bias, before QK norm and RoPE
  const float* q_norm;    // [head_dim] or null
  const float* k_norm;    // [head_dim] or null
  const float* rope;      // [context, head_dim / 2, 2] cos, sin
  const int32_t* pages;   // page table
  void* page_pool;        // [page][layer][K, V]; K [kv_head][64][head_dim], V [kv_head][head_dim][64]
  void* tree_keys;        // this layer's [kv_head][64][head_dim]: the nodes of this round, as in the pages; one token's
                          // key and value go to its page instead
  void* tree_values;      // this layer's [kv_head][64][head_dim]
  const float* kv_scale;  // [2, kv_heads] of FP8 pages, powers of two: value = stored * scale; null for bf16
  float* partial;         // [kv_heads][splits][64 * group][head_dim + 2] output, maximum, sum
  uint32_t* counters;     // [kv_heads] blocks that have finished
  void* output;           // A f16 activations
  int64_t page_bytes;
  int64_t layer_offset;         // bytes of this layer within a page
  int32_t window;               // sliding window in tokens; 0: all
  int32_t splits;               // most splits (context / kSplitTokens, rounded up)
  const void* o_weights;        // what is read next, or null where another forward has it: L2 is asked for it
  const void* gate_up_weights;  // and behind that
  int32_t linear_blocks;        // of a launch of theirs, at most
  int32_t page_blocks;          // of ull_attention_pages that share a kv head; 0: it is not launched
  int32_t unused[2];
};

inline constexpr int kLayerLinears = 4;
inline constexpr int kQkvLinear = 0;
inline constexpr int kOutputLinear = 1;
inline constexpr int kGateUpLinear = 2;
inline constexpr int kDownLinear = 3;

// A layer's steps, each as its own kernel takes it. In device memory, where no kernel writes it.
struct alignas(16) LayerParams {
  LinearParams linears[kLayerLinears];
  AttentionParams attention;
};

struct LayersParams {  // all layers of a round of one token in one launch
  const Round* round;
  const LayerParams* layers;  // [layers]
  uint32_t* arrivals;         // what the steps have done, counted through the round (layer_steps.cuh); zero before it
};

struct SampleParams {
  Round* round;
  const State* state;
  float* logits;                // [64, V]; neither penalties nor biases are in it
  void* scratch;                // sample_scratch_bytes
  const uint32_t* text_counts;  // [V]
  const uint32_t* mask;         // [V rounded up to kMaskTokens / 32]
};

struct AcceptParams {
  Round* round;
  State* state;
  RoundResult* results;  // [kRoundSlots] mapped
  int32_t* text;         // [context + kTreeTokens + 1]
};

struct PlainParams {  // draws of a round of one token whose request has neither filters nor biases, and ends the round
  SampleParams sample;
  AcceptParams accept;
  uint32_t* counters;  // [1] blocks that have finished; zero before it
  int32_t parts;       // blocks of the head, which has left its maxima in the scratch
  int32_t padding;
};

// The end of a round of one token whose lm_head was scanned in FP8: its draw, where only the token is asked for, and
// what ull_accept does (head_rescore.cu).
struct HeadScanParams {
  Round* round;
  const State* state;
  const void* weights;       // of the lm_head: packed, 16 bits
  const float* scale;        // [V] of the lm_head
  const float* bound;        // [V] |exact - scanned logit| is at most that times the norm of the normed residual
  const float* residual;     // [64, H]: row 0
  const float* norm_weight;  // [H]
  const float* logits;       // [V] of the scan
  void* normed;              // H f16 activations: row 0
  void* scratch;             // sample_scratch_bytes
  AcceptParams accept;
};

struct CommitParams {
  const Round* round;
  const int32_t* pages;
  void* page_pool;
  const void* tree_keys;    // [layers][kv_head][64][head_dim]
  const void* tree_values;  // [layers][kv_head][64][head_dim]
  RoundResult* results;     // the round's end is reported by the last block
  uint32_t* counters;       // [1]
  const float* tapped;      // [64, taps, H] the scratch of taps; null: there are none
  float* tap_ring;          // [kTapSlots, taps, H]
  int64_t page_bytes;
};

struct MedusaStartParams {
  const Round* round;
  const State* state;
  const float* residual;     // [64, H] as the last round that emitted left it
  const float* norm_weight;  // [H] of the final norm
  void* normed;              // H f16 activations: the same row for every head
};

struct MedusaRankParams {
  Round* round;
  const State* state;
  const float* logits;          // [heads, V]
  void* scratch;                // sample_scratch_bytes
  const uint32_t* text_counts;  // [V]
  uint32_t* counters;           // [heads] blocks that have finished; zero before it
};

struct TapsParams {
  const Round* round;
  const float* ring;         // [kTapSlots, ring_taps, target's H]
  const float* norm_weight;  // [taps, target's H]; null: they are not normalised
  void* output;              // f16 activations of width taps * target's H, times kMlpScale
  int32_t ring_taps;
  int32_t taps[kMostTaps];  // which of the ring's rows the head reads
  int32_t padding;
};

struct EagleInputParams {
  const Round* round;
  const void* table;            // [target's V, H] bf16
  const float* states;          // [64, H] of the entries that have taps
  const float* outputs;         // [64, H] residual that left the layer in the pass before
  const float* embedding_norm;  // [H]
  const float* hidden_norm;     // [H]
  const float* output_norm;     // [H] of the outputs, where the head is fed them behind its final norm
  void* input;                  // 2 * H f16 activations
  float* residual;              // [64, H]
};

struct EagleRankParams {
  Round* round;
  const State* state;           // the target's
  const float* logits;          // [64, V]
  const int32_t* names;         // [V] the target's token of each of the head's; null: the same
  void* scratch;                // sample_scratch_bytes
  const uint32_t* text_counts;  // the target's
  uint32_t* counters;           // [ranked entries] blocks that have finished; zero before it
};

struct DflashStoreParams {
  const Round* round;
  const float* partial;   // [kSlices, 64, K and V rows of qkv] the slices' sums
  const float* scale;     // [K and V rows] of qkv
  const float* bias;      // [K and V rows] of qkv, or null
  const float* k_norm;    // [head_dim] or null
  const float* rope;      // [context, head_dim / 2, 2] cos, sin
  const float* kv_scale;  // as AttentionParams'
  void* tree_keys;        // this layer's, as AttentionParams': position base + i is node i
  void* tree_values;
};

struct DflashNodesParams {
  Round* round;
  const float* residual;         // [64, H] as the last block left it
  const float* norm_weight;      // [H] of the final norm
  const void* embedding;         // [target's V, Markov rank] bf16
  const float* confidence;       // [H (+ rank)]
  const float* confidence_bias;  // [1]
  void* factors;     // f16 activations of width rank: what the Markov term is made of, or the gate's half of it
  void* gate_input;  // f16 activations of width H + rank: the state and the embedding; null: no gate
};

struct DflashRankParams {
  Round* round;
  const State* state;           // the target's
  const float* logits;          // [64, V]: of a block by entry, of nodes by their place among those that are ranked
  const int32_t* names;         // as EagleRankParams'
  const int32_t* text;          // the target's tokens by position, of a request with penalties
  void* scratch;                // sample_scratch_bytes
  const uint32_t* text_counts;  // the target's
  uint32_t* counters;           // [ranked rows] blocks that have finished; zero before it
};

// ---- of a chunk. Its f16 activations of width K lie as [tile of 128 tokens][K / 32][4][128][8]
// (linear/activations.cuh), e4m3 ones as [tile][K / 32][2][128][16] (chunk/layout.cuh). "fast": of bundles whose
// prompts are read with e4m3 activations.

struct ChunkEmbedParams {
  const Chunk* chunk;
  const void* table;  // [V, H] bf16
  float* residual;    // [kChunkTokens, H]
};

struct ChunkNormParams {
  const Chunk* chunk;
  float* residual;           // [kChunkTokens, H]
  const float* norm_weight;  // [H]
  void* normed;              // H activations (fast: e4m3); null: only the taps or `last` are wanted
  float* taps;               // this layer's rows of the ring; null: not tapped
  float* token_scale;        // fast: [kChunkTokens] written; else null
  const float* partial;      // of up to kChunkTile tokens: what o or down leave to be added to the residual first, as
  const float* scale;        // NormParams' [kSlices, kChunkTile, H]; null: nothing
  const float* bias;         // as NormParams'
  float* last;               // [H]: the last token's row is kept here, the residual of a round that draws behind it; a
                             // launch of one block looks at that token alone; null: nobody draws
  float unit;
  int32_t padding;
};

struct ChunkTapsParams {
  const Chunk* chunk;
  const float* ring;         // as TapsParams'
  const float* norm_weight;  // as TapsParams'
  void* output;              // f16 activations of width taps * target's H, times kMlpScale
  int32_t ring_taps;
  int32_t taps[kMostTaps];  // as TapsParams'
  int32_t padding;
};

struct ChunkEagleInputParams {
  const Chunk* chunk;
  const void* table;            // [target's V, H] bf16
  const float* states;          // [kChunkTokens, H]
  const float* embedding_norm;  // [H]
  const float* hidden_norm;     // [H]
  void* input;                  // 2 * H f16 activations
};

struct ChunkQuantiseParams {  // fast
  const Chunk* chunk;
  const void* activations;  // f16
  void* quantised;          // the same ones as e4m3
  float* token_scale;       // [kChunkTokens] written: what each token's e4m3 are to be multiplied by
  int32_t steps;            // of 32 columns
  int32_t padding;
};

struct ChunkLinearParams {
  const Chunk* chunk;
  const void* weights;       // packed, see linear.cuh
  const float* scale;        // [N]
  const float* bias;         // [N] or null
  const void* activations;   // K activations (fast: e4m3)
  void* output;              // qkv: f32 [kChunkTokens, Q]; o, down: f32 residual [kChunkTokens, H], added to; gate_up:
                             // I f16 activations
  const float* token_scale;  // fast: [kChunkTokens] of the activations; else null
  float* partial;            // o, down: where slices' sums of up to kChunkTile tokens stay apart; null: nowhere
  int32_t whole[kChunkParts];  // of a chunk of i + 1 tiles: how many of a column's clusters have blocks of 128 rows,
                               // the first ones; those behind have 64
};

struct ChunkStoreParams {
  const Chunk* chunk;
  const float* qkv;       // [kChunkTokens, Q] with bias, before QK norm and RoPE
  const float* k_norm;    // [head_dim] or null
  const float* rope;      // [context, head_dim / 2, 2] cos, sin
  const int32_t* pages;   // page table
  void* page_pool;        // as AttentionParams'
  const float* kv_scale;  // as AttentionParams'
  int64_t page_bytes;
  int64_t layer_offset;  // bytes of this layer within a page
};

struct ChunkAttentionParams {
  const Chunk* chunk;
  const float* qkv;       // [kChunkTokens, Q] with bias, before QK norm and RoPE, of which this reads the queries
  const float* q_norm;    // [head_dim] or null
  const float* rope;      // [context, head_dim / 2, 2] cos, sin
  const int32_t* pages;   // page table
  const void* page_pool;  // as AttentionParams', with every token's key and value
  const float* kv_scale;  // as AttentionParams'
  void* output;           // A f16 activations
  float* partial;         // what blocks leave that share splits out: chunk_attention_plan.cuh
  uint32_t* counters;     // [kv_heads][4 * group][8] warps that have finished
  int64_t page_bytes;
  int64_t layer_offset;  // bytes of this layer within a page
  int32_t window;        // sliding window in tokens; 0: all
  int32_t blocks;        // of a kv head that run at once, at most the grid's: among so many splits are shared out
  int32_t results;       // that a block leaves at most
  int32_t padding;
};

struct ChunkProbeParams {
  uint32_t* differences;  // [1] added to
  uint32_t seed;
  int32_t rounds;  // of each block
  int32_t flaw;    // 1: one bit of an operand is changed on one side, to see that the probe sees it
  int32_t padding;
};

struct FillParams {  // weights of a benchmark bundle
  void* output;
  int64_t bytes;
  uint64_t seed;
  int32_t format;  // 0: e4m3 weights, 1: f16, 2: bf16, 3: f32
  float amplitude;
};

}  // namespace ull::gpu
