/* SPDX-License-Identifier: Apache-2.0
 *
 * complete.c: how ops end: completions, errors, and connections that are given up; and what each event does.
 */
#include <stdlib.h>

#include "internal.h"

/* ------------------------------------------------------------------------------------------------------ completions */

static bool may_complete(const struct op *op) {
    if (op->failed) return true;
    const bool received = op->kind != VNIC_WRITE_IMM || op->received;
    if (op->kind == VNIC_READ || (op_is_atomic(op) && op->sges)) return op->executed; /* it brings something back */
    if (op->flags & VNIC_VISIBLE) return op->seen && received;
    switch (op_knobs(op)->completion_level) {
    case VNIC_LEVEL_TX:
        return op->enabled;
    case VNIC_LEVEL_ACK:
        return op->executed && received;
    default:
        return op->seen && received;
    }
}

void op_check_ready(struct op *op) {
    if (op->completing || op->completed || !may_complete(op)) return;
    const vnic_knobs *k = op_knobs(op);
    const bool in_order = k->completion_order == VNIC_COMPLETES_IN_ORDER;
    if (in_order && op->conn->head != op) return;
    if (op->conn->state >= CONN_DRAINING) return;
    op->completing = true;
    struct vnic_fabric *f = op->endpoint->fabric;
    const uint64_t delay = draw_delay(f, op->endpoint->rank, in_order ? k->delay / 16 : k->delay);
    op->complete_event = event_add(f, EVENT_COMPLETE, delay, op, op->conn);
}

static void unlist(struct conn *conn, struct op *op) {
    if (op->previous)
        op->previous->next = op->next;
    else
        conn->head = op->next;
    if (op->next)
        op->next->previous = op->previous;
    else
        conn->tail = op->previous;
    if (conn->launch == op) conn->launch = op->next;
    conn->outstanding--;
    op->endpoint->outstanding--;
    op->endpoint->inflight_bytes -= op->length;
}

static void complete(struct op *op) {
    struct conn *conn = op->conn;
    struct vnic_endpoint *e = op->endpoint;
    struct vnic_fabric *f = e->fabric;
    const vnic_knobs *k = op_knobs(op);
    if (op->duplicate) {
        struct event *duplicate = op->duplicate;
        op->duplicate = NULL;
        event_remove(f, duplicate);
    }
    if (op->waiting_entries && k->dup_write) posted_end_duplicates(conn->target, op);
    /* The source is the caller's again: what is still to be sent was read before. */
    if (!op->failed && !op->executed) {
        met_source(op, 0, op->length);
        op_read_ahead(op);
    }
    const bool was_full = (k->per_peer_qp ? conn->outstanding : e->outstanding) >= k->max_wr;
    unlist(conn, op);
    op->completed = true;
    if (op->waiting_entries) conn->target->of_completed += op->waiting_entries;
    if (op->failed || op->flags & VNIC_SIGNALLED) {
        const struct record r = {
            .cookie = op->cookie,
            .peer = op->peer,
            .status = op->status,
            .vendor_code =
                op->vendor_code ? op->vendor_code : vnic_vendor_code((vnic_vendor)k->vendor, (vnic_status)op->status)};
        f->stats.completions++;
        if (op->status) f->stats.errors++;
        cq_push(e, &r, true);
        if (fault(f, VNIC_FAULT_DUPLICATE_COMPLETION, e->rank, op->peer, NULL)) cq_push(e, &r, false);
        if (fault(f, VNIC_FAULT_STRAY_COMPLETION, e->rank, op->peer, NULL)) {
            conn->stray = true;
            conn->stray_cookie = op->cookie;
        }
    }
    if (was_full) wake(f, e->rank);
    if (k->completion_order == VNIC_COMPLETES_IN_ORDER && conn->head) op_check_ready(conn->head);
    op_release(op); /* the list's */
}

/* ----------------------------------------------------------------------------------------------------------- errors */

