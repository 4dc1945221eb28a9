// The Python module ull._native: bindings only, no logic. The one file that includes Python.h.
// nanobind's own headers shadow; ours may not.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/gumbel.h"
#include "base/notify.h"
#include "engine/detokenizer.h"
#include "engine/engine.h"
#include "engine/scripted_executor.h"
#include "exec/cpu/cpu_executor.h"
#include "exec/cpu/evaluate.h"
#include "exec/cpu/local_decoder.h"
#include "exec/cpu/local_session.h"
#include "exec/cpu/sampler.h"
#include "io/io.h"

namespace nb = nanobind;

namespace {

// ---- exec: models, the cpu executor, the sampler ----------------------------------------------------------------

using Int32Array = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A NumPy array that owns `values`, of the given shape.
template <typename T, typename... Extents>
auto numpy_array(std::vector<T> values, Extents... extents) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Extents)>>(owned->data(), {static_cast<size_t>(extents)...},
                                                                 owner);
}

template <typename T>
T field(const nb::dict& dict, const char* name) {
  if (!dict.contains(name)) throw std::invalid_argument(std::string(name) + ": missing");
  try {
    return nb::cast<T>(dict[name]);
  } catch (const nb::cast_error&) {
    throw std::invalid_argument(std::string(name) + ": has the wrong type or is out of range");
  }
}

ull::cpu::Format format_named(const std::string& owner, const std::string& dtype) {
  if (dtype == "F8_E4M3") return ull::cpu::Format::kF8;
  if (dtype == "BF16" || dtype == "bf16") return ull::cpu::Format::kBf16;
  if (dtype == "F32" || dtype == "f32") return ull::cpu::Format::kF32;
  throw std::invalid_argument(owner + ": dtype \"" + dtype + "\" is unknown");
}

using TensorMap = std::map<std::string, ull::cpu::TensorInfo>;

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

ull::cpu::ModelSpec model_dimensions(const nb::dict& dict) {
  ull::cpu::ModelSpec spec;
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
ull::cpu::ModelSpec model_spec(const nb::dict& dict) {
  ull::cpu::ModelSpec spec = model_dimensions(dict);
  spec.path = field<std::string>(dict, "path");
  spec.tensors = tensor_map(dict);
  TensorMap medusa_tensors = take_tensors(spec.tensors, "medusa.", /*keep=*/true);
  TensorMap draft_tensors = take_tensors(spec.tensors, "draft.", /*keep=*/false);
  spec.medusa = section(dict, "medusa", [&](const nb::dict& inner) {
    ull::cpu::MedusaSpec medusa;
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
    ull::cpu::ModelSpec draft = model_dimensions(inner);
    draft.path = spec.path;
    draft.tensors = std::move(draft_tensors);
    return draft;
  });
  return spec;
}

ull::cpu::ModelOptions model_options(int threads, std::vector<int> cores, std::string isa, int chunk,
                                     std::optional<int> pages) {
  if (pages.has_value() && *pages < 1) throw std::invalid_argument("pages: must be at least 1");
  ull::cpu::ModelOptions options;
  options.threads = threads;
  options.cores = std::move(cores);
  options.isa = std::move(isa);
  options.chunk = chunk;
  options.pages = pages.value_or(0);
  return options;
}

std::span<const int32_t> span_of(const Int32Array& tokens) { return {tokens.data(), tokens.size()}; }

nb::tuple evaluate(const nb::dict& spec, const Int32Array& tokens, int window, int threads,
                   const std::optional<nb::callable>& progress) {
  const std::vector<int32_t> ids(tokens.data(), tokens.data() + tokens.size());
  const auto report = [&](int64_t done, int64_t total) {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress.has_value()) (*progress)(done, total);
  };
  ull::cpu::ModelSpec native = model_spec(spec);
  ull::cpu::Evaluation result;
  {
    const nb::gil_scoped_release release;
    result = ull::cpu::evaluate(std::move(native), ids, window, threads, report);
  }
  const size_t predictions = result.nll.size();
  return nb::make_tuple(numpy_array(std::move(result.nll), predictions),
                        numpy_array(std::move(result.argmax), predictions));
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
    for (const auto& [token, value] : optional("logit_bias", std::map<int32_t, float>{})) {
      bias.push_back({token, value});
    }
    sampling.bias = bias.data();
    sampling.bias_count = static_cast<int>(bias.size());
  }
  SamplingParameters(const SamplingParameters&) = delete;
  SamplingParameters& operator=(const SamplingParameters&) = delete;

  std::vector<ull::LogitBias> bias;
  ull::Sampling sampling;
};

