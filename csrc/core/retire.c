/* SPDX-License-Identifier: Apache-2.0
 *
 * retire.c: from completions of the NIC to the counters that waits look at, and what happens when something fails.
 *
 * A peer's list is popped from its head only, so an entry leaves in posting order. A channel's window then advances in
 * ticket order.
 */
#include <stdio.h>

#include "staging.h"

/* Of a list that is not empty, `e` is the first that stays, NULL if none does. What was before it has left. */
static void set_head(struct proxy *p, struct peer *q, struct entry *e, uint64_t bytes) {
    q->inflight_bytes -= (uint32_t)bytes;
    p->inflight_bytes -= bytes;
    p->moved = true;
    q->head = e;
    if (!e) {
        const uint32_t target = (uint32_t)(q - p->peers);
        q->tail = NULL;
        p->busy[target >> 6] &= ~(1ull << (target & 63));
        p->busy_count--;
    }
}

/* `e` is complete or given up. Returns the one behind it. */
static inline struct entry *leave(struct entry *e, uint64_t *bytes) {
    *bytes += e->bytes_issued;
    e->stage = STAGE_FREE;
    return e->next;
}

/* The signal held at the head: its put is complete, and so is all before it. */
static void head_held(struct proxy *p, struct peer *q, struct entry *e) {
    e->flags |= ENTRY_SOURCE_DONE;
    e->stage = STAGE_SIGNAL_DUE;
    p->moved = true;
    activate(p, q);
}

/* The record of the signal at the head was submitted: has its target said that it added it? */
static bool applied(const struct proxy *p, const struct peer *q) {
    const struct link *l = link_of(p, q);
    return (int64_t)(l->returned - l->records) >= 0 || FAULT(return_word_ignored);
}

/*
 * The put at the head is submitted in part, and all of that is complete: cut it off, so that its bytes are not counted
 * as in flight any more. A put larger than what may be in flight goes in such parts. Its end stays where it was.
 */
__attribute__((noinline)) static void cut_off(struct proxy *p, struct peer *q, struct entry *e) {
    const uint32_t done = e->bytes_issued;
    e->local += done;
    e->remote += done;
    e->bytes -= done;
    e->bytes_issued = 0;
    if (p->staging) p->staging->entries[e - p->entries].cut += done; /* its record is for all of it */
    q->inflight_bytes -= done;
    p->inflight_bytes -= done;
    q->progress = p->tick;
}

/* Take off the list what is complete at its head. The kind of NIC and the strategy are constants here. */
static inline __attribute__((always_inline)) void retire_as(struct proxy *p, struct peer *q, bool in_order, bool hold,
                                                            bool sequenced) {
    struct entry *e = q->head;
    const struct entry *const head = e, *const issue = q->issue;
    uint32_t completed = q->seq_completed;
    if (in_order && UNLIKELY(p->raise == RAISE_READ)) completed = q->seq_visible;
    if (sequenced) completed = (uint32_t)link_of(p, q)->returned;
    uint64_t bytes = 0;
    while (e != issue) {
        if (FAULT(complete_at_submit) && !in_order && e->stage != STAGE_HELD && e->stage != STAGE_SIGNAL_DUE) {
            e = leave(e, &bytes);
            continue;
        }
        if (!in_order && e->outstanding) break;
        if ((in_order || sequenced) && (int32_t)(completed - e->last_seq) < 0) break;
        if (hold && e->stage >= STAGE_HELD && (e->stage != STAGE_APPLYING || !applied(p, q))) {
            if (e->stage == STAGE_HELD) head_held(p, q, e);
            break;
        }
        e = leave(e, &bytes);
    }
    if (UNLIKELY(e && e == issue && e->bytes_issued) && (in_order ? !peer_inflight(q) : !e->outstanding))
        cut_off(p, q, e);
    if (e == head) return;
    set_head(p, q, e, bytes);
    q->progress = p->tick;
}

void retire_head(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    if (LIKELY(p->in_order && !p->hold))
        retire_as(p, q, true, false, false);
    else if (p->sequenced)
        retire_as(p, q, false, false, true);
    else
        retire_as(p, q, p->in_order, p->hold, false);
}

