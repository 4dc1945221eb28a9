#include "cpu/taps.h"

namespace ull::cpu {

std::vector<int> tapped_layers(const ModelSpec& spec) {
  std::vector<int> layers;
  if (spec.eagle != nullptr) layers.insert(layers.end(), spec.eagle->taps.begin(), spec.eagle->taps.end());
  if (spec.dflash != nullptr) layers.insert(layers.end(), spec.dflash->taps.begin(), spec.dflash->taps.end());
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

}  // namespace ull::cpu
