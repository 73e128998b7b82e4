// What kernels for Hopper (sm_90a) share: rings of slots that the copy engine fills, and the way of a tile's sums from
// registers to boxes in shared memory.
//
// It is compiled behind instructions.cuh.

constexpr uint32_t kBoxBytes = 64 * 64 * 2;  // 64 rows of 64 numbers, each row 128 bytes, swizzled

struct Terms {
  float alpha, beta, delta, gamma;
};

// The tensor cores' view of an operand: rows of 128 bytes, swizzled, groups of eight rows 1024 bytes apart. Of a B that is
// turned, 64 columns are in one box, and the next 64 in the box behind it.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)(kBoxBytes >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

// ---- a ring of slots in shared memory

template <int SLOTS, uint32_t BYTES> struct RingOf {
  uint32_t slots, full, empty;  // addresses in shared memory
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ uint32_t here() const { return slots + slot * BYTES; }
  __device__ __forceinline__ uint32_t full_here() const { return full + 8 * slot; }
  __device__ __forceinline__ uint32_t empty_here() const { return empty + 8 * slot; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full_here(), phase); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty_here(), phase ^ 1); }
  __device__ __forceinline__ void next() {
    if (++slot == SLOTS) { slot = 0; phase ^= 1; }
  }
  __device__ __forceinline__ void go_to(int position) {
    slot = uniform(position % SLOTS);
    phase = uniform((position / SLOTS) & 1);
  }
};

// ---- where numbers are in a box, and how sums get there

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

// The sums of a tile, rounded: 16 pairs for each of up to four boxes.
typedef uint32_t Rounded[64];

// 128 threads that have the sums of boxes in their registers.
struct Threads {
  int thread, barrier;  // which of them this is; where they meet
  __device__ __forceinline__ void sync() const { threads_sync(barrier, 128); }

  // A box of 64x64 sums: scaled, added to, and rounded once, for each result.
  template <int BOX, int RESULTS, int ADDED>
  __device__ __forceinline__ void round(
      float (&t)[64], Rounded (&out)[RESULTS], const Terms (&terms)[RESULTS], const uint32_t (&slots)[2],
      int row, int col) const {
    constexpr int kHalf = BOX / 2, kSide = BOX % 2;
    const bool diagonal = row + 64 * kHalf == col + 64 * kSide;
    const uint32_t c_box = ADDED > 1 ? slots[kHalf] + kSide * kBoxBytes : slots[0] + BOX * kBoxBytes;
    const uint32_t e_box = c_box + 2 * kBoxBytes;
    const int lane = thread & 31, warp = thread >> 5;
    const bool low_one = (lane >> 2) == 2 * (lane & 3), high_one = (lane >> 2) == 2 * (lane & 3) + 1;
    uint32_t c[16], e[16];  // asked for all at once: each one may have to wait for the tensor cores
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if constexpr (ADDED > 0) get_blocks(c_box + direct_place(j), c + 2 * j);
      if constexpr (ADDED > 1) get_blocks(e_box + direct_place(j), e + 2 * j);
    }
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
      const int sum = 32 * kSide + 2 * pair;
      const bool one = (pair % 4 == 0 || pair % 4 == 3) && diagonal && pair / 4 == warp;  // the diagonal is here
#pragma unroll
      for (int k = 0; k < RESULTS; ++k) {
        float low = __fmaf_rn(terms[k].alpha, t[sum], one && low_one ? terms[k].gamma : 0.0f);
        float high = __fmaf_rn(terms[k].alpha, t[sum + 1], one && high_one ? terms[k].gamma : 0.0f);
        if constexpr (ADDED > 0) add(terms[k].beta, c[pair], low, high);
        if constexpr (ADDED > 1) add(terms[k].delta, e[pair], low, high);
        out[k][16 * BOX + pair] = rounded(low, high);
      }
    }
  }
  // The same for a result in two halves: itself, and what rounding takes from it, times the second alpha.
  template <int BOX>
  __device__ __forceinline__ void round_in_halves(float (&t)[64], Rounded (&out)[2], const Terms (&terms)[2]) const {
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
      const int sum = 32 * (BOX % 2) + 2 * pair;
      const float low = __fmul_rn(terms[0].alpha, t[sum]), high = __fmul_rn(terms[0].alpha, t[sum + 1]);
      const uint32_t both = rounded(low, high);
      float of_low, of_high;
      widened(both, of_low, of_high);
      out[0][16 * BOX + pair] = both;
      out[1][16 * BOX + pair] = rounded(
          __fmul_rn(terms[1].alpha, __fsub_rn(low, of_low)), __fmul_rn(terms[1].alpha, __fsub_rn(high, of_high)));
    }
  }
  __device__ __forceinline__ static void add(float factor, uint32_t pair, float& low, float& high) {
    float of_low, of_high;
    widened(pair, of_low, of_high);
    low = __fmaf_rn(factor, of_low, low);
    high = __fmaf_rn(factor, of_high, high);
  }

  // Eighths of a box: 8x8 blocks of rows (this warp's two) and of columns (two at a time).
  template <int BOX> __device__ __forceinline__ void put(const Rounded& out, uint32_t to) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) put_blocks(to + direct_place(j), out + 16 * BOX + 2 * j);
  }
  template <int BOX> __device__ __forceinline__ void put_mirrored(const Rounded& out, uint32_t to) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) put_blocks_transposed(to + mirror_place(j), out + 16 * BOX + 2 * j);
  }
  // On the diagonal, blocks below it go to both places of one box; everything else where it does no harm.
  template <int BOX>
  __device__ __forceinline__ void put_diagonal(const Rounded& out, uint32_t box, uint32_t aside) const {
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
};
