/* SPDX-License-Identifier: Apache-2.0
 *
 * complete.c: completions, what their statuses mean, and events of the device.
 *
 * Of a completion that failed only wr_id, status, qp_num and vendor_err are defined, so nothing else is looked at. The
 * first failure of a connection is told; what comes back flushed behind it is not news.
 */
#include "verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define AT_ONCE 64

/* One row an ibv_wc_status. */
static const struct row {
    uccl_ep_status status;
    const char *text;
} rows[] = {
    [IBV_WC_SUCCESS] = {UCCL_EP_OK, "success"},
    [IBV_WC_LOC_LEN_ERR] = {UCCL_EP_E_RANGE, "local length error: longer than the port or the queue pair takes"},
    [IBV_WC_LOC_QP_OP_ERR] = {UCCL_EP_E_NIC,
                              "local queue pair operation error: the NIC does not understand the request"},
    [IBV_WC_LOC_EEC_OP_ERR] = {UCCL_EP_E_NIC, "local EE context operation error"},
    [IBV_WC_LOC_PROT_ERR] = {UCCL_EP_E_REGISTRATION, "local protection error: the source is not registered (any more)"},
    [IBV_WC_WR_FLUSH_ERR] = {UCCL_EP_E_NIC, "flushed: the connection was broken, from the other end or by an event"},
    [IBV_WC_MW_BIND_ERR] = {UCCL_EP_E_NIC, "memory window bind error"},
    [IBV_WC_BAD_RESP_ERR] = {UCCL_EP_E_NIC, "bad response: an unexpected packet from the peer"},
    [IBV_WC_LOC_ACCESS_ERR] = {UCCL_EP_E_REGISTRATION, "local access error: a right is missing on the own region"},
    [IBV_WC_REM_INV_REQ_ERR] = {UCCL_EP_E_NIC, "remote invalid request: the peer's NIC refuses this operation"},
    [IBV_WC_REM_ACCESS_ERR] = {UCCL_EP_E_REGISTRATION,
                               "remote access error: the peer's region is gone, shorter, or lacks the right"},
    [IBV_WC_REM_OP_ERR] = {UCCL_EP_E_NIC, "remote operation error: the peer's NIC could not carry it out"},
    [IBV_WC_RETRY_EXC_ERR] =
        {UCCL_EP_E_PEER_LOST,
         "transport retries exceeded: the peer is gone, or packets are lost (PFC, MTU, GID, route)"},
    [IBV_WC_RNR_RETRY_EXC_ERR] = {UCCL_EP_E_NIC, "receiver-not-ready retries exceeded: the peer had no receive posted"},
    [IBV_WC_LOC_RDD_VIOL_ERR] = {UCCL_EP_E_NIC, "local RDD violation"},
    [IBV_WC_REM_INV_RD_REQ_ERR] = {UCCL_EP_E_NIC, "remote invalid RD request"},
    [IBV_WC_REM_ABORT_ERR] = {UCCL_EP_E_NIC, "aborted by the peer"},
    [IBV_WC_INV_EECN_ERR] = {UCCL_EP_E_NIC, "invalid EE context number"},
    [IBV_WC_INV_EEC_STATE_ERR] = {UCCL_EP_E_NIC, "invalid EE context state"},
    [IBV_WC_FATAL_ERR] = {UCCL_EP_E_NIC, "fatal error of the NIC"},
    [IBV_WC_RESP_TIMEOUT_ERR] = {UCCL_EP_E_PEER_LOST, "response timeout"},
    [IBV_WC_GENERAL_ERR] = {UCCL_EP_E_NIC, "general error"},
};
#define ROWS (sizeof rows / sizeof *rows)

/* Both numbers in one: the status of libibverbs, and above it what the vendor adds. */
static int32_t code_of(const struct ibv_wc *wc) {
    return (int32_t)((wc->vendor_err & 0x7fffff) << 8 | ((uint32_t)wc->status & 0xff));
}

void verbs_describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)device;
    (void)status;
    if (!bytes) return;
    const uint32_t wc = (uint32_t)vendor_code & 0xff, vendor = (uint32_t)vendor_code >> 8;
    const char *what = wc < ROWS && rows[wc].text ? rows[wc].text : "a status that libibverbs did not have";
    const char *more = vendor ? verbs_this_vendor.describe(vendor) : NULL;
    if (vendor)
        snprintf(text, bytes, "%s (status %u, vendor error %#x%s%s)", what, wc, vendor, more ? ": " : "",
                 more ? more : "");
    else
        snprintf(text, bytes, "%s (status %u)", what, wc);
}

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
    c->status = (uint32_t)wc->status < ROWS && rows[wc->status].text ? rows[wc->status].status : UCCL_EP_E_NIC;
    c->vendor_code = code_of(wc);
    p->failure = (uccl_ep_status)c->status;
    p->failure_code = c->vendor_code;
    return true;
}

