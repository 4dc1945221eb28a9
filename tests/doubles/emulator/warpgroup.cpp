#include "warpgroup.h"

#include <cstring>
#include <deque>

#include "core_matrices.h"
#include "numbers.h"
#include "order.h"
#include "shadow.h"

namespace ull::emulator {

namespace {

constexpr int kWarps = 4;  // of a warpgroup
constexpr int kThreads = kWarps * kWarpLanes;

// In accumulators in flight: a signalling NaN, which copies keep and arithmetic makes a quiet one.
constexpr uint32_t kPoison = 0x7FA5C3F1;

enum class Operation : uint8_t { kFence, kMma, kCommit, kWait };

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kFence:
      return "warpgroup_fence";
    case Operation::kMma:
      return "warpgroup_mma";
    case Operation::kCommit:
      return "warpgroup_commit";
    case Operation::kWait:
      return "warpgroup_wait";
  }
  return "";
}

std::string told(Site site) { return std::string(file_name(site.file)) + ":" + std::to_string(site.line); }

// What the threads of a warpgroup come to one after another.
struct Step {
  Operation operation;
  Site site;
  int groups;  // of a product, its descriptor and its factors
  uint64_t b;
  Factors factors;
  bool begins;  // the sum: it adds to nothing
  int first;    // the thread that came first
  int came;     // how many have
};

// The registers of a warp that products in flight add to.
struct Accumulator {
  int groups;
  int products;                   // in flight
  Site site;                      // of the last product
  uint32_t lanes;                 // whose registers are poisoned:
  float* registers[kWarpLanes];   // [groups][4]
  std::vector<Matrices> columns;  // [groups], of which c counts

  bool meets(int lane, const void* address, uint64_t bytes) const {
    if ((lanes >> lane & 1U) == 0) return false;
    const auto* from = static_cast<const unsigned char*>(address);
    const auto* mine = reinterpret_cast<const unsigned char*>(registers[lane]);
    return from < mine + groups * 4 * sizeof(float) && mine < from + bytes;
  }
};

// A warp's part of a product in flight.
struct Product {
  Site site;
  Factors factors;
  bool begins;
  int commit;  // the number of its group
  CoreMatrices b;
  Accumulator* accumulator;
  uint32_t lanes;  // that have come
  const uint32_t* a[kWarpLanes];
  uint32_t first_a[kWarpLanes][4];     // what a and b were when it began
  std::vector<unsigned char> first_b;  // [groups][2 halves of k][core matrix]
  std::vector<Store> stores;           // that have written b
};

// An access to the stack.
struct Touch {
  const void* address;
  uint64_t bytes;
  bool stores;
};

struct LaneState {
  uint32_t steps, products;  // that it has come to
  int commits;
  bool fenced;                 // since the last commit
  std::vector<Touch> touched;  // registers, since the fence
};

// A warpgroup_wait() of a warp, and what each lane's clock was.
struct Finish {
  Site site;
  uint32_t clock[kWarpLanes];
};

struct WarpState {
  uint32_t finished;  // products
  std::deque<Product> products;
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  std::vector<Finish> finishes;
  std::vector<uint32_t> readers;  // by 16 bytes of shared memory: the last of the finishes, from 1, behind a product
                                  // that has read them; 0: none
  LaneState lane[kWarpLanes];
};

struct Warpgroup {
  std::deque<Step> steps;
  uint32_t passed;  // steps that all threads have come to and that are forgotten
  WarpState warp[kWarps];
};

}  // namespace

struct Warpgroups {
  explicit Warpgroups(int threads) : warpgroup(static_cast<size_t>(threads / kThreads)) {}

  std::vector<Warpgroup> warpgroup;  // those of which the block has all threads
};

