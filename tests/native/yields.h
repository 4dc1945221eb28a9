// Who gives its core away: in a test program that includes this, sched_yield() tells on_yield(), which the program
// defines.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string_view>

void on_yield(std::string_view thread) noexcept;

// Takes the C library's place.
extern "C" int sched_yield() noexcept {
  char name[16];
  pthread_getname_np(pthread_self(), name, sizeof(name));
  on_yield(name);
  return static_cast<int>(syscall(SYS_sched_yield));
}
