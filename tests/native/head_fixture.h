// Requests that draft with a head on a played device: what tests of every kind of head share.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "graph_fixture.h"

namespace ull::test {

// What is kept of a sequence between its requests.
struct Sequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> pages;
  Drafted drafted = {};
};

// Of trees up to 16 nodes.
struct HeadRig : GraphRig {
  using Passes = std::vector<FakeHead::Record>;

  HeadRig(DrafterKind kind, const FakeHead::Script& script, const FakeDevice::Script& target,
          const graph::GraphOptions& options)
      : GraphRig(target, options, std::nullopt, of(kind == DrafterKind::kEagle, script),
                 of(kind == DrafterKind::kDflash, script)) {
    (void)head().records();
    speculation = kind;
    max_tree = 16;
  }

  [[nodiscard]] FakeHead& head() { return eagle != nullptr ? static_cast<FakeHead&>(*eagle) : *dflash; }

  // The passes since the last call.
  Passes passes() {
    (void)rest();
    return head().records();
  }

  // Positions [begin, end) of a text.
  Status read(const std::vector<int32_t>& text, int begin, int end) {
    for (int done = begin; done < end;) {
      const int count = std::min(executor.info().prefill_chunk, end - done);
      const PrefillStep step{text.data() + done, count, done, pages.data(), &drafted, speculation, text.data()};
      if (const Status status = executor.start_prefill(step); status != Status::kOk) return status;
      if (const Status status = finish(); status != Status::kOk) return status;
      done += count;
    }
    return Status::kOk;
  }

  // `count` tokens behind a text of which the caches hold the first `cached` positions, and the first round takes the
  // last but one `forced` along.
  Status answer(std::vector<int32_t>& text, int count, int cached = 0, int forced = 0) {
    prompt_tokens = static_cast<int>(text.size());
    drafted.cut(cached);
    if (const Status status = read(text, cached, prompt_tokens - 1 - forced); status != Status::kOk) return status;
    if (forced == 0) return decode(text, count);
    text.reserve(text.size() + 1);
    if (const Status status = executor.start_round(first_step(text, forced, count)); status != Status::kOk) {
      return status;
    }
    if (const Status status = finish(); status != Status::kOk) return status;
    text.push_back(result.tokens[0].token);
    return decode(text, count - 1);
  }

  void enter(const Sequence& sequence) {
    pages = sequence.pages;
    drafted = sequence.drafted;
  }
  void leave(Sequence& sequence) { sequence.drafted = drafted; }

 private:
  static std::optional<FakeHead::Script> of(bool is, const FakeHead::Script& script) {
    return is ? std::optional(script) : std::nullopt;
  }
};

inline std::vector<int32_t> behind(const std::vector<int32_t>& text, size_t prompt) {
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}

// Entries that were attended to though they are of no such text.
inline int wrong(const HeadRig::Passes& passes) {
  int count = 0;
  for (const auto& pass : passes) count += pass.wrong;
  return count;
}

}  // namespace ull::test
