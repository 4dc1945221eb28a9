// What ZMTP's mechanisms have in common: the greeting, the commands behind it until hands are shaken, and what becomes
// of the frames of a message that is none.
#pragma once

#include <span>
#include <string_view>

#include "protocol/protocol.h"
#include "protocol/zmtp_frames.h"

namespace ull::zmtp {

class Mechanism : public Protocol {
 public:
  [[nodiscard]] Step step(ProtocolState& state, Bytes input) const noexcept final;
  [[nodiscard]] bool pings() const noexcept final { return true; }
  [[nodiscard]] char letter() const noexcept final { return 'Z'; }

 protected:
  // `name`: as greetings have it. `stranger`: what becomes of a peer whose greeting has another.
  Mechanism(int64_t max_message, std::string_view name, const Step& stranger)
      : Protocol(max_message), name_(name), stranger_(stranger) {}

  // A command of the handshake, whole. The step's `consumed` is set by the caller.
  [[nodiscard]] virtual Step hear(ProtocolState& state, Bytes command) const noexcept = 0;
  // Messages, once hands have been shaken.
  [[nodiscard]] virtual Step take_frames(ProtocolState& state, Bytes input) const noexcept = 0;

  // The frame with the version has come.
  static void take_version(ProtocolState& state, Bytes text) noexcept;
  // A frame of no use takes `bytes` of the connection, and its text begins with `text`; `left` bytes of it are yet to
  // be thrown away. False: too much of this message has been.
  [[nodiscard]] bool waste(ProtocolState& state, const Frame& frame, Role role, Bytes text, size_t bytes,
                           size_t left) const noexcept;

 private:
  [[nodiscard]] Step shake_hands(ProtocolState& state, Bytes input) const noexcept;

  const std::string_view name_;
  const Step stranger_;
};

}  // namespace ull::zmtp
