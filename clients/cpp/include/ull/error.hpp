// What can go wrong: every exception of this client is an ull::Error with the code of docs/wire.md, or one of ours.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace ull {

class Error : public std::runtime_error {
 public:
  Error(std::string code, const std::string& message) : std::runtime_error(message), code_(std::move(code)) {}
  // Such as "busy"; those of the client itself are "disconnected", "protocol" and "usage".
  [[nodiscard]] const std::string& code() const { return code_; }

 private:
  std::string code_;
};

// The daemon refused a request: nothing of it has run.
class Refused : public Error {
 public:
  using Error::Error;
  std::optional<std::string> field;        // the field at fault
  std::optional<uint64_t> retry_after_ms;  // of "busy": when it may be worth while to try again
  std::optional<uint64_t> queue_length;    // of "busy": requests that wait
  std::optional<double> expected_ms;       // of "deadline_unreachable": when the last token would be there
};

// A request that was accepted has failed (`done.error`); the tokens that came before stand.
class Failed : public Error {
 public:
  using Error::Error;
};

// There is no daemon, it has gone, or it does not answer. The client's open streams and sessions are lost; the next
// request connects again.
class Disconnected : public Error {
 public:
  explicit Disconnected(const std::string& message) : Error("disconnected", message) {}
};

// A message of the daemon is none that docs/wire.md has. The connection is given up.
class ProtocolError : public Error {
 public:
  explicit ProtocolError(const std::string& message) : Error("protocol", message) {}
};

// A call that makes no sense, such as for the result of a stream that has not ended.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error("usage", message) {}
};

}  // namespace ull
