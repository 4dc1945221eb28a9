// A DFlash head against a plain evaluation, for every kind of head, and what it makes of bad specs and tensors.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dflash.h"
#include "dflash_file.h"

using namespace ull;
using namespace ull::cpu;
using check::DflashFile;
using check::DflashShape;
using check::Vector;

namespace {

const std::atomic<bool> kNever{false};
const int32_t kPages[] = {5, 2, 7, 0, 4, 1, 3, 6};
constexpr int kPositions = 150;

ModelOptions options(int threads, int chunk = 64) {
  ModelOptions result;
  result.threads = threads;
  result.chunk = chunk;
  return result;
}

// A ring with random taps of positions [0, kPositions), and the same in the order of the head's taps.
struct Taps {
  explicit Taps(const DflashSpec& head) : ring({0, 2, 3}, 64, 2 * kPositions) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int p = 0; p < kPositions; ++p) {
      float row[3 * 64];
      for (float& value : row) value = normal(random);
      ring.put(p, p % 80, kPages[p / kPageTokens], row);
      dense.emplace_back();
      for (const int layer : head.taps) {
        const float* from = row + (layer == 0 ? 0 : layer - 1) * 64;
        dense.back().insert(dense.back().end(), from, from + 64);
      }
    }
  }

  TapRing ring;
  std::vector<Vector> dense;  // [position][taps * 64]
};

// The target's lm_head on x.
Vector target_logits(Model& model, const Vector& x) {
  const std::vector<float> input(x.begin(), x.end());
  std::vector<float> logits(static_cast<size_t>(model.spec().vocabulary));
  model.head_logits(input.data(), 1, logits.data());
  return Vector(logits.begin(), logits.end());
}

Vector embedding_of(const DflashFile& file, const Model& model, int32_t token) {
  if (!file.embedding.empty()) return file.embedding[static_cast<size_t>(token)];
  std::vector<float> row(64);
  model.weights().embed(token, row.data());
  return Vector(row.begin(), row.end());
}

bool close(double a, double b) { return std::abs(a - b) < 2e-4 * std::max(1.0, std::abs(b)); }

void check_head(const DflashShape& shape, int first, int start, int count, int threads, int chunk) {
  const DflashFile file(shape);
  const Taps taps(*file.head);
  Model model(file.model.spec, options(threads, chunk));
  DflashHead head(model);
  const int32_t root = 33;
  REQUIRE(head.read(taps.ring, start - first, first, kPages, kNever) == Status::kOk);
  REQUIRE(head.run(root, count, start, first, kPages, kNever) == Status::kOk);
  const auto embed = [&](int32_t token) { return embedding_of(file, model, token); };
  const std::vector<Vector> states = file.states(taps.dense, first, start, count, embed, root);
  const int depths = shape.anchor_predicts ? count : count - 1;
  head.predict(depths);
  for (int d = 1; d <= depths; ++d) {
    const Vector& state = states[static_cast<size_t>(shape.anchor_predicts ? d - 1 : d)];
    for (size_t k = 0; k < state.size(); ++k) CHECK(close(static_cast<double>(head.state(d)[k]), state[k]));
    const Vector logits = shape.own_lm_head ? file.lm_head(state) : target_logits(model, state);
    std::vector<bool> known(80);
    for (int own = 0; own < file.head->model.vocabulary; ++own) {
      const int32_t token = file.token_of(own);
      known[static_cast<size_t>(token)] = true;
      CHECK(close(static_cast<double>(head.logits(d)[token]), logits[static_cast<size_t>(own)]));
    }
    for (int32_t token = 0; token < 80; ++token) {
      CHECK_EQ(head.knows(token), static_cast<bool>(known[static_cast<size_t>(token)]));
      if (!known[static_cast<size_t>(token)]) CHECK(head.logits(d)[token] < -1e20F);
    }
    for (const int32_t parent : {0, 17, 79}) {
      if (shape.confidence) {
        CHECK(close(static_cast<double>(head.confidence(d, parent)), file.survival(state, parent)));
      }
      if (shape.markov == 0) continue;
      const float* factor = head.markov_factor(d, parent);
      for (int own = 0; own < file.head->model.vocabulary; own += 7) {
        CHECK(
            close(static_cast<double>(head.markov_term(factor, file.token_of(own))), file.markov(state, parent, own)));
      }
    }
  }
}

