// What penalties count: prompt and completion apart, along texts that grow, are cut, and are replaced.
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "executor/token_counts.h"

namespace {

using ull::TokenCounts;

// Whether `counts` says of `text` what counting it anew says.
bool agrees(const TokenCounts& counts, const std::vector<int32_t>& text, int prompt, int vocabulary) {
  std::map<int32_t, int> generated;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] >= 0 && text[i] < vocabulary) generated[text[i]] += static_cast<int>(i) < prompt ? 0 : 1;
  }
  if (counts.size() != static_cast<int>(generated.size())) return false;
  for (int i = 0; i < counts.size(); ++i) {
    const auto entry = generated.find(counts.token(i));
    if (entry == generated.end() || entry->second != counts.generated(entry->first)) return false;
  }
  return true;
}

TEST(texts_that_grow_are_cut_and_are_replaced) {
  constexpr int kVocabulary = 12;
  std::mt19937 random(7);
  const auto some = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  TokenCounts counts(kVocabulary, 100);
  std::vector<int32_t> text;
  int prompt = 0;
  for (int step = 0; step < 3000; ++step) {
    const int what = some(10);
    if (what == 0 || text.size() > 90) {  // another request
      text.assign(static_cast<size_t>(1 + some(20)), 0);
      for (int32_t& token : text) token = some(kVocabulary + 2) - 1;  // some outside the vocabulary
      prompt = some(static_cast<int>(text.size()) + 1);
    } else if (what == 1 && static_cast<int>(text.size()) > prompt) {
      text.back() = some(kVocabulary);  // the last token was another one
    } else if (what == 2 && static_cast<int>(text.size()) > prompt + 1) {
      text.pop_back();
    } else {
      text.push_back(some(kVocabulary));
    }
    counts.follow(text.data(), static_cast<int>(text.size()), prompt);
    REQUIRE(agrees(counts, text, prompt, kVocabulary));
    std::vector<int32_t> longer = text;
    for (int i = some(5); i > 0; --i) {
      longer.push_back(some(kVocabulary + 2) - 1);
      counts.add(longer.back());
      REQUIRE(agrees(counts, longer, prompt, kVocabulary));
    }
    if (some(2) == 0) continue;  // a round that is run again leaves them
    for (; longer.size() > text.size(); longer.pop_back()) counts.take_back();
    REQUIRE(agrees(counts, text, prompt, kVocabulary));
  }
}

TEST(the_prompt_stays) {
  TokenCounts counts(5, 10);
  const std::vector<int32_t> prompt = {1, 2, 1};
  counts.follow(prompt.data(), 3, 3);
  counts.take_back();
  CHECK(agrees(counts, prompt, 3, 5));
  CHECK(counts.holds(1) && !counts.holds(3) && counts.generated(1) == 0);
}

}  // namespace
