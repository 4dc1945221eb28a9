// The EAGLE head against a naive evaluation, the trees that its drafter proposes against chains computed from scratch,
// and what is refused.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/gumbel.h"
#include "check.h"
#include "cpu/eagle.h"
#include "eagle_file.h"

using namespace ull;
using namespace ull::cpu;
using TapNorm = EagleSpec::TapNorm;

namespace {

const std::atomic<bool> kNever{false};
const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};
constexpr int kRing = 300;

ModelOptions options_for(const ModelSpec& spec, int threads = 1, int chunk = 64) {
  ModelOptions options;
  options.threads = threads;
  options.chunk = chunk;
  options.taps = tapped_layers(spec);
  options.widest = widest_columns(*spec.eagle, spec.hidden);
  return options;
}

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5) % 80);
  return tokens;
}

// What a target might leave at a position: [layers of the ring][hidden].
std::vector<float> some_taps(const TapRing& ring, int position) {
  std::mt19937 random(static_cast<unsigned>(position) + 5U);
  std::normal_distribution<float> normal;
  std::vector<float> row(ring.layers().size() * 64);
  for (float& value : row) value = normal(random);
  return row;
}

// A target, its head, and a ring with the taps of `tokens` but the last, from position `first` on.
class Rig {
 public:
  explicit Rig(const check::EagleFile& file, int threads = 1, int chunk = 64, bool coupled = true)
      : model(file.model.spec, options_for(file.model.spec, threads, chunk)),
        ring(tapped_layers(file.model.spec), 64, kRing),
        drafter(model, ring, coupled) {}

  void fill(const std::vector<int32_t>& tokens, int first = 0) {
    for (int position = first; position + 1 < static_cast<int>(tokens.size()); ++position) {
      ring.put(position, tokens[static_cast<size_t>(position)], kPages[position / kPageTokens],
               some_taps(ring, position).data());
    }
  }

  Model model;
  TapRing ring;
  EagleDrafter drafter;
};

TreePlan plan_of(int count, int depth) {
  TreePlan plan;
  plan.count = count;
  plan.depth = depth;
  return plan;
}

// What is proposed behind `history`, as ways from the root.
using Way = std::vector<int32_t>;
std::vector<Way> propose(Rig& rig, const std::vector<int32_t>& history, Drafted& drafted, const Sampling& sampling,
                         const TreePlan& plan, int prompt = 40) {
  TokenCounts counts(80, 512);
  const int size = static_cast<int>(history.size());
  counts.follow(history.data(), size, std::min(prompt, size));
  const int distinct = counts.size();
  const DraftContext context{.history = history.data(),
                             .position = size - 1,
                             .pages = kPages,
                             .sampling = &sampling,
                             .drafted = &drafted,
                             .hidden = nullptr,
                             .abort = &kNever,
                             .counts = sampling.penalises() ? &counts : nullptr};
  DraftTree tree;
  tree.reset(history.back(), 80, kMaxTreeTokens, kMaxTreeTokens);
  CHECK(rig.drafter.propose(context, plan, tree) == Status::kOk);
  CHECK_EQ(counts.size(), distinct);  // what it added is gone
  std::vector<Way> ways(1);
  for (int node = 1; node < tree.count(); ++node) {
    ways.push_back(ways[static_cast<size_t>(tree.parent(node))]);
    ways.back().push_back(tree.token(node));
  }
  ways.erase(ways.begin());
  return ways;
}

// The same by the definition: a best-first search, where what follows each text comes from a head that reads all of it
// from scratch as a chain.
class Scratch {
 public:
  Scratch(const check::EagleFile& file, const std::vector<int32_t>& history, int from, const Sampling& sampling,
          int prompt = 40)
      : file_(file),
        history_(history),
        from_(from),
        sampling_(sampling),
        prompt_(prompt),
        rig_(std::make_unique<Rig>(file)),
        sampler_(rig_->model.kernels(), 80) {
    rig_->fill(history);
  }

