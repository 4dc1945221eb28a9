// The index of runs, and the memory of past outputs, against plain searches over the whole text.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "draft/past_outputs.h"
#include "draft/suffix_index.h"

namespace {

using ull::PastOutputs;
using ull::SuffixIndex;
using Tokens = std::vector<int32_t>;

constexpr int kMost = 64;

// Tokens that `text`, up to and with text[place], has in common with the newest ones of `newest`; `oldest`: forgotten
// before it.
int common(const Tokens& text, int place, int oldest, const Tokens& newest) {
  int same = 0;
  while (same < SuffixIndex::kLongest && place - same >= oldest && same < static_cast<int>(newest.size()) &&
         text[static_cast<size_t>(place - same)] == newest[newest.size() - 1 - static_cast<size_t>(same)]) {
    ++same;
  }
  return same;
}

// Of every place, the longest matches first, the latest first where these are equal: (place, common).
std::vector<std::pair<int, int>> places(const Tokens& text, int oldest, const Tokens& newest) {
  std::vector<std::pair<int, int>> found;
  for (int place = static_cast<int>(text.size()) - 1; place >= oldest; --place) {
    if (const int same = common(text, place, oldest, newest); same > 0) found.push_back({place, same});
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return found;
}

Tokens random_text(std::mt19937& random, int length, unsigned letters) {
  Tokens text;
  while (static_cast<int>(text.size()) < length) {
    if (text.size() > 40 && random() % 4 == 0) {
      const size_t from = random() % (text.size() - 20);
      for (size_t i = 0; i < 12; ++i) text.push_back(text[from + i]);
    }
    text.push_back(static_cast<int32_t>(random() % letters));
  }
  text.resize(static_cast<size_t>(length));
  return text;
}

// Few enough occurrences of each token that none is left out: every place must be told, each with its length.
TEST(all_places_are_found_where_they_are_few) {
  std::mt19937 random(5);
  for (const int capacity : {1000, 100, 64}) {
    SuffixIndex index(capacity);
    Tokens text;
    for (const int32_t token : random_text(random, 600, 90)) {
      SuffixIndex::Place told[kMost];
      Tokens newest = text;
      newest.push_back(token);
      const int oldest = std::max(0, static_cast<int>(text.size()) - capacity);
      const auto expected = places(text, oldest, newest);
      const int count =
          index.find(newest.data(), static_cast<int>(newest.size()), SuffixIndex::Runs::kAll, told, kMost);
      if (expected.size() < SuffixIndex::kMostLooks / 2) {
        CHECK_EQ(count, static_cast<int>(expected.size()));
        for (int i = 0; i < count; ++i) {
          CHECK_EQ(static_cast<int>(told[i].at), expected[static_cast<size_t>(i)].first);
          CHECK_EQ(told[i].common, expected[static_cast<size_t>(i)].second);
          CHECK_EQ(index.token(told[i].at), token);
          CHECK_EQ(index.behind(told[i].at),
                   static_cast<int>(text.size()) - 1 - expected[static_cast<size_t>(i)].first);
        }
      }
      index.append(token);
      text.push_back(token);
    }
  }
}

// With many occurrences what is told is true, in order, different, and no more than was asked for.
TEST(what_is_told_of_many_places_is_true) {
  std::mt19937 random(6);
  SuffixIndex index(300);
  Tokens text;
  for (const int32_t token : random_text(random, 2000, 3)) {
    Tokens newest = text;
    newest.push_back(token);
    const int oldest = std::max(0, static_cast<int>(text.size()) - 300);
    const auto all = places(text, oldest, newest);
    for (const auto runs : {SuffixIndex::Runs::kAll, SuffixIndex::Runs::kLongest}) {
      SuffixIndex::Place told[10];
      const int count = index.find(newest.data(), static_cast<int>(newest.size()), runs, told, 10);
      CHECK(count <= 10);
      CHECK_EQ(count > 0, !all.empty());
      for (int i = 0; i < count; ++i) {
        const int place = static_cast<int>(told[i].at);
        CHECK(place >= oldest && place < static_cast<int>(text.size()));
        CHECK_EQ(told[i].common, common(text, place, oldest, newest));
        CHECK(i == 0 || told[i].common < told[i - 1].common ||
              (told[i].common == told[i - 1].common && told[i].at < told[i - 1].at));
      }
    }
    index.append(token);
    text.push_back(token);
  }
}

TEST(a_run_of_one_token_fits_into_any_memory) {
  SuffixIndex index(1);
  const Tokens newest{4};
  SuffixIndex::Place told[kMost];
  CHECK_EQ(index.find(newest.data(), 1, SuffixIndex::Runs::kAll, told, kMost), 0);
  index.append(4);
  CHECK_EQ(index.find(newest.data(), 1, SuffixIndex::Runs::kAll, told, kMost), 1);
  index.append(5);
  CHECK_EQ(index.find(newest.data(), 1, SuffixIndex::Runs::kAll, told, kMost), 0);
}

TEST(what_is_cleared_is_not_found_but_can_be_read) {
  SuffixIndex index(16);
  for (const int32_t token : {1, 2, 3}) index.append(token);
  const uint32_t second = index.end() - 2;
  index.clear();
  const Tokens newest{1, 2, 3};
  SuffixIndex::Place told[kMost];
  CHECK_EQ(index.find(newest.data(), 3, SuffixIndex::Runs::kAll, told, kMost), 0);
  CHECK(index.holds(second));
  CHECK_EQ(index.token(second), 2);
  for (int i = 0; i < 15; ++i) index.append(9);
  CHECK(!index.holds(second));
  CHECK(!index.holds(index.end()));
}

TEST(past_outputs_keep_the_newest) {
  PastOutputs past(5);
  CHECK(past.copy().empty());
  for (const int32_t token : {1, 2, -7}) past.append(token);
  CHECK((past.copy() == Tokens{1, 2, PastOutputs::kBoundary}));
  for (const int32_t token : {4, 5, 6, 7}) past.append(token);
  CHECK((past.copy() == Tokens{PastOutputs::kBoundary, 4, 5, 6, 7}));
  CHECK_EQ(past.appended(), 7U);
}

// The copy is a piece of what was appended, without a token of another time, while tokens are being appended.
TEST(past_outputs_are_copied_while_they_grow) {
  PastOutputs past(4096);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int32_t token = 0; !stop.load(std::memory_order_relaxed); token = (token + 1) % 1'000'000) past.append(token);
  });
  for (int copies = 0; copies < 200;) {
    const Tokens tokens = past.copy();
    CHECK(tokens.size() <= 4096);
    for (size_t k = 1; k < tokens.size(); ++k) CHECK_EQ(tokens[k], (tokens[k - 1] + 1) % 1'000'000);
    copies += tokens.size() > 1 ? 1 : 0;
  }
  stop.store(true, std::memory_order_relaxed);
  writer.join();
}

}  // namespace
