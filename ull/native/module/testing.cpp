// The scripted executor, replayed acceptance, and the rig of speculation.
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "module/bindings.h"
#include "module/model.h"
#include "module/sampling.h"
#include "testing/local_decoder.h"
#include "testing/replayed_acceptance.h"
#include "testing/scripted_drafter.h"
#include "testing/scripted_executor.h"

namespace ull::module {
namespace {

nb::dict decode(cpu::LocalDecoder& self, const Int32Array& tokens, int max_tokens, const nb::dict& sampling,
                const std::string& speculate, int max_tree, const std::optional<Int32Array>& pages, int cached) {
  const SamplingParameters wanted(sampling);
  const cpu::DecodeRequest request{span_of(tokens),
                                   max_tokens,
                                   wanted.sampling(),
                                   drafter_named(speculate),
                                   max_tree,
                                   pages ? span_of(*pages) : std::span<const int32_t>(),
                                   cached};
  cpu::Decoded decoded;
  {
    const nb::gil_scoped_release release;
    decoded = self.decode(request);
  }
  nb::list ids, logprobs, top, rounds;
  for (const RoundToken& token : decoded.tokens) {
    ids.append(token.token);
    logprobs.append(token.logprob);
    nb::list alternatives;
    for (int rank = 0; rank < token.top_count; ++rank) {
      alternatives.append(nb::make_tuple(token.top[rank].token, token.top[rank].logprob));
    }
    top.append(alternatives);
  }
  for (const cpu::DecodeRound& round : decoded.rounds) {
    rounds.append(
        nb::make_tuple(drafter_name(round.drafter), round.tree_tokens, round.depth, round.accepted, round.nanoseconds));
  }
  nb::dict out;
  out["tokens"] = ids;
  out["logprobs"] = logprobs;
  out["top"] = top;
  out["rounds"] = rounds;
  out["failed"] = decoded.failed;
  return out;
}

}  // namespace

ReplaceDrafter replacement(const ReplayedTables& tables, int vocabulary, int context) {
  std::map<DrafterKind, ReplayedAcceptance::Tables> by_kind;
  for (const auto& [name, of_drafter] : tables) by_kind.emplace(drafter_named(name), of_drafter);
  return by_kind.empty() ? nullptr : replayed_acceptance(std::move(by_kind), vocabulary, context);
}

void bind_testing(nb::module_& m) {
  nb::class_<ScriptedExecutor, Executor>(
      m, "ScriptedExecutor",
      "An executor without a model: the token at position p is tokens[p % len(tokens)], or with from_past a hash of "
      "every token before p, read back through the page table. Times in nanoseconds; layers above 0: steps are "
      "computed inside start_*(), with so many beats of the engine's pulse, like those of an executor without a "
      "device; "
      "fail_step "
      "and hang_step count prefill chunks, copies and rounds from 0 (-1: never).")
      .def(
          "__init__",
          [](ScriptedExecutor* self, std::vector<int32_t> tokens, bool from_past, int tokens_per_round, int vocabulary,
             int context, int pages, int prefill_chunk, int64_t round_ns, int64_t prefill_token_ns, bool blocking,
             int layers, int64_t fail_step, int64_t hang_step, bool ignore_abort, std::string failure,
             bool restart_helps, int forced_tokens, int score_nodes) {
            new (self) ScriptedExecutor({.tokens = std::move(tokens),
                                         .from_past = from_past,
                                         .tokens_per_round = tokens_per_round,
                                         .vocabulary = vocabulary,
                                         .context = context,
                                         .page_count = pages,
                                         .prefill_chunk = prefill_chunk,
                                         .round_ns = round_ns,
                                         .prefill_token_ns = prefill_token_ns,
                                         .blocking = blocking,
                                         .layers = layers,
                                         .fail_step = fail_step,
                                         .hang_step = hang_step,
                                         .ignore_abort = ignore_abort,
                                         .failure = std::move(failure),
                                         .restart_helps = restart_helps,
                                         .forced_tokens = forced_tokens,
                                         .score_nodes = score_nodes});
          },
          "tokens"_a, nb::kw_only(), "from_past"_a = false, "tokens_per_round"_a = 1, "vocabulary"_a = 32000,
          "context"_a = 4096, "pages"_a = 128, "prefill_chunk"_a = 256, "round_ns"_a = 0, "prefill_token_ns"_a = 0,
          "blocking"_a = false, "layers"_a = 0, "fail_step"_a = -1, "hang_step"_a = -1, "ignore_abort"_a = false,
          "failure"_a = "", "restart_helps"_a = false, "forced_tokens"_a = 0, "score_nodes"_a = kMaxTreeTokens)
      .def_prop_ro("steps", &ScriptedExecutor::steps, "Steps started so far.");

  nb::class_<cpu::LocalDecoder>(m, "SpeculationRig",
                                "A cpu executor without an engine, for tests and benchmarks of speculation.")
      .def(
          "__init__",
          [](cpu::LocalDecoder* self, const nb::dict& spec, int threads, std::vector<int> cores, int prefill_chunk,
             std::optional<int> pages, std::string isa, bool adaptive, bool coupled, const std::string& drafter,
             std::vector<int32_t> truth, uint64_t seed, std::shared_ptr<PastOutputs> past_outputs) {
            cpu::SpeculationOptions options{
                .adaptive = adaptive, .coupled = coupled, .past_outputs = std::move(past_outputs)};
            if (!drafter.empty()) {
              options.in_place_of_draft_model =
                  scripted_drafter(parse_draft_mode(drafter), std::move(truth), field<int>(spec, "vocabulary"), seed);
            }
            new (self) cpu::LocalDecoder(model_spec(spec),
                                         model_options(threads, std::move(cores), std::move(isa), prefill_chunk, pages),
                                         std::move(options));
          },
          "spec"_a, nb::kw_only(), "threads"_a = 1, "cores"_a = std::vector<int>(), "prefill_chunk"_a = 256,
          "pages"_a = nb::none(), "isa"_a = "auto", "adaptive"_a = true, "coupled"_a = true, "drafter"_a = "",
          "truth"_a = std::vector<int32_t>(), "seed"_a = 0, "past_outputs"_a.none() = nb::none(),
          "`drafter`: right, wrong, random, mixed, duplicates or beyond takes the draft model's place; it knows "
          "`truth`, the session's tokens by position. `past_outputs`: the suffix drafter's.")
      .def("decode", &decode, "tokens"_a, "max_tokens"_a, "sampling"_a = nb::dict(), "speculate"_a = "none",
           "max_tree"_a = 0, "pages"_a = nb::none(), "cached"_a = 0,
           "Runs one request -> {tokens, logprobs, top, rounds, failed}. rounds: (drafter, tree_tokens, depth, "
           "accepted, nanoseconds). `cached`: prompt tokens that the last request left in the cache.")
      .def_prop_ro("info", [](const cpu::LocalDecoder& self) { return executor_info(self.info()); });
}

}  // namespace ull::module
