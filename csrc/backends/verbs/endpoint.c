/* SPDX-License-Identifier: Apache-2.0
 *
 * endpoint.c: the queues of one thread: a completion queue, receives, a queue pair for each peer (the own rank too: it
 * is connected to itself).
 *
 * Sizes are for the worst case, so that neither a completion queue overruns nor a receiver is ever not ready. A
 * completion queue holds every work request that can be outstanding, since all of them complete when a queue pair
 * breaks, signalled or not; every receive; and one more for each peer, the last of a connection.
 */
#include "rc.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ----------------------------------------------------------------------------------------------------- queue pairs */

/* Any number will do, as long as it is another than the last connection's: late packets of that one are then not taken
 * for new ones, also where the NIC gives the number of its queue pair again. */
static uint32_t first_packet(const verbs_peer *p) {
    uint32_t psn = 0;
    if (getrandom(&psn, sizeof psn, GRND_NONBLOCK) != sizeof psn) psn = p->psn + 0x5bd1e9;
    psn &= 0xffffff;
    return psn != p->psn ? psn : (psn + 0x800000) & 0xffffff;
}

static uccl_ep_status no_queue_pair(const uccl_ep_endpoint *e, uint32_t peer, int error) {
    const verbs_found *found = &e->nic->found;
    return verbs_fail(e->device->host, error == ENOMEM ? UCCL_EP_E_NO_MEMORY : UCCL_EP_E_NIC, error,
                      "%.32s: no queue pair for rank %u of %u: %s (errno %d; the NIC has %u of %u requests)%s",
                      found->name, peer, e->peers, strerror(error), error, found->limits.max_qp,
                      found->limits.max_qp_wr,
                      error == ENOMEM ? ": fewer proxies, max_inflight_peer=, or ulimit -l" : "");
}

/* With requests by calls (ibv_wr_*) where the provider has them. */
static struct ibv_qp *create(const uccl_ep_endpoint *e, struct ibv_qp_init_attr *attributes, struct ibv_qp_ex **calls) {
    const verbs_library *l = &e->device->library;
    struct verbs_context *context = verbs_get_ctx_op(e->nic->context, create_qp_ex);
    const int32_t option = e->device->options.calls;
    *calls = NULL;
    if (context && l->ibv_qp_to_qp_ex && (option == VERBS_UNSET ? !verbs_this_vendor.lists : option)) {
        struct ibv_qp_init_attr_ex extended = {.qp_context = attributes->qp_context,
                                               .send_cq = attributes->send_cq,
                                               .recv_cq = attributes->recv_cq,
                                               .srq = attributes->srq,
                                               .cap = attributes->cap,
                                               .qp_type = attributes->qp_type,
                                               .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                               .pd = e->nic->pd,
                                               .send_ops_flags =
                                                   IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                                   IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD};
        if (!(e->device->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64))
            extended.send_ops_flags &= ~(uint64_t)IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
        struct ibv_qp *qp = context->create_qp_ex(e->nic->context, &extended);
        if (qp) {
            attributes->cap = extended.cap;
            *calls = l->ibv_qp_to_qp_ex(qp);
            return qp;
        }
        /* A provider without them says so; anything else is looked at by the ordinary call. */
    }
    errno = 0;
    return l->ibv_create_qp(e->nic->pd, attributes);
}

uccl_ep_status verbs_qp_open(uccl_ep_endpoint *e, uint32_t peer) {
    const verbs_library *l = &e->device->library;
    verbs_peer *p = &e->peer[peer];
    struct ibv_qp_init_attr attributes;
    for (;;) {
        /* What is granted is written into it. */
        attributes = (struct ibv_qp_init_attr){.qp_context = p, /* of its events */
                                               .send_cq = e->queue.cq,
                                               .recv_cq = e->queue.cq,
                                               .srq = e->srq,
                                               .qp_type = IBV_QPT_RC,
                                               .cap = {.max_send_wr = e->depth,
                                                       .max_recv_wr = e->srq             ? 0
                                                                      : e->receives_peer ? e->receives_peer
                                                                                         : 1,
                                                       .max_send_sge = 1,
                                                       .max_recv_sge = e->srq ? 0 : 1,
                                                       .max_inline_data = e->inline_bytes}};
        p->qp = create(e, &attributes, &p->calls);
        if (p->qp) break;
        const int error = errno ? errno : EIO;
        if (!e->inline_bytes) {
            p->state = VERBS_BROKEN;
            return no_queue_pair(e, peer, error);
        }
        e->inline_bytes /= 2; /* more than the NIC grants: some refuse instead, or find no memory for the queue */
    }
    if (attributes.cap.max_send_wr < e->depth) {
        l->ibv_destroy_qp(p->qp);
        p->qp = NULL;
        p->state = VERBS_BROKEN;
        return verbs_fail(e->device->host, UCCL_EP_E_NIC, 0,
                          "%s: a queue pair of %u requests was asked for, and has %u", e->nic->found.name, e->depth,
                          attributes.cap.max_send_wr);
    }
    p->granted_inline = attributes.cap.max_inline_data;
    if (p->granted_inline > e->inline_bytes) p->granted_inline = e->inline_bytes;
    p->state = VERBS_IDLE;
    p->posted = p->completed = 0u - 64; /* so that wrapping is nothing that comes after hours (LIM-1) */
    p->psn = first_packet(p);
    p->generation++;
    atomic_store_explicit(&p->last_receive, 0, memory_order_relaxed);
    p->waits_until = 0;
    p->failure = UCCL_EP_OK;
    p->failure_of_posting = false;
    p->number = p->qp->qp_num;
    e->nic->qp_peer[p->number & 0xffffff] = (uint16_t)(peer + 1);
    return UCCL_EP_OK;
}

