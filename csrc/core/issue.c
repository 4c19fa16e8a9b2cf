/* SPDX-License-Identifier: Apache-2.0
 *
 * issue.c: from a peer's order list to operations of the NIC.
 *
 * A walk from `issue` plans a batch within the limits and moves `issue` behind it. A NIC that takes less than all of it
 * has the walk taken back and done again for exactly what it took, so what it refused was never issued (B1: never
 * advance an index before the NIC has said yes).
 */
#include "internal.h"

void activate(struct proxy *p, struct peer *q) {
    if (q->active) return;
    q->active = 1;
    p->active[p->active_count++] = (uint16_t)(q - p->peers);
}

/*
 * Limits share what is left: a peer may hold as much as is still free for all others together. A stalled peer thus
 * never takes the last of it (PRG-2), and a peer alone still gets half. (Dynamic thresholds of shared-memory switches:
 * Choudhury and Hahne, 1998.)
 */
static uint32_t operations_allowed(const struct proxy *p, const struct peer *q) {
    const uint32_t left = p->max_inflight - p->inflight;
    const uint32_t mine = peer_inflight(q);
    uint32_t room = left > mine ? left - mine : 0;
    if (!room && !mine && left) room = 1;
    if (mine + room > p->max_inflight_peer) room = p->max_inflight_peer > mine ? p->max_inflight_peer - mine : 0;
    /* A batch ends where sequences wrap: within one, the next cookie is the last one + 1. */
    const uint32_t to_wrap = 0u - (q->seq_issued + 1);
    if (to_wrap && room > to_wrap) room = to_wrap;
    return room < p->max_batch ? room : p->max_batch;
}

static uint64_t bytes_allowed(const struct proxy *p, const struct peer *q) {
    const uint64_t used = p->inflight_bytes + q->inflight_bytes;
    return used < p->max_inflight_bytes ? (p->max_inflight_bytes - used) / 2 : 0;
}

/* More than its share of bytes, after `planned`? A put larger than all limits goes in one of these ways, too. */
static bool bytes_allowed_beyond(const struct proxy *p, const struct peer *q, uint64_t planned, uint32_t length) {
    const uint64_t total = p->inflight_bytes + planned;
    if (total <= p->max_inflight_bytes / 4) return true;
    /* What it has in flight comes back only once it submits more. */
    if (q->uncovered && !planned) return true;
    return !q->inflight_bytes && !planned && total + length <= p->max_inflight_bytes;
}

/* A batch in the making. */
typedef struct batch {
    uint32_t room, n; /* operations: at most, and planned */
    uint32_t holds, merged, flow_stops;
    uint64_t bytes; /* of the puts planned */
    uccl_ep_operation operations[BATCH_OPERATIONS];
} batch;

static inline void write_put(uccl_ep_operation *o, const struct entry *e, uint32_t begin, uint32_t length) {
    o->kind = UCCL_EP_OPERATION_WRITE;
    o->flags = 0;
    o->local_region = UCCL_EP_REGION_HEAP;
    o->remote_region = UCCL_EP_REGION_HEAP;
    o->length = length;
    o->local_offset = e->local + begin;
    o->remote_offset = e->remote + begin;
    o->value = 0;
}

static inline void write_signal(uccl_ep_operation *o, const struct entry *e) {
    o->kind = UCCL_EP_OPERATION_ADD64;
    o->flags = 0;
    o->local_region = 0;
    o->remote_region = UCCL_EP_REGION_SIGNALS;
    o->length = 8;
    o->local_offset = 0;
    o->remote_offset = (uint64_t)e->slot * 8;
    o->value = e->add;
}

/* Completions of an in-order NIC are told by sequence; of another by entry and ticket, which this gives. */
__attribute__((noinline)) static uint64_t count_outstanding(const struct proxy *p, struct entry *e) {
    e->outstanding++;
    e->group = 1;
    return ticket_of(&p->channel[e->channel], e) << 32 | (uint32_t)(e - p->entries);
}

/*
 * `o` carries the whole put of `first`. Let it carry what follows as long as channel, source and target go on where the
 * last one ended. Returns the last entry carried; no other of them has a signal.
 */
