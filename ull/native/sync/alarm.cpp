#include "sync/alarm.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ull {

Alarm::Alarm() : fd_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "timerfd_create");
}

Alarm::~Alarm() { close(fd_); }

void Alarm::set(int64_t time_ns) noexcept {
  itimerspec when{};
  when.it_value.tv_sec = time_ns / 1'000'000'000;
  when.it_value.tv_nsec = time_ns % 1'000'000'000;
  timerfd_settime(fd_, TFD_TIMER_ABSTIME, &when, nullptr);  // cannot fail: the fd and the time are valid
}

}  // namespace ull