uccl_ep_status verbs_qp_close(uccl_ep_endpoint *e, uint32_t peer) {
    verbs_peer *p = &e->peer[peer];
    if (!p->qp) return UCCL_EP_OK;
    verbs_take_events(e->device, e->nic); /* of this one, too */
    /* Before, since another thread may be given the number at once. */
    e->nic->qp_peer[p->number & 0xffffff] = 0;
    const int error = e->device->library.ibv_destroy_qp(p->qp);
    /* A NIC that is gone writes nothing, whatever the kernel says of its queue pairs. */
    if (error && !atomic_load_explicit(&e->nic->lost, memory_order_acquire)) {
        e->nic->qp_peer[p->number & 0xffffff] = (uint16_t)(peer + 1);
        return verbs_fail(e->device->host, UCCL_EP_E_NIC, error,
                          "%.32s: the queue pair of rank %u cannot be destroyed, and may still read and write: %s "
                          "(errno %d)",
                          e->nic->found.name, peer, strerror(error), error);
    }
    p->qp = NULL;
    p->number = UINT32_MAX;
    p->state = VERBS_BROKEN;
    return UCCL_EP_OK;
}

/* -------------------------------------------------------------------------------------------------------- receives */

/* An immediate brings its bytes to where the sender said, so the buffer stays as it is. There is one nevertheless, and
 * it is not empty: a shared queue of bnxt_re needs an element (rdma-core providers/bnxt_re: not every version pads
 * one), and to mlx5 a length of 0 is 2^31 bytes. */
uccl_ep_status verbs_post_receives(uccl_ep_endpoint *e, uint32_t peer, uint32_t n) {
    struct ibv_recv_wr requests[VERBS_BATCH], *bad;
    struct ibv_sge nowhere = {
        .addr = (uintptr_t)e->nic->scratch, .length = sizeof(uint64_t), .lkey = e->nic->scratch_mr->lkey};
    memset(requests, 0, sizeof requests);
    while (n) {
        const uint32_t some = n < VERBS_BATCH ? n : VERBS_BATCH;
        for (uint32_t i = 0; i < some; i++) {
            requests[i].wr_id = VERBS_WR_RECEIVE | verbs_wr_id(0, e->peer[peer].generation, peer);
            requests[i].sg_list = &nowhere;
            requests[i].num_sge = 1;
            requests[i].next = i + 1 < some ? &requests[i + 1] : NULL;
        }
        const int error =
            e->srq ? ibv_post_srq_recv(e->srq, requests, &bad) : ibv_post_recv(e->peer[peer].qp, requests, &bad);
        if (error)
            return verbs_fail(e->device->host, UCCL_EP_E_NIC, error, "%s: posting receives for rank %u: %s (errno %d)",
                              e->nic->found.name, peer, strerror(error), error);
        n -= some;
    }
    return UCCL_EP_OK;
}

uccl_ep_status verbs_replenish(uccl_ep_endpoint *e, uint32_t peer, uint32_t n) {
    if (peer >= e->peers)
        return verbs_fail(e->device->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
    verbs_peer *p = &e->peer[peer];
    if (p->state != VERBS_CONNECTED) return UCCL_EP_OK; /* connect() makes up for it */
    if (n > p->taken)
        return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "rank %u: %u receives given back, and it took %u",
                          peer, n, p->taken);
    const uccl_ep_status status = verbs_post_receives(e, peer, n);
    if (status == UCCL_EP_OK) p->taken -= n;
    return status;
}

/* --------------------------------------------------------------------------------------------------- open and close */

static uccl_ep_status check_config(uccl_ep_device *d, const uccl_ep_endpoint_config *c) {
    if (!c->peers || c->peers > d->caps.max_peers || c->rank >= c->peers || (d->endpoints && c->peers != d->peers))
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0,
                          "rank %u of %u: at most %u are possible, and on all endpoints alike", c->rank, c->peers,
                          d->caps.max_peers);
    if (!c->inflight_peer || !c->inflight || c->inflight_peer > d->caps.max_inflight_peer)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "%u operations to a peer, %u in all: 1 to %u are possible",
                          c->inflight_peer, c->inflight, d->caps.max_inflight_peer);
    return UCCL_EP_OK;
}

/* Where a region is registered in pieces, here or at the peer, an operation becomes up to three requests: own pieces
 * are known, those of peers are not yet. So a queue holds three of one operation at least, else the operations asked
 * for if they are whole; completions are counted as if all were in pieces. */
