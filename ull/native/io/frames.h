// What the io thread puts on the wire, and the text and logprobs that go with it. One layout per frame;
// docs/wire.md documents them and tests/core/test_io.py freezes them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/text.h"
#include "engine/vocabulary.h"

namespace ull {

inline constexpr int kMaxFrameTokens = 4096;          // tokens per frame; a longer backlog takes several
inline constexpr int kMaxFrameLogprobs = 256;         // tokens per frame with logprobs
inline constexpr int kMaxFramePromptLogprobs = 2048;  // numbers per frame of a prompt's tokens, each of the likeliest
                                                      // two of them: ten kilobytes
inline constexpr size_t kFrameText = 256 * 1024;      // bytes of text per frame
inline constexpr size_t kMaxDigest = 64;              // characters of a bundle's digest

enum class ClientState : uint8_t { kOk, kGone, kStalled };

[[nodiscard]] constexpr const char* client_state_name(ClientState state) noexcept {
  switch (state) {
    case ClientState::kOk:
      return "ok";
    case ClientState::kGone:
      return "gone";
    case ClientState::kStalled:
      return "stalled";
  }
  return "unknown";
}

// How far the io thread has come with delivering one request.
struct Delivery {
  bool active = false;
  bool ended = false;      // the final event has come
  bool flushed = false;    // the text that the assembler held back has been sent
  bool finished = false;   // the done frame has been sent, or there is nobody to send it to
  bool delivered = false;  // the done frame was sent
  bool truncated = false;  // the client has not got everything, and will not
  bool silent_last = false;
  bool dropped = false;  // it was held, and nobody wants it any more
  ClientState client = ClientState::kOk;
  int32_t sent = 0;                       // completion tokens sent (or dropped, if the client is gone)
  int32_t available = 0;                  // completion tokens known of
  int32_t prompt_logprobs_sent = 0;       // numbers of the prompt's tokens that were sent (or dropped), ...
  int32_t prompt_logprobs_available = 0;  // ... and that are known of; they go before every token
  int64_t pending_ns = 0;                 // when token `sent` was accepted
  int64_t newest_ns = 0;                  // when the newest event's first token was
  int64_t blocked_ns = 0;                 // since when the client has not taken a frame; 0: it does
  int32_t first_logprob = -1;             // records of the tokens not yet sent
  int32_t last_logprob = -1;
  TextAssembler assembler;

  [[nodiscard]] bool pending() const noexcept {
    return prompt_logprobs_pending() || sent < available || (ended && !flushed);
  }
  [[nodiscard]] bool prompt_logprobs_pending() const noexcept {
    return prompt_logprobs_sent < prompt_logprobs_available;
  }
  // Nothing more of the answer but its end is to be sent.
  void drop_pending() noexcept {
    sent = available;
    prompt_logprobs_sent = prompt_logprobs_available;
  }
};

class FramePacker {
 public:
  // `bundle`: the digest that every done frame names, at most kMaxDigest characters.
  FramePacker(const Vocabulary& vocabulary, const LogprobRecord* logprobs, std::string bundle = {});

  struct TokenFrame {
    std::span<const uint8_t> bytes;  // valid until the next pack
    int32_t count = 0;               // tokens in it
    bool text = false;               // it has any text
    bool flushes = false;            // it is the request's last
    int32_t next_logprob = -1;       // the first record that is not in it
    TextAssembler assembler;         // the delivery's, once this frame has been sent
  };

  // As many pending tokens as fit one frame. The delivery is not changed: a frame that cannot be sent is packed again.
  [[nodiscard]] TokenFrame tokens(const RequestSlot& request, const Delivery& delivery) noexcept;
  struct PromptFrame {
    std::span<const uint8_t> bytes;  // valid until the next pack
    int32_t count = 0;               // numbers in it
  };
  // As many of the pending log-probabilities of the prompt as fit one frame.
  [[nodiscard]] PromptFrame prompt_logprobs(const RequestSlot& request, const Delivery& delivery) noexcept;
  // Of a truncated delivery it says that the request was cancelled because its client had stalled.
  [[nodiscard]] std::span<const uint8_t> done(const RequestSlot& request, const Delivery& delivery) noexcept;
  // The record for the control plane that an accepted request has ended.
  [[nodiscard]] std::span<const uint8_t> ended(const RequestSlot& request, const Delivery& delivery) noexcept;

 private:
  const Vocabulary& vocabulary_;
  const LogprobRecord* logprobs_;  // [kLogprobRecords]
  const std::string bundle_;
  const size_t text_capacity_;
  const std::unique_ptr<char[]> text_;
  std::vector<uint8_t> buffer_;
};

}  // namespace ull
