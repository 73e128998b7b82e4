// Products of stacks of matrices, one after the other in a single launch, in 16 bits with fp32 sums, on Hopper (sm_90a):
//   D = alpha A B^T + beta C + delta E + gamma I where that is known to be symmetric: one triangle is computed;
//   D = alpha A B + beta C                       where it is not.
// Of the same product, a second D with other factors can be made, or one of what rounding takes from the first.
//
// Of a symmetric D, the other triangle is written as the mirror image of the first, or not at all: what is multiplied
// next then takes boxes from the triangle that is there, and has the tensor cores read them turned. That is half of the
// bytes to write and to hold in the cache, and the same bits.
//
// Tiles are 128x128. Two thread blocks on neighbouring multiprocessors (a cluster) take two tiles of one column, or the
// upper and the lower half of one: each loads its own rows of A, and half of B for both. In a block, two groups of 128
// threads take turns: while one multiplies its tile, the other rounds the one before and puts it into staging memory. Four
// warps serve them: one takes tiles and looks ahead for what may be loaded, one loads, and two store what is staged. So
// the tensor cores never wait for memory. What is multiplied passes through a ring of slots in shared memory; so do C and
// E, in slots of their own behind the last one of their tile.
//
// A product may read what one before it wrote. For each matrix a counter says how many tiles are written, of all products
// so far; the warp that looks ahead waits until it says enough. Clusters take pairs of tiles in the order of one list, as
// they come, and nobody waits for tiles that come later in it. So whoever has the first pair that is not done can go on,
// however many clusters are there at the same time. Between the products of one matrix come those of others: then nobody
// waits at all, and there is no pause between two products.
//
// The last product's results need not be written at all: they can be steps that parameters take at once (`Landing`).
//
// The design is that of NVIDIA's CUTLASS for Hopper ("ping-pong" kernels: https://github.com/NVIDIA/cutlass).
//
// A sum is the same whichever kernel makes it: 64 numbers of k at a time, in four instructions of 16, as Triton does.
//
// It is compiled behind hopper.cuh.

constexpr int kSlots = 6;
constexpr uint32_t kTileBytes = 2 * kBoxBytes;    // 128 rows
constexpr uint32_t kSlotBytes = 2 * kTileBytes;   // of A and of B, or 128 columns of C or E
constexpr int kAhead = 4;                         // items that are known before they are done; even, for two groups
constexpr int kShared = 1, kIdle = 2;             // flags of an item: B is the other block's too; there is nothing to do
constexpr int kEnd = 4, kPastEnd = 8;             // the list is at its end; one more item, for whoever looks at every other
constexpr int kTwoHalves = 2;                     // of a product: the second result is what rounding takes from the first
constexpr int kShort = 16;                        // half a tile, 64 rows: boxes 0 and 1, and of A one box instead of two
constexpr int kProductShift = 8;                  // what is left of an item's flags is the number of its product
constexpr int kMostMaps = 12, kMostProducts = 39;
static_assert(kAhead % 2 == 0, "a group has to find its items in the same slots again");

struct Product {
  unsigned char a, b, c, e, d, second;             // numbers of their maps
  unsigned char mirrored, added, awaited, twice;   // `added`: how many of C and E there are
  unsigned char half_a, half_b, half_d;            // symmetric stacks of which only the lower triangle is there
  unsigned char lands;                             // 0, or how parameters take the result as a step
  int rows, cols, steps;                           // of D; and of the inner dimension, 64 numbers each
  int after;                                       // tiles of this matrix that have to be written before
  Terms terms[2];                                  // of the first result, and of the second
  __device__ __forceinline__ int slots() const { return steps + added; }
  // The step of the inner dimension from which boxes of A and B are turned. Of a triangle, what is right of the diagonal
  // is taken from below it, turned; a box on the diagonal is the same either way.
  __device__ __forceinline__ int a_turns(int row) const { return half_a ? row / 64 + 1 : steps; }
  __device__ __forceinline__ int b_turns(int col) const { return half_b ? col / 64 + 1 : mirrored ? steps : 0; }
};
struct Program {
  TensorMap maps[kMostMaps];
  Product products[kMostProducts];
};

