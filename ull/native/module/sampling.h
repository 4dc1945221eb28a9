// The one reader of a request's sampling parameters, and how each of a request's parameters is read.
#pragma once

#include <vector>

#include "engine/engine.h"
#include "executor/sampling.h"
#include "module/bindings.h"

namespace ull::module {

// params[name], or `fallback` where it is absent. Throws InvalidRequest.
template <typename T>
T parameter(const nb::dict& params, const char* name, T fallback) {
  if (!params.contains(name)) return fallback;
  try {
    return nb::cast<T>(params[name]);
  } catch (const nb::cast_error&) {
    throw InvalidRequest(name, "has the wrong type or is out of range");
  }
}

// A sampling dict, read, and the bias that it owns. Throws InvalidRequest.
class SamplingParameters {
 public:
  explicit SamplingParameters(const nb::dict& params);
  SamplingParameters(const SamplingParameters&) = delete;
  SamplingParameters& operator=(const SamplingParameters&) = delete;

  [[nodiscard]] const Sampling& sampling() const noexcept { return sampling_; }

 private:
  std::vector<LogitBias> bias_;
  Sampling sampling_;  // its bias points to `bias_`
};

}  // namespace ull::module
