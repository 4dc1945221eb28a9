// A head that drafts from the target's own hidden states ("taps"), with a cache of its own in the target's pages: what
// does not depend on where it runs. The taps of the newest positions lie in a ring (tap_tags.h); an entry of the cache
// is made from the taps of its position, so that what has left the ring cannot be read any more. Entries are therefore
// read as they come: with each chunk of a prompt, with each proposal, and, where a few rounds pass without one or the
// first round was a chunk, before the next round. A head that has not been asked for long rests: it reads nothing,
// since that would cost what drafting is to win, and when it is asked again it begins anew with the newest positions.
// Where entries are missing, then or of a prefix that was cached by requests that do not speculate, the head attends
// from behind them on.
#pragma once

#include <atomic>
#include <cstdint>

#include "draft/drafter.h"
#include "draft/tap_tags.h"

namespace ull {

class HeadDrafter : public Drafter {
 public:
  [[nodiscard]] DrafterKind kind() const noexcept final { return kind_; }
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept override;
  [[nodiscard]] Status keep_up(const DraftContext& context) noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  // -1 where the tap of the position before the root is not there.
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;

 protected:
  // lookahead: how many tokens behind its own position an entry reads: 1 for EAGLE (the token at position + 1), else 0.
  HeadDrafter(DrafterKind kind, const TapTags& tags, int lookahead, int context)
      : kind_(kind), tags_(tags), lookahead_(lookahead), context_(context) {}

  // Makes the entries of positions [start, start + count), whose taps the ring holds, in the order of positions.
  // tokens[i]: the token at position start + lookahead + i. `from`: the first position that they may attend to. `last`:
  // the last entry's output is what a proposal begins with. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] virtual Status read(const int32_t* tokens, int count, int start, int from, const int32_t* pages,
                                    bool last, const std::atomic<bool>& abort) noexcept = 0;

  // Brings the cache up to the root: every proposal's beginning. With lookahead, the entry before the root is read even
  // if it is there, for its output. *from: the first position that may be attended to. kOk with *from == the root's
  // position: the taps are not there, and there is nothing to propose.
  [[nodiscard]] Status reach_root(const DraftContext& context, int32_t* from) noexcept;

 private:
  // The cache then holds [range.from, end), as far as the ring goes; history: [end + lookahead].
  [[nodiscard]] Status follow(const int32_t* history, const int32_t* pages, int32_t end, bool last, CachedRange& range,
                              const std::atomic<bool>& abort) noexcept;
  [[nodiscard]] CachedRange& range_of(Drafted& drafted) const noexcept {
    return kind_ == DrafterKind::kEagle ? drafted.eagle : drafted.dflash;
  }

  [[nodiscard]] bool rests() const noexcept;

  int unasked_ = 0;  // rounds since it proposed last, as far as they matter
  const DrafterKind kind_;
  const TapTags& tags_;
  const int lookahead_;
  const int context_;
};

}  // namespace ull
