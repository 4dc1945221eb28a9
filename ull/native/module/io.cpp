#include "io/io.h"

#include "protocol/allow_list.h"
#include "protocol/saved_state.h"

#include "module/bindings.h"

namespace ull::module {
namespace {

CurveKey key_of(const nb::bytes& bytes, const char* name) {
  CurveKey key;
  if (bytes.size() != key.size()) throw std::invalid_argument(std::string(name) + ": a key has 32 bytes");
  std::copy_n(reinterpret_cast<const uint8_t*>(bytes.c_str()), key.size(), key.begin());
  return key;
}

nb::bytes to_bytes(const std::vector<uint8_t>& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

std::vector<uint8_t> from_bytes(const nb::bytes& bytes) {
  const auto* const begin = static_cast<const uint8_t*>(bytes.data());
  return {begin, begin + bytes.size()};
}

// Doors as (descriptor, state), clients as (descriptor, state, waiting payloads, identity).
nb::tuple hand_over(const Io& io) {
  const Transport::Estate estate = io.hand_over();
  nb::list doors, clients;
  for (const auto& door : estate.doors) doors.append(nb::make_tuple(door.fd, to_bytes(door.state)));
  for (const auto& client : estate.clients) {
    nb::list payloads;
    for (const auto& payload : client.payloads) payloads.append(to_bytes(payload));
    clients.append(nb::make_tuple(client.fd, to_bytes(client.state), payloads, to_bytes(client.identity)));
  }
  return nb::make_tuple(doors, clients);
}

nb::list take_over(Io& io, const std::vector<std::tuple<int, nb::bytes>>& doors,
                   const std::vector<std::tuple<int, nb::bytes, std::vector<nb::bytes>>>& clients) {
  Transport::Estate estate;
  for (const auto& [fd, state] : doors) {
    estate.doors.push_back({.fd = fd, .identity = {}, .state = from_bytes(state), .payloads = {}});
  }
  for (const auto& [fd, state, payloads] : clients) {
    estate.clients.push_back({.fd = fd, .identity = {}, .state = from_bytes(state), .payloads = {}});
    for (const nb::bytes& payload : payloads) estate.clients.back().payloads.push_back(from_bytes(payload));
  }
  nb::list identities;
  for (const auto& identity : io.take_over(estate)) identities.append(to_bytes(identity));
  return identities;
}

nb::dict io_stats(const Io& io) {
  nb::dict out = to_dict(io.stats().named());
  out["delivery_ns"] = to_dict(io.delivery_ns().named());
  return out;
}

}  // namespace

void bind_io(nb::module_& m) {
  m.attr("SAVED_FORMAT") = kSavedFormat;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<AllowList>(m, "AllowList", "The clients that may come by CURVE.")
      .def(nb::init<>())
      .def(
          "set",
          [](AllowList& list, const std::vector<std::tuple<nb::bytes, std::string, bool>>& clients) {
            AllowList::Clients known;
            for (const auto& [key, name, admin] : clients) known[key_of(key, "clients")] = {name, admin};
            list.set(std::move(known));
          },
          "clients"_a, "In place of those before: a public key's 32 bytes, a name, and whether it is an admin's.");

  nb::class_<Io>(m, "Io", "The io thread: clients' sockets and the PAIR to the control plane.")
      .def(
          "__init__",
          [](Io* self, Engine& engine, uintptr_t zmq_context, const std::string& libzmq,
             const std::vector<std::string>& listen, const std::string& control, int core,
             std::optional<bool> cooperative, const std::string& idle, int64_t client_stall_ms, int64_t max_message,
             int linger_ms, int ping_ms, int mute_ms, const std::vector<std::string>& local, const std::string& bundle,
             const std::string& libsodium, const nb::bytes& curve_secret,
             const std::shared_ptr<AllowList>& curve_clients) {
            std::optional<Curve::Options> curve;
            if (curve_clients != nullptr) {
              curve = {.sodium = Sodium::load(libsodium),
                       .secret = key_of(curve_secret, "curve_secret"),
                       .clients = curve_clients};
            }
            const IoOptions options{.server = {.zeromq = listen,
                                               .local = local,
                                               .max_message = max_message,
                                               .ping_ms = ping_ms,
                                               .mute_ms = mute_ms,
                                               .curve = curve,
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
          "local"_a = std::vector<std::string>{}, "bundle"_a = "", "libsodium"_a = "",
          "curve_secret"_a = nb::bytes("", 0), "curve_clients"_a.none() = nb::none(), nb::keep_alive<1, 2>())
      .def("start", &Io::start, Unlocked(), "Binds (RuntimeError naming the endpoint) and starts the thread.")
      .def("stop", &Io::stop, Unlocked(), "Delivers what has ended, closes the sockets. Idempotent.")
      .def("halt", &Io::halt, Unlocked(),
           "Takes no more messages, delivers what there is, ends the thread; all stays open. start() goes on.")
      .def("hand_over", &hand_over,
           "Halted: what a successor goes on with, as (doors, clients): a door is (descriptor, state), a client\n"
           "(descriptor, state, waiting payloads, identity). All stays open, but only one may go on with it.")
      .def("take_over", &take_over, "doors"_a, "clients"_a,
           "Halted: goes on with what a predecessor has handed over, the clients without their identities there.\n"
           "Returns those that they have here. RuntimeError: it cannot, and is of no use any more.")
      .def("abandon", &Io::abandon, Unlocked(), "Halted: closes everything without a word; a successor has it.")
      .def("stats", &io_stats)
      .def(
          "delivery_histogram", [](const Io& io) { return to_dict(io.delivery_ns()); },
          "From a token's acceptance to its frame's hand-over to the kernel, as Engine.round_histogram.")
      .def_prop_ro("endpoints", &Io::endpoints, "Clients' endpoints as bound: tcp port 0 is resolved.");
}

}  // namespace ull::module
