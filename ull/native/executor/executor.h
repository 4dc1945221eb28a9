// The executor contract: what runs the maths of an engine. One executor serves one stream at a time.
//
// prepare() allocates everything and may throw. After it: no allocation, no lock, no exception. Each step is
// started, then polled until it is no longer kPending; one step is in flight at a time. abort() may be called from
// another thread at any time and makes the step in flight end early with kAborted; one that comes while none is in
// flight may be lost, so that who aborts looks again once a step has started (Pulse, poll()).
//
// A step reads the sequence's page table; the engine guarantees that it covers every position the step writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/status.h"
#include "executor/constraint.h"
#include "executor/sampling.h"
#include "kv/drafted.h"
#include "kv/page.h"

namespace ull {

inline constexpr int kMaxTreeTokens = 64;                      // nodes of the widest draft tree, root included
inline constexpr int kMaxTokensPerRound = kMaxTreeTokens + 1;  // the widest tree and the bonus token
inline constexpr int kMaxTopLogprobs = 20;                     // alternatives reported per token

// Who proposes a round's draft tokens: it changes the speed of a request, never its output. A request may also ask for
// kAuto, which chooses from the others.
enum class DrafterKind : uint8_t { kNone, kSuffix, kMedusa, kEagle, kDflash, kDraft, kAuto };
inline constexpr int kDrafterKinds = 7;

[[nodiscard]] constexpr const char* drafter_name(DrafterKind kind) noexcept {
  switch (kind) {
    case DrafterKind::kNone:
      return "none";
    case DrafterKind::kSuffix:
      return "suffix";
    case DrafterKind::kMedusa:
      return "medusa";
    case DrafterKind::kEagle:
      return "eagle";
    case DrafterKind::kDflash:
      return "dflash";
    case DrafterKind::kDraft:
      return "draft";
    case DrafterKind::kAuto:
      return "auto";
  }
  return "unknown";
}

[[nodiscard]] constexpr std::optional<DrafterKind> parse_drafter(std::string_view name) noexcept {
  for (int i = 0; i < kDrafterKinds; ++i) {
    if (name == drafter_name(static_cast<DrafterKind>(i))) return static_cast<DrafterKind>(i);
  }
  return std::nullopt;
}

// Tree sizes whose verify cost is measured at warm-up.
inline constexpr int kCostSizes = 7;
inline constexpr int kCostTokens[kCostSizes] = {1, 2, 4, 8, 16, 32, 64};

// How much of an ended request's keys and values may serve later requests. Caching must never change the output, so
// that only those may that a prefill of the same tokens would write, bit for bit.
enum class Reuse : uint8_t {
  kAll,      // rounds write what a prefill would
  kPrompt,   // what prefill wrote: the prompt but its last token, which the first round feeds
  kNothing,  // every request starts cold
};

// What an engine offers to its users; filled by prepare().
struct ExecutorInfo {
  int vocabulary = 0;        // tokens
  int context = 0;           // tokens a sequence can hold
  int page_count = 0;        // KV pages in all
  int prefill_chunk = 0;     // most tokens one start_prefill takes
  int tokens_per_round = 1;  // most tokens one round emits: it writes as many positions, from the fed token's on
  int64_t weight_bytes = 0;  // of the target and of what drafts for it
  int64_t kv_bytes = 0;      // likewise
  int64_t drafter_weight_bytes = 0;  // the drafters' share of weight_bytes
  int64_t drafter_kv_bytes = 0;
  int forced_tokens = 0;  // most RoundStep::forced, whatever so many cost; 0: prefill and rounds are different kernels
  // Whether the round that feeds a prompt's last token reads it, and up to prefill_chunk - 1 tokens before it, as a
  // prefill does that draws behind them, though other rounds write other values. It must say history and prompt_tokens.
  bool prefill_draws = false;
  bool copies_pages = false;  // whether start_copy() is offered
  bool penalties = false;     // whether Sampling's penalties are applied
  bool constraints = false;   // whether RoundStep::constraint is applied
  int score_nodes = 0;        // most nodes of a ScoreStep; 0: start_scores() is not offered
  Reuse reuse = Reuse::kAll;
  const char* name = "";                             // of the implementation: "cpu/avx512", "cpu/portable", ...
  bool drafters[kDrafterKinds] = {true};             // by DrafterKind: which a request may ask for
  DrafterKind default_drafter = DrafterKind::kNone;  // of a request that asks for none
  int default_max_tree = kMaxTreeTokens;
  int64_t verify_ns[kCostSizes] = {};    // a forward pass over kCostTokens[i] tree nodes and their logits; 0: unknown
  int64_t draft_ns[kDrafterKinds] = {};  // one proposal of one token by each drafter; 0: unknown

