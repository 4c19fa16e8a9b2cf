/* SPDX-License-Identifier: Apache-2.0
 *
 * work.c: a work request from post to completion.
 *
 * Every freedom is an event of its own, enabled as soon as what the NIC promises allows it, and not earlier. So both
 * schedules, by drawn times and by choice, go through the same conditions.
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static void enable_op(struct op *op);
static void check_ready(struct op *op);
static void check_immediate(struct op *op);
static void read_ahead(struct op *op);
static void fail(struct op *op, vnic_status status, int32_t vendor_code);

static const vnic_knobs *knobs(const struct op *op) {
    return &op->endpoint->nic->knobs;
}

static bool is_write(const struct op *op) {
    return op->kind == VNIC_WRITE || op->kind == VNIC_WRITE_IMM;
}

static uint8_t all_pieces(const struct op *op) {
    return (uint8_t)((1u << op->pieces) - 1);
}

void op_release(struct op *op) {
    if (--op->refs) return;
    struct vnic_fabric *f = op->endpoint ? op->endpoint->fabric : NULL;
    if (op->copy) data_give(f, op->copy, op->copy_class);
    pool_give(&f->ops, op);
}

/* The target's endpoint, if it is there and its NIC works. */
static struct vnic_endpoint *target_of(const struct op *op) {
    struct vnic_endpoint *target = endpoint_of(op->endpoint->fabric, op->conn->remote);
    return target && !target->nic->lost ? target : NULL;
}

/* ------------------------------------------------------------------------------------------------------------- post */

static vnic_refusal refuse(char *text, vnic_refusal refusal, const char *why) {
    snprintf(text, 256, "%s", why);
    return refusal;
}

