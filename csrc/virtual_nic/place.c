/* SPDX-License-Identifier: Apache-2.0
 *
 * place.c: bytes, adds and immediates arrive at a target.
 */
#include "internal.h"

void op_enable_piece(struct op *op, uint8_t piece) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = op_knobs(op);
    /* In strict order times add up along the connection: a fraction each. */
    uint64_t delay = draw_delay(f, op->endpoint->rank, vnic_write_write(k) ? k->delay / 16 : k->delay);
    if (!piece) delay += op->delay;
    struct event *e = event_add(f, EVENT_PLACE, delay, op, op->conn);
    e->piece = piece;
    op->piece_event[piece] = e;
}

/* A piece reaches the target's NIC: into memory at once, or into its buffer. */
static void land(struct op *op, uint8_t piece, struct vnic_endpoint *target, struct vnic_region *region,
                 uint64_t offset, bool duplicate) {
    struct vnic_nic *nic = target->nic;
    struct vnic_fabric *f = nic->fabric;
    const uint32_t from = op->cut[piece], bytes = op->cut[piece + 1] - from;
    met_source(op, from, bytes);
    const bool choice = f->config.choice_schedule;
    const bool truthful = op_knobs(op)->completion_level == VNIC_LEVEL_DELIVERY || op->flags & VNIC_VISIBLE;
    const vnic_place order = (vnic_place)op_knobs(op)->place_order;
    if (!nic_is_fifo(nic) && (region->strict || !nic->knobs.late_overwrite) && bytes)
        posted_settle(nic, region, offset + from, bytes);
    /* Behind what waits there already, if the order is kept. */
    bool late = nic->first && (nic_is_fifo(nic) || (order == VNIC_PLACE_MESSAGE && op->visible != op->placed));
    if (nic->knobs.visible_delay && !late) late = choice || vnic_choose(f, VNIC_CHOICE_NIC, target->rank, 4) != 0;
    /* What lands again must not come to light behind a completion that means visible. */
    if (late && !(duplicate && truthful) && bytes) {
        posted_add(nic, op, piece, region, offset + from, bytes, duplicate);
        return;
    }
    read_source(op, from, bytes, region->base + offset + from);
    met_memory(f, region, offset + from, bytes, false);
    if (bytes) wake(f, target->rank);
    if (!duplicate) op_piece_visible(op, piece);
}

static void give_old(const struct op *op, uint64_t old) {
    if (op->sges) memcpy(op->sge[0].region->base + op->sge[0].offset, &old, sizeof old);
}

