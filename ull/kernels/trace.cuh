// One traced round, or chunk of a prompt: with the macro ULL_TRACE each block of each kernel leaves a record of when it
// did what, behind the Round in device memory; a kernel of a chunk's, behind the Chunk. Without it, as in every bundle,
// nothing of this is compiled. arch.cuh includes this.
//
// The first thread stamps for its block, with both timers: %globaltimer is the same everywhere but may tick coarsely,
// %clock64 is fine but each multiprocessor's own. The record is written at the block's end, behind the wait for the
// predecessor. bench/h200/trace.py says how big the area is and reads it.
#pragma once

#if ULL_TRACE
#include "params.h"
#endif

namespace ull::trace {

enum Mark : int {
  kStart = 0,
  kFilled = 1,     // the ring's copies have been asked for
  kWaited = 2,     // the wait for the predecessor has returned
  kFirstUsed = 3,  // the first stage of the ring has been used (of a chunk: is there); of attention: the token's own
                   // heads are prepared; of attention by tiles: queries are, and keys are awaited
  kLastUsed = 4,   // the last one; of attention: the probabilities of the block's last split are there, of attention by
                   // tiles, the last one's outputs
  kEnd = 5,
  kMarks = 6,
};

#if ULL_TRACE

inline constexpr bool kStamps = true;

struct Record {
  uint32_t kernel;  // hash of its name
  uint32_t block;
  uint32_t multiprocessor;
  uint32_t unused;
  uint64_t ns[kMarks];  // 0: does not apply
  uint64_t ticks[kMarks];
};
static_assert(sizeof(Record) == 112);

struct Area {
  uint32_t count;     // of records; more may have been wanted than there is room for
  uint32_t capacity;  // the host's
  uint32_t unused[14];
  Record records[1];
};
template <typename Owner>  // Round or Chunk
inline constexpr int64_t kAreaAt = (static_cast<int64_t>(sizeof(Owner)) + 255) / 256 * 256;

constexpr uint32_t hash(const char* name) {  // FNV-1a
  uint32_t value = 2166136261U;
  for (; *name != '\0'; ++name) value = (value ^ static_cast<uint32_t>(*name)) * 16777619U;
  return value;
}

struct Stamps {
  uint64_t ns[kMarks];
  uint64_t ticks[kMarks];
};

#ifdef ULL_EMULATOR
#define ULL_TRACED ULL_UNSEEN inline
inline Stamps emulated_stamps[4096];  // of a grid's blocks, which may run side by side
ULL_TRACED Stamps& stamps() { return emulated_stamps[(arch::block_y() * arch::grid_x() + arch::block_x()) % 4096]; }
#else
#define ULL_TRACED ULL_DEVICE
ULL_TRACED Stamps& stamps() {
  __shared__ Stamps block_stamps;
  return block_stamps;
}
#endif

ULL_TRACED void mark(Mark which) {
  if (arch::thread() != 0) return;
  Stamps& block = stamps();
  block.ns[which] = arch::timer_ns();
  block.ticks[which] = arch::clock_ticks();
}

ULL_TRACED void wait_returned() { mark(kWaited); }

// A stage of the first warp's ring has been used.
ULL_TRACED void mark_stage(int stage) {
  if (stage == 0) mark(kFirstUsed);
  mark(kLastUsed);
}

ULL_TRACED void begin() {
  if (arch::thread() == 0) stamps() = {};
  mark(kStart);
}

template <typename Owner>
ULL_TRACED void leave_record(uint32_t kernel, const Owner* owner) {
  arch::warp_barrier();  // where lanes have ended apart
  arch::block_barrier();
  mark(kEnd);
  if (arch::thread() != 0) return;
  auto* area = reinterpret_cast<Area*>(reinterpret_cast<uint64_t>(owner) + kAreaAt<Owner>);
  const uint32_t index = arch::atomic_add(&area->count, 1U);
  if (index >= area->capacity) return;
  Record& record = area->records[index];
  record.kernel = kernel;
  record.block = static_cast<uint32_t>(arch::block_y() * arch::grid_x() + arch::block_x());
  record.multiprocessor = static_cast<uint32_t>(arch::multiprocessor());
  const Stamps& block = stamps();
  for (int i = 0; i < kMarks; ++i) {
    record.ns[i] = block.ns[i];
    record.ticks[i] = block.ticks[i];
  }
}

// By all threads of a block. Kernels that belong to no round and no chunk leave nothing.
template <typename Params>
ULL_TRACED void end(uint32_t kernel, const Params& params) {
  if constexpr (requires { params.round->count; }) {
    leave_record(kernel, params.round);
  } else if constexpr (requires { params.sample.round->count; }) {
    leave_record(kernel, params.sample.round);
  } else if constexpr (requires { params.chunk->count; }) {
    leave_record(kernel, params.chunk);
  }
}

#else

inline constexpr bool kStamps = false;
ULL_DEVICE void mark(Mark) {}
ULL_DEVICE void mark_stage(int) {}

#endif

}  // namespace ull::trace
