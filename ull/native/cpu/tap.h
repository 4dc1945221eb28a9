// What an evaluation may tap a forward pass with: it sees the inputs of the linears on their way into the product, and
// may change them. An ordinary pass has no tap.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kv_cache.h"

namespace ull::cpu {

// The linears of a layer, in the order of execution.
enum class Linear : uint8_t { kQkv, kOutput, kGateUp, kDown };
inline constexpr int kLayerLinears = 4;

// Linears of a model by number: kLayerLinears of each layer, then the lm_head.
[[nodiscard]] constexpr int linear_index(int layer, Linear linear) noexcept {
  return layer * kLayerLinears + static_cast<int>(linear);
}
[[nodiscard]] constexpr int lm_head_index(int layers) noexcept { return layers * kLayerLinears; }

// Their names, "layers.N.qkv", ".o", ".gate_up", ".down" and "lm_head", by number.
[[nodiscard]] std::vector<std::string> linear_names(int layers);

class Tap {
 public:
  virtual ~Tap() = default;
  // One token's input of a linear: x[i * stride] for i in [0, count), times `factor`, a power of two. Each member of a
  // team calls it for tokens of its own.
  virtual void take(int linear, int member, float* x, int count, int stride, float factor) noexcept = 0;

  // Between the steps of an evaluation. The cache holds one layer's keys and values of positions [start, start + count)
  // in pages that follow one another.
  virtual void chunk_done(const KvCache& /*cache*/, int /*start*/, int /*count*/) {}
  // All tokens have passed `layer`; that behind the last one is the lm_head.
  virtual void layer_done(int /*layer*/) {}
};

}  // namespace ull::cpu
