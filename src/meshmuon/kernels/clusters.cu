// Products of stacks of matrices, one after the other in a single launch, in 16 bits with fp32 sums, on Hopper (sm_90a):
//   D = alpha A B^T + beta C + gamma I where that is known to be symmetric: one triangle is computed, and mirrored;
//   D = alpha A B + beta C             where it is not.
//
// Tiles are 128x128. Two thread blocks on neighbouring multiprocessors (a cluster) take two tiles of one column: each
// loads its own rows of A, and half of B for both. In a block, two groups of 128 threads take turns: while one multiplies
// its tile, the other rounds the one before and puts it into staging memory. Four warps serve them: one takes tiles and
// looks ahead for what may be loaded, one loads, and two store what is staged. So the tensor cores never wait for memory.
// What is multiplied passes through a ring of slots in shared memory; so does C, in a slot of its own behind the last one
// of its tile.
//
// A product may read what one before it wrote. For each matrix a counter says how many tiles are written, of all products
// so far; the warp that looks ahead waits until it says enough. Clusters take pairs of tiles in the order of one list, as
// they come, and nobody waits for tiles that come later in it. So whoever has the first pair that is not done can go on,
// however many clusters are there at the same time. Between the products of one matrix come those of others: then nobody
// waits at all, and there is no pause between two products.
//
// The design is that of NVIDIA's CUTLASS for Hopper ("ping-pong" kernels: https://github.com/NVIDIA/cutlass).
//
// A sum is the same whichever kernel makes it: 64 numbers of k at a time, in four instructions of 16, as Triton does.

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
struct alignas(64) TensorMap { char opaque[128]; };

constexpr int kSlots = 6;
constexpr uint32_t kBoxBytes = 64 * 64 * 2;       // 64 rows of 64 numbers, each row 128 bytes, swizzled
constexpr uint32_t kTileBytes = 2 * kBoxBytes;    // 128 rows
constexpr uint32_t kSlotBytes = 2 * kTileBytes;   // of A and of B, or 128 columns of C
constexpr int kAhead = 4;                         // items that are known before they are done; even, for two groups
constexpr int kShared = 1, kIdle = 2;             // flags of an item: B is the other block's too; there is nothing to do
constexpr int kEnd = 4, kPastEnd = 8;             // the list is at its end; one more item, for whoever looks at every other
constexpr int kProductShift = 8;                  // what is left of an item's flags is the number of its product
constexpr int kMostMaps = 12, kMostProducts = 48;
static_assert(kAhead % 2 == 0, "a group has to find its items in the same slots again");

struct Product {
  unsigned char a, b, c, d;  // numbers of their maps
  unsigned char mirrored, add, awaited, unused;
  int rows, cols, steps;     // of D; and of the inner dimension, 64 numbers each
  int after;                 // tiles of this matrix that have to be written before
  float alpha, beta, gamma;
};
struct Program {
  TensorMap maps[kMostMaps];
  Product products[kMostProducts];
};

// ---- what C++ has no words for

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }  // tells the compiler so

__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
__device__ __forceinline__ void threads_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void threads_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ uint32_t address_at(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Without .release.cluster, which would wait for all of memory: what is handed over has been read, not written.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_at(barrier, rank)) : "memory");
}

// Arrives when `value`, never negative, has been read from shared memory. Reading may wait for the tensor cores, and takes
// longer then than it takes others to overwrite what is said to have been read.
__device__ __forceinline__ void barrier_arrive_having(int value, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .pred read;\n"
      "setp.ge.s32 read, %1, 0;\n"
      "@read mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(address_at(barrier, rank)), "r"(value) : "memory");
}
// Puts 16 bytes into a block's shared memory, and tells its barrier.
__device__ __forceinline__ void send(int4 value, uint32_t to, uint32_t barrier, uint32_t rank) {
  const uint32_t there = address_at(to, rank), barrier_there = address_at(barrier, rank);
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%1], 16;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%2, %3, %4, %5}, [%1];"
      ::"r"(there), "r"(barrier_there), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}