  std::vector<Way> best(int nodes, int depth) {
    struct Known {
      float reach;
      int order;
      Way way;
      bool operator<(const Known& other) const {
        return reach < other.reach || (!(other.reach < reach) && order > other.order);
      }
    };
    std::priority_queue<Known> known;
    std::vector<Way> out;
    int order = 0;
    const auto expand = [&](const Way& way, float reach) {
      const auto found = candidates(way);
      float total = 0.0F;
      for (const auto& [token, score] : found) total += std::exp(score - found.front().second);
      for (const auto& [token, score] : found) {
        Way next = way;
        next.push_back(token);
        known.push({reach * (std::exp(score - found.front().second) / total), order++, next});
      }
    };
    expand({}, 1.0F);
    while (static_cast<int>(out.size()) + 1 < nodes && !known.empty()) {
      const Known top = known.top();
      known.pop();
      out.push_back(top.way);
      if (static_cast<int>(top.way.size()) < depth) expand(top.way, top.reach);
    }
    return out;
  }

 private:
  // The likeliest ten behind the history and `way`, best first, with their scores.
  std::vector<std::pair<int32_t, float>> candidates(const Way& way) {
    const int root = static_cast<int>(history_.size()) - 1;
    EagleHead head(rig_->model);
    for (int position = from_; position < root; ++position) {
      head.read_taps(rig_->ring, position, 1);
      head.run({.tokens = &history_[static_cast<size_t>(position) + 1],
                .count = 1,
                .start = position,
                .from = from_,
                .pages = kPages});
    }
    for (size_t i = 0; i < way.size(); ++i) {
      std::vector<float> state(static_cast<size_t>(file_.spec->model.hidden));
      head.output(0, state.data());
      std::copy(state.begin(), state.end(), head.state(0));
      head.run({.tokens = &way[i], .count = 1, .start = root + static_cast<int>(i), .from = from_, .pages = kPages});
    }
    std::vector<float> own(static_cast<size_t>(file_.spec->model.vocabulary)), logits(80, -1e30F);
    head.project(0, 1, own.data());
    for (int i = 0; i < file_.spec->model.vocabulary; ++i) {
      logits[static_cast<size_t>(file_.name(i))] = own[static_cast<size_t>(i)];
    }
    TokenCounts counts(80, 512);
    std::vector<int32_t> text = history_;
    text.insert(text.end(), way.begin(), way.end());
    counts.follow(text.data(), static_cast<int>(text.size()), std::min(prompt_, root + 1));
    const int position = static_cast<int>(text.size());
    const TokenCounts* used = sampling_.penalises() ? &counts : nullptr;
    int32_t tokens[10];
    const int count = sampler_.rank(logits.data(), position, sampling_, 10, tokens, used);
    std::vector<std::pair<int32_t, float>> found;
    for (int i = 0; i < count; ++i) {
      if (logits[static_cast<size_t>(tokens[i])] < -1e29F) continue;
      float score = Sampler::adjusted(logits[static_cast<size_t>(tokens[i])], tokens[i], sampling_, used);
      if (sampling_.temperature > 0.0F) {
        score = score / sampling_.temperature + gumbel(sampling_.seed, position, tokens[i]);
      }
      if (!found.empty()) score = std::min(score, found.back().second);  // behind what the filters prefer
      found.emplace_back(tokens[i], score);
    }
    return found;
  }

  const check::EagleFile& file_;
  const std::vector<int32_t> history_;
  const int from_;
  const Sampling sampling_;
  const int prompt_;
  std::unique_ptr<Rig> rig_;
  Sampler sampler_;
};

Sampling sampled(float temperature) {
  Sampling sampling;
  sampling.temperature = temperature;
  sampling.seed = 99;
  return sampling;
}

