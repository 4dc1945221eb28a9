#include "protocol/protocol.h"

#include <string_view>

#include "protocol/request_id.h"

namespace ull {
namespace {

// What ProtocolState::malformed may be.
constexpr const char* kMalformed[] = {kBadFrame, kBadVersion, kTooLong};

}  // namespace

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

Protocol::Packed Protocol::pack(ProtocolState& /*state*/, std::span<const uint8_t> payload,
                                Header& header) const noexcept {
  const size_t size = pack_header(payload.size(), header);
  return {.header = std::span(header).first(size), .payload = payload};
}

std::span<const uint8_t> Protocol::ping(ProtocolState& /*state*/) const noexcept { return {}; }

void Protocol::introduce(const ProtocolState& /*state*/, Peer& /*peer*/) const noexcept {}

bool Protocol::welcome(const ProtocolState& /*state*/) const noexcept { return true; }

void Protocol::save(const ProtocolState& state, StateWriter& writer) const {
  for (const bool flag : {state.open, state.greeted, state.pings, state.version_ok, state.throwing, state.has_id}) {
    writer.flag(flag);
  }
  for (const uint64_t number : {uint64_t{state.frames}, state.id, uint64_t{state.left}, uint64_t{state.thrown}}) {
    writer.number(number);
  }
  writer.text(state.malformed == nullptr ? std::string_view{} : state.malformed);
}

bool Protocol::restore(ProtocolState& state, StateReader& reader) const {
  for (bool* flag : {&state.open, &state.greeted, &state.pings, &state.version_ok, &state.throwing, &state.has_id}) {
    *flag = reader.flag();
  }
  const uint64_t frames = reader.number();
  state.frames = static_cast<uint8_t>(frames);
  state.id = reader.number();
  state.left = reader.number();
  state.thrown = reader.number();
  const std::string_view why = reader.text();
  for (const char* known : kMalformed) {
    if (why == known) state.malformed = known;
  }
  // A loop that throws bytes away must have some to wait for.
  return frames <= 2 && (why.empty() || state.malformed != nullptr) && (!state.throwing || state.left > 0);
}

}  // namespace ull
