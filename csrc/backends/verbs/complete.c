/* SPDX-License-Identifier: Apache-2.0
 *
 * complete.c: completions of queue pairs.
 *
 * Of a completion that failed only wr_id, status, qp_num and vendor_err are defined, so nothing else is looked at. The
 * first failure of a connection is told; what comes back flushed behind it is not news.
 */
#include "rc.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

/* What a completion tells the core: at most one record. */
static bool receive(uccl_ep_endpoint *e, const struct ibv_wc *wc, uccl_ep_completion *c) {
    const uint32_t peer =
        e->srq ? e->nic->qp_peer[wc->qp_num & 0xffffff] - 1u : (uint32_t)(wc->wr_id & (VERBS_MAX_PEERS - 1));
    verbs_peer *p = &e->peer[peer < e->peers ? peer : 0];
    const bool of_now = e->srq ? p->number == wc->qp_num : p->generation == (uint16_t)(wc->wr_id >> 32);
    if (peer >= e->peers || !of_now) { /* of a queue pair that is no more */
        if (e->srq) verbs_post_receives(e, 0, 1);
        return false;
    }
    p->taken++; /* a failed one, too: connect() gives it back */
    /* Failed ones are flushed with their queue pair, of which the operations tell. */
    if (wc->status != IBV_WC_SUCCESS || p->state == VERBS_DRAINING || !(wc->wc_flags & IBV_WC_WITH_IMM)) return false;
    *c = (uccl_ep_completion){.cookie = ntohl(wc->imm_data), .kind = UCCL_EP_COMPLETION_IMMEDIATE, .peer = peer};
    return true;
}

static inline bool take(uccl_ep_endpoint *e, const struct ibv_wc *wc, uccl_ep_completion *c) {
    if (wc->wr_id & VERBS_WR_RECEIVE) return receive(e, wc, c);
    const uint32_t peer = (uint32_t)(wc->wr_id >> 48), number = (uint32_t)wc->wr_id;
    if (peer >= e->peers) return false;
    verbs_peer *p = &e->peer[peer];
    /* Of an earlier connection, or covered already. */
    if (p->generation != (uint16_t)(wc->wr_id >> 32) || number - p->completed >= p->posted - p->completed) return false;
    p->completed = number + 1;
    if (p->state != VERBS_CONNECTED) return false;
    *c = (uccl_ep_completion){.cookie = p->cookies[number & e->mask], .peer = peer};
    if (__builtin_expect(wc->status == IBV_WC_SUCCESS, 1)) return true;
    p->state = VERBS_FAILED;
    c->status = verbs_status_of(wc->status);
    c->vendor_code = verbs_code_of(wc);
    p->failure = (uccl_ep_status)c->status;
    p->failure_code = c->vendor_code;
    return true;
}

int32_t verbs_poll(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max) {
    return verbs_queue_poll(&e->queue, e, take, completions, max);
}

uccl_ep_status verbs_collect(uccl_ep_endpoint *e) {
    return verbs_queue_collect(&e->queue, e, take);
}

/* ---------------------------------------------------------------------------------------------------------- events */

void verbs_last_receive(void *qp_context) {
    verbs_peer *p = qp_context;
    atomic_store_explicit(&p->last_receive, 1, memory_order_release);
}

int32_t verbs_events(uccl_ep_endpoint *e, uccl_ep_event *events, uint32_t max) {
    return verbs_tell_loss(e->device, e->nic, &e->queue.loss_told, events, max);
}

uccl_ep_status verbs_flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    return verbs_flush_gpu(e->device, e->nic, region);
}