  // Most RoundStep::forced of the round that feeds a prompt's last token.
  [[nodiscard]] int prompt_forced() const noexcept {
    if (prefill_draws) return prefill_chunk - 1;
    return reuse == Reuse::kAll ? forced_tokens : 0;
  }
  // Whether a pass may go over tokens that stand in the cache, and leave it as it was.
  [[nodiscard]] bool scores_prompts() const noexcept { return score_nodes > 0 && reuse == Reuse::kAll; }
};

struct TokenLogprob {
  int32_t token;
  float logprob;  // natural log, of the model's own distribution (before temperature, bias and filters)
};

// One token that a round emitted.
struct RoundToken {
  int32_t token;
  float logprob;                      // valid if the request asked for logprobs
  int32_t top_count;                  // alternatives in `top`, at most Sampling::top_logprobs
  TokenLogprob top[kMaxTopLogprobs];  // descending
};

struct PrefillStep {
  const int32_t* tokens;                         // [count] prompt tokens of positions [start, start + count)
  int32_t count;                                 // 1 .. ExecutorInfo::prefill_chunk
  int32_t start;                                 // position of tokens[0]
  const int32_t* pages;                          // page table: pages[p / kPageTokens] holds position p
  Drafted* drafted = nullptr;                    // in/out
  DrafterKind speculation = DrafterKind::kNone;  // of the request that this prompt belongs to
  const int32_t* history = nullptr;              // [start + count] the sequence's tokens; null: nobody says
};

// A decode round: feeds `token` at `position` and emits the token(s) that follow. The prompt's last token is fed by
// the first round, so that a prompt of n tokens needs prefill of n - 1 and the first round yields the first token.
//
// A round with `forced` tokens feeds these behind `token`, as a chain, and emits the one token that follows the last of
// them, at position + forced + 1: one pass over the weights for a prompt's end and its first token. It drafts nothing
// (count 1, tree_tokens 1, accepted 0), and its bits are those of a prefill of [position, position + forced) and a
// plain round. Where ExecutorInfo::prefill_draws, the round that feeds the prompt's last token is such a one whether
// tokens are forced or not, with the bits of a prefill.
struct RoundStep {
  int32_t token;
  int32_t position;  // position of `token`; the emitted tokens stand at position + forced + 1, ...
  const int32_t* pages;
  const Sampling* sampling;
  int32_t max_tokens;                // emit at most this many (>= 1); pages cover position + forced + max_tokens - 1
  const int32_t* history = nullptr;  // [position + forced + 1] the sequence's tokens; history[position] == token
  DrafterKind speculation = DrafterKind::kNone;
  int32_t max_tree = 0;        // most nodes of the draft tree, root included, 1 .. kMaxTreeTokens; 0: as many as pay
  Drafted* drafted = nullptr;  // in/out
  const int32_t* stops = nullptr;  // [stop_count] ids that end the request: a round may go no further than one of them
  int32_t stop_count = 0;
  int32_t prompt_tokens = 0;  // of the history; what follows them was generated
  bool rehearsal = false;     // not a client's: the drafter drafts whether that pays or not, and nothing is learnt
  int32_t forced = 0;  // 0 .. ExecutorInfo::forced_tokens, or prompt_forced(): tokens at history[position + 1 ..]
  // Of a request that has one (only where ExecutorInfo::constraints says so): it has taken the completion up to and
  // with the last forced token. A round that is kOk has had it take the tokens that it emits, each of which it allows:
  // see constraint.h for the draw. After kAborted it stands where it stood; kExecutorFailed with constraint->failure()
  // set is the constraint's failure, and the executor goes on.
  TokenConstraint* constraint = nullptr;

