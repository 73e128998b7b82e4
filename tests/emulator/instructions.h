// What instructions.cuh names, played by a CPU (machine.h). Compiled instead of it, before hopper.cuh and a kernel.

#include <cmath>
#include <tuple>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes)

using std::min;
struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct int4 { int x, y, z, w; };
struct float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }

struct Index { unsigned x; };
#define threadIdx (Index{(unsigned)machine::self().number})
#define blockIdx (Index{(unsigned)machine::block().number})
#define blockDim (Index{(unsigned)machine::block().launch->threads})
#define gridDim (Index{(unsigned)machine::block().launch->blocks})

extern "C" {
unsigned char memory[1];  // shared memory is the block's own; kernels take nothing but its address
}
inline size_t __cvta_generic_to_shared(const void*) { return machine::kBase; }

// ---- numbers

constexpr bool kBrain = ELEMENT[0] == 'b';

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float widen(uint16_t bits) {
  if (kBrain) return float_of((uint32_t)bits << 16);
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return digits ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + digits, exponent - 25) : std::ldexp((float)digits, -24));
}
inline uint16_t narrow(float x) {  // to nearest, ties to even
  const uint32_t bits = bits_of(x), sign = bits >> 31 << 15;
  if (std::isnan(x)) return kBrain ? 0x7FFF : 0x7FFF;
  if (kBrain) return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < 6.103515625e-05f) return sign | (uint16_t)std::nearbyint(std::ldexp(size, 24));
  const uint32_t away = (bits & 0x7FFFFFFF) - (112u << 23);
  return sign | (away + 0xFFF + (away >> 13 & 1)) >> 13;
}
struct Widened {
  float of[65536];
  Widened() {
    for (int i = 0; i < 65536; ++i) of[i] = widen(i);
  }
};
static const Widened widened_numbers;

inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __int_as_float(int x) { return float_of((uint32_t)x); }
inline uint32_t rounded(float low, float high) { return narrow(low) | (uint32_t)narrow(high) << 16; }
inline void widened(uint32_t pair, float& low, float& high) {
  low = widened_numbers.of[pair & 0xFFFF];
  high = widened_numbers.of[pair >> 16];
}

// ---- threads

inline bool leads() { return machine::self().lane() == 0; }
inline bool elected() {  // any of them: not the one that leads
  machine::together("election", nullptr, [](void**) {});
  return machine::self().lane() == machine::kLanes - 1;
}
inline int uniform(int x) {
  int mine = x;
  machine::together("shuffle", &mine, [](void** all) {
    for (int i = 1; i < machine::kLanes; ++i) *(int*)all[i] = *(int*)all[0];
  });
  return mine;
}
inline void __syncwarp() {
  machine::together("meeting of a warp", nullptr, [](void**) {});
}
inline uint32_t rank_in_cluster() { return machine::block().rank; }

inline void join(int number, int threads, bool wait) {
  auto& barrier = machine::block().named[number];
  if (threads % machine::kLanes) machine::fail("a barrier for parts of warps");
  if (barrier.arrived && barrier.threads != threads) machine::fail("a named barrier of two sizes");
  barrier.threads = threads;
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else if (wait) {
    machine::wait_until("named barrier", [&barrier, generation] { return barrier.generation != generation; });
  }
}
inline void threads_sync(int barrier, int threads) { join(barrier, threads, true); }
inline void threads_arrive(int barrier, int threads) { join(barrier, threads, false); }
inline void __syncthreads() { join(0, blockDim.x, true); }
inline void cluster_sync() {
  auto& cluster = *machine::block().cluster;
  const unsigned generation = cluster.generation;
  if (++cluster.arrived == (int)(cluster.blocks.size() * blockDim.x)) {
    cluster.arrived = 0;
    ++cluster.generation;
  } else {
    machine::wait_until("cluster", [&cluster, generation] { return cluster.generation != generation; });
  }
}
template <int COUNT> inline void registers_give() {}
template <int COUNT> inline void registers_take() {}
inline void forget(int&) {}