static struct entry *merge(const struct proxy *p, batch *b, uccl_ep_operation *o, struct entry *first,
                           uint64_t bytes_room) {
    struct entry *last = first;
    while (last->flags & ENTRY_FOLLOWED) {
        struct entry *next = last->next;
        if (next->channel != first->channel || next->stage != STAGE_TAKEN || !next->bytes || next->bytes > bytes_room ||
            (uint64_t)o->length + next->bytes > p->max_message_bytes)
            break;
        if (next->local != last->local + last->bytes && !FAULT(merge_across_gap)) break;
        bytes_room -= next->bytes;
        o->length += next->bytes;
        next->bytes_issued = next->bytes;
        if (p->in_order) {
            last->last_seq = (uint32_t)o->cookie;
        } else {
            next->outstanding++;
            first->group++;
        }
        b->merged++;
        last = next;
    }
    return last;
}

/*
 * Fill a batch of up to b->room operations, and move `issue` behind what it carries. The strategy and the kind of NIC
 * are constants here, so that each has a loop without the questions of the others.
 */
static inline __attribute__((always_inline)) void plan_as(struct proxy *p, struct peer *q, batch *b, bool in_order,
                                                          bool hold) {
    /* Copies: for all that the compiler knows, the stores below could change what p and q point to. */
    const uint32_t max_message = p->max_message_bytes;
    static const struct entry_state fresh = {.stage = STAGE_TAKEN};
    uccl_ep_operation *o = b->operations, *const end = o + b->room;
    /* Of the last operation, on in-order NICs: one before the first, whose sequence may be 0. */
    uint64_t cookie = ((uint64_t)q->incarnation << 32 | (uint32_t)(q->seq_issued + 1)) - 1;
    uint64_t granted = bytes_allowed(p, q), bytes_room = granted;
    b->holds = b->merged = b->flow_stops = 0;

    if (hold && signal_due(p, q) && o != end) {
        write_signal(o, q->head);
        o++->cookie = in_order ? ++cookie : count_outstanding(p, q->head);
        q->head->last_seq = (uint32_t)cookie;
        q->head->stage = STAGE_TAKEN;
    }
    struct entry *e = q->issue;
    while (e) {
        if (LIKELY(!memcmp(&e->state, &fresh, sizeof fresh))) {
            /* A put of one operation, as nearly all are; or none. */
            const uint64_t bytes = e->bytes;
            if (bytes) {
                if (o == end) goto full;
                if (UNLIKELY(bytes > max_message || bytes > bytes_room)) goto pieces;
                bytes_room -= bytes;
                write_put(o, e, 0, (uint32_t)bytes);
                o++->cookie = in_order ? ++cookie : count_outstanding(p, e);
                e->bytes_issued = (uint32_t)bytes;
            }
        } else {
            if (e->stage != STAGE_TAKEN) goto next; /* skipped */
        pieces:
            while (e->bytes_issued != e->bytes) {
                const uint32_t begin = e->bytes_issued, left = e->bytes - begin;
                const uint32_t length = left < max_message ? left : max_message;
                if (o == end) goto full;
                if (length > bytes_room) {
                    if (!bytes_allowed_beyond(p, q, granted - bytes_room, length)) {
                        b->flow_stops++;
                        goto full;
                    }
                    granted += length - bytes_room;
                    bytes_room = length;
                }
                bytes_room -= length;
                write_put(o, e, begin, length);
                o->cookie = in_order ? ++cookie : count_outstanding(p, e);
                if (FAULT(drop_split_tail) && begin && length == left) o->length = 0;
                e->bytes_issued = begin + length;
                if (e->flags & ENTRY_FOLLOWED && p->merge && !begin && length == left) {
                    e = merge(p, b, o, e, bytes_room);
                    bytes_room -= o->length - length;
                }
                o++;
            }
        }
        if (has_signal(e)) {
            if (hold && !FAULT(signal_not_held)) {
                e->stage = STAGE_HELD;
                b->holds++;
            } else {
                if (o == end) goto full;
                write_signal(o, e);
                o++->cookie = in_order ? ++cookie : count_outstanding(p, e);
            }
        }
    next:
        e->last_seq = (uint32_t)cookie;
        e = e->next;
    }
full:
    q->issue = e;
    b->n = (uint32_t)(o - b->operations);
    b->bytes = granted - bytes_room;
}

static void plan(struct proxy *p, struct peer *q, batch *b) {
    if (LIKELY(p->in_order && !p->hold))
        plan_as(p, q, b, true, false);
    else if (p->in_order)
        plan_as(p, q, b, true, true);
    else
        plan_as(p, q, b, false, p->hold);
}

/* Undo a plan: `begin` was at `issue`, with so much of it issued and so many outstanding; what lies behind it was
 * untouched. */
