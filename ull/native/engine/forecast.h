// When a request that is submitted now will be done, if all that is ahead of it takes as long as steps have taken so
// far and emits as many tokens as it may. The control thread's; it looks at the slots without stopping anybody.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/costs.h"
#include "engine/shared.h"
#include "executor/executor.h"
#include "kv/page_hash.h"

namespace ull {

struct Expected {
  int64_t first_ns = 0;        // CLOCK_MONOTONIC, as all of these: its first token, ...
  int64_t done_ns = 0;         // ... and its last
  int64_t late_ns = 0;         // when it is done if what may well go slowly does
  int32_t cached = 0;          // tokens of its prompt that are probably in the KV cache
  bool keeps_promises = true;  // no request whose deadline was accepted misses it because of this one
};

class Forecast {
 public:
  // Allocates for as many requests as there are slots.
  Forecast(EngineShared& shared, const CachedPages& cached, const ExecutorInfo& info);

  // `request` holds what is submitted; its state is not looked at.
  [[nodiscard]] Expected of(const RequestSlot& request, int64_t now) noexcept;
  // Nanoseconds until one of those that have begun is done; 0 if none has.
  [[nodiscard]] int64_t next_end_ns() noexcept;

 private:
  // Work that is ahead of a request, or its own.
  struct Work {
    const RequestSlot* request = nullptr;
    bool begun = false;
    int64_t due_ns = 0;
    double first_ns = 0;  // up to and with its first token
    double rest_ns = 0;
    double margin_ns = 0;
  };

  // Whether its first round reads the prompt's last token as a chunk does, whatever stands in the cache before it.
  [[nodiscard]] bool reads_last_token(const RequestSlot& request) const noexcept;
  // What is left of a request of which the first `from` tokens are in the KV cache.
  [[nodiscard]] Work work_of(const RequestSlot& request, int from, bool begun) const noexcept;
  void collect(const RequestSlot* except) noexcept;
  // What more urgent requests that are yet to come may take of `ns` of less urgent work.
  [[nodiscard]] StepCosts::Estimate urgent_share(Priority priority, double ns, int64_t now) noexcept;

  EngineShared& shared_;
  const CachedPages& cached_;
  const int chunk_;           // of prefill
  const int forced_;          // most prompt tokens that a first round reads beside the last one
  const bool prefill_draws_;  // whether it reads that one, too, as a chunk does
  StepCosts costs_;
  std::vector<Work> works_;

  // How much of the time requests more urgent than each priority take lately.
  struct Load {
    int64_t urgent_ns = 0;  // StepCosts::urgent_ns() when it was last looked at
    int64_t seen_ns = 0;    // CLOCK_MONOTONIC, then
    double share = 0;
  };
  std::array<Load, kPriorities> loads_{};
};

}  // namespace ull