/* What this NIC does not do at all, or not in this size. */
static vnic_refusal check_kind(const vnic_knobs *k, const vnic_work *w, uint64_t length, char *text) {
    if (w->kind < VNIC_WRITE || w->kind > VNIC_READ) return refuse(text, VNIC_UNSUPPORTED, "no such operation");
    if (w->kind == VNIC_ADD && !k->atomics) return refuse(text, VNIC_UNSUPPORTED, "the NIC has no atomics");
    if (w->kind == VNIC_WRITE_IMM && !k->imm_bits) return refuse(text, VNIC_UNSUPPORTED, "the NIC has no immediates");
    if (w->kind == VNIC_READ && !k->has_read) return refuse(text, VNIC_UNSUPPORTED, "the NIC has no reads");
    if (!(w->flags & VNIC_SIGNALLED) && !k->unsignalled_ok)
        return refuse(text, VNIC_UNSUPPORTED, "every request of this NIC must be signalled");
    if (w->flags & VNIC_FENCE && k->fence_kind == VNIC_FENCE_NONE)
        return refuse(text, VNIC_UNSUPPORTED, "the NIC has no fence");
    if (w->flags & VNIC_VISIBLE && !k->visible_on_request && k->completion_level != VNIC_LEVEL_DELIVERY)
        return refuse(text, VNIC_UNSUPPORTED, "the NIC cannot be asked for a completion that means visible");
    if (w->sges > VNIC_MAX_SGES || w->sges > k->max_sge || (w->kind == VNIC_READ && w->sges != 1))
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

static bool local_ok(const struct op *op) {
    for (uint32_t i = 0; i < op->sges; i++) {
        const vnic_sge *s = &op->sge[i];
        if (!s->length) continue;
        if (!s->region || !s->region->alive || s->region->rank != op->endpoint->rank || s->offset > s->region->bytes ||
            s->length > s->region->bytes - s->offset)
            return false;
    }
    return true;
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
    op->cookie = w->cookie;
    op->seq = ++conn->seq;
    op->rnr_left = (uint32_t)k->rnr_retries;
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
    if (w->flags & VNIC_INLINE) read_ahead(op);
    f->stats.operations++;
    note(f, NOTE_POST, e->rank, conn->peer, op->seq, op->kind, op->cookie);
    if (conn->state == CONN_ERROR) {
        op->failed = true;
        op->status = VNIC_FLUSHED;
        if (conn->launch == op) conn->launch = NULL;
        check_ready(op);
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
        uint64_t length = work[i].kind == VNIC_ADD ? 8 : 0;
        for (uint32_t s = 0; s < work[i].sges && s < VNIC_MAX_SGES; s++) length += work[i].sge[s].length;
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

/* ----------------------------------------------------------------------------------------------------------- launch */

/* A key opens memory of the rank at the other end of the connection, and of no other. */
static struct vnic_region *remote_region(const struct op *op, const struct vnic_endpoint *target, uint64_t *offset) {
    struct vnic_region *region =
        region_find(op->endpoint->fabric, op->remote_key, op->remote_address, op->length, offset);
    return region && region->rank == target->rank ? region : NULL;
}

/* What is known to go wrong with an op before a byte of it moves. */
static vnic_status doom_of(struct op *op) {
    const vnic_knobs *k = knobs(op);
    if (op->doom) return (vnic_status)op->doom;
    if (!op->copy && !local_ok(op)) return VNIC_LOCAL_ACCESS;
    const struct vnic_endpoint *target = target_of(op);
    if (!target) return VNIC_OK; /* silence, which is found out in time */
    const bool known = op->endpoint->self < target->peers && target->remote[op->endpoint->self] == op->endpoint->id;
    if (k->needs_target_ah && !known) return VNIC_UNKNOWN_PEER;
    if (op->kind == VNIC_ADD && op->remote_address % 8) return VNIC_REMOTE_INVALID;
    uint64_t offset;
    if ((op->length || op->kind != VNIC_WRITE_IMM) && !remote_region(op, target, &offset)) return VNIC_REMOTE_ACCESS;
    return VNIC_OK;
}

/* Where the payload is cut. Not within an 8-byte word of the target, nor, where blocks stay whole, within one. */
static void cut(struct op *op) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = knobs(op);
    op->pieces = 1;
    op->cut[1] = op->length;
    if (!is_write(op) || k->pieces < 2) return;
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
    const vnic_knobs *k = knobs(op);
    op->launched = true;
    cut(op);
    note(op->endpoint->fabric, NOTE_LAUNCH, op->endpoint->rank, op->peer, op->seq, op->pieces, op->cookie);
    if (op->flags & VNIC_FENCE && k->fence_kind == VNIC_FENCE_DELIVERED)
        wait_for(op, WAITS_SEEN, conn->unseen);
    else if ((op->kind == VNIC_ADD && vnic_write_atomic(k)) || (op->kind == VNIC_READ && k->read_flushes))
        wait_for(op, WAITS_EXECUTED, conn->unexecuted);
    else if (op->flags & VNIC_FENCE)
        wait_for(op, WAITS_ATOMICS, conn->atomics);
    if (op->kind == VNIC_WRITE_IMM && vnic_write_imm(k)) op->imm_blockers = conn->unseen;
    conn->unexecuted++;
    conn->unseen++;
    if (!is_write(op)) conn->atomics++;
    keep_waiting(op);
    if (!op->blockers) enable_op(op);
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

static void enable_piece(struct op *op, uint8_t piece) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = knobs(op);
    /* In strict order times add up along the connection: a fraction each. */
    uint64_t delay = draw_delay(f, op->endpoint->rank, vnic_write_write(k) ? k->delay / 16 : k->delay);
    if (!piece) delay += op->delay;
    struct event *e = event_add(f, EVENT_PLACE, delay, op, op->conn);
    e->piece = piece;
    op->piece_event[piece] = e;
}

static void resource_append(struct op **list, struct op *op) {
    while (*list) list = &(*list)->next_waiting;
    op->next_waiting = NULL;
    *list = op;
    op->refs++;
}

/* An add takes a resource of the responder, of its queue or of the whole NIC, until it is complete. */
static bool take_resource(struct op *op) {
    const vnic_knobs *k = knobs(op);
    struct vnic_endpoint *target = target_of(op);
    if (op->kind != VNIC_ADD || !k->responder_atomics || op->holds_resource || !target) return true;
    const bool device = k->responder_scope == VNIC_SCOPE_DEVICE;
    uint32_t *used = device ? &target->nic->adding : &op->conn->adding;
    if (*used >= k->responder_atomics) {
        if (k->responder_over == VNIC_OVER_FAIL)
            fail(op, VNIC_REMOTE_INVALID, 0);
        else
            resource_append(device ? &target->nic->for_resource : &op->conn->for_resource, op);
        return false;
    }
    ++*used;
    op->holds_resource = true;
    return true;
}

static void give_resource(struct op *op) {
    if (!op->holds_resource) return;
    op->holds_resource = false;
    const bool device = knobs(op)->responder_scope == VNIC_SCOPE_DEVICE;
    struct vnic_endpoint *target = target_of(op);
    if (device && !target) return; /* the NIC that counted it is not there any more */
    uint32_t *used = device ? &target->nic->adding : &op->conn->adding;
    struct op **list = device ? &target->nic->for_resource : &op->conn->for_resource;
    if (*used) --*used;
    struct op *next = *list;
    if (!next) return;
    *list = next->next_waiting;
    enable_op(next);
    op_release(next);
}

/* Nothing that the NIC promises holds the op back any more. */
static void enable_op(struct op *op) {
    if (op->failed || op->enabled) return;
    if (op->flags & VNIC_FENCE && op->conn->fence_broken && knobs(op)->fence_kind == VNIC_FENCE_DELIVERED) {
        fail(op, VNIC_FLUSHED, 0); /* a fence cancels behind what failed */
        return;
    }
    if (!take_resource(op)) return;
    op->enabled = true;
    const vnic_place order = (vnic_place)knobs(op)->place_order;
    const bool one_by_one = order == VNIC_PLACE_MESSAGE || order == VNIC_PLACE_STRICT;
    for (uint8_t i = 0; i < (one_by_one ? 1 : op->pieces); i++) enable_piece(op, i);
    check_ready(op);
}

/* One earlier op reached a milestone: those that waited for it are nearer to theirs. First counted, then let go: what
 * is let go may fail and change the list. */
static void unblock(struct conn *conn, const struct op *done, enum waits what, bool atomic) {
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
        if (!op->blockers) enable_op(op);
        check_immediate(op);
        op_release(op);
    }
}

static void seen(struct op *op) {
    if (op->seen) return;
    op->seen = true;
    op->conn->unseen--;
    unblock(op->conn, op, WAITS_SEEN, false);
    check_immediate(op);
    check_ready(op);
}

static void executed(struct op *op) {
    if (op->executed) return;
    struct conn *conn = op->conn;
    op->executed = true;
    conn->unexecuted--;
    if (!is_write(op)) conn->atomics--;
    if (conn->active == op) conn->active = NULL;
    unblock(conn, op, WAITS_EXECUTED, !is_write(op));
    if (op->visible == all_pieces(op)) seen(op);
    check_immediate(op);
    check_ready(op);
    kick(conn);
}

void op_piece_visible(struct op *op, uint8_t piece) {
    op->visible |= (uint8_t)(1u << piece);
    if (op->executed && op->visible == all_pieces(op)) seen(op);
}

/* A piece reaches the target's NIC: into memory at once, or into its buffer. */
static void land(struct op *op, uint8_t piece, struct vnic_endpoint *target, struct vnic_region *region,
                 uint64_t offset, bool duplicate) {
    struct vnic_nic *nic = target->nic;
    struct vnic_fabric *f = nic->fabric;
    const uint32_t from = op->cut[piece], bytes = op->cut[piece + 1] - from;
    const bool choice = f->config.choice_schedule;
    const bool truthful = knobs(op)->completion_level == VNIC_LEVEL_DELIVERY || op->flags & VNIC_VISIBLE;
    const vnic_place order = (vnic_place)knobs(op)->place_order;
    if (!nic_is_fifo(nic) && !nic->knobs.late_overwrite && bytes) posted_settle(nic, region, offset + from, bytes);
    /* Behind what waits there already, if the order is kept. */
    bool late = nic->first && (nic_is_fifo(nic) || (order == VNIC_PLACE_MESSAGE && op->visible != op->placed));
    if (nic->knobs.visible_delay && !late) late = choice || vnic_choose(f, VNIC_CHOICE_NIC, target->rank, 4) != 0;
    /* What lands again must not come to light behind a completion that means visible. */
    if (late && !(duplicate && truthful) && bytes) {
        posted_add(nic, op, piece, region, offset + from, bytes, duplicate);
        return;
    }
    read_source(op, from, bytes, region->base + offset + from);
    if (bytes) wake(f, target->rank);
    if (!duplicate) op_piece_visible(op, piece);
}

static void add_to_word(struct op *op, struct vnic_region *region, uint64_t offset) {
    uint64_t *word = (uint64_t *)(void *)(region->base + offset);
    __atomic_fetch_add(word, op->value, __ATOMIC_ACQ_REL);
}

/* Adds of one NIC are done one after the other. Between NICs they are a load and a store, with time in between. */
static void begin_add(struct op *op, struct vnic_endpoint *target, struct vnic_region *region, uint64_t offset) {
    struct vnic_nic *nic = target->nic;
    struct vnic_fabric *f = nic->fabric;
    if (nic->add_busy) {
        resource_append(&nic->add_waiting, op);
        return;
    }
    nic->add_busy = true;
    op->conn->target = nic;
    op->read_value = __atomic_load_n((uint64_t *)(void *)(region->base + offset), __ATOMIC_ACQUIRE);
    op->other_event = event_add(f, EVENT_ADD_STORE, draw_delay(f, target->rank, nic->knobs.delay / 4), op, op->conn);
}

static void place(struct op *op, uint8_t piece);

void next_add(struct vnic_nic *nic) {
    nic->add_busy = false;
    struct op *op = nic->add_waiting;
    if (!op) return;
    nic->add_waiting = op->next_waiting;
    if (!op->failed) place(op, 0);
    op_release(op);
}

static void store_add(struct op *op) {
    struct vnic_nic *nic = op->conn->target;
    uint64_t offset;
    struct vnic_region *region =
        region_find(op->endpoint->fabric, op->remote_key, op->remote_address, op->length, &offset);
    if (region) {
        __atomic_store_n((uint64_t *)(void *)(region->base + offset), op->read_value + op->value, __ATOMIC_RELEASE);
        wake(op->endpoint->fabric, region->rank);
    }
    op->placed = op->visible = 1;
    executed(op);
    next_add(nic);
}

/* A duplicate may come from now until the completion is given. */
static void maybe_twice(struct op *op, uint8_t piece) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = knobs(op);
    if (!k->dup_write || op->duplicate || op->completed || op->cut[piece + 1] == op->cut[piece]) return;
    /* By choice: it is an alternative until the completion comes, and never happens if that comes first. */
    if (!f->config.choice_schedule && !vnic_chance(f, VNIC_CHOICE_NIC, op->endpoint->rank, (uint32_t)k->dup_write))
        return;
    op->duplicate = event_add(f, EVENT_DUPLICATE, draw_delay(f, op->endpoint->rank, k->delay), op, op->conn);
    op->duplicate->piece = piece;
}

