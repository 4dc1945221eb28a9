// The io thread: owns the sockets, hands requests to the control plane, turns the engine's events into frames and
// sends them. It never waits for Python or for a client.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/histogram.h"
#include "base/idle.h"
#include "engine/engine.h"
#include "io/control_pair.h"
#include "io/frames.h"
#include "io/intake.h"
#include "io/outbox.h"
#include "io/pace.h"
#include "io/server.h"
#include "io/zmq_api.h"
#include "sync/agent.h"
#include "sync/alarm.h"
#include "sync/seqlock.h"

namespace ull {

struct IoOptions {
  Server::Options server = {};
  std::string control = "inproc://ull-control";
  int core = -1;  // core of the io thread; -1: any
  // Whether the io thread gives its core away for a moment after each send; by default if it has none of its own.
  std::optional<bool> cooperative = std::nullopt;
  IdleMode idle = IdleMode::kAdaptive;
  std::string bundle = {};        // its digest, which every done frame names; at most kMaxDigest characters
  int64_t client_stall_ms = 250;  // a client that takes no frame for longer loses its request's tokens
};

// Counted by the io thread.
struct IoStats {
  uint64_t requests = 0;         // messages handed to the control plane
  uint64_t malformed = 0;        // messages of a wrong shape or version
  uint64_t replies = 0;          // control plane replies sent
  uint64_t replies_dropped = 0;  // ... to clients that were gone or had left too many
  uint64_t token_frames = 0;
  uint64_t tokens = 0;  // completion tokens in them
  uint64_t prompt_logprobs_frames = 0;
  uint64_t done_frames = 0;      // but for those that the control plane sends, which are replies
  uint64_t dones_dropped = 0;    // of stalled requests, to clients that were gone or had left too many
  uint64_t waiting = 0;          // replies and done frames that their clients have not taken, now
  uint64_t bytes = 0;            // payload of these frames
  uint64_t blocked_sends = 0;    // sends that found the client's queue full
  uint64_t clients_gone = 0;     // requests that lost their client
  uint64_t clients_stalled = 0;  // requests cancelled because their client did not read
  uint64_t clients = 0;          // connected, now
  uint64_t local_clients = 0;    // ... by the local transport
  uint64_t accepted = 0;         // connections since the start
  uint64_t turned_away = 0;      // too many at once
  uint64_t denied = 0;           // that may not come in, or had tried it too often
  uint64_t dropped = 0;          // disconnected: not our protocol, late, mute, too long a message, memory short
  uint64_t sleeps = 0;           // times the thread went to sleep
  uint64_t bound_again = 0;      // sockets whose file was gone and that have a new one
  uint64_t unreachable = 0;      // endpoints whose file is not ours, now

  [[nodiscard]] NamedCounts named() const {
    return {{"requests", requests},
            {"malformed", malformed},
            {"replies", replies},
            {"replies_dropped", replies_dropped},
            {"token_frames", token_frames},
            {"tokens", tokens},
            {"prompt_logprobs_frames", prompt_logprobs_frames},
            {"done_frames", done_frames},
            {"dones_dropped", dones_dropped},
            {"waiting", waiting},
            {"bytes", bytes},
            {"blocked_sends", blocked_sends},
            {"clients_gone", clients_gone},
            {"clients_stalled", clients_stalled},
            {"clients", clients},
            {"local_clients", local_clients},
            {"accepted", accepted},
            {"turned_away", turned_away},
            {"denied", denied},
            {"dropped", dropped},
            {"sleeps", sleeps},
            {"bound_again", bound_again},
            {"unreachable", unreachable}};
  }
};

class Io {
 public:
  // `engine` must outlive this; `context` is a libzmq context, for the PAIR. Throws std::invalid_argument
  // naming the option.
  Io(Engine& engine, const zmq::Api& api, void* context, const IoOptions& options);
  // With another way to clients than sockets.
  Io(Engine& engine, const zmq::Api& api, void* context, const IoOptions& options, std::unique_ptr<Transport> clients);
  ~Io();
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  // Binds and starts the thread. Throws std::runtime_error naming the endpoint or path that could not be bound. After
  // halt() it goes on where it was.
  void start();
  // Takes no more messages, delivers what there is (for at most the linger time) and ends the thread; everything stays
  // open, and who is connected waits. What the control plane was sent is there for it.
  void halt() noexcept;
  // Halted only: what a successor goes on with. It may still be gone on with here, as long as no successor does.
  [[nodiscard]] Transport::Estate hand_over() const;
  // ... Goes on with what another process has handed over, in place of the own doors; returns the clients' identities.
  // Says nothing to anybody before start(): until then the other may go on with it.
  [[nodiscard]] std::vector<std::vector<uint8_t>> take_over(const Transport::Estate& estate);
  // ... A successor has it: closes everything here, and says nothing to anybody.
  void abandon() noexcept;
  // Delivers what has ended (for at most the linger time), closes the sockets, ends the thread. Idempotent.
  void stop() noexcept;

