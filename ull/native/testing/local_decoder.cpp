#include "testing/local_decoder.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/clock.h"

namespace ull::cpu {

LocalDecoder::LocalDecoder(ModelSpec spec, ModelOptions options, SpeculationOptions speculation)
    : executor_(std::move(spec), std::move(options), std::move(speculation)) {
  executor_.prepare();
  pages_.resize(static_cast<size_t>(executor_.info().page_count));
  std::iota(pages_.begin(), pages_.end(), 0);
}

Decoded LocalDecoder::decode(const DecodeRequest& request) {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  };
  const std::span<const int32_t> pages = request.pages.empty() ? std::span<const int32_t>(pages_) : request.pages;
  const int prompt = static_cast<int>(request.tokens.size());
  require(prompt >= 1, "tokens: at least one is needed");
  require(request.max_tokens >= 1, "max_tokens: must be at least 1");
  require(request.max_tree >= 0 && request.max_tree <= kMaxTreeTokens, "max_tree: must be 0 to 64");
  require(request.cached >= 0 && request.cached < prompt, "cached: must be less than the prompt");
  require(executor_.info().drafters[static_cast<size_t>(request.speculation)], "speculate: there is no such drafter");
  const int64_t end = int64_t{prompt} + request.max_tokens;
  require(end <= executor_.info().context && end <= static_cast<int64_t>(pages.size()) * kPageTokens,
          "max_tokens: the tokens do not fit the context or the pages");
  for (const int32_t page : pages) require(page >= 0 && page < executor_.info().page_count, "pages: out of range");

  require(request.forced >= 0 && request.forced <= executor_.info().forced_tokens, "forced: must be 0 to chunk - 1");

  drafted_.cut(request.cached);
  RoundResult result;
  int start = request.cached;
  while (start < prompt - 1 - request.forced) {
    const int count = std::min(executor_.info().prefill_chunk, prompt - 1 - request.forced - start);
    Status status = executor_.start_prefill({.tokens = request.tokens.data() + start,
                                             .count = count,
                                             .start = start,
                                             .pages = pages.data(),
                                             .drafted = &drafted_,
                                             .speculation = request.speculation,
                                             .history = request.tokens.data()});
    if (status == Status::kOk) status = executor_.poll(result);
    if (status != Status::kOk) throw std::runtime_error("prefill failed");
    start += count;
  }
  Decoded out;
  std::vector<int32_t> history(request.tokens.begin(), request.tokens.end());
  history.reserve(static_cast<size_t>(end));
  const auto complete = [&] { return request.constraint != nullptr && request.constraint->complete(); };
  while (static_cast<int>(out.tokens.size()) < request.max_tokens && !complete()) {
    const int last = static_cast<int>(history.size()) - 1;
    const int position = out.tokens.empty() ? start : last;
    const int left = request.max_tokens - static_cast<int>(out.tokens.size());
    const int64_t begin = monotonic_ns();
    Status status = executor_.start_round({.token = history[static_cast<size_t>(position)],
                                           .position = position,
                                           .pages = pages.data(),
                                           .sampling = &request.sampling,
                                           .max_tokens = std::min(left, kMaxTokensPerRound),
                                           .history = history.data(),
                                           .speculation = request.speculation,
                                           .max_tree = request.max_tree,
                                           .drafted = &drafted_,
                                           .prompt_tokens = prompt,
                                           .forced = last - position,
                                           .constraint = request.constraint});
    if (status == Status::kOk) status = executor_.poll(result);
    if (status != Status::kOk) {
      out.failed = true;
      return out;
    }
    out.rounds.push_back({result.drafter, result.tree_tokens, result.depth, result.accepted, monotonic_ns() - begin});
    for (int i = 0; i < result.count; ++i) {
      out.tokens.push_back(result.tokens[i]);
      history.push_back(result.tokens[i].token);
    }
  }
  return out;
}

}  // namespace ull::cpu