static void place(struct op *op, uint8_t piece) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = knobs(op);
    struct vnic_endpoint *target = target_of(op);
    /* A reliable connection has two ends: the other one must still be, or be again, this one's. */
    if (!target || (k->error_scope == VNIC_ERROR_QP &&
                    (op->endpoint->self >= target->peers || target->remote[op->endpoint->self] != op->endpoint->id))) {
        op_lost(op);
        return;
    }
    uint64_t offset = 0;
    struct vnic_region *region = NULL;
    if (op->length || op->kind != VNIC_WRITE_IMM) {
        region = remote_region(op, target, &offset);
        if (!region) {
            fail(op, VNIC_REMOTE_ACCESS, 0);
            return;
        }
    }
    if (!op->copy && !local_ok(op)) {
        fail(op, VNIC_LOCAL_ACCESS, 0);
        return;
    }
    if (op->kind == VNIC_ADD) {
        if (vnic_write_atomic(k)) posted_flush_conn(target->nic, op->conn);
        if (target->nic->knobs.nics > 1) {
            begin_add(op, target, region, offset);
            return;
        }
        add_to_word(op, region, offset);
        wake(f, target->rank);
        op->placed = op->visible = 1;
    } else if (op->kind == VNIC_READ) {
        if (k->read_flushes) {
            f->stats.flushes++;
            posted_flush_conn(target->nic, op->conn);
        }
        const vnic_sge *to = &op->sge[0];
        if (op->length) memmove(to->region->base + to->offset, region->base + offset, op->length);
        op->placed = op->visible = 1;
    } else {
        if (region)
            land(op, piece, target, region, offset, false);
        else
            op->visible |= (uint8_t)(1u << piece);
        op->placed |= (uint8_t)(1u << piece);
        maybe_twice(op, piece);
        if (op->placed != all_pieces(op)) {
            if (k->place_order == VNIC_PLACE_MESSAGE || k->place_order == VNIC_PLACE_STRICT)
                enable_piece(op, (uint8_t)(piece + 1));
            return;
        }
    }
    executed(op);
}

