// The kernels of ficco: one source for HIP and CUDA. ficco/hip_kernels/launch.py launches them.

#include "device.h"

// launch.py has the same numbers.
constexpr u32 COPY_THREADS = 512;
constexpr u32 REDUCE_THREADS = 256;
constexpr u32 MERGE_THREADS = 256, COMBINE_THREADS = 256, GATE_THREADS = 256, ROUTE_THREADS = 256;
constexpr u32 ONE_SHOT_THREADS = 512;
constexpr u32 ASIDE_THREAD = 32;  // on CUDA the first thread of the second warp
constexpr u32 SIGNAL_THREADS = 64;
constexpr u32 CAST_THREADS = 256;
constexpr u32 MAX_PARTS = 16;
constexpr u32 MAX_ENDS = 16;
constexpr u32 MAX_RUNS = 64;
constexpr u32 MAX_SIGNALS = 48;

// Units of 16 bytes that a thread has in flight: it loads all of them, then stores them. A shifted
// copy needs two loads for each store, so it has half as many.
constexpr u32 IN_FLIGHT = 8;
constexpr u32 SHIFTED_IN_FLIGHT = 4;
constexpr u32 ONE_SHOT_IN_FLIGHT = 4;  // for each part
constexpr u32 CAST_HELD = 8;           // kept in registers until the factor is known
constexpr u32 CAST_HELD_SHORT = 4;     // the same, for parts of at most 32 units, such as blocks

// Copies.

// Units of 16 bytes per row, and the constants of the division by that number: i / units equals
// i * magic >> shift for all i below 2^31 (Granlund and Montgomery, "Division by invariant integers
// using multiplication", PLDI 1994).
struct Row {
  u32 units, magic, shift;
};

INLINE u32 row_of(u32 i, Row row) { return (u32)((u64)i * row.magic >> row.shift); }

// Offset in bytes of unit i from the first unit of the first row.
INLINE u64 place_of(u32 i, Row row, u64 pitch) {
  const u32 at = row_of(i, row);
  return at * pitch + (u64)(i - at * row.units) * 16;
}

// Address modulo 16.
INLINE u32 behind(const u8* at) { return (u32)(u64)at & 15; }

template <typename Piece>
INLINE u32 move(u8* dst, const u8* src, u64 at) {
  *(Piece*)(dst + at) = *(const Piece*)(src + at);
  return sizeof(Piece);
}

// Copies `height` rows of `width` bytes. All rows of both buffers have one address modulo 16. A row
// is copied in three parts: the bytes up to a multiple of 16, whole units, and the remaining bytes.
INLINE void copy_aligned(u8* dst, u64 dst_pitch, const u8* src, u64 src_pitch, u64 width, Row row,
                         u32 height, u32 block, u32 blocks) {
  const u32 first = block * COPY_THREADS + thread_index();
  const u32 stride = blocks * COPY_THREADS;
  const u32 total = row.units * height;  // below 2^31
  const u32 head = (16 - behind(dst)) & 15, tail = (u32)(width - head) & 15;
  u8* const to = dst + head;
  const u8* const from = src + head;
  for (u32 i = first; i < total; i += IN_FLIGHT * stride) {
    u32x4 held[IN_FLIGHT];
#pragma unroll
    for (u32 n = 0; n < IN_FLIGHT; n++) {
      const u32 at = i + n * stride;
      if (at < total) held[n] = *(const u32x4*)(from + place_of(at, row, src_pitch));
    }
#pragma unroll
    for (u32 n = 0; n < IN_FLIGHT; n++) {
      const u32 at = i + n * stride;
      if (at < total) *(u32x4*)(to + place_of(at, row, dst_pitch)) = held[n];
    }
  }
  if (head || tail) {
    for (u32 n = first; n < height; n += stride) {
      u8* const d = dst + n * dst_pitch;
      const u8* const s = src + n * src_pitch;
      u64 at = 0;
      if (head & 1) at += move<u8>(d, s, at);
      if (head & 2) at += move<u16>(d, s, at);
      if (head & 4) at += move<u32>(d, s, at);
      if (head & 8) at += move<u64>(d, s, at);
      at += (u64)row.units * 16;
      if (tail & 8) at += move<u64>(d, s, at);
      if (tail & 4) at += move<u32>(d, s, at);
      if (tail & 2) at += move<u16>(d, s, at);
      if (tail & 1) at += move<u8>(d, s, at);
    }
  }
}

// A unit of the destination. Its bytes [first, last) belong to a row.
struct Piece {
  u8* to;
  const u8* from;  // source of byte 0, also if byte 0 does not belong to the row
  u32 first, last;
};

INLINE Piece piece_of(u32 i, Row row, u8* dst, u64 dst_pitch, const u8* src, u64 src_pitch,
                      u64 width) {
  const u32 at = row_of(i, row);
  const u64 begin = (u64)(i - at * row.units) * 16;
  u8* const d = dst + at * dst_pitch;
  const u32 lead = behind(d);
  const u64 bytes = lead + width > begin ? lead + width - begin : 0;
  return {d - lead + begin, src + at * src_pitch - lead + begin, begin ? 0 : lead,
          bytes < 16 ? (u32)bytes : 16};
}

