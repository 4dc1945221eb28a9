#include "cpu/offline/fake_quantiser.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

#include "cpu/e4m3.h"

namespace ull::cpu {

FakeQuantiser::FakeQuantiser(const std::map<std::string, float>& scales, int layers) {
  const std::vector<std::string> names = linear_names(layers);
  scales_.resize(names.size());
  std::string unknown;
  for (const auto& [name, scale] : scales) {
    const auto place = std::find(names.begin(), names.end(), name);
    if (place == names.end()) {
      unknown += (unknown.empty() ? "" : ", ") + name;
      continue;
    }
    if (!(scale > 0.0F && std::isfinite(scale))) {
      throw std::invalid_argument("input_scales: that of " + name + " must be positive and finite");
    }
    scales_[static_cast<size_t>(place - names.begin())] = scale;
  }
  if (!unknown.empty()) throw std::invalid_argument("input_scales: the model has no linear named " + unknown);
}

FakeQuantiser::FakeQuantiser(int layers) : scales_(linear_names(layers).size(), kOfToken) {
  scales_[static_cast<size_t>(lm_head_index(layers))] = 0.0F;
}

void FakeQuantiser::take(int linear, int, float* x, int count, int stride, float factor) noexcept {
  float scale = scales_[static_cast<size_t>(linear)];
  if (scale == 0.0F) return;
  const float unscaled = 1.0F / factor;  // exact: a power of two
  if (scale == kOfToken) {
    float largest = 0.0F;
    for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[static_cast<ptrdiff_t>(i) * stride]));
    if (largest == 0.0F) return;
    scale = largest * unscaled / kLargestE4m3;
  }
  for (int i = 0; i < count; ++i) {
    float& value = x[static_cast<ptrdiff_t>(i) * stride];
    value = round_to_e4m3(value * unscaled / scale) * scale * factor;
  }
}

}  // namespace ull::cpu
