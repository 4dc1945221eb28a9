// The hidden states that the target leaves for the heads that draft for it: a ring over the newest positions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/aligned.h"
#include "cpu/model_shape.h"
#include "draft/tap_tags.h"

namespace ull::cpu {

class TapRing {
 public:
  // layers: see ModelOptions::taps. capacity: positions. Allocates.
  TapRing(std::vector<int> layers, int hidden, int capacity)
      : layers_(std::move(layers)),
        hidden_(static_cast<size_t>(hidden)),
        tags_(capacity),
        rows_(static_cast<size_t>(capacity) * layers_.size() * hidden_) {}

  [[nodiscard]] const TapTags& tags() const noexcept { return tags_; }
  [[nodiscard]] const std::vector<int>& layers() const noexcept { return layers_; }

  // row: [layers][hidden] of the token at `position`.
  void put(int32_t position, int32_t token, int32_t page, const float* row) noexcept {
    tags_.put(position, token, page);
    std::copy_n(row, layers_.size() * hidden_, rows_.data() + offset(position));
  }
  // One layer's state at `position` -> [hidden].
  [[nodiscard]] const float* state(int32_t position, int layer) const noexcept {
    const auto found = std::find(layers_.begin(), layers_.end(), layer);
    return rows_.data() + offset(position) + static_cast<size_t>(found - layers_.begin()) * hidden_;
  }

 private:
  [[nodiscard]] size_t offset(int32_t position) const noexcept {
    return static_cast<size_t>(tags_.slot(position)) * layers_.size() * hidden_;
  }

  const std::vector<int> layers_;
  const size_t hidden_;
  TapTags tags_;
  AlignedArray<float> rows_;  // [capacity][layers][hidden]
};

// The layers that the heads of a bundle read, ascending, each once; empty: it has no such heads.
[[nodiscard]] std::vector<int> tapped_layers(const ModelSpec& spec);

}  // namespace ull::cpu
