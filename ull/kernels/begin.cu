// Starts a round: finds its request in mapped host memory and turns it into the Round that every other kernel reads.
//
// A dependent read of host memory costs a PCIe round trip (1 to 2 us), and which slot is due is known only to the
// device. So the small part of all slots is read at once, beside the state and the control block. The rest of a request
// (stops, biases, pages) is read only when its setting is a new one.
#include <cstddef>

#include "model.cuh"

namespace ull::gpu {
namespace {

constexpr int kThreads = 512;
// 8-byte words of RoundRequest: header, tree and Sampling; then stops and biases, in the order in which State has them.
constexpr int kHeadWords = (offsetof(RoundRequest, sampling) + sizeof(Sampling)) / 8;
constexpr int kSamplingWord = offsetof(RoundRequest, sampling) / 8;
constexpr int kStopWords = kStopTokens / 2;
constexpr int kStateSamplingWord = offsetof(State, sampling) / 8;
constexpr int kStateHeadWords = kStateSamplingWord;
constexpr int kRequestThreads = kRoundSlots * kHeadWords;
constexpr int kStateThread = kRequestThreads + 1;  // the one before reads the control block

static_assert(kStateThread + kStateHeadWords <= kThreads);
static_assert(offsetof(RoundRequest, sampling) % 8 == 0 && offsetof(State, sampling) % 8 == 0);
static_assert(offsetof(RoundRequest, stops) == offsetof(RoundRequest, sampling) + sizeof(Sampling));
static_assert(offsetof(State, stops) == offsetof(State, sampling) + sizeof(Sampling));
static_assert(offsetof(RoundRequest, biases) == offsetof(RoundRequest, stops) + sizeof(RoundRequest::stops));
static_assert(offsetof(State, biases) == offsetof(State, stops) + sizeof(State::stops));

struct alignas(16) Shared {
  uint64_t requests[kRoundSlots][kHeadWords];
  uint64_t state[kStateHeadWords];
  uint64_t cancelled_through;
  uint64_t ancestors[2][kTreeTokens];  // bit j of entry i: node j is on node i's way from the root, so far
  uint8_t jumps[2][kTreeTokens];       // the node above those
  alignas(16) uint8_t path[kTreeTokens][kTreeTokens];
};

// The part of a request that is always read, as its C++ struct lays it out.
struct RequestHead {
  const uint64_t* words;

