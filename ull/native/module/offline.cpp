// A model without an engine: one session of it, and the passes of the build.
#include <map>
#include <memory>
#include <optional>

#include "cpu/offline/evaluate.h"
#include "cpu/offline/fake_quantiser.h"
#include "cpu/offline/local_session.h"
#include "cpu/offline/observe.h"
#include "module/bindings.h"
#include "module/model.h"

namespace ull::module {
namespace {

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
                   const std::optional<InputScales>& input_scales, bool token_scales) {
  const std::vector<int32_t> ids(tokens.data(), tokens.data() + tokens.size());
  cpu::ModelSpec native = model_spec(spec);
  std::optional<cpu::FakeQuantiser> quantiser;
  if (input_scales && !input_scales->empty()) quantiser.emplace(*input_scales, native.layers);
  if (token_scales) {
    if (quantiser) throw std::invalid_argument("token_scales: not beside input_scales");
    quantiser.emplace(native.layers);
  }
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

}  // namespace

void bind_offline(nb::module_& m) {
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

  m.def("evaluate", &evaluate, "spec"_a, "tokens"_a, "window"_a, "threads"_a = 1, "progress"_a = nb::none(),
        "input_scales"_a = nb::none(), "token_scales"_a = false,
        "One layer-by-layer pass over the mapped weights. tokens int32 [n] are cut into windows, each from position 0; "
        "-> (nll float32 [m], argmax int32 [m]) for tokens 1.. of each. progress(done, total) may raise to stop. "
        "`input_scales`: the input of each linear named (layers.N.qkv, .o, .gate_up, .down, lm_head) is rounded to "
        "E4M3 times its scale. `token_scales`: that of every linear but lm_head, for each token times its largest / "
        "448.");
  m.def("observe", &observe, "spec"_a, "tokens"_a, "window"_a, "threads"_a = 1, "progress"_a = nb::none(),
        "What evaluate's pass meets -> (uint64 [32768] per linear: its inputs' |x| counted by their bits as bf16, "
        "truncated; the largest |x| per linear; float32 [2 * kv_heads] per layer, \"layers.N.kv\": the largest |key| "
        "after norm and rotation and |value| of each head). RuntimeError if anything is not finite.");
}

}  // namespace ull::module
