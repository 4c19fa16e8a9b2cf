/* SPDX-License-Identifier: Apache-2.0
 *
 * order.c: when an op may go.
 *
 * Every freedom of a NIC is an event of its own, enabled as soon as what the NIC promises allows it, and not earlier.
 * So both schedules, by drawn times and by choice, go through the same conditions, and these are here.
 */
#include "internal.h"

/* ----------------------------------------------------------------------------------------------------------- launch */

/* What is known to go wrong with an op before a byte of it moves. */
static vnic_status doom_of(struct op *op) {
    const vnic_knobs *k = op_knobs(op);
    if (op->doom) return (vnic_status)op->doom;
    if (!op->copy && !op_local_ok(op)) return VNIC_LOCAL_ACCESS;
    const struct vnic_endpoint *target = op_target(op);
    if (!target) return VNIC_OK; /* silence, which is found out in time */
    const bool known = op->endpoint->self < target->peers && target->remote[op->endpoint->self] == op->endpoint->id;
    if (k->needs_target_ah && !known) return VNIC_UNKNOWN_PEER;
    if (op_is_atomic(op) && op->remote_address % 8) return VNIC_REMOTE_INVALID;
    uint64_t offset;
    if ((op->length || op->kind != VNIC_WRITE_IMM) && !op_remote_region(op, target, &offset)) return VNIC_REMOTE_ACCESS;
    return VNIC_OK;
}

/* Where the payload is cut. Not within an 8-byte word of the target, nor, where blocks stay whole, within one. */
static void cut(struct op *op) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = op_knobs(op);
    op->pieces = 1;
    op->cut[1] = op->length;
    if (!op_is_write(op) || k->pieces < 2) return;
    const uint32_t unit = k->place_order == VNIC_PLACE_NONE ? 8 : 128;
    const uint32_t head = (unit - (uint32_t)(op->remote_address % unit)) % unit; /* up to the first boundary */
    if (op->length <= head || (!head && op->length <= unit)) return;
    const uint32_t inner = (op->length - head + unit - 1) / unit + (head != 0); /* units that the payload touches */
    uint32_t pieces = (uint32_t)k->pieces < inner ? (uint32_t)k->pieces : inner;
    if (!f->config.choice_schedule) pieces = 1 + vnic_choose(f, VNIC_CHOICE_NIC, op->endpoint->rank, pieces);
    for (uint32_t i = 1; i < pieces; i++) {
        const uint64_t at = (uint64_t)inner * i / pieces; /* whole units before the cut */
        op->cut[i] = head ? head + (uint32_t)(at - 1) * unit : (uint32_t)at * unit;
    }
    op->pieces = (uint8_t)pieces;
    op->cut[pieces] = op->length;
}

static void wait_for(struct op *op, enum waits what, uint32_t blockers) {
    if (!blockers) return;
    op->waits = (uint8_t)what;
    op->blockers = blockers;
}

static void keep_waiting(struct op *op) {
    if (op->waiting || (!op->blockers && !op->imm_blockers)) return;
    op->waiting = true;
    op->refs++;
    op->next_waiting = op->conn->waiting;
    op->conn->waiting = op;
}

static void start(struct op *op) {
    struct conn *conn = op->conn;
    const vnic_knobs *k = op_knobs(op);
    op->launched = true;
    cut(op);
    note(op->endpoint->fabric, NOTE_LAUNCH, op->endpoint->rank, op->peer, op->seq, op->pieces, op->cookie);
    if (op->flags & VNIC_FENCE && k->fence_kind == VNIC_FENCE_DELIVERED)
        wait_for(op, WAITS_SEEN, conn->unseen);
    else if ((op_is_atomic(op) && vnic_write_atomic(k)) || (op->kind == VNIC_READ && k->read_flushes))
        wait_for(op, WAITS_EXECUTED, conn->unexecuted);
    else if (op->flags & VNIC_FENCE)
        wait_for(op, WAITS_ATOMICS, conn->atomics);
    if (op->kind == VNIC_WRITE_IMM && vnic_write_imm(k)) op->imm_blockers = conn->unseen;
    conn->unexecuted++;
    conn->unseen++;
    if (!op_is_write(op)) conn->atomics++;
    keep_waiting(op);
    if (!op->blockers) op_enable(op);
}

/* Launch what may be launched. */
void kick(struct conn *conn) {
    struct vnic_endpoint *e = conn->endpoint;
    struct vnic_fabric *f = e->fabric;
    const vnic_knobs *k = &e->nic->knobs;
    if (e->dead || e->nic->lost) return;
    while (conn->state == CONN_UP && conn->launch && (int32_t)(conn->rung - conn->launch->seq) >= 0) {
        struct op *op = conn->launch;
        if (conn->active) return; /* strict order: one after the other */
        if (!op->doom) op->doom = (uint8_t)doom_of(op);
        if (op->flags & VNIC_FENCE && conn->fence_broken && !op->doom) op->doom = VNIC_FLUSHED;
        if (op->doom) {
            /* Where an error stops the queue, nothing behind it is launched, and all before it is executed. */
            if (k->error_scope == VNIC_ERROR_QP && conn->unexecuted) return;
            if (!op->other_event)
                op->other_event = event_add(f, EVENT_FAIL, draw_delay(f, e->rank, k->delay), op, conn);
            if (k->error_scope == VNIC_ERROR_QP) return;
            conn->fence_broken = true;
            conn->launch = op->next;
            continue;
        }
        conn->launch = op->next;
        if (vnic_write_write(k)) conn->active = op;
        start(op);
    }
}