namespace {

WarpState& my_warp() {
  const int index = self->warp->index;
  return block->warpgroups->warpgroup[static_cast<size_t>(index / kWarps)].warp[index % kWarps];
}

LaneState& my_lane() { return my_warp().lane[self->lane]; }

LaneState& come_to(Step step) {
  if (block->warpgroups == nullptr) block->warpgroups = std::make_shared<Warpgroups>(grid.threads);
  const auto index = static_cast<size_t>(self->index / kThreads);
  const char* name = name_of(step.operation);
  if (index >= block->warpgroups->warpgroup.size()) {
    fail_at(step.site, "%s by thread %d: of its warpgroup, threads %zu to %zu, the block of %d lacks some", name,
            self->index, index * kThreads, index * kThreads + kThreads - 1, grid.threads);
  }
  Warpgroup& group = block->warpgroups->warpgroup[index];
  LaneState& lane = my_lane();
  const uint32_t at = lane.steps++ - group.passed;
  if (at == group.steps.size()) {
    for (size_t w = index * kWarps; w < (index + 1) * kWarps; ++w) {
      const Warp& warp = block->warps[w];
      if (warp.exited == 0) continue;
      fail_at(step.site, "%s, but thread %d of the warpgroup has ended", name,
              warp.index * kWarpLanes + __builtin_ctz(warp.exited));
    }
    step.first = self->index;
    group.steps.push_back(step);
  }
  Step& all = group.steps[at];
  if (all.operation != step.operation || all.site.line != step.site.line) {
    fail_at(step.site, "%s, but thread %d of the warpgroup was in %s at %s", name, all.first, name_of(all.operation),
            told(all.site).c_str());
  }
  if (all.groups != step.groups || all.b != step.b || all.factors != step.factors || all.begins != step.begins) {
    fail_at(step.site, "%s of another shape or with another descriptor than thread %d of the warpgroup", name,
            all.first);
  }
  ++all.came;
  while (!group.steps.empty() && group.steps.front().came == kThreads) {
    group.steps.pop_front();
    ++group.passed;
  }
  return lane;
}

LaneState& come_to(Operation operation, Site site) {
  return come_to({operation, site, 0, 0, Factors::kF16, false, 0, 0});
}

bool is_poisoned(const Accumulator& accumulator, int lane) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(accumulator.registers[lane]);
  return memcmp(bytes, &kPoison, sizeof(kPoison)) == 0 &&
         memcmp(bytes, bytes + sizeof(kPoison), (accumulator.groups * 4U - 1) * sizeof(kPoison)) == 0;
}

void require_poison(const Accumulator& accumulator, int lane, Site site) {
  if (is_poisoned(accumulator, lane)) return;
  fail_at(site, "lane %d has changed c of the product at %s before a warpgroup_wait() brought it back", lane,
          told(accumulator.site).c_str());
}

// A lane's registers, see arch::mma: two pairs of columns of each group, in rows lane / 4 and 8 more.
template <typename Visit>
void visit_registers(Accumulator& accumulator, int lane, Visit visit) {
  for (int group = 0; group < accumulator.groups; ++group) {
    for (int half = 0; half < 2; ++half) {
      visit(&accumulator.columns[static_cast<size_t>(group)].c[lane / 4 + 8 * half][lane % 4 * 2],
            accumulator.registers[lane] + 4 * group + 2 * half);
    }
  }
}

// The lane's registers are the accumulator's until they are brought back.
void take_registers(Accumulator& accumulator, float* c, Site site) {
  const int lane = self->lane;
  if ((accumulator.lanes >> lane & 1U) != 0) {
    if (accumulator.registers[lane] != c) {
      fail_at(site, "lane %d has other registers for c than its warp at %s", lane, told(accumulator.site).c_str());
    }
    require_poison(accumulator, lane, site);
    return;
  }
  accumulator.lanes |= 1U << lane;
  accumulator.registers[lane] = c;
  visit_registers(accumulator, lane, [](float* value, float* at) {
    memcpy(value, at, 2 * sizeof(float));
    memcpy(at, &kPoison, sizeof(kPoison));
    memcpy(at + 1, &kPoison, sizeof(kPoison));
  });
}

// What the first lane of a warp to come to a product adds to.
Accumulator& accumulator_at(const float* c, int groups, Site site) {
  WarpState& warp = my_warp();
  for (const auto& each : warp.accumulators) {
    if (!each->meets(self->lane, c, static_cast<uint64_t>(groups) * 4 * sizeof(float))) continue;
    if (each->registers[self->lane] == c && each->groups == groups) return *each;
    fail_at(site, "c overlaps c of the product of another shape at %s, which is in flight", told(each->site).c_str());
  }
  warp.accumulators.push_back(std::make_unique<Accumulator>());
  Accumulator& fresh = *warp.accumulators.back();
  fresh.groups = groups;
  fresh.columns.resize(static_cast<size_t>(groups));
  return fresh;
}