int32_t sample(const FloatArray& logits, int32_t position, const nb::dict& parameters) {
  const SamplingParameters wanted(parameters);
  if (logits.size() == 0) throw std::invalid_argument("logits: at least one is needed");
  std::vector<float> copy(logits.data(), logits.data() + logits.size());
  const auto isa = parameters.contains("isa") ? field<std::string>(parameters, "isa") : std::string("auto");
  ull::cpu::Sampler sampler(ull::cpu::select_kernels(isa), static_cast<int>(copy.size()));
  ull::RoundToken token{};
  if (sampler.sample(copy.data(), position, wanted.sampling, token) != ull::Status::kOk) {
    throw std::invalid_argument("logits: not finite, or every token is banned");
  }
  return token.token;
}

ull::Speculation speculation_named(const std::string& name) {
  const std::optional<ull::Speculation> speculation = ull::parse_speculation(name);
  if (!speculation) throw std::invalid_argument("speculate: \"" + name + "\" is no drafter");
  return *speculation;
}

ull::cpu::SpeculationOptions speculation_options(const std::string& speculate, int max_tree, bool adaptive,
                                                 bool coupled) {
  if (max_tree < 1 || max_tree > ull::kMaxTreeTokens) throw std::invalid_argument("max_tree: must be 1 to 64");
  return {speculation_named(speculate), max_tree, adaptive, coupled, nullptr};
}

nb::dict decode(ull::cpu::LocalDecoder& self, const Int32Array& tokens, int max_tokens, const nb::dict& sampling,
                const std::string& speculate, int max_tree, const std::optional<Int32Array>& pages, int cached) {
  const SamplingParameters wanted(sampling);
  const ull::cpu::DecodeRequest request{span_of(tokens), max_tokens,
                                        wanted.sampling, speculation_named(speculate),
                                        max_tree,        pages ? span_of(*pages) : std::span<const int32_t>(),
                                        cached};
  ull::cpu::Decoded decoded;
  {
    const nb::gil_scoped_release release;
    decoded = self.decode(request);
  }
  nb::list ids, logprobs, top, rounds;
  for (const ull::RoundToken& token : decoded.tokens) {
    ids.append(token.token);
    logprobs.append(token.logprob);
    nb::list alternatives;
    for (int rank = 0; rank < token.top_count; ++rank) {
      alternatives.append(nb::make_tuple(token.top[rank].token, token.top[rank].logprob));
    }
    top.append(alternatives);
  }
  for (const ull::cpu::DecodeRound& round : decoded.rounds) {
    rounds.append(nb::make_tuple(ull::speculation_name(round.drafter), round.tree_tokens, round.depth, round.accepted,
                                 round.nanoseconds));
  }
  nb::dict out;
  out["tokens"] = ids;
  out["logprobs"] = logprobs;
  out["top"] = top;
  out["rounds"] = rounds;
  out["failed"] = decoded.failed;
  return out;
}

// What an executor says of itself.
nb::dict executor_info(const ull::ExecutorInfo& info) {
  nb::dict out;
  out["executor"] = info.name;
  out["vocabulary"] = info.vocabulary;
  out["page_count"] = info.page_count;
  out["prefill_chunk"] = info.prefill_chunk;
  out["weight_bytes"] = info.weight_bytes;
  out["kv_bytes"] = info.kv_bytes;
  nb::list drafters;
  nb::dict draft_ns;
  nb::dict verify_ns;
  for (int i = 0; i < ull::kSpeculations; ++i) {
    const char* name = ull::speculation_name(static_cast<ull::Speculation>(i));
    if (info.drafters[i]) drafters.append(name);
    if (info.draft_ns[i] > 0) draft_ns[name] = info.draft_ns[i];
  }
  for (int i = 0; i < ull::kCostSizes; ++i) {
    if (info.verify_ns[i] > 0) verify_ns[nb::cast(std::to_string(ull::kCostTokens[i]))] = info.verify_ns[i];
  }
  out["drafters"] = drafters;
  out["default_drafter"] = ull::speculation_name(info.default_drafter);
  out["default_max_tree"] = info.default_max_tree;
  out["draft_ns"] = draft_ns;
  out["verify_ns"] = verify_ns;
  return out;
}

