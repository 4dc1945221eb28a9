#include "io/io.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <stdexcept>
#include <string_view>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/thread.h"

namespace ull {
namespace {

constexpr int kEventBatch = 256;       // events taken before their tokens are sent
constexpr int kMessageBatch = 64;      // messages taken before the events get their turn
constexpr int64_t kSocketsNs = 5'000;  // while spinning the sockets are looked at this often; one look is ~2 us
constexpr int64_t kRetryNs = 200'000;  // between two tries of a blocked send
constexpr long kRetrySleepMs = 1;      // ... while asleep
constexpr int64_t kPublishNs = 1'000'000;
constexpr size_t kMaxReplies = 256;  // control plane replies that wait for full clients

constexpr std::string_view kVersion = "ull1";

std::span<const uint8_t> as_bytes(std::string_view text) noexcept {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

Io::Io(Engine& engine, const zmq::Api& api, void* context, const IoOptions& options)
    : engine_(engine),
      shared_(engine.shared()),
      api_(api),
      options_(options),
      router_(api_, context, options.router),
      packer_(engine.vocabulary(), shared_.logprobs.get()),
      deliveries_(shared_.slots) {
  if (options.client_stall_ms < 1) throw std::invalid_argument("client_stall_ms: must be positive");
  if (options.listen.empty()) throw std::invalid_argument("listen: needs at least one endpoint");
  active_.reserve(shared_.slots);
  dirty_.reserve(shared_.slots);
  replies_.reserve(kMaxReplies);
  api_.msg_init(&identity_);
  api_.msg_init(&payload_);
}

Io::~Io() {
  stop();
  api_.msg_close(&identity_);
  api_.msg_close(&payload_);
}

void Io::start() {
  if (thread_.joinable() || stopping_.load(std::memory_order_relaxed)) throw std::logic_error("an Io starts once");
  router_.open(options_.listen, options_.control);
  thread_ = std::thread([this] { run(); });
}

void Io::stop() noexcept {
  stopping_.store(true, std::memory_order_release);
  if (!thread_.joinable()) return;
  shared_.io_waker.wake();
  thread_.join();
}

void Io::run() noexcept {
  name_current_thread("ull-io");
  (void)pin_current_thread(options_.core);
  int64_t give_up_ns = 0;
  for (;;) {
    now_ = monotonic_ns();
    const bool sockets = now_ - sockets_ns_ >= kSocketsNs;
    if (sockets) sockets_ns_ = now_;
    const bool worked = do_work(sockets);
    if (worked) worked_ns_ = now_;
    if (now_ - published_ns_ >= kPublishNs) {
      published_.store(stats_);
      published_ns_ = now_;
    }
    if (stopping_.load(std::memory_order_acquire)) {
      if (give_up_ns == 0) give_up_ns = now_ + static_cast<int64_t>(options_.router.linger_ms) * 1'000'000;
      if ((sockets && !worked && flushed()) || now_ >= give_up_ns) break;
    } else if (!worked) {
      idle();
    }
  }
  published_.store(stats_);
  router_.close();
}

// Events first: tokens are what a client waits for.
bool Io::do_work(bool sockets) noexcept {
  bool worked = take_events();
  for (const uint32_t slot : dirty_) deliver(slot);
  dirty_.clear();
  if (blocked_ && now_ >= retry_ns_) retry();
  if (!sockets) return worked;
  for (int i = 0; i < kMessageBatch && receive_request(); ++i) worked = true;
  for (int i = 0; i < kMessageBatch && receive_reply(); ++i) worked = true;
  return worked;
}

// Spins for a moment after the last work, or around the time when a token is due; then, if adaptive, sleeps until a
// socket or the engine has something, or until it is time to spin again.
void Io::idle() noexcept {
  cpu_relax();
  if (options_.idle == IdleMode::kSpin) return;
  const bool paced = pace_.expects(now_);
  if (paced ? now_ >= pace_.spin_from_ns() : now_ - worked_ns_ < kIdleSpinNs) return;
  shared_.io_waker.announce();
  if (shared_.events.empty() && !stopping_.load(std::memory_order_acquire)) {
    published_.store(stats_);
    ++stats_.sleeps;
    if (paced) alarm_.set(pace_.spin_from_ns());
    // While a request waits for the control plane no other is read, so clients' input must not end the sleep.
    const bool parked = parked_kind_ != nullptr;
    std::array<zmq::PollItem, 4> items{{{nullptr, shared_.io_waker.fd(), zmq::kPollIn, 0},
                                        {router_.control(), 0, zmq::kPollIn, 0},
                                        {nullptr, alarm_.fd(), static_cast<short>(paced ? zmq::kPollIn : 0), 0},
                                        {router_.clients(), 0, zmq::kPollIn, 0}}};
    (void)api_.poll(items.data(), parked ? 3 : 4, blocked_ || parked ? kRetrySleepMs : -1);
  }
  shared_.io_waker.awake();
  sockets_ns_ = 0;  // look at the sockets in the next cycle
  worked_ns_ = monotonic_ns();
}

bool Io::flushed() const noexcept {
  return shared_.events.empty() && replies_.empty() && parked_kind_ == nullptr &&
         std::none_of(active_.begin(), active_.end(), [this](uint32_t slot) { return deliveries_[slot].ended; });
}

bool Io::take_events() noexcept {
  EngineEvent event;
  int taken = 0;
  while (taken < kEventBatch && shared_.events.try_pop(event)) {
    take(event);
    ++taken;
  }
  return taken > 0;
}

void Io::take(const EngineEvent& event) noexcept {
  Delivery& delivery = deliveries_[event.slot];
  if (!delivery.active) {
    delivery = Delivery{};
    delivery.active = true;
    delivery.assembler.reset(&shared_.slot(event.slot).stops);
    active_.push_back(event.slot);
  }
  if (event.count > 0) {
    if (delivery.sent == delivery.available) delivery.pending_ns = event.time_ns;
    delivery.newest_ns = event.time_ns;
    pace_.token(event.time_ns);
    delivery.available += event.count;
  }
  if (event.logprobs >= 0) {
    if (delivery.first_logprob < 0) {
      delivery.first_logprob = event.logprobs;
    } else {
      shared_.logprobs[static_cast<size_t>(delivery.last_logprob)].next = event.logprobs;
    }
    int32_t last = event.logprobs;
    while (shared_.logprobs[static_cast<size_t>(last)].next >= 0)
      last = shared_.logprobs[static_cast<size_t>(last)].next;
    delivery.last_logprob = last;
  }
  if (event.final) {
    pace_.end();
    delivery.ended = true;
    delivery.silent_last = event.silent_last;
  }
  if (std::find(dirty_.begin(), dirty_.end(), event.slot) == dirty_.end()) dirty_.push_back(event.slot);
}

// Sends what can be sent for one request: tokens, then the done frame, then the record for the control plane, after
// which the slot is free again. Stops early if the client or the control plane has no room; retry() comes back.
void Io::deliver(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  if (delivery.client != ClientState::kOk) {
    delivery.sent = delivery.available;
    free_logprobs(slot, -1);
  } else if ((delivery.blocked_ns != 0 && now_ < retry_ns_) || !deliver_tokens(slot)) {
    return;
  }
  if (!delivery.ended || !deliver_done(slot)) return;

  if (!to_control(as_bytes("D"), true)) {
    blocked_ = true;
    return;
  }
  (void)to_control(packer_.ended(shared_.slot(slot), delivery), false);
  delivery.active = false;
  active_.erase(std::find(active_.begin(), active_.end(), slot));
  shared_.slot(slot).state.store(SlotState::kFree, std::memory_order_release);
}

// False if the client has no room. A client that turns out to be gone counts as served.
bool Io::deliver_tokens(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  const RequestSlot& request = shared_.slot(slot);
  while (delivery.pending() && delivery.client == ClientState::kOk) {
    const FramePacker::TokenFrame frame = packer_.tokens(request, delivery);
    if (frame.count > 0 || frame.text) {
      const Sent sent = router_.send(request.client(), frame.bytes);
      if (sent == Sent::kBlocked) {
        note_blocked(slot);
        if (delivery.client == ClientState::kOk) return false;
        break;
      }
      if (sent == Sent::kGone) {
        give_up(slot, ClientState::kGone);
        break;
      }
      if (frame.count > 0) delivery_ns_.record(monotonic_ns() - delivery.pending_ns);
      ++stats_.token_frames;
      stats_.tokens += static_cast<uint64_t>(frame.count);
      stats_.bytes += frame.bytes.size();
      delivery.blocked_ns = 0;
    }
    delivery.assembler = frame.assembler;
    delivery.flushed = frame.flushes;
    delivery.sent += frame.count;
    // Of a backlog that takes several frames only the newest round's time is still known.
    delivery.pending_ns = delivery.newest_ns;
    free_logprobs(slot, frame.next_logprob);
  }
  return true;
}

bool Io::deliver_done(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  if (delivery.finished) return true;
  if (delivery.client == ClientState::kOk) {
    const RequestSlot& request = shared_.slot(slot);
    const std::span<const uint8_t> frame = packer_.done(request);
    switch (router_.send(request.client(), frame)) {
      case Sent::kBlocked:
        note_blocked(slot);
        if (delivery.client == ClientState::kOk) return false;
        break;
      case Sent::kGone:
        give_up(slot, ClientState::kGone);
        break;
      case Sent::kOk:
        delivery.delivered = true;
        ++stats_.done_frames;
        stats_.bytes += frame.size();
        break;
    }
  }
  delivery.finished = true;
  return true;
}

// The client's queue is full. Tokens stay where they are (the slot's own array) and go out together later.
void Io::note_blocked(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  ++stats_.blocked_sends;
  blocked_ = true;
  if (delivery.blocked_ns == 0) {
    delivery.blocked_ns = now_;
    retry_ns_ = std::max(retry_ns_, now_ + kRetryNs);
  } else if (now_ - delivery.blocked_ns >= options_.client_stall_ms * 1'000'000) {
    give_up(slot, ClientState::kStalled);
  }
}

// The rest of this request goes nowhere: its engine time is better spent on the next.
void Io::give_up(uint32_t slot, ClientState why) noexcept {
  Delivery& delivery = deliveries_[slot];
  delivery.client = why;
  ++(why == ClientState::kGone ? stats_.clients_gone : stats_.clients_stalled);
  delivery.sent = delivery.available;
  free_logprobs(slot, -1);
  if (!delivery.ended) engine_.cancel_slot(slot);
}

// Gives the records before `until` (-1: all) back to the engine thread.
void Io::free_logprobs(uint32_t slot, int32_t until) noexcept {
  Delivery& delivery = deliveries_[slot];
  while (delivery.first_logprob >= 0 && delivery.first_logprob != until) {
    delivery.first_logprob = shared_.give_back(shared_.slot(slot), delivery.first_logprob);
  }
  if (delivery.first_logprob < 0) delivery.last_logprob = -1;
}

// Tries everything again that had no room.
void Io::retry() noexcept {
  blocked_ = false;
  retry_ns_ = 0;
  // deliver() may remove the slot it is given from the list.
  for (size_t i = active_.size(); i-- > 0;) {
    const Delivery& delivery = deliveries_[active_[i]];
    if (delivery.blocked_ns != 0 || delivery.ended) deliver(active_[i]);
  }
  size_t kept = 0;
  for (Reply& reply : replies_) {
    const bool behind = waits_for_reply(reply.identity, kept);  // one client's replies keep their order
    const Sent sent = behind ? Sent::kBlocked : router_.send(reply.identity, reply.payload);
    const bool late = now_ - reply.since_ns >= options_.client_stall_ms * 1'000'000;
    stats_.replies += sent == Sent::kOk ? 1 : 0;
    stats_.replies_dropped += sent == Sent::kGone || (sent == Sent::kBlocked && late) ? 1 : 0;
    if (sent == Sent::kBlocked && !late) std::swap(replies_[kept++], reply);
  }
  replies_.resize(kept);
  blocked_ = blocked_ || kept > 0;
  if (blocked_) retry_ns_ = now_ + kRetryNs;
}

// True if one of the first `count` waiting replies is for this client.
bool Io::waits_for_reply(std::span<const uint8_t> identity, size_t count) const noexcept {
  return std::any_of(replies_.begin(), replies_.begin() + static_cast<std::ptrdiff_t>(count), [&](const Reply& reply) {
    return std::equal(identity.begin(), identity.end(), reply.identity.begin(), reply.identity.end());
  });
}

// Takes one message from a client and hands it to the control plane. False if there was none, or the control plane
// has no room: then it waits here and clients' further messages wait in libzmq, bounded by its high-water mark.
bool Io::receive_request() noexcept {
  if (parked_kind_ != nullptr) return forward_parked();
  if (api_.msg_recv(&identity_, router_.clients(), zmq::kDontWait) < 0) return false;
  parked_received_ns_ = monotonic_ns();
  // Frames beyond the second are dropped one by one: a message of a hundred frames takes no more room than one of two.
  int frames = 0;
  bool version_ok = false;
  const zmq::Message* last = &identity_;
  zmq::Message other;
  api_.msg_init(&other);
  while (api_.msg_more(last) != 0) {
    ++frames;
    zmq::Message* const target = frames == 2 ? &payload_ : &other;
    if (api_.msg_recv(target, router_.clients(), 0) < 0) break;
    if (frames == 1) {
      const std::span<const uint8_t> version = bytes(other);
      version_ok = std::equal(version.begin(), version.end(), kVersion.begin(), kVersion.end());
    }
    last = target;
  }
  api_.msg_close(&other);
  parked_reason_ = frames != 2 ? "bad_frame" : !version_ok ? "bad_version" : nullptr;
  parked_kind_ = parked_reason_ == nullptr ? "R" : "B";
  ++(parked_reason_ == nullptr ? stats_.requests : stats_.malformed);
  (void)forward_parked();
  return true;
}

// Returns true if the control plane took it. The payload is moved, not copied: a long prompt holds up no token.
bool Io::forward_parked() noexcept {
  if (!to_control(as_bytes(parked_kind_), true)) return false;
  (void)to_control(bytes(identity_), true);
  if (parked_reason_ != nullptr) {
    (void)to_control(as_bytes(parked_reason_), false);
    api_.msg_close(&payload_);
    api_.msg_init(&payload_);
  } else {
    std::array<uint8_t, sizeof(int64_t)> received;
    for (size_t i = 0; i < received.size(); ++i) {
      received[i] = static_cast<uint8_t>(static_cast<uint64_t>(parked_received_ns_) >> (8 * i));  // little endian
    }
    (void)api_.msg_send(&payload_, router_.control(), zmq::kDontWait | zmq::kSendMore);
    (void)to_control(received, false);
  }
  parked_kind_ = nullptr;
  return true;
}

// Takes one reply [identity, payload] from the control plane and sends it to its client.
bool Io::receive_reply() noexcept {
  zmq::Message identity;
  zmq::Message payload;
  zmq::Message other;
  api_.msg_init(&identity);
  api_.msg_init(&payload);
  api_.msg_init(&other);
  const bool received = api_.msg_recv(&identity, router_.control(), zmq::kDontWait) >= 0;
  if (received) {
    int frames = 1;
    const zmq::Message* last = &identity;
    while (api_.msg_more(last) != 0) {
      zmq::Message* const target = ++frames == 2 ? &payload : &other;
      if (api_.msg_recv(target, router_.control(), 0) < 0) break;
      last = target;
    }
    const bool behind = waits_for_reply(bytes(identity), replies_.size());
    Sent sent = Sent::kGone;
    if (frames == 2) sent = behind ? Sent::kBlocked : router_.send(bytes(identity), bytes(payload));
    if (sent == Sent::kOk) {
      ++stats_.replies;
    } else if (sent == Sent::kBlocked && replies_.size() < kMaxReplies) {
      const std::span<const uint8_t> client = bytes(identity);
      const std::span<const uint8_t> body = bytes(payload);
      replies_.push_back({{client.begin(), client.end()}, {body.begin(), body.end()}, now_});
      blocked_ = true;
    } else {
      ++stats_.replies_dropped;
    }
  }
  api_.msg_close(&identity);
  api_.msg_close(&payload);
  api_.msg_close(&other);
  return received;
}

// Sends one frame to the control plane; false if it has no room. libzmq decides that with a message's first frame.
bool Io::to_control(std::span<const uint8_t> frame, bool more) noexcept {
  const int flags = zmq::kDontWait | (more ? zmq::kSendMore : 0);
  return api_.send(router_.control(), frame.data(), frame.size(), flags) >= 0;
}

std::span<const uint8_t> Io::bytes(zmq::Message& message) const noexcept {
  return {static_cast<const uint8_t*>(api_.msg_data(&message)), api_.msg_size(&message)};
}

}  // namespace ull
