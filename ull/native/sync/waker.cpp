#include "sync/waker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ull {

Waker::Waker() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Waker::~Waker() { close(fd_); }

void Waker::signal() noexcept {
  const uint64_t one = 1;
  // Can only fail if the counter is at 2^64 - 2, and then the fd is readable anyway.
  [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof(one));
}

void Waker::wait() noexcept {
  pollfd item{fd_, POLLIN, 0};
  while (poll(&item, 1, -1) < 0 && errno == EINTR) {
  }
}

void Waker::awake() noexcept {
  (void)state_.exchange(kAwake, std::memory_order_acq_rel);
  // Whoever has withdrawn the announcement may write only after this read, which finds nothing then: its signal ends
  // the next sleep at once, and the read after that takes it away. Were it not for every sleep to end in a read, the
  // descriptor would stay readable and no sleep would last again.
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = read(fd_, &count, sizeof(count));
}

}  // namespace ull
