// The functions of libsodium that CURVE needs, found at run time in the libsodium that pyzmq has brought: no second
// copy, and no code of ours, does cryptography. Signatures: sodium/crypto_box.h of libsodium 1.0; its ABI is stable.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ull {

using CurveKey = std::array<uint8_t, 32>;  // a public, secret or shared key

struct Sodium {
  static constexpr size_t kMac = 16;    // bytes that a box has more than what is in it
  static constexpr size_t kNonce = 24;  // bytes

  int (*init)();
  void (*random)(void* to, size_t size);
  void (*zero)(void* what, size_t size);
  int (*equal)(const void* one, const void* other, size_t size);  // 0: they are; in constant time
  int (*keypair)(uint8_t* public_key, uint8_t* secret_key);
  int (*public_of)(uint8_t* public_key, const uint8_t* secret_key);
  // The key that two pairs share. Not 0: the public key is none.
  int (*shared)(uint8_t* key, const uint8_t* public_key, const uint8_t* secret_key);
  int (*seal)(uint8_t* box, const uint8_t* text, unsigned long long size, const uint8_t* nonce, const uint8_t* key);
  // `size`: of the box. Not 0: it was not sealed with this key and nonce.
  int (*open)(uint8_t* text, const uint8_t* box, unsigned long long size, const uint8_t* nonce, const uint8_t* key);
  // The cipher alone, which changes nothing about the size: bytes 32.. of the stream belong to a box's text.
  int (*stream)(uint8_t* to, const uint8_t* from, unsigned long long size, const uint8_t* nonce, const uint8_t* key);

  // `path`: of libsodium. Throws std::runtime_error if it cannot be loaded or lacks a function.
  [[nodiscard]] static Sodium load(const std::string& path);
};

}  // namespace ull
