/* SPDX-License-Identifier: Apache-2.0
 *
 * issue.c: from a peer's order list to operations of the NIC.
 *
 * Two walks over the same entries. The first plans operations within the limits and changes nothing; the NIC says how many it took;
 * the second does the books for exactly those. A NIC without room thus costs nothing but the plan (B1: never advance an index
 * before the NIC has said yes).
 */
#include "internal.h"

/* What a planned operation stands for. */
typedef struct plan {
    uint32_t bytes;
    uint32_t group; /* entries whose puts it carries */
} plan;

void activate(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    if (q->active) return;
    q->active = 1;
    p->active[p->active_count++] = (uint16_t)target;
}

/*
 * Limits share what is left: a peer may hold as much as is still free for all others together. A stalled peer thus never takes the last of it
 * (PRG-2), and a peer alone still gets half. (Dynamic thresholds of shared-memory switches: Choudhury and Hahne, 1998.)
 */
static uint32_t operations_allowed(const struct proxy *p, const struct peer *q) {
    const uint32_t left = p->max_inflight - p->inflight;
    uint32_t room = left > q->inflight ? left - q->inflight : 0;
    if (!room && !q->inflight && left) room = 1;
    if (q->inflight + room > p->max_inflight_peer)
        room = p->max_inflight_peer > q->inflight ? p->max_inflight_peer - q->inflight : 0;
    return room < p->max_batch ? room : p->max_batch;
}

static bool bytes_allowed(const struct proxy *p, const struct peer *q, uint64_t planned, uint64_t more) {
    const uint64_t total = p->inflight_bytes + planned;
    const uint64_t mine = q->inflight_bytes + planned;
    /* A quarter may be held by operations without a completion (signal_every): whatever waits for less waits for ever. A put
     * larger than the limit goes then, too. */
    if (total <= p->max_inflight_bytes / 4) return true;
    if (total + more > p->max_inflight_bytes) return false;
    return !mine || mine + more <= p->max_inflight_bytes - total;
}

static bool has_put(const struct entry *e) { return e->op & 1; }
static bool has_signal(const struct entry *e) { return e->op & 2; }
_Static_assert((UCCL_EP_OP_PUT & 3) == 1 && (UCCL_EP_OP_SIGNAL & 3) == 2 && (UCCL_EP_OP_PUT_SIGNAL & 3) == 3 &&
                   (UCCL_EP_OP_FLUSH & 3) == 0,
               "the operation's bits tell what it has");

/* The bytes right behind `e`'s, on the same channel, both here and there. */
static bool adjacent(const struct entry *e, const struct entry *next, uint64_t bytes) {
    return next->channel == e->channel && next->stage == STAGE_QUEUED && has_put(next) && next->bytes &&
           (next->local == e->local + bytes || FAULT(merge_across_gap)) && next->remote == e->remote + bytes &&
           !next->bytes_issued;
}

static inline uint64_t cookie_of(const struct proxy *p, const struct peer *q, uint32_t id, uint32_t seq) {
    if (p->in_order) return (uint64_t)q->incarnation << 32 | seq;
    return (uint64_t)p->entries[id].ticket_low << 32 | id;
}

static inline void plan_add(uccl_ep_operation *o, const struct entry *e) {
    *o = (uccl_ep_operation){.kind = UCCL_EP_OPERATION_ADD64,
                             .remote_region = UCCL_EP_REGION_SIGNALS,
                             .length = 8,
                             .remote_offset = (uint64_t)e->slot * 8,
                             .value = e->add};
}

