// The ROUTER socket that clients talk to. Opened by the thread that starts the io thread, then used and closed by the
// io thread alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/backlog.h"
#include "io/control_pair.h"
#include "io/socket_file.h"
#include "io/transport.h"
#include "io/zmq_api.h"

namespace ull {

class Router final : public Transport {
 public:
  struct Options {
    int send_high_water = 64;                  // messages queued per client before it counts as unreadable
    int64_t max_message = 16 * 1024 * 1024;    // bytes; a longer one is refused, see kLongestRefused
    int64_t backlog_bytes = 64 * 1024 * 1024;  // of all clients' messages that wait; at least two of the longest
    int linger_ms = 1000;                      // time that frames sent before close() have to reach the network
  };

  Router(const zmq::Api& api, void* context, const Options& options);
  ~Router() override;
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  // Binds clients' endpoints. Throws std::runtime_error naming the endpoint. libzmq takes an ipc path over from whoever
  // has it: the control plane must have claimed it (ull/sockets.py).
  void open(const std::vector<std::string>& listen);
  void close() noexcept;
  // As bound: tcp port 0 is resolved.
  [[nodiscard]] const std::vector<std::string>& endpoints() const noexcept { return endpoints_; }

  // Sends [identity, version, payload].
  [[nodiscard]] Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept override;
  // The next message, of each client in turn. Frames beyond the second are thrown away, a batch of them a call: a
  // message of millions of frames holds nobody up.
  [[nodiscard]] Received receive(Incoming& message) noexcept override;
  // Takes from libzmq what has come, so that it never stops reading a connection.
  void tend() noexcept override { (void)drain(); }

  // An identity that clients have chosen themselves belongs to the newest connection that names it, except while
  // `keep`: then a newcomer is not heard, and the stream to the older one goes on.
  void keep_named_clients(bool keep) noexcept;

  // Looks whether each ipc endpoint's file is still there, and binds it again if not.
  void look_at_files() noexcept;
  // Tells the control plane what has become of them; what it has no room for is told with the next call.
  void tell_of_files(ControlPair& control) noexcept;
  [[nodiscard]] uint64_t bound_again() const noexcept { return bound_again_; }  // times
  [[nodiscard]] uint64_t unreachable() const noexcept;                          // endpoints without a file of ours, now

  [[nodiscard]] const Backlog& backlog() const noexcept { return backlog_; }
  [[nodiscard]] void* socket() const noexcept { return socket_; }

 private:
  struct File {
    size_t endpoint;  // index
    SocketFile file;
    SocketFile::State state = SocketFile::State::kOurs;
    SocketFile::State told = SocketFile::State::kOurs;  // as the control plane knows it
    bool bound_again = false;                           // ... does not know yet
  };

  void bind(const std::string& endpoint);
  [[nodiscard]] bool bind_again(File& file) noexcept;
  [[nodiscard]] Received take(int& frames_left) noexcept;
  [[nodiscard]] Received drain() noexcept;
  void refuse_long() noexcept;

  const zmq::Api& api_;
  void* const context_;
  const Options options_;
  void* socket_ = nullptr;
  std::vector<std::string> endpoints_;
  std::vector<File> files_;  // of ipc endpoints
  uint64_t bound_again_ = 0;
  Backlog backlog_;
  Incoming message_;  // the one that is being received
  zmq::Message frame_;
  uint64_t frames_ = 0;  // of it that have been taken, its identity included; 0: none is being received
  bool version_ok_ = false;
  bool keeps_named_clients_ = false;
};

}  // namespace ull
