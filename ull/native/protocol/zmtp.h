// ZeroMQ's wire protocol, ZMTP 3.1 (https://rfc.zeromq.org/spec/37/) with the NULL mechanism, as a ROUTER speaks it to
// DEALERs, REQs and ROUTERs. A message of ours is two frames: `ull1` and the payload. Anything else is malformed and
// thrown away as it arrives, up to kLongestRefused bytes of it.
//
// An identity that a peer names (ZMQ_ROUTING_ID) is taken and not used: each connection is a client of its own.
#pragma once

#include "protocol/mechanism.h"

namespace ull {

class Zmtp final : public zmtp::Mechanism {
 public:
  explicit Zmtp(int64_t max_message) : Mechanism(max_message, "NULL", {.kind = Step::Kind::kUnfit}) {}

  // Greeting and READY at once: with the NULL mechanism neither depends on the peer's.
  [[nodiscard]] std::span<const uint8_t> greeting() const noexcept override;
  size_t pack_header(size_t size, Header& header) const noexcept override;
  [[nodiscard]] std::span<const uint8_t> ping(ProtocolState& state) const noexcept override;

 private:
  [[nodiscard]] Step hear(ProtocolState& state, std::span<const uint8_t> command) const noexcept override;
  [[nodiscard]] Step take_frames(ProtocolState& state, std::span<const uint8_t> input) const noexcept override;
};

}  // namespace ull
