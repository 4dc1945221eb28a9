// Where the newest tokens of a text stood before: the suffix tree of a text that grows at its end and is forgotten at
// its beginning, kept as the places below its nodes, the latest first. Runs of a few lengths have hash chains through
// the text (as in zlib), so that growing by a token costs the same whatever the text is. A query walks the chain of the
// longest runs, then those of shorter ones, and compares tokens. Nothing allocates after the constructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ull {

class SuffixIndex {
 public:
  static constexpr int kRuns[] = {8, 4, 2, 1};  // tokens of the runs that have chains, the longest first
  static constexpr int kRunCount = 4;
  static constexpr int kLongest = 32;    // no longer match is told from another
  static constexpr int kMostLooks = 32;  // places looked at per chain and query

  // A token that stood where a text's newest token stands now.
  struct Place {
    uint32_t at;     // for token()
    int32_t common;  // tokens up to it that are the text's newest ones, 1 .. kLongest
  };
  enum class Runs : uint8_t {
    kAll,
    kLongest,  // only the longest of kRuns that stand anywhere: all that are told are of one chain
  };

  // capacity: tokens that are remembered.
  explicit SuffixIndex(int capacity);

  void append(int32_t token) noexcept;
  // Forgets everything. Tokens stay readable until others take their places.
  void clear() noexcept { count_ = 0; }

  // The places of the newest token of `text`, text[length - 1] -> how many, at most `most`: those with the longest
  // matches first, the latest first where these are equal.
  [[nodiscard]] int find(const int32_t* text, int length, Runs runs, Place* places, int most) const noexcept;

  [[nodiscard]] uint32_t end() const noexcept { return end_; }  // of the next token
  // Tokens behind `at`, where find() found something.
  [[nodiscard]] int behind(uint32_t at) const noexcept { return static_cast<int>(end_ - at) - 1; }
  [[nodiscard]] int32_t token(uint32_t at) const noexcept { return tokens_[at & mask_]; }
  // Whether token(at) is still what was appended there.
  [[nodiscard]] bool holds(uint32_t at) const noexcept { return end_ - at - 1 <= mask_; }
  [[nodiscard]] int64_t bytes() const noexcept;

 private:
  // The bucket of the run of kRuns[run] tokens; token(i): the one i before its last.
  template <typename Token>
  [[nodiscard]] size_t bucket(int run, const Token& token) const noexcept;
  [[nodiscard]] int common(uint32_t at, const int32_t* last, int length) const noexcept;

  int capacity_;
  uint32_t mask_;                   // of a place, for the ring
  int bits_;                        // log2 of the buckets of runs of one length
  uint32_t end_ = 0;                // wraps around: places are compared by their distance from it
  int count_ = 0;                   // tokens remembered
  std::vector<int32_t> tokens_;     // [ring]
  std::vector<uint32_t> previous_;  // [ring][kRunCount] where the run before it in the same bucket ends
  std::vector<uint32_t> latest_;    // [kRunCount][buckets] where the newest run ends
};

}  // namespace ull