typedef RingOf<kSlots, kSlotBytes> Ring;

// ---- parameters that take a step where it is computed: fp32, numbers of a row side by side, rows 16-byte aligned

constexpr int kDecaysIfAgreed = 2;  // how a product may land: only what agrees with its direction in sign decays

struct Landing {
  const long long* entries;     // of each matrix, as kernels/tables.py lists them
  const float *lr, *decay;      // `decay` null: nothing decays
  const unsigned char* proceed; // null: go
};
enum Field { kGradient = 0, kParameter = 2, kRowStride = 7, kRows = 9, kCols = 10, kTurned = 15, kScale = 16, kFields = 18 };

// One parameter, as it is stored: the matrix, or its transpose. It has no rows if it is to stay as it is.
struct Ground {
  float* base;
  long long row_stride;
  int rows, cols;
  bool turned;
  float size, kept;  // factors of the direction, and of the parameter

  __device__ __forceinline__ Ground(const Landing& landing, int matrix) {
    const long long* entry = landing.entries + (long long)kFields * matrix;
    const bool stays = !entry[kGradient] || (landing.proceed && !*landing.proceed);
    base = (float*)entry[kParameter];
    row_stride = entry[kRowStride];
    rows = stays ? 0 : (int)entry[kRows];
    cols = (int)entry[kCols];
    turned = entry[kTurned];
    const float lr = *landing.lr;
    size = __fmul_rn(lr, __int_as_float((int)entry[kScale]));
    kept = landing.decay ? __fsub_rn(1.0f, __fmul_rn(lr, *landing.decay)) : 1.0f;
  }
  __device__ __forceinline__ bool has(int row, int col) const { return row < rows && col < cols; }
  __device__ __forceinline__ float4* four_at(int row, int col) const { return (float4*)(base + row * row_stride + col); }

  // Every operation rounded by itself, as the kernel does that takes steps from memory: the same bits.
  __device__ __forceinline__ float stepped(float parameter, float direction, bool if_agreed) const {
    const bool decays = !if_agreed || __fmul_rn(direction, parameter) > 0.0f;
    return __fsub_rn(decays ? __fmul_rn(parameter, kept) : parameter, __fmul_rn(direction, size));
  }
};

// ---- what both blocks of a cluster are to do, one item after the other: taken by one warp, sent to all others

struct Item {
  int matrix, row, col, flags, position;  // the last: in the ring, of all that was loaded before
  __device__ __forceinline__ bool idle() const { return flags & kIdle; }
  __device__ __forceinline__ bool shared() const { return flags & kShared; }
  __device__ __forceinline__ bool is_short() const { return flags & kShort; }
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
    const Item item = {uniform(sent.x), (place & 0xFFFF) * 64, (place >> 16) * 64, uniform(sent.z), uniform(sent.w)};
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
  const int4* items;  // two for each pair: matrix, row and column in boxes of 64, flags
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
      position = (position + product.slots()) % (2 * kSlots);
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
      count_on(progress, number + 1);
    }
    __syncwarp();
  }
}

// ---- the warp that loads

// Column and row of a box of an operand, whose rows are `across` and whose 64 numbers of k are `along`; or turned.
__device__ __forceinline__ int2 corner(bool turned, int along, int across) {
  return turned ? make_int2(across, along) : make_int2(along, across);
}