static void cancel(struct op *op) {
    struct vnic_fabric *f = op->endpoint->fabric;
    for (uint32_t i = 0; i < VNIC_MAX_PIECES; i++) {
        if (!op->piece_event[i]) continue;
        struct event *e = op->piece_event[i];
        op->piece_event[i] = NULL;
        event_remove(f, e);
    }
    if (op->duplicate) {
        struct event *e = op->duplicate;
        op->duplicate = NULL;
        event_remove(f, e);
    }
    if (op->other_event) {
        struct event *e = op->other_event;
        const bool half = e->kind == EVENT_ADD_STORE;
        op->other_event = NULL;
        event_remove(f, e);
        if (half) next_add(op->conn->target);
    }
}

/* It ends without having been executed whole: nobody waits for it any longer. */
static void end_unexecuted(struct op *op) {
    struct conn *conn = op->conn;
    if (!op->launched) return;
    if (!op->executed) {
        op->executed = true;
        conn->unexecuted--;
        if (!op_is_write(op)) conn->atomics--;
        if (conn->active == op) conn->active = NULL;
        op_give_resource(op);
        conn_unblock(conn, op, WAITS_EXECUTED, !op_is_write(op));
    }
    if (!op->seen) {
        op->seen = true;
        conn->unseen--;
        conn_unblock(conn, op, WAITS_SEEN, false);
    }
}

static void flush_behind(struct conn *conn, struct op *first) {
    for (struct op *op = first, *next; op; op = next) {
        next = op->next;
        if (op->failed || op->completing) continue;
        op->failed = true;
        op->status = VNIC_FLUSHED;
        op->refs++;
        cancel(op);
        end_unexecuted(op);
        op_check_ready(op);
        op_release(op);
    }
    conn->launch = NULL;
}

/* An op fails, at whatever stage. */
void op_fail(struct op *op, vnic_status status, int32_t vendor_code) {
    struct conn *conn = op->conn;
    struct vnic_fabric *f = op->endpoint->fabric;
    if (op->failed) return;
    op->refs++;
    note(f, NOTE_ERROR, op->endpoint->rank, op->peer, op->seq, (uint32_t)status, op->cookie);
    op->failed = true;
    op->status = (uint8_t)status;
    if (vendor_code) op->vendor_code = vendor_code;
    cancel(op);
    conn->fence_broken = true;
    const bool stops = op_knobs(op)->error_scope == VNIC_ERROR_QP && conn->state == CONN_UP;
    if (stops) {
        conn->state = CONN_ERROR;
        if (!op->completed) flush_behind(conn, op->next);
    }
    end_unexecuted(op);
    if (conn->active == op) conn->active = NULL; /* it was executed, and waited for its receive */
    if (!op->completed) op_check_ready(op);
    kick(conn);
    op_release(op);
}

void conn_error(struct conn *conn) {
    if (conn->state != CONN_UP) return;
    note(conn->endpoint->fabric, NOTE_ERROR, conn->endpoint->rank, conn->peer, 0, 0, 0);
    conn->state = CONN_ERROR;
    conn->fence_broken = true;
    flush_behind(conn, conn->head);
}

void op_lost(struct op *op) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = op_knobs(op);
    if (op->failed || op->lost) return;
    op->lost = true;
    op->refs++;
    cancel(op);
    if (op->completed)
        end_unexecuted(op);
    else if (k->dead_peer == VNIC_SILENCE_TIMEOUT && op->conn->state == CONN_UP &&
             op->endpoint->terms.retry_ns != UINT64_MAX)
        op->other_event = event_timer(f, EVENT_GIVE_UP, op->endpoint->terms.retry_ns, op, op->conn);
    op_release(op);
}

static void forget(struct op **list, const struct conn *conn) {
    while (*list) {
        struct op *op = *list;
        if (op->conn != conn) {
            list = &op->next_waiting;
            continue;
        }
        *list = op->next_waiting;
        op_release(op);
    }
}

