// D = alpha A B^T + beta C + gamma I, known to be symmetric, of so few tiles that each has a multiprocessor of its own; in
// 16 bits with fp32 sums, on Hopper (sm_90a). One triangle is computed, the other one is its mirror image.
//
// Nothing is scheduled here and nobody takes turns: what counts is how soon the first numbers arrive and the last ones
// leave. A tile is ROWS x COLS boxes of 64x64, and a thread block computes one. A group of 128 threads multiplies for each
// row of boxes, and one more warp loads, as far ahead as there is room. The result leaves from the memory of the ring,
// which is not needed any more then.
//
// Where B is A, two boxes on the diagonal need what one box elsewhere does: its two operands. So one thread block can take
// both, a group for each, where there are more boxes than multiprocessors.
//
// A step takes as long as its operands need to get into a multiprocessor, some 60 bytes a cycle. One thread loads them, as
// fast as that, and waits for the kernel before as late as it can.
//
// A sum is the same whichever kernel makes it: 64 numbers of k at a time, in four instructions of 16.
//
// It is compiled behind hopper.cuh.

constexpr int kMostBlocks = 144;

// What a thread block does: where its tile begins, in boxes; or the two boxes (row, row) and (col, col).
struct Block {
  unsigned char row, col, paired;
};
struct Few {
  TensorMap a, b, c, d;
  Terms terms;
  int rows, steps, blocks;  // of D; of the inner dimension, 64 numbers each; for one matrix
  int same, added;          // whether B is A; whether there is C
  Block block[kMostBlocks];
};