// ---- kernels before and after

inline void wait_for_kernel_before() {
  auto& launches = machine::the.launches;
  size_t mine = 0;
  while (launches[mine].get() != machine::block().launch) ++mine;
  machine::wait_until("kernel before", [&launches, mine] { return mine == 0 || launches[mine - 1]->done(); });
  machine::block().cluster->knows = true;
}
inline void let_next_kernel_begin() { machine::block().let_go = true; }
inline void touch_memory() {
  if (!machine::block().cluster->knows) machine::fail("memory, before the kernel before is known to be done");
}

// ---- barriers in shared memory

inline machine::Block& block_at(uint32_t& address) {  // of an address in any block of the cluster
  if (address >> 24 == 0) return machine::block();
  auto& there = *machine::block().cluster->blocks.at((address >> 24) - 1);
  if (!there.running) machine::fail("a block that has left");
  address &= 0xFFFFFF;
  return there;
}
inline uint32_t address_at(uint32_t address, uint32_t rank) { return address | (rank + 1) << 24; }

inline void barrier_init(uint32_t barrier, int count) {
  machine::block().offset(barrier, 8);
  if (barrier % 8) machine::fail("a barrier that is not aligned");
  auto& made = machine::block().barriers[barrier];
  made.count = made.pending = count;
}
inline void barriers_ready() {}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  auto& there = machine::block().barrier(barrier);
  machine::wait_until("barrier", [&there, parity] { return (there.phase & 1) != parity; });
}
inline void barrier_arrive(uint32_t barrier) { machine::block().barrier(barrier).arrive(); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  auto& there = machine::block().barrier(barrier);
  there.expect(bytes);
  there.arrive();
}
inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  uint32_t address = address_at(barrier, rank);
  machine::Barrier* there = &block_at(address).barrier(address);
  machine::later([there] { there->arrive(); });
}
inline void barrier_arrive_having(int, uint32_t barrier, uint32_t rank) { barrier_arrive_at(barrier, rank); }

// ---- shared memory

inline void put_bytes(uint32_t to, const void* from, uint32_t bytes) {
  memcpy(&machine::block().seen[machine::block().offset(to, bytes)], from, bytes);
  machine::self().unseen.push_back({to, bytes});
}
inline void get_bytes(void* to, uint32_t from, uint32_t bytes) {
  memcpy(to, &machine::block().seen[machine::block().offset(from, bytes)], bytes);
}
inline void show_copy_engine() {
  auto& block = machine::block();
  for (auto [from, bytes] : machine::self().unseen)
    memcpy(&block.engine[from - machine::kBase], &block.seen[from - machine::kBase], bytes);
  machine::self().unseen.clear();
}
inline void send(int4 value, uint32_t to, uint32_t barrier, uint32_t rank) {
  uint32_t there = address_at(to, rank), told = address_at(barrier, rank);
  auto& block = block_at(there);
  block_at(told);
  const uint32_t offset = block.offset(there, 16);
  auto* signal = &block.barrier(told);
  signal->expect(16);
  signal->arrive();
  machine::later([&block, offset, value, signal] {
    memcpy(&block.seen[offset], &value, 16);
    signal->complete(16);
  });
}
inline int4 get_sent(uint32_t from) {
  int4 value;
  get_bytes(&value, from, 16);
  return value;
}
inline uint2 get_pairs(uint32_t address) {
  uint2 pairs;
  get_bytes(&pairs, address, 8);
  return pairs;
}
inline unsigned short get_number(uint32_t address) {
  unsigned short number;
  get_bytes(&number, address, 2);
  return number;
}
inline void put_number(uint32_t address, unsigned short value) { put_bytes(address, &value, 2); }
inline void begin_to_count(uint32_t counter) {
  const int zero = 0;
  put_bytes(counter, &zero, 4);
}
inline void count_on(uint32_t counter, int count) { put_bytes(counter, &count, 4); }
inline void wait_for_more(uint32_t counter, int than) {
  auto& block = machine::block();
  const uint8_t* there = &block.seen[block.offset(counter, 4)];
  machine::wait_until("progress", [there, than] {
    int count;
    memcpy(&count, there, 4);
    return count > than;
  });
}

