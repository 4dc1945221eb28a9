// The KV pages of all sessions, one pool allocated and touched at construction (layout: kv/page_layout.h).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/aligned.h"
#include "exec/cpu/kernels.h"
#include "kv/page_layout.h"

namespace ull::cpu {

// Rounds to bf16, nearest even; NaN stays NaN.
[[nodiscard]] inline uint16_t round_to_bf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>(bits >> 16 | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

class KvCache {
 public:
  KvCache(const PageLayout& layout, int pages, Format format)
      : layout_(layout), format_(format), pages_(pages), pool_(static_cast<size_t>(pages) * layout.page_bytes()) {}

  [[nodiscard]] int pages() const noexcept { return pages_; }
  [[nodiscard]] int layers() const noexcept { return layout_.layers; }
  [[nodiscard]] Format format() const noexcept { return format_; }
  [[nodiscard]] int64_t bytes() const noexcept { return static_cast<int64_t>(pool_.size()); }

  // Tile `tile` of a page's keys: [head_dim][32 tokens].
  [[nodiscard]] const uint8_t* keys(int page, int layer, int kv_head, int tile) const noexcept {
    return pool_.data() + layout_.key_offset(page, layer, kv_head) +
           static_cast<size_t>(tile) * layout_.key_head_bytes() / (PageLayout::kTokens / PageLayout::kTile);
  }
  // Tile `tile` of a page's values: [64 tokens][32 dims].
  [[nodiscard]] const uint8_t* values(int page, int layer, int kv_head, int tile) const noexcept {
    return pool_.data() + layout_.value_offset(page, layer, kv_head) +
           static_cast<size_t>(tile) * PageLayout::kTokens * PageLayout::kTile * layout_.element_bytes;
  }

  // Stores one token's key and value ([head_dim] each) in slot `slot` (0..63) of a page.
  void write(int page, int layer, int kv_head, int slot, const float* key, const float* value) noexcept {
    uint8_t* keys_to = pool_.data() + layout_.key_offset(page, layer, kv_head);
    uint8_t* values_to = pool_.data() + layout_.value_offset(page, layer, kv_head);
    const int tile = slot / PageLayout::kTile;
    const int position = layout_.tile_position(slot % PageLayout::kTile);
    for (int d = 0; d < layout_.head_dim; ++d) {
      put(keys_to, (tile * layout_.head_dim + d) * PageLayout::kTile + position, key[d]);
      put(values_to,
          (d / PageLayout::kTile * PageLayout::kTokens + slot) * PageLayout::kTile +
              layout_.tile_position(d % PageLayout::kTile),
          value[d]);
    }
  }

 private:
  void put(uint8_t* to, int index, float value) const noexcept {
    if (format_ == Format::kBf16) {
      const uint16_t rounded = round_to_bf16(value);
      std::memcpy(to + static_cast<size_t>(index) * 2, &rounded, sizeof(rounded));
    } else {
      std::memcpy(to + static_cast<size_t>(index) * 4, &value, sizeof(value));
    }
  }

  PageLayout layout_;
  Format format_;
  int pages_;
  AlignedArray<uint8_t> pool_;  // [pages] x page_bytes
};

}  // namespace ull::cpu
