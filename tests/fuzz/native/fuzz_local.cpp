// The local transport's protocol, likewise.
#include "protocol/local_protocol.h"
#include "streams.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ull::LocalProtocol local(600);
  ull::fuzz::compare_deliveries(local, {data, size}, 2048 + 16);
  return 0;
}
