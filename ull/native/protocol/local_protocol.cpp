#include "protocol/local_protocol.h"

#include <algorithm>
#include <array>

#include "protocol/peer.h"

namespace ull {
namespace {

constexpr auto kHello = [] {
  std::array<uint8_t, 8> hello{};  // the version, and zeros
  std::copy(kWireVersion.begin(), kWireVersion.end(), hello.begin());
  return hello;
}();
constexpr size_t kLength = 4;  // bytes before a payload

}  // namespace

std::span<const uint8_t> LocalProtocol::greeting() const noexcept { return kHello; }

Step LocalProtocol::step(ProtocolState& state, std::span<const uint8_t> input) const noexcept {
  using enum Step::Kind;
  if (!state.open) {
    const size_t seen = std::min(input.size(), kHello.size());
    if (!std::equal(kHello.begin(), kHello.begin() + seen, input.begin())) return {.kind = kUnfit};
    if (seen < kHello.size()) return {.wanted = kHello.size()};
    state.open = true;
    return {.kind = kOpened, .consumed = kHello.size()};
  }
  size_t at = 0;
  if (!state.throwing) {
    if (input.size() < kLength) return {.wanted = kLength};
    const size_t size = input[0] | size_t{input[1]} << 8 | size_t{input[2]} << 16 | size_t{input[3]} << 24;
    if (size > max_refused_) return {.kind = kUnfit};
    const size_t needed = kLength + (size > max_message_ ? std::min(size, kLook) : size);
    if (input.size() < needed) return {.wanted = needed};
    if (size <= max_message_) return {.kind = kMessage, .consumed = needed, .payload = input.subspan(kLength, size)};
    look_for_id(state, input.subspan(kLength, needed - kLength));  // no byte of the next message
    throw_away(state, size, kTooLong);
    at = kLength;
  }
  if (!thrown_away(state, input, at)) return {.consumed = at};
  return refused(state, at);
}

size_t LocalProtocol::pack_header(size_t size, Header& header) const noexcept {
  for (size_t i = 0; i < kLength; ++i) header[i] = static_cast<uint8_t>(size >> (8 * i));
  return kLength;
}

}  // namespace ull
