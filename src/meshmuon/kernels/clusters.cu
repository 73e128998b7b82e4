// D = alpha A B^T + beta C + gamma I for products known to be symmetric, in 16 bits with fp32 sums, on Hopper (sm_90a).
//
// Tiles are 128x128, of the lower triangle. Two thread blocks on neighbouring multiprocessors (a cluster) take two tiles
// of one column: each loads its own rows of A, and half of the rows of B for both. In a block, one thread loads, and two
// groups of 128 threads take turns: while one multiplies its tile, the other rounds and stores the one before. So the
// tensor cores never wait for a result to be written. What is multiplied passes through a ring of slots in shared memory;
// so does C, in a slot of its own behind the last one of its tile.
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
constexpr int kShared = 1, kIdle = 2;             // flags of an item: B is the other block's too; there is nothing to do

struct Scale { float alpha, beta, gamma; };

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
// Without .release.cluster, which would wait for all of memory: what is handed over has been read, not written.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier), "r"(rank) : "memory");
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

// The tensor cores' view of an operand: rows of 128 bytes, swizzled, groups of eight rows 1024 bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
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
// 64x128 sums, 16 numbers of k; `keep` adds to what is there.
__device__ __forceinline__ void multiply(float (&t)[64], uint64_t a, uint64_t b, bool keep) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
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

// The strict upper part of a box on the diagonal comes from its own mirror image: D = D^T bit for bit.
__device__ __forceinline__ void complete_diagonal(uint32_t box, uint32_t mirror, int thread) {
#pragma unroll 1
  for (int i = thread; i < 64 * 64; i += 128) {
    const int row = i >> 6, col = i & 63;
    const uint32_t number = place(row, col >> 3) + 2 * (col & 7);
    if (col > row) put_number(box + number, get_number(mirror + number));
  }
}

// ---- the thread that loads

__device__ __forceinline__ void load_items(
    Ring ring, const TensorMap& a, const TensorMap& b, const TensorMap& c, const int4* items, int first, int last,
    uint32_t rank, int steps, bool add) {
  int4 item = items[2 * first + rank];
  // What is read or written comes after what is loaded here; blocks that load nothing write nothing, and the grid cannot
  // end before those that wait. Tables and maps were there long before.
  wait_for_kernel_before();
  for (int index = first; index < last; ++index) {
    const int4 following = items[2 * min(index + 1, last - 1) + rank];
    const bool idle = item.w & kIdle, shared = item.w & kShared;
    for (int step = 0; step < steps; ++step) {
      ring.wait_empty();
      const uint32_t barrier = ring.full_here(), to = ring.here(), to_b = to + kTileBytes;
      if (idle) {
        barrier_arrive(barrier);
      } else {
        barrier_expect(barrier, kSlotBytes);
        load(to, a, barrier, 64 * step, item.y, item.x);
        if (shared) {
          load_for_both(to_b + rank * kBoxBytes, b, barrier, 64 * step, item.z + 64 * rank, item.x);
        } else {
          load(to_b, b, barrier, 64 * step, item.z, item.x);
          load(to_b + kBoxBytes, b, barrier, 64 * step, item.z + 64, item.x);
        }
      }
      ring.next();
    }
    if (add) {
      ring.wait_empty();
      if (idle) {
        barrier_arrive(ring.full_here());
      } else {
        barrier_expect(ring.full_here(), kSlotBytes);
        load(ring.here(), c, ring.full_here(), item.z, item.y, item.x);
        load(ring.here() + kTileBytes, c, ring.full_here(), item.z + 64, item.y, item.x);
      }
      ring.next();
    }
    item = following;
  }
}

// ---- a group of 128 threads that multiplies

struct Group {
  Ring ring;
  uint32_t staging;   // 8 KB for a box of results, 8 KB for its mirror image
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

  template <bool FIRST> __device__ __forceinline__ void start(float (&top)[64], float (&bottom)[64]) {
    ring.wait_full();
    const uint64_t a = operand(ring.here()), b = operand(ring.here() + kTileBytes);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      multiply(top, a + 2 * part, b + 2 * part, !(FIRST && part == 0));
      multiply(bottom, a + (kBoxBytes >> 4) + 2 * part, b + 2 * part, !(FIRST && part == 0));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }

