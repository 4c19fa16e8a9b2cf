/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c: registered regions, and the bytes that wait between a NIC and memory.
 *
 * A NIC acknowledges bytes once it has them; they go through its buffer and the PCIe path and become visible later
 * (knob visible_delay). A NIC with strict order keeps the order of arrival there; another may let any leave first, but
 * where a message lands in order it becomes visible in order, too.
 */
#include <stdlib.h>

#include "internal.h"

#define REGIONS_SPARE 1024u /* that wait before one of them is used again */

/* ---------------------------------------------------------------------------------------------------------- regions */

/* The id in the low bits, and above it a number that no other registration of that id has had (with 32 bits, none of
 * the last 32767): a stale or cut key names nothing. */
static uint64_t make_key(struct vnic_fabric *f, const vnic_knobs *knobs, uint32_t id, uint64_t turn) {
    uint64_t tag = (uint64_t)id * 0x9e3779b97f4a7c15ull ^ f->config.seed * 0xd1342543de82ef95ull;
    tag ^= tag >> 31;
    if (knobs->key_bits == 32) return ((tag + (turn << 16)) & 0x7fff0000u) | 0x80000000u | id;
    return ((tag + turn) << 16 | id) | 1ull << 63;
}

/* An id: one that nobody has had, or the one that was given back first once so many wait that what is late for it is
 * long over. */
static vnic_region *take_id(struct vnic_fabric *f) {
    if (f->n_spare && (f->n_spare > REGIONS_SPARE || f->n_regions >= VNIC_MAX_REGIONS)) {
        vnic_region *spare = f->regions[f->first_spare];
        f->first_spare = spare->next_spare;
        f->n_spare--;
        return spare;
    }
    if (f->n_regions >= VNIC_MAX_REGIONS) return NULL;
    if (f->n_regions + 1 >= f->room_regions) {
        const uint32_t room = f->room_regions ? 2 * f->room_regions : 64;
        vnic_region **grown = realloc(f->regions, room * sizeof *grown);
        if (!grown) return NULL;
        f->regions = grown;
        f->room_regions = room;
        if (!f->n_regions) f->regions[f->n_regions++] = NULL; /* id 0 names nothing */
    }
    vnic_region *region = calloc(1, sizeof *region);
    if (!region) return NULL;
    region->id = f->n_regions++;
    f->regions[region->id] = region;
    return region;
}

vnic_region *vnic_region_add(struct vnic_fabric *f, const vnic_knobs *knobs, uint32_t rank, uint32_t tag, void *base,
                             uint64_t bytes) {
    vnic_region *region = take_id(f);
    if (!region) return NULL;
    const uint32_t id = region->id, turn = region->turn;
    *region = (vnic_region){.base = base,
                            .bytes = bytes,
                            .key = make_key(f, knobs, id, turn),
                            .id = id,
                            .turn = turn,
                            .rank = rank,
                            .tag = tag,
                            .by_address = knobs->addr_mode == VNIC_ADDRESS_VIRTUAL,
                            .alive = true};
    return region;
}

void vnic_region_remove(struct vnic_fabric *f, vnic_region *region) {
    if (!region->alive) return;
    for (uint32_t i = 0; i < f->n_nics; i++)
        if (f->nics[i]) posted_flush_region(f->nics[i], region);
    region->alive = false;
}

void vnic_region_forget(struct vnic_fabric *f, vnic_region *region) {
    vnic_region_remove(f, region);
    region->turn++;
    if (f->n_spare++)
        f->regions[f->last_spare]->next_spare = region->id;
    else
        f->first_spare = region->id;
    f->last_spare = region->id;
}

vnic_region *vnic_region_of(const struct vnic_fabric *f, uint32_t id) {
    return id < f->n_regions ? f->regions[id] : NULL;
}

