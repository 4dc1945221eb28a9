#include "engine/vocabulary.h"

#include <algorithm>
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
constexpr uint32_t kVersion = 2;
constexpr uint8_t kSpecial = 1;    // flag bit 0
constexpr uint8_t kByteToken = 2;  // flag bit 1
constexpr uint32_t kFirstTokens = 0xFFFF'FFFF;
constexpr uint32_t kLongestPiece = (1U << 30) - 1;  // bytes

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw std::runtime_error(path + ": " + reason + "; rebuild the bundle with ull-build");
}

uint32_t read_u32(const std::vector<uint8_t>& file, size_t offset) {
  uint32_t value = 0;
  std::memcpy(&value, file.data() + offset, sizeof(value));
  return value;
}

PieceKind kind_of(uint8_t flags, std::string_view bytes) {
  if ((flags & kSpecial) != 0) return PieceKind::kSkipped;
  if ((flags & kByteToken) != 0) return PieceKind::kByteToken;
  Utf8Scanner scanner;
  const bool valid =
      std::all_of(bytes.begin(), bytes.end(), [&](char byte) { return scanner.accept(static_cast<uint8_t>(byte)); });
  return valid && scanner.whole() ? PieceKind::kText : PieceKind::kBytes;
}

}  // namespace

Vocabulary::Vocabulary(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) refuse(path, "cannot be opened");
  const std::vector<uint8_t> file{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};

  const size_t header = kMagic.size() + 3 * sizeof(uint32_t);
  if (file.size() < header || std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    refuse(path, "not a vocabulary file");
  }
  const uint32_t version = read_u32(file, kMagic.size());
  if (version != kVersion) refuse(path, "version " + std::to_string(version) + ", expected 2");
  const uint64_t count = read_u32(file, kMagic.size() + sizeof(uint32_t));
  leading_.count = read_u32(file, kMagic.size() + 2 * sizeof(uint32_t));
  leading_.first_token_only = leading_.count == kFirstTokens;
  const uint64_t flags = header + (count + 1) * sizeof(uint32_t);
  const uint64_t data = flags + count;
  if (count == 0 || file.size() < data) refuse(path, "truncated");

  entries_.reserve(count);
  uint32_t start = read_u32(file, header);
  if (start != 0) refuse(path, "offset 0 is not zero");
  for (uint64_t token = 0; token < count; ++token) {
    const auto name = [&] { return "token " + std::to_string(token); };
    const uint32_t end = read_u32(file, header + (token + 1) * sizeof(uint32_t));
    if (end < start) refuse(path, "offsets of " + name() + " run backwards");
    if (file.size() < data + end) refuse(path, "truncated or followed by foreign bytes");
    const uint32_t length = end - start;
    if (length > kLongestPiece) refuse(path, name() + " is too long");
    const auto* const bytes = reinterpret_cast<const char*>(file.data() + data + start);
    const PieceKind kind = kind_of(file[flags + token], {bytes, length});
    if (kind == PieceKind::kByteToken && length != 1) refuse(path, name() + " is a byte token, but not one byte");
    entries_.push_back({start, kind == PieceKind::kSkipped ? 0 : length, static_cast<uint32_t>(kind)});
    longest_ = std::max<size_t>(longest_, entries_.back().length);
    start = end;
  }
  if (file.size() != data + start) refuse(path, "truncated or followed by foreign bytes");
  bytes_.assign(file.begin() + static_cast<std::ptrdiff_t>(data), file.end());
}

LeadingSpaces Vocabulary::leading_spaces(std::span<const int32_t> prompt) const noexcept {
  if (leading_.count == 0) return {};
  StopSet none;
  TextAssembler text;
  NoText nowhere;
  text.reset(&none, leading_);
  for (const int32_t token : prompt) {
    text.feed(piece(token), nowhere);
    if (text.leading_spaces().count == 0) return {};
  }
  text.finish(nowhere);
  return text.leading_spaces();
}

}  // namespace ull
