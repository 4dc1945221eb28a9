// A transformer of the Llama family (Llama, Mistral, Qwen2, Qwen3) on the CPU. model.cpp reads like the maths.
//
// The forward pass is one function that every member of a thread team runs; barriers separate the steps. Bits do not
// depend on the chunk, the page table, the number of threads or the instruction set.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/aligned.h"
#include "base/status.h"
#include "cpu/attention.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kv_cache.h"
#include "cpu/model_shape.h"
#include "cpu/panels.h"
#include "cpu/tap.h"
#include "cpu/thread_team.h"
#include "cpu/weights.h"
#include "executor/executor.h"

namespace ull::cpu {

struct ModelOptions {
  int threads = 1;
  std::vector<int> cores;  // see ThreadTeam
  std::string isa = "auto";
  int chunk = 256;  // most tokens per forward()
  int pages = 0;    // KV pages; 0: as many as one sequence of spec.context tokens needs
  WeightStorage storage = WeightStorage::kResident;
  bool trees = false;     // forward() takes draft trees: one page more
  int cache_layers = 0;   // layers that the KV pages hold; 0: all. 1: run layer by layer (evaluate)
  std::vector<int> taps;  // layers whose input the heads read, ascending; spec.layers: what leaves the last one
  int widest = 0;         // columns of matrices that multiply() takes, beside those as wide as the model's own
};

enum class LogitsOf : uint8_t { kNone, kLast, kAll };

struct ForwardStep {
  const int32_t* tokens;  // [count], each in [0, vocabulary)
  int count;              // 1 .. chunk
  int start;              // position of tokens[0]
  const int32_t* pages;   // page table, covers start + count - 1
  LogitsOf logits_of;
  float* logits;                    // [1 or count][vocabulary], by logits_of
  bool tapped = false;              // keep what options.taps name: see tapped()
  const TreePaths* tree = nullptr;  // null: the tokens follow one another. Else token i is node i of a draft tree, its
                                    // keys and values go to the tree page, and `pages` covers [0, start)
};

class Model {
 public:
  // Loads the weights and allocates everything. Throws std::invalid_argument (bad spec, tensors, options) and
  // std::bad_alloc.
  Model(ModelSpec spec, const ModelOptions& options, std::shared_ptr<ThreadTeam> team = nullptr);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  [[nodiscard]] const ModelSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] const Kernels& kernels() const noexcept { return kernels_; }
  [[nodiscard]] const ModelWeights& weights() const noexcept { return weights_; }
  [[nodiscard]] const KvCache& cache() const noexcept { return cache_; }
  [[nodiscard]] int chunk() const noexcept { return chunk_; }
  [[nodiscard]] int pinned_threads() const noexcept { return team_->pinned(); }
  [[nodiscard]] const std::shared_ptr<ThreadTeam>& team() const noexcept { return team_; }

  // Beaten by every forward() from now on, once per layer; null: none.
  void set_pulse(Pulse* pulse) noexcept { pulse_ = pulse; }
  // Whether the step in flight must end. Beats the pulse, on the engine's thread.
  [[nodiscard]] bool interrupted(const std::atomic<bool>& abort) noexcept {
    const bool beating = pulse_ == nullptr || pulse_->beat();
    return !beating || abort.load(std::memory_order_relaxed);
  }

  // kOk, or kAborted if it was interrupted(), which is asked once per layer.
  [[nodiscard]] Status forward(const ForwardStep& step, const std::atomic<bool>& abort) noexcept;

  // The pieces of forward(), for a pass over the model layer by layer. hidden: [count][spec.hidden] f32, in and out.
  void embed(const int32_t* tokens, int count, float* hidden) noexcept;
  void run_layer(int layer, float* hidden, int count, int start, const int32_t* pages) noexcept;
  void project(float* hidden, int count, float* logits) noexcept;  // [count][vocabulary]
  // All layers over a block: each of its tokens sees the whole of it, and the keys of positions [first, start). hidden:
  // [count][spec.hidden], in and out. kOk, or kAborted as forward().
  [[nodiscard]] Status run_block(float* hidden, int count, int start, int first, const int32_t* pages,
                                 const std::atomic<bool>& abort) noexcept;
  // Stores the keys and values that each layer makes of x [count][spec.hidden], as it is, and computes nothing else.
  void store(const float* x, int count, int start, const int32_t* pages) noexcept;
  // Lets `tap`, which must outlive the model, have a look at the linears' inputs. Once, before the first pass.
  void set_tap(Tap* tap) noexcept { tap_ = tap; }