/* Let a channel's counters follow its window. */
void window_advance(struct proxy *p, struct channel *c) {
    const uint64_t mask = c->window_mask, taken = c->taken;
    uint64_t complete = c->complete;
    const uint64_t before = complete;
    while (complete != taken) {
        /* Entry by entry to the window's end, then from its beginning. */
        const struct entry *e = &c->window[complete & mask], *const begin = e;
        const uint64_t to_end = mask + 1 - (complete & mask), left = taken - complete;
        const struct entry *const end = e + (left < to_end ? left : to_end);
        while (e != end && e->stage == STAGE_FREE) e++;
        complete += (uint64_t)(e - begin);
        if (e != end) break;
    }
    c->complete = complete;
    uint64_t source = (int64_t)(c->source - complete) > 0 ? c->source : complete;
    if (p->source_early) {
        while (source != taken) {
            const struct entry *e = &c->window[source & mask];
            if (e->stage != STAGE_FREE && !(e->flags & ENTRY_SOURCE_DONE)) break;
            source++;
        }
    }
    if (FAULT(source_at_take)) source = c->taken;
    if (source != c->source) {
        c->source = source;
        __atomic_store_n(&c->counters->source, source, __ATOMIC_RELEASE);
    }
    if (complete != before) {
        uint64_t published = complete;
        if (FAULT(window_of_16_bits)) published = (uint16_t)complete;
        __atomic_store_n(&c->counters->complete, published, __ATOMIC_RELEASE);
    }
}

/* --------------------------------------------------------------------------------------------------------- failures */

/* What a failed operation of the NIC looks like to a person. */
static void nic_error(struct proxy *p, uccl_ep_error *error, const struct entry *e, uint32_t target, int32_t status,
                      int32_t vendor_code) {
    char text[160] = "";
    fill_error(p, error, checked_status(status), "ERR-2", target);
    error->vendor_code = vendor_code;
    p->comm->backend->describe(p->comm->device, status, vendor_code, text, sizeof text);
    text[sizeof text - 1] = 0;
    if (e) {
        const struct channel *c = &p->channel[e->channel];
        error->channel = c->index;
        error->ticket = ticket_of(c, e);
        error->op = e->op;
    }
    snprintf(error->text, sizeof error->text, "%.100s failed towards rank %u: %s (%s, vendor code %d)", error->nic,
             target, text[0] ? text : "no text from the backend", uccl_ep_status_name(status), vendor_code);
}

/*
 * One entry failed and the NIC goes on (an error of the operation alone). Later entries of the same channel to this
 * target must not be seen as delivered by a signal (ERR-3): what is not submitted of them is not submitted any more.
 */
void entry_failed(struct proxy *p, uint32_t target, struct entry *failed, const uccl_ep_error *error) {
    struct channel *c = &p->channel[failed->channel];
    const uint32_t record = record_failure(p->comm, error);
    for (struct entry *e = failed; e; e = e->next) {
        if (e->channel != failed->channel || e->flags & ENTRY_FAILED) continue;
        e->flags |= ENTRY_FAILED;
        close_target(p, e->channel, target, ticket_of(c, e), record);
        if (FAULT(signal_after_failure) && e != failed) continue;
        e->stage = STAGE_SKIPPED;
    }
}

/*
 * The NIC, or the core, gives up on a peer: nothing more is submitted, every channel towards it closes, and what is
 * outstanding fails as soon as the NIC has let go of the sources.
 */
void peer_fail(struct proxy *p, uint32_t target, const uccl_ep_error *error) {
    struct peer *q = &p->peers[target];
    if (q->state != PEER_UP) return;
    __atomic_store_n(&q->state, PEER_FAILING, __ATOMIC_RELEASE);
    p->failing++;
    q->progress = p->tick;
    q->failure = (uint16_t)record_failure(p->comm, error);
    if (error->status == UCCL_EP_E_PEER_LOST) mark_lost(p->comm, target);
    for (uint32_t c = 0; c < p->channels; c++) close_target(p, c, target, UCCL_EP_NO_TICKET, q->failure);
    for (struct entry *e = q->head; e; e = e->next) {
        if (e->flags & ENTRY_FAILED) continue;
        e->flags |= ENTRY_FAILED;
        close_target(p, e->channel, target, ticket_of(&p->channel[e->channel], e), q->failure);
    }
    q->issue = NULL;
    q->uncovered = 0;
    if (FAULT(loss_closes_all))
        for (uint32_t other = 0; other < p->size; other++)
            if (other != target) peer_fail(p, other, error);
}

