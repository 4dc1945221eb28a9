// The id of a request that is not decoded.
#include "protocol/request_id.h"

#include <span>
#include <string>

#include "check.h"

namespace {

using namespace std::string_literals;

TEST(the_id_of_a_request) {
  const auto find = [](const std::string& payload) -> std::string {
    uint64_t id = 0;
    const bool found = ull::find_request_id({reinterpret_cast<const uint8_t*>(payload.data()), payload.size()}, id);
    return found ? std::to_string(id) : "none";
  };
  CHECK_EQ(find("\x81\xa2id\x07"s), "7");
  CHECK_EQ(find("\x81\xa2id\xcc\xff"s), "255");
  CHECK_EQ(find("\x81\xa2id\xcd\x01\x02"s), "258");
  CHECK_EQ(find("\x81\xa2id\xce\x01\x00\x00\x00"s), "16777216");
  CHECK_EQ(find("\x81\xa2id\xcf\x80\x00\x00\x00\x00\x00\x00\x01"s), "9223372036854775809");
  CHECK_EQ(find("\x82\xa4type\xa8generate\xa2id\x05"s), "5");
  CHECK_EQ(find("\x81\xa2id\xca\x40\xe0\x00\x00"s), "7");
  CHECK_EQ(find("\x81\xa2id\xcb\x40\x1c\x00\x00\x00\x00\x00\x00"s), "7");
  CHECK_EQ(find("\x81\xa2id\xcb\x40\x1e\x00\x00\x00\x00\x00\x00"s), "none");  // 7.5
  CHECK_EQ(find("\x81\xa2id\xcb\xc0\x1c\x00\x00\x00\x00\x00\x00"s), "none");  // -7
  CHECK_EQ(find("\x81\xa2id\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"s), "none");  // not a number
  CHECK_EQ(find("\x81\xa2id\xcb\x43\xe0\x00\x00\x00\x00\x00\x00"s), "none");  // 2^63: no longer exact
  CHECK_EQ(find("\x81\xa2id\xcb\x40\x1c"s), "none");
  CHECK_EQ(find("\xde\x00\x02\xa1x\xc0\xa2id\x05"s), "5");
  // Past every kind of value.
  for (const std::string& value : {"\xc0"s,
                                   "\xc3"s,
                                   "\xff"s,
                                   "\xd0\x80"s,
                                   "\xd3\x01\x02\x03\x04\x05\x06\x07\x08"s,
                                   "\xca\x01\x02\x03\x04"s,
                                   "\xcb\x01\x02\x03\x04\x05\x06\x07\x08"s,
                                   "\xd9\x03"
                                   "abc"s,
                                   "\xda\x00\x01"
                                   "a"s,
                                   "\xdb\x00\x00\x00\x01"
                                   "a"s,
                                   "\xc4\x02"
                                   "ab"s,
                                   "\xc5\x00\x01"
                                   "a"s,
                                   "\xc6\x00\x00\x00\x01"
                                   "a"s,
                                   "\xd4\x01\x02"s,
                                   "\xd5\x01\x02\x03"s,
                                   "\xc7\x02\x01\x02\x03"s,
                                   "\xc8\x00\x01\x01\x02"s,
                                   "\x93\x01\x02\x93\x01\x02\x03"s,
                                   "\x82\x01\x02\x03\x91\x04"s,
                                   "\xdc\x00\x02\x01\x02"s,
                                   "\xdd\x00\x00\x00\x01\x01"s,
                                   "\xde\x00\x01\x01\x02"s,
                                   "\xdf\x00\x00\x00\x01\x01\x02"s,
                                   "\xd8"s + std::string(17, 'x'),
                                   "\x90"s,
                                   "\x80"s}) {
    CHECK_EQ(find("\x82\xa1x"s + value + "\xa2id\x2a"), "42");
  }
  for (const std::string& payload :
       {""s, "\x80"s, "\x07"s, "\x91\x01"s, "\x81\xa2id"s, "\x81\xa2id\xcf\x01"s, "\x81\xa2id\xff"s,
        "\x81\xa2id\xa1"
        "7"s,
        "\x81\xa2id\xca\x01\x02\x03\x04"s, "\x81\xa3idd\x07"s, "\xdf\xff\xff\xff\xff"s,
        "\x82\xa1x\xdd\xff\xff\xff\xff"s, "\x82\x91\x01\x01\xa2id\x01"s, "\x82\xa1x\xc6\xff\xff\xff\xff\xa2id\x01"s}) {
    CHECK_EQ(find(payload), "none");
  }
  // The search has an end.
  CHECK_EQ(find("\x82\xa1x\xdc\xff\xff"s + std::string(65535, '\x01') + "\xa2id\x01"), "none");
}

}  // namespace
