/* SPDX-License-Identifier: Apache-2.0
 *
 * device_emulation.h: device_platform.h for the CPU (emulation.h).
 */
#ifndef UCCL_EP_DEVICE_EMULATION_H
#define UCCL_EP_DEVICE_EMULATION_H

#include "emulation.h"
#include "ring.h"

#define UCCL_EP_KERNEL extern "C" __attribute__((visibility("default")))
#define UCCL_EP_DEVICE inline
/* A block is a thread, and its lanes are fibers of it: what belongs to the thread belongs to the block. */
#define UCCL_EP_SHARED static thread_local
#define UCCL_EP_EMULATION_ENTRY(kernel)                                                                                \
    extern "C" __attribute__((visibility("default"))) void uccl_ep_call_##kernel(void **args) {                        \
        uccl_ep::platform::entry<decltype(&kernel), &kernel>::call(args);                                              \
    }                                                                                                                  \
    extern "C" __attribute__((visibility("default"))) const unsigned *uccl_ep_sizes_##kernel() {                       \
        return uccl_ep::platform::entry<decltype(&kernel), &kernel>::sizes;                                            \
    }

namespace uccl_ep {
namespace platform {

/* Calls a kernel with the arguments whose addresses are in `args`. sizes: theirs, and 0. */
template <unsigned... Index> struct indices {};
template <unsigned N, unsigned... Index> struct indices_to : indices_to<N - 1, N - 1, Index...> {};
template <unsigned... Index> struct indices_to<0, Index...> { typedef indices<Index...> type; };
template <typename T> struct argument { typedef T type; };
template <typename T> struct argument<const T> { typedef T type; };

template <typename Function, Function function> struct entry;
template <typename... Argument, void (*function)(Argument...)> struct entry<void (*)(Argument...), function> {
    static constexpr unsigned sizes[] = {sizeof(Argument)..., 0u};
    template <unsigned... Index> static void call_with(void **args, indices<Index...>) {
        (void)args;
        function(*static_cast<typename argument<Argument>::type *>(args[Index])...);
    }
    static void call(void **args) { call_with(args, typename indices_to<sizeof...(Argument)>::type()); }
};
template <typename... Argument, void (*function)(Argument...)>
constexpr unsigned entry<void (*)(Argument...), function>::sizes[];

UCCL_EP_DEVICE uccl_ep_u32 width() {
    return uccl_ep_emulation_self()->width;
}
UCCL_EP_DEVICE uccl_ep_u32 lane() {
    return uccl_ep_emulation_self()->lane;
}
UCCL_EP_DEVICE uccl_ep_u32 thread() {
    return uccl_ep_emulation_self()->thread;
}
UCCL_EP_DEVICE uccl_ep_u32 threads() {
    return uccl_ep_emulation_self()->threads;
}
UCCL_EP_DEVICE uccl_ep_u32 block() {
    return uccl_ep_emulation_self()->block;
}
UCCL_EP_DEVICE uccl_ep_u32 blocks() {
    return uccl_ep_emulation_self()->blocks;
}
UCCL_EP_DEVICE uccl_ep_u64 present() {
    return uccl_ep_emulation_self()->present;
}

UCCL_EP_DEVICE uccl_ep_u64 load_system(const uccl_ep_u64 *address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE uccl_ep_u64 load_device(const uccl_ep_u64 *address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE uccl_ep_u32 load_device(const uccl_ep_u32 *address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE uccl_ep_u64 load_acquire_system(const uccl_ep_u64 *address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
UCCL_EP_DEVICE uccl_ep_u64 load_acquire_device(const uccl_ep_u64 *address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
UCCL_EP_DEVICE uccl_ep_u32 load_acquire_block(const uccl_ep_u32 *address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
UCCL_EP_DEVICE void store_system(uccl_ep_u64 *address, uccl_ep_u64 value) {
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE void store_release_system(uccl_ep_u64 *address, uccl_ep_u64 value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
UCCL_EP_DEVICE void store_release_device(uccl_ep_u64 *address, uccl_ep_u64 value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
UCCL_EP_DEVICE void store_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE void store_release_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
UCCL_EP_DEVICE uccl_ep_u64 add_device(uccl_ep_u64 *address, uccl_ep_u64 value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE uccl_ep_u32 exchange_device(uccl_ep_u32 *address, uccl_ep_u32 value) {
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE uccl_ep_u32 add_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
UCCL_EP_DEVICE uccl_ep_u32 or_block(uccl_ep_u32 *address, uccl_ep_u32 value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

UCCL_EP_DEVICE uccl_ep_u64 load_constant(const uccl_ep_u64 *address) {
    return *address;
}

UCCL_EP_DEVICE void fence_system() {
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    uccl_ep_emulation_self()->fenced = 1;
}

UCCL_EP_DEVICE void fence_block() {
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}
UCCL_EP_DEVICE uccl_ep_u64 load_pair_system(const uccl_ep_u64 *address, uccl_ep_u64 *second) {
    const uccl_ep_u64 first = load_acquire_system(address);
    *second = load_system(address + 1);
    return first;
}

/* The fence before it is asked for, not trusted to: no machine that this runs on would show that it is missing. That it
 * was there makes the store a release, which ThreadSanitizer, unlike a fence, understands. */
UCCL_EP_DEVICE void store_command(uccl_ep_slot *slot, uccl_ep_u64 word0, uccl_ep_u64 word1) {
    if (!uccl_ep_emulation_self()->fenced) uccl_ep_emulation_unfenced();
    uccl_ep_emulation_self()->fenced = 0;
    __atomic_store_n(&slot->word[0], word0, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->word[1], word1, __ATOMIC_RELEASE);
}

/* Lanes are told apart by where they wait, the return address of the call; after a tail call that is another's. */
#define UCCL_EP_NO_TAIL_CALL_ __asm__ volatile("")

UCCL_EP_DEVICE uccl_ep_u64 active() {
    const uccl_ep_u64 mask = uccl_ep_emulation_active();
    UCCL_EP_NO_TAIL_CALL_;
    return mask;
}
UCCL_EP_DEVICE uccl_ep_u64 shuffle(uccl_ep_u64 mask, uccl_ep_u64 value, uccl_ep_u32 from) {
    const uccl_ep_u64 theirs = uccl_ep_emulation_shuffle(mask, value, from);
    UCCL_EP_NO_TAIL_CALL_;
    return theirs;
}
UCCL_EP_DEVICE uccl_ep_u64 ballot(uccl_ep_u64 mask, bool predicate) {
    const uccl_ep_u64 votes = uccl_ep_emulation_ballot(mask, predicate);
    UCCL_EP_NO_TAIL_CALL_;
    return votes;
}
UCCL_EP_DEVICE void sync_warp(uccl_ep_u64 mask) {
    uccl_ep_emulation_sync_warp(mask);
    UCCL_EP_NO_TAIL_CALL_;
}
UCCL_EP_DEVICE void sync_block() {
    uccl_ep_emulation_sync_block();
    UCCL_EP_NO_TAIL_CALL_;
}

UCCL_EP_DEVICE uccl_ep_u32 lowest_bit(uccl_ep_u64 mask) {
    return (uccl_ep_u32)__builtin_ctzll(mask);
}
UCCL_EP_DEVICE uccl_ep_u32 count_bits(uccl_ep_u64 mask) {
    return (uccl_ep_u32)__builtin_popcountll(mask);
}

UCCL_EP_DEVICE uccl_ep_u64 clock() {
    return uccl_ep_emulation_clock();
}
UCCL_EP_DEVICE uccl_ep_u64 cycles() {
    return clock();
}
UCCL_EP_DEVICE void relax() {
    uccl_ep_emulation_relax();
    UCCL_EP_NO_TAIL_CALL_;
}
/* All memory is the same here, and a turn lets the other fibers run. */
enum : uccl_ep_u32 { turns_host = 16, turns_device = 16, turns_shared = 1024 };
UCCL_EP_DEVICE void breath() {}
UCCL_EP_DEVICE void *dynamic_shared() {
    return uccl_ep_emulation_self()->shared;
}

} // namespace platform
} // namespace uccl_ep

#endif
