#include "base/allocation.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <stdexcept>

namespace ull {
namespace {

double machine_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

}  // namespace

std::string describe_bytes(double bytes) {
  constexpr std::array kUnits{"bytes", "kB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  for (; bytes >= 1000.0 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000.0;
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return text.data();
}

void throw_not_allocated(const std::string& what, double bytes) {
  throw std::runtime_error(what + ": " + describe_bytes(bytes) + " cannot be allocated (this machine has " +
                           describe_bytes(machine_bytes()) + ", and limits like `ulimit -v` and -l may leave less)");
}

void check_machine_has(const std::string& what, double bytes) {
  if (bytes > machine_bytes()) throw_not_allocated(what, bytes);
}

}  // namespace ull