// Four 8x8 blocks: lane 8 i + r says where row r of block i is; every lane holds two numbers of a row of each.
struct Blocks {
  uint32_t address;
  uint32_t* held;
};
inline void get_blocks(uint32_t address, uint32_t* r) {
  Blocks mine = {address, r};
  machine::together("four blocks to registers", &mine, [](void** all) {
    for (int lane = 0; lane < machine::kLanes; ++lane)
      for (int i = 0; i < 4; ++i)
        get_bytes(((Blocks*)all[lane])->held + i, ((Blocks*)all[8 * i + lane / 4])->address + 4 * (lane % 4), 4);
  });
}
inline void put_rows(uint32_t address, const uint32_t* r, bool transposed) {
  uint16_t rows[machine::kLanes][8];
  struct Mine {
    const uint32_t* held;
    uint16_t (*rows)[8];
  } mine = {r, rows};
  // The last lane to come hands every lane the row it has the address of.
  const auto hand_out = [transposed](void** all) {
    for (int lane = 0; lane < machine::kLanes; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half) {
          const int row = lane / 4, col = 2 * (lane % 4) + half;
          const uint16_t number = ((Mine*)all[lane])->held[i] >> 16 * half;
          const int to = transposed ? col : row, at = transposed ? row : col;
          ((Mine*)all[8 * i + to])->rows[0][at] = number;
        }
  };
  machine::together(transposed ? "four turned blocks" : "four blocks", &mine, hand_out);
  if (address % 16) machine::fail("a row that is not aligned");
  put_bytes(address, rows[0], 16);
}
inline void put_blocks(uint32_t address, const uint32_t* r) { put_rows(address, r, false); }
inline void put_blocks_transposed(uint32_t address, const uint32_t* r) { put_rows(address, r, true); }

// ---- the copy engine: boxes of 64 by 64 numbers of 16 bits, swizzled

struct alignas(64) TensorMap {
  uint64_t base, sides[3], strides[2];  // columns, rows, matrices; bytes from row to row, from matrix to matrix
  char unused[128 - 6 * 8];

