// Initialisation, the device and its primary context, errors.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "fake.h"

namespace fakecuda {

namespace {

std::atomic<bool> initialised = false;
std::atomic<Result> sticky = kSuccess;
int context;  // its address is the primary context
std::atomic<int> retained = 0;
thread_local void* current = nullptr;

// CUdevice_attribute of an H200.
int attribute(int id, bool& known) {
  const std::string capability = option("ULL_FAKECUDA_CAPABILITY", "9.0");
  known = true;
  switch (id) {
    case 1:  // MAX_THREADS_PER_BLOCK
      return 1024;
    case 8:  // MAX_SHARED_MEMORY_PER_BLOCK
      return 48 * 1024;
    case 10:  // WARP_SIZE
      return 32;
    case 12:  // MAX_REGISTERS_PER_BLOCK
      return 65536;
    case 16:  // MULTIPROCESSOR_COUNT
      return static_cast<int>(number("ULL_FAKECUDA_MULTIPROCESSORS", 132));
    case 38:  // L2_CACHE_SIZE
      return 60 << 20;
    case 39:  // MAX_THREADS_PER_MULTIPROCESSOR
      return 2048;
    case 75:  // COMPUTE_CAPABILITY_MAJOR
      return atoi(capability.c_str());
    case 76:  // COMPUTE_CAPABILITY_MINOR
      return atoi(capability.c_str() + capability.find('.') + 1);
    case 81:  // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
      return 228 * 1024;
    case 97:  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
      return 227 * 1024;
    case 19:  // CAN_MAP_HOST_MEMORY
    case 32:  // ECC_ENABLED
    case 41:  // UNIFIED_ADDRESSING
    case 95:  // COOPERATIVE_LAUNCH
      return 1;
    case 18:  // INTEGRATED
    case 20:  // COMPUTE_MODE
      return 0;
    default:
      known = false;
      return 0;
  }
}

Result check_device(int device) {
  if (!initialised) return kNotInitialized;
  return device == 0 && number("ULL_FAKECUDA_DEVICES", 1) > 0 ? kSuccess : kInvalidDevice;
}

Result init(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (number("ULL_FAKECUDA_DEVICES", 1) < 1) return kNoDevice;
  initialised = true;
  return kSuccess;
}

Result driver_version(int* version) {
  *version = static_cast<int>(number("ULL_FAKECUDA_DRIVER", 13000));
  return kSuccess;
}

Result device_count(int* count) {
  *count = static_cast<int>(number("ULL_FAKECUDA_DEVICES", 1));
  return initialised ? kSuccess : kNotInitialized;
}

Result device_get(int* device, int ordinal) {
  *device = ordinal;
  return check_device(ordinal);
}

Result device_name(char* name, int bytes, int device) {
  snprintf(name, static_cast<size_t>(bytes), "%s", option("ULL_FAKECUDA_NAME", "NVIDIA H200").c_str());
  return check_device(device);
}

Result device_uuid(unsigned char (*uuid)[16], int device) {
  for (int i = 0; i < 16; ++i) (*uuid)[i] = static_cast<unsigned char>(0xF0 + i);
  return check_device(device);
}

Result affinity_support(int* supported, int /*type*/, int device) {
  *supported = number("ULL_FAKECUDA_GRANTED", 0) > 0 ? 1 : 0;
  return check_device(device);
}

struct ExecAffinity {  // CUexecAffinityParam
  int type;
  unsigned multiprocessors;
};

Result context_affinity(ExecAffinity* affinity, int type) {
  if (const Result result = ready(); result != kSuccess) return result;
  *affinity = {type, static_cast<unsigned>(number("ULL_FAKECUDA_GRANTED", 0))};
  return kSuccess;
}

Result device_attribute(int* value, int id, int device) {
  bool known;
  *value = attribute(id, known);
  const Result result = check_device(device);
  return result != kSuccess ? result : known ? kSuccess : kInvalidValue;
}

Result total_memory(size_t* bytes, int device) {
  *bytes = static_cast<size_t>(number("ULL_FAKECUDA_MEMORY", 150'754'820'096));
  return check_device(device);
}

Result pci_bus_id(char* text, int bytes, int device) {
  snprintf(text, static_cast<size_t>(bytes), "0000:01:00.0");
  return check_device(device);
}

Result retain_context(void** result, int device) {
  *result = &context;
  ++retained;
  return check_device(device);
}

Result release_context(int device) {
  if (retained > 0) --retained;
  return check_device(device);
}

Result set_context(void* value) {
  if (!initialised) return kNotInitialized;
  if (value != nullptr && (value != &context || retained == 0)) return kInvalidContext;
  current = value;
  return sticky;
}

Result get_context(void** value) {
  *value = current;
  return initialised ? kSuccess : kNotInitialized;
}

Result context_device(int* device) {
  *device = 0;
  return ready();
}

Result synchronise_context() {
  if (const Result result = ready(); result != kSuccess) return result;
  drain_all_streams();
  return sticky;
}

Result priority_range(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return ready();
}

struct Error {
  Result code;
  const char* name;
  const char* text;
};

constexpr Error kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kLaunchOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
};

Result error_name(Result error, const char** name) {
  for (const Error& entry : kErrors) {
    if (entry.code == error) return *name = entry.name, kSuccess;
  }
  return *name = nullptr, kInvalidValue;
}

Result error_string(Result error, const char** text) {
  for (const Error& entry : kErrors) {
    if (entry.code == error) return *text = entry.text, kSuccess;
  }
  return *text = nullptr, kInvalidValue;
}

const Exports exports{
    {"cuInit", address_of(init)},
    {"cuDriverGetVersion", address_of(driver_version)},
    {"cuDeviceGetCount", address_of(device_count)},
    {"cuDeviceGet", address_of(device_get)},
    {"cuDeviceGetName", address_of(device_name)},
    {"cuDeviceGetUuid", address_of(device_uuid)},
    {"cuDeviceGetAttribute", address_of(device_attribute)},
    {"cuDeviceGetExecAffinitySupport", address_of(affinity_support)},
    {"cuCtxGetExecAffinity", address_of(context_affinity)},
    {"cuDeviceTotalMem", address_of(total_memory)},
    {"cuDeviceGetPCIBusId", address_of(pci_bus_id)},
    {"cuDevicePrimaryCtxRetain", address_of(retain_context)},
    {"cuDevicePrimaryCtxRelease", address_of(release_context)},
    {"cuCtxSetCurrent", address_of(set_context)},
    {"cuCtxGetCurrent", address_of(get_context)},
    {"cuCtxGetDevice", address_of(context_device)},
    {"cuCtxSynchronize", address_of(synchronise_context)},
    {"cuCtxGetStreamPriorityRange", address_of(priority_range)},
    {"cuGetErrorName", address_of(error_name)},
    {"cuGetErrorString", address_of(error_string)},
};

}  // namespace

std::string option(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value == nullptr ? fallback : value;
}

int64_t number(const char* name, int64_t fallback) {
  const char* value = getenv(name);
  return value == nullptr ? fallback : atoll(value);
}

void log_line(const std::string& json) {
  static std::mutex& lock = *new std::mutex;
  static const std::string& path = *new std::string(option("ULL_FAKECUDA_LOG", ""));
  if (path.empty()) return;
  const std::lock_guard guard(lock);
  std::ofstream(path, std::ios::app) << json << "\n";
}

Result ready() {
  if (!initialised) return kNotInitialized;
  if (current == nullptr || retained == 0) return kInvalidContext;
  return sticky;
}

void set_sticky_error(Result error) {
  Result none = kSuccess;
  sticky.compare_exchange_strong(none, error);
}

Result sticky_error() { return sticky; }

}  // namespace fakecuda