static uint32_t requests_an_operation(const uccl_ep_device *d) {
    for (uint32_t i = 0; i < UCCL_EP_REGIONS; i++)
        if (d->region[i].chunks > 1) return VERBS_PARTS;
    return 1;
}

static uccl_ep_status open_queues(uccl_ep_endpoint *e, const uccl_ep_endpoint_config *c) {
    uccl_ep_device *d = e->device;
    const verbs_library *l = &d->library;
    const verbs_found *found = &e->nic->found;
    uint64_t sends = (uint64_t)c->inflight * VERBS_PARTS;
    const uint64_t receives = (uint64_t)e->peers * e->receives_peer, all = (uint64_t)e->peers * e->depth;
    if (sends > all) sends = all;
    const uint64_t entries = sends + receives + e->peers;
    if (entries > found->limits.max_cqe)
        return verbs_fail(d->host, UCCL_EP_E_CAPABILITY, 0,
                          "%s: %" PRIu64
                          " completions may be outstanding, and its queues hold %u: fewer max_inflight, or "
                          "ranks",
                          found->name, entries, found->limits.max_cqe);
    const uccl_ep_status status = verbs_queue_open(&e->queue, d, e->nic, (uint32_t)entries, (uint32_t)entries);
    if (status != UCCL_EP_OK) return status;
    if (!receives || !found->limits.max_srq_wr) return UCCL_EP_OK;
    struct ibv_srq_init_attr attributes = {.srq_context = &e->queue,
                                           .attr = {.max_wr = (uint32_t)receives, .max_sge = 1}};
    if (receives > found->limits.max_srq_wr)
        return verbs_fail(d->host, UCCL_EP_E_CAPABILITY, 0, "%s: %" PRIu64 " receives, and a shared queue holds %u",
                          found->name, receives, found->limits.max_srq_wr);
    errno = 0;
    e->srq = l->ibv_create_srq(e->nic->pd, &attributes);
    if (!e->srq)
        return verbs_fail(d->host, errno == ENOMEM ? UCCL_EP_E_NO_MEMORY : UCCL_EP_E_NIC, errno,
                          "%s: no shared receive queue of %" PRIu64 ": %s (errno %d)", found->name, receives,
                          strerror(errno), errno);
    return verbs_post_receives(e, 0, (uint32_t)receives);
}

static size_t cookies_bytes(const uccl_ep_endpoint *e) {
    return (size_t)e->peers * (e->mask + 1) * sizeof *e->cookies;
}

uccl_ep_status verbs_endpoint_open(uccl_ep_device *d, const uccl_ep_endpoint_config *given, uccl_ep_endpoint **out) {
    *out = NULL;
    uccl_ep_endpoint_config c = {0};
    memcpy(&c, given, given->size < sizeof c ? given->size : sizeof c);
    uccl_ep_status status = check_config(d, &c);
    if (status != UCCL_EP_OK) return status;
    uccl_ep_endpoint *e = calloc(1, sizeof *e + c.peers * sizeof *e->peer);
    if (!e) return verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for an endpoint of %u peers", c.peers);
    e->device = d;
    e->index = c.index;
    e->nic_index = c.index % d->nics;
    e->nic = &d->nic[e->nic_index];
    e->rank = d->rank = c.rank;
    e->peers = d->peers = c.peers;
    d->endpoints++;
    e->receives_peer = c.receives_peer;
    e->inline_bytes = e->nic->found.limits.inline_bytes;
    uint64_t depth = (uint64_t)c.inflight_peer * requests_an_operation(d) + 1;
    if (depth < VERBS_PARTS + 1) depth = VERBS_PARTS + 1;
    if (depth > e->nic->found.limits.max_qp_wr) depth = e->nic->found.limits.max_qp_wr;
    e->depth = (uint32_t)depth;
    e->mask = e->depth > 1 ? (2u << (31 - __builtin_clz(e->depth - 1))) - 1 : 0;
    e->cookies = verbs_reserve(cookies_bytes(e));
    if (!e->cookies) status = verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, errno, "no memory for %u peers", e->peers);
    if (status == UCCL_EP_OK) status = open_queues(e, &c);
    for (uint32_t peer = 0; peer < e->peers && status == UCCL_EP_OK; peer++) {
        e->peer[peer].cookies = e->cookies + (size_t)peer * (e->mask + 1);
        status = verbs_qp_open(e, peer);
    }
    if (status != UCCL_EP_OK) {
        verbs_endpoint_close(e);
        return status;
    }
    *out = e;
    return UCCL_EP_OK;
}

/* Destroying a queue pair ends its DMA. */
void verbs_endpoint_close(uccl_ep_endpoint *e) {
    const verbs_library *l = &e->device->library;
    for (uint32_t peer = 0; peer < e->peers; peer++) verbs_qp_close(e, peer);
    if (e->srq) l->ibv_destroy_srq(e->srq);
    verbs_queue_close(&e->queue);
    verbs_release(e->cookies, cookies_bytes(e));
    e->device->endpoints--;
    free(e);
}
