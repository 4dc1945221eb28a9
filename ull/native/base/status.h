// Status codes of the hot path. Contract: trivially copyable, no allocation, never thrown.
#pragma once

#include <cstdint>

namespace ull {

enum class Status : uint8_t {
  kOk = 0,
  kPending,         // a round or chunk is still running: poll again
  kAborted,         // abort() took effect; the sequence's KV beyond the last completed step is undefined
  kOutOfPages,      // the page pool cannot hold the sequence's next token
  kExecutorFailed,  // a sticky failure: the executor must not be used again
};

[[nodiscard]] constexpr const char* status_name(Status status) noexcept {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kPending:
      return "pending";
    case Status::kAborted:
      return "aborted";
    case Status::kOutOfPages:
      return "out_of_pages";
    case Status::kExecutorFailed:
      return "executor_failed";
  }
  return "unknown";
}

}  // namespace ull
