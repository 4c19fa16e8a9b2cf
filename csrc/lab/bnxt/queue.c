/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.c: a Thor's rings, decoded and encoded.
 *
 * Completions of requests are cumulative: one tells where the next request begins, and with it that all before are
 * done. The library gives a completion with an error to the oldest request that it has heard nothing of: so those
 * before it that nobody asked about are told first. What is behind an error is not told by the NIC: a terminal
 * completion makes the library flush its rings itself.
 */
#include "bnxt.h"

_Static_assert(sizeof(struct bnxt_entry) == 2 * BNXT_SLOT && sizeof(struct bnxt_receive) == 2 * BNXT_SLOT &&
                   sizeof(struct bnxt_piece) == BNXT_SLOT && sizeof(struct bnxt_completion) == 32,
               "layouts of bnxt_re-abi.h");

#define HEAD_SLOTS 2u

/* -------------------------------------------------------------------------------------------------------- requests */

static uint32_t pieces(const uint8_t *entry, uint32_t slots, struct lab_sge *sge) {
    const uint32_t n = slots - HEAD_SLOTS;
    for (uint32_t i = 0; i < n; i++) {
        struct bnxt_piece piece;
        memcpy(&piece, entry + (HEAD_SLOTS + i) * BNXT_SLOT, sizeof piece);
        sge[i] = (struct lab_sge){piece.address, piece.length, piece.lkey};
    }
    return n;
}

static bool slots_fit(uint32_t slots) {
    return slots >= HEAD_SLOTS && slots <= HEAD_SLOTS + BNXT_SGES;
}

/* Bytes in the entry, or pieces of memory. The head has the length of both. */
static bool payload(const uint8_t *entry, const struct bnxt_entry *head, struct lab_work *work) {
    if (head->flags & BNXT_IS_INLINE) {
        if (head->length > (head->slots - HEAD_SLOTS) * BNXT_SLOT) return false;
        work->inline_bytes = head->length;
        memcpy(work->data, entry + sizeof *head, head->length);
        return true;
    }
    uint64_t length = 0;
    work->sges = pieces(entry, head->slots, work->sge);
    for (uint32_t i = 0; i < work->sges; i++) length += work->sge[i].length;
    return length == head->length;
}

static bool atomic(const uint8_t *entry, const struct bnxt_entry *head, struct lab_work *work) {
    work->remote_address = head->remote_address;
    work->rkey = head->immediate;
    work->add_or_swap = head->to.atomic.swap;
    work->compare = head->to.atomic.compare;
    work->sges = pieces(entry, head->slots, work->sge);
    return work->sges == 1 && !(head->flags & BNXT_IS_INLINE);
}

/* False: the NIC does not understand it. */
static bool decode(const lab_qp *qp, const uint8_t *entry, struct lab_work *work) {
    struct bnxt_entry head;
    memcpy(&head, entry, sizeof head);
    work->signalled = head.flags & BNXT_SIGNALLED;
    work->fence = head.flags & BNXT_FENCES;
    work->solicited = head.flags & BNXT_SOLICITED;
    work->sges = work->inline_bytes = 0;
    work->immediate = __builtin_bswap32(head.immediate); /* on the wire it is big-endian, whoever makes the NIC */
    if (!slots_fit(head.slots)) return false;
    switch (head.operation) {
    case BNXT_SEND:
    case BNXT_SEND_IMM:
        work->opcode = head.operation == BNXT_SEND ? LAB_SEND : LAB_SEND_IMM;
        if (qp->type == LAB_UD) {
            work->qkey = head.qkey;
            work->dest_qpn = head.to.datagram.qpn & 0xffffff;
            work->ah = head.to.datagram.ah & 0xfffff;
        }
        return payload(entry, &head, work);
    case BNXT_WRITE:
    case BNXT_WRITE_IMM:
    case BNXT_READ:
        work->opcode = head.operation == BNXT_READ    ? LAB_READ
                       : head.operation == BNXT_WRITE ? LAB_WRITE
                                                      : LAB_WRITE_IMM;
        work->remote_address = head.to.rdma.remote_address;
        work->rkey = head.to.rdma.rkey;
        return payload(entry, &head, work) && (work->opcode != LAB_READ || !work->inline_bytes);
    case BNXT_COMPARE_SWAP:
        work->opcode = LAB_SWAP;
        return atomic(entry, &head, work);
    case BNXT_FETCH_ADD:
        work->opcode = LAB_ADD;
        return atomic(entry, &head, work);
    default:
        lab_unsupported("operation 0x%x of a Thor", head.operation);
        return false;
    }
}