template <int ROWS, int COLS> struct Tiles {
  static constexpr bool kSmall = ROWS * COLS == 1;
  static constexpr int kGroups = kSmall ? 2 : ROWS;
  static constexpr int kSlots = 28 / (ROWS + COLS);
  static constexpr uint32_t kSlotBytes = (ROWS + COLS) * kBoxBytes;  // of A and of B, or less of C
  typedef RingOf<kSlots, kSlotBytes> Ring;

  struct Task {
    const Few& few;
    Block block;
    int matrix;

    // A and B are the same numbers.
    __device__ __forceinline__ bool once() const { return few.same && ROWS == COLS && block.row == block.col; }
    __device__ __forceinline__ bool paired() const { return kSmall && block.paired; }
    // The first box of a group, and where its operands are in a slot.
    __device__ __forceinline__ int row(int group) const {
      return paired() ? (group ? block.col : block.row) : block.row + group;
    }
    __device__ __forceinline__ int col(int group) const { return paired() ? row(group) : block.col; }
    __device__ __forceinline__ uint32_t a(int group) const { return group * kBoxBytes; }
    __device__ __forceinline__ uint32_t b(int group) const {
      return paired() ? group * kBoxBytes : once() ? 0 : ROWS * kBoxBytes;
    }
    // Whether a group has something to do: above the diagonal and outside there is nothing.
    __device__ __forceinline__ bool has(int group, int side = 0) const {
      const bool inside = paired() || (group < ROWS && 64 * row(group) < few.rows);
      return inside && col(group) + side <= row(group);
    }
    __device__ __forceinline__ int groups() const {
      int count = 0;
      for (int group = 0; group < kGroups; ++group) count += has(group);
      return count;
    }
  };

  __device__ __forceinline__ static void load_all(Ring ring, const Task& task) {
    const Few& few = task.few;
    for (int step = 0; step < few.steps; ++step, ring.next()) {
      const uint32_t barrier = ring.full_here(), to = ring.here();
      ring.wait_empty();
      barrier_expect(barrier, task.once() ? ROWS * kBoxBytes : kSlotBytes);
      if (step == 0) wait_for_kernel_before();  // as late as can be: everything else is ready
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        load(to + i * kBoxBytes, few.a, barrier, 64 * step, 64 * (task.block.row + i), task.matrix);
      if (task.once()) continue;
#pragma unroll
      for (int i = 0; i < COLS; ++i)
        load(to + (ROWS + i) * kBoxBytes, few.b, barrier, 64 * step, 64 * (task.block.col + i), task.matrix);
    }
    if (!few.added) return;
    ring.wait_empty();
    const int boxes = kSmall ? task.groups() : kGroups * COLS;
    barrier_expect(ring.full_here(), boxes * kBoxBytes);
#pragma unroll
    for (int i = 0; i < kGroups * COLS; ++i)
      if (i < boxes)
        load(ring.here() + i * kBoxBytes, few.c, ring.full_here(), 64 * (task.col(i / COLS) + i % COLS),
             64 * task.row(i / COLS), task.matrix);
  }

  // 128 threads, and the boxes that are theirs.
  struct Group : Threads {
    Ring ring;
    int number;

    __device__ __forceinline__ void release(int slot) const {
      if (thread == 0) barrier_arrive(ring.empty + 8 * slot);
    }

    template <int COLUMNS, bool FIRST> __device__ __forceinline__ void start(float (&sums)[64], const Task& task) const {
      ring.wait_full();
      const uint64_t a = operand(ring.here() + task.a(number)), b = operand(ring.here() + task.b(number));
      products_fence();
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const bool keep = !(FIRST && part == 0);
        multiply<COLUMNS, false, false>(sums, a + 2 * part, b + 2 * part, keep);
      }
      products_commit();
    }
    template <int COLUMNS> __device__ __forceinline__ void accumulate(float (&sums)[64], const Task& task) {
      start<COLUMNS, true>(sums, task);
      int previous = ring.slot;
      ring.next();
#pragma unroll 1
      for (int step = 1; step < task.few.steps; ++step) {
        start<COLUMNS, false>(sums, task);
        products_wait<1>();
        release(previous);
        previous = ring.slot;
        ring.next();
      }
      products_wait<0>();
      settle(sums);
      release(previous);
    }

    template <int ADDED>
    __device__ __forceinline__ void round_tile(float (&sums)[64], Rounded (&out)[1], const Task& task) const {
      const Terms terms[1] = {task.few.terms};
      if constexpr (ADDED > 0) ring.wait_full();
      const uint32_t slots[2] = {ring.here() + number * COLS * kBoxBytes, 0};
      const int row = 64 * task.row(number), col = 64 * task.col(number);
      round<0, 1, ADDED>(sums, out, terms, slots, row, col);
      if constexpr (COLS > 1) round<1, 1, ADDED>(sums, out, terms, slots, row, col);
    }

    // A box and its mirror image.
    __device__ __forceinline__ uint32_t staged(int side) const {
      return ring.slots + (number * COLS + side) * 2 * kBoxBytes;
    }
    template <int SIDE> __device__ __forceinline__ void put_box(const Rounded& out, const Task& task) const {
      if (!task.has(number, SIDE)) return;
      const uint32_t box = staged(SIDE), mirror = box + kBoxBytes;
      if (task.row(number) == task.col(number) + SIDE) {
        put_diagonal<SIDE>(out, box, mirror);
      } else {
        put<SIDE>(out, box);
        put_mirrored<SIDE>(out, mirror);
      }
    }
    __device__ __forceinline__ void store_boxes(const Task& task) const {
      for (int side = 0; side < COLS && task.has(number, side); ++side) {
        const int row = 64 * task.row(number), col = 64 * (task.col(number) + side);
        store(task.few.d, staged(side), col, row, task.matrix);
        if (row != col) store(task.few.d, staged(side) + kBoxBytes, row, col, task.matrix);
      }
    }

    __device__ __forceinline__ void compute(const Task& task) {
      float sums[64];
      accumulate<64 * COLS>(sums, task);
      Rounded out[1];
      if (task.few.added) {
        round_tile<1>(sums, out, task);
      } else {
        round_tile<0>(sums, out, task);
      }
      threads_sync(1 + kGroups, 128 * task.groups());  // nobody needs the ring any more
      put_box<0>(out[0], task);
      if constexpr (COLS > 1) put_box<1>(out[0], task);
      show_copy_engine();
      sync();
      if (thread > 0) return;
      store_boxes(task);
      stores_commit();
      stores_read();  // shared memory has to be there until then
    }
  };

  __device__ __forceinline__ static void run(const Few& few, uint32_t memory) {
    const unsigned blocks = few.blocks, matrix = gridDim.x == blocks ? 0 : blockIdx.x / blocks;  // a division takes long
    const Task task = {few, few.block[blockIdx.x - matrix * blocks], (int)matrix};
    Ring ring;
    ring.slots = memory;
    ring.full = memory + kSlots * kSlotBytes;
    ring.empty = ring.full + 8 * kSlots;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kSlots; ++i) {
        barrier_init(ring.full + 8 * i, 1);
        barrier_init(ring.empty + 8 * i, task.groups());
      }
      barriers_ready();
      fetch(few.a), fetch(few.b), fetch(few.d);
      if (few.added) fetch(few.c);
    }
    let_next_kernel_begin();
    __syncthreads();
    const int role = uniform(threadIdx.x >> 7);
    if (threadIdx.x + 32 >= blockDim.x) {
      if (elected()) load_all(ring, task);
    } else if (task.has(role)) {
      Group group;
      group.thread = threadIdx.x & 127;
      group.barrier = 1 + role;
      group.ring = ring;
      group.number = role;
      group.compute(task);
    }
  }
};

#define KERNEL(ROWS, COLS) \
  extern "C" __global__ void __launch_bounds__(128 * Tiles<ROWS, COLS>::kGroups + 32, 1) \
      few_##ROWS##x##COLS(const __grid_constant__ Few few) { \
    extern __shared__ __align__(1024) unsigned char memory[]; \
    Tiles<ROWS, COLS>::run(few, (uint32_t)__cvta_generic_to_shared(memory)); \
  }
KERNEL(1, 1)
KERNEL(2, 1)
KERNEL(3, 1)
KERNEL(2, 2)