static void change_word(struct op *op, struct vnic_region *region, uint64_t offset) {
    uint64_t *word = (uint64_t *)(void *)(region->base + offset);
    uint64_t old = op->compare;
    if (op->kind == VNIC_ADD)
        old = __atomic_fetch_add(word, op->value, __ATOMIC_ACQ_REL);
    else
        __atomic_compare_exchange_n(word, &old, op->value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    give_old(op, old);
    met_memory(op->endpoint->fabric, region, offset, sizeof *word, true);
}

/* Adds of one NIC are done one after the other. Between NICs they are a load and a store, with time in between. */
static void begin_add(struct op *op, struct vnic_endpoint *target, struct vnic_region *region, uint64_t offset) {
    struct vnic_nic *nic = target->nic;
    struct vnic_fabric *f = nic->fabric;
    if (nic->add_busy) {
        op_queue(&nic->add_waiting, op);
        return;
    }
    nic->add_busy = true;
    op->conn->target = nic;
    op->read_value = __atomic_load_n((uint64_t *)(void *)(region->base + offset), __ATOMIC_ACQUIRE);
    op->other_event = event_add(f, EVENT_ADD_STORE, draw_delay(f, target->rank, nic->knobs.delay / 4), op, op->conn);
}

void next_add(struct vnic_nic *nic) {
    nic->add_busy = false;
    struct op *op = nic->add_waiting;
    if (!op) return;
    nic->add_waiting = op->next_waiting;
    if (!op->failed) op_place(op, 0);
    op_release(op);
}

void op_store_add(struct op *op) {
    struct vnic_nic *nic = op->conn->target;
    uint64_t offset;
    struct vnic_region *region =
        region_find(op->endpoint->fabric, op->remote_key, op->remote_address, op->length, &offset);
    if (region) {
        const uint64_t old = op->read_value;
        const bool stores = op->kind == VNIC_ADD || old == op->compare;
        if (stores)
            __atomic_store_n((uint64_t *)(void *)(region->base + offset),
                             op->kind == VNIC_ADD ? old + op->value : op->value, __ATOMIC_RELEASE);
        if (op_local_ok(op)) give_old(op, old);
        wake(op->endpoint->fabric, region->rank);
    }
    op->placed = op->visible = 1;
    op_executed(op);
    next_add(nic);
}

/* A duplicate may come from now until the completion is given. */
static void maybe_twice(struct op *op, uint8_t piece) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = op_knobs(op);
    if (!k->dup_write || op->duplicate || op->completed || op->cut[piece + 1] == op->cut[piece]) return;
    /* By choice: it is an alternative until the completion comes, and never happens if that comes first. */
    if (!f->config.choice_schedule && !vnic_chance(f, VNIC_CHOICE_NIC, op->endpoint->rank, (uint32_t)k->dup_write))
        return;
    op->duplicate = event_add(f, EVENT_DUPLICATE, draw_delay(f, op->endpoint->rank, k->delay), op, op->conn);
    op->duplicate->piece = piece;
}

void op_place(struct op *op, uint8_t piece) {
    struct vnic_fabric *f = op->endpoint->fabric;
    const vnic_knobs *k = op_knobs(op);
    struct vnic_endpoint *target = op_target(op);
    /* A reliable connection has two ends: the other one must still be, or be again, this one's. */
    if (!target || (k->error_scope == VNIC_ERROR_QP &&
                    (op->endpoint->self >= target->peers || target->remote[op->endpoint->self] != op->endpoint->id))) {
        op_lost(op);
        return;
    }
    uint64_t offset = 0;
    struct vnic_region *region = NULL;
    if (op->length || op->kind != VNIC_WRITE_IMM) {
        region = op_remote_region(op, target, &offset);
        if (!region) {
            op_fail(op, VNIC_REMOTE_ACCESS, 0);
            return;
        }
    }
    if (!op->copy && !op_local_ok(op)) {
        op_fail(op, VNIC_LOCAL_ACCESS, 0);
        return;
    }
    if (op_is_atomic(op)) {
        if (vnic_write_atomic(k)) {
            met_flush(target->nic, target->rank);
            posted_flush_conn(target->nic, op->conn);
        }
        if (target->nic->knobs.nics > 1) {
            begin_add(op, target, region, offset);
            return;
        }
        change_word(op, region, offset);
        wake(f, target->rank);
        op->placed = op->visible = 1;
    } else if (op->kind == VNIC_READ) {
        if (k->read_flushes) {
            f->stats.flushes++;
            met_flush(target->nic, target->rank);
            posted_flush_conn(target->nic, op->conn);
        }
        const vnic_sge *to = &op->sge[0];
        if (op->length) memmove(to->region->base + to->offset, region->base + offset, op->length);
        /* What a strict region takes by a read nobody looks at: it was to flush. */
        if (!to->region->strict) met_memory(f, to->region, to->offset, op->length, false);
        op->placed = op->visible = 1;
    } else {
        if (region)
            land(op, piece, target, region, offset, false);
        else
            op->visible |= (uint8_t)(1u << piece);
        op->placed |= (uint8_t)(1u << piece);
        maybe_twice(op, piece);
        if (op->placed != op_all_pieces(op)) {
            if (k->place_order == VNIC_PLACE_MESSAGE || k->place_order == VNIC_PLACE_STRICT)
                op_enable_piece(op, (uint8_t)(piece + 1));
            return;
        }
    }
    op_executed(op);
}

