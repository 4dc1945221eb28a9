// Graphs: lists of captured operations, replayed on a stream.
#include <chrono>
#include <thread>

#include "fake.h"

namespace fakecuda {

namespace {

Handles<Graph>& graphs() {
  static auto* handles = new Handles<Graph>;
  return *handles;
}

struct Executable {
  std::vector<std::shared_ptr<Node>> nodes;
};

Handles<Executable>& executables() {
  static auto* handles = new Handles<Executable>;
  return *handles;
}

Result end_capture(void* stream_handle, void** graph) {
  *graph = nullptr;
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture == nullptr) return kIllegalState;
  const auto captured = std::move(stream->capture);
  stream->capture = nullptr;
  if (stream->capture_broken) return kCaptureInvalidated;
  *graph = graphs().add(captured);
  return kSuccess;
}

Result instantiate(void** executable, void* graph_handle, unsigned long long /*flags*/) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto graph = graphs().find(graph_handle);
  if (graph == nullptr) return kInvalidHandle;
  *executable = executables().add(std::make_shared<Executable>(Executable{graph->nodes}));
  log_line("{\"event\":\"instantiate\",\"nodes\":" + std::to_string(graph->nodes.size()) + "}");
  return kSuccess;
}

struct InstantiateParams {  // CUDA_GRAPH_INSTANTIATE_PARAMS
  uint64_t flags;
  void* upload_stream;
  void* error_node;
  int result;
};

Result instantiate_with_params(void** executable, void* graph, InstantiateParams* params) {
  params->error_node = nullptr;
  params->result = 0;
  return instantiate(executable, graph, params->flags);
}

[[noreturn]] void hang() {
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

Result launch(void* handle, void* stream_handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto executable = executables().find(handle);
  const auto stream = find_stream(stream_handle);
  if (executable == nullptr || stream == nullptr) return kInvalidHandle;
  int64_t value;
  if (fault_now("launch", value)) return static_cast<Result>(value);
  if (fault_now("hang", value)) {
    enqueue(stream, hang);
    return kSuccess;
  }
  if (fault_now("sticky", value)) {
    enqueue(stream, [value] { set_sticky_error(static_cast<Result>(value)); });
    return kSuccess;
  }
  const auto run = [executable] {
    for (const auto& node : executable->nodes) {
      if (sticky_error() == kSuccess) node->run();
    }
  };
  // Within a capture it becomes a child graph.
  const Result result =
      submit(stream, {NodeType::kGraph, run, nullptr, std::make_shared<Graph>(Graph{executable->nodes})});
  static const auto patience = std::chrono::milliseconds(number("ULL_FAKECUDA_LAUNCH_MS", 0));
  if (stream->capture == nullptr) rests(*stream, patience);
  return result;
}

Result upload(void* handle, void* stream) {
  if (const Result result = ready(); result != kSuccess) return result;
  return executables().find(handle) != nullptr && find_stream(stream) != nullptr ? kSuccess : kInvalidHandle;
}

Result destroy(void* handle) { return graphs().remove(handle) == nullptr ? kInvalidHandle : ready(); }
Result destroy_executable(void* handle) { return executables().remove(handle) == nullptr ? kInvalidHandle : ready(); }

Result nodes(void* handle, void** list, size_t* count) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto graph = graphs().find(handle);
  if (graph == nullptr) return kInvalidHandle;
  if (list != nullptr) {
    for (size_t i = 0; i < *count && i < graph->nodes.size(); ++i) list[i] = graph->nodes[i].get();
  }
  *count = graph->nodes.size();
  return kSuccess;
}

std::shared_ptr<Node> find_node(const Graph& graph, void* handle) {
  for (const auto& node : graph.nodes) {
    if (node.get() == handle) return node;
    if (node->child == nullptr) continue;
    if (auto found = find_node(*node->child, handle)) return found;
  }
  return nullptr;
}

std::shared_ptr<Node> find_node(void* handle) {
  for (const auto& graph : graphs().all()) {
    if (auto found = find_node(*graph, handle)) return found;
  }
  return nullptr;
}

Result node_type(void* handle, int* type) {
  const auto node = find_node(handle);
  if (node == nullptr) return kInvalidHandle;
  *type = static_cast<int>(node->type);
  return ready();
}

Result child_graph(void* handle, void** graph) {
  const auto node = find_node(handle);
  if (node == nullptr) return kInvalidHandle;
  if (node->child == nullptr) return kInvalidValue;
  *graph = graphs().add(node->child);
  return ready();
}

// A function of the host's, called in the stream's turn.
Result launch_host(void* stream_handle, void (*function)(void*), void* data) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  return submit(stream, {NodeType::kHost, [function, data] { function(data); }});
}

struct KernelNodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** params;
  void** extra;
  void* kernel;
  void* context;
};

Result kernel_node_params(void* handle, KernelNodeParams* params) {
  const auto node = find_node(handle);
  if (node == nullptr) return kInvalidHandle;
  if (node->kernel == nullptr) return kInvalidValue;
  const KernelNode& kernel = *node->kernel;
  *params = {kernel.function.get(),
             {static_cast<unsigned>(kernel.grid_x), static_cast<unsigned>(kernel.grid_y), 1},
             {static_cast<unsigned>(kernel.threads), 1, 1},
             static_cast<unsigned>(kernel.shared_bytes),
             nullptr,
             nullptr,
             nullptr,
             nullptr};
  return ready();
}

const Exports exports{
    {"cuStreamEndCapture", address_of(end_capture)},
    {"cuGraphInstantiate", address_of(instantiate)},
    {"cuGraphInstantiateWithFlags", address_of(instantiate)},
    {"cuGraphInstantiateWithParams", address_of(instantiate_with_params)},
    {"cuGraphLaunch", address_of(launch)},
    {"cuGraphUpload", address_of(upload)},
    {"cuGraphDestroy", address_of(destroy)},
    {"cuGraphExecDestroy", address_of(destroy_executable)},
    {"cuGraphGetNodes", address_of(nodes)},
    {"cuGraphNodeGetType", address_of(node_type)},
    {"cuGraphChildGraphNodeGetGraph", address_of(child_graph)},
    {"cuLaunchHostFunc", address_of(launch_host)},
    {"cuGraphKernelNodeGetParams", address_of(kernel_node_params)},
};

}  // namespace

}  // namespace fakecuda
