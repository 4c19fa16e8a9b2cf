/* SPDX-License-Identifier: Apache-2.0
 *
 * trace.c: the flight recorder. The last commands that a proxy took, as they were in the ring.
 *
 * A proxy records a run of commands, taken at once from consecutive slots, by one copy of the slots and one line about
 * the run: a few instructions a command. Whoever reads puts the two together and leaves out what was overwritten
 * meanwhile.
 */
#include "internal.h"

void trace_record(struct proxy *p, const struct channel *c, uint64_t ticket, uint32_t n) {
    const uint64_t run = atomic_load_explicit(&p->trace_runs, memory_order_relaxed);
    const uint64_t begin = p->trace_end, slots = 1ull << p->ring_log2;
    const uccl_ep_slot *from = &c->slots[ticket & (slots - 1)];
    const uint32_t whole = (uint32_t)(TRACE_ENTRIES - begin % TRACE_ENTRIES), first = n < whole ? n : whole;
    UCCL_EP_ASSERT((ticket & (slots - 1)) + n <= slots);
    memcpy(&p->trace_slots[begin % TRACE_ENTRIES], from, first * sizeof *from);
    memcpy(p->trace_slots, from + first, (n - first) * sizeof *from);
    p->trace_end = begin + n;
    p->trace[run % TRACE_ENTRIES] =
        (struct trace_run){.time_ns = p->now_ns, .ticket = ticket, .end = begin + n, .n = n, .channel = c->index};
    atomic_store_explicit(&p->trace_runs, run + 1, memory_order_release);
}

/* A proxy writes these words plainly while they are read; a thread sanitizer is right about that, and it is meant. */
#define RACY_READ __attribute__((no_sanitize("thread")))

/* Acquire: the look at trace_runs that follows must not come before. */
RACY_READ static void copy_words(void *to, const void *from, size_t bytes) {
    for (size_t w = 0; w < bytes / sizeof(uint64_t); w++)
        ((uint64_t *)to)[w] = __atomic_load_n((const uint64_t *)from + w, __ATOMIC_ACQUIRE);
}
_Static_assert(sizeof(struct trace_run) % sizeof(uint64_t) == 0 && sizeof(uccl_ep_words) % sizeof(uint64_t) == 0,
               "what is traced is words");

/* Run `r` as it is now; false if it may be overwritten already. */
static bool read_run(struct proxy *p, uint64_t r, struct trace_run *run) {
    copy_words(run, &p->trace[r % TRACE_ENTRIES], sizeof *run);
    /* The line behind the last published one may be in the making. */
    return atomic_load_explicit(&p->trace_runs, memory_order_acquire) - r < TRACE_ENTRIES;
}

uccl_ep_status uccl_ep_trace(uccl_ep_comm *comm, uint32_t index, uccl_ep_trace_entry *entries, uint32_t *n) {
    if (!comm || !n || (*n && !entries) || index >= comm->config.proxies)
        return fail_local(UCCL_EP_E_RANGE, "", "the trace of one of %u proxies", comm ? comm->config.proxies : 0);
    struct proxy *p = &comm->proxies[index];
    const uint32_t room = *n < TRACE_ENTRIES ? *n : TRACE_ENTRIES;
    const uint64_t runs = atomic_load_explicit(&p->trace_runs, memory_order_acquire);
    struct trace_run run = {0};
    uint64_t newest = 0; /* position behind the last command */
    uint32_t at = room;  /* filled from the back: the newest first */
    for (uint64_t r = runs; r && at;) {
        if (!read_run(p, --r, &run)) break;
        if (at == room) newest = run.end;
        for (uint32_t k = run.n; k && at; k--) {
            uccl_ep_trace_entry *e = &entries[--at];
            *e = (uccl_ep_trace_entry){.time_ns = run.time_ns, .ticket = run.ticket + k - 1, .channel = run.channel};
            copy_words(&e->words, &p->trace_slots[(run.end - run.n + k - 1) % TRACE_ENTRIES], sizeof e->words);
        }
    }
    uint32_t written = room - at;
    /* What was overwritten while it was read is the oldest: leave it out, and what a run in the making may overwrite.
     */
    const uint64_t last = atomic_load_explicit(&p->trace_runs, memory_order_acquire);
    if (last && !read_run(p, last - 1, &run)) written = 0;
    const uint64_t lost =
        written ? run.end + TAKE_COMMANDS - newest : 0; /* positions since the newest one that was read */
    if (lost + written > TRACE_ENTRIES) written = lost < TRACE_ENTRIES ? (uint32_t)(TRACE_ENTRIES - lost) : 0;
    memmove(entries, entries + room - written, written * sizeof *entries);
    *n = written;
    return UCCL_EP_OK;
}
