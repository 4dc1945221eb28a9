#include "io/io.h"

#include "module/bindings.h"

namespace ull::module {
namespace {

nb::dict io_stats(const Io& io) {
  nb::dict out = to_dict(io.stats().named());
  out["delivery_ns"] = to_dict(io.delivery_ns().named());
  return out;
}

}  // namespace

void bind_io(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Io>(m, "Io", "The io thread: clients' sockets and the PAIR to the control plane.")
      .def(
          "__init__",
          [](Io* self, Engine& engine, uintptr_t zmq_context, const std::string& libzmq,
             const std::vector<std::string>& listen, const std::string& control, int core,
             std::optional<bool> cooperative, const std::string& idle, int64_t client_stall_ms, int64_t max_message,
             int linger_ms, int ping_ms, int mute_ms, const std::vector<std::string>& local,
             const std::string& bundle) {
            const IoOptions options{.server = {.zeromq = listen,
                                               .local = local,
                                               .max_message = max_message,
                                               .ping_ms = ping_ms,
                                               .mute_ms = mute_ms,
                                               .linger_ms = linger_ms},
                                    .control = control,
                                    .core = core,
                                    .cooperative = cooperative,
                                    .idle = parse_idle_mode(idle),
                                    .bundle = bundle,
                                    .client_stall_ms = client_stall_ms};
            new (self) Io(engine, zmq::load(libzmq), reinterpret_cast<void*>(zmq_context), options);
          },
          "engine"_a, nb::kw_only(), "zmq_context"_a, "libzmq"_a, "listen"_a, "control"_a = "inproc://ull-control",
          "core"_a = -1, "cooperative"_a = nb::none(), "idle"_a = "adaptive", "client_stall_ms"_a = 250,
          "max_message"_a = 16 * 1024 * 1024, "linger_ms"_a = 1000, "ping_ms"_a = 2000, "mute_ms"_a = 5000,
          "local"_a = std::vector<std::string>{}, "bundle"_a = "", nb::keep_alive<1, 2>())
      .def("start", &Io::start, Unlocked(), "Binds (RuntimeError naming the endpoint) and starts the thread.")
      .def("stop", &Io::stop, Unlocked(), "Delivers what has ended, closes the sockets. Idempotent.")
      .def("stats", &io_stats)
      .def_prop_ro("endpoints", &Io::endpoints, "Clients' endpoints as bound: tcp port 0 is resolved.");
}

}  // namespace ull::module
