// Device memory is the host's, mapped page by page with an unreadable page behind each allocation; copies are checked
// against the allocations.
#include <sys/mman.h>

#include <cstring>

#include "fake.h"

namespace fakecuda {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kAlignment = 256;  // of device memory
constexpr uint64_t kFilledBytes =
    256 << 20;  // what a new allocation shows as 0xFF; larger ones read as zeros behind it

struct Allocation {
  uint64_t bytes;
  uint64_t area;  // start of the mapping
  uint64_t area_bytes;
  bool host;  // mapped host memory
};

std::mutex& lock = *new std::mutex;
std::map<uint64_t, Allocation>& allocations = *new std::map<uint64_t, Allocation>;

uint64_t free_bytes() {
  auto free = static_cast<uint64_t>(number("ULL_FAKECUDA_FREE", number("ULL_FAKECUDA_MEMORY", 150'754'820'096)));
  for (const auto& [address, allocation] : allocations) {
    if (!allocation.host) free -= std::min(free, allocation.bytes);
  }
  return free;
}

uint64_t map_pages(uint64_t bytes, bool host) {
  const uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const uint64_t pages = (rounded + kPage - 1) / kPage * kPage;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* area = mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (area == MAP_FAILED) return 0;
  auto* start = static_cast<unsigned char*>(area);
  mprotect(start + pages, kPage, PROT_NONE);
  unsigned char* data = start + pages - rounded;
  memset(data, 0xFF, std::min(bytes, kFilledBytes));
  const auto address = reinterpret_cast<uint64_t>(data);
  allocations[address] = {bytes, reinterpret_cast<uint64_t>(area), pages + kPage, host};
  return address;
}

Result unmap(uint64_t address, bool host) {
  const std::lock_guard guard(lock);
  const auto found = allocations.find(address);
  if (found == allocations.end() || found->second.host != host) return kInvalidValue;
  munmap(reinterpret_cast<void*>(found->second.area), found->second.area_bytes);
  allocations.erase(found);
  return kSuccess;
}

// The allocation that [address, address + bytes) lies in.
const Allocation* find(uint64_t address, uint64_t bytes) {
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return nullptr;
  --next;
  return address + bytes <= next->first + next->second.bytes ? &next->second : nullptr;
}

bool is_pinned(uint64_t address, uint64_t bytes) {
  const std::lock_guard guard(lock);
  const Allocation* allocation = find(address, bytes);
  return allocation != nullptr && allocation->host;
}

Result memory_info(size_t* free, size_t* total) {
  const std::lock_guard guard(lock);
  *free = free_bytes();
  *total = static_cast<size_t>(number("ULL_FAKECUDA_MEMORY", 150'754'820'096));
  return ready();
}

Result allocate(uint64_t* address, size_t bytes) {
  if (const Result result = ready(); result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  int64_t unused;
  if (fault_now("alloc", unused)) return kOutOfMemory;
  const std::lock_guard guard(lock);
  if (bytes > free_bytes()) return kOutOfMemory;
  *address = map_pages(bytes, false);
  return *address == 0 ? kOutOfMemory : kSuccess;
}

Result release(uint64_t address) {
  if (const Result result = ready(); result != kSuccess) return result;
  drain_all_streams();
  return address == 0 ? kSuccess : unmap(address, false);
}

Result allocate_host(void** pointer, size_t bytes, unsigned /*flags*/) {
  if (const Result result = ready(); result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  const std::lock_guard guard(lock);
  *pointer = reinterpret_cast<void*>(map_pages(bytes, true));
  return *pointer == nullptr ? kOutOfMemory : kSuccess;
}

Result allocate_host_plain(void** pointer, size_t bytes) { return allocate_host(pointer, bytes, 0); }

Result host_device_pointer(uint64_t* address, void* pointer, unsigned flags) {
  *address = reinterpret_cast<uint64_t>(pointer);
  if (const Result result = ready(); result != kSuccess) return result;
  return flags == 0 && is_pinned(*address, 1) ? kSuccess : kInvalidValue;
}

Result release_host(void* pointer) {
  if (const Result result = ready(); result != kSuccess) return result;
  drain_all_streams();
  return unmap(reinterpret_cast<uint64_t>(pointer), true);
}

// A copy between a device range, checked, and host memory. From pageable memory the driver takes its own copy of the
// source before it returns; pinned memory is read, and written, when the copy's turn comes.
Result copy(uint64_t target, uint64_t source, uint64_t bytes, uint64_t host, void* stream_handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  if (bytes == 0) return kSuccess;
  if (target != host && !is_device_range(target, bytes)) return kInvalidValue;
  if (source != host && !is_device_range(source, bytes)) return kInvalidValue;
  const bool pinned = host != 0 && is_pinned(host, bytes);
  auto snapshot = std::make_shared<std::vector<unsigned char>>();
  if (host == source && !pinned) {
    const auto* data = reinterpret_cast<const unsigned char*>(source);
    snapshot->assign(data, data + bytes);
  }
  const auto run = [=] {
    const void* from = snapshot->empty() ? reinterpret_cast<const void*>(source) : snapshot->data();
    memmove(reinterpret_cast<void*>(target), from, bytes);
  };
  const Result result = submit(stream, {NodeType::kMemcpy, run, nullptr});
  if (result != kSuccess || host != target || pinned || stream->capture != nullptr) return result;
  return wait_for(stream);
}

Result to_device(uint64_t target, const void* source, size_t bytes, void* stream) {
  const auto host = reinterpret_cast<uint64_t>(source);
  return copy(target, host, bytes, host, stream);
}
Result to_host(void* target, uint64_t source, size_t bytes, void* stream) {
  const auto host = reinterpret_cast<uint64_t>(target);
  return copy(host, source, bytes, host, stream);
}
Result within_device(uint64_t target, uint64_t source, size_t bytes, void* stream) {
  return copy(target, source, bytes, 0, stream);
}

// The forms without a stream wait until the copy is done.
Result finish(Result result) { return result == kSuccess ? wait_for(find_stream(nullptr)) : result; }
Result to_device_now(uint64_t target, const void* source, size_t bytes) {
  return finish(to_device(target, source, bytes, nullptr));
}
Result to_host_now(void* target, uint64_t source, size_t bytes) {
  return finish(to_host(target, source, bytes, nullptr));
}
Result within_device_now(uint64_t target, uint64_t source, size_t bytes) {
  return finish(within_device(target, source, bytes, nullptr));
}

template <typename T>
Result fill(uint64_t target, T value, size_t count, void* stream_handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  if (target % sizeof(T) != 0 || !is_device_range(target, count * sizeof(T))) return kInvalidValue;
  const auto run = [=] {
    auto* data = reinterpret_cast<T*>(target);
    for (size_t i = 0; i < count; ++i) data[i] = value;
  };
  return submit(stream, {NodeType::kMemset, run, nullptr});
}
Result fill8(uint64_t target, unsigned char value, size_t count, void* stream) {
  return fill(target, value, count, stream);
}
Result fill32(uint64_t target, unsigned value, size_t count, void* stream) {
  return fill(target, value, count, stream);
}
Result fill8_now(uint64_t target, unsigned char value, size_t count) {
  return finish(fill(target, value, count, nullptr));
}
Result fill32_now(uint64_t target, unsigned value, size_t count) { return finish(fill(target, value, count, nullptr)); }

const Exports exports{
    {"cuMemGetInfo", address_of(memory_info)},
    {"cuMemAlloc", address_of(allocate)},
    {"cuMemFree", address_of(release)},
    {"cuMemHostAlloc", address_of(allocate_host)},
    {"cuMemAllocHost", address_of(allocate_host_plain)},
    {"cuMemHostGetDevicePointer", address_of(host_device_pointer)},
    {"cuMemFreeHost", address_of(release_host)},
    {"cuMemcpyHtoD", address_of(to_device_now)},
    {"cuMemcpyDtoH", address_of(to_host_now)},
    {"cuMemcpyDtoD", address_of(within_device_now)},
    {"cuMemcpyHtoDAsync", address_of(to_device)},
    {"cuMemcpyDtoHAsync", address_of(to_host)},
    {"cuMemcpyDtoDAsync", address_of(within_device)},
    {"cuMemsetD8", address_of(fill8_now)},
    {"cuMemsetD32", address_of(fill32_now)},
    {"cuMemsetD8Async", address_of(fill8)},
    {"cuMemsetD32Async", address_of(fill32)},
};

}  // namespace

bool is_device_range(uint64_t address, uint64_t bytes) {
  const std::lock_guard guard(lock);
  return find(address, bytes) != nullptr;
}

}  // namespace fakecuda
