// Starts a round: finds its request in mapped host memory and turns it into the Round that every other kernel reads.
//
// A dependent read of host memory costs a PCIe round trip (1 to 2 us), and which slot is due is known only to the
// device. So the small part of all slots is read at once, with the control block, and before the round before has
// ended. The rest of a request (stops, biases, pages) is read only when its setting is a new one.
#include "model.cuh"

namespace ull::gpu {
namespace {

constexpr int kThreads = 512;
// 8-byte words of a request's head: everything before the stops.
constexpr int kHeadWords = ULL_OFFSETOF(RoundRequest, stops) / 8;
constexpr int kStatePieces = ULL_OFFSETOF(State, stops) / 16;  // of 16 bytes, everything before the stops
constexpr int kRequestThreads = kRoundSlots * kHeadWords;
constexpr int kStateThread = kRequestThreads + 1;  // the one before reads the control block
static_assert(kStateThread + kStatePieces <= kThreads);
static_assert(ULL_OFFSETOF(RoundRequest, stops) % 8 == 0 && ULL_OFFSETOF(State, stops) % 16 == 0);
// Stops and biases stand together in both.
static_assert(ULL_OFFSETOF(RoundRequest, biases) == ULL_OFFSETOF(RoundRequest, stops) + 4 * kStopTokens);
static_assert(ULL_OFFSETOF(State, biases) == ULL_OFFSETOF(State, stops) + 4 * kStopTokens);

struct alignas(64) Shared {
  uint64_t requests[kRoundSlots][round_up(kHeadWords, 8)];
  uint64_t state[round_up(2 * kStatePieces, 8)];
  uint64_t cancelled_through;
  uint64_t ancestors[2][kTreeTokens];  // bit j of entry i: node j is on node i's way from the root, so far
  uint8_t jumps[2][kTreeTokens];       // the node above those
  uint64_t path[kTreeTokens * kTreeTokens / 8];

