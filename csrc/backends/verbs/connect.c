/* SPDX-License-Identifier: Apache-2.0
 *
 * connect.c: a queue pair from RESET over INIT and RTR to RTS, and back.
 *
 * A connection ends in order: the queue pair goes to ERR, one more request is posted, and once that one has come back
 * flushed, so has all before it. Where receives are shared, an event tells when it takes no more of them. Then it is
 * destroyed and a new one made for the next connection: what is still on its way to the old one finds nobody, and a
 * completion of it carries an old generation, or the number of a queue pair that is no more.
 */
#include "rc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "wire.h"

/* Longest wait for the event that ends the receives of a queue pair: a NIC, or a kernel, may not have it. */
#define LAST_RECEIVE_NS 100000000ull

/* Do the ranks read from or add to each other? All have registered alike. */
static bool reads_or_adds(const uccl_ep_endpoint *e) {
    uint32_t access = 0;
    for (uint32_t i = 0; i < UCCL_EP_REGIONS; i++) access |= e->device->region[i].access;
    return access & (UCCL_EP_ACCESS_REMOTE_ATOMIC | UCCL_EP_ACCESS_REMOTE_READ);
}

/* Reads and atomics that a queue pair takes from its peer at a time. Where the NIC shares them out (device_responders),
 * nobody gets any who needs none. */
static uint8_t responder_depth(const uccl_ep_endpoint *e) {
    const verbs_limits *l = &e->nic->found.limits;
    uint32_t depth = l->responder_depth < 16 || e->device->options.rd_atomic != VERBS_UNSET ? l->responder_depth : 16;
    if (!l->device_responders || VERBS_FAULT(responders_unshared)) return (uint8_t)(depth < 255 ? depth : 255);
    if (!reads_or_adds(e)) return 0;
    const uint32_t share = l->device_responders / (e->peers * (e->device->endpoints ? e->device->endpoints : 1));
    if (depth > share) depth = share;
    return (uint8_t)(depth ? depth : 1);
}

