// The clients that may come by CURVE: by their public key, a name and what they may do. Written by whoever reads the
// list, looked at by the io thread once per handshake.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "protocol/sodium.h"

namespace ull {

class AllowList {
 public:
  struct Client {
    std::string name;
    bool admin = false;
  };
  using Clients = std::map<CurveKey, Client>;

  // In place of those before. Any thread.
  void set(Clients clients) {
    const std::lock_guard lock(mutex_);
    clients_ = std::move(clients);
    generation_.fetch_add(1, std::memory_order_release);
  }
  [[nodiscard]] std::optional<Client> find(const CurveKey& key) const {
    const std::lock_guard lock(mutex_);
    const auto found = clients_.find(key);
    if (found == clients_.end()) return std::nullopt;
    return found->second;
  }
  // Another number after each set(): who came before it is to be looked up again.
  [[nodiscard]] uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;
  Clients clients_;
  std::atomic<uint64_t> generation_{0};
};

}  // namespace ull
