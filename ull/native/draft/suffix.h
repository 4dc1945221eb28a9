// Drafts what followed the newest tokens where they stood before: in the request's own text, and in what the engine has
// generated lately. No model. The places of the longest matches vote with the square of their length, in the request's
// own text kVote times as much, the latest a little more than older ones. A path's score is the product of the shares
// of these votes that its tokens have of those at their nodes, of which kDoubt are nobody's. The tree takes the best
// paths; a match of n tokens is followed for kReach * n + kReach. At a temperature a token's share is weighed with the
// noise that its draw gets.
#pragma once

#include <cstdint>
#include <memory>

#include "draft/drafter.h"
#include "draft/past_outputs.h"
#include "draft/suffix_index.h"

namespace ull {

class SuffixDrafter final : public Drafter {
 public:
  static constexpr int kOwnPlaces = 48;
  static constexpr int kPastPlaces = 16;
  static constexpr int kMostFollowed = 2048;  // tokens that a round or a chunk of a prompt reads at most
  static constexpr int kMostMoved = 256;      // tokens that a round moves to the past outputs at most
  static constexpr int kVote = 4;
  static constexpr float kDoubt = 32.0F;
  static constexpr int kReach = 8;

  // context: most tokens of a sequence. past: null: only the request's own text counts.
  explicit SuffixDrafter(int context, std::shared_ptr<PastOutputs> past = nullptr, bool coupled = true);

  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kSuffix; }
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept override;
  // By the score of the best first token.
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  // As many nodes as the plan has, of a shape of its own.
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] int max_rank() const noexcept override { return 8; }
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return 2000 + 100 * depth; }

  // Of the last confidence(), for tests: the longest match in either text, 0: nothing matched.
  [[nodiscard]] int match_length() const noexcept { return match_length_; }

 private:
  static constexpr int kPlaces = kOwnPlaces + kPastPlaces;
  static_assert(kPlaces <= 64, "a set of places is one word");

  // A place of the query, and what its vote counts for.
  struct Voter {
    uint32_t at;
    int32_t common;
    float weight;  // of 1 token squared
    bool own;
  };
  // A token that may follow a node, with the voters who say so.
  struct Candidate {
    float score;
    int32_t token;
    int32_t parent;
    uint64_t voters;
  };
  // Generated tokens of a request that has ended, in the own text.
  struct Segment {
    uint32_t begin;
    uint32_t end;
  };

  // Reads what history[0, count) has more than what was read, at most kMostFollowed tokens, or all anew if it is no
  // continuation of that.
  void follow(const int32_t* history, int count) noexcept;
  // The segment that is being generated has ended.
  void close_segment() noexcept;
  void move_segments() noexcept;
  void ask(const DraftContext& context, SuffixIndex::Runs runs) noexcept;
  [[nodiscard]] int32_t following(const Voter& voter, const DraftContext& context, int depth) const noexcept;
  // Adds the candidates for the children of `node`, which those of `voters` have led to, with a score of `score`.
  void expand(const DraftContext& context, int node, int depth, float score, uint64_t voters) noexcept;

  const bool coupled_;
  const std::shared_ptr<PastOutputs> past_;

  SuffixIndex own_;    // of twice the context: what a request generated stays for a while
  uint32_t base_ = 0;  // place of the history's first token
  int indexed_ = 0;    // tokens of the history that have been read
  int position_ = -1;  // of the last query's root
  int32_t root_ = -1;  // its token
  int prompt_tokens_ = 0;

  bool generates_ = false;  // there is a segment_
  Segment segment_{};
  static constexpr int kMostSegments = 16;
  Segment ended_[kMostSegments];  // [ended_count_] the oldest first
  int ended_count_ = 0;

  Voter voters_[kPlaces];
  int voter_count_ = 0;
  int match_length_ = 0;
  Candidate candidates_[kPlaces];  // each voter is with one of them at most
  int candidate_count_ = 0;
};

}  // namespace ull
