// The text of a request with penalties, as the device has it: tokens by position, of which the first come by way of
// mapped memory, once, and what follows is what rounds have emitted. The device counts it on its own; this is the
// host's copy, which says whether the device's text is still the sequence's.
//
// Rounds write no token at or before their root, so what a round that nobody takes has left behind its root does no
// harm: begin() forgets it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "executor/executor.h"
#include "kernels/params.h"

namespace ull::graph {

class Text {
 public:
  // mapped: [capacity] what the device reads when the version changes.
  Text(int32_t* mapped, int capacity)
      : text_(static_cast<size_t>(capacity) + kMaxTokensPerRound), mapped_(mapped), capacity_(capacity) {}

  // Whether it begins with history [0, count), the first `prompt_tokens` of which are the prompt.
  //
  // A request's history only grows, and no other request goes on where it was: its first round stands at the end of the
  // prompt, where no later one does. So what has been compared once is not compared again.
  [[nodiscard]] bool holds(const int32_t* history, int count, int prompt_tokens) noexcept {
    if (version_ == 0 || prompt_tokens != prompt_tokens_ || count > count_) return false;
    const bool goes_on = history == history_ && count > prompt_tokens && count >= compared_;
    const int same = goes_on ? compared_ : 0;
    if (!std::equal(history + same, history + count, text_.data() + same)) return false;
    history_ = history;
    compared_ = count;
    return true;
  }
  // Takes it over; count: at most the capacity. No round under way reads the mapped memory: a step begins when the one
  // before it has ended, and what may still be queued behind that one goes on with the text that the device has.
  void take(const int32_t* history, int count, int prompt_tokens) noexcept {
    ++version_;
    count_ = std::min(count, capacity_);
    prompt_tokens_ = prompt_tokens;
    std::copy_n(history, count_, text_.data());
    std::copy_n(history, count_, mapped_);
    history_ = history;
    compared_ = count_;
  }

  // A round begins whose root is the last of the first `count` tokens, and ends with what it emitted.
  void begin(int count) noexcept {
    count_ = std::min(count, count_);
    compared_ = std::min(compared_, count_);
  }
  void add(int32_t token) noexcept {
    if (static_cast<size_t>(count_) < text_.size()) text_[static_cast<size_t>(count_++)] = token;
  }

  void write(gpu::RoundRequest& request) const noexcept {
    request.text = version_;
    request.prompt_tokens = prompt_tokens_;
  }

 private:
  uint32_t version_ = 0;  // the device begins with 0, which no round asks for
  int count_ = 0;
  int prompt_tokens_ = 0;
  int compared_ = 0;                  // tokens that were history_'s when it was last looked at
  const int32_t* history_ = nullptr;  // never read
  std::vector<int32_t> text_;         // [count_]
  int32_t* const mapped_;
  const int capacity_;
};

}  // namespace ull::graph
