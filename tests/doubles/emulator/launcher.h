// The C interface of a library of emulated kernels (tests/rigs/kernels/emulation.py and tests/doubles/fakecuda load
// it).
#pragma once

#include <cstdint>

extern "C" {

struct UllPrefetch {
  const void* address;
  uint64_t bytes;
  int32_t block;   // y * grid_x + x
  int32_t waited;  // 1: the thread had called wait_for_predecessor()
};

struct UllKernel {
  const char* name;
  int32_t params_bytes;
  int32_t most_threads;
};

struct UllRegion {
  void* address;
  uint64_t bytes;
};

struct UllLaunch {
  const char* kernel;
  int32_t grid_x, grid_y;
  int32_t threads;
  int32_t shared_bytes;
  const void* params;
  uint64_t seed;                // of the order of blocks and threads
  const UllRegion* written;     // [written_count] by the predecessor: 0xFF until a block has waited for it
  const UllRegion* constants;   // [constant_count] what no kernel writes: may be read before that
  const UllRegion* earlier;     // [earlier_count] what earlier kernels wrote that have ended: may be too, past L1
  const UllRegion* host_reads;  // [host_read_count] mapped memory that the host reads when it is told to
  int32_t written_count, constant_count, earlier_count, host_read_count;
};

// The library's kernels; returns how many.
__attribute__((visibility("default"))) int ull_emulator_kernels(const UllKernel** kernels);
// What the last launch asked L2 for, in its order; returns how many times.
__attribute__((visibility("default"))) int ull_emulator_prefetches(const UllPrefetch** prefetches);
// Runs one launch to its end. 0, or 1 with a message in `error` [error_bytes].
__attribute__((visibility("default"))) int ull_emulator_launch(const UllLaunch* launch, char* error,
                                                               uint64_t error_bytes);
// Gives back what launches keep for the next one: two mappings for each thread of a block.
__attribute__((visibility("default"))) void ull_emulator_give_back();
}
