#include "launcher.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "copies.h"
#include "emulated_arch.h"
#include "order.h"
#include "shadow.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace ull::emulator {

namespace {

constexpr size_t kPage = 4096;
constexpr uint32_t kMostShared = 227 * 1024;  // dynamic shared memory of a block on sm_90
constexpr size_t kRedzone = 256;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 256 * 1024;  // frames are larger
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

// Stacks begin at different places in their pages: what 32 lanes have at the same depth would otherwise compete for the
// same lines of the cache.
constexpr size_t kColours = 16;
constexpr size_t kColourBytes = 192;

constexpr int kMostTogether = 64;  // blocks that run at once

struct Entry {
  UllKernel kernel;
  void (*body)(const void* params);
  bool meets;
  int cluster_x, cluster_y;
};

std::vector<Entry>& entries() {
  static std::vector<Entry> list;
  return list;
}

std::mutex launch_lock;

// `bytes` with an unreadable page before and after.
unsigned char* map_guarded(size_t bytes) {
  void* area = mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) abort();
  auto* data = static_cast<unsigned char*>(area) + kPage;
  if (mprotect(data, bytes, PROT_READ | PROT_WRITE) != 0) abort();
  return data;
}

void unmap_guarded(void* data, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(data, bytes);
#endif
  munmap(static_cast<unsigned char*>(data) - kPage, bytes + 2 * kPage);
}

// The block's shared memory ends (rounded up to 128 bytes) where an unreadable page begins; a redzone lies before it.
class SharedMemory {
 public:
  SharedMemory() : data_(map_guarded(kBytes)) {}
  ~SharedMemory() { unmap_guarded(data_, kBytes); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // 0xFF, so that what nobody wrote shows as NaN.
  unsigned char* fresh(uint32_t bytes) {
    unpoison();
    start_ = data_ + kBytes - (bytes + 127) / 128 * 128;
    bytes_ = bytes;
    memset(start_ - kRedzone, 0xFF, static_cast<size_t>(data_ + kBytes - start_) + kRedzone);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(data_, static_cast<size_t>(start_ - data_));
    __asan_poison_memory_region(start_ + bytes, static_cast<size_t>(data_ + kBytes - start_) - bytes);
#endif
    return start_;
  }

  // Whether the redzones are as fresh() left them.
  bool intact() {
    unpoison();
    const auto untouched = [](const unsigned char* from, const unsigned char* to) {
      while (from != to && *from == 0xFF) ++from;
      return from == to;
    };
    return untouched(start_ - kRedzone, start_) && untouched(start_ + bytes_, data_ + kBytes);
  }

 private:
  void unpoison() {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(data_, kBytes);
#endif
  }

  static constexpr size_t kBytes = (kMostShared + kRedzone + kPage - 1) / kPage * kPage;
  unsigned char* data_;  // [kBytes]
  unsigned char* start_ = nullptr;
  uint32_t bytes_ = 0;
};

// A block with its shared memory and its threads' stacks.
class Place {
 public:
  explicit Place(int threads) { provide(threads); }
  ~Place() {
    while (stacks_ > 0) unmap_guarded(block.thread[--stacks_].fiber.stack, kStackBytes);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  void provide(int threads) {
    for (; stacks_ < threads; ++stacks_) {
      Fiber& fiber = block.thread[stacks_].fiber;
      fiber.stack = map_guarded(kStackBytes);
      fiber.bytes = kStackBytes - static_cast<size_t>(stacks_) % kColours * kColourBytes;
    }
  }

  Block block = {};
  SharedMemory shared;

 private:
  int stacks_ = 0;
};

// The first stays; those of blocks that ran beside it are given back, for a process may not have many mappings.
std::vector<std::unique_ptr<Place>> places;

// A kernel's access to an address that is not mapped ends the launch instead of the process. (Under AddressSanitizer
// its own handler reports more.)
class FaultHandler {
 public:
  static sigjmp_buf resume;

#ifdef __SANITIZE_ADDRESS__
  FaultHandler() = default;
#else
  FaultHandler() {
    static unsigned char* signal_stack = map_guarded(kStackBytes);
    thread_ = pthread_self();
    stack_t stack = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = kStackBytes;
    sigaltstack(&stack, &previous_stack_);
    struct sigaction action = {};
    action.sa_sigaction = &FaultHandler::on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &previous_[0]);
    sigaction(SIGBUS, &action, &previous_[1]);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &previous_[0], nullptr);
    sigaction(SIGBUS, &previous_[1], nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }

