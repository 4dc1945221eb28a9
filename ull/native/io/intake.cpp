#include "io/intake.h"

#include <utility>

namespace ull {
namespace {

constexpr int kMessageBatch = 64;  // messages taken before the events get their turn

}  // namespace

Intake::Intake(const zmq::Api& api, ControlPair& control, std::vector<Transport*> transports)
    : api_(api), control_(control), transports_(std::move(transports)) {
  api_.msg_init(&message_.payload);
}

Intake::~Intake() { api_.msg_close(&message_.payload); }

bool Intake::work() noexcept {
  bool worked = false;
  for (int i = 0; i < kMessageBatch; ++i) {
    if (!parked_ && !receive()) return worked || unfinished_;
    parked_ = !control_.forward(message_);
    if (parked_) break;
    worked = true;
  }
  return worked;
}

// The next message, of the transport whose turn it is if it has one. A message that has begun is taken to its end
// before another transport's.
bool Intake::receive() noexcept {
  unfinished_ = false;
  for (size_t i = 0; i < transports_.size(); ++i, turn_ = (turn_ + 1) % transports_.size()) {
    const Received received = transports_[turn_]->receive(message_);
    if (received == Received::kNothing) continue;
    unfinished_ = received == Received::kUnfinished;
    if (unfinished_) return false;
    turn_ = (turn_ + 1) % transports_.size();
    ++(message_.malformed == nullptr ? requests_ : malformed_);
    return true;
  }
  return false;
}

}  // namespace ull
