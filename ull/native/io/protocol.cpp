#include "io/protocol.h"

#include "io/request_id.h"

namespace ull {

void Protocol::throw_away(ProtocolState& state, size_t size, const char* malformed) noexcept {
  state.throwing = true;
  state.left = size;
  state.malformed = malformed;
}

bool Protocol::thrown_away(ProtocolState& state, std::span<const uint8_t> input, size_t& at) noexcept {
  const size_t here = std::min(state.left, input.size() - at);
  state.left -= here;
  at += here;
  state.throwing = state.left > 0;
  return !state.throwing;
}

Step Protocol::refused(ProtocolState& state, size_t consumed) noexcept {
  const Step step{.kind = Step::Kind::kMessage,
                  .consumed = consumed,
                  .malformed = state.malformed,
                  .has_id = state.has_id,
                  .id = state.id};
  state.frames = 0;
  state.malformed = nullptr;
  state.has_id = false;
  state.thrown = 0;
  return step;
}

void Protocol::look_for_id(ProtocolState& state, std::span<const uint8_t> payload) noexcept {
  state.has_id = find_request_id(payload, state.id);
}

}  // namespace ull