/* The endpoint itself cannot be used any more: close it, which stops all its DMA, and fail everybody. */
void endpoint_fail(struct proxy *p, uccl_ep_status status, const char *why) {
    if (p->endpoint_broken) return;
    p->endpoint_broken = true;
    for (uint32_t target = 0; target < p->size; target++) {
        uccl_ep_error error;
        fill_error(p, &error, status, "ERR-1", target);
        error.vendor_code = host_fail_code();
        snprintf(error.text, sizeof error.text, "the endpoint of proxy %u was closed: %s", p->index, why);
        peer_fail(p, target, &error);
    }
    p->comm->backend->endpoint_close(p->endpoint);
    p->endpoint = NULL;
}

void endpoint_poll_failed(struct proxy *p, int32_t status) {
    char why[160];
    if (status < 0)
        snprintf(why, sizeof why, "poll() gave %s (%d)%s%.80s", uccl_ep_status_name(status), status,
                 host_fail_text()[0] ? ": " : "", host_fail_text());
    else
        snprintf(why, sizeof why, "poll() gave %d completions where %u have room: report it to the backend's author",
                 status, BATCH_OPERATIONS);
    endpoint_fail(p, checked_status(status), why);
}

/* The NIC is disconnected from the peer: no completion will come for what is in flight. */
void peer_let_go(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    if (p->in_order)
        p->inflight -= peer_inflight(q);
    else
        flights_drop(p, target);
    q->seq_completed = q->seq_issued;
}

/* Ask the NIC to let go; once it has, retire all that is on the list. */
void peer_failing_step(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    if (p->staging && staging_busy(p, target)) return;
    if (!p->endpoint_broken) {
        host_fail_clear();
        const uccl_ep_status status = p->comm->backend->disconnect(p->endpoint, target);
        if (status == UCCL_EP_IN_PROGRESS && silence_ns(p, q) <= p->comm->config.peer_timeout_ns) return;
        if (status != UCCL_EP_OK) {
            char why[160];
            snprintf(why, sizeof why, "it did not let go of rank %u (%s %.80s)", target, uccl_ep_status_name(status),
                     host_fail_text());
            endpoint_fail(p, status == UCCL_EP_IN_PROGRESS ? UCCL_EP_E_NIC : checked_status(status), why);
        }
    }
    peer_let_go(p, target);
    uint64_t bytes = 0;
    struct entry *e = q->head;
    while (e) e = leave(e, &bytes);
    if (q->head) set_head(p, q, NULL, bytes);
    p->failing--;
    __atomic_store_n(&q->state, PEER_DOWN, __ATOMIC_RELEASE);
}

/*
 * Does a failure towards the peer concern more than the command at hand? Where the NIC says so, and where what is
 * missing holds up all that follows: of a number, a fence, or a record that its target now waits for in vain, or finds
 * after a reset (ERR-6).
 */
static bool concerns_peer(const struct proxy *p, const struct entry *e, int32_t status) {
    return p->error_stops || status == UCCL_EP_E_PEER_LOST || !e || e->stage == STAGE_APPLYING ||
           e->flags & ENTRY_RECORD_SENT;
}

/* A backend's refusal, as a record. */
static void refusal(struct proxy *p, uccl_ep_error *error, const struct entry *e, uint32_t target,
                    uccl_ep_status status) {
    nic_error(p, error, e, target, status, host_fail_code());
    if (host_fail_text()[0])
        snprintf(error->text, sizeof error->text, "%.60s refused an operation towards rank %u: %.150s", error->nic,
                 target, host_fail_text());
}

/* submit() refused the next operation to `target`. */
void issue_refused(struct proxy *p, uint32_t target, uccl_ep_status status) {
    struct peer *q = &p->peers[target];
    uccl_ep_error error;
    /* In a hold the signal due at the head goes first, otherwise what comes next. */
    struct entry *e = signal_due(p, q) ? q->head : q->issue;
    refusal(p, &error, e, target, status);
    if (concerns_peer(p, e, status))
        peer_fail(p, target, &error);
    else
        entry_failed(p, target, e, &error);
    retire_head(p, target);
}

