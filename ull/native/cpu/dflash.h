// A DFlash head (Chen et al., arXiv 2602.06036), and DSpark's (arXiv 2607.05147): a few layers that draft a whole block
// in one pass. Their cache holds, for every position of the text, keys and values that each layer makes of one vector,
// hidden_norm(fc(taps)): the context. A pass embeds [root, mask, mask ...]; every slot sees the context and the whole
// block, and predicts the token that stands at its own position, or with anchor_predicts the one behind it.
//
// DSpark adds to a slot's logits a term of low rank that knows the token before, and estimates how likely a slot's
// draft is to be accepted.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/aligned.h"
#include "cpu/model.h"
#include "cpu/sampler.h"
#include "cpu/taps.h"
#include "cpu/tensor_loader.h"
#include "draft/growth.h"
#include "draft/head_drafter.h"

namespace ull::cpu {

// What the head computes. Depth d, from 1, is that of the draft tree: the slot that predicts the token at root + d.
class DflashHead {
 public:
  // target.spec().dflash says what to load. It runs on the target's team, uses the target's embedding and lm_head where
  // it has none, and has a page for each of the target's. Throws std::invalid_argument, "dflash: ..." naming the tensor
  // at fault.
  explicit DflashHead(Model& target);

  [[nodiscard]] int block() const noexcept { return spec_.block; }
  [[nodiscard]] int depths() const noexcept { return spec_.anchor_predicts ? spec_.block : spec_.block - 1; }
  [[nodiscard]] int vocabulary() const noexcept { return body_.spec().vocabulary; }  // tokens that it can propose
  [[nodiscard]] bool has_markov() const noexcept { return spec_.markov > 0; }
  [[nodiscard]] int markov_rank() const noexcept { return spec_.markov; }
  [[nodiscard]] bool has_confidence() const noexcept { return spec_.confidence; }
  [[nodiscard]] bool confidence_reads_markov() const noexcept { return spec_.confidence_reads_markov; }
  [[nodiscard]] int64_t weight_bytes() const noexcept { return body_.weights().bytes() + memory_.bytes; }
  [[nodiscard]] int64_t kv_bytes() const noexcept { return body_.cache().bytes(); }
  [[nodiscard]] Model& body() noexcept { return body_; }

  // Makes the context of positions [start, start + count), whose taps the ring holds. kOk or kAborted.
  [[nodiscard]] Status read(const TapRing& ring, int count, int start, const int32_t* pages,
                            const std::atomic<bool>& abort) noexcept;
  // A pass over `count` positions, the root's own first, which see the context of [first, start). kOk or kAborted.
  [[nodiscard]] Status run(int32_t root, int count, int start, int first, const int32_t* pages,
                           const std::atomic<bool>& abort) noexcept;

  // Of the last run(). The state of the slot that predicts depth d, behind the final norm -> [hidden].
  [[nodiscard]] const float* state(int depth) const noexcept;
  // Fills logits(1 .. count).
  void predict(int count) noexcept;
  // [target vocabulary]; those of tokens that the head does not know are far below all others.
  [[nodiscard]] float* logits(int depth) noexcept {
    return logits_.data() + static_cast<size_t>(depth - 1) * static_cast<size_t>(target_.spec().vocabulary);
  }
  [[nodiscard]] bool knows(int32_t token) const noexcept { return own_[static_cast<size_t>(token)] >= 0; }
  // What `parent` adds to the logits of its children at `depth`: the factor [rank], valid until the next call, and the
  // term of one token that the head knows.
  [[nodiscard]] const float* markov_factor(int depth, int32_t parent) noexcept;
  [[nodiscard]] float markov_term(const float* factor, int32_t token) const noexcept;
  // The estimated chance that the draft at `depth` below `parent` is accepted, if all before it are.
  [[nodiscard]] float confidence(int depth, int32_t parent) const noexcept;

 private:
  using Tensors = std::map<std::string, TensorInfo>;

  void load_more();
  void map_tokens();

