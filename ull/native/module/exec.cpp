// Models, the cpu executor, the sampler.
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "base/gumbel.h"
#include "cpu/cpu_executor.h"
#include "cpu/offline/evaluate.h"
#include "cpu/offline/fake_quantiser.h"
#include "cpu/offline/local_session.h"
#include "cpu/offline/observe.h"
#include "cpu/sampler.h"
#include "module/bindings.h"
#include "testing/local_decoder.h"
#include "testing/scripted_drafter.h"

namespace ull::module {
namespace {

cpu::Format format_named(const std::string& owner, const std::string& dtype) {
  if (dtype == "F8_E4M3") return cpu::Format::kF8;
  if (dtype == "BF16" || dtype == "bf16") return cpu::Format::kBf16;
  if (dtype == "F32" || dtype == "f32") return cpu::Format::kF32;
  throw std::invalid_argument(owner + ": dtype \"" + dtype + "\" is unknown");
}

using TensorMap = std::map<std::string, cpu::TensorInfo>;

TensorMap tensor_map(const nb::dict& dict) {
  TensorMap tensors;
  for (const auto& [key, value] : field<nb::dict>(dict, "tensors")) {
    const auto name = nb::cast<std::string>(key);
    using Entry = std::tuple<int64_t, int64_t, std::string, std::vector<int64_t>>;
    Entry entry;
    if (!nb::try_cast(value, entry)) {
      throw std::invalid_argument("tensor " + name + ": must be (offset, nbytes, dtype, shape)");
    }
    const auto& [offset, bytes, dtype, shape] = entry;
    tensors[name] = {offset, bytes, format_named("tensor " + name, dtype), shape};
  }
  return tensors;
}

// Takes the tensors whose names begin with `prefix` out of `from`, without the prefix unless `keep` is set.
TensorMap take_tensors(TensorMap& from, const std::string& prefix, bool keep) {
  TensorMap taken;
  for (auto entry = from.lower_bound(prefix); entry != from.end() && entry->first.starts_with(prefix);) {
    taken[keep ? entry->first : entry->first.substr(prefix.size())] = entry->second;
    entry = from.erase(entry);
  }
  return taken;
}

cpu::ModelSpec model_dimensions(const nb::dict& dict) {
  cpu::ModelSpec spec;
  spec.hidden = field<int>(dict, "hidden");
  spec.layers = field<int>(dict, "layers");
  spec.heads = field<int>(dict, "heads");
  spec.kv_heads = field<int>(dict, "kv_heads");
  spec.head_dim = field<int>(dict, "head_dim");
  spec.intermediate = field<int>(dict, "intermediate");
  spec.vocabulary = field<int>(dict, "vocabulary");
  spec.context = field<int>(dict, "context");
  spec.rms_epsilon = field<float>(dict, "rms_epsilon");
  spec.qk_norm = field<bool>(dict, "qk_norm");
  spec.kv_format = format_named("kv_dtype", field<std::string>(dict, "kv_dtype"));
  const auto frequencies = field<FloatArray>(dict, "inv_freq");
  spec.inv_freq.assign(frequencies.data(), frequencies.data() + frequencies.size());
  spec.attention_factor = field<float>(dict, "attention_factor");
  spec.windows = field<std::vector<int>>(dict, "windows");
  return spec;
}

// dict[name], a dict of its own, read by `read`; null if it is absent or None. Errors name the section.
template <typename Read>
auto section(const nb::dict& dict, const std::string& name, Read read)
    -> std::shared_ptr<const decltype(read(std::declval<const nb::dict&>()))> {
  using Section = decltype(read(std::declval<const nb::dict&>()));
  if (!dict.contains(name.c_str()) || dict[name.c_str()].is_none()) return nullptr;
  const auto inner = field<nb::dict>(dict, name.c_str());
  try {
    return std::make_shared<const Section>(read(inner));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + "." + error.what());
  }
}

// Bundle.native_spec() -> ModelSpec; ValueError names the field or tensor.
cpu::ModelSpec model_spec(const nb::dict& dict) {
  cpu::ModelSpec spec = model_dimensions(dict);
  spec.path = field<std::string>(dict, "path");
  spec.tensors = tensor_map(dict);
  TensorMap medusa_tensors = take_tensors(spec.tensors, "medusa.", /*keep=*/true);
  TensorMap draft_tensors = take_tensors(spec.tensors, "draft.", /*keep=*/false);
  spec.medusa = section(dict, "medusa", [&](const nb::dict& inner) {
    cpu::MedusaSpec medusa;
    medusa.heads = field<int>(inner, "heads");
    medusa.layers = field<int>(inner, "layers");
    const auto version = field<std::string>(inner, "version");
    if (version != "1" && version != "2") {
      throw std::invalid_argument("version: must be \"1\" or \"2\", not \"" + version + "\"");
    }
    medusa.own_lm_head = version == "1";
    medusa.tensors = std::move(medusa_tensors);
    return medusa;
  });
  spec.draft = section(dict, "draft", [&](const nb::dict& inner) {
    cpu::ModelSpec draft = model_dimensions(inner);
    draft.path = spec.path;
    draft.tensors = std::move(draft_tensors);
    return draft;
  });
  return spec;
}

cpu::ModelOptions model_options(int threads, std::vector<int> cores, std::string isa, int chunk,
                                std::optional<int> pages) {
  if (pages.has_value() && *pages < 1) throw std::invalid_argument("pages: must be at least 1");
  cpu::ModelOptions options;
  options.threads = threads;
  options.cores = std::move(cores);
  options.isa = std::move(isa);
  options.chunk = chunk;
  options.pages = pages.value_or(0);
  return options;
}

using Progress = std::optional<nb::callable>;

// For the core, which calls it without the GIL: Ctrl-C, and what `progress` raises, stop the pass.
std::function<void(int64_t, int64_t)> reporting(const Progress& progress) {
  return [&progress](int64_t done, int64_t total) {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress.has_value()) (*progress)(done, total);
  };
}

