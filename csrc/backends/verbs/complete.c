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

#define AT_ONCE 64

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

static uccl_ep_status broken(const uccl_ep_endpoint *e, int error) {
    return verbs_fail(e->device->host, UCCL_EP_E_NIC, error, "%s: its completion queue cannot be read (%d)",
                      e->nic->found.name, error);
}

/* ibv_poll_cq; what this vendor's library may fail with is as nothing found. */
static inline int poll_some(uccl_ep_endpoint *e, int want, struct ibv_wc *wc) {
    const int got = ibv_poll_cq(e->cq, want, wc);
    if (__builtin_expect(got < 0, 0)) return ++e->poll_failures <= verbs_this_vendor.poll_failures ? 0 : got;
    if (__builtin_expect(e->poll_failures != 0, 0)) e->poll_failures = 0;
    return got;
}

int32_t verbs_poll(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max) {
    struct ibv_wc wc[AT_ONCE];
    uint32_t n = 0;
    const uint32_t lost = atomic_load_explicit(&e->lost, memory_order_acquire);
    if (__builtin_expect(lost != 0, 0))
        return verbs_fail(e->device->host, UCCL_EP_E_NIC, 0, "%.40s: %s", e->nic->found.name,
                          lost - 1 == IBV_EVENT_CQ_ERR ? "a completion queue overran"
                                                       : "a shared receive queue failed");
    while (n < max && e->found_head != e->found_tail) completions[n++] = e->found[e->found_head++];
    while (n < max) {
        const int want = max - n < AT_ONCE ? (int)(max - n) : AT_ONCE;
        const int got = poll_some(e, want, wc);
        if (got < 0) return n ? (int32_t)n : broken(e, got);
        for (int i = 0; i < got; i++) n += take(e, &wc[i], &completions[n]);
        if (got < want) break;
    }
    return (int32_t)n;
}

uccl_ep_status verbs_collect(uccl_ep_endpoint *e) {
    struct ibv_wc wc[AT_ONCE];
    if (e->found_head) {
        memmove(e->found, e->found + e->found_head, (e->found_tail - e->found_head) * sizeof *e->found);
        e->found_tail -= e->found_head;
        e->found_head = 0;
    }
    /* What waits here, and in the queue, is counted as outstanding, so there is room for all of it. */
    for (;;) {
        const uint32_t room = e->found_room - e->found_tail, want = room < AT_ONCE ? room : AT_ONCE;
        const int got = want ? poll_some(e, (int)want, wc) : 0;
        if (got < 0) return broken(e, got);
        for (int i = 0; i < got; i++) e->found_tail += take(e, &wc[i], &e->found[e->found_tail]);
        if ((uint32_t)got < want || !want) return UCCL_EP_OK;
    }
}

/* ---------------------------------------------------------------------------------------------------------- events */

void verbs_queue_failed(uccl_ep_endpoint *e, uint32_t type) {
    atomic_store_explicit(&e->lost, type + 1, memory_order_release);
}

void verbs_last_receive(void *qp_context) {
    verbs_peer *p = qp_context;
    atomic_store_explicit(&p->last_receive, 1, memory_order_release);
}

int32_t verbs_events(uccl_ep_endpoint *e, uccl_ep_event *events, uint32_t max) {
    return verbs_tell_loss(e->device, e->nic, &e->loss_told, events, max);
}

uccl_ep_status verbs_flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    return verbs_flush_gpu(e->device, e->nic, region);
}
