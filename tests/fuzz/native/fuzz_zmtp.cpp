// ZeroMQ's wire protocol: the same messages come out however the bytes arrive.
#include "protocol/zmtp.h"
#include "streams.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ull::Zmtp zmtp(600);
  ull::fuzz::compare_deliveries(zmtp, {data, size}, 2048 + 16);
  return 0;
}
