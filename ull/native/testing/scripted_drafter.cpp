#include "testing/scripted_drafter.h"

#include <memory>
#include <stdexcept>
#include <string>

namespace ull {

MakeDrafter scripted_drafter(ScriptedDrafter::Mode mode, std::vector<int32_t> truth, int vocabulary, uint64_t seed) {
  return [=] { return std::make_unique<ScriptedDrafter>(mode, truth, vocabulary, seed); };
}

ScriptedDrafter::Mode parse_draft_mode(std::string_view name) {
  using Mode = ScriptedDrafter::Mode;
  if (name == "right") return Mode::kRight;
  if (name == "wrong") return Mode::kWrong;
  if (name == "random") return Mode::kRandom;
  if (name == "mixed") return Mode::kMixed;
  if (name == "duplicates") return Mode::kDuplicates;
  if (name == "beyond") return Mode::kBeyond;
  throw std::invalid_argument("drafter: \"" + std::string(name) + "\" is unknown");
}

uint32_t ScriptedDrafter::random(uint32_t below) noexcept {
  return philox4x32({{drawn_++, 0, 0, 0}}, static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)).word[0] %
         below;
}

int32_t ScriptedDrafter::true_token(int position) const noexcept {
  return position < static_cast<int>(truth_.size()) ? truth_[static_cast<size_t>(position)] : -1;
}

void ScriptedDrafter::chain(int position, bool right, DraftTree& tree) noexcept {
  for (int node = 0, depth = 1; node >= 0; ++depth) {
    const int32_t truth = true_token(position + depth);
    const int32_t token = right ? truth : (truth + 1 + static_cast<int32_t>(random(2))) % vocabulary_;
    node = tree.add(node, token);
  }
}

// Random children of random nodes until nothing fits for a while.
void ScriptedDrafter::bush(int position, bool with_truth, DraftTree& tree) noexcept {
  int truth = 0;  // the deepest node of the true path
  for (int attempt = 0; attempt < 4 * kMaxTreeTokens; ++attempt) {
    if (with_truth && random(3) == 0) {
      const int next = tree.add(truth, true_token(position + tree.depth(truth) + 1));
      if (next >= 0) truth = next;
      continue;
    }
    const int parent = static_cast<int>(random(static_cast<uint32_t>(tree.count())));
    const int32_t likely = true_token(position + tree.depth(parent) + 1);
    const bool right = !with_truth && random(2) == 0;
    (void)tree.add(parent, right ? likely : static_cast<int32_t>(random(static_cast<uint32_t>(vocabulary_))));
  }
}

Status ScriptedDrafter::propose(const DraftContext& context, const TreePlan&, DraftTree& tree) noexcept {
  const int position = context.position;
  switch (mode_) {
    case Mode::kRight:
      chain(position, /*right=*/true, tree);
      break;
    case Mode::kWrong:
      chain(position, /*right=*/false, tree);
      break;
    case Mode::kRandom:
      bush(position, /*with_truth=*/false, tree);
      break;
    case Mode::kMixed:
      bush(position, /*with_truth=*/true, tree);
      break;
    case Mode::kDuplicates:
      for (int attempt = 0; attempt < 4 * kMaxTreeTokens; ++attempt) {
        const int parent = static_cast<int>(random(static_cast<uint32_t>(tree.count())));
        const int32_t truth = true_token(position + tree.depth(parent) + 1);
        (void)tree.add(parent, random(2) == 0 ? truth : 1);
        (void)tree.add(parent, 1);
      }
      break;
    case Mode::kBeyond: {
      const int32_t beyond[] = {vocabulary_, -1, INT32_MAX, INT32_MIN, vocabulary_ + 7};
      int node = 0;
      for (int depth = 1; node >= 0 && depth < kMaxTreeTokens; ++depth) {
        for (const int32_t token : beyond) (void)tree.add(node, token);
        node = tree.add(node, true_token(position + depth));
      }
      break;
    }
  }
  return Status::kOk;
}

}  // namespace ull
