// SIGTERM, SIGINT and SIGHUP, heard by the process itself and not by Python: a thread of ours ends the process when its
// time is up, even if no other thread does anything any more.
#pragma once

#include <cstdint>

namespace ull {

class Termination {
 public:
  // Takes the signals over, for as long as the process lives, and starts the thread. One per process; a second object
  // is another view of the same. Throws std::system_error.
  Termination();

  // SIGTERMs and SIGINTs so far.
  [[nodiscard]] uint32_t asked() const noexcept;
  [[nodiscard]] uint32_t hangups() const noexcept;  // SIGHUPs so far
  [[nodiscard]] int last_signal() const noexcept;   // of asked(); 0: none
  // Readable after a signal, until clear().
  [[nodiscard]] int fd() const noexcept;
  void clear() noexcept;

  // What the first SIGTERM or SIGINT leaves the process, and what the second does: it then ends with `status`. Holds
  // for signals that have come, too.
  void set_patience(int64_t first_ms, int64_t second_ms, int status) noexcept;
  // The process ends with `status` in `time_ms` at the latest, unless it does so earlier by itself.
  void end_within(int64_t time_ms, int status) noexcept;
};

}  // namespace ull