// Bytes [first, first + 16) of the 32 bytes `low`, `high`. `first` is below 16.
INLINE u32x4 from_byte(u32 first, u32x4 low, u32x4 high) {
  u32 held[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (u32 n = 0; n < 6; n++) held[n] = first & 8 ? held[n + 2] : held[n];
#pragma unroll
  for (u32 n = 0; n < 5; n++) held[n] = first & 4 ? held[n + 1] : held[n];
  const u32 bits = 8 * (first & 3);
#pragma unroll
  for (u32 n = 0; n < 4; n++) held[n] = (u32)(((u64)held[n + 1] << 32 | held[n]) >> bits);
  return {held[0], held[1], held[2], held[3]};
}

// Copies `height` rows of `width` bytes at any alignment. A unit is only read if it contains bytes
// of a row, so no access leaves the allocation.
INLINE void copy_shifted(u8* dst, u64 dst_pitch, const u8* src, u64 src_pitch, u64 width, Row row,
                         u32 height, u32 block, u32 blocks) {
  const u32 stride = blocks * COPY_THREADS;
  const u32 total = row.units * height;  // below 2^31
  for (u32 i = block * COPY_THREADS + thread_index(); i < total; i += SHIFTED_IN_FLIGHT * stride) {
    u32x4 low[SHIFTED_IN_FLIGHT], high[SHIFTED_IN_FLIGHT];
#pragma unroll
    for (u32 n = 0; n < SHIFTED_IN_FLIGHT; n++) {
      low[n] = high[n] = {0, 0, 0, 0};
      if (i + n * stride >= total) continue;
      const Piece p = piece_of(i + n * stride, row, dst, dst_pitch, src, src_pitch, width);
      const u32 shift = behind(p.from);
      const u32x4* const from = (const u32x4*)(p.from - shift);
      if (p.first < p.last && p.first < 16 - shift) low[n] = from[0];
      if (p.first < p.last && p.last > 16 - shift) high[n] = from[1];
    }
#pragma unroll
    for (u32 n = 0; n < SHIFTED_IN_FLIGHT; n++) {
      if (i + n * stride >= total) continue;
      const Piece p = piece_of(i + n * stride, row, dst, dst_pitch, src, src_pitch, width);
      const u32x4 loaded = from_byte(behind(p.from), low[n], high[n]);
      if (p.last - p.first == 16) {
        *(u32x4*)p.to = loaded;
        continue;
      }
      const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (u32 byte = 0; byte < 16; byte++)
        if (p.first <= byte && byte < p.last) p.to[byte] = (u8)(words[byte / 4] >> 8 * (byte % 4));
    }
  }
}

// Destinations and sources of copies of one shape.
struct Ends {
  u8* dst[MAX_ENDS];
  const u8* src[MAX_ENDS];
};

// Blocks [i * blocks, (i + 1) * blocks) carry out copy i. With `release`, a stream write that
// follows the kernel can tell a peer that the rows have arrived.
#define COPY(name, copy)                                                                         \
  KERNEL(COPY_THREADS)                                                                           \
  name(CONSTANT Ends ends, u64 dst_pitch, u64 src_pitch, u64 width, u32 units, u32 magic,        \
       u32 shift, u32 height, u32 blocks, u32 release) {                                         \
    const u32 which = block_index() / blocks, block = block_index() % blocks;                    \
    copy(ends.dst[which], dst_pitch, ends.src[which], src_pitch, width, {units, magic, shift},   \
         height, block, blocks);                                                                 \
    if (release) release_block();                                                                \
  }

COPY(ficco_copy_aligned, copy_aligned)
COPY(ficco_copy_shifted, copy_shifted)

// Runs of 16-byte units: destinations, sources, and the number of units up to the end of each run.
struct Runs {
  u8* dst[MAX_RUNS];
  const u8* src[MAX_RUNS];
  u32 end[MAX_RUNS];
};

KERNEL(COPY_THREADS)
ficco_copy_runs(CONSTANT Runs runs, u32 count, u32 blocks) {
  const u32 total = runs.end[count - 1], stride = blocks * COPY_THREADS;
  u32 run = 0, begin = 0;
  for (u32 i = block_index() * COPY_THREADS + thread_index(); i < total; i += stride) {
    while (i >= runs.end[run]) begin = runs.end[run++];
    move<u32x4>(runs.dst[run], runs.src[run], (u64)(i - begin) * 16);
  }
}

// Signals between ranks before or after the work of a launch: waits for words and writes of words.
// One thread carries them out in order.
struct Script {
  u32* at[MAX_SIGNALS];
  u64 value[MAX_SIGNALS];
  u64 waits, wide, behind;  // bit i: signal i waits; has 64 bits; releases earlier stores
  u32 count;                // number of signals
  u32 aside;                // block 0 writes the first `aside` signals from another warp
  u32 alone;                // only block 0 carries out the first `alone` signals
};

INLINE void write(const Script& script, u32 i) {
  if (script.wide & 1ull << i)
    store_system((u64*)script.at[i], script.value[i]);
  else
    store_system(script.at[i], (u32)script.value[i]);
}

INLINE void carry_out(const Script& script, u32 first, u32 last) {
#pragma unroll 1
  for (u32 i = first; i < last; i++) {
    if (script.waits >> i & 1) {
      wait_system(script.at[i], (u32)script.value[i]);
      continue;
    }
    if (script.behind >> i & 1) release_system();
    write(script, i);
  }
}

// Carries out the signals before the work of a launch. No block continues before its signals are
// done. A second warp writes the signals `aside`: a fence of the first warp would wait for these
// writes, which may cross PCIe.
INLINE void carry_out_front(const Script& front) {
  const bool first = block_index() == 0;
  if (first && thread_index() == ASIDE_THREAD)
    for (u32 i = 0; i < front.aside; i++) write(front, i);
  if (thread_index() == 0) carry_out(front, first ? front.aside : front.alone, front.count);
  barrier();
}

// One thread of each of `blocks` blocks calls this. Returns true for the last caller. `arrived` is 0
// before and after.
INLINE bool last_of(u32 blocks, u32* arrived) {
  if (add_device(arrived) != blocks - 1) return false;
  store_system(arrived, 0);
  return true;
}

// The last block carries out `rear`, and sees the stores that the other blocks have released.
INLINE void carry_out_rear(const Script& rear, u32 blocks, u32* arrived) {
  if (!last_of(blocks, arrived)) return;
  acquire_device();
  carry_out(rear, 0, rear.count);
}

// COPY between two scripts. The last block to finish carries out `rear`.
#define EXCHANGE(name, copy)                                                                     \
  KERNEL(COPY_THREADS)                                                                           \
  name(CONSTANT Ends ends, u64 dst_pitch, u64 src_pitch, u64 width, u32 units, u32 magic,        \
       u32 shift, u32 height, u32 blocks, u32 all_blocks, u32* arrived, CONSTANT Script front,   \
       CONSTANT Script rear) {                                                                   \
    const u32 which = block_index() / blocks, block = block_index() % blocks;                    \
    carry_out_front(front);                                                                      \
    copy(ends.dst[which], dst_pitch, ends.src[which], src_pitch, width, {units, magic, shift},   \
         height, block, blocks);                                                                 \
    barrier();                                                                                   \
    if (thread_index() != COPY_THREADS - 1) return;                                              \
    release_system();                                                                            \
    carry_out_rear(rear, all_blocks, arrived);                                                   \
  }

EXCHANGE(ficco_exchange_aligned, copy_aligned)
EXCHANGE(ficco_exchange_shifted, copy_shifted)

// Reduction.

INLINE float to_float(float value) { return value; }
INLINE void from_float(float value, float& to) { to = value; }
INLINE float to_float(bf16 value) { return float_of((u32)value.bits << 16); }

// Rounds to nearest, ties to even. NaN becomes 0x7fc0, as in PyTorch.
INLINE void from_float(float value, bf16& to) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = value != value ? 0x7fc0 : (u16)rounded;
}

