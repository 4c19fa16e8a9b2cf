/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations wait for their turn and completions for theirs: a NIC that is slow, short of room and, with disorder,
 * without any order, and still keeps its promises. What a fault changes is asked of fault.c.
 */
#include <stdlib.h>
#include <string.h>

#include "mutant.h"

#define POLL_BATCH 64u

/* xorshift64: any seed but zero. */
static uint64_t next_random(uccl_ep_endpoint *e) {
    e->random ^= e->random << 13;
    e->random ^= e->random >> 7;
    return e->random ^= e->random << 17;
}

static bool chance(uccl_ep_endpoint *e, uint32_t of, uint32_t in) {
    return of && next_random(e) % in < of;
}

/* One in four operations is followed by a pause. */
static uint64_t pause_until(uccl_ep_endpoint *e, uint64_t now) {
    const uint64_t longest = e->device->knobs.lazy_ns;
    return longest && chance(e, 1, 4) ? now + next_random(e) % longest : now;
}

uccl_ep_status queue_open(uccl_ep_endpoint *e, uint32_t peer) {
    struct queue *q = &e->queues[peer];
    if (!q->ring) q->ring = calloc(e->device->knobs.room, sizeof *q->ring);
    if (!q->ring)
        return e->device->host->fail(e->device->host->context, UCCL_EP_E_NO_MEMORY, 0, "no memory for a queue");
    q->stopped = false;
    q->resume_ns = q->give_ns = 0;
    return UCCL_EP_OK;
}

void queues_close(uccl_ep_endpoint *e) {
    for (uint32_t peer = 0; peer < e->peers; peer++) free(e->queues[peer].ring);
}

uccl_ep_status mutant_submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted) {
    const struct knobs *knobs = &e->device->knobs;
    (void)flags;
    *accepted = 0;
    if (peer >= e->peers || !e->queues[peer].ring)
        return e->device->host->fail(e->device->host->context, UCCL_EP_E_INVALID, 0, "no connection to this peer");
    struct queue *q = &e->queues[peer];
    if (chance(e, knobs->again, 100)) return UCCL_EP_OK;
    const uint64_t room = knobs->room - (q->taken - q->first);
    if (n > room) n = (uint32_t)room;
    if (n > 1 && chance(e, knobs->partial, 100)) n = 1 + (uint32_t)(next_random(e) % (n - 1));
    const uint64_t now = now_of(e);
    for (uint32_t i = 0; i < n; i++) {
        struct pending *p = pending_at(e, peer, q->taken);
        *p = (struct pending){.operation = operations[i], .number = q->taken, .taken_ns = now};
        fault_taken(e, peer, p);
        q->taken++;
    }
    *accepted = n;
    fault_submitted(e, peer);
    return UCCL_EP_OK;
}

/* -------------------------------------------------------------------------------------------------------- executing */

bool hand(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, const uccl_ep_operation *operation) {
    const uccl_ep_backend *real = e->device->real;
    uccl_ep_operation o = *operation;
    uint32_t accepted = 0;
    o.flags = (uint8_t)(o.flags | UCCL_EP_OPERATION_SIGNALLED); /* our own cover is counted out in give() */
    o.cookie = at;
    const uccl_ep_status status = real->submit(e->inner, peer, &o, 1, 0, &accepted);
    if (accepted == 1) {
        if (at != NOBODY) {
            struct pending *p = pending_at(e, peer, at);
            p->stage = HANDED;
            p->parts++;
        }
        return true;
    }
    if (status == UCCL_EP_OK || status == UCCL_EP_E_AGAIN) return false;
    if (at != NOBODY) end(e, peer, at, status, 0);
    return true;
}

void end(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, int32_t status, int32_t vendor_code) {
    struct queue *q = &e->queues[peer];
    struct pending *p = pending_at(e, peer, at);
    const enum fault fault = e->device->knobs.fault;
    if (status == UCCL_EP_OK && p->doomed) status = UCCL_EP_E_NIC, vendor_code = FAILED_ON_PURPOSE;
    if (fault == FAULT_failure_hidden && status == UCCL_EP_E_NIC) status = UCCL_EP_OK;
    if (fault == FAULT_loss_hidden && status == UCCL_EP_E_PEER_LOST) status = UCCL_EP_OK;
    p->stage = ENDED;
    p->status = status;
    p->vendor_code = vendor_code;
    if (status == UCCL_EP_OK || e->device->knobs.disorder) return;
    if (fault == FAULT_failure_passed) {
        for (uint64_t behind = at + 1; behind != q->taken; behind++)
            if (pending_at(e, peer, behind)->stage == WAITING)
                hand(e, peer, behind, &pending_at(e, peer, behind)->operation);
    }
    q->stopped = true;
}

/* False: no room in the real backend. */
static bool execute(uccl_ep_endpoint *e, uint32_t peer, uint64_t at) {
    struct queue *q = &e->queues[peer];
    struct pending *p = pending_at(e, peer, at);
    if (p->operation.kind == UCCL_EP_OPERATION_WRITE && chance(e, e->device->knobs.fail, 1000)) {
        /* A lost acknowledgement looks like a lost operation (ERR-2): some of those that fail have taken effect. */
        if (chance(e, 3, 4)) {
            end(e, peer, at, UCCL_EP_E_NIC, FAILED_ON_PURPOSE);
            return true;
        }
        p->doomed = true;
    }
    if (!hand(e, peer, at, &p->operation)) {
        p->doomed = false;
        return false;
    }
    const enum fault fault = e->device->knobs.fault;
    const bool passes = e->device->knobs.disorder || fault == FAULT_failure_hidden || fault == FAULT_failure_passed;
    if (p->doomed && !passes) q->stopped = true;
    return true;
}