 private:
  static void on_fault(int signal, siginfo_t* info, void*) {
    if (self == nullptr || pthread_equal(pthread_self(), thread_) == 0) {  // not a kernel's: fault again, unhandled
      sigaction(signal, &previous_[signal == SIGSEGV ? 0 : 1], nullptr);
      return;
    }
    const auto* address = static_cast<unsigned char*>(info->si_addr);
    const auto* stack = static_cast<unsigned char*>(self->fiber.stack);
    char text[400];
    int used =
        snprintf(text, sizeof(text), "%s, block (%d, %d), thread %d: ", grid.kernel, block->x, block->y, self->index);
    if (address >= stack - kPage && address < stack) {
      used += snprintf(text + used, sizeof(text) - used, "stack overflow");
    } else {
      used += snprintf(text + used, sizeof(text) - used, "illegal memory access at %p (shared + %td)",
                       static_cast<const void*>(address), address - block->shared);
    }
    grid.error = text;
    siglongjmp(resume, 1);
  }

  static pthread_t thread_;
  static struct sigaction previous_[2];
  stack_t previous_stack_ = {};
#endif
};

sigjmp_buf FaultHandler::resume;
#ifndef __SANITIZE_ADDRESS__
pthread_t FaultHandler::thread_;
struct sigaction FaultHandler::previous_[2];
#endif

// The launch's mistakes that the driver itself would refuse.
std::string refusal(const UllLaunch& launch, const Entry& entry) {
  if (launch.grid_x < 1 || launch.grid_y < 1 || launch.grid_y > 65535) return "grid out of range";
  if (launch.threads < 32 || launch.threads % kWarpLanes != 0 || launch.threads > entry.kernel.most_threads) {
    return std::to_string(launch.threads) + " threads: must be a multiple of 32 and within the kernel's bound of " +
           std::to_string(entry.kernel.most_threads);
  }
  if (entry.meets && static_cast<int64_t>(launch.grid_x) * launch.grid_y > kMostTogether) {
    return std::to_string(static_cast<int64_t>(launch.grid_x) * launch.grid_y) +
           " blocks that wait for each other: the emulator runs " + std::to_string(kMostTogether) + " at once";
  }
  if (launch.grid_x % entry.cluster_x != 0 || launch.grid_y % entry.cluster_y != 0) {
    return "a grid of " + std::to_string(launch.grid_x) + " x " + std::to_string(launch.grid_y) +
           " blocks: must be whole clusters of " + std::to_string(entry.cluster_x) + " x " +
           std::to_string(entry.cluster_y);
  }
  if (launch.shared_bytes < 0 || static_cast<uint32_t>(launch.shared_bytes) > kMostShared) {
    return std::to_string(launch.shared_bytes) + " bytes of shared memory: at most " + std::to_string(kMostShared);
  }
  return {};
}

__attribute__((noinline)) bool run_guarded_blocks() {
  if (sigsetjmp(FaultHandler::resume, 1) != 0) return false;
  return run_blocks();
}

// Runs the blocks of these numbers at once; what went wrong.
std::string run_together(const std::vector<int>& numbers) {
  for (auto& place : places) place->provide(grid.threads);
  while (places.size() < numbers.size()) places.push_back(std::make_unique<Place>(grid.threads));
  grid.blocks.clear();
  for (size_t i = 0; i < numbers.size(); ++i) {
    Block& one = places[i]->block;
    one.x = numbers[i] % grid.grid_x;
    one.y = numbers[i] / grid.grid_x;
    one.number = static_cast<uint16_t>(numbers[i]);
    one.shared = places[i]->shared.fresh(grid.shared_bytes);
    grid.blocks.push_back(&one);
  }
  const bool good = run_guarded_blocks();
  self = nullptr;
  show_hidden_regions();
  std::string outside;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (places[i]->shared.intact() || !outside.empty()) continue;
    outside = std::string(grid.kernel) + ", block (" + std::to_string(places[i]->block.x) + ", " +
              std::to_string(places[i]->block.y) + "): wrote outside its " + std::to_string(grid.shared_bytes) +
              " bytes of shared memory";
  }
  return good ? outside : grid.error;
}

