// The graph program: captured CUDA graphs and the mapped blocks through which they are asked and answer. ull/gpu makes
// it and owns everything in it; the core replays it. Handles are the CUDA driver's, opaque here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "draft/medusa_tree.h"
#include "executor/executor.h"
#include "kernels/params.h"

namespace ull::graph {

static_assert(gpu::kMedusaRanks == kMedusaRanks);
static_assert(gpu::kTreeTokens == kMaxTreeTokens && gpu::kPageTokens == kPageTokens);
static_assert(gpu::kAlternatives == kMaxTopLogprobs && gpu::kBiases == kMaxLogitBias);
static_assert(kCostTokens[kCostSizes - 1] == gpu::kTreeTokens);

// What the sampler of a round of one token can do. Two that serve a request give it the same bits.
enum class Sampler : uint8_t {
  kFull,   // everything
  kPlain,  // requests without filters, biases, penalties and logprobs: see serves()
  kScan,   // the same but for min-p, by a scan of a coarser lm_head and an exact rescoring of what may win
};
inline constexpr int kSamplers = 3;

// Graphs of rounds of one token.
struct SingleGraphs {
  void* round = nullptr;  // CUgraphExec of one; null: there is none
  void* burst = nullptr;  // CUgraphExec of burst_rounds that continue one another; null: there is none
};

// Rounds of a few tokens with an attention that divides the work of a long cache among more blocks, beside those of
// GraphProgram, whose bits they have.
struct WideGraphs {
  int from = 0;                          // positions before a round, the fewest where they are meant; 0: there are none
  void* rounds[kCostSizes] = {};         // as GraphProgram's; null: there is none
  SingleGraphs singles[kSamplers] = {};  // likewise
};

// Through what rounds are asked for and answered, and the pages that they fill.
struct RoundBlocks {
  void* stream = nullptr;                 // CUstream that all graphs are launched on
  void* context = nullptr;                // CUcontext of the stream
  gpu::RoundRequest* requests = nullptr;  // [kRoundSlots] mapped
  gpu::RoundResult* results = nullptr;    // [kRoundSlots] mapped
  gpu::HostControl* control = nullptr;    // mapped
  int32_t* pages = nullptr;               // [context_tokens / kPageTokens, rounded up] mapped
  int32_t* text = nullptr;                // [context_tokens] mapped
  void* chunk = nullptr;      // CUgraphExec: up to kChunkTokens of a prompt fill the cache (kPrefill); null: none
  int32_t* chunks = nullptr;  // [kRoundSlots][kChunkTokens] mapped, where there is `chunk`: its tokens
  int vocabulary = 0;
  int context_tokens = 0;
  int page_count = 0;
  int64_t weight_bytes = 0;
  int64_t kv_bytes = 0;
  uint64_t kv_pages = 0;  // CUdeviceptr of the first page, behind which lie the others; 0: they cannot be copied

  // Throws std::invalid_argument naming the field that cannot be.
  void check() const;
  [[nodiscard]] int64_t page_bytes() const noexcept { return kv_bytes / page_count; }
};

inline constexpr int kEagleFirst = 8;                // most entries of EagleProgram::first
inline constexpr int kEagleLevels[] = {16, 32, 64};  // entries
inline constexpr int kEagleSizes = sizeof(kEagleLevels) / sizeof(int);

// An EAGLE head's passes (RoundMode::kEagle), of as many pages and tokens as the model that it drafts for.
struct EagleProgram : RoundBlocks {
  void* fill = nullptr;            // CUgraphExec: up to kTreeTokens entries are made of taps, nothing is ranked
  void* first = nullptr;           // CUgraphExec: up to kEagleFirst entries, of which the last is ranked
  void* levels[kEagleSizes] = {};  // CUgraphExec: up to kEagleLevels[i] entries, of which the newest are ranked