using InputScales = std::map<std::string, float>;  // by linear

nb::tuple evaluate(const nb::dict& spec, const Int32Array& tokens, int window, int threads, const Progress& progress,
                   const std::optional<InputScales>& input_scales) {
  const std::vector<int32_t> ids(tokens.data(), tokens.data() + tokens.size());
  cpu::ModelSpec native = model_spec(spec);
  std::optional<cpu::FakeQuantiser> quantiser;
  if (input_scales && !input_scales->empty()) quantiser.emplace(*input_scales, native.layers);
  cpu::Evaluation result;
  {
    const nb::gil_scoped_release release;
    result =
        cpu::evaluate(std::move(native), ids, window, threads, reporting(progress), quantiser ? &*quantiser : nullptr);
  }
  const size_t predictions = result.nll.size();
  return nb::make_tuple(numpy_array(std::move(result.nll), predictions),
                        numpy_array(std::move(result.argmax), predictions));
}

nb::tuple observe(const nb::dict& spec, const Int32Array& tokens, int window, int threads, const Progress& progress) {
  const std::vector<int32_t> ids(tokens.data(), tokens.data() + tokens.size());
  cpu::ModelSpec native = model_spec(spec);
  cpu::Observation seen;
  {
    const nb::gil_scoped_release release;
    seen = cpu::observe(std::move(native), ids, window, threads, reporting(progress));
  }
  nb::dict histograms;
  nb::dict largest;
  for (cpu::ObservedInput& input : seen.inputs) {
    histograms[input.name.c_str()] = numpy_array(std::move(input.histogram), cpu::kMagnitudeBins);
    largest[input.name.c_str()] = input.largest;
  }
  nb::dict keys_values;
  for (size_t layer = 0; layer < seen.keys_values.size(); ++layer) {
    const size_t count = seen.keys_values[layer].size();
    keys_values[("layers." + std::to_string(layer) + ".kv").c_str()] =
        numpy_array(std::move(seen.keys_values[layer]), count);
  }
  return nb::make_tuple(histograms, largest, keys_values);
}

// A sampling dict and the bias that it owns.
struct SamplingParameters {
  explicit SamplingParameters(const nb::dict& parameters) {
    const auto optional = [&]<typename T>(const char* name, T fallback) {
      return parameters.contains(name) ? field<T>(parameters, name) : fallback;
    };
    sampling.temperature = optional("temperature", 0.0F);
    sampling.top_k = optional("top_k", 0);
    sampling.top_p = optional("top_p", 1.0F);
    sampling.min_p = optional("min_p", 0.0F);
    sampling.seed = optional("seed", uint64_t{0});
    sampling.top_logprobs = optional("logprobs", -1);
    sampling.repetition_penalty = optional("repetition_penalty", 1.0F);
    sampling.frequency_penalty = optional("frequency_penalty", 0.0F);
    sampling.presence_penalty = optional("presence_penalty", 0.0F);
    for (const auto& [token, value] : optional("logit_bias", std::map<int32_t, float>{})) {
      bias.push_back({token, value});
    }
    sampling.bias = bias.data();
    sampling.bias_count = static_cast<int>(bias.size());
  }
  SamplingParameters(const SamplingParameters&) = delete;
  SamplingParameters& operator=(const SamplingParameters&) = delete;

  std::vector<LogitBias> bias;
  Sampling sampling;
};