auto gumbel_noise(uint64_t seed, int32_t position, const Int32Array& tokens) {
  std::vector<float> noise;
  for (const int32_t token : span_of(tokens)) noise.push_back(ull::gumbel(seed, position, token));
  return numpy_array(std::move(noise), tokens.size());
}

void bind_exec(nb::module_& m) {
  using namespace nb::literals;
  using Model = ull::cpu::LocalSession;
  nb::class_<Model>(m, "CpuModel", "A model and one session, without an engine: for tests, the build and bench.")
      .def(
          "__init__",
          [](Model* self, const nb::dict& spec, int threads, std::vector<int> cores, std::string isa,
             std::optional<int> pages, int max_chunk) {
            new (self)
                Model(model_spec(spec), model_options(threads, std::move(cores), std::move(isa), max_chunk, pages));
          },
          "spec"_a, nb::kw_only(), "threads"_a = 1, "cores"_a = std::vector<int>(), "isa"_a = "auto",
          "pages"_a = nb::none(), "max_chunk"_a = 256,
          "Loads the weights and allocates everything. `cores`: none, or one per thread (the first is the caller's "
          "and left alone). ValueError names the field or tensor at fault.")
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

  nb::class_<ull::cpu::CpuExecutor, ull::Executor>(m, "CpuExecutor", "The executor that needs no GPU.")
      .def(
          "__init__",
          [](ull::cpu::CpuExecutor* self, const nb::dict& spec, int threads, std::vector<int> cores, int prefill_chunk,
             std::optional<int> pages, std::string isa, const std::string& speculate, int max_tree, bool adaptive,
             bool coupled) {
            new (self) ull::cpu::CpuExecutor(
                model_spec(spec), model_options(threads, std::move(cores), std::move(isa), prefill_chunk, pages),
                speculation_options(speculate, max_tree, adaptive, coupled));
          },
          "spec"_a, nb::kw_only(), "threads"_a, "cores"_a, "prefill_chunk"_a = 256, "pages"_a = nb::none(),
          "isa"_a = "auto", "speculate"_a = "none", "max_tree"_a = ull::kMaxTreeTokens, "adaptive"_a = true,
          "coupled"_a = true,
          "`threads` includes the engine thread. `cores`: none, or one per thread; the first is the engine thread's "
          "own. `pages`: KV pages of 64 tokens, default: one session of the spec's context. `speculate`, `max_tree`: "
          "of requests that name none. For tests and comparisons: adaptive=False drafts the widest tree allowed in "
          "every round, coupled=False ranks drafts without the request's noise.");

  nb::class_<ull::cpu::LocalDecoder>(m, "SpeculationRig",
                                     "A cpu executor without an engine, for tests and benchmarks of speculation.")
      .def(
          "__init__",
          [](ull::cpu::LocalDecoder* self, const nb::dict& spec, int threads, std::vector<int> cores, int prefill_chunk,
             std::optional<int> pages, std::string isa, bool adaptive, bool coupled, const std::string& drafter,
             std::vector<int32_t> truth, uint64_t seed) {
            ull::cpu::SpeculationOptions options = speculation_options("none", ull::kMaxTreeTokens, adaptive, coupled);
            if (!drafter.empty()) {
              options.scripted = std::make_shared<ull::ScriptedDrafter>(
                  ull::parse_draft_mode(drafter), std::move(truth), field<int>(spec, "vocabulary"), seed);
            }
            new (self) ull::cpu::LocalDecoder(
                model_spec(spec), model_options(threads, std::move(cores), std::move(isa), prefill_chunk, pages),
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
      .def_prop_ro("info", [](const ull::cpu::LocalDecoder& self) { return executor_info(self.info()); });

  m.def("evaluate", &evaluate, "spec"_a, "tokens"_a, "window"_a, "threads"_a = 1, "progress"_a = nb::none(),
        "One layer-by-layer pass over the mapped weights. tokens int32 [n] are cut into windows, each from position 0; "
        "-> (nll float32 [m], argmax int32 [m]) for tokens 1.. of each. progress(done, total) may raise to stop.");
  m.def("sample", &sample, "logits"_a, "position"_a, "sampling"_a,
        "Draws the token at `position` from float32 [V] logits; sampling: temperature, top_k, top_p, min_p, seed, "
        "logit_bias {id: float}.");
  m.def("gumbel", &gumbel_noise, "seed"_a, "position"_a, "tokens"_a,
        "The noise of the sampling rule for int32 [n] tokens -> float32 [n].");
}

// ---- engine, io, notify -----------------------------------------------------------------------------------------

std::span<const uint8_t> view(const nb::bytes& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size()};
}

// A prompt: int32 array, or its bytes in native order.
std::span<const int32_t> token_view(const nb::object& tokens) {
  if (nb::isinstance<nb::bytes>(tokens)) {
    const auto bytes = nb::cast<nb::bytes>(tokens);
    if (bytes.size() % sizeof(int32_t) != 0) throw ull::InvalidRequest("token_ids", "the bytes are not whole int32s");
    return {reinterpret_cast<const int32_t*>(bytes.c_str()), bytes.size() / sizeof(int32_t)};
  }
  using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  Tokens array;
  if (!nb::try_cast(tokens, array, /* convert= */ false)) {
    throw ull::InvalidRequest("token_ids", "must be bytes or a 1-D int32 array");
  }
  return {array.data(), array.size()};
}

// Reads params[key], or returns `fallback` if it is absent.
template <typename T>
T parameter(const nb::dict& params, const char* key, T fallback) {
  if (!params.contains(key)) return fallback;
  try {
    return nb::cast<T>(params[key]);
  } catch (const nb::cast_error&) {
    throw ull::InvalidRequest(key, "has the wrong type or is out of range");
  }
}

uint64_t submit(ull::Engine& engine, const nb::bytes& identity, uint64_t request_id, const nb::object& tokens,
                const nb::dict& params) {
  ull::Submission submission;
  submission.identity = view(identity);
  submission.id = request_id;
  submission.tokens = token_view(tokens);
  submission.max_tokens = parameter(params, "max_tokens", 256);
  ull::Sampling& sampling = submission.sampling;
  sampling.temperature = parameter(params, "temperature", 0.0F);
  sampling.top_k = parameter(params, "top_k", 0);
  sampling.top_p = parameter(params, "top_p", 1.0F);
  sampling.min_p = parameter(params, "min_p", 0.0F);
  sampling.seed = parameter(params, "seed", uint64_t{0});
  sampling.top_logprobs = parameter(params, "logprobs", -1);
  std::vector<ull::LogitBias> bias;
  for (const auto& [token, value] : parameter(params, "logit_bias", std::map<int32_t, float>{})) {
    bias.push_back({token, value});
  }
  sampling.bias = bias.data();
  sampling.bias_count = static_cast<int32_t>(bias.size());
  if (params.contains("speculate") && !params["speculate"].is_none()) {
    const auto name = parameter(params, "speculate", std::string());
    submission.speculation = ull::parse_speculation(name);
    if (!submission.speculation) throw ull::InvalidRequest("speculate", "\"" + name + "\" is no drafter");
  }
  submission.max_tree = parameter(params, "max_tree", 0);
  for (const nb::bytes& stop : parameter(params, "stop", std::vector<nb::bytes>{})) {
    submission.stops.emplace_back(stop.c_str(), stop.size());
  }
  submission.stop_ids = parameter(params, "stop_ids", std::vector<int32_t>{});
  submission.deadline_ns = parameter(params, "deadline_ns", int64_t{0});
  submission.received_ns = parameter(params, "received_ns", int64_t{0});
  submission.admitted_ns = parameter(params, "admitted_ns", int64_t{0});
  return engine.submit(submission);
}

nb::dict to_dict(const ull::NamedCounts& counts) {
  nb::dict out;
  for (const auto& [name, value] : counts) out[name] = value;
  return out;
}

nb::dict engine_stats(const ull::Engine& engine) {
  const ull::EngineStats stats = engine.stats();
  nb::dict out = to_dict(stats.named());
  out["finished"] = to_dict(stats.finished());
  out["by_drafter"] = to_dict(stats.by_drafter());
  nb::list accepted;
  for (const uint64_t rounds : stats.counters.accepted_by_depth) accepted.append(rounds);
  out["accepted_by_depth"] = accepted;
  out["round_ns"] = to_dict(engine.round_ns().named());
  return out;
}

nb::dict engine_info(const ull::Engine& engine) {
  nb::dict out = executor_info(engine.executor_info());
  out["context"] = engine.context();
  out["max_prompt"] = engine.max_prompt();
  return out;
}

nb::dict io_stats(const ull::Io& io) {
  nb::dict out = to_dict(io.stats().named());
  out["delivery_ns"] = to_dict(io.delivery_ns().named());
  return out;
}

void bind_engine_errors(nb::module_& m) {
  nb::exception<ull::QueueFull>(m, "QueueFull", PyExc_RuntimeError);
  nb::exception<ull::EngineClosed>(m, "EngineClosed", PyExc_RuntimeError);
  // InvalidRequest(ValueError) with an attribute `field`.
  const nb::object invalid = nb::steal(PyErr_NewException("ull._native.InvalidRequest", PyExc_ValueError, nullptr));
  m.attr("InvalidRequest") = invalid;
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void* type) {
        try {
          std::rethrow_exception(pointer);
        } catch (const ull::InvalidRequest& error) {
          const nb::handle handle(static_cast<PyObject*>(type));
          nb::object value = handle(error.what());
          value.attr("field") = error.field;
          PyErr_SetObject(handle.ptr(), value.ptr());
        }
      },
      invalid.ptr());
}

