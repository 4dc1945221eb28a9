// What a core does beside the thread that runs on it: the gaps in which a thread that only reads the clock does not
// run. Interrupts, other threads, the hypervisor and the firmware make them (the method of rtla's and sysjitter's).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ull {

struct NoiseReport {
  uint64_t reads = 0;             // of the clock
  int64_t observed_ns = 0;        // from the first read to the last
  int64_t shortest_ns = 0;        // between two reads: what reading costs
  int64_t longest_ns = 0;         // between two reads
  uint64_t gaps = 0;              // of bounds[0] or more
  int64_t gaps_ns = 0;            // their sum
  std::vector<uint64_t> by_size;  // by_size[i]: gaps of bounds[i] or more, and of less than bounds[i + 1]
};

// Reads the clock for `duration_ns` in a thread of its own on `core` (negative: wherever the kernel places it).
// bounds: ascending, in nanoseconds; at least one. Throws std::invalid_argument where the thread cannot run on `core`,
// std::system_error where there is no thread.
[[nodiscard]] NoiseReport measure_noise(int core, int64_t duration_ns, std::span<const int64_t> bounds);

}  // namespace ull
