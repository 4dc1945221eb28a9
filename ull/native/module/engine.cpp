// The engine, and the texts of its streams.
#include "engine/engine.h"
#include "engine/detokenizer.h"
#include "module/bindings.h"
#include "module/grammar.h"
#include "module/sampling.h"

namespace ull::module {
namespace {

std::span<const uint8_t> view(const nb::bytes& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size()};
}

// A prompt: int32 array, or its bytes in native order.
std::span<const int32_t> token_view(const nb::object& tokens) {
  if (nb::isinstance<nb::bytes>(tokens)) {
    const auto bytes = nb::cast<nb::bytes>(tokens);
    if (bytes.size() % sizeof(int32_t) != 0) throw InvalidRequest("token_ids", "the bytes are not whole int32s");
    return {reinterpret_cast<const int32_t*>(bytes.c_str()), bytes.size() / sizeof(int32_t)};
  }
  using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  Tokens array;
  if (!nb::try_cast(tokens, array, /* convert= */ false)) {
    throw InvalidRequest("token_ids", "must be bytes or a 1-D int32 array");
  }
  return {array.data(), array.size()};
}

uint64_t submit(Engine& engine, const nb::bytes& identity, uint64_t request_id, const nb::object& tokens,
                const nb::dict& params) {
  Submission submission;
  submission.identity = view(identity);
  submission.id = request_id;
  submission.tokens = token_view(tokens);
  submission.max_tokens = parameter(params, "max_tokens", 256);
  const SamplingParameters wanted(params);
  submission.sampling = wanted.sampling();
  if (params.contains("speculate") && !params["speculate"].is_none()) {
    const auto name = parameter(params, "speculate", std::string());
    submission.speculation = parse_drafter(name);
    if (!submission.speculation) throw InvalidRequest("speculate", "\"" + name + "\" is no drafter");
  }
  submission.max_tree = parameter(params, "max_tree", 0);
  for (const nb::bytes& stop : parameter(params, "stop", std::vector<nb::bytes>{})) {
    submission.stops.emplace_back(stop.c_str(), stop.size());
  }
  submission.stop_ids = parameter(params, "stop_ids", std::vector<int32_t>{});
  submission.warnings = parameter(params, "warnings", std::vector<std::string>{});
  if (params.contains("priority")) {
    const auto name = parameter(params, "priority", std::string());
    const std::optional<Priority> priority = parse_priority(name);
    if (!priority) throw InvalidRequest("priority", "\"" + name + "\" is none; choose realtime, interactive or batch");
    submission.priority = *priority;
  }
  submission.timeout_ns = parameter(params, "timeout_ns", int64_t{0});
  submission.deadline_ns = parameter(params, "deadline_ns", int64_t{0});
  submission.hold = parameter(params, "hold", false);
  submission.rolled_back_tokens = parameter(params, "rolled_back_tokens", 0);
  submission.returns_tokens = parameter(params, "returns_tokens", false);
  submission.told_by_control = parameter(params, "told_by_control", false);
  if (params.contains("choices") && !params["choices"].is_none()) {
    submission.choices = parameter(params, "choices", std::vector<std::vector<int32_t>>{});
    if (submission.choices.empty()) throw InvalidRequest("choices", "is empty: give at least one label");
  }
  submission.constraint = constraint_of(params, engine.executor_info().vocabulary);
  submission.pin = parameter(params, "pin", uint64_t{0});
  submission.received_ns = parameter(params, "received_ns", int64_t{0});
  submission.admitted_ns = parameter(params, "admitted_ns", int64_t{0});
  submission.prompt_logprobs = parameter(params, "prompt_logprobs", false);
  submission.prompt_top_logprobs = parameter(params, "prompt_top_logprobs", 0);
  submission.rehearsal = parameter(params, "rehearsal", false);
  return engine.submit(submission);
}

nb::dict engine_stats(const Engine& engine) {
  const EngineStats stats = engine.stats();
  nb::dict out = to_dict(stats.named());
  out["finished"] = to_dict(stats.finished());
  out["by_drafter"] = to_dict(stats.by_drafter(stats.counters.rounds_by_drafter));
  out["drafted_by_drafter"] = to_dict(stats.by_drafter(stats.counters.drafted_by_drafter));
  out["accepted_by_drafter"] = to_dict(stats.by_drafter(stats.counters.accepted_by_drafter));
  nb::list accepted;
  for (const uint64_t rounds : stats.counters.accepted_by_depth) accepted.append(rounds);
  out["accepted_by_depth"] = accepted;
  out["round_ns"] = to_dict(engine.round_ns().named());
  out["failure"] = engine.failure();
  return out;
}

nb::dict engine_info(const Engine& engine) {
  nb::dict out = executor_info(engine.executor_info());
  out["context"] = engine.context();
  out["max_prompt"] = engine.max_prompt();
  return out;
}

// What Python sees of the exceptions that have more to say than a text.
void describe(const InvalidRequest& error, nb::object& value) { value.attr("field") = error.field; }
void describe(const QueueFull& error, nb::object& value) {
  value.attr("queue_length") = error.queue_length;
  value.attr("expected_ns") = error.expected_ns;
}
void describe(const DeadlineUnreachable& error, nb::object& value) { value.attr("expected_ns") = error.expected_ns; }

template <typename Error>
void bind_error(nb::module_& m, const char* name, PyObject* base) {
  const nb::object type = nb::steal(PyErr_NewException((std::string("ull._native.") + name).c_str(), base, nullptr));
  m.attr(name) = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void* raised) {
        try {
          std::rethrow_exception(pointer);
        } catch (const Error& error) {
          const nb::handle handle(static_cast<PyObject*>(raised));
          nb::object value = handle(error.what());
          describe(error, value);
          PyErr_SetObject(handle.ptr(), value.ptr());
        }
      },
      type.ptr());
}

