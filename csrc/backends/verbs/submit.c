/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.c: operations to work requests, posted as one list: one doorbell.
 *
 * An operation is one request, but where a region is registered in pieces and the operation crosses from one to the
 * next. The NIC's queue counts requests, so room is counted in them; what a signalled request covers is free again once
 * it has completed.
 */
#include "verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define KNOWN_FLAGS UCCL_EP_OPERATION_SIGNALLED

static inline bool inside(uint64_t bytes, uint64_t offset, uint64_t length) {
    return offset <= bytes && length <= bytes - offset;
}

static inline uint64_t length_of(const uccl_ep_operation *o) {
    return o->kind == UCCL_EP_OPERATION_ADD64 ? sizeof(uint64_t) : o->length;
}

static inline const verbs_remote *remote_of(const uccl_ep_device *d, uint32_t peer, const uccl_ep_operation *o) {
    return o->remote_region < UCCL_EP_REGIONS && d->remote[o->remote_region] ? &d->remote[o->remote_region][peer]
                                                                             : NULL;
}

/* Can it be carried out? refusal() says why not. */
static inline bool valid(const uccl_ep_device *d, const uccl_ep_operation *o, const verbs_remote *remote) {
    const uint64_t length = length_of(o);
    if (!remote || !inside(remote->bytes, o->remote_offset, length)) return false;
    if (o->flags & ~KNOWN_FLAGS) return false;
    if (o->kind == UCCL_EP_OPERATION_ADD64)
        return o->remote_offset % sizeof(uint64_t) == 0 && d->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64;
    if (o->kind < UCCL_EP_OPERATION_WRITE || o->kind > UCCL_EP_OPERATION_READ) return false;
    if (o->kind == UCCL_EP_OPERATION_WRITE_IMM && o->value > UINT32_MAX) return false;
    return o->local_region < UCCL_EP_REGIONS && length <= d->caps.max_message_bytes &&
           inside(d->region[o->local_region].bytes, o->local_offset, length);
}

__attribute__((cold, noinline)) static uccl_ep_status refusal(const uccl_ep_device *d, uint32_t peer,
                                                              const uccl_ep_operation *o, const verbs_remote *remote) {
    const uccl_ep_host *host = d->host;
    const uint64_t length = length_of(o);
    if (o->kind < UCCL_EP_OPERATION_WRITE || o->kind > UCCL_EP_OPERATION_READ || o->flags & ~KNOWN_FLAGS)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "an operation of kind %u with flags %#x: not promised", o->kind,
                          o->flags);
    if (o->kind == UCCL_EP_OPERATION_ADD64 && !(d->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64))
        return verbs_fail(host, UCCL_EP_E_UNSUPPORTED, 0, "an add, and the NIC has no atomics");
    if (!remote || !remote->bytes)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "region %u of rank %u was not imported", o->remote_region, peer);
    if (!inside(remote->bytes, o->remote_offset, length))
        return verbs_fail(host, UCCL_EP_E_RANGE, 0,
                          "%" PRIu64 " bytes at offset %" PRIu64 " of a region of %" PRIu64 " bytes of rank %u", length,
                          o->remote_offset, remote->bytes, peer);
    if (o->kind == UCCL_EP_OPERATION_ADD64)
        return verbs_fail(host, UCCL_EP_E_ALIGNMENT, 0, "an add at offset %" PRIu64 ": words are aligned to 8 bytes",
                          o->remote_offset);
    if (o->kind == UCCL_EP_OPERATION_WRITE_IMM && o->value > UINT32_MAX)
        return verbs_fail(host, UCCL_EP_E_RANGE, 0, "an immediate of more than 32 bits");
    if (length > d->caps.max_message_bytes)
        return verbs_fail(host, UCCL_EP_E_RANGE, 0, "an operation of %" PRIu64 " bytes: at most %" PRIu64, length,
                          d->caps.max_message_bytes);
    return verbs_fail(host, UCCL_EP_E_RANGE, 0, "%" PRIu64 " bytes at offset %" PRIu64 " of the own region %u", length,
                      o->local_offset, o->local_region);
}