__device__ __forceinline__ int4 get_sent(uint32_t from) {
  int4 value;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void load(uint32_t to, const TensorMap& from, uint32_t barrier, int col, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(&from), "r"(barrier), "r"(col), "r"(row), "r"(matrix) : "memory");
}
__device__ __forceinline__ void load_for_both(
    uint32_t to, const TensorMap& from, uint32_t barrier, int col, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(&from), "r"(barrier), "r"(col), "r"(row), "r"(matrix), "h"((unsigned short)3) : "memory");
}
__device__ __forceinline__ void store(const TensorMap& to, uint32_t from, int col, int row, int matrix) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(&to), "r"(from), "r"(col), "r"(row), "r"(matrix) : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What the copy engine wrote here, it may read there: the fences are for its own view of memory.
__device__ __forceinline__ void count_up(int* counter) {
  asm volatile("fence.proxy.async;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait_for_count(const int* counter, int enough) {
  int count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  } while (count < enough);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// The tensor cores' view of an operand: rows of 128 bytes, swizzled, groups of eight rows 1024 bytes apart. Of a B whose
// rows run along the inner dimension, 64 columns are in one box, and the next 64 in the box behind it.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)(kBoxBytes >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
template <int LEFT> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Tells the compiler that sums have changed: they may not be read before the wait.
__device__ __forceinline__ void settle(float (&t)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(t[i])::"memory");
}

#define SUMS_4(i) "+f"(t[i]), "+f"(t[i + 1]), "+f"(t[i + 2]), "+f"(t[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
// 64x128 sums, 16 numbers of k; `keep` adds to what is there. B^T is in shared memory, or B itself.
template <bool TURNED> __device__ __forceinline__ void multiply(float (&t)[64], uint64_t a, uint64_t b, bool keep) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " "
      "{" NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, %67;\n"
      "}\n"
      : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
      : "l"(a), "l"(b), "r"((int)keep), "n"(TURNED ? 1 : 0));
}
// The left half of them alone.
__device__ __forceinline__ void multiply_left(float (&t)[64], uint64_t a, uint64_t b, bool keep) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : SUMS_16(0), SUMS_16(16)
      : "l"(a), "l"(b), "r"((int)keep));
}

__device__ __forceinline__ uint32_t rounded(float low, float high) {
  uint32_t pair;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ void widened(uint32_t pair, float& low, float& high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.f32." ELEMENT " %0, l;\n"
      "cvt.f32." ELEMENT " %1, h;\n"
      "}\n" : "=f"(low), "=f"(high) : "r"(pair));
}