void bind_engine_errors(nb::module_& m) {
  nb::exception<EngineClosed>(m, "EngineClosed", PyExc_RuntimeError);
  bind_error<InvalidRequest>(m, "InvalidRequest", PyExc_ValueError);
  bind_error<QueueFull>(m, "QueueFull", PyExc_RuntimeError);
  bind_error<DeadlineUnreachable>(m, "DeadlineUnreachable", PyExc_RuntimeError);
  m.attr("QueueFull").attr("queue_length") = 0;  // of one that is raised in Python
  m.attr("QueueFull").attr("expected_ns") = 0;
}

}  // namespace

void bind_engine(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  bind_engine_errors(m);

  nb::class_<Engine>(m, "Engine", "One executor, its request slots, and the engine and watchdog threads.")
      .def(
          "__init__",
          [](Engine* self, Executor& executor, const std::string& vocab_path, int queue_depth, int client_share,
             int core, std::optional<bool> cooperative, const std::string& idle, int64_t watchdog_ms, int max_prompt,
             int max_sessions, bool prefix_cache, int64_t aging_ms, int64_t slow_cycle_us) {
            const EngineOptions options{.queue_depth = queue_depth,
                                        .client_share = client_share,
                                        .core = core,
                                        .cooperative = cooperative,
                                        .idle = parse_idle_mode(idle),
                                        .watchdog_ms = watchdog_ms,
                                        .max_prompt = max_prompt,
                                        .max_sessions = max_sessions,
                                        .prefix_cache = prefix_cache,
                                        .aging_ms = aging_ms,
                                        .slow_cycle_us = slow_cycle_us};
            const nb::gil_scoped_release unlocked;
            new (self) Engine(executor, vocab_path, options);
          },
          "executor"_a, "vocab_path"_a, nb::kw_only(), "queue_depth"_a = 64, "client_share"_a = 0, "core"_a = -1,
          "cooperative"_a = nb::none(), "idle"_a = "adaptive", "watchdog_ms"_a = 2000, "max_prompt"_a = 0,
          "max_sessions"_a = 16, "prefix_cache"_a = true, "aging_ms"_a = 2000, "slow_cycle_us"_a = 10'000,
          nb::keep_alive<1, 2>())
      .def("warm_up", &Engine::warm_up, Unlocked(),
           "Runs a prefill chunk and a few rounds with every drafter; before start().")
      .def("start", &Engine::start, Unlocked())
      .def("stop", &Engine::stop, Unlocked(), "Ends every request, then the threads. Idempotent.")
      .def("submit", &submit, "identity"_a, "request_id"_a, "tokens"_a, "params"_a,
           "Queues a request (everything is copied) and returns a handle. Raises InvalidRequest (a ValueError with "
           "the attribute `field`), QueueFull (`queue_length`, `expected_ns`), DeadlineUnreachable (`expected_ns`) or "
           "EngineClosed. Only one thread may submit and cancel.")
      .def(
          "cancel",
          [](Engine& engine, const nb::bytes& identity, uint64_t request_id, bool shed) {
            return engine.cancel(view(identity), request_id, shed);
          },
          "identity"_a, "request_id"_a, "shed"_a = false,
          "True if that client has such a request and it had not ended, or is held. `shed`: the daemon is being "
          "stopped, and says so in the request's end.")
      .def(
          "withdraw",
          [](Engine& engine, const nb::bytes& identity, uint64_t request_id) {
            return engine.withdraw(view(identity), request_id);
          },
          "identity"_a, "request_id"_a,
          "Ends a held request without a word to its client; False if that client has no such one.")
      .def(
          "commit",
          [](Engine& engine, const nb::bytes& identity, uint64_t request_id) {
            return engine.commit(view(identity), request_id);
          },
          "identity"_a, "request_id"_a, "Releases a held request; False if that client has no such one.")
      .def("unpin", &Engine::unpin, "pin"_a, "What was pinned by that number no longer is.")
      .def("drain", &Engine::drain, "Refuses new requests; those accepted run to their end.")
      .def("drained", &Engine::drained, "True once the end of every accepted request has reached the io PAIR.")
      .def("stats", &engine_stats)
      .def(
          "round_histogram", [](const Engine& engine) { return to_dict(engine.round_ns()); },
          "From one round's tokens to the next's: sum (ns) and buckets, pairs of the largest value (ns) and a count.")
      .def(
          "trace",
          [](Engine& engine, bool frames, uint64_t since, size_t most) {
            uint64_t next = 0;
            const TraceRing& ring = frames ? engine.shared().frames : engine.shared().steps;
            const std::vector<TraceRecord> records = ring.copy(since, most, next);
            return nb::make_tuple(
                nb::bytes(reinterpret_cast<const char*>(records.data()), records.size() * sizeof(TraceRecord)), next);
          },
          "frames"_a, "since"_a, "most"_a,
          "The newest records of the engine thread's steps, or of the io thread's frames, from number `since` on: "
          "their bytes (sync/trace_ring.h), and the number behind the last.")
      .def("health", &Engine::health, "'ok', 'stalled' or 'failed'.")
      .def(
          "threads",
          [](Engine& engine) {
            nb::dict out;
            out["engine"] = to_dict(engine.shared().engine_agent.duty().named());
            out["io"] = to_dict(engine.shared().io_agent.duty().named());
            return out;
          },
          "What the engine thread and the io thread do with their time.")
      .def(
          "beat",
          [](Engine& engine) {
            engine.beat();
            engine.free_ended();
          },
          "The control plane's sign of life; to be called when `control_call` is readable.")
      .def("end_beat", &Engine::end_beat, "The control plane ends and is watched no longer.")
      .def_prop_ro("queue_length", &Engine::queue_length, "Requests that wait.")
      .def_prop_ro("client_share", &Engine::client_share, "Requests that one client may have waiting or running.")
      .def_prop_ro("control_call", &Engine::control_call,
                   "Descriptor that is readable when the control plane is to call beat() and look at health().")
      .def_prop_ro("vocabulary", &Engine::vocabulary, "What the texts of its streams are made of.")
      .def_prop_ro("info", &engine_info);

  nb::class_<Vocabulary>(m, "Vocabulary", "A bundle's vocab.bin: token ids to text.")
      .def(nb::init<const std::string&>(), "path"_a)
      .def_prop_ro("size", &Vocabulary::size, "Ids, rows of padding included.")
      .def(
          "text",
          [](const Vocabulary& self, const std::vector<int32_t>& ids, const std::vector<int32_t>& prompt) {
            return text_of(self, ids, prompt);
          },
          "ids"_a, "prompt"_a = std::vector<int32_t>{}, nb::call_guard<nb::gil_scoped_release>(),
          "The whole text of these tokens, by the code of the streams. Special tokens and unknown ids have none. "
          "`prompt`: the tokens that the text goes on behind.");

  nb::class_<Detokenizer>(m, "Detokenizer", "Token ids to text, incrementally, cut at the first stop string.")
      .def(nb::init<const std::string&, const std::vector<std::string>&, const std::vector<int32_t>&>(), "vocab_path"_a,
           "stop"_a = std::vector<std::string>{}, "prompt"_a = std::vector<int32_t>{},
           "`prompt`: the tokens that the text goes on behind.")
      .def("feed", &Detokenizer::feed, "tokens"_a, "Text that these tokens finish.")
      .def("finish", &Detokenizer::finish, "Text held back, once no token follows.")
      .def_prop_ro("stopped", &Detokenizer::stopped, "True once a stop string is complete.");
}

}  // namespace ull::module
