// The daemon's two sockets: a ROUTER that clients talk to and a PAIR to the control plane. Opened by the thread that
// starts the io thread, then used and closed by the io thread alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/zmq_api.h"

namespace ull {

enum class Sent : uint8_t {
  kOk,
  kBlocked,  // the peer's queue is full: try again later
  kGone,     // there is no such peer (any more)
};

class Router {
 public:
  struct Options {
    int send_high_water = 64;                // messages queued per client before it counts as unreadable
    int64_t max_message = 16 * 1024 * 1024;  // bytes per frame; a client that sends more is disconnected
    int linger_ms = 1000;                    // time that frames sent before close() have to reach the network
  };

  Router(const zmq::Api& api, void* context, const Options& options);
  ~Router() { close(); }
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  // Binds clients' endpoints and the control plane's. Throws std::runtime_error naming the endpoint. libzmq takes an
  // ipc path over from whoever has it: the control plane must have claimed it (ull/sockets.py).
  void open(const std::vector<std::string>& listen, const std::string& control);
  void close() noexcept;
  // As bound: tcp port 0 is resolved.
  [[nodiscard]] const std::vector<std::string>& endpoints() const noexcept { return endpoints_; }

  // Sends [identity, version, payload] to a client without waiting.
  [[nodiscard]] Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept;

  [[nodiscard]] void* clients() const noexcept { return clients_; }
  [[nodiscard]] void* control() const noexcept { return control_; }

 private:
  void set(void* socket, int option, int value, const char* name);
  void bind(void* socket, const std::string& endpoint);
  [[noreturn]] void fail(const std::string& what) const;

  const zmq::Api& api_;
  void* const context_;
  const Options options_;
  void* clients_ = nullptr;
  void* control_ = nullptr;
  std::vector<std::string> endpoints_;
};

}  // namespace ull
