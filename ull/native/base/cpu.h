// Hints to the processor for spinning threads.
#pragma once

namespace ull {

// Tells the core that this is a spin loop (saves power, leaves the pipeline to the sibling thread).
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr int kCacheLine = 64;  // bytes; also the unit in which adjacent-line prefetch is tolerated

}  // namespace ull
