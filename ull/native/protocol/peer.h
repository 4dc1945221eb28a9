// What the protocols and the sockets have in common: the version that peers speak, how long a message may be, who is at
// the other end.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ull {

inline constexpr std::string_view kWireVersion = "ull1";
// Why a client's message is no request: not two frames, of another version, longer than a message may be.
inline constexpr char kBadFrame[] = "bad_frame";
inline constexpr char kBadVersion[] = "bad_version";
inline constexpr char kTooLong[] = "too_long";

// A message that is longer than it may be is thrown away and its request refused, up to this many bytes; beyond, its
// connection is closed.
inline constexpr int64_t kLongestRefused = 16 * 1024 * 1024;

// Who is at the other end of a connection, as far as the transport knows.
struct Peer {
  enum Kind : uint8_t { kAddress = 'a', kUser = 'u', kKey = 'k' };
  static constexpr size_t kLongest = 96;

  void set(std::string_view text) noexcept {
    size = static_cast<uint8_t>(std::min(text.size(), kLongest));
    std::copy_n(text.begin(), size, name.begin());
  }
  [[nodiscard]] std::string_view text() const noexcept { return {name.data(), size}; }

  Kind kind = kAddress;  // of the name: an address, a user's id with the process's, or that of a key
  bool admin = false;
  uint8_t size = 0;
  std::array<char, kLongest> name;
};

}  // namespace ull
