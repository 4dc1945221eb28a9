#include "protocol/zmtp.h"

#include "protocol/zmtp_frames.h"

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

Step Zmtp::step(ProtocolState& state, Bytes input) const noexcept {
  return state.open ? take_frames(state, input) : shake_hands(state, input);
}

Step Zmtp::shake_hands(ProtocolState& state, Bytes input) noexcept {
  size_t at = 0;
  if (!state.greeted) {
    const Greeting theirs = Greeting::of(input, "NULL");
    if (!theirs.fits || !theirs.named) return {.kind = Kind::kUnfit};
    if (input.size() < kGreeting) return {.wanted = kGreeting};
    state.greeted = true;
    state.pings = input[kMajor] > 3 || input[kMinor] > 0;
    at = kGreeting;
  }
  const Bytes rest = input.subspan(at);
  if (rest.size() < 2) return {.consumed = at, .wanted = 2};
  const Frame frame = Frame::of(rest);
  if (!frame.valid || !frame.command || frame.size > kLongestCommand) return {.kind = Kind::kUnfit};
  if (rest.size() < frame.header + frame.size) return {.consumed = at, .wanted = frame.header + frame.size};
  Bytes body = rest.subspan(frame.header, frame.size);
  std::string_view name;
  if (!take_name(body, name) || name != "READY" || !is_fit(body)) return {.kind = Kind::kUnfit};
  state.open = true;
  return {.kind = Kind::kOpened, .consumed = at + frame.header + frame.size};
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
        state.version_ok = as_text(body) == kWireVersion;
        state.frames = 1;
        break;
      case Role::kPayload:
        state.frames = 0;
        return {.kind = Kind::kMessage, .consumed = at + frame.size, .payload = body};
      case Role::kLongPayload:
        look_for_id(state, body);
        [[fallthrough]];
      case Role::kWaste:
        state.thrown += frame.header + frame.size;
        if (state.thrown > max_refused_ + kLongestCommand) return {.kind = Kind::kUnfit};
        throw_away(state, frame.size, malformed(frame, state, role));
        state.version_ok = state.version_ok && state.frames == 1;
        state.frames = state.frames == 0 ? 1 : 2;
        break;
    }
  }
}

}  // namespace ull
