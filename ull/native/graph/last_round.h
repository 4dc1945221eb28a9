// The round that a drafter on the device has observed last: what it left there, hidden states and State, serves the
// drafter only until something else is launched, since any round of another sequence overwrites it.
#pragma once

#include <cstdint>

#include "draft/drafter.h"
#include "graph/round_queue.h"

namespace ull::graph {

class LastRound {
 public:
  // `queue`: the target's rounds, which must outlive it.
  explicit LastRound(const RoundQueue& queue) : queue_(queue) {}

  void observe(const DraftOutcome& outcome) noexcept {
    sequence_ = queue_.asked();
    position_ = outcome.position + outcome.count;
    token_ = outcome.emitted[outcome.count - 1];
  }
  // Whether what the device holds is that round's, and the context's root the token that it emitted last.
  [[nodiscard]] bool precedes(const DraftContext& context) const noexcept {
    return sequence_ != 0 && sequence_ == queue_.asked() && context.history != nullptr &&
           context.position == position_ && context.history[position_] == token_;
  }

 private:
  const RoundQueue& queue_;
  uint64_t sequence_ = 0;  // 0: there was none
  int32_t position_ = 0;   // of the token that it emitted last
  int32_t token_ = 0;
};

}  // namespace ull::graph