struct vnic_region *region_find(const struct vnic_fabric *f, uint64_t key, uint64_t address, uint64_t bytes,
                                uint64_t *offset) {
    vnic_region *region = vnic_region_of(f, (uint32_t)(key & 0xffff));
    if (!region || !region->alive || region->key != key) return NULL;
    const uint64_t at = region->by_address ? address - (uintptr_t)region->base : address;
    if (at > region->bytes || bytes > region->bytes - at) return NULL;
    *offset = at;
    return region;
}

void read_source(const struct op *op, uint32_t at, uint32_t bytes, char *to) {
    if (op->copy) {
        memcpy(to, op->copy + at, bytes);
        return;
    }
    for (uint32_t i = 0; i < op->sges && bytes; i++) {
        const vnic_sge *s = &op->sge[i];
        if (at >= s->length) {
            at -= s->length;
            continue;
        }
        const uint32_t here = s->length - at < bytes ? s->length - at : bytes;
        memmove(to, s->region->base + s->offset + at, here); /* a rank's own target may overlap its source */
        to += here;
        bytes -= here;
        at = 0;
    }
}

/* ---------------------------------------------------------------------------------------------------- posted writes */

bool nic_is_fifo(const struct vnic_nic *nic) {
    return nic->knobs.place_order == VNIC_PLACE_STRICT && !nic->knobs.relaxed;
}

/* The next one of its kind may become visible: the NIC's oldest, or the next piece of a message that lands in order. */
static void enable(struct vnic_nic *nic, struct posted *p) {
    if (p->event) return;
    struct vnic_fabric *f = nic->fabric;
    p->event = event_add(f, EVENT_VISIBLE, draw_delay(f, p->region->rank, nic->knobs.visible_delay), NULL, NULL);
    p->event->posted = p;
    p->event->piece = p->piece;
}

static bool in_order_within(const struct posted *p) {
    const vnic_place order = (vnic_place)knobs_of(p->op->conn)->place_order;
    return order == VNIC_PLACE_MESSAGE || order == VNIC_PLACE_STRICT;
}

static bool behind_its_own(const struct posted *p) {
    for (const struct posted *q = p->previous; q; q = q->previous)
        if (q->op == p->op) return true;
    return false;
}

void posted_add(struct vnic_nic *nic, struct op *op, uint8_t piece, struct vnic_region *region, uint64_t offset,
                uint32_t bytes, bool duplicate) {
    struct vnic_fabric *f = nic->fabric;
    struct posted *p = must(pool_take(&f->posted));
    p->nic = nic;
    p->region = region;
    p->op = op;
    p->offset = offset;
    p->bytes = bytes;
    p->piece = piece;
    p->duplicate = duplicate;
    p->data = data_take(f, bytes, &p->data_class);
    read_source(op, op->cut[piece], bytes, p->data);
    f->met.buffer |= rank_bit(region->rank);
    if (nic_is_fifo(nic)) f->met.order |= rank_bit(region->rank);
    op->refs++;
    op->conn->posted++;
    op->conn->target = nic;
    op->waiting_entries++;
    p->previous = nic->last;
    if (nic->last)
        nic->last->next = p;
    else
        nic->first = p;
    nic->last = p;
    if (nic_is_fifo(nic)) {
        if (nic->first == p) enable(nic, p);
    } else if (!in_order_within(p) || !behind_its_own(p)) {
        enable(nic, p);
    }
}