std::string refusal(const DflashShape& shape, void (*change)(DflashSpec&)) {
  DflashFile file(shape);
  change(*file.head);
  try {
    Model model(file.model.spec, options(1));
    const DflashHead head(model);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST(every_kind_of_head_agrees_with_a_plain_evaluation) {
  struct Markov {
    int rank;
    bool gated;
  };
  for (const int embedding : {0, 1}) {
    for (const int lm_head : {0, 1, 2}) {  // the target's, its own, its own with a map
      for (const bool anchor : {false, true}) {
        for (const int window : {0, 5, 70}) {
          const DflashShape shape{.own_embedding = embedding == 1,
                                  .own_lm_head = lm_head > 0,
                                  .mapped = lm_head == 2,
                                  .anchor_predicts = anchor,
                                  .window = window};
          check_head(shape, 0, 100, 8, 1 + window % 2, 64);
        }
      }
      for (const Markov markov : {Markov{0, false}, Markov{24, false}, Markov{24, true}}) {
        for (const int confidence : {0, 1, 2}) {  // none, of the state, of the token before too
          if (confidence == 2 && markov.rank == 0) continue;
          const DflashShape shape{.own_embedding = embedding == 1,
                                  .own_lm_head = lm_head > 0,
                                  .mapped = lm_head == 2,
                                  .anchor_predicts = true,
                                  .markov = markov.rank,
                                  .gated = markov.gated,
                                  .confidence = confidence > 0,
                                  .reads_markov = confidence == 2};
          check_head(shape, 0, 70, 5, 2, 64);
        }
      }
    }
  }
}

// Blocks over the edge of a page, contexts of any length, entries that are missing, rows of queries that do not fill
// tiles, and a target that takes fewer rows at once than the block has.
TEST(blocks_and_contexts_of_any_size_agree_with_a_plain_evaluation) {
  for (const int heads : {1, 3, 4}) {
    for (const int start : {1, 2, 60, 63, 64, 65, 128, 140}) {
      for (const int first : {0, 1, 59, 64, 100}) {
        if (first >= start) continue;
        check_head({.window = start % 2 == 0 ? 9 : 0, .heads = heads}, first, start, 8, 1 + heads % 2, 3);
      }
    }
  }
  for (const int block : {2, 16, 32}) {
    for (const int count : {1, 2, block - 1, block}) {
      check_head({.anchor_predicts = true, .block = block}, 3, 50, std::max(count, 1), 2, 64);
    }
  }
}

// The entries of a text are the same to the bit in whatever pieces they are read, by however many threads.
TEST(context_is_the_same_in_any_pieces) {
  const DflashFile file({.own_lm_head = true, .heads = 3});
  const Taps taps(*file.head);
  std::vector<float> expected;
  for (const int threads : {1, 2, 3}) {
    for (const int piece : {1, 2, 5, 13, 64, 100, 140}) {
      Model model(file.model.spec, options(threads));
      DflashHead head(model);
      for (int at = 0; at < 140; at += piece) {
        // A pass in between leaves what the next entries overwrite.
        CHECK(head.run(5, 8, at, 0, kPages, kNever) == Status::kOk);
        CHECK(head.read(taps.ring, std::min(piece, 140 - at), at, kPages, kNever) == Status::kOk);
      }
      REQUIRE(head.run(7, 8, 140, 0, kPages, kNever) == Status::kOk);
      head.predict(7);
      std::vector<float> logits(head.logits(1), head.logits(1) + 7 * 80);
      if (expected.empty()) expected = logits;
      CHECK(logits == expected);
    }
  }
}

// What stands before the first entry, whatever it is, changes nothing.
TEST(missing_context_is_not_seen) {
  const DflashFile file;
  const Taps taps(*file.head);
  std::vector<float> expected;
  for (const int filled : {0, 30, 90}) {
    Model model(file.model.spec, options(1));
    DflashHead head(model);
    CHECK(head.read(taps.ring, filled, 0, kPages, kNever) == Status::kOk);
    CHECK(head.read(taps.ring, 30, 90, kPages, kNever) == Status::kOk);
    REQUIRE(head.run(7, 8, 120, 90, kPages, kNever) == Status::kOk);
    const std::vector<float> states(head.state(1), head.state(1) + 7 * 64);
    if (expected.empty()) expected = states;
    CHECK(states == expected);
  }
}

TEST(an_abort_ends_reading_and_passes) {
  const DflashFile file;
  const Taps taps(*file.head);
  Model model(file.model.spec, options(1));
  DflashHead head(model);
  const std::atomic<bool> aborted{true};
  CHECK(head.read(taps.ring, 10, 0, kPages, aborted) == Status::kAborted);
  CHECK(head.run(1, 8, 10, 0, kPages, aborted) == Status::kAborted);
}

TEST(bad_heads_are_refused_by_name) {
  const DflashShape full{.own_embedding = true,
                         .own_lm_head = true,
                         .mapped = true,
                         .anchor_predicts = true,
                         .markov = 24,
                         .gated = true,
                         .confidence = true,
                         .reads_markov = true};
  CHECK_EQ(refusal(full, [](DflashSpec&) {}), "accepted");
  CHECK_EQ(refusal({}, [](DflashSpec&) {}), "accepted");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.model.hidden = 96; }),
           "dflash.own_embedding: must be true where dflash.hidden is not the target's hidden");
  CHECK_EQ(refusal({.own_embedding = true}, [](DflashSpec& spec) { spec.model.hidden = 96; }),
           "dflash.own_lm_head: must be true where dflash.hidden is not the target's hidden");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.model.heads = 0; }), "dflash.heads: must be a multiple of kv_heads");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.model.kv_format = Format::kF8; }),
           "dflash.kv_dtype: must be bf16 or f32");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.taps.clear(); }),
           "dflash.taps: must name 1 layer or more, of 2^24 values together");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.taps = {4}; }),
           "dflash.taps: must be 0 to the target's number of layers");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.block = 1; }), "dflash.block: must be 2 to 32");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.block = 33; }), "dflash.block: must be 2 to 32");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.mask_token = 80; }),
           "dflash.mask_token: must be a token of the target's vocabulary");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.model.context = 511; }),
           "dflash.context: must not be shorter than the target's");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.mapped = true; }),
           "dflash.mapped: must be false without an lm_head of its own");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.model.vocabulary = 79; }),
           "dflash.own_lm_head: must be true where dflash.vocabulary is not the target's");
  CHECK_EQ(refusal(full, [](DflashSpec& spec) { spec.model.vocabulary = 81; }),
           "dflash.vocabulary: must not be larger than the target's");
  CHECK_EQ(refusal(full, [](DflashSpec& spec) { spec.markov = 4097; }), "dflash.markov: must be 0 to 4096");
  CHECK_EQ(refusal({}, [](DflashSpec& spec) { spec.gated = true; }),
           "dflash.markov_kind: must be plain without a Markov term");
  CHECK_EQ(refusal({.confidence = true}, [](DflashSpec& spec) { spec.confidence_reads_markov = true; }),
           "dflash.confidence_reads_markov: must be false without a confidence head or a Markov term");
  for (const char* name :
       {"fc.weight", "hidden_norm", "layers.1.k_norm", "norm", "lm_head.weight", "embed.weight", "markov.embed",
        "markov.head", "markov.gate.weight", "confidence.weight", "confidence.bias", "d2t"}) {
    DflashFile file(full);
    file.head->model.tensors.erase(name);
    std::string message = "accepted";
    try {
      Model model(file.model.spec, options(1));
      const DflashHead head(model);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CHECK_EQ(message, std::string("dflash: tensor ") + name + ": missing");
  }
  CHECK_EQ(refusal(full, [](DflashSpec& spec) { spec.model.tensors["markov.head"].format = Format::kF32; }),
           "dflash: tensor markov.head: 3072 bytes do not fit shape [64, 24] of F32");
  CHECK_EQ(refusal(full, [](DflashSpec& spec) { spec.model.tensors["d2t"] = spec.model.tensors["confidence.bias"]; }),
           "dflash: tensor d2t: shape [16], expected [64]");
}

TEST(a_map_names_each_token_of_the_target_once) {
  DflashFile file({.own_lm_head = true, .mapped = true});
  file.head->model.tensors["d2t"].offset = file.head->model.tensors["hidden_norm"].offset;
  file.head->model.tensors["d2t"].shape = {64};
  std::string message;
  try {
    Model model(file.model.spec, options(1));
    const DflashHead head(model);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.starts_with("dflash: tensor d2t: entry 0 is "));
  CHECK(message.ends_with(", which is no token of the target's or stands there twice"));
}
