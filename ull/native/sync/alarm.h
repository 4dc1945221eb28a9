// A file descriptor that becomes readable at a set time: ends a poll() with nanosecond resolution.
#pragma once

#include <cstdint>

namespace ull {

class Alarm {
 public:
  Alarm();  // throws std::system_error if the process has no file descriptors left
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Readable from `time_ns` (monotonic_ns()) on; an earlier setting is forgotten.
  void set(int64_t time_ns) noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace ull
