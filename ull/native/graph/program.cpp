#include "graph/program.h"

#include <stdexcept>

namespace ull::graph {
namespace {

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

template <typename Block>
void require_block(const Block* block, const char* field) {
  const auto address = reinterpret_cast<uintptr_t>(block);
  if (address == 0 || address % alignof(Block) != 0) {
    throw std::invalid_argument(std::string(field) + ": must be the address of a block aligned to " +
                                std::to_string(alignof(Block)) + " bytes");
  }
}

}  // namespace

void RoundBlocks::check() const {
  require(stream != nullptr, "stream: must be the handle of a stream");
  require(context != nullptr, "context: must be the handle of a context");
  require_block(requests, "requests");
  require_block(results, "results");
  require_block(control, "control");
  require_block(pages, "pages");
  require_block(text, "text");
  if (chunk != nullptr) require_block(chunks, "chunks");
  require(vocabulary >= 1, "vocabulary: must be positive");
  require(context_tokens >= 2, "context_tokens: must be at least 2");
  require(page_count >= 1, "page_count: must be positive");
  require(weight_bytes >= 0, "weight_bytes: must not be negative");
  require(kv_bytes >= 0, "kv_bytes: must not be negative");
  require(kv_pages == 0 || (kv_bytes > 0 && kv_bytes % page_count == 0), "kv_bytes: must be a multiple of page_count");
}

void EagleProgram::check() const {
  require(fill != nullptr, "fill: must be the handle of a graph");
  require(first != nullptr, "first: must be the handle of a graph");
  for (const void* level : levels) require(level != nullptr, "levels: must be the handles of graphs");
  RoundBlocks::check();
}

void DflashProgram::check() const {
  for (const void* context_graph : contexts) {
    require(context_graph != nullptr, "contexts: must be the handles of graphs");
  }
  require(block != nullptr, "block: must be the handle of a graph");
  require(block_tokens >= 2 && block_tokens <= kMaxDflashBlock, "block_tokens: must be 2 to 32");
  require(mask_token >= 0, "mask_token: must be a token");
  RoundBlocks::check();
}

void GraphProgram::check() const {
  require(rounds[0] != nullptr, "graphs: a round of one token is missing");
  require(singles[0].round == nullptr, "singles: the full sampler's is the round of one token");
  bool bursts = false;
  for (int i = 0; i < kSamplers; ++i) {
    bursts = bursts || singles[i].burst != nullptr;
    require(singles[i].burst == nullptr || single(static_cast<Sampler>(i)) != nullptr,
            "bursts: there is no single round of that sampler");
  }
  // Beside the rounds of a burst stands the one that they continue.
  require(bursts ? burst_rounds >= 2 && burst_rounds < gpu::kRoundSlots : burst_rounds == 0,
          "burst_rounds: must be 2 or 3 if there are bursts");
  check_wide();
  require(prefill != nullptr, "prefill: must be the handle of a graph");
  require(!chunks_prefill() || !rounds_prefill(),
          "reuse: rounds have other bits than a chunk that alone reads prompts");
  require(last_chunk == nullptr || chunks_prefill() || (chunk != nullptr && rounds_prefill()),
          "last_chunk: there is no chunk, or rounds have other bits and read prompts too");
  RoundBlocks::check();
  require((redraw == nullptr) == (redraws == nullptr), "redraws: must be the handles of two graphs, or none");
  if (redraw != nullptr) require_block(mask, "mask");
  require((medusa != nullptr) == (medusa_heads > 0), "medusa: must be the handle of a graph if there are heads");
  require(medusa_heads >= 0 && medusa_heads <= kMaxMedusaHeads, "medusa_heads: must be 0 to 12");
  require(medusa_bytes >= 0, "medusa_bytes: must not be negative");
  require(!name.empty(), "name: must not be empty");
  const auto beside = [&](const RoundBlocks& own) {
    require(own.context == context, "context: must be the target's");
    require(own.context_tokens >= context_tokens, "context_tokens: must not be below the target's");
    require(own.page_count == page_count, "page_count: must be the target's");
    require(own.requests != requests && own.results != results, "requests: must not be the target's");
  };
  const auto check_part = [&](const char* field, const auto& part) {
    if (part == nullptr) return;
    try {
      part->check();
      beside(*part);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(field) + ": " + error.what());
    }
  };
  check_part("draft", draft);
  check_part("eagle", eagle);
  check_part("dflash", dflash);
  // What its passes read, the rounds leave on theirs, some of it after they have answered.
  require(eagle == nullptr || eagle->stream == stream, "eagle: stream: must be the target's");
  require(dflash == nullptr || dflash->stream == stream, "dflash: stream: must be the target's");
  require(dflash == nullptr || dflash->mask_token < vocabulary, "dflash: mask_token: must be a token");
  require(draft == nullptr || (draft->medusa == nullptr && draft->draft == nullptr && draft->eagle == nullptr &&
                               draft->dflash == nullptr),
          "draft: takes none of its own");
  require(draft == nullptr || !draft->chunks_prefill(), "draft: chunk: must not be its `prefill`");
}

// Whoever may take a round of one token from it may take any.
void GraphProgram::check_wide() const {
  require(wide.from >= 0, "wide: from: must not be negative");
  for (int i = 0; i < kCostSizes; ++i) {
    require(wide.rounds[i] == nullptr || (wide.from > 0 && rounds[i] != nullptr),
            "wide: graphs: there is no such round without it, or no position where it is meant");
  }
  for (const Sampler sampler : {Sampler::kFull, Sampler::kPlain, Sampler::kScan}) {
    const bool same = (single(sampler) == nullptr) == (single(sampler, true) == nullptr) &&
                      (burst(sampler) == nullptr) == (burst(sampler, true) == nullptr);
    require(wide.from == 0 || same, "wide: must have the rounds of one token that there are without it");
  }
}

int GraphProgram::most_nodes() const noexcept {
  int most = 0;
  for (int i = 0; i < kCostSizes; ++i) {
    if (rounds[i] != nullptr) most = kCostTokens[i];
  }
  return most;
}

}  // namespace ull::graph
