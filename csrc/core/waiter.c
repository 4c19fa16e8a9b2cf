/* SPDX-License-Identifier: Apache-2.0
 *
 * waiter.c: who waits for which signal, for report(). A wait that has lasted a little takes a place of a fixed table,
 * without a lock, and gives it back at its end; one that finds no place is counted.
 */
#define _GNU_SOURCE /* gettid's number, pthread_getname_np */
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

/* Low bits of `version`. It counts up with every change, so that a reader knows if it has read two waits. */
#define PLACE_FREE 0u
#define PLACE_CHANGES 1u
#define PLACE_TOLD 2u
#define PLACE_BITS 3u

/* A long wait may come in pieces, so that its thread can look at other things in between (Python's signal handlers). */
#define SAME_WAIT_NS 100000000ull

static uint64_t get(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}
static void set(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

uint32_t waiter_begin(uccl_ep_comm *comm, uint32_t slot, uint64_t value, uint32_t source) {
    const uint64_t now = comm_now(comm), thread = (uint64_t)syscall(SYS_gettid);
    const uint64_t what = (uint64_t)source << 32 | slot;
    for (uint32_t i = 0; i < MAX_WAITERS; i++) {
        /* The same thread begins at the same place: there it finds what it waited for before. */
        const uint32_t place = (uint32_t)(thread + i) % MAX_WAITERS;
        struct waiter *w = &comm->waiters[place];
        uint64_t version = get(&w->version);
        if ((version & PLACE_BITS) != PLACE_FREE ||
            !atomic_compare_exchange_strong_explicit(&w->version, &version, version + PLACE_CHANGES,
                                                     memory_order_acquire, memory_order_relaxed))
            continue;
        atomic_thread_fence(memory_order_release); /* nobody sees what follows without the change of the version */
        const bool goes_on = get(&w->thread) == thread && get(&w->what) == what && get(&w->value) == value &&
                             now - get(&w->end_ns) < SAME_WAIT_NS;
        if (!goes_on) {
            char name[16] = "";
            uint64_t words[2];
            pthread_getname_np(pthread_self(), name, sizeof name);
            memcpy(words, name, sizeof words);
            set(&w->name[0], words[0]);
            set(&w->name[1], words[1]);
            set(&w->thread, thread);
            set(&w->what, what);
            set(&w->value, value);
            set(&w->begin_ns, now);
        }
        atomic_store_explicit(&w->version, version + PLACE_TOLD, memory_order_release);
        return place;
    }
    atomic_fetch_add_explicit(&comm->waiters_untold, 1, memory_order_relaxed);
    return MAX_WAITERS;
}

void waiter_end(uccl_ep_comm *comm, uint32_t place) {
    if (place == MAX_WAITERS) {
        atomic_fetch_sub_explicit(&comm->waiters_untold, 1, memory_order_relaxed);
        return;
    }
    struct waiter *w = &comm->waiters[place];
    set(&w->end_ns, comm_now(comm));
    /* On to the next version that is free. */
    atomic_fetch_add_explicit(&w->version, PLACE_BITS + 1 - PLACE_TOLD, memory_order_release);
}

bool waiter_read(const uccl_ep_comm *comm, uint32_t place, struct waiting *out) {
    const struct waiter *w = &comm->waiters[place];
    const uint64_t version = atomic_load_explicit(&w->version, memory_order_acquire);
    if ((version & PLACE_BITS) != PLACE_TOLD) return false;
    const uint64_t words[2] = {get(&w->name[0]), get(&w->name[1])};
    memcpy(out->name, words, sizeof words);
    out->name[sizeof out->name - 1] = 0;
    out->thread = get(&w->thread);
    out->slot = (uint32_t)get(&w->what);
    out->source = (uint32_t)(get(&w->what) >> 32);
    out->value = get(&w->value);
    out->begin_ns = get(&w->begin_ns);
    atomic_thread_fence(memory_order_acquire);
    return get(&w->version) == version;
}