// Every flag in two or three ways, in pairs rather than in all combinations where a flag changes what is loaded alone.
std::vector<check::EagleOptions> all_options() {
  std::vector<check::EagleOptions> all;
  for (int flags = 0; flags < 48; ++flags) {
    check::EagleOptions options;
    options.norm_before_residual = (flags & 1) != 0;
    options.norm_output = (flags & 2) != 0;
    options.own_embedding = (flags & 4) != 0;
    options.mapped = (flags & 8) != 0;
    options.tap_norm = flags < 16 ? TapNorm::kNone : flags < 32 ? TapNorm::kEach : TapNorm::kAll;
    options.own_shape = options.own_embedding && flags % 3 != 0;
    options.qk_norm = flags % 5 == 1;
    options.window = flags % 7 == 2 ? 6 : 0;
    if (flags % 4 == 3) options.taps = {3, 1};
    all.push_back(options);
  }
  return all;
}

void check_close(const std::vector<double>& expected, const float* actual) {
  double largest = 0.0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(std::abs(static_cast<double>(actual[i]) - expected[i]) < 3e-5 * largest);
  }
}

}  // namespace

TEST(the_head_agrees_with_a_naive_evaluation_whatever_its_flags) {
  int number = 0;
  for (const check::EagleOptions& options : all_options()) {
    const check::EagleFile file(options);
    Rig rig(file, 1 + number % 3, number % 4 == 0 ? 5 : 64);
    ++number;
    const std::vector<int32_t> tokens = some_tokens(80);
    rig.fill(tokens);
    check::EagleReference reference(file, [&](int32_t token) {
      std::vector<float> row(64);
      rig.model.weights().embed(token, row.data());
      return check::Row(row.begin(), row.end());
    });
    EagleHead head(rig.model);
    const int width = file.spec->model.hidden, vocabulary = file.spec->model.vocabulary;
    std::vector<float> logits(static_cast<size_t>(5 * vocabulary)), output(static_cast<size_t>(width));
    const auto check_entry = [&](int row, int entry) {
      head.output(row, output.data());
      check_close(reference.output(entry), output.data());
      check_close(reference.logits(entry), logits.data() + static_cast<size_t>(row * vocabulary));
    };
    // A chain that crosses a page, in passes of up to five entries; nothing before position 60 is there.
    const int from = 60;
    std::vector<int> seen;
    for (int start = from; start < 72;) {
      const int count = std::min(1 + start % 5, 72 - start);
      head.read_taps(rig.ring, start, count);
      head.run({.tokens = tokens.data() + start + 1, .count = count, .start = start, .from = from, .pages = kPages});
      head.project(0, count, logits.data());
      for (int row = 0; row < count; ++row) {
        check::Row taps;
        for (const int layer : options.taps) {
          const float* state = rig.ring.state(start + row, layer);
          taps.insert(taps.end(), state, state + 64);
        }
        const int entry =
            reference.add(tokens[static_cast<size_t>(start + row + 1)], reference.of_taps(taps), start + row, seen);
        seen.push_back(entry);
        check_entry(row, entry);
      }
      start += count;
    }
    // A tree below entry 71: three nodes, then two below the second and one below the third.
    head.cache().copy_token(kPages[71 / 64], 71 % 64, head.cache().tree_page(), 0);
    const uint8_t parents[] = {0, 0, 0, 0, 2, 2, 3};
    const int32_t nodes[] = {0, 7, 31, 60, 7, 8, 79};
    int entries[7] = {seen.back()};
    std::vector<float> outputs(static_cast<size_t>(7 * width));
    const check::Row root = reference.output(seen.back());
    std::copy(root.begin(), root.end(), outputs.begin());
    for (const auto& [first, count] : {std::pair{1, 3}, std::pair{4, 3}}) {
      TreePaths paths;
      paths.assign(parents, first + count);
      for (int i = 0; i < count; ++i) {
        std::copy_n(outputs.data() + static_cast<size_t>(parents[first + i] * width), width, head.state(i));
      }
      head.run({.tokens = nodes + first,
                .count = count,
                .start = 71,
                .from = from,
                .pages = kPages,
                .tree = &paths,
                .first_node = first});
      head.project(0, count, logits.data());
      for (int i = 0; i < count; ++i) {
        const int node = first + i;
        std::vector<int> way = seen;
        if (parents[node] > 0) way.push_back(entries[parents[node]]);
        entries[node] =
            reference.add(nodes[node], reference.output(entries[parents[node]]), 71 + paths.depths[node], way);
        check_entry(i, entries[node]);
        head.output(i, outputs.data() + static_cast<size_t>(node * width));
      }
    }
  }
}

