/* SPDX-License-Identifier: Apache-2.0
 *
 * doorbell.c: the register that all queues of a context share.
 *
 * A store names a queue and where the program is in it. One that makes no sense changes nothing and is said, each kind
 * once: the program may wait for ever behind it, and has to hear why.
 */
#include "bnxt.h"

/* Bits of `said` above those of the types. */
enum { NO_REGISTER = 16, NO_QUEUE, NO_INDEX };

static void refuse(lab_context *context, uint32_t kind, const char *what, uint64_t value) {
    struct bnxt_context *of = context->model_data;
    if (of->said >> kind & 1) return;
    of->said |= 1u << kind;
    lab_unsupported("doorbell of a Thor: %s (0x%016llx)", what, (unsigned long long)value);
}

static bool move(lab_context *context, uint32_t *index, uint32_t n, uint64_t value) {
    if (BNXT_DOORBELL_INDEX(value) < n) {
        *index = BNXT_DOORBELL_INDEX(value);
        return true;
    }
    refuse(context, NO_INDEX, "an index that its ring does not have", value);
    return false;
}

static void ring_queue(lab_context *context, uint64_t value, bool receives) {
    lab_qp *qp = lab_qp_numbered(BNXT_DOORBELL_NUMBER(value));
    if (!qp || qp->pd->context != context) {
        refuse(context, NO_QUEUE, "no such queue", value);
        return;
    }
    struct bnxt_qp *of = qp->model_data;
    struct bnxt_ring *ring = receives ? &of->receives : &of->sends;
    const uint32_t before = ring->posted, batch = (uint32_t)context->device->knobs.max_batch;
    if (!move(context, &ring->posted, ring->n, value)) return;
    ring->rung = value;
    if (receives || !batch) return;
    if ((ring->posted + ring->n - before) % ring->n > batch) ring->over = (before + batch) % ring->n;
}

static void ring_shared(lab_context *context, uint64_t value, bool arm) {
    lab_srq *srq = lab_find_srq(context, BNXT_DOORBELL_NUMBER(value));
    if (!srq) {
        refuse(context, NO_QUEUE, "no such queue", value);
        return;
    }
    struct bnxt_srq *of = srq->model_data;
    if (!arm) {
        if (move(context, &of->ring.posted, of->ring.n, value)) of->ring.rung = value;
        return;
    }
    srq->limit = BNXT_DOORBELL_INDEX(value);
    lab_srq_look(srq);
}

/* Libraries tell what they have taken before they have taken a whole ring of it: so the index alone says how far they
 * are. Arming says it, too; entries beyond it are an event at once. */
static void ring_completions(lab_context *context, uint64_t value, uint32_t type) {
    lab_cq *cq = lab_find_cq(context, BNXT_DOORBELL_NUMBER(value));
    if (!cq) {
        refuse(context, NO_QUEUE, "no such queue", value);
        return;
    }
    struct bnxt_cq *of = cq->model_data;
    /* Where it is now: `index` is that of `produced`. */
    uint32_t at = (of->index + of->n - (of->produced - of->consumed)) % of->n;
    const uint32_t before = at;
    if (!move(context, &at, of->n, value)) return;
    const uint32_t taken = (at + of->n - before) % of->n;
    if (taken > of->produced - of->consumed) {
        refuse(context, NO_INDEX, "completions that have not been written are taken", value);
        return;
    }
    of->consumed += taken;
    if (type == BNXT_CONSUMED) return;
    cq->armed = true;
    cq->solicited_only = type == BNXT_ARM_SOLICITED;
    const uint32_t last = cq->solicited_only ? of->solicited : of->produced;
    if (last - of->consumed - 1 < of->n) lab_cq_notify(cq, true);
}

void bnxt_store(lab_context *context, uint32_t page, uint32_t offset, uint64_t value, uint32_t width) {
    const uint32_t type = BNXT_DOORBELL_TYPE(value);
    (void)page;
    if (offset || width != sizeof value) {
        refuse(context, NO_REGISTER, "a store beside the register (entries that are pushed)", value);
        return;
    }
    switch (type) {
    case BNXT_RING_SENDS:
    case BNXT_RING_RECEIVES:
        ring_queue(context, value, type == BNXT_RING_RECEIVES);
        return;
    case BNXT_RING_SHARED:
    case BNXT_ARM_SHARED:
        ring_shared(context, value, type == BNXT_ARM_SHARED);
        return;
    case BNXT_CONSUMED:
    case BNXT_ARM_SOLICITED:
    case BNXT_ARM_ALL:
        ring_completions(context, value, type);
        return;
    default:
        refuse(context, type, "a type that this NIC does not offer", value);
    }
}

void bnxt_ring(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring) {
    const struct bnxt_qp *of = qp->model_data;
    const bool sends = kind == LAB_RING_SENDS;
    const struct bnxt_ring *r = sends     ? &of->sends
                                : qp->srq ? &((const struct bnxt_srq *)qp->srq->model_data)->ring
                                          : &of->receives;
    *ring = (struct lab_ring){.entries = r->entries,
                              .bytes = r->n * BNXT_ENTRY,
                              .unit = BNXT_ENTRY,
                              .posted = r->posted,
                              .number = !sends && qp->srq ? qp->srq->handle : qp->number,
                              .doorbell_bytes = sizeof r->rung};
    memcpy(ring->doorbell, &r->rung, sizeof r->rung);
}
