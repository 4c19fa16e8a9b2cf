/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.h: the completion queue of an endpoint, whatever the transport: read by poll(), or emptied into a list on the
 * side by what must not wait for poll().
 *
 * What a completion tells the core, the transport's `take` says: at most one record. It is given by name, so that a
 * compiler makes one function of both.
 */
#ifndef UCCL_EP_VERBS_QUEUE_H
#define UCCL_EP_VERBS_QUEUE_H

#include <string.h>

#include "verbs.h"

#define VERBS_AT_ONCE 64

typedef struct verbs_queue {
    uccl_ep_device *device;
    verbs_nic *nic;
    struct ibv_cq *cq;
    _Atomic(const char *) lost; /* what an event, or the endpoint, said has failed; NULL: nothing */
    uint32_t failures;          /* of reading it, on end */
    bool loss_told;             /* of the NIC */
    /* Completions that verbs_queue_collect() found and verbs_queue_poll() has not given yet: [head, tail). */
    uccl_ep_completion *found;
    uint32_t found_head, found_tail, found_room;
} verbs_queue;

typedef bool verbs_take(uccl_ep_endpoint *endpoint, const struct ibv_wc *wc, uccl_ep_completion *completion);

/* A queue of `entries`; there is room for as many of all completions as are `outstanding` at most. After an error, too,
 * verbs_queue_close() is called. */
uccl_ep_status verbs_queue_open(verbs_queue *queue, uccl_ep_device *device, verbs_nic *nic, uint32_t entries,
                                uint32_t outstanding);
void verbs_queue_close(verbs_queue *queue);
/* What was collected of `peer` nobody wants any more. */
void verbs_queue_forget(verbs_queue *queue, uint32_t peer);
uccl_ep_status verbs_queue_broken(const verbs_queue *queue, int error);
uccl_ep_status verbs_queue_lost(const verbs_queue *queue, const char *what);

/* ibv_poll_cq; what this vendor's library may fail with is as nothing found. */
static inline int verbs_queue_some(verbs_queue *q, int want, struct ibv_wc *wc) {
    const int got = ibv_poll_cq(q->cq, want, wc);
    if (__builtin_expect(got < 0, 0)) return ++q->failures <= verbs_this_vendor.poll_failures ? 0 : got;
    if (__builtin_expect(q->failures != 0, 0)) q->failures = 0;
    return got;
}

/* For poll(). */
static inline int32_t verbs_queue_poll(verbs_queue *q, uccl_ep_endpoint *e, verbs_take *take,
                                       uccl_ep_completion *completions, uint32_t max) {
    struct ibv_wc wc[VERBS_AT_ONCE];
    uint32_t n = 0;
    const char *lost = atomic_load_explicit(&q->lost, memory_order_acquire);
    if (__builtin_expect(lost != NULL, 0)) return verbs_queue_lost(q, lost);
    while (n < max && q->found_head != q->found_tail) completions[n++] = q->found[q->found_head++];
    while (n < max) {
        const int want = max - n < VERBS_AT_ONCE ? (int)(max - n) : VERBS_AT_ONCE;
        const int got = verbs_queue_some(q, want, wc);
        if (got < 0) return n ? (int32_t)n : verbs_queue_broken(q, got);
        for (int i = 0; i < got; i++) n += take(e, &wc[i], &completions[n]);
        if (got < want) break;
    }
    return (int32_t)n;
}

/* Empty it into the list on the side. What waits there, and in the queue, is counted as outstanding, so there is room
 * for all of it. */
static inline uccl_ep_status verbs_queue_collect(verbs_queue *q, uccl_ep_endpoint *e, verbs_take *take) {
    struct ibv_wc wc[VERBS_AT_ONCE];
    if (q->found_head) {
        memmove(q->found, q->found + q->found_head, (q->found_tail - q->found_head) * sizeof *q->found);
        q->found_tail -= q->found_head;
        q->found_head = 0;
    }
    for (;;) {
        const uint32_t room = q->found_room - q->found_tail, want = room < VERBS_AT_ONCE ? room : VERBS_AT_ONCE;
        const int got = want ? verbs_queue_some(q, (int)want, wc) : 0;
        if (got < 0) return verbs_queue_broken(q, got);
        for (int i = 0; i < got; i++) q->found_tail += take(e, &wc[i], &q->found[q->found_tail]);
        if ((uint32_t)got < want || !want) return UCCL_EP_OK;
    }
}

#endif
