// Sequences: KV pages that outlive the request that filled them, so that the next turn of a conversation prefills only
// what is new. Everything is allocated at construction; after it nothing here allocates, locks or throws. One thread
// (the engine's) uses it.
//
// A sequence is open while a request fills it, resident afterwards. Several may be open at a time: a request that is
// suspended keeps its own. Nobody takes the pages of an open sequence, nor of a pinned one; what is resident goes, the
// least recently used first, when pages are needed.
//
// Admission takes the resident sequence that shares the longest prefix with the prompt, the shortest if there are
// several. It is continued in place if it loses no more than the prompt keeps of it (the next turn, a retry), or no
// more than a page holds while the prompt is mostly in it (the same question again). Otherwise (another conversation
// under the same system prompt) a new sequence shares the full pages of the prefix, which are never written again, and
// takes a copy of what lies in the page behind them; the old one stays whole, as one always does that is open, or
// pinned by somebody else. A page has a count of sequences that hold it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kv/drafted.h"
#include "kv/page.h"
#include "kv/page_hash.h"

namespace ull {

class PagePool {
 public:
  explicit PagePool(int page_count);

  [[nodiscard]] int free_count() const noexcept { return static_cast<int>(free_.size()); }
  [[nodiscard]] int page_count() const noexcept { return static_cast<int>(holders_.size()); }
  [[nodiscard]] bool shared(int32_t page) const noexcept { return holders_[static_cast<size_t>(page)] > 1; }

  // A page with one holder, or -1 if none is free.
  [[nodiscard]] int32_t take() noexcept;
  void hold(int32_t page) noexcept { ++holders_[static_cast<size_t>(page)]; }
  void release(int32_t page) noexcept;

 private:
  std::vector<int32_t> free_;      // a stack: the page released last is the warmest
  std::vector<uint16_t> holders_;  // [page_count] sequences that hold the page
};

// The first tokens of a page that a sequence takes over into one of its own.
struct PageCopy {
  int32_t from = -1;
  int32_t to = -1;
  int32_t tokens = 0;  // 0: there is nothing to copy
};

class Sequence {
 public:
  // Tokens whose keys and values are certainly in the cache, by position.
  [[nodiscard]] std::span<const int32_t> tokens() const noexcept { return tokens_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(tokens_.size()); }
  // Page table: page_table()[p / kPageTokens] holds position p, for every reserved position.
  [[nodiscard]] const int32_t* page_table() const noexcept { return pages_.data(); }
  // What drafters have of tokens() in caches of their own, in the same pages.
  [[nodiscard]] Drafted* drafted() noexcept { return &drafted_; }
  // What must be copied before anything else is done with a sequence that has just been opened; tokens() holds it
  // already. copied(): it has been.
  [[nodiscard]] const PageCopy& copy() const noexcept { return copy_; }
  void copied() noexcept { copy_ = {}; }
  // Records tokens that a completed step has put into the cache, at positions size() and on.
  void append(std::span<const int32_t> tokens) noexcept;

 private:
  friend class PrefixCache;
  [[nodiscard]] bool evictable() const noexcept { return used_at_ != 0 && !open_ && pin_ == 0; }
  // Forgets what lies behind the first `tokens` tokens.
  void shorten(int tokens) noexcept;

  std::vector<int32_t> tokens_;   // capacity: the context
  std::vector<uint64_t> hashes_;  // of the full pages of tokens_; capacity: pages of the context
  std::vector<int32_t> pages_;    // likewise
  CachedPages* cached_ = nullptr;
  Drafted drafted_;
  PageCopy copy_;
  uint64_t used_at_ = 0;  // admission count at the last use; 0: the sequence is free
  uint64_t pin_ = 0;      // by whom it is pinned; 0: nobody
  bool open_ = false;
};

class PrefixCache {
 public:
  struct Options {
    int page_count = 0;
    int context = 0;          // most tokens a sequence holds
    int max_sequences = 16;   // resident
    int max_open = 1;         // at a time, beside those
    bool reuse = true;        // false: every request starts cold
    bool copies = true;       // false: pages cannot be copied, so that only full ones are shared
    bool shares_open = true;  // false: nobody shares what an open sequence holds, which may be what nobody reuses
  };

  explicit PrefixCache(const Options& options);

  // The sequence that serves `prompt` ([>= 1] tokens); its size() tokens, at most prompt.size() - 1, are the prompt's
  // cached prefix, once its copy() has been made, which comes before anything else is opened. `pin`: as in close().
  [[nodiscard]] Sequence& open(std::span<const int32_t> prompt, uint64_t pin = 0) noexcept;

  // Makes the page table of an open sequence cover positions [0, tokens), evicting resident ones, least recently used
  // first. kOutOfPages if even that is not enough.
  [[nodiscard]] Status reserve(Sequence& sequence, int tokens) noexcept;

  // Ends the use of an open sequence. At most its first `kept` tokens stay resident; without any, if reuse is off, or
  // if another sequence begins with the same, nothing of it does. With a `pin` (not 0) they stay until unpin(), in
  // place of what was pinned by it before; a pin beyond max_sequences / 2 has no effect.
  void close(Sequence& sequence, int kept, uint64_t pin = 0) noexcept;
  void unpin(uint64_t pin) noexcept;
  void unpin_all() noexcept;

  [[nodiscard]] int pages_used() const noexcept { return pool_.page_count() - pool_.free_count(); }
  [[nodiscard]] int page_count() const noexcept { return pool_.page_count(); }
  // Pages that pinned sequences hold; one that several share counts for each.
  [[nodiscard]] int pages_pinned() const noexcept;
  [[nodiscard]] int resident() const noexcept;
  [[nodiscard]] int pinned() const noexcept;
  // For guesses by other threads.
  [[nodiscard]] const CachedPages& cached() const noexcept { return cached_; }

 private:
  // The resident sequence to serve from, and how many of the prompt's tokens it shares.
  struct Match {
    Sequence* sequence = nullptr;
    int shared = 0;
    bool continues = false;  // in place
  };

  [[nodiscard]] Match find(std::span<const int32_t> reusable, uint64_t pin) noexcept;
  // How many tokens it shares with `text`, whose pages have the names wanted_.
  [[nodiscard]] int shared_with(const Sequence& sequence, std::span<const int32_t> text) const noexcept;
  void fork(const Match& match, Sequence& sequence) noexcept;
  [[nodiscard]] Sequence* that_begins_with(const Sequence& sequence) noexcept;
  [[nodiscard]] Sequence* free_sequence() noexcept;
  // Of the evictable ones, but not the one excepted; null if there is no other.
  [[nodiscard]] Sequence* least_recently_used(const Sequence* except = nullptr) noexcept;
  // A free page, if need be an evictable sequence's, but not the excepted one's; -1 if there is none.
  [[nodiscard]] int32_t take_page(const Sequence* except = nullptr) noexcept;
  void cut(Sequence& sequence, int tokens) noexcept;
  void truncate(Sequence& sequence, int tokens) noexcept;
  void evict(Sequence& sequence) noexcept;

  PagePool pool_;
  CachedPages cached_;
  std::vector<Sequence> sequences_;
  std::vector<uint64_t> wanted_;  // names of the pages of the text that is looked for
  uint64_t admissions_ = 0;
  const int max_sequences_;
  const bool reuse_;
  const bool copies_;
  const bool shares_open_;
};

}  // namespace ull
