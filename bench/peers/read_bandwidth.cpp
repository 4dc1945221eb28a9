// The peer of bench/cpu.py: the most that this machine's memory yields to `threads` cores that only read.
//
//   read_bandwidth BYTES THREADS PASSES       prints the GB/s of each pass, one line each
#include <sys/mman.h>
#include <time.h>

#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// 64 bytes a step in four independent sums: as fast as the core can load.
uint64_t read_all(const uint64_t* words, size_t count) {
  using Lane = uint64_t __attribute__((vector_size(64)));
  const Lane* lanes = reinterpret_cast<const Lane*>(words);
  Lane sums[4] = {};
  for (size_t i = 0; i + 4 <= count / 8; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += lanes[i + lane];
  }
  uint64_t total = 0;
  for (const Lane& sum : sums) {
    for (int i = 0; i < 8; ++i) total += sum[i];
  }
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s BYTES THREADS PASSES\n", argv[0]);
    return 2;
  }
  const int threads = std::atoi(argv[2]);
  const int passes = std::atoi(argv[3]);
  const size_t share = std::strtoull(argv[1], nullptr, 10) / threads / 4096 * 4096;
  void* memory = mmap(nullptr, share * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, share * threads, MADV_HUGEPAGE);
  std::memset(memory, 1, share * threads);
  std::barrier together(threads + 1);
  std::vector<uint64_t> sums(threads);
  std::vector<std::jthread> team;
  for (int t = 0; t < threads; ++t) {
    team.emplace_back([&, t] {
      const auto* words = reinterpret_cast<const uint64_t*>(static_cast<char*>(memory) + share * t);
      for (int pass = 0; pass < passes; ++pass) {
        together.arrive_and_wait();
        sums[t] += read_all(words, share / sizeof(uint64_t));
        together.arrive_and_wait();
      }
    });
  }
  for (int pass = 0; pass < passes; ++pass) {
    together.arrive_and_wait();
    const int64_t started = now_ns();
    together.arrive_and_wait();
    std::printf("%.3f\n", static_cast<double>(share) * threads / static_cast<double>(now_ns() - started));
  }
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total == 42 ? 3 : 0;  // the sums must be used, or the loop is dropped
}
