// The kernels of ficco: one source for HIP and CUDA. ficco/hip_kernels/launch.py launches them.

#include "device.h"

// The same numbers as in launch.py.
constexpr u32 COPY_THREADS = 512;
constexpr u32 REDUCE_THREADS = 256;
constexpr u32 SIGNAL_THREADS = 64;
constexpr u32 MAX_PARTS = 16;
constexpr u32 MAX_ENDS = 16;

// Units that a thread has in flight: loads first, then stores.
constexpr u32 IN_FLIGHT = 8;

// Copies.

// Units per row, and what divides by that: i / units = i * magic >> shift for all i below 2^31
// (Granlund and Montgomery, Division by invariant integers using multiplication, PLDI 1994).
struct Row {
  u32 units, magic, shift;
};

// Where the i-th unit lies, from the first unit of the first row.
template <typename Unit>
INLINE u64 place_of(u32 i, Row row, u64 pitch) {
  const u32 at = (u32)((u64)i * row.magic >> row.shift);
  return at * pitch + (u64)(i - at * row.units) * sizeof(Unit);
}

template <typename Unit>
INLINE u32 move(u8* dst, const u8* src, u64 at) {
  *(Unit*)(dst + at) = *(const Unit*)(src + at);
  return sizeof(Unit);
}

// Copies `height` rows of `head` bytes, units and `tail` bytes. Units lie at multiples of their
// size in both buffers; head and tail are shorter than a unit, and only 16-byte units have a head.
// With `release` a stream's write behind the kernel tells a peer that the rows are there.
template <typename Unit>
INLINE void copy_rows(u8* dst, u64 dst_pitch, const u8* src, u64 src_pitch, u32 head, Row row_of,
                      u32 tail, u32 height, u32 block, u32 blocks, u32 release) {
  const u32 first = block * COPY_THREADS + thread_index();
  const u32 stride = blocks * COPY_THREADS;
  const u32 total = row_of.units * height;  // below 2^31
  u8* const to = dst + head;
  const u8* const from = src + head;
  for (u32 i = first; i < total; i += IN_FLIGHT * stride) {
    Unit held[IN_FLIGHT];
#pragma unroll
    for (u32 n = 0; n < IN_FLIGHT; n++) {
      const u32 at = i + n * stride;
      if (at < total) held[n] = *(const Unit*)(from + place_of<Unit>(at, row_of, src_pitch));
    }
#pragma unroll
    for (u32 n = 0; n < IN_FLIGHT; n++) {
      const u32 at = i + n * stride;
      if (at < total) *(Unit*)(to + place_of<Unit>(at, row_of, dst_pitch)) = held[n];
    }
  }
  if (head || tail) {
    for (u32 row = first; row < height; row += stride) {
      u8* const d = dst + row * dst_pitch;
      const u8* const s = src + row * src_pitch;
      u64 at = 0;
      if (head & 1) at += move<u8>(d, s, at);
      if (head & 2) at += move<u16>(d, s, at);
      if (head & 4) at += move<u32>(d, s, at);
      if (head & 8) at += move<u64>(d, s, at);
      at += (u64)row_of.units * sizeof(Unit);
      if (tail & 8) at += move<u64>(d, s, at);
      if (tail & 4) at += move<u32>(d, s, at);
      if (tail & 2) at += move<u16>(d, s, at);
      if (tail & 1) at += move<u8>(d, s, at);
    }
  }
  if (release) release_block();
}

// Where several copies of the same shape lead, and where they come from.
struct Ends {
  u8* dst[MAX_ENDS];
  const u8* src[MAX_ENDS];
};

// The first `blocks` blocks carry out the first copy, the next the second, and so on.
#define COPY(name, Unit)                                                                         \
  KERNEL(COPY_THREADS)                                                                           \
  name(CONSTANT Ends ends, u64 dst_pitch, u64 src_pitch, u32 head, u32 units, u32 magic,         \
       u32 shift, u32 tail, u32 height, u32 blocks, u32 release) {                               \
    const Row row_of = {units, magic, shift};                                                    \
    const u32 which = block_index() / blocks, block = block_index() % blocks;                    \
    copy_rows<Unit>(ends.dst[which], dst_pitch, ends.src[which], src_pitch, head, row_of, tail,  \
                    height, block, blocks, release);                                             \
  }

COPY(ficco_copy16, u32x4)
COPY(ficco_copy8, u64)
COPY(ficco_copy4, u32)
COPY(ficco_copy2, u16)
COPY(ficco_copy1, u8)

// Reduction.

INLINE float to_float(float value) { return value; }
INLINE void from_float(float value, float& to) { to = value; }
INLINE float to_float(bf16 value) { return float_of((u32)value.bits << 16); }

