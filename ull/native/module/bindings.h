// What the bindings share. Only the files of module/ include it, and with it Python.h.
#pragma once

// nanobind's own headers shadow; ours may not.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/histogram.h"
#include "draft/drafter.h"
#include "executor/executor.h"

namespace ull::module {

namespace nb = nanobind;
using namespace nb::literals;

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

[[nodiscard]] inline std::span<const int32_t> span_of(const Int32Array& tokens) {
  return {tokens.data(), tokens.size()};
}

[[nodiscard]] inline nb::dict to_dict(const NamedCounts& counts) {
  nb::dict out;
  for (const auto& [name, value] : counts) out[name] = value;
  return out;
}

// A histogram as `stats` tells of it in full.
[[nodiscard]] inline nb::dict to_dict(const Histogram& histogram) {
  nb::list buckets;
  for (const auto& [upper, count] : histogram.buckets()) buckets.append(nb::make_tuple(upper, count));
  nb::dict out;
  out["sum"] = histogram.sum();
  out["buckets"] = buckets;
  return out;
}

// A view of `dict` that nobody can write to.
[[nodiscard]] inline nb::object read_only(const nb::dict& dict) {
  return nb::module_::import_("types").attr("MappingProxyType")(dict);
}

// What an executor says of itself.
[[nodiscard]] nb::dict executor_info(const ExecutorInfo& info);
// "none", "suffix", ...; std::invalid_argument otherwise.
[[nodiscard]] DrafterKind drafter_named(const std::string& name);
// By a drafter's name, the chances of a ReplayedAcceptance that stands in its place. std::invalid_argument.
using ReplayedTables = std::map<std::string, std::vector<std::vector<float>>>;
[[nodiscard]] ReplaceDrafter replacement(const ReplayedTables& tables, int vocabulary, int context);

void bind_executor(nb::module_& m);
void bind_past_outputs(nb::module_& m);
void bind_cpu(nb::module_& m);
void bind_graph(nb::module_& m);
void bind_testing(nb::module_& m);
void bind_offline(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_grammar(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_process(nb::module_& m);
void bind_io(nb::module_& m);
void bind_messages(nb::module_& m);
void bind_limits(nb::module_& m);

}  // namespace ull::module
