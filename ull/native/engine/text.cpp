#include "engine/text.h"

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

int StopSet::step(int index, int matched, uint8_t byte) const noexcept {
  const auto& bytes = bytes_[static_cast<size_t>(index)];
  const auto& borders = borders_[static_cast<size_t>(index)];
  const char next = static_cast<char>(byte);
  while (matched > 0 && next != bytes[static_cast<size_t>(matched)]) {
    matched = borders[static_cast<size_t>(matched) - 1];
  }
  return matched + (next == bytes[static_cast<size_t>(matched)] ? 1 : 0);
}

void StopMatcher::reset(const StopSet* stops) noexcept {
  stops_ = stops;
  matched_.fill(0);
  held_ = 0;
  holder_ = 0;
}

void Utf8Repair::feed(uint8_t byte, TextBuffer& out) noexcept {
  if (pending_ == 0) {
    begin(byte, out);
    return;
  }
  if (byte < low_ || byte > high_) {
    out.append(kReplacement.data(), kReplacement.size());
    pending_ = 0;
    begin(byte, out);
    return;
  }
  bytes_[static_cast<size_t>(pending_++)] = static_cast<char>(byte);
  low_ = 0x80;
  high_ = 0xBF;
  if (pending_ == needed_) {
    out.append(bytes_.data(), static_cast<size_t>(needed_));
    pending_ = 0;
  }
}

void Utf8Repair::finish(TextBuffer& out) noexcept {
  if (pending_ > 0) out.append(kReplacement.data(), kReplacement.size());
  pending_ = 0;
}

// The first byte of a character fixes its length and the range of its second byte (Unicode 15, table 3-7).
void Utf8Repair::begin(uint8_t byte, TextBuffer& out) noexcept {
  const char character = static_cast<char>(byte);
  if (byte < 0x80) {
    out.append(&character, 1);
    return;
  }
  if (byte < 0xC2 || byte > 0xF4) {
    out.append(kReplacement.data(), kReplacement.size());
    return;
  }
  bytes_[0] = character;
  pending_ = 1;
  needed_ = byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
  low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
}

void TextAssembler::reset(const StopSet* stops) noexcept {
  matcher_.reset(stops);
  repair_.reset();
  stopped_ = false;
}

bool TextAssembler::feed(std::span<const uint8_t> bytes, TextBuffer& out) noexcept {
  for (const uint8_t byte : bytes) {
    if (stopped_) break;
    stopped_ = matcher_.feed(byte, [&](uint8_t text) { repair_.feed(text, out); });
  }
  return stopped_;
}

void TextAssembler::finish(TextBuffer& out) noexcept {
  matcher_.finish([&](uint8_t text) { repair_.feed(text, out); });
  repair_.finish(out);
}

}  // namespace ull