  ULL_DEVICE uint64_t sequence() const { return words[0]; }
  ULL_DEVICE int32_t field(size_t offset) const {
    return static_cast<int32_t>(words[offset / 8] >> (offset % 8 == 0 ? 0 : 32));
  }
  ULL_DEVICE RoundMode mode() const { return static_cast<RoundMode>(field(offsetof(RoundRequest, mode))); }
  ULL_DEVICE int32_t token(int node) const { return field(offsetof(RoundRequest, tokens) + sizeof(int32_t) * node); }
  ULL_DEVICE uint8_t parent(int node) const {
    return static_cast<uint8_t>(words[(offsetof(RoundRequest, parents) + node) / 8] >> (node % 8 * 8));
  }
};

ULL_DEVICE int32_t state_field(const Shared& shared, size_t offset) {
  return static_cast<int32_t>(shared.state[offset / 8] >> (offset % 8 == 0 ? 0 : 32));
}

ULL_DEVICE int bits_set(uint64_t bits) {
  bits -= (bits >> 1) & 0x5555555555555555U;
  bits = (bits & 0x3333333333333333U) + ((bits >> 2) & 0x3333333333333333U);
  return static_cast<int>((((bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0FU) * 0x0101010101010101U) >> 56);
}

ULL_DEVICE int32_t clamp(int32_t value, int32_t limit) { return value < 0 ? 0 : value < limit ? value : limit; }

ULL_DEVICE void read_heads(const BeginParams& params, Shared& shared) {
  const int me = arch::thread();
  if (me < kRequestThreads) {
    const auto* words = reinterpret_cast<const uint64_t*>(&params.requests[me / kHeadWords]);
    shared.requests[me / kHeadWords][me % kHeadWords] = arch::load_acquire_system(words + me % kHeadWords);
  } else if (me == kRequestThreads) {
    shared.cancelled_through = arch::load_acquire_system(&params.control->cancelled_through);
  } else if (me < kStateThread + kStateHeadWords) {
    shared.state[me - kStateThread] = reinterpret_cast<const uint64_t*>(params.state)[me - kStateThread];
  }
  for (int i = me; i < params.counter_count; i += kThreads) params.counters[i] = 0;
}

// Sampling, stops, biases and page table of a setting that the device has not seen.
ULL_DEVICE void copy_setting(const BeginParams& params, const RoundRequest& request, const RequestHead& head) {
  const auto* from = reinterpret_cast<const uint64_t*>(&request);
  auto* to = reinterpret_cast<uint64_t*>(params.state);
  const int32_t biases = clamp(head.field(offsetof(RoundRequest, sampling.bias_count)), kBiases);
  const int words = kHeadWords - kSamplingWord + kStopWords + biases;
  for (int i = arch::thread(); i < words; i += kThreads) {
    to[kStateSamplingWord + i] = arch::load_acquire_system(from + kSamplingWord + i);
  }
  const int32_t pages = clamp(head.field(offsetof(RoundRequest, page_count)), params.page_capacity);
  const auto* table = reinterpret_cast<const uint64_t*>(params.host_pages);  // follows HostControl: aligned to 64
  for (int i = arch::thread(); 2 * i < pages; i += kThreads) {
    const uint64_t pair = arch::load_acquire_system(table + i);
    params.pages[2 * i] = static_cast<int32_t>(pair);
    if (2 * i + 1 < pages) params.pages[2 * i + 1] = static_cast<int32_t>(pair >> 32);
  }
  if (arch::thread() == 0) {
    params.state->setting = static_cast<uint32_t>(head.field(offsetof(RoundRequest, setting)));
    params.state->stop_count = clamp(head.field(offsetof(RoundRequest, stop_count)), kStopTokens);
  }
}

// Depths and paths. Nodes on a path have ascending numbers, so a set of ancestors is a path already: the depth of
// ancestor j is how many ancestors come before it. The sets grow by doubling: after round r they reach 2^r nodes up.
ULL_DEVICE void build_paths(const RequestHead& head, int count, Shared& shared, Round* round) {
  const int me = arch::thread();
  const bool chain = head.mode() == RoundMode::kPrefill;
  if (me < kTreeTokens) {
    shared.ancestors[0][me] = uint64_t{1} << me;
    shared.jumps[0][me] = me == 0 || me >= count ? 0 : chain ? static_cast<uint8_t>(me - 1) : head.parent(me);
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
  for (int i = me; i < count * kTreeTokens; i += kThreads) {
    const int node = i / kTreeTokens, above = i % kTreeTokens;
    const uint64_t set = shared.ancestors[from][node], bit = uint64_t{1} << above;
    if ((set & bit) != 0) shared.path[node][bits_set(set & (bit - 1))] = static_cast<uint8_t>(above);
  }
  if (me < count) round->depths[me] = bits_set(shared.ancestors[from][me]) - 1;
  arch::block_barrier();
  constexpr int kPieces = kTreeTokens / 8;
  for (int i = me; i < count * kPieces; i += kThreads) {
    reinterpret_cast<uint64_t*>(round->path)[i] = reinterpret_cast<const uint64_t*>(shared.path)[i];
  }
}

ULL_DEVICE bool is_skipped(const Shared& shared, const RequestHead& head, uint64_t sequence) {
  const bool continues = head.mode() == RoundMode::kContinue;
  const int32_t count = head.field(offsetof(RoundRequest, count));
  return head.sequence() != sequence || sequence <= shared.cancelled_through ||
         (continues && state_field(shared, offsetof(State, stopped)) != 0) ||
         (!continues && (count < 1 || count > kTreeTokens));
}

}  // namespace

ULL_KERNEL(ull_begin, BeginParams, kThreads, 1) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const uint64_t begin_ns = arch::timer_ns();
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  for (int i = arch::thread(); i < kTreeTokens * kTreeTokens / 8; i += kThreads) {
    reinterpret_cast<uint64_t*>(shared.path)[i] = 0;
  }
  read_heads(params, shared);
  arch::block_barrier();

  const uint64_t sequence = shared.state[0];
  const int slot = static_cast<int>(sequence % kRoundSlots);
  const RequestHead head{shared.requests[slot]};
  const bool skipped = is_skipped(shared, head, sequence);
  const bool continues = head.mode() == RoundMode::kContinue;
  const int count = skipped ? 0 : continues ? 1 : head.field(offsetof(RoundRequest, count));
  Round* round = params.round;
  if (arch::thread() == 0) {
    round->sequence = sequence;
    round->mode = head.mode();
    round->count = count;
    round->base =
        continues ? state_field(shared, offsetof(State, position)) : head.field(offsetof(RoundRequest, position));
    round->max_tokens = head.field(offsetof(RoundRequest, max_tokens));
    round->draws = head.mode() == RoundMode::kPrefill ? 0 : 1;
    round->logits_finite = 1;
    round->begin_ns = begin_ns;
    params.state->sequence = sequence + 1;
  }
  if (skipped) return;
  if (arch::thread() < count) {
    round->tokens[arch::thread()] =
        continues ? state_field(shared, offsetof(State, token)) : head.token(arch::thread());
  }
  build_paths(head, count, shared, round);
  const auto setting = static_cast<uint32_t>(head.field(offsetof(RoundRequest, setting)));
  if (setting != static_cast<uint32_t>(state_field(shared, offsetof(State, setting)))) {
    copy_setting(params, params.requests[slot], head);
  }
}

}  // namespace ull::gpu