static uccl_ep_status no_rank(const uccl_ep_endpoint *e, uint32_t peer) {
    return verbs_fail(e->device->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
}

uccl_ep_status verbs_endpoint_address(uccl_ep_endpoint *e, void *blob, uint32_t *bytes) {
    verbs_port *port = &e->nic->found.port;
    if (!verbs_port_refresh(&e->device->library, e->nic->context, port))
        return verbs_fail(
            e->device->host, UCCL_EP_E_NIC, 0,
            "%.32s: GID %u of port %u is gone: was an IP address taken away? Open it anew, or give it back",
            e->nic->found.name, port->gid_index, port->number);
    verbs_address mine = {.magic = VERBS_ADDRESS_MAGIC,
                          .rank = e->rank,
                          .peers = e->peers,
                          .index = e->index,
                          .nics = (uint8_t)e->device->nics,
                          .pkey = port->pkey,
                          .lid = port->lid,
                          .link_layer = port->link_layer,
                          .mtu = (uint8_t)port->mtu,
                          .responder_depth = responder_depth(e)};
    memcpy(mine.gid, port->gid.raw, sizeof mine.gid);
    if (*bytes < sizeof mine)
        return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "endpoint_address: %u bytes of room, %zu needed",
                          *bytes, sizeof mine);
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

uccl_ep_status verbs_peer_address(uccl_ep_endpoint *e, uint32_t peer, void *blob, uint32_t *bytes) {
    if (peer >= e->peers) return no_rank(e, peer);
    if (!e->peer[peer].qp) { /* there was no room for one when the last connection ended */
        const uccl_ep_status status = verbs_qp_open(e, peer);
        if (status != UCCL_EP_OK) return status;
    }
    const verbs_pair mine = {.qp_number = e->peer[peer].qp->qp_num, .psn = e->peer[peer].psn};
    if (*bytes < sizeof mine)
        return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "peer_address: %u bytes of room, %zu needed", *bytes,
                          sizeof mine);
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

/* ---------------------------------------------------------------------------------------------------------- connect */

static uccl_ep_status check_address(const uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes,
                                    verbs_address *address, verbs_pair *pair) {
    const uccl_ep_host *host = e->device->host;
    const verbs_port *port = &e->nic->found.port;
    if (bytes == sizeof *address + sizeof *pair) {
        memcpy(address, blob, sizeof *address);
        memcpy(pair, (const char *)blob + sizeof *address, sizeof *pair);
    }
    if (bytes != sizeof *address + sizeof *pair || address->magic != VERBS_ADDRESS_MAGIC)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0,
                          "rank %u sent %u bytes that are no address of this backend: do all ranks run one version?",
                          peer, bytes);
    if (address->rank != peer || address->peers != e->peers || address->index != e->index)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0,
                          "the address of rank %u says rank %u of %u, endpoint %u, and there are %u ranks and this is "
                          "endpoint %u",
                          peer, address->rank, address->peers, address->index, e->peers, e->index);
    if (address->nics != e->device->nics)
        return verbs_fail(host, UCCL_EP_E_BOOTSTRAP, 0,
                          "rank %u uses %u NICs and this rank %u: give all the same number", peer, address->nics,
                          e->device->nics);
    if (address->link_layer != port->link_layer)
        return verbs_fail(host, UCCL_EP_E_BOOTSTRAP, 0, "rank %u is on %s and this rank on %s (port %u of %.32s)", peer,
                          address->link_layer == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "InfiniBand",
                          port->link_layer == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "InfiniBand", port->number,
                          e->nic->found.name);
    const bool roce = port->link_layer == IBV_LINK_LAYER_ETHERNET;
    if (roce && verbs_gid_is_ipv4(address->gid) != verbs_gid_is_ipv4(port->gid.raw)) {
        char theirs[INET6_ADDRSTRLEN] = "?", ours[INET6_ADDRSTRLEN] = "?";
        inet_ntop(AF_INET6, address->gid, theirs, sizeof theirs);
        inet_ntop(AF_INET6, port->gid.raw, ours, sizeof ours);
        return verbs_fail(host, UCCL_EP_E_BOOTSTRAP, 0,
                          "rank %u is at %s and this rank at %s (GID %u of %.32s): of IPv4 and IPv6 one must be on all "
                          "ranks; choose with gid=",
                          peer, theirs, ours, port->gid_index, e->nic->found.name);
    }
    /* One partition, and a full member at one end at least. */
    if ((address->pkey ^ port->pkey) & 0x7fff || !((address->pkey | port->pkey) & 0x8000))
        return verbs_fail(host, UCCL_EP_E_BOOTSTRAP, 0,
                          "rank %u is in the partition %#x and this rank in %#x (port %u of %.32s): choose one on all "
                          "ranks with pkey=",
                          peer, address->pkey, port->pkey, port->number, e->nic->found.name);
    if (address->mtu < IBV_MTU_256 || address->mtu > IBV_MTU_4096 || pair->qp_number > 0xffffff || pair->psn > 0xffffff)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "the address of rank %u has MTU number %u and queue pair %#x",
                          peer, address->mtu, pair->qp_number);
    if (!address->responder_depth && e->nic->found.limits.initiator_depth && reads_or_adds(e))
        return verbs_fail(
            host, UCCL_EP_E_BOOTSTRAP, 0,
            "rank %u takes no reads and atomics (0 at a time), and the signals need them: see to rd_atomic= "
            "and the limits of its NIC",
            peer);
    return UCCL_EP_OK;
}