  Model& target_;
  const DflashSpec& spec_;
  Model body_;  // the layers and the final norm, with the head's own cache
  TensorMemory memory_;
  Matrix fc_;                        // [hidden, taps * target hidden]
  AlignedArray<float> hidden_norm_;  // [hidden]
  RowTable markov_embedding_;        // [target vocabulary][rank] bf16
  RowTable markov_head_;             // [vocabulary][rank] bf16
  Matrix markov_gate_;               // [rank, hidden + rank]
  AlignedArray<float> confidence_;   // [hidden (+ rank)]
  float confidence_bias_ = 0.0F;
  std::vector<int32_t> tokens_;  // [vocabulary] the target's token of its own
  std::vector<int32_t> own_;     // [target vocabulary] its own of the target's; -1: it has none
  bool scattered_ = false;       // its own logits are not the target's, token by token

  AlignedArray<float> mask_;        // [hidden] embedding
  AlignedArray<float> tapped_;      // [chunk][taps * target hidden]
  AlignedArray<float> context_;     // [chunk][hidden]
  AlignedArray<float> hidden_;      // [block][hidden] the residual stream
  AlignedArray<float> states_;      // [block][hidden]
  AlignedArray<float> own_logits_;  // [depths][vocabulary] where they are scattered
  AlignedArray<float> logits_;      // [depths][target vocabulary]
  AlignedArray<float> gate_input_;  // [hidden + rank]
  AlignedArray<float> factor_;      // [rank]
};

// Takes the number of nodes and the depth from the plan and grows the likeliest paths, as Medusa's drafter does. With a
// Markov term the best candidates of each depth are scored anew below every node that gets children. With a confidence
// head the candidates of a node share what it says instead of one.
class DflashDrafter final : public HeadDrafter {
 public:
  // Multiply-adds of a Markov term over the whole vocabulary up to which a parent's children are ranked exactly: about
  // as long as a row of the lm_head takes. Above it, the term only reorders the best without it.
  static constexpr int64_t kMostExact = int64_t{1} << 20;

  // coupled: see MedusaDrafter.
  DflashDrafter(Model& target, const TapRing& ring, bool coupled = true, int64_t most_exact = kMostExact);

  void prepare() override;
  void set_pulse(Pulse* pulse) noexcept override { head_.body().set_pulse(pulse); }
  void copy_page(const CopyStep& step) noexcept override { head_.body().copy_page(step); }
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return head_.depths(); }
  [[nodiscard]] int max_rank() const noexcept override;
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override;
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return head_.weight_bytes(); }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return head_.kv_bytes(); }

 private:
  static constexpr int kRanks = 10;            // children of a node
  static constexpr int kRescored = kMaxRanks;  // candidates of a depth that a Markov term may reorder

  struct Candidate {
    int32_t token;
    float logit;  // before penalties and bias
    float bias;
    float noise;
  };
  struct Depth {
    bool ranked = false;
    int count = 0;
    Candidate candidates[kRescored];  // best first, without a Markov term
  };
  struct Children {
    int count = 0;
    int32_t tokens[kRescored];
    float adjusted[kRescored];  // logits, times the inverse temperature
    float scores[kRescored];    // adjusted + noise
    float shares[kRescored];
  };

  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                            const std::atomic<bool>& abort) noexcept override;
  [[nodiscard]] Branch expand(const DraftTree& tree, int node) noexcept;
  void rank(int depth) noexcept;
  // The children of `parent` at `depth`, best first.
  void score(int depth, int32_t parent, Children& children) noexcept;
  // The same with the Markov term of every token of the vocabulary, where that is small.
  void rank_exactly(int depth, int32_t parent, Children& children) noexcept;
  // Puts those that the request's filters would drop behind the others.
  void filter(Children& children) const noexcept;
  [[nodiscard]] int64_t time_depth(int depth) noexcept;

  DflashHead head_;
  const TapRing& ring_;
  Sampler sampler_;
  const int vocabulary_;  // the target's
  const int context_;
  const int pages_;
  const bool coupled_;
  AlignedArray<float>
      exact_;  // [vocabulary] logits with the Markov term of a parent; empty: the vocabulary is too large
  int64_t cost_ns_[kMaxDflashBlock + 1] = {};  // by depth

  // The proposal in flight.
  Sampling sampling_;
  TokenCounts* counts_ = nullptr;
  int32_t position_ = 0;
  int wanted_ = 0;  // children of a node
  int depth_ = 0;
  Depth depths_[kMaxDflashBlock + 1];
  Children of_depth_[kMaxDflashBlock + 1];  // without a Markov term: the same below every node
  Children of_node_[kMaxTreeTokens];
};

}  // namespace ull::cpu