__device__ __forceinline__ void load_tile(
    Ring& ring, const Program& program, const Product& product, Item item, uint32_t rank) {
  const TensorMap &a = program.maps[product.a], &b = program.maps[product.b];
  const int steps = product.steps, a_turns = product.a_turns(item.row), b_turns = product.b_turns(item.col);
  const int mine = item.col + (item.shared() ? 64 * rank : 0);
  const uint32_t bytes = kSlotBytes - (item.is_short() ? kBoxBytes : 0);  // of A, B and the other block's part of B
  for (int step = 0; step < steps; ++step, ring.next()) {
    ring.wait_empty();
    if (elected()) {
      const uint32_t barrier = ring.full_here(), to = ring.here(), to_b = to + kTileBytes;
      const bool a_turned = step >= a_turns, b_turned = step >= b_turns;
      const int2 top = corner(a_turned, 64 * step, item.row), bottom = corner(a_turned, 64 * step, item.row + 64);
      const int2 left = corner(b_turned, 64 * step, mine), right = corner(b_turned, 64 * step, mine + 64);
      barrier_expect(barrier, bytes);
      load(to, a, barrier, top.x, top.y, item.matrix);
      if (!item.is_short()) load(to + kBoxBytes, a, barrier, bottom.x, bottom.y, item.matrix);
      if (item.shared()) {
        load_for_both(to_b + rank * kBoxBytes, b, barrier, left.x, left.y, item.matrix);
      } else {
        load(to_b, b, barrier, left.x, left.y, item.matrix);
        load(to_b + kBoxBytes, b, barrier, right.x, right.y, item.matrix);
      }
    }
  }
}

// C alone takes a slot. With E, the upper halves of both take one, and the lower halves the next. For half a tile, what is
// below it comes as well, and is not used.
__device__ __forceinline__ void load_added(Ring& ring, const Program& program, const Product& product, Item item) {
  for (int slot = 0; slot < product.added; ++slot, ring.next()) {
    ring.wait_empty();
    if (elected()) {
      barrier_expect(ring.full_here(), kSlotBytes);
#pragma unroll
      for (int box = 0; box < 4; ++box) {
        const bool both = product.added > 1;
        const TensorMap& from = program.maps[both && box >= 2 ? product.e : product.c];
        const int col = item.col + 64 * (box % 2), row = item.row + 64 * (both ? slot : box / 2);
        load(ring.here() + box * kBoxBytes, from, ring.full_here(), col, row, item.matrix);
      }
    }
  }
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
      load_nothing(ring, product.slots());
      continue;
    }
    if (scouted) wait_for_more(progress, number);
    load_tile(ring, program, product, item, mail.rank);
    load_added(ring, program, product, item);
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
// Boxes are stored two at a time: side by side, or one with its mirror image. On the diagonal, and where a mirror image is
// wanted, they go one by one.
__device__ __forceinline__ bool side_by_side(Item item, const Product& product) {
  return !product.mirrored || (product.half_d && item.row != item.col);
}
// Where the box number 0...3 of a tile begins, and whether it is computed: what is above the diagonal is not, and of half
// a tile there are two.
struct Box {
  int row, col;
  bool there;
  __device__ __forceinline__ Box(int number, Item item, const Product& product)
      : row(item.row + 64 * (number / 2)), col(item.col + 64 * (number % 2)),
        there(row < product.rows && (product.mirrored ? col <= row : col < product.cols) &&
              !(number >= 2 && item.is_short())) {}
};

__device__ __forceinline__ void store_tile(Staging staging, const TensorMap& d, Item item, const Product& product) {
  const uint32_t left = staging.boxes, right = staging.boxes + kBoxBytes;
  const bool two = side_by_side(item, product);
  for (int part = 0; part < 4; part += two ? 2 : 1) {
    const Box box(part, item, product), next(part + 1, item, product);
    if (!box.there) continue;
    staging.wait_staged();
    if (leads() && !product.lands) {
      store(d, left, box.col, box.row, item.matrix);
      if (two) {
        if (next.there) store(d, right, next.col, next.row, item.matrix);
      } else if (!product.half_d && box.row != box.col) {
        store(d, right, box.row, box.col, item.matrix);
      }
      stores_commit();
      stores_read();
    }
    __syncwarp();
    staging.give_free();
  }
}

