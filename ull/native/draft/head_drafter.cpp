#include "draft/head_drafter.h"

#include <algorithm>

namespace ull {
namespace {

constexpr int kPending = 64;  // fewer entries may wait for a proposal
constexpr int kAnew = 16;     // entries that a proposal begins anew with: reading more would cost several rounds
constexpr int kAwake = 32;  // rounds without a proposal after which it rests: fewer, so that one probe makes none wait
constexpr int kSmallHole = 8;  // holes are passed over if what is held is so many times as long

}  // namespace

Status HeadDrafter::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  if (step.speculation != kind_ && step.speculation != DrafterKind::kAuto) return Status::kOk;
  if (step.drafted == nullptr || step.history == nullptr) return Status::kOk;
  const int32_t end = std::min(step.start + step.count, context_) - lookahead_;
  return follow(step.history, step.pages, end, /*last=*/false, range_of(*step.drafted), abort);
}

Status HeadDrafter::keep_up(const DraftContext& context) noexcept {
  if (rests() || context.drafted == nullptr || context.history == nullptr) return Status::kOk;
  CachedRange& range = range_of(*context.drafted);
  if (context.position - range.through < kPending) return Status::kOk;
  return follow(context.history, context.pages, std::min(context.position, context_), /*last=*/false, range,
                *context.abort);
}

bool HeadDrafter::rests() const noexcept { return unasked_ >= kAwake; }

void HeadDrafter::observe(const DraftOutcome& outcome) noexcept {
  unasked_ = outcome.proposed ? 0 : std::min(unasked_ + 1, kAwake);
}

int HeadDrafter::confidence(const DraftContext& context) noexcept {
  const int32_t last = context.position - 1;
  if (context.drafted == nullptr || context.history == nullptr || last < 0 || context.position >= context_) return -1;
  if (!tags_.holds(last, context.history[last], context.pages[last / kPageTokens])) return -1;
  return temperature_confidence(context.sampling->temperature);
}

Status HeadDrafter::reach_root(const DraftContext& context, int32_t* from) noexcept {
  CachedRange& range = range_of(*context.drafted);
  const int32_t last = context.position - 1;
  *from = context.position;
  if (lookahead_ > 0 && (last < 0 || !tags_.holds(last, context.history[last], context.pages[last / kPageTokens]))) {
    return Status::kOk;  // the entry may be there, but not its output
  }
  if (rests() && range.through < context.position - kAnew) {
    range.through = context.position - kAnew;
    range.begin_at(range.through);
  }
  const Status status = follow(context.history, context.pages, context.position, /*last=*/true, range, *context.abort);
  if (range.through == context.position) *from = range.from;
  return status;
}

Status HeadDrafter::follow(const int32_t* history, const int32_t* pages, int32_t end, bool last, CachedRange& range,
                           const std::atomic<bool>& abort) noexcept {
  int32_t begin = std::min(range.through, end);
  if (last && lookahead_ > 0) begin = std::min(begin, end - 1);
  if (begin >= end) return Status::kOk;
  const int32_t held = tags_.first_held(history, pages, std::max(begin, 0), end);
  if (held >= end) return Status::kOk;
  if (held > begin) {
    range.lacking += held - begin;
    if (begin - range.from < kSmallHole * range.lacking) range.begin_at(held);
    begin = held;
  }
  const Status status = read(history + begin + lookahead_, end - begin, begin, range.from, pages, last, abort);
  if (status == Status::kOk) range.through = end;
  return status;
}

}  // namespace ull
