// ZMTP 3.1 with the CURVE mechanism (https://rfc.zeromq.org/spec/25/ and /26/), as a server: every byte behind the
// handshake is encrypted and authenticated, and only clients whose key is in the allow-list get through it. What the
// frames inside mean is Zmtp's.
//
// The cookie of a WELCOME is random and kept: a connection has its place anyway, so that nothing is gained by having
// the client carry its state.
#pragma once

#include <memory>
#include <vector>

#include "protocol/allow_list.h"
#include "protocol/mechanism.h"
#include "protocol/sodium.h"

namespace ull {

class Curve final : public zmtp::Mechanism {
 public:
  struct Options {
    Sodium sodium;
    CurveKey secret;  // the server's
    std::shared_ptr<AllowList> clients;
  };

  Curve(int64_t max_message, const Options& options);
  ~Curve() override;
  Curve(const Curve&) = delete;
  Curve& operator=(const Curve&) = delete;

  [[nodiscard]] std::span<const uint8_t> greeting() const noexcept override;
  size_t pack_header(size_t size, Header& header) const noexcept override;
  [[nodiscard]] Packed pack(ProtocolState& state, std::span<const uint8_t> payload,
                            Header& header) const noexcept override;
  [[nodiscard]] std::span<const uint8_t> ping(ProtocolState& state) const noexcept override;
  void introduce(const ProtocolState& state, Peer& peer) const noexcept override;
  [[nodiscard]] bool welcome(const ProtocolState& state) const noexcept override;
  [[nodiscard]] uint64_t guests() const noexcept override { return options_.clients->generation(); }
  [[nodiscard]] bool laborious() const noexcept override { return true; }
  void save(const ProtocolState& state, StateWriter& writer) const override;
  [[nodiscard]] bool restore(ProtocolState& state, StateReader& reader) const override;

 private:
  struct Session;  // what is kept of one connection

  [[nodiscard]] static Session& session_of(const ProtocolState& state) noexcept;
  [[nodiscard]] Step hear(ProtocolState& state, std::span<const uint8_t> command) const noexcept override;
  [[nodiscard]] Step hear_hello(ProtocolState& state, std::span<const uint8_t> body) const noexcept;
  [[nodiscard]] Step hear_initiate(ProtocolState& state, std::span<const uint8_t> body) const noexcept;
  [[nodiscard]] Step take_frames(ProtocolState& state, std::span<const uint8_t> input) const noexcept override;
  [[nodiscard]] bool seal(Session& session, uint8_t flags, std::span<const uint8_t> body) const noexcept;
  [[nodiscard]] uint8_t* scratch(size_t size) const noexcept;

  const Options options_;
  CurveKey public_;
  // One thread at a time uses this: what is being read, and what is being sent.
  mutable std::vector<uint8_t> opened_;
  mutable std::vector<uint8_t> sealed_;
};

}  // namespace ull
