// One thread of a block: its own stack, and a switch that saves what the x86-64 calling convention asks for (about 20
// instructions; ucontext elsewhere). Tells AddressSanitizer of every switch.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace ull::emulator {

struct Fiber {
  void* stack = nullptr;  // lowest byte; [bytes]
  size_t bytes = 0;
  void* saved = nullptr;       // x86-64: stack pointer
  void* fake_stack = nullptr;  // AddressSanitizer's
  bool is_done = false;        // has returned from everything but its entry
#ifndef __x86_64__
  ucontext_t context;
#endif
};

// Makes the next switch to `fiber` call entry() on its stack. `entry` never returns, and calls fiber_entered() first.
void fiber_prepare(Fiber& fiber, void (*entry)());
// For the fiber that a thread of the operating system started with.
void fiber_adopt_caller(Fiber& fiber);
void fiber_switch(Fiber& from, Fiber& to);
// `from` is not resumed again.
[[noreturn]] void fiber_leave(Fiber& from, Fiber& to);
void fiber_entered();

}  // namespace ull::emulator
