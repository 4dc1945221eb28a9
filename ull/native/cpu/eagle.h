// An EAGLE-3 head (Li et al., arXiv 2503.01840): one layer that reads the token to come beside the target's hidden
// states, and its own output where these are not known yet. Entry p of its cache is made of the embedding of the token
// at p + 1 and of what the target left at p (its "taps", through fc), and its output predicts the token at p + 2.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "cpu/attention.h"
#include "cpu/kv_cache.h"
#include "cpu/model.h"
#include "cpu/sampler.h"
#include "cpu/taps.h"
#include "cpu/tensor_loader.h"
#include "draft/eagle_tree.h"
#include "draft/head_drafter.h"

namespace ull::cpu {

// Columns of the widest matrix of a head, for ModelOptions::widest.
[[nodiscard]] int widest_columns(const EagleSpec& spec, int target_hidden) noexcept;

class EagleHead {
 public:
  // model.spec().eagle says what to load. Its cache has the target's pages. Throws std::invalid_argument naming the
  // tensor at fault.
  explicit EagleHead(Model& model);

  [[nodiscard]] const EagleSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] int rows() const noexcept { return rows_; }  // most entries of a pass
  [[nodiscard]] int64_t bytes() const noexcept { return memory_.bytes; }
  [[nodiscard]] KvCache& cache() noexcept { return cache_; }
  [[nodiscard]] const KvCache& cache() const noexcept { return cache_; }
  // The target's token of each token of its own; empty: they are the same.
  [[nodiscard]] const std::vector<int32_t>& names() const noexcept { return names_; }

  // The hidden state that entry `row` of the next pass is made of: [hidden].
  [[nodiscard]] float* state(int row) noexcept { return states_.data() + static_cast<size_t>(row) * hidden_; }
  // Makes states [0, count) of what the target left at positions [start, start + count), which the ring holds.
  void read_taps(const TapRing& ring, int start, int count) noexcept;

  struct Pass {
    const int32_t* tokens;  // [count] the target's: of each entry's position + 1
    int count;              // 1 .. rows()
    int start;              // position of the first entry, or of the tree's root
    int from;               // the first position that may be attended to
    const int32_t* pages;
    const TreePaths* tree = nullptr;  // entry i is then node first_node + i, in the tree page
    int first_node = 0;
  };
  void run(const Pass& pass) noexcept;
  // Of a pass without a tree what stays in the cache, keys and values: no outputs.
  void keep(const Pass& pass) noexcept;

  // What an entry below entry `row` of the last pass is made of -> [hidden].
  void output(int row, float* out) const noexcept;
  // Logits of entries [row, row + count) of the last pass -> [count][its own vocabulary].
  void project(int row, int count, float* logits) noexcept;

 private:
  void load(const ModelSpec& target);
  // The layer's input: [count][2 * hidden], and the residual stream.
  void prepare_input(const Pass& pass) noexcept;
  [[nodiscard]] AttentionStep attention_step(const Pass& pass) noexcept;
  void attend(const Pass& pass) noexcept;
  void feed_forward(int count) noexcept;
  // residual += matrix x
  void add_product(const Matrix& matrix, const float* x, int count) noexcept;
  void normalise(const float* x, const AlignedArray<float>& weight, float* out) const noexcept;

  Model& model_;
  const EagleSpec& spec_;
  const size_t hidden_;
  const size_t target_hidden_;
  const int rows_;
  TensorMemory memory_;
  Matrix fc_;
  std::vector<AlignedArray<float>> tap_norms_;  // one per tap, or one for all
  AlignedArray<float> embedding_norm_;          // [hidden]
  AlignedArray<float> hidden_norm_;             // [hidden]
  LayerWeights layer_;                          // but for the norm of its input
  AlignedArray<float> norm_;                    // [hidden]
  Matrix lm_head_;
  RowTable embedding_;  // without data: the target's
  std::vector<int32_t> names_;
  KvCache cache_;
  Attention attention_;

  AlignedArray<float> taps_;      // [rows][taps][target hidden]
  AlignedArray<float> states_;    // [rows][hidden]
  AlignedArray<float> input_;     // [rows][2 * hidden]
  AlignedArray<float> residual_;  // [rows][hidden]
  AlignedArray<float> qkv_;       // [rows][qkv_rows]
  AlignedArray<float> attended_;  // [rows][heads * head_dim]
  AlignedArray<float> added_;     // [rows][hidden] a product on its way to the residual stream; a norm's output
  AlignedArray<float> gate_up_;   // [rows][2 * intermediate in whole tiles]
  AlignedArray<float> gated_;     // [rows][intermediate]
};

// Runs the head on the likeliest nodes of each level of the tree that it grows, as many as the machine computes for
// little more than one.
class EagleDrafter final : public HeadDrafter {
 public:
  // coupled: see MedusaDrafter.
  EagleDrafter(Model& model, const TapRing& taps, bool coupled = true);

  void prepare() override;
  void copy_page(const CopyStep& step) noexcept override {
    head_.cache().copy_page(step.from_page, step.to_page, step.tokens);
  }
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return kMaxEagleDepth; }
  [[nodiscard]] int max_rank() const noexcept override { return kEagleRanks; }
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override;
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return head_.bytes(); }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return head_.cache().bytes(); }
  // Nodes of a level that it is run on at most.
  [[nodiscard]] int width() const noexcept { return width_; }

 private:
  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                            const std::atomic<bool>& abort) noexcept override;
  // Runs the head on nodes [1, count] of a level -> outputs, logits.
  void run_level(const int* nodes, int count, int root, int from, const int32_t* pages) noexcept;
  // Candidates below `node`, whose entry's logits are row `row` of logits_.
  void rank(const DraftContext& context, const Sampling& sampling, int node, int row) noexcept;
  [[nodiscard]] int64_t time_level(int width) noexcept;

  Model& model_;
  const TapRing& taps_;
  EagleHead head_;
  Sampler sampler_;
  const bool coupled_;
  int width_;
  AlignedArray<float> logits_;   // [kMaxEagleWidth][the head's vocabulary]
  AlignedArray<float> named_;    // [the target's vocabulary] one row of them, under the target's names
  AlignedArray<float> outputs_;  // [kMaxEagleEntries][hidden] by entry of the tree page; 0: the root's
  EagleTree tree_;
  TreePaths paths_;                              // of the entries
  int entries_ = 0;                              // in the tree page
  uint8_t parents_[kMaxTreeTokens] = {};         // of the entries
  int16_t entry_of_[EagleTree::kCapacity] = {};  // [node] that it was run on
  int64_t root_ns_ = 0;                          // one entry with its logits, ranked
  int64_t level_ns_ = 0;                         // a level of width_ nodes, ranked
};

}  // namespace ull::cpu
