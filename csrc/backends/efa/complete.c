/* SPDX-License-Identifier: Apache-2.0
 *
 * complete.c: completions, in whatever order they come.
 *
 * What a completion is of, wr_id tells, and nothing else does: a finished read calls itself a send (rdma-core
 * providers/efa, verbs.c), and of one that failed only wr_id, status, qp_num and vendor_err are defined.
 */
#include "efa.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

/* Whose immediate it is: the NIC names the sender by its handle here, and by its queue pair there. */
static inline uint32_t sender(const uccl_ep_endpoint *e, const struct ibv_wc *wc) {
    if (wc->slid == EFA_NO_HANDLE) return UINT32_MAX;
    uint32_t at = e->by_handle[wc->slid];
    while (at && e->peer[at - 1].qp_number != wc->src_qp) at = e->peer[at - 1].next;
    return at - 1;
}

/* Late ones of a peer that was left are nothing; one that is connected would have lost a signal: whoever waits for it
 * in vain finds this line. */
static void tell_stranger(uccl_ep_endpoint *e, const struct ibv_wc *wc) {
    char text[256];
    if (e->stranger_told) return;
    e->stranger_told = true;
    snprintf(text, sizeof text,
             "%s: an immediate of queue pair %u behind address handle 0x%x, which is no peer of endpoint %u, is left "
             "out; later ones are without a word",
             e->nic->found.name, wc->src_qp, wc->slid, e->index);
    e->device->host->log(e->device->host->context, UCCL_EP_LOG_INFO, text);
}

static bool receive(uccl_ep_endpoint *e, const struct ibv_wc *wc, uccl_ep_completion *c) {
    const bool took = wc->wr_id & EFA_WR_RECEIVE;
    const bool immediate = wc->status == IBV_WC_SUCCESS && wc->wc_flags & IBV_WC_WITH_IMM;
    const uint32_t peer = immediate ? sender(e, wc) : UINT32_MAX, value = immediate ? ntohl(wc->imm_data) : 0;
    efa_peer *p = peer < e->peers ? &e->peer[peer] : NULL;
    if (__builtin_expect(immediate && !p, 0)) tell_stranger(e, wc);
    /* Failed, of nobody, of an earlier connection, or of one that ends. */
    if (!p || p->state != EFA_CONNECTED || (value >> EFA_IMMEDIATE_BITS != p->ours && !VERBS_FAULT(old_immediates))) {
        if (took && efa_post_receives(e, 1) != UCCL_EP_OK)
            atomic_store_explicit(&e->queue.lost, "a receive that was taken could not be posted again",
                                  memory_order_release);
        return false;
    }
    p->taken += took;
    *c = (uccl_ep_completion){
        .cookie = value & ((1u << EFA_IMMEDIATE_BITS) - 1), .kind = UCCL_EP_COMPLETION_IMMEDIATE, .peer = peer};
    return true;
}

static inline bool take(uccl_ep_endpoint *e, const struct ibv_wc *wc, uccl_ep_completion *c) {
    if (!(wc->wr_id & EFA_WR_SEND)) return receive(e, wc, c);
    const uint32_t at = (uint32_t)wc->wr_id;
    efa_slot *slot = at < e->depth ? &e->slots[at] : NULL;
    /* Of none that is under way: told already. */
    if (!slot || !(slot->uses & 1) || (slot->uses & 0x3fffffff) != (wc->wr_id >> 32 & 0x3fffffff)) return false;
    efa_peer *p = &e->peer[slot->peer];
    slot->uses++;
    e->free[e->n_free++] = at;
    p->outstanding--;
    if (p->state != EFA_CONNECTED) return false;
    *c = (uccl_ep_completion){.cookie = slot->cookie, .peer = slot->peer};
    if (__builtin_expect(wc->status == IBV_WC_SUCCESS, 1)) return true;
    c->status = efa_status_of(wc);
    c->vendor_code = verbs_code_of(wc);
    return true;
}

int32_t verbs_poll(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max) {
    return verbs_queue_poll(&e->queue, e, take, completions, max);
}

uccl_ep_status efa_collect(uccl_ep_endpoint *e) {
    return verbs_queue_collect(&e->queue, e, take);
}

void verbs_last_receive(void *qp_context) {
    (void)qp_context; /* there are no shared queues of receives */
}

int32_t verbs_events(uccl_ep_endpoint *e, uccl_ep_event *events, uint32_t max) {
    return verbs_tell_loss(e->device, e->nic, &e->queue.loss_told, events, max);
}

uccl_ep_status verbs_flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    return verbs_flush_gpu(e->device, e->nic, region);
}
