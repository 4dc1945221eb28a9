// Clients' messages on their way to the control plane, one at a time. What the control plane has no room for waits
// here, and everything behind it with its client.
#pragma once

#include <cstdint>

#include "io/control_pair.h"
#include "io/transport.h"
#include "io/zmq_api.h"

namespace ull {

class Intake {
 public:
  Intake(const zmq::Api& api, ControlPair& control, Transport& clients);
  ~Intake();
  Intake(const Intake&) = delete;
  Intake& operator=(const Intake&) = delete;

  // Hands over what there is, a bounded number of messages. Returns whether there was anything.
  [[nodiscard]] bool work() noexcept;

  // Hands over what waits for the control plane, and receives nothing more.
  void finish() noexcept { parked_ = parked_ && !control_.forward(message_); }

  // A message waits for the control plane: no other is received until it has room.
  [[nodiscard]] bool parked() const noexcept { return parked_; }
  [[nodiscard]] uint64_t requests() const noexcept { return requests_; }    // handed over, or parked
  [[nodiscard]] uint64_t malformed() const noexcept { return malformed_; }  // messages of a wrong shape or version

 private:
  const zmq::Api& api_;
  ControlPair& control_;
  Transport& clients_;
  Incoming message_;
  bool parked_ = false;
  uint64_t requests_ = 0;
  uint64_t malformed_ = 0;
};

}  // namespace ull
