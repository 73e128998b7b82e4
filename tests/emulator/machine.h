// A multiprocessor on a CPU: threads that take turns, as irregularly as it likes, and engines that work when it pleases them.
//
// Every CUDA thread is a fiber. It runs until it has to wait; then some other one does. What is asynchronous on a GPU
// (copies, products, signals to another block) lies in a list, and is done at some later time. Who comes next is drawn
// from a seed, and so is who is slow. So a kernel that needs a barrier which is not there goes wrong for some seed.
//
// Stricter than a GPU, in order to notice more:
// - Shared memory that a copy is on its way to is full of NaN until it arrives.
// - Threads and engines see memory apart: what a thread writes, the copy engine sees after that thread's fence.
// - Barriers complain of too many arrivals, warps of lanes that do different things, everything of memory that is not there.
// - Who reads or writes anything before the kernel before is known to be done is refused.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace machine {

constexpr uint32_t kBase = 1024;          // where a block's shared memory begins
constexpr uint32_t kMostShared = 227 * 1024;
constexpr int kLanes = 32, kGroup = 128;  // threads of a warp, and of those that multiply together
constexpr size_t kStackBytes = 128 * 1024;

struct Failure {
  std::string what;
};
[[noreturn]] void fail(const std::string& what);

// ---- what is in a block

struct Barrier {  // of shared memory: a phase ends when all have arrived and all bytes have come
  int count = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;
  void arrive() {
    if (pending == 0) fail("more arrive at a barrier than it waits for");
    --pending;
    look();
  }
  void expect(long more) { bytes += more; }
  void complete(long some) {
    bytes -= some;
    look();
  }
  void look() {
    if (pending || bytes) return;
    ++phase;
    pending = count;
  }
};
struct NamedBarrier {
  int arrived = 0, threads = 0;
  unsigned generation = 0;
};

// A product that 128 threads take part in. It can begin when all of them have asked for it.
struct Products {
  uint64_t a, b;
  int columns;
  bool keep, a_turned, b_turned;
  int asked = 0;
  float* sums[kGroup];
};
struct WarpGroup {
  std::deque<Products> asked;  // not done
  long done = 0;
};

struct Block;
struct Lane {
  Block* block;
  int number;  // in the block
  ucontext_t context;
  jmp_buf here;
  void* stack = nullptr;
  bool started = false, done = false;
  std::function<bool()> ready;  // none: it can go on
  const char* waits_for = "";
  std::vector<std::pair<uint32_t, uint32_t>> unseen;  // what it wrote that the copy engine need not see yet
  long products = 0;                                   // asked for
  std::vector<long> committed;                         // how many had been, at every commit
  int stores_open = 0, stores_unread = 0, stores_unwritten = 0;  // copies to memory: not committed; committed
  int lane() const { return number % kLanes; }
};
struct Warp {
  Lane* lanes[kLanes];
  // What all lanes do together.
  int arrived = 0;
  unsigned generation = 0;
  const char* together = nullptr;
  void* arguments[kLanes];
  double laziness = 0;
};
struct Cluster {
  std::vector<Block*> blocks;
  int arrived = 0;
  unsigned generation = 0;
  bool knows = false;  // that the kernel before is done
};
struct Launch;
struct Block {
  Launch* launch;
  Cluster* cluster;
  int number, rank, shared_bytes;
  std::vector<uint8_t> seen, engine;  // shared memory, as threads and as engines see it
  std::map<uint32_t, Barrier> barriers;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<Warp> warps;
  std::vector<WarpGroup> groups;
  int running = 0;
  int stores_unread = 0;
  bool let_go = false;  // the next kernel may begin

  uint32_t offset(uint32_t address, uint32_t bytes) const {
    if (address < kBase || address + bytes > kBase + (uint32_t)shared_bytes) fail("shared memory that is not there");
    return address - kBase;
  }
  Barrier& barrier(uint32_t address) {
    const auto found = barriers.find(address);
    if (found == barriers.end()) fail("a barrier that is not there");
    return found->second;
  }
};