/* The backend refused an operation of the core's own, without which nothing goes on with that peer. */
void control_refused(struct proxy *p, uint32_t target, uccl_ep_status status) {
    uccl_ep_error error;
    refusal(p, &error, NULL, target, status);
    peer_fail(p, target, &error);
}

/* ------------------------------------------------------------------------------------------------------ completions */

/* Reads and return words among what is complete by now. */
static void control_completed(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    if (q->reading && (int32_t)(q->seq_completed - q->seq_read) >= 0) {
        q->reading = false;
        q->seq_visible = q->seq_read;
        if (flush_due(q)) activate(p, q);
    }
    if (!p->links) return;
    const struct link *l = &p->links[target];
    if (l->returning && (int32_t)(q->seq_completed - l->control_seq) >= 0) mailbox_return_done(p, target);
}

static void completion_in_order(struct proxy *p, const uccl_ep_completion *completion) {
    if (UNLIKELY(completion->peer >= p->size)) {
        p->stats.stale++;
        return;
    }
    struct peer *q = &p->peers[completion->peer];
    uint32_t seq = (uint32_t)completion->cookie;
    if (UNLIKELY(q->state != PEER_UP || completion->cookie >> 32 != q->incarnation ||
                 (int32_t)(seq - q->seq_completed) <= 0 || (int32_t)(q->seq_issued - seq) < 0)) {
        p->stats.stale++;
        return;
    }
    const bool failed = completion->status != UCCL_EP_OK && !FAULT(error_swallowed);
    if (UNLIKELY(failed)) seq--; /* all before the failed one was executed */
    const uint32_t done = seq - q->seq_completed;
    q->seq_completed = seq;
    p->inflight -= done;
    if (p->controls) control_completed(p, completion->peer);
    retire_head(p, completion->peer);
    if (UNLIKELY(failed)) {
        uccl_ep_error error;
        nic_error(p, &error, q->head, completion->peer, completion->status, completion->vendor_code);
        peer_fail(p, completion->peer, &error);
    }
}

/* All that was to be submitted of it is, and is complete: the NIC reads its source no more. */
static void source_done(struct proxy *p, struct peer *q, struct entry *e) {
    if (e == q->issue || e->bytes_issued != e->bytes) return;
    e->flags |= ENTRY_SOURCE_DONE;
    p->moved = true;
}

static void completion_any_order(struct proxy *p, const uccl_ep_completion *completion) {
    enum flight_kind kind;
    const struct flight *f = flight_end(p, completion->cookie, &kind);
    if (UNLIKELY(!f)) {
        p->stats.stale++;
        return;
    }
    const uint32_t target = f->peer;
    struct peer *q = &p->peers[target];
    struct entry *e = kind == FLIGHT_COMMAND ? &p->entries[f->entry] : NULL;
    if (e) {
        q->seq_completed++;
        struct entry *carried = e;
        for (uint32_t k = FAULT(complete_at_submit) ? 0 : e->group; k; k--, carried = carried->next) {
            carried->outstanding--;
            if (p->sequenced && !carried->outstanding) source_done(p, q, carried);
        }
    }
    if (UNLIKELY(completion->status != UCCL_EP_OK) && !FAULT(error_swallowed) && q->state == PEER_UP) {
        uccl_ep_error error;
        nic_error(p, &error, e, target, completion->status, completion->vendor_code);
        if (concerns_peer(p, e, completion->status))
            peer_fail(p, target, &error);
        else
            entry_failed(p, target, e, &error);
    }
    if (q->state != PEER_UP) return;
    if (e)
        retire_head(p, target);
    else
        mailbox_return_done(p, target);
}

void retire_completion(struct proxy *p, const uccl_ep_completion *completion) {
    p->stats.completions++;
    if (completion->kind == UCCL_EP_COMPLETION_IMMEDIATE) {
        mailbox_immediate(p, completion->peer, completion->cookie);
        return;
    }
    if (p->in_order)
        completion_in_order(p, completion);
    else
        completion_any_order(p, completion);
}
