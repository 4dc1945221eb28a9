// Which positions' taps a ring holds, and whose.
#include "draft/tap_tags.h"

#include <vector>

#include "check.h"

using ull::TapTags;

namespace {

const int32_t kPages[] = {4, 7, 2};

std::vector<int32_t> tokens_of(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(3 * i);
  return tokens;
}

void put(TapTags& tags, const std::vector<int32_t>& tokens, int begin, int end) {
  for (int position = begin; position < end; ++position) {
    tags.put(position, tokens[static_cast<size_t>(position)], kPages[position / ull::kPageTokens]);
  }
}

int first_held(const TapTags& tags, const std::vector<int32_t>& tokens, int begin, int end) {
  return tags.first_held(tokens.data(), kPages, begin, end);
}

}  // namespace

TEST(a_slot_is_known_by_position_token_and_page) {
  TapTags tags(8);
  CHECK(!tags.holds(0, 0, 0));  // an empty slot is nobody's
  tags.put(13, 5, 2);
  CHECK(tags.holds(13, 5, 2));
  CHECK(!tags.holds(13, 6, 2));
  CHECK(!tags.holds(13, 5, 3));
  CHECK(!tags.holds(5, 5, 2));   // the same slot
  CHECK(!tags.holds(21, 5, 2));  // likewise
  tags.put(21, 5, 2);
  CHECK(!tags.holds(13, 5, 2));
}

TEST(the_newest_positions_are_held_without_a_gap) {
  const std::vector<int32_t> tokens = tokens_of(180);
  TapTags tags(100);
  put(tags, tokens, 0, 170);
  CHECK_EQ(first_held(tags, tokens, 0, 170), 70);
  CHECK_EQ(first_held(tags, tokens, 90, 170), 90);
  CHECK_EQ(first_held(tags, tokens, 0, 171), 171);  // not even the last
  CHECK_EQ(first_held(tags, tokens, 170, 170), 170);
  std::vector<int32_t> other = tokens;
  ++other[120];
  CHECK_EQ(first_held(tags, other, 0, 170), 121);
}

TEST(what_may_have_been_overwritten_is_forgotten) {
  const std::vector<int32_t> tokens = tokens_of(180);
  TapTags tags(100);
  put(tags, tokens, 0, 100);
  tags.forget(100, 5);  // of the slots of positions 0 to 4
  for (int position = 0; position < 100; ++position) {
    CHECK_EQ(tags.holds(position, tokens[static_cast<size_t>(position)], kPages[position / 64]), position >= 5);
  }
  CHECK_EQ(first_held(tags, tokens, 0, 100), 5);
  put(tags, tokens, 100, 103);
  CHECK_EQ(first_held(tags, tokens, 0, 103), 5);
  tags.forget(98, 0);
  CHECK_EQ(first_held(tags, tokens, 0, 103), 5);
  tags.forget(98, 4);  // around the ring's end
  CHECK_EQ(first_held(tags, tokens, 0, 98), 5);
  CHECK_EQ(first_held(tags, tokens, 0, 102), 102);
  CHECK_EQ(first_held(tags, tokens, 0, 103), 102);
  tags.forget(7, 1000);  // more than there are
  for (int end = 1; end < 103; ++end) CHECK_EQ(first_held(tags, tokens, 0, end), end);
}

TEST(a_cleared_ring_holds_nothing) {
  const std::vector<int32_t> tokens = tokens_of(50);
  TapTags tags(64);
  put(tags, tokens, 0, 50);
  tags.clear();
  CHECK_EQ(first_held(tags, tokens, 0, 50), 50);
  CHECK(!tags.holds(0, 0, 0));
}
