// The one reader of a request's sampling parameters.
#pragma once

#include <vector>

#include "executor/sampling.h"
#include "module/bindings.h"

namespace ull::module {

// A sampling dict, read, and the bias that it owns. ValueError names the parameter.
class SamplingParameters {
 public:
  explicit SamplingParameters(const nb::dict& parameters);
  SamplingParameters(const SamplingParameters&) = delete;
  SamplingParameters& operator=(const SamplingParameters&) = delete;

  [[nodiscard]] const Sampling& sampling() const noexcept { return sampling_; }

 private:
  std::vector<LogitBias> bias_;
  Sampling sampling_;  // its bias points to `bias_`
};

}  // namespace ull::module
