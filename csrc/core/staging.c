/* SPDX-License-Identifier: Apache-2.0
 *
 * staging.c: a heap in device memory for NICs that do not reach it, staged through host memory.
 *
 * What is registered as the heap is its *mirror* in host memory, twice as large: one half where peers write, at the
 * offsets of the heap, and one where own puts are sent from, at theirs. Two halves, because an offset may be the source
 * of one put and the target of another. A put goes
 *
 *   heap --copy--> mirror, sending half --NIC--> mirror, receiving half at the target --copy--> heap
 *
 * Each put has a record in the target's mailbox that says which bytes to bring (mailbox.c), as a signal has. The
 * target's proxy starts the copies of the records that have come, and once those are done adds their signals and
 * returns their numbers: so a signal comes after the bytes (SIG-2, MEM-3), and what was returned is visible to kernels
 * (QUI-1).
 *
 * Neither half needs flow control. What lies at a source's offset in the sending half is written again only by a later
 * put of the same bytes, which have not changed before the NIC had read them (PUT-3; a source is free with the NIC's
 * completion, not with the copy's). What lies in the receiving half is written again only by a put to the same bytes,
 * which follows the completion of the first (PUT-7).
 *
 * Copies are started and looked at, never waited for.
 */
#include "staging.h"

#include <stdio.h>
#include <stdlib.h>

#include "mailbox.h"

/* ------------------------------------------------------------------------------------------------- create and destroy
 */

uccl_ep_status staging_open(uccl_ep_comm *comm, struct proxy *p) {
    const size_t entries = (size_t)p->channels << p->window_log2;
    struct staging *s = p->staging = calloc(1, sizeof *s);
    if (s) s->entries = calloc(entries, sizeof *s->entries);
    if (s) s->landings = calloc(comm->size, sizeof *s->landings);
    if (!s || !s->entries || !s->landings)
        return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the staging of proxy %u", p->index);
    struct copies *const both[] = {&s->out, &s->in};
    for (size_t i = 0; i < 2; i++) {
        const uccl_ep_status status = comm->accelerator->queue_open(comm->gpu, &both[i]->queue);
        if (status == UCCL_EP_OK && both[i]->queue) continue;
        both[i]->queue = NULL;
        return status == UCCL_EP_OK ? fail_local(UCCL_EP_E_BACKEND, "", "%s said OK and gave no queue: report it",
                                                 comm->accelerator->name)
                                    : accelerator_failed(comm, status, "", "opening a queue for copies");
    }
    for (uint32_t source = 0; source < comm->size; source++) staging_reset(p, source);
    return UCCL_EP_OK;
}

/* The NIC has let go of the mirror, and no proxy runs. */
void staging_close(struct proxy *p) {
    struct staging *s = p->staging;
    if (!s) return;
    if (s->out.queue) p->comm->accelerator->queue_close(s->out.queue);
    if (s->in.queue) p->comm->accelerator->queue_close(s->in.queue);
    free(s->entries);
    free(s->landings);
    free(s);
    p->staging = NULL;
}

/* Nothing has been taken from `source` that its link does not count. */
void staging_reset(struct proxy *p, uint32_t source) {
    if (p->staging) p->staging->landings[source] = (struct landing){.end = p->links[source].expected};
}

/* ------------------------------------------------------------------------------------------------------------- copies
 */

static char *mirror_at(const uccl_ep_comm *comm, uint64_t offset) {
    return (char *)comm->mirror + offset;
}

static char *heap_at(const uccl_ep_comm *comm, uint64_t offset) {
    return (char *)comm->config.heap + offset;
}

/* Nothing can be sent or received any more. */
static void copies_failed(struct proxy *p, uccl_ep_status status, const char *what) {
    char why[160];
    const char *text = p->comm->accelerator->error_text();
    snprintf(why, sizeof why, "the heap is staged, and %s failed (%s): %.80s", what, uccl_ep_status_name(status),
             text ? text : "");
    p->staging->broken = true;
    endpoint_fail(p, checked_status(status), why);
}

static void start(struct proxy *p, struct copies *c) {
    if (!c->bytes || p->staging->broken) return;
    const uccl_ep_status status = p->comm->accelerator->copy_start(c->queue, c->to, c->from, c->bytes);
    c->bytes = 0;
    if (UNLIKELY(status != UCCL_EP_OK)) copies_failed(p, status, "starting a copy");
}

/* Returns the mark that will cover it. */
static uint64_t add_copy(struct proxy *p, struct copies *c, char *to, const char *from, uint64_t bytes) {
    if (c->bytes && c->to + c->bytes == to && c->from + c->bytes == from) {
        c->bytes += bytes;
    } else {
        start(p, c);
        c->to = to;
        c->from = from;
        c->bytes = bytes;
    }
    c->unmarked = true;
    return c->given + 1;
}

/* Start and mark what was gathered, and see what is done. Returns whether something is. */
static bool look(struct proxy *p, struct copies *c) {
    const uccl_ep_accelerator *a = p->comm->accelerator;
    start(p, c);
    if (c->unmarked && !p->staging->broken) {
        uint64_t number = 0;
        const uccl_ep_status status = a->mark(c->queue, &number);
        if (status == UCCL_EP_OK && number == c->given + 1) {
            c->given = number;
            c->unmarked = false;
        } else if (status != UCCL_EP_E_AGAIN) { /* else what is done makes room */
            copies_failed(p, status == UCCL_EP_OK ? UCCL_EP_E_BACKEND : status, "marking copies");
        }
    }
    if (c->done == c->given || p->staging->broken) return false;
    uint64_t done = c->done;
    const uccl_ep_status status = a->marks_done(c->queue, &done);
    if (UNLIKELY(status != UCCL_EP_OK || done - c->done > c->given - c->done)) {
        copies_failed(p, status == UCCL_EP_OK ? UCCL_EP_E_BACKEND : status, "copying");
        return false;
    }
    const bool moved = done != c->done;
    c->done = done;
    return moved;
}

