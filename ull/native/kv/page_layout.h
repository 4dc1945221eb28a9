// How one KV page lies in memory. A page holds the keys and values of kPageTokens tokens for every layer; pages lie
// behind one another in one pool: [page][layer][keys | values].
//
// Both halves are stored as row tiles of 32, like weights (cpu/kernels/kernels.h), so that scores and weighted sums are
// the same products as every linear layer: keys [kv_head][token / 32][head_dim][32 tokens], rows = tokens; values
// [kv_head][head_dim / 32][64 tokens][32 dims], rows = dims (padded with zeros to a multiple of 32). bf16 elements are
// interleaved within the 32 as weights are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv/page.h"

namespace ull {

struct PageLayout {
  static constexpr int kTokens = kPageTokens;
  static constexpr int kTile = 32;

  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  size_t element_bytes = 0;  // 2: bf16, 4: f32

  [[nodiscard]] constexpr int value_tiles() const noexcept { return (head_dim + kTile - 1) / kTile; }
  [[nodiscard]] constexpr size_t key_head_bytes() const noexcept {
    return static_cast<size_t>(kTokens) * static_cast<size_t>(head_dim) * element_bytes;
  }
  [[nodiscard]] constexpr size_t value_head_bytes() const noexcept {
    return static_cast<size_t>(kTokens) * static_cast<size_t>(value_tiles() * kTile) * element_bytes;
  }
  [[nodiscard]] constexpr size_t layer_bytes() const noexcept {
    return static_cast<size_t>(kv_heads) * (key_head_bytes() + value_head_bytes());
  }
  [[nodiscard]] constexpr size_t page_bytes() const noexcept { return static_cast<size_t>(layers) * layer_bytes(); }

  // Byte offsets in the pool.
  [[nodiscard]] constexpr size_t key_offset(int page, int layer, int kv_head) const noexcept {
    return static_cast<size_t>(page) * page_bytes() + static_cast<size_t>(layer) * layer_bytes() +
           static_cast<size_t>(kv_head) * key_head_bytes();
  }
  [[nodiscard]] constexpr size_t value_offset(int page, int layer, int kv_head) const noexcept {
    return static_cast<size_t>(page) * page_bytes() + static_cast<size_t>(layer) * layer_bytes() +
           static_cast<size_t>(kv_heads) * key_head_bytes() + static_cast<size_t>(kv_head) * value_head_bytes();
  }

  // Position of row r (0..31) among a tile's 32 elements.
  [[nodiscard]] constexpr int tile_position(int row) const noexcept {
    return element_bytes == 4 ? row : row < kTile / 2 ? 2 * row : 2 * (row - kTile / 2) + 1;
  }
};

}  // namespace ull
