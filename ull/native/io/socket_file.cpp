#include "io/socket_file.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>

namespace ull {
namespace {

constexpr int kBacklog = 256;
constexpr mode_t kModeBits = 0777;

}  // namespace

SocketFile::State SocketFile::look() noexcept {
  struct stat found{};
  if (lstat(path_.c_str(), &found) != 0) return errno == ENOENT || errno == ENOTDIR ? State::kGone : State::kForeign;
  if (found.st_dev != device_ || found.st_ino != inode_) return State::kForeign;
  mode_ = found.st_mode & kModeBits;  // it may have been changed since
  return State::kOurs;
}

int SocketFile::bind_again() noexcept {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path_.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    return -1;
  }
  path_.copy(address.sun_path, path_.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  // The file's mode is the socket's without the bits of the umask: nobody gets in before it is as it should be, and a
  // umask that is too strict is made good afterwards.
  if (fchmod(fd, mode_) != 0 || bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path_.c_str(), mode_) != 0 || listen(fd, kBacklog) != 0 || !adopt()) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

bool SocketFile::adopt() noexcept {
  struct stat found{};
  if (lstat(path_.c_str(), &found) != 0) return false;
  device_ = found.st_dev;
  inode_ = found.st_ino;
  mode_ = found.st_mode & kModeBits;
  return true;
}

}  // namespace ull
