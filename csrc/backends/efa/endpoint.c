/* SPDX-License-Identifier: Apache-2.0
 *
 * endpoint.c: the queues of one thread: a queue pair for all peers, its completion queue, receives.
 *
 * The completion queue holds every operation that can be under way and every immediate that peers may have under way to
 * this endpoint. So it does not overrun, also if nobody reads it: immediates that take no receive are not held back by
 * anything else (ai-dynamo/nixl issue 1084), but the core has a bound for each peer.
 */
#include "efa.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* --------------------------------------------------------------------------------------------------------- receives */

/* An immediate brings its bytes to where the sender said: the element is never written. */
uccl_ep_status efa_post_receives(uccl_ep_endpoint *e, uint32_t n) {
    struct ibv_recv_wr requests[VERBS_BATCH], *bad;
    struct ibv_sge nowhere = {
        .addr = (uintptr_t)e->nic->scratch, .length = sizeof(uint64_t), .lkey = e->nic->scratch_mr->lkey};
    if (e->unsolicited || VERBS_FAULT(no_receives)) return UCCL_EP_OK;
    memset(requests, 0, sizeof requests);
    while (n) {
        const uint32_t some = n < VERBS_BATCH ? n : VERBS_BATCH;
        for (uint32_t i = 0; i < some; i++) {
            requests[i].wr_id = EFA_WR_RECEIVE;
            requests[i].sg_list = &nowhere;
            requests[i].num_sge = 1;
            requests[i].next = i + 1 < some ? &requests[i + 1] : NULL;
        }
        const int error = ibv_post_recv(e->qp, requests, &bad);
        if (error)
            return verbs_fail(e->device->host, UCCL_EP_E_NIC, error, "%s: posting receives: %s (errno %d)",
                              e->nic->found.name, strerror(error), error);
        n -= some;
    }
    return UCCL_EP_OK;
}

uccl_ep_status verbs_replenish(uccl_ep_endpoint *e, uint32_t peer, uint32_t n) {
    if (peer >= e->peers)
        return verbs_fail(e->device->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
    efa_peer *p = &e->peer[peer];
    if (p->state != EFA_CONNECTED) return UCCL_EP_OK; /* connect() makes up for it */
    if (n > p->taken)
        return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "rank %u: %u receives given back, and it took %u",
                          peer, n, p->taken);
    const uccl_ep_status status = efa_post_receives(e, n);
    if (status == UCCL_EP_OK) p->taken -= n;
    return status;
}

/* ------------------------------------------------------------------------------------------------------- queue pair */

static uccl_ep_status no_queue_pair(const uccl_ep_endpoint *e, int error) {
    const verbs_found *found = &e->nic->found;
    return verbs_fail(
        e->device->host, error == ENOMEM ? UCCL_EP_E_NO_MEMORY : UCCL_EP_E_NIC, error,
        "%.32s: no queue pair of %u requests: %s (errno %d; the NIC has %u queue pairs for all processes, "
        "of %u requests)%s",
        found->name, e->depth, strerror(error), error, found->limits.max_qp, found->limits.max_qp_wr,
        error == ENOMEM ? ": fewer ranks or proxies on this NIC, or ulimit -l" : "");
}

static struct ibv_qp *create(const uccl_ep_endpoint *e, uint32_t inline_bytes, uint32_t receives,
                             struct ibv_qp_cap *granted) {
    const verbs_limits *l = &e->nic->found.limits;
    struct ibv_qp_init_attr_ex attributes = {.qp_context = (void *)e,
                                             .send_cq = e->queue.cq,
                                             .recv_cq = e->queue.cq,
                                             .qp_type = IBV_QPT_DRIVER,
                                             .sq_sig_all = !VERBS_FAULT(unsignalled),
                                             .cap = {.max_send_wr = VERBS_FAULT(past_queue) ? 1 : e->depth,
                                                     .max_recv_wr = receives ? receives : 1,
                                                     .max_send_sge = 1,
                                                     .max_recv_sge = 1,
                                                     .max_inline_data = inline_bytes},
                                             .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                             .pd = e->nic->pd,
                                             .send_ops_flags =
                                                 IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM};
    struct efadv_qp_init_attr own = {.driver_qp_type = EFADV_SRD, .sl = (uint8_t)e->device->options.service_level};
    if (l->initiator_depth) attributes.send_ops_flags |= IBV_QP_EX_WITH_RDMA_READ;
    if (e->unsolicited && !VERBS_FAULT(not_unsolicited)) own.flags |= EFADV_QP_UNSOLICITED;
    if (inline_bytes) own.flags |= EFADV_QP_INLINE_WRITE;
    errno = 0;
    struct ibv_qp *qp = ((efadv_create_qp_ex_function)e->device->library.own[EFA_CREATE_QP])(
        e->nic->context, &attributes, &own, sizeof own);
    *granted = attributes.cap;
    return qp;
}

static uccl_ep_status step(const uccl_ep_endpoint *e, struct ibv_qp_attr *attributes, int mask, const char *name) {
    const int error = e->device->library.ibv_modify_qp(e->qp, attributes, mask | IBV_QP_STATE);
    if (!error) return UCCL_EP_OK;
    return verbs_fail(e->device->host, UCCL_EP_E_NIC, error,
                      "%.32s: the step of a queue pair to %s failed: %s (errno %d)", e->nic->found.name, name,
                      strerror(error), error);
}

