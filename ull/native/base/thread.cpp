#include "base/thread.h"

#include <pthread.h>
#include <sched.h>

namespace ull {

SignalsBlocked::SignalsBlocked() noexcept {
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

void name_current_thread(const char* name) noexcept { pthread_setname_np(pthread_self(), name); }

bool pin_current_thread(int core) noexcept {
  if (core < 0) return true;
  if (core > kMaxCore) return false;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  return pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores) == 0;
}

}  // namespace ull
