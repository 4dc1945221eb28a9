#include "protocol/sodium.h"

#include <dlfcn.h>

#include <stdexcept>
#include <type_traits>

namespace ull {

Sodium Sodium::load(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("libsodium: " + path + " cannot be loaded");
  Sodium sodium{};
  // Never dlclosed: the functions are used for as long as the process lives.
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error("libsodium: " + path + " has no " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(sodium.init, "sodium_init");
  find(sodium.random, "randombytes_buf");
  find(sodium.zero, "sodium_memzero");
  find(sodium.equal, "sodium_memcmp");
  find(sodium.keypair, "crypto_box_keypair");
  find(sodium.public_of, "crypto_scalarmult_base");
  find(sodium.shared, "crypto_box_beforenm");
  find(sodium.seal, "crypto_box_easy_afternm");
  find(sodium.open, "crypto_box_open_easy_afternm");
  find(sodium.stream, "crypto_stream_xsalsa20_xor");
  if (sodium.init() < 0) throw std::runtime_error("libsodium: it cannot be initialised");
  return sodium;
}

}  // namespace ull
