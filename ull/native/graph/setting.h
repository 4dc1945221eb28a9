// What a request's rounds have in common, which the device copies when its version changes: sampling, biases, stops and
// the page table. The version is raised only when one of them differs from what it was.
//
// A round whose request block carries a version that the device does not have reads the mapped page table while it
// runs. So `pages` must not be written while such a round may be under way: see RoundQueue::setting_is_free().
#pragma once

#include <cstdint>
#include <vector>

#include "executor/executor.h"
#include "executor/sampling.h"
#include "kernels/params.h"

namespace ull::graph {

class Setting {
 public:
  // mapped: [capacity] the page table that the device reads.
  Setting(int32_t* mapped, int capacity);

  // Whether a round with these parameters needs no new version. pages: [count].
  [[nodiscard]] bool holds(const Sampling& sampling, const int32_t* stops, int stop_count) const noexcept;
  [[nodiscard]] bool holds(const int32_t* pages, int count) const noexcept;

  // Takes them over; the version goes up if something differs.
  void take(const Sampling& sampling, const int32_t* stops, int stop_count, const int32_t* pages, int count) noexcept;
  void take(const int32_t* pages, int count) noexcept;

  [[nodiscard]] uint32_t version() const noexcept { return version_; }
  // Fills a request block. device_has: the device has copied this version, so that the biases need not go along.
  void write(gpu::RoundRequest& request, bool device_has) const noexcept;

 private:
  uint32_t version_ = 0;  // the device begins with 0, which no round asks for
  gpu::Sampling sampling_{};
  int32_t stop_count_ = 0;
  int32_t page_count_ = 0;
  int32_t stops_[gpu::kStopTokens] = {};
  std::vector<gpu::LogitBias> biases_;  // [kBiases]; sampling_.bias_count are valid
  std::vector<int32_t> pages_;          // [capacity] what `mapped_` holds, in memory that is certainly cached
  int32_t* const mapped_;               // [capacity]
};

}  // namespace ull::graph
