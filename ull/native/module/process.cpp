// What concerns the process as a whole: signals, the service manager.
#include "base/notify.h"
#include "base/termination.h"
#include "module/bindings.h"

namespace ull::module {

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
}

}  // namespace ull::module