// Four 8x8 blocks between registers and shared memory, a row of a block at each lane's address.
__device__ __forceinline__ void get_blocks(uint32_t address, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void put_blocks(uint32_t address, const uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void put_blocks_transposed(uint32_t address, const uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ unsigned short get_number(uint32_t address) {
  unsigned short value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void put_number(uint32_t address, unsigned short value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// The kernel before in the stream may still be running when this one begins, up to here; the next one may begin as well.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void fetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- the ring, and where numbers are in a box

struct Ring {
  uint32_t slots, full, empty;  // addresses in shared memory
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ uint32_t here() const { return slots + slot * kSlotBytes; }
  __device__ __forceinline__ uint32_t full_here() const { return full + 8 * slot; }
  __device__ __forceinline__ uint32_t empty_here() const { return empty + 8 * slot; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full_here(), phase); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty_here(), phase ^ 1); }
  __device__ __forceinline__ void next() {
    if (++slot == kSlots) { slot = 0; phase ^= 1; }
  }
  __device__ __forceinline__ void go_to(int position) {
    slot = uniform(position % kSlots);
    phase = uniform((position / kSlots) & 1);
  }
};

// Where eight numbers of a row begin: the swizzle that the copy engine and the tensor cores agree on.
__device__ __forceinline__ uint32_t place(int row, int eighth) { return row * 128 + ((eighth ^ (row & 7)) << 4); }

// Of the 8x8 blocks on the diagonal, the strict upper part comes from their mirror images: D = D^T bit for bit.
__device__ __forceinline__ void complete_diagonal(uint32_t box, uint32_t mirror, int thread) {
#pragma unroll
  for (int i = thread; i < 8 * 64; i += 128) {
    const int eighth = i >> 6, row = (i >> 3) & 7, col = i & 7;
    const uint32_t number = place(8 * eighth + row, eighth) + 2 * col;
    if (col > row) put_number(box + number, get_number(mirror + number));
  }
}

// ---- what both blocks of a cluster are to do, one item after the other: taken by one warp, sent to all others

__device__ __forceinline__ bool leads() { return (threadIdx.x & 31) == 0; }

struct Item {
  int matrix, row, col, flags, position;  // the last: in the ring, of all that was loaded before
  __device__ __forceinline__ bool idle() const { return flags & kIdle; }
  __device__ __forceinline__ bool shared() const { return flags & kShared; }
  __device__ __forceinline__ bool ends() const { return flags & (kEnd | kPastEnd); }
  __device__ __forceinline__ bool past_end() const { return flags & kPastEnd; }
  __device__ __forceinline__ int product() const { return flags >> kProductShift; }
};

struct Mail {
  uint32_t items, full, empty;  // addresses in shared memory; the first block's `empty` is told by the readers of both
  uint32_t rank;

  // The same for all threads of a warp, and said so.
  __device__ __forceinline__ Item read(int number) const {
    const int slot = number % kAhead;
    barrier_wait(full + 8 * slot, (number / kAhead) & 1);
    const int4 sent = get_sent(items + 16 * slot);
    const int place = uniform(sent.y);
    const Item item = {uniform(sent.x), (place & 0xFFFF) * 128, (place >> 16) * 128, uniform(sent.z), uniform(sent.w)};
    if (leads()) barrier_arrive_having(sent.x, empty + 8 * slot, 0);
    return item;
  }
  __device__ __forceinline__ void wait_read(int number) const {
    barrier_wait(empty + 8 * (number % kAhead), ((number / kAhead) & 1) ^ 1);
  }
  __device__ __forceinline__ void send_both(int number, int4 first, int4 second) const {
    const int slot = number % kAhead;
    send(first, items + 16 * slot, full + 8 * slot, 0);
    send(second, items + 16 * slot, full + 8 * slot, 1);
  }
};
// Who reads an item: a warp that loads, one that looks ahead, one that stores, and four that multiply; in both blocks.
constexpr int kReaders = 2 * (1 + 1 + 1 + 4);

// ---- the warp that takes items, and waits for products before, far ahead of the one that loads

// The list, and one thread that goes through it and sends what it takes to both blocks.
struct Agenda {
  const int4* items;  // two for each pair: matrix, row and column of tiles, flags
  int pairs;
  int* taken;         // how many of the pairs are; null where clusters take them in turn, since no product waits for another
  int pair = 0;       // the one to be sent next
  int position = 0;   // in the ring

  __device__ __forceinline__ void take(int number) {
    pair = taken ? atomicAdd(taken, 1) : (int)(blockIdx.x >> 1) + number * (int)(gridDim.x >> 1);
  }
  __device__ __forceinline__ void send_next(const Mail& mail, const Program& program, int number) {
    mail.wait_read(number);
    if (pair < pairs) {
      int4 first = items[2 * pair], second = items[2 * pair + 1];
      const Product& product = program.products[first.z >> kProductShift];
      first.w = second.w = position;
      mail.send_both(number, first, second);
      position = (position + product.steps + product.add) % (2 * kSlots);
      take(number + 1);
    } else {
      mail.send_both(number, {0, 0, kEnd, 0}, {0, 0, kEnd, 0});
      mail.wait_read(number + 1);
      mail.send_both(number + 1, {0, 0, kPastEnd, 0}, {0, 0, kPastEnd, 0});
    }
  }
};

__device__ __forceinline__ void scout(
    Mail mail, Agenda agenda, const Program& program, const int* written, uint32_t progress) {
  if (mail.rank == 0 && leads()) agenda.take(0);
  for (int number = 0;; ++number) {
    if (mail.rank == 0 && leads()) agenda.send_next(mail, program, number);
    __syncwarp();
    const Item item = mail.read(number);
    if (item.ends()) break;
    if (!written) continue;
    const Product& product = program.products[item.product()];
    if (leads()) {
      if (product.after && !item.idle()) wait_for_count(written + item.matrix, product.after);
      asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(progress), "r"(number + 1) : "memory");
    }
    __syncwarp();
  }
}
__device__ __forceinline__ void wait_for_scout(uint32_t progress, int number) {
  int reached;
  do {
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(reached) : "r"(progress) : "memory");
  } while (reached <= number);
}

// ---- the warp that loads

__device__ __forceinline__ void load_tile(
    Ring& ring, const Program& program, const Product& product, Item item, uint32_t rank) {
  const TensorMap &a = program.maps[product.a], &b = program.maps[product.b];
  const bool turned = !product.mirrored;
  const int steps = product.steps, across = item.col + (item.shared() ? 64 * rank : 0);
  int col = turned ? across : 0, row = turned ? 0 : across;
  for (int step = 0; step < steps; ++step, ring.next()) {
    ring.wait_empty();
    if (leads()) {
      const uint32_t barrier = ring.full_here(), to = ring.here(), to_b = to + kTileBytes;
      barrier_expect(barrier, kSlotBytes);
      load(to, a, barrier, 64 * step, item.row, item.matrix);
      load(to + kBoxBytes, a, barrier, 64 * step, item.row + 64, item.matrix);
      if (item.shared()) {
        load_for_both(to_b + rank * kBoxBytes, b, barrier, col, row, item.matrix);
      } else {
        load(to_b, b, barrier, col, row, item.matrix);
        load(to_b + kBoxBytes, b, barrier, turned ? col + 64 : col, turned ? row : row + 64, item.matrix);
      }
    }
    col += turned ? 0 : 64;
    row += turned ? 64 : 0;
  }
}

__device__ __forceinline__ void load_added(Ring& ring, const TensorMap& c, Item item) {
  ring.wait_empty();
  if (leads()) {
    barrier_expect(ring.full_here(), kSlotBytes);
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const int col = item.col + 64 * (box / 2), row = item.row + 64 * (box % 2);
      load(ring.here() + box * kBoxBytes, c, ring.full_here(), col, row, item.matrix);
    }
  }
  ring.next();
}