int32_t sample(const FloatArray& logits, int32_t position, const nb::dict& parameters,
               const std::optional<Int32Array>& history, int prompt_tokens) {
  const SamplingParameters wanted(parameters);
  if (logits.size() == 0) throw std::invalid_argument("logits: at least one is needed");
  std::vector<float> copy(logits.data(), logits.data() + logits.size());
  const auto isa = parameters.contains("isa") ? field<std::string>(parameters, "isa") : std::string("auto");
  cpu::Sampler sampler(cpu::select_kernels(isa), static_cast<int>(copy.size()));
  RoundToken token{};
  std::optional<TokenCounts> counts;
  if (history) {
    const int length = static_cast<int>(history->size());
    counts.emplace(static_cast<int>(copy.size()), length);
    counts->follow(history->data(), length, prompt_tokens);
  }
  if (sampler.sample(copy.data(), position, wanted.sampling, token, counts ? &*counts : nullptr) != Status::kOk) {
    throw std::invalid_argument("logits: not finite, or every token is banned");
  }
  return token.token;
}

cpu::SpeculationOptions speculation_options(const std::string& speculate, int max_tree, bool adaptive, bool coupled) {
  if (max_tree < 1 || max_tree > kMaxTreeTokens) throw std::invalid_argument("max_tree: must be 1 to 64");
  return {speculation_named(speculate), max_tree, adaptive, coupled, nullptr};
}