struct Parts {
  const void* at[MAX_PARTS];
};

// COUNT elements of a part, as 16-byte units and as elements. COUNT elements of the result are one
// unit.
template <typename In, u32 COUNT>
struct Units {
  static constexpr u32 UNITS = COUNT * sizeof(In) / 16;
  union {
    u32x4 units[UNITS];
    In elements[COUNT];
  };
};

// Adds units `at` of parts [first, first + SOME) to the sums. All loads come before the additions.
template <u32 SOME, typename In, u32 EACH, u32 PLACES>
INLINE void add(float (&sum)[PLACES][EACH], const Parts& parts, u32 first,
                const u64 (&at)[PLACES]) {
  typedef Units<In, EACH> Held;
  Held held[SOME][PLACES];
#pragma unroll
  for (u32 n = 0; n < SOME; n++) {
#pragma unroll
    for (u32 p = 0; p < PLACES; p++) {
      const u32x4* const from = (const u32x4*)parts.at[first + n] + at[p] * Held::UNITS;
#pragma unroll
      for (u32 u = 0; u < Held::UNITS; u++) held[n][p].units[u] = from[u];
    }
  }
#pragma unroll
  for (u32 n = 0; n < SOME; n++) {
#pragma unroll
    for (u32 p = 0; p < PLACES; p++) {
#pragma unroll
      for (u32 e = 0; e < EACH; e++) sum[p][e] += to_float(held[n][p].elements[e]);
    }
  }
}

// Index in memory of element i of rows of `width` elements that begin `pitch` elements apart.
INLINE u64 in_rows(u64 i, u64 width, u64 pitch) {
  return width == pitch ? i : i / width * pitch + i % width;
}

// Adds `count` parts in order, in float32, multiplies the sum by `factor`, and rounds once. Rows
// have `width` elements and begin `pitch` elements apart in all parts, `out_pitch` apart in the
// result. The first `vectors` units of 16 bytes of the result are stored as units, `PLACES` at a
// time, the rest element by element. The units are also stored to `copies` buffers with the
// result's layout.
template <u32 THREADS, u32 PLACES, typename In, typename Out>
INLINE void reduce(Out* out, const Parts& parts, u32 count, u64 vectors, u64 elements, u64 width,
                   u64 pitch, u64 out_pitch, u32 blocks, void* const* copy = nullptr,
                   u32 copies = 0, float factor = 1.0f) {
  constexpr u32 EACH = 16 / sizeof(Out);
  const u64 first = (u64)block_index() * THREADS + thread_index();
  const u64 stride = (u64)blocks * THREADS;
  for (u64 n = first; n < vectors; n += PLACES * stride) {
    u64 at[PLACES];
    float sum[PLACES][EACH];
#pragma unroll
    for (u32 v = 0; v < PLACES; v++) {
      const u64 i = n + v * stride;  // past the end, unit n is read again
      at[v] = in_rows(i < vectors ? i : n, width / EACH, pitch / EACH);
#pragma unroll
      for (u32 e = 0; e < EACH; e++) sum[v][e] = -0.0f;  // neutral element: 0 + -0 is 0
    }
    u32 p = 0;
    if (PLACES == 1)  // otherwise enough loads are in flight
      for (; p + 4 <= count; p += 4) add<4, In, EACH>(sum, parts, p, at);
    for (; p + 2 <= count; p += 2) add<2, In, EACH>(sum, parts, p, at);
    if (p < count) add<1, In, EACH>(sum, parts, p, at);
#pragma unroll
    for (u32 v = 0; v < PLACES; v++) {
      const u64 i = n + v * stride;
      if (i >= vectors) continue;
      Units<Out, EACH> result;
#pragma unroll
      for (u32 e = 0; e < EACH; e++) from_float(sum[v][e] * factor, result.elements[e]);
      const u64 to = in_rows(i, width / EACH, out_pitch / EACH);
#pragma unroll 1
      for (u32 c = 0; c < copies; c++) ((u32x4*)copy[c])[to] = result.units[0];
      ((u32x4*)out)[to] = result.units[0];
    }
  }
  for (u64 n = vectors * EACH + first; n < elements; n += stride) {
    const u64 i = in_rows(n, width, pitch);
    float sum = -0.0f;
    for (u32 p = 0; p < count; p++) sum += to_float(((const In*)parts.at[p])[i]);
    from_float(sum * factor, out[in_rows(n, width, out_pitch)]);
  }
}