__device__ __forceinline__ void store_items(Staging staging, Mail mail, const Program& program, int* written) {
  staging.give_free();
  for (int number = staging.number;; number += 2) {
    const Item item = mail.read(number);
    if (item.ends()) break;
    if (item.idle()) continue;
    const Product& product = program.products[item.product()];
    store_tile(staging, program.maps[product.d], item, product);
    if (product.twice) store_tile(staging, program.maps[product.second], item, product);
    if (product.awaited && leads()) {
      stores_done();
      count_up(written + item.matrix);
    }
    __syncwarp();
  }
}

// ---- a group of 128 threads that multiplies

// Whether steps of half a tile leave the other half out. Compilers before CUDA 12.8 cannot cope with one more kind of steps:
// they would have every product wait for the one before, in all of the kernel (C7511).
#if defined(__CUDACC_VER_MAJOR__) && 100 * __CUDACC_VER_MAJOR__ + __CUDACC_VER_MINOR__ < 1208
constexpr bool kShortSteps = false;
#else
constexpr bool kShortSteps = true;
#endif

// Which sums of a tile a step adds to: all; on the diagonal, all but the right half of the upper ones, which is above it;
// of half a tile, wherever it is, the upper ones.
enum Sums { kAll, kOnDiagonal, kUpper };

struct Group : Threads {
  Ring ring;
  Staging staging;
  int number;

  // The same group, though the compiler cannot know it: what follows from the thread is worked out when it is needed, not
  // far ahead, in registers that sums are spilled for.
  __device__ __forceinline__ Group anew() const {
    Group group = *this;
    forget(group.thread);
    return group;
  }

  // A slot is empty when the groups of both blocks say so: either block may be the one that fills it.
  __device__ __forceinline__ void release(int slot) const {
    if (thread < 2) barrier_arrive_at(ring.empty + 8 * slot, thread);
  }
  // The groups take turns, so that no one waits for a slot before everybody has waited for its use before: barriers know
  // odd from even, not how often. So the turn goes on when all slots of a tile are known to be full, C's and E's too.
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