// The same lane begins the product.
void add_product(Factors factors, bool begins, const float* c, const CoreMatrices& b, int commit, Site site) {
  WarpState& warp = my_warp();
  Product& product = warp.products.emplace_back();
  product.site = site;
  product.factors = factors;
  product.begins = begins;
  product.commit = commit;
  product.b = b;
  product.accumulator = &accumulator_at(c, b.groups, site);
  product.accumulator->site = site;
  ++product.accumulator->products;
  product.first_b.resize(static_cast<size_t>(b.groups) * 2 * kCoreBytes);
  const auto bytes = static_cast<uint32_t>(b.piece_bytes());
  for (int i = 0; i < b.pieces(); ++i) {
    memcpy(&product.first_b[static_cast<size_t>(i) * bytes], b.piece(i), bytes);
    if (reports) find_stores(b.piece(i), bytes, product.stores);
  }
}

void require_brought(const CoreMatrices& b, Site site) {
  for (const std::vector<BulkCopy>* copies : {&block->copies, &block->landed}) {
    for (const BulkCopy& copy : *copies) {
      if (!b.meets(copy.shared, copy.bytes)) continue;
      fail_at(site, "reads shared + %td, where the bulk copy begun at %s writes: nobody has waited for it",
              copy.shared - block->shared, told(copy.site).c_str());
    }
  }
}

void require_fenced(LaneState& lane, const float* c, int groups, const uint32_t* a, Site site) {
  if (!lane.fenced) {
    fail_at(site, "warpgroup_mma without warpgroup_fence() %s",
            lane.commits == 0 ? "before it" : "since the last warpgroup_commit()");
  }
  const auto meets = [](const Touch& touch, const void* address, uint64_t bytes) {
    const auto* from = static_cast<const unsigned char*>(touch.address);
    const auto* mine = static_cast<const unsigned char*>(address);
    return from < mine + bytes && mine < from + touch.bytes;
  };
  for (const Touch& touch : lane.touched) {
    const bool of_c = meets(touch, c, static_cast<uint64_t>(groups) * 4 * sizeof(float));
    if (of_c || (touch.stores && meets(touch, a, 4 * sizeof(uint32_t)))) {
      fail_at(site, "warpgroup_mma, but thread %d has accessed %s since warpgroup_fence()", self->index,
              of_c ? "c" : "a");
    }
  }
}

// ---- when a product is finished -------------------------------------------------------------------------------------

// Ends the launch if an operand is not what it was when the product began.
void require_operands(const Product& product, Site site) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (memcmp(product.a[lane], product.first_a[lane], sizeof(product.first_a[lane])) == 0) continue;
    fail_at(site, "lane %d has changed a of the product at %s, which was in flight until here", lane,
            told(product.site).c_str());
  }
  const auto bytes = static_cast<size_t>(product.b.piece_bytes());
  for (int i = 0; i < product.b.pieces(); ++i) {
    const unsigned char* piece = product.b.piece(i);
    if (memcmp(piece, &product.first_b[static_cast<size_t>(i) * bytes], bytes) == 0) continue;
    fail_at(site, "b of the product at %s, which was in flight until here, has changed: at shared + %td to + %td",
            told(product.site).c_str(), piece - block->shared, piece + bytes - block->shared);
  }
}

// Half of a product of e4m3 as one of f16, which holds each of them: a lane's words 2 * half and + 1 of a, and of b the
// core matrices of that half of k.
void compute_e4m3(const Product& product, int half) {
  std::vector<Matrices>& columns = product.accumulator->columns;
  uint16_t a[16][16];  // [row][k]
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = product.first_a[lane][2 * half + i / 4];
      a[lane / 4 + i / 4 * 8][lane % 4 * 4 + i % 4] = kE4m3.f16[word >> (i % 4 * 8) & 255U];
    }
  }
  for (size_t group = 0; group < columns.size(); ++group) {
    Matrices& m = columns[group];
    memcpy(m.a, a, sizeof(a));
    const unsigned char* core = &product.first_b[(2 * group + static_cast<size_t>(half)) * kCoreBytes];
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) m.b[k][column] = kE4m3.f16[core[column * kRowBytes + k]];
    }
    multiply(m);
  }
}