  uint8_t* at(int col, int row, int matrix) const {
    const bool inside = col >= 0 && row >= 0 && matrix >= 0 && (uint64_t)col < sides[0] && (uint64_t)row < sides[1] &&
                        (uint64_t)matrix < sides[2];
    return inside ? (uint8_t*)base + matrix * strides[1] + row * strides[0] + 2 * col : nullptr;
  }
};
constexpr uint32_t kCopied = 64 * 64 * 2;
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy_in(uint32_t to, const TensorMap& from, uint32_t barrier, int col, int row, int matrix, bool for_both) {
  touch_memory();
  if (to % 1024) machine::fail("a box that is not aligned");
  const TensorMap map = from;
  std::vector<machine::Block*> blocks = {&machine::block()};
  if (for_both) blocks = machine::block().cluster->blocks;
  for (machine::Block* block : blocks) {
    if (!block->running) machine::fail("a block that has left");
    const uint32_t offset = block->offset(to, kCopied);
    memset(&block->seen[offset], 0xFF, kCopied);
    memset(&block->engine[offset], 0xFF, kCopied);
    machine::Barrier* told = &block->barrier(barrier);
    machine::later([=] {
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 64; ++j) {
          const uint8_t* number = map.at(col + j, row + i, matrix);
          const uint32_t place = swizzled(to + 128 * i + 2 * j) - machine::kBase;
          memset(&block->engine[place], 0, 2);
          if (number) memcpy(&block->engine[place], number, 2);
        }
      memcpy(&block->seen[offset], &block->engine[offset], kCopied);
      told->complete(kCopied);
    });
  }
}
inline void load(uint32_t to, const TensorMap& from, uint32_t barrier, int col, int row, int matrix) {
  copy_in(to, from, barrier, col, row, matrix, false);
}
inline void load_for_both(uint32_t to, const TensorMap& from, uint32_t barrier, int col, int row, int matrix) {
  copy_in(to, from, barrier, col, row, matrix, true);
}
inline void store(const TensorMap& to, uint32_t from, int col, int row, int matrix) {
  touch_memory();
  machine::Block* block = &machine::block();
  machine::Lane* lane = &machine::self();
  const uint32_t offset = block->offset(from, kCopied);
  if (from % 1024) machine::fail("a box that is not aligned");
  ++lane->stores_open;
  ++lane->stores_unread, ++lane->stores_unwritten;
  ++block->stores_unread, ++block->launch->unwritten;
  const TensorMap map = to;
  machine::later([=] {
    std::vector<uint8_t> box(&block->engine[offset], &block->engine[offset] + kCopied);
    --lane->stores_unread, --block->stores_unread;
    machine::later([=] {
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 64; ++j)
          if (uint8_t* number = map.at(col + j, row + i, matrix))
            memcpy(number, &box[swizzled(from + 128 * i + 2 * j) - from], 2);
      --lane->stores_unwritten, --block->launch->unwritten;
    });
  });
}
inline void stores_commit() { machine::self().stores_open = 0; }
inline void stores_read() {
  machine::Lane* lane = &machine::self();
  if (lane->stores_open) machine::fail("waits for stores that are not committed");
  machine::wait_until("stores to be read", [lane] { return lane->stores_unread == 0; });
}
inline void stores_done() {
  machine::Lane* lane = &machine::self();
  if (lane->stores_open) machine::fail("waits for stores that are not committed");
  machine::wait_until("stores to be done", [lane] { return lane->stores_unwritten == 0; });
}
inline void fetch(const TensorMap&) {}
inline void bring_near(const void*) {}

// ---- memory

inline int atomicAdd(int* counter, int more) {
  touch_memory();
  const int before = *counter;
  *counter += more;
  return before;
}
inline void count_up(int* counter) {
  touch_memory();
  machine::later([counter] { ++*counter; });
}
inline void wait_for_count(const int* counter, int enough) {
  touch_memory();
  machine::wait_until("count", [counter, enough] { return *counter >= enough; });
}
inline float4 __ldcs(const float4* from) {
  touch_memory();
  return *from;
}
inline void __stcs(float4* to, float4 value) {
  touch_memory();
  *to = value;
}

// ---- tensor cores

template <bool A_TURNED, bool B_TURNED>
inline void ask_for_products(float* sums, uint64_t a, uint64_t b, bool keep, int columns) {
  machine::Lane& lane = machine::self();
  machine::WarpGroup& group = machine::block().groups[lane.number / machine::kGroup];
  const size_t place = lane.products++ - group.done;
  if (place == group.asked.size()) group.asked.push_back({a, b, columns, keep, A_TURNED, B_TURNED});
  machine::Products& products = group.asked[place];
  const machine::Products mine = {a, b, columns, keep, A_TURNED, B_TURNED};
  if (products.a != a || products.b != b || products.columns != columns || products.keep != keep ||
      products.a_turned != A_TURNED || products.b_turned != B_TURNED) {
    machine::fail("threads of a group multiply different things");
  }
  products.sums[lane.number % machine::kGroup] = sums;
  ++products.asked;
}
template <int COLUMNS, bool A_TURNED, bool B_TURNED>
inline void multiply(float (&t)[64], uint64_t a, uint64_t b, bool keep) {
  ask_for_products<A_TURNED, B_TURNED>(t, a, b, keep, COLUMNS);
}
inline void products_fence() {}
inline void products_commit() { machine::self().committed.push_back(machine::self().products); }
template <int LEFT> inline void products_wait() {
  machine::Lane& lane = machine::self();
  machine::WarpGroup& group = machine::block().groups[lane.number / machine::kGroup];
  const int count = (int)lane.committed.size() - LEFT;
  const long wanted = count > 0 ? lane.committed[count - 1] : 0;
  machine::wait_until("products", [&group, wanted] { return group.done >= wanted; });
}
inline void settle(float (&)[64]) {}