// To the nearest, ties to even; NaN becomes PyTorch's.
INLINE void from_float(float value, bf16& to) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = value != value ? 0x7fc0 : (u16)rounded;
}

struct Parts {
  const void* at[MAX_PARTS];
};

// 16-byte units of a part that hold as many elements as one of the result, and these as floats.
template <typename In, u32 COUNT>
struct Units {
  static constexpr u32 UNITS = COUNT * sizeof(In) / 16;
  union {
    u32x4 units[UNITS];
    In elements[COUNT];
  };
};

// Adds the i-th elements of some parts to a sum: all loads first.
template <u32 SOME, typename In, u32 EACH>
INLINE void add(float (&sum)[EACH], const Parts& parts, u32 first, u64 i) {
  typedef Units<In, EACH> Held;
  Held held[SOME];
#pragma unroll
  for (u32 n = 0; n < SOME; n++) {
    const u32x4* const from = (const u32x4*)parts.at[first + n] + i * Held::UNITS;
#pragma unroll
    for (u32 u = 0; u < Held::UNITS; u++) held[n].units[u] = from[u];
  }
#pragma unroll
  for (u32 n = 0; n < SOME; n++) {
#pragma unroll
    for (u32 e = 0; e < EACH; e++) sum[e] += to_float(held[n].elements[e]);
  }
}

// Where the i-th of what rows of `width` hold lies, of rows that begin `pitch` apart.
INLINE u64 in_rows(u64 i, u64 width, u64 pitch) {
  return width == pitch ? i : i / width * pitch + i % width;
}

// Adds `count` parts in their order, in float, and rounds once. Rows of `width` elements lie `pitch`
// apart in all parts and `out_pitch` apart in the result. The first `vectors` times 16 bytes of the result go by
// 16-byte accesses, the rest by elements.
template <typename In, typename Out>
INLINE void reduce(Out* out, const Parts& parts, u32 count, u64 vectors, u64 elements, u64 width,
                   u64 pitch, u64 out_pitch, u32 blocks) {
  constexpr u32 EACH = 16 / sizeof(Out);
  const u64 first = (u64)block_index() * REDUCE_THREADS + thread_index();
  const u64 stride = (u64)blocks * REDUCE_THREADS;
  for (u64 n = first; n < vectors; n += stride) {
    const u64 i = in_rows(n, width / EACH, pitch / EACH);
    float sum[EACH];
#pragma unroll
    for (u32 e = 0; e < EACH; e++) sum[e] = -0.0f;  // the neutral element: 0 + -0 is 0
    u32 p = 0;
    for (; p + 4 <= count; p += 4) add<4, In, EACH>(sum, parts, p, i);
    if (p + 2 <= count) {
      add<2, In, EACH>(sum, parts, p, i);
      p += 2;
    }
    if (p < count) add<1, In, EACH>(sum, parts, p, i);
    Units<Out, EACH> result;
#pragma unroll
    for (u32 e = 0; e < EACH; e++) from_float(sum[e], result.elements[e]);
    ((u32x4*)out)[in_rows(n, width / EACH, out_pitch / EACH)] = result.units[0];
  }
  for (u64 n = vectors * EACH + first; n < elements; n += stride) {
    const u64 i = in_rows(n, width, pitch);
    float sum = -0.0f;
    for (u32 p = 0; p < count; p++) sum += to_float(((const In*)parts.at[p])[i]);
    from_float(sum, out[in_rows(n, width, out_pitch)]);
  }
}

#define REDUCE(name, In, Out)                                                                    \
  KERNEL(REDUCE_THREADS)                                                                         \
  name(Out* out, CONSTANT Parts parts, u32 count, u32 blocks, u64 vectors, u64 elements,         \
       u64 width, u64 pitch, u64 out_pitch) {                                                    \
    reduce<In, Out>(out, parts, count, vectors, elements, width, pitch, out_pitch, blocks);      \
  }

REDUCE(ficco_reduce_bfloat16_bfloat16, bf16, bf16)
REDUCE(ficco_reduce_float16_float16, f16, f16)
REDUCE(ficco_reduce_float32_float32, float, float)
REDUCE(ficco_reduce_float32_bfloat16, float, bf16)
REDUCE(ficco_reduce_float32_float16, float, f16)

// Signals. One block, a thread for each word.

struct Words {
  u32* at[SIGNAL_THREADS];
  u32 value[SIGNAL_THREADS];
};

// Writes words behind everything that the stream did before.
KERNEL(SIGNAL_THREADS) ficco_post(CONSTANT Words words, u32 count) {
  const u32 i = thread_index();
  release_system();
  if (i < count) store_system(words.at[i], words.value[i]);
}

// Waits until words have their values. When `limit` ticks have passed it gives up, and writes
// `first` + the index of a missing word to `late`.
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