void bind_engine(nb::module_& m) {
  using namespace nb::literals;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  bind_engine_errors(m);

  nb::class_<ull::ScriptedExecutor, ull::Executor>(
      m, "ScriptedExecutor",
      "An executor without a model: the token at position p is tokens[p % len(tokens)], or with from_past a hash of "
      "every token before p, read back through the page table. Times in nanoseconds; fail_step and hang_step count "
      "prefill chunks and rounds from 0 (-1: never).")
      .def(
          "__init__",
          [](ull::ScriptedExecutor* self, std::vector<int32_t> tokens, bool from_past, int tokens_per_round,
             int vocabulary, int context, int pages, int prefill_chunk, int64_t round_ns, int64_t prefill_token_ns,
             bool blocking, int64_t fail_step, int64_t hang_step, bool ignore_abort) {
            new (self) ull::ScriptedExecutor({std::move(tokens), from_past, tokens_per_round, vocabulary, context,
                                              pages, prefill_chunk, round_ns, prefill_token_ns, blocking, fail_step,
                                              hang_step, ignore_abort});
          },
          "tokens"_a, nb::kw_only(), "from_past"_a = false, "tokens_per_round"_a = 1, "vocabulary"_a = 32000,
          "context"_a = 4096, "pages"_a = 128, "prefill_chunk"_a = 256, "round_ns"_a = 0, "prefill_token_ns"_a = 0,
          "blocking"_a = false, "fail_step"_a = -1, "hang_step"_a = -1, "ignore_abort"_a = false)
      .def_prop_ro("steps", &ull::ScriptedExecutor::steps, "Steps started so far.");

  nb::class_<ull::Engine>(m, "Engine", "One executor, its request slots, and the engine and watchdog threads.")
      .def(
          "__init__",
          [](ull::Engine* self, ull::Executor& executor, const std::string& vocab_path, int queue_depth, int core,
             const std::string& idle, int64_t watchdog_ms, int max_prompt, int max_sessions, bool prefix_cache,
             int64_t slow_cycle_us) {
            const ull::EngineOptions options{queue_depth,  core,         ull::parse_idle_mode(idle),
                                             watchdog_ms,  max_prompt,   max_sessions,
                                             prefix_cache, slow_cycle_us};
            const nb::gil_scoped_release unlocked;
            new (self) ull::Engine(executor, vocab_path, options);
          },
          "executor"_a, "vocab_path"_a, nb::kw_only(), "queue_depth"_a = 64, "core"_a = -1, "idle"_a = "adaptive",
          "watchdog_ms"_a = 2000, "max_prompt"_a = 0, "max_sessions"_a = 16, "prefix_cache"_a = true,
          "slow_cycle_us"_a = 10'000, nb::keep_alive<1, 2>())
      .def("warm_up", &ull::Engine::warm_up, Unlocked(), "Runs a prefill chunk and a few rounds; before start().")
      .def("start", &ull::Engine::start, Unlocked())
      .def("stop", &ull::Engine::stop, Unlocked(), "Ends every request, then the threads. Idempotent.")
      .def("submit", &submit, "identity"_a, "request_id"_a, "tokens"_a, "params"_a,
           "Queues a request (everything is copied) and returns a handle. Raises InvalidRequest (a ValueError with "
           "the attribute `field`), QueueFull or EngineClosed. Only one thread may submit and cancel.")
      .def(
          "cancel",
          [](ull::Engine& engine, const nb::bytes& identity, uint64_t request_id) {
            return engine.cancel(view(identity), request_id);
          },
          "identity"_a, "request_id"_a, "True if that client has such a request and it had not ended.")
      .def("drain", &ull::Engine::drain, "Refuses new requests; those accepted run to their end.")
      .def("drained", &ull::Engine::drained, "True once the end of every accepted request has reached the io PAIR.")
      .def("stats", &engine_stats)
      .def("health", &ull::Engine::health, "'ok', 'stalled' or 'failed'.")
      .def_prop_ro("info", &engine_info);

  nb::class_<ull::Io>(m, "Io", "The io thread: clients' ROUTER socket and the PAIR to the control plane.")
      .def(
          "__init__",
          [](ull::Io* self, ull::Engine& engine, uintptr_t zmq_context, const std::string& libzmq,
             const std::vector<std::string>& listen, const std::string& control, int core, const std::string& idle,
             int send_hwm, int64_t client_stall_ms, int64_t max_message, int linger_ms) {
            const ull::IoOptions options{
                listen, control, core, ull::parse_idle_mode(idle), client_stall_ms, {send_hwm, max_message, linger_ms}};
            new (self) ull::Io(engine, ull::zmq::load(libzmq), reinterpret_cast<void*>(zmq_context), options);
          },
          "engine"_a, nb::kw_only(), "zmq_context"_a, "libzmq"_a, "listen"_a, "control"_a = "inproc://ull-control",
          "core"_a = -1, "idle"_a = "adaptive", "send_hwm"_a = 64, "client_stall_ms"_a = 250,
          "max_message"_a = 16 * 1024 * 1024, "linger_ms"_a = 1000, nb::keep_alive<1, 2>())
      .def("start", &ull::Io::start, Unlocked(), "Binds (RuntimeError naming the endpoint) and starts the thread.")
      .def("stop", &ull::Io::stop, Unlocked(), "Delivers what has ended, closes the sockets. Idempotent.")
      .def("stats", &io_stats)
      .def_prop_ro("endpoints", &ull::Io::endpoints, "Clients' endpoints as bound: tcp port 0 is resolved.");

  nb::class_<ull::Detokenizer>(m, "Detokenizer", "Token ids to text, incrementally, cut at the first stop string.")
      .def(nb::init<const std::string&, const std::vector<std::string>&>(), "vocab_path"_a,
           "stop"_a = std::vector<std::string>{})
      .def("feed", &ull::Detokenizer::feed, "tokens"_a, "Text that these tokens finish.")
      .def("finish", &ull::Detokenizer::finish, "Text held back, once no token follows.")
      .def_prop_ro("stopped", &ull::Detokenizer::stopped, "True once a stop string is complete.");

  m.def("notify", &ull::notify_service_manager, "state"_a,
        "Sends a state (such as READY=1) to systemd's notification socket; False if there is none.");
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of ull.";
  nb::class_<ull::Executor>(m, "Executor", "What runs the maths of an engine: a CpuExecutor or a ScriptedExecutor.")
      .def_prop_ro("name", [](const ull::Executor& executor) { return executor.info().name; })
      .def_prop_ro("weight_bytes", [](const ull::Executor& executor) { return executor.info().weight_bytes; })
      .def_prop_ro("kv_bytes", [](const ull::Executor& executor) { return executor.info().kv_bytes; });
  bind_exec(m);
  bind_engine(m);
}
