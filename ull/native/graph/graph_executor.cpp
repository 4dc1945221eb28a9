#include "graph/graph_executor.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "graph/requests.h"

namespace ull::graph {

GraphExecutor::GraphExecutor(GraphProgram program, const Driver& driver, const GraphOptions& options)
    : program_((program.check(), std::move(program))),
      driver_(driver),
      options_(checked(options, program_)),
      setting_(program_.pages, pages_for(program_.context_tokens)),
      text_(program_.text, program_.context_tokens),
      queue_(program_, driver_, foresight_),
      redraws_(program_, queue_, setting_, text_),
      graphs_(program_),
      tags_(program_.eagle == nullptr && program_.dflash == nullptr ? 0 : gpu::kTapSlots) {}

const GraphOptions& GraphExecutor::checked(const GraphOptions& options, const GraphProgram& program) {
  if (options.watchdog_ms < 1) throw std::invalid_argument("watchdog_ms: must be positive");
  if (options.prefill_chunk < 1) throw std::invalid_argument("prefill_chunk: must be positive");
  if (options.max_tree < 1 || options.max_tree > kMaxTreeTokens) {
    throw std::invalid_argument("max_tree: must be 1 to " + std::to_string(kMaxTreeTokens));
  }
  if (options.drafter == DrafterKind::kDraft && program.draft == nullptr && !options.in_place_of_draft_model) {
    throw std::invalid_argument("drafter: the program holds no draft model");
  }
  if (options.drafter == DrafterKind::kEagle && program.eagle == nullptr) {
    throw std::invalid_argument("drafter: the program holds no EAGLE head");
  }
  if (options.drafter == DrafterKind::kDflash && program.dflash == nullptr) {
    throw std::invalid_argument("drafter: the program holds no DFlash head");
  }
  if (options.drafter == DrafterKind::kMedusa && program.medusa == nullptr) {
    throw std::invalid_argument("drafter: the program holds no Medusa heads");
  }
  return options;
}

// ---- steps --------------------------------------------------------------------------------------------------------

bool GraphExecutor::valid(const int32_t* tokens, int count, int start) const noexcept {
  if (proposer_ == nullptr || count < 1 || start < 0 || count > info_.context - start) return false;
  return std::all_of(tokens, tokens + count, [&](int32_t token) { return token >= 0 && token < info_.vocabulary; });
}

bool GraphExecutor::valid(const RoundStep& step) const noexcept {
  if (step.max_tokens < 1 || step.sampling->bias_count > kMaxLogitBias) return false;
  if (step.constraint != nullptr && !redraws_.offered()) return false;
  if (step.forced == 0) {
    return valid(&step.token, 1, step.position) && !(step.sampling->penalises() && step.history == nullptr);
  }
  const int most = ends_prompt(step) ? info_.prompt_forced() : info_.forced_tokens;
  // To penalties, what is forced is the prompt's.
  return step.forced > 0 && step.forced <= most && step.position >= 0 && step.history != nullptr &&
         !(step.sampling->penalises() && step.root() >= step.prompt_tokens) &&
         valid(step.history + step.position, step.forced + 1, step.position);
}

bool GraphExecutor::valid(const ScoreStep& step) const noexcept {
  if (step.count > info_.score_nodes || !valid(step.tokens, step.count, step.position) || step.query_count < 1 ||
      step.top_count < 0 || step.top_count > std::min(kMaxTopLogprobs, info_.vocabulary)) {
    return false;
  }
  for (int i = 1; i < step.count; ++i) {
    if (step.parents[i] >= i) return false;
  }
  return std::all_of(step.queries, step.queries + step.query_count, [&](const ScoreQuery& query) {
    return query.node >= 0 && query.node < step.count && query.token >= 0 && query.token < info_.vocabulary;
  });
}

Status GraphExecutor::begin_step(StepKind kind) noexcept {
  abort_.store(false, std::memory_order_relaxed);  // it was meant for an earlier step
  kind_ = kind;
  launched_ = abandoned_ = settled_ = false;
  first_ = last_ = 0;
  redraws_.begin();
  queue_.restart_watchdog();
  return queue_.enter();
}

Status GraphExecutor::start_prefill(const PrefillStep& step) noexcept {
  if (step.count > info_.prefill_chunk || !valid(step.tokens, step.count, step.start)) return Status::kExecutorFailed;
  if (begin_step(StepKind::kPrefill) != Status::kOk) return Status::kExecutorFailed;
  prefill_ = prompt_ = step;
  drop_ahead();
  advance();
  return queue_.failed() ? Status::kExecutorFailed : Status::kOk;
}

Status GraphExecutor::start_round(const RoundStep& step) noexcept {
  if (!valid(step) || begin_step(StepKind::kRound) != Status::kOk) return Status::kExecutorFailed;
  round_ = step;
  const DraftContext now{.history = step.history,
                         .position = step.position,
                         .pages = step.pages,
                         .sampling = step.sampling,
                         .drafted = step.drafted,
                         .hidden = nullptr,
                         .abort = &abort_,
                         .prompt_tokens = step.prompt_tokens};
  // A draft that was aborted leaves the round to be ended where it is polled.
  if (proposer_->propose(step, now, is_chunk(step)) == Status::kExecutorFailed) {
    return queue_.fail("a drafter has failed", /*restart_helps=*/true);
  }
  const bool adopted = proposer_->tree().count() == 1 && ahead_is(step);
  if (adopted) {
    first_ = last_ = ahead_;
    launched_ = true;
    ahead_ = ahead_ < ahead_through_ ? ahead_ + 1 : 0;
    ahead_position_ = -1;
  } else {
    if (ahead_ != 0) queue_.cancel();
    ahead_ = 0;
  }
  advance();
  return queue_.failed() ? Status::kExecutorFailed : Status::kOk;
}

Status GraphExecutor::start_scores(const ScoreStep& step) noexcept {
  if (!valid(step) || begin_step(StepKind::kScores) != Status::kOk) return Status::kExecutorFailed;
  scores_ = step;
  drop_ahead();
  advance();
  return queue_.failed() ? Status::kExecutorFailed : Status::kOk;
}

Status GraphExecutor::start_copy(const CopyStep& step) noexcept {
  const auto is_page = [&](int32_t page) { return page >= 0 && page < info_.page_count; };
  if (!info_.copies_pages || !is_page(step.from_page) || !is_page(step.to_page) || step.from_page == step.to_page ||
      step.tokens < 1 || step.tokens > kPageTokens) {
    return Status::kExecutorFailed;
  }
  if (begin_step(StepKind::kCopy) != Status::kOk) return Status::kExecutorFailed;
  drop_ahead();
  if (queue_.copy_page(step.from_page, step.to_page) == Status::kOk) proposer_->copy_page(step);
  launched_ = true;
  return queue_.failed() ? Status::kExecutorFailed : Status::kOk;
}

// No round follows: what is queued for one, or waits for it, is not wanted.
void GraphExecutor::drop_ahead() noexcept {
  foresight_.stop();
  if (ahead_ != 0) queue_.cancel();
  ahead_ = 0;
}

// Whether the round that is queued does just what this step asks for.
bool GraphExecutor::ahead_is(const RoundStep& step) noexcept {
  if (step.forced > 0 || is_chunk(step)) return false;
  return ahead_ != 0 && step.constraint == nullptr && ahead_position_ == step.position && ahead_token_ == step.token &&
         setting_.holds(*step.sampling, step.stops, step.stop_count) &&
         setting_.holds(step.pages, pages_for(step.position + 1)) && text_is(step);
}

// Whether penalties look at the text that the device has.
bool GraphExecutor::text_is(const RoundStep& step) noexcept {
  return !step.sampling->penalises() || text_.holds(step.history, step.root() + 1, step.prompt_tokens);
}

void GraphExecutor::advance() noexcept {
  if (kind_ == StepKind::kPrefill) launch_prompt();
  if (kind_ == StepKind::kScores) launch_scores();
  if (kind_ != StepKind::kRound) return;
  if (!launched_) launch_tree();
  if (launched_ && ahead_ == 0) launch_ahead();
}

int GraphExecutor::first_forced(int count, int start) const noexcept {
  const int last = program_.last_chunk != nullptr ? (count - 1) % info_.prefill_chunk + 1 : 0;
  if (program_.prefill_draws()) return last - 1;
  switch (prompt_costs_.first(count, start, last)) {
    case FirstRound::kSingle:
      return 0;
    case FirstRound::kChunk:
      return last - 1;
    case FirstRound::kFull:
      break;
  }
  return std::min(info_.forced_tokens, program_.most_nodes() - 1);
}

void GraphExecutor::launch_prompt() noexcept {
  const int pages = pages_for(prompt_.start + prompt_.count);
  while (!launched_ && queue_.has_slot()) {
    if (!setting_.holds(prompt_.pages, pages)) {
      if (!queue_.setting_is_free(setting_)) return;
      setting_.take(prompt_.pages, pages);
    }
    const int most = std::min(prompt_.count, gpu::kChunkTokens);
    const bool in_chunks = program_.chunks_prefill() || (program_.chunk != nullptr && most > gpu::kTreeTokens &&
                                                         prompt_costs_.prefers_chunk(most, prompt_.start));
    const int count = in_chunks ? most : std::min(most, gpu::kTreeTokens);
    void* graph = in_chunks ? program_.chunk : graphs_.prefill_for(count, prompt_.start);
    fill_prompt(graph, prompt_.tokens, count, prompt_.start);
    tags_.forget(prompt_.start, count);
    if (queue_.launch(graph, setting_, text_) != Status::kOk) return;
    last_ = queue_.launched();
    if (first_ == 0) first_ = last_;
    prompt_.tokens += count;
    prompt_.start += count;
    prompt_.count -= count;
    launched_ = prompt_.count == 0;
  }
}

void GraphExecutor::fill_prompt(void* graph, const int32_t* tokens, int count, int position) noexcept {
  gpu::RoundRequest& request = queue_.next_request(graph);
  request.mode = gpu::RoundMode::kPrefill;
  request.count = count;
  request.position = position;
  request.max_tokens = 0;
  if (graph == program_.chunk) {
    std::copy_n(tokens, count, queue_.next_chunk());
  } else {
    fill_chain(request, tokens, count);
  }
}

void GraphExecutor::fill_last_chunk(const int32_t* tokens, int count, int position, int max_tokens) noexcept {
  gpu::RoundRequest& request = queue_.next_request(program_.last_chunk);
  request.mode = gpu::RoundMode::kTake;
  request.count = count;
  request.position = position;
  request.max_tokens = max_tokens;
  request.forced = count - 1;
  std::copy_n(tokens, count, queue_.next_chunk());
}

void GraphExecutor::launch_tree() noexcept {
  const RoundStep& step = round_;
  const int root = step.root(), pages = pages_for(root + step.max_tokens);
  if (!queue_.has_slot()) return;
  if (!setting_.holds(*step.sampling, step.stops, step.stop_count) || !setting_.holds(step.pages, pages)) {
    if (!queue_.setting_is_free(setting_)) return;
    setting_.take(*step.sampling, step.stops, step.stop_count, step.pages, pages);
  }
  if (!text_is(step)) text_.take(step.history, root + 1, step.prompt_tokens);
  if (step.sampling->penalises()) text_.begin(root + 1);
  const DraftTree& tree = proposer_->tree();
  const int count = step.forced + tree.count();
  void* graph = nullptr;
  if (is_chunk(step)) {
    graph = program_.last_chunk;
    fill_last_chunk(step.history + step.position, count, step.position, step.max_tokens);
  } else {
    graph = graphs_.round_for(count, step.position, *step.sampling, /*keeps_logits=*/step.constraint != nullptr);
    gpu::RoundRequest& request = queue_.next_request(graph);
    request.mode = gpu::RoundMode::kTake;
    request.count = count;
    request.position = step.position;
    request.max_tokens = step.max_tokens;
    if (step.forced > 0) {  // then the tree is its root alone, the last of them
      request.forced = step.forced;
      fill_chain(request, step.history + step.position, count);
    } else {
      std::copy_n(tree.tokens(), count, request.tokens);
      std::copy_n(tree.parents(), count, request.parents);
    }
  }
  tags_.forget(step.position, step.forced + std::min(step.max_tokens, tree.deepest() + 1));
  // A constraint may refuse what was drawn: what follows is then not behind what the device has accepted.
  const bool goes_on = step.constraint == nullptr && step.max_tokens > tree.deepest() + 1;
  foresight_.begin_round(/*foresees=*/goes_on && step.speculation != DrafterKind::kNone);
  if (queue_.launch(graph, setting_, text_) != Status::kOk) return;
  first_ = last_ = queue_.launched();
  launched_ = true;
  if (goes_on) proposer_->launched();
}

// A round over the tree, of which nothing but the logits is of use, and behind it the queries.
void GraphExecutor::launch_scores() noexcept {
  const ScoreStep& step = scores_;
  if (first_ == 0) {
    const int pages = pages_for(step.position + step.count);
    if (!queue_.has_slot()) return;
    const Sampling sampling{.top_logprobs = step.top_count > 0 ? step.top_count : -1};  // of the queries, not the round
    if (!setting_.holds(sampling, nullptr, 0) || !setting_.holds(step.pages, pages)) {
      if (!queue_.setting_is_free(setting_)) return;
      setting_.take(sampling, nullptr, 0, step.pages, pages);
    }
    void* graph = graphs_.round_for(step.count, step.position, sampling, /*keeps_logits=*/true);
    gpu::RoundRequest& request = queue_.next_request(graph);
    request.mode = gpu::RoundMode::kTake;
    request.count = step.count;
    request.position = step.position;
    request.max_tokens = 1;
    std::copy_n(step.tokens, step.count, request.tokens);
    std::copy_n(step.parents, step.count, request.parents);
    tags_.forget(step.position, 1);
    if (queue_.launch(graph, setting_, text_) != Status::kOk) return;
    first_ = queue_.launched();
  }
  redraws_.ask(step);
  last_ = queue_.launched();
  launched_ = redraws_.asked(step);
}

// Queues the plain rounds that follow the one in flight if that is also plain, unless the request ends with that one.
// The pages are there: the step's cover its root + max_tokens - 1.
void GraphExecutor::launch_ahead() noexcept {
  const RoundStep& step = round_;
  const int position = step.root() + 1;
  const int pages = pages_for(step.root() + step.max_tokens);
  if (proposer_->tree().count() > 1 || step.speculation != DrafterKind::kNone || step.max_tokens < 2) return;
  if (step.constraint != nullptr) return;
  if (position >= info_.context) return;
  if (queue_.seen() >= last_ && queue_.result(last_).stopped != 0) return;
  void* graph = graphs_.burst_for(*step.sampling, position);
  int rounds = program_.burst_rounds;
  if (graph == nullptr || rounds >= step.max_tokens || position + rounds > info_.context) {
    graph = graphs_.round_for(1, position, *step.sampling);
    rounds = 1;
  }
  if (!queue_.has_slots(rounds)) return;
  if (!setting_.holds(step.pages, pages)) {
    if (!queue_.setting_is_free(setting_)) return;
    setting_.take(step.pages, pages);
  }
  tags_.forget(position, rounds);
  for (int i = 0; i < rounds; ++i) fill_continuation(queue_.next_request(graph, i), position + i);
  if (queue_.launch(graph, setting_, text_, rounds) != Status::kOk) return;
  ahead_through_ = queue_.launched();
  ahead_ = ahead_through_ - static_cast<uint64_t>(rounds) + 1;
  ahead_position_ = -1;
}

Status GraphExecutor::poll(RoundResult& result) noexcept {
  if (queue_.failed()) return Status::kExecutorFailed;
  while (queue_.take_answer()) {
  }
  if (abandoned_ || abort_.load(std::memory_order_acquire)) return abandon();
  if (kind_ == StepKind::kScores) return finish_scores();
  advance();
  if (!launched_ || queue_.seen() < last_) {
    if (launched_) foresight_.prepare_next();
    return queue_.watch();
  }
  if (kind_ == StepKind::kCopy) return Status::kOk;
  return kind_ == StepKind::kPrefill ? finish_prefill() : finish_round(result);
}

// Has what is queued skipped and waits for the device to say so: the next step then finds it idle.
Status GraphExecutor::abandon() noexcept {
  if (!abandoned_) {
    queue_.cancel();
    abandoned_ = true;
    ahead_ = 0;
    if (kind_ == StepKind::kRound) redraws_.give_back(round_);
  }
  return queue_.idle() ? Status::kAborted : queue_.watch();
}

Status GraphExecutor::finish_prefill() noexcept {
  for (uint64_t sequence = first_; sequence <= last_; ++sequence) {
    if (queue_.result(sequence).status != gpu::RoundStatus::kOk) {
      return queue_.fail("the device has not run a chunk of a prompt", /*restart_helps=*/true);
    }
  }
  for (int i = std::max(0, prefill_.count - tags_.capacity()); i < prefill_.count; ++i) {
    const int32_t position = prefill_.start + i;
    tags_.put(position, prefill_.tokens[i], prefill_.pages[position / kPageTokens]);
  }
  return proposer_->prefill(prefill_, abort_);
}

// Of what the round fed: all but the token that it emitted last.
void GraphExecutor::keep_taps(const RoundResult& result) noexcept {
  if (tags_.capacity() == 0) return;
  const int32_t root = round_.root();
  const auto put = [&](int32_t position, int32_t token) {
    tags_.put(position, token, round_.pages[position / kPageTokens]);
  };
  for (int32_t position = round_.position; position < root; ++position) put(position, round_.history[position]);
  put(root, round_.forced > 0 ? round_.history[root] : round_.token);
  for (int i = 0; i + 1 < result.count; ++i) put(root + 1 + i, result.tokens[i].token);
}

// Answers are read before their slots are used again.
Status GraphExecutor::finish_scores() noexcept {
  if (first_ != 0 && queue_.seen() >= first_) {
    const bool known = queue_.launched() < first_ + gpu::kRoundSlots;  // its slot is still its own
    if (known && queue_.result(first_).status == gpu::RoundStatus::kSkipped) {
      return queue_.fail("the device has not run a tree whose tokens are to be scored", /*restart_helps=*/true);
    }
    if (const Status status = redraws_.collect(scores_); status != Status::kPending) return status;
  }
  advance();
  return queue_.watch();
}

Status GraphExecutor::finish_round(RoundResult& result) noexcept {
  if (redraws_.pending()) return queue_.watch();
  const gpu::RoundResult& answer = queue_.result(last_);
  if (answer.status == gpu::RoundStatus::kNotFinite) {
    return queue_.fail("a logit is not finite, or every token is banned", /*restart_helps=*/true);
  }
  if (answer.status != gpu::RoundStatus::kOk || !copy_tokens(answer, result)) {
    return queue_.fail("the device gave an impossible answer to a round", /*restart_helps=*/true);
  }
  if (round_.constraint != nullptr) {
    if (const Status status = redraws_.walk(round_, answer, result); status != Status::kOk) return status;
  }
  if (round_.sampling->penalises()) {
    for (int i = 0; i < result.count; ++i) text_.add(result.tokens[i].token);
  }
  keep_taps(result);
  if (answer.stopped != 0) foresight_.stop();
  if (round_.speculation != DrafterKind::kNone) proposer_->learn(round_, result);
  ahead_token_ = result.tokens[result.count - 1].token;
  ahead_position_ = answer.stopped != 0 ? -1 : round_.root() + result.count;
  return Status::kOk;
}

// False if the answer is not one to the round that was asked for.
bool GraphExecutor::copy_tokens(const gpu::RoundResult& answer, RoundResult& result) const noexcept {
  const DraftTree& tree = proposer_->tree();
  const int nodes = is_chunk(round_) ? 1 : round_.forced + tree.count();
  if (answer.count < 1 || answer.count > std::min(round_.max_tokens, tree.deepest() + 1)) return false;
  int node = 0;
  for (int i = 0; i < answer.count; ++i) {
    const gpu::EmittedToken& from = answer.tokens[i];
    RoundToken& to = result.tokens[i];
    if (!copy_token(from, info_.vocabulary, to) || from.node < 0 || from.node >= nodes) {
      return false;
    }
    if (i == answer.count - 1) break;
    node = tree.child(node, from.token);
    if (node < 0) return false;
    result.ranks[i] = static_cast<uint8_t>(tree.rank(node));
  }
  result.count = answer.count;
  result.drafter = proposer_->drafter();
  result.tree_tokens = tree.count();
  result.depth = tree.deepest();
  result.accepted = answer.count - 1;
  return true;
}

void GraphExecutor::settle() noexcept {
  if (settled_) return;
  settled_ = true;
  kind_ = StepKind::kNone;
  ahead_ = 0;
  if (queue_.enter() != Status::kOk) return;
  queue_.cancel();
  (void)queue_.drain();
}

}  // namespace ull::graph
