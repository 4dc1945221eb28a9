// Modules and kernels: an image must be an ELF file for CUDA that has the kernel's symbol; what runs is the function of
// that name in the library of emulated kernels. One kernel is the double's own: fakecuda_call calls a function of the
// process, and so stands for the kernels of a library that the double does not have.
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>

#include "fake.h"
#include "params.h"

namespace fakecuda {

namespace {

constexpr int kCudaMachine = 190;  // EM_CUDA

struct Module {
  std::set<std::string> symbols;
  std::map<std::string, std::shared_ptr<Function>> functions;
};

Handles<Module>& modules() {
  static auto* handles = new Handles<Module>;
  return *handles;
}
Handles<Function>& functions() {
  static auto* handles = new Handles<Function>;
  return *handles;
}

struct HostCall {  // parameters of fakecuda_call
  void (*function)(int64_t);
  int64_t argument;
};
const UllKernel kHostCall = {"fakecuda_call", sizeof(HostCall), 1024};

// A library that ULL_FAKECUDA_KERNELS names.
struct Library {
  std::string symbol;  // of the images whose kernels it holds; empty: of all others
  LaunchFunction launch = nullptr;
  std::map<std::string, UllKernel> kernels;

  // entry: PATH or SYMBOL=PATH; empty: a library of what is the double's own.
  explicit Library(const std::string& entry) {
    const size_t sign = entry.find('=');
    if (sign != std::string::npos) symbol = entry.substr(0, sign);
    const std::string path = sign == std::string::npos ? entry : entry.substr(sign + 1);
    kernels[kHostCall.name] = kHostCall;
    if (path.empty()) return;
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      fprintf(stderr, "fakecuda: %s\n", dlerror());
      return;
    }
    launch = reinterpret_cast<LaunchFunction>(dlsym(handle, "ull_emulator_launch"));
    const auto list = reinterpret_cast<int (*)(const UllKernel**)>(dlsym(handle, "ull_emulator_kernels"));
    const UllKernel* entries;
    const int count = list(&entries);
    for (int i = 0; i < count; ++i) kernels[entries[i].name] = entries[i];
    // A kernel under way at exit ends before the libraries' own variables are destroyed.
    static const int once = std::atexit([] { exiting.lock(); });
    (void)once;
  }

  static inline std::mutex& exiting = *new std::mutex;
};

// Those of all images; the last one serves those that no other does.
const std::vector<Library*>& libraries() {
  static const auto* loaded = [] {
    auto* all = new std::vector<Library*>;
    std::stringstream entries(option("ULL_FAKECUDA_KERNELS", ""));
    for (std::string entry; std::getline(entries, entry, ':');) all->push_back(new Library(entry));
    if (all->empty()) all->push_back(new Library(""));
    std::stable_partition(all->begin(), all->end(), [](const Library* one) { return !one->symbol.empty(); });
    return all;
  }();
  return *loaded;
}

const Library& library_of(const std::set<std::string>& symbols) {
  for (const Library* library : libraries()) {
    if (symbols.count(library->symbol) != 0) return *library;
  }
  return *libraries().back();
}

// The names in the image's symbol table; false if it is no ELF file for CUDA.
bool read_symbols(const unsigned char* image, std::set<std::string>& names) {
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_ident[EI_CLASS] != ELFCLASS64) return false;
  if (header->e_machine != kCudaMachine || header->e_shentsize != sizeof(Elf64_Shdr)) return false;
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB || sections[i].sh_link >= header->e_shnum) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image + sections[i].sh_offset);
    const auto* text = reinterpret_cast<const char*>(image + sections[sections[i].sh_link].sh_offset);
    for (size_t j = 0; j < sections[i].sh_size / sizeof(Elf64_Sym); ++j) names.insert(text + symbols[j].st_name);
  }
  return true;
}

Result load(void** handle, const void* image) {
  if (const Result result = ready(); result != kSuccess) return result;
  int64_t value;
  if (fault_now("module", value)) return static_cast<Result>(value);
  if (image == nullptr) return kInvalidValue;
  auto module = std::make_shared<Module>();
  if (!read_symbols(static_cast<const unsigned char*>(image), module->symbols)) return kInvalidImage;
  *handle = modules().add(module);
  return kSuccess;
}

Result load_with_options(void** handle, const void* image, unsigned, int*, void**) { return load(handle, image); }

Result unload(void* handle) { return modules().remove(handle) == nullptr ? kInvalidHandle : ready(); }

Result get_function(void** handle, void* module_handle, const char* name) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto module = modules().find(module_handle);
  if (module == nullptr) return kInvalidHandle;
  if (module->symbols.count(name) == 0) return kNotFound;
  auto& function = module->functions[name];
  if (function == nullptr) {
    const Library& library = library_of(module->symbols);
    const auto kernel = library.kernels.find(name);
    if (kernel == library.kernels.end()) {
      fprintf(stderr, "fakecuda: ULL_FAKECUDA_KERNELS has no %s\n", name);
      return kNotFound;
    }
    function = std::make_shared<Function>(Function{name, kernel->second, library.launch});
    functions().add(function);
  }
  *handle = function.get();
  return kSuccess;
}

constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kCarveout = 9;          // CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT

Result set_attribute(void* handle, int attribute, int value) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto function = functions().find(handle);
  if (function == nullptr) return kInvalidHandle;
  if (attribute == kCarveout) return value >= -1 && value <= 100 ? kSuccess : kInvalidValue;
  if (attribute != kMaxDynamicShared) return kNotSupported;
  if (value < 0 || value > 227 * 1024) return kInvalidValue;
  function->shared_limit = value;
  return kSuccess;
}

