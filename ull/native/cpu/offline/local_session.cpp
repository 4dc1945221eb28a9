#include "cpu/offline/local_session.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace ull::cpu {

LocalSession::LocalSession(ModelSpec spec, const ModelOptions& options, std::unique_ptr<Tap> tap)
    : tap_(std::move(tap)),
      model_(std::move(spec), options),
      sampler_(model_.kernels(), model_.spec().vocabulary),
      pages_(static_cast<size_t>(model_.cache().pages())) {
  std::iota(pages_.begin(), pages_.end(), 0);
  model_.set_tap(tap_.get());
}

std::vector<float> LocalSession::logits(std::span<const int32_t> tokens, int chunk, std::span<const int32_t> pages) {
  check_pages(pages);
  std::vector<float> out(tokens.size() * static_cast<size_t>(model_.spec().vocabulary));
  feed(tokens, chunk, pages.empty() ? std::span<const int32_t>(pages_) : pages, out.data());
  return out;
}

void LocalSession::prefill(std::span<const int32_t> tokens, int chunk) { feed(tokens, chunk, pages_, nullptr); }

std::vector<float> LocalSession::decode(int32_t token, int position) {
  if (position < 0) throw std::invalid_argument("position: must not be negative");
  check_tokens({&token, 1});
  check_extent(int64_t{position} + 1, pages_.size());
  std::vector<float> out(static_cast<size_t>(model_.spec().vocabulary));
  feed_one(token, position, out.data());
  return out;
}

std::vector<int32_t> LocalSession::generate_greedy(std::span<const int32_t> tokens, int count) {
  if (tokens.empty()) throw std::invalid_argument("tokens: at least one is needed");
  if (count < 1) throw std::invalid_argument("n: must be at least 1");
  check_extent(static_cast<int64_t>(tokens.size()) + count - 1, pages_.size());
  if (tokens.size() > 1) feed(tokens.first(tokens.size() - 1), model_.chunk(), pages_, nullptr);
  check_tokens(tokens.last(1));
  std::vector<float> logits(static_cast<size_t>(model_.spec().vocabulary));
  std::vector<int32_t> out;
  int32_t token = tokens.back();
  for (int position = static_cast<int>(tokens.size()) - 1; static_cast<int>(out.size()) < count; ++position) {
    feed_one(token, position, logits.data());
    RoundToken drawn{};
    if (sampler_.sample(logits.data(), position + 1, {}, drawn) != Status::kOk) {
      throw std::runtime_error("generate_greedy: a logit is not finite");
    }
    token = drawn.token;
    out.push_back(token);
  }
  return out;
}

void LocalSession::check_tokens(std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens) {
    if (token < 0 || token >= model_.spec().vocabulary) {
      throw std::invalid_argument("tokens: id " + std::to_string(token) + " is outside the vocabulary of " +
                                  std::to_string(model_.spec().vocabulary));
    }
  }
}

void LocalSession::check_extent(int64_t end, size_t pages) const {
  if (end > model_.spec().context) {
    throw std::invalid_argument("tokens: " + std::to_string(end) + " positions, but the context holds " +
                                std::to_string(model_.spec().context));
  }
  if (end > static_cast<int64_t>(pages) * kPageTokens) {
    throw std::invalid_argument("pages: " + std::to_string(pages) + " pages cannot hold " + std::to_string(end) +
                                " tokens");
  }
}

void LocalSession::check_pages(std::span<const int32_t> pages) const {
  std::vector<bool> used(pages_.size());
  for (const int32_t page : pages) {
    if (page < 0 || page >= static_cast<int32_t>(used.size()) || used[static_cast<size_t>(page)]) {
      throw std::invalid_argument("pages: must be distinct numbers below " + std::to_string(used.size()));
    }
    used[static_cast<size_t>(page)] = true;
  }
}

void LocalSession::feed(std::span<const int32_t> tokens, int chunk, std::span<const int32_t> pages, float* logits) {
  if (tokens.empty()) throw std::invalid_argument("tokens: at least one is needed");
  if (chunk < 1 || chunk > model_.chunk()) {
    throw std::invalid_argument("chunk: must be 1 to " + std::to_string(model_.chunk()));
  }
  check_tokens(tokens);
  check_extent(static_cast<int64_t>(tokens.size()), pages.size());
  const int total = static_cast<int>(tokens.size());
  for (int start = 0; start < total; start += chunk) {
    float* rows = logits == nullptr
                      ? nullptr
                      : logits + static_cast<size_t>(start) * static_cast<size_t>(model_.spec().vocabulary);
    (void)model_.forward({tokens.data() + start, std::min(chunk, total - start), start, pages.data(),
                          logits == nullptr ? LogitsOf::kNone : LogitsOf::kAll, rows},
                         never_abort_);
  }
}

void LocalSession::feed_one(int32_t token, int position, float* logits) {
  (void)model_.forward({&token, 1, position, pages_.data(), LogitsOf::kLast, logits}, never_abort_);
}

}  // namespace ull::cpu
