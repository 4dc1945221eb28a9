// Copies keys and values of the accepted nodes from the tree scratch into the pages, their taps into the ring, and
// reports the end of the round.
// Grid: x = kv heads, y = layers.
#include <cstdint>

#include "arch.cuh"
#include "attention/kv_format.cuh"
#include "model.cuh"

namespace ull::gpu {

inline constexpr int kCommitThreads = 128;

// The end of a Round as accept() has left it, in shared memory: by way of L2, since this block may have begun, and its
// multiprocessor may have cached the Round, before that.
struct Accepted {
  int32_t unused[2];
  int32_t count;
  uint8_t node[kTreeTokens];
  int32_t padding;
};
inline constexpr int kAcceptedOffset = ULL_OFFSETOF(Round, accepted_count) - 8;
static_assert(kAcceptedOffset % 16 == 0 && sizeof(Accepted) % 16 == 0);
static_assert(kAcceptedOffset + sizeof(Accepted) == sizeof(Round));

ULL_DEVICE const Accepted& load_accepted(const Round* round) {
  unsigned char* shared = arch::shared_memory();
  const int at = 16 * arch::thread();
  if (at < static_cast<int>(sizeof(Accepted))) {
    arch::store_shared(shared + at,
                       arch::load_global(reinterpret_cast<const unsigned char*>(round) + kAcceptedOffset + at));
  }
  arch::block_barrier();
  return *reinterpret_cast<const Accepted*>(shared);
}

// Keys of one layer and kv head: rows of head_dim. base: position of the first; scratch: [64][head_dim]; pool: page 0.
ULL_DEVICE void commit_keys(const CommitParams& params, const Accepted& accepted, int base,
                            const unsigned char* scratch, unsigned char* pool) {
  constexpr int kRowBytes = kHeadDim * kKvBytes;
  constexpr int kVectors = kRowBytes / 16;
  for (int i = arch::thread(); i < accepted.count * kVectors; i += kCommitThreads) {
    const int position = base + i / kVectors;
    const int node = accepted.node[i / kVectors];
    unsigned char* row = pool + static_cast<int64_t>(params.pages[position / kPageTokens]) * params.page_bytes +
                         position % kPageTokens * kRowBytes;
    arch::store_global(row + i % kVectors * 16, arch::load_global(scratch + node * kRowBytes + i % kVectors * 16));
  }
}

// Values: columns of [head_dim][64]. A thread takes 16 bytes of a node's row; neighbouring threads take neighbouring
// positions, whose elements lie side by side.
ULL_DEVICE void commit_values(const CommitParams& params, const Accepted& accepted, int base,
                              const unsigned char* scratch, unsigned char* pool) {
  constexpr int kRowBytes = kHeadDim * kKvBytes;
  constexpr int kElements = 16 / kKvBytes;
  const int vectors = kRowBytes / 16 * accepted.count;
  for (int i = arch::thread(); i < vectors; i += kCommitThreads) {
    const int index = i % accepted.count;
    const int dim = i / accepted.count * kElements;
    const int position = base + index;
    const arch::Vector4 loaded = arch::load_global(scratch + accepted.node[index] * kRowBytes + dim * kKvBytes);
    unsigned char* column = pool + static_cast<int64_t>(params.pages[position / kPageTokens]) * params.page_bytes +
                            position % kPageTokens * kKvBytes;
#pragma unroll
    for (int d = 0; d < kElements; ++d) {
      unsigned char* to = column + (dim + d) * (kPageTokens * kKvBytes);
      const uint32_t word = loaded.word[d * kKvBytes / 4] >> (d * kKvBits % 32);
      if constexpr (kKvBits == 16) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
      } else {
        *to = static_cast<unsigned char>(word);
      }
    }
  }
}

// Rows of taps, shared among all blocks.
ULL_DEVICE void commit_taps(const CommitParams& params, const Accepted& accepted, int base) {
  constexpr int kVectors = (kTaps > 0 ? kTaps : 1) * round_up(kHidden, kRowUnit) / 4;  // of a position
  const int blocks = arch::grid_x() * arch::grid_y(), block = arch::block_y() * arch::grid_x() + arch::block_x();
  for (int i = block * kCommitThreads + arch::thread(); i < accepted.count * kVectors; i += blocks * kCommitThreads) {
    const int index = i / kVectors, vector = i % kVectors;
    const int64_t from = int64_t{accepted.node[index]} * kVectors + vector;
    const int64_t to = int64_t{(base + index) % kTapSlots} * kVectors + vector;
    arch::store_global(params.tap_ring + 4 * to, arch::load_global(params.tapped + 4 * from));
  }
}

ULL_KERNEL(ull_commit, CommitParams, kCommitThreads, 4) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const Round& round = *params.round;
  const Accepted& accepted = load_accepted(params.round);
  if (round.count > 0 && accepted.count > 0) {
    const int64_t scratch = (int64_t{arch::block_y()} * kKvHeads + arch::block_x()) * kKvHeadBytes;
    unsigned char* pool = static_cast<unsigned char*>(params.page_pool) + arch::block_y() * kKvLayerBytes +
                          int64_t{arch::block_x()} * kKvHeadBytes;
    commit_keys(params, accepted, round.base, static_cast<const unsigned char*>(params.tree_keys) + scratch, pool);
    commit_values(params, accepted, round.base, static_cast<const unsigned char*>(params.tree_values) + scratch,
                  pool + kKvLayerBytes / 2);
    if constexpr (kTaps > 0) {
      if (params.tapped != nullptr) commit_taps(params, accepted, round.base);
    }
  }
  arch::block_barrier();
  if (arch::thread() != 0) return;
  arch::fence_device();
  const uint32_t blocks = static_cast<uint32_t>(arch::grid_x() * arch::grid_y());
  if (arch::atomic_add(params.counters, 1U) != blocks - 1) return;
  *params.counters = 0;
  params.results[round.sequence % kRoundSlots].end_ns = arch::timer_ns();
}

}  // namespace ull::gpu