// Of the n-th cluster, by their ranks.
std::vector<int> blocks_of_cluster(int n) {
  std::vector<int> numbers;
  const int first = grid.in_row ? n * grid.cluster : n / grid.grid_x * grid.cluster * grid.grid_x + n % grid.grid_x;
  for (int rank = 0; rank < grid.cluster; ++rank) numbers.push_back(first + rank * (grid.in_row ? 1 : grid.grid_x));
  return numbers;
}

std::string run_grid() {
  std::vector<int> order(static_cast<size_t>(grid.grid_x) * static_cast<size_t>(grid.grid_y) /
                         static_cast<size_t>(grid.cluster));
  std::iota(order.begin(), order.end(), 0);
  for (size_t left = order.size(); left > 1; --left) std::swap(order[left - 1], order[draw() % left]);
  [[maybe_unused]] const FaultHandler handler;
  if (grid.meets) return run_together(order);
  for (const int cluster : order) {
    std::string error = run_together(blocks_of_cluster(cluster));
    if (!error.empty()) return error;
  }
  return {};
}

std::vector<Region> regions(const UllRegion* from, int count) {
  std::vector<Region> list;
  for (int i = 0; i < count; ++i) list.push_back({from[i].address, from[i].bytes});
  return list;
}

std::string run(const UllLaunch& launch) {
  const std::lock_guard guard(launch_lock);
  for (const Entry& entry : entries()) {
    if (strcmp(entry.kernel.name, launch.kernel) != 0) continue;
    const std::string refused = refusal(launch, entry);
    if (!refused.empty()) return std::string(launch.kernel) + ": " + refused;
    fiber_adopt_caller(grid.launcher);
    grid.kernel = entry.kernel.name;
    grid.body = entry.body;
    grid.meets = entry.meets;
    grid.cluster = entry.cluster_x * entry.cluster_y;
    grid.in_row = entry.cluster_x > 1;
    grid.params = launch.params;
    grid.grid_x = launch.grid_x;
    grid.grid_y = launch.grid_y;
    grid.threads = launch.threads;
    grid.shared_bytes = static_cast<uint32_t>(launch.shared_bytes);
    grid.random = launch.seed * 0x9E3779B97F4A7C15ULL + 0xD1B54A32D192ED03ULL;
    grid.params_bytes = static_cast<uint64_t>(entry.kernel.params_bytes);
    grid.written = regions(launch.written, launch.written_count);
    grid.constants = regions(launch.constants, launch.constant_count);
    grid.earlier = regions(launch.earlier, launch.earlier_count);
    grid.host_reads = regions(launch.host_reads, launch.host_read_count);
    grid.prefetches.clear();
    forget_order();
    forget_shadow();
    const std::string error = run_grid();
    places.resize(1);
    return error.empty() ? unpublished() : error;
  }
  return std::string("unknown kernel ") + launch.kernel;
}

}  // namespace

Registration::Registration(const char* name, size_t params_bytes, int most_threads, bool meets, int cluster_x,
                           int cluster_y, void (*body)(const void* params)) {
  entries().push_back({{name, static_cast<int32_t>(params_bytes), most_threads}, body, meets, cluster_x, cluster_y});
}

}  // namespace ull::emulator

int ull_emulator_kernels(const UllKernel** kernels) {
  static std::vector<UllKernel> list;
  if (list.empty()) {
    for (const auto& entry : ull::emulator::entries()) list.push_back(entry.kernel);
  }
  *kernels = list.data();
  return static_cast<int>(list.size());
}

int ull_emulator_prefetches(const UllPrefetch** prefetches) {
  *prefetches = ull::emulator::grid.prefetches.data();
  return static_cast<int>(ull::emulator::grid.prefetches.size());
}

int ull_emulator_launch(const UllLaunch* launch, char* error, uint64_t error_bytes) {
  const std::string message = ull::emulator::run(*launch);
  snprintf(error, error_bytes, "%s", message.c_str());
  return message.empty() ? 0 : 1;
}

void ull_emulator_give_back() {
  const std::lock_guard lock(ull::emulator::launch_lock);
  ull::emulator::places.clear();
}
