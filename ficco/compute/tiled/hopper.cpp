// A matrix product as one persistent kernel for Hopper (sm_90a). Tiles wait for arriving rows and
// announce finished rows. The kernel is compiled at run time and needs no header.
//
// C[p] = A[p] @ B for up to MAX_PRODUCTS products that share B. Operands have 16 bits or are
// float8, results have 16 bits, sums are float32. float8 operands have a factor for each row of A
// and each column of B, or one factor each. A block has one warp that loads (TMA), two warps that
// store (TMA) and two groups of four warps that multiply (wgmma), each group half of the rows of a
// tile. The two blocks of a cluster share a tile: one has the upper and one the lower rows (CM = 2,
// B is multicast), or the left and the right columns (CN = 2, A is multicast).
//
// The work list of worklist.py has the items of each cluster in order, in rounds of one item per
// cluster. A round of empty items ends it. The loading warp waits until the gates of an item are
// open. A tile may be cut along k: its parts stay in float32 in `parts` until the owner of the tile
// adds them, always in one order. All counters return to zero, so a graph can be replayed.
//
// hopper.py puts in front of this text: the function mma; BM and BN, rows and columns of the tile
// of a block; STAGES, of the ring of loads; CM and CN; SIZE, bytes of an element of A and B;
// B_ROWS, 1 if B is [k, n] and 0 if B is [n, k], both with contiguous rows; PACK, the instruction
// that rounds two float32; WIDEN, the one that converts an element of C to float32; PRECISE, 1 to
// add the sums of each step in float32, since the float8 instructions accumulate with less
// precision.

typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

// worklist.py has the same numbers.
constexpr int MAX_PRODUCTS = 8, MAX_GATES = 128;
constexpr int LINE = 128, BK = LINE / SIZE;  // bytes and elements of a row in a step along k
constexpr bool SCALED = SIZE == 1;

constexpr int CLUSTER = CM * CN;
constexpr int GROUP_ROWS = BM / 2, STRIPES = GROUP_ROWS / 64;  // 64 rows each, one wgmma
constexpr u32 BOX = 64 * LINE;                                 // bytes of 64 rows of a step
// Boxes of 64 columns. If BN is no multiple, half of the last box of B is unused, and the last box
// of C overlaps the one before.
constexpr int BOXES = (BN + 63) / 64;
constexpr u32 A_BYTES = BM * LINE, B_BYTES = B_ROWS ? BOXES * BOX : BN * LINE;
constexpr u32 STAGE = A_BYTES + B_BYTES;
static_assert(CLUSTER <= 2 && BM % 128 == 0 && BN % 32 == 0 && BN >= 64, "");
static_assert(CM == 1 || BN / CM % 64 == 0, "each block of a cluster loads whole boxes of B");
static_assert(!(SCALED && B_ROWS) && !(PRECISE && STRIPES > 1), "");

struct alignas(64) Map {
  u64 words[16];
};

// Tensor maps: A and C of each product, and B.
struct Maps {
  Map a[MAX_PRODUCTS], c[MAX_PRODUCTS], b;
};

// Work lists and signals.
struct Lists {
  const int4* items;
  const u64* gates;     // addresses of words; a gate is open if its word is 1
  const u64* words;     // addresses of the words that announcements set to 1
  const u32* targets;   // value of the counter that completes an announcement
  u32* counters;        // of each announcement
  u32* ready;           // per cut tile, block of the cluster and group: number of written parts
  float4* parts;        // per slot, block of the cluster and group: a part of a tile
  u32* late;            // set to 1 + a gate that did not open, or 1 + MAX_GATES for parts
  u64 limit_ns;         // time after which the kernel gives up waiting
  u32 clusters, gate_count;
};

// Factors of float8 operands: for the rows of each product and for the columns of B, with strides
// (0: one factor for all) and counts. `bias`, a row of C's dtype or null, is added.
struct Scales {
  const float* a[MAX_PRODUCTS];
  const float* b;
  const unsigned short* bias;
  int rows[MAX_PRODUCTS];
  int n, a_stride, b_stride;
};