static uccl_ep_status open_qp(uccl_ep_endpoint *e, uint32_t receives) {
    const verbs_limits *l = &e->nic->found.limits;
    const verbs_library *library = &e->device->library;
    struct ibv_qp_cap cap;
    uint32_t inline_bytes = l->inline_bytes;
    for (;;) {
        e->qp = create(e, inline_bytes, receives, &cap);
        if (e->qp) break;
        if (!inline_bytes) return no_queue_pair(e, errno ? errno : EIO);
        inline_bytes = 0; /* with inline writes a queue holds fewer requests, and not every version has them */
    }
    e->calls = library->ibv_qp_to_qp_ex ? library->ibv_qp_to_qp_ex(e->qp) : NULL;
    if (!e->calls || (cap.max_send_wr < e->depth && !VERBS_FAULT(past_queue)) ||
        (!e->unsolicited && cap.max_recv_wr < receives))
        return verbs_fail(e->device->host, UCCL_EP_E_NIC, 0,
                          "%s: a queue pair of %u requests and %u receives was asked for, and has %u and %u%s",
                          e->nic->found.name, e->depth, receives, cap.max_send_wr, cap.max_recv_wr,
                          e->calls ? "" : ", and no calls (ibv_wr_*)");
    e->granted_inline = cap.max_inline_data < inline_bytes ? cap.max_inline_data : inline_bytes;
    /* Of any queue pair of that number that was before, or will be: what was for one is refused by the other. */
    if (getrandom(&e->qkey, sizeof e->qkey, GRND_NONBLOCK) != sizeof e->qkey)
        e->qkey = (uint32_t)e->device->host->now_ns(e->device->host->context);
    e->qkey &= 0x7fffffff; /* the high bit is for privileged ones (IBTA, volume 1, 10.2.5) */
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = e->nic->found.port.number, .qkey = e->qkey};
    uccl_ep_status status = step(e, &a, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, "INIT");
    if (status == UCCL_EP_OK) status = efa_post_receives(e, receives);
    a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR};
    if (status == UCCL_EP_OK) status = step(e, &a, 0, "RTR");
    a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .rnr_retry = (uint8_t)e->device->options.rnr_retry};
    if (status == UCCL_EP_OK) status = step(e, &a, IBV_QP_SQ_PSN | (l->rnr_retry ? IBV_QP_RNR_RETRY : 0), "RTS");
    return status;
}

/* --------------------------------------------------------------------------------------------------- open and close */

static uccl_ep_status check_config(uccl_ep_device *d, const uccl_ep_endpoint_config *c) {
    if (!c->peers || c->peers > d->caps.max_peers || c->rank >= c->peers || (d->endpoints && c->peers != d->peers))
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0,
                          "rank %u of %u: at most %u are possible, and on all endpoints alike", c->rank, c->peers,
                          d->caps.max_peers);
    if (!c->inflight_peer || !c->inflight || c->inflight > d->caps.max_inflight_endpoint)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "%u operations to a peer, %u in all: 1 to %u are possible",
                          c->inflight_peer, c->inflight, d->caps.max_inflight_endpoint);
    return UCCL_EP_OK;
}

static size_t slots_bytes(const uccl_ep_endpoint *e) {
    return (size_t)e->depth * (sizeof *e->slots + sizeof *e->free);
}

static uccl_ep_status open_queues(uccl_ep_endpoint *e) {
    uccl_ep_device *d = e->device;
    const verbs_limits *l = &e->nic->found.limits;
    const uint64_t receives = (uint64_t)e->peers * e->receives_peer, entries = e->depth + receives;
    if (entries > l->max_cqe || (!e->unsolicited && receives > l->max_receives))
        return verbs_fail(d->host, UCCL_EP_E_CAPABILITY, 0,
                          "%s: %" PRIu64
                          " immediates and %u operations may be outstanding; its queues hold %u receives "
                          "and %u completions: fewer max_inflight, or ranks",
                          e->nic->found.name, receives, e->depth, l->max_receives, l->max_cqe);
    e->slots = verbs_reserve(slots_bytes(e));
    e->by_handle = verbs_reserve(EFA_HANDLES * sizeof *e->by_handle);
    if (!e->slots || !e->by_handle)
        return verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, errno, "no memory for %u operations", e->depth);
    e->free = (uint32_t *)(void *)(e->slots + e->depth);
    for (e->n_free = 0; e->n_free < e->depth; e->n_free++) e->free[e->n_free] = e->n_free;
    const uccl_ep_status status = verbs_queue_open(
        &e->queue, d, e->nic, VERBS_FAULT(small_queue) ? e->depth : (uint32_t)entries, (uint32_t)entries);
    if (status != UCCL_EP_OK) return status;
    return open_qp(e, e->unsolicited ? 0 : (uint32_t)receives);
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
    e->depth = c.inflight;
    e->unsolicited = e->nic->found.limits.unsolicited;
    status = open_queues(e);
    if (status != UCCL_EP_OK) {
        verbs_endpoint_close(e);
        return status;
    }
    *out = e;
    return UCCL_EP_OK;
}

/* Destroying the queue pair ends its DMA; handles go after what was posted with them. What a completion queue still
 * holds of a queue pair goes with it. */
void verbs_endpoint_close(uccl_ep_endpoint *e) {
    const verbs_library *l = &e->device->library;
    if (e->qp) verbs_take_events(e->device, e->nic); /* of this one, too */
    if (e->qp) l->ibv_destroy_qp(e->qp);
    for (uint32_t peer = 0; peer < e->peers; peer++) efa_drop_handle(e, peer);
    verbs_queue_close(&e->queue);
    verbs_release(e->by_handle, EFA_HANDLES * sizeof *e->by_handle);
    verbs_release(e->slots, slots_bytes(e));
    e->device->endpoints--;
    free(e);
}
