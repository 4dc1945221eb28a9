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

// Bundle.native_spec() -> ModelSpec; ValueError names the field or tensor.
ull::cpu::ModelSpec model_spec(const nb::dict& dict) {
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
  spec.path = field<std::string>(dict, "path");
  for (const auto& [key, value] : field<nb::dict>(dict, "tensors")) {
    const auto name = nb::cast<std::string>(key);
    using Entry = std::tuple<int64_t, int64_t, std::string, std::vector<int64_t>>;
    Entry entry;
    if (!nb::try_cast(value, entry)) {
      throw std::invalid_argument("tensor " + name + ": must be (offset, nbytes, dtype, shape)");
    }
    const auto& [offset, bytes, dtype, shape] = entry;
    spec.tensors[name] = {offset, bytes, format_named("tensor " + name, dtype), shape};
  }
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

int32_t sample(const FloatArray& logits, int32_t position, const nb::dict& parameters) {
  const auto optional = [&]<typename T>(const char* name, T fallback) {
    return parameters.contains(name) ? field<T>(parameters, name) : fallback;
  };
  ull::Sampling sampling;
  sampling.temperature = optional("temperature", 0.0F);
  sampling.top_k = optional("top_k", 0);
  sampling.top_p = optional("top_p", 1.0F);
  sampling.min_p = optional("min_p", 0.0F);
  sampling.seed = optional("seed", uint64_t{0});
  std::vector<ull::LogitBias> bias;
  for (const auto& [token, value] : optional("logit_bias", std::map<int32_t, float>{})) bias.push_back({token, value});
  sampling.bias = bias.data();
  sampling.bias_count = static_cast<int>(bias.size());
  if (logits.size() == 0) throw std::invalid_argument("logits: at least one is needed");
  std::vector<float> copy(logits.data(), logits.data() + logits.size());
  ull::cpu::Sampler sampler(ull::cpu::select_kernels(optional("isa", std::string("auto"))),
                            static_cast<int>(copy.size()));
  ull::RoundToken token{};
  if (sampler.sample(copy.data(), position, sampling, token) != ull::Status::kOk) {
    throw std::invalid_argument("logits: not finite, or every token is banned");
  }
  return token.token;
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
             std::optional<int> pages, std::string isa) {
            new (self) ull::cpu::CpuExecutor(
                model_spec(spec), model_options(threads, std::move(cores), std::move(isa), prefill_chunk, pages));
          },
          "spec"_a, nb::kw_only(), "threads"_a, "cores"_a, "prefill_chunk"_a = 256, "pages"_a = nb::none(),
          "isa"_a = "auto",
          "`threads` includes the engine thread. `cores`: none, or one per thread; the first is the engine thread's "
          "own. `pages`: KV pages of 64 tokens, default: one session of the spec's context.");

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
  out["round_ns"] = to_dict(engine.round_ns().named());
  return out;
}

nb::dict engine_info(const ull::Engine& engine) {
  const ull::ExecutorInfo& info = engine.executor_info();
  nb::dict out;
  out["executor"] = info.name;
  out["vocabulary"] = info.vocabulary;
  out["context"] = engine.context();
  out["max_prompt"] = engine.max_prompt();
  out["page_count"] = info.page_count;
  out["prefill_chunk"] = info.prefill_chunk;
  out["weight_bytes"] = info.weight_bytes;
  out["kv_bytes"] = info.kv_bytes;
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
