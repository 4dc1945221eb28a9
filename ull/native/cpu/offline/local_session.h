// One session of a model without an engine around it: for tests, the build and benchmarks. Not the hot path: bad
// arguments throw std::invalid_argument, a model that yields no finite logits std::runtime_error.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/model.h"
#include "cpu/sampler.h"

namespace ull::cpu {

class LocalSession {
 public:
  // `tap`, if there is one, sees the linears' inputs.
  LocalSession(ModelSpec spec, const ModelOptions& options, std::unique_ptr<Tap> tap = nullptr);

  [[nodiscard]] const Model& model() const noexcept { return model_; }

  // Feeds tokens from position 0, `chunk` at a time -> logits [tokens][vocabulary]. pages: the page table, or empty
  // for pages 0, 1, 2, ...
  std::vector<float> logits(std::span<const int32_t> tokens, int chunk, std::span<const int32_t> pages);
  void prefill(std::span<const int32_t> tokens, int chunk);
  // Feeds one token -> logits [vocabulary].
  std::vector<float> decode(int32_t token, int position);
  // The `count` most probable tokens after `tokens`, one after another.
  std::vector<int32_t> generate_greedy(std::span<const int32_t> tokens, int count);

 private:
  void check_tokens(std::span<const int32_t> tokens) const;
  // Positions [0, end) must fit the context and a table of `pages` pages.
  void check_extent(int64_t end, size_t pages) const;
  void check_pages(std::span<const int32_t> pages) const;
  void feed(std::span<const int32_t> tokens, int chunk, std::span<const int32_t> pages, float* logits);
  void feed_one(int32_t token, int position, float* logits);

  std::unique_ptr<Tap> tap_;  // outlives the model
  Model model_;
  Sampler sampler_;
  std::vector<int32_t> pages_;  // 0, 1, 2, ...
  std::atomic<bool> never_abort_{false};
};

}  // namespace ull::cpu
