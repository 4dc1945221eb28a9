// The parameters of every kernel of tests/kernels/test_emulator.py.
#pragma once

#include <cstdint>

struct ProbeParams {
  const void* input;
  void* output;
  int32_t count;
  int32_t fault;  // 0: the kernel is right; otherwise it lacks or does something, see there
};
