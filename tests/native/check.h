// The native tests' harness: TEST defines a case, CHECK and CHECK_EQ record a failure and go on, REQUIRE leaves the
// case. main() runs every case, or those whose name contains argv[1], and exits non-zero if anything failed or
// nothing ran. Include it in exactly one .cpp per executable.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace ull::check {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline bool add(const char* name, void (*body)()) {
  cases().push_back({name, body});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::cerr << file << ":" << line << ": " << what << "\n";
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream text;
  text << expression << ": " << a << " != " << b;
  fail(file, line, text.str());
}

inline const char*& limited() {
  static const char* name = "";
  return name;
}

// Ends the process if the case takes longer than any does, also under a sanitizer on a busy machine: it hangs.
inline void limit(const char* name) {
  limited() = name;
  std::signal(SIGALRM, [](int) {
    std::fprintf(stderr, "FAIL %s: hangs\n", limited());
    _exit(1);
  });
  alarm(300);
}

}  // namespace ull::check

#define ULL_CHECK_JOIN_(a, b) a##b
#define ULL_CHECK_JOIN(a, b) ULL_CHECK_JOIN_(a, b)

#define TEST(name)                                                                                \
  static void name();                                                                             \
  [[maybe_unused]] static const bool ULL_CHECK_JOIN(name, _added) = ull::check::add(#name, name); \
  static void name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) ull::check::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)

#define CHECK_EQ(a, b) ull::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

#define REQUIRE(condition)                                             \
  do {                                                                 \
    if (!(condition)) {                                                \
      ull::check::fail(__FILE__, __LINE__, "REQUIRE(" #condition ")"); \
      return;                                                          \
    }                                                                  \
  } while (false)

#define CHECK_THROWS(expression, exception)                                                      \
  do {                                                                                           \
    bool thrown = false;                                                                         \
    try {                                                                                        \
      (void)(expression);                                                                        \
    } catch (const exception&) {                                                                 \
      thrown = true;                                                                             \
    }                                                                                            \
    if (!thrown) ull::check::fail(__FILE__, __LINE__, #expression " did not throw " #exception); \
  } while (false)

int main(int argc, char** argv) {
  int ran = 0;
  for (const auto& test : ull::check::cases()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++ran;
    const int before = ull::check::failures();
    ull::check::limit(test.name);
    test.body();
    std::printf("%s %s\n", ull::check::failures() == before ? "ok  " : "FAIL", test.name);
    std::fflush(stdout);
  }
  std::printf("%d cases, %d failures\n", ran, ull::check::failures());
  return ran == 0 || ull::check::failures() > 0 ? 1 : 0;
}
