// The cpu executor's arithmetic, as a table of functions: one table per instruction set, all from the same templates
// (kernels_*.h), all with the same bits. Every output element is one chain of fused multiply-adds in ascending order;
// vector lanes hold different output elements; sums over lanes use a fixed tree.
//
// Matrices are stored in row tiles of 32: element (tile, k, p) is weight row 32 tile + row(p), column k, with
// row(2i) = i and row(2i + 1) = 16 + i for kF8 and kBf16 (so that a shift and a mask yield rows 0..15 and 16..31), and
// row(p) = p for kF32. kF8 products come out multiplied by 2^-120: the caller multiplies x by kF8InputScale and the
// result by kF8OutputScale, both exact.
//
// Activations x are packed in panels of up to kMaxPanel tokens: [panel][k][width]. Sums are [token][32].
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ull::cpu {

inline constexpr int kLanes = 16;
inline constexpr int kTileRows = 32;
inline constexpr int kMaxPanel = 12;      // tokens whose sums for one tile stay in registers
inline constexpr int kMaxTileGroup = 4;   // tiles that one call multiplies with one token
inline constexpr int kPageKeys = 64;      // keys per KV page (kPageTokens)
inline constexpr int kNormPartials = 64;  // partial sums of a norm

inline constexpr float kF8InputScale = 0x1.0p64F;
inline constexpr float kF8OutputScale = 0x1.0p56F;

enum class Format : uint8_t { kF8, kBf16, kF32 };
inline constexpr int kFormats = 3;

[[nodiscard]] constexpr size_t format_bytes(Format format) noexcept {
  return format == Format::kF8 ? 1 : format == Format::kBf16 ? 2 : 4;
}

// sums[tile][token][32] (+)= weights[tile][k][32] * x[k][token] for k ascending in [0, count). `resume` continues the
// chains in sums. tile_bytes and sums_tile (floats) are the distances between a call's tiles.
using MultiplyFunction = void (*)(const uint8_t* weights, size_t tile_bytes, int count, const float* x, float* sums,
                                  size_t sums_tile, bool resume) noexcept;

struct Kernels {
  const char* name;

  // [format][width - 1][0: one tile, 1: two tiles, 2: four tiles]; null where the instruction set gains nothing.
  MultiplyFunction multiply[kFormats][kMaxPanel][3];
  // The same with x row by row: x[token][kPageKeys]; one tile. Not for kF8.
  MultiplyFunction multiply_rows[kFormats][kMaxPanel];
  // out[k][32] = weights[k][32] in natural row order, for kF8 still times 2^-120.
  void (*unpack[kFormats])(const uint8_t* weights, int count, float* out) noexcept;

  // out[i] = sums[i] * scale[i] + bias[i], i in [0, 32). scale or bias may be null.
  void (*finish_tile)(const float* sums, const float* scale, const float* bias, float* out) noexcept;
  // out[i] = silu(gate[i]) * up[i] * factor, i in [0, 32)
  void (*silu_multiply)(const float* gate, const float* up, float factor, float* out) noexcept;
  // RMS norm: out[i * stride] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i] * factor. factor: a power of two.
  void (*normalise)(const float* x, const float* weight, int count, float epsilon, float factor, float* out,
                    int stride) noexcept;
  // Rotary embedding of one head in halves: (a, b) -> (a cos - b sin, b cos + a sin), a = head[i], b = head[half + i].
  void (*rotate)(float* head, const float* cosine, const float* sine, int half) noexcept;

  // One query's online softmax over a page. scores: keys 0..31 in low, 32..63 in high; keys outside [first, last] get
  // probability 0. Writes exp(score - maximum) to probabilities[64], updates maximum and sum, returns the factor
  // by which what was accumulated before this page is to be multiplied.
  float (*softmax_page)(const float* low, const float* high, int first, int last, float* probabilities, float* maximum,
                        float* sum) noexcept;

  // Sampler. scan: false if a logit is not finite; *maximum = the largest.
  bool (*scan)(const float* logits, int count, float* maximum) noexcept;
  // The smallest index of the largest value; -inf never beats a finite value.
  int (*argmax)(const float* values, int count) noexcept;
  // out[i] = exp((logits[i] - shift) * inverse_temperature)
  void (*exponentials)(const float* logits, int count, float shift, float inverse_temperature, float* out) noexcept;
  // argmax over tokens of (logits - shift) * inverse_temperature + gumbel(seed, position, token)
  int (*gumbel_argmax)(const float* logits, int count, float shift, float inverse_temperature, uint64_t seed,
                       int32_t position) noexcept;
  // What gumbel_argmax compares: out[i] = (logits[i] - shift) * inverse_temperature + gumbel(seed, position, i)
  void (*gumbel_scores)(const float* logits, int count, float shift, float inverse_temperature, uint64_t seed,
                        int32_t position, float* out) noexcept;
};

[[nodiscard]] const Kernels& portable_kernels() noexcept;
#if defined(__x86_64__)
[[nodiscard]] const Kernels& avx2_kernels() noexcept;
[[nodiscard]] const Kernels& avx512_kernels() noexcept;
#endif

// isa: "auto" (the best that this machine has), "avx512", "avx2" or "portable". Throws std::invalid_argument if the
// name is unknown or the machine lacks it.
[[nodiscard]] const Kernels& select_kernels(const std::string& isa);

// Multiplies `tiles` tiles with one panel of `width` tokens, as many at a time as the table offers.
inline void multiply_tiles(const Kernels& kernels, Format format, int width, int tiles, const uint8_t* weights,
                           size_t tile_bytes, int count, const float* x, float* sums, size_t sums_tile,
                           bool resume) noexcept {
  const auto& functions = kernels.multiply[static_cast<int>(format)][width - 1];
  for (int tile = 0; tile < tiles;) {
    int log2 = tiles - tile >= 4 ? 2 : tiles - tile >= 2 ? 1 : 0;
    while (functions[log2] == nullptr) --log2;
    functions[log2](weights + static_cast<size_t>(tile) * tile_bytes, tile_bytes, count, x,
                    sums + static_cast<size_t>(tile) * sums_tile, sums_tile, resume);
    tile += 1 << log2;
  }
}

}  // namespace ull::cpu
