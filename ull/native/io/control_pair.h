// The PAIR socket to the control plane: requests and the ends of accepted ones go there, replies come back. Opened by
// the thread that starts the io thread, used by the io thread alone while that runs, closed by whoever has ended it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "io/transport.h"
#include "io/zmq_api.h"

namespace ull {

// What the control plane is told: a message's first frame, this letter. Numbers are u64, little endian.
enum class IoMessage : char {
  kRequest = 'R',    // a client's message: [identity, payload, received_ns]
  kMalformed = 'B',  // a client's that is no request: [identity, reason], and its id if it is known
  kEnded = 'D',      // an accepted request has ended: [record], and its completion's ids (i32) if they are wanted
  kEndpoint = 'E',   // what has become of an endpoint's socket file: [endpoint, bound_again | ours | gone | foreign]
  kPeer = 'P',  // who a client is, before its first message: [identity, kind (Peer::Kind), A | G (admin or not), name]
  kDenied = 'X',  // somebody was not let in: [why, address]
  kGone = 'G',    // a client has hung up, and what it asked for is to be ended: [identity]
};

inline constexpr std::pair<const char*, IoMessage> kIoMessages[] = {
    {"request", IoMessage::kRequest},   {"malformed", IoMessage::kMalformed}, {"ended", IoMessage::kEnded},
    {"endpoint", IoMessage::kEndpoint}, {"peer", IoMessage::kPeer},           {"denied", IoMessage::kDenied},
    {"gone", IoMessage::kGone}};

class ControlPair {
 public:
  ControlPair(const zmq::Api& api, void* context);
  ~ControlPair();
  ControlPair(const ControlPair&) = delete;
  ControlPair& operator=(const ControlPair&) = delete;

  // Throws std::runtime_error naming the endpoint.
  void open(const std::string& endpoint);
  void close(int linger_ms) noexcept;

  // Each sends one message; false if the control plane has no room. forward() decides between kRequest and kMalformed,
  // sends a client's kPeer first, and leaves a message that it has sent without its payload.
  [[nodiscard]] bool forward(Incoming& message) noexcept;
  [[nodiscard]] bool send_record(std::span<const uint8_t> record,
                                 std::optional<std::span<const int32_t>> ids = std::nullopt) noexcept;
  [[nodiscard]] bool send_endpoint(std::string_view endpoint, std::string_view what) noexcept;
  [[nodiscard]] bool send_denied(const Transport::Denial& denial) noexcept;
  [[nodiscard]] bool send_gone(std::span<const uint8_t> identity) noexcept;
  // The next reply to a client; false if there is none. What it returns is valid until the next call.
  struct Reply {
    std::span<const uint8_t> identity;
    std::span<const uint8_t> payload;
    bool whole = false;  // false: not the two frames that a reply has
  };
  [[nodiscard]] bool receive(Reply& reply) noexcept;

  [[nodiscard]] void* socket() const noexcept { return socket_; }

 private:
  [[nodiscard]] bool introduce(const Incoming& message) noexcept;
  [[nodiscard]] bool begin(IoMessage kind) noexcept;
  [[nodiscard]] bool send(std::span<const uint8_t> frame, bool more) noexcept;

  const zmq::Api& api_;
  void* const context_;
  void* socket_ = nullptr;
  zmq::Message identity_;
  zmq::Message payload_;
  zmq::Message other_;
};

}  // namespace ull
