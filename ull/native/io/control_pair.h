// The PAIR socket to the control plane: requests and the ends of accepted ones go there, replies come back. Opened by
// the thread that starts the io thread, then used and closed by the io thread alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/transport.h"
#include "io/zmq_api.h"

namespace ull {

class ControlPair {
 public:
  ControlPair(const zmq::Api& api, void* context);
  ~ControlPair();
  ControlPair(const ControlPair&) = delete;
  ControlPair& operator=(const ControlPair&) = delete;

  // Throws std::runtime_error naming the endpoint.
  void open(const std::string& endpoint);
  void close(int linger_ms) noexcept;

  // A client's message: [R, identity, payload, received_ns] or, if malformed, [B, identity, reason] and its id if it is
  // known; numbers are u64, little endian. False if the control plane has no room; else the payload is empty
  // afterwards.
  [[nodiscard]] bool forward(Incoming& message) noexcept;
  // The record that an accepted request has ended: [D, record]. False if the control plane has no room.
  [[nodiscard]] bool send_record(std::span<const uint8_t> record) noexcept;
  // What has become of an endpoint's socket file: [E, endpoint, what], where `what` is bound_again, ours, gone or
  // foreign. False if the control plane has no room.
  [[nodiscard]] bool send_endpoint(std::string_view endpoint, std::string_view what) noexcept;
  // A client has hung up, and what it asked for is to be ended: [G, identity]. False if the control plane has no room.
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
  [[nodiscard]] bool send(std::span<const uint8_t> frame, bool more) noexcept;

  const zmq::Api& api_;
  void* const context_;
  void* socket_ = nullptr;
  zmq::Message identity_;
  zmq::Message payload_;
  zmq::Message other_;
};

}  // namespace ull
