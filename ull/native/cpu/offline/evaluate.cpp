#include "cpu/offline/evaluate.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/float_math.h"
#include "cpu/model.h"

namespace ull::cpu {
namespace {

constexpr int kChunk = 256;          // tokens per step through a layer
constexpr int kProjectedChunk = 48;  // tokens whose logits are held at once

void predict(const Kernels& kernels, const float* logits, int vocabulary, int32_t target, float* scratch,
             Evaluation& result) {
  float maximum = 0.0F;
  if (!kernels.scan(logits, vocabulary, &maximum)) throw std::runtime_error("evaluate: a logit is not finite");
  kernels.exponentials(logits, vocabulary, maximum, 1.0F, scratch);
  double total = 0.0;
  for (int i = 0; i < vocabulary; ++i) total += static_cast<double>(scratch[i]);
  result.nll.push_back(log_lanes<ScalarMath>(static_cast<float>(total)) + maximum - logits[target]);
  result.argmax.push_back(kernels.argmax(logits, vocabulary));
}

}  // namespace

Evaluation evaluate(ModelSpec spec, const std::vector<int32_t>& tokens, int window, int threads,
                    const std::function<void(int64_t, int64_t)>& progress, Tap* tap) {
  if (window < 2) throw std::invalid_argument("window: must be at least 2 tokens");
  if (tokens.size() < 2) throw std::invalid_argument("tokens: at least 2 are needed");
  for (const int32_t token : tokens) {
    if (token < 0 || token >= spec.vocabulary) throw std::invalid_argument("tokens: id outside the vocabulary");
  }
  spec.context = window;
  ModelOptions options;
  options.threads = threads;
  options.chunk = std::min(window, kChunk);
  options.storage = WeightStorage::kMapped;
  options.cache_layers = 1;
  Model model(std::move(spec), options);
  model.set_tap(tap);
  const int layers = model.spec().layers;
  const int vocabulary = model.spec().vocabulary;
  const size_t width = static_cast<size_t>(model.spec().hidden);
  const int total = static_cast<int>(tokens.size());
  std::vector<int32_t> pages(static_cast<size_t>(model.cache().pages()));
  std::iota(pages.begin(), pages.end(), 0);
  AlignedArray<float> hidden(tokens.size() * width);  // [tokens][hidden]
  const auto row = [&](int token) { return hidden.data() + static_cast<size_t>(token) * width; };

  const int64_t work = static_cast<int64_t>(total) * (layers + 1);  // a token through one layer or the lm_head
  int64_t done = 0;
  const auto advance = [&](int count) {
    done += count;
    if (progress) progress(done, work);
  };
  for (int token = 0; token < total; token += options.chunk) {
    model.embed(tokens.data() + token, std::min(options.chunk, total - token), row(token));
  }
  for (int layer = 0; layer < layers; ++layer) {
    for (int first = 0; first < total; first += window) {
      const int length = std::min(window, total - first);
      for (int start = 0; start < length; start += options.chunk) {
        const int count = std::min(options.chunk, length - start);
        model.run_layer(layer, row(first + start), count, start, pages.data());
        if (tap != nullptr) tap->chunk_done(model.cache(), start, count);
        advance(count);
      }
    }
    model.weights().drop_layer(layer);
    if (tap != nullptr) tap->layer_done(layer);
  }
  Evaluation result;
  result.nll.reserve(tokens.size());
  result.argmax.reserve(tokens.size());
  AlignedArray<float> logits(static_cast<size_t>(kProjectedChunk) * static_cast<size_t>(vocabulary));
  AlignedArray<float> scratch(static_cast<size_t>(vocabulary));
  const int step = std::min(kProjectedChunk, options.chunk);
  for (int first = 0; first < total; first += step) {
    const int count = std::min(step, total - first);
    model.project(row(first), count, logits.data());
    for (int i = 0; i < count; ++i) {
      const int next = first + i + 1;
      if (next >= total || next % window == 0) continue;  // the window's last token predicts nothing
      predict(model.kernels(), logits.data() + static_cast<size_t>(i) * static_cast<size_t>(vocabulary), vocabulary,
              tokens[static_cast<size_t>(next)], scratch.data(), result);
    }
    advance(count);
  }
  if (tap != nullptr) tap->layer_done(layers);
  return result;
}

}  // namespace ull::cpu
