// One matrix product as one persistent kernel for Hopper (sm_90a), whose tiles wait for arriving rows
// and announce finished rows. It is compiled at run time and needs no header.
//
// C[p] = A[p] @ B for up to MAX_PRODUCTS products that share B; 16-bit or float8 in, 16-bit out, sums
// in float32. float8 is scaled: a factor for each row of A and each column of B, or one for all.
// A block has a warp that loads (TMA), two warps that store (TMA) and two groups of four warps that
// multiply (wgmma), each of them half of the rows of a tile. In a cluster of two, blocks share a
// tile: one below the other (CM = 2, B is multicast) or side by side (CN = 2, A is multicast).
//
// A work list, made by worklist.py, says which cluster computes what in which order, in rounds of
// one item per cluster; a round of empty items closes it. The loading warp waits until the gates of
// an item are open. Tiles may be cut along k: parts lie in float32 in `parts` until the owner of the
// tile adds them, always in the same order. All counters rest at zero, so that a graph can replay.
//
// Before this text come the function mma and the constants BM, BN (rows and columns of a tile of
// one block), STAGES (of the ring of loads), CM, CN, SIZE (bytes of an element of A and B), B_ROWS
// (1: B is [k, n], 0: B is [n, k], each with contiguous rows), PACK and WIDEN (the instructions that
// round two float32, and read an element of C as float32), and PRECISE (1: what the instructions
// for float8 add up in less than float32 is added up in float32 after each step).

typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

// The same numbers as in worklist.py and kernel.py.
constexpr int MAX_PRODUCTS = 8, MAX_GATES = 128;
constexpr int LINE = 128, BK = LINE / SIZE;  // bytes and elements of a row in a step along k
constexpr bool SCALED = SIZE == 1;

constexpr int CLUSTER = CM * CN;
constexpr int GROUP_ROWS = BM / 2, STRIPES = GROUP_ROWS / 64;  // of 64 rows, one wgmma each
constexpr u32 BOX = 64 * LINE;                                 // bytes of 64 rows of a step
// Of 64 columns. The last one is half used if B comes in boxes, and begins earlier if C goes in them.
constexpr int BOXES = (BN + 63) / 64;
constexpr u32 A_BYTES = BM * LINE, B_BYTES = B_ROWS ? BOXES * BOX : BN * LINE;
constexpr u32 STAGE = A_BYTES + B_BYTES;
static_assert(CLUSTER <= 2 && BM % 128 == 0 && BN % 32 == 0 && BN >= 64, "");
static_assert(CM == 1 || BN / CM % 64 == 0, "each block of a cluster loads whole boxes of B");
static_assert(!(SCALED && B_ROWS) && !(PRECISE && STRIPES > 1), "");

struct alignas(64) Map {
  u64 words[16];
};

// Tensor maps of A and C per product, and of B.
struct Maps {
  Map a[MAX_PRODUCTS], c[MAX_PRODUCTS], b;
};

// The other arguments.
struct Lists {
  const int4* items;
  const u64* gates;     // addresses of words: 1 is open
  const u64* words;     // addresses of words that announcements set to 1
  const u32* targets;   // additions to a counter that complete an announcement
  u32* counters;        // per announcement
  u32* ready;           // per cut tile, block of the cluster and group: parts that are written
  float4* parts;        // per slot, block of the cluster and group: a part of a tile
  u32* late;            // becomes 1 + a gate that did not open, 1 + MAX_GATES for parts
  u64 limit_ns;         // after which the kernel no longer waits
  u32 clusters, gate_count;
};

// The factors of float8: where those of the products' rows and of B's columns begin, how far apart
// they are (0: one for all), how many there are; and a row that is added, of C's dtype, or null.
struct Scales {
  const float* a[MAX_PRODUCTS];
  const float* b;
  const unsigned short* bias;
  int rows[MAX_PRODUCTS];
  int n, a_stride, b_stride;
};

// A tile, or a part of it along k: columns [k0, k0 + kn) in units of BK. Ranges are inclusive.
struct Item {
  int product, row, column, k0;
  int kn;      // 0: the list has ended
  int tile;    // the index of a tile that is cut along k; -1: it is whole
  int slot;    // where its part lies; of an owner: the first of the others' parts
  int others;  // parts that the owner adds to its own; 0: this is such a part
  int gate_first, gate_last, announce_first, announce_last;  // none: 0, -1
};

