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
// A step takes as long as its operands need to get into a multiprocessor, 64 bytes a cycle. So where B is A, and while there
// are enough multiprocessors, a box is done by two of them: each takes half of its columns, and three quarters of its
// operands. A box on the diagonal stays whole, since it takes in one operand anyway.
//
// Tiles of one whole box need no more than half of a multiprocessor's shared memory. Where all multiprocessors have one,
// those of the next kernel get ready beside them, and have only to wait for what they write.
//
// A sum is the same whichever kernel makes it: 64 numbers of k at a time, in four instructions of 16.
//
// It is compiled behind hopper.cuh.

constexpr int kMostBlocks = 144;

// What a thread block does: where its tile begins, in boxes, and how much of it is there. A pair are the boxes (row, row)
// and (col, col).
enum Part : unsigned char { kWhole, kPair, kLeft, kRight };
struct Block {
  unsigned char row, col;
  Part part;
};
struct Few {
  TensorMap a, b, c, d;
  TensorMap upright, flat;  // D in boxes of 64x32 and of 32x64, where boxes are halved; and then B, too, in 32x64
  Terms terms;
  int rows, steps, blocks;  // of D; of the inner dimension, 64 numbers each; for one matrix
  int same, added;          // whether B is A; whether there is C
  Block block[kMostBlocks];
};

// How boxes are taken: as they are, in halves where they are off the diagonal, or with room beside for the next kernel.
enum How { kAsTheyAre, kInHalves, kBeside };