#define REDUCE(name, In, Out)                                                                    \
  KERNEL(REDUCE_THREADS)                                                                         \
  name(Out* out, CONSTANT Parts parts, u32 count, u32 blocks, u64 vectors, u64 elements,         \
       u64 width, u64 pitch, u64 out_pitch, float factor) {                                      \
    reduce<REDUCE_THREADS, 1, In, Out>(out, parts, count, vectors, elements, width, pitch,       \
                                       out_pitch, blocks, nullptr, 0, factor);                   \
  }

REDUCE(ficco_reduce_bfloat16_bfloat16, bf16, bf16)
REDUCE(ficco_reduce_float16_float16, f16, f16)
REDUCE(ficco_reduce_float32_float32, float, float)
REDUCE(ficco_reduce_float32_bfloat16, float, bf16)
REDUCE(ficco_reduce_float32_float16, float, f16)

// Attention: merges partial results for the same queries.

// Strides of a tensor in elements.
struct Strides {
  u64 batch, head, row;
};

// Partial results. Part p has rows [first[p], stop[p]) of the result.
struct Means {
  const void* at[MAX_PARTS];
  const float* lse[MAX_PARTS];
  Strides strides[MAX_PARTS], lse_strides[MAX_PARTS];
  u32 first[MAX_PARTS], stop[MAX_PARTS];
};

INLINE u64 along(const Strides& strides, u32 batch, u32 head, u32 row) {
  return batch * strides.batch + head * strides.head + row * strides.row;
}

// Parts that are read at once. Four spill scalar registers on AMD.
#if defined(__HIP__)
constexpr u32 MERGED_AT_ONCE = 2;
#else
constexpr u32 MERGED_AT_ONCE = 4;
#endif

// A thread computes one unit of 16 bytes of the result; each head of a row has `units` of them. The
// thread of the first unit also writes the log-sum-exp of all parts, if `total_lse` is not null.
// Weights are relative to the largest log-sum-exp so far, so each part is read once (online
// softmax).
template <typename T>
INLINE void merge(T* out, const Strides& out_strides, float* total_lse, const Strides& lse_strides,
                  const Means& parts, u32 count, u32 units, u32 heads, u32 rows, u32 total,
                  u32 blocks) {
  constexpr u32 EACH = 16 / sizeof(T);
  constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
  for (u32 n = block_index() * MERGE_THREADS + thread_index(); n < total;
       n += blocks * MERGE_THREADS) {
    const u32 unit = n % units, head = n / units % heads, rest = n / units / heads;
    const u32 row = rest % rows, batch = rest / rows;
    float most = 0.0f, all = 0.0f, sum[EACH] = {};
    bool begun = false;
    for (u32 p = 0; p < count; p += MERGED_AT_ONCE) {
      bool has[MERGED_AT_ONCE];
      float lse[MERGED_AT_ONCE];
      Units<T, EACH> held[MERGED_AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < MERGED_AT_ONCE; i++) {
        has[i] = p + i < count && row >= parts.first[p + i] && row < parts.stop[p + i];
        if (!has[i]) continue;
        const u32 there = row - parts.first[p + i];
        lse[i] = parts.lse[p + i][along(parts.lse_strides[p + i], batch, head, there)];
        const T* const from = (const T*)parts.at[p + i];
        const u64 begin = along(parts.strides[p + i], batch, head, there);
        held[i].units[0] = *(const u32x4*)(from + begin + unit * EACH);
      }
      const float before = most;
      const bool adds = begun;
#pragma unroll
      for (u32 i = 0; i < MERGED_AT_ONCE; i++) {
        if (has[i] && !(begun && lse[i] <= most)) most = lse[i];
        begun = begun || has[i];
      }
      const float scale = adds ? exp2_of((before - most) * LOG2_E) : 0.0f;
      all *= scale;
#pragma unroll
      for (u32 e = 0; e < EACH; e++) sum[e] *= scale;
#pragma unroll
      for (u32 i = 0; i < MERGED_AT_ONCE; i++) {
        if (!has[i]) continue;
        const float weight = exp2_of((lse[i] - most) * LOG2_E);
        all += weight;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) sum[e] += weight * to_float(held[i].elements[e]);
      }
    }
    Units<T, EACH> result;
#pragma unroll
    for (u32 e = 0; e < EACH; e++) from_float(sum[e] / all, result.elements[e]);
    *(u32x4*)(out + along(out_strides, batch, head, row) + unit * EACH) = result.units[0];
    if (total_lse && unit == 0)
      total_lse[along(lse_strides, batch, head, row)] = most + log2_of(all) * LN_2;
  }
}

