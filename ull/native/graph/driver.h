// The functions of the CUDA driver that replaying graphs needs: a table filled from libcuda.so.1 at run time, so that
// the core builds and starts where there is none. Tests put functions of their own in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ull::graph {

struct Driver {
  using Result = int;  // CUresult

  Result (*set_context)(void* context) = nullptr;                                    // cuCtxSetCurrent
  Result (*launch)(void* graph, void* stream) = nullptr;                             // cuGraphLaunch
  Result (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream) = nullptr;  // cuMemcpyDtoDAsync
  Result (*query)(void* stream) = nullptr;                                           // cuStreamQuery
  Result (*error_name)(Result error, const char** name) = nullptr;                   // cuGetErrorName
  Result (*error_text)(Result error, const char** text) = nullptr;                   // cuGetErrorString
};

inline constexpr Driver::Result kSuccess = 0;     // CUDA_SUCCESS
inline constexpr Driver::Result kNotReady = 600;  // CUDA_ERROR_NOT_READY: work is still queued or running

// Throws std::runtime_error naming the library or the function that is missing. The library stays loaded.
[[nodiscard]] Driver load_driver(const std::string& library);

}  // namespace ull::graph
