// Memory whose size a setting decides: where there is not as much, the error names the setting and the size. For load
// time only.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace ull {

// For people, in powers of ten: "6.6 TB".
[[nodiscard]] std::string describe_bytes(double bytes);

// Throws std::runtime_error: "SETTING: WHAT: 6.6 TB cannot be allocated (this machine has 24.1 GB)".
[[noreturn]] void throw_not_allocated(const std::string& what, double bytes);

// Throws as above if the machine has less memory than `bytes`; the kernel may promise it all the same.
void check_machine_has(const std::string& what, double bytes);

// Returns what `make` does, which allocates about `bytes`. `what` begins with the setting's name and a colon.
template <typename Make>
decltype(auto) allocate_for(const std::string& what, double bytes, Make&& make) {
  check_machine_has(what, bytes);
  try {
    return std::forward<Make>(make)();
  } catch (const std::bad_alloc&) {
    throw_not_allocated(what, bytes);
  }
}

}  // namespace ull