struct Launch {
  std::function<void()> body;
  int blocks, threads, shared_bytes, cluster;
  std::vector<std::unique_ptr<Block>> there;
  std::vector<std::unique_ptr<Cluster>> clusters;
  int begun = 0, left = 0, unwritten = 0;  // blocks that began and that left; copies to memory under way
  bool done() const { return left == blocks && unwritten == 0; }
  bool lets_next_begin() const {
    if (begun < blocks) return false;
    return std::all_of(there.begin(), there.end(), [](const auto& b) { return b->let_go || b->running == 0; });
  }
};

// ---- the machine

struct Machine {
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<std::function<void()>> engines;  // what is under way, in no order
  std::vector<WarpGroup*> multiplying;
  std::vector<void*> stacks;
  std::mt19937 random;
  jmp_buf scheduler;
  Lane* current = nullptr;
  std::string failure;
  double eagerness = 0.5;  // of engines
  int resident = 0;

  double draw() { return (random() >> 8) * (1.0 / (1 << 24)); }
  size_t pick(size_t count) { return random() % count; }
};
static Machine the;

void fail(const std::string& what) {
  if (!the.current) throw Failure{what};
  const Lane& lane = *the.current;
  the.failure = what + " (block " + std::to_string(lane.block->number) + ", thread " + std::to_string(lane.number) + ")";
  _longjmp(the.scheduler, 2);
}

inline Lane& self() { return *the.current; }
inline Block& block() { return *the.current->block; }
inline Warp& warp() { return block().warps[self().number / kLanes]; }

inline void pause() {
  if (_setjmp(the.current->here) == 0) _longjmp(the.scheduler, 1);
}
template <class Ready> void wait_until(const char* what, Ready ready) {
  while (!ready()) {
    self().waits_for = what;
    self().ready = ready;
    pause();
  }
}
inline void later(std::function<void()> work) { the.engines.push_back(std::move(work)); }

// All lanes of a warp come here; the last one does something for all of them.
template <class Work> void together(const char* what, void* argument, Work work) {
  Warp& mine = warp();
  if (mine.arrived && strcmp(mine.together, what)) {
    fail(std::string("lanes of one warp do different things: ") + what + " and " + mine.together);
  }
  mine.together = what;
  mine.arguments[self().lane()] = argument;
  const unsigned generation = mine.generation;
  if (++mine.arrived == kLanes) {
    mine.arrived = 0;
    work(mine.arguments);
    ++mine.generation;
  } else {
    wait_until(what, [&mine, generation] { return mine.generation != generation; });
  }
}

inline void begin_fiber() {
  the.current->block->launch->body();
  Lane& lane = self();
  if (lane.stores_open) fail("stores that are never committed");
  lane.done = true;
  _longjmp(the.scheduler, 1);
}

inline void run_lane(Lane& lane) {
  the.current = &lane;
  const int how = _setjmp(the.scheduler);
  if (how == 0) {
    if (lane.started) _longjmp(lane.here, 1);
    lane.started = true;
    if (the.stacks.empty()) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw Failure{"no memory for another stack"};
      the.stacks.push_back(memory);
    }
    lane.stack = the.stacks.back();
    the.stacks.pop_back();
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = kStackBytes;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, begin_fiber, 0);
    setcontext(&lane.context);
  }
  Lane& back = *the.current;
  the.current = nullptr;
  if (how == 2) throw Failure{the.failure};
  if (!back.done) return;
  the.stacks.push_back(back.stack);
  Block& block = *back.block;
  if (--block.running) return;
  if (block.stores_unread) throw Failure{"a block leaves while its stores still read shared memory"};
  --the.resident;
  ++block.launch->left;
}

// Whether any lane of it went on.
inline bool run_warp(Warp& warp) {
  bool moved = false;
  for (Lane* lane : warp.lanes) {
    if (!lane || lane->done || (lane->ready && !lane->ready())) continue;
    lane->ready = nullptr;
    run_lane(*lane);
    moved = true;
  }
  return moved;
}

void multiply_now(Block& block, const Products& products);  // instructions.h

inline bool run_engine() {
  std::vector<std::pair<Block*, WarpGroup*>> able;
  for (auto& launch : the.launches)
    for (auto& block : launch->there)
      if (block->running)
        for (auto& group : block->groups)
          if (!group.asked.empty() && group.asked.front().asked == kGroup) able.push_back({block.get(), &group});
  const size_t count = able.size() + the.engines.size();
  if (!count) return false;
  const size_t chosen = the.pick(count);
  if (chosen < able.size()) {
    auto [block, group] = able[chosen];
    multiply_now(*block, group->asked.front());
    group->asked.pop_front();
    ++group->done;
  } else {
    std::swap(the.engines[chosen - able.size()], the.engines.back());
    auto work = std::move(the.engines.back());
    the.engines.pop_back();
    work();
  }
  return true;
}

