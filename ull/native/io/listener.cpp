#include "io/listener.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace ull {
namespace {

constexpr int kBacklog = 256;
constexpr std::string_view kIpc = "ipc://", kTcp = "tcp://";
// A machine that has vanished is noticed by the kernel within five seconds.
constexpr int kKeepaliveIdleS = 2, kKeepaliveIntervalS = 1, kKeepaliveCount = 3;
constexpr int kUserTimeoutMs = 5000;

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

void set(int fd, int level, int option, int value) {
  if (setsockopt(fd, level, option, &value, sizeof(value)) != 0) fail(errno);
}

uint16_t parse_port(std::string_view text) {
  if (text == "*") return 0;
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) {
    throw std::runtime_error("a port is 0 to 65535, or *");
  }
  return port;
}

// The address of a network interface, IPv4 first.
bool find_interface(const std::string& name, Address& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return false;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
      if (name != each->ifa_name || each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
      std::memcpy(&address, each->ifa_addr, family == AF_INET ? sizeof(address.v4) : sizeof(address.v6));
      return true;
    }
  }
  return false;
}

void find_host(const std::string& name, Address& address) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(name.c_str(), nullptr, &hints, &found); error != 0) {
    throw std::runtime_error(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  if (found->ai_addrlen > sizeof(address)) fail(EAFNOSUPPORT);
  std::memcpy(&address, found->ai_addr, found->ai_addrlen);
}

Address parse_tcp(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) throw std::runtime_error("it has no port");
  const uint16_t port = parse_port(text.substr(colon + 1));
  std::string_view host = text.substr(0, colon);
  Address address{};
  if (host == "*") {
    address.v4.sin_family = AF_INET;
  } else if (host.starts_with('[') && host.ends_with(']')) {
    find_host(std::string(host.substr(1, host.size() - 2)), address);
  } else if (const std::string name(host); !find_interface(name, address)) {
    find_host(name, address);
  }
  (address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port) = htons(port);
  return address;
}

std::string describe_tcp(int fd) {
  Address address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, &address.any, &size) != 0) fail(errno);
  char text[NI_MAXHOST];  // with the zone of a link-local address
  const bool v6 = address.any.sa_family == AF_INET6;
  if (const int error = getnameinfo(&address.any, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST); error != 0) {
    throw std::runtime_error(gai_strerror(error));
  }
  std::string endpoint(kTcp);
  endpoint.append(v6 ? "[" : "").append(text).append(v6 ? "]:" : ":");
  return endpoint.append(std::to_string(ntohs(v6 ? address.v6.sin6_port : address.v4.sin_port)));
}

}  // namespace

Listener::Listener(const std::string& endpoint) : endpoint_(endpoint) {
  try {
    if (endpoint.starts_with(kIpc) && endpoint.size() > kIpc.size()) {
      listen_ipc(endpoint.substr(kIpc.size()));
    } else if (endpoint.starts_with(kTcp)) {
      listen_tcp(std::string_view(endpoint).substr(kTcp.size()));
    } else {
      fail(EINVAL);
    }
  } catch (const std::exception& error) {
    if (fd_ >= 0) ::close(fd_);
    const auto* const known = dynamic_cast<const std::system_error*>(&error);
    throw std::runtime_error(endpoint + ": " + (known != nullptr ? known->code().message() : error.what()));
  }
}

Listener::Listener(int fd, StateReader& reader) : fd_(fd), tcp_(reader.flag()), endpoint_(reader.text()) {
  const std::string path(reader.text());
  SocketFile::Identity identity;
  identity.device = reader.number();
  identity.inode = reader.number();
  identity.mode = static_cast<mode_t>(reader.number());
  if (!path.empty()) file_.emplace(path, identity);
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (!reader.whole() || getsockopt(fd_, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    throw std::runtime_error("a door that was handed over is none");
  }
}

void Listener::save(StateWriter& writer) const {
  writer.flag(tcp_);
  writer.text(endpoint_);
  writer.text(file_ ? std::string_view(file_->path()) : std::string_view{});
  const SocketFile::Identity identity = file_ ? file_->identity() : SocketFile::Identity{};
  writer.number(identity.device);
  writer.number(identity.inode);
  writer.number(identity.mode);
}

Listener::~Listener() {
  if (fd_ >= 0) ::close(fd_);
}

Listener::Listener(Listener&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      tcp_(other.tcp_),
      endpoint_(std::move(other.endpoint_)),
      file_(std::move(other.file_)),
      state_(other.state_),
      told_(other.told_),
      bound_again_(other.bound_again_),
      told_bound_again_(other.told_bound_again_) {}

void Listener::listen_ipc(const std::string& path) {
  fd_ = listen_unix(path, std::nullopt);
  if (fd_ < 0) fail(errno);
  if (!path.starts_with('@')) file_.emplace(path);
}

// Options of the listening socket are those of each connection.
void Listener::listen_tcp(std::string_view text) {
  tcp_ = true;
  const Address address = parse_tcp(text);
  const bool v6 = address.any.sa_family == AF_INET6;
  fd_ = socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd_ < 0) fail(errno);
  set(fd_, SOL_SOCKET, SO_REUSEADDR, 1);
  set(fd_, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd_, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleS);
  set(fd_, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalS);
  set(fd_, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveCount);
  set(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  if (bind(fd_, &address.any, v6 ? sizeof(address.v6) : sizeof(address.v4)) != 0 || listen(fd_, kBacklog) != 0) {
    fail(errno);
  }
  endpoint_ = describe_tcp(fd_);
}

bool Listener::look_at_file() noexcept {
  if (!file_) return false;
  state_ = file_->look();
  if (state_ != SocketFile::State::kGone) return false;
  const int fd = file_->bind_again();
  if (fd < 0) return false;
  ::close(fd_);
  fd_ = fd;
  state_ = SocketFile::State::kOurs;
  ++bound_again_;
  return true;
}

std::string_view Listener::news() const noexcept {
  if (bound_again_ != told_bound_again_) return "bound_again";
  return state_ == told_ ? std::string_view{} : socket_file_state_name(state_);
}

void Listener::told() noexcept {
  told_ = bound_again_ != told_bound_again_ ? SocketFile::State::kOurs : state_;
  told_bound_again_ = bound_again_;
}

}  // namespace ull
