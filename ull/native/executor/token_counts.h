// How often each token occurs in a request's text so far: what penalties look at (executor/sampling.h). At a node of a
// draft tree the text includes the way from the root to that node, so tokens can be added and taken back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ull {

class TokenCounts {
 public:
  // Allocates for texts of `context` tokens and what one round puts behind them.
  TokenCounts(int vocabulary, int context);

  // Counts history[0, count), of which the first `prompt` are the prompt. Cheap where it continues what is counted.
  void follow(const int32_t* history, int count, int prompt) noexcept;
  // A generated token behind the text, and the last one away again.
  void add(int32_t token) noexcept;
  void take_back() noexcept;

  // The different tokens of the text, in any order.
  [[nodiscard]] int size() const noexcept { return distinct_count_; }
  [[nodiscard]] int32_t token(int index) const noexcept { return distinct_[static_cast<size_t>(index)]; }
  // Whether the text holds `token`, and how often it does behind the prompt.
  [[nodiscard]] bool holds(int32_t token) const noexcept { return generated(token) > 0 || prompted(token); }
  [[nodiscard]] int generated(int32_t token) const noexcept { return generated_[static_cast<size_t>(token)]; }

 private:
  [[nodiscard]] bool prompted(int32_t token) const noexcept { return prompted_[static_cast<size_t>(token)] != 0; }
  [[nodiscard]] bool known(int32_t token) const noexcept {
    return token >= 0 && static_cast<size_t>(token) < generated_.size();
  }
  void clear() noexcept;

  std::vector<int32_t> generated_;  // [vocabulary]
  std::vector<uint8_t> prompted_;   // [vocabulary] 1: the prompt holds it
  std::vector<int32_t> distinct_;   // [distinct_count_]
  int distinct_count_ = 0;
  std::vector<int32_t> text_;  // [text_count_] what is counted
  int text_count_ = 0;
  int prompt_ = 0;
};

}  // namespace ull