static void take_back(struct peer *q, struct entry *begin, uint32_t bytes_issued, uint16_t outstanding, bool due) {
    for (struct entry *e = begin; e; e = e == q->issue ? NULL : e->next) {
        e->bytes_issued = 0;
        e->outstanding = 0;
        if (e->stage == STAGE_HELD) e->stage = STAGE_TAKEN;
    }
    if (begin) begin->bytes_issued = bytes_issued, begin->outstanding = outstanding;
    if (due) q->head->stage = STAGE_SIGNAL_DUE, q->head->outstanding = 0;
    q->issue = begin;
}

/* Broken on purpose; see fault_point.h. */
static void damage(uccl_ep_operation *operations, uint32_t n) {
    for (uint32_t i = 0; i + 1 < n; i++) {
        uccl_ep_operation *a = &operations[i], *b = &operations[i + 1];
        const bool put_signal = a->kind == UCCL_EP_OPERATION_WRITE && b->kind == UCCL_EP_OPERATION_ADD64;
        const bool two_signals = a->kind == UCCL_EP_OPERATION_ADD64 && b->kind == UCCL_EP_OPERATION_ADD64;
        if ((FAULT(signal_before_put) && put_signal) || (FAULT(signals_reordered) && two_signals)) {
            const uccl_ep_operation swap = *a;
            *a = *b;
            *b = swap;
            const uint64_t cookie = a->cookie;
            const uint8_t flags = a->flags;
            a->cookie = b->cookie, b->cookie = cookie;
            a->flags = b->flags, b->flags = flags;
            i++;
        }
        if (FAULT(signal_lost_in_batch) && two_signals && a->remote_offset == b->remote_offset) b->value = 0;
    }
}

/*
 * Say which operations give a completion: the last one, and some before it, for a NIC that takes only a part. If the
 * last one taken has none, nothing tells of what came before it until more is submitted; so the first of the next batch
 * has one.
 */
static void mark_signalled(const struct proxy *p, const struct peer *q, batch *b) {
    const uint32_t every = p->unsignalled ? p->signal_every : 1;
    for (uint32_t i = every - 1; i < b->n; i += every) b->operations[i].flags = UCCL_EP_OPERATION_SIGNALLED;
    b->operations[b->n - 1].flags = UCCL_EP_OPERATION_SIGNALLED;
    if (q->uncovered) b->operations[0].flags = UCCL_EP_OPERATION_SIGNALLED;
}

void issue_peer(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    struct entry *const begin = q->issue;
    const uint32_t bytes_issued = begin ? begin->bytes_issued : 0;
    const uint16_t outstanding = begin ? begin->outstanding : 0;
    const bool due = signal_due(p, q);
    batch b;
    b.room = operations_allowed(p, q);
    uint32_t accepted = 0;
    uccl_ep_status status = UCCL_EP_OK;
    plan(p, q, &b);
    q->limited = !b.n;
    if (!b.room) p->stats.flow_stops++;
    if (b.n) {
        mark_signalled(p, q, &b);
        damage(b.operations, b.n);
        host_fail_clear();
        status = p->comm->backend->submit(p->endpoint, target, b.operations, b.n, 0, &accepted);
        p->stats.submits++;
        if (UNLIKELY(accepted > b.n)) {
            accepted = 0;
            status = UCCL_EP_E_BACKEND;
        }
        if (accepted) q->uncovered = !b.operations[accepted - 1].flags;
        if (UNLIKELY(accepted < b.n)) {
            if (status == UCCL_EP_OK) p->stats.backpressure++;
            take_back(q, begin, bytes_issued, outstanding, due);
            b.room = accepted;
            plan(p, q, &b);
            UCCL_EP_ASSERT(b.n == accepted);
        }
    }
    q->seq_issued += b.n;
    q->inflight_bytes += b.bytes;
    p->inflight += b.n;
    p->inflight_bytes += b.bytes;
    p->stats.operations += b.n;
    p->stats.merged += b.merged;
    p->stats.holds += b.holds;
    p->stats.flow_stops += b.flow_stops;
    if (p->inflight > p->stats.inflight_peak) p->stats.inflight_peak = p->inflight;
    if (p->inflight_bytes > p->stats.inflight_bytes_peak) p->stats.inflight_bytes_peak = p->inflight_bytes;
    if (FAULT(complete_at_submit) && p->in_order && accepted) {
        const uccl_ep_completion early = {.cookie = (uint64_t)q->incarnation << 32 | q->seq_issued, .peer = target};
        retire_completion(p, &early);
        return;
    }
    if (UNLIKELY(status != UCCL_EP_OK && status != UCCL_EP_E_AGAIN)) {
        issue_refused(p, target, status);
        return;
    }
    retire_head(p, target); /* commands that need no operation */
}
