/* SPDX-License-Identifier: Apache-2.0
 *
 * device_cuda.h: device_platform.h for CUDA, compute capability 7.0 and newer, with nvcc, NVRTC or clang.
 *
 * Memory operations are written as PTX: the compiler's own names differ between nvcc and NVRTC without headers, and
 * what they become is the point. On sm_90 fence.acq_rel.sys is MEMBAR.ALL.SYS, where __threadfence_system() is the
 * stronger and slower MEMBAR.SC.SYS; a release store is that fence and a store; an acquire load is a load that drops
 * the first-level cache.
 */
#ifndef UCCL_EP_DEVICE_CUDA_H
#define UCCL_EP_DEVICE_CUDA_H

#include "ring.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "uccl_ep needs compute capability 7.0: lanes of older GPUs do not go on independently of each other"
#endif

#define UCCL_EP_KERNEL extern "C" __global__
#define UCCL_EP_DEVICE __device__ __forceinline__
#define UCCL_EP_SHARED __shared__
#define UCCL_EP_EMULATION_ENTRY(kernel)

namespace uccl_ep {
namespace platform {

UCCL_EP_DEVICE uccl_ep_u32 width() {
    return 32;
}
UCCL_EP_DEVICE uccl_ep_u32 lane() {
    uccl_ep_u32 id;
    asm("mov.u32 %0, %%laneid;" : "=r"(id));
    return id;
}
UCCL_EP_DEVICE uccl_ep_u32 thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
UCCL_EP_DEVICE uccl_ep_u32 threads() {
    return blockDim.x * blockDim.y * blockDim.z;
}
UCCL_EP_DEVICE uccl_ep_u32 block() {
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}
UCCL_EP_DEVICE uccl_ep_u32 blocks() {
    return gridDim.x * gridDim.y * gridDim.z;
}
UCCL_EP_DEVICE uccl_ep_u64 present() {
    const uccl_ep_u32 left = threads() - (thread() - lane());
    return left < 32 ? (1ull << left) - 1 : 0xffffffffull;
}

/* What is not for the block alone lies anywhere but in shared memory, so its state space is known: an atomic operation
 * on a generic address is compiled twice, with a branch. */
#define UCCL_EP_CUDA_LOAD_(name, type, constraint, code)                                                               \
    UCCL_EP_DEVICE type name(const type *address) {                                                                    \
        type value;                                                                                                    \
        asm volatile(code " %0, [%1];" : "=" constraint(value) : "l"(__cvta_generic_to_global(address)) : "memory");   \
        return value;                                                                                                  \
    }
#define UCCL_EP_CUDA_STORE_(name, type, constraint, code)                                                              \
    UCCL_EP_DEVICE void name(type *address, type value) {                                                              \
        asm volatile(code " [%0], %1;" ::"l"(__cvta_generic_to_global(address)), constraint(value) : "memory");        \
    }
#define UCCL_EP_CUDA_CHANGE_(name, type, constraint, code)                                                             \
    UCCL_EP_DEVICE type name(type *address, type value) {                                                              \
        type old;                                                                                                      \
        asm volatile(code " %0, [%1], %2;"                                                                             \
                     : "=" constraint(old)                                                                             \
                     : "l"(__cvta_generic_to_global(address)), constraint(value)                                       \
                     : "memory");                                                                                      \
        return old;                                                                                                    \
    }
UCCL_EP_CUDA_LOAD_(load_system, uccl_ep_u64, "l", "ld.relaxed.sys.global.b64")
UCCL_EP_CUDA_LOAD_(load_device, uccl_ep_u64, "l", "ld.relaxed.gpu.global.b64")
UCCL_EP_CUDA_LOAD_(load_device, uccl_ep_u32, "r", "ld.relaxed.gpu.global.b32")
UCCL_EP_CUDA_LOAD_(load_acquire_system, uccl_ep_u64, "l", "ld.acquire.sys.global.b64")
UCCL_EP_CUDA_LOAD_(load_acquire_device, uccl_ep_u64, "l", "ld.acquire.gpu.global.b64")
UCCL_EP_CUDA_STORE_(store_system, uccl_ep_u64, "l", "st.relaxed.sys.global.b64")
UCCL_EP_CUDA_STORE_(store_release_system, uccl_ep_u64, "l", "st.release.sys.global.b64")
UCCL_EP_CUDA_STORE_(store_release_device, uccl_ep_u64, "l", "st.release.gpu.global.b64")
UCCL_EP_CUDA_CHANGE_(add_device, uccl_ep_u64, "l", "atom.relaxed.gpu.global.add.u64")
UCCL_EP_CUDA_CHANGE_(exchange_device, uccl_ep_u32, "r", "atom.relaxed.gpu.global.exch.b32")
/* What is for the block lies in shared memory, in words of 32 bits: through generic addresses each access would be
 * several times slower, and an addition to 64 bits is a loop. */
UCCL_EP_DEVICE uccl_ep_u32 in_shared(const void *address) {
    return (uccl_ep_u32)__cvta_generic_to_shared(address);
}
UCCL_EP_DEVICE uccl_ep_u32 load_acquire_block(const uccl_ep_u32 *address) {
    uccl_ep_u32 value;
    asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(value) : "r"(in_shared(address)) : "memory");
    return value;
}
UCCL_EP_DEVICE void store_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    asm volatile("st.relaxed.cta.shared.b32 [%0], %1;" ::"r"(in_shared(address)), "r"(value) : "memory");
}
UCCL_EP_DEVICE void store_release_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(in_shared(address)), "r"(value) : "memory");
}
UCCL_EP_DEVICE uccl_ep_u32 add_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    uccl_ep_u32 old;
    asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "r"(in_shared(address)), "r"(value)
                 : "memory");
    return old;
}
UCCL_EP_DEVICE uccl_ep_u32 or_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    uccl_ep_u32 old;
    asm volatile("atom.relaxed.cta.shared.or.b32 %0, [%1], %2;"
                 : "=r"(old)
                 : "r"(in_shared(address)), "r"(value)
                 : "memory");
    return old;
}
#undef UCCL_EP_CUDA_LOAD_
#undef UCCL_EP_CUDA_STORE_
#undef UCCL_EP_CUDA_CHANGE_

