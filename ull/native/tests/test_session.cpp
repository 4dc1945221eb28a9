// Pages and sessions: reuse in place, sharing of full pages, eviction, and no page lost or held twice.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "kv/session.h"

namespace {

using ull::kPageTokens;
using ull::Session;
using ull::SessionCache;
using ull::Status;

std::vector<int32_t> numbers(int count, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Runs a request: the cached prefix, then everything of `tokens` but the last goes into the cache.
int serve(SessionCache& cache, const std::vector<int32_t>& tokens) {
  Session& session = cache.open(tokens);
  const int cached = session.size();
  const auto feed = std::span<const int32_t>(tokens).subspan(static_cast<size_t>(cached));
  if (cache.reserve(session, static_cast<int>(tokens.size())) != Status::kOk) return -1;
  session.append(feed.first(feed.size() - 1));
  cache.close(session, session.size());
  return cached;
}

TEST(next_turn_continues_in_place) {
  SessionCache cache({.page_count = 32, .context = 1024});
  const auto talk = numbers(600);
  CHECK_EQ(serve(cache, {talk.begin(), talk.begin() + 100}), 0);
  CHECK_EQ(serve(cache, {talk.begin(), talk.begin() + 350}), 99);
  CHECK_EQ(serve(cache, talk), 349);
  CHECK_EQ(cache.resident(), 1);
  CHECK_EQ(cache.pages_used(), 10);
  CHECK_EQ(serve(cache, talk), 599);  // the last token is always fed: there must be something to decode from
  CHECK_EQ(serve(cache, {talk.begin(), talk.begin() + 301}), 300);
}

TEST(another_conversation_shares_full_pages_and_leaves_the_first_whole) {
  SessionCache cache({.page_count = 64, .context = 1024});
  auto first = numbers(900);
  auto second = numbers(900, 5000);
  std::copy_n(first.begin(), 200, second.begin());  // a common system prompt
  CHECK_EQ(serve(cache, first), 0);
  CHECK_EQ(serve(cache, second), 200 / kPageTokens * kPageTokens);
  CHECK_EQ(cache.resident(), 2);
  CHECK_EQ(cache.pages_used(), 15 + 15 - 3);
  CHECK_EQ(serve(cache, first), 899);
  CHECK_EQ(serve(cache, second), 899);
}

TEST(a_cut_never_falls_into_a_shared_page) {
  SessionCache cache({.page_count = 64, .context = 1024});
  auto first = numbers(900);
  auto second = numbers(192 + 10, 0);
  second.back() = 7777;
  CHECK_EQ(serve(cache, first), 0);
  CHECK_EQ(serve(cache, second), 192);
  // Continues the second at 150, inside a page that the first holds too.
  auto third = numbers(400, 9000);
  std::copy_n(first.begin(), 150, third.begin());
  Session& session = cache.open(third);
  CHECK_EQ(session.size(), 128);
  CHECK(cache.reserve(session, 400) == Status::kOk);
  const int32_t written = session.page_table()[2];
  cache.close(session, session.size());
  Session& again = cache.open(first);
  CHECK_EQ(again.size(), 899);
  for (int page = 0; page < 15; ++page) CHECK(again.page_table()[page] != written);
  cache.close(again, again.size());
}

TEST(the_least_recently_used_session_goes_first) {
  SessionCache cache({.page_count = 64, .context = 256, .max_sessions = 3});
  const auto a = numbers(100, 1000);
  const auto b = numbers(100, 2000);
  const auto c = numbers(100, 3000);
  for (const auto& tokens : {a, b, c, a}) (void)serve(cache, tokens);
  CHECK_EQ(serve(cache, numbers(100, 4000)), 0);  // takes b's place
  CHECK_EQ(serve(cache, a), 99);
  CHECK_EQ(serve(cache, c), 99);
  CHECK_EQ(serve(cache, b), 0);
}

TEST(pages_are_taken_from_idle_sessions) {
  SessionCache cache({.page_count = 8, .context = 512});
  CHECK_EQ(serve(cache, numbers(256, 1000)), 0);
  CHECK_EQ(serve(cache, numbers(256, 2000)), 0);
  CHECK_EQ(cache.pages_used(), 8);
  CHECK_EQ(serve(cache, numbers(500, 3000)), 0);
  CHECK_EQ(cache.resident(), 1);
  CHECK_EQ(cache.pages_used(), 8);
}

TEST(a_session_beyond_the_pool_is_refused) {
  SessionCache cache({.page_count = 4, .context = 1024});
  Session& session = cache.open(numbers(1000));
  CHECK(cache.reserve(session, 256) == Status::kOk);
  CHECK(cache.reserve(session, 257) == Status::kOutOfPages);
  cache.close(session, session.size());
  CHECK_EQ(cache.pages_used(), 0);
}

TEST(without_reuse_every_request_starts_cold) {
  SessionCache cache({.page_count = 8, .context = 512, .reuse = false});
  CHECK_EQ(serve(cache, numbers(100)), 0);
  CHECK_EQ(cache.pages_used(), 0);
  CHECK_EQ(serve(cache, numbers(100)), 0);
  CHECK_EQ(cache.resident(), 0);
}

TEST(a_session_that_is_not_kept_gives_everything_back) {
  SessionCache cache({.page_count = 8, .context = 512});
  Session& session = cache.open(numbers(100));
  CHECK(cache.reserve(session, 100) == Status::kOk);
  session.append(numbers(64));
  cache.close(session, 0);
  CHECK_EQ(cache.pages_used(), 0);
  CHECK_EQ(cache.resident(), 0);
}

TEST(only_what_may_be_kept_serves_the_next_turn) {
  SessionCache cache({.page_count = 16, .context = 1024});
  const auto talk = numbers(600);
  Session& session = cache.open(talk);
  CHECK(cache.reserve(session, 600) == Status::kOk);
  session.append(std::span(talk).first(599));
  cache.close(session, 140);
  CHECK_EQ(cache.pages_used(), 3);
  Session& next = cache.open(talk);
  CHECK_EQ(next.size(), 140);
  cache.close(next, 1000);  // more than it holds
  CHECK_EQ(cache.resident(), 1);
  CHECK_EQ(cache.open(talk).size(), 140);
}

// Random prompts over a few roots against a model of the cache that is a map page -> content: whatever was cached must
// read back as the prompt's own prefix, and the pages of the open session must be distinct.
TEST(random_use_reads_back_what_was_written) {
  std::mt19937 random(7);
  SessionCache cache({.page_count = 40, .context = 640, .max_sessions = 5});
  std::vector<int32_t> content(40 * kPageTokens, -1);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  std::vector<std::vector<int32_t>> history{numbers(640, 1000), numbers(640, 2000)};
  int hits = 0;
  for (int request = 0; request < 3000; ++request) {
    auto prompt = history[static_cast<size_t>(below(static_cast<int>(history.size())))];
    prompt.resize(static_cast<size_t>(1 + below(640)));
    if (below(3) == 0) {  // branches off
      const auto from = static_cast<size_t>(below(static_cast<int>(prompt.size())));
      for (size_t i = from; i < prompt.size(); ++i) prompt[i] = 10'000 + below(5);
      if (history.size() < 12) history.push_back(prompt);
    }
    Session& session = cache.open(prompt);
    const int cached = session.size();
    hits += cached > 0 ? 1 : 0;
    REQUIRE(cached < static_cast<int>(prompt.size()));
    REQUIRE(cache.reserve(session, static_cast<int>(prompt.size())) == Status::kOk);
    const int32_t* pages = session.page_table();
    const auto at = [&](int position) -> int32_t& {
      return content[static_cast<size_t>(pages[position / kPageTokens] * kPageTokens + position % kPageTokens)];
    };
    for (int position = 0; position < cached; ++position) {
      REQUIRE(at(position) == prompt[static_cast<size_t>(position)]);
    }
    const std::set<int32_t> distinct(pages, pages + ull::pages_for(static_cast<int>(prompt.size())));
    REQUIRE(static_cast<int>(distinct.size()) == ull::pages_for(static_cast<int>(prompt.size())));
    const int fed = cached + below(static_cast<int>(prompt.size()) - cached + 1);  // aborted somewhere
    for (int position = cached; position < fed; ++position) at(position) = prompt[static_cast<size_t>(position)];
    session.append(
        std::span<const int32_t>(prompt).subspan(static_cast<size_t>(cached), static_cast<size_t>(fed - cached)));
    cache.close(session, below(10) == 0 ? 0 : below(session.size() + 1));
  }
  CHECK(hits > 1000);
}

}  // namespace
