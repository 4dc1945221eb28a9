#include "engine/stops.h"

namespace ull {

bool StopSet::add(std::string_view stop) noexcept {
  if (stop.empty() || stop.size() > kMaxStopBytes || count_ == kMaxStops) return false;
  auto& bytes = bytes_[static_cast<size_t>(count_)];
  auto& borders = borders_[static_cast<size_t>(count_)];
  for (size_t i = 0; i < stop.size(); ++i) bytes[i] = stop[i];
  borders[0] = 0;
  for (size_t i = 1; i < stop.size(); ++i) {
    uint16_t border = borders[i - 1];
    while (border > 0 && bytes[i] != bytes[border]) border = borders[border - 1U];
    borders[i] = static_cast<uint16_t>(border + (bytes[i] == bytes[border] ? 1 : 0));
  }
  lengths_[static_cast<size_t>(count_)] = static_cast<uint16_t>(stop.size());
  ++count_;
  return true;
}

void StopMatcher::reset(const StopSet* stops) noexcept {
  stops_ = stops;
  matched_.fill(0);
  held_ = 0;
  holder_ = 0;
}

}  // namespace ull