#define MERGE(name, T)                                                                           \
  KERNEL(MERGE_THREADS)                                                                          \
  name(T* out, CONSTANT Strides out_strides, float* lse, CONSTANT Strides lse_strides,           \
       CONSTANT Means parts, u32 count, u32 units, u32 heads, u32 rows, u32 total, u32 blocks) { \
    merge<T>(out, out_strides, lse, lse_strides, parts, count, units, heads, rows, total,        \
             blocks);                                                                            \
  }

MERGE(ficco_merge_bfloat16, bf16)
MERGE(ficco_merge_float16, f16)

// Experts: routing of tokens, and sums of the rows that experts return for a token.

// Block e counts the pairs (token, choice) that chose expert e, and gives each pair its place among
// them and its row. Pairs are ordered by choice, then by token; each thread has a range of them.
// With a capacity, expert e has rows from e * capacity, and a pair without room gets the row after
// all rows. Without a capacity, the rows of an expert follow those of the experts before it, and
// `held` has the token of each row. `by_token` and `by_choice` are the strides of `chosen`. The low
// half of a sum counts pairs of expert e, the high half pairs of lower experts.
KERNEL(ROUTE_THREADS)
ficco_route(u64* places, u64* rows, u64* held, u64* counts, const u64* chosen, u64 by_token,
            u64 by_choice, u64 tokens, u64 pairs, u64 capacity, u32 blocks) {
  SHARED u64 sums[2][ROUTE_THREADS];
  const u32 me = thread_index();
  const u64 expert = block_index(), each = (pairs + ROUTE_THREADS - 1) / ROUTE_THREADS;
  const u64 first = me * each, last = first + each < pairs ? first + each : pairs;
  u64 token = first % tokens, choice = first / tokens;
  u64 counted = 0;
  u32 from = 0;
  for (u64 pair = first; pair < last; pair++) {
    const u64 its = chosen[token * by_token + choice * by_choice];
    counted += (u64)(its < expert) << 32 | (its == expert);
    if (++token == tokens) token = 0, choice++;
  }
  sums[0][me] = counted;
  barrier();
  for (u32 step = 1; step < ROUTE_THREADS; step *= 2) {
    sums[1 - from][me] = sums[from][me] + (me >= step ? sums[from][me - step] : 0);
    from = 1 - from;
    barrier();
  }
  u64 place = (u32)(sums[from][me] - counted);
  const u64 all = sums[from][ROUTE_THREADS - 1], before = all >> 32;
  if (me == ROUTE_THREADS - 1) counts[expert] = (u32)all;
  token = first % tokens, choice = first / tokens;
  for (u64 pair = first; pair < last; pair++) {
    if (chosen[token * by_token + choice * by_choice] == expert) {
      places[pair] = place;
      if (capacity) {
        rows[pair] = place < capacity ? expert * capacity + place : blocks * capacity;
      } else {
        rows[pair] = before + place;
        held[before + place] = token;
      }
      place++;
    }
    if (++token == tokens) token = 0, choice++;
  }
}

// Applies SiLU or ReLU to the first half of each row, multiplies by the second half, and rounds
// once. A row of the result has `units` units of 16 bytes. Strides of batches and rows are in
// elements.
template <typename T, bool SILU>
INLINE void gate(T* out, u64 out_batch, u64 out_row, const T* in, u64 in_batch, u64 in_row,
                 u32 rows, u32 units, u64 total, u32 blocks) {
  constexpr u32 EACH = 16 / sizeof(T);
  constexpr float LOG2_E = 1.4426950408889634f;
  const u64 first = (u64)block_index() * GATE_THREADS + thread_index();
  for (u64 n = first; n < total; n += (u64)blocks * GATE_THREADS) {
    const u32 unit = n % units;
    const u64 rest = n / units, row = rest % rows, batch = rest / rows;
    const T* const from = in + batch * in_batch + row * in_row + unit * EACH;
    Units<T, EACH> gates, values;
    gates.units[0] = *(const u32x4*)from;
    values.units[0] = *(const u32x4*)(from + units * EACH);
    Units<T, EACH> result;
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      const float x = to_float(gates.elements[e]);
      // fmaxf would turn NaN into zero.
      const float gated = SILU ? x / (1.0f + exp2_of(-x * LOG2_E)) : (x < 0.0f ? 0.0f : x);
      from_float(gated * to_float(values.elements[e]), result.elements[e]);
    }
    *(u32x4*)(out + batch * out_batch + row * out_row + unit * EACH) = result.units[0];
  }
}

#define GATED(name, T, SILU)                                                                     \
  KERNEL(GATE_THREADS)                                                                           \
  name(T* out, u64 out_batch, u64 out_row, const T* in, u64 in_batch, u64 in_row, u32 rows,      \
       u32 units, u64 total, u32 blocks) {                                                       \
    gate<T, SILU>(out, out_batch, out_row, in, in_batch, in_row, rows, units, total, blocks);    \
  }

GATED(ficco_silu_gated_bfloat16, bf16, true)
GATED(ficco_silu_gated_float16, f16, true)
GATED(ficco_relu_gated_bfloat16, bf16, false)
GATED(ficco_relu_gated_float16, f16, false)

