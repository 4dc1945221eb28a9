// The end of a round's maths, by one block: takes what is forced, and behind it the longest path of the tree whose
// nodes are what was drawn at their parents, cuts that at a stop token and at max_tokens, tells the host, and leaves
// behind what a continuing round feeds and which nodes' KV commit() keeps. Of the Medusa heads it tells the host every
// one's candidates, and leaves no trace; of an EAGLE or DFlash head those of the last entries, or of a block's first
// predictions, and leaves the entries to be kept. Of a round that draws again it tells every draw, and leaves what was
// drawn.
#pragma once

#include "arch.cuh"
#include "params.h"

namespace ull::gpu::accept {

constexpr int kLeastThreads = 128;
constexpr int kPieces = sizeof(EmittedToken) / 16;  // 16-byte pieces of a result token; the first is all but `top`
constexpr int kStopThread = kTreeTokens;            // the first of the threads that read the stops
static_assert(sizeof(EmittedToken) % 16 == 0 && ULL_OFFSETOF(EmittedToken, top) == 16);
static_assert(ULL_OFFSETOF(RoundResult, tokens) % 16 == 0 && ULL_OFFSETOF(Round, drawn) % 8 == 0);
static_assert(kStopThread + kStopTokens <= kLeastThreads);

// In shared memory.
struct Shared {
  int32_t draws[kTreeTokens];
  int32_t next[kTreeTokens];  // the child that holds the node's draw, or -1
  int32_t stops[kStopTokens];
  bool stop[kTreeTokens];  // the draw is a stop token
  uint8_t accepted[kTreeTokens];
  int32_t count;
  int32_t stopped;
};
static_assert(sizeof(Shared) == 776);  // ull/gpu/geometry/sampling.py

// Walks from the root along the draws.
ULL_DEVICE void walk(int root, int32_t max_tokens, Shared& shared) {
  int count = 0;
  bool stopped = false;
  for (int node = root; node >= 0 && count < max_tokens && !stopped; node = shared.next[node]) {
    if (shared.draws[node] < 0) break;  // not finite: what came before stands
    shared.accepted[count++] = static_cast<uint8_t>(node);
    stopped = shared.stop[node];
  }
  shared.count = count;
  shared.stopped = stopped ? 1 : 0;
}

// Finds each node's successor, from the root on: what is forced was not drawn. Siblings hold different tokens, so no
// two nodes claim the same parent.
ULL_DEVICE void match(const Round* round, const State* state, int root, int count, Shared& shared) {
  const int me = arch::thread();
  int32_t token = -1;
  int parent = 0;
  if (me >= root && me < count) {
    token = round->tokens[me];
    shared.draws[me] = round->drawn[me].token;
    shared.next[me] = -1;
    if (me > root) parent = round->path[me][round->depths[me] - 1];
  }
  const int stops = state->stop_count;
  if (me >= kStopThread && me < kStopThread + stops) shared.stops[me - kStopThread] = state->stops[me - kStopThread];
  arch::block_barrier();
  if (me >= root && me < count) {
    if (me > root && shared.draws[parent] == token) shared.next[parent] = me;
    bool stop = false;
    for (int i = 0; i < stops; ++i) stop = stop || shared.draws[me] == shared.stops[i];
    shared.stop[me] = stop;
  }
  arch::block_barrier();
}

// Of a round that draws again: what was drawn, and nothing if one of the draws found nothing.
ULL_DEVICE void gather(const Round* round, int count, Shared& shared) {
  const int me = arch::thread();
  if (me < count) {
    shared.draws[me] = round->drawn[me].token;
    shared.accepted[me] = static_cast<uint8_t>(me);
  }
  arch::block_barrier();
  if (me != 0) return;
  shared.count = count;
  shared.stopped = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (shared.draws[i] < 0) shared.count = 0;
  }
}

// What a draw under a mask leaves behind stands where the round before had another token. No round continues it.
ULL_DEVICE void leave_redrawn(const AcceptParams& params, const Shared& shared) {
  const Round* round = params.round;
  State* state = params.state;
  if (arch::thread() != 0) return;
  state->stopped = 1;
  if (shared.count == 0 || round->tokens[0] >= 0) return;
  const int32_t token = shared.draws[0], position = round->base + 1;
  if (state->sampling.penalises != 0) params.text[position] = token;
  state->token = token;
  state->position = position;
  state->node = round->rows[0];
}