/* One step of the state machine, and what a failure of it means. */
static uccl_ep_status step(const uccl_ep_endpoint *e, uint32_t peer, struct ibv_qp_attr *attributes, int mask,
                           const char *name, const union ibv_gid *gid) {
    const int error = e->device->library.ibv_modify_qp(e->peer[peer].qp, attributes, mask | IBV_QP_STATE);
    if (!error) return UCCL_EP_OK;
    char where[INET6_ADDRSTRLEN + 8] = "";
    if (gid) inet_ntop(AF_INET6, gid->raw, where, sizeof where);
    const char *remedy = "";
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EADDRNOTAVAIL)
        remedy = ": it does not answer from this port; see to routes, neighbours (ip neigh) and gid=";
    else if (error == EINVAL && e->nic->found.limits.device_responders && attributes->max_dest_rd_atomic)
        remedy = ": all processes on this NIC share its responder resources: fewer ranks or proxies on it, or "
                 "atomics=0 and rd_atomic=1";
    else if (error == EINVAL && gid)
        remedy = ": is the GID (gid=) still there, the MTU (mtu=) the fabric's, rd_atomic= within the NIC's?";
    return verbs_fail(e->device->host, UCCL_EP_E_NIC, error,
                      "%.32s, queue pair to rank %u%s%s: the step to %s failed: %s (errno %d)%s", e->nic->found.name,
                      peer, gid ? " at " : "", where, name, strerror(error), error, remedy);
}

static uccl_ep_status to_init(const uccl_ep_endpoint *e, uint32_t peer, const verbs_port *port) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .pkey_index = port->pkey_index, .port_num = port->number};
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    if (responder_depth(e)) {
        a.qp_access_flags |= IBV_ACCESS_REMOTE_READ;
        if (e->device->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64) a.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
    }
    return step(e, peer, &a, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT", NULL);
}

static uccl_ep_status to_rtr(const uccl_ep_endpoint *e, uint32_t peer, const verbs_port *port,
                             const verbs_address *address, const verbs_pair *pair) {
    const verbs_options *o = &e->device->options;
    const bool global = port->link_layer == IBV_LINK_LAYER_ETHERNET;
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR,
                            .path_mtu = address->mtu < port->mtu ? address->mtu : port->mtu,
                            .dest_qp_num = pair->qp_number,
                            .rq_psn = pair->psn,
                            .max_dest_rd_atomic = responder_depth(e),
                            .min_rnr_timer = (uint8_t)o->rnr_timer};
    a.ah_attr = (struct ibv_ah_attr){
        .dlid = address->lid, .sl = (uint8_t)o->service_level, .is_global = global, .port_num = port->number};
    union ibv_gid gid;
    memcpy(gid.raw, address->gid, sizeof gid.raw);
    if (global)
        a.ah_attr.grh = (struct ibv_global_route){.dgid = gid,
                                                  .flow_label = (uint32_t)o->flow_label,
                                                  .sgid_index = port->gid_index,
                                                  .hop_limit = (uint8_t)o->hop_limit,
                                                  .traffic_class = (uint8_t)o->traffic_class};
    return step(e, peer, &a,
                IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                    IBV_QP_MIN_RNR_TIMER,
                "RTR", global ? &gid : NULL);
}

static uccl_ep_status to_rts(const uccl_ep_endpoint *e, uint32_t peer, const verbs_address *address) {
    const verbs_options *o = &e->device->options;
    const uint32_t depth = e->nic->found.limits.initiator_depth;
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTS,
                            .timeout = (uint8_t)o->timeout,
                            .retry_cnt = (uint8_t)o->retry,
                            .rnr_retry = (uint8_t)o->rnr_retry,
                            .sq_psn = e->peer[peer].psn,
                            .max_rd_atomic =
                                (uint8_t)(depth < address->responder_depth ? depth : address->responder_depth)};
    return step(e, peer, &a,
                IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC, "RTS",
                NULL);
}