Result get_attribute(int* value, int attribute, void* handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto function = functions().find(handle);
  if (function == nullptr) return kInvalidHandle;
  if (attribute != 0 && attribute != kMaxDynamicShared) return kNotSupported;
  *value = attribute == 0 ? function->kernel.most_threads : function->shared_limit;
  return kSuccess;
}

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  int padding;
  int value[16];
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

constexpr int kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

Result launch_with(const LaunchConfig* config, void* handle, void** params, void** extra) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto function = functions().find(handle);
  const auto stream = find_stream(config->stream);
  if (function == nullptr || stream == nullptr) return kInvalidHandle;
  const unsigned threads = config->block[0];
  if (config->grid[0] == 0 || config->grid[1] == 0 || config->grid[1] > 65535 || config->grid[2] != 1)
    return kInvalidValue;
  if (config->block[1] != 1 || config->block[2] != 1 || threads == 0 || threads > 1024) return kInvalidValue;
  if (threads > static_cast<unsigned>(function->kernel.most_threads)) return kLaunchOutOfResources;
  if (config->shared_bytes > static_cast<unsigned>(function->shared_limit)) return kInvalidValue;
  if (params == nullptr || extra != nullptr) return kInvalidValue;
  bool overlaps = false;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id != kProgrammaticSerialization) return kNotSupported;
    overlaps = config->attributes[i].value[0] != 0;
  }
  const auto* bytes = static_cast<const unsigned char*>(params[0]);
  auto kernel = std::make_shared<KernelNode>(
      KernelNode{function, static_cast<int>(config->grid[0]), static_cast<int>(config->grid[1]),
                 static_cast<int>(threads), static_cast<int>(config->shared_bytes),
                 std::vector<unsigned char>(bytes, bytes + function->kernel.params_bytes), overlaps});
  if (stream->capture != nullptr) {
    log_line("{\"event\":\"capture\",\"kernel\":\"" + function->name + "\",\"grid\":[" +
             std::to_string(kernel->grid_x) + "," + std::to_string(kernel->grid_y) +
             "],\"threads\":" + std::to_string(threads) + ",\"shared_bytes\":" + std::to_string(kernel->shared_bytes) +
             ",\"overlaps\":" + (overlaps ? "true" : "false") + "}");
  }
  return submit(stream, {NodeType::kKernel, [kernel] { run_kernel(*kernel); }, kernel});
}

Result launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
              unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra) {
  const LaunchConfig config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, nullptr, 0};
  return launch_with(&config, function, params, extra);
}

Result active_blocks(int* count, void* handle, int threads, size_t shared_bytes) {
  if (const Result result = ready(); result != kSuccess) return result;
  if (functions().find(handle) == nullptr) return kInvalidHandle;
  if (threads < 1 || threads > 1024) return kInvalidValue;
  const size_t by_memory = 228 * 1024 / (shared_bytes + 1024);
  *count = static_cast<int>(std::min<size_t>(static_cast<size_t>(2048 / threads), by_memory));
  return kSuccess;
}

// Puts a token id that was never drawn into the round that ull_accept is about to report.
void corrupt(const KernelNode& kernel) {
  int64_t value;
  if (kernel.function->name != "ull_accept" || !fault_now("corrupt", value)) return;
  ull::gpu::AcceptParams params;
  memcpy(&params, kernel.params.data(), sizeof(params));
  for (auto& drawn : params.round->drawn) drawn.token = static_cast<int32_t>(value);
}

const Exports exports{
    {"cuModuleLoadData", address_of(load)},
    {"cuModuleLoadDataEx", address_of(load_with_options)},
    {"cuModuleUnload", address_of(unload)},
    {"cuModuleGetFunction", address_of(get_function)},
    {"cuFuncSetAttribute", address_of(set_attribute)},
    {"cuFuncGetAttribute", address_of(get_attribute)},
    {"cuLaunchKernel", address_of(launch)},
    {"cuLaunchKernelEx", address_of(launch_with)},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", address_of(active_blocks)},
};

}  // namespace

void run_kernel(const KernelNode& kernel) {
  if (kernel.function->name == kHostCall.name) {
    HostCall call;
    memcpy(&call, kernel.params.data(), sizeof(call));
    call.function(call.argument);
    return;
  }
  static std::atomic<uint64_t> seed = static_cast<uint64_t>(number("ULL_FAKECUDA_SEED", 0));
  const std::lock_guard guard(Library::exiting);
  corrupt(kernel);
  const UllLaunch launch = {.kernel = kernel.function->kernel.name,
                            .grid_x = kernel.grid_x,
                            .grid_y = kernel.grid_y,
                            .threads = kernel.threads,
                            .shared_bytes = kernel.shared_bytes,
                            .params = kernel.params.data(),
                            .seed = seed++,
                            .written = nullptr,
                            .constants = nullptr,
                            .earlier = nullptr,
                            .host_reads = nullptr,
                            .written_count = 0,
                            .constant_count = 0,
                            .earlier_count = 0,
                            .host_read_count = 0};
  char error[4096];
  if (kernel.function->launch(&launch, error, sizeof(error)) == 0) return;
  fprintf(stderr, "fakecuda: %s\n", error);
  set_sticky_error(strstr(error, "illegal memory access") != nullptr ? kIllegalAddress : kLaunchFailed);
}

}  // namespace fakecuda
