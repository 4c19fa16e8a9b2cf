/* SPDX-License-Identifier: Apache-2.0
 *
 * op.c: what an op refers to: its memory, its target, and how long it lives.
 */
#include "internal.h"

void op_release(struct op *op) {
    if (--op->refs) return;
    struct vnic_fabric *f = op->endpoint ? op->endpoint->fabric : NULL;
    if (op->copy) data_give(f, op->copy, op->copy_class);
    pool_give(&f->ops, op);
}

/* The target's endpoint, if it is there and its NIC works. */
struct vnic_endpoint *op_target(const struct op *op) {
    struct vnic_endpoint *target = endpoint_of(op->endpoint->fabric, op->conn->remote);
    return target && !target->nic->lost ? target : NULL;
}

bool op_local_ok(const struct op *op) {
    for (uint32_t i = 0; i < op->sges; i++) {
        const vnic_sge *s = &op->sge[i];
        if (!s->length) continue;
        if (!s->region || !s->region->alive || s->region->rank != op->endpoint->rank || s->offset > s->region->bytes ||
            s->length > s->region->bytes - s->offset)
            return false;
    }
    return true;
}

/* A key opens memory of the rank at the other end of the connection, and of no other. */
struct vnic_region *op_remote_region(const struct op *op, const struct vnic_endpoint *target, uint64_t *offset) {
    struct vnic_region *region =
        region_find(op->endpoint->fabric, op->remote_key, op->remote_address, op->length, offset);
    return region && region->rank == target->rank ? region : NULL;
}

void op_read_ahead(struct op *op) {
    if (!op_is_write(op) || op->copy || !op->length || !op_local_ok(op)) return;
    uint32_t class;
    char *copy = data_take(op->endpoint->fabric, op->length, &class);
    read_source(op, 0, op->length, copy);
    op->copy = copy;
    op->copy_class = class;
}

void conn_detach(struct conn *conn) {
    for (struct op *op = conn->head; op && op->launched; op = op->next) op_read_ahead(op);
}
