#include "protocol/zmtp.h"

namespace ull {
namespace {

using namespace zmtp;
using Kind = Step::Kind;

// Signature, version 3.1, mechanism, no server of security, filler; then READY with two properties.
constexpr auto kOurGreeting = literal(
    "\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    "\4\x29\5READY\13Socket-Type\0\0\0\6ROUTER\10Identity\0\0\0\0");
static_assert(kOurGreeting.size() == kGreeting + 43);
constexpr auto kPing = literal("\4\7\4PING\0\0");  // with no time to live

}  // namespace

Bytes Zmtp::greeting() const noexcept { return kOurGreeting; }
Bytes Zmtp::ping(ProtocolState& /*state*/) const noexcept { return kPing; }

size_t Zmtp::pack_header(size_t size, Header& header) const noexcept {
  static_assert(kLongestHeader >= 6 + 9);
  static constexpr auto kVersionFrame = literal("\1\4ull1");
  uint8_t* at = std::copy(kVersionFrame.begin(), kVersionFrame.end(), header.begin());
  return static_cast<size_t>(put_frame_header(at, 0, size) - header.data());
}

Step Zmtp::hear(ProtocolState& state, Bytes command) const noexcept {
  std::string_view name;
  if (!take_name(command, name) || name != "READY" || !is_fit(command)) return {.kind = Kind::kUnfit};
  state.open = true;
  return {.kind = Kind::kOpened};
}

Step Zmtp::take_frames(ProtocolState& state, Bytes input) const noexcept {
  for (size_t at = 0;;) {
    if (state.throwing) {
      if (!thrown_away(state, input, at)) return {.consumed = at};
      if (state.malformed != nullptr) return refused(state, at);
    }
    const Bytes rest = input.subspan(at);
    if (rest.size() < 2) return {.consumed = at, .wanted = 2};
    const Frame frame = Frame::of(rest);
    if (!frame.valid) return {.kind = Kind::kUnfit};
    if (rest.size() < frame.header) return {.consumed = at, .wanted = frame.header};
    if (frame.size > (frame.command ? kLongestCommand : max_refused_)) return {.kind = Kind::kUnfit};
    const Role role = role_of(frame, state, max_message_);
    const size_t needed = role == Role::kWaste         ? 0
                          : role == Role::kLongPayload ? std::min(frame.size, kLook)
                                                       : frame.size;
    if (rest.size() < frame.header + needed) return {.consumed = at, .wanted = frame.header + needed};
    const Bytes body = rest.subspan(frame.header, needed);
    at += frame.header;
    switch (role) {
      case Role::kCommand:
        at += frame.size;
        if (const Obeyed obeyed = obey(body); obeyed.kind == Kind::kAnswer) {
          state.answer[0] = kCommandFlag;
          state.answer[1] = static_cast<uint8_t>(obeyed.size);
          std::copy_n(obeyed.answer.begin(), obeyed.size, state.answer.begin() + 2);
          return {.kind = Kind::kAnswer, .consumed = at, .payload = std::span(state.answer).first(2 + obeyed.size)};
        } else if (obeyed.kind == Kind::kUnfit) {
          return {.kind = Kind::kUnfit, .consumed = at};
        }
        break;
      case Role::kVersion:
        at += frame.size;
        take_version(state, body);
        break;
      case Role::kPayload:
        state.frames = 0;
        return {.kind = Kind::kMessage, .consumed = at + frame.size, .payload = body};
      case Role::kLongPayload:
      case Role::kWaste:
        if (!waste(state, frame, role, body, frame.header + frame.size, frame.size)) return {.kind = Kind::kUnfit};
        break;
    }
  }
}

}  // namespace ull
