// Naming and pinning of the runtime's own threads. Both are best effort: a thread that cannot be pinned still works.
#pragma once

namespace ull {

// Shown by top and gdb; at most 15 characters.
void name_current_thread(const char* name) noexcept;

// Pins the calling thread to `core`; negative: leaves it as it is. Returns false if the kernel refused.
[[nodiscard]] bool pin_current_thread(int core) noexcept;

}  // namespace ull