void conn_drop(struct conn *conn) {
    struct vnic_endpoint *e = conn->endpoint;
    struct vnic_fabric *f = e->fabric;
    conn->state = CONN_DOWN;
    if (conn->target) posted_flush_conn(conn->target, conn);
    forget(&conn->waiting, conn);
    forget(&conn->for_resource, conn);
    for (uint32_t i = 0; i < f->n_nics; i++) {
        forget(&f->nics[i]->for_resource, conn);
        forget(&f->nics[i]->add_waiting, conn);
    }
    while (conn->head) {
        struct op *op = conn->head;
        op->refs++;
        op->failed = true;
        cancel(op);
        unlist(conn, op);
        op->completed = true;
        op_give_resource(op);
        op_release(op);
        op_release(op);
    }
    events_remove_of(f, conn);
    conn->launch = conn->active = NULL;
    conn->rung = conn->seq;
    conn->unexecuted = conn->unseen = conn->atomics = conn->adding = 0;
    conn->turn = conn->turns;
    conn->target = NULL;
    for (struct conn **link = &e->unrung; conn->unrung_listed && *link; link = &(*link)->next_unrung) {
        if (*link != conn) continue;
        *link = conn->next_unrung;
        conn->unrung_listed = false;
        break;
    }
    /* Completions of it that were not polled are not given any more. */
    struct record **link = &e->first;
    e->last = NULL;
    while (*link) {
        struct record *r = *link;
        if (r->immediate || r->peer != conn->peer) {
            e->last = r;
            link = &r->next;
            continue;
        }
        *link = r->next;
        e->cq_used -= r->entry;
        pool_give(&f->records, r);
    }
}

/* ----------------------------------------------------------------------------------------------------------- events */

void run_event(struct vnic_fabric *f, struct event *e) {
    struct op *op = e->op;
    if (e->kind > EVENT_DUPLICATE || (op && op->failed)) f->met.anything = 1;
    if (op) note(f, e->kind, op->endpoint->rank, op->peer, op->seq, e->piece, op->cookie);
    if (op && op->other_event == e) op->other_event = NULL;
    switch (e->kind) {
    case EVENT_PLACE:
        op->piece_event[e->piece] = NULL;
        op_place(op, e->piece);
        break;
    case EVENT_VISIBLE: {
        struct posted *p = e->posted;
        p->event = NULL;
        note(f, EVENT_VISIBLE, p->op->endpoint->rank, p->op->peer, p->op->seq, p->piece, p->op->cookie);
        posted_drain(p->nic, p);
        break;
    }
    case EVENT_COMPLETE: {
        struct conn *conn = e->conn;
        op->complete_event = NULL;
        const bool provider = op->status && op_knobs(op)->flush_by == VNIC_FLUSH_PROVIDER;
        complete(op);
        /* The library completes what is behind the error as soon as it has seen it. */
        while (provider && conn->state == CONN_ERROR && conn->head && conn->head->failed) {
            struct op *next = conn->head;
            if (next->complete_event) {
                struct event *superseded = next->complete_event;
                next->complete_event = NULL;
                event_remove(f, superseded);
            }
            complete(next);
        }
        break;
    }
    case EVENT_IMMEDIATE:
    case EVENT_RNR_RETRY:
        op_deliver_immediate(op);
        break;
    case EVENT_DUPLICATE:
        op->duplicate = NULL;
        op_place_again(op, e->piece);
        break;
    case EVENT_ADD_STORE:
        op_store_add(op);
        break;
    case EVENT_FAIL:
        op_fail(op, (vnic_status)op->doom, op->vendor_code);
        break;
    case EVENT_GIVE_UP:
        op_fail(op, VNIC_RETRY_EXCEEDED, 0);
        break;
    case EVENT_DRAINED:
        conn_drop(e->conn);
        break;
    case EVENT_STRAY: {
        const struct record r = {.cookie = e->conn->stray_cookie, .peer = e->conn->peer};
        cq_push(e->conn->endpoint, &r, false);
        break;
    }
    case EVENT_CALL:
        e->call(e->context, e->argument);
        break;
    default:
        break;
    }
}