TEST(a_tree_is_the_best_of_chains_computed_from_scratch) {
  const LogitBias bias[] = {{3, 2.0F}, {17, -1.0F}};
  const std::vector<check::EagleOptions> all = all_options();
  int number = 0;
  for (const size_t chosen : {size_t{0}, size_t{7}, size_t{15}, size_t{18}, size_t{29}, size_t{46}}) {
    const check::EagleFile file(all[chosen]);
    for (int variant = 0; variant < 7; ++variant) {
      Sampling sampling = sampled(variant == 0 || variant == 5 ? 0.0F : 0.2F * static_cast<float>(variant));
      if (variant == 2) sampling.top_k = 5;
      if (variant == 3) sampling.top_p = 0.8F;
      if (variant == 3) sampling.min_p = 0.05F;
      if (variant == 4) sampling.bias = bias, sampling.bias_count = 2;
      if (variant >= 5) sampling.repetition_penalty = 1.5F, sampling.frequency_penalty = 0.8F;
      if (variant == 6) sampling.presence_penalty = -1.0F;
      const std::vector<int32_t> history = some_tokens(62 + number % 5);
      const int first = number % 3 == 0 ? 0 : 50;  // what lies before it, the target has not left
      Rig rig(file, 1 + number % 2);
      rig.fill(history, first);
      ++number;
      Drafted drafted;
      const auto ways = propose(rig, history, drafted, sampling, plan_of(7, 4));
      CHECK(ways == Scratch(file, history, first, sampling).best(7, 4));
      CHECK_EQ(drafted.eagle.from, first);
      CHECK_EQ(drafted.eagle.through, static_cast<int32_t>(history.size()) - 1);
      CHECK(propose(rig, history, drafted, sampling, plan_of(7, 4)) == ways);  // with all entries there already
    }
  }
}

TEST(a_cache_that_grew_bit_by_bit_proposes_what_one_from_scratch_does) {
  const check::EagleFile file;
  for (const int chunk : {16, 64}) {
    Rig rig(file, 1, chunk);
    const std::vector<int32_t> tokens = some_tokens(200);
    Drafted drafted;
    for (int start = 0; start < 120;) {
      const int count = std::min(chunk, 120 - start);
      for (int p = start; p < start + count; ++p) {
        rig.ring.put(p, tokens[static_cast<size_t>(p)], kPages[p / kPageTokens], some_taps(rig.ring, p).data());
      }
      CHECK(rig.drafter.prefill({.tokens = tokens.data() + start,
                                 .count = count,
                                 .start = start,
                                 .pages = kPages,
                                 .drafted = &drafted,
                                 .speculation = DrafterKind::kEagle,
                                 .history = tokens.data()},
                                kNever) == Status::kOk);
      start += count;
      CHECK_EQ(drafted.eagle.through, start - 1);  // the token behind the last is not known yet
    }
    for (const int length : {122, 123, 130, 140, 199}) {
      const std::vector<int32_t> history(tokens.begin(), tokens.begin() + length);
      rig.fill(history, 120);
      Drafted fresh;
      Rig alone(file);
      alone.fill(history);
      CHECK(propose(rig, history, drafted, sampled(0.7F), plan_of(20, 5)) ==
            propose(alone, history, fresh, sampled(0.7F), plan_of(20, 5)));
      CHECK_EQ(drafted.eagle.through, length - 1);
    }
    // Rolled back into text that went another way.
    std::vector<int32_t> other(tokens.begin(), tokens.begin() + 150);
    for (size_t i = 128; i < other.size(); ++i) other[i] = (other[i] + 1) % 80;
    drafted.cut(128);
    CHECK_EQ(drafted.eagle.through, 127);
    rig.fill(other, 128);
    Drafted fresh;
    Rig alone(file);
    alone.fill(other);
    CHECK(propose(rig, other, drafted, sampled(0.0F), plan_of(20, 5)) ==
          propose(alone, other, fresh, sampled(0.0F), plan_of(20, 5)));
  }
}