/* The steps are calls of the kernel, each of bounded time; they are done at once. */
uccl_ep_status verbs_connect(uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes) {
    if (peer >= e->peers) return no_rank(e, peer);
    verbs_peer *p = &e->peer[peer];
    verbs_address address;
    verbs_pair pair;
    uccl_ep_status status = check_address(e, peer, blob, bytes, &address, &pair);
    if (status != UCCL_EP_OK) return status;
    if (p->state != VERBS_IDLE)
        return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "rank %u: connected already, or without a queue pair",
                          peer);
    const verbs_port *port = &e->nic->found.port;
    status = to_init(e, peer, port);
    /* Before the peer can send: it is never to find a receiver that is not ready. */
    if (status == UCCL_EP_OK) {
        const uint32_t n = e->srq ? p->taken : e->receives_peer;
        status = verbs_post_receives(e, peer, n);
        if (status == UCCL_EP_OK) p->taken = 0;
    }
    if (status == UCCL_EP_OK) status = to_rtr(e, peer, port, &address, &pair);
    if (status == UCCL_EP_OK) status = to_rts(e, peer, &address);
    if (status == UCCL_EP_OK) p->state = VERBS_CONNECTED;
    return status;
}

uccl_ep_status verbs_connect_poll(uccl_ep_endpoint *e, uint32_t peer) {
    if (peer >= e->peers) return no_rank(e, peer);
    if (e->peer[peer].state == VERBS_CONNECTED || e->peer[peer].state == VERBS_FAILED) return UCCL_EP_OK;
    return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "rank %u: connect_poll without connect", peer);
}

/* ------------------------------------------------------------------------------------------------------- disconnect */

/* No more of it is executed, and what is outstanding comes back flushed. */
static void to_error(uccl_ep_endpoint *e, verbs_peer *p, uint32_t peer) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
    struct ibv_send_wr *bad, last = {.wr_id = verbs_wr_id(peer, p->generation, p->posted),
                                     .opcode = IBV_WR_RDMA_WRITE,
                                     .send_flags = IBV_SEND_SIGNALED};
    const int error = e->device->library.ibv_modify_qp(p->qp, &a, IBV_QP_STATE);
    p->state = VERBS_DRAINING;
    /* Of requests that were executed and gave no completion nothing more is heard: one behind them is. Where it cannot
     * be posted, destroying the queue pair alone makes the NIC let go. */
    if (!error && p->posted != p->completed && !ibv_post_send(p->qp, &last, &bad))
        p->posted++;
    else
        p->completed = p->posted;
}

/* A queue pair in ERR may still hold a receive of the shared queue: destroyed now, it takes that along, and the queue
 * is one short for ever (InfiniBand Architecture Specification, volume 1, 11.6.3.2: Last WQE Reached). */
static bool receives_over(const uccl_ep_endpoint *e, verbs_peer *p) {
    if (!e->srq) return true;
    verbs_take_events(e->device, e->nic);
    if (atomic_load_explicit(&p->last_receive, memory_order_acquire) ||
        atomic_load_explicit(&e->nic->lost, memory_order_acquire))
        return true;
    const uccl_ep_host *host = e->device->host;
    const uint64_t now = host->now_ns(host->context);
    if (!p->waits_until) p->waits_until = now + LAST_RECEIVE_NS;
    return now >= p->waits_until;
}

uccl_ep_status verbs_disconnect(uccl_ep_endpoint *e, uint32_t peer) {
    if (peer >= e->peers) return no_rank(e, peer);
    verbs_peer *p = &e->peer[peer];
    if (p->state == VERBS_IDLE || p->state == VERBS_BROKEN) return UCCL_EP_OK;
    if (p->state != VERBS_DRAINING) to_error(e, p, peer);
    uccl_ep_status status = verbs_collect(e);
    if (status != UCCL_EP_OK) return status;
    if (p->completed != p->posted || !receives_over(e, p)) return UCCL_EP_IN_PROGRESS;
    status = verbs_collect(e); /* what came before the event: destroying would throw it away */
    if (status == UCCL_EP_OK) status = verbs_qp_close(e, peer);
    /* And what is left, while there is no new one that could have its number. */
    if (status == UCCL_EP_OK) status = verbs_collect(e);
    if (status != UCCL_EP_OK) return status;
    verbs_queue_forget(&e->queue, peer);
    /* If there is no room for the next one now, peer_address() tries again. */
    verbs_qp_open(e, peer);
    return UCCL_EP_OK;
}
