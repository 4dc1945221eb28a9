#include "testing/replayed_acceptance.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace ull {
namespace {

void check(const ReplayedAcceptance::Tables& tables) {
  if (tables.empty()) throw std::invalid_argument("replayed_acceptance: there is no table");
  for (const auto& table : tables) {
    if (table.empty() || table.size() >= kMaxTreeTokens || table.size() != tables[0].size()) {
      throw std::invalid_argument("replayed_acceptance: tables must have one length of 1 to " +
                                  std::to_string(kMaxTreeTokens - 1));
    }
    for (const float chance : table) {
      if (!(chance >= 0.0F && chance <= 1.0F)) {
        throw std::invalid_argument("replayed_acceptance: a chance must be 0 to 1");
      }
    }
  }
}

}  // namespace

ReplayedAcceptance::ReplayedAcceptance(std::unique_ptr<Drafter> head, Tables tables, int vocabulary, int context)
    : head_(std::move(head)),
      tables_((check(tables), std::move(tables))),
      vocabulary_(vocabulary),
      text_(static_cast<size_t>(context), kUnknown) {}

int ReplayedAcceptance::max_depth() const noexcept {
  return std::min(head_->max_depth(), static_cast<int>(tables_[0].size()));
}

int32_t ReplayedAcceptance::token_at(int32_t position) const noexcept {
  return position >= 0 && position < static_cast<int32_t>(text_.size()) ? text_[static_cast<size_t>(position)]
                                                                        : kUnknown;
}

float ReplayedAcceptance::uniform() noexcept {
  return static_cast<float>(philox4x32({{drawn_++, 0, 0, 0}}, 0, 0).word[0] >> 8) * 0x1.0p-24F;
}

// The root is the prompt's, of which nothing is known, or the token that was the answer's there.
int ReplayedAcceptance::confidence(const DraftContext& context) noexcept {
  const int32_t root = token_at(context.position);
  const bool known = context.history != nullptr && token_at(context.position + 1) != kUnknown &&
                     (root == kUnknown || root == context.history[context.position]);
  return known ? head_->confidence(context) : -1;
}

Status ReplayedAcceptance::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (const Status status = head_->propose(context, plan, tree); status != Status::kOk) return status;
  const auto& table = tables_[context.sampling->seed % tables_.size()];
  const int depth = std::min(tree.deepest(), max_depth());
  tree.cut(1);
  bool right = true;
  for (int node = 0, at = 1; at <= depth && node >= 0; ++at) {
    const int32_t truth = token_at(context.position + at);
    if (truth == kUnknown) break;
    const float chance = table[static_cast<size_t>(at - 1)];
    right = right && uniform() < chance;
    node = tree.add(node, right ? truth : (truth + 1) % vocabulary_, head_->foresees() ? chance : DraftTree::kUnknown);
  }
  return Status::kOk;
}

void ReplayedAcceptance::observe(const DraftOutcome& outcome) noexcept {
  head_->observe(outcome);
  for (int32_t i = 0; i < outcome.count; ++i) {
    const int32_t position = outcome.position + 1 + i;
    if (position < static_cast<int32_t>(text_.size())) text_[static_cast<size_t>(position)] = outcome.emitted[i];
  }
}

ReplaceDrafter replayed_acceptance(std::map<DrafterKind, ReplayedAcceptance::Tables> tables, int vocabulary,
                                   int context) {
  for (const auto& [kind, of_kind] : tables) check(of_kind);
  return [=, tables = std::move(tables)](std::unique_ptr<Drafter> drafter) -> std::unique_ptr<Drafter> {
    const auto found = tables.find(drafter->kind());
    if (found == tables.end()) return drafter;
    return std::make_unique<ReplayedAcceptance>(std::move(drafter), found->second, vocabulary, context);
  };
}

}  // namespace ull