  template <Sums SUMS, bool A_TURNED, bool B_TURNED, bool FIRST = false>
  __device__ __forceinline__ void start(float (&top)[64], float (&bottom)[64]) const {
    constexpr int kAcross = 16 * 128 >> 4, kAlong = 16 * 2 >> 4;  // 16 rows, or 16 numbers of a row
    constexpr int kStepA = A_TURNED ? kAcross : kAlong, kStepB = B_TURNED ? kAcross : kAlong;
    ring.wait_full();
    const uint64_t a = operand(ring.here()), b = operand(ring.here() + kTileBytes);
    products_fence();
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const bool keep = !(FIRST && part == 0);
      if constexpr (SUMS == kOnDiagonal) {
        multiply<64, A_TURNED, B_TURNED>(top, a + kStepA * part, b + kStepB * part, keep);
      } else {
        multiply<128, A_TURNED, B_TURNED>(top, a + kStepA * part, b + kStepB * part, keep);
      }
      if constexpr (SUMS != kUpper) {
        multiply<128, A_TURNED, B_TURNED>(bottom, a + (kBoxBytes >> 4) + kStepA * part, b + kStepB * part, keep);
      }
    }
    products_commit();
  }

  // Goes on to some step; `previous` is the slot that the products before still read.
  template <Sums SUMS, bool A_TURNED, bool B_TURNED>
  __device__ __forceinline__ void go_on(float (&top)[64], float (&bottom)[64], int& step, int end, int& previous) {
#pragma unroll 1
    for (; step < end; ++step) {
      start<SUMS, A_TURNED, B_TURNED>(top, bottom);
      products_wait<1>();
      release(previous);
      previous = ring.slot;
      ring.next();
    }
  }

  // All products of a tile are under way afterwards; gives the slot that the last ones still read. On the diagonal, a
  // triangle A has a triangle B beside it, so that A never turns before B; and nothing is turned from the first step on.
  //
  // Half a tile is one of a symmetric product alone, in which nothing is turned. Its first step is that of a whole tile:
  // lower sums that nobody takes, of whatever is where A's lower box would be. With a first step of its own, the compiler
  // would have to bring three beginnings together, and spills registers.
  template <Sums SUMS>
  __device__ __forceinline__ int accumulate(float (&top)[64], float (&bottom)[64], Item item, const Product& product) {
    const int a_turns = product.a_turns(item.row), b_turns = product.b_turns(item.col), steps = product.steps;
    if (SUMS == kOnDiagonal || b_turns > 0) {
      start<SUMS, false, false, true>(top, bottom);
    } else {
      start<SUMS, false, true, true>(top, bottom);
    }
    int step = 1, previous = ring.slot;
    ring.next();
    if (kShortSteps && SUMS == kAll && item.is_short()) go_on<kUpper, false, false>(top, bottom, step, steps, previous);
    go_on<SUMS, false, false>(top, bottom, step, min(a_turns, b_turns), previous);
    if (SUMS == kAll && a_turns < b_turns) {
      go_on<SUMS, true, false>(top, bottom, step, b_turns, previous);
    } else {
      go_on<SUMS, false, true>(top, bottom, step, a_turns, previous);
    }
    go_on<SUMS, true, true>(top, bottom, step, steps, previous);
    return previous;
  }

  __device__ __forceinline__ void stage() const {
    show_copy_engine();
    staging.give_staged();
  }

  // Written where it belongs, and mirrored where that is wanted. Every element has one writer.
  template <int BOX>
  __device__ __forceinline__ void write_one(const Rounded& out, Item item, const Product& product) const {
    const Box box(BOX, item, product);
    if (!box.there) return;
    const uint32_t direct = staging.boxes, mirror = staging.boxes + kBoxBytes;
    staging.wait_free();
    if (box.row == box.col) {
      put_diagonal<BOX>(out, direct, mirror);
    } else {
      put<BOX>(out, direct);
      if (!product.half_d) put_mirrored<BOX>(out, mirror);
    }
    stage();
  }
  // Two boxes side by side.
  template <int BOX>
  __device__ __forceinline__ void write_two(const Rounded& out, Item item, const Product& product) const {
    if (!Box(BOX, item, product).there) return;
    staging.wait_free();
    put<BOX>(out, staging.boxes);
    put<BOX + 1>(out, staging.boxes + kBoxBytes);
    stage();
  }

  // Has the parameters of a tile brought near, long before it is done.
  __device__ __forceinline__ void call_for(const Ground& ground, Item item) const {
    const int row = (ground.turned ? item.col : item.row) + thread, col = ground.turned ? item.row : item.col;
#pragma unroll
    for (int line = 0; line < 128; line += 32)
      if (ground.has(row, col + line))
        bring_near(ground.four_at(row, col + line));
  }
  // Takes the steps of a box of directions that is staged as its parameters are stored, which begin at `row` and `col`:
  // four numbers a thread at a time. All are asked for before the first is used.
  __device__ __forceinline__ void step_along(
      uint32_t box, const Ground& ground, int row, int col, bool if_agreed) const {
    constexpr int kTurns = 8, kDown = 8;  // a turn of all threads is eight rows
    const int down = thread >> 4, across = thread & 15;
    box += place(down, across >> 1) + 8 * (across & 1);
    row += down, col += 4 * across;
    float4 parameters[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      if (ground.has(row + kDown * turn, col)) parameters[turn] = __ldcs(ground.four_at(row + kDown * turn, col));
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!ground.has(row + kDown * turn, col)) continue;
      const uint2 pairs = get_pairs(box + 128 * kDown * turn);
      float4 direction, &parameter = parameters[turn];
      widened(pairs.x, direction.x, direction.y);
      widened(pairs.y, direction.z, direction.w);
      parameter.x = ground.stepped(parameter.x, direction.x, if_agreed);
      parameter.y = ground.stepped(parameter.y, direction.y, if_agreed);
      parameter.z = ground.stepped(parameter.z, direction.z, if_agreed);
      parameter.w = ground.stepped(parameter.w, direction.w, if_agreed);
      __stcs(ground.four_at(row + kDown * turn, col), parameter);
    }
  }
  // Two boxes side by side, which land instead of being stored. The storing warp only hands staging memory back.
  template <int BOX>
  __device__ __forceinline__ void land_two(
      const Rounded& out, Item item, const Product& product, const Ground& ground) const {
    const Box first(BOX, item, product);
    if (!first.there) return;
    staging.wait_free();
    if (ground.turned) {
      put_mirrored<BOX>(out, staging.boxes);
      put_mirrored<BOX + 1>(out, staging.boxes + kBoxBytes);
    } else {
      put<BOX>(out, staging.boxes);
      put<BOX + 1>(out, staging.boxes + kBoxBytes);
    }
    sync();
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const int col = first.col + 64 * side;
      const int row_there = ground.turned ? col : first.row, col_there = ground.turned ? first.row : col;
      step_along(staging.boxes + side * kBoxBytes, ground, row_there, col_there, product.lands == kDecaysIfAgreed);
    }
    staging.give_staged();
  }
  __device__ __forceinline__ void land(const Rounded& out, Item item, const Product& product, const Ground& ground) const {
    land_two<0>(out, item, product, ground);
    land_two<2>(out, item, product, ground);
  }

  __device__ __forceinline__ void write(const Rounded& out, Item item, const Product& product) const {
    if (side_by_side(item, product)) {
      write_two<0>(out, item, product);
      write_two<2>(out, item, product);
    } else {
      write_one<0>(out, item, product);
      write_one<1>(out, item, product);
      write_one<2>(out, item, product);
      write_one<3>(out, item, product);
    }
  }

  // C and E are in the slots behind those of a tile.
  __device__ __forceinline__ void wait_added(int count) const {
    Ring added = ring;
    for (int i = 0; i < count; ++i, added.next()) added.wait_full();
  }
  __device__ __forceinline__ void release_read(int slot) const {
    show_copy_engine();  // it has been read, and may be overwritten
    sync();
    release(slot);
  }

  template <int RESULTS, int ADDED>
  __device__ __forceinline__ void round_tile(
      float (&top)[64], float (&bottom)[64], Rounded (&out)[RESULTS], Item item, const Product& product) const {
    Terms terms[RESULTS];
#pragma unroll
    for (int k = 0; k < RESULTS; ++k) terms[k] = product.terms[k];
    Ring behind = ring;
    behind.next();
    const uint32_t slots[2] = {ring.here(), behind.here()};
    round<0, RESULTS, ADDED>(top, out, terms, slots, item.row, item.col);
    round<1, RESULTS, ADDED>(top, out, terms, slots, item.row, item.col);  // above the diagonal this is nothing, and goes nowhere
    if constexpr (ADDED > 1) release_read(ring.slot);
    round<2, RESULTS, ADDED>(bottom, out, terms, slots, item.row, item.col);  // of half a tile, this and the next go nowhere
    round<3, RESULTS, ADDED>(bottom, out, terms, slots, item.row, item.col);
    if constexpr (ADDED > 0) release_read(ADDED > 1 ? behind.slot : ring.slot);
  }
  __device__ __forceinline__ void round_tile_in_halves(
      float (&top)[64], float (&bottom)[64], Rounded (&out)[2], const Product& product) const {
    const Terms terms[2] = {product.terms[0], product.terms[1]};
    round_in_halves<0>(top, out, terms);
    round_in_halves<1>(top, out, terms);
    round_in_halves<2>(bottom, out, terms);
    round_in_halves<3>(bottom, out, terms);
  }
};

