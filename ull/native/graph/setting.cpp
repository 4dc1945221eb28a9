#include "graph/setting.h"

#include <algorithm>
#include <cstring>

namespace ull::graph {
namespace {

gpu::Sampling device_sampling(const Sampling& sampling) noexcept {
  return {.temperature = sampling.temperature,
          .top_k = sampling.top_k,
          .top_p = sampling.top_p,
          .min_p = sampling.min_p,
          .seed = sampling.seed,
          .top_logprobs = sampling.top_logprobs,
          .bias_count = sampling.bias_count,
          .repetition_penalty = sampling.repetition_penalty,
          .frequency_penalty = sampling.frequency_penalty,
          .presence_penalty = sampling.presence_penalty,
          .penalises = sampling.penalises() ? 1 : 0};
}

bool same_bits(const gpu::Sampling& a, const gpu::Sampling& b) noexcept {
  static_assert(sizeof(gpu::Sampling) == 48);  // no padding, whose bits might differ
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

}  // namespace

Setting::Setting(int32_t* mapped, int capacity)
    : biases_(gpu::kBiases), pages_(static_cast<size_t>(capacity)), mapped_(mapped) {}

bool Setting::holds(const Sampling& sampling, const int32_t* stops, int stop_count) const noexcept {
  static_assert(sizeof(gpu::LogitBias) == sizeof(LogitBias));
  return same_bits(device_sampling(sampling), sampling_) && std::min(stop_count, gpu::kStopTokens) == stop_count_ &&
         std::equal(stops_, stops_ + stop_count_, stops) &&
         (sampling.bias_count == 0 || std::memcmp(sampling.bias, biases_.data(),
                                                  static_cast<size_t>(sampling.bias_count) * sizeof(LogitBias)) == 0);
}

bool Setting::holds(const int32_t* pages, int count) const noexcept {
  return count <= page_count_ && std::equal(pages, pages + count, pages_.data());
}

void Setting::take(const int32_t* pages, int count) noexcept {
  if (version_ > 0 && holds(pages, count)) return;
  ++version_;
  // Mostly the table of before and a page more.
  const int32_t* changed = std::mismatch(pages, pages + std::min(count, page_count_), pages_.data()).first;
  const size_t first = static_cast<size_t>(changed - pages);
  std::copy(changed, pages + count, pages_.data() + first);
  std::copy(changed, pages + count, mapped_ + first);
  page_count_ = count;
}

void Setting::take(const Sampling& sampling, const int32_t* stops, int stop_count, const int32_t* pages,
                   int count) noexcept {
  const uint32_t before = version_;
  take(pages, count);
  if (holds(sampling, stops, stop_count)) return;
  version_ = before + 1;
  sampling_ = device_sampling(sampling);
  stop_count_ = std::min(stop_count, gpu::kStopTokens);  // the engine looks at every token itself: fewer do no harm
  std::copy_n(stops, stop_count_, stops_);
  for (int i = 0; i < sampling.bias_count; ++i) {
    biases_[static_cast<size_t>(i)] = {sampling.bias[i].token, sampling.bias[i].bias};
  }
}

void Setting::write(gpu::RoundRequest& request, bool device_has) const noexcept {
  request.setting = version_;
  request.page_count = page_count_;
  request.stop_count = stop_count_;
  request.sampling = sampling_;
  std::copy_n(stops_, stop_count_, request.stops);
  if (!device_has) std::copy_n(biases_.data(), sampling_.bias_count, request.biases);
}

}  // namespace ull::graph
