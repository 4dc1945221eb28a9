// cuGetProcAddress_v2, the one symbol through which everything else is found.
#include <cstring>

#include "fake.h"

namespace fakecuda {

namespace {

std::map<std::string, void*>& table() {
  static auto* functions = new std::map<std::string, void*>;  // never destroyed: threads may outlive main()
  return *functions;
}

constexpr uint64_t kFound = 0;  // CUdriverProcAddressQueryResult
constexpr uint64_t kMissing = 1;

Result get_proc_address(const char* symbol, void** function, int /*version*/, uint64_t /*flags*/, int* status) {
  const auto found = table().find(symbol);
  *function = found == table().end() ? nullptr : found->second;
  if (status != nullptr) *status = static_cast<int>(*function == nullptr ? kMissing : kFound);
  return *function == nullptr ? kNotFound : kSuccess;
}

const Exports exports{{"cuGetProcAddress", address_of(get_proc_address)},
                      {"cuGetProcAddress_v2", address_of(get_proc_address)}};

}  // namespace

Exports::Exports(std::initializer_list<std::pair<const char*, void*>> functions) {
  for (const auto& [name, function] : functions) table()[name] = function;
}

}  // namespace fakecuda

extern "C" __attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* symbol, void** function,
                                                                          int version, uint64_t flags, int* status) {
  return fakecuda::get_proc_address(symbol, function, version, flags, status);
}
