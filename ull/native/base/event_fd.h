// A file descriptor that stays readable from raise() until clear(): wakes a thread that polls, an event loop included.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace ull {

class EventFd {
 public:
  // Throws std::system_error if the process has no file descriptors left.
  EventFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~EventFd() { close(fd_); }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  // Any thread, and a signal handler.
  void raise() noexcept {
    const uint64_t one = 1;
    // Can only fail if the counter is at 2^64 - 2, and then the descriptor is readable anyway.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof(one));
  }
  void clear() noexcept {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = read(fd_, &count, sizeof(count));
  }
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace ull