INLINE Item item_at(const int4* items, u32 index) {
  const int4 a = __ldg(items + 3 * index), b = __ldg(items + 3 * index + 1),
             c = __ldg(items + 3 * index + 2);
  return Item{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
}

INLINE constexpr int box_column_at(int box) { return min(box * 64, BN - 64); }

INLINE bool is_part(const Item& item) { return item.tile >= 0 && !item.others; }

// Shared memory is addressed by 32 bits.

INLINE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

INLINE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

INLINE void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

INLINE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the same barrier of a block of the cluster. The scope stays the default one: .release.cluster
// is a fence in each k step, which cost a quarter of the speed.
INLINE void barrier_arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

INLINE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// A box of a matrix at column x and row y; to both blocks of a cluster if BOTH. Zeros outside.
template <bool BOTH>
INLINE void load(u32 to, const Map* map, u32 barrier, int x, int y) {
  if constexpr (BOTH) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "h"((unsigned short)3)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
  }
}

// A box of 64 x 64 elements of C. What is outside of the matrix is not stored.
INLINE void store(const Map* map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(from), "r"(x), "r"(y)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

INLINE void prefetch(const Map* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

INLINE u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

INLINE u32 load_system(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

INLINE u32 load_device(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

INLINE u32 add_relaxed(u32* at) {
  u32 before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}

INLINE void store_system(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

INLINE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

INLINE u32 rank_in_cluster() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

INLINE u32 pack(float low, float high) {
  u32 both;
  asm(PACK " %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

INLINE float widen(const unsigned short* at) {
  float value;
  asm(WIDEN " %0, %1;" : "=f"(value) : "h"(__ldg(at)));
  return value;
}

// Multiplies a thread's sums of a product, which begin at a row and a column, by their factors, and
// adds the bias (PTX, "Register fragments for wgmma.mma_async.m64nNk32"). What is outside of the
// matrix is not stored, so that any factor will do. Those of rows arrive with the rows: the loading
// warp has acquired them, and its barriers hand that on; L1 may hold what was there before.
INLINE void scale(float (&sums)[STRIPES][BN / 2], const Scales& scales, int product, int row,
                  int column) {
#pragma unroll
  for (int s = 0; s < STRIPES; ++s) {
    float of_row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = min(row + s * 64 + h * 8, scales.rows[product] - 1);
      of_row[h] = __ldcg(scales.a[product] + at * scales.a_stride);
    }
#pragma unroll
    for (int j = 0; j < BN / 8; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const int at = min(column + j * 8 + w, scales.n - 1);
        const float of_column = __ldg(scales.b + at * scales.b_stride);
        const float bias = scales.bias ? widen(scales.bias + at) : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& sum = sums[s][4 * j + 2 * h + w];
          sum = sum * of_row[h] * of_column + bias;
        }
      }
  }
}

// Waits, once per gate, until the gates of items are open.
struct Gates {
  u64 low = 0, high = 0;  // gates that were seen open
  u64 deadline;
  bool waits = true;

  // The lanes of a warp look at all gates at once: one after the other costs most of a microsecond
  // each even if they are open.
  INLINE void look(const Lists& lists, u32 lane) {
    if (!lists.gate_count) return;
#pragma unroll
    for (u32 first = 0; first < MAX_GATES; first += 32) {
      const u32 gate = first + lane;
      const bool open =
          gate < lists.gate_count && load_system((const u32*)__ldg(lists.gates + gate)) == 1;
      const u64 lanes = __ballot_sync(~0u, open);
      (first < 64 ? low : high) |= lanes << (first & 63);
    }
    // Hands on what the other lanes acquired; then as in pass.
    __syncwarp();
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  INLINE void pass(const Lists& lists, int first, int last) {
    bool waited = false;
    for (int gate = first; waits && gate <= last; ++gate) {
      const u64 bit = 1ull << (gate & 63);
      if ((gate < 64 ? low : high) & bit) continue;
      const u32* word = (const u32*)__ldg(lists.gates + gate);
      while (load_system(word) != 1) {
        if (now_ns() > deadline) {
          store_system(lists.late, 1 + gate);
          waits = false;
          return;
        }
        __nanosleep(20);
      }
      (gate < 64 ? low : high) |= bit;
      waited = true;
    }
    // TMA reads by another proxy than the load of the word.
    if (waited) asm volatile("fence.proxy.async.global;" ::: "memory");
  }
};

// One more store warp has stored its rows of a tile. The end of a bulk store is a fence between its
// proxy and the generic one. The first fence and the additions release what was stored; whoever adds
// last acquires that from all others, and releases it to the system, by the second fence. Loads and
// additions of different announcements are in flight together: the last tile's delay the end.
INLINE void announce(const Lists& lists, int first, int last) {
  constexpr int AT_ONCE = 2;
  for (int i = first; i <= last; i += AT_ONCE) {
    u32 before[AT_ONCE], target[AT_ONCE];
    u64 word[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      target[j] = __ldg(lists.targets + min(i + j, last));
      word[j] = __ldg(lists.words + min(i + j, last));
    }
    if (i == first) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (i + j <= last) before[j] = add_relaxed(lists.counters + i + j);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (i + j <= last && before[j] + 1 == target[j]) {
        lists.counters[i + j] = 0;
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(word[j]) : "memory");
      }
  }
}

// Waits until so many of the enqueued steps are left; they write registers until here.
template <int LEFT>
INLINE void wait_steps(float (&of)[STRIPES][BN / 2]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
  for (int s = 0; s < STRIPES; ++s)
#pragma unroll
    for (int j = 0; j < BN / 2; ++j) asm volatile("" : "+f"(of[s][j])::"memory");
}

INLINE void add(float (&sums)[STRIPES][BN / 2], const float (&step)[STRIPES][BN / 2]) {
#pragma unroll
  for (int s = 0; s < STRIPES; ++s)
#pragma unroll
    for (int j = 0; j < BN / 2; ++j) sums[s][j] += step[s][j];
}

// Adds the others' parts, or writes this one. Threads of a group hold the same elements each time.
INLINE void put_part(float (&sums)[STRIPES][BN / 2], float4* part) {
#pragma unroll
  for (int s = 0; s < STRIPES; ++s)
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
      const float* x = &sums[s][4 * j];
      __stcg(part + (s * BN / 8 + j) * 128, make_float4(x[0], x[1], x[2], x[3]));
    }
}

INLINE void add_part(float (&sums)[STRIPES][BN / 2], const float4* part) {
#pragma unroll
  for (int s = 0; s < STRIPES; ++s)
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
      const float4 x = __ldcg(part + (s * BN / 8 + j) * 128);
      sums[s][4 * j] += x.x;
      sums[s][4 * j + 1] += x.y;
      sums[s][4 * j + 2] += x.z;
      sums[s][4 * j + 3] += x.w;
    }
}

// 160 registers and not 168, which would fill the processor: a small kernel that is resident, such
// as one that copies for a peer, must fit beside a block, or blocks wait for its processor.
#if CM * CN > 1
extern "C" __global__ void __cluster_dims__(CM* CN, 1, 1) __maxnreg__(160)
#else
extern "C" __global__ void __maxnreg__(160)
#endif
    ficco_tiled(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists,
                const __grid_constant__ Scales scales) {
  // Shared memory: per group two boxes of C that are being stored, the ring, barriers.
  extern __shared__ char memory[];
  const u32 boxes = (shared_address(memory) + 1023) & ~1023u, ring = boxes + 4 * BOX;
  const u32 full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
  const u32 box_full = empty + 8 * STAGES, box_empty = box_full + 32;
  const u32 rank = CLUSTER > 1 ? rank_in_cluster() : 0, mine = blockIdx.x / CLUSTER;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row_in_tile = CM > 1 ? rank * BM : 0, column_in_tile = CN > 1 ? rank * BN : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2 * CLUSTER);
    }
    for (int b = 0; b < 4; ++b) {
      barrier_init(box_full + 8 * b, 128);
      barrier_init(box_empty + 8 * b, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  Gates gates;
  if (warp == 0) gates.look(lists, lane);
  if constexpr (CLUSTER > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {  // loads
      gates.deadline = now_ns() + lists.limit_ns;
      prefetch(&maps.b);
      u32 stage = 0, phase = 1;
      for (u32 i = mine;; i += lists.clusters) {
        const Item item = item_at(lists.items, i);
        if (!item.kn) break;
        const Map* map = &maps.a[item.product];
        prefetch(map);
        gates.pass(lists, item.gate_first, item.gate_last);
        for (int k = item.k0; k < item.k0 + item.kn; ++k) {
          const u32 a = ring + stage * STAGE, b = a + A_BYTES, done = full + 8 * stage;
          barrier_wait(empty + 8 * stage, phase);
          barrier_expect(done, STAGE);
          if constexpr (CN > 1) {
            const int row = item.row + rank * (BM / 2);
            load<true>(a + rank * (A_BYTES / 2), map, done, k * BK, row);
          } else {
            load<false>(a, map, done, k * BK, item.row + row_in_tile);
          }
          // With CM = 2 each block loads its half for both, with CN = 2 its own columns.
          const int column = item.column + rank * (BN / CM);
          const u32 to = b + (CM > 1 ? rank * (B_BYTES / 2) : 0);
          if constexpr (B_ROWS) {
#pragma unroll
            for (int j = 0; j < BOXES / CM; ++j)
              load<(CM > 1)>(to + j * BOX, &maps.b, done, column + j * 64, k * BK);
          } else {
            load<(CM > 1)>(to, &maps.b, done, k * BK, column);
          }
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    } else if ((warp == 1 || warp == 2) && lane == 0) {  // stores the boxes of a group
      const int group = warp - 1;
      u32 count = 0;
      for (u32 i = mine;; i += lists.clusters) {
        const Item item = item_at(lists.items, i);
        if (!item.kn) break;
        if (is_part(item)) continue;
        const Map* map = &maps.c[item.product];
        const int row = item.row + row_in_tile + group * GROUP_ROWS;
        const int column = item.column + column_in_tile;
        for (int s = 0; s < STRIPES; ++s)
          for (int j = 0; j < BOXES; ++j, ++count) {
            const u32 box = group * 2 + (count & 1);
            barrier_wait(box_full + 8 * box, count >> 1 & 1);
            store(map, boxes + box * BOX, column + box_column_at(j), row + s * 64);
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            barrier_arrive(box_empty + 8 * box);
          }
        announce(lists, item.announce_first, item.announce_last);
      }
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  } else {  // multiplies
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const int group = warp / 4 - 1, thread = threadIdx.x & 127, warp_in_group = thread >> 5;
    // Matrix descriptors (PTX, "Matrix descriptor format"): address, leading and stride byte
    // offset, all without their last 4 bits, and swizzles of 128 bytes. [n, k] in memory: 1024
    // bytes from 8 rows to the next; an instruction takes 32 bytes of k. [k, n] in memory, in boxes of
    // 64 n x 64 k: one box from 64 n to the next, 1024 bytes from 8 k to the next; 16 k are 2048 bytes.
    constexpr u64 SWIZZLED = 1ull << 62 | (u64)(1024 >> 4) << 32;
    constexpr u64 B_LEADING = (u64)(B_ROWS ? BOX >> 4 : 1) << 16;
    constexpr u32 B_STEP = (B_ROWS ? 2048 : 32) >> 4;
    // The upper bits of an address in a cluster are the block's; they are no part of a descriptor.
    const u32 ring_at = ring & 0x3ffff;
    const u64 a_first = SWIZZLED | 1ull << 16 | (ring_at + group * GROUP_ROWS * LINE) >> 4;
    const u64 b_first = SWIZZLED | B_LEADING | (ring_at + A_BYTES) >> 4;
    // Where stmatrix puts this thread's rows of 16 bytes.
    const u32 box_row = warp_in_group * 16 + (lane & 15), box_column = lane >> 4;
    const u32 box_at = boxes + group * 2 * BOX + box_row * 128;
    float sums[STRIPES][BN / 2];
    u32 stage = 0, phase = 0, count = 0;
    const auto release = [&](u32 done) {
      if (lane || warp_in_group >= CLUSTER) return;
      if constexpr (CLUSTER > 1) {
        barrier_arrive_at(empty + 8 * done, warp_in_group);
      } else {
        barrier_arrive(empty + 8 * done);
      }
    };
    // Enqueues a step, or adds it; returns its stage.
    const auto multiply = [&](float (&into)[STRIPES][BN / 2], bool adds) {
      barrier_wait(full + 8 * stage, phase);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u64 offset = stage * (STAGE >> 4);
#pragma unroll
      for (int kk = 0; kk < LINE / 32; ++kk)
#pragma unroll
        for (int s = 0; s < STRIPES; ++s)
          mma(into[s], a_first + offset + kk * 2 + s * (BOX >> 4), b_first + offset + kk * B_STEP,
              adds || kk);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      const u32 used = stage;
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
      return used;
    };
    u32 i = mine;
    Item next = item_at(lists.items, i);
    while (next.kn) {
      const Item item = next;
      next = item_at(lists.items, i += lists.clusters);
      if constexpr (PRECISE) {  // a step is added while the next one is multiplied
        float one[STRIPES][BN / 2], two[STRIPES][BN / 2];
#pragma unroll
        for (int j = 0; j < BN / 2; ++j) sums[0][j] = 0.0f;
        u32 before = multiply(one, false);
        for (int k = 1;; k += 2) {
          if (k == item.kn) {
            wait_steps<0>(one);
            release(before);
            add(sums, one);
            break;
          }
          const u32 now = multiply(two, false);
          wait_steps<1>(one);
          release(before);
          add(sums, one);
          if (k + 1 == item.kn) {
            wait_steps<0>(two);
            release(now);
            add(sums, two);
            break;
          }
          before = multiply(one, false);
          wait_steps<1>(two);
          release(now);
          add(sums, two);
        }
      } else {
        u32 before = multiply(sums, false);
        for (int k = 1; k < item.kn; ++k) {
          const u32 now = multiply(sums, true);
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          release(before);
          before = now;
        }
        wait_steps<0>(sums);
        release(before);
      }

      if (item.tile >= 0) {
        constexpr int PART = GROUP_ROWS * BN / 4;
        float4* part = lists.parts + (u64)((item.slot * CLUSTER + rank) * 2 + group) * PART + thread;
        u32* ready = lists.ready + (item.tile * CLUSTER + rank) * 2 + group;
        if (!item.others) {
          put_part(sums, part);
          asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
          if (thread == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ready) : "memory");
          continue;
        }
        if (thread == 0) {
          // Other clusters wait for gates up to the limit, then write their parts.
          const u64 began = now_ns();
          while (load_device(ready) != item.others) {
            if (now_ns() - began <= 2 * lists.limit_ns) continue;
            store_system(lists.late, 1 + MAX_GATES);
            break;
          }
          *ready = 0;
        }
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        for (int p = 0; p < item.others; ++p, part += (u64)CLUSTER * 2 * PART) add_part(sums, part);
      }
      if constexpr (SCALED) {
        const int row = row_in_tile + group * GROUP_ROWS + warp_in_group * 16 + (lane >> 2);
        scale(sums, scales, item.product, item.row + row,
              item.column + column_in_tile + (lane & 3) * 2);
      }
#pragma unroll
      for (int s = 0; s < STRIPES; ++s)
#pragma unroll
        for (int j = 0; j < BOXES; ++j, ++count) {
          const u32 box = group * 2 + (count & 1), to = box_at + (count & 1) * BOX;
          barrier_wait(box_empty + 8 * box, (count >> 1 & 1) ^ 1);
#pragma unroll
          for (int q = 0; q < 8; q += 2) {
            const float* x = &sums[s][box_column_at(j) / 2 + q * 4];
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + (((q + box_column) ^ (box_row & 7)) << 4)),
                         "r"(pack(x[0], x[1])), "r"(pack(x[2], x[3])), "r"(pack(x[4], x[5])),
                         "r"(pack(x[6], x[7]))
                         : "memory");
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          barrier_arrive(box_full + 8 * box);
        }
    }
  }
  // A block must not end while the other one multicasts to it or arrives at its barriers.
  if constexpr (CLUSTER > 1) cluster_sync();
}