  void check() const;
};

inline constexpr int kMaxDflashBlock = 32;
inline constexpr int kDflashContexts[] = {8, 64};  // positions

// A DFlash head's passes, of as many pages and tokens as the model that it drafts for.
struct DflashProgram : RoundBlocks {
  void* contexts[2] = {};  // CUgraphExec (kDflashContext): of up to kDflashContexts[i] positions
  void* block = nullptr;   // CUgraphExec (kDflashBlock): up to `block_tokens` entries
  void* nodes = nullptr;   // CUgraphExec (kDflashNodes): up to 8 nodes are ranked; null: there is no Markov term
  int block_tokens = 0;
  int32_t mask_token = 0;        // of the target's: what a block's entries behind the root hold
  bool anchor_predicts = false;  // the first entry predicts the token behind the root

  void check() const;
};

struct GraphProgram : RoundBlocks {
  // CUgraphExec of a round of up to kCostTokens[i] nodes; null: there is none. All give the same bits.
  void* rounds[kCostSizes] = {};
  SingleGraphs singles[kSamplers] = {};  // by Sampler; kFull's round is rounds[0], and null here
  int burst_rounds = 0;                  // 0: there are no bursts
  WideGraphs wide;
  // CUgraphExec, up to kTreeTokens prompt tokens, with the bits of `chunk`. `chunk` itself: chunks alone read prompts,
  // and where there is `last_chunk` it reads their last token.
  void* prefill = nullptr;
  // CUgraphExec, up to kChunkTokens prompt tokens (kTake): as `chunk`, and the round of the last one, which draws what
  // follows, in one pass over the weights. null: there is none.
  void* last_chunk = nullptr;
  void* medusa = nullptr;    // CUgraphExec of the Medusa heads; null: there are none
  void* redraw = nullptr;    // CUgraphExec of one draw more from a round's logits; null: there is none
  void* redraws = nullptr;   // and of up to kTreeTokens, where there is `redraw`
  uint32_t* mask = nullptr;  // [(vocabulary + 31) / 32] mapped, where there is `redraw`
  int medusa_heads = 0;      // that `medusa` runs
  int64_t medusa_bytes = 0;  // of their weights, which weight_bytes leaves out
  Reuse reuse = Reuse::kAll;
  std::string name;     // of the executor, e.g. "graph/sm_90a"
  std::string library;  // the CUDA driver's file
  // The draft model's, in the same context, of as many pages and at least as many tokens; null: there is none.
  std::shared_ptr<const GraphProgram> draft = nullptr;
  // The head that drafts from the taps that its rounds leave; null: there is none.
  std::shared_ptr<const EagleProgram> eagle = nullptr;
  std::shared_ptr<const DflashProgram> dflash = nullptr;  // likewise

  void check() const;
  // Nodes of the widest round.
  [[nodiscard]] int most_nodes() const noexcept;
  // CUgraphExec of a round of one token; null: there is none.
  [[nodiscard]] void* single(Sampler sampler, bool is_wide = false) const noexcept {
    if (sampler == Sampler::kFull) return is_wide ? wide.rounds[0] : rounds[0];
    return (is_wide ? wide.singles : singles)[static_cast<int>(sampler)].round;
  }
  [[nodiscard]] void* burst(Sampler sampler, bool is_wide = false) const noexcept {
    return (is_wide ? wide.singles : singles)[static_cast<int>(sampler)].burst;
  }
  // Whether a round's graph writes the bits to the cache that `prefill` does.
  [[nodiscard]] bool rounds_prefill() const noexcept { return reuse == Reuse::kAll; }
  // Whether no other graph reads prompts than `chunk`.
  [[nodiscard]] bool chunks_prefill() const noexcept { return chunk != nullptr && chunk == prefill; }
  // Whether such a prompt's last token is read by `last_chunk`, too.
  [[nodiscard]] bool prefill_draws() const noexcept { return chunks_prefill() && last_chunk != nullptr; }

 private:
  void check_wide() const;
};

}  // namespace ull::graph