// Where numbers of an operand are: rows of 128 bytes. Along k, or turned: then 64 rows of the operand lie side by side.
inline float operand_at(const machine::Block& block, uint64_t operand, bool turned, int across, int k) {
  const uint32_t start = (operand & 0x3FFF) << 4, box = (operand >> 16 & 0x3FFF) << 4, eight = (operand >> 32 & 0x3FFF) << 4;
  if (operand >> 62 != 1) throw machine::Failure{"an operand that is not swizzled by 128 bytes"};
  const uint32_t address = turned ? start + across / 64 * box + k / 8 * eight + k % 8 * 128 + 2 * (across % 64)
                                  : start + across / 8 * eight + across % 8 * 128 + 2 * k;
  uint16_t bits;
  memcpy(&bits, &block.engine[block.offset(swizzled(address), 2)], 2);
  return widened_numbers.of[bits];
}
void machine::multiply_now(machine::Block& block, const machine::Products& products) {
  const int columns = products.columns;
  static float a[64][16], b[16][128], sums[128];
  for (int i = 0; i < 64; ++i)
    for (int k = 0; k < 16; ++k) a[i][k] = operand_at(block, products.a, products.a_turned, i, k);
  for (int j = 0; j < columns; ++j)
    for (int k = 0; k < 16; ++k) b[k][j] = operand_at(block, products.b, products.b_turned, j, k);
  for (int i = 0; i < 64; ++i) {
    std::fill(sums, sums + columns, 0.0f);
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < columns; ++j) sums[j] += a[i][k] * b[k][j];
    for (int j = 0; j < columns; ++j) {  // thread and register that hold this sum
      const int thread = 32 * (i / 16) + 4 * (i % 8) + j % 8 / 2;
      float& held = products.sums[thread][4 * (j / 8) + 2 * (i % 16 / 8) + j % 2];
      held = (products.keep ? held : 0.0f) + sums[j];
    }
  }
}

// ---- launches

template <class Function, class... Arguments, size_t... I>
std::function<void()> bound(Function function, std::tuple<Arguments...>* types, void** given, std::index_sequence<I...>) {
  auto arguments = std::make_shared<std::tuple<Arguments...>>(*(Arguments*)given[I]...);
  return [function, arguments] { std::apply(function, *arguments); };
}
template <class... Arguments> std::function<void()> bind(void (*function)(Arguments...), void** given) {
  using Types = std::tuple<std::remove_cv_t<Arguments>...>;
  return bound(function, (Types*)nullptr, given, std::index_sequence_for<Arguments...>());
}
std::function<void()> find_kernel(const std::string& name, void** given);  // KERNELS, at the end of the source

// Puts a kernel into the stream. Its arguments are copied, as by a GPU.
extern "C" int record(const char* name, int blocks, int threads, int shared_bytes, int cluster, void** given) {
  if (shared_bytes > (int)machine::kMostShared || blocks % cluster) return 1;
  auto body = find_kernel(name, given);
  if (!body) return 2;
  machine::the.launches.push_back(std::make_unique<machine::Launch>());
  auto& launch = *machine::the.launches.back();
  launch.body = std::move(body);
  launch.blocks = blocks, launch.threads = threads, launch.shared_bytes = shared_bytes, launch.cluster = cluster;
  return 0;
}
// Runs all that is in the stream; `most` blocks at a time. Says what went wrong.
extern "C" int run(unsigned seed, int most, char* wrong, int size) {
  int code = 0;
  try {
    machine::run_all(seed, most);
  } catch (const machine::Failure& failure) {
    snprintf(wrong, size, "%s", failure.what.c_str());
    code = 1;
  }
  machine::the.current = nullptr;
  machine::give_back_stacks();
  machine::the.launches.clear();
  machine::the.engines.clear();
  return code;
}