  // The logits of rows [row, row + count) of the last forward() -> [count][vocabulary].
  void project_rows(int row, int count, float* logits) noexcept;
  // The residual stream of row `row` of the last forward() that was `tapped`, as it entered the layers options.taps ->
  // [taps][hidden].
  [[nodiscard]] const float* tapped(int row) const noexcept {
    return tapped_.data() + static_cast<size_t>(row) * tapped_width();
  }
  [[nodiscard]] size_t tapped_width() const noexcept { return taps_.size() * static_cast<size_t>(spec_.hidden); }
  [[nodiscard]] const std::vector<int>& taps() const noexcept { return taps_; }
  // The lm_head's input of row `row` of the last forward(), unscaled -> [hidden].
  void normed_row(int row, float* out) const noexcept;
  // out[token][0, matrix.rows) = scale * (matrix x) + bias, for x [count][matrix.columns] f32, count <= chunk() and
  // columns no more than the model's own widest input. Rows before row tile `from` are left out.
  void multiply(const Matrix& matrix, const float* x, int count, float* out, size_t out_stride, int from = 0) noexcept;
  // The shared lm_head on rows like those of normed_row() -> [count][vocabulary].
  void head_logits(const float* x, int count, float* logits) noexcept;

  // Copies the keys and values of tree node `node` (its slot in the tree page) to `position`, all layers.
  void keep_node(int node, int position, const int32_t* pages) noexcept;
  // Copies the keys and values of a page's first tokens to another page, all layers.
  void copy_page(const CopyStep& step) noexcept { cache_.copy_page(step.from_page, step.to_page, step.tokens); }

 private:
  struct Scratch {
    AlignedArray<float> normed;    // [hidden] one token's norm, made by every member for itself
    AlignedArray<float> unpacked;  // [kUnpackedDepth][32] weights
    AlignedArray<float> sums;      // [kMaxTileGroup][columns][32]
  };

  // Everything below is called by every member of the team.
  void embed_tokens(int member, const int32_t* tokens) noexcept;
  void layer(int member, int index) noexcept;
  // Keeps the residual stream if it is wanted as it enters `layer`.
  void keep_tap(int member, int layer) noexcept;
  void logits(int member, const float* hidden, const Panels& panels, float* out) noexcept;
  // The complete input of a linear, [columns] per token, packed. Ends with a barrier if there is a tap.
  void tap(int member, int linear, const Matrix& matrix, AlignedArray<float>& x, const Panels& panels) noexcept;
  // out[token][0, rows) = matrix x, x packed for it; from row tile `from` on.
  void product(int member, const Matrix& matrix, const float* x, const Panels& panels, int rows, float* out,
               size_t out_stride, int from = 0) noexcept;
  // RMS norm of the chunk, packed for `consumer`. Ends with a barrier unless each member made its own.
  const float* normalise(int member, const float* hidden, const Panels& panels, const AlignedArray<float>& weight,
                         const Matrix& consumer) noexcept;
  // Multiplies this member's share of the row tiles and calls finish(tile, sums) for each `unit` tiles; sums is
  // [unit][sums_tile], of which [token][32] is filled.
  // from: the first tile that is wanted, a multiple of `unit`.
  template <typename Finish>
  void linear(int member, const Matrix& matrix, const float* x, const Panels& panels, int unit, Finish finish,
              int from = 0) noexcept;
  // Queries, keys and values of the chunk, from row tile `from` on -> qkv_.
  void project_qkv(int member, const Matrix& matrix, const float* x, int from = 0) noexcept;
  [[nodiscard]] AttentionStep attention_step(int layer) noexcept;
  void add_to_hidden(int member, const Matrix& matrix, const float* x) noexcept;
  void activate(int member, const LayerWeights& weights, const float* x) noexcept;
  void allocate_activations(size_t hidden, size_t columns, size_t widest);
  void set_chunk(float* hidden, int count, int start, const int32_t* pages, const TreePaths* tree = nullptr) noexcept;

  ModelSpec spec_;
  const Kernels& kernels_;
  int chunk_;
  ModelWeights weights_;
  std::shared_ptr<ThreadTeam> team_;
  KvCache cache_;
  Attention attention_;

  int qkv_stride_;                // rows of qkv, padded to tiles
  AlignedArray<float> hidden_;    // [chunk][hidden] the residual stream
  AlignedArray<float> qkv_;       // [chunk][qkv_stride]
  AlignedArray<float> normed_;    // packed [columns][hidden]
  AlignedArray<float> mixed_;     // packed [columns][max(heads * head_dim, intermediate, options.widest)]
  std::vector<Scratch> scratch_;  // [threads]
  std::vector<int> taps_;
  AlignedArray<float> tapped_;  // [chunk][taps][hidden]

  // The chunk in flight; written by member 0 before the team starts.
  float* residual_ = nullptr;  // [count][hidden]
  Panels panels_{1, 1, 1};
  int start_ = 0;
  const int32_t* pages_ = nullptr;
  const TreePaths* tree_ = nullptr;
  bool block_ = false;  // see AttentionStep
  int first_ = 0;
  Pulse* pulse_ = nullptr;
  bool stop_ = false;  // member 0 was interrupted; published by a barrier

  Tap* tap_ = nullptr;
};

}  // namespace ull::cpu
