// What a thread has done lately, step by step, for whoever asks: the newest kRecords records, always on. One thread
// writes, which costs it a few stores a step and never a wait; any thread copies what is whole.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/cpu.h"

namespace ull {

enum class TraceKind : uint8_t { kPrefill, kRound, kScore, kFrame };

// One step of a request, or one frame of it that was handed to the kernel. Its layout is what a `trace` answer has.
struct TraceRecord {
  int64_t begin_ns = 0;  // CLOCK_MONOTONIC; of a frame: when its oldest token was accepted
  int64_t end_ns = 0;
  uint64_t id = 0;          // of the request
  uint64_t connection = 0;  // of its client: the last eight bytes of the identity, as a big-endian number
  TraceKind kind = TraceKind::kPrefill;
  uint8_t drafter = 0;    // DrafterKind of a round
  uint16_t tree = 0;      // tokens that a round has verified
  uint16_t accepted = 0;  // of its draft
  uint16_t count = 0;     // tokens that were read, emitted, scored or sent
};
static_assert(sizeof(TraceRecord) == 40);

class TraceRing {
 public:
  static constexpr size_t kRecords = 16384;

  // The one writer.
  void push(const TraceRecord& record) noexcept {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    const auto words = std::bit_cast<Words>(record);
    std::atomic<uint64_t>* const place = &words_[head % kRecords * kWords];
    // Release: whoever reads one of these words and then the head sees that the record before was finished.
    for (size_t i = 0; i < kWords; ++i) place[i].store(words[i], std::memory_order_release);
    head_.store(head + 1, std::memory_order_release);
  }

  // Any thread: how many records there have been.
  [[nodiscard]] uint64_t head() const noexcept { return head_.load(std::memory_order_acquire); }

  // Any thread: the records from number `since` on that are still there, at most `most`; `next`: the number behind the
  // last of them.
  [[nodiscard]] std::vector<TraceRecord> copy(uint64_t since, size_t most, uint64_t& next) const {
    const uint64_t before = head();
    uint64_t first = std::max(since, before > kRecords ? before - kRecords : 0);
    first = std::min(first, before);
    next = std::min<uint64_t>(before, first + most);
    std::vector<TraceRecord> records;
    records.reserve(next - first);
    for (uint64_t number = first; number < next; ++number) {
      Words words;
      const std::atomic<uint64_t>* const place = &words_[number % kRecords * kWords];
      for (size_t i = 0; i < kWords; ++i) words[i] = place[i].load(std::memory_order_acquire);
      records.push_back(std::bit_cast<TraceRecord>(words));
    }
    // What was written over meanwhile, or may have been half written, is left out.
    const uint64_t after = head_.load(std::memory_order_relaxed);
    const uint64_t whole = after >= kRecords ? after - kRecords + 1 : 0;
    if (whole > first)
      records.erase(records.begin(), records.begin() + static_cast<ptrdiff_t>(std::min(whole, next) - first));
    return records;
  }

 private:
  static constexpr size_t kWords = sizeof(TraceRecord) / sizeof(uint64_t);
  using Words = std::array<uint64_t, kWords>;

  alignas(kCacheLine) std::atomic<uint64_t> head_{0};
  std::array<std::atomic<uint64_t>, kRecords * kWords> words_{};
};

}  // namespace ull
