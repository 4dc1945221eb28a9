// Activations as an FP8 linear sees them: rounded to E4M3 times a scale, and taken back to float.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cpu/tap.h"

namespace ull::cpu {

class FakeQuantiser final : public Tap {
 public:
  // scales: by name, see linear_names(). Throws std::invalid_argument naming those that are unknown or not positive.
  FakeQuantiser(const std::map<std::string, float>& scales, int layers);
  // Every linear's input but the lm_head's, each token's in a scale of its own: its largest becomes 448.
  explicit FakeQuantiser(int layers);

  void take(int linear, int member, float* x, int count, int stride, float factor) noexcept override;

 private:
  static constexpr float kOfToken = -1.0F;

  std::vector<float> scales_;  // [linears] 0: the input stays as it is; kOfToken: each token has its own
};

}  // namespace ull::cpu
