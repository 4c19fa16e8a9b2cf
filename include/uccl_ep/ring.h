/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.h: the command ring, from many producers to one proxy.
 *
 * Purpose. The data structures that producers and proxy share, and the four steps of posting: reserve, wait for space,
 * store, and (on the other side) take. Memory is laid out so that every word in host memory has one writing side, since
 * a GPU's atomics on host memory are not atomic against a CPU's on most machines.
 *
 *   slots       host memory (pinned for a device channel), written by producers only, 16 bytes each
 *   producer    next ticket, cached tail: device memory for a device channel, else host memory
 *   gave_up     host memory, written by producers only
 *   counters    host memory, written by the CPU only; those of one proxy lie side by side
 *
 * Ordering. A ticket is the position of a command, 64-bit, starting at uccl_ep_ring.first_ticket. Slot = ticket mod
 * slots. A slot is published by its lap parity in *both* words: (ticket / slots) odd or even, inverted, so that zeroed
 * memory is "not written" in the first lap. Nobody clears slots, and a consumer that tests both words cannot meet a
 * torn command whatever the width of the producer's stores. Posting is a release by the storing thread and taking an
 * acquire (PUB-1): both words are stored after everything the poster did before. The consumer publishes `tail` with
 * release after it has read a slot, and a producer acquires it before it overwrites that slot.
 *
 * Posting together (PUB-2). One thread reserves n consecutive tickets, waits until all n slots are free, and then they
 * are stored, by one thread or by many. Nobody waits for one slot of its n: on a GPU wave lanes that wait for each
 * other's slots never meet again. n is at most the number of slots.
 *
 * Giving up (PRG-3). A reserved ticket that nobody stores would stop the ring for ever. Who gives up waiting for space
 * sets `gave_up`; the channel is then closed, and every wait on it ends with an error.
 *
 * Start: head, tail_cache, tail, source and complete are first_ticket, `failed` is UCCL_EP_NO_TICKET, slots are
 * formatted (uccl_ep_ring_format).
 *
 * Threads: producers may be any number; one consumer. Lifetime: the ring outlives its producers' last post.
 * Errors: none here; deadlines belong to the caller of uccl_ep_ring_has_space.
 */
#ifndef UCCL_EP_RING_H
#define UCCL_EP_RING_H

#include "command.h"

#define UCCL_EP_RING_MIN_LOG2 1u
#define UCCL_EP_RING_MAX_LOG2 16u

typedef struct uccl_ep_slot {
    uccl_ep_u64 word[2];
} uccl_ep_slot;

/* Producers' own words. Head and the cached tail are on lines of their own: all producers write the first, few the
 * rest. */
typedef struct uccl_ep_ring_producer {
    uccl_ep_u64 head; /* next ticket to be reserved */
    uccl_ep_u64 pad0[7];
    uccl_ep_u64 tail_cache; /* a tail that was read before: spares a read of host memory while it shows space */
    uccl_ep_u32 asking;     /* of device channels: 1 while one of those that wait for space reads `tail` for all */
    uccl_ep_u32 reserved;
    uccl_ep_u64 pad1[6];
} uccl_ep_ring_producer;

/* What a channel's status word says. */
typedef enum uccl_ep_channel_state {
    UCCL_EP_CHANNEL_OPEN = 0,
    UCCL_EP_CHANNEL_CLOSED = 1, /* malformed command without a readable target, or a producer gave up */
    UCCL_EP_CHANNEL_ABORTED = 2
} uccl_ep_channel_state;

#define UCCL_EP_NO_TICKET (~0ull)

/*
 * What a proxy publishes of one channel. A wait for ticket t is over when `complete` (or `source`) is above t; it has
 * failed if `failed` is at or below t. The record of a failure is published before `failed`, and `failed` before the
 * counter passes it (ERR-2).
 */
typedef struct uccl_ep_ring_counters {
    uccl_ep_u64 tail;     /* tickets below it have been taken: their slots are free */
    uccl_ep_u64 source;   /* tickets below it: sources reusable (QUI-0) */
    uccl_ep_u64 complete; /* tickets below it: complete (QUI-1) */
    uccl_ep_u64 failed;   /* lowest failed ticket that nobody acknowledged, or UCCL_EP_NO_TICKET */
    uccl_ep_u64 status;   /* uccl_ep_channel_state */
    uccl_ep_u64 pad[3];
} uccl_ep_ring_counters;
UCCL_EP_STATIC_ASSERT_(sizeof(uccl_ep_ring_counters) == 64, "one line a channel");

/* A producer's view of a ring. Plain pointers: it is copied to the device as it is. */
typedef struct uccl_ep_ring {
    uccl_ep_u32 codec_version; /* UCCL_EP_CODEC_VERSION */
    uccl_ep_u32 log2_slots;
    uccl_ep_u32 granularity; /* of the channel: 16 or 4 */
    uccl_ep_u32 channel;
    uccl_ep_u64 first_ticket;
    uccl_ep_slot *slots;
    uccl_ep_ring_producer *producer;
    uccl_ep_u64 *gave_up; /* not zero: a producer reserved tickets and will not store them */
    const uccl_ep_ring_counters *counters;
} uccl_ep_ring;

