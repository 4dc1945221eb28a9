// What ZMTP's frames are made of (https://rfc.zeromq.org/spec/37/), whatever the mechanism that carries them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "protocol/protocol.h"

namespace ull::zmtp {

using Bytes = std::span<const uint8_t>;

inline constexpr uint8_t kMoreFlag = 1, kLongFlag = 2, kCommandFlag = 4;  // bits of a frame's flags
inline constexpr size_t kGreeting = 64;
inline constexpr size_t kLongestCommand = 2048;  // a READY with everything that a peer may say of itself, and room
inline constexpr size_t kLongestContext = 16;    // of a PING
inline constexpr size_t kLongestIdentity = 255;

// A string literal's bytes without its final zero.
template <size_t size>
consteval std::array<uint8_t, size - 1> literal(const char (&text)[size]) {
  std::array<uint8_t, size - 1> bytes{};
  for (size_t i = 0; i + 1 < size; ++i) bytes[i] = static_cast<uint8_t>(text[i]);
  return bytes;
}

inline std::string_view as_text(Bytes bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline uint64_t big_endian(Bytes bytes) noexcept {
  uint64_t value = 0;
  for (const uint8_t byte : bytes) value = value << 8 | byte;
  return value;
}

inline bool same_name(std::string_view one, std::string_view other) noexcept {  // of a property: case does not count
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](char a, char b) { return (a | 0x20) == (b | 0x20); });
}

// Takes a name, of a command or a property, from the beginning of `bytes`. False if it is not whole.
inline bool take_name(Bytes& bytes, std::string_view& name) noexcept {
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

inline constexpr size_t kMajor = 10, kMinor = 11;  // places of the version in a greeting

// A greeting as far as it has come: whether it is one of ZMTP 3, and names this mechanism. Who speaks something else is
// not waited for.
struct Greeting {
  bool fits = true;
  bool named = true;

  static Greeting of(Bytes input, std::string_view mechanism) noexcept {
    constexpr size_t kSignatureEnd = 9, kMechanism = 12, kMechanismBytes = 20;
    const size_t seen = input.size();
    std::array<uint8_t, kMechanismBytes> name{};
    std::copy(mechanism.begin(), mechanism.end(), name.begin());
    const Bytes given = input.subspan(std::min(seen, kMechanism));
    return {
        .fits = !((seen > 0 && input[0] != 0xff) || (seen > kSignatureEnd && input[kSignatureEnd] != 0x7f) ||
                  (seen > kMajor && input[kMajor] < 3)),
        .named = std::equal(name.begin(), name.begin() + static_cast<ptrdiff_t>(std::min(given.size(), name.size())),
                            given.begin())};
  }
};

// What a frame is for us.
enum class Role : uint8_t { kCommand, kVersion, kPayload, kLongPayload, kWaste };

inline Role role_of(const Frame& frame, const ProtocolState& state, size_t max_message) noexcept {
  if (frame.command) return Role::kCommand;
  if (state.frames == 0 && frame.more && frame.size == kWireVersion.size()) return Role::kVersion;
  if (state.frames != 1 || frame.more || !state.version_ok) return Role::kWaste;
  return frame.size <= max_message ? Role::kPayload : Role::kLongPayload;
}

// Why a message that ends with this frame is none; null: it goes on.
inline const char* malformed(const Frame& frame, const ProtocolState& state, Role role) noexcept {
  if (frame.more) return nullptr;
  if (role == Role::kLongPayload) return kTooLong;
  return state.frames == 1 ? kBadVersion : kBadFrame;
}

// Whether a peer that says this of itself can talk to a ROUTER.
inline bool is_fit(Bytes properties) noexcept {
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

// Writes what a frame of a message begins with, flags and size, to `at`; returns where it ends.
inline uint8_t* put_frame_header(uint8_t* at, uint8_t flags, size_t size) noexcept {
  if (size < 256) {
    *at++ = flags;
    *at++ = static_cast<uint8_t>(size);
  } else {
    *at++ = flags | kLongFlag;
    for (int shift = 56; shift >= 0; shift -= 8) *at++ = static_cast<uint8_t>(size >> shift);
  }
  return at;
}

// What a command between messages asks for: kUnfit, kMore (nothing, it is not for us), or kAnswer, whose body is then
// in `answer`.
struct Obeyed {
  Step::Kind kind = Step::Kind::kMore;
  std::array<uint8_t, 5 + kLongestContext> answer = {};  // the body of a PONG
  size_t size = 0;
};

// A PING is answered with its context; what else a peer may say between messages is not for us.
inline Obeyed obey(Bytes command) noexcept {
  Obeyed obeyed;
  std::string_view name;
  if (!take_name(command, name) || name == "ERROR") return {.kind = Step::Kind::kUnfit};
  if (name != "PING") return obeyed;
  constexpr size_t kTimeToLive = 2;
  if (command.size() < kTimeToLive) return {.kind = Step::Kind::kUnfit};
  const Bytes context = command.subspan(kTimeToLive).first(std::min(command.size() - kTimeToLive, kLongestContext));
  static constexpr auto kPong = literal("\4PONG");
  auto at = std::copy(kPong.begin(), kPong.end(), obeyed.answer.begin());
  at = std::copy(context.begin(), context.end(), at);
  obeyed.kind = Step::Kind::kAnswer;
  obeyed.size = static_cast<size_t>(at - obeyed.answer.begin());
  return obeyed;
}

}  // namespace ull::zmtp