void op_place_again(struct op *op, uint8_t piece) {
    struct vnic_endpoint *target = op_target(op);
    uint64_t offset = 0;
    struct vnic_region *region = target ? op_remote_region(op, target, &offset) : NULL;
    if (op->completed || !region || (!op->copy && !op_local_ok(op))) return;
    op->endpoint->fabric->stats.duplicates++;
    land(op, piece, target, region, offset, true);
}

/* ------------------------------------------------------------------------------------------------------- immediates */

/* Its own bytes are there, and where the NIC promises it, visible, and the earlier ones too. */
void op_check_immediate(struct op *op) {
    const vnic_knobs *k = op_knobs(op);
    if (op->kind != VNIC_WRITE_IMM || op->imm_enabled || op->failed || !op->executed || op->imm_blockers) return;
    if (op->endpoint->in_turn && op->turn != op->conn->turn) return;
    if ((k->imm_visible || vnic_write_imm(k)) && !op->seen) return;
    op->imm_enabled = true;
    struct vnic_fabric *f = op->endpoint->fabric;
    const uint64_t delay = draw_delay(f, op->endpoint->rank, vnic_write_imm(k) ? 0 : k->delay);
    op->other_event = event_add(f, EVENT_IMMEDIATE, delay, op, op->conn);
}

void op_deliver_immediate(struct op *op) {
    struct vnic_fabric *f = op->endpoint->fabric;
    struct vnic_endpoint *target = op_target(op);
    if (!target || target->peers <= op->endpoint->self) {
        op_lost(op);
        return;
    }
    const vnic_knobs *k = &target->nic->knobs;
    const bool consumes = vnic_imm_consumes(k);
    bool ready = true;
    vnic_status own = VNIC_OK;
    if (target->receive) {
        if (fault(f, VNIC_FAULT_RNR, target->rank, op->endpoint->self, NULL))
            own = VNIC_RNR_EXCEEDED;
        else
            own = target->receive(target->receive_context, op->cookie);
        ready = own != VNIC_RNR_EXCEEDED;
    } else if (consumes) {
        struct conn *back = conn_get(target, op->endpoint->self);
        ready = k->srq ? target->shared_receives > 0 : back->receives > 0;
        if (fault(f, VNIC_FAULT_RNR, target->rank, op->endpoint->self, NULL)) ready = false;
        if (ready) {
            target->shared_receives--;
            back->receives--; /* with a shared queue below zero where a peer takes others' */
        }
    }
    if (!ready) {
        f->stats.rnr++;
        const vnic_terms *terms = &op->endpoint->terms;
        if (op_knobs(op)->rnr == VNIC_RNR_RETRY && (terms->rnr_retries == VNIC_ANY || op->rnr_left--))
            op->other_event = event_timer(f, EVENT_RNR_RETRY, terms->rnr_ns, op, op->conn);
        else
            op_fail(op, VNIC_RNR_EXCEEDED, 0);
        return;
    }
    if (own != VNIC_OK) {
        op_fail(op, own, 0);
        return;
    }
    f->stats.immediates++;
    const uint64_t bits = op_knobs(op)->imm_bits;
    const struct record r = {.cookie = bits < 64 ? op->value & ((1ull << bits) - 1) : op->value,
                             .peer = op->endpoint->self,
                             .immediate = true,
                             .consumed = consumes};
    op->received = true;
    if (!target->receive) cq_push(target, &r, false);
    struct conn *conn = op->conn;
    conn->turn++;
    for (struct op *next = op->next; op->endpoint->in_turn && next; next = next->next) {
        if (next->kind != VNIC_WRITE_IMM) continue;
        op_check_immediate(next);
        break;
    }
    op_check_ready(op);
    if (conn->active == op && op->executed) {
        conn->active = NULL;
        kick(conn);
    }
}
