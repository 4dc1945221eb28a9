#include "draft/suffix.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/float_math.h"
#include "base/gumbel.h"

namespace ull {
namespace {

constexpr int kRecent = 16;       // tokens compared to tell whether the history is still the one that was read
constexpr float kAgeing = 0.05F;  // votes are divided by 1 + this per place before them
constexpr float kClasses[] = {0.15F, 0.4F, 0.7F};  // scores of the best first token that separate the confidences

constexpr float squared(int tokens) { return static_cast<float>(tokens * tokens); }

}  // namespace

SuffixDrafter::SuffixDrafter(int context, std::shared_ptr<PastOutputs> past, bool coupled)
    : coupled_(coupled), past_(std::move(past)), own_(2 * std::max(context, kMostFollowed)) {}

void SuffixDrafter::follow(const int32_t* history, int count) noexcept {
  const auto read = [&](int at) { return own_.token(base_ + static_cast<uint32_t>(at)); };
  bool continues = indexed_ <= count && (indexed_ == 0 || history[0] == read(0));
  for (int at = std::max(indexed_ - kRecent, 0); continues && at < indexed_; ++at) continues = history[at] == read(at);
  if (!continues) {
    close_segment();
    own_.clear();
    base_ = own_.end();
    indexed_ = 0;
  }
  for (const int end = std::min(count, indexed_ + kMostFollowed); indexed_ < end; ++indexed_) {
    own_.append(history[indexed_]);
  }
}

void SuffixDrafter::close_segment() noexcept {
  if (!generates_ || past_ == nullptr) return;
  generates_ = false;
  const uint32_t read = own_.end() - segment_.begin;  // tokens of it, unless reading has not come so far yet
  if (own_.end() - base_ < segment_.begin - base_) return;
  segment_.end = segment_.begin + std::min(segment_.end - segment_.begin, read);
  if (segment_.begin == segment_.end) return;
  if (ended_count_ == kMostSegments) {
    std::copy(ended_ + 1, ended_ + ended_count_, ended_);
    --ended_count_;
  }
  ended_[ended_count_++] = segment_;
}

void SuffixDrafter::move_segments() noexcept {
  if (ended_count_ == 0) return;
  Segment& first = ended_[0];
  for (int moved = 0; moved < kMostMoved && first.begin != first.end; ++moved, ++first.begin) {
    if (own_.holds(first.begin)) past_->append(own_.token(first.begin));
  }
  if (first.begin != first.end) return;
  past_->append(PastOutputs::kBoundary);
  std::copy(ended_ + 1, ended_ + ended_count_, ended_);
  --ended_count_;
}

Status SuffixDrafter::prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept {
  (void)abort;
  if (step.history != nullptr) follow(step.history, step.start + step.count);
  return Status::kOk;
}

void SuffixDrafter::ask(const DraftContext& context, SuffixIndex::Runs runs) noexcept {
  SuffixIndex::Place places[kPlaces];
  const int length = context.position + 1;
  const int own = own_.find(context.history, length, runs, places, kOwnPlaces);
  int count = own;
  if (past_ != nullptr) count += past_->index().find(context.history, length, runs, places + own, kPastPlaces);
  voter_count_ = count;
  match_length_ = 0;
  for (int i = 0; i < count; ++i) {
    const bool is_own = i < own;
    const float age = 1.0F + kAgeing * static_cast<float>(is_own ? i : i - own);
    voters_[i] = {places[i].at, places[i].common, static_cast<float>(is_own ? kVote : 1) / age, is_own};
    match_length_ = std::max(match_length_, places[i].common);
  }
}

int SuffixDrafter::confidence(const DraftContext& context) noexcept {
  voter_count_ = 0;
  match_length_ = 0;
  if (context.position < 0) return -1;
  follow(context.history, context.position);  // not the root: the newest tokens must not find themselves
  move_segments();
  position_ = context.position;
  root_ = context.history[context.position];
  prompt_tokens_ = context.prompt_tokens;
  ask(context, SuffixIndex::Runs::kLongest);
  if (voter_count_ == 0) return -1;
  candidate_count_ = 0;
  expand(context, 0, 1, 1.0F, ~uint64_t{0});
  if (candidate_count_ == 0) return -1;
  return static_cast<int>(std::upper_bound(std::begin(kClasses), std::end(kClasses), candidates_[0].score) - kClasses);
}

// Beyond the present the text is taken to go on repeating what lies between the place and now.
int32_t SuffixDrafter::following(const Voter& voter, const DraftContext& context, int depth) const noexcept {
  if (voter.own) {
    const int place = static_cast<int>(voter.at - base_);
    return context.history[place + 1 + (depth - 1) % (context.position - place)];
  }
  const SuffixIndex& past = past_->index();
  return depth <= past.behind(voter.at) ? past.token(voter.at + static_cast<uint32_t>(depth)) : PastOutputs::kBoundary;
}

void SuffixDrafter::expand(const DraftContext& context, int node, int depth, float score, uint64_t voters) noexcept {
  const int first = candidate_count_;
  float total = kDoubt;
  if (voter_count_ < kPlaces) voters &= (uint64_t{1} << voter_count_) - 1;
  for (; voters != 0; voters &= voters - 1) {
    const int index = std::countr_zero(voters);
    const Voter& voter = voters_[index];
    if (depth > kReach * voter.common + kReach) continue;
    const int32_t token = following(voter, context, depth);
    if (token < 0) continue;
    const float votes = voter.weight * squared(std::min(voter.common + depth - 1, SuffixIndex::kLongest));
    total += votes;
    int at = first;
    while (at < candidate_count_ && candidates_[at].token != token) ++at;
    if (at == candidate_count_) candidates_[candidate_count_++] = {0.0F, token, node, 0};
    candidates_[at].score += votes;
    candidates_[at].voters |= uint64_t{1} << index;
  }
  const bool noisy = coupled_ && context.sampling != nullptr && context.sampling->temperature > 0.0F;
  if (noisy && candidate_count_ > first + 1) {
    const float before = total - kDoubt;
    float after = 0.0F;
    for (int at = first; at < candidate_count_; ++at) {
      const float noise = gumbel(context.sampling->seed, context.position + depth, candidates_[at].token);
      candidates_[at].score *= exp_lanes<ScalarMath>(noise);
      after += candidates_[at].score;
    }
    for (int at = first; at < candidate_count_; ++at) candidates_[at].score *= before / after;
  }
  int best = first;
  for (int at = first; at < candidate_count_; ++at) {
    candidates_[at].score *= score / total;
    if (candidates_[at].score > candidates_[best].score) best = at;
  }
  if (candidate_count_ > first) std::swap(candidates_[first], candidates_[best]);
}

Status SuffixDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (voter_count_ == 0) return Status::kOk;
  ask(context, SuffixIndex::Runs::kAll);
  candidate_count_ = 0;
  expand(context, 0, 1, 1.0F, ~uint64_t{0});
  while (candidate_count_ > 0 && tree.count() < plan.count) {
    Candidate* best = std::max_element(candidates_, candidates_ + candidate_count_,
                                       [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
    const Candidate chosen = *best;
    *best = candidates_[--candidate_count_];
    const int node = tree.add(chosen.parent, chosen.token);
    if (node >= 0) expand(context, node, tree.depth(node) + 1, chosen.score, chosen.voters);
  }
  return Status::kOk;
}

// The tokens are read at once, but for the last one, which is the next root: nobody calls when a request ends.
void SuffixDrafter::observe(const DraftOutcome& outcome) noexcept {
  if (outcome.count < 1 || outcome.position != position_) return;
  const uint32_t root = base_ + static_cast<uint32_t>(position_);
  if (!generates_ || segment_.end != root) {
    close_segment();
    // What was generated before this round is another's to tell, but for the root.
    segment_.begin = position_ >= prompt_tokens_ ? root : root + 1;
    generates_ = true;
  }
  segment_.end = root + static_cast<uint32_t>(outcome.count);
  if (indexed_ != position_) return;
  own_.append(root_);
  for (int i = 0; i + 1 < outcome.count; ++i) own_.append(outcome.emitted[i]);
  indexed_ += outcome.count;
}

}  // namespace ull