/* First walk. Fills operations and plans; returns how many. */
static uint32_t plan_batch(struct proxy *p, struct peer *q, uccl_ep_operation *operations, plan *plans, uint32_t room) {
    uint32_t n = 0;
    uint32_t seq = q->seq_issued;
    uint64_t planned = 0;

    if (p->hold && q->head != NONE && entry_at(p, q->head)->stage == STAGE_SIGNAL_DUE) {
        plan_add(&operations[0], entry_at(p, q->head));
        operations[0].cookie = cookie_of(p, q, q->head, ++seq);
        plans[0] = (plan){0, 1};
        n = 1;
    }
    for (uint32_t id = q->issue; id != NONE;) {
        struct entry *e = entry_at(p, id);
        uint32_t group = 1;
        if (e->stage == STAGE_QUEUED && has_put(e) && e->bytes) {
            if (n == room) break;
            if (!e->counted && !bytes_allowed(p, q, planned, e->bytes)) {
                p->stats.flow_stops++;
                break;
            }
            uint32_t done = e->bytes_issued;
            uint32_t length = e->bytes - done;
            if (length > p->max_message_bytes) length = (uint32_t)p->max_message_bytes;
            if (p->merge && !done && length == e->bytes) {
                for (uint32_t other = e->next; other != NONE && e->op == UCCL_EP_OP_PUT; group++) {
                    const struct entry *next = entry_at(p, other);
                    if (!adjacent(e, next, length) || (uint64_t)length + next->bytes > p->max_message_bytes ||
                        !bytes_allowed(p, q, planned, (uint64_t)length + next->bytes))
                        break;
                    length += next->bytes;
                    id = other;
                    other = next->op == UCCL_EP_OP_PUT ? next->next : NONE;
                }
            }
            struct entry *last = entry_at(p, id);
            for (;;) {
                uccl_ep_operation *o = &operations[n];
                o->kind = UCCL_EP_OPERATION_WRITE;
                o->flags = 0;
                o->local_region = o->remote_region = UCCL_EP_REGION_HEAP;
                o->length = length;
                o->local_offset = e->local + done;
                o->remote_offset = e->remote + done;
                o->value = 0;
                o->cookie = cookie_of(p, q, (uint32_t)(e - p->entries), ++seq);
                plans[n++] = (plan){length, group};
                done += length;
                if (group > 1 || done == e->bytes || n == room) break;
                length = e->bytes - done;
                if (length > p->max_message_bytes) length = (uint32_t)p->max_message_bytes;
            }
            if (group == 1 && done < e->bytes) break;
            planned += group > 1 ? length : e->bytes;
            if (FAULT(drop_split_tail) && e->bytes > p->max_message_bytes) operations[n - 1].length = 0;
            e = last;
        }
        if (has_signal(e) && (e->stage == STAGE_QUEUED || e->stage == STAGE_SIGNAL_DUE) &&
            (!p->hold || FAULT(signal_not_held))) {
            if (n == room) break;
            plan_add(&operations[n], e);
            operations[n].cookie = cookie_of(p, q, (uint32_t)(e - p->entries), ++seq);
            plans[n++] = (plan){0, 1};
        }
        id = e->next;
    }
    return n;
}

static inline void account(struct proxy *p, struct peer *q, struct entry *e) {
    q->seq_issued++;
    q->inflight++;
    p->inflight++;
    e->last_seq = q->seq_issued;
    e->outstanding++;
}

static inline void count_bytes(struct proxy *p, struct peer *q, struct entry *e) {
    if (e->counted) return;
    e->counted = 1;
    q->inflight_bytes += e->bytes;
    p->inflight_bytes += e->bytes;
}

