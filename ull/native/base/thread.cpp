#include "base/thread.h"

#include <pthread.h>
#include <sched.h>

namespace ull {

void name_current_thread(const char* name) noexcept { pthread_setname_np(pthread_self(), name); }

bool pin_current_thread(int core) noexcept {
  if (core < 0) return true;
  if (core >= CPU_SETSIZE) return false;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  return pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores) == 0;
}

}  // namespace ull
