#include "cpu/offline/observe.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "cpu/offline/evaluate.h"
#include "cpu/tap.h"

namespace ull::cpu {
namespace {

constexpr uint32_t kInfinity = 0x7F800000;

// The bits of |value|: they rise with it, infinity and NaN come last.
uint32_t magnitude_bits(float value) noexcept { return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU; }

float finite_magnitude(uint32_t bits, const std::string& name) {
  if (bits >= kInfinity) throw std::runtime_error("observe: " + name + " is not finite");
  return std::bit_cast<float>(bits);
}

// Counts the inputs of one layer at a time.
class Observer final : public Tap {
 public:
  Observer(const ModelSpec& spec, int members) : spec_(spec), names_(linear_names(spec.layers)) {
    counts_.resize(static_cast<size_t>(std::max(members, 1)));
    for (Member& member : counts_) {
      for (Counts& counts : member.linears) counts.histogram.resize(kMagnitudeBins);
    }
    largest_kv_.resize(static_cast<size_t>(2 * spec.kv_heads));
  }

  void take(int linear, int member, float* x, int count, int stride, float factor) noexcept override {
    Counts& counts = counts_[static_cast<size_t>(member)].linears[linear % kLayerLinears];
    const float unscaled = 1.0F / factor;
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = magnitude_bits(x[static_cast<ptrdiff_t>(i) * stride] * unscaled);
      ++counts.histogram[bits >> 16];
      counts.largest = std::max(counts.largest, bits);
    }
  }

  void chunk_done(const KvCache& cache, int start, int count) override {
    for (int position = start; position < start + count; ++position) {
      for (int head = 0; head < spec_.kv_heads; ++head) look_at(cache, position, head);
    }
  }

  void layer_done(int layer) override {
    const bool is_layer = layer < spec_.layers;
    for (int i = 0; i < (is_layer ? kLayerLinears : 1); ++i) collect(linear_index(layer, static_cast<Linear>(i)));
    if (!is_layer) return;
    std::vector<float>& largest = seen_.keys_values.emplace_back();
    for (uint32_t& bits : largest_kv_) {
      largest.push_back(finite_magnitude(std::exchange(bits, 0), "a key or value of layer " + std::to_string(layer)));
    }
  }

  Observation finish() { return std::move(seen_); }

 private:
  struct Counts {
    std::vector<uint64_t> histogram;  // [kMagnitudeBins]
    uint32_t largest = 0;             // bits of |x|
  };
  struct alignas(kCacheLine) Member {
    Counts linears[kLayerLinears];
  };

  // A position's key and value of one head; both are f32 in the cache.
  void look_at(const KvCache& cache, int position, int head) noexcept {
    const int page = position / kPageKeys;
    const int slot = position % kPageKeys;
    const auto* keys = reinterpret_cast<const float*>(cache.keys(page, 0, head, slot / kTileRows)) + slot % kTileRows;
    uint32_t& key = largest_kv_[static_cast<size_t>(head)];
    uint32_t& value = largest_kv_[static_cast<size_t>(spec_.kv_heads + head)];
    for (int d = 0; d < spec_.head_dim; ++d) {
      const auto* values = reinterpret_cast<const float*>(cache.value_row(page, 0, head, d / kTileRows, slot));
      key = std::max(key, magnitude_bits(keys[d * kTileRows]));
      value = std::max(value, magnitude_bits(values[d % kTileRows]));
    }
  }

  // Moves what the members have counted of a linear to the observation.
  void collect(int linear) {
    ObservedInput input{names_[static_cast<size_t>(linear)], std::vector<uint64_t>(kMagnitudeBins)};
    uint32_t largest = 0;
    for (Member& member : counts_) {
      Counts& counts = member.linears[linear % kLayerLinears];
      for (size_t bin = 0; bin < kMagnitudeBins; ++bin) input.histogram[bin] += counts.histogram[bin];
      std::fill(counts.histogram.begin(), counts.histogram.end(), 0);
      largest = std::max(largest, std::exchange(counts.largest, 0));
    }
    input.largest = finite_magnitude(largest, "an input of " + input.name);
    seen_.inputs.push_back(std::move(input));
  }

  const ModelSpec spec_;
  const std::vector<std::string> names_;
  std::vector<Member> counts_;
  std::vector<uint32_t> largest_kv_;  // [2 * kv_heads] bits of the layer's largest |key|, |value|
  Observation seen_;
};

}  // namespace

Observation observe(ModelSpec spec, const std::vector<int32_t>& tokens, int window, int threads,
                    const std::function<void(int64_t, int64_t)>& progress) {
  validate(spec);
  spec.kv_format = Format::kF32;
  Observer observer(spec, threads);
  (void)evaluate(std::move(spec), tokens, window, threads, progress, &observer);
  return observer.finish();
}

}  // namespace ull::cpu