/* ---------------------------------------------------------------------------------------------------------- execute */

void op_queue(struct op **list, struct op *op) {
    while (*list) list = &(*list)->next_waiting;
    op->next_waiting = NULL;
    *list = op;
    op->refs++;
}

/* An add takes a resource of the responder, of its queue or of the whole NIC, until it is applied. Not until it is
 * complete: completions are in order, and an earlier add may still wait for a resource. */
static bool take_resource(struct op *op) {
    const vnic_knobs *k = op_knobs(op);
    struct vnic_endpoint *target = op_target(op);
    if (!op_is_atomic(op) || !k->responder_atomics || op->holds_resource || !target) return true;
    const bool device = k->responder_scope == VNIC_SCOPE_DEVICE;
    uint32_t *used = device ? &target->nic->adding : &op->conn->adding;
    if (*used >= k->responder_atomics) {
        if (k->responder_over == VNIC_OVER_FAIL)
            op_fail(op, VNIC_REMOTE_INVALID, 0);
        else
            op_queue(device ? &target->nic->for_resource : &op->conn->for_resource, op);
        return false;
    }
    ++*used;
    op->holds_resource = true;
    return true;
}

void op_give_resource(struct op *op) {
    if (!op->holds_resource) return;
    op->holds_resource = false;
    const bool device = op_knobs(op)->responder_scope == VNIC_SCOPE_DEVICE;
    struct vnic_endpoint *target = op_target(op);
    if (device && !target) return; /* the NIC that counted it is not there any more */
    uint32_t *used = device ? &target->nic->adding : &op->conn->adding;
    struct op **list = device ? &target->nic->for_resource : &op->conn->for_resource;
    if (*used) --*used;
    struct op *next = *list;
    if (!next) return;
    *list = next->next_waiting;
    op_enable(next);
    op_release(next);
}

/* Nothing that the NIC promises holds the op back any more. */
void op_enable(struct op *op) {
    if (op->failed || op->enabled) return;
    if (op->flags & VNIC_FENCE && op->conn->fence_broken && op_knobs(op)->fence_kind == VNIC_FENCE_DELIVERED) {
        op_fail(op, VNIC_FLUSHED, 0); /* a fence cancels behind what failed */
        return;
    }
    if (!take_resource(op)) return;
    op->enabled = true;
    const vnic_place order = (vnic_place)op_knobs(op)->place_order;
    const bool one_by_one = order == VNIC_PLACE_MESSAGE || order == VNIC_PLACE_STRICT;
    for (uint8_t i = 0; i < (one_by_one ? 1 : op->pieces); i++) op_enable_piece(op, i);
    op_check_ready(op);
}

/* One earlier op reached a milestone: those that waited for it are nearer to theirs. First counted, then let go: what
 * is let go may fail and change the list. */
void conn_unblock(struct conn *conn, const struct op *done, enum waits what, bool atomic) {
    struct op *free_now = NULL;
    struct op **link = &conn->waiting;
    while (*link) {
        struct op *op = *link;
        bool let_go = false;
        if ((int32_t)(op->seq - done->seq) > 0) {
            if (op->blockers && (op->waits == what || (atomic && op->waits == WAITS_ATOMICS))) let_go = !--op->blockers;
            if (op->imm_blockers && what == WAITS_SEEN && !--op->imm_blockers) let_go = true;
        }
        if (op->blockers || op->imm_blockers) {
            link = &op->next_waiting;
        } else {
            *link = op->next_waiting;
            op->waiting = false;
        }
        if (!let_go) continue;
        if (op->waiting) op->refs++; /* of free_now; otherwise the list's goes over to it */
        op->next_unblocked = free_now;
        free_now = op;
    }
    while (free_now) {
        struct op *op = free_now;
        free_now = op->next_unblocked;
        if (!op->blockers) op_enable(op);
        op_check_immediate(op);
        op_release(op);
    }
}

void op_seen(struct op *op) {
    if (op->seen) return;
    op->seen = true;
    op->conn->unseen--;
    conn_unblock(op->conn, op, WAITS_SEEN, false);
    op_check_immediate(op);
    op_check_ready(op);
}

void op_executed(struct op *op) {
    if (op->executed) return;
    struct conn *conn = op->conn;
    op->executed = true;
    conn->unexecuted--;
    if (!op_is_write(op)) conn->atomics--;
    if (conn->active == op && !op_awaits_turn(op)) conn->active = NULL;
    op_give_resource(op);
    conn_unblock(conn, op, WAITS_EXECUTED, !op_is_write(op));
    if (op->visible == op_all_pieces(op)) op_seen(op);
    op_check_immediate(op);
    op_check_ready(op);
    kick(conn);
}

void op_piece_visible(struct op *op, uint8_t piece) {
    op->visible |= (uint8_t)(1u << piece);
    if (op->executed && op->visible == op_all_pieces(op)) op_seen(op);
}
