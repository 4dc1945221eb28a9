#include "io/outbox.h"

#include <algorithm>
#include <new>
#include <utility>

namespace ull {
namespace {

constexpr int kRetryBatch = 32;                // clients tried before the events get their turn
constexpr int64_t kShortestPauseNs = 200'000;  // between two tries of one client
constexpr int64_t kLongestPauseNs = 50'000'000;

std::string_view as_text(std::span<const uint8_t> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const uint8_t> as_bytes(std::string_view text) noexcept {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

Sent Outbox::send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept {
  if (!boxes_.empty() && find(identity) != nullptr) return Sent::kBlocked;
  return clients_.send(identity, payload);
}

void Outbox::post(Kind kind, std::span<const uint8_t> identity, std::span<const uint8_t> payload,
                  int64_t now) noexcept {
  switch (send(identity, payload)) {
    case Sent::kOk:
      ++count(kind).sent;
      break;
    case Sent::kGone:
      ++count(kind).dropped;
      break;
    case Sent::kBlocked:
      try {
        keep(kind, identity, payload, now);
      } catch (const std::bad_alloc&) {
        ++count(kind).dropped;
      }
      break;
  }
}

void Outbox::retry(int64_t now) noexcept {
  for (int tried = 0; tried < kRetryBatch && due_ns() <= now; ++tried) {
    auto turn = due_.extract(due_.begin());
    Box& box = *turn.mapped();
    deliver(box, now);
    if (box.letters.empty()) {
      boxes_.erase(boxes_.find(box.identity));
    } else {
      turn.key() = now + box.pause_ns;
      due_.insert(std::move(turn));
    }
  }
}

std::vector<std::vector<uint8_t>> Outbox::waiting_for(std::span<const uint8_t> identity) const {
  std::vector<std::vector<uint8_t>> payloads;
  const auto found = boxes_.find(as_text(identity));
  if (found == boxes_.end()) return payloads;
  for (const Letter& letter : found->second.letters) payloads.push_back(letter.payload);
  return payloads;
}

Outbox::Box* Outbox::find(std::span<const uint8_t> identity) noexcept {
  const auto found = boxes_.find(as_text(identity));
  return found == boxes_.end() ? nullptr : &found->second;
}

void Outbox::keep(Kind kind, std::span<const uint8_t> identity, std::span<const uint8_t> payload, int64_t now) {
  const size_t cost = payload.size() + kLetterCost;
  Letter letter{kind, now, {payload.begin(), payload.end()}};
  Box* box = find(identity);
  if (box != nullptr && box->stalled &&
      (box->cost + cost > limits_.stalled_bytes || stalled_cost_ + cost > limits_.all_stalled_bytes)) {
    ++count(kind).dropped;
    return;
  }
  if (box != nullptr) {
    box->letters.push_back(std::move(letter));
  } else {
    Box fresh;
    fresh.pause_ns = kShortestPauseNs;
    fresh.letters.push_back(std::move(letter));
    const auto place = boxes_.emplace(as_text(identity), std::move(fresh)).first;
    box = &place->second;
    box->identity = place->first;
    try {
      due_.emplace(now + kShortestPauseNs, box);
    } catch (...) {
      boxes_.erase(place);
      throw;
    }
  }
  box->cost += cost;
  (box->stalled ? stalled_cost_ : waiting_cost_) += cost;
  ++waiting_;
}

// Sends what the client takes. A client that is gone gets nothing more.
void Outbox::deliver(Box& box, int64_t now) noexcept {
  const size_t before = box.letters.size();
  while (!box.letters.empty()) {
    const Sent sent = clients_.send(as_bytes(box.identity), box.letters.front().payload);
    if (sent == Sent::kBlocked) break;
    remove(box, false, sent == Sent::kOk);
  }
  box.pause_ns = box.letters.size() < before ? kShortestPauseNs : std::min(2 * box.pause_ns, kLongestPauseNs);
  if (box.letters.empty() || box.stalled) return;
  const int64_t stalls_ns = box.letters.front().posted_ns + limits_.stall_ns;
  if (now >= stalls_ns) {
    stall(box);
  } else {
    box.pause_ns = std::min(box.pause_ns, stalls_ns - now);
  }
}

// From now on nobody waits for this client, until it has taken everything.
void Outbox::stall(Box& box) noexcept {
  box.stalled = true;
  waiting_cost_ -= box.cost;
  stalled_cost_ += box.cost;
  while (!box.letters.empty() && (box.cost > limits_.stalled_bytes || stalled_cost_ > limits_.all_stalled_bytes)) {
    remove(box, true, false);
  }
}

void Outbox::remove(Box& box, bool newest, bool sent) noexcept {
  Letter& letter = newest ? box.letters.back() : box.letters.front();
  const size_t cost = letter.payload.size() + kLetterCost;
  ++(sent ? count(letter.kind).sent : count(letter.kind).dropped);
  box.cost -= cost;
  (box.stalled ? stalled_cost_ : waiting_cost_) -= cost;
  --waiting_;
  if (newest) {
    box.letters.pop_back();
  } else {
    box.letters.pop_front();
  }
}

}  // namespace ull
