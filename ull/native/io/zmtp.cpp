#include "io/zmtp.h"

#include <string_view>

namespace ull {
namespace {

using Kind = Step::Kind;
using Bytes = std::span<const uint8_t>;

constexpr uint8_t kMoreFlag = 1, kLongFlag = 2, kCommandFlag = 4;  // bits of a frame's flags
constexpr size_t kGreeting = 64;
constexpr size_t kLongestCommand = 2048;  // a READY with everything that a peer may say of itself, and room
constexpr size_t kLongestContext = 16;    // of a PING
constexpr size_t kLongestIdentity = 255;

// A string literal's bytes without its final zero.
template <size_t size>
consteval std::array<uint8_t, size - 1> literal(const char (&text)[size]) {
  std::array<uint8_t, size - 1> bytes{};
  for (size_t i = 0; i + 1 < size; ++i) bytes[i] = static_cast<uint8_t>(text[i]);
  return bytes;
}

// Signature, version 3.1, mechanism, no server of security, filler; then READY with two properties.
constexpr auto kOurGreeting = literal(
    "\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    "\4\x29\5READY\13Socket-Type\0\0\0\6ROUTER\10Identity\0\0\0\0");
static_assert(kOurGreeting.size() == kGreeting + 43);
constexpr auto kPing = literal("\4\7\4PING\0\0");  // with no time to live

std::string_view as_text(Bytes bytes) noexcept { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

uint64_t big_endian(Bytes bytes) noexcept {
  uint64_t value = 0;
  for (const uint8_t byte : bytes) value = value << 8 | byte;
  return value;
}

bool same_name(std::string_view one, std::string_view other) noexcept {  // of a property: case does not count
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](char a, char b) { return (a | 0x20) == (b | 0x20); });
}

// Takes a name, of a command or a property, from the beginning of `bytes`. False if it is not whole.
bool take_name(Bytes& bytes, std::string_view& name) noexcept {
  if (bytes.empty() || bytes.size() < size_t{1} + bytes[0]) return false;
  name = as_text(bytes.subspan(1, bytes[0]));
  bytes = bytes.subspan(size_t{1} + bytes[0]);
  return true;
}

struct Frame {
  size_t header = 2;  // bytes
  size_t size = 0;    // of the body; known once the header is whole
  bool more = false;
  bool command = false;
  bool valid = true;

  // What begins with these bytes, at least two.
  static Frame of(Bytes bytes) noexcept {
    Frame frame;
    const uint8_t flags = bytes[0];
    frame.more = (flags & kMoreFlag) != 0;
    frame.command = (flags & kCommandFlag) != 0;
    frame.valid = flags < 8 && !(frame.more && frame.command);
    frame.header = (flags & kLongFlag) != 0 ? 9 : 2;
    if (bytes.size() >= frame.header) frame.size = big_endian(bytes.subspan(1, frame.header - 1));
    return frame;
  }
};

// What a frame is for us.
enum class Role : uint8_t { kCommand, kVersion, kPayload, kLongPayload, kWaste };

Role role_of(const Frame& frame, const ProtocolState& state, size_t max_message) noexcept {
  if (frame.command) return Role::kCommand;
  if (state.frames == 0 && frame.more && frame.size == kWireVersion.size()) return Role::kVersion;
  if (state.frames != 1 || frame.more || !state.version_ok) return Role::kWaste;
  return frame.size <= max_message ? Role::kPayload : Role::kLongPayload;
}

// Why a message that ends with this frame is none; null: it goes on.
const char* malformed(const Frame& frame, const ProtocolState& state, Role role) noexcept {
  if (frame.more) return nullptr;
  if (role == Role::kLongPayload) return kTooLong;
  return state.frames == 1 ? "bad_version" : "bad_frame";
}

// Whether a peer that says this of itself can talk to a ROUTER.
bool is_fit(Bytes properties) noexcept {
  bool fit = false;
  while (!properties.empty()) {
    std::string_view name;
    if (!take_name(properties, name) || properties.size() < 4) return false;
    const size_t size = big_endian(properties.first(4));
    if (properties.size() < 4 + size) return false;
    const std::string_view value = as_text(properties.subspan(4, size));
    properties = properties.subspan(4 + size);
    if (same_name(name, "Socket-Type")) fit = value == "DEALER" || value == "REQ" || value == "ROUTER";
    if (same_name(name, "Identity") && size > kLongestIdentity) return false;
  }
  return fit;
}

// A PING is answered with its context; what else a peer may say between messages is not for us.
Step obey(ProtocolState& state, Bytes command) noexcept {
  std::string_view name;
  if (!take_name(command, name) || name == "ERROR") return {.kind = Kind::kUnfit};
  if (name != "PING") return {};
  constexpr size_t kTimeToLive = 2;
  if (command.size() < kTimeToLive) return {.kind = Kind::kUnfit};
  const Bytes context = command.subspan(kTimeToLive).first(std::min(command.size() - kTimeToLive, kLongestContext));
  static constexpr auto kPong = literal("\4\0\4PONG");
  auto at = std::copy(kPong.begin(), kPong.end(), state.answer.begin());
  at = std::copy(context.begin(), context.end(), at);
  const auto size = static_cast<size_t>(at - state.answer.begin());
  state.answer[1] = static_cast<uint8_t>(size - 2);
  return {.kind = Kind::kAnswer, .payload = std::span(state.answer).first(size)};
}

}  // namespace

Bytes Zmtp::greeting() const noexcept { return kOurGreeting; }
Bytes Zmtp::ping() const noexcept { return kPing; }

size_t Zmtp::pack_header(size_t size, Header& header) const noexcept {
  static_assert(kLongestHeader >= 6 + 9);
  static constexpr auto kVersionFrame = literal("\1\4ull1");
  uint8_t* at = std::copy(kVersionFrame.begin(), kVersionFrame.end(), header.begin());
  if (size < 256) {
    *at++ = 0;
    *at++ = static_cast<uint8_t>(size);
  } else {
    *at++ = kLongFlag;
    for (int shift = 56; shift >= 0; shift -= 8) *at++ = static_cast<uint8_t>(size >> shift);
  }
  return static_cast<size_t>(at - header.data());
}

Step Zmtp::step(ProtocolState& state, Bytes input) const noexcept {
  return state.open ? take_frames(state, input) : shake_hands(state, input);
}

// The greeting is judged as far as it has come: who speaks something else is not waited for.
Step Zmtp::shake_hands(ProtocolState& state, Bytes input) noexcept {
  size_t at = 0;
  if (!state.greeted) {
    constexpr size_t kSignatureEnd = 9, kMajor = 10, kMinor = 11, kMechanism = 12, kMechanismBytes = 20;
    static constexpr auto kNull = literal("NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    static_assert(kNull.size() == kMechanismBytes);
    const size_t seen = input.size();
    const Bytes mechanism = input.subspan(std::min(seen, kMechanism));
    const size_t named = std::min(mechanism.size(), kMechanismBytes);
    if ((seen > 0 && input[0] != 0xff) || (seen > kSignatureEnd && input[kSignatureEnd] != 0x7f) ||
        (seen > kMajor && input[kMajor] < 3) || !std::equal(kNull.begin(), kNull.begin() + named, mechanism.begin())) {
      return {.kind = Kind::kUnfit};
    }
    if (seen < kGreeting) return {.wanted = kGreeting};
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
        if (const Step step = obey(state, body); step.kind != Kind::kMore) {
          return {.kind = step.kind, .consumed = at, .payload = step.payload};
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
