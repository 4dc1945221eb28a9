#include "io/backlog.h"

#include <algorithm>
#include <array>
#include <new>

#include "io/request_id.h"

namespace ull {
namespace {

constexpr size_t kRefusalShare = 4;  // refusals may take the bytes divided by this
// libzmq lets messages of up to so many bytes share the buffer that they were received in.
constexpr size_t kSharedBytes = 8192;

std::string_view as_text(std::span<const uint8_t> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

size_t cost_of(const zmq::Api& api, const zmq::Message& payload) noexcept {
  return api.msg_size(&payload) + Backlog::kMessageCost;
}

}  // namespace

Backlog::~Backlog() {
  for (auto& [identity, queue] : queues_) {
    for (Entry& entry : queue.entries) api_.msg_close(&entry.payload);
  }
}

void Backlog::push(Incoming& message) noexcept {
  try {
    store(message);
  } catch (const std::bad_alloc&) {
    ++counts_.dropped;
  }
  zmq::clear(api_, message.payload);
}

bool Backlog::pop(Incoming& message) noexcept {
  if (turns_.empty()) return false;
  Queue& queue = *turns_.front();
  Entry& entry = queue.entries.front();
  message.identity_size = queue.identity.size();
  std::copy(queue.identity.begin(), queue.identity.end(), message.identity.begin());
  message.malformed = entry.malformed;
  message.received_ns = entry.received_ns;
  message.id = entry.id;
  message.has_id = entry.has_id;
  account(queue, entry, false);
  api_.msg_move(&message.payload, &entry.payload);
  api_.msg_close(&entry.payload);
  queue.entries.pop_front();
  if (queue.entries.empty()) {
    turns_.pop_front();
    queues_.erase(queues_.find(queue.identity));
  } else {
    turns_.splice(turns_.end(), turns_, turns_.begin());
  }
  return true;
}

void Backlog::forget(std::span<const uint8_t> identity) noexcept {
  if (turns_.empty()) return;
  const auto place = queues_.find(as_text(identity));
  if (place == queues_.end()) return;
  Queue& queue = place->second;
  for (Entry& entry : queue.entries) {
    account(queue, entry, false);
    api_.msg_close(&entry.payload);
  }
  turns_.erase(std::find(turns_.begin(), turns_.end(), &queue));
  queues_.erase(place);
}

void Backlog::account(Queue& queue, const Entry& entry, bool in) noexcept {
  const bool refusal = entry.malformed == kRefused;
  const size_t cost = refusal ? kMessageCost : cost_of(api_, entry.payload);
  for (size_t* total : refusal ? std::array{&queue.refusal_cost, &refusal_cost_} : std::array{&queue.cost, &cost_}) {
    *total = in ? *total + cost : *total - cost;
  }
}

bool Backlog::fits(const Queue& queue, size_t cost) const noexcept {
  return cost_ < bytes_ && queue.cost + cost <= bytes_ - cost_;
}

bool Backlog::refusal_fits(const Queue& queue) const noexcept {
  const size_t bytes = bytes_ / kRefusalShare;
  return refusal_cost_ < bytes && queue.refusal_cost + kMessageCost <= bytes - refusal_cost_;
}

// Moves a payload, or copies it where it would hold the whole buffer that it was received in.
void Backlog::keep(zmq::Message& from, zmq::Message& to) noexcept {
  const std::span<const uint8_t> bytes = zmq::bytes(api_, from);
  if (bytes.size() > kSharedBytes || api_.msg_init_size(&to, bytes.size()) != 0) {
    api_.msg_init(&to);
    api_.msg_move(&to, &from);
    return;
  }
  std::copy(bytes.begin(), bytes.end(), static_cast<uint8_t*>(api_.msg_data(&to)));
}

void Backlog::store(Incoming& message) {
  const std::string_view identity = as_text(message.client());
  auto place = queues_.find(identity);
  static const Queue kNobody{};
  const Queue& before = place == queues_.end() ? kNobody : place->second;
  const size_t cost = cost_of(api_, message.payload);
  const bool kept = fits(before, cost);
  if (!kept && !refusal_fits(before)) {
    ++counts_.dropped;
    return;
  }
  if (place == queues_.end()) {
    place = queues_.emplace(identity, Queue{}).first;
    place->second.identity = place->first;
    try {
      turns_.push_back(&place->second);
    } catch (...) {
      queues_.erase(place);
      throw;
    }
  }
  Queue& queue = place->second;
  try {
    queue.entries.push_back({{}, message.malformed, message.received_ns, message.id, message.has_id});
  } catch (...) {
    if (queue.entries.empty()) {
      turns_.pop_back();
      queues_.erase(place);
    }
    throw;
  }
  Entry& entry = queue.entries.back();
  api_.msg_init(&entry.payload);
  if (kept) {
    keep(message.payload, entry.payload);
  } else {
    entry.malformed = kRefused;
    if (!entry.has_id) entry.has_id = find_request_id(zmq::bytes(api_, message.payload), entry.id);
    ++counts_.refused;
  }
  account(queue, entry, true);
}

}  // namespace ull
