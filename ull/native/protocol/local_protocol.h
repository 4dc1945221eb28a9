// The local transport's protocol. A message is a u32 (little endian) and that many bytes of payload, in both
// directions. Each side's first eight bytes are its hello: `ull1` and a u32 0.
#pragma once

#include "protocol/protocol.h"

namespace ull {

class LocalProtocol final : public Protocol {
 public:
  explicit LocalProtocol(int64_t max_message) : Protocol(max_message) {}

  [[nodiscard]] std::span<const uint8_t> greeting() const noexcept override;
  [[nodiscard]] Step step(ProtocolState& state, std::span<const uint8_t> input) const noexcept override;
  size_t pack_header(size_t size, Header& header) const noexcept override;
  [[nodiscard]] char letter() const noexcept override { return 'L'; }
};

}  // namespace ull