/* The entry at `taken`; NULL: none has been posted. */
static const uint8_t *next(struct bnxt_ring *ring, uint32_t *index) {
    if (ring->taken == ring->posted) return NULL;
    *index = ring->taken;
    if (++ring->taken == ring->n) ring->taken = 0;
    return ring->entries + (size_t)*index * BNXT_ENTRY;
}

bool bnxt_fetch(lab_qp *qp, struct lab_work *work) {
    struct bnxt_qp *of = qp->model_data;
    const uint8_t *entry = next(&of->sends, &work->cookie);
    if (!entry) return false;
    const bool over = work->cookie == of->sends.over;
    if (over) of->sends.over = of->sends.n;
    if (over || !decode(qp, entry, work)) work->opcode = LAB_BAD;
    return true;
}

/* -------------------------------------------------------------------------------------------------------- receives */

/* One that makes no sense has no room for anything. */
static void take_receive(const uint8_t *entry, struct lab_receive *receive) {
    struct bnxt_receive head;
    memcpy(&head, entry, sizeof head);
    receive->cookie = head.tag;
    receive->sges = 0;
    if (head.operation == BNXT_RECEIVE && slots_fit(head.slots))
        receive->sges = pieces(entry, head.slots, receive->sge);
}

bool bnxt_fetch_receive(lab_qp *qp, struct lab_receive *receive) {
    struct bnxt_qp *of = qp->model_data;
    uint32_t index;
    const uint8_t *entry = next(&of->receives, &index);
    if (entry) take_receive(entry, receive);
    return entry;
}

bool bnxt_fetch_shared_receive(lab_srq *srq, struct lab_receive *receive) {
    struct bnxt_srq *of = srq->model_data;
    uint32_t index;
    const uint8_t *entry = next(&of->ring, &index);
    if (!entry) return false;
    take_receive(entry, receive);
    return true;
}

uint32_t bnxt_shared_receives(lab_srq *srq) {
    const struct bnxt_srq *of = srq->model_data;
    return (of->ring.posted + of->ring.n - of->ring.taken) % of->ring.n;
}

/* ----------------------------------------------------------------------------------------------------- completions */

uint32_t bnxt_cq_used(lab_cq *cq) {
    const struct bnxt_cq *of = cq->model_data;
    return of->produced - of->consumed;
}

/* The word with the phase hands the entry over: last of all. */
static void append(lab_cq *cq, struct bnxt_completion *entry, bool solicited) {
    struct bnxt_cq *of = cq->model_data;
    if (bnxt_cq_used(cq) >= of->n) { /* beside what the NIC's thread counts: an error tells of those before, too */
        if (!cq->overrun) lab_async_event(cq->context, LAB_EVENT_CQ_ERR, cq->user_handle);
        cq->overrun = true;
        return;
    }
    uint8_t *at = of->ring + (size_t)of->index * sizeof *entry;
    const size_t head = offsetof(struct bnxt_completion, head);
    memcpy(at, entry, head);
    memcpy(at + offsetof(struct bnxt_completion, tag), &entry->tag, sizeof entry->tag);
    __atomic_store_n((uint32_t *)(void *)(at + head), entry->head | of->phase, __ATOMIC_RELEASE);
    if (++of->index == of->n) {
        of->index = 0;
        of->phase = !of->phase;
    }
    of->produced++;
    if (solicited) of->solicited = of->produced;
}