// Sums the `choices` rows of each token in order, in float32, times its weights unless `weights` is
// null. Rows have `units` units of 16 bytes. `by_token` and `by_choice` are the strides of
// `picked`.
template <typename T>
INLINE void combine(T* out, const T* rows, const u64* picked, u64 by_token, u64 by_choice,
                    const float* weights, u32 choices, u32 units, u64 total, u32 blocks) {
  constexpr u32 EACH = 16 / sizeof(T);
  const u64 first = (u64)block_index() * COMBINE_THREADS + thread_index();
  for (u64 n = first; n < total; n += (u64)blocks * COMBINE_THREADS) {
    const u32 unit = n % units;
    const u64 token = n / units;
    float sum[EACH];
#pragma unroll
    for (u32 e = 0; e < EACH; e++) sum[e] = -0.0f;
#pragma unroll 2
    for (u32 c = 0; c < choices; c++) {
      const u64 row = picked[token * by_token + c * by_choice];
      const float weight = weights ? weights[token * choices + c] : 1.0f;
      Units<T, EACH> held;
      held.units[0] = *(const u32x4*)(rows + (row * units + unit) * EACH);
#pragma unroll
      for (u32 e = 0; e < EACH; e++) sum[e] += weight * to_float(held.elements[e]);
    }
    Units<T, EACH> result;
#pragma unroll
    for (u32 e = 0; e < EACH; e++) from_float(sum[e], result.elements[e]);
    *(u32x4*)(out + n * EACH) = result.units[0];
  }
}

#define COMBINE(name, T)                                                                         \
  KERNEL(COMBINE_THREADS)                                                                        \
  name(T* out, const T* rows, const u64* picked, u64 by_token, u64 by_choice,                    \
       const float* weights, u32 choices, u32 units, u64 total, u32 blocks) {                    \
    combine<T>(out, rows, picked, by_token, by_choice, weights, choices, units, total, blocks);  \
  }

COMBINE(ficco_combine_bfloat16, bf16)
COMBINE(ficco_combine_float16, f16)

// A reduction of parts in peers' memory, on few blocks, between two scripts. A peer only has to know
// that its part has been read, and the loads of a block are complete at its barrier. So no fence is
// needed before `rear` (2 H200: three took 1.1 us of 19).
#define ONE_SHOT(name, T)                                                                        \
  KERNEL(ONE_SHOT_THREADS)                                                                       \
  name(T* out, CONSTANT Parts parts, u32 count, u32 blocks, u64 vectors, u64 elements,           \
       u64 width, u64 pitch, u64 out_pitch, u32* arrived, CONSTANT Script front,                 \
       CONSTANT Script rear) {                                                                   \
    carry_out_front(front);                                                                      \
    reduce<ONE_SHOT_THREADS, ONE_SHOT_IN_FLIGHT, T, T>(out, parts, count, vectors, elements,     \
                                                       width, pitch, out_pitch, blocks);         \
    barrier();                                                                                   \
    if (thread_index() != ONE_SHOT_THREADS - 1) return;                                          \
    if (last_of(blocks, arrived)) carry_out(rear, 0, rear.count);                                \
  }

ONE_SHOT(ficco_one_shot_bfloat16, bf16)
ONE_SHOT(ficco_one_shot_float16, f16)
ONE_SHOT(ficco_one_shot_float32, float)

// The second exchange of a two-shot: each rank sends its sums to its peers.
struct Shares {
  void* sent[MAX_PARTS];        // destination of this rank's sums at each peer
  u32* posts[MAX_PARTS];        // at each peer, the words of this rank's blocks
  const void* come[MAX_PARTS];  // on this rank, where the sums of each peer arrive
  void* kept[MAX_PARTS];        // their destination in the result
  u64 units[MAX_PARTS];         // their size in units of 16 bytes
  u32* waits[MAX_PARTS];        // on this rank, the words of each peer's blocks
  u32 sends, keeps;             // number of peers to send to, and to receive from
};

// A one-shot of this rank's rows, then an exchange of the sums. Block b waits only for block b of
// each peer: blocks have the same stride on all ranks, so block b of the peer wrote the units that
// block b copies here. Another warp than the one with the fence polls, since the fence takes
// longer.
#define TWO_SHOT(name, T)                                                                        \
  KERNEL(ONE_SHOT_THREADS)                                                                       \
  name(T* out, CONSTANT Parts parts, u32 count, u32 blocks, u64 vectors, u64 elements,           \
       u64 width, u64 pitch, u64 out_pitch, u32* arrived, CONSTANT Script front,                 \
       CONSTANT Script rear, CONSTANT Shares shares) {                                           \
    carry_out_front(front);                                                                      \
    if (vectors <= blocks * ONE_SHOT_THREADS) /* no thread has a second unit to read */          \
      reduce<ONE_SHOT_THREADS, 1, T, T>(out, parts, count, vectors, elements, width, pitch,      \
                                        out_pitch, blocks, shares.sent, shares.sends);           \
    else                                                                                         \
      reduce<ONE_SHOT_THREADS, ONE_SHOT_IN_FLIGHT, T, T>(out, parts, count, vectors, elements,   \
                                                         width, pitch, out_pitch, blocks,        \
                                                         shares.sent, shares.sends);             \
    exchange_sums(shares, blocks);                                                               \
    barrier();                                                                                   \
    if (thread_index() != ONE_SHOT_THREADS - 1) return;                                          \
    release_device();                                                                            \
    carry_out_rear(rear, blocks, arrived);                                                       \
  }

