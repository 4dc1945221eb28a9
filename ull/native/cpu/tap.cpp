#include "cpu/tap.h"

namespace ull::cpu {

std::vector<std::string> linear_names(int layers) {
  std::vector<std::string> names;
  for (int layer = 0; layer < layers; ++layer) {
    for (const char* linear : {"qkv", "o", "gate_up", "down"}) {
      names.push_back("layers." + std::to_string(layer) + "." + linear);
    }
  }
  names.emplace_back("lm_head");
  return names;
}

}  // namespace ull::cpu