TEST(what_waits_is_read_before_the_ring_forgets_it) {
  const check::EagleFile file;
  Rig rig(file);
  const std::vector<int32_t> history = some_tokens(200);
  rig.fill(history);
  Drafted drafted;
  const Sampling greedy;
  const auto keep_up = [&](int position) {
    const DraftContext context{.history = history.data(),
                               .position = position,
                               .pages = kPages,
                               .sampling = &greedy,
                               .drafted = &drafted,
                               .hidden = nullptr,
                               .abort = &kNever};
    CHECK(rig.drafter.keep_up(context) == Status::kOk);
  };
  keep_up(40);
  CHECK_EQ(drafted.eagle.through, 0);
  keep_up(70);
  CHECK_EQ(drafted.eagle.through, 70);
  keep_up(199);
  CHECK_EQ(drafted.eagle.through, 199);
}

TEST(without_the_root_s_tap_there_is_nothing_to_propose) {
  const check::EagleFile file;
  Rig rig(file);
  const std::vector<int32_t> history = some_tokens(50);
  rig.fill(history);
  Drafted drafted;
  const Sampling greedy;
  const auto at = [&](const std::vector<int32_t>& text, Drafted* where) {
    return DraftContext{.history = text.data(),
                        .position = static_cast<int32_t>(text.size()) - 1,
                        .pages = kPages,
                        .sampling = &greedy,
                        .drafted = where,
                        .hidden = nullptr,
                        .abort = &kNever};
  };
  CHECK_EQ(rig.drafter.confidence(at(history, &drafted)), 0);
  CHECK_EQ(rig.drafter.confidence(at(history, nullptr)), -1);
  CHECK_EQ(rig.drafter.confidence(at({5}, &drafted)), -1);
  std::vector<int32_t> other = history;
  other[48] = (other[48] + 1) % 80;  // the token before the root is another one
  CHECK_EQ(rig.drafter.confidence(at(other, &drafted)), -1);
  CHECK(propose(rig, other, drafted, greedy, plan_of(8, 3)).empty());
  drafted.eagle = {0, 49};  // its entry is there, made by someone else
  CHECK(propose(rig, other, drafted, greedy, plan_of(8, 3)).empty());
  CHECK(!propose(rig, history, drafted, greedy, plan_of(8, 3)).empty());
}

TEST(an_abort_changes_nothing_that_counts) {
  const check::EagleFile file;
  Rig rig(file, 1, 16);
  const std::vector<int32_t> history = some_tokens(60);
  rig.fill(history);
  const std::atomic<bool> aborted{true};
  Sampling sampling = sampled(0.5F);
  sampling.frequency_penalty = 0.5F;
  TokenCounts counts(80, 512);
  counts.follow(history.data(), 60, 20);
  const int distinct = counts.size();
  Drafted drafted;
  drafted.eagle = {0, 10};
  const DraftContext context{.history = history.data(),
                             .position = 59,
                             .pages = kPages,
                             .sampling = &sampling,
                             .drafted = &drafted,
                             .hidden = nullptr,
                             .abort = &aborted,
                             .counts = &counts};
  DraftTree tree;
  tree.reset(history.back(), 80, 64, 63);
  CHECK(rig.drafter.propose(context, plan_of(8, 4), tree) == Status::kAborted);
  CHECK_EQ(tree.count(), 1);
  CHECK_EQ(drafted.eagle.through, 10);
  CHECK_EQ(counts.size(), distinct);
  CHECK(rig.drafter.prefill({.tokens = history.data() + 10,
                             .count = 16,
                             .start = 10,
                             .pages = kPages,
                             .drafted = &drafted,
                             .speculation = DrafterKind::kAuto,
                             .history = history.data()},
                            aborted) == Status::kAborted);
  CHECK_EQ(drafted.eagle.through, 10);
}