INLINE void exchange_sums(const Shares& shares, u32 blocks) {
  const u32 thread = thread_index(), block = block_index();
  barrier();
  if (thread < shares.sends) {
    release_system();
    store_system(shares.posts[thread] + block, 1u);
  }
  // No word is cleared before all words have arrived, so that the watchdog can name a late peer.
  const u32 peer = thread - ASIDE_THREAD;  // on CUDA in another warp than the posts
  if (peer < shares.keeps) wait_system(shares.waits[peer] + block, 1);
  barrier();
  if (peer < shares.keeps) store_system(shares.waits[peer] + block, 0u);
  const u64 first = (u64)block * ONE_SHOT_THREADS + thread, stride = (u64)blocks * ONE_SHOT_THREADS;
  for (u32 p = 0; p < shares.keeps; p++) {
    for (u64 n = first; n < shares.units[p]; n += ONE_SHOT_IN_FLIGHT * stride) {
      u32x4 held[ONE_SHOT_IN_FLIGHT];
#pragma unroll
      for (u32 v = 0; v < ONE_SHOT_IN_FLIGHT; v++)
        if (n + v * stride < shares.units[p])
          held[v] = ((const u32x4*)shares.come[p])[n + v * stride];
#pragma unroll
      for (u32 v = 0; v < ONE_SHOT_IN_FLIGHT; v++)
        if (n + v * stride < shares.units[p]) ((u32x4*)shares.kept[p])[n + v * stride] = held[v];
    }
  }
}

TWO_SHOT(ficco_two_shot_bfloat16, bf16)
TWO_SHOT(ficco_two_shot_float16, f16)
TWO_SHOT(ficco_two_shot_float32, float)

// Casts to e4m3. A part of a row shares a factor: the smallest power of two that avoids overflow.
// The threads of a part are a team, whose size is a power of two.

// The largest value of the team. All threads of the block must call this.
INLINE u32 largest_of(u32 value, u32 team) {
  for (u32 bit = 1; bit < team && bit < WARP; bit *= 2) {
    const u32 other = exchanged(value, bit);
    value = other > value ? other : value;
  }
  if (team <= WARP) return value;
  SHARED u32 of_warps[CAST_THREADS / WARP];
  barrier();  // other threads may still read the values of the part before
  if (thread_index() % WARP == 0) of_warps[thread_index() / WARP] = value;
  barrier();
  const u32 first = thread_index() / team * (team / WARP);
  for (u32 n = 0; n < team / WARP; n++) {
    const u32 other = of_warps[first + n];
    value = other > value ? other : value;
  }
  return value;
}

// Bits that order values by magnitude, NaN above all, and the inverse.
INLINE u32 size_of(float value) { return bits_of(value) & 0x7fffffff; }
INLINE u32 size_of(bf16 value) { return value.bits & 0x7fff; }
INLINE u32 size_of(f16 value) { return value.bits & 0x7fff; }
INLINE void of_size(u32 size, float& to) { to = float_of(size); }
INLINE void of_size(u32 size, bf16& to) { to.bits = (u16)size; }
INLINE void of_size(u32 size, f16& to) { to.bits = (u16)size; }

// Rounds to nearest, ties to even, as PyTorch does. No value exceeds the largest e4m3.
INLINE u32 rounded_e4m3(float value, u32 fnuz) {
  const u32 bias = 7 + fnuz, sign = bits_of(value) >> 24 & 0x80;
  u32 size = size_of(value);
  if (size >= 0x7f800000) return fnuz ? 0x80 : sign | 0x7f;
  if (size < (128 - bias) << 23) {  // subnormal: a multiple of the smallest number
    const u32 unit = (148 - bias) << 23;
    size = bits_of(float_of(size) + float_of(unit)) - unit;
  } else {
    size -= (127 - bias) << 23;
    size = (size + 0x7ffff + (size >> 20 & 1)) >> 20;
  }
  return size || !fnuz ? sign | size : 0;  // fnuz has no negative zero
}

INLINE u32 e4m3(const float (&values)[4], u32 fnuz) {
  if (fnuz ? HAS_FNUZ : HAS_E4M3) return to_e4m3(values);
  u32 bytes = 0;
#pragma unroll
  for (u32 n = 0; n < 4; n++) bytes |= rounded_e4m3(values[n], fnuz) << 8 * n;
  return bytes;
}

// The biased exponent, as in a float, of the smallest factor that keeps `largest` from overflow.
INLINE u32 exponent_of(float largest, u32 fnuz) {
  const u32 most = bits_of(fnuz ? 240.0f : 448.0f), bits = bits_of(largest);
  const u32 up = (bits & 0x7fffff) > (most & 0x7fffff), exponent = (bits >> 23) + up + 127;
  return exponent > (most >> 23) + 1 ? exponent - (most >> 23) : 1;
}

template <typename In>
INLINE Units<In, 16 / sizeof(In)> unit_at(const In* from, u32 aligned) {
  Units<In, 16 / sizeof(In)> unit;
  if (aligned) {
    unit.units[0] = *(const u32x4*)from;
  } else {
#pragma unroll
    for (u32 e = 0; e < 16 / sizeof(In); e++) unit.elements[e] = from[e];
  }
  return unit;
}

