// What runs through a model: how large the inputs of its linears are, and its keys and values. For calibration.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/model_shape.h"

namespace ull::cpu {

inline constexpr int kMagnitudeBins = 1 << 15;  // by the upper 15 bits of |x|: x truncated to bf16

struct ObservedInput {
  std::string name;                 // see linear_names()
  std::vector<uint64_t> histogram;  // [kMagnitudeBins] of |x|
  float largest = 0.0F;             // |x|
};

struct Observation {
  std::vector<ObservedInput> inputs;            // [linears]
  std::vector<std::vector<float>> keys_values;  // [layers][2 * kv_heads] largest |key| after norm and rotation, |value|
};

// Runs the model as evaluate() does, with keys and values in float32. Throws as evaluate() does, and
// std::runtime_error if an input, key or value is not finite.
Observation observe(ModelSpec spec, const std::vector<int32_t>& tokens, int window, int threads,
                    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace ull::cpu
