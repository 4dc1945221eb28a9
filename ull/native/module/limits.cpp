// What Python must know of the core's numbers and words.
#include <utility>

#include "base/thread.h"
#include "cpu/model_shape.h"
#include "draft/medusa_tree.h"
#include "draft/past_outputs.h"
#include "engine/engine.h"
#include "engine/stops.h"
#include "grammar/grammars.h"
#include "io/control_pair.h"
#include "io/frames.h"
#include "io/transport.h"
#include "module/bindings.h"

namespace ull::module {
namespace {

constexpr std::pair<const char*, int> kLimits[] = {
    {"choice_tokens", kMaxChoiceTokens},
    {"choices", kMaxChoices},
    {"context", cpu::kMaxDimension},  // tokens
    {"core", kMaxCore},
    {"dflash_block", cpu::kMaxDflashBlock},                     // positions
    {"frame_text", static_cast<int>(kFrameText)},               // bytes
    {"grammar_bytes", static_cast<int>(grammar::kMostSource)},  // of its text
    {"logit_bias", kMaxLogitBias},
    {"logprobs", kMaxTopLogprobs},
    {"prompt_top_logprobs", kMaxPromptTopLogprobs},
    {"medusa_heads", kMaxMedusaHeads},
    {"medusa_layers", kMaxMedusaLayers},
    {"page_tokens", kPageTokens},
    {"past_outputs", PastOutputs::kMostTokens},
    {"queue_depth", kMaxQueueDepth},
    {"sessions", kMaxSessions},
    {"stop_bytes", kMaxStopBytes},
    {"stop_ids", kMaxStopIds},
    {"stops", kMaxStops},
    {"tree", kMaxTreeTokens},
    {"warning_bytes", kMaxWarningBytes},
    {"warnings", kMaxWarnings},
};

}  // namespace

void bind_limits(nb::module_& m) {
  nb::dict limits;
  for (const auto& [name, value] : kLimits) limits[name] = value;
  m.attr("LIMITS") = read_only(limits);
  nb::dict messages;
  for (const auto& [name, kind] : kIoMessages) {
    const auto letter = static_cast<char>(kind);
    messages[name] = nb::bytes(&letter, 1);
  }
  m.attr("IO_MESSAGES") = read_only(messages);
  m.attr("WIRE_VERSION") = nb::bytes(kWireVersion.data(), kWireVersion.size());
}

}  // namespace ull::module
