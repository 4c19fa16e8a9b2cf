/* SPDX-License-Identifier: Apache-2.0
 *
 * post.c: work requests on their way into a queue: what is refused, what fits, and the doorbell.
 */
#include <stdio.h>

#include "internal.h"

/* ------------------------------------------------------------------------------------------------------------- post */

static vnic_refusal refuse(char *text, vnic_refusal refusal, const char *why) {
    snprintf(text, 256, "%s", why);
    return refusal;
}

/* What this NIC does not do at all, or not in this size. */
static vnic_refusal check_kind(const vnic_knobs *k, const vnic_work *w, uint64_t length, char *text) {
    if (w->kind < VNIC_WRITE || w->kind > VNIC_SWAP) return refuse(text, VNIC_UNSUPPORTED, "no such operation");
    const bool atomic = w->kind == VNIC_ADD || w->kind == VNIC_SWAP;
    if (atomic && !k->atomics) return refuse(text, VNIC_UNSUPPORTED, "the NIC has no atomics");
    if (w->kind == VNIC_WRITE_IMM && !k->imm_bits) return refuse(text, VNIC_UNSUPPORTED, "the NIC has no immediates");
    if (w->kind == VNIC_READ && !k->has_read) return refuse(text, VNIC_UNSUPPORTED, "the NIC has no reads");
    if (!(w->flags & VNIC_SIGNALLED) && !k->unsignalled_ok)
        return refuse(text, VNIC_UNSUPPORTED, "every request of this NIC must be signalled");
    if (w->flags & VNIC_FENCE && k->fence_kind == VNIC_FENCE_NONE)
        return refuse(text, VNIC_UNSUPPORTED, "the NIC has no fence");
    if (w->flags & VNIC_VISIBLE && !k->visible_on_request && k->completion_level != VNIC_LEVEL_DELIVERY)
        return refuse(text, VNIC_UNSUPPORTED, "the NIC cannot be asked for a completion that means visible");
    if (w->sges > VNIC_MAX_SGES || w->sges > k->max_sge || (w->kind == VNIC_READ && w->sges != 1) ||
        (atomic && (w->sges > 1 || (w->sges && w->sge[0].length != 8))))
        return refuse(text, VNIC_UNSUPPORTED, "more pieces of local memory than a request gathers");
    if (length > k->max_msg) {
        snprintf(text, 256, "%llu bytes, and the NIC's longest message has %llu", (unsigned long long)length,
                 (unsigned long long)k->max_msg);
        return VNIC_TOO_LONG;
    }
    if (w->flags & VNIC_INLINE && (length > k->max_inline || !(w->kind == VNIC_WRITE || w->kind == VNIC_WRITE_IMM))) {
        snprintf(text, 256, "%llu bytes inline, and the NIC takes %llu, of writes", (unsigned long long)length,
                 (unsigned long long)k->max_inline);
        return VNIC_TOO_LONG;
    }
    return VNIC_TAKEN;
}

static void append(struct conn *conn, struct op *op) {
    op->previous = conn->tail;
    if (conn->tail)
        conn->tail->next = op;
    else
        conn->head = op;
    conn->tail = op;
    if (!conn->launch) conn->launch = op;
    op->refs = 1;
}

static void take(struct conn *conn, const vnic_work *w, uint64_t length, bool poisoned) {
    struct vnic_endpoint *e = conn->endpoint;
    struct vnic_fabric *f = e->fabric;
    const vnic_knobs *k = &e->nic->knobs;
    struct op *op = must(pool_take(&f->ops));
    op->conn = conn;
    op->endpoint = e;
    op->peer = conn->peer;
    op->kind = w->kind;
    op->flags = w->flags;
    op->sges = w->sges;
    memcpy(op->sge, w->sge, w->sges * sizeof *w->sge);
    op->length = (uint32_t)length;
    op->remote_address = w->remote_address;
    op->remote_key = w->remote_key;
    op->value = w->value;
    op->compare = w->compare;
    op->cookie = w->cookie;
    op->seq = ++conn->seq;
    op->rnr_left = e->terms.rnr_retries;
    if (op->kind == VNIC_WRITE_IMM) op->turn = conn->turns++;
    op->doom = w->fails;
    append(conn, op);
    conn->outstanding++;
    e->outstanding++;
    e->inflight_bytes += length;
    if (e->inflight_bytes > f->stats.inflight_bytes_peak) f->stats.inflight_bytes_peak = e->inflight_bytes;
    if (poisoned) op->doom = VNIC_LOCAL_OPERATION;
    /* Too much in flight: packets are dropped until the retries run out (thor2, pollara). */
    if (k->retry_exc_inflight_bytes && e->inflight_bytes > k->retry_exc_inflight_bytes) op->doom = VNIC_RETRY_EXCEEDED;
    uint64_t parameter = 0;
    if (f->fault_mask) {
        if (fault(f, VNIC_FAULT_DROP, e->rank, conn->peer, &parameter)) {
            op->vendor_code = (int32_t)parameter;
            op->doom = (uint8_t)(parameter ? vnic_status_of((vnic_vendor)k->vendor, (int32_t)parameter)
                                           : VNIC_REMOTE_OPERATION);
        }
        if (fault(f, VNIC_FAULT_QUEUE_ERROR, e->rank, conn->peer, NULL)) op->doom = VNIC_LOCAL_OPERATION;
        if (fault(f, VNIC_FAULT_DELAY, e->rank, conn->peer, &parameter)) op->delay += parameter;
        if (fault(f, VNIC_FAULT_SLOW_PEER, e->rank, conn->peer, &parameter)) op->delay += parameter;
    }
    if (w->flags & VNIC_INLINE) op_read_ahead(op);
    f->stats.operations++;
    note(f, NOTE_POST, e->rank, conn->peer, op->seq, op->kind, op->cookie);
    if (conn->state == CONN_ERROR) {
        op->failed = true;
        op->status = VNIC_FLUSHED;
        if (conn->launch == op) conn->launch = NULL;
        op_check_ready(op);
    }
}

