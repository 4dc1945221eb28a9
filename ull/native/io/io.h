// The io thread: owns the sockets, hands requests to the control plane, turns the engine's events into frames and
// sends them. It never waits for Python or for a client.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/histogram.h"
#include "base/idle.h"
#include "engine/engine.h"
#include "io/frames.h"
#include "io/pace.h"
#include "io/router.h"
#include "io/zmq_api.h"
#include "sync/alarm.h"
#include "sync/seqlock.h"

namespace ull {

struct IoOptions {
  std::vector<std::string> listen = {};  // clients' endpoints
  std::string control = "inproc://ull-control";
  int core = -1;  // core of the io thread; -1: any
  IdleMode idle = IdleMode::kAdaptive;
  int64_t client_stall_ms = 250;  // a client that takes no frame for longer loses its request
  Router::Options router = {};
};

// Counted by the io thread.
struct IoStats {
  uint64_t requests = 0;         // messages handed to the control plane
  uint64_t malformed = 0;        // messages of a wrong shape or version
  uint64_t replies = 0;          // control plane replies sent
  uint64_t replies_dropped = 0;  // ... to clients that were gone or unreadable
  uint64_t token_frames = 0;
  uint64_t tokens = 0;  // completion tokens in them
  uint64_t done_frames = 0;
  uint64_t bytes = 0;            // payload of token and done frames
  uint64_t blocked_sends = 0;    // sends that found the client's queue full
  uint64_t clients_gone = 0;     // requests that lost their client
  uint64_t clients_stalled = 0;  // requests cancelled because their client did not read
  uint64_t sleeps = 0;           // times the thread went to sleep

  [[nodiscard]] NamedCounts named() const {
    return {{"requests", requests},
            {"malformed", malformed},
            {"replies", replies},
            {"replies_dropped", replies_dropped},
            {"token_frames", token_frames},
            {"tokens", tokens},
            {"done_frames", done_frames},
            {"bytes", bytes},
            {"blocked_sends", blocked_sends},
            {"clients_gone", clients_gone},
            {"clients_stalled", clients_stalled},
            {"sleeps", sleeps}};
  }
};

class Io {
 public:
  // `engine` must outlive this; `context` is a libzmq context. Throws std::invalid_argument naming the option.
  Io(Engine& engine, const zmq::Api& api, void* context, const IoOptions& options);
  ~Io();
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  // Binds and starts the thread. Throws std::runtime_error naming the endpoint that could not be bound.
  void start();
  // Delivers what has ended (for at most the linger time), closes the sockets, ends the thread. Idempotent.
  void stop() noexcept;

  [[nodiscard]] IoStats stats() const noexcept { return published_.load(); }
  // Time from a token's acceptance by the engine thread to its frame's hand-over to libzmq, oldest token of the frame.
  [[nodiscard]] const Histogram& delivery_ns() const noexcept { return delivery_ns_; }
  [[nodiscard]] const std::vector<std::string>& endpoints() const noexcept { return router_.endpoints(); }

 private:
  // A reply of the control plane that its client's full queue did not take yet.
  struct Reply {
    std::vector<uint8_t> identity;
    std::vector<uint8_t> payload;
    int64_t since_ns = 0;
  };

  void run() noexcept;
  [[nodiscard]] bool do_work(bool sockets) noexcept;
  void idle() noexcept;
  [[nodiscard]] bool flushed() const noexcept;

  [[nodiscard]] bool take_events() noexcept;
  void take(const EngineEvent& event) noexcept;
  void deliver(uint32_t slot) noexcept;
  [[nodiscard]] bool deliver_tokens(uint32_t slot) noexcept;
  [[nodiscard]] bool deliver_done(uint32_t slot) noexcept;
  void note_blocked(uint32_t slot) noexcept;
  void give_up(uint32_t slot, ClientState why) noexcept;
  void free_logprobs(uint32_t slot, int32_t until) noexcept;
  void retry() noexcept;

  [[nodiscard]] bool receive_request() noexcept;
  [[nodiscard]] bool forward_parked() noexcept;
  [[nodiscard]] bool receive_reply() noexcept;
  [[nodiscard]] bool waits_for_reply(std::span<const uint8_t> identity, size_t count) const noexcept;
  [[nodiscard]] bool to_control(std::span<const uint8_t> frame, bool more) noexcept;
  [[nodiscard]] std::span<const uint8_t> bytes(zmq::Message& message) const noexcept;

  Engine& engine_;
  EngineShared& shared_;
  const zmq::Api api_;
  const IoOptions options_;
  Router router_;
  FramePacker packer_;
  std::vector<Delivery> deliveries_;  // [slots]
  std::vector<uint32_t> active_;      // slots with an active delivery
  std::vector<uint32_t> dirty_;       // slots with something new to send
  std::vector<Reply> replies_;        // waiting; bounded
  // The request that is on its way to the control plane.
  zmq::Message identity_;
  zmq::Message payload_;
  const char* parked_kind_ = nullptr;  // "R" or "B" while the control plane does not take it; null: none
  const char* parked_reason_ = nullptr;
  int64_t parked_received_ns_ = 0;

  Pace pace_;
  Alarm alarm_;
  int64_t now_ = 0;         // start of this cycle
  int64_t worked_ns_ = 0;   // when there last was something to do
  int64_t sockets_ns_ = 0;  // when the sockets were last looked at
  int64_t retry_ns_ = 0;    // when blocked sends are tried again
  bool blocked_ = false;    // some send is waiting for a client or the control plane
  IoStats stats_;
  Seqlock<IoStats> published_;
  int64_t published_ns_ = 0;
  Histogram delivery_ns_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ull
