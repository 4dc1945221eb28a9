// What a protocol makes of bytes, however they arrive.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "protocol/protocol.h"

namespace ull::fuzz {

inline void require(bool condition) {
  if (!condition) std::abort();
}

// A number for all that came out of a stream, in order.
class Outcome {
 public:
  void add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }
  void add(std::span<const uint8_t> bytes) {
    add(bytes.size());
    for (const uint8_t byte : bytes) add(uint64_t{byte});
  }
  [[nodiscard]] uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// Feeds `input` to a new connection, `piece` bytes at a time (0: all at once), as the server does, and holds the
// protocol to its word: it never asks for more than a message may have, nor takes what is not there.
inline uint64_t outcome_of(const Protocol& protocol, std::span<const uint8_t> input, size_t piece, size_t most_wanted) {
  ProtocolState state;
  Outcome outcome;
  std::vector<uint8_t> waiting;
  size_t fed = 0;
  while (fed < input.size()) {
    const size_t count = piece == 0 ? input.size() : std::min(piece, input.size() - fed);
    waiting.insert(waiting.end(), input.begin() + static_cast<ptrdiff_t>(fed),
                   input.begin() + static_cast<ptrdiff_t>(fed + count));
    fed += count;
    for (int steps = 0;; ++steps) {
      require(steps < 100'000);
      const Step step = protocol.step(state, waiting);
      require(step.consumed <= waiting.size());
      if (step.kind == Step::Kind::kUnfit || step.kind == Step::Kind::kRefused) {
        outcome.add(static_cast<uint64_t>(step.kind));
        return outcome.value();
      }
      if (step.kind != Step::Kind::kMore) outcome.add(static_cast<uint64_t>(step.kind));
      if (step.kind == Step::Kind::kMessage) {
        outcome.add(step.payload);
        outcome.add(step.malformed != nullptr ? 1U : 0U);
        outcome.add(step.has_id ? step.id : 0U);
      }
      // An answer's bytes are of the connection's own where they are encrypted: only that there is one is compared.
      waiting.erase(waiting.begin(), waiting.begin() + static_cast<ptrdiff_t>(step.consumed));
      if (step.kind == Step::Kind::kMore) {
        // It is asked again as soon as anything has come: `wanted` only says how much room that needs.
        require(step.wanted >= 1 && step.wanted <= most_wanted);
        require(state.throwing || waiting.size() < step.wanted);
        break;
      }
    }
  }
  return outcome.value();
}

// All at once, byte by byte, and in pieces: the same.
inline void compare_deliveries(const Protocol& protocol, std::span<const uint8_t> input, size_t most_wanted) {
  const uint64_t whole = outcome_of(protocol, input, 0, most_wanted);
  const size_t piece = input.empty() ? 1 : 1 + input.back() % 37;
  require(outcome_of(protocol, input, piece, most_wanted) == whole);
}

}  // namespace ull::fuzz
