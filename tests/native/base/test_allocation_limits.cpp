// What a setting makes too large is refused by the setting's name, with the size.
#include <stdexcept>
#include <string>

#include "base/allocation.h"
#include "check.h"
#include "kv/page.h"
#include "kv/prefix_cache.h"

namespace {

template <typename Make>
std::string complaint(double bytes, Make make) {
  try {
    ull::allocate_for("kv_pages: 3 pages", bytes, make);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(bytes_are_described_in_powers_of_ten) {
  CHECK_EQ(ull::describe_bytes(0), "0 bytes");
  CHECK_EQ(ull::describe_bytes(999), "999 bytes");
  CHECK_EQ(ull::describe_bytes(98304), "98.3 kB");
  CHECK_EQ(ull::describe_bytes(6.6e12), "6.6 TB");
  CHECK_EQ(ull::describe_bytes(5e21), "5000.0 EB");
}

TEST(what_can_be_allocated_is_returned) {
  CHECK_EQ(ull::allocate_for("x: y", 8, [] { return 7; }), 7);
}

TEST(what_cannot_be_allocated_names_setting_and_size) {
  const std::string refused = complaint(100, [] { throw std::bad_alloc(); });
  CHECK(refused.starts_with("kv_pages: 3 pages: 100 bytes cannot be allocated (this machine has "));
}

TEST(more_than_the_machine_has_is_not_even_tried) {
  bool tried = false;
  CHECK(complaint(1e18, [&] { tried = true; }).starts_with("kv_pages: 3 pages: 1.0 EB cannot be allocated"));
  CHECK(!tried);
}

TEST(sessions_say_what_they_would_take) {
  try {
    const ull::PrefixCache cache({.page_count = 1, .context = 2'000'000'000, .max_sequences = 1'000'000});
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).starts_with("sessions: 1000000 of up to 2000000000 tokens: 8.0 PB"));
  }
}

TEST(tokens_of_many_pages_do_not_overflow) {
  CHECK_EQ(ull::tokens_in(3), 192);
  CHECK_EQ(ull::tokens_in(33'554'431), 2'147'483'584);
  CHECK_EQ(ull::tokens_in(33'554'432), 2'147'483'647);
  CHECK_EQ(ull::tokens_in(100'000'000), 2'147'483'647);
}
