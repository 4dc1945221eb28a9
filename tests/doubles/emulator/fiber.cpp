#include "fiber.h"

#include <pthread.h>

#include <cstdint>
#include <cstdlib>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace ull::emulator {

#ifdef __x86_64__
// void ull_emulator_switch(void** save, void* load): rdi, rsi.
asm(R"(
.text
.globl ull_emulator_switch
.hidden ull_emulator_switch
.type ull_emulator_switch, @function
ull_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ull_emulator_switch, .-ull_emulator_switch
)");
extern "C" __attribute__((visibility("hidden"))) void ull_emulator_switch(void** save, void* load);

static void swap(Fiber& from, Fiber& to) { ull_emulator_switch(&from.saved, to.saved); }
#else
static void swap(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

void fiber_prepare(Fiber& fiber, void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
  // Frames that nobody returned from are still poisoned.
  constexpr size_t kFirstFrame = 4096;
  const size_t poisoned = fiber.is_done ? kFirstFrame : fiber.bytes;
  __asan_unpoison_memory_region(static_cast<char*>(fiber.stack) + fiber.bytes - poisoned, poisoned);
#endif
  fiber.is_done = false;
  fiber.fake_stack = nullptr;
#ifdef __x86_64__
  // From the top: a null return address of entry(), entry(), six registers. On entry rsp is 8 modulo 16, as after a
  // call.
  auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(fiber.stack) + fiber.bytes);
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.saved = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
}

void fiber_adopt_caller([[maybe_unused]] Fiber& fiber) {
#ifdef __SANITIZE_ADDRESS__  // the only one who asks
  struct Stack {
    void* lowest;
    size_t bytes;
  };
  static thread_local const Stack stack = [] {  // to ask takes long
    Stack found;
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) abort();
    pthread_attr_getstack(&attributes, &found.lowest, &found.bytes);
    pthread_attr_destroy(&attributes);
    return found;
  }();
  fiber.stack = stack.lowest;
  fiber.bytes = stack.bytes;
#endif
}

void fiber_switch(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.bytes);
#endif
  swap(from, to);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void fiber_leave(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, to.stack, to.bytes);
#endif
  swap(from, to);
  abort();
}

void fiber_entered() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace ull::emulator
