// ficco/hip_kernels/device.h for a CPU: one thread at a time, so that the code of the kernels runs
// without a GPU.

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};
struct alignas(16) u32x4 {
  u32 x, y, z, w;
};

#define INLINE static inline
#define CONSTANT const
#define KERNEL(threads) extern "C" void

static thread_local u32 the_block, the_thread;
extern "C" void become(u32 block, u32 thread) {
  the_block = block;
  the_thread = thread;
}

INLINE u32 thread_index() { return the_thread; }
INLINE u32 block_index() { return the_block; }

INLINE void release_system() { __atomic_thread_fence(__ATOMIC_RELEASE); }
INLINE void acquire_system() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
INLINE void release_device() { release_system(); }
INLINE void acquire_device() { acquire_system(); }
INLINE void release_block() { release_system(); }

// Threads run in order, the last thread of a block last. Concurrent threads use the barrier.
static pthread_barrier_t meeting;
static bool together;
extern "C" void meet(u32 threads) {
  if (together) pthread_barrier_destroy(&meeting);
  together = threads;
  if (together) pthread_barrier_init(&meeting, nullptr, threads);
}
INLINE void barrier() {
  if (together) pthread_barrier_wait(&meeting);
}

#define SHARED static
constexpr u32 WARP = 32;
INLINE u32 exchanged(u32 value, u32 bit) {
  static u32 values[1024];
  barrier();
  values[the_thread] = value;
  barrier();
  return values[the_thread ^ bit];
}

constexpr bool HAS_E4M3 = false, HAS_FNUZ = false;
INLINE u32 to_e4m3(const float (&)[4]) { return 0; }
INLINE u32 add_device(u32* at) { return __atomic_fetch_add(at, 1, __ATOMIC_RELAXED); }

INLINE u32 load_system(const u32* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
INLINE void wait_system(const u32* at, u32 value) {
  while (__atomic_load_n(at, __ATOMIC_ACQUIRE) != value) {}
}
INLINE void store_system(u32* at, u32 value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
INLINE void store_system(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }

INLINE u64 ticks() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}
INLINE void pause() { sched_yield(); }

INLINE float exp2_of(float value) { return exp2f(value); }
INLINE float log2_of(float value) { return log2f(value); }
INLINE u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
INLINE float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Conversions of half precision, which are instructions on a device.
INLINE float to_float(f16 value) {
  const u32 sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31;
  const u32 fraction = value.bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  const float size = exponent ? ldexpf(1024.0f + fraction, (int)exponent - 25)
                              : ldexpf((float)fraction, -24);
  return sign ? -size : size;
}
INLINE void from_float(float value, f16& to) {
  const u16 sign = bits_of(value) >> 16 & 0x8000;
  const float size = fabsf(value);
  if (value != value) {
    to.bits = sign | 0x7e00;
  } else if (size >= 65520.0f) {
    to.bits = sign | 0x7c00;
  } else if (size < 6.103515625e-05f) {
    to.bits = sign | (u16)rintf(ldexpf(size, 24));  // also carries into the smallest normal number
  } else {
    int exponent;
    frexpf(size, &exponent);
    const u32 fraction = (u32)rintf(ldexpf(size, 11 - exponent));  // 1024 to 2048
    to.bits = sign | (u16)(((exponent + 13) << 10) + fraction);
  }
}