void compute(const Product& product) {
  if (product.begins) {
    for (Matrices& m : product.accumulator->columns) memset(m.c, 0, sizeof(m.c));
  }
  if (product.factors == Factors::kE4m3) {
    for (int half = 0; half < 2; ++half) compute_e4m3(product, half);
    return;
  }
  std::vector<Matrices>& columns = product.accumulator->columns;
  for (int lane = 0; lane < kWarpLanes; ++lane) set_a(columns[0], lane, product.first_a[lane]);
  const unsigned char* core = product.first_b.data();
  for (Matrices& m : columns) {
    if (&m != &columns[0]) memcpy(m.a, columns[0].a, sizeof(m.a));
    uint16_t b[2][8][8];  // [half of k][column][k]
    memcpy(b, core, sizeof(b));
    core += sizeof(b);
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) m.b[k][column] = b[k / 8][column][k % 8];
    }
    multiply(m);
  }
}

// Keeps in mind that the warp's last finish stands behind a product that has read there.
void remember_reader(WarpState& warp, const CoreMatrices& b) {
  if (warp.readers.empty()) warp.readers.resize(grid.shared_bytes / kRowBytes);
  for (int i = 0; i < b.pieces(); ++i) {
    const auto row = static_cast<size_t>(b.piece(i) - block->shared) / kRowBytes;
    for (int j = 0; j < b.piece_bytes() / kRowBytes; ++j) {
      warp.readers[row + j] = static_cast<uint32_t>(warp.finishes.size());
    }
  }
}

void remember_finish(WarpState& warp, Site site) {
  Finish& finish = warp.finishes.emplace_back();
  finish.site = site;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    finish.clock[lane] = clock_of(self->warp->index * kWarpLanes + lane);
  }
}

// Whether all of the accumulator's registers are among those that the wait was called with.
bool is_handed(const Accumulator& accumulator, const Operand (&operands)[kWarpLanes]) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const auto* c = reinterpret_cast<const float*>(operands[lane].value);
    const float* mine = accumulator.registers[lane];
    if (mine < c || mine + 4 * accumulator.groups > c + 4 * operands[lane].b[1]) return false;
  }
  return true;
}

// Whether that wait of a warp has happened before what this thread does now, in any lane: its products were the whole
// warp's.
bool is_over(const Finish& finish, const Block& owner, int warp) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (has_ended(owner.number, warp * kWarpLanes + lane, finish.clock[lane])) return true;
  }
  return false;
}

std::string reader_in_flight(const WarpState& warp, const unsigned char* from, uint64_t bytes) {
  for (const Product& product : warp.products) {
    if (product.b.meets(from, bytes)) return "the product at " + told(product.site) + ", which is in flight, reads it";
  }
  return {};
}

std::string reader_not_over(const WarpState& state, const Block& owner, int warp, const unsigned char* from,
                            uint64_t bytes) {
  if (state.readers.empty()) return {};
  const auto first = static_cast<size_t>(from - owner.shared) / kRowBytes;
  const auto last = (static_cast<size_t>(from - owner.shared) + bytes - 1) / kRowBytes;
  for (size_t row = first; row <= last && row < state.readers.size(); ++row) {
    if (state.readers[row] == 0) continue;
    const Finish& finish = state.finishes[state.readers[row] - 1];
    if (is_over(finish, owner, warp)) continue;
    return "a product that warp " + std::to_string(warp) + " has waited for at " + told(finish.site) +
           " has read it: neither happens before the other";
  }
  return {};
}

}  // namespace

void fence_products(Site site) {
  LaneState& lane = come_to(Operation::kFence, site);
  lane.fenced = true;
  lane.touched.clear();
}

void begin_product(Factors factors, bool begins, float* c, int groups, const uint32_t* a, uint64_t b, Site site) {
  LaneState& lane = come_to({Operation::kMma, site, groups, b, factors, begins, 0, 0});
  require_fenced(lane, c, groups, a, site);
  const CoreMatrices matrices = core_matrices_of(b, groups, site);
  require_brought(matrices, site);
  WarpState& warp = my_warp();
  const size_t index = lane.products++ - warp.finished;
  if (index == warp.products.size()) add_product(factors, begins, c, matrices, lane.commits, site);
  Product& product = warp.products[index];
  product.lanes |= 1U << self->lane;
  product.a[self->lane] = a;
  memcpy(product.first_a[self->lane], a, sizeof(product.first_a[self->lane]));
  take_registers(*product.accumulator, c, site);
  if (reports) watch_product(product.stores, site);
}