template <int ROWS, int COLS, How HOW = kAsTheyAre> struct Tiles {
  static constexpr bool kSmall = ROWS * COLS == 1, kHalves = HOW == kInHalves;
  static constexpr int kGroups = kSmall && !kHalves ? 2 : ROWS;
  static constexpr int kTogether = HOW == kBeside ? 2 : 1;  // on a multiprocessor
  static constexpr int kSlots = 28 / kTogether / (ROWS + COLS);
  static constexpr uint32_t kSlotBytes = (ROWS + COLS) * kBoxBytes;  // of A and of B, or less of C
  typedef RingOf<kSlots, kSlotBytes> Ring;

  struct Task {
    const Few& few;
    Block block;
    int matrix;

    // A and B are the same numbers.
    __device__ __forceinline__ bool once() const {
      return (kHalves || few.same) && ROWS == COLS && block.row == block.col;
    }
    __device__ __forceinline__ bool paired() const { return kSmall && !kHalves && block.part == kPair; }
    __device__ __forceinline__ bool half() const { return kHalves && block.part != kWhole; }
    __device__ __forceinline__ bool right() const { return kHalves && block.part == kRight; }
    __device__ __forceinline__ int first_col() const { return 64 * block.col + (right() ? 32 : 0); }
    // The first box of a group, and where its operands are in a slot.
    __device__ __forceinline__ int row(int group) const {
      return paired() ? (group ? block.col : block.row) : block.row + group;
    }
    __device__ __forceinline__ int col(int group) const { return paired() ? row(group) : block.col; }
    __device__ __forceinline__ uint32_t a(int group) const { return group * kBoxBytes; }
    __device__ __forceinline__ uint32_t b(int group) const {
      return paired() ? group * kBoxBytes : once() ? 0 : ROWS * kBoxBytes;
    }
    __device__ __forceinline__ uint32_t bytes() const {
      return ROWS * kBoxBytes + (once() ? 0 : half() ? kBoxBytes / 2 : COLS * kBoxBytes);
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
      barrier_expect(barrier, task.bytes());
      if (step == 0) wait_for_kernel_before();  // as late as can be: everything else is ready
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        load(to + i * kBoxBytes, few.a, barrier, 64 * step, 64 * (task.block.row + i), task.matrix);
      if (task.once()) continue;
#pragma unroll
      for (int i = 0; i < COLS; ++i)
        load(to + (ROWS + i) * kBoxBytes, few.b, barrier, 64 * step, 64 * i + task.first_col(), task.matrix);
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

    // A tile of halves is off the diagonal, and takes its columns of all of a box of C.
    template <int COLUMNS, int ADDED>
    __device__ __forceinline__ void round_tile(float (&sums)[64], Rounded (&out)[1], const Task& task) const {
      const Terms terms[1] = {task.few.terms};
      if constexpr (ADDED > 0) ring.wait_full();
      const uint32_t slots[2] = {ring.here() + number * COLS * kBoxBytes, 0};
      if constexpr (COLUMNS == 32) {
        round<0, 1, ADDED, 8>(sums, out, terms, slots, 64, 0, task.right() ? 4 : 0);
      } else {
        const int row = 64 * task.row(number), col = 64 * task.col(number);
        round<0, 1, ADDED>(sums, out, terms, slots, row, col);
        if constexpr (COLS > 1) round<1, 1, ADDED>(sums, out, terms, slots, row, col);
      }
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
    // Half a box in rows of 64 bytes, swizzled as the copy engine does those, and its mirror image in 32 rows of 128 bytes.
    __device__ __forceinline__ void put_half(const Rounded& out) const {
      const int lane = thread & 31, warp = thread >> 5, block = lane >> 3;
      const int row = 16 * warp + 8 * (block & 1) + (lane & 7);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int quarter = j + (block >> 1);
        put_blocks(staged(0) + row * 64 + ((quarter ^ ((row >> 1) & 3)) << 4), out + 2 * j);
        put_blocks_transposed(staged(0) + kBoxBytes + mirror_place(j), out + 2 * j);
      }
    }
    __device__ __forceinline__ void store_half(const Task& task) const {
      const int row = 64 * task.row(0), col = task.first_col();
      store(task.few.upright, staged(0), col, row, task.matrix);
      store(task.few.flat, staged(0) + kBoxBytes, row, col, task.matrix);
    }

    __device__ __forceinline__ void meet_groups(const Task& task) const {
      if constexpr (kGroups == 1) {
        sync();
      } else {
        threads_sync(1 + kGroups, 128 * task.groups());
      }
    }
    template <int COLUMNS> __device__ __forceinline__ void compute(const Task& task) {
      float sums[64];
      accumulate<COLUMNS>(sums, task);
      Rounded out[1];
      if (task.few.added) {
        round_tile<COLUMNS, 1>(sums, out, task);
      } else {
        round_tile<COLUMNS, 0>(sums, out, task);
      }
      meet_groups(task);  // nobody needs the ring any more
      if constexpr (COLUMNS == 32) {
        put_half(out[0]);
      } else {
        put_box<0>(out[0], task);
        if constexpr (COLS > 1) put_box<1>(out[0], task);
      }
      show_copy_engine();
      sync();
      if (thread > 0) return;
      if constexpr (COLUMNS == 32) {
        store_half(task);
      } else {
        store_boxes(task);
      }
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
      if (kHalves) fetch(few.upright), fetch(few.flat);
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
      if (kHalves && task.half()) {
        group.template compute<32>(task);
      } else {
        group.template compute<64 * COLS>(task);
      }
    }
  }
};

#define KERNEL(NAME, ...) \
  extern "C" __global__ void __launch_bounds__(128 * Tiles<__VA_ARGS__>::kGroups + 32, Tiles<__VA_ARGS__>::kTogether) \
      NAME(const __grid_constant__ Few few) { \
    extern __shared__ __align__(1024) unsigned char memory[]; \
    Tiles<__VA_ARGS__>::run(few, (uint32_t)__cvta_generic_to_shared(memory)); \
  }
KERNEL(few_1x1_halves, 1, 1, kInHalves)
KERNEL(few_1x1_beside, 1, 1, kBeside)
KERNEL(few_1x1, 1, 1)
KERNEL(few_2x1, 2, 1)
KERNEL(few_3x1, 3, 1)
KERNEL(few_2x2, 2, 2)