/* Whose turn it is, or NOBODY. */
static uint64_t next_waiting(uccl_ep_endpoint *e, uint32_t peer) {
    struct queue *q = &e->queues[peer];
    if (e->device->knobs.disorder) {
        const uint64_t n = q->taken - q->first;
        const uint64_t start = n ? next_random(e) % n : 0;
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t at = q->first + (start + i) % n;
            if (pending_at(e, peer, at)->stage == WAITING) return at;
        }
        return NOBODY;
    }
    if (q->handed < q->first) q->handed = q->first; /* what is below may be another position's by now */
    while (q->handed != q->taken && pending_at(e, peer, q->handed)->stage != WAITING) q->handed++;
    return q->handed == q->taken ? NOBODY : q->handed;
}

static void execute_some(uccl_ep_endpoint *e, uint32_t peer, uint64_t now) {
    struct queue *q = &e->queues[peer];
    if (q->debt.due_ns) fault_debt(e, peer, now);
    const uint32_t most = e->device->knobs.step ? 1 : POLL_BATCH;
    for (uint32_t i = 0; i < most && !q->stopped && now >= q->resume_ns; i++) {
        const uint64_t at = next_waiting(e, peer);
        if (at == NOBODY) return;
        const enum turn turn = fault_turn(e, peer, at, now);
        if (turn == NOT_YET || (turn == HONEST && !execute(e, peer, at))) return;
        q->resume_ns = pause_until(e, now);
    }
}

/* ------------------------------------------------------------------------------------------------------- completing */

static bool give_one(uccl_ep_endpoint *e, uint32_t peer, struct pending *p, uccl_ep_completion *out) {
    p->given = true;
    fault_ended(e, peer, p);
    if (p->status == UCCL_EP_OK && !(p->operation.flags & UCCL_EP_OPERATION_SIGNALLED)) return false;
    if (!fault_give(e, peer)) return false;
    *out = (uccl_ep_completion){
        .cookie = p->operation.cookie, .status = p->status, .peer = peer, .vendor_code = p->vendor_code};
    return true;
}

static uint32_t give_some(uccl_ep_endpoint *e, uint32_t peer, uint64_t now, uccl_ep_completion *out, uint32_t max) {
    struct queue *q = &e->queues[peer];
    uint32_t n = 0;
    if (e->device->knobs.disorder) {
        for (uint64_t at = q->first; at != q->taken && n < max; at++) {
            struct pending *p = pending_at(e, peer, at);
            if (p->given || (p->stage != ENDED && !fault_early(e, p)) || chance(e, 1, 2)) continue;
            n += give_one(e, peer, p, &out[n]);
        }
    }
    while (!e->device->knobs.disorder && q->give != q->taken && n < max && now >= q->give_ns) {
        struct pending *p = pending_at(e, peer, q->give);
        if (p->stage != ENDED && !fault_early(e, p)) break;
        n += give_one(e, peer, p, &out[n]);
        q->give++;
        q->give_ns =
            p->status == UCCL_EP_OK ? pause_until(e, now) : UINT64_MAX; /* what is behind a failure is not told */
    }
    while (q->first != q->taken) {
        const struct pending *p = pending_at(e, peer, q->first);
        if (p->stage != ENDED || !p->given) break;
        q->first++;
    }
    return n;
}

int32_t mutant_poll(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max) {
    const uccl_ep_backend *real = e->device->real;
    uccl_ep_completion got[POLL_BATCH];
    uint32_t n = 0;
    const int32_t ended = real->poll(e->inner, got, max < POLL_BATCH ? max : POLL_BATCH);
    if (ended < 0) return ended;
    for (int32_t i = 0; i < ended; i++) {
        if (got[i].kind != UCCL_EP_COMPLETION_OPERATION) {
            completions[n++] = got[i];
            continue;
        }
        const struct queue *q = &e->queues[got[i].peer];
        const uint64_t at = got[i].cookie;
        if (at - q->first >= q->taken - q->first) continue; /* NOBODY's, or of an earlier connection */
        struct pending *p = pending_at(e, got[i].peer, at);
        if (got[i].status != UCCL_EP_OK) p->status = got[i].status, p->vendor_code = got[i].vendor_code;
        if (p->parts && !--p->parts) end(e, got[i].peer, at, p->status, p->vendor_code);
    }
    const uint64_t now = now_of(e);
    for (uint32_t k = 0; k < e->peers; k++) {
        const uint32_t peer = (uint32_t)((k + now / 1024) % e->peers); /* nobody is always first */
        if (!e->queues[peer].ring) continue;
        execute_some(e, peer, now);
        if (e->queues[peer].first != e->queues[peer].taken) n += give_some(e, peer, now, completions + n, max - n);
    }
    return (int32_t)n;
}

uccl_ep_status mutant_disconnect(uccl_ep_endpoint *e, uint32_t peer) {
    const uccl_ep_status status = e->device->real->disconnect(e->inner, peer);
    if (status != UCCL_EP_OK || peer >= e->peers || !e->queues[peer].ring) return status;
    struct queue *q = &e->queues[peer];
    const bool keep = e->device->knobs.fault == FAULT_old_operations;
    q->debt.due_ns = 0;
    q->stopped = true; /* until it is connected again */
    for (uint64_t at = q->first; at != q->taken; at++) {
        struct pending *p = pending_at(e, peer, at);
        p->given = true;
        p->parts = 0;
        if (!keep || p->stage != WAITING) p->stage = ENDED;
    }
    q->give = q->taken;
    if (!keep) q->first = q->handed = q->taken;
    return UCCL_EP_OK;
}
