// Faults that tests ask for: "kind=when" or "kind=when:value", separated by commas, in ULL_FAKECUDA_FAULT or, while the
// process runs, in the file that ULL_FAKECUDA_CONTROL names (read, and emptied, at each graph launch). The fault
// happens at the when-th event from then on:
//   launch=N[:error]   cuGraphLaunch fails (701); nothing runs
//   hang=N             the graph launched never ends
//   sticky=N[:error]   the graph launched ends the context: every later call returns the error (700)
//   corrupt=N[:token]  the round of the N-th ull_accept reports this token id (-7) instead of what was drawn
//   alloc=N            cuMemAlloc has no memory left
//   module=N[:error]   cuModuleLoadData refuses the image (209)
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "fake.h"

namespace fakecuda {

namespace {

std::mutex lock;
std::vector<Fault>* faults = nullptr;

int64_t default_value(const std::string& kind) {
  if (kind == "launch") return kLaunchOutOfResources;
  if (kind == "sticky") return kIllegalAddress;
  if (kind == "corrupt") return -7;
  if (kind == "module") return 209;  // CUDA_ERROR_NO_BINARY_FOR_GPU
  return 0;
}

void add(const std::string& text) {
  std::istringstream stream(text);
  std::string item;
  while (std::getline(stream, item, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string::npos) continue;
    const std::string kind = item.substr(0, equals);
    const size_t colon = item.find(':', equals);
    const int64_t value = colon == std::string::npos ? default_value(kind) : atoll(item.c_str() + colon + 1);
    faults->push_back({kind, atoll(item.c_str() + equals + 1), value});
  }
}

void read_control_file() {
  static const std::string path = option("ULL_FAKECUDA_CONTROL", "");
  if (path.empty()) return;
  std::ifstream file(path);
  std::string text;
  if (!std::getline(file, text) || text.empty()) return;
  std::ofstream(path, std::ios::trunc);
  add(text);
}

}  // namespace

bool fault_now(const std::string& kind, int64_t& value) {
  const std::lock_guard guard(lock);
  if (faults == nullptr) {
    faults = new std::vector<Fault>;
    add(option("ULL_FAKECUDA_FAULT", ""));
  }
  if (kind == "launch") read_control_file();
  for (Fault& fault : *faults) {
    if (fault.kind != kind || fault.countdown <= 0 || --fault.countdown != 0) continue;
    value = fault.value;
    log_line("{\"event\":\"fault\",\"kind\":\"" + kind + "\",\"value\":" + std::to_string(value) + "}");
    return true;
  }
  return false;
}

}  // namespace fakecuda