static uccl_ep_status broken(const uccl_ep_endpoint *e, int error) {
    return verbs_fail(e->device->host, UCCL_EP_E_NIC, error, "%s: its completion queue cannot be read (%d)",
                      e->nic->found.name, error);
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
        const int got = ibv_poll_cq(e->cq, want, wc);
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
        const int got = want ? ibv_poll_cq(e->cq, (int)want, wc) : 0;
        if (got < 0) return broken(e, got);
        for (int i = 0; i < got; i++) e->found_tail += take(e, &wc[i], &e->found[e->found_tail]);
        if ((uint32_t)got < want || !want) return UCCL_EP_OK;
    }
}

/* ---------------------------------------------------------------------------------------------------------- events */

/* Errors of queue pairs are not told: the next operation to that peer fails, with what the NIC says of it. A queue of
 * an endpoint that failed is the end of that endpoint alone. */
static void take_event(const uccl_ep_device *d, verbs_nic *nic, const struct ibv_async_event *event) {
    const uint32_t type = (uint32_t)event->event_type + 1;
    char text[VERBS_TEXT];
    switch (event->event_type) {
    case IBV_EVENT_DEVICE_FATAL:
        atomic_store_explicit(&nic->lost, 1, memory_order_release);
        break;
    case IBV_EVENT_CQ_ERR: {
        uccl_ep_endpoint *e = event->element.cq->cq_context;
        atomic_store_explicit(&e->lost, type, memory_order_release);
        break;
    }
    case IBV_EVENT_SRQ_ERR: {
        uccl_ep_endpoint *e = event->element.srq->srq_context;
        atomic_store_explicit(&e->lost, type, memory_order_release);
        break;
    }
    case IBV_EVENT_QP_LAST_WQE_REACHED: {
        verbs_peer *p = event->element.qp->qp_context;
        atomic_store_explicit(&p->last_receive, 1, memory_order_release);
        break;
    }
    case IBV_EVENT_PORT_ERR:
        snprintf(text, sizeof text, "%s: port %d is down", nic->found.name, event->element.port_num);
        d->host->log(d->host->context, UCCL_EP_LOG_WARN, text);
        break;
    default:
        break;
    }
}

/* Each is acknowledged as soon as it is read: destroying what it is about waits for that. */
void verbs_take_events(const uccl_ep_device *d, verbs_nic *nic) {
    const verbs_library *l = &d->library;
    struct ibv_async_event event;
    /* Bounded, also if a NIC makes them faster than they are read. */
    for (uint32_t i = 0; i < 64 && !l->ibv_get_async_event(nic->context, &event); i++) {
        take_event(d, nic, &event);
        l->ibv_ack_async_event(&event);
    }
}

int32_t verbs_events(uccl_ep_endpoint *e, uccl_ep_event *events, uint32_t max) {
    verbs_take_events(e->device, e->nic);
    const uint32_t lost = atomic_load_explicit(&e->nic->lost, memory_order_acquire);
    if (!lost || e->loss_told || !max) return 0;
    e->loss_told = true;
    events[0] = (uccl_ep_event){.kind = UCCL_EP_EVENT_DEVICE_LOST};
    snprintf(events[0].text, sizeof events[0].text, "%.40s: the NIC reports a fatal error (or was removed)",
             e->nic->found.name);
    return 1;
}

/* The GPU's driver does it: the NIC's part is done when it tells of an immediate (ordered by PCI Express). */
uccl_ep_status verbs_flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    const uccl_ep_device *d = e->device;
    if ((uint32_t)region >= UCCL_EP_REGIONS || d->region[region].kind == UCCL_EP_MEMORY_HOST) return UCCL_EP_OK;
    const uccl_ep_status status = d->host->accelerator->flush_writes(d->host->gpu);
    if (status == UCCL_EP_OK) return status;
    return verbs_fail(d->host, status, 0, "flushing what %s wrote to the GPU: %.150s", e->nic->found.name,
                      d->host->accelerator->error_text());
}
