// Device functions of the kernels, for HIP (clang, hiprtc) and CUDA (nvcc, nvrtc), without vendors'
// headers: indices, barriers, system-scope ordering, a clock, conversions.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

#if defined(__HIP__)

#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __device__
#define __device__ __attribute__((device))
#endif
#define INLINE __device__ static inline __attribute__((always_inline))
#define KERNEL(threads) \
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, threads))) void

// A parameter that is read in place, also at computed indices.
#define CONSTANT const

typedef u32 u32x4 __attribute__((ext_vector_type(4)));

INLINE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
INLINE u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }

// The scope "" is the whole system. On gfx942 a release writes back the L2 of this XCD, and an
// acquire invalidates it.
INLINE void release_system() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  __builtin_amdgcn_s_waitcnt(0);  // clang 19 omits this wait if a branch skips the fence
}
INLINE void acquire_system() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }
INLINE void release_device() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
INLINE void acquire_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }

// Makes the stores of the block visible to the system, with one write-back of the L2 of its XCD. A
// stream write may not write back the L2 of every XCD. A workgroup release alone would not wait for
// stores in flight.
INLINE void release_block() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_waitcnt(0);
  __builtin_amdgcn_s_barrier();
  if (thread_index() < 64) release_system();
  __builtin_amdgcn_s_waitcnt(0);
}

// Waits for all threads of the block and for their stores.
INLINE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_waitcnt(0);
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

INLINE u32 load_system(const u32* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Waits for a value. Later loads see the stores that the peer released before it. Polls are
// relaxed, and only the last one invalidates caches.
INLINE void wait_system(const u32* at, u32 value) {
  while (load_system(at) != value) {}
  acquire_system();
}
INLINE void store_system(u32* at, u32 value) {
  __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
INLINE void store_system(u64* at, u64 value) {
  __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

// Adds one at device scope, and returns the value before.
INLINE u32 add_device(u32* at) {
  return __hip_atomic_fetch_add(at, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Ticks of hipDeviceAttributeWallClockRate, 100 MHz on MI200 and MI300.
INLINE u64 ticks() { return __builtin_readsteadycounter(); }
INLINE void pause() { __builtin_amdgcn_s_sleep(2); }

INLINE float to_float(f16 value) { return (float)__builtin_bit_cast(_Float16, value.bits); }
INLINE void from_float(float value, f16& to) {
  to.bits = __builtin_bit_cast(u16, (_Float16)value);
}
INLINE float exp2_of(float value) { return __builtin_amdgcn_exp2f(value); }
INLINE float log2_of(float value) { return __builtin_amdgcn_logf(value); }
INLINE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
INLINE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

// Shared memory of a block.
#define SHARED static __attribute__((shared))
constexpr u32 WARP = 64;

// The value of the thread of the same warp whose index differs in this bit.
INLINE u32 exchanged(u32 value, u32 bit) {
  const u32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
  return __builtin_amdgcn_ds_bpermute((lane ^ bit) * 4, value);
}

// Converts four values to e4m3 by an instruction of the device: fnuz on gfx942, OCP on gfx950. No
// value exceeds the largest e4m3.
#if defined(__gfx942__)
constexpr bool HAS_E4M3 = false, HAS_FNUZ = true;
#elif defined(__gfx950__)
constexpr bool HAS_E4M3 = true, HAS_FNUZ = false;
#else
constexpr bool HAS_E4M3 = false, HAS_FNUZ = false;
#endif
INLINE u32 to_e4m3(const float (&values)[4]) {
#if defined(__gfx942__) || defined(__gfx950__)
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(values[0], values[1], 0, false);
  return (u32)__builtin_amdgcn_cvt_pk_fp8_f32(values[2], values[3], low, true);
#else
  return 0;
#endif
}

#else  // CUDA

#define INLINE __device__ static __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define CONSTANT const __grid_constant__

typedef uint4 u32x4;

INLINE u32 thread_index() { return threadIdx.x; }
INLINE u32 block_index() { return blockIdx.x; }

// Weaker than __threadfence_system(), which is sequentially consistent.
INLINE void release_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
INLINE void acquire_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
INLINE void release_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
INLINE void acquire_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The end of a kernel and the fence of a stream write suffice.
INLINE void release_block() {}

INLINE void barrier() { __syncthreads(); }
INLINE u32 add_device(u32* at) { return atomicAdd(at, 1u); }

INLINE u32 load_system(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
INLINE void store_system(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
INLINE void store_system(u64* at, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Waits for a value. Later loads see the stores that the peer released before it. Every poll
// acquires: a separate acquire after the last poll would take one more load. Unlike a fence, an
// acquiring load does not wait for stores in flight.
INLINE void wait_system(const u32* at, u32 value) {
  u32 word;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  } while (word != value);
}

// Nanoseconds.
INLINE u64 ticks() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
INLINE void pause() { __nanosleep(100); }

INLINE float to_float(f16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
INLINE void from_float(float value, f16& to) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
}
INLINE float exp2_of(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
INLINE float log2_of(float value) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
INLINE u32 bits_of(float value) { return __float_as_uint(value); }
INLINE float float_of(u32 bits) { return __uint_as_float(bits); }

#define SHARED __shared__
constexpr u32 WARP = 32;

INLINE u32 exchanged(u32 value, u32 bit) { return __shfl_xor_sync(0xffffffffu, value, bit); }

#if __CUDA_ARCH__ >= 890
constexpr bool HAS_E4M3 = true, HAS_FNUZ = false;
#else
constexpr bool HAS_E4M3 = false, HAS_FNUZ = false;
#endif
INLINE u32 to_e4m3(const float (&values)[4]) {
#if __CUDA_ARCH__ >= 890
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(low) : "f"(values[0]), "f"(values[1]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(high) : "f"(values[2]), "f"(values[3]));
  return (u32)high << 16 | low;
#else
  return 0;
#endif
}

#endif
