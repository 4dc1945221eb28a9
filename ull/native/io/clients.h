// All of the daemon's clients, whichever transport they have come by.
#pragma once

#include <span>

#include "io/local_socket.h"
#include "io/router.h"
#include "io/transport.h"

namespace ull {

class Clients final : public Sender {
 public:
  Clients(Router& router, LocalSocket& local) : router_(router), local_(local) {}

  [[nodiscard]] Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept override {
    return LocalSocket::owns(identity) ? local_.send(identity, payload) : router_.send(identity, payload);
  }

 private:
  Router& router_;
  LocalSocket& local_;
};

}  // namespace ull