static const uint8_t opcodes[] = {
    [UCCL_EP_OPERATION_WRITE] = IBV_WR_RDMA_WRITE,
    [UCCL_EP_OPERATION_ADD64] = IBV_WR_ATOMIC_FETCH_AND_ADD,
    [UCCL_EP_OPERATION_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
    [UCCL_EP_OPERATION_READ] = IBV_WR_RDMA_READ,
};

/* The part of `o` that begins at `done` and crosses no piece of either region, as request and element. Returns its
 * length. */
static inline uint32_t fill(const uccl_ep_endpoint *e, const verbs_remote *remote, const uccl_ep_operation *o,
                            uint32_t done, uint32_t granted_inline, struct ibv_send_wr *request,
                            struct ibv_sge *piece) {
    const uint64_t there = o->remote_offset + done;
    const uint32_t chunk = (uint32_t)(there / remote->chunk);
    const uint32_t rkey = remote->rkeys[e->nic_index * remote->chunks + chunk];
    request->sg_list = piece;
    request->num_sge = 1;
    request->send_flags = 0;
    if (o->kind == UCCL_EP_OPERATION_ADD64) {
        /* What was there before comes back, and nobody looks at it. */
        *piece = (struct ibv_sge){(uintptr_t)e->nic->scratch, sizeof(uint64_t), e->nic->scratch_mr->lkey};
        request->opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        request->wr.atomic.remote_addr = remote->address + there;
        request->wr.atomic.compare_add = o->value;
        request->wr.atomic.swap = 0;
        request->wr.atomic.rkey = rkey;
        return sizeof(uint64_t);
    }
    const verbs_region *local = &e->device->region[o->local_region];
    const uint64_t here = o->local_offset + done;
    const uint32_t local_chunk = (uint32_t)(here / local->chunk);
    uint64_t length = o->length - done;
    if (length > remote->chunk - there % remote->chunk) length = remote->chunk - there % remote->chunk;
    if (length > local->chunk - here % local->chunk) length = local->chunk - here % local->chunk;
    *piece = (struct ibv_sge){local->address + here, (uint32_t)length, local->keys[e->nic_index].lkey[local_chunk]};
    if (!length) request->num_sge = 0;
    /* The CPU copies what goes inline: not from a GPU's memory. */
    if (length <= granted_inline && length && o->kind != UCCL_EP_OPERATION_READ && local->kind == UCCL_EP_MEMORY_HOST)
        request->send_flags = IBV_SEND_INLINE;
    request->wr.rdma.remote_addr = remote->address + there;
    request->wr.rdma.rkey = rkey;
    const bool last = done + length == o->length;
    request->opcode = last                                ? opcodes[o->kind]
                      : o->kind == UCCL_EP_OPERATION_READ ? IBV_WR_RDMA_READ
                                                          : IBV_WR_RDMA_WRITE;
    request->imm_data = htonl((uint32_t)o->value);
    return (uint32_t)length;
}

/* Post n requests; *posted of them were taken. */
static int ring(uccl_ep_endpoint *e, verbs_peer *p, uint32_t n, uint32_t *posted) {
    struct ibv_send_wr *bad = NULL;
    e->requests[n - 1].next = NULL;
    const int error = ibv_post_send(p->qp, e->requests, &bad);
    *posted = n;
    if (error) *posted = bad >= e->requests && bad < e->requests + n ? (uint32_t)(bad - e->requests) : 0;
    p->posted += *posted;
    return error;
}

uccl_ep_status verbs_submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                            uint32_t flags, uint32_t *accepted) {
    (void)flags; /* a doorbell rings for every list */
    uccl_ep_device *d = e->device;
    *accepted = 0;
    if (peer >= e->peers) return verbs_fail(d->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, e->peers);
    verbs_peer *p = &e->peer[peer];
    if (p->state != VERBS_CONNECTED)
        return verbs_fail(d->host, p->state == VERBS_FAILED ? UCCL_EP_E_NIC : UCCL_EP_E_INVALID, 0, "rank %u: %s", peer,
                          p->state == VERBS_FAILED ? "its queue pair has failed" : "not connected");
    uccl_ep_status status = UCCL_EP_OK;
    uint32_t i = 0, batch = 0;
    bool room = true;
    while (room && status == UCCL_EP_OK && (i < n || batch)) {
        /* As many as a list holds; then one doorbell. */
        uint32_t left = e->depth - 1 - (p->posted - p->completed);
        for (; i < n && batch < VERBS_BATCH && room; i++) {
            const uccl_ep_operation *o = &operations[i];
            const verbs_remote *remote = remote_of(d, peer, o);
            if (!valid(d, o, remote)) {
                status = refusal(d, peer, o, remote);
                break;
            }
            const uint32_t first = batch, length = (uint32_t)length_of(o);
            uint32_t done = 0;
            do {
                if (batch == VERBS_BATCH || batch >= left) break;
                struct ibv_send_wr *request = &e->requests[batch];
                const uint32_t number = p->posted + batch;
                done += fill(e, remote, o, done, p->granted_inline, request, &e->pieces[batch]);
                request->wr_id = verbs_wr_id(peer, p->generation, number);
                request->next = request + 1;
                p->cookies[number & e->mask] = o->cookie;
                e->operation_of[batch++] = (uint16_t)i;
            } while (done < length);
            if (done < length || batch == first) { /* all of it or nothing */
                room = batch == VERBS_BATCH && first;
                batch = first;
                break;
            }
            if (o->flags & UCCL_EP_OPERATION_SIGNALLED) e->requests[batch - 1].send_flags |= IBV_SEND_SIGNALED;
        }
        if (!batch) break;
        uint32_t posted;
        const int error = ring(e, p, batch, &posted);
        *accepted = error ? e->operation_of[posted] : e->operation_of[batch - 1] + 1u;
        batch = 0;
        if (error == ENOMEM) return UCCL_EP_OK; /* its queue is full: later */
        if (error)
            return verbs_fail(d->host, UCCL_EP_E_NIC, error, "%.32s: posting to rank %u: %s (errno %d)",
                              e->nic->found.name, peer, strerror(error), error);
    }
    return status;
}
