/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.c: operations to work requests, one doorbell a batch.
 *
 * Where the provider can be called for each request (ibv_wr_*), it is: the request is written once, into the NIC's
 * queue. Otherwise they are posted as a list.
 *
 * An operation is one request, but where a region is registered in pieces and the operation crosses from one to the
 * next. The NIC's queue counts requests, so room is counted in them; what a signalled request covers is free again once
 * it has completed.
 */
#include "rc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "operation.h"

static const uint8_t opcodes[] = {
    [UCCL_EP_OPERATION_WRITE] = IBV_WR_RDMA_WRITE,
    [UCCL_EP_OPERATION_ADD64] = IBV_WR_ATOMIC_FETCH_AND_ADD,
    [UCCL_EP_OPERATION_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
    [UCCL_EP_OPERATION_READ] = IBV_WR_RDMA_READ,
};

/* One work request: an operation, or the part of one that crosses no piece of either region. */
typedef struct part {
    uint64_t wr_id, here, there, value;
    uint32_t length, lkey, rkey, flags; /* IBV_SEND_* */
    uint8_t opcode;                     /* ibv_wr_opcode */
} part;

static inline uint32_t within(uint64_t chunk, uint64_t offset, uint64_t length) {
    const uint64_t left = chunk - (offset & (chunk - 1));
    return (uint32_t)(length < left ? length : left);
}

/* How many requests it takes. */
static inline uint32_t parts_of(const uccl_ep_device *d, const verbs_remote *remote, const uccl_ep_operation *o) {
    if (o->kind == UCCL_EP_OPERATION_ADD64) return 1;
    const verbs_region *local = &d->region[o->local_region];
    if (__builtin_expect(local->chunks == 1 && remote->chunks == 1, 1)) return 1;
    uint32_t n = 0, done = 0;
    do {
        done += within(remote->chunk, o->remote_offset + done,
                       within(local->chunk, o->local_offset + done, o->length - done));
        n++;
    } while (done < o->length);
    return n;
}

/* What begins at byte `done` of the operation. */
static inline part part_at(const uccl_ep_endpoint *e, const verbs_remote *remote, const uccl_ep_operation *o,
                           uint32_t done, uint32_t granted_inline) {
    const uint64_t there = o->remote_offset + done;
    const uint32_t *rkeys = remote->rkeys + (size_t)e->nic_index * remote->chunks;
    part p = {.there = remote->address + there, .rkey = rkeys[there >> remote->chunk_log2], .value = o->value};
    bool last = true;
    if (o->kind == UCCL_EP_OPERATION_ADD64) {
        /* What was there before comes back, and nobody looks at it. */
        p.here = (uintptr_t)e->nic->scratch;
        p.lkey = e->nic->scratch_mr->lkey;
        p.length = sizeof(uint64_t);
        p.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    } else {
        const verbs_region *local = &e->device->region[o->local_region];
        const uint64_t here = o->local_offset + done;
        p.length = within(remote->chunk, there, within(local->chunk, here, o->length - done));
        p.here = local->address + here;
        p.lkey = local->keys[e->nic_index].lkey[here >> local->chunk_log2];
        last = done + p.length == o->length;
        p.opcode = last || o->kind == UCCL_EP_OPERATION_READ ? opcodes[o->kind] : IBV_WR_RDMA_WRITE;
        /* The CPU copies what goes inline: not from a GPU's memory. */
        if (p.length <= granted_inline && p.length && o->kind != UCCL_EP_OPERATION_READ &&
            local->kind == UCCL_EP_MEMORY_HOST)
            p.flags = IBV_SEND_INLINE;
    }
    if (last && o->flags & UCCL_EP_OPERATION_SIGNALLED) p.flags |= IBV_SEND_SIGNALED;
    return p;
}

/* ---------------------------------------------------------------------------------- two ways to hand requests over */

/* As a list, which ibv_post_send takes. */
static inline void enlist(uccl_ep_endpoint *e, uint32_t at, const part *p) {
    struct ibv_send_wr *r = &e->requests[at];
    e->pieces[at] = (struct ibv_sge){.addr = p->here, .length = p->length, .lkey = p->lkey};
    r->wr_id = p->wr_id;
    r->next = r + 1;
    r->sg_list = &e->pieces[at];
    r->num_sge = p->length != 0;
    r->opcode = (enum ibv_wr_opcode)p->opcode;
    r->send_flags = p->flags;
    if (p->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        r->wr.atomic.remote_addr = p->there;
        r->wr.atomic.compare_add = p->value;
        r->wr.atomic.swap = 0;
        r->wr.atomic.rkey = p->rkey;
        return;
    }
    r->imm_data = htonl((uint32_t)p->value);
    r->wr.rdma.remote_addr = p->there;
    r->wr.rdma.rkey = p->rkey;
}

/* Each by a call, into the NIC's queue. */
static inline void call(struct ibv_qp_ex *qp, const part *p) {
    qp->wr_id = p->wr_id;
    qp->wr_flags = p->flags; /* rxe sends inline data only with the flag; others do not look at it here */
    switch (p->opcode) {
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        ibv_wr_atomic_fetch_add(qp, p->rkey, p->there, p->value);
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        ibv_wr_rdma_write_imm(qp, p->rkey, p->there, htonl((uint32_t)p->value));
        break;
    case IBV_WR_RDMA_READ:
        ibv_wr_rdma_read(qp, p->rkey, p->there);
        break;
    default:
        ibv_wr_rdma_write(qp, p->rkey, p->there);
        break;
    }
    if (p->flags & IBV_SEND_INLINE)
        ibv_wr_set_inline_data(qp, (void *)(uintptr_t)p->here, p->length);
    else if (p->length)
        ibv_wr_set_sge(qp, p->lkey, p->here, p->length);
    else
        ibv_wr_set_sge_list(qp, 0, NULL);
}

/* The doorbell for n requests; *posted of them were taken. UINT32_MAX: nobody knows how many. */
static int ring(uccl_ep_endpoint *e, verbs_peer *p, uint32_t n, uint32_t *posted) {
    int error;
    *posted = n;
    if (p->calls) {
        error = ibv_wr_complete(p->calls);
        if (error) *posted = 0; /* all or nothing */
    } else {
        struct ibv_send_wr *bad = NULL;
        e->requests[n - 1].next = NULL;
        error = ibv_post_send(p->qp, e->requests, &bad);
        if (error) *posted = bad >= e->requests && bad < e->requests + n ? (uint32_t)(bad - e->requests) : UINT32_MAX;
    }
    p->posted += *posted < n ? *posted : n;
    return error;
}

/* Its completion may have been of an operation that submit() had refused: the reason is told again. */
__attribute__((cold, noinline)) static uccl_ep_status failed_before(const uccl_ep_endpoint *e, const verbs_peer *p,
                                                                    uint32_t peer) {
    char text[VERBS_TEXT];
    if (p->failure_of_posting)
        snprintf(text, sizeof text, "posting: %s (errno %d)", strerror(p->failure_code), p->failure_code);
    else
        verbs_describe(e->device, p->failure, p->failure_code, text, sizeof text);
    return verbs_fail(e->device->host, p->failure ? p->failure : UCCL_EP_E_NIC, p->failure_code,
                      "rank %u: its queue pair has failed before: %.180s", peer, text);
}

uccl_ep_status verbs_submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                            uint32_t flags, uint32_t *accepted) {
    (void)flags; /* a doorbell rings for every batch */
    uccl_ep_device *d = e->device;
    *accepted = 0;
    if (peer >= e->peers) return verbs_fail(d->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
    verbs_peer *p = &e->peer[peer];
    if (p->state == VERBS_FAILED) return failed_before(e, p, peer);
    if (p->state != VERBS_CONNECTED) return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "rank %u: not connected", peer);
    const uint32_t longest = d->caps.max_batch && d->caps.max_batch < VERBS_BATCH ? d->caps.max_batch : VERBS_BATCH;
    uccl_ep_status status = UCCL_EP_OK;
    for (uint32_t i = 0; i < n && status == UCCL_EP_OK;) {
        const uint32_t left = e->depth - 1 - (p->posted - p->completed), most = left < longest ? left : longest;
        uint32_t batch = 0;
        for (; i < n; i++) {
            const uccl_ep_operation *o = &operations[i];
            const verbs_remote *remote = verbs_remote_of(d, peer, o);
            if (!verbs_valid(d, e->nic, o, remote)) {
                status = verbs_refusal(d, e->nic, peer, o, remote);
                break;
            }
            const uint32_t parts = parts_of(d, remote, o);
            if (parts > e->depth - 1 || parts > longest)
                status = verbs_fail(d->host, UCCL_EP_E_RANGE, 0, "an operation of %u requests, and a queue has %u",
                                    parts, e->depth - 1);
            if (batch + parts > most || status != UCCL_EP_OK) break;
            if (p->calls && !batch) ibv_wr_start(p->calls);
            uint32_t done = 0;
            do {
                part one = part_at(e, remote, o, done, p->granted_inline);
                const uint32_t number = p->posted + batch;
                one.wr_id = verbs_wr_id(peer, p->generation, number);
                p->cookies[number & e->mask] = o->cookie;
                if (p->calls)
                    call(p->calls, &one);
                else
                    enlist(e, batch, &one);
                done += one.length;
                e->operation_of[batch++] = (uint16_t)i;
            } while (o->kind != UCCL_EP_OPERATION_ADD64 && done < o->length);
        }
        if (!batch) break; /* no room now, or refused */
        uint32_t posted;
        const int error = ring(e, p, batch, &posted);
        if (!error) {
            *accepted = i;
            continue;
        }
        /* Its queue is full: later, unless a part of an operation is under way: that is not to be placed twice. */
        const bool known = posted < batch,
                   between = !posted || !known || e->operation_of[posted - 1] != e->operation_of[posted];
        *accepted = e->operation_of[known ? posted : 0];
        if (error == ENOMEM && known && between) return UCCL_EP_OK;
        if (!known || !between) {
            p->state = VERBS_FAILED;
            p->failure = UCCL_EP_E_NIC;
            p->failure_code = error;
            p->failure_of_posting = true;
        }
        return verbs_fail(d->host, UCCL_EP_E_NIC, error, "%.32s: posting to rank %u: %s (errno %d)", e->nic->found.name,
                          peer, strerror(error), error);
    }
    return status;
}
