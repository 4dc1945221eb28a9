// A door for clients: a listening socket, of an ipc or tcp endpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/socket_file.h"
#include "protocol/saved_state.h"

namespace ull {

class Listener {
 public:
  // `endpoint`: ipc://path, ipc://@name (of the abstract namespace) or tcp://address:port, as libzmq writes them: an
  // address may be *, a literal (IPv6 in brackets) or a network interface; a port may be * or 0. The path must not
  // exist; the umask decides who may connect. Throws std::runtime_error naming the endpoint.
  explicit Listener(const std::string& endpoint);
  // What save() of another process wrote, of the socket `fd`, which is this one's from now on. Throws
  // std::runtime_error if it is none.
  Listener(int fd, StateReader& reader);
  ~Listener();
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&&) = delete;

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool tcp() const noexcept { return tcp_; }
  void save(StateWriter& writer) const;
  // As bound: the port is resolved.
  [[nodiscard]] const std::string& endpoint() const noexcept { return endpoint_; }

  // Looks whether the path still leads here. A file that is gone is made anew: fd() is another one then, and true is
  // returned; who is connected notices nothing.
  [[nodiscard]] bool look_at_file() noexcept;
  [[nodiscard]] SocketFile::State state() const noexcept { return state_; }
  [[nodiscard]] uint64_t bound_again() const noexcept { return bound_again_; }  // times
  // What has become of the file since told(); empty: nothing.
  [[nodiscard]] std::string_view news() const noexcept;
  void told() noexcept;

 private:
  void listen_ipc(const std::string& path);
  void listen_tcp(std::string_view address);

  int fd_ = -1;
  bool tcp_ = false;
  std::string endpoint_;
  std::optional<SocketFile> file_;
  SocketFile::State state_ = SocketFile::State::kOurs;
  SocketFile::State told_ = SocketFile::State::kOurs;
  uint64_t bound_again_ = 0;
  uint64_t told_bound_again_ = 0;
};

}  // namespace ull