static void list_unrung(struct conn *conn) {
    if (conn->unrung_listed) return;
    conn->unrung_listed = true;
    conn->next_unrung = conn->endpoint->unrung;
    conn->endpoint->unrung = conn;
}

static void ring(struct conn *conn) {
    struct vnic_endpoint *e = conn->endpoint;
    struct vnic_fabric *f = e->fabric;
    if (conn->rung == conn->seq) return;
    if (vnic_chance(f, VNIC_CHOICE_NIC, e->rank, (uint32_t)e->nic->knobs.drop_rate) ||
        fault(f, VNIC_FAULT_LOST_DOORBELL, e->rank, conn->peer, NULL)) {
        note(f, NOTE_DOORBELL_LOST, e->rank, conn->peer, conn->seq, 0, 0);
        list_unrung(conn);
        return;
    }
    conn->rung = conn->seq;
    kick(conn);
}

bool vnic_ring(struct vnic_endpoint *e) {
    struct conn *conn = e->unrung;
    e->unrung = NULL;
    const bool any = conn;
    e->fabric->met.rung |= any;
    for (struct conn *next; conn; conn = next) {
        next = conn->next_unrung;
        conn->unrung_listed = false;
        note(e->fabric, NOTE_RING, e->rank, conn->peer, conn->seq, 0, 0);
        ring(conn);
    }
    return any;
}

vnic_refusal vnic_post(struct vnic_endpoint *e, uint32_t peer, const vnic_work *work, uint32_t n, bool more,
                       uint32_t *taken, char *text) {
    struct vnic_fabric *f = e->fabric;
    const vnic_knobs *k = &e->nic->knobs;
    *taken = 0;
    text[0] = 0;
    const char *broken = vnic_endpoint_broken(e);
    if (broken) return refuse(text, VNIC_BROKEN, broken);
    if (peer >= e->peers || e->remote[peer] == VNIC_NO_ENDPOINT)
        return refuse(text, VNIC_BROKEN, "the endpoint is not connected to this peer");
    struct conn *conn = conn_get(e, peer);
    if (conn->state >= CONN_DRAINING)
        return refuse(text, VNIC_BROKEN, "the endpoint is being disconnected from this peer");
    if (fault(f, VNIC_FAULT_AGAIN, e->rank, peer, NULL)) {
        f->stats.backpressure++;
        return refuse(text, VNIC_NO_ROOM, "again");
    }
    uint32_t limit = k->max_batch && n > k->max_batch ? (uint32_t)k->max_batch : n;
    if (limit > 1 && fault(f, VNIC_FAULT_PARTIAL, e->rank, peer, NULL))
        limit = 1 + vnic_choose(f, VNIC_CHOICE_FAULT, e->rank, limit - 1);
    const uint32_t poisoned = n > 1 && fault(f, VNIC_FAULT_ERROR_IN_BATCH, e->rank, peer, NULL) ? n / 2 : n;
    vnic_refusal refusal = VNIC_TAKEN;
    for (uint32_t i = 0; i < limit; i++) {
        const bool atomic = work[i].kind == VNIC_ADD || work[i].kind == VNIC_SWAP;
        uint64_t length = atomic ? 8 : 0;
        for (uint32_t s = 0; s < work[i].sges && s < VNIC_MAX_SGES && !atomic; s++) length += work[i].sge[s].length;
        refusal = check_kind(k, &work[i], length, text);
        if (refusal != VNIC_TAKEN) break;
        if ((k->per_peer_qp ? conn->outstanding : e->outstanding) >= k->max_wr) {
            refusal = refuse(text, VNIC_NO_ROOM, "the queue is full");
            break;
        }
        take(conn, &work[i], length, i == poisoned);
        ++*taken;
    }
    if (*taken < n && (refusal == VNIC_TAKEN || refusal == VNIC_NO_ROOM)) {
        f->stats.backpressure++;
        refusal = VNIC_NO_ROOM;
    }
    if (!*taken) return refusal;
    if (more)
        list_unrung(conn);
    else
        ring(conn);
    return refusal;
}