/* Second walk: the first `accepted` planned operations were taken. */
static void commit_batch(struct proxy *p, struct peer *q, const plan *plans, uint32_t accepted) {
    uint32_t i = 0;
    if (p->hold && q->head != NONE && entry_at(p, q->head)->stage == STAGE_SIGNAL_DUE) {
        if (!accepted) return;
        struct entry *e = entry_at(p, q->head);
        account(p, q, e);
        e->stage = STAGE_ISSUED;
        i = 1;
    }
    while (q->issue != NONE) {
        struct entry *e = entry_at(p, q->issue);
        if (e->stage == STAGE_QUEUED) {
            e->last_seq = q->seq_issued; /* of a command without an operation: done when all before it is */
            if (has_put(e) && e->bytes) {
                if (i == accepted) break;
                if (plans[i].group > 1) {
                    const uint32_t group = plans[i].group;
                    e->group = (uint16_t)group;
                    account(p, q, e);
                    p->stats.merged += group - 1;
                    for (uint32_t k = 1;; k++) {
                        count_bytes(p, q, e);
                        e->bytes_issued = e->bytes;
                        if (k == group) break;
                        e->stage = STAGE_ISSUED;
                        q->issue = e->next;
                        e = entry_at(p, e->next);
                        e->last_seq = q->seq_issued;
                        e->outstanding++;
                    }
                    i++;
                } else {
                    count_bytes(p, q, e);
                    while (e->bytes_issued < e->bytes && i < accepted) {
                        e->bytes_issued += plans[i++].bytes;
                        account(p, q, e);
                    }
                    if (e->bytes_issued < e->bytes) break;
                }
            }
            e->stage = !has_signal(e)                            ? STAGE_ISSUED
                       : p->hold && !FAULT(signal_not_held) ? STAGE_HELD
                                                                 : STAGE_SIGNAL_DUE;
            if (e->stage == STAGE_HELD) p->stats.holds++;
        }
        if (e->stage == STAGE_SIGNAL_DUE) {
            if (i == accepted) break;
            account(p, q, e);
            i++;
            e->stage = STAGE_ISSUED;
        }
        q->issue = e->next;
    }
    UCCL_EP_ASSERT(i == accepted);
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

void issue_peer(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    uccl_ep_operation operations[BATCH_OPERATIONS];
    plan plans[BATCH_OPERATIONS];
    const uint32_t room = operations_allowed(p, q);
    const uint32_t n = room ? plan_batch(p, q, operations, plans, room) : 0;
    q->limited = !n;
    if (!room) p->stats.flow_stops++;
    uint32_t accepted = 0;
    uccl_ep_status status = UCCL_EP_OK;
    if (n) {
        if (p->unsignalled) {
            /* One completion covers a run; never so few that a full queue holds none. */
            for (uint32_t i = 0; i < n; i++)
                if (!((q->seq_issued + 1 + i) % p->signal_every) || operations[i].length >= p->signalled_bytes)
                    operations[i].flags = UCCL_EP_OPERATION_SIGNALLED;
            operations[n - 1].flags = UCCL_EP_OPERATION_SIGNALLED;
        } else {
            for (uint32_t i = 0; i < n; i++) operations[i].flags = UCCL_EP_OPERATION_SIGNALLED;
        }
        damage(operations, n);
        host_fail_clear();
        status = p->comm->backend->submit(p->endpoint, target, operations, n, 0, &accepted);
        p->stats.submits++;
        if (UNLIKELY(accepted > n)) {
            accepted = 0;
            status = UCCL_EP_E_BACKEND;
        }
        if (accepted < n && status == UCCL_EP_OK) p->stats.backpressure++;
        p->stats.operations += accepted;
    }
    commit_batch(p, q, plans, accepted);
    if (p->inflight > p->stats.inflight_peak) p->stats.inflight_peak = p->inflight;
    if (p->inflight_bytes > p->stats.inflight_bytes_peak) p->stats.inflight_bytes_peak = p->inflight_bytes;
    if (FAULT(complete_at_submit) && p->in_order && accepted) {
        const uccl_ep_completion early = {.cookie = cookie_of(p, q, 0, q->seq_issued), .peer = target};
        retire_completion(p, &early);
        return;
    }
    if (UNLIKELY(status != UCCL_EP_OK && status != UCCL_EP_E_AGAIN)) {
        issue_refused(p, target, status);
        return;
    }
    retire_head(p, target); /* commands that need no operation */
}