static void tell_request(lab_cq *cq, struct bnxt_qp *of, uint32_t status) {
    struct bnxt_completion entry = {.request = {.handle = of->handle, .next = of->done},
                                    .head = BNXT_OF_REQUEST << 1 | status << 8};
    of->told = of->done;
    append(cq, &entry, status);
}

/* Requests that are done and that no completion has told: an entry for none of them would be one for a whole ring. */
static void tell_unasked(lab_cq *cq, struct bnxt_qp *of) {
    if (of->told != of->done) tell_request(cq, of, 0);
}

/* The numbers of receives are others than those of requests. */
static uint32_t receive_status(vnic_status status) {
    switch (status) {
    case VNIC_OK:
        return 0;
    case VNIC_LOCAL_LENGTH:
        return 2;
    case VNIC_LOCAL_ACCESS:
        return 3;
    case VNIC_REMOTE_INVALID:
        return 6;
    default:
        return 4; /* local operation */
    }
}

static void tell_receive(lab_cq *cq, const struct lab_done *done) {
    const struct bnxt_qp *of = done->qp->model_data;
    const bool datagram = done->qp->type == LAB_UD;
    const uint32_t flags = (done->qp->srq ? BNXT_FROM_SRQ : 0) | (done->has_immediate ? BNXT_HAS_IMMEDIATE : 0) |
                           (done->is_write ? BNXT_IS_WRITE : 0);
    struct bnxt_completion entry = {.receive = {.length = done->bytes,
                                                .immediate = __builtin_bswap32(done->immediate),
                                                .handle = of->handle,
                                                .source = datagram ? (uint64_t)(done->source_qpn & 0xffff) << 48 : 0},
                                    .head = (uint32_t)(datagram ? BNXT_OF_RECEIVE_UD : BNXT_OF_RECEIVE_RC) << 1 |
                                            receive_status(done->status) << 8 | flags << 16,
                                    .tag = (done->cookie & 0xfffff) | (datagram ? done->source_qpn >> 16 << 24 : 0)};
    append(cq, &entry, done->solicited || done->status != VNIC_OK);
}

/* One terminal completion, in the queue of the requests: the library moves both rings to what is to be flushed, and
 * takes the other queue's lock while it holds this one's. A second one there could make two threads wait for each
 * other. */
static void tell_end(lab_cq *cq, const lab_qp *qp) {
    struct bnxt_qp *of = qp->model_data;
    struct bnxt_completion entry = {.terminal = {.handle = of->handle,
                                                 .next_send = (uint16_t)of->sends.taken,
                                                 .next_receive = (uint16_t)of->receives.taken},
                                    .head = BNXT_TERMINAL << 1};
    tell_unasked(cq, of);
    append(cq, &entry, true);
}

void bnxt_complete(lab_cq *cq, const struct lab_done *done) {
    struct bnxt_qp *of = done->qp->model_data;
    if (done->rest) {
        if (!done->receive) tell_end(cq, done->qp);
        return;
    }
    if (done->receive) {
        tell_receive(cq, done);
        return;
    }
    const uint32_t behind = (done->cookie + 1) % of->sends.n;
    if (done->status == VNIC_OK) {
        of->done = behind;
        if (done->signalled) tell_request(cq, of, 0);
        return;
    }
    /* A NIC that cannot be reached does not answer either. */
    const vnic_status status = done->status == VNIC_UNREACHABLE ? VNIC_RETRY_EXCEEDED : done->status;
    tell_unasked(cq, of);
    of->done = behind;
    tell_request(cq, of, (uint32_t)vnic_vendor_code(VNIC_BROADCOM, status) & 0xff);
}
