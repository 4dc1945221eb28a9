// Requests on a cpu executor without an engine around it: for the properties of speculative decoding and for
// benchmarks. Not the hot path; bad arguments throw std::invalid_argument, an executor that fails std::runtime_error.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/cpu_executor.h"

namespace ull::cpu {

struct DecodeRequest {
  std::span<const int32_t> tokens;  // the prompt
  int max_tokens = 1;
  Sampling sampling = {};
  DrafterKind speculation = DrafterKind::kNone;
  int max_tree = 0;
  std::span<const int32_t> pages = {};    // page table; empty: 0, 1, 2, ...
  int cached = 0;                         // tokens of the prompt that an earlier request left in the cache
  int forced = 0;                         // most tokens of it that the first round feeds behind its first
  TokenConstraint* constraint = nullptr;  // at its beginning; what it forces is drawn
};

struct DecodeRound {
  DrafterKind drafter;
  int tree_tokens;
  int depth;
  int accepted;
  int64_t nanoseconds;
};

struct Decoded {
  std::vector<RoundToken> tokens;
  std::vector<DecodeRound> rounds;
  bool failed = false;  // the executor failed after these tokens
};

class LocalDecoder {
 public:
  LocalDecoder(ModelSpec spec, ModelOptions options, SpeculationOptions speculation);

  [[nodiscard]] const ExecutorInfo& info() const noexcept { return executor_.info(); }
  Decoded decode(const DecodeRequest& request);

 private:
  CpuExecutor executor_;
  std::vector<int32_t> pages_;  // 0, 1, 2, ...
  Drafted drafted_;
};

}  // namespace ull::cpu
