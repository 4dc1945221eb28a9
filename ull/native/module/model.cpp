#include "module/model.h"

#include <map>
#include <tuple>

#include "module/bindings.h"

namespace ull::module {
namespace {

cpu::Format format_named(const std::string& owner, const std::string& dtype) {
  if (dtype == "F8_E4M3" || dtype == "fp8") return cpu::Format::kF8;
  if (dtype == "BF16" || dtype == "bf16") return cpu::Format::kBf16;
  if (dtype == "F32" || dtype == "f32" || dtype == "I32") return cpu::Format::kF32;  // I32: four bytes an item too
  throw std::invalid_argument(owner + ": dtype \"" + dtype + "\" is unknown");
}

using TensorMap = std::map<std::string, cpu::TensorInfo>;

TensorMap tensor_map(const nb::dict& dict) {
  TensorMap tensors;
  for (const auto& [key, value] : field<nb::dict>(dict, "tensors")) {
    const auto name = nb::cast<std::string>(key);
    using Entry = std::tuple<int64_t, int64_t, std::string, std::vector<int64_t>>;
    Entry entry;
    if (!nb::try_cast(value, entry)) {
      throw std::invalid_argument("tensor " + name + ": must be (offset, nbytes, dtype, shape)");
    }
    const auto& [offset, bytes, dtype, shape] = entry;
    tensors[name] = {offset, bytes, format_named("tensor " + name, dtype), shape};
  }
  return tensors;
}

// Takes the tensors whose names begin with `prefix` out of `from`, without the prefix unless `keep` is set.
TensorMap take_tensors(TensorMap& from, const std::string& prefix, bool keep) {
  TensorMap taken;
  for (auto entry = from.lower_bound(prefix); entry != from.end() && entry->first.starts_with(prefix);) {
    taken[keep ? entry->first : entry->first.substr(prefix.size())] = entry->second;
    entry = from.erase(entry);
  }
  return taken;
}

cpu::ModelSpec model_dimensions(const nb::dict& dict) {
  cpu::ModelSpec spec;
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
  spec.attention_factor = field<float>(dict, "attention_factor");
  spec.windows = field<std::vector<int>>(dict, "windows");
  return spec;
}

// dict[name], a dict of its own, read by `read`; null if it is absent or None. Errors name the section.
template <typename Read>
auto section(const nb::dict& dict, const std::string& name, Read read)
    -> std::shared_ptr<const decltype(read(std::declval<const nb::dict&>()))> {
  using Section = decltype(read(std::declval<const nb::dict&>()));
  if (!dict.contains(name.c_str()) || dict[name.c_str()].is_none()) return nullptr;
  const auto inner = field<nb::dict>(dict, name.c_str());
  try {
    return std::make_shared<const Section>(read(inner));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + "." + error.what());
  }
}

}  // namespace

cpu::ModelSpec model_spec(const nb::dict& dict) {
  cpu::ModelSpec spec = model_dimensions(dict);
  spec.path = field<std::string>(dict, "path");
  spec.tensors = tensor_map(dict);
  TensorMap medusa_tensors = take_tensors(spec.tensors, "medusa.", /*keep=*/true);
  TensorMap draft_tensors = take_tensors(spec.tensors, "draft.", /*keep=*/false);
  spec.medusa = section(dict, "medusa", [&](const nb::dict& inner) {
    cpu::MedusaSpec medusa;
    medusa.heads = field<int>(inner, "heads");
    medusa.layers = field<int>(inner, "layers");
    const auto version = field<std::string>(inner, "version");
    if (version != "1" && version != "2") {
      throw std::invalid_argument("version: must be \"1\" or \"2\", not \"" + version + "\"");
    }
    medusa.own_lm_head = version == "1";
    medusa.tensors = std::move(medusa_tensors);
    return medusa;
  });
  spec.draft = section(dict, "draft", [&](const nb::dict& inner) {
    cpu::ModelSpec draft = model_dimensions(inner);
    draft.path = spec.path;
    draft.tensors = std::move(draft_tensors);
    return draft;
  });
  const auto head_model = [&](const nb::dict& inner, const std::string& prefix) {
    cpu::ModelSpec head = model_dimensions(inner);
    head.path = spec.path;
    head.tensors = take_tensors(spec.tensors, prefix, /*keep=*/false);
    return head;
  };
  spec.eagle = section(dict, "eagle", [&](const nb::dict& inner) {
    cpu::EagleSpec eagle;
    eagle.model = head_model(inner, "eagle.");
    eagle.taps = field<std::vector<int>>(inner, "taps");
    eagle.norm_before_residual = field<bool>(inner, "norm_before_residual");
    eagle.norm_output = field<bool>(inner, "norm_output");
    const auto norm = field<std::string>(inner, "tap_norm");
    if (norm != "none" && norm != "each" && norm != "all") {
      throw std::invalid_argument("tap_norm: must be \"none\", \"each\" or \"all\", not \"" + norm + "\"");
    }
    using TapNorm = cpu::EagleSpec::TapNorm;
    eagle.tap_norm = norm == "none" ? TapNorm::kNone : norm == "each" ? TapNorm::kEach : TapNorm::kAll;
    eagle.own_embedding = field<bool>(inner, "own_embedding");
    eagle.mapped = field<bool>(inner, "mapped");
    return eagle;
  });
  spec.dflash = section(dict, "dflash", [&](const nb::dict& inner) {
    cpu::DflashSpec dflash;
    dflash.model = head_model(inner, "dflash.");
    dflash.taps = field<std::vector<int>>(inner, "taps");
    dflash.block = field<int>(inner, "block");
    dflash.mask_token = field<int32_t>(inner, "mask_token");
    dflash.anchor_predicts = field<bool>(inner, "anchor_predicts");
    dflash.own_embedding = field<bool>(inner, "own_embedding");
    dflash.own_lm_head = field<bool>(inner, "own_lm_head");
    dflash.mapped = field<bool>(inner, "mapped");
    dflash.markov = field<int>(inner, "markov");
    dflash.gated = field<std::string>(inner, "markov_kind") == "gated";
    dflash.confidence = field<bool>(inner, "confidence");
    dflash.confidence_reads_markov = field<bool>(inner, "confidence_reads_markov");
    return dflash;
  });
  return spec;
}

cpu::ModelOptions model_options(int threads, std::vector<int> cores, std::string isa, int chunk,
                                std::optional<int> pages) {
  if (pages.has_value() && *pages < 1) throw std::invalid_argument("pages: must be at least 1");
  cpu::ModelOptions options;
  options.threads = threads;
  options.cores = std::move(cores);
  options.isa = std::move(isa);
  options.chunk = chunk;
  options.pages = pages.value_or(0);
  return options;
}

}  // namespace ull::module