/* Neither volatile nor a clobber: equal loads are one load. */
UCCL_EP_DEVICE uccl_ep_u64 load_constant(const uccl_ep_u64 *address) {
    uccl_ep_u64 value;
    asm("ld.global.nc.b64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(address)));
    return value;
}

UCCL_EP_DEVICE void fence_system() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
UCCL_EP_DEVICE void fence_block() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
}

/* One access for both where PTX has it (8.3): a wait then costs one read of host memory and not two, one after the
 * other. */
UCCL_EP_DEVICE uccl_ep_u64 load_pair_system(const uccl_ep_u64 *address, uccl_ep_u64 *second) {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 3)
    uccl_ep_u64 first, next;
    asm volatile("{ .reg .b128 pair; ld.acquire.sys.global.b128 pair, [%2]; mov.b128 {%0, %1}, pair; }"
                 : "=l"(first), "=l"(next)
                 : "l"(__cvta_generic_to_global(address))
                 : "memory");
    *second = next;
#else
    const uccl_ep_u64 first = load_acquire_system(address);
    *second = load_system(address + 1);
#endif
    return first;
}

/* One aligned 16-byte store, STG.E.128: in practice one write on the bus. PTX calls it two accesses without an order
 * between them, which is why both words carry the parity. Slots are host memory: the global state space is known. */
UCCL_EP_DEVICE void store_command(uccl_ep_slot *slot, uccl_ep_u64 word0, uccl_ep_u64 word1) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(slot)), "l"(word0),
                 "l"(word1)
                 : "memory");
}

UCCL_EP_DEVICE uccl_ep_u64 active() {
    return __activemask();
}
UCCL_EP_DEVICE uccl_ep_u64 shuffle(uccl_ep_u64 mask, uccl_ep_u64 value, uccl_ep_u32 from) {
    return __shfl_sync((unsigned)mask, (unsigned long long)value, (int)from);
}
UCCL_EP_DEVICE uccl_ep_u64 ballot(uccl_ep_u64 mask, bool predicate) {
    return __ballot_sync((unsigned)mask, predicate);
}
UCCL_EP_DEVICE void sync_warp(uccl_ep_u64 mask) {
    __syncwarp((unsigned)mask);
}
UCCL_EP_DEVICE void sync_block() {
    __syncthreads();
}

UCCL_EP_DEVICE uccl_ep_u32 lowest_bit(uccl_ep_u64 mask) {
    return (uccl_ep_u32)__ffsll((long long)mask) - 1;
}
UCCL_EP_DEVICE uccl_ep_u32 count_bits(uccl_ep_u64 mask) {
    return (uccl_ep_u32)__popcll(mask);
}

/* Nanoseconds, the same on all multiprocessors: their own cycle counters differ from each other and with the clock. */
UCCL_EP_DEVICE uccl_ep_u64 clock() {
    uccl_ep_u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
UCCL_EP_DEVICE uccl_ep_u64 cycles() {
    return (uccl_ep_u64)clock64();
}
/* A wait reads host memory, for 0.7 us a turn, or shared memory, where a turn should be short: nanosleep, at its least,
 * takes longer than what most waits wait for. */
UCCL_EP_DEVICE void relax() {}
/* A turn takes about a microsecond, half of one, and some tens of nanoseconds: a look every half millisecond or so. */
enum : uccl_ep_u32 { turns_host = 256, turns_device = 1024, turns_shared = 16384 };
/* A third of a microsecond at the clocks of today's devices. Sleeping is not that exact. */
UCCL_EP_DEVICE void breath() {
    for (const uccl_ep_u64 begin = cycles(); cycles() - begin < 650;) {
    }
}
UCCL_EP_DEVICE void *dynamic_shared() {
    extern __shared__ __align__(16) unsigned char uccl_ep_dynamic_shared[];
    return uccl_ep_dynamic_shared;
}

} // namespace platform
} // namespace uccl_ep

#endif
