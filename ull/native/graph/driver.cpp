#include "graph/driver.h"

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

namespace ull::graph {
namespace {

constexpr int kVersion = 12'000;  // of the interface that is asked for: CUDA 12.0

// cuGetProcAddress_v2 of CUDA 12 and later.
using GetProcAddress = Driver::Result (*)(const char* symbol, void** function, int version, uint64_t flags,
                                          int* status);

}  // namespace

Driver load_driver(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error("the CUDA driver cannot be loaded: " + std::string(dlerror()));
  const auto get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(handle, "cuGetProcAddress_v2"));
  if (get_proc_address == nullptr) {
    throw std::runtime_error("the CUDA driver " + library + " is older than CUDA 12: update the NVIDIA driver");
  }
  Driver driver;
  const auto find = [&](auto& function, const char* name) {
    void* symbol = nullptr;
    int status = 0;
    if (get_proc_address(name, &symbol, kVersion, 0, &status) != kSuccess || symbol == nullptr) {
      throw std::runtime_error("the CUDA driver " + library + " has no " + name + ": update the NVIDIA driver");
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(driver.set_context, "cuCtxSetCurrent");
  find(driver.launch, "cuGraphLaunch");
  find(driver.copy, "cuMemcpyDtoDAsync");
  find(driver.query, "cuStreamQuery");
  find(driver.error_name, "cuGetErrorName");
  find(driver.error_text, "cuGetErrorString");
  return driver;
}

}  // namespace ull::graph