  // Only their heads are there.
  ULL_DEVICE const RoundRequest& request(int slot) const {
    return *reinterpret_cast<const RoundRequest*>(requests[slot]);
  }
  ULL_DEVICE const State& old_state() const { return *reinterpret_cast<const State*>(state); }
};
static_assert(sizeof(Shared) == 7232);  // ull/gpu/geometry/sampling.py

ULL_DEVICE int bits_set(uint64_t bits) {
  bits -= (bits >> 1) & 0x5555555555555555U;
  bits = (bits & 0x3333333333333333U) + ((bits >> 2) & 0x3333333333333333U);
  return static_cast<int>((((bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0FU) * 0x0101010101010101U) >> 56);
}

ULL_DEVICE int32_t clamp(int32_t value, int32_t limit) { return value < 0 ? 0 : value < limit ? value : limit; }

// What the host has written, which no kernel does: a request is complete before its round is launched, unless the round
// awaits it. In a burst this is read while the round before ends.
ULL_DEVICE void read_requests(const BeginParams& params, Shared& shared) {
  const int me = arch::thread();
  if (me < kRequestThreads) {
    const int slot = me / kHeadWords, word = me % kHeadWords;
    shared.requests[slot][word] =
        arch::load_acquire_system(reinterpret_cast<const uint64_t*>(&params.requests[slot]) + word);
  } else if (me == kRequestThreads) {
    shared.cancelled_through = arch::load_acquire_system(&params.control->cancelled_through);
  }
}

// Waits for a request that was unknown when the graph was launched, and reads it: what has been read before may be of
// both sides of its coming. Whether it has waited: a round's time counts from there.
ULL_DEVICE bool await_request(const BeginParams& params, uint64_t sequence, Shared& shared) {
  const int slot = static_cast<int>(sequence % kRoundSlots);
  if (shared.request(slot).awaited == 0) return false;
  arch::block_barrier();
  if (arch::thread() == 0) {
    while (arch::load_acquire_system(&params.requests[slot].sequence) == (sequence | kAwaited) &&
           arch::load_acquire_system(&params.control->cancelled_through) < sequence) {
      arch::pause();
    }
  }
  arch::block_barrier();
  read_requests(params, shared);
  arch::block_barrier();
  return true;
}

// What the round before has left, by way of L2: in a burst this block may have begun, and its multiprocessor may have
// cached the State, before that round's last block wrote it.
ULL_DEVICE void read_state(const BeginParams& params, Shared& shared) {
  const int piece = arch::thread() - kStateThread;
  if (piece < 0 || piece >= kStatePieces) return;
  arch::store_shared(&shared.state[2 * piece],
                     arch::load_global(reinterpret_cast<const uint64_t*>(params.state) + 2 * piece));
}

// Sampling, stops, biases and page table of a setting that the device has not seen. `head` lies in shared memory,
// `request` on the host.
ULL_DEVICE void copy_setting(const BeginParams& params, const RoundRequest& request, const RoundRequest& head) {
  State* state = params.state;
  const int32_t biases = clamp(head.sampling.bias_count, kBiases);
  const auto* from = reinterpret_cast<const uint64_t*>(request.stops);
  auto* to = reinterpret_cast<uint64_t*>(state->stops);
  for (int i = arch::thread(); i < kStopTokens / 2 + biases; i += kThreads) to[i] = arch::load_acquire_system(from + i);
  const int32_t pages = clamp(head.page_count, params.page_capacity);
  const auto* table = reinterpret_cast<const uint64_t*>(params.host_pages);  // follows HostControl: aligned to 64
  for (int i = arch::thread(); 2 * i < pages; i += kThreads) {
    const uint64_t pair = arch::load_acquire_system(table + i);
    params.pages[2 * i] = static_cast<int32_t>(pair);
    if (2 * i + 1 < pages) params.pages[2 * i + 1] = static_cast<int32_t>(pair >> 32);
  }
  if (arch::thread() == 0) {
    state->setting = head.setting;
    state->stop_count = clamp(head.stop_count, kStopTokens);
    state->sampling = head.sampling;
    state->sampling.bias_count = biases;
  }
}

ULL_DEVICE void count_token(const BeginParams& params, int32_t token, uint32_t amount) {
  if (token >= 0 && token < kVocabulary) arch::atomic_add(&params.text_counts[token], amount);
}

// A text that the device has not seen: the tokens up to the root, by way of a copy whose later tokens accept() writes.
ULL_DEVICE void read_text(const BeginParams& params, const RoundRequest& head, int32_t count) {
  const int me = arch::thread();
  for (int i = 4 * me; i < round_up(kVocabulary, kRowUnit); i += 4 * kThreads) {
    arch::store_global(params.text_counts + i, {});
  }
  arch::fence_device();
  arch::block_barrier();
  const auto* pairs = reinterpret_cast<const uint64_t*>(params.host_text);  // aligned to 64
  for (int i = 2 * me; i < count; i += 2 * kThreads) {
    const uint64_t pair = arch::load_acquire_system(pairs + i / 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int32_t token = static_cast<int32_t>(pair >> (32 * j));
      if (i + j >= count) break;
      params.text[i + j] = token;
      if (i + j >= head.prompt_tokens) {
        count_token(params, token, kGenerated);
      } else if (token >= 0 && token < kVocabulary) {
        arch::atomic_or(&params.text_counts[token], kPrompted);
      }
    }
  }
}

// Makes the counts those of the text up to the root, at `base`: behind what is forced. A round that nobody took may
// have counted what stands behind it.
ULL_DEVICE void count_text(const BeginParams& params, const RoundRequest& head, const State& state, int32_t base) {
  const int32_t count = clamp(base, params.text_capacity - 1) + 1;
  if (head.text != state.text) {
    read_text(params, head, count);
  } else {
    for (int i = count + arch::thread(); i < state.counted; i += kThreads) {
      count_token(params, params.text[i], ~kGenerated + 1);
    }
    for (int i = state.counted + arch::thread(); i < count; i += kThreads) {
      count_token(params, params.text[i], kGenerated);
    }
  }
  if (arch::thread() == 0) {
    params.state->text = head.text;
    params.state->counted = count;
    params.state->prompt_tokens = head.prompt_tokens;
  }
}

// The tokens that a draw may be: a few thousand words, wherever the request has a constraint that refused a token.
ULL_DEVICE void copy_mask(const BeginParams& params) {
  const auto* from = reinterpret_cast<const uint64_t*>(params.host_mask);  // aligned to 64
  auto* to = reinterpret_cast<uint64_t*>(params.mask);
#pragma unroll 1
  for (int i = arch::thread(); i < round_up(kVocabulary, kMaskTokens) / 64; i += kThreads) {
    to[i] = arch::load_acquire_system(from + i);
  }
}

// Depths and paths. Nodes on a path have ascending numbers, so a set of ancestors is a path already: the depth of
// ancestor j is how many ancestors come before it. The sets grow by doubling: after round r they reach 2^r nodes up.
// Draws from logits that are there have no ancestors: all stand at the round's position.
ULL_DEVICE void build_paths(const RoundRequest& head, int count, bool chain, Shared& shared, Round* round) {
  const int me = arch::thread();
  const bool apart = head.mode == RoundMode::kRedraw;
  if (me < kTreeTokens) {
    shared.ancestors[0][me] = uint64_t{1} << me;
    const uint8_t above = chain ? static_cast<uint8_t>(me - 1) : apart ? static_cast<uint8_t>(me) : head.parents[me];
    shared.jumps[0][me] = me == 0 || me >= count ? 0 : above;
  }
  int from = 0;
  for (int reach = 1; reach < count; reach *= 2, from = 1 - from) {
    arch::block_barrier();
    if (me < kTreeTokens) {
      const int above = shared.jumps[from][me];
      shared.ancestors[1 - from][me] = shared.ancestors[from][me] | shared.ancestors[from][above];
      shared.jumps[1 - from][me] = shared.jumps[from][above];
    }
  }
  arch::block_barrier();
  auto* path = reinterpret_cast<uint8_t*>(shared.path);
  for (int i = me; i < count * kTreeTokens; i += kThreads) {
    const int node = i / kTreeTokens, above = i % kTreeTokens;
    const uint64_t set = shared.ancestors[from][node], bit = uint64_t{1} << above;
    if ((set & bit) != 0) path[node * kTreeTokens + bits_set(set & (bit - 1))] = static_cast<uint8_t>(above);
  }
  if (me < count) round->depths[me] = bits_set(shared.ancestors[from][me]) - 1;
  arch::block_barrier();
  auto* out = reinterpret_cast<uint64_t*>(round->path);
  for (int i = me; i < count * kTreeTokens / 8; i += kThreads) out[i] = shared.path[i];
}

// What a round is about, which a request that was written before the round before had ended leaves to the device.
struct Task {
  bool skipped;
  int32_t count;  // nodes
  int32_t base;
  bool chain;
};

// The request is not the one that is due, or not wanted any more.
ULL_DEVICE bool is_cancelled(const Shared& shared, const RoundRequest& head) {
  const State& state = shared.old_state();
  return head.sequence != state.sequence || state.sequence <= shared.cancelled_through;
}

ULL_DEVICE Task task_of(const BeginParams& params, const Shared& shared, const RoundRequest& head) {
  const State& state = shared.old_state();
  const bool medusa = head.mode == RoundMode::kMedusa, follows = medusa && head.position < 0;
  const bool chain = medusa || head.mode == RoundMode::kPrefill || head.mode == RoundMode::kDflashContext ||
                     head.mode == RoundMode::kDflashBlock;
  Task task{is_cancelled(shared, head), head.count, head.position, chain};
  if (head.mode == RoundMode::kContinue || follows) {
    task.skipped = task.skipped || state.stopped != 0;
    task.base = state.position;
    if (!follows) task.count = 1;
  }
  if constexpr (kMayLack) {
    if (head.position < 0) {
      // A block begins at the token that the target has drawn last; other passes read what it has accepted.
      const bool block = head.mode == RoundMode::kDflashBlock;
      task.count = block ? head.count : params.target->accepted_count;
      task.base = block ? params.target_state->position : params.target->base;
      task.skipped = task.skipped || params.target_state->stopped != 0 || task.count > head.count;
      task.chain = true;
    }
  }
  task.skipped = task.skipped || task.count < 1 || task.count > kTreeTokens;
  return task;
}

// The same of a chunk's round: of its first tokens, of which nobody asks more than how many there are, or of its last
// one, which is drawn behind.
ULL_DEVICE Task chunk_task(const Shared& shared, const RoundRequest& head) {
  const bool draws = head.mode == RoundMode::kTake;
  const bool skipped = is_cancelled(shared, head) || (head.mode != RoundMode::kPrefill && !draws) || head.count < 1 ||
                       head.count > kChunkTokens;
  if (draws) return {skipped, 1, head.position + head.count - 1, true};
  return {skipped, clamp(head.count, kTreeTokens), head.position, true};
}

// The token of an entry that is made of a node that the target has accepted: the one behind that.
ULL_DEVICE int32_t token_behind(const BeginParams& params, int entry, int count) {
  const Round* target = params.target;
  return entry + 1 < count ? target->tokens[target->accepted[entry + 1]] : params.target_state->token;
}

// A chunk's tokens and extent, and the only node of a round that draws behind them. `count` 0: it is skipped.
ULL_DEVICE void begin_chunk(const BeginParams& params, const RoundRequest& head, int slot, int count) {
  static_assert(kThreads == kChunkTokens);
  const int me = arch::thread();
  Chunk* chunk = params.chunk;
  if (me == 0) {
    chunk->sequence = head.sequence;
    chunk->base = head.position;
    chunk->count = count;
  }
  if (2 * me < count) {  // the slot's tokens are aligned to 64 bytes; behind an odd last one stands an older one
    const auto* pairs = reinterpret_cast<const uint64_t*>(params.host_chunks + slot * kChunkTokens);
    const uint64_t pair = arch::load_acquire_system(pairs + me);
    const auto first = static_cast<int32_t>(pair), second = static_cast<int32_t>(pair >> 32);
    chunk->tokens[2 * me] = first;
    chunk->tokens[2 * me + 1] = second;
    if (head.mode == RoundMode::kTake && (count - 1) / 2 == me) {
      params.round->tokens[0] = count % 2 == 0 ? second : first;
      params.round->depths[0] = params.round->path[0][0] = 0;
    }
  }
}

// The first node that is drawn: what comes before it is forced, but for a chunk's tokens, which are no nodes. 0 where
// nothing is. Of heads: the first without taps.
template <bool kChunk>
ULL_DEVICE int first_draw(const RoundRequest& head, int count) {
  if constexpr (kChunk) return 0;
  if (head.mode == RoundMode::kEagle) return head.position < 0 ? count : clamp(head.forced, count);
  if (head.mode == RoundMode::kDflashContext) return count;
  return head.mode == RoundMode::kTake ? clamp(head.forced, head.count - 1) : 0;
}

// The kernel. kChunk: of a chunk, which is a round of a few of its tokens to whoever ends it.
template <bool kChunk>
ULL_DEVICE void begin(const BeginParams& params) {
  arch::release_dependents();
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  for (int i = arch::thread(); i < kTreeTokens * kTreeTokens / 8; i += kThreads) shared.path[i] = 0;
  read_requests(params, shared);
  arch::wait_for_predecessor();
  uint64_t begin_ns = arch::timer_ns();
  read_state(params, shared);
  for (int i = arch::thread(); i < params.counter_count; i += kThreads) params.counters[i] = 0;
  arch::block_barrier();

  const State& state = shared.old_state();
  if (await_request(params, state.sequence, shared)) begin_ns = arch::timer_ns();
  const int slot = static_cast<int>(state.sequence % kRoundSlots);
  const RoundRequest& head = shared.request(slot);
  const bool continues = head.mode == RoundMode::kContinue;
  const Task task = kChunk ? chunk_task(shared, head) : task_of(params, shared, head);
  const int count = task.skipped ? 0 : task.count, me = arch::thread();
  Round* round = params.round;
  if (me == 0) {
    round->sequence = state.sequence;
    round->mode = head.mode;
    round->count = count;
    round->base = task.base;
    round->max_tokens = head.max_tokens;
    const bool is_head = head.mode == RoundMode::kMedusa || head.mode >= RoundMode::kEagle;
    round->draws = is_head || head.mode == RoundMode::kPrefill ? 0 : 1;
    round->first_draw = task.skipped ? 0 : first_draw<kChunk>(head, count);
    if constexpr (kMayLack) round->first = head.first;
    round->begin_ns = begin_ns;
    params.state->sequence = state.sequence + 1;
  }
  if constexpr (kChunk) begin_chunk(params, head, slot, task.skipped ? 0 : head.count);
  if (task.skipped) return;
  if constexpr (!kChunk) {
    if (me < count) round->tokens[me] = continues ? state.token : head.tokens[me];
    if constexpr (kMayLack) {
      const bool block = head.mode == RoundMode::kDflashBlock;
      if (head.position < 0 && me < (block ? 1 : count)) {
        round->tokens[me] = block ? params.target_state->token : token_behind(params, me, count);
      }
    }
    build_paths(head, count, task.chain, shared, round);
    if (head.mode == RoundMode::kRedraw) {
      if (me < count) round->rows[me] = head.parents[me] % kTreeTokens;
      if (head.tokens[0] < 0) copy_mask(params);
    }
  }
  if (head.setting != state.setting) copy_setting(params, params.requests[slot], head);
  if (head.sampling.penalises != 0 && head.mode != RoundMode::kPrefill) {
    count_text(params, head, state, task.base + first_draw<kChunk>(head, count));
  }
}

}  // namespace

ULL_KERNEL(ull_begin, BeginParams, kThreads, 1) { begin<false>(params); }
ULL_KERNEL(ull_begin_chunk, BeginParams, kThreads, 1) { begin<true>(params); }

}  // namespace ull::gpu
