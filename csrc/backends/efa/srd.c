/* SPDX-License-Identifier: Apache-2.0
 *
 * srd.c: scalable reliable datagrams: what a device has to have, and what is promised.
 */
#include "efa.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define PORT 1u

static uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* It has one port, and one GID there. */
static bool look_port(const verbs_library *l, struct ibv_context *context, verbs_found *found, char *text) {
    verbs_port *port = &found->port;
    struct ibv_port_attr attributes = {0};
    const int error = l->ibv_query_port(context, PORT, (struct _compat_ibv_port_attr *)&attributes);
    if (error) {
        snprintf(text, VERBS_TEXT, "port %u does not answer: %s (errno %d)", PORT, strerror(error), error);
        return false;
    }
    if (attributes.state != IBV_PORT_ACTIVE) {
        snprintf(text, VERBS_TEXT,
                 "port %u is not active: is its network interface attached, and does the security group let the group "
                 "itself pass?",
                 PORT);
        return false;
    }
    static const union ibv_gid none;
    *port = (verbs_port){.number = PORT, .link_layer = attributes.link_layer, .mtu = attributes.active_mtu};
    if (l->ibv_query_gid(context, PORT, 0, &port->gid) || !memcmp(&port->gid, &none, sizeof none)) {
        snprintf(text, VERBS_TEXT, "port %u has no GID (address)", PORT);
        return false;
    }
    snprintf(port->why, sizeof port->why, "GID 0");
    found->port_attributes = attributes;
    return true;
}

static bool look(const verbs_library *l, const verbs_options *options, struct ibv_device *device,
                 struct ibv_context *context, verbs_found *found, char *text) {
    (void)device;
    struct efadv_device_attr a = {0};
    const int error = ((efadv_query_device_function)l->own[EFA_QUERY_DEVICE])(context, &a, sizeof a);
    if (error) {
        snprintf(text, VERBS_TEXT,
                 "libefa does not know it: %s (errno %d): libibverbs and libefa must be of one release of rdma-core",
                 strerror(error), error);
        return false;
    }
    if (!(a.device_caps & EFADV_WRITE)) {
        char model[64];
        snprintf(text, VERBS_TEXT,
                 "%s, and RDMA write is not offered: that needs efa2 or newer (such as p5), and for those rdma-core 46 "
                 "and the kernel's efa 2.4",
                 verbs_model_name(&found->attributes, model));
        return false;
    }
    if (!look_port(l, context, found, text)) return false;
    found->limits = verbs_common_limits(options, found);
    verbs_limits *limits = &found->limits;
    limits->max_qp_wr = smaller(limits->max_qp_wr, a.max_sq_wr);
    limits->max_receives = a.max_rq_wr;
    limits->max_message = a.max_rdma_size;
    limits->initiator_depth = limits->responder_depth = a.device_caps & EFADV_READ ? 1 : 0; /* there are reads */
    limits->rnr_retry = a.device_caps & EFADV_RNR_RETRY;
    limits->unsolicited = a.device_caps & EFADV_UNSOLICITED && options->unsolicited != 0;
    /* Inline writes take a larger place in the queue each, so none are asked for by default. */
    const uint32_t most = a.inline_buf_size_ex;
    limits->inline_bytes = options->inline_bytes == VERBS_UNSET ? 0 : smaller((uint32_t)options->inline_bytes, most);
    if (options->unsolicited == 1 && !limits->unsolicited) {
        snprintf(text, VERBS_TEXT,
                 "unsolicited=1, and immediates without receives are not offered: rdma-core 52, the kernel's efa 2.10 "
                 "and a NIC that has them are needed");
        return false;
    }
    if (limits->max_qp_wr < 4 || limits->max_cqe < 16 || (!limits->unsolicited && limits->max_receives < 4) ||
        !limits->max_message) {
        snprintf(text, VERBS_TEXT, "queues of %u requests, %u receives and %u completions are too small",
                 limits->max_qp_wr, limits->max_receives, limits->max_cqe);
        return false;
    }
    return true;
}

/*
 * What SRD guarantees (amzn-drivers SRD.txt, fi_efa(7)): a write is placed, and acknowledged once the peer's NIC has
 * all of it; an immediate is told of once the bytes of its own write are placed. Nothing of order, and nothing of
 * visibility to others than the host. A payload may be placed twice until it is acknowledged (efa3, aws-ofi-nccl),
 * which no generation rules out.
 */
static void promise(const verbs_options *options, const verbs_found *found, uint32_t nics, uccl_ep_caps *caps) {
    const verbs_limits *l = &found->limits;
    (void)options;
    caps->flags |= UCCL_EP_CAP_IMM_VISIBLE;
    if (!l->unsolicited) caps->flags |= UCCL_EP_CAP_IMM_NEEDS_RECEIVE;
    caps->immediate_bits = EFA_IMMEDIATE_BITS;
    caps->max_inflight_endpoint = caps->max_inflight_peer = smaller(l->max_qp_wr, l->max_cqe / 2);
    caps->max_endpoints = l->max_qp * nics;
    if (!l->unsolicited) caps->max_receives = smaller(caps->max_receives, l->max_receives);
}

const verbs_transport verbs_this_transport = {
    .options = VERBS_SRD,
    .library = "libefa.so.1",
    .environment = "UCCL_EP_LIBEFA",
    .functions = {"efadv_query_device", "efadv_create_qp_ex", "efadv_query_ah"},
    .remedy = "install ibverbs-providers of rdma-core 46 or newer, or AWS's EFA installer",
    .look = look,
    .promise = promise,
    .flush_gpu = true, /* ofiwg/libfabric pull request 12807 */
    .max_chunks = 1,   /* an immediate is not to come before a part of its write */
};