  // The position of the token behind which the emitted ones stand: the last one that is fed.
  [[nodiscard]] int32_t root() const noexcept { return position + forced; }
  // Whether that is the prompt's last token.
  [[nodiscard]] bool ends_prompt() const noexcept { return root() + 1 == prompt_tokens; }
};

// One token of which a ScoreStep wants to know how likely it is.
struct ScoreQuery {
  int32_t node;   // of the step's tree, behind which the token would stand
  int32_t token;  // 0 .. vocabulary - 1
};

// A pass over a tree of tokens that nothing is drawn from: natural log-probabilities, of the model's own distribution,
// of `queries`. The cache holds the positions before `position`; what the pass leaves from there on is nobody's.
//
// Except where ExecutorInfo::reuse is kAll, the tree is a chain, and the cache holds just these tokens at their
// positions: then it holds them, and what follows them, when the pass has ended too, be it aborted. What the pass
// writes has the bits that are there.
struct ScoreStep {
  const int32_t* tokens;        // [count] tokens[0], the root, stands at `position`
  const uint8_t* parents;       // [count] parents[i] < i; parents[0] = 0
  int32_t count;                // 1 .. ExecutorInfo::score_nodes
  int32_t position;             // pages cover position + count - 1
  const int32_t* pages;         // page table
  const ScoreQuery* queries;    // [query_count]
  int32_t query_count;          // 1 or more
  float* logprobs;              // out: [query_count], complete once the step is kOk
  int32_t top_count = 0;        // 0 .. kMaxTopLogprobs, at most the vocabulary: so many of the likeliest tokens, ...
  TokenLogprob* top = nullptr;  // ... out: [query_count][top_count], likeliest first; of the same, the smaller id first
};

// Copies the first positions of a KV page to another one, all layers, for the draft model's cache too.
struct CopyStep {
  int32_t from_page;
  int32_t to_page;
  int32_t tokens;  // 1 .. kPageTokens
};

struct RoundResult {
  int32_t count = 0;                         // tokens emitted
  DrafterKind drafter = DrafterKind::kNone;  // who proposed the tree that was verified; kNone: a plain round
  int32_t tree_tokens = 1;                   // its nodes, root included
  int32_t depth = 0;                         // of its deepest node; the root's is 0
  int32_t accepted = 0;                      // draft tokens accepted: count - 1
  uint8_t ranks[kMaxTreeTokens] = {};        // [accepted] rank among its siblings of the accepted node at depth i + 1
  RoundToken tokens[kMaxTokensPerRound];
};

// What an executor that computes inside start_*() calls meanwhile, so that the engine can look at what has happened.
class Pulse {
 public:
  // Once per layer, on the thread that called start_*(). False: the step is to end now, with kAborted.
  [[nodiscard]] virtual bool beat() noexcept = 0;

 protected:
  ~Pulse() = default;
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual void prepare() = 0;
  // While no step is in flight. The pulse outlives the steps that follow; null: nobody wants to know.
  virtual void set_pulse(Pulse* pulse) noexcept { (void)pulse; }
  [[nodiscard]] virtual const ExecutorInfo& info() const noexcept = 0;
  // Of the `count` tokens that are to be read from position `start` on, a prompt's and what is forced behind it: how
  // many of the last ones its first round is to take beside the one that it feeds. More than
  // ExecutorInfo::prompt_forced() are as good as that.
  // That changes no bit.
  [[nodiscard]] virtual int first_forced(int count, int start) const noexcept {
    (void)count, (void)start;
    return info().prompt_forced();
  }
  [[nodiscard]] virtual Status start_prefill(const PrefillStep& step) noexcept = 0;
  [[nodiscard]] virtual Status start_round(const RoundStep& step) noexcept = 0;
  // Only where ExecutorInfo::copies_pages says so.
  [[nodiscard]] virtual Status start_copy(const CopyStep& step) noexcept {
    (void)step;
    return Status::kExecutorFailed;
  }
  // Only where ExecutorInfo::score_nodes says so.
  [[nodiscard]] virtual Status start_scores(const ScoreStep& step) noexcept {
    (void)step;
    return Status::kExecutorFailed;
  }
  // Polls the step in flight. For a round that is kOk, `result` holds its tokens; other steps leave it untouched.
  [[nodiscard]] virtual Status poll(RoundResult& result) noexcept = 0;
  virtual void abort() noexcept = 0;
  // The steps of a request have ended, and no other may follow for long: nothing is to wait for one.
  virtual void rest() noexcept {}
  // No step follows: returns once nothing of this executor runs any more, or it has failed.
  virtual void settle() noexcept {}
  // Why it has failed, for people, valid for its life; null while it has not, or cannot say. Any thread.
  [[nodiscard]] virtual const char* failure() const noexcept { return nullptr; }
  // Whether a new process may do better after that failure; false if the device must be reset first. Any thread.
  [[nodiscard]] virtual bool restart_helps() const noexcept { return false; }
};

}  // namespace ull
