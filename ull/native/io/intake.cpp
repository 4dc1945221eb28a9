#include "io/intake.h"

namespace ull {
namespace {

// Taken before the events get their turn.
constexpr int kMessageBatch = 64;
constexpr size_t kBatchBytes = 128 * 1024;

}  // namespace

Intake::Intake(const zmq::Api& api, ControlPair& control, Transport& clients)
    : api_(api), control_(control), clients_(clients) {
  api_.msg_init(&message_.payload);
}

Intake::~Intake() { api_.msg_close(&message_.payload); }

bool Intake::work() noexcept {
  bool worked = false;
  size_t bytes = 0;
  for (int i = 0; i < kMessageBatch && bytes < kBatchBytes; ++i) {
    if (!parked_) {
      if (!clients_.receive(message_)) return worked;
      ++(message_.malformed == nullptr ? requests_ : malformed_);
    }
    bytes += api_.msg_size(&message_.payload);
    parked_ = !control_.forward(message_);
    if (parked_) return worked;
    worked = true;
  }
  return worked;
}

}  // namespace ull
