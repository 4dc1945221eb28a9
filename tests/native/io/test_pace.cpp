// Pace: when the io thread expects the next token. Alarm: the timer that ends its sleep.
#include <poll.h>

#include "base/clock.h"
#include "check.h"
#include "io/pace.h"
#include "sync/alarm.h"

namespace {

constexpr int64_t kInterval = 400'000;

ull::Pace steady_pace(int64_t* last) {
  ull::Pace pace;
  for (int i = 1; i <= 20; ++i) pace.token(*last = 1'000'000'000 + i * kInterval);
  return pace;
}

}  // namespace

TEST(a_steady_stream_is_expected_around_its_next_token) {
  int64_t last = 0;
  const ull::Pace pace = steady_pace(&last);
  CHECK(pace.expects(last));
  CHECK(pace.spin_from_ns() > last + kInterval / 2);
  CHECK(pace.spin_from_ns() < last + kInterval);
  CHECK(pace.expects(last + kInterval));
}

TEST(an_overdue_token_is_no_longer_expected) {
  int64_t last = 0;
  const ull::Pace pace = steady_pace(&last);
  CHECK(!pace.expects(last + 2 * kInterval));
}

TEST(nothing_is_expected_before_two_tokens_nor_after_the_end) {
  ull::Pace pace;
  CHECK(!pace.expects(0));
  pace.token(1'000'000'000);
  CHECK(!pace.expects(1'000'000'000));
  int64_t last = 0;
  pace = steady_pace(&last);
  pace.end();
  CHECK(!pace.expects(last));
}

TEST(intervals_too_short_or_too_long_to_sleep_through_are_left_alone) {
  for (const int64_t interval : {10'000, 80'000'000}) {
    ull::Pace pace;
    int64_t last = 0;
    for (int i = 1; i <= 20; ++i) pace.token(last = 1'000'000'000 + i * interval);
    CHECK(!pace.expects(last + interval / 2));
  }
}

TEST(the_running_mean_follows_a_change) {
  int64_t last = 0;
  ull::Pace pace = steady_pace(&last);
  for (int i = 0; i < 60; ++i) pace.token(last += 3 * kInterval);
  CHECK(pace.spin_from_ns() > last + 2 * kInterval);
  CHECK(pace.spin_from_ns() < last + 3 * kInterval);
}

TEST(an_alarm_is_readable_from_its_time_on_and_forgets_earlier_ones) {
  ull::Alarm alarm;
  pollfd item{alarm.fd(), POLLIN, 0};
  CHECK(poll(&item, 1, 0) == 0);
  const int64_t due = ull::monotonic_ns() + 2'000'000;
  alarm.set(due);
  CHECK(poll(&item, 1, 5'000) == 1);
  CHECK(ull::monotonic_ns() >= due);
  alarm.set(ull::monotonic_ns() + 60'000'000'000);
  CHECK(poll(&item, 1, 0) == 0);
}
