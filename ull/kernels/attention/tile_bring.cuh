// How a tile of the pages becomes f16 operands in shared memory: by four warps, each of which loads what mma() would
// have for b in its lanes, turns it, and stores each register of b as a core matrix.
#pragma once

#include "attention/attention_values.cuh"
#include "attention/tiles.cuh"
#include "linear/activations.cuh"

namespace ull::gpu {

// A warp's part of a tile: every fourth group of positions, or of dimensions.
struct KeyTile {
  arch::Vector4 loaded[kTileGroups / 4][kKeySteps];
};
struct ValueTile {
  arch::Vector4 loaded[kDimGroups / 4][kTileUnits];
};

ULL_DEVICE int group_of(int i) { return arch::warp() % 4 + 4 * i; }

// keys: a page's of the kv head, [64][head_dim].
ULL_DEVICE void load_tile(KeyTile& tile, const unsigned char* keys) {
  const int g = arch::lane() / 4, t = arch::lane() % 4;
#pragma unroll
  for (int i = 0; i < kTileGroups / 4; ++i) {
    const unsigned char* key = keys + (column_position(group_of(i), g / 2) + g % 2) * (kHeadDim * kKvBytes);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) tile.loaded[i][step] = arch::load_global(key + key_offset(step, t));
  }
}

// values: a page's of the kv head, [head_dim][64].
ULL_DEVICE void load_tile(ValueTile& tile, const unsigned char* values) {
  const int g = arch::lane() / 4, t = arch::lane() % 4;
#pragma unroll
  for (int i = 0; i < kDimGroups / 4; ++i) {
    const unsigned char* value = values + (8 * group_of(i) + g) * (kPageTokens * kKvBytes) + 16 * t;
#pragma unroll
    for (int unit = 0; unit < kTileUnits; ++unit) tile.loaded[i][unit] = arch::load_global(value + 64 * unit);
  }
}

// One register of each lane as a core matrix: lane 4c + t has elements 2t and 2t + 1 of column c.
ULL_DEVICE void store_core(unsigned char* core, uint32_t pair) {
  reinterpret_cast<uint32_t*>(core)[arch::lane()] = pair;
}

ULL_DEVICE void store_tile(unsigned char* slot, KeyTile& tile) {
#pragma unroll
  for (int i = 0; i < kTileGroups / 4; ++i) {
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      prepare(tile.loaded[i][step]);
#pragma unroll
      for (int m = 0; m < kKeyProducts; ++m) {
        uint32_t b[2];
        key_operand(b, tile.loaded[i][step], m, arch::lane() % 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store_core(key_core(slot, step * kKeyProducts + m, half, group_of(i)), b[half]);
        }
      }
    }
  }
}

// Two values, at `position` and the one behind it: 0 instead of NaN within the chunk, and of anything behind it. They
// are also multiplied with the probabilities 0 of rows that do not see them, which must not notice: see store_tree().
ULL_DEVICE uint32_t seen_values(uint32_t pair, int position, const ChunkExtent& chunk) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = position + i - chunk.base;
    const bool is_nan = (pair >> (16 * i) & 0x7FFFU) > 0x7C00U;
    if (index >= chunk.count || (index >= 0 && is_nan)) pair &= 0xFFFF0000U >> (16 * i);
  }
  return pair;
}

// position: the tile's first one; kReaches: the tile has positions of the chunk, or behind it.
template <bool kReaches>
ULL_DEVICE void store_tile(unsigned char* slot, ValueTile& tile, int position, const ChunkExtent& chunk) {
#pragma unroll
  for (int i = 0; i < kDimGroups / 4; ++i) {
#pragma unroll
    for (int unit = 0; unit < kTileUnits; ++unit) {
      prepare(tile.loaded[i][unit]);
#pragma unroll
      for (int m = 0; m < kKvProducts; ++m) {
        uint32_t b[2];
        operand(b, tile.loaded[i][unit], m);
        const int first = position + unit * kValueUnit + 4 * kKvProducts * (arch::lane() % 4) + 4 * m;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (kReaches) b[half] = seen_values(b[half], first + 2 * half, chunk);
          store_core(value_core(slot, unit * kKvProducts + m, half, group_of(i)), b[half]);
        }
      }
    }
  }
}

// Brings tiles [first, end) of a kv head, of which there is at least one. By the four warps of a warpgroup. Each part's
// registers are loaded again as soon as it is stored, and behind the fence, which may wait for loads: so the next
// tile's keys come while values are stored, and its values while keys are. What is cached may be brought before the
// wait for the predecessor, which does not write it. kOfChunk: tiles may reach the chunk, whose keys and values it does
// write; before the first of these tiles is loaded, the warps wait.
template <bool kOfChunk, typename Params, typename Ring>
ULL_DEVICE void bring_tiles(const Params& params, int kv_head, int first, int end, const ChunkExtent& chunk,
                            const Ring& ring) {
  const int last = end - 1;
  const auto* pool = static_cast<const unsigned char*>(params.page_pool) + params.layer_offset + kv_head * kKvHeadBytes;
  const auto keys_of = [&](uint32_t page) { return pool + int64_t{page} * params.page_bytes; };
  const auto page_of = [&](int tile) {
    const int at = smaller(tile, last);
    return word_of(arch::load_global(params.pages + at / kSplitTiles * kSplitTiles), at % kSplitTiles);
  };
  const int reaching = kOfChunk ? chunk.base / kPageTokens : end;  // the first tile that has positions of the chunk
  if (kOfChunk && first >= reaching) arch::wait_for_predecessor();
  uint32_t page = page_of(first), next_page = page_of(first + 1);
  KeyTile keys;
  ValueTile values;
  load_tile(keys, keys_of(page));
  load_tile(values, keys_of(page) + kKvLayerBytes / 2);
#pragma unroll 1
  for (int tile = first; tile <= last; ++tile) {  // nobody stores what is loaded behind the last one
    const int item = 2 * (tile - first), position = tile * kPageTokens;
    page = next_page;
    next_page = page_of(tile + 2);
    ring.wait_empty(item);
    store_tile(ring.slot(item), keys);
    ring.publish(item);
    if (kOfChunk && tile + 1 == reaching) arch::wait_for_predecessor();
    load_tile(keys, keys_of(page));
    ring.wait_empty(item + 1);
    if (kOfChunk && position + kPageTokens > chunk.base) {
      store_tile<true>(ring.slot(item + 1), values, position, chunk);
    } else {
      store_tile<false>(ring.slot(item + 1), values, position, chunk);
    }
    ring.publish(item + 1);
    load_tile(values, keys_of(page) + kKvLayerBytes / 2);
  }
}

}  // namespace ull::gpu