__device__ __forceinline__ void load_nothing(Ring& ring, int slots) {
  for (int i = 0; i < slots; ++i, ring.next()) {
    ring.wait_empty();
    if (leads()) barrier_arrive(ring.full_here());
  }
}

__device__ __forceinline__ void load_items(
    Ring ring, Mail mail, const Program& program, bool scouted, uint32_t progress) {
  for (int number = 0;; ++number) {
    const Item item = mail.read(number);
    if (item.ends()) break;
    const Product& product = program.products[item.product()];
    if (item.idle()) {
      load_nothing(ring, product.steps + product.add);
      continue;
    }
    if (scouted) wait_for_scout(progress, number);
    load_tile(ring, program, product, item, mail.rank);
    if (product.add) load_added(ring, program.maps[product.c], item);
  }
}

// ---- a warp that stores what a group has put into its staging memory: boxes 64x64, side by side or mirrored

struct Staging {
  uint32_t boxes;  // two of 8 KB
  int number;      // of the group
  __device__ __forceinline__ void wait_free() const { threads_sync(7 + number, 160); }
  __device__ __forceinline__ void give_free() const { threads_arrive(7 + number, 160); }
  __device__ __forceinline__ void wait_staged() const { threads_sync(5 + number, 160); }
  __device__ __forceinline__ void give_staged() const { threads_arrive(5 + number, 160); }
};
// Where the box number 0...3 of a tile begins, and whether it is computed: what is above the diagonal is not.
struct Box {
  int row, col;
  bool there;
  __device__ __forceinline__ Box(int number, Item item, const Product& product)
      : row(item.row + 64 * (number / 2)), col(item.col + 64 * (number % 2)),
        there(row < product.rows && (product.mirrored ? col <= row : col < product.cols)) {}
};

