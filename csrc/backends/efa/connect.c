/* SPDX-License-Identifier: Apache-2.0
 *
 * connect.c: who the peers are. SRD has no connections: what is made here is the address handle of the peer, with which
 * it is reached, and without which this NIC refuses what comes from it.
 *
 * A connection ends once all that was posted to the peer has completed, well or not: the queue pair is the other peers'
 * as well, so it cannot be broken to make an end. A NIC gives up on a peer that does not respond.
 */
#include "efa.h"

#include <stdio.h>
#include <string.h>

#include "../verbs/wire.h"

static uccl_ep_status no_rank(const uccl_ep_endpoint *e, uint32_t peer) {
    return verbs_fail(e->device->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
}

static uccl_ep_status no_room(const uccl_ep_endpoint *e, const char *what, uint32_t room, size_t needed) {
    return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "%s: %u bytes of room, %zu needed", what, room, needed);
}

uccl_ep_status verbs_endpoint_address(uccl_ep_endpoint *e, void *blob, uint32_t *bytes) {
    efa_address mine = {.magic = EFA_ADDRESS_MAGIC,
                        .rank = e->rank,
                        .peers = e->peers,
                        .index = e->index,
                        .qp_number = e->qp->qp_num,
                        .qkey = e->qkey,
                        .nics = (uint8_t)e->device->nics,
                        .unsolicited = e->unsolicited};
    memcpy(mine.gid, e->nic->found.port.gid.raw, sizeof mine.gid);
    if (*bytes < sizeof mine) return no_room(e, "endpoint_address", *bytes, sizeof mine);
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

uccl_ep_status verbs_peer_address(uccl_ep_endpoint *e, uint32_t peer, void *blob, uint32_t *bytes) {
    if (peer >= e->peers) return no_rank(e, peer);
    const efa_pair mine = {.connection = e->peer[peer].ours};
    if (*bytes < sizeof mine) return no_room(e, "peer_address", *bytes, sizeof mine);
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

/* ---------------------------------------------------------------------------------------------------------- connect */

static uccl_ep_status check_address(const uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes,
                                    efa_address *address, efa_pair *pair) {
    const uccl_ep_host *host = e->device->host;
    static const uint8_t none[16];
    if (bytes == sizeof *address + sizeof *pair) {
        memcpy(address, blob, sizeof *address);
        memcpy(pair, (const char *)blob + sizeof *address, sizeof *pair);
    }
    if (bytes != sizeof *address + sizeof *pair || address->magic != EFA_ADDRESS_MAGIC)
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
    /* A NIC that sends one way refuses a peer that receives the other (libfabric prov/efa asks for this as well). */
    if (address->unsolicited != e->unsolicited)
        return verbs_fail(
            host, UCCL_EP_E_BOOTSTRAP, 0,
            "immediates to rank %u take %s receives and those to this rank take %s: give all unsolicited=0", peer,
            address->unsolicited ? "no" : "posted", e->unsolicited ? "none" : "them");
    if (address->qp_number > 0xffffff || pair->connection > 0xff || !memcmp(address->gid, none, sizeof none))
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "the address of rank %u has queue pair %#x and connection %u",
                          peer, address->qp_number, pair->connection);
    return UCCL_EP_OK;
}

uccl_ep_status verbs_connect(uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes) {
    if (peer >= e->peers) return no_rank(e, peer);
    efa_peer *p = &e->peer[peer];
    efa_address address = {0};
    efa_pair pair = {0};
    uccl_ep_status status = check_address(e, peer, blob, bytes, &address, &pair);
    if (status != UCCL_EP_OK) return status;
    if (p->state != EFA_IDLE)
        return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "rank %u: connected already", peer);
    /* Immediates of the last connection leave the queue before those of this one can come: there is room for one
     * connection's. */
    status = efa_collect(e);
    if (status == UCCL_EP_OK) status = efa_post_receives(e, p->taken);
    if (status != UCCL_EP_OK) return status;
    p->taken = 0;
    memcpy(p->gid, address.gid, sizeof p->gid);
    /* Here, and not when something is sent: the peer's NIC may be the first to send. */
    if (!VERBS_FAULT(late_handle)) status = efa_make_handle(e, peer);
    if (status != UCCL_EP_OK) return status;
    p->qp_number = address.qp_number;
    p->qkey = address.qkey;
    p->theirs = (uint8_t)pair.connection;
    p->state = EFA_CONNECTED;
    return UCCL_EP_OK;
}

uccl_ep_status verbs_connect_poll(uccl_ep_endpoint *e, uint32_t peer) {
    if (peer >= e->peers) return no_rank(e, peer);
    if (e->peer[peer].state == EFA_CONNECTED) return UCCL_EP_OK;
    return verbs_fail(e->device->host, UCCL_EP_E_INVALID, 0, "rank %u: connect_poll without connect", peer);
}

/* ------------------------------------------------------------------------------------------------------- disconnect */

uccl_ep_status verbs_disconnect(uccl_ep_endpoint *e, uint32_t peer) {
    if (peer >= e->peers) return no_rank(e, peer);
    efa_peer *p = &e->peer[peer];
    if (p->state == EFA_IDLE) return UCCL_EP_OK;
    p->state = EFA_DRAINING;
    const uccl_ep_status status = efa_collect(e);
    if (status != UCCL_EP_OK) return status;
    /* A NIC that is gone reads and writes nothing, and tells of nothing. */
    if (p->outstanding && !atomic_load_explicit(&e->nic->lost, memory_order_acquire)) return UCCL_EP_IN_PROGRESS;
    efa_drop_handle(e, peer);
    verbs_queue_forget(&e->queue, peer); /* receives that it took are given back by the next connection */
    p->ours++;
    return UCCL_EP_OK;
}
