#include "engine/vocabulary.h"

#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace ull {
namespace {

static_assert(std::endian::native == std::endian::little, "bundles are little endian");

constexpr std::string_view kMagic = "ULLVOCAB";
constexpr uint32_t kVersion = 1;
constexpr uint8_t kSpecial = 1;  // flag bit 0

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw std::runtime_error(path + ": " + reason + "; rebuild the bundle with ull-build");
}

uint32_t read_u32(const std::vector<uint8_t>& file, size_t offset) {
  uint32_t value = 0;
  std::memcpy(&value, file.data() + offset, sizeof(value));
  return value;
}

}  // namespace

Vocabulary::Vocabulary(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) refuse(path, "cannot be opened");
  const std::vector<uint8_t> file{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};

  const size_t header = kMagic.size() + 2 * sizeof(uint32_t);
  if (file.size() < header || std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    refuse(path, "not a vocabulary file");
  }
  const uint32_t version = read_u32(file, kMagic.size());
  if (version != kVersion) refuse(path, "version " + std::to_string(version) + ", expected 1");
  const uint64_t count = read_u32(file, kMagic.size() + sizeof(uint32_t));
  const uint64_t flags = header + (count + 1) * sizeof(uint32_t);
  const uint64_t data = flags + count;
  if (count == 0 || file.size() < data) refuse(path, "truncated");

  pieces_.reserve(count);
  uint32_t start = read_u32(file, header);
  if (start != 0) refuse(path, "offset 0 is not zero");
  for (uint64_t token = 0; token < count; ++token) {
    const uint32_t end = read_u32(file, header + (token + 1) * sizeof(uint32_t));
    if (end < start) refuse(path, "offsets of token " + std::to_string(token) + " run backwards");
    const bool special = (file[flags + token] & kSpecial) != 0;
    pieces_.push_back({start, special ? 0 : end - start});
    if (pieces_.back().length > longest_) longest_ = pieces_.back().length;
    start = end;
  }
  if (file.size() != data + start) refuse(path, "truncated or followed by foreign bytes");
  bytes_.assign(file.begin() + static_cast<std::ptrdiff_t>(data), file.end());
}

}  // namespace ull
