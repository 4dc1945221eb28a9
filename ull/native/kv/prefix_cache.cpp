#include "kv/prefix_cache.h"

#include <algorithm>
#include <string>

#include "base/allocation.h"

namespace ull {
namespace {

constexpr int kLeastCopied = 8;  // tokens; fewer are read with the rest of the prompt in less than a step's time

}  // namespace

PagePool::PagePool(int page_count) : holders_(static_cast<size_t>(page_count), uint16_t{0}) {
  free_.reserve(static_cast<size_t>(page_count));
  for (int32_t page = page_count - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() noexcept {
  if (free_.empty()) return -1;
  const int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::release(int32_t page) noexcept {
  if (--holders_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

void Sequence::append(std::span<const int32_t> tokens) noexcept {
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  while ((hashes_.size() + 1) * kPageTokens <= tokens_.size()) {
    const uint64_t before = hashes_.empty() ? 0 : hashes_.back();
    hashes_.push_back(page_hash(before, tokens_.data() + hashes_.size() * kPageTokens));
    cached_->add(hashes_.back());
  }
}

void Sequence::shorten(int tokens) noexcept {
  tokens_.resize(static_cast<size_t>(tokens));
  drafted_.cut(tokens);
  while (hashes_.size() * kPageTokens > tokens_.size()) {
    cached_->remove(hashes_.back());
    hashes_.pop_back();
  }
}

PrefixCache::PrefixCache(const Options& options)
    : pool_(options.page_count),
      sequences_(static_cast<size_t>(options.max_sequences) + static_cast<size_t>(options.max_open) - 1),
      max_sequences_(options.max_sequences),
      reuse_(options.reuse),
      copies_(options.copies),
      shares_open_(options.reuse && options.shares_open) {
  const double bytes = static_cast<double>(sizeof(int32_t)) * static_cast<double>(sequences_.size()) * options.context;
  allocate_for(
      "sessions: " + std::to_string(options.max_sequences) + " of up to " + std::to_string(options.context) + " tokens",
      bytes, [&] {
        wanted_.reserve(static_cast<size_t>(pages_for(options.context)));
        for (Sequence& sequence : sequences_) {
          sequence.tokens_.reserve(static_cast<size_t>(options.context));
          sequence.hashes_.reserve(static_cast<size_t>(pages_for(options.context)));
          sequence.pages_.reserve(static_cast<size_t>(pages_for(options.context)));
          sequence.cached_ = &cached_;
        }
      });
}

// Of max_sequences + max_open - 1 sequences, at most max_open - 1 are open and at most half of max_sequences pinned:
// one is free, or can be evicted.
Sequence& PrefixCache::open(std::span<const int32_t> prompt, uint64_t pin) noexcept {
  ++admissions_;
  const Match match = find(prompt.first(prompt.size() - 1), pin);
  Sequence* sequence = nullptr;
  if (!match.continues) {
    sequence = free_sequence();
    if (sequence == nullptr) sequence = least_recently_used(match.sequence);
  }
  if (sequence == nullptr) sequence = match.continues ? match.sequence : least_recently_used();
  const bool in_place = sequence == match.sequence;  // also where the match is the only one that can be had
  if (!in_place) evict(*sequence);
  sequence->used_at_ = admissions_;
  sequence->open_ = true;
  if (in_place) {
    cut(*sequence, match.shared);
  } else if (match.sequence != nullptr) {
    fork(match, *sequence);
  }
  return *sequence;
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> reusable, uint64_t pin) noexcept {
  wanted_.clear();
  while ((wanted_.size() + 1) * kPageTokens <= reusable.size()) {
    const uint64_t before = wanted_.empty() ? 0 : wanted_.back();
    wanted_.push_back(page_hash(before, reusable.data() + wanted_.size() * kPageTokens));
  }
  Match best;
  for (Sequence& sequence : sequences_) {
    if (sequence.open_ && !shares_open_) continue;
    const int shared = shared_with(sequence, reusable);
    const int lost = sequence.size() - shared;
    const bool mostly = 2 * shared >= static_cast<int>(reusable.size());
    const bool ours = !sequence.open_ && (sequence.pin_ == 0 || sequence.pin_ == pin);
    const bool continues = ours && shared > 0 && (lost <= shared || (lost <= kPageTokens && mostly));
    if (!continues && shared < (copies_ ? kLeastCopied : kPageTokens)) continue;
    const bool better = shared > best.shared || (shared == best.shared && sequence.size() < best.sequence->size());
    if (better) best = {&sequence, shared, continues};
  }
  // Equal names are not equal tokens for certain.
  const auto begin = reusable.begin();
  if (best.shared > 0 && !std::equal(begin, begin + best.shared, best.sequence->tokens_.begin())) return {};
  return best;
}

int PrefixCache::shared_with(const Sequence& sequence, std::span<const int32_t> text) const noexcept {
  size_t same = 0;  // pages; where one differs, so do all behind it
  size_t beyond = std::min(sequence.hashes_.size(), wanted_.size()) + 1;
  while (beyond - same > 1) {
    const size_t middle = same + (beyond - same) / 2;
    (sequence.hashes_[middle - 1] == wanted_[middle - 1] ? same : beyond) = middle;
  }
  const auto at = static_cast<ptrdiff_t>(same * kPageTokens);
  const auto ends = std::mismatch(sequence.tokens_.begin() + at, sequence.tokens_.end(), text.begin() + at, text.end());
  return static_cast<int>(ends.second - text.begin());
}

// Shares the match's prefix with a sequence that holds nothing yet.
void PrefixCache::fork(const Match& match, Sequence& sequence) noexcept {
  Sequence& source = *match.sequence;
  source.used_at_ = admissions_;  // its prefix is in use: the last to be evicted
  int taken = match.shared / kPageTokens * kPageTokens;
  sequence.pages_.assign(source.pages_.begin(), source.pages_.begin() + pages_for(taken));
  for (const int32_t page : sequence.pages_) pool_.hold(page);
  if (const int rest = match.shared - taken; copies_ && rest >= kLeastCopied) {
    if (const int32_t page = take_page(&source); page >= 0) {
      sequence.copy_ = {source.pages_[static_cast<size_t>(pages_for(taken))], page, rest};
      sequence.pages_.push_back(page);
      taken = match.shared;
    }
  }
  sequence.append(source.tokens().first(static_cast<size_t>(taken)));
  sequence.drafted_ = source.drafted_;
  sequence.drafted_.cut(taken);
}

Status PrefixCache::reserve(Sequence& sequence, int tokens) noexcept {
  while (static_cast<int>(sequence.pages_.size()) < pages_for(tokens)) {
    const int32_t page = take_page();
    if (page < 0) return Status::kOutOfPages;
    sequence.pages_.push_back(page);
  }
  return Status::kOk;
}

void PrefixCache::close(Sequence& sequence, int kept, uint64_t pin) noexcept {
  const int whole = sequence.size() - sequence.copy_.tokens;  // without what was to be copied and has not been
  sequence.copied();
  truncate(sequence, reuse_ ? std::min(kept, whole) : 0);  // and gives back what was reserved ahead
  sequence.open_ = false;
  if (pin != 0) {
    unpin(pin);
    sequence.pin_ = sequence.size() > 0 && pinned() < max_sequences_ / 2 ? pin : 0;
  }
  Sequence* other = sequence.size() > 0 && sequence.pin_ == 0 ? that_begins_with(sequence) : nullptr;
  if (other != nullptr) other->used_at_ = sequence.used_at_;
  if (other != nullptr || sequence.size() == 0) evict(sequence);
  const auto idle =
      std::ranges::count_if(sequences_, [](const Sequence& each) { return each.used_at_ != 0 && !each.open_; });
  if (idle > max_sequences_) {  // those that are open have places of their own
    if (Sequence* oldest = least_recently_used(); oldest != nullptr) evict(*oldest);
  }
}

void PrefixCache::unpin(uint64_t pin) noexcept {
  for (Sequence& sequence : sequences_) {
    if (sequence.pin_ == pin) sequence.pin_ = 0;
  }
}

void PrefixCache::unpin_all() noexcept {
  for (Sequence& sequence : sequences_) sequence.pin_ = 0;
}

int PrefixCache::resident() const noexcept {
  return static_cast<int>(std::count_if(sequences_.begin(), sequences_.end(),
                                        [](const Sequence& sequence) { return sequence.used_at_ != 0; }));
}

int PrefixCache::pinned() const noexcept {
  return static_cast<int>(
      std::count_if(sequences_.begin(), sequences_.end(), [](const Sequence& sequence) { return sequence.pin_ != 0; }));
}

int PrefixCache::pages_pinned() const noexcept {
  int pages = 0;
  for (const Sequence& sequence : sequences_)
    pages += sequence.pin_ != 0 ? static_cast<int>(sequence.pages_.size()) : 0;
  return pages;
}

Sequence* PrefixCache::free_sequence() noexcept {
  for (Sequence& sequence : sequences_) {
    if (sequence.used_at_ == 0) return &sequence;
  }
  return nullptr;
}

Sequence* PrefixCache::that_begins_with(const Sequence& sequence) noexcept {
  for (Sequence& other : sequences_) {
    if (&other == &sequence || other.size() < sequence.size()) continue;
    if (const size_t pages = sequence.hashes_.size();
        pages > 0 && other.hashes_[pages - 1] != sequence.hashes_.back()) {
      continue;
    }
    if (std::equal(sequence.tokens_.begin(), sequence.tokens_.end(), other.tokens_.begin())) return &other;
  }
  return nullptr;
}

Sequence* PrefixCache::least_recently_used(const Sequence* except) noexcept {
  Sequence* oldest = nullptr;
  for (Sequence& sequence : sequences_) {
    if (&sequence == except || !sequence.evictable()) continue;
    if (oldest == nullptr || sequence.used_at_ < oldest->used_at_) oldest = &sequence;
  }
  return oldest;
}

int32_t PrefixCache::take_page(const Sequence* except) noexcept {
  for (;;) {
    if (const int32_t page = pool_.take(); page >= 0) return page;
    Sequence* victim = least_recently_used(except);
    if (victim == nullptr) return -1;
    evict(*victim);
  }
}

// Keeps the first `tokens` tokens. If the cut falls inside a page that another sequence holds too, and which must not
// be written, the sequence gets a page of its own, into which they are to be copied.
void PrefixCache::cut(Sequence& sequence, int tokens) noexcept {
  const size_t last = static_cast<size_t>(tokens / kPageTokens);
  if (copies_ && tokens % kPageTokens >= kLeastCopied && pool_.shared(sequence.pages_[last])) {
    const int32_t shared = sequence.pages_[last];
    const int32_t own = take_page();
    if (own >= 0 && pool_.shared(shared)) {
      sequence.copy_ = {shared, own, tokens % kPageTokens};
      sequence.pages_[last] = own;
      pool_.release(shared);
    } else if (own >= 0) {  // the other sequence had to go for it: the page has become this one's own
      pool_.release(own);
    }
  }
  truncate(sequence, tokens);
}

// Keeps the first `tokens` tokens, or fewer: a page that another sequence holds too must not be written, so if the cut
// falls inside one it moves down to that page's start.
void PrefixCache::truncate(Sequence& sequence, int tokens) noexcept {
  const int last = tokens / kPageTokens;
  if (tokens % kPageTokens != 0 && pool_.shared(sequence.pages_[static_cast<size_t>(last)])) {
    tokens = last * kPageTokens;
  }
  sequence.shorten(tokens);
  while (static_cast<int>(sequence.pages_.size()) > pages_for(tokens)) {
    pool_.release(sequence.pages_.back());
    sequence.pages_.pop_back();
  }
}

void PrefixCache::evict(Sequence& sequence) noexcept {
  truncate(sequence, 0);
  sequence.used_at_ = 0;
  sequence.pin_ = 0;
}

}  // namespace ull