static void place_again(struct op *op, uint8_t piece) {
    struct vnic_endpoint *target = target_of(op);
    uint64_t offset = 0;
    struct vnic_region *region = target ? remote_region(op, target, &offset) : NULL;
    if (op->completed || !region || (!op->copy && !local_ok(op))) return;
    op->endpoint->fabric->stats.duplicates++;
    land(op, piece, target, region, offset, true);
}

/* ------------------------------------------------------------------------------------------------------- immediates */

/* Its own bytes are there, and where the NIC promises it, visible, and the earlier ones too. */
static void check_immediate(struct op *op) {
    const vnic_knobs *k = knobs(op);
    if (op->kind != VNIC_WRITE_IMM || op->imm_enabled || op->failed || !op->executed || op->imm_blockers) return;
    if ((k->imm_visible || vnic_write_imm(k)) && !op->seen) return;
    op->imm_enabled = true;
    struct vnic_fabric *f = op->endpoint->fabric;
    const uint64_t delay = draw_delay(f, op->endpoint->rank, vnic_write_imm(k) ? 0 : k->delay);
    op->other_event = event_add(f, EVENT_IMMEDIATE, delay, op, op->conn);
}

static void deliver_immediate(struct op *op) {
    struct vnic_fabric *f = op->endpoint->fabric;
    struct vnic_endpoint *target = target_of(op);
    if (!target || target->peers <= op->endpoint->self) {
        op_lost(op);
        return;
    }
    const vnic_knobs *k = &target->nic->knobs;
    const bool consumes = vnic_imm_consumes(k);
    bool ready = true;
    if (consumes) {
        struct conn *back = k->srq ? NULL : conn_get(target, op->endpoint->self);
        ready = k->srq ? target->shared_receives > 0 : back->receives > 0;
        if (fault(f, VNIC_FAULT_RNR, target->rank, op->endpoint->self, NULL)) ready = false;
        if (ready && k->srq) target->shared_receives--;
        if (ready && !k->srq) back->receives--;
    }
    if (!ready) {
        f->stats.rnr++;
        if (knobs(op)->rnr == VNIC_RNR_RETRY && op->rnr_left--)
            op->other_event = event_timer(f, EVENT_RNR_RETRY, 8 * knobs(op)->delay + 1000, op, op->conn);
        else
            fail(op, VNIC_RNR_EXCEEDED, 0);
        return;
    }
    f->stats.immediates++;
    const uint64_t bits = knobs(op)->imm_bits;
    const struct record r = {.cookie = bits < 64 ? op->value & ((1ull << bits) - 1) : op->value,
                             .peer = op->endpoint->self,
                             .immediate = true,
                             .consumed = consumes};
    op->received = true;
    cq_push(target, &r, false);
    check_ready(op);
}

