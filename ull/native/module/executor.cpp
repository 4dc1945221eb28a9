#include "module/bindings.h"

namespace ull::module {

nb::dict executor_info(const ExecutorInfo& info) {
  nb::dict out;
  out["executor"] = info.name;
  out["vocabulary"] = info.vocabulary;
  out["page_count"] = info.page_count;
  out["prefill_chunk"] = info.prefill_chunk;
  out["weight_bytes"] = info.weight_bytes;
  out["kv_bytes"] = info.kv_bytes;
  out["drafter_weight_bytes"] = info.drafter_weight_bytes;
  out["drafter_kv_bytes"] = info.drafter_kv_bytes;
  nb::list drafters;
  nb::dict draft_ns;
  nb::dict verify_ns;
  for (int i = 0; i < kDrafterKinds; ++i) {
    const char* name = drafter_name(static_cast<DrafterKind>(i));
    if (info.drafters[i]) drafters.append(name);
    if (info.draft_ns[i] > 0) draft_ns[name] = info.draft_ns[i];
  }
  for (int i = 0; i < kCostSizes; ++i) {
    if (info.verify_ns[i] > 0) verify_ns[nb::cast(std::to_string(kCostTokens[i]))] = info.verify_ns[i];
  }
  out["penalties"] = info.penalties;
  out["score_nodes"] = info.score_nodes;
  out["scores_prompts"] = info.scores_prompts();
  out["constraints"] = info.constraints;
  out["drafters"] = drafters;
  out["default_drafter"] = drafter_name(info.default_drafter);
  out["default_max_tree"] = info.default_max_tree;
  out["draft_ns"] = draft_ns;
  out["verify_ns"] = verify_ns;
  return out;
}

DrafterKind drafter_named(const std::string& name) {
  const std::optional<DrafterKind> speculation = parse_drafter(name);
  if (!speculation) throw std::invalid_argument("speculate: \"" + name + "\" is no drafter");
  return *speculation;
}

void bind_executor(nb::module_& m) {
  nb::class_<Executor>(m, "Executor",
                       "What runs the maths of an engine: a CpuExecutor, GraphExecutor or ScriptedExecutor.")
      .def_prop_ro("name", [](const Executor& executor) { return executor.info().name; })
      .def_prop_ro("weight_bytes", [](const Executor& executor) { return executor.info().weight_bytes; })
      .def_prop_ro("kv_bytes", [](const Executor& executor) { return executor.info().kv_bytes; })
      .def_prop_ro("failure", &Executor::failure, "Why it has failed; None while it has not, or cannot say.")
      .def_prop_ro("restart_helps", &Executor::restart_helps,
                   "Of a failed executor: whether a new process may do better. False if the GPU must be reset first.")
      .def("settle", &Executor::settle, nb::call_guard<nb::gil_scoped_release>(),
           "Waits until nothing of it runs any more, or it has failed; no step follows.");
}

}  // namespace ull::module
