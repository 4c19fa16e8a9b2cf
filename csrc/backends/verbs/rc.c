/* SPDX-License-Identifier: Apache-2.0
 *
 * rc.c: reliable connections: what a device has to have, and what is promised.
 */
#include "rc.h"

#include <stdio.h>

static bool look(const verbs_library *library, const verbs_options *options, struct ibv_device *device,
                 struct ibv_context *context, verbs_found *found, char *text) {
    if (device->transport_type != IBV_TRANSPORT_IB) {
        snprintf(text, VERBS_TEXT,
                 "no InfiniBand or RoCE (transport %d): it has no reliable connections with immediates",
                 device->transport_type);
        return false;
    }
    if (!verbs_port_choose(library, options, context, found->name, found->attributes.phys_port_cnt, &found->port,
                           &found->port_attributes, text))
        return false;
    found->limits = verbs_common_limits(options, found);
    if (found->limits.max_qp_wr >= 4 && found->limits.max_cqe >= 16 && found->limits.max_sge) return true;
    snprintf(text, VERBS_TEXT, "queues of %u requests and %u completions are too small", found->limits.max_qp_wr,
             found->limits.max_cqe);
    return false;
}

/*
 * What reliable connections guarantee (InfiniBand Architecture Specification, volume 1, release 1.6, chapter 9):
 *  - requests of a queue pair are executed once and in order, completed in order, and after one that failed none is
 *    (9.4, 9.9; queue pair in the error state);
 *  - a completed write is acknowledged by the responder, which is not visibility: an application may rely on the
 *    bytes once a later immediate has been received or a later atomic was executed (o9-20);
 *  - a read is executed after the writes before it, and its answer pushes them ahead of itself (PCI Express, table of
 *    ordering rules: a completion does not pass a posted write).
 * That writes become visible in the order of their requests is more, and a vendor's promise. Relaxed ordering takes it
 * away: what stays is that a received immediate says that earlier bytes are visible (ibv_reg_mr(3)).
 */
static void promise(const verbs_options *options, const verbs_found *found, uint32_t nics, uccl_ep_caps *caps) {
    const verbs_limits *l = &found->limits;
    uint64_t flags = UCCL_EP_CAP_COMPLETES_IN_ORDER | UCCL_EP_CAP_UNSIGNALLED | UCCL_EP_CAP_NO_DUPLICATES |
                     UCCL_EP_CAP_ERROR_STOPS | UCCL_EP_CAP_IMM_NEEDS_RECEIVE | UCCL_EP_CAP_IMM_VISIBLE;
    if (l->atomics) flags |= UCCL_EP_CAP_ATOMIC_ADD64;
    if (l->atomics && nics == 1 && found->attributes.atomic_cap == IBV_ATOMIC_GLOB)
        flags |= UCCL_EP_CAP_ATOMIC_COHERENT;
    if (l->ordered && !options->relaxed) {
        flags |= UCCL_EP_CAP_ORDER_WRITE_WRITE | UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_SIGNALS_STRICT |
                 UCCL_EP_CAP_ORDER_WRITE_IMM;
    }
    if (l->initiator_depth && l->responder_depth && !options->relaxed) flags |= UCCL_EP_CAP_READ_FLUSHES;
    caps->flags |= flags;
    caps->max_inflight_peer = l->max_qp_wr - 1; /* the last one is for the end of a connection */
    caps->max_inflight_endpoint = l->max_cqe / 2 / VERBS_PARTS;
    if (l->max_qp && l->max_qp < caps->max_peers) caps->max_peers = l->max_qp;
    caps->responder_atomics = l->device_responders;
    if (l->max_srq_wr && l->max_srq_wr < caps->max_receives) caps->max_receives = l->max_srq_wr;
}

const verbs_transport verbs_this_transport = {
    .options = VERBS_RC,
    .look = look,
    .promise = promise,
    .try_adds = verbs_try_adds,
    .by_number = true,
    .max_chunks = VERBS_MAX_CHUNKS,
};
