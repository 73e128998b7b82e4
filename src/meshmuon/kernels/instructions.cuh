// Instructions of Hopper (sm_90a) that C++ has no words for, each by a name of its own.
//
// Nothing else is said in PTX. So a machine without a GPU can play the kernels: it has other meanings for these names
// (tests/emulator/instructions.h).

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
struct alignas(64) TensorMap { char opaque[128]; };

__device__ __forceinline__ bool leads() { return (threadIdx.x & 31) == 0; }
// The same for a whole warp that comes here together, in words that tell the compiler that it is one thread: what needs
// numbers that a warp shares, as the copy engine does, is no loop over threads then.
__device__ __forceinline__ bool elected() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n" : "=r"(chosen));
  return chosen;
}
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
template <int COUNT> __device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// Has the compiler work out anew what follows from a value, though that is the same as before.
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
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
// What this thread has written to shared memory, or read from it, comes before what the copy engine reads or writes there.
__device__ __forceinline__ void show_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void bring_near(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line) : "memory");
}

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
// A count in shared memory, that one thread moves on.
__device__ __forceinline__ void begin_to_count(uint32_t counter) {
  asm volatile("st.shared.s32 [%0], 0;" ::"r"(counter) : "memory");
}
__device__ __forceinline__ void count_on(uint32_t counter, int count) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(counter), "r"(count) : "memory");
}
__device__ __forceinline__ void wait_for_more(uint32_t counter, int than) {
  int count;
  do {
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(count) : "r"(counter) : "memory");
  } while (count <= than);
}

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
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
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
  NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// 64 x COLUMNS sums, 16 numbers of k; `keep` adds to what is there. Rows of an operand run along k, or (turned) across it.
#define PRODUCTS(columns, sums, a, b, keep, a_turned, b_turned) \
  "{\n" \
  ".reg .pred p;\n" \
  "setp.ne.b32 p, " keep ", 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." ELEMENT "." ELEMENT " {" sums "}, " a ", " b ", p, 1, 1, " \
      a_turned ", " b_turned ";\n" \
  "}\n"
template <int COLUMNS, bool A_TURNED, bool B_TURNED>
__device__ __forceinline__ void multiply(float (&t)[64], uint64_t a, uint64_t b, bool keep) {
  static_assert(COLUMNS == 64 || COLUMNS == 128);
  constexpr int kA = A_TURNED ? 1 : 0, kB = B_TURNED ? 1 : 0;
  if constexpr (COLUMNS == 64) {
    asm volatile(PRODUCTS("64", NAMES_32, "%32", "%33", "%34", "%35", "%36")
                 : SUMS_16(0), SUMS_16(16) : "l"(a), "l"(b), "r"((int)keep), "n"(kA), "n"(kB));
  } else {
    asm volatile(PRODUCTS("128", NAMES_64, "%64", "%65", "%66", "%67", "%68")
                 : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48) : "l"(a), "l"(b), "r"((int)keep), "n"(kA), "n"(kB));
  }
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
// Four numbers side by side.
__device__ __forceinline__ uint2 get_pairs(uint32_t address) {
  uint2 pairs;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pairs.x), "=r"(pairs.y) : "r"(address) : "memory");
  return pairs;
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
