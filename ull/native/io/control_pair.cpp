#include "io/control_pair.h"

#include <array>
#include <string_view>

namespace ull {
namespace {

// What waits for the control plane waits with its client, where each has its turn, and not in one line here: one
// message on this side and one on the other.
constexpr int kSendHighWater = 1;

std::span<const uint8_t> as_bytes(std::string_view text) noexcept {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::array<uint8_t, sizeof(uint64_t)> little_endian(uint64_t value) noexcept {
  std::array<uint8_t, sizeof(uint64_t)> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  return bytes;
}

}  // namespace

ControlPair::ControlPair(const zmq::Api& api, void* context) : api_(api), context_(context) {
  for (zmq::Message* message : {&identity_, &payload_, &other_}) api_.msg_init(message);
}

ControlPair::~ControlPair() {
  close(0);
  for (zmq::Message* message : {&identity_, &payload_, &other_}) api_.msg_close(message);
}

void ControlPair::open(const std::string& endpoint) {
  socket_ = api_.socket(context_, zmq::kPair);
  try {
    if (socket_ == nullptr) zmq::fail(api_, "PAIR socket");
    zmq::set(api_, socket_, zmq::kLinger, 0, "LINGER");
    zmq::set(api_, socket_, zmq::kSendHighWater, kSendHighWater, "SNDHWM");
    zmq::set(api_, socket_, zmq::kReceiveHighWater, 0, "RCVHWM");
    if (api_.bind(socket_, endpoint.c_str()) != 0) zmq::fail(api_, endpoint);
  } catch (...) {
    close(0);
    throw;
  }
}

void ControlPair::close(int linger_ms) noexcept {
  if (socket_ == nullptr) return;
  (void)api_.setsockopt(socket_, zmq::kLinger, &linger_ms, sizeof(linger_ms));
  api_.close(socket_);
  socket_ = nullptr;
}

bool ControlPair::forward(Incoming& message) noexcept {
  if (message.first && !introduce(message)) return false;
  message.first = false;
  if (!begin(message.malformed == nullptr ? IoMessage::kRequest : IoMessage::kMalformed)) return false;
  (void)send(message.client(), true);
  if (message.malformed != nullptr) {
    (void)send(as_bytes(message.malformed), message.has_id);
    if (message.has_id) (void)send(little_endian(message.id), false);
    zmq::clear(api_, message.payload);
    return true;
  }
  // Moved, not copied: a long prompt holds up no token.
  (void)api_.msg_send(&message.payload, socket_, zmq::kDontWait | zmq::kSendMore);
  (void)send(little_endian(static_cast<uint64_t>(message.received_ns)), false);
  return true;
}

bool ControlPair::send_record(std::span<const uint8_t> record, std::optional<std::span<const int32_t>> ids) noexcept {
  if (!begin(IoMessage::kEnded)) return false;
  (void)send(record, ids.has_value());
  if (ids) (void)send({reinterpret_cast<const uint8_t*>(ids->data()), ids->size_bytes()}, false);
  return true;
}

bool ControlPair::send_endpoint(std::string_view endpoint, std::string_view what) noexcept {
  if (!begin(IoMessage::kEndpoint)) return false;
  (void)send(as_bytes(endpoint), true);
  (void)send(as_bytes(what), false);
  return true;
}

bool ControlPair::introduce(const Incoming& message) noexcept {
  if (!begin(IoMessage::kPeer)) return false;
  (void)send(message.client(), true);
  const std::array<uint8_t, 2> marks{message.peer.kind, static_cast<uint8_t>(message.peer.admin ? 'A' : 'G')};
  (void)send(std::span(marks).first(1), true);
  (void)send(std::span(marks).last(1), true);
  (void)send(as_bytes(message.peer.text()), false);
  return true;
}

bool ControlPair::send_denied(const Transport::Denial& denial) noexcept {
  if (!begin(IoMessage::kDenied)) return false;
  (void)send(as_bytes(denial.why), true);
  (void)send(as_bytes(denial.peer.text()), false);
  return true;
}

bool ControlPair::send_gone(std::span<const uint8_t> identity) noexcept {
  if (!begin(IoMessage::kGone)) return false;
  (void)send(identity, false);
  return true;
}

bool ControlPair::receive(Reply& reply) noexcept {
  if (api_.msg_recv(&identity_, socket_, zmq::kDontWait) < 0) return false;
  int frames = 1;
  const zmq::Message* last = &identity_;
  while (api_.msg_more(last) != 0) {
    zmq::Message* const target = ++frames == 2 ? &payload_ : &other_;
    if (api_.msg_recv(target, socket_, 0) < 0) break;
    last = target;
  }
  reply = {zmq::bytes(api_, identity_), zmq::bytes(api_, payload_), frames == 2};
  return true;
}

// libzmq decides with a message's first frame whether there is room; the others always go with it.
bool ControlPair::begin(IoMessage kind) noexcept {
  const auto letter = static_cast<uint8_t>(kind);
  return send({&letter, 1}, true);
}

bool ControlPair::send(std::span<const uint8_t> frame, bool more) noexcept {
  const int flags = zmq::kDontWait | (more ? zmq::kSendMore : 0);
  return api_.send(socket_, frame.data(), frame.size(), flags) >= 0;
}

}  // namespace ull
