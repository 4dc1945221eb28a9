// A request's sampling parameters, and the sampling rule by itself.
#include "module/sampling.h"

#include <map>
#include <optional>

#include "base/gumbel.h"
#include "cpu/sampler.h"

namespace ull::module {
namespace {

int32_t sample(const FloatArray& logits, int32_t position, const nb::dict& params,
               const std::optional<Int32Array>& history, int prompt_tokens) {
  const SamplingParameters wanted(params);
  if (logits.size() == 0) throw std::invalid_argument("logits: at least one is needed");
  std::vector<float> copy(logits.data(), logits.data() + logits.size());
  const auto isa = parameter(params, "isa", std::string("auto"));
  cpu::Sampler sampler(cpu::select_kernels(isa), static_cast<int>(copy.size()));
  RoundToken token{};
  std::optional<TokenCounts> counts;
  if (history) {
    const int length = static_cast<int>(history->size());
    counts.emplace(static_cast<int>(copy.size()), length);
    counts->follow(history->data(), length, prompt_tokens);
  }
  if (sampler.sample(copy.data(), position, wanted.sampling(), token, counts ? &*counts : nullptr) != Status::kOk) {
    throw std::invalid_argument("logits: not finite, or every token is banned");
  }
  return token.token;
}

auto gumbel_noise(uint64_t seed, int32_t position, const Int32Array& tokens) {
  std::vector<float> noise;
  for (const int32_t token : span_of(tokens)) noise.push_back(gumbel(seed, position, token));
  return numpy_array(std::move(noise), tokens.size());
}

}  // namespace

SamplingParameters::SamplingParameters(const nb::dict& params) {
  sampling_.temperature = parameter(params, "temperature", 0.0F);
  sampling_.top_k = parameter(params, "top_k", 0);
  sampling_.top_p = parameter(params, "top_p", 1.0F);
  sampling_.min_p = parameter(params, "min_p", 0.0F);
  sampling_.seed = parameter(params, "seed", uint64_t{0});
  sampling_.top_logprobs = parameter(params, "logprobs", -1);
  sampling_.repetition_penalty = parameter(params, "repetition_penalty", 1.0F);
  sampling_.frequency_penalty = parameter(params, "frequency_penalty", 0.0F);
  sampling_.presence_penalty = parameter(params, "presence_penalty", 0.0F);
  for (const auto& [token, value] : parameter(params, "logit_bias", std::map<int32_t, float>{})) {
    bias_.push_back({token, value});
  }
  sampling_.bias = bias_.data();
  sampling_.bias_count = static_cast<int32_t>(bias_.size());
}

void bind_sampling(nb::module_& m) {
  m.def("sample", &sample, "logits"_a, "position"_a, "sampling"_a, "history"_a = nb::none(), "prompt_tokens"_a = 0,
        "Draws the token at `position` from float32 [V] logits; sampling: temperature, top_k, top_p, min_p, seed, "
        "logit_bias {id: float}, repetition_penalty, frequency_penalty, presence_penalty. The penalties look at "
        "`history`, int32 ids of which the first prompt_tokens are the prompt.");
  m.def("gumbel", &gumbel_noise, "seed"_a, "position"_a, "tokens"_a,
        "The noise of the sampling rule for int32 [n] tokens -> float32 [n].");
}

}  // namespace ull::module