static bool under_way(const struct copies *c) {
    return c->unmarked || c->done != c->given;
}

/* Returns whether something moved. */
bool staging_pass(struct proxy *p) {
    struct staging *s = p->staging;
    if (UNLIKELY(s->broken)) return false;
    bool moved = look(p, &s->out);
    moved |= look(p, &s->in);
    const bool waits = under_way(&s->out) || under_way(&s->in);
    if (moved || !waits) s->progress = p->tick;
    /* As silence of a peer: a copy that does not end must not hold up a wait, a reset or an exclude for ever (ERR-1).
     */
    if (UNLIKELY(waits && (uint64_t)(p->tick - s->progress) << TICK_LOG2 > p->comm->config.peer_timeout_ns)) {
        s->broken = true;
        endpoint_fail(p, UCCL_EP_E_DEADLINE,
                      "the heap is staged, and its copies made no progress within peer_timeout: is the GPU stuck?");
    }
    return moved;
}

/* ------------------------------------------------------------------------------------------------------------ sending
 */

/* `n` commands from `ticket` on were taken: those that were not refused need their sources in the mirror. */
void staging_take(struct proxy *p, const struct channel *c, uint64_t ticket, uint32_t n) {
    struct staging *s = p->staging;
    for (uint32_t i = 0; i < n; i++) {
        struct entry *e = &c->window[(ticket + i) & c->window_mask];
        if (e->stage != STAGE_TAKEN) continue;
        struct staged *of = &s->entries[e - p->entries];
        *of = (struct staged){0};
        if (!e->bytes) continue;
        if (!has_signal(e)) e->slot = 0, e->add = 0; /* its record adds nothing */
        of->mark =
            add_copy(p, &s->out, mirror_at(p->comm, p->heap_bytes + e->local), heap_at(p->comm, e->local), e->bytes);
        p->stats.staged_out += e->bytes;
    }
}

/* Does the driver still read sources of what is on the peer's list, or write what the peer had sent? */
bool staging_busy(const struct proxy *p, uint32_t target) {
    const struct staging *s = p->staging;
    if (s->broken) return false;
    for (const struct entry *e = p->peers[target].head; e; e = e->next)
        if (!copies_done(&s->out, s->entries[e - p->entries].mark)) return true;
    return !copies_done(&s->in, s->landings[target].mark);
}

/* ---------------------------------------------------------------------------------------------------------- receiving
 */

/* What `source` wrote about itself: only within the heap, whatever it says (MEM-2). */
static bool start_landing(struct proxy *p, uint32_t source, uint64_t number, uint64_t *mark) {
    uint64_t offset, bytes;
    if (!mailbox_extent(p, source, number, &offset, &bytes)) return true; /* no record: a put's own number */
    if (!bytes) return true;
    if (UNLIKELY(offset > p->heap_bytes || bytes > p->heap_bytes - offset)) {
        uccl_ep_error error;
        fill_error(p, &error, UCCL_EP_E_MALFORMED, "ERR-4", source);
        snprintf(error.text, sizeof error.text,
                 "rank %u wrote a record for %llu bytes at offset %llu, and the heap has %llu: it is given up, since "
                 "nothing that it says can be believed",
                 source, (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)p->heap_bytes);
        peer_fail(p, source, &error);
        return false;
    }
    *mark = add_copy(p, &p->staging->in, heap_at(p->comm, offset), mirror_at(p->comm, offset), bytes);
    p->stats.staged_in += bytes;
    return true;
}

/* What has been taken of `source` is on its way to the heap. */
bool staging_lands(const struct proxy *p, uint32_t source) {
    return p->staging->landings[source].end != p->links[source].expected;
}

/*
 * The records of `source` up to `*end` have come. Returns whether the bytes of some are in the heap, and *end is then
 * where those end; else their copies are under way. One group of records at a time: what comes meanwhile is the next.
 */
bool staging_landed(struct proxy *p, uint32_t source, uint64_t *end) {
    struct landing *l = &p->staging->landings[source];
    if (!staging_lands(p, source)) {
        for (uint64_t number = l->end; number != *end; number++)
            if (!start_landing(p, source, number, &l->mark)) return false;
        l->end = *end;
    }
    *end = l->end;
    return copies_done(&p->staging->in, l->mark) || FAULT(applied_before_copied);
}

/* -------------------------------------------------------------------------------------------------------------- reset
 */

/* No proxy runs. What was started ends before anything of the next incarnation begins (ERR-6). */
uccl_ep_status staging_drain(uccl_ep_comm *comm) {
    const uint64_t deadline = deadline_of(comm, comm->config.peer_timeout_ns);
    for (uint32_t i = 0; i < comm->config.proxies; i++) {
        struct proxy *p = &comm->proxies[i];
        struct staging *s = p->staging;
        backoff b = {0};
        while (s && (under_way(&s->out) || under_way(&s->in))) {
            look(p, &s->out);
            look(p, &s->in);
            if (s->broken)
                return fail_local(UCCL_EP_E_NIC, "ERR-6",
                                  "copies of the staged heap failed: only a new communicator "
                                  "helps");
            if (comm_now(comm) >= deadline)
                return fail_local(UCCL_EP_E_DEADLINE, "ERR-6", "copies of the staged heap did not end in time");
            backoff_pause(comm, &b);
        }
    }
    return UCCL_EP_OK;
}
