// Pages and sequences: reuse in place, sharing and copying of pages, eviction, and no page lost or held twice.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "kv/prefix_cache.h"

namespace {

using ull::kPageTokens;
using ull::PrefixCache;
using ull::Sequence;
using ull::Status;

std::vector<int32_t> numbers(int count, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Runs a request: the cached prefix, then everything of `tokens` but the last goes into the cache.
int serve(PrefixCache& cache, const std::vector<int32_t>& tokens) {
  Sequence& sequence = cache.open(tokens);
  sequence.copied();
  const int cached = sequence.size();
  const auto feed = std::span<const int32_t>(tokens).subspan(static_cast<size_t>(cached));
  if (cache.reserve(sequence, static_cast<int>(tokens.size())) != Status::kOk) return -1;
  sequence.append(feed.first(feed.size() - 1));
  cache.close(sequence, sequence.size());
  return cached;
}

TEST(next_turn_continues_in_place) {
  PrefixCache cache({.page_count = 32, .context = 1024});
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
  PrefixCache cache({.page_count = 64, .context = 1024, .copies = false});
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

// A prompt of 17 tokens, and an answer of `answer`; how many tokens were cached.
int ask(PrefixCache& cache, int answer, int32_t words) {
  const auto prompt = numbers(17, 500);
  Sequence& sequence = cache.open(prompt);
  sequence.copied();
  const int cached = sequence.size();
  CHECK(cache.reserve(sequence, 17 + answer) == Status::kOk);
  sequence.append(std::span(prompt).subspan(static_cast<size_t>(cached)));
  sequence.append(numbers(answer - 1, words));  // the last is in no cache
  cache.close(sequence, sequence.size());
  return cached;
}

TEST(a_short_prompt_is_found_again_whatever_was_answered) {
  PrefixCache cache({.page_count = 64, .context = 1024});
  CHECK_EQ(ask(cache, 200, 1000), 0);
  CHECK_EQ(ask(cache, 8, 2000), 16);  // beside the long answer, which stays
  CHECK_EQ(cache.resident(), 2);
  for (int again = 0; again < 20; ++again) CHECK_EQ(ask(cache, 8, 3000 + 10 * again), 16);
  CHECK_EQ(cache.resident(), 2);
  auto next_turn = numbers(17, 500);
  const auto answer = numbers(199, 1000);
  next_turn.insert(next_turn.end(), answer.begin(), answer.end());
  next_turn.push_back(1);
  CHECK_EQ(serve(cache, next_turn), 16 + 200);
}

TEST(a_short_answer_to_the_same_question_takes_its_place) {
  PrefixCache cache({.page_count = 64, .context = 1024});
  CHECK_EQ(ask(cache, 60, 1000), 0);
  CHECK_EQ(ask(cache, 60, 2000), 16);
  CHECK_EQ(cache.resident(), 1);
}

TEST(a_question_that_shares_little_with_a_conversation_leaves_it_whole) {
  PrefixCache cache({.page_count = 64, .context = 1024});
  const auto talk = numbers(60);
  CHECK_EQ(serve(cache, talk), 0);
  auto other = numbers(50, 7000);
  std::copy_n(talk.begin(), 5, other.begin());  // what every conversation begins with: too short to be worth a copy
  CHECK_EQ(serve(cache, other), 0);
  std::copy_n(talk.begin(), 9, other.begin());
  CHECK_EQ(serve(cache, other), 9);
  CHECK_EQ(serve(cache, talk), 59);
}

TEST(the_same_conversation_is_not_kept_twice) {
  PrefixCache cache({.page_count = 64, .context = 1024});
  for (int again = 0; again < 5; ++again) {
    CHECK_EQ(ask(cache, 200, 1000), again == 0 ? 0 : 16);
    CHECK_EQ(cache.resident(), 1);
    CHECK_EQ(cache.pages_used(), ull::pages_for(17 + 199));
  }
  // The one that stays counts as used by all of them, also by those that found nothing in it.
  for (const bool copies : {true, false}) {
    PrefixCache few({.page_count = 64, .context = 1024, .max_sequences = 3, .copies = copies});
    CHECK_EQ(ask(few, 200, 1000), 0);
    CHECK_EQ(serve(few, numbers(100, 4000)), 0);
    CHECK_EQ(ask(few, 200, 1000), copies ? 16 : 0);
    CHECK_EQ(few.resident(), 2);
    CHECK_EQ(serve(few, numbers(100, 5000)), 0);
    CHECK_EQ(serve(few, numbers(100, 6000)), 0);  // takes the place of the second
    auto next_turn = numbers(17, 500);
    const auto answer = numbers(199, 1000);
    next_turn.insert(next_turn.end(), answer.begin(), answer.end());
    next_turn.push_back(1);
    CHECK_EQ(serve(few, next_turn), 216);
  }
}

TEST(the_rest_of_a_prefix_is_copied_into_a_page_of_its_own) {
  PrefixCache cache({.page_count = 64, .context = 1024});
  const auto first = numbers(900);
  auto second = numbers(900, 5000);
  std::copy_n(first.begin(), 200, second.begin());
  CHECK_EQ(serve(cache, first), 0);
  cache.open(first).drafted()->model = 195;
  Sequence& source = cache.open(first);
  const int32_t from = source.page_table()[3];
  cache.close(source, source.size());
  Sequence& sequence = cache.open(second);
  CHECK_EQ(sequence.size(), 200);
  CHECK_EQ(sequence.copy().from, from);
  CHECK_EQ(sequence.copy().to, sequence.page_table()[3]);
  CHECK_EQ(sequence.copy().tokens, 200 - 192);
  CHECK(sequence.copy().to != from);
  CHECK_EQ(sequence.drafted()->model, 195);
  sequence.copied();
  CHECK_EQ(sequence.copy().tokens, 0);
  CHECK(cache.reserve(sequence, 300) == Status::kOk);
  sequence.append(std::span(second).subspan(200, 100));
  cache.close(sequence, sequence.size());
  CHECK_EQ(cache.resident(), 2);
  // What was to be copied and has not been is not there.
  auto third = numbers(900, 6000);
  std::copy_n(first.begin(), 250, third.begin());
  Sequence& aborted = cache.open(third);
  CHECK_EQ(aborted.size(), 250);
  CHECK_EQ(aborted.copy().tokens, 250 - 192);
  cache.close(aborted, aborted.size());
  CHECK_EQ(aborted.size(), 0);  // the full pages are those of the first
  CHECK_EQ(aborted.copy().tokens, 0);
  CHECK_EQ(cache.resident(), 2);
}

TEST(without_room_for_a_copy_full_pages_are_shared) {
  PrefixCache cache({.page_count = 4, .context = 256});
  const auto first = numbers(256);
  CHECK_EQ(serve(cache, first), 0);
  auto second = numbers(256, 5000);
  std::copy_n(first.begin(), 100, second.begin());
  Sequence& sequence = cache.open(second);
  CHECK_EQ(sequence.size(), 64);
  CHECK_EQ(sequence.copy().tokens, 0);
  cache.close(sequence, 64);
  CHECK_EQ(serve(cache, first), 255);
}

TEST(the_only_session_is_cut_rather_than_begun_anew) {
  PrefixCache cache({.page_count = 16, .context = 1024, .max_sequences = 1});
  CHECK_EQ(serve(cache, numbers(900)), 0);
  auto other = numbers(300, 5000);
  std::copy_n(numbers(100).begin(), 100, other.begin());
  CHECK_EQ(serve(cache, other), 100);
  CHECK_EQ(cache.resident(), 1);
}

TEST(the_draft_s_share_is_cut_with_the_tokens) {
  PrefixCache cache({.page_count = 16, .context = 1024});
  const auto talk = numbers(200);
  Sequence& sequence = cache.open(talk);
  CHECK(cache.reserve(sequence, 200) == Status::kOk);
  sequence.append(talk);
  sequence.drafted()->model = 180;
  cache.close(sequence, 150);
  Sequence& shorter = cache.open(std::span(talk).first(121));
  CHECK_EQ(shorter.size(), 120);
  CHECK_EQ(shorter.drafted()->model, 120);
  cache.close(shorter, 0);
  CHECK_EQ(cache.open(talk).drafted()->model, 0);
}

TEST(a_cut_never_falls_into_a_shared_page) {
  PrefixCache cache({.page_count = 64, .context = 1024, .copies = false});
  auto first = numbers(900);
  auto second = numbers(192 + 10, 0);
  second[195] = 7777;
  CHECK_EQ(serve(cache, first), 0);
  CHECK_EQ(serve(cache, second), 192);
  // Continues the second at 150, inside a page that the first holds too.
  auto third = numbers(400, 9000);
  std::copy_n(first.begin(), 150, third.begin());
  Sequence& sequence = cache.open(third);
  CHECK_EQ(sequence.size(), 128);
  CHECK(cache.reserve(sequence, 400) == Status::kOk);
  const int32_t written = sequence.page_table()[2];
  cache.close(sequence, sequence.size());
  Sequence& again = cache.open(first);
  CHECK_EQ(again.size(), 899);
  for (int page = 0; page < 15; ++page) CHECK(again.page_table()[page] != written);
  cache.close(again, again.size());
}

TEST(a_cut_in_a_shared_page_goes_on_in_a_copy) {
  PrefixCache cache({.page_count = 64, .context = 1024});
  const auto first = numbers(900);
  auto second = numbers(192 + 18, 0);
  second[204] = 7777;
  CHECK_EQ(serve(cache, first), 0);
  CHECK_EQ(serve(cache, second), 204);
  auto third = numbers(400, 9000);
  std::copy_n(first.begin(), 150, third.begin());
  Sequence& sequence = cache.open(third);
  CHECK_EQ(sequence.size(), 150);
  CHECK_EQ(sequence.copy().tokens, 150 - 128);
  CHECK_EQ(sequence.copy().to, sequence.page_table()[2]);
  const int32_t from = sequence.copy().from, to = sequence.copy().to;
  CHECK(from != to);
  sequence.copied();
  CHECK(cache.reserve(sequence, 200) == Status::kOk);
  sequence.append(std::span(third).subspan(150, 50));
  cache.close(sequence, sequence.size());
  CHECK_EQ(cache.resident(), 2);
  Sequence& again = cache.open(first);
  CHECK_EQ(again.size(), 899);
  CHECK_EQ(again.page_table()[2], from);
}

TEST(the_least_recently_used_session_goes_first) {
  PrefixCache cache({.page_count = 64, .context = 256, .max_sequences = 3});
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
  PrefixCache cache({.page_count = 8, .context = 512});
  CHECK_EQ(serve(cache, numbers(256, 1000)), 0);
  CHECK_EQ(serve(cache, numbers(256, 2000)), 0);
  CHECK_EQ(cache.pages_used(), 8);
  CHECK_EQ(serve(cache, numbers(500, 3000)), 0);
  CHECK_EQ(cache.resident(), 1);
  CHECK_EQ(cache.pages_used(), 8);
}

TEST(a_session_beyond_the_pool_is_refused) {
  PrefixCache cache({.page_count = 4, .context = 1024});
  Sequence& sequence = cache.open(numbers(1000));
  CHECK(cache.reserve(sequence, 256) == Status::kOk);
  sequence.append(numbers(256));
  CHECK(cache.reserve(sequence, 257) == Status::kOutOfPages);
  CHECK_EQ(sequence.size(), 256);  // the sequence that is open is no victim
  CHECK_EQ(cache.pages_used(), 4);
  cache.close(sequence, sequence.size());
  CHECK_EQ(cache.open(numbers(1000)).size(), 256);
}

TEST(without_reuse_every_request_starts_cold) {
  PrefixCache cache({.page_count = 8, .context = 512, .reuse = false});
  CHECK_EQ(serve(cache, numbers(100)), 0);
  CHECK_EQ(cache.pages_used(), 0);
  CHECK_EQ(serve(cache, numbers(100)), 0);
  CHECK_EQ(cache.resident(), 0);
}

TEST(a_session_that_is_not_kept_gives_everything_back) {
  PrefixCache cache({.page_count = 8, .context = 512});
  Sequence& sequence = cache.open(numbers(100));
  CHECK(cache.reserve(sequence, 100) == Status::kOk);
  sequence.append(numbers(64));
  cache.close(sequence, 0);
  CHECK_EQ(cache.pages_used(), 0);
  CHECK_EQ(cache.resident(), 0);
}

TEST(only_what_may_be_kept_serves_the_next_turn) {
  PrefixCache cache({.page_count = 16, .context = 1024});
  const auto talk = numbers(600);
  Sequence& sequence = cache.open(talk);
  CHECK(cache.reserve(sequence, 600) == Status::kOk);
  sequence.append(std::span(talk).first(599));
  cache.close(sequence, 140);
  CHECK_EQ(cache.pages_used(), 3);
  Sequence& next = cache.open(talk);
  CHECK_EQ(next.size(), 140);
  cache.close(next, 1000);  // more than it holds
  CHECK_EQ(cache.resident(), 1);
  CHECK_EQ(cache.open(talk).size(), 140);
}

// Random prompts over a few roots against a model of the cache that is a map page -> content: whatever was cached must
// read back as the prompt's own prefix, and the pages of the open sequence must be distinct.
TEST(random_use_reads_back_what_was_written) {
  std::mt19937 random(7);
  PrefixCache cache({.page_count = 40, .context = 640, .max_sequences = 5});
  std::vector<int32_t> content(40 * kPageTokens, -1);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  std::vector<std::vector<int32_t>> history{numbers(640, 1000), numbers(640, 2000)};
  int hits = 0;
  int copies = 0;
  for (int request = 0; request < 3000; ++request) {
    auto prompt = history[static_cast<size_t>(below(static_cast<int>(history.size())))];
    prompt.resize(static_cast<size_t>(1 + below(640)));
    if (below(3) == 0) {  // branches off
      const auto from = static_cast<size_t>(below(static_cast<int>(prompt.size())));
      for (size_t i = from; i < prompt.size(); ++i) prompt[i] = 10'000 + below(5);
      if (history.size() < 12) history.push_back(prompt);
    }
    Sequence& sequence = cache.open(prompt);
    const int cached = sequence.size();
    hits += cached > 0 ? 1 : 0;
    REQUIRE(cached < static_cast<int>(prompt.size()));
    REQUIRE(cache.reserve(sequence, static_cast<int>(prompt.size())) == Status::kOk);
    const int32_t* pages = sequence.page_table();
    const auto at = [&](int position) -> int32_t& {
      return content[static_cast<size_t>(pages[position / kPageTokens] * kPageTokens + position % kPageTokens)];
    };
    if (const ull::PageCopy copy = sequence.copy(); copy.tokens > 0) {
      ++copies;
      if (below(8) == 0) {  // aborted
        cache.close(sequence, sequence.size());
        continue;
      }
      const auto page = [&](int32_t index) { return content.begin() + static_cast<ptrdiff_t>(index) * kPageTokens; };
      std::fill_n(page(copy.to), kPageTokens, -1);
      std::copy_n(page(copy.from), copy.tokens, page(copy.to));
      sequence.copied();
    }
    for (int position = 0; position < cached; ++position) {
      REQUIRE(at(position) == prompt[static_cast<size_t>(position)]);
    }
    const std::set<int32_t> distinct(pages, pages + ull::pages_for(static_cast<int>(prompt.size())));
    REQUIRE(static_cast<int>(distinct.size()) == ull::pages_for(static_cast<int>(prompt.size())));
    const int fed = cached + below(static_cast<int>(prompt.size()) - cached + 1);  // aborted somewhere
    for (int position = cached; position < fed; ++position) at(position) = prompt[static_cast<size_t>(position)];
    sequence.append(
        std::span<const int32_t>(prompt).subspan(static_cast<size_t>(cached), static_cast<size_t>(fed - cached)));
    cache.close(sequence, below(10) == 0 ? 0 : below(sequence.size() + 1));
  }
  CHECK(hits > 1000);
  CHECK(copies > 200);
}

TEST(an_open_session_is_shared_and_never_continued) {
  PrefixCache cache({.page_count = 64, .context = 1024, .max_sequences = 4, .max_open = 3});
  const auto talk = numbers(300);
  Sequence& first = cache.open(talk);
  CHECK(cache.reserve(first, 300) == Status::kOk);
  first.append(std::span(talk).first(250));
  Sequence& second = cache.open(talk);  // the same question, while the first is suspended
  CHECK(&second != &first);
  CHECK_EQ(second.size(), 250);
  CHECK_EQ(second.copy().tokens, 250 - 192);
  second.copied();
  CHECK(cache.reserve(second, 300) == Status::kOk);
  CHECK(second.page_table()[2] == first.page_table()[2]);
  CHECK(second.page_table()[3] != first.page_table()[3]);
  cache.close(second, second.size());
  CHECK_EQ(cache.resident(), 1);  // it holds nothing that the first does not
  cache.close(first, first.size());
  CHECK_EQ(serve(cache, talk), 250);
}

TEST(open_sessions_keep_their_pages) {
  PrefixCache cache({.page_count = 8, .context = 512, .max_sequences = 2, .max_open = 2});
  const auto talk = numbers(300);
  Sequence& first = cache.open(talk);
  CHECK(cache.reserve(first, 300) == Status::kOk);
  Sequence& second = cache.open(numbers(300, 5000));
  CHECK(cache.reserve(second, 192) == Status::kOk);
  CHECK(cache.reserve(second, 193) == Status::kOutOfPages);
  cache.close(first, 0);
  CHECK(cache.reserve(second, 512) == Status::kOk);
  cache.close(second, 0);
  CHECK_EQ(cache.pages_used(), 0);
}

TEST(pins_stay_move_and_go) {
  PrefixCache cache({.page_count = 16, .context = 512, .max_sequences = 4});
  const auto pin = [&](const std::vector<int32_t>& tokens, uint64_t by) {
    Sequence& sequence = cache.open(tokens, by);
    sequence.copied();
    CHECK(cache.reserve(sequence, static_cast<int>(tokens.size())) == Status::kOk);
    sequence.append(std::span(tokens).subspan(static_cast<size_t>(sequence.size())));
    cache.close(sequence, sequence.size(), by);
  };
  const auto system = numbers(140), other = numbers(140, 3000);
  pin(system, 1);
  pin(other, 2);
  pin(numbers(140, 4000), 3);  // one too many of four sequences: it is resident as any other
  CHECK_EQ(cache.pinned(), 2);
  CHECK_EQ(cache.pages_pinned(), 6);
  for (int i = 0; i < 8; ++i) CHECK_EQ(serve(cache, numbers(300, 10'000 * (i + 1))), 0);
  // Another conversation under the pinned prompt takes it over and leaves it where it is.
  auto turn = system;
  turn.resize(200, 77);
  CHECK_EQ(serve(cache, turn), 140);
  CHECK_EQ(cache.pinned(), 2);
  // Who has pinned it goes on in place.
  pin(turn, 1);
  CHECK_EQ(cache.pinned(), 2);
  cache.unpin(1);
  cache.unpin(2);
  cache.unpin(2);
  CHECK_EQ(cache.pinned(), 0);
  for (int i = 0; i < 8; ++i) (void)serve(cache, numbers(300, 10'000 * (i + 1)));
  CHECK_EQ(serve(cache, system), 0);
}

TEST(a_guess_at_what_is_cached) {
  PrefixCache cache({.page_count = 32, .context = 1024});
  const auto talk = numbers(600);
  CHECK_EQ(cache.cached().likely(talk), 0);
  CHECK_EQ(serve(cache, talk), 0);
  CHECK_EQ(cache.cached().likely(talk), 599 / kPageTokens * kPageTokens);
  auto other = talk;
  other[200] = 7;
  CHECK_EQ(cache.cached().likely(other), 192);
  Sequence& sequence = cache.open(talk);
  cache.close(sequence, 100);
  CHECK_EQ(cache.cached().likely(talk), 64);
}

// Several requests at a time, as the engine thread has them: each reads back what it wrote, whatever others are opened,
// shared, pinned, given up and closed meanwhile, and no page is lost.
TEST(random_use_of_several_open_sessions) {
  constexpr int kPages = 12;
  PrefixCache cache({.page_count = kPages, .context = 640, .max_sequences = 5, .max_open = 3});
  std::mt19937 random(11);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<uint32_t>(limit)); };
  std::vector<int32_t> content(kPages * kPageTokens, -1);
  struct Work {
    Sequence* sequence = nullptr;
    std::vector<int32_t> text;
    uint64_t pin = 0;
  };
  std::vector<Work> works(3);
  std::vector<std::vector<int32_t>> history;
  int hits = 0, refused = 0;
  const auto at = [&](Sequence& sequence, int position) -> int32_t& {
    const int32_t page = sequence.page_table()[position / kPageTokens];
    return content[static_cast<size_t>(page * kPageTokens + position % kPageTokens)];
  };
  for (int step = 0; step < 30'000; ++step) {
    Work& work = works[static_cast<size_t>(below(3))];
    if (work.sequence == nullptr) {
      work.text.assign(static_cast<size_t>(1 + below(400)), 0);
      if (!history.empty() && below(4) > 0) {
        work.text = history[static_cast<size_t>(below(static_cast<int>(history.size())))];
        work.text.resize(static_cast<size_t>(1 + below(500)), below(4));
      } else {
        for (int32_t& token : work.text) token = below(3);
        if (history.size() < 10) history.push_back(work.text);
      }
      work.pin = below(4) == 0 ? 1 + static_cast<uint64_t>(below(2)) : 0;
      Sequence& sequence = cache.open(work.text, work.pin);
      if (const ull::PageCopy copy = sequence.copy(); copy.tokens > 0) {
        const auto page = [&](int32_t index) { return content.begin() + static_cast<ptrdiff_t>(index) * kPageTokens; };
        std::fill_n(page(copy.to), kPageTokens, -1);
        std::copy_n(page(copy.from), copy.tokens, page(copy.to));
        sequence.copied();
      }
      hits += sequence.size() > 0 ? 1 : 0;
      work.sequence = &sequence;
    } else if (const int size = work.sequence->size(); size < static_cast<int>(work.text.size()) && below(3) > 0) {
      const int count = std::min(1 + below(90), static_cast<int>(work.text.size()) - size);
      if (cache.reserve(*work.sequence, size + count) == Status::kOk) {
        for (int i = size; i < size + count; ++i) at(*work.sequence, i) = work.text[static_cast<size_t>(i)];
        work.sequence->append(
            std::span<const int32_t>(work.text).subspan(static_cast<size_t>(size), static_cast<size_t>(count)));
      } else {
        ++refused;
      }
    } else {
      cache.close(*work.sequence, below(8) == 0 ? 0 : below(work.sequence->size() + 1), work.pin);
      work.sequence = nullptr;
    }
    if (below(20) == 0) cache.unpin(1 + static_cast<uint64_t>(below(2)));
    for (const Work& each : works) {
      if (each.sequence == nullptr) continue;
      const int size = each.sequence->size();
      REQUIRE(size <= static_cast<int>(each.text.size()));
      for (int i = 0; i < size; ++i) REQUIRE(at(*each.sequence, i) == each.text[static_cast<size_t>(i)]);
    }
    REQUIRE(cache.pages_used() <= kPages && cache.pinned() <= 2 && cache.resident() <= 5 + 2);
  }
  for (Work& work : works) {
    if (work.sequence != nullptr) cache.close(*work.sequence, 0);
  }
  for (const uint64_t pin : {1, 2}) cache.unpin(pin);
  // One sequence that takes every page: all others must let go of theirs.
  Sequence& all = cache.open(numbers(640, 500));  // of which pages are left over
  CHECK(cache.reserve(all, 640) == Status::kOk);
  CHECK(hits > 1000);
  CHECK(refused > 0);
  cache.close(all, 0);
}

}  // namespace
