// What goes over the wire by ZeroMQ's protocol (ZMTP 3.1, https://rfc.zeromq.org/spec/37/): written here by the RFC,
// not with the code under test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ull::test {

using namespace std::string_literals;

// What is made of a stream, one after the other: opened, message PAYLOAD, answer BYTES, too_long of ID, unfit ...
using Events = std::vector<std::string>;

inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr uint8_t kMore = 1, kLong = 2, kCommand = 4;

inline std::string big_endian(uint64_t value, int bytes) {
  std::string text;
  while (bytes-- > 0) text += static_cast<char>(value >> (8 * bytes) & 0xff);
  return text;
}

inline std::string header(int flags, uint64_t size) {
  return static_cast<char>(flags) + big_endian(size, (flags & kLong) != 0 ? 8 : 1);
}

// In the short format where it fits.
inline std::string frame(int flags, const std::string& body) {
  return header(body.size() > 255 ? flags | kLong : flags, body.size()) + body;
}
inline std::string long_frame(int flags, const std::string& body) { return header(flags | kLong, body.size()) + body; }

// The signature's padding is what older peers take for the length of an identity and a byte: that of none.
inline std::string greeting(int major = 3, int minor = 1, std::string mechanism = "NULL") {
  mechanism.resize(20);
  return "\xff\0\0\0\0\0\0\0\1\x7f"s + static_cast<char>(major) + static_cast<char>(minor) + mechanism + '\0' +
         std::string(31, '\0');
}

inline std::string name(const std::string& text) { return static_cast<char>(text.size()) + text; }
inline std::string property(const std::string& key, const std::string& value) {
  return name(key) + big_endian(value.size(), 4) + value;
}
inline std::string command(const std::string& verb, const std::string& data) {
  return frame(kCommand, name(verb) + data);
}
inline std::string ready(const std::string& type, const std::string& more = "") {
  return command("READY", property("Socket-Type", type) + more);
}
inline std::string ping(const std::string& context, const std::string& time_to_live = "\0\0"s) {
  return command("PING", time_to_live + context);
}
inline std::string pong(const std::string& context) { return command("PONG", context); }
inline std::string message(const std::string& payload) { return frame(kMore, "ull1") + frame(0, payload); }

// A client's handshake, and the server's.
inline const std::string kHandshake = greeting() + ready("DEALER");
inline const std::string kTheirs =
    greeting() + command("READY", property("Socket-Type", "ROUTER") + property("Identity", ""));
inline const std::string kRequest = "\x81\xa2id\x2a";  // {"id": 42}

inline std::string text_of(std::span<const uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }
inline std::span<const uint8_t> bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Streams of clients, good and damaged: the same for the same seed.
class RandomStreams {
 public:
  explicit RandomStreams(uint32_t seed) : state_(seed) {}
  uint32_t below(size_t limit) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<uint32_t>((state_ >> 33) % limit);
  }

  // What a client may say, with what the server makes of it; messages are at most 500 bytes long.
  std::string stream(Events& events) {
    std::string text = greeting(3, static_cast<int>(below(3)));
    text += below(2) == 0 ? ready("REQ") : long_frame(kCommand, name("READY") + property("Socket-Type", "DEALER"));
    events = {"opened"};
    for (uint32_t i = below(12); i-- > 0;) {
      const std::string body(below(3) == 0 ? below(500) : below(12), 'b');
      const int format = below(2) == 0 ? 0 : kLong;
      const std::string first = header(kMore | format, 4);
      const auto say = [&](const std::string& bytes, const std::string& event) {
        text += bytes;
        events.push_back(event);
      };
      switch (below(8)) {
        case 0:
          say(frame(0, body), "bad_frame");
          break;
        case 1:
          say(first + "ull0" + frame(0, body), "bad_version");
          break;
        case 2:
          say(first + "ull1" + frame(kMore, body) + frame(0, body), "bad_frame");
          break;
        case 3:
          say(first + "ull1" + frame(0, kRequest + std::string(500 + below(5000), 'l')), "too_long of 42");
          break;
        case 4:
          say(ping(body.substr(0, 16)), "answer " + pong(body.substr(0, 16)));
          break;
        case 5:
          text += command("X", body);
          break;
        default:
          say(first + "ull1" + frame(0, body), "message " + body);
      }
    }
    return text;
  }
  void damage(std::string& text) {
    for (uint32_t i = 1 + below(3); i-- > 0;) text[below(text.size())] ^= static_cast<char>(1 << below(8));
  }

 private:
  uint64_t state_;
};

}  // namespace ull::test
