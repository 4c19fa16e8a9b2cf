/* SPDX-License-Identifier: Apache-2.0
 *
 * rc.h: reliable connections: the transport of connectx, thor and pollara. An endpoint is a completion queue and a
 * queue pair for each peer.
 */
#ifndef UCCL_EP_VERBS_RC_H
#define UCCL_EP_VERBS_RC_H

#include "fault.h"
#include "queue.h"

/* wr_id: whose it is, of which connection, and its number there. Of a receive: RECEIVE, with peer and connection where
 * the queue is the peer's own. */
#define VERBS_WR_RECEIVE (1ull << 63)

static inline uint64_t verbs_wr_id(uint32_t peer, uint16_t generation, uint32_t number) {
    return (uint64_t)peer << 48 | (uint64_t)generation << 32 | number;
}

typedef enum verbs_state {
    VERBS_IDLE,      /* a queue pair in RESET */
    VERBS_CONNECTED, /* RTS */
    VERBS_FAILED,    /* as before, and an operation failed: nothing more is executed */
    VERBS_DRAINING,  /* ERR; the last completion is to come */
    VERBS_BROKEN     /* no queue pair: making one failed */
} verbs_state;

typedef struct verbs_peer {
    struct ibv_qp *qp;
    struct ibv_qp_ex *calls; /* the same, where requests are posted by calls; NULL: as lists */
    uint64_t *cookies;       /* [depth] of work requests posted, by number */
    uint32_t state;          /* verbs_state */
    uint16_t generation;
    uint32_t posted, completed; /* numbers of work requests */
    uint32_t psn;
    uint32_t number;               /* of the queue pair; UINT32_MAX: there is none */
    uint32_t taken;                /* receives that it took and that were not given back */
    _Atomic uint32_t last_receive; /* an event said that it takes no more of the shared queue */
    uint64_t waits_until;          /* for that event; 0: does not wait yet */
    uint32_t granted_inline;       /* bytes that may go inline */
    uccl_ep_status failure;        /* of the first operation that failed; its code */
    int32_t failure_code;
    bool failure_of_posting; /* its code is an errno */
} verbs_peer;

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    verbs_nic *nic;
    uint32_t nic_index, index, rank, peers;
    uint32_t depth; /* work requests that a queue pair takes, one of them for the end of a connection */
    uint32_t mask;  /* of places for their cookies */
    uint32_t receives_peer, inline_bytes;
    verbs_queue queue; /* of completions; the context of its events, and of the shared queue's */
    struct ibv_srq *srq;
    uint64_t *cookies; /* [peers][mask + 1] */
    /* A batch in the making. */
    struct ibv_send_wr requests[VERBS_BATCH];
    struct ibv_sge pieces[VERBS_BATCH];
    uint16_t operation_of[VERBS_BATCH];
    verbs_peer peer[];
};

/* A queue pair for `peer`, in RESET; a new connection's. */
uccl_ep_status verbs_qp_open(uccl_ep_endpoint *endpoint, uint32_t peer);
/* Its DMA has ended, unless that failed: then the queue pair is still there. */
uccl_ep_status verbs_qp_close(uccl_ep_endpoint *endpoint, uint32_t peer);
/* n receives, to the shared queue or the peer's. */
uccl_ep_status verbs_post_receives(uccl_ep_endpoint *endpoint, uint32_t peer, uint32_t n);
/* For a device without endpoints and regions: verbs_transport.try_adds. */
uccl_ep_status verbs_try_adds(uccl_ep_device *device, char *text);
/* Empty the completion queue on the side. */
uccl_ep_status verbs_collect(uccl_ep_endpoint *endpoint);

#endif