TEST(uncoupled_drafts_do_not_look_at_the_noise) {
  const check::EagleFile file;
  const std::vector<int32_t> history = some_tokens(40);
  Rig uncoupled(file, 1, 64, /*coupled=*/false), coupled(file);
  uncoupled.fill(history);
  coupled.fill(history);
  Drafted a, b, c, d;
  const auto greedy = propose(coupled, history, a, sampled(0.0F), plan_of(12, 3));
  CHECK(propose(uncoupled, history, b, sampled(1.2F), plan_of(12, 3)) == greedy);
  CHECK(propose(coupled, history, c, sampled(1.2F), plan_of(12, 3)) != greedy);
}

TEST(depth_and_size_are_the_plan_s_and_the_context_s) {
  const check::EagleFile file;
  Rig rig(file);
  for (const int length : {60, 505, 510, 511, 512}) {
    const std::vector<int32_t> history = some_tokens(length);
    rig.fill(history, std::max(0, length - 200));
    Drafted drafted;
    for (const int depth : {1, 3, 8, 20}) {
      const auto ways = propose(rig, history, drafted, sampled(0.3F), plan_of(64, depth));
      size_t deepest = 0;
      for (const Way& way : ways) deepest = std::max(deepest, way.size());
      CHECK(deepest <= static_cast<size_t>(std::min({depth, 8, 512 - length})));
      CHECK(length > 504 || ways.size() == (depth == 1 ? 10 : 63));
    }
    CHECK(propose(rig, history, drafted, sampled(0.3F), plan_of(1, 0)).empty());
  }
}

TEST(a_copied_page_has_the_head_s_entries_too) {
  const check::EagleFile file;
  Rig rig(file), copied(file);
  const std::vector<int32_t> history = some_tokens(100);
  for (Rig* each : {&rig, &copied}) each->fill(history);
  Drafted drafted, other;
  const auto expected = propose(rig, history, drafted, sampled(0.0F), plan_of(12, 4));
  (void)propose(copied, history, other, sampled(0.0F), plan_of(12, 4));
  // The first page moves to page 2 of the pool, and something else comes to stand where it was.
  copied.drafter.copy_page({.from_page = kPages[0], .to_page = 2, .tokens = 64});
  std::vector<int32_t> noise = some_tokens(64);
  std::reverse(noise.begin(), noise.end());
  copied.fill(noise);
  Drafted scribbled;
  (void)propose(copied, noise, scribbled, sampled(0.0F), plan_of(4, 2));
  const int32_t pages[] = {2, kPages[1]};
  for (int p = 0; p < 99; ++p) {
    copied.ring.put(p, history[static_cast<size_t>(p)], pages[p / kPageTokens], some_taps(copied.ring, p).data());
  }
  const Sampling greedy;
  const DraftContext context{.history = history.data(),
                             .position = 99,
                             .pages = pages,
                             .sampling = &greedy,
                             .drafted = &other,
                             .hidden = nullptr,
                             .abort = &kNever};
  DraftTree tree;
  tree.reset(history.back(), 80, 64, 63);
  CHECK(copied.drafter.propose(context, plan_of(12, 4), tree) == Status::kOk);
  REQUIRE(tree.count() == static_cast<int>(expected.size()) + 1);
  for (int node = 1; node < tree.count(); ++node) {
    CHECK_EQ(tree.token(node), expected[static_cast<size_t>(node) - 1].back());
  }
}