template <typename In>
INLINE void store_cast(u8* to, const Units<In, 16 / sizeof(In)>& unit, float inverse, u32 fnuz) {
  constexpr u32 WORDS = 4 / sizeof(In);
  u32 words[WORDS];
#pragma unroll
  for (u32 w = 0; w < WORDS; w++) {
    float values[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) values[n] = to_float(unit.elements[4 * w + n]) * inverse;
    words[w] = e4m3(values, fnuz);
  }
  if (WORDS == 2)
    *(u64*)to = (u64)words[WORDS - 1] << 32 | words[0];
  else
    *(u32*)to = words[0];
}

// Casts rows of `cols` elements. Pitches: `in_pitch` elements, `out_pitch` bytes of the result,
// `factor_pitch` factors. A part has `length` elements, the last part of a row perhaps fewer, and
// always whole units. There are fewer than 2^31 parts.
template <typename In, u32 HELD>
INLINE void cast(u8* out, u64 out_pitch, float* factors, u64 factor_pitch, const In* in,
                 u64 in_pitch, u32 rows, u32 cols, u32 length, u32 team, u32 fnuz, u32 aligned,
                 u32 blocks) {
  constexpr u32 EACH = 16 / sizeof(In);
  typedef Units<In, EACH> Unit;
  const u32 teams = CAST_THREADS / team, member = thread_index() % team;
  const u32 per_row = (cols + length - 1) / length, parts = rows * per_row;
  for (u32 first = block_index() * teams; first < parts; first += blocks * teams) {
    const u32 part = first + thread_index() / team;
    const u32 row = part / per_row, which = part % per_row;
    const u32 begin = which * length;
    u32 units = (cols - begin < length ? cols - begin : length) / EACH;
    if (part >= parts) units = 0;
    const In* const from = in + row * in_pitch + begin;
    Unit held[HELD];
    u32 size = 0;
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
      if (member + n * team < units) held[n] = unit_at(from + (member + n * team) * EACH, aligned);
#pragma unroll
    for (u32 n = 0; n < HELD; n++) {
      if (member + n * team >= units) continue;
#pragma unroll
      for (u32 e = 0; e < EACH; e++) {
        const u32 other = size_of(held[n].elements[e]);
        size = other > size ? other : size;
      }
    }
    for (u32 n = member + HELD * team; n < units; n += team) {  // read twice
      const Unit unit = unit_at(from + n * EACH, aligned);
#pragma unroll
      for (u32 e = 0; e < EACH; e++) {
        const u32 other = size_of(unit.elements[e]);
        size = other > size ? other : size;
      }
    }
    In most;
    of_size(largest_of(size, team), most);
    const float largest = to_float(most);
    const bool finite = size_of(largest) < 0x7f800000;
    const u32 exponent = exponent_of(largest, fnuz);
    // A part with NaN or infinity becomes NaN.
    const float factor = finite ? float_of(exponent << 23) : largest;
    const float inverse = finite ? float_of((254 - exponent) << 23) : float_of(0x7fc00000);
    u8* const to = out + row * out_pitch + begin;
#pragma unroll
    for (u32 n = 0; n < HELD; n++) {
      if (member + n * team >= units) continue;
      store_cast(to + (member + n * team) * EACH, held[n], inverse, fnuz);
    }
    for (u32 n = member + HELD * team; n < units; n += team)
      store_cast(to + n * EACH, unit_at(from + n * EACH, aligned), inverse, fnuz);
    if (member == 0 && part < parts) factors[row * factor_pitch + which] = factor;
  }
}

#define CAST(name, In, HELD)                                                                     \
  KERNEL(CAST_THREADS)                                                                           \
  name(u8* out, u64 out_pitch, float* factors, u64 factor_pitch, const In* in, u64 in_pitch,     \
       u32 rows, u32 cols, u32 length, u32 team, u32 fnuz, u32 aligned, u32 blocks) {            \
    cast<In, HELD>(out, out_pitch, factors, factor_pitch, in, in_pitch, rows, cols, length,      \
                   team, fnuz, aligned, blocks);                                                 \
  }

CAST(ficco_cast_bfloat16, bf16, CAST_HELD)
CAST(ficco_cast_float16, f16, CAST_HELD)
CAST(ficco_cast_float32, float, CAST_HELD)
CAST(ficco_cast_short_bfloat16, bf16, CAST_HELD_SHORT)
CAST(ficco_cast_short_float16, f16, CAST_HELD_SHORT)
CAST(ficco_cast_short_float32, float, CAST_HELD_SHORT)

// Signals. One block, one thread per word.

struct Words {
  u32* at[SIGNAL_THREADS];
  u32 value[SIGNAL_THREADS];
};

// Writes words after all earlier work of the stream.
KERNEL(SIGNAL_THREADS) ficco_post(CONSTANT Words words, u32 count) {
  const u32 i = thread_index();
  release_system();
  if (i < count) store_system(words.at[i], words.value[i]);
}

// Waits until each word has its value. After `limit` ticks a thread gives up and writes `first`
// plus the index of its word to `late`.
KERNEL(SIGNAL_THREADS) ficco_wait(CONSTANT Words words, u32 count, u32 first, u64 limit,
                                  u32* late) {
  const u32 i = thread_index();
  if (i < count) {
    const u64 begin = ticks();
    while (load_system(words.at[i]) != words.value[i]) {
      if (ticks() - begin > limit) {
        store_system(late, first + i);
        break;
      }
      pause();
    }
  }
  acquire_system();
}

KERNEL(SIGNAL_THREADS) ficco_script(CONSTANT Script script) { carry_out_front(script); }