void commit_products(Site site) {
  LaneState& lane = come_to(Operation::kCommit, site);
  lane.fenced = false;
  lane.touched.clear();
  ++lane.commits;
}

void wait_for_products(int pending, float* c, int groups, Site site) {
  come_to(Operation::kWait, site);
  Operand& mine = my_operand();
  mine.value = reinterpret_cast<uintptr_t>(c);
  mine.b[0] = static_cast<uint32_t>(pending);
  mine.b[1] = static_cast<uint32_t>(groups);
  meet_warp(Collective::kWarpgroupWait, site);
}

void finish_products(const Operand (&operands)[kWarpLanes], Site site) {
  WarpState& warp = my_warp();
  if (reports) remember_finish(warp, site);
  const int finished = warp.lane[0].commits - static_cast<int>(operands[0].b[0]);  // commits
  while (!warp.products.empty() && warp.products.front().commit < finished) {
    const Product& product = warp.products.front();
    require_operands(product, site);
    compute(product);
    if (reports) remember_reader(warp, product.b);
    --product.accumulator->products;
    warp.products.pop_front();
    ++warp.finished;
  }
  std::erase_if(warp.accumulators, [&](const std::unique_ptr<Accumulator>& accumulator) {
    if (accumulator->products != 0 || !is_handed(*accumulator, operands)) return false;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      require_poison(*accumulator, lane, site);
      visit_registers(*accumulator, lane, [](const float* value, float* at) { memcpy(at, value, 2 * sizeof(float)); });
    }
    return true;
  });
}

void end_products() {
  if (block->warpgroups == nullptr) return;
  const auto index = static_cast<size_t>(self->index / kThreads);
  if (index >= block->warpgroups->warpgroup.size()) return;
  const LaneState& lane = my_lane();
  const uint32_t mine = 1U << self->lane;
  for (const Product& product : my_warp().products) {
    if ((product.lanes & mine) == 0) continue;
    fail_at(product.site, "thread %d ends, and nobody has %s the product", self->index,
            product.commit == lane.commits ? "committed" : "waited for");
  }
  for (const auto& accumulator : my_warp().accumulators) {
    if ((accumulator->lanes & mine) == 0) continue;
    fail_at(accumulator->site, "thread %d ends, and no warpgroup_wait() was called with c of the product", self->index);
  }
  const Warpgroup& group = block->warpgroups->warpgroup[index];
  const uint32_t at = lane.steps - group.passed;
  if (at == group.steps.size()) return;
  const Step& missed = group.steps[at];
  fail_at(missed.site, "thread %d ends, and has not come to this %s as thread %d of its warpgroup", self->index,
          name_of(missed.operation), missed.first);
}

std::string product_that_reads(const Block& owner, const void* shared, uint64_t bytes) {
  if (owner.warpgroups == nullptr) return {};
  const auto* from = static_cast<const unsigned char*>(shared);
  int warp = 0;
  for (const Warpgroup& group : owner.warpgroups->warpgroup) {
    for (const WarpState& state : group.warp) {
      std::string found = reader_in_flight(state, from, bytes);
      if (found.empty() && reports) found = reader_not_over(state, owner, warp, from, bytes);
      if (!found.empty()) return found;
      ++warp;
    }
  }
  return {};
}

std::string product_of_registers(const void* address, uint64_t bytes, bool stores) {
  if (block->warpgroups == nullptr) return {};
  if (static_cast<size_t>(self->index / kThreads) >= block->warpgroups->warpgroup.size()) return {};
  const WarpState& warp = my_warp();
  for (const auto& accumulator : warp.accumulators) {
    if (accumulator->meets(self->lane, address, bytes)) return "c of the product at " + told(accumulator->site);
  }
  const auto* from = static_cast<const unsigned char*>(address);
  for (const Product& product : warp.products) {
    if (!stores || (product.lanes >> self->lane & 1U) == 0) continue;
    const auto* a = reinterpret_cast<const unsigned char*>(product.a[self->lane]);
    if (from < a + 4 * sizeof(uint32_t) && a < from + bytes) return "a of the product at " + told(product.site);
  }
  LaneState& lane = my_lane();
  if (lane.fenced) lane.touched.push_back({address, bytes, stores});
  return {};
}

}  // namespace ull::emulator
