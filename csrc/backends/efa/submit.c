/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.c: operations to work requests, one doorbell a batch. Each operation is one request, and signalled: the
 * provider refuses others, and fences (rdma-core providers/efa, verbs.c).
 */
#include "efa.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "../verbs/operation.h"

static inline uint64_t take_slot(uccl_ep_endpoint *e, uint32_t peer, uint64_t cookie) {
    const uint32_t at = e->free[--e->n_free];
    efa_slot *slot = &e->slots[at];
    slot->cookie = cookie;
    slot->peer = peer;
    slot->uses++; /* odd: in use */
    return EFA_WR_SEND | (uint64_t)(slot->uses & 0x3fffffff) << 32 | at;
}

static inline void request(uccl_ep_endpoint *e, const efa_peer *p, const verbs_remote *remote,
                           const uccl_ep_operation *o, uint64_t wr_id) {
    struct ibv_qp_ex *qp = e->calls;
    const verbs_region *local = &e->device->region[o->local_region];
    const uint64_t here = local->address + o->local_offset, there = remote->address + o->remote_offset;
    const uint32_t rkey = remote->rkeys[e->nic_index];
    qp->wr_id = wr_id;
    qp->wr_flags = VERBS_FAULT(unsignalled) ? 0 : IBV_SEND_SIGNALED;
    /* The CPU copies what goes inline: not from a GPU's memory. */
    const bool inlined = o->length && o->length <= e->granted_inline && o->kind != UCCL_EP_OPERATION_READ &&
                         local->kind == UCCL_EP_MEMORY_HOST;
    if (inlined) qp->wr_flags |= IBV_SEND_INLINE;
    if (o->kind == UCCL_EP_OPERATION_WRITE_IMM)
        ibv_wr_rdma_write_imm(qp, rkey, there, htonl((uint32_t)o->value | (uint32_t)p->theirs << EFA_IMMEDIATE_BITS));
    else if (o->kind == UCCL_EP_OPERATION_READ)
        ibv_wr_rdma_read(qp, rkey, there);
    else
        ibv_wr_rdma_write(qp, rkey, there);
    if (inlined)
        ibv_wr_set_inline_data(qp, (void *)(uintptr_t)here, o->length);
    else if (o->length)
        ibv_wr_set_sge(qp, local->keys[e->nic_index].lkey[0], here, o->length);
    else
        ibv_wr_set_sge_list(qp, 0, NULL);
    ibv_wr_set_ud_addr(qp, p->ah, p->qp_number, p->qkey);
}

/* The last n slots that were taken were for nothing. */
static void give_back(uccl_ep_endpoint *e, uint32_t n) {
    while (n--) e->slots[e->free[e->n_free++]].uses++;
}

uccl_ep_status verbs_submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                            uint32_t flags, uint32_t *accepted) {
    (void)flags; /* a doorbell rings for every batch */
    uccl_ep_device *d = e->device;
    *accepted = 0;
    if (peer >= e->peers) return verbs_fail(d->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
    efa_peer *p = &e->peer[peer];
    if (p->state != EFA_CONNECTED) return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "rank %u: not connected", peer);
    if (VERBS_FAULT(late_handle) && !p->ah) {
        const uccl_ep_status status = efa_make_handle(e, peer);
        if (status != UCCL_EP_OK) return status;
    }
    while (*accepted < n) {
        const uint32_t left = n - *accepted, most = left < VERBS_BATCH ? left : VERBS_BATCH;
        const uccl_ep_operation *refused = NULL;
        uint32_t batch = 0;
        for (; batch < most && e->n_free; batch++) {
            const uccl_ep_operation *o = &operations[*accepted + batch];
            const verbs_remote *remote = verbs_remote_of(d, peer, o);
            if (!verbs_valid(d, e->nic, o, remote)) {
                refused = o;
                break;
            }
            if (!batch) ibv_wr_start(e->calls);
            request(e, p, remote, o, take_slot(e, peer, o->cookie));
        }
        if (batch) {
            const int error = ibv_wr_complete(e->calls); /* all or nothing */
            if (error) {
                give_back(e, batch);
                if (error == ENOMEM && !VERBS_FAULT(past_queue)) return UCCL_EP_OK; /* its queue is full: later */
                return verbs_fail(d->host, UCCL_EP_E_NIC, error, "%.32s: posting to rank %u: %s (errno %d)",
                                  e->nic->found.name, peer, strerror(error), error);
            }
            p->outstanding += batch;
            *accepted += batch;
        }
        if (refused) return verbs_refusal(d, e->nic, peer, refused, verbs_remote_of(d, peer, refused));
        if (!e->n_free) break;
    }
    return UCCL_EP_OK;
}