nb::dict decode(cpu::LocalDecoder& self, const Int32Array& tokens, int max_tokens, const nb::dict& sampling,
                const std::string& speculate, int max_tree, const std::optional<Int32Array>& pages, int cached) {
  const SamplingParameters wanted(sampling);
  const cpu::DecodeRequest request{span_of(tokens), max_tokens,
                                   wanted.sampling, speculation_named(speculate),
                                   max_tree,        pages ? span_of(*pages) : std::span<const int32_t>(),
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

auto gumbel_noise(uint64_t seed, int32_t position, const Int32Array& tokens) {
  std::vector<float> noise;
  for (const int32_t token : span_of(tokens)) noise.push_back(gumbel(seed, position, token));
  return numpy_array(std::move(noise), tokens.size());
}

}  // namespace

void bind_exec(nb::module_& m) {
  using Model = cpu::LocalSession;
  nb::class_<Model>(m, "CpuModel", "A model and one session, without an engine: for tests, the build and bench.")
      .def(
          "__init__",
          [](Model* self, const nb::dict& spec, int threads, std::vector<int> cores, std::string isa,
             std::optional<int> pages, int max_chunk, const std::optional<InputScales>& input_scales) {
            cpu::ModelSpec native = model_spec(spec);
            std::unique_ptr<cpu::Tap> tap;
            if (input_scales) tap = std::make_unique<cpu::FakeQuantiser>(*input_scales, native.layers);
            new (self)
                Model(std::move(native), model_options(threads, std::move(cores), std::move(isa), max_chunk, pages),
                      std::move(tap));
          },
          "spec"_a, nb::kw_only(), "threads"_a = 1, "cores"_a = std::vector<int>(), "isa"_a = "auto",
          "pages"_a = nb::none(), "max_chunk"_a = 256, "input_scales"_a = nb::none(),
          "Loads the weights and allocates everything. `cores`: none, or one per thread (the first is the caller's "
          "and left alone). `input_scales`: see evaluate. ValueError names the field or tensor at fault.")
      .def(
          "logits",
          [](Model& self, const Int32Array& tokens, int chunk, const std::optional<Int32Array>& pages) {
            std::vector<float> out;
            {
              const nb::gil_scoped_release release;
              out = self.logits(span_of(tokens), chunk, pages ? span_of(*pages) : std::span<const int32_t>());
            }
            return numpy_array(std::move(out), tokens.size(), self.model().spec().vocabulary);
          },
          "tokens"_a, "chunk"_a = 256, "pages"_a = nb::none(),
          "int32 [T] tokens of a fresh session -> float32 [T, vocabulary]. `pages`: the page table to use.")
      .def(
          "prefill",
          [](Model& self, const Int32Array& tokens, int chunk) {
            const nb::gil_scoped_release release;
            self.prefill(span_of(tokens), chunk);
          },
          "tokens"_a, "chunk"_a = 256, "Feeds int32 [T] tokens from position 0; no logits.")
      .def(
          "decode",
          [](Model& self, int32_t token, int position) {
            std::vector<float> out;
            {
              const nb::gil_scoped_release release;
              out = self.decode(token, position);
            }
            return numpy_array(std::move(out), self.model().spec().vocabulary);
          },
          "token"_a, "position"_a, "Feeds one token -> float32 [vocabulary].")
      .def(
          "generate_greedy",
          [](Model& self, const Int32Array& tokens, int count) {
            std::vector<int32_t> out;
            {
              const nb::gil_scoped_release release;
              out = self.generate_greedy(span_of(tokens), count);
            }
            return numpy_array(std::move(out), count);
          },
          "tokens"_a, "n"_a, "The n most probable tokens after int32 [T] tokens, one after another -> int32 [n].")
      .def_prop_ro("isa", [](const Model& self) { return self.model().kernels().name; })
      .def_prop_ro("weight_bytes", [](const Model& self) { return self.model().weights().bytes(); })
      .def_prop_ro("kv_bytes", [](const Model& self) { return self.model().cache().bytes(); });

  nb::class_<cpu::CpuExecutor, Executor>(m, "CpuExecutor", "The executor that needs no GPU.")
      .def(
          "__init__",
          [](cpu::CpuExecutor* self, const nb::dict& spec, int threads, std::vector<int> cores, int prefill_chunk,
             std::optional<int> pages, std::string isa, const std::string& speculate, int max_tree, bool adaptive,
             bool coupled) {
            new (self) cpu::CpuExecutor(model_spec(spec),
                                        model_options(threads, std::move(cores), std::move(isa), prefill_chunk, pages),
                                        speculation_options(speculate, max_tree, adaptive, coupled));
          },
          "spec"_a, nb::kw_only(), "threads"_a, "cores"_a, "prefill_chunk"_a = 256, "pages"_a = nb::none(),
          "isa"_a = "auto", "speculate"_a = "none", "max_tree"_a = kMaxTreeTokens, "adaptive"_a = true,
          "coupled"_a = true,
          "`threads` includes the engine thread. `cores`: none, or one per thread; the first is the engine thread's "
          "own. `pages`: KV pages of 64 tokens, default: one session of the spec's context. `speculate`, `max_tree`: "
          "of requests that name none. adaptive=False drafts the widest tree allowed in every round, whether that pays "
          "or not. For comparisons: coupled=False ranks drafts without the request's noise.");

  nb::class_<cpu::LocalDecoder>(m, "SpeculationRig",
                                "A cpu executor without an engine, for tests and benchmarks of speculation.")
      .def(
          "__init__",
          [](cpu::LocalDecoder* self, const nb::dict& spec, int threads, std::vector<int> cores, int prefill_chunk,
             std::optional<int> pages, std::string isa, bool adaptive, bool coupled, const std::string& drafter,
             std::vector<int32_t> truth, uint64_t seed) {
            cpu::SpeculationOptions options = speculation_options("none", kMaxTreeTokens, adaptive, coupled);
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
          "truth"_a = std::vector<int32_t>(), "seed"_a = 0,
          "`drafter`: right, wrong, random, mixed, duplicates or beyond takes the draft model's place; it knows "
          "`truth`, the session's tokens by position.")
      .def("decode", &decode, "tokens"_a, "max_tokens"_a, "sampling"_a = nb::dict(), "speculate"_a = "none",
           "max_tree"_a = 0, "pages"_a = nb::none(), "cached"_a = 0,
           "Runs one request -> {tokens, logprobs, top, rounds, failed}. rounds: (drafter, tree_tokens, depth, "
           "accepted, nanoseconds). `cached`: prompt tokens that the last request left in the cache.")
      .def_prop_ro("info", [](const cpu::LocalDecoder& self) { return executor_info(self.info()); });

  m.def("evaluate", &evaluate, "spec"_a, "tokens"_a, "window"_a, "threads"_a = 1, "progress"_a = nb::none(),
        "input_scales"_a = nb::none(),
        "One layer-by-layer pass over the mapped weights. tokens int32 [n] are cut into windows, each from position 0; "
        "-> (nll float32 [m], argmax int32 [m]) for tokens 1.. of each. progress(done, total) may raise to stop. "
        "`input_scales`: the input of each linear named (layers.N.qkv, .o, .gate_up, .down, lm_head) is rounded to "
        "E4M3 times its scale.");
  m.def("observe", &observe, "spec"_a, "tokens"_a, "window"_a, "threads"_a = 1, "progress"_a = nb::none(),
        "What evaluate's pass meets -> (uint64 [32768] per linear: its inputs' |x| counted by their bits as bf16, "
        "truncated; the largest |x| per linear; float32 [2 * kv_heads] per layer, \"layers.N.kv\": the largest |key| "
        "after norm and rotation and |value| of each head). RuntimeError if anything is not finite.");
  m.def("sample", &sample, "logits"_a, "position"_a, "sampling"_a, "history"_a = nb::none(), "prompt_tokens"_a = 0,
        "Draws the token at `position` from float32 [V] logits; sampling: temperature, top_k, top_p, min_p, seed, "
        "logit_bias {id: float}, repetition_penalty, frequency_penalty, presence_penalty. The penalties look at "
        "`history`, int32 ids of which the first prompt_tokens are the prompt.");
  m.def("gumbel", &gumbel_noise, "seed"_a, "position"_a, "tokens"_a,
        "The noise of the sampling rule for int32 [n] tokens -> float32 [n].");
}

}  // namespace ull::module