inline void begin_cluster(Launch& launch) {
  launch.clusters.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *launch.clusters.back();
  for (int rank = 0; rank < launch.cluster; ++rank) {
    launch.there.push_back(std::make_unique<Block>());
    Block& block = *launch.there.back();
    block.launch = &launch;
    block.cluster = &cluster;
    block.number = launch.begun++;
    block.rank = rank;
    block.shared_bytes = launch.shared_bytes;
    block.seen.assign(launch.shared_bytes, 0xFF);
    block.engine = block.seen;
    block.running = launch.threads;
    block.warps.resize((launch.threads + kLanes - 1) / kLanes);
    block.groups.resize((launch.threads + kGroup - 1) / kGroup);
    for (Warp& warp : block.warps) {
      std::fill(warp.lanes, warp.lanes + kLanes, nullptr);
      warp.laziness = the.pick(3) == 0 ? 0.95 : the.pick(2) == 0 ? 0.5 : 0.0;
    }
    for (int i = 0; i < launch.threads; ++i) {
      block.lanes.push_back(std::make_unique<Lane>());
      block.lanes[i]->block = &block;
      block.lanes[i]->number = i;
      block.warps[i / kLanes].lanes[i % kLanes] = block.lanes[i].get();
    }
    cluster.blocks.push_back(&block);
    ++the.resident;
  }
}

// Blocks begin in order, as far as there is room; those of a launch when the one before lets them.
inline bool begin_blocks(int most) {
  bool begun = false;
  for (size_t i = 0; i < the.launches.size(); ++i) {
    Launch& launch = *the.launches[i];
    if (i && !the.launches[i - 1]->lets_next_begin()) break;
    while (launch.begun < launch.blocks && the.resident + launch.cluster <= std::max(most, launch.cluster)) {
      begin_cluster(launch);
      begun = true;
    }
    if (launch.begun < launch.blocks) break;
  }
  return begun;
}

inline std::string who_waits() {
  std::map<std::string, int> counts;
  for (auto& launch : the.launches)
    for (auto& block : launch->there)
      for (auto& lane : block->lanes)
        if (!lane->done) {
          const std::string who = "block " + std::to_string(block->number) + ", warp " + std::to_string(lane->number / kLanes);
          ++counts[who + ": " + lane->waits_for];
        }
  std::string text = "nobody can go on:";
  int lines = 0;
  for (auto& [who, count] : counts)
    if (++lines <= 24) text += "\n  " + std::to_string(count) + " threads of " + who;
  return text;
}

inline void run_all(unsigned seed, int most) {
  the.random.seed(seed);
  the.engines.clear();
  the.resident = 0;
  const double moods[] = {0.05, 0.3, 0.7, 0.98};
  the.eagerness = moods[the.pick(4)];
  std::vector<Warp*> warps;
  for (;;) {
    bool moved = begin_blocks(most);
    warps.clear();
    for (auto& launch : the.launches)
      for (auto& block : launch->there)
        if (block->running)
          for (Warp& warp : block->warps) warps.push_back(&warp);
    if (warps.empty() && the.engines.empty()) return;
    std::shuffle(warps.begin(), warps.end(), the.random);
    for (Warp* warp : warps) {
      if (the.draw() >= warp->laziness) moved |= run_warp(*warp);
      while (the.draw() < the.eagerness && run_engine()) moved = true;
    }
    if (moved) continue;
    for (Warp* warp : warps) moved |= run_warp(*warp);  // the lazy ones, too
    while (!moved || the.draw() < 0.8) {  // nobody can go on without engines
      if (!run_engine()) break;
      moved = true;
    }
    if (!moved) throw Failure{who_waits()};
  }
}

inline void give_back_stacks() {
  for (auto& launch : the.launches)
    for (auto& block : launch->there)
      for (auto& lane : block->lanes)
        if (lane->started && !lane->done) the.stacks.push_back(lane->stack);
}

}  // namespace machine