  // All products of a tile are under way afterwards; gives the slot that the last ones still read.
  __device__ __forceinline__ int accumulate(float (&top)[64], float (&bottom)[64], int steps) {
    start<true>(top, bottom);
    int previous = ring.slot;
    ring.next();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      start<false>(top, bottom);
      products_wait<1>();
      release(previous);
      previous = ring.slot;
      ring.next();
    }
    return previous;
  }

  // A box of 64x64 sums: scaled, added to, and rounded once.
  template <int BOX> __device__ __forceinline__ void round(float (&t)[64], int4 item, Scale scale, bool add) {
    constexpr int kHalf = BOX / 2, kSide = BOX % 2;
    const bool diagonal = item.y + 64 * kHalf == item.z + 64 * kSide;
    const uint32_t box = ring.here() + kSide * kTileBytes + kHalf * kBoxBytes;  // of C
    const int lane = thread & 31, warp = thread >> 5, block = lane >> 3;
    const float low_one = (lane >> 2) == 2 * (lane & 3) ? scale.gamma : 0.0f;
    const float high_one = (lane >> 2) == 2 * (lane & 3) + 1 ? scale.gamma : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const bool here = diagonal && j == 2 * warp;  // this warp's rows meet the diagonal in these columns
      uint32_t added[4];
      if (add) get_blocks(box + place(16 * warp + 8 * (block & 1) + (lane & 7), j + (block >> 1)), added);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sum = 32 * kSide + 4 * j + 2 * i;
        const bool one = (i == 0 || i == 3) && here;
        float low = __fmaf_rn(scale.alpha, t[sum], one ? low_one : 0.0f);
        float high = __fmaf_rn(scale.alpha, t[sum + 1], one ? high_one : 0.0f);
        if (add) {
          float c_low, c_high;
          widened(added[i], c_low, c_high);
          low = __fmaf_rn(scale.beta, c_low, low);
          high = __fmaf_rn(scale.beta, c_high, high);
        }
        out[16 * BOX + 2 * j + i] = rounded(low, high);
      }
    }
  }

  // Written where it belongs and mirrored, by the copy engine. Every element has one writer.
  template <int BOX> __device__ __forceinline__ void write(const TensorMap& d, int4 item, int m) {
    const int row = item.y + 64 * (BOX / 2), col = item.z + 64 * (BOX % 2);
    if (col > row || row >= m) return;
    const uint32_t box = staging, mirror = staging + kBoxBytes;
    const int lane = thread & 31, warp = thread >> 5, block = lane >> 3;
    if (thread == 0) stores_read();  // those before
    sync();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const uint32_t* pairs = out + 16 * BOX + 2 * j;
      put_blocks(box + place(16 * warp + 8 * (block & 1) + (lane & 7), j + (block >> 1)), pairs);
      put_blocks_transposed(mirror + place(8 * (j + (block >> 1)) + (lane & 7), 2 * warp + (block & 1)), pairs);
    }
    if (row == col) {
      sync();
      complete_diagonal(box, mirror, thread);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync();
    if (thread == 0) {
      store(d, box, col, row, item.x);
      if (row != col) store(d, mirror, row, col, item.x);
      stores_commit();
    }
  }
};

// items: for each pair of tiles, (matrix, row, column, flags) of either block. starts: where each cluster's items begin.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) symmetric_product(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap c,
    const __grid_constant__ TensorMap d, const int4* items, const int* starts, int m, int steps, int add, float alpha,
    float beta, float gamma) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Ring ring;
  ring.slots = (uint32_t)__cvta_generic_to_shared(memory);
  const uint32_t staging = ring.slots + kSlots * kSlotBytes;
  ring.full = staging + 4 * kBoxBytes;
  ring.empty = ring.full + 8 * kSlots;
  const uint32_t rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fetch(a), fetch(b), fetch(c), fetch(d);
  }
  let_next_kernel_begin();
  __syncthreads();
  cluster_sync();
  const int cluster = blockIdx.x >> 1;
  const int first = uniform(starts[cluster]), last = uniform(starts[cluster + 1]);
  const int role = uniform(threadIdx.x >> 7);
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0 && first < last) load_items(ring, a, b, c, items, first, last, rank, steps, add);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Group group;
    group.ring = ring;
    group.number = role - 1;
    group.thread = threadIdx.x & 127;
    group.staging = staging + group.number * 2 * kBoxBytes;
    const Scale scale = {alpha, beta, gamma};
    const int slots = steps + (add ? 1 : 0);  // that a tile takes
    float top[64], bottom[64];
    for (int index = first + group.number; index < last; index += 2) {
      const int4 item = items[2 * index + rank];
      group.ring.go_to((index - first) * slots);
      if (index > first) group.take_turn();
      if (item.w & kIdle) {
        group.pass(slots);
        if (index + 1 < last) group.give_turn();
        continue;
      }
      const int unreleased = group.accumulate(top, bottom, steps);
      if (add) group.ring.wait_full();  // before the turn goes on: the other group will come round to this slot
      if (index + 1 < last) group.give_turn();
      products_wait<0>();
      settle(top);
      settle(bottom);
      group.release(unreleased);
      group.round<0>(top, item, scale, add);
      group.round<1>(top, item, scale, add);
      group.round<2>(bottom, item, scale, add);
      group.round<3>(bottom, item, scale, add);
      if (add) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // C has been read, and may be overwritten
        group.sync();
        group.release(group.ring.slot);
      }
      group.write<0>(d, item, m);
      group.write<1>(d, item, m);
      group.write<2>(d, item, m);
      group.write<3>(d, item, m);
    }
    if (group.thread == 0) stores_read();
  }
  cluster_sync();  // no block may leave while the other one can still signal to it
}