/* ------------------------------------------------------------------------------------------------------ completions */

static bool may_complete(const struct op *op) {
    if (op->failed) return true;
    const bool received = op->kind != VNIC_WRITE_IMM || op->received;
    if (op->kind == VNIC_READ) return op->executed;
    if (op->flags & VNIC_VISIBLE) return op->seen && received;
    switch (knobs(op)->completion_level) {
    case VNIC_LEVEL_TX:
        return op->enabled;
    case VNIC_LEVEL_ACK:
        return op->executed && received;
    default:
        return op->seen && received;
    }
}

static void check_ready(struct op *op) {
    if (op->completing || op->completed || !may_complete(op)) return;
    const vnic_knobs *k = knobs(op);
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

static void read_ahead(struct op *op) {
    if (!is_write(op) || op->copy || !op->length || !local_ok(op)) return;
    uint32_t class;
    char *copy = data_take(op->endpoint->fabric, op->length, &class);
    read_source(op, 0, op->length, copy);
    op->copy = copy;
    op->copy_class = class;
}

void conn_detach(struct conn *conn) {
    for (struct op *op = conn->head; op && op->launched; op = op->next) read_ahead(op);
}

static void complete(struct op *op) {
    struct conn *conn = op->conn;
    struct vnic_endpoint *e = op->endpoint;
    struct vnic_fabric *f = e->fabric;
    const vnic_knobs *k = knobs(op);
    if (op->duplicate) {
        struct event *duplicate = op->duplicate;
        op->duplicate = NULL;
        event_remove(f, duplicate);
    }
    /* The source is the caller's again: what is still to be sent was read before. */
    if (!op->failed && !op->executed) read_ahead(op);
    const bool was_full = (k->per_peer_qp ? conn->outstanding : e->outstanding) >= k->max_wr;
    unlist(conn, op);
    op->completed = true;
    if (op->waiting_entries) conn->target->of_completed += op->waiting_entries;
    give_resource(op);
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
    if (k->completion_order == VNIC_COMPLETES_IN_ORDER && conn->head) check_ready(conn->head);
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
        if (!is_write(op)) conn->atomics--;
        if (conn->active == op) conn->active = NULL;
        unblock(conn, op, WAITS_EXECUTED, !is_write(op));
    }
    if (!op->seen) {
        op->seen = true;
        conn->unseen--;
        unblock(conn, op, WAITS_SEEN, false);
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
        check_ready(op);
        op_release(op);
    }
    conn->launch = NULL;
}

