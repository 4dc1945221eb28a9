#include "protocol/mechanism.h"

namespace ull::zmtp {

using Kind = Step::Kind;

Step Mechanism::step(ProtocolState& state, Bytes input) const noexcept {
  return state.open ? take_frames(state, input) : shake_hands(state, input);
}

Step Mechanism::shake_hands(ProtocolState& state, Bytes input) const noexcept {
  size_t at = 0;
  if (!state.greeted) {
    const Greeting theirs = Greeting::of(input, name_);
    if (!theirs.fits) return {.kind = Kind::kUnfit};
    if (!theirs.named) return stranger_;
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
  Step step = hear(state, rest.subspan(frame.header, frame.size));
  step.consumed = at + frame.header + frame.size;
  return step;
}

void Mechanism::take_version(ProtocolState& state, Bytes text) noexcept {
  state.version_ok = as_text(text) == kWireVersion;
  state.frames = 1;
}

bool Mechanism::waste(ProtocolState& state, const Frame& frame, Role role, Bytes text, size_t bytes,
                      size_t left) const noexcept {
  if (role == Role::kLongPayload) look_for_id(state, text);
  state.thrown += bytes;
  if (state.thrown > max_refused_ + kLongestCommand) return false;
  throw_away(state, left, malformed(frame, state, role));
  state.version_ok = state.version_ok && state.frames == 1;
  state.frames = state.frames == 0 ? 1 : 2;
  return true;
}

}  // namespace ull::zmtp
