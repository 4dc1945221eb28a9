// What is launched on a stream, round after round, and what will most likely be launched next. While the host waits for
// the device, that graph is put on the stream, where it waits for its request (kAwaited, kernels/params.h): when the
// host knows what it wants, one store into mapped memory takes the place of a launch. Nothing is guessed of the request
// itself, so nothing that is wrong is ever run: a graph that is not wanted is sent away, and its kernels find nothing
// to do. That costs some microseconds of the device; so a launch is only foreseen where the last two rounds agree on
// it.
//
// One graph waits at a time, behind everything else on the stream. The queues of all that draft there share a
// Foresight: whoever launches something else, or copies, sends it away first. Used by one thread at a time.
#pragma once

namespace ull::graph {

class RoundQueue;

class Foresight {
 public:
  // A round is about to be launched. foresees: what comes behind it is a round like it, unless the host learns
  // otherwise.
  void begin_round(bool foresees) noexcept {
    begins_ = true;
    if (!foresees_) now_.count = kEndless;
    foresees_ = foresees;
  }
  // What comes next is no round, or nothing: it is not foreseen, and nothing waits.
  void stop() noexcept {
    foresees_ = false;
    send_away();
  }

  // Notes that `queue` has launched `graph`, of so many rounds, or given it its request.
  void launched(RoundQueue& queue, void* graph, int rounds) noexcept;
  // Called where the host waits: launches what it will want next, if that is known. A queue that fails in it says so
  // when it is used.
  void prepare_next() noexcept;

  [[nodiscard]] bool waits(const RoundQueue& queue) const noexcept { return waiting_ == &queue; }
  [[nodiscard]] bool waits(const RoundQueue& queue, const void* graph) const noexcept {
    return waiting_ == &queue && waiting_graph_ == graph;
  }
  // The graph that waits is to do nothing.
  void send_away() noexcept;

 private:
  static constexpr int kLongest = 16;            // launches from one round to the next, that included
  static constexpr int kEndless = kLongest + 1;  // of what is not to be foreseen

  struct Launch {
    RoundQueue* queue;
    void* graph;
    bool operator==(const Launch&) const = default;
  };
  // What followed a round that was to be followed by another, up to that.
  struct Course {
    Launch launches[kLongest];
    int count = 0;
  };

  Course now_, last_, older_;
  bool begins_ = false;    // the next launch is a round's
  bool foresees_ = false;  // behind the round under way
  RoundQueue* waiting_ = nullptr;
  void* waiting_graph_ = nullptr;
};

}  // namespace ull::graph
