// The cpu executor.
#include "cpu/cpu_executor.h"

#include "module/bindings.h"
#include "module/model.h"
#include "testing/ngram.h"

namespace ull::module {
namespace {

cpu::SpeculationOptions speculation_options(const std::string& speculate, int max_tree, bool adaptive, bool coupled) {
  if (max_tree < 1 || max_tree > kMaxTreeTokens) {
    throw std::invalid_argument("max_tree: must be 1 to " + std::to_string(kMaxTreeTokens));
  }
  return {.drafter = drafter_named(speculate), .max_tree = max_tree, .adaptive = adaptive, .coupled = coupled};
}

}  // namespace

void bind_cpu(nb::module_& m) {
  nb::class_<cpu::CpuExecutor, Executor>(m, "CpuExecutor", "The executor that needs no GPU.")
      .def(
          "__init__",
          [](cpu::CpuExecutor* self, const nb::dict& spec, int threads, std::vector<int> cores, int prefill_chunk,
             std::optional<int> pages, std::string isa, const std::string& speculate, int max_tree, bool adaptive,
             bool coupled, std::shared_ptr<PastOutputs> past_outputs, bool ngram,
             const ReplayedTables& replayed_acceptance) {
            cpu::ModelSpec read = model_spec(spec);
            cpu::SpeculationOptions speculation = speculation_options(speculate, max_tree, adaptive, coupled);
            speculation.past_outputs = std::move(past_outputs);
            speculation.replace_drafter = replacement(replayed_acceptance, read.vocabulary, read.context);
            if (ngram) {
              speculation.in_place_of_suffix = [context = read.context] {
                return std::make_unique<NgramDrafter>(context);
              };
            }
            new (self) cpu::CpuExecutor(std::move(read),
                                        model_options(threads, std::move(cores), std::move(isa), prefill_chunk, pages),
                                        std::move(speculation));
          },
          "spec"_a, nb::kw_only(), "threads"_a, "cores"_a, "prefill_chunk"_a = 256, "pages"_a = nb::none(),
          "isa"_a = "auto", "speculate"_a = "none", "max_tree"_a = kMaxTreeTokens, "adaptive"_a = true,
          "coupled"_a = true, "past_outputs"_a.none() = nb::none(), "ngram"_a = false,
          "replayed_acceptance"_a = ReplayedTables(),
          "`threads` includes the engine thread. `cores`: none, or one per thread; the first is the engine thread's "
          "own. `pages`: KV pages of 64 tokens, default: one session of the spec's context. `speculate`, `max_tree`: "
          "of requests that name none. adaptive=False drafts the widest tree allowed in every round, whether that pays "
          "or not. `past_outputs`: what the suffix drafter drafts from beside the request's own text, and feeds. For "
          "comparisons: coupled=False ranks drafts without the request's noise; ngram=True lets the last match alone "
          "draft in place of `suffix`; replayed_acceptance={drafter: tables} has drafts be right as often "
          "as others have published (chances by depth, of each kind of text; a request's seed says which).");
}

}  // namespace ull::module
