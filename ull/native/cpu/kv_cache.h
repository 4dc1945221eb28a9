// The KV pages of all sequences, one pool allocated and touched at construction (layout: kv/page_layout.h). Behind them
// may lie one more, the tree page: slot i holds node i of the draft tree that is being verified.
//
// A model whose pages are FP8 on a GPU has them in bf16 here, each number rounded to what FP8 would hold: an E4M3
// number times a power of two, which bf16 holds as it is.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/aligned.h"
#include "base/allocation.h"
#include "cpu/e4m3.h"
#include "cpu/kernels/kernels.h"
#include "kv/page_layout.h"

namespace ull::cpu {

// Rounds to bf16, nearest even; NaN stays NaN.
[[nodiscard]] inline uint16_t round_to_bf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>(bits >> 16 | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

// The units in which FP8 pages keep a head's keys and values, powers of two; 0: they are kept as they are.
struct KvScale {
  float key = 0.0F;
  float value = 0.0F;
};

[[nodiscard]] inline float kept_in(float scale, float value) noexcept {
  return scale == 0.0F ? value : round_to_e4m3(value / scale) * scale;
}

class KvCache {
 public:
  KvCache(const PageLayout& layout, int pages, Format format, bool trees = false)
      : layout_(layout),
        format_(format),
        pages_(pages),
        pool_(allocate(static_cast<size_t>(pages), trees ? 1 : 0, layout.page_bytes())) {}

  [[nodiscard]] int pages() const noexcept { return pages_; }
  [[nodiscard]] int tree_page() const noexcept { return pages_; }
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

  // One token's values in value tile `tile`: [32 dims].
  [[nodiscard]] const uint8_t* value_row(int page, int layer, int kv_head, int tile, int slot) const noexcept {
    return values(page, layer, kv_head, tile) + static_cast<size_t>(slot) * value_row_bytes();
  }
  [[nodiscard]] size_t value_row_bytes() const noexcept { return PageLayout::kTile * layout_.element_bytes; }

  // Copies one token's keys and values, all layers, from one slot to another.
  void copy_token(int from_page, int from_slot, int to_page, int to_slot) noexcept {
    const size_t element = layout_.element_bytes;
    const auto key_index = [&](int slot) {
      return static_cast<size_t>(slot / PageLayout::kTile * layout_.head_dim * PageLayout::kTile +
                                 layout_.tile_position(slot % PageLayout::kTile));
    };
    for (int layer = 0; layer < layout_.layers; ++layer) {
      for (int head = 0; head < layout_.kv_heads; ++head) {
        const uint8_t* from =
            pool_.data() + layout_.key_offset(from_page, layer, head) + key_index(from_slot) * element;
        uint8_t* to = pool_.data() + layout_.key_offset(to_page, layer, head) + key_index(to_slot) * element;
        for (int d = 0; d < layout_.head_dim; ++d) {
          const size_t offset = static_cast<size_t>(d) * PageLayout::kTile * element;
          std::memcpy(to + offset, from + offset, element);
        }
        for (int tile = 0; tile < layout_.value_tiles(); ++tile) {
          uint8_t* row = pool_.data() + layout_.value_offset(to_page, layer, head) +
                         static_cast<size_t>(tile * PageLayout::kTokens + to_slot) * value_row_bytes();
          std::memcpy(row, value_row(from_page, layer, head, tile, from_slot), value_row_bytes());
        }
      }
    }
  }

  // Copies the first `count` (1 .. 64) tokens' keys and values, all layers, from one page to another. Keys are copied
  // by whole tiles: what lies behind the tokens in either page is nobody's.
  void copy_page(int from_page, int to_page, int count) noexcept {
    constexpr int kTiles = PageLayout::kTokens / PageLayout::kTile;
    const size_t tiles = static_cast<size_t>((count + PageLayout::kTile - 1) / PageLayout::kTile);
    const size_t key_bytes = tiles * layout_.key_head_bytes() / kTiles;
    for (int layer = 0; layer < layout_.layers; ++layer) {
      for (int head = 0; head < layout_.kv_heads; ++head) {
        std::memcpy(pool_.data() + layout_.key_offset(to_page, layer, head),
                    pool_.data() + layout_.key_offset(from_page, layer, head), key_bytes);
        for (int tile = 0; tile < layout_.value_tiles(); ++tile) {
          uint8_t* rows = pool_.data() + layout_.value_offset(to_page, layer, head) +
                          static_cast<size_t>(tile * PageLayout::kTokens) * value_row_bytes();
          std::memcpy(rows, values(from_page, layer, head, tile), static_cast<size_t>(count) * value_row_bytes());
        }
      }
    }
  }

  // Stores one token's key and value ([head_dim] each) in slot `slot` (0..63) of a page.
  void write(int page, int layer, int kv_head, int slot, const float* key, const float* value, KvScale scale) noexcept {
    uint8_t* keys_to = pool_.data() + layout_.key_offset(page, layer, kv_head);
    uint8_t* values_to = pool_.data() + layout_.value_offset(page, layer, kv_head);
    const int tile = slot / PageLayout::kTile;
    const int position = layout_.tile_position(slot % PageLayout::kTile);
    for (int d = 0; d < layout_.head_dim; ++d) {
      put(keys_to, (tile * layout_.head_dim + d) * PageLayout::kTile + position, kept_in(scale.key, key[d]));
      put(values_to,
          (d / PageLayout::kTile * PageLayout::kTokens + slot) * PageLayout::kTile +
              layout_.tile_position(d % PageLayout::kTile),
          kept_in(scale.value, value[d]));
    }
  }

 private:
  static AlignedArray<uint8_t> allocate(size_t pages, size_t more, size_t page_bytes) {
    const double bytes = static_cast<double>(pages + more) * static_cast<double>(page_bytes);
    const std::string what = std::to_string(pages) + " pages of " + describe_bytes(static_cast<double>(page_bytes));
    return allocate_for("kv_pages: " + what, bytes, [&] { return AlignedArray<uint8_t>((pages + more) * page_bytes); });
  }

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