TEST(costs_are_measured) {
  const check::EagleFile file;
  Rig rig(file, 2);
  CHECK_EQ(rig.drafter.width(), 8);
  rig.drafter.prepare();
  CHECK(rig.drafter.width() >= 1 && rig.drafter.width() <= 8);
  CHECK(rig.drafter.cost_ns(1) > 0);
  CHECK_EQ(rig.drafter.cost_ns(0), 0);
  for (int depth = 2; depth <= 8; ++depth) CHECK(rig.drafter.cost_ns(depth) > rig.drafter.cost_ns(depth - 1));
  CHECK_EQ(rig.drafter.cost_ns(20), rig.drafter.cost_ns(8));
  CHECK(rig.drafter.weight_bytes() > 4 * 64 * 3 * 64);
  CHECK(rig.drafter.kv_bytes() > 0);
  CHECK(rig.drafter.branches());
  CHECK_EQ(rig.drafter.max_depth(), 8);
  CHECK_EQ(rig.drafter.max_rank(), 10);
}

TEST(bad_heads_are_refused_by_name) {
  const auto refusal = [](const check::EagleOptions& options, auto change) -> std::string {
    const check::EagleFile file(options);
    ModelSpec spec = file.model.spec;
    auto eagle = std::make_shared<EagleSpec>(*file.spec);
    change(*eagle);
    spec.eagle = eagle;
    try {
      validate(spec);
      Model model(spec, options_for(spec));
      const TapRing ring(tapped_layers(spec), 64, kRing);
      const EagleDrafter drafter(model, ring);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  };
  const check::EagleOptions plain, own{.own_embedding = true, .mapped = true, .own_shape = true};
  CHECK_EQ(refusal(plain, [](EagleSpec&) {}), "accepted");
  CHECK_EQ(refusal(own, [](EagleSpec&) {}), "accepted");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.model.head_dim = 15; }),
           "eagle.head_dim: must be even, 2 to 1024");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.model.layers = 2, spec.model.windows = {0, 0}; }),
           "eagle.layers: must be 1");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.model.kv_format = Format::kF8; }),
           "eagle.kv_dtype: must be bf16 or f32");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.model.context = 511; }),
           "eagle.context: must not be shorter than the target's");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.taps = {}; }),
           "eagle.taps: must name 1 layer or more, of 2^24 values together");
  for (const int layer : {-1, 4}) {
    CHECK_EQ(refusal(plain, [&](EagleSpec& spec) { spec.taps = {0, layer, 1}; }),
             "eagle.taps: must be 0 to the target's number of layers");
  }
  CHECK_EQ(refusal(own, [](EagleSpec& spec) { spec.own_embedding = false; }),
           "eagle.own_embedding: must be true where eagle.hidden is not the target's hidden");
  CHECK_EQ(refusal(own, [](EagleSpec& spec) { spec.mapped = false; }),
           "eagle.mapped: must be true where eagle.vocabulary is not the target's");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.model.draft = std::make_shared<ModelSpec>(); }),
           "eagle: must not have drafters of its own");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.model.tensors.erase("fc.weight"); }),
           "eagle: tensor fc.weight: missing");
  CHECK_EQ(refusal(plain, [](EagleSpec& spec) { spec.taps = {0, 1}; }),
           "eagle: tensor fc.weight: shape [2, 192, 32], expected [2, 128, 32]");
  const std::string message =
      refusal(own, [](EagleSpec& spec) { spec.model.tensors["d2t"] = spec.model.tensors["norm"]; });
  CHECK(message.starts_with("eagle: tensor d2t: "));
  CHECK(message.ends_with(" at 0 is not a token of the target, which has 80"));
}