/* An op fails, at whatever stage. */
static void fail(struct op *op, vnic_status status, int32_t vendor_code) {
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
    const bool stops = knobs(op)->error_scope == VNIC_ERROR_QP && conn->state == CONN_UP;
    if (stops) {
        conn->state = CONN_ERROR;
        if (!op->completed) flush_behind(conn, op->next);
    }
    end_unexecuted(op);
    if (!op->completed) check_ready(op);
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
    const vnic_knobs *k = knobs(op);
    if (op->failed || op->lost) return;
    op->lost = true;
    op->refs++;
    cancel(op);
    if (op->completed)
        end_unexecuted(op);
    else if (k->dead_peer == VNIC_SILENCE_TIMEOUT && op->conn->state == CONN_UP)
        op->other_event = event_timer(f, EVENT_GIVE_UP, k->retry_ns, op, op->conn);
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
        give_resource(op);
        op_release(op);
        op_release(op);
    }
    events_remove_of(f, conn);
    conn->launch = conn->active = NULL;
    conn->rung = conn->seq;
    conn->unexecuted = conn->unseen = conn->atomics = conn->adding = 0;
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
    if (op) note(f, e->kind, op->endpoint->rank, op->peer, op->seq, e->piece, op->cookie);
    if (op && op->other_event == e) op->other_event = NULL;
    switch (e->kind) {
    case EVENT_PLACE:
        op->piece_event[e->piece] = NULL;
        place(op, e->piece);
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
        const bool provider = op->status && knobs(op)->flush_by == VNIC_FLUSH_PROVIDER;
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
        deliver_immediate(op);
        break;
    case EVENT_DUPLICATE:
        op->duplicate = NULL;
        place_again(op, e->piece);
        break;
    case EVENT_ADD_STORE:
        store_add(op);
        break;
    case EVENT_FAIL:
        fail(op, (vnic_status)op->doom, op->vendor_code);
        break;
    case EVENT_GIVE_UP:
        fail(op, VNIC_RETRY_EXCEEDED, 0);
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
