/* SPDX-License-Identifier: Apache-2.0
 *
 * events.c: what the device says without being asked, and the flush of a GPU, whatever the transport.
 */
#include "queue.h"

#include <stdio.h>

static void fail(verbs_queue *queue, const char *what) {
    atomic_store_explicit(&queue->lost, what, memory_order_release);
}

/* Errors of queue pairs are not told: the next operation to that peer fails, with what the NIC says of it. A queue of
 * an endpoint that failed is the end of that endpoint alone. */
static void take_event(const uccl_ep_device *d, verbs_nic *nic, const struct ibv_async_event *event) {
    char text[VERBS_TEXT];
    switch (event->event_type) {
    case IBV_EVENT_DEVICE_FATAL:
        atomic_store_explicit(&nic->lost, 1, memory_order_release);
        break;
    case IBV_EVENT_CQ_ERR:
        fail(event->element.cq->cq_context, "a completion queue overran");
        break;
    case IBV_EVENT_SRQ_ERR:
        fail(event->element.srq->srq_context, "a shared receive queue failed");
        break;
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        verbs_last_receive(event->element.qp->qp_context);
        break;
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

int32_t verbs_tell_loss(const uccl_ep_device *d, verbs_nic *nic, bool *told, uccl_ep_event *events, uint32_t max) {
    verbs_take_events(d, nic);
    const uint32_t lost = atomic_load_explicit(&nic->lost, memory_order_acquire);
    if (!lost || *told || !max) return 0;
    *told = true;
    events[0] = (uccl_ep_event){.kind = UCCL_EP_EVENT_DEVICE_LOST};
    snprintf(events[0].text, sizeof events[0].text, "%.40s: the NIC reports a fatal error (or was removed)",
             nic->found.name);
    return 1;
}

/* The GPU's driver does it: the NIC's part is done when it tells of an immediate (ordered by PCI Express). */
uccl_ep_status verbs_flush_gpu(const uccl_ep_device *d, const verbs_nic *nic, uccl_ep_region region) {
    if ((uint32_t)region >= UCCL_EP_REGIONS || d->region[region].kind == UCCL_EP_MEMORY_HOST) return UCCL_EP_OK;
    const uccl_ep_status status = d->host->accelerator->flush_writes(d->host->gpu);
    if (status == UCCL_EP_OK) return status;
    return verbs_fail(d->host, status, 0, "flushing what %s wrote to the GPU: %.150s", nic->found.name,
                      d->host->accelerator->error_text());
}
