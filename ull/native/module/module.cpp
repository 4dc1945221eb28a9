// The Python module ull._native: bindings only, no logic.
#include "module/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "The native core of ull.";
  ull::module::bind_executor(m);
  ull::module::bind_past_outputs(m);
  ull::module::bind_cpu(m);
  ull::module::bind_graph(m);
  ull::module::bind_testing(m);
  ull::module::bind_offline(m);
  ull::module::bind_sampling(m);
  ull::module::bind_grammar(m);
  ull::module::bind_engine(m);
  ull::module::bind_process(m);
  ull::module::bind_io(m);
  ull::module::bind_messages(m);
  ull::module::bind_limits(m);
}
