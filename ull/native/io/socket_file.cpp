#include "io/socket_file.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

namespace ull {
namespace {

constexpr int kBacklog = 256;
constexpr mode_t kModeBits = 0777;

}  // namespace

int listen_unix(const std::string& path, std::optional<mode_t> mode) noexcept {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    return -1;
  }
  path.copy(address.sun_path, path.size());
  const bool abstract = path.starts_with('@');
  if (abstract) address.sun_path[0] = '\0';
  const size_t size = abstract ? offsetof(sockaddr_un, sun_path) + path.size() : sizeof(address);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  // The file's mode is the socket's without the bits of the umask: nobody gets in before it is as it should be, and a
  // umask that is too strict is made good afterwards.
  if ((mode && fchmod(fd, *mode) != 0) ||
      bind(fd, reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(size)) != 0 ||
      (mode && chmod(path.c_str(), *mode) != 0) || listen(fd, kBacklog) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

SocketFile::State SocketFile::look() noexcept {
  struct stat found{};
  if (lstat(path_.c_str(), &found) != 0) return errno == ENOENT || errno == ENOTDIR ? State::kGone : State::kForeign;
  if (found.st_dev != identity_.device || found.st_ino != identity_.inode) return State::kForeign;
  identity_.mode = found.st_mode & kModeBits;  // it may have been changed since
  return State::kOurs;
}

int SocketFile::bind_again() noexcept {
  const int fd = listen_unix(path_, identity_.mode);
  if (fd < 0 || adopt()) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

bool SocketFile::adopt() noexcept {
  struct stat found{};
  if (lstat(path_.c_str(), &found) != 0) return false;
  identity_ = {found.st_dev, found.st_ino, found.st_mode & kModeBits};
  return true;
}

}  // namespace ull