static void leave(struct vnic_nic *nic, struct posted *p, bool written) {
    struct vnic_fabric *f = nic->fabric;
    if (p->previous)
        p->previous->next = p->next;
    else
        nic->first = p->next;
    if (p->next)
        p->next->previous = p->previous;
    else
        nic->last = p->previous;
    if (p->event) event_remove(f, p->event);
    if (nic_is_fifo(nic)) {
        if (nic->first) enable(nic, nic->first);
    } else if (in_order_within(p)) {
        for (struct posted *q = p->next; q; q = q->next) {
            if (q->op != p->op) continue;
            enable(nic, q);
            break;
        }
    }
    data_give(f, p->data, p->data_class);
    struct op *op = p->op;
    const uint8_t piece = p->piece;
    const bool counts = written && !p->duplicate;
    const uint32_t rank = p->region->rank;
    f->met.buffer |= rank_bit(rank);
    if (written) met_memory(f, p->region, p->offset, p->bytes, false);
    op->conn->posted--;
    op->waiting_entries--;
    if (op->completed) nic->of_completed--;
    pool_give(&f->posted, p);
    if (written) wake(f, rank);
    if (counts) op_piece_visible(op, piece);
    op_release(op);
}

/* Into memory. */
void posted_drain(struct vnic_nic *nic, struct posted *p) {
    if (p->region->alive) memcpy(p->region->base + p->offset, p->data, p->bytes);
    leave(nic, p, true);
}

/* All that satisfies a condition, in the order of arrival; with strict order what lies before it goes, too. Draining
 * one can make no new entries, but its op's next steps may remove some: look from the front each time. */
static void flush(struct vnic_nic *nic, const struct conn *conn, const struct vnic_region *region) {
    for (;;) {
        struct posted *p = nic->first;
        while (p && !(conn ? p->op->conn == conn : p->region == region)) p = p->next;
        if (!p) return;
        posted_drain(nic, nic_is_fifo(nic) ? nic->first : p);
    }
}

/* Whether or not there is anything: what comes a little later is not emptied. */
void met_flush(struct vnic_nic *nic, uint32_t rank) {
    nic->fabric->met.emptied |= rank_bit(rank);
    if (nic_is_fifo(nic)) nic->fabric->met.order |= rank_bit(rank);
}

void posted_flush_conn(struct vnic_nic *nic, const struct conn *conn) {
    if (conn->posted) flush(nic, conn, NULL);
}

void posted_flush_region(struct vnic_nic *nic, const struct vnic_region *region) {
    flush(nic, NULL, region);
}

void posted_settle(struct vnic_nic *nic, const struct vnic_region *region, uint64_t offset, uint32_t bytes) {
    for (struct posted *p = nic->of_completed ? nic->first : NULL; p;) {
        if (!p->op->completed || p->region != region || p->offset >= offset + bytes || offset >= p->offset + p->bytes) {
            p = p->next;
            continue;
        }
        posted_drain(nic, p);
        p = nic->of_completed ? nic->first : NULL; /* more may have left than this one */
    }
}

/* A completion is given: what landed again of its op comes to light now or never. A NIC that lets it wait for longer
 * places bytes again behind the completion, and no flush of the target's before it can help, nor a read that came to
 * the target between the two copies. */
void posted_end_duplicates(struct vnic_nic *nic, const struct op *op) {
    while (op->waiting_entries) {
        struct posted *p = nic->first;
        while (p && !(p->op == op && p->duplicate)) p = p->next;
        if (!p) return;
        posted_drain(nic, nic_is_fifo(nic) ? nic->first : p);
    }
}

/* A rank is dead, and so is its memory. */
void posted_drop_rank(struct vnic_nic *nic, uint32_t rank) {
    for (struct posted *p = nic->first, *next; p; p = next) {
        next = p->next; /* it stays: nothing is drained here */
        if (p->region->rank != rank) continue;
        struct op *op = p->op;
        op->refs++;
        leave(nic, p, false);
        op_lost(op);
        op_release(op);
    }
}

void vnic_flush_local(struct vnic_endpoint *e, const vnic_region *region) {
    struct vnic_fabric *f = e->fabric;
    f->stats.flushes++;
    note(f, NOTE_FLUSH, e->rank, e->rank, region->tag, 0, 0);
    vnic_hash_mix(f, 0xf1005u ^ (uint64_t)e->id << 32);
    met_flush(e->nic, e->rank);
    posted_flush_region(e->nic, region);
}
