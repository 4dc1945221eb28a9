// The graph executor, from the dict that ull/gpu hands over.
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>

#include "graph/driver.h"
#include "graph/graph_executor.h"
#include "graph/program.h"
#include "module/bindings.h"

namespace ull::module {
namespace {

template <typename Pointer = void*>
Pointer address(const nb::dict& dict, const char* name) {
  return reinterpret_cast<Pointer>(field<uintptr_t>(dict, name));
}

Reuse reuse_named(const std::string& name) {
  if (name == "all") return Reuse::kAll;
  if (name == "prompt") return Reuse::kPrompt;
  if (name == "nothing") return Reuse::kNothing;
  throw std::invalid_argument("reuse: must be all, prompt or nothing, not \"" + name + "\"");
}

// Handles of rounds by the most tokens; ValueError names the field.
void read_rounds(const nb::dict& dict, void* (&rounds)[kCostSizes]) {
  for (const auto& [tokens, handle] : field<std::map<int, uintptr_t>>(dict, "graphs")) {
    const int* size = std::find(std::begin(kCostTokens), std::end(kCostTokens), tokens);
    if (size == std::end(kCostTokens) || handle == 0) {
      throw std::invalid_argument("graphs: must map 1, 2, 4, 8, 16, 32 or 64 tokens to the handle of a graph");
    }
    rounds[size - std::begin(kCostTokens)] = reinterpret_cast<void*>(handle);
  }
}

// Handles by the sampler's name, at a member of `singles`; ValueError names the field.
void read_singles(const nb::dict& dict, const char* name, void* graph::SingleGraphs::* member,
                  graph::SingleGraphs (&singles)[graph::kSamplers]) {
  constexpr const char* kNames[graph::kSamplers] = {"full", "plain", "scan"};
  if (!dict.contains(name)) return;
  for (const auto& [sampler, handle] : field<std::map<std::string, uintptr_t>>(dict, name)) {
    const auto* known = std::find(std::begin(kNames), std::end(kNames), sampler);
    if (known == std::end(kNames) || handle == 0) {
      throw std::invalid_argument(std::string(name) + ": must map full, plain or scan to the handle of a graph");
    }
    singles[known - std::begin(kNames)].*member = reinterpret_cast<void*>(handle);
  }
}

// Graphs by the draws that they hold, and the mask; ValueError names the field.
void read_redraws(const nb::dict& dict, graph::GraphProgram& program) {
  if (!dict.contains("redraws")) return;
  for (const auto& [draws, handle] : field<std::map<int, uintptr_t>>(dict, "redraws")) {
    if ((draws != 1 && draws != gpu::kTreeTokens) || handle == 0) {
      throw std::invalid_argument("redraws: must map 1 and 64 draws to the handle of a graph");
    }
    (draws == 1 ? program.redraw : program.redraws) = reinterpret_cast<void*>(handle);
  }
  if (program.redraw != nullptr) program.mask = address<uint32_t*>(dict, "mask");
}

void read_blocks(const nb::dict& dict, graph::RoundBlocks& blocks) {
  blocks.stream = address(dict, "stream");
  blocks.context = address(dict, "context");
  blocks.requests = address<gpu::RoundRequest*>(dict, "requests");
  blocks.results = address<gpu::RoundResult*>(dict, "results");
  blocks.control = address<gpu::HostControl*>(dict, "control");
  blocks.pages = address<int32_t*>(dict, "pages");
  blocks.text = address<int32_t*>(dict, "text");
  blocks.vocabulary = field<int>(dict, "vocabulary");
  blocks.context_tokens = field<int>(dict, "context_tokens");
  blocks.page_count = field<int>(dict, "page_count");
  blocks.weight_bytes = field<int64_t>(dict, "weight_bytes");
  blocks.kv_bytes = field<int64_t>(dict, "kv_bytes");
  blocks.kv_pages = field<uint64_t>(dict, "kv_pages");
  if (!dict.contains("chunk")) return;
  blocks.chunk = address(dict, "chunk");
  if (blocks.chunk != nullptr) blocks.chunks = address<int32_t*>(dict, "chunks");
}

// ValueError names the field.
graph::EagleProgram eagle_program(const nb::dict& dict) {
  graph::EagleProgram program;
  program.fill = address(dict, "fill");
  program.first = address(dict, "first");
  for (const auto& [entries, handle] : field<std::map<int, uintptr_t>>(dict, "levels")) {
    const int* size = std::find(std::begin(graph::kEagleLevels), std::end(graph::kEagleLevels), entries);
    if (size == std::end(graph::kEagleLevels)) throw std::invalid_argument("levels: must be of 16, 32 and 64 entries");
    program.levels[size - std::begin(graph::kEagleLevels)] = reinterpret_cast<void*>(handle);
  }
  read_blocks(dict, program);
  program.check();
  return program;
}

// ValueError names the field.
graph::DflashProgram dflash_program(const nb::dict& dict) {
  graph::DflashProgram program;
  for (const auto& [positions, handle] : field<std::map<int, uintptr_t>>(dict, "contexts")) {
    const int* size = std::find(std::begin(graph::kDflashContexts), std::end(graph::kDflashContexts), positions);
    if (size == std::end(graph::kDflashContexts)) {
      throw std::invalid_argument("contexts: must be of 8 and 64 positions");
    }
    program.contexts[size - std::begin(graph::kDflashContexts)] = reinterpret_cast<void*>(handle);
  }
  program.block = address(dict, "block");
  program.nodes = address(dict, "nodes");
  program.block_tokens = field<int>(dict, "block_tokens");
  program.mask_token = field<int32_t>(dict, "mask_token");
  program.anchor_predicts = field<bool>(dict, "anchor_predicts");
  read_blocks(dict, program);
  program.check();
  return program;
}

// ValueError names the field.
graph::GraphProgram graph_program(const nb::dict& dict) {
  graph::GraphProgram program;
  read_rounds(dict, program.rounds);
  read_singles(dict, "singles", &graph::SingleGraphs::round, program.singles);
  read_singles(dict, "bursts", &graph::SingleGraphs::burst, program.singles);
  if (dict.contains("wide")) {
    const auto wide = field<nb::dict>(dict, "wide");
    program.wide.from = field<int>(wide, "from");
    read_rounds(wide, program.wide.rounds);
    read_singles(wide, "singles", &graph::SingleGraphs::round, program.wide.singles);
    read_singles(wide, "bursts", &graph::SingleGraphs::burst, program.wide.singles);
  }
  if (dict.contains("burst_rounds")) program.burst_rounds = field<int>(dict, "burst_rounds");
  read_redraws(dict, program);
  program.prefill = address(dict, "prefill");
  if (dict.contains("last_chunk")) program.last_chunk = address(dict, "last_chunk");
  read_blocks(dict, program);
  program.name = field<std::string>(dict, "name");
  program.library = field<std::string>(dict, "library");
  if (dict.contains("medusa")) {
    program.medusa = address(dict, "medusa");
    program.medusa_heads = field<int>(dict, "medusa_heads");
    program.medusa_bytes = field<int64_t>(dict, "medusa_bytes");
  }
  if (dict.contains("draft")) {
    program.draft = std::make_shared<graph::GraphProgram>(graph_program(field<nb::dict>(dict, "draft")));
  }
  if (dict.contains("eagle")) {
    program.eagle = std::make_shared<graph::EagleProgram>(eagle_program(field<nb::dict>(dict, "eagle")));
  }
  if (dict.contains("dflash")) {
    program.dflash = std::make_shared<graph::DflashProgram>(dflash_program(field<nb::dict>(dict, "dflash")));
  }
  if (dict.contains("reuse")) program.reuse = reuse_named(field<std::string>(dict, "reuse"));
  program.check();
  return program;
}

}  // namespace

void bind_graph(nb::module_& m) {
  nb::class_<graph::GraphExecutor, Executor>(m, "GraphExecutor", "The executor that replays captured CUDA graphs.")
      .def(
          "__init__",
          [](graph::GraphExecutor* self, const nb::dict& program, int64_t watchdog_ms, int prefill_chunk,
             const std::string& drafter, int max_tree, bool adaptive, std::shared_ptr<PastOutputs> past_outputs,
             const ReplayedTables& replayed_acceptance) {
            graph::GraphProgram checked = graph_program(program);
            const graph::GraphOptions options{
                .watchdog_ms = watchdog_ms,
                .prefill_chunk = prefill_chunk,
                .drafter = drafter_named(drafter),
                .max_tree = max_tree,
                .adaptive = adaptive,
                .replace_drafter = replacement(replayed_acceptance, checked.vocabulary, checked.context_tokens),
                .past_outputs = std::move(past_outputs)};
            const graph::Driver driver = graph::load_driver(checked.library);
            new (self) graph::GraphExecutor(std::move(checked), driver, options);
          },
          "program"_a, nb::kw_only(), "watchdog_ms"_a = 2000, "prefill_chunk"_a = gpu::kChunkTokens,
          "drafter"_a = "none", "max_tree"_a = kMaxTreeTokens, "adaptive"_a = true,
          "past_outputs"_a.none() = nb::none(), "replayed_acceptance"_a = ReplayedTables(),
          "`program`: the hand-over of ull.gpu: handles and addresses, which must stay valid until the engine has "
          "stopped. Its device must not have run a round yet. `prefill_chunk`: most tokens of a prompt that a step "
          "reads, 512 at the most. `drafter`, `max_tree`: of requests that name none. adaptive=False drafts the widest "
          "tree allowed in every round, whether that pays or not. `past_outputs`: the suffix drafter's, beside the "
          "request's own text. `replayed_acceptance`: for measurements, as of the cpu executor. ValueError names the "
          "field at fault, RuntimeError what the driver lacks.");
}

}  // namespace ull::module