UCCL_EP_FN uccl_ep_u64 uccl_ep_ring_slots(const uccl_ep_ring *ring) {
    return 1ull << ring->log2_slots;
}

/* The parity bit, in place, that marks `ticket` as written. */
UCCL_EP_FN uccl_ep_u64 uccl_ep_ring_parity(uccl_ep_u32 log2_slots, uccl_ep_u64 ticket) {
    return (~(ticket >> log2_slots) & 1ull) << UCCL_EP_PARITY_SHIFT;
}

/* Host side. The device's four steps are in device.h, over the same structures. */
#if !defined(__CUDACC_RTC__) && !defined(__HIPCC_RTC__)

/* Reserve n tickets; the first one is returned. Relaxed: a reservation orders nothing. */
static inline uccl_ep_u64 uccl_ep_ring_reserve(const uccl_ep_ring *ring, uccl_ep_u64 n) {
    return __atomic_fetch_add(&ring->producer->head, n, __ATOMIC_RELAXED);
}

/* 1 if the slots of tickets first .. first + n - 1 are free. Differences, not comparisons: tickets may wrap. */
static inline int uccl_ep_ring_has_space(const uccl_ep_ring *ring, uccl_ep_u64 first, uccl_ep_u64 n) {
    const uccl_ep_u64 slots = uccl_ep_ring_slots(ring);
    /* Acquire also here: the thread that wrote the cache had acquired the tail, and its release hands that on. */
    if (first + n - __atomic_load_n(&ring->producer->tail_cache, __ATOMIC_ACQUIRE) <= slots) return 1;
    const uccl_ep_u64 tail = __atomic_load_n(&ring->counters->tail, __ATOMIC_ACQUIRE);
    /* Producers may put an older tail over a newer one: the cache then only costs another look. */
    __atomic_store_n(&ring->producer->tail_cache, tail, __ATOMIC_RELEASE);
    return first + n - tail <= slots;
}

/* Store one command into its reserved, free slot: the release of PUB-1. */
static inline void uccl_ep_ring_store(const uccl_ep_ring *ring, uccl_ep_u64 ticket, uccl_ep_words words) {
    uccl_ep_slot *slot = &ring->slots[ticket & (uccl_ep_ring_slots(ring) - 1)];
    const uccl_ep_u64 parity = uccl_ep_ring_parity(ring->log2_slots, ticket);
    __atomic_store_n(&slot->word[0], words.word[0] | parity, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->word[1], words.word[1] | parity, __ATOMIC_RELEASE);
}

/*
 * Consumer: 1 and the words, without their parity bits, if `slot` has been stored in the lap of `parity`. Word 1 first
 * and with acquire: it is the one that a CPU producer releases. Word 0 needs its own parity test, since a GPU's two
 * stores may land in either order, but no acquire: whoever sees word 1 sees all that came before the post
 * (tests/native/test_ring_model.c).
 */
static inline int uccl_ep_slot_take(const uccl_ep_slot *slot, uccl_ep_u64 parity, uccl_ep_words *words) {
    const uccl_ep_u64 word1 = __atomic_load_n(&slot->word[1], __ATOMIC_ACQUIRE) ^ parity;
    if (word1 & UCCL_EP_PARITY_BIT) return 0;
    const uccl_ep_u64 word0 = __atomic_load_n(&slot->word[0], __ATOMIC_RELAXED) ^ parity;
    if (word0 & UCCL_EP_PARITY_BIT) return 0;
    words->word[0] = word0;
    words->word[1] = word1;
    return 1;
}

/* The same for the slot of `ticket`; the words are as stored, parity bits included. */
static inline int uccl_ep_ring_take(const uccl_ep_slot *slots, uccl_ep_u32 log2_slots, uccl_ep_u64 ticket,
                                    uccl_ep_words *words) {
    const uccl_ep_u64 parity = uccl_ep_ring_parity(log2_slots, ticket);
    if (!uccl_ep_slot_take(&slots[ticket & ((1ull << log2_slots) - 1)], parity, words)) return 0;
    words->word[0] |= parity;
    words->word[1] |= parity;
    return 1;
}

/* Make every slot say "not written" for the laps that start at `first_ticket`. Before the first producer. */
static inline void uccl_ep_ring_format(uccl_ep_slot *slots, uccl_ep_u32 log2_slots, uccl_ep_u64 first_ticket) {
    const uccl_ep_u64 n = 1ull << log2_slots;
    for (uccl_ep_u64 i = 0; i < n; i++) {
        const uccl_ep_u64 ticket = first_ticket + i;
        uccl_ep_slot *slot = &slots[ticket & (n - 1)];
        slot->word[0] = slot->word[1] = uccl_ep_ring_parity(log2_slots, ticket) ^ UCCL_EP_PARITY_BIT;
    }
}

#endif
#endif