__device__ __forceinline__ void store_items(Staging staging, Mail mail, const Program& program, int* written) {
  const uint32_t left = staging.boxes, right = staging.boxes + kBoxBytes;
  staging.give_free();
  for (int number = staging.number;; number += 2) {
    const Item item = mail.read(number);
    if (item.ends()) break;
    if (item.idle()) continue;
    const Product& product = program.products[item.product()];
    const TensorMap& d = program.maps[product.d];
    for (int part = 0; part < 4; part += product.mirrored ? 1 : 2) {
      const Box box(part, item, product), next(part + 1, item, product);
      if (!box.there) continue;
      staging.wait_staged();
      if (leads()) {
        store(d, left, box.col, box.row, item.matrix);
        if (product.mirrored) {
          if (box.row != box.col) store(d, right, box.row, box.col, item.matrix);
        } else if (next.there) {
          store(d, right, next.col, next.row, item.matrix);
        }
        stores_commit();
        stores_read();
      }
      __syncwarp();
      staging.give_free();
    }
    if (product.awaited && leads()) {
      stores_done();
      count_up(written + item.matrix);
    }
    __syncwarp();
  }
}

// ---- a group of 128 threads that multiplies

// Of a tile on the diagonal, what is above it is not computed: of its upper half only the left one.
enum class Kind { whole, mirrored, diagonal };

struct Group {
  Ring ring;
  Staging staging;
  int number, thread;  // of the group; in the group
  uint32_t out[64];    // rounded results: 16 pairs for each of four boxes

  __device__ __forceinline__ void sync() const { threads_sync(1 + number, 128); }
  // A slot is empty when the groups of both blocks say so: either block may be the one that fills it.
  __device__ __forceinline__ void release(int slot) const {
    if (thread < 2) barrier_arrive_at(ring.empty + 8 * slot, thread);
  }
  // The groups take turns, so that no one waits for a slot before everybody has waited for its use before: barriers know
  // odd from even, not how often. So the turn goes on when all slots of a tile are known to be full, C's included.
  __device__ __forceinline__ void take_turn() const { threads_sync(3 + number, 256); }
  __device__ __forceinline__ void give_turn() const { threads_arrive(4 - number, 256); }

  __device__ __forceinline__ void pass(int count) {
    for (int i = 0; i < count; ++i) {
      ring.wait_full();
      sync();  // all have seen it
      release(ring.slot);
      ring.next();
    }
  }

  template <Kind KIND, bool FIRST> __device__ __forceinline__ void start(float (&top)[64], float (&bottom)[64]) {
    constexpr bool kTurned = KIND == Kind::whole;
    constexpr int kStep = kTurned ? 16 * 128 >> 4 : 16 * 2 >> 4;  // 16 rows, or 16 numbers of a row
    ring.wait_full();
    const uint64_t a = operand(ring.here()), b = operand(ring.here() + kTileBytes);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const bool keep = !(FIRST && part == 0);
      if constexpr (KIND == Kind::diagonal) {
        multiply_left(top, a + 2 * part, b + kStep * part, keep);
      } else {
        multiply<kTurned>(top, a + 2 * part, b + kStep * part, keep);
      }
      multiply<kTurned>(bottom, a + (kBoxBytes >> 4) + 2 * part, b + kStep * part, keep);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }

  // All products of a tile are under way afterwards; gives the slot that the last ones still read.
  template <Kind KIND> __device__ __forceinline__ int accumulate(float (&top)[64], float (&bottom)[64], int steps) {
    start<KIND, true>(top, bottom);
    int previous = ring.slot;
    ring.next();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      start<KIND, false>(top, bottom);
      products_wait<1>();
      release(previous);
      previous = ring.slot;
      ring.next();
    }
    return previous;
  }

  // A box of 64x64 sums: scaled, added to, and rounded once.
  template <int BOX> __device__ __forceinline__ void round(float (&t)[64], Item item, const Product& product) {
    constexpr int kHalf = BOX / 2, kSide = BOX % 2;
    const bool diagonal = item.row + 64 * kHalf == item.col + 64 * kSide;
    const uint32_t box = ring.here() + kSide * kTileBytes + kHalf * kBoxBytes;  // of C
    const int lane = thread & 31, warp = thread >> 5, block = lane >> 3;
    const float alpha = product.alpha, beta = product.beta;
    const float low_one = (lane >> 2) == 2 * (lane & 3) ? product.gamma : 0.0f;
    const float high_one = (lane >> 2) == 2 * (lane & 3) + 1 ? product.gamma : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const bool here = diagonal && j == 2 * warp;  // this warp's rows meet the diagonal in these columns
      uint32_t added[4];
      if (product.add) get_blocks(box + place(16 * warp + 8 * (block & 1) + (lane & 7), j + (block >> 1)), added);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum = 32 * kSide + 4 * j + 2 * i;
        const bool one = (i == 0 || i == 3) && here;
        float low = __fmaf_rn(alpha, t[sum], one ? low_one : 0.0f);
        float high = __fmaf_rn(alpha, t[sum + 1], one ? high_one : 0.0f);
        if (product.add) {
          float c_low, c_high;
          widened(added[i], c_low, c_high);
          low = __fmaf_rn(beta, c_low, low);
          high = __fmaf_rn(beta, c_high, high);
        }
        out[16 * BOX + 2 * j + i] = rounded(low, high);
      }
    }
  }

  // Eighths of a box: 8x8 blocks of rows (this warp's two) and of columns (two at a time).
  template <int BOX> __device__ __forceinline__ void put(uint32_t to) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) put_blocks(to + direct_place(j), out + 16 * BOX + 2 * j);
  }
  template <int BOX> __device__ __forceinline__ void put_mirrored(uint32_t to) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) put_blocks_transposed(to + mirror_place(j), out + 16 * BOX + 2 * j);
  }
  // On the diagonal, blocks below it go to both places of one box; everything else where it does no harm.
  template <int BOX> __device__ __forceinline__ void put_diagonal(uint32_t box, uint32_t aside) {
    const int block = (thread & 31) >> 3, row = 2 * (thread >> 5) + (block & 1);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int col = j + (block >> 1);
      put_blocks((col <= row ? box : aside) + direct_place(j), out + 16 * BOX + 2 * j);
      put_blocks_transposed((col < row ? box : aside) + mirror_place(j), out + 16 * BOX + 2 * j);
    }
    sync();
    complete_diagonal(box, aside, thread);
  }
  __device__ __forceinline__ uint32_t direct_place(int j) const {
    const int lane = thread & 31, warp = thread >> 5, block = lane >> 3;
    return place(16 * warp + 8 * (block & 1) + (lane & 7), j + (block >> 1));
  }
  __device__ __forceinline__ uint32_t mirror_place(int j) const {
    const int lane = thread & 31, warp = thread >> 5, block = lane >> 3;
    return place(8 * (j + (block >> 1)) + (lane & 7), 2 * warp + (block & 1));
  }
  __device__ __forceinline__ void stage() const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    staging.give_staged();
  }

  // Written where it belongs and mirrored. Every element has one writer.
  template <int BOX> __device__ __forceinline__ void write_mirrored(Item item, const Product& product) {
    const Box box(BOX, item, product);
    if (!box.there) return;
    const uint32_t direct = staging.boxes, mirror = staging.boxes + kBoxBytes;
    staging.wait_free();
    if (box.row == box.col) {
      put_diagonal<BOX>(direct, mirror);
    } else {
      put<BOX>(direct);
      put_mirrored<BOX>(mirror);
    }
    stage();
  }
  // Two boxes side by side, where nothing is mirrored.
  template <int BOX> __device__ __forceinline__ void write_whole(Item item, const Product& product) {
    if (!Box(BOX, item, product).there) return;
    staging.wait_free();
    put<BOX>(staging.boxes);
    put<BOX + 1>(staging.boxes + kBoxBytes);
    stage();
  }

  __device__ __forceinline__ void write(Item item, const Product& product) {
    if (product.mirrored) {
      write_mirrored<0>(item, product);
      write_mirrored<1>(item, product);
      write_mirrored<2>(item, product);
      write_mirrored<3>(item, product);
    } else {
      write_whole<0>(item, product);
      write_whole<2>(item, product);
    }
  }
};

