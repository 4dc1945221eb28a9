// A way to clients, as the io thread sees it: takes their messages one by one, sends them frames, never waits.
// A client is known by its identity, 1 to 255 bytes that the transport chooses or the client has chosen.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "engine/request.h"
#include "io/zmq_api.h"

namespace ull {

inline constexpr std::string_view kWireVersion = "ull1";
// Values of Incoming::malformed for requests that were not kept: their client has too many waiting; they are longer
// than a message may be.
inline constexpr const char* kRefused = "busy";
inline constexpr const char* kTooLong = "too_long";

// A message that is longer than it may be is thrown away and its request refused, up to this many bytes; beyond, its
// connection is closed.
inline constexpr int64_t kLongestRefused = 16 * 1024 * 1024;

enum class Sent : uint8_t {
  kOk,
  kBlocked,  // the peer's queue is full: try again later
  kGone,     // there is no such peer (any more)
};

// One message of a client.
struct Incoming {
  std::array<uint8_t, kMaxIdentity> identity;
  size_t identity_size = 0;
  zmq::Message payload;             // initialised by whoever owns this; moved on, not copied
  const char* malformed = nullptr;  // why it is no request: "bad_frame", "bad_version", ...; null: it is one
  int64_t received_ns = 0;          // CLOCK_MONOTONIC
  uint64_t id = 0;                  // of a refused request, where it could be found
  bool has_id = false;

  [[nodiscard]] std::span<const uint8_t> client() const noexcept { return {identity.data(), identity_size}; }
};

enum class Received : uint8_t {
  kNothing,
  kUnfinished,  // a part was taken: the rest comes with further calls, after others have had their turn
  kMessage,
};

class Sender {
 public:
  virtual ~Sender() = default;
  // Sends one frame of the wire to a client.
  [[nodiscard]] virtual Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept = 0;
};

class Transport : public Sender {
 public:
  // Takes the next message, or a bounded part of it.
  [[nodiscard]] virtual Received receive(Incoming& message) noexcept = 0;
  // To be called now and then while nothing is received: a bounded amount of what must not wait.
  virtual void tend() noexcept {}
};

}  // namespace ull
