// The service manager's notification protocol (sd_notify(3)), without libsystemd.
#pragma once

#include <cstdint>
#include <string_view>

namespace ull {

// Sends one datagram ("READY=1", "WATCHDOG=1", ...) to $NOTIFY_SOCKET. False if there is none or it cannot be reached,
// or this process is not the service yet.
bool notify_service_manager(std::string_view state) noexcept;

// From now on this process is not the service (it is to succeed one that runs), or it is.
void be_the_service(bool is) noexcept;

// Writes one line to standard error, its end added, if that does not wait: for threads that must not.
void complain(std::string_view line) noexcept;

// The watchdog period that the service manager asks of this process, in microseconds; 0 if it asks for none
// ($WATCHDOG_USEC, and $WATCHDOG_PID where set).
[[nodiscard]] int64_t service_watchdog_usec() noexcept;

}  // namespace ull