__device__ __forceinline__ void multiply_items(Group& group, Mail mail, const Program& program) {
  float top[64], bottom[64];
  for (int number = group.number;; number += 2) {
    const Item item = mail.read(number);
    if (number > 0 && !item.past_end()) group.take_turn();
    if (item.ends()) break;
    const Product& product = program.products[item.product()];
    group.ring.go_to(item.position);
    if (item.idle()) {
      group.pass(product.steps + product.add);
      group.give_turn();
      continue;
    }
    const bool diagonal = product.mirrored && item.row == item.col;
    const int unreleased = !product.mirrored ? group.accumulate<Kind::whole>(top, bottom, product.steps)
                           : diagonal        ? group.accumulate<Kind::diagonal>(top, bottom, product.steps)
                                             : group.accumulate<Kind::mirrored>(top, bottom, product.steps);
    if (product.add) group.ring.wait_full();  // before the turn goes on: the other group will come round to this slot
    group.give_turn();
    products_wait<0>();
    settle(top);
    settle(bottom);
    group.release(unreleased);
    group.round<0>(top, item, product);
    if (!diagonal) group.round<1>(top, item, product);
    group.round<2>(bottom, item, product);
    group.round<3>(bottom, item, product);
    if (product.add) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // C has been read, and may be overwritten
      group.sync();
      group.release(group.ring.slot);
    }
    group.write(item, product);
  }
  group.staging.wait_free();  // all is read
}

// items: for each pair of tiles, (matrix, row and column of tiles, flags and product, 0) of either block. written: for
// each matrix, how many of its tiles are, and then how many pairs are taken, from zero on; null where no product waits
// for another.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    run_program(const __grid_constant__ Program program, const int4* items, int pairs, int* written, int matrices) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Ring ring;
  ring.slots = (uint32_t)__cvta_generic_to_shared(memory);
  const uint32_t staging = ring.slots + kSlots * kSlotBytes;
  Mail mail;
  mail.items = staging + 4 * kBoxBytes;
  mail.full = mail.items + 16 * kAhead;
  mail.empty = mail.full + 8 * kAhead;
  mail.rank = rank_in_cluster();
  ring.full = mail.empty + 8 * kAhead;
  ring.empty = ring.full + 8 * kSlots;
  const uint32_t progress = ring.empty + 8 * kSlots;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 2);
    }
    for (int i = 0; i < kAhead; ++i) {
      barrier_init(mail.full + 8 * i, 1);
      barrier_init(mail.empty + 8 * i, kReaders);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nst.shared.s32 [%0], 0;" ::"r"(progress) : "memory");
    const Product& product = program.products[0];
    fetch(program.maps[product.a]), fetch(program.maps[product.b]), fetch(program.maps[product.d]);
  }
  let_next_kernel_begin();
  __syncthreads();
  cluster_sync();
  const int role = uniform(threadIdx.x >> 7);
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int warp = uniform(threadIdx.x >> 5);
    if (warp < 2) wait_for_kernel_before();  // what else is read or written comes after; tables and maps were there
    if (warp == 0) {
      load_items(ring, mail, program, written != nullptr, progress);
    } else if (warp == 1) {
      scout(mail, {items, pairs, written ? written + matrices : nullptr}, program, written, progress);
    } else {
      store_items({staging + (warp - 2) * 2 * kBoxBytes, warp - 2}, mail, program, written);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Group group;
    group.ring = ring;
    group.number = role - 1;
    group.thread = threadIdx.x & 127;
    group.staging = {staging + group.number * 2 * kBoxBytes, group.number};
    multiply_items(group, mail, program);
  }
  cluster_sync();  // no block may leave while the other one can still signal to it
}