__device__ __forceinline__ void multiply_items(Group& group, Mail mail, const Program& program, const Landing& landing) {
  for (int number = group.number;; number += 2) {
    const Item item = mail.read(number);
    const bool lands = !item.ends() && !item.idle() && program.products[item.product()].lands;
    if (lands) group.call_for(Ground(landing, item.matrix), item);
    if (number > 0 && !item.past_end()) group.take_turn();
    if (item.ends()) break;
    const Product& product = program.products[item.product()];
    group.ring.go_to(item.position);
    if (item.idle()) {
      group.pass(product.slots());
      group.give_turn();
      continue;
    }
    const bool diagonal = product.mirrored && item.row == item.col && !item.is_short();
    float top[64], bottom[64];
    const int unreleased = diagonal ? group.accumulate<kOnDiagonal>(top, bottom, item, product)
                                    : group.accumulate<kAll>(top, bottom, item, product);
    group.wait_added(product.added);  // before the turn goes on: the other group will come round to these slots
    group.give_turn();
    products_wait<0>();
    settle(top);
    settle(bottom);
    group.release(unreleased);
    const Group rounding = group.anew();
    if (product.lands) {
      Rounded out[1];
      rounding.round_tile<1, 0>(top, bottom, out, item, product);
      rounding.anew().land(out[0], item, product, Ground(landing, item.matrix));
    } else if (product.twice) {
      Rounded out[2];
      if (product.twice == kTwoHalves) {
        rounding.round_tile_in_halves(top, bottom, out, product);
      } else {
        rounding.round_tile<2, 2>(top, bottom, out, item, product);
      }
      rounding.anew().write(out[0], item, product);
      rounding.anew().write(out[1], item, product);
    } else {
      Rounded out[1];
      if (product.added == 0) {
        rounding.round_tile<1, 0>(top, bottom, out, item, product);
      } else if (product.added == 1) {
        rounding.round_tile<1, 1>(top, bottom, out, item, product);
      } else {
        rounding.round_tile<1, 2>(top, bottom, out, item, product);
      }
      rounding.anew().write(out[0], item, product);
    }
  }
  group.staging.wait_free();  // all is read
}

