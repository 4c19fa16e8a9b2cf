/* SPDX-License-Identifier: Apache-2.0
 *
 * device_hip.h: device_platform.h for HIP, CDNA and RDNA, with hipcc or hiprtc.
 *
 * Host memory that the device polls or posts to must be coherent ("fine-grained"); in other memory system scope means
 * nothing. Lanes of a wave go on in lockstep: of two sides of a branch one waits for the other, and a lane that waits
 * in a loop for another lane of its wave waits for ever. device.h is written for that.
 */
#ifndef UCCL_EP_DEVICE_HIP_H
#define UCCL_EP_DEVICE_HIP_H

#ifndef __HIPCC_RTC__
#include <hip/hip_runtime.h>
#endif

#include "ring.h"

#define UCCL_EP_KERNEL extern "C" __global__
#define UCCL_EP_DEVICE __device__ inline __attribute__((always_inline))
#define UCCL_EP_SHARED __shared__
#define UCCL_EP_EMULATION_ENTRY(kernel)

namespace uccl_ep {
namespace platform {

UCCL_EP_DEVICE uccl_ep_u32 width() {
    return (uccl_ep_u32)warpSize;
}
UCCL_EP_DEVICE uccl_ep_u32 lane() {
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
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
    return left < 64 && left < width() ? (1ull << left) - 1 : ~0ull >> (64 - width());
}

UCCL_EP_DEVICE uccl_ep_u64 load_system(const uccl_ep_u64 *address) {
    return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE uccl_ep_u64 load_device(const uccl_ep_u64 *address) {
    return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uccl_ep_u32 load_device(const uccl_ep_u32 *address) {
    return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uccl_ep_u64 load_acquire_system(const uccl_ep_u64 *address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE uccl_ep_u64 load_acquire_device(const uccl_ep_u64 *address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uccl_ep_u32 load_acquire_block(const uccl_ep_u32 *address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
UCCL_EP_DEVICE void store_system(uccl_ep_u64 *address, uccl_ep_u64 value) {
    __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE void store_release_system(uccl_ep_u64 *address, uccl_ep_u64 value) {
    __hip_atomic_store(address, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE void store_release_device(uccl_ep_u64 *address, uccl_ep_u64 value) {
    __hip_atomic_store(address, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE void store_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
UCCL_EP_DEVICE void store_release_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    __hip_atomic_store(address, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
UCCL_EP_DEVICE uccl_ep_u64 add_device(uccl_ep_u64 *address, uccl_ep_u64 value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uccl_ep_u32 exchange_device(uccl_ep_u32 *address, uccl_ep_u32 value) {
    return __hip_atomic_exchange(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uccl_ep_u32 add_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
UCCL_EP_DEVICE uccl_ep_u32 or_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    return __hip_atomic_fetch_or(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

UCCL_EP_DEVICE uccl_ep_u64 load_constant(const uccl_ep_u64 *address) {
    return *address;
}

UCCL_EP_DEVICE void fence_system() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
}
UCCL_EP_DEVICE void fence_block() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup");
}
UCCL_EP_DEVICE uccl_ep_u64 load_pair_system(const uccl_ep_u64 *address, uccl_ep_u64 *second) {
    const uccl_ep_u64 first = load_acquire_system(address);
    *second = load_system(address + 1);
    return first;
}

/* Two stores: there is no 16-byte atomic, and a plain 16-byte store has no scope. Both words carry the parity. */
UCCL_EP_DEVICE void store_command(uccl_ep_slot *slot, uccl_ep_u64 word0, uccl_ep_u64 word1) {
    store_system(&slot->word[0], word0);
    store_system(&slot->word[1], word1);
}

/* In lockstep the lanes that are here are those of the execution mask, and the masks that device.h makes of them are
 * the execution mask again: nothing has to be waited for. */
UCCL_EP_DEVICE uccl_ep_u64 ballot(uccl_ep_u64 mask, bool predicate) {
    return __ballot(predicate) & mask;
}
UCCL_EP_DEVICE uccl_ep_u64 active() {
    return __ballot(1);
}
UCCL_EP_DEVICE uccl_ep_u64 shuffle(uccl_ep_u64 mask, uccl_ep_u64 value, uccl_ep_u32 from) {
    (void)mask;
    const int at = (int)(from << 2);
    const uccl_ep_u32 low = (uccl_ep_u32)__builtin_amdgcn_ds_bpermute(at, (int)(uccl_ep_u32)value);
    const uccl_ep_u32 high = (uccl_ep_u32)__builtin_amdgcn_ds_bpermute(at, (int)(uccl_ep_u32)(value >> 32));
    return (uccl_ep_u64)high << 32 | low;
}
UCCL_EP_DEVICE void sync_warp(uccl_ep_u64 mask) {
    (void)mask;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
UCCL_EP_DEVICE void sync_block() {
    __syncthreads();
}

UCCL_EP_DEVICE uccl_ep_u32 lowest_bit(uccl_ep_u64 mask) {
    return (uccl_ep_u32)__builtin_ctzll(mask);
}
UCCL_EP_DEVICE uccl_ep_u32 count_bits(uccl_ep_u64 mask) {
    return (uccl_ep_u32)__builtin_popcountll(mask);
}

/* The constant clock, 100 MHz on CDNA: the shader clock changes its rate. */
UCCL_EP_DEVICE uccl_ep_u64 clock() {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_s_sendmsg_rtnl(0x83); /* where s_memrealtime is gone */
#else
    return __builtin_amdgcn_s_memrealtime();
#endif
}
UCCL_EP_DEVICE uccl_ep_u64 cycles() {
    return (uccl_ep_u64)clock64();
}
UCCL_EP_DEVICE void relax() {
    __builtin_amdgcn_s_sleep(1);
}
/* As on CUDA, where they were measured. */
enum : uccl_ep_u32 { turns_host = 256, turns_device = 1024, turns_shared = 16384 };
UCCL_EP_DEVICE void breath() {}
UCCL_EP_DEVICE void *dynamic_shared() {
    extern __shared__ uccl_ep_u64 uccl_ep_dynamic_shared[];
    return uccl_ep_dynamic_shared;
}

} // namespace platform
} // namespace uccl_ep

#endif
