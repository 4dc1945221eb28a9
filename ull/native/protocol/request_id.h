// The `id` of a request that is not decoded: a look into the msgpack map, past whatever stands before the id.
#pragma once

#include <cstdint>
#include <span>

namespace ull {

// A float whose value is an integer counts as one. False if there is none, it is no integer that fits, or too much
// stands before it.
[[nodiscard]] bool find_request_id(std::span<const uint8_t> payload, uint64_t& id) noexcept;

}  // namespace ull
