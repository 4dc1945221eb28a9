// The search for the id of a request that is too long to be taken.
#include "protocol/request_id.h"

#include <optional>
#include <span>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint64_t id = 0;
  (void)ull::find_request_id({data, size}, id);
  return 0;
}
