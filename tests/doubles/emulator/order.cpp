#include "order.h"

#include <algorithm>
#include <unordered_map>

#include "cluster.h"

namespace ull::emulator {

__attribute__((visibility("hidden"))) bool reports = false;

namespace {

std::unordered_map<const void*, View> released;  // by the address of an atomic in global memory

Order& order() { return *block->order; }
int width() { return static_cast<int>(order().thread.size()); }
uint32_t* seen(int thread) { return order().row(order().seen, thread); }
uint32_t* proxied(int thread) { return order().row(order().proxied, thread); }

__attribute__((optimize("O3"))) void raise(uint32_t* row, const uint32_t* other, int width) {
  for (int i = 0; i < width; ++i) row[i] = row[i] > other[i] ? row[i] : other[i];
}

void add(View& view, int number, const std::shared_ptr<const Row>& row) {
  std::shared_ptr<const Row>& mine = view[number];
  if (mine == row) return;
  if (mine == nullptr) {
    mine = row;
    return;
  }
  auto both = std::make_shared<Row>(*mine);
  raise(both->data(), row->data(), static_cast<int>(row->size()));
  if (*both == *row) {
    mine = row;
  } else if (*both != *mine) {
    mine = std::move(both);
  }
}

void add(View& view, const View& other) {
  for (const auto& [number, row] : other) add(view, number, row);
}

// A release has happened: what the thread does from now on is another epoch.
void advance(int thread) { ++seen(thread)[thread]; }

void acquire(const View& view) {
  const int me = self->index;
  Order::OfThread& mine = my_order();
  std::shared_ptr<View> foreign;
  for (const auto& [number, row] : view) {
    if (number == block->number) {
      raise(seen(me), row->data(), width());
      continue;
    }
    if (foreign == nullptr)
      foreign = mine.foreign == nullptr ? std::make_shared<View>() : std::make_shared<View>(*mine.foreign);
    add(*foreign, number, row);
  }
  if (foreign != nullptr) mine.foreign = std::move(foreign);
}

void join_rows(std::vector<uint32_t>& rows, const std::vector<int>& threads) {
  Order& all = order();
  Row joint(all.row(rows, threads[0]), all.row(rows, threads[0]) + width());
  for (const int thread : threads) raise(joint.data(), all.row(rows, thread), width());
  for (const int thread : threads) std::copy(joint.begin(), joint.end(), all.row(rows, thread));
}

void join_foreign(const std::vector<int>& threads) {
  std::vector<Order::OfThread>& each = order().thread;
  std::shared_ptr<const View> joint = each[static_cast<size_t>(threads[0])].foreign;
  for (const int thread : threads) {
    const std::shared_ptr<const View>& other = each[static_cast<size_t>(thread)].foreign;
    if (other == joint || other == nullptr) continue;
    auto both = joint == nullptr ? std::make_shared<View>() : std::make_shared<View>(*joint);
    add(*both, *other);
    joint = std::move(both);
  }
  for (const int thread : threads) each[static_cast<size_t>(thread)].foreign = joint;
}

}  // namespace

void begin_order(Block& block) {
  if (!reports) return;
  if (block.order == nullptr) block.order = std::make_shared<Order>();
  const auto threads = static_cast<size_t>(grid.threads);
  block.order->thread.assign(threads, {});
  block.order->proxied.clear();
  block.order->seen.assign(threads * threads, 0);
  for (size_t i = 0; i < threads; ++i) block.order->seen[i * threads + i] = 1;
}

void forget_order() { released.clear(); }

Order::OfThread& my_order() { return order().thread[static_cast<size_t>(self->index)]; }
uint32_t my_clock() { return seen(self->index)[self->index]; }
uint32_t clock_of(int thread) { return seen(thread)[thread]; }

void threads_meet(const std::vector<int>& threads, const Handover& arrived) {
  if (!reports) return;
  const int first = threads[0];
  if (!arrived.seen.empty()) raise(seen(first), arrived.seen.data(), width());
  if (!arrived.proxied.empty()) raise(proxied(first), arrived.proxied.data(), width());
  join_rows(order().seen, threads);
  if (!order().proxied.empty()) join_rows(order().proxied, threads);
  if (!arrived.foreign.empty()) {
    std::shared_ptr<const View>& foreign = order().thread[static_cast<size_t>(first)].foreign;
    auto both = foreign == nullptr ? std::make_shared<View>() : std::make_shared<View>(*foreign);
    add(*both, arrived.foreign);
    foreign = std::move(both);
  }
  join_foreign(threads);
  for (const int thread : threads) advance(thread);
}

void blocks_meet(const std::vector<Thread*>& threads) {
  if (!reports) return;
  Block* const mine = block;
  View all;
  for (int rank = 0; rank < grid.cluster; ++rank) {
    block = &block_of_rank(rank);
    std::vector<int> own;
    for (const Thread* thread : threads) {
      if (thread->warp->block == block) own.push_back(thread->index);
    }
    if (own.empty()) continue;
    threads_meet(own, {});
    const int first = own[0];
    auto joint = std::make_shared<Row>(seen(first), seen(first) + width());
    --(*joint)[static_cast<size_t>(first)];  // what it does from now on is another epoch
    add(all, block->number, std::move(joint));
    const std::shared_ptr<const View>& foreign = order().thread[static_cast<size_t>(first)].foreign;
    if (foreign != nullptr) add(all, *foreign);
  }
  for (int rank = 0; rank < grid.cluster; ++rank) {
    block = &block_of_rank(rank);
    auto others = std::make_shared<View>(all);
    others->erase(block->number);
    for (const Thread* thread : threads) {
      if (thread->warp->block != block) continue;
      raise(seen(thread->index), all[block->number]->data(), width());
      order().thread[static_cast<size_t>(thread->index)].foreign = others;
    }
  }
  block = mine;
}

void hand_over(Handover& to) {
  if (!reports) return;
  const int me = self->index;
  to.seen.resize(static_cast<size_t>(width()));
  raise(to.seen.data(), seen(me), width());
  if (!order().proxied.empty()) {
    to.proxied.resize(static_cast<size_t>(width()));
    raise(to.proxied.data(), proxied(me), width());
  }
  if (my_order().foreign != nullptr) add(to.foreign, *my_order().foreign);
  advance(me);
}

void hand_loads_over(Handover& to) {
  if (!reports) return;
  add(to.loaded, everything_seen());
  add(to.loaded, my_order().loaded);
  advance(self->index);
}

void take_over(const Handover& from) {
  if (!reports) return;
  add(my_order().loaded, from.loaded);
  if (from.seen.empty()) return;
  raise(seen(self->index), from.seen.data(), width());
  if (!from.proxied.empty()) raise(proxied(self->index), from.proxied.data(), width());
  acquire(from.foreign);
}

View everything_seen() {
  const std::shared_ptr<const View>& foreign = my_order().foreign;
  View view = foreign == nullptr ? View() : *foreign;
  view[block->number] = std::make_shared<Row>(seen(self->index), seen(self->index) + width());
  return view;
}

void fence_order() {
  if (!reports) return;
  Order::OfThread& mine = my_order();
  acquire(mine.acquired);
  mine.acquired.clear();
  mine.fenced = std::make_shared<View>(everything_seen());
  advance(self->index);
}

void atomic_order(const void* address) {
  View& here = released[address];
  Order::OfThread& mine = my_order();
  add(mine.acquired, here);
  if (mine.fenced != nullptr) add(here, *mine.fenced);
}

void release_order(const void* address) {
  if (!reports) return;
  add(released[address], everything_seen());
  advance(self->index);
}

void await_order(const void* address) {
  if (reports) add(my_order().acquired, released[address]);
}

void fence_copies_order() {
  if (!reports) return;
  if (order().proxied.empty()) order().proxied.assign(order().seen.size(), 0);
  raise(proxied(self->index), seen(self->index), width());
  advance(self->index);
}

void fence_sources_order() {
  if (reports) my_order().sources_fenced = my_order().waited;
}

bool holds(const View& view, int block_number, int thread, uint32_t clock) {
  const auto row = view.find(block_number);
  return row != view.end() && (*row->second)[static_cast<size_t>(thread)] >= clock;
}

bool has_happened(int block_number, int thread, uint32_t clock) {
  if (block_number == block->number) return seen(self->index)[thread] >= clock;
  const std::shared_ptr<const View>& foreign = my_order().foreign;
  return foreign != nullptr && holds(*foreign, block_number, thread, clock);
}

bool has_ended(int block_number, int thread, uint32_t clock) {
  return has_happened(block_number, thread, clock) || holds(my_order().loaded, block_number, thread, clock);
}

bool is_proxied(int thread, uint32_t clock) {
  return !order().proxied.empty() && proxied(self->index)[thread] >= clock;
}

}  // namespace ull::emulator
