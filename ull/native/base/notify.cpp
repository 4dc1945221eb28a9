#include "base/notify.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace ull {
namespace {

std::atomic<bool> is_the_service{true};

}  // namespace

void be_the_service(bool is) noexcept { is_the_service.store(is, std::memory_order_relaxed); }

bool notify_service_manager(std::string_view state) noexcept {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || !is_the_service.load(std::memory_order_relaxed)) return false;
  sockaddr_un address{};
  const size_t length = std::strlen(path);
  if (length < 2 || length >= sizeof(address.sun_path) || (path[0] != '/' && path[0] != '@')) return false;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // abstract namespace
  const int socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket_fd < 0) return false;
  const auto address_length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  const ssize_t sent = sendto(socket_fd, state.data(), state.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
                              reinterpret_cast<const sockaddr*>(&address), address_length);
  close(socket_fd);
  return sent == static_cast<ssize_t>(state.size());
}

void complain(std::string_view line) noexcept {
  std::array<char, 512> text;  // below PIPE_BUF: a pipe that poll() calls writable takes it whole
  const size_t length = std::min(line.size(), text.size() - 1);
  std::memcpy(text.data(), line.data(), length);
  text[length] = '\n';
  pollfd item{STDERR_FILENO, POLLOUT, 0};
  if (poll(&item, 1, 0) != 1 || (item.revents & POLLOUT) == 0) return;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), length + 1);
}

int64_t service_watchdog_usec() noexcept {
  const char* period = std::getenv("WATCHDOG_USEC");
  if (period == nullptr) return 0;
  const char* process = std::getenv("WATCHDOG_PID");
  if (process != nullptr && std::strtoll(process, nullptr, 10) != getpid()) return 0;
  const long long usec = std::strtoll(period, nullptr, 10);
  return usec > 0 ? usec : 0;
}

}  // namespace ull
