// What the bindings of everything that runs a model on the CPU are given: the model, and how to run it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu/model.h"
#include "module/bindings.h"

namespace ull::module {

// Bundle.native_spec() -> ModelSpec; ValueError names the field or tensor.
[[nodiscard]] cpu::ModelSpec model_spec(const nb::dict& dict);

// `pages`: of the KV cache; none: one session of the spec's context.
[[nodiscard]] cpu::ModelOptions model_options(int threads, std::vector<int> cores, std::string isa, int chunk,
                                              std::optional<int> pages);

}  // namespace ull::module
