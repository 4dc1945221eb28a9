// A double of the CUDA driver (libcuda.so.1) for tests: one device whose memory is the host's, streams that are
// threads, graphs that are lists, and kernels that tests/doubles/emulator runs. Only what ull and cuda-python's loading
// of it ask for.
//
// Environment (all optional but the first, for kernels):
//   ULL_FAKECUDA_KERNELS          library built by tests/rigs/kernels/emulation.py that holds the code of every kernel;
//                                 then, behind ":", SYMBOL=LIBRARY for the images that have this symbol
//   ULL_FAKECUDA_DEVICES          number of devices, 0 or 1 (1)
//   ULL_FAKECUDA_NAME             "NVIDIA H200"
//   ULL_FAKECUDA_CAPABILITY       "9.0"
//   ULL_FAKECUDA_DRIVER           version that cuDriverGetVersion tells, 1000 * major + 10 * minor (13000)
//   ULL_FAKECUDA_MULTIPROCESSORS  132
//   ULL_FAKECUDA_GRANTED          of them, to a context, as an MPS thread limit does; 0: all, and no affinity is known
//   ULL_FAKECUDA_MEMORY           bytes of device memory in all (150754820096)
//   ULL_FAKECUDA_FREE             bytes that are free at first (all)
//   ULL_FAKECUDA_SEED             of the emulator's order of threads (0)
//   ULL_FAKECUDA_LAUNCH_MS        for so long a graph's launch may wait for its work (0), so that a host that would
//                                 spin leaves its core to it
//   ULL_FAKECUDA_LOG              file that gets one JSON line per kernel captured, graph instantiated and fault
//                                 injected
//   ULL_FAKECUDA_FAULT            faults, see faults.cpp; ULL_FAKECUDA_CONTROL names a file from which more are read
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "launcher.h"

namespace fakecuda {

using Result = int;  // CUresult
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidImage = 200;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kIllegalState = 401;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kLaunchOutOfResources = 701;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureInvalidated = 901;

// ---- device (device.cpp) ----------------------------------------------------------------------------------------

std::string option(const char* name, const char* fallback);  // an environment variable
int64_t number(const char* name, int64_t fallback);
void log_line(const std::string& json);

// Whether a call may go on: initialised, a context current in this thread, and no sticky error.
Result ready();
// An error after which every call fails, as after an illegal access on the device. The first one stays.
void set_sticky_error(Result error);
Result sticky_error();

// ---- handles ----------------------------------------------------------------------------------------------------

// The objects of one kind that are alive, by the pointer that the caller holds.
template <typename T>
class Handles {
 public:
  T* add(std::shared_ptr<T> object) {
    const std::lock_guard guard(lock_);
    T* handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }
  std::shared_ptr<T> find(void* handle) {  // null: no such object
    const std::lock_guard guard(lock_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> remove(void* handle) {
    const std::lock_guard guard(lock_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  std::vector<std::shared_ptr<T>> all() {
    const std::lock_guard guard(lock_);
    std::vector<std::shared_ptr<T>> list;
    for (const auto& [handle, object] : objects_) list.push_back(object);
    return list;
  }

 private:
  std::mutex lock_;
  std::map<void*, std::shared_ptr<T>> objects_;
};

// ---- modules (module.cpp) ---------------------------------------------------------------------------------------

using LaunchFunction = int (*)(const UllLaunch* launch, char* error, uint64_t error_bytes);

struct Function {
  std::string name;
  UllKernel kernel;
  LaunchFunction launch;         // of its library
  int shared_limit = 48 * 1024;  // dynamic shared memory, until cuFuncSetAttribute
};

struct KernelNode {
  std::shared_ptr<Function> function;
  int grid_x, grid_y, threads, shared_bytes;
  std::vector<unsigned char> params;  // a copy, as the driver makes
  bool overlaps;                      // programmatic stream serialization (PDL)
};

void run_kernel(const KernelNode& kernel);  // a failure is a sticky error, and its reason goes to stderr

// ---- streams, graphs (stream.cpp, graph.cpp) --------------------------------------------------------------------

enum class NodeType : int {  // CUgraphNodeType
  kKernel = 0,
  kMemcpy = 1,
  kMemset = 2,
  kHost = 3,
  kGraph = 4,
  kEventRecord = 7
};

struct Graph;

struct Node {
  NodeType type;
  std::function<void()> run;
  std::shared_ptr<KernelNode> kernel = nullptr;  // of kKernel
  std::shared_ptr<Graph> child = nullptr;        // of kGraph
};

struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;  // in the order of capture, which is one that runs
};

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool running = false;  // an operation that has left the queue
  bool ended = false;
  bool blocking = true;            // waits for the legacy stream, and that for it
  std::shared_ptr<Graph> capture;  // not null: operations are added to it
  bool capture_broken = false;
};

Handles<Stream>& streams();
// The stream of a handle; 0, 1 and 2 are the default ones. Null: no such stream.
std::shared_ptr<Stream> find_stream(void* handle);
// Adds the operation to the stream's capture, or runs it in its turn.
Result submit(const std::shared_ptr<Stream>& stream, Node node);
void enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> operation);
// kSuccess, or why it may not be waited for.
Result wait_for(const std::shared_ptr<Stream>& stream);
// Whether the stream has nothing left to do, now or within `patience`.
bool rests(Stream& stream, std::chrono::milliseconds patience);
void drain_all_streams();

// ---- memory (memory.cpp) ----------------------------------------------------------------------------------------

bool is_device_range(uint64_t address, uint64_t bytes);  // of one allocation, or of mapped host memory

// ---- faults (faults.cpp) ----------------------------------------------------------------------------------------

struct Fault {
  std::string kind;
  int64_t countdown;  // happens when it reaches 0
  int64_t value;      // what the kind makes of it
};

// Counts one event of this kind ("launch", "hang", ...); true if the fault is to happen now, with its value.
bool fault_now(const std::string& kind, int64_t& value);

// ---- table of functions (table.cpp) -----------------------------------------------------------------------------

// Makes functions known to cuGetProcAddress, by the name it is asked for.
struct Exports {
  explicit Exports(std::initializer_list<std::pair<const char*, void*>> functions);
};

template <typename F>
void* address_of(F* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace fakecuda
