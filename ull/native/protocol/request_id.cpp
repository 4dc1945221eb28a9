#include "protocol/request_id.h"

#include <algorithm>
#include <bit>
#include <string_view>

namespace ull {
namespace {

constexpr int kMostValues = 1024;  // looked at before the search is given up
constexpr std::string_view kKey = "id";

// Reads msgpack forwards; `ok` turns false at the end of the input.
struct Cursor {
  std::span<const uint8_t> left;
  bool ok = true;

  uint64_t number(size_t bytes) noexcept {  // big endian
    uint64_t value = 0;
    for (const uint8_t byte : skip(bytes)) value = value << 8 | byte;
    return value;
  }
  std::span<const uint8_t> skip(uint64_t bytes) noexcept {
    if (!ok || bytes > left.size()) {
      ok = false;
      return {};
    }
    const auto skipped = left.first(static_cast<size_t>(bytes));
    left = left.subspan(static_cast<size_t>(bytes));
    return skipped;
  }
};

// What one value's head says: how many bytes of it follow, and how many further values.
struct Head {
  uint64_t bytes = 0;
  uint64_t values = 0;
  bool integer = false;  // not negative, or of `bytes` bytes
  uint64_t small = 0;    // an integer within the head
  bool text = false;
  bool real = false;  // of `bytes` bytes
};

constexpr double kMaxExact = 9007199254740992.0;  // 2^53; beyond it neighbouring integers are the same float

// The value of a float's bits, if it is an integer from 0 to kMaxExact.
bool integral(uint64_t bits, uint64_t bytes, uint64_t& id) noexcept {
  const double value =
      bytes == 8 ? std::bit_cast<double>(bits) : static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  if (!(value >= 0 && value <= kMaxExact)) return false;
  id = static_cast<uint64_t>(value);
  return static_cast<double>(id) == value;
}

Head head(Cursor& in) noexcept {
  const auto tag = static_cast<uint8_t>(in.number(1));
  if (tag < 0x80) return {.integer = true, .small = tag};
  if (tag < 0x90) return {.values = uint64_t{tag & 0x0FU} * 2};
  if (tag < 0xA0) return {.values = tag & 0x0FU};
  if (tag < 0xC0) return {.bytes = tag & 0x1FU, .text = true};
  if (tag >= 0xE0) return {};
  switch (tag) {
    case 0xC4:
    case 0xC5:
    case 0xC6:
      return {.bytes = in.number(size_t{1} << (tag - 0xC4))};
    case 0xC7:
    case 0xC8:
    case 0xC9:
      return {.bytes = in.number(size_t{1} << (tag - 0xC7)) + 1};
    case 0xCA:
    case 0xCB:
      return {.bytes = uint64_t{4} << (tag - 0xCA), .real = true};
    case 0xCC:
    case 0xCD:
    case 0xCE:
    case 0xCF:
      return {.bytes = uint64_t{1} << (tag - 0xCC), .integer = true};
    case 0xD0:
    case 0xD1:
    case 0xD2:
    case 0xD3:
      return {.bytes = uint64_t{1} << (tag - 0xD0)};
    case 0xD4:
    case 0xD5:
    case 0xD6:
    case 0xD7:
    case 0xD8:
      return {.bytes = (uint64_t{1} << (tag - 0xD4)) + 1};
    case 0xD9:
    case 0xDA:
    case 0xDB:
      return {.bytes = in.number(size_t{1} << (tag - 0xD9)), .text = true};
    case 0xDC:
    case 0xDD:
      return {.values = in.number(size_t{2} << (tag - 0xDC))};
    case 0xDE:
    case 0xDF:
      return {.values = in.number(size_t{2} << (tag - 0xDE)) * 2};
    default:
      return {};  // nil, false, true
  }
}

}  // namespace

bool find_request_id(std::span<const uint8_t> payload, uint64_t& id) noexcept {
  Cursor in{payload};
  if (payload.empty() || !((payload[0] & 0xF0) == 0x80 || payload[0] == 0xDE || payload[0] == 0xDF)) return false;
  uint64_t members = head(in).values / 2;
  int budget = kMostValues;
  for (; in.ok && members > 0 && budget > 0; --members) {
    const Head key = head(in);
    const std::span<const uint8_t> name = in.skip(key.bytes);
    const bool found = key.text && std::equal(name.begin(), name.end(), kKey.begin(), kKey.end());
    if (key.values > 0) return false;
    uint64_t values = 1;  // still to be skipped, nested ones included
    for (; in.ok && values > 0 && budget > 0; --values, --budget) {
      const Head value = head(in);
      if (found && value.real) {
        const uint64_t bits = in.number(static_cast<size_t>(value.bytes));
        return in.ok && integral(bits, value.bytes, id);
      }
      if (found) {
        id = value.bytes > 0 && value.integer ? in.number(static_cast<size_t>(value.bytes)) : value.small;
        return in.ok && value.integer;
      }
      (void)in.skip(value.bytes);
      if (value.values > payload.size()) return false;
      values += value.values;
    }
  }
  return false;
}

}  // namespace ull