// Pieces of the emitted tokens, one store each; a token's unused alternatives are left out.
template <int kThreads>
ULL_DEVICE void report_tokens(const Round* round, const Shared& shared, RoundResult* result) {
  for (int i = arch::thread(); i < shared.count * kPieces; i += kThreads) {
    const int emitted = i / kPieces, piece = i % kPieces;
    const EmittedToken& drawn = round->drawn[shared.accepted[emitted]];
    if (2 * piece > drawn.top_count + 1) continue;
    const auto* from = reinterpret_cast<const uint64_t*>(&drawn) + 2 * piece;
    const uint64_t low = from[0], high = from[1];
    arch::store_global(reinterpret_cast<arch::Vector4*>(&result->tokens[emitted]) + piece,
                       {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                         static_cast<uint32_t>(high >> 32)}});
  }
}

// For all threads of the block. What it draws on is visible to them. kAny: of any round, one that draws again too.
template <int kThreads, bool kAny = false>
ULL_DEVICE void end_round(const AcceptParams& params, Shared& shared) {
  static_assert(kThreads >= kLeastThreads);
  Round* round = params.round;
  State* state = params.state;
  const int count = round->count, root = round->first_draw;
  const bool draws = round->draws != 0, medusa = round->mode == RoundMode::kMedusa;
  const bool head = kAny && round->mode >= RoundMode::kEagle;  // that has a cache of its own
  const bool block = kAny && round->mode == RoundMode::kDflashBlock;
  const int most = round->max_tokens < count ? round->max_tokens : count;
  const int ranked = medusa ? count : head ? most : 0;  // nodes whose candidates the host is told: the last
  const bool redraws = kAny && count > 0 && round->mode == RoundMode::kRedraw;
  const uint64_t sequence = round->sequence;
  RoundResult* result = &params.results[sequence % kRoundSlots];

  if (redraws) {
    gather(round, count, shared);
  } else {
    if (count > 0 && draws) match(round, state, root, count, shared);
    if (arch::thread() == 0) {
      shared.count = 0;
      shared.stopped = 0;
      if (count > 0 && draws) walk(root, round->max_tokens, shared);
      if (ranked > 0) shared.count = ranked;
    }
  }
  if (arch::thread() < ranked) {
    shared.accepted[arch::thread()] = static_cast<uint8_t>((block ? 0 : count - ranked) + arch::thread());
  }
  arch::block_barrier();

  // The host first.
  const int emitted = shared.count;
  const bool not_finite = redraws ? emitted == 0 : count > 0 && draws && shared.draws[root] < 0;
  if (arch::thread() == 0) {
    result->status = count == 0 ? RoundStatus::kSkipped : not_finite ? RoundStatus::kNotFinite : RoundStatus::kOk;
    result->count = emitted;
    result->begin_ns = round->begin_ns;
    result->stopped = shared.stopped;
    result->end_ns = arch::timer_ns();  // where commit() follows, it says once more
  }
  report_tokens<kThreads>(round, shared, result);
  arch::block_barrier();
  if (arch::thread() == 0) arch::store_release_system(&result->sequence, sequence);

  if (medusa) return;
  if (redraws) return leave_redrawn(params, shared);
  if (!head && arch::thread() < emitted && state->sampling.penalises != 0) {
    params.text[round->base + root + 1 + arch::thread()] = shared.draws[shared.accepted[arch::thread()]];
  }
  const int given = draws || head ? root : count;  // nodes that are kept whatever was drawn
  const int kept = not_finite ? 0 : head ? given : given + emitted;
  if (arch::thread() < kept) {
    round->accepted[arch::thread()] =
        arch::thread() < given ? static_cast<uint8_t>(arch::thread()) : shared.accepted[arch::thread() - given];
  }
  if (arch::thread() == kThreads - 1) {
    round->accepted_count = kept;
    // Only a round that emitted can be continued.
    state->stopped = head || emitted == 0 || shared.stopped != 0 ? 1 : 0;
    if (!head && emitted > 0) {
      state->token = shared.draws[shared.accepted[emitted - 1]];
      state->position = round->base + root + emitted;
      state->node = shared.accepted[emitted - 1];
    }
  }
}

}  // namespace ull::gpu::accept
