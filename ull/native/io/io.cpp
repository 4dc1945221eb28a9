#include "io/io.h"

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/thread.h"

namespace ull {
namespace {

constexpr int kEventBatch = 256;       // events taken before their tokens are sent
constexpr int kReplyBatch = 64;        // replies taken before the events get their turn
constexpr int kPromptBatch = 4;        // frames of a prompt's log-probabilities, likewise: some tens of microseconds
constexpr int64_t kSocketsNs = 5'000;  // while spinning the sockets are looked at this often; one look is ~1.5 us
constexpr int64_t kStreamingSocketsNs = 50'000;  // ... while tokens are on their way: a fraction of a round
constexpr int64_t kRetryNs = 200'000;            // between two tries of a blocked send
constexpr int64_t kRetrySleepNs = 1'000'000;     // ... while asleep
constexpr int64_t kLongestSleepNs = 1'000'000'000;
constexpr int64_t kFilesNs = 1'000'000'000;  // between two looks at the sockets' files
constexpr int64_t kPublishNs = 1'000'000;

}  // namespace

Io::Io(Engine& engine, const zmq::Api& api, void* context, const IoOptions& options)
    : Io(engine, api, context, options, std::make_unique<Server>(api, options.server)) {
  if (options.server.zeromq.empty()) throw std::invalid_argument("listen: needs at least one endpoint");
}

Io::Io(Engine& engine, const zmq::Api& api, void* context, const IoOptions& options, std::unique_ptr<Transport> clients)
    : engine_(engine),
      shared_(engine.shared()),
      agent_(shared_.io_agent),
      api_(api),
      options_(options),
      clients_(std::move(clients)),
      control_(api_, context),
      intake_(api_, control_, *clients_),
      outbox_(*clients_, {.stall_ns = options.client_stall_ms * 1'000'000}),
      packer_(engine.vocabulary(), shared_.logprobs.get(), options.bundle),
      deliveries_(shared_.slots) {
  if (options.bundle.size() > kMaxDigest) throw std::invalid_argument("bundle: a digest has at most 64 characters");
  if (options.client_stall_ms < 1) throw std::invalid_argument("client_stall_ms: must be positive");
  active_.reserve(shared_.slots);
  dirty_.reserve(shared_.slots);
  delivering_.reserve(shared_.slots);
}

Io::~Io() { stop(); }

void Io::start() {
  if (thread_.joinable() || stopping_.load(std::memory_order_relaxed)) throw std::logic_error("an Io starts once");
  if (!open_) {
    try {
      clients_->open();
      control_.open(options_.control);
    } catch (...) {
      clients_->close();
      throw;
    }
    open_ = true;
  }
  halting_.store(false, std::memory_order_relaxed);
  thread_ = start_thread([this] { run(); });
}

void Io::stop() noexcept {
  stopping_.store(true, std::memory_order_release);
  if (thread_.joinable()) {
    agent_.wake();
    thread_.join();
  }
  close();
}

void Io::halt() noexcept {
  if (!thread_.joinable()) return;
  halting_.store(true, std::memory_order_release);
  agent_.wake();
  thread_.join();
}

Transport::Estate Io::hand_over() const {
  require_halted();
  Transport::Estate estate = clients_->hand_over();
  for (Transport::Handed& client : estate.clients) client.payloads = outbox_.waiting_for(client.identity);
  return estate;
}

std::vector<std::vector<uint8_t>> Io::take_over(const Transport::Estate& estate) {
  require_halted();
  std::vector<std::vector<uint8_t>> identities = clients_->take_over(estate);
  for (size_t i = 0; i < identities.size(); ++i) {
    for (const auto& payload : estate.clients[i].payloads) inherited_.emplace_back(identities[i], payload);
  }
  return identities;
}

void Io::abandon() noexcept {
  if (thread_.joinable()) return;
  clients_->abandon();
  close();
}

void Io::require_halted() const {
  if (!open_ || thread_.joinable()) throw std::logic_error("only an Io that was halted is handed over");
}

void Io::close() noexcept {
  if (!open_) return;
  open_ = false;
  clients_->close();
  control_.close(options_.server.linger_ms);
}

void Io::run() noexcept {
  agent_.begin({.name = "ull-io",
                .core = options_.core,
                .cooperative = options_.cooperative.value_or(options_.core < 0),
                .idle = options_.idle});
  for (const auto& [identity, payload] : inherited_) {
    outbox_.post(Outbox::Kind::kReply, identity, payload, monotonic_ns());
  }
  inherited_ = {};
  int64_t give_up_ns = 0;
  for (bool worked = false;;) {
    agent_.tick();
    now_ = monotonic_ns();
    agent_.end_cycle(now_, worked);
    const bool sockets = now_ - sockets_ns_ >= (active_.empty() ? kSocketsNs : kStreamingSocketsNs);
    if (sockets) sockets_ns_ = now_;
    worked = do_work(sockets);
    if (worked) {
      worked_ns_ = now_;
      agent_.give_way();
    }
    if (now_ - published_ns_ >= kPublishNs) publish();
    if (stopping_.load(std::memory_order_acquire) || halting_.load(std::memory_order_acquire)) {
      if (give_up_ns == 0) give_up_ns = now_ + static_cast<int64_t>(options_.server.linger_ms) * 1'000'000;
      if ((sockets && !worked && flushed()) || now_ >= give_up_ns) break;
    } else if (!worked) {
      idle();
    }
  }
  publish();
  agent_.end();
}

void Io::look_at_files() noexcept {
  files_ns_ = now_;
  clients_->look_at_files();
  for (Transport::EndpointNews news; clients_->news(news) && control_.send_endpoint(news.endpoint, news.what);) {
    clients_->pop_news();
  }
}

void Io::publish() noexcept {
  const Transport::Counts counts = clients_->counts();
  stats_.clients = counts.clients;
  stats_.local_clients = counts.local_clients;
  stats_.accepted = counts.accepted - rehearsals_;
  stats_.turned_away = counts.refused;
  stats_.denied = counts.denied;
  stats_.dropped = counts.dropped;
  stats_.bound_again = counts.bound_again;
  stats_.unreachable = counts.unreachable;
  stats_.requests = intake_.requests() - rehearsals_;
  stats_.malformed = intake_.malformed();
  stats_.replies = outbox_.counts(Outbox::Kind::kReply).sent;
  stats_.replies_dropped = outbox_.counts(Outbox::Kind::kReply).dropped + broken_replies_;
  stats_.done_frames = done_frames_ + outbox_.counts(Outbox::Kind::kDone).sent;
  stats_.dones_dropped = outbox_.counts(Outbox::Kind::kDone).dropped;
  stats_.waiting = outbox_.waiting();
  published_.store(stats_);
  published_ns_ = now_;
}

// Events first: tokens are what a client waits for.
bool Io::do_work(bool sockets) noexcept {
  bool worked = take_events();
  if (const uint32_t releases = shared_.releases.load(std::memory_order_acquire); releases != seen_releases_) {
    seen_releases_ = releases;
    dirty_.assign(active_.begin(), active_.end());
    worked = true;
  }
  delivering_.swap(dirty_);
  for (const uint32_t slot : delivering_) deliver(slot);
  delivering_.clear();
  if (blocked_ && (now_ >= retry_ns_ || (record_waits_ && sockets))) retry();
  worked = worked || !dirty_.empty();
  if (now_ >= outbox_.due_ns()) outbox_.retry(now_);
  // A request is taken only where its reply would have room; the end of one that has been comes first.
  const bool halting = halting_.load(std::memory_order_acquire);
  const bool open = outbox_.room() && !record_waits_ && !halting;
  if (halting && !record_waits_) intake_.finish();
  if (!sockets && !(open && !intake_.parked() && clients_->ready())) return worked;
  if (now_ - files_ns_ >= kFilesNs) look_at_files();
  if (open && intake_.work()) worked = true;
  if (!open || intake_.parked()) clients_->tend();
  tell_gone();
  for (int i = 0; i < kReplyBatch && receive_reply(); ++i) worked = true;
  return worked;
}

// Spins for a moment after the last work, or around the time when a token is due; then, if adaptive, sleeps until a
// socket or the engine has something, or until it is time to spin again.
void Io::idle() noexcept {
  cpu_relax();
  if (!agent_.sleeps()) return;
  const bool paced = pace_.expects(now_);
  if (paced ? now_ >= pace_.spin_from_ns() : !Agent::spun(now_ - worked_ns_)) return;
  const auto nothing_new = [this] {
    return shared_.events.empty() && shared_.releases.load(std::memory_order_acquire) == seen_releases_ &&
           !stopping_.load(std::memory_order_acquire) && !halting_.load(std::memory_order_acquire);
  };
  worked_ns_ = agent_.sleep(nothing_new, [&] {
    ++stats_.sleeps;
    publish();
    if (paced) alarm_.set(pace_.spin_from_ns());
    wait_for_events(paced);
  });
  sockets_ns_ = 0;  // look at the sockets in the next cycle
}

// What there is no room for must not end the sleep: replies while too much waits for clients.
void Io::wait_for_events(bool paced) noexcept {
  const bool room = outbox_.room();
  const bool parked = intake_.parked();
  const bool waits = record_waits_ || (parked ? room : !clients_->gone().empty());  // for the control plane
  const auto control_events = static_cast<short>((room ? zmq::kPollIn : 0) | (waits ? zmq::kPollOut : 0));
  std::array<zmq::PollItem, 4> items{{{nullptr, agent_.fd(), zmq::kPollIn, 0},
                                      {nullptr, alarm_.fd(), static_cast<short>(paced ? zmq::kPollIn : 0), 0},
                                      {control_.socket(), 0, control_events, 0},
                                      {nullptr, clients_->fd(), zmq::kPollIn, 0}}};
  int64_t wake_ns = std::min(now_ + kLongestSleepNs, outbox_.due_ns());
  if (blocked_) wake_ns = std::min(wake_ns, now_ + kRetrySleepNs);
  if (room && !parked && !record_waits_ && clients_->ready()) wake_ns = now_;
  const int64_t sleep_ms = std::max<int64_t>(0, (wake_ns - now_ + 999'999) / 1'000'000);
  (void)api_.poll(items.data(), static_cast<int>(items.size()), static_cast<long>(sleep_ms));
}

bool Io::flushed() const noexcept {
  return shared_.events.empty() && outbox_.delivered() && !intake_.parked() &&
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
    const RequestSlot& request = shared_.slot(event.slot);
    delivery.assembler.reset(&request.stops, request.leading_spaces);
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
  delivery.prompt_logprobs_available = std::max(delivery.prompt_logprobs_available, event.prompt_logprobs);
  if (event.final) {
    pace_.end();
    delivery.ended = true;
    delivery.silent_last = event.silent_last;
  }
  mark(event.slot);
}

// There is something to send for this request.
void Io::mark(uint32_t slot) noexcept {
  if (std::find(dirty_.begin(), dirty_.end(), slot) == dirty_.end()) dirty_.push_back(slot);
}

// Sends what can be sent for one request: tokens, then the done frame, then the record for the control plane, after
// which the slot is free again. Where the control plane tells the client of the end, the record stands for the done
// frame: it is sent once all tokens are out, and what the control plane then sends comes behind them. Stops early if
// the client or the control plane has no room; retry() comes back.
void Io::deliver(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  if (!delivery.active || holds_back(slot)) return;
  if (delivery.client != ClientState::kOk) {
    delivery.drop_pending();
    free_logprobs(slot, -1);
  } else if ((delivery.blocked_ns != 0 && now_ < retry_ns_) || !deliver_prompt_logprobs(slot) ||
             !deliver_tokens(slot)) {
    return;
  }
  const RequestSlot& request = shared_.slot(slot);
  if (!delivery.ended || (!request.told_by_control && !deliver_done(slot))) return;
  std::optional<std::span<const int32_t>> ids;
  if (request.returns_tokens) ids.emplace(request.completion(), static_cast<size_t>(delivery.available));
  if (!control_.send_record(packer_.ended(request, delivery), ids)) {
    blocked_ = true;
    record_waits_ = true;
    // At the daemon's end nobody takes records any more, and nobody else tells the client.
    if (request.told_by_control && stopping_.load(std::memory_order_acquire)) (void)deliver_done(slot);
    return;
  }
  delivery.active = false;
  active_.erase(std::find(active_.begin(), active_.end(), slot));
  shared_.slot(slot).enter(SlotState::kFree);
}

// Whether nothing of it may be delivered yet. What is dropped instead of committed has no tokens for its client.
bool Io::holds_back(uint32_t slot) noexcept {
  const RequestSlot& request = shared_.slot(slot);
  if (!request.held.load(std::memory_order_acquire)) return false;
  if (!request.cancel.load(std::memory_order_acquire)) return true;
  Delivery& delivery = deliveries_[slot];
  delivery.dropped = true;
  delivery.drop_pending();
  delivery.flushed = true;
  return false;
}

// Whether a frame was taken. A client that turns out to have gone, or to have stalled, gets nothing more.
Sent Io::send_frame(uint32_t slot, std::span<const uint8_t> bytes) noexcept {
  Delivery& delivery = deliveries_[slot];
  const Sent sent = outbox_.send(shared_.slot(slot).client(), bytes);
  if (sent == Sent::kBlocked) note_blocked(slot);
  if (sent == Sent::kGone) give_up(slot, ClientState::kGone);
  if (sent == Sent::kOk) delivery.blocked_ns = 0;
  return sent;
}

// What is known of the prompt's tokens, before any token of the answer. False if the client has no room, or if others
// have their turn before the rest.
bool Io::deliver_prompt_logprobs(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  const RequestSlot& request = shared_.slot(slot);
  for (int frames = 0; delivery.prompt_logprobs_pending() && delivery.client == ClientState::kOk; ++frames) {
    if (frames == kPromptBatch) {
      mark(slot);
      return false;
    }
    const FramePacker::PromptFrame frame = packer_.prompt_logprobs(request, delivery);
    const Sent sent = send_frame(slot, frame.bytes);
    if (sent == Sent::kBlocked && delivery.client == ClientState::kOk) return false;
    if (sent != Sent::kOk) break;
    delivery.prompt_logprobs_sent += frame.count;
    if (request.rehearsal) continue;
    ++stats_.prompt_logprobs_frames;
    stats_.bytes += frame.bytes.size();
  }
  return true;
}

// False if the client has no room. A client that turns out to be gone counts as served.
bool Io::deliver_tokens(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  const RequestSlot& request = shared_.slot(slot);
  while (delivery.pending() && delivery.client == ClientState::kOk) {
    const FramePacker::TokenFrame frame = packer_.tokens(request, delivery);
    if (frame.count > 0 || frame.text) {
      const Sent sent = send_frame(slot, frame.bytes);
      if (sent == Sent::kBlocked && delivery.client == ClientState::kOk) return false;
      if (sent != Sent::kOk) break;
      if (!request.rehearsal) {
        if (frame.count > 0) {
          const int64_t handed_ns = monotonic_ns();
          delivery_ns_.record(handed_ns - delivery.pending_ns);
          shared_.frames.push({.begin_ns = delivery.pending_ns,
                               .end_ns = handed_ns,
                               .id = request.id,
                               .connection = request.connection(),
                               .kind = TraceKind::kFrame,
                               .count = static_cast<uint16_t>(frame.count)});
        }
        ++stats_.token_frames;
        stats_.tokens += static_cast<uint64_t>(frame.count);
        stats_.bytes += frame.bytes.size();
      }
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

// False if the client has no room. What a stalled client is told waits for it, but not in the slot.
bool Io::deliver_done(uint32_t slot) noexcept {
  Delivery& delivery = deliveries_[slot];
  if (delivery.finished) return true;
  const RequestSlot& request = shared_.slot(slot);
  if (request.withdrawn.load(std::memory_order_acquire)) {
    delivery.finished = true;
    return true;
  }
  if (delivery.client == ClientState::kOk) {
    const std::span<const uint8_t> frame = packer_.done(request, delivery);
    switch (outbox_.send(request.client(), frame)) {
      case Sent::kBlocked:
        note_blocked(slot);
        if (delivery.client == ClientState::kOk) return false;
        break;
      case Sent::kGone:
        give_up(slot, ClientState::kGone);
        break;
      case Sent::kOk:
        delivery.delivered = true;
        if (request.rehearsal) {
          ++rehearsals_;
        } else {
          ++done_frames_;
          stats_.bytes += frame.size();
        }
        break;
    }
  }
  if (delivery.client == ClientState::kStalled) {
    outbox_.post(Outbox::Kind::kDone, request.client(), packer_.done(request, delivery), now_);
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
  delivery.truncated = !delivery.ended || delivery.pending();
  ++(why == ClientState::kGone ? stats_.clients_gone : stats_.clients_stalled);
  delivery.drop_pending();
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
  record_waits_ = false;
  retry_ns_ = 0;
  // deliver() may remove the slot it is given from the list.
  for (size_t i = active_.size(); i-- > 0;) {
    const Delivery& delivery = deliveries_[active_[i]];
    if (delivery.blocked_ns != 0 || delivery.ended) deliver(active_[i]);
  }
  if (blocked_) retry_ns_ = now_ + kRetryNs;
}

// What clients have asked for ends with their connection; the last that they said comes before.
void Io::tell_gone() noexcept {
  if (intake_.parked()) return;
  for (auto client = clients_->gone(); !client.empty() && control_.send_gone(client); client = clients_->gone()) {
    clients_->pop_gone();
  }
  for (Transport::Denial denial; clients_->denial(denial) && control_.send_denied(denial);) clients_->pop_denial();
}

// Takes one reply from the control plane and sends it to its client. While too much waits for clients, replies stay
// where they are.
bool Io::receive_reply() noexcept {
  ControlPair::Reply reply;
  if (!outbox_.room() || !control_.receive(reply)) return false;
  if (reply.whole) {
    outbox_.post(Outbox::Kind::kReply, reply.identity, reply.payload, now_);
  } else {
    ++broken_replies_;
  }
  return true;
}

}  // namespace ull