// items: for each pair of tiles, (matrix, row and column in boxes of 64, flags and product, 0) of either block. written:
// for each matrix, how many of its tiles are, and then how many pairs are taken, from zero on; null where no product
// waits for another. landing: what the last product lands on, if it does.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    run_program(
        const __grid_constant__ Program program, const int4* items, int pairs, int* written, int matrices,
        const __grid_constant__ Landing landing) {
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
    barriers_ready();
    begin_to_count(progress);
    const Product& product = program.products[0];
    fetch(program.maps[product.a]), fetch(program.maps[product.b]), fetch(program.maps[product.d]);
  }
  if (!landing.entries) let_next_kernel_begin();  // others may read parameters before they wait, as if these never changed
  __syncthreads();
  cluster_sync();
  const int role = uniform(threadIdx.x >> 7);
  if (role == 0) {
    registers_give<40>();
    const int warp = uniform(threadIdx.x >> 5);
    // Tables and maps were there before. What else is read or written comes after, also by the groups: an item has to be
    // sent to them first.
    if (warp < 2) wait_for_kernel_before();
    if (warp == 0) {
      load_items(ring, mail, program, written != nullptr, progress);
    } else if (warp == 1) {
      scout(mail, {items, pairs, written ? written + matrices : nullptr}, program, written, progress);
    } else {
      store_items({staging + (warp - 2) * 2 * kBoxBytes, warp - 2}, mail, program, written);
    }
  } else {
    registers_take<232>();
    Group group;
    group.ring = ring;
    group.number = role - 1;
    group.thread = threadIdx.x & 127;
    group.barrier = 1 + group.number;
    group.staging = {staging + group.number * 2 * kBoxBytes, group.number};
    multiply_items(group, mail, program, landing);
  }
  cluster_sync();  // no block may leave while the other one can still signal to it
}
