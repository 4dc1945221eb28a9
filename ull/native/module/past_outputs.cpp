// What the suffix drafter remembers of past outputs.
#include "draft/past_outputs.h"

#include "module/bindings.h"

namespace ull::module {

void bind_past_outputs(nb::module_& m) {
  nb::class_<PastOutputs>(m, "PastOutputs",
                          "The newest tokens of outputs that have ended, -1 between two: what the suffix drafter of an "
                          "executor drafts from, and adds to.")
      .def(
          "__init__",
          [](PastOutputs* self, int tokens) {
            if (tokens < 1 || tokens > PastOutputs::kMostTokens) {
              throw std::invalid_argument("tokens: must be 1 to " + std::to_string(PastOutputs::kMostTokens));
            }
            new (self) PastOutputs(tokens);
          },
          "tokens"_a, "`tokens`: how many are kept; the oldest are forgotten first.")
      .def(
          "append",
          [](PastOutputs& self, const Int32Array& tokens) {
            for (const int32_t token : span_of(tokens)) self.append(token);
          },
          "tokens"_a, "Only before the engine starts. A negative id is a boundary.")
      .def(
          "copy",
          [](const PastOutputs& self) {
            std::vector<int32_t> tokens = self.copy();
            const size_t count = tokens.size();
            return numpy_array(std::move(tokens), count);
          },
          "The tokens, the oldest first -> [at most `tokens`] int32. Any thread, at any time.")
      .def_prop_ro("appended", &PastOutputs::appended, "Tokens that were ever added, boundaries included.");
}

}  // namespace ull::module