// A tile, or a part of it: [k0, k0 + kn) along k, in units of BK. Ranges of gates and announcements
// include their ends.
struct Item {
  int product, row, column, k0;
  int kn;      // 0: end of the list
  int tile;    // index of a tile that is cut along k; -1: the tile is whole
  int slot;    // slot of this part; for the owner, the slot of the first other part
  int others;  // for the owner, number of other parts; 0: this is another part
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

// Arrives at the same barrier of a block of the cluster, with the default scope: .release.cluster
// would be a fence in each step along k, which costs a quarter of the speed.
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

// Loads a box of a matrix at column x and row y, for both blocks of a cluster if BOTH. Elements
// outside of the matrix are zeros.
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

// Stores a box of 64 x 64 elements of C, except elements outside of the matrix.
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

// Multiplies the sums of a thread by their factors and adds the bias. `row` and `column` are those
// of its first sum (PTX, "Register fragments for wgmma.mma_async.m64nNk32"). Sums outside of the
// matrix get any factor, since they are not stored. Factors of rows arrive with the rows: the
// loading warp has acquired them, and its barriers order these loads after that. L1 may have stale
// factors, so the loads bypass it.
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

// Waits until the gates of an item are open, once per gate.
struct Gates {
  u64 low = 0, high = 0;  // bits of gates that are known to be open
  u64 deadline;
  bool waits = true;

  // The lanes of a warp load all gates at once. One after the other, each open gate would cost most
  // of a microsecond.
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
    // Orders the loads of lane 0 after what the other lanes acquired. The fence is that of `pass`.
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
    // TMA reads through another proxy than the load of the word.
    if (waited) asm volatile("fence.proxy.async.global;" ::: "memory");
  }
};

// Counts the rows that this store warp has stored, and announces rows that are complete. The end of
// a bulk store orders its proxy before the generic one. The first fence and the additions release
// the stored rows. The warp with the last addition acquires the rows of all warps and releases them
// to the system, by the second fence. Loads and additions of several announcements are in flight
// together, since those of the last tile delay the end of the kernel.
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

// Waits until only LEFT of the enqueued steps run. Until then steps write their registers.
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

// put_part writes the sums of a part, add_part adds them. A thread has the same elements in all
// parts.
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

// With 168 registers a block would fill its SM. With 160 a small resident kernel, such as a copy
// for a peer, fits beside the block; otherwise blocks would wait for its SM.
#if CM * CN > 1
extern "C" __global__ void __cluster_dims__(CM* CN, 1, 1) __maxnreg__(160)
#else
extern "C" __global__ void __maxnreg__(160)
#endif
    ficco_tiled(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists,
                const __grid_constant__ Scales scales) {
  // Shared memory: two boxes of C for each group, the ring of loads, barriers.
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
    if (warp == 0 && lane == 0) {  // the loading warp
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
          // With CM = 2 a block loads half of B for both blocks, with CN = 2 its own columns.
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
    } else if ((warp == 1 || warp == 2) && lane == 0) {  // the storing warp of a group
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
  } else {  // the multiplying groups
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const int group = warp / 4 - 1, thread = threadIdx.x & 127, warp_in_group = thread >> 5;
    // Matrix descriptors (PTX, "Matrix descriptor format"): address, leading and stride byte
    // offset, each divided by 16, and a swizzle of 128 bytes. If memory is [n, k], 8 rows take 1024
    // bytes, and an instruction reads 32 bytes along k. If memory is [k, n], boxes have 64 n x 64
    // k: 64 n take one box, 8 k take 1024 bytes, and the 16 k of an instruction take 2048 bytes.
    constexpr u64 SWIZZLED = 1ull << 62 | (u64)(1024 >> 4) << 32;
    constexpr u64 B_LEADING = (u64)(B_ROWS ? BOX >> 4 : 1) << 16;
    constexpr u32 B_STEP = (B_ROWS ? 2048 : 32) >> 4;
    // The upper bits of a shared address name the block in its cluster. A descriptor has none of
    // them.
    const u32 ring_at = ring & 0x3ffff;
    const u64 a_first = SWIZZLED | 1ull << 16 | (ring_at + group * GROUP_ROWS * LINE) >> 4;
    const u64 b_first = SWIZZLED | B_LEADING | (ring_at + A_BYTES) >> 4;
    // Where stmatrix stores the rows of 16 bytes of this thread.
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
    // Enqueues a step that overwrites `into`, or adds to it. Returns the stage of its operands.
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
      if constexpr (PRECISE) {  // adds a step while the next one is multiplied
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
          // Other clusters may wait up to the limit for their gates before they write their parts.
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
  // A block must not end while the other block multicasts to it or arrives at its barriers.
  if constexpr (CLUSTER > 1) cluster_sync();
}