  [[nodiscard]] IoStats stats() const noexcept { return published_.load(); }
  // Time from a token's acceptance by the engine thread to its frame's hand-over to the kernel, oldest token of the
  // frame.
  [[nodiscard]] const Histogram& delivery_ns() const noexcept { return delivery_ns_; }
  [[nodiscard]] const std::vector<std::string>& endpoints() const noexcept { return clients_->endpoints(); }

 private:
  void run() noexcept;
  void close() noexcept;
  void require_halted() const;
  [[nodiscard]] bool do_work(bool sockets) noexcept;
  void idle() noexcept;
  void wait_for_events(bool paced) noexcept;
  [[nodiscard]] bool flushed() const noexcept;

  [[nodiscard]] bool take_events() noexcept;
  void take(const EngineEvent& event) noexcept;
  void mark(uint32_t slot) noexcept;
  void deliver(uint32_t slot) noexcept;
  [[nodiscard]] bool holds_back(uint32_t slot) noexcept;
  [[nodiscard]] bool deliver_prompt_logprobs(uint32_t slot) noexcept;
  [[nodiscard]] bool deliver_tokens(uint32_t slot) noexcept;
  [[nodiscard]] bool deliver_done(uint32_t slot) noexcept;
  [[nodiscard]] Sent send_frame(uint32_t slot, std::span<const uint8_t> bytes) noexcept;
  void note_blocked(uint32_t slot) noexcept;
  void give_up(uint32_t slot, ClientState why) noexcept;
  void free_logprobs(uint32_t slot, int32_t until) noexcept;
  void retry() noexcept;

  [[nodiscard]] bool receive_reply() noexcept;
  void look_at_files() noexcept;
  void tell_gone() noexcept;
  void publish() noexcept;

  Engine& engine_;
  EngineShared& shared_;
  Agent& agent_;
  const zmq::Api api_;
  const IoOptions options_;
  const std::unique_ptr<Transport> clients_;
  ControlPair control_;
  Intake intake_;
  Outbox outbox_;
  FramePacker packer_;
  std::vector<Delivery> deliveries_;  // [slots]
  std::vector<uint32_t> active_;      // slots with an active delivery
  std::vector<uint32_t> dirty_;       // slots with something new to send
  std::vector<uint32_t> delivering_;  // those whose turn it is in this cycle

  Pace pace_;
  Alarm alarm_;
  int64_t now_ = 0;              // start of this cycle
  int64_t worked_ns_ = 0;        // when there last was something to do
  int64_t sockets_ns_ = 0;       // when the sockets were last looked at
  int64_t retry_ns_ = 0;         // when blocked sends are tried again
  uint32_t seen_releases_ = 0;   // EngineShared::releases when what is held was last looked at
  bool blocked_ = false;         // some send is waiting for a client or the control plane
  bool record_waits_ = false;    // ... for the control plane, among them
  uint64_t done_frames_ = 0;     // sent in time
  uint64_t rehearsals_ = 0;      // requests that the daemon has sent itself: nobody counts them
  uint64_t broken_replies_ = 0;  // of the control plane: not two frames
  IoStats stats_;
  Seqlock<IoStats> published_;
  int64_t published_ns_ = 0;
  int64_t files_ns_ = 0;  // when the files of the sockets were last looked at
  Histogram delivery_ns_;
  std::vector<std::pair<std::vector<uint8_t>, std::vector<uint8_t>>> inherited_;  // payloads for clients
  bool open_ = false;                                                             // the sockets
  std::atomic<bool> stopping_{false};
  std::atomic<bool> halting_{false};
  std::thread thread_;
};

}  // namespace ull
