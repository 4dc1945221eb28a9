// What the kernel tests on the chip launch before each kernel (device_kernels.py), so that a missing
// wait_for_predecessor() shows there: it lets its dependents begin at once, and only much later writes what they read.
#include "arch.cuh"

namespace {

using namespace ull::arch;

constexpr int kRegions = 16;

struct Region {
  const unsigned char* from;  // on the device
  unsigned char* to;
  int64_t bytes;
};

struct PredecessorParams {
  Region regions[kRegions];
  int64_t count;
  uint64_t spin_ns;
};

struct ReaderParams {
  const uint32_t* source;  // [count, 4], of which the first is read
  uint32_t* output;        // [count]
  int32_t count;
  int32_t early;  // 1: reads before the wait
};

}  // namespace

ULL_KERNEL(ull_predecessor, PredecessorParams, 256, 1) {
  release_dependents();
  wait_for_predecessor();
  const uint64_t began = timer_ns();
  while (timer_ns() - began < params.spin_ns) {
  }
  const int64_t stride = static_cast<int64_t>(grid_x()) * threads();
  for (int64_t region = 0; region < params.count; ++region) {
    const Region& copied = params.regions[region];
    for (int64_t i = static_cast<int64_t>(block_x()) * threads() + thread(); i < copied.bytes; i += stride) {
      copied.to[i] = copied.from[i];
    }
  }
}

// A dependent that is right, or reads too early. It makes use of what it has read before it waits: else the assembler
// would put the wait first.
ULL_KERNEL(ull_reader, ReaderParams, 256, 1) {
  const int i = block_x() * threads() + thread();
  if (i < params.count && params.early != 0) params.output[i] = load_stream(params.source + 4 * i).word[0];
  wait_for_predecessor();
  if (i < params.count && params.early == 0) params.output[i] = load_stream(params.source + 4 * i).word[0];
}
