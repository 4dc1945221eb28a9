// ZMTP with CURVE: the handshake of a client that has no key, and what a client with one may send behind it. The
// cryptography is a stand-in that changes nothing but to add its MAC, so that mutations reach what lies behind it.
#include "protocol/curve.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "streams.h"

namespace {

using ull::Sodium;

constexpr size_t kMac = Sodium::kMac;

int fake_seal(uint8_t* box, const uint8_t* text, unsigned long long size, const uint8_t*, const uint8_t*) {
  std::memmove(box + kMac, text, size);
  std::memset(box, 0, kMac);
  return 0;
}

int fake_open(uint8_t* text, const uint8_t* box, unsigned long long size, const uint8_t*, const uint8_t*) {
  if (size < kMac) return -1;
  std::memmove(text, box + kMac, size - kMac);
  return 0;
}

Sodium stand_in() {
  Sodium sodium{};
  sodium.init = [] { return 0; };
  sodium.random = [](void* to, size_t size) { std::memset(to, 7, size); };
  sodium.zero = [](void* what, size_t size) { std::memset(what, 0, size); };
  sodium.equal = [](const void* one, const void* other, size_t size) { return std::memcmp(one, other, size); };
  sodium.keypair = [](uint8_t* public_key, uint8_t* secret_key) {
    std::memset(public_key, 3, 32);
    std::memset(secret_key, 3, 32);
    return 0;
  };
  sodium.public_of = [](uint8_t* public_key, const uint8_t* secret_key) {
    std::memcpy(public_key, secret_key, 32);
    return 0;
  };
  sodium.shared = [](uint8_t* key, const uint8_t*, const uint8_t*) {
    std::memset(key, 1, 32);
    return 0;
  };
  sodium.seal = fake_seal;
  sodium.open = fake_open;
  sodium.stream = [](uint8_t* to, const uint8_t* from, unsigned long long size, const uint8_t*, const uint8_t*) {
    std::memmove(to, from, size);
    return 0;
  };
  return sodium;
}

const ull::Curve& server() {
  static const auto clients = [] {
    auto list = std::make_shared<ull::AllowList>();
    ull::CurveKey known;
    known.fill(5);
    list->set({{known, {"known", false}}});
    return list;
  }();
  ull::CurveKey secret;
  secret.fill(9);
  static const ull::Curve curve(600, {.sodium = stand_in(), .secret = secret, .clients = clients});
  return curve;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ull::fuzz::compare_deliveries(server(), {data, size}, 2048 + 64);
  return 0;
}
