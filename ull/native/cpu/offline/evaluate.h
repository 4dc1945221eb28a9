// Perplexity of a model without holding it: one pass over the layers of a mapped weights file, all windows together.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/model_shape.h"
#include "cpu/tap.h"

namespace ull::cpu {

struct Evaluation {
  std::vector<float> nll;       // [predictions] -ln p(token), natural log
  std::vector<int32_t> argmax;  // [predictions] the most probable token
};

// Splits tokens into windows of `window`, each a sequence from position 0, and predicts tokens 1 .. of each (the last
// window may be shorter; one token alone predicts nothing). progress(done, total) is called between steps and may
// throw to stop; `tap` looks on. Peak memory: 4 hidden n bytes, one layer's KV of one window, and the resident part of
// one layer. Throws std::invalid_argument for a bad spec, tensor, token or window; std::runtime_error if a logit is not
// finite.
Evaluation evaluate(ModelSpec spec, const std::vector<int32_t>& tokens, int window, int threads,
                    const std::function<void(int64_t, int64_t)>& progress, Tap* tap = nullptr);

}  // namespace ull::cpu
