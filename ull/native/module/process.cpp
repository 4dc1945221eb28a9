// What concerns the process as a whole: signals, the service manager, the cores that it runs on.
#include "base/noise.h"
#include "base/notify.h"
#include "base/termination.h"
#include "module/bindings.h"

namespace ull::module {

namespace {

nb::dict noise_of(int core, int64_t duration_ns, const std::vector<int64_t>& bounds_ns) {
  NoiseReport report;
  {
    const nb::gil_scoped_release others_run;
    report = measure_noise(core, duration_ns, bounds_ns);
  }
  nb::dict out;
  out["reads"] = report.reads;
  out["observed_ns"] = report.observed_ns;
  out["shortest_ns"] = report.shortest_ns;
  out["longest_ns"] = report.longest_ns;
  out["gaps"] = report.gaps;
  out["gaps_ns"] = report.gaps_ns;
  out["by_size"] = report.by_size;
  return out;
}

}  // namespace

void bind_process(nb::module_& m) {
  nb::class_<Termination>(
      m, "Termination",
      "SIGTERM, SIGINT and SIGHUP, taken over for as long as the process lives, and a native thread "
      "that ends the process when its time is up. One per process.")
      .def(nb::init<>())
      .def_prop_ro("asked", &Termination::asked, "SIGTERMs and SIGINTs so far.")
      .def_prop_ro("hangups", &Termination::hangups, "SIGHUPs so far.")
      .def_prop_ro("last_signal", &Termination::last_signal, "Number of the last SIGTERM or SIGINT; 0: none.")
      .def_prop_ro("fd", &Termination::fd, "Descriptor that is readable after a signal, until clear().")
      .def("clear", &Termination::clear)
      .def("set_patience", &Termination::set_patience, "first_ms"_a, "second_ms"_a, "status"_a,
           "How long the process may run after the first and after the second SIGTERM or SIGINT; then it ends.")
      .def("end_within", &Termination::end_within, "time_ms"_a, "status"_a,
           "The process ends in this time at the latest.");

  m.def("notify", &notify_service_manager, "state"_a,
        "Sends a state (such as READY=1) to systemd's notification socket; False if there is none.");
  m.def("be_the_service", &be_the_service, "is_it"_a,
        "Whether this process is the one that the service manager hears of: not before it has succeeded another.");
  m.def("measure_noise", &noise_of, "core"_a, "duration_ns"_a, "bounds_ns"_a,
        "Reads the clock on a core, and counts the gaps between two reads by their size. ValueError: no such core.");
}

}  // namespace ull::module
