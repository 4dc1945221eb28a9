#include "io/frames.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "io/msgpack.h"

namespace ull {
namespace {

constexpr size_t kTokenBytes = 5;                                   // an id, encoded
constexpr size_t kLogprobBytes = 64 + kMaxTopLogprobs * 16;         // one token's logprobs, encoded
constexpr size_t kChoiceBytes = 24;                                 // what is said of one label, encoded
constexpr size_t kHeaderBytes = 4096 + kMaxChoices * kChoiceBytes;  // everything else in a frame

void pack_usage(MsgpackWriter& out, const RequestSlot& request) noexcept {
  const Choices* choices = request.choices.get();
  out.map(choices != nullptr ? 6 : 4);
  out.text("prompt_tokens");
  out.integer(static_cast<uint64_t>(request.prompt_tokens));
  out.text("cached_tokens");
  out.integer(static_cast<uint64_t>(request.outcome.cached_tokens));
  out.text("completion_tokens");
  out.integer(static_cast<uint64_t>(request.outcome.completion_tokens));
  out.text("rolled_back_tokens");
  out.integer(static_cast<uint64_t>(request.rolled_back_tokens));
  if (choices == nullptr) return;
  out.text("scored_tokens");
  out.integer(static_cast<uint64_t>(choices->scored_tokens()));
  out.text("choice_tokens");
  out.array(choices->size());
  for (size_t i = 0; i < choices->size(); ++i) out.integer(choices->label(i).size());
}

// What was found of the labels; nil of a request that ended before all of them were scored.
void pack_choice(MsgpackWriter& out, const Choices& choices) noexcept {
  if (!choices.chosen()) {
    out.nil();
    return;
  }
  const auto pack = [&](std::string_view name, std::span<const double> values) {
    out.text(name);
    out.array(values.size());
    for (const double value : values) out.real(value);
  };
  out.map(4);
  out.text("index");
  out.integer(choices.choice());
  pack("logprobs", choices.logprobs());
  pack("probabilities", choices.probabilities());
  out.text("margin");
  out.real(choices.margin());
}

void pack_timeline(MsgpackWriter& out, const Timeline& timeline) noexcept {
  const auto stamp = [&](std::string_view name, int64_t time_ns) {
    out.text(name);
    out.integer(static_cast<uint64_t>(time_ns));
  };
  out.map(9);
  stamp("received_ns", timeline.received_ns);
  stamp("admitted_ns", timeline.admitted_ns);
  stamp("started_ns", timeline.started_ns);
  stamp("prefilled_ns", timeline.prefilled_ns);
  stamp("first_token_ns", timeline.first_token_ns);
  stamp("last_token_ns", timeline.last_token_ns);
  stamp("done_ns", timeline.done_ns);
  stamp("expected_first_ns", timeline.expected_first_ns);
  stamp("expected_done_ns", timeline.expected_done_ns);
}

void pack_error(MsgpackWriter& out, const Outcome& outcome) noexcept {
  if (outcome.error_code == nullptr) {
    out.nil();
    return;
  }
  out.map(2);
  out.text("code");
  out.text(outcome.error_code);
  out.text("message");
  out.text(outcome.error_message);
}

void pack_speculation(MsgpackWriter& out, const RequestSlot& request) noexcept {
  const RoundTotals& totals = request.rounds;
  out.map(6);
  out.text("rounds");
  out.integer(static_cast<uint64_t>(totals.rounds));
  out.text("drafted_tokens");
  out.integer(static_cast<uint64_t>(totals.drafted_tokens));
  out.text("accepted_tokens");
  out.integer(static_cast<uint64_t>(totals.accepted_tokens));
  out.text("tokens_per_round");
  out.real(totals.rounds > 0 ? static_cast<double>(request.outcome.completion_tokens) / totals.rounds : 0.0);
  out.text("by_drafter");
  const auto& by_drafter = totals.by_drafter;
  out.map(static_cast<uint64_t>(std::count_if(by_drafter.begin(), by_drafter.end(), [](int32_t n) { return n > 0; })));
  for (size_t i = 0; i < by_drafter.size(); ++i) {
    if (by_drafter[i] == 0) continue;
    out.text(drafter_name(static_cast<DrafterKind>(i)));
    out.integer(static_cast<uint64_t>(by_drafter[i]));
  }
  out.text("accepted_by_depth");
  const int depths = totals.deepest();
  out.array(static_cast<uint64_t>(depths));
  for (int depth = 0; depth < depths; ++depth) {
    out.integer(static_cast<uint64_t>(totals.accepted_by_depth[static_cast<size_t>(depth)]));
  }
}

// How the request ended for its client.
Outcome outcome_of(const RequestSlot& request, const Delivery& delivery) noexcept {
  Outcome outcome = request.outcome;
  if (delivery.client == ClientState::kStalled && delivery.truncated && outcome.reason != FinishReason::kError) {
    outcome.reason = FinishReason::kCancelled;
    outcome.error_code = "stalled";
    outcome.error_message = "the client took no frame for too long (io.client_stall_ms): the rest was dropped";
  }
  if (delivery.dropped && outcome.reason != FinishReason::kError) {
    outcome.reason = FinishReason::kCancelled;
    if (request.shed.load(std::memory_order_relaxed)) {
      outcome.error_code = kDraining;
      outcome.error_message = kShuttingDown;
    }
  }
  return outcome;
}

// Pairs of pack_end(), the bundle's apart.
uint64_t end_pairs(const RequestSlot& request) noexcept { return request.choices != nullptr ? 8 : 7; }

// The members that the done frame and the control plane's record share: seven pairs, of a request with choices one
// more, and the digest of the `bundle` where there is one.
void pack_end(MsgpackWriter& out, const RequestSlot& request, const Delivery& delivery,
              std::optional<std::string_view> bundle = std::nullopt) noexcept {
  const Outcome outcome = outcome_of(request, delivery);
  out.text("id");
  out.integer(request.id);
  out.text("finish_reason");
  out.text(finish_reason_name(outcome.reason));
  out.text("usage");
  pack_usage(out, request);
  out.text("timeline");
  pack_timeline(out, request.timeline);
  out.text("seed");
  out.integer(request.sampling.seed);
  if (bundle) {
    out.text("bundle");
    out.text(*bundle);
  }
  out.text("error");
  pack_error(out, outcome);
  out.text("speculation");
  pack_speculation(out, request);
  if (request.choices == nullptr) return;
  out.text("choice");
  pack_choice(out, *request.choices);
}

// What a request with a constraint has beside it: one pair. Others have none.
void pack_grammar(MsgpackWriter& out, const RequestSlot& request) noexcept {
  if (request.constraint == nullptr) return;
  out.text("grammar");
  out.map(2);
  out.text("masks");
  out.integer(static_cast<uint64_t>(request.outcome.masks));
  out.text("forced_tokens");
  out.integer(static_cast<uint64_t>(request.outcome.forced_tokens));
}

[[nodiscard]] uint64_t grammar_pairs(const RequestSlot& request) noexcept { return request.constraint != nullptr; }

void pack_top(MsgpackWriter& out, std::span<const TokenLogprob> top) noexcept {
  out.array(top.size());
  for (const TokenLogprob& each : top) {
    out.array(2);
    out.integer(static_cast<uint64_t>(each.token));
    out.real(each.logprob);
  }
}

void pack_logprob(MsgpackWriter& out, const RoundToken& token) noexcept {
  out.map(3);
  out.text("token");
  out.integer(static_cast<uint64_t>(token.token));
  out.text("logprob");
  out.real(token.logprob);
  out.text("top");
  pack_top(out, {token.top, static_cast<size_t>(token.top_count)});
}

}  // namespace

FramePacker::FramePacker(const Vocabulary& vocabulary, const LogprobRecord* logprobs, std::string bundle)
    : vocabulary_(vocabulary),
      logprobs_(logprobs),
      bundle_(std::move(bundle)),
      // At least one token and the flush always fit.
      text_capacity_(std::max(kFrameText, 2 * TextAssembler::text_bound(vocabulary.longest()))),
      text_(std::make_unique_for_overwrite<char[]>(text_capacity_)),
      buffer_(kHeaderBytes + text_capacity_ + kMaxFrameTokens * kTokenBytes + kMaxFrameLogprobs * kLogprobBytes) {}

FramePacker::TokenFrame FramePacker::tokens(const RequestSlot& request, const Delivery& delivery) noexcept {
  const bool with_logprobs = request.sampling.top_logprobs >= 0;
  const int32_t pending = delivery.available - delivery.sent;
  const int32_t most = std::min(pending, with_logprobs ? kMaxFrameLogprobs : kMaxFrameTokens);
  const int32_t* ids = request.completion() + delivery.sent;

  TokenFrame frame;
  frame.assembler = delivery.assembler;
  TextBuffer text{text_.get(), 0};
  while (frame.count < most) {
    const Piece piece = vocabulary_.piece(ids[frame.count]);
    // Room for this piece and the flush that may follow.
    if (text.size + TextAssembler::text_bound(piece.bytes.size()) > text_capacity_) break;
    const bool silent = delivery.silent_last && delivery.sent + frame.count + 1 == delivery.available;
    if (!silent) frame.assembler.feed(piece, text);
    ++frame.count;
  }
  frame.flushes = delivery.ended && frame.count == pending;
  if (frame.flushes) frame.assembler.finish(text);
  frame.text = text.size > 0;

  MsgpackWriter out(buffer_);
  out.map(with_logprobs ? 7 : 6);
  out.text("type");
  out.text("token");
  out.text("id");
  out.integer(request.id);
  out.text("index");
  out.integer(static_cast<uint64_t>(delivery.sent));
  out.text("ids");
  out.array(static_cast<uint64_t>(frame.count));
  for (int32_t i = 0; i < frame.count; ++i) out.integer(static_cast<uint64_t>(ids[i]));
  out.text("text");
  out.text({text.data, text.size});
  out.text("time_ns");
  out.integer(static_cast<uint64_t>(frame.count > 0 ? delivery.pending_ns : request.timeline.last_token_ns));
  if (with_logprobs) {
    out.text("logprobs");
    out.array(static_cast<uint64_t>(frame.count));
    frame.next_logprob = delivery.first_logprob;
    for (int32_t i = 0; i < frame.count; ++i) {
      const LogprobRecord& record = logprobs_[frame.next_logprob];
      pack_logprob(out, record.token);
      frame.next_logprob = record.next;
    }
  }
  frame.bytes = out.bytes();
  return frame;
}

FramePacker::PromptFrame FramePacker::prompt_logprobs(const RequestSlot& request, const Delivery& delivery) noexcept {
  const PromptLogprobs& logprobs = *request.prompt_logprobs;
  const int32_t first = delivery.prompt_logprobs_sent;
  const int32_t most = kMaxFramePromptLogprobs / (1 + 2 * logprobs.top_count());
  const int32_t count = std::min(delivery.prompt_logprobs_available - first, most);
  MsgpackWriter out(buffer_);
  out.map(logprobs.top_count() > 0 ? 5 : 4);
  out.text("type");
  out.text("prompt_logprobs");
  out.text("id");
  out.integer(request.id);
  out.text("index");
  out.integer(static_cast<uint64_t>(first + 1));  // of the prompt's tokens, the first has none
  out.text("logprobs");
  out.array(static_cast<uint64_t>(count));
  for (const float value : logprobs.values().subspan(static_cast<size_t>(first), static_cast<size_t>(count))) {
    out.real(value);
  }
  if (const auto top_count = static_cast<size_t>(logprobs.top_count()); top_count > 0) {
    out.text("top");
    out.array(static_cast<uint64_t>(count));
    for (int32_t i = first; i < first + count; ++i) {
      pack_top(out, logprobs.top().subspan(static_cast<size_t>(i) * top_count, top_count));
    }
  }
  return {out.bytes(), count};
}

std::span<const uint8_t> FramePacker::done(const RequestSlot& request, const Delivery& delivery) noexcept {
  MsgpackWriter out(buffer_);
  out.map(end_pairs(request) + grammar_pairs(request) + 3);
  out.text("type");
  out.text("done");
  pack_end(out, request, delivery, bundle_);
  pack_grammar(out, request);
  out.text("warnings");
  out.array(request.warnings.size());
  for (size_t i = 0; i < request.warnings.size(); ++i) out.text(request.warnings[i]);
  return out.bytes();
}

std::span<const uint8_t> FramePacker::ended(const RequestSlot& request, const Delivery& delivery) noexcept {
  MsgpackWriter out(buffer_);
  out.map(end_pairs(request) + grammar_pairs(request) + 3);
  out.text("identity");
  out.binary(request.client());
  pack_end(out, request, delivery);
  pack_grammar(out, request);
  out.text("delivered");
  out.boolean(delivery.delivered);
  out.text("client");
  out.text(client_state_name(delivery.client));
  return out.bytes();
}

}  // namespace ull
