#include "graph/foresight.h"

#include <algorithm>

#include "graph/round_queue.h"

namespace ull::graph {

void Foresight::launched(RoundQueue& queue, void* graph, int rounds) noexcept {
  if (waits(queue)) waiting_ = nullptr;
  if (rounds > 1) now_.count = kEndless;  // whose requests must be known
  if (now_.count < kLongest) now_.launches[now_.count] = {&queue, graph};
  now_.count = std::min(now_.count + 1, kEndless);
  if (!begins_) return;
  begins_ = false;
  older_ = last_;
  last_ = now_;
  if (last_.count == kEndless) last_.count = 0;
  now_.count = 0;
}

void Foresight::prepare_next() noexcept {
  const int next = now_.count;
  if (!foresees_ || waiting_ != nullptr || next >= last_.count || next >= older_.count) return;
  // All so far, and what comes next, were the same in both rounds before.
  if (!std::equal(now_.launches, now_.launches + next, last_.launches) ||
      !std::equal(last_.launches, last_.launches + next + 1, older_.launches)) {
    return;
  }
  const Launch& launch = last_.launches[next];
  if (launch.queue->failed() || !launch.queue->has_slot()) return;
  waiting_ = launch.queue;
  waiting_graph_ = launch.graph;
  launch.queue->launch_waiting(launch.graph);
}

void Foresight::send_away() noexcept {
  if (waiting_ == nullptr) return;
  waiting_->send_away();
  waiting_ = nullptr;
}

}  // namespace ull::graph
