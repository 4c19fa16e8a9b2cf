/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.c: entries of ConnectX' queues, decoded and encoded.
 *
 * Doorbells are records in host memory: what the program writes to the doorbell page besides is not needed and not
 * looked at. An entry that the NIC does not understand is LAB_BAD, and the reason is said once.
 */
#include "../bytes.h"
#include "mlx5.h"

enum {
    NOP = 0x00,
    WRITE = 0x08,
    WRITE_IMM = 0x09,
    SEND = 0x0a,
    SEND_IMM = 0x0b,
    READ = 0x10,
    COMPARE_SWAP = 0x11,
    FETCH_ADD = 0x12
};
/* Byte 11 of an entry. The fence that verbs ask for is "small and fence"; "initiator small" orders nothing that we
 * have. */
enum { SOLICITED = 2, SIGNALLED = 8, FENCE_MASK = 0xe0, FENCE_INITIATOR_SMALL = 0x20 };
enum {
    CQE_REQUEST = 0,
    CQE_WRITE_IMM = 1,
    CQE_SEND = 2,
    CQE_SEND_IMM = 3,
    CQE_RESIZE = 5,
    CQE_REQUEST_ERROR = 13,
    CQE_RESPONSE_ERROR = 14
};
#define INLINE 0x80000000u

/* ------------------------------------------------------------------------------------------------------------- sends
 */

static void piece(struct lab_sge *sge, const uint8_t *segment) {
    sge->length = be32_at(segment);
    sge->lkey = be32_at(segment + 4);
    sge->address = be64_at(segment + 8);
}

/* Pieces of memory, or bytes that are in the entry itself. False: it makes no sense. */
static bool payload(const uint8_t *at, const uint8_t *end, struct lab_work *work) {
    while (at < end) {
        const uint32_t word = be32_at(at);
        if (word & INLINE) {
            const uint32_t n = word & 0x3ff;
            if (work->sges || n > (size_t)(end - at) - 4 || work->inline_bytes + n > LAB_MAX_INLINE) return false;
            memcpy(work->data + work->inline_bytes, at + 4, n);
            work->inline_bytes += n;
            at += (4 + n + MLX5_UNIT - 1) / MLX5_UNIT * MLX5_UNIT;
            continue;
        }
        if (work->inline_bytes || work->sges == LAB_MAX_SGES) return false;
        piece(&work->sge[work->sges], at);
        if (work->sge[work->sges].lkey != MLX5_NO_KEY) work->sges++;
        at += MLX5_UNIT;
    }
    return true;
}

static bool remote(const uint8_t *at, const uint8_t *end, struct lab_work *work) {
    if (at + MLX5_UNIT > end) return false;
    work->remote_address = be64_at(at);
    work->rkey = be32_at(at + 8);
    return true;
}

static bool atomic(const uint8_t *at, const uint8_t *end, struct lab_work *work) {
    if (!remote(at, end, work) || at + 2 * MLX5_UNIT > end) return false;
    work->add_or_swap = be64_at(at + MLX5_UNIT);
    work->compare = be64_at(at + MLX5_UNIT + 8);
    return payload(at + 2 * MLX5_UNIT, end, work) && work->sges == 1 && work->sge[0].length == 8;
}

/* Address vector (48 bytes): key @0, queue pair @8, GID @32; the handle that was made for it is found by that. */
static const uint8_t *datagram(const lab_qp *qp, const uint8_t *at, const uint8_t *end, struct lab_work *work) {
    struct in6_addr gid;
    work->ah = 0xffff;
    if (qp->type != LAB_UD || at + 3 * MLX5_UNIT > end) return at;
    memcpy(&gid, at + 32, sizeof gid);
    const lab_ah *ah = lab_ah_of_gid(qp->pd->context->device, &gid);
    if (ah) work->ah = ah->number;
    work->qkey = be32_at(at);
    work->dest_qpn = be32_at(at + 8) & 0xffffff;
    return at + 3 * MLX5_UNIT;
}

static bool decode(const lab_qp *qp, const uint8_t *entry, uint32_t bytes, struct lab_work *work) {
    const uint8_t *end = entry + bytes, *at = entry + MLX5_UNIT;
    switch (entry[3]) {
    case NOP:
        work->opcode = LAB_NOTHING;
        return true;
    case SEND:
    case SEND_IMM:
        work->opcode = entry[3] == SEND ? LAB_SEND : LAB_SEND_IMM;
        if (qp->type == LAB_UD && bytes < 4 * MLX5_UNIT) return false;
        at = datagram(qp, at, end, work);
        return payload(at, end, work);
    case WRITE:
        work->opcode = LAB_WRITE;
        break;
    case WRITE_IMM:
        work->opcode = LAB_WRITE_IMM;
        break;
    case READ:
        work->opcode = LAB_READ;
        break;
    case FETCH_ADD:
        work->opcode = LAB_ADD;
        return atomic(at, end, work);
    case COMPARE_SWAP:
        work->opcode = LAB_SWAP;
        return atomic(at, end, work);
    default:
        lab_unsupported("operation 0x%x of a ConnectX", entry[3]);
        return false;
    }
    if (!remote(at, end, work) || !payload(at + MLX5_UNIT, end, work)) return false;
    return work->opcode != LAB_READ || !work->inline_bytes;
}

bool mlx5_fetch(lab_qp *lab, struct lab_work *work) {
    struct mlx5_qp *qp = lab->model_data;
    const uint16_t posted = (uint16_t)mlx5_record(&qp->doorbell[1]);
    uint8_t entry[MLX5_UNITS * MLX5_UNIT];
    if (!qp->send_blocks || qp->sent == posted) return false;
    const size_t ring = (size_t)qp->send_blocks * MLX5_BLOCK, start = qp->sent * (size_t)MLX5_BLOCK % ring;
    memcpy(entry, qp->sends + start, MLX5_UNIT);
    const uint32_t units = entry[7] & 0x3f, bytes = units * MLX5_UNIT;
    /* An entry may run over the end of the ring. */
    const size_t first = start + bytes <= ring ? bytes : ring - start;
    memcpy(entry, qp->sends + start, first);
    memcpy(entry + first, qp->sends, bytes - first);

    const uint16_t index = (uint16_t)(entry[1] << 8 | entry[2]), left = (uint16_t)(posted - qp->sent);
    const uint32_t blocks = units ? (bytes + MLX5_BLOCK - 1) / MLX5_BLOCK : 1;
    work->signalled = entry[11] & SIGNALLED;
    work->solicited = entry[11] & SOLICITED;
    work->fence = (entry[11] & FENCE_MASK) && (entry[11] & FENCE_MASK) != FENCE_INITIATOR_SMALL;
    work->cookie = (uint32_t)entry[3] << 16 | qp->sent;
    work->sges = work->inline_bytes = 0;
    memcpy(&work->immediate, entry + 12, sizeof work->immediate);
    const bool whole = units && blocks <= left && blocks <= qp->send_blocks && index == qp->sent &&
                       be32_at(entry + 4) >> 8 == lab->number;
    if (!whole || !decode(lab, entry, bytes, work)) work->opcode = LAB_BAD;
    /* Behind an entry that makes no sense nothing can be found: all of it is one. */
    qp->sent = (uint16_t)(qp->sent + (whole ? blocks : left));
    return true;
}

/* ---------------------------------------------------------------------------------------------------------- receives
 */

static uint32_t pieces(const uint8_t *at, const uint8_t *end, struct lab_sge *sge) {
    uint32_t n = 0;
    for (; at + MLX5_UNIT <= end && n < LAB_MAX_SGES; at += MLX5_UNIT) {
        piece(&sge[n], at);
        if (sge[n].lkey == MLX5_NO_KEY) break;
        n++;
    }
    return n;
}

bool mlx5_fetch_receive(lab_qp *lab, struct lab_receive *receive) {
    struct mlx5_qp *qp = lab->model_data;
    if (!qp->receive_n || qp->received == (uint16_t)mlx5_record(&qp->doorbell[0])) return false;
    const size_t stride = (size_t)1 << qp->receive_shift;
    const uint8_t *entry = qp->receives + (qp->received & (qp->receive_n - 1)) * stride;
    receive->cookie = qp->received++;
    receive->sges = pieces(entry, entry + stride, receive->sge);
    return true;
}

uint32_t mlx5_shared_receives(lab_srq *lab) {
    const struct mlx5_srq *srq = lab->model_data;
    return (uint16_t)(mlx5_record(srq->doorbell) - srq->taken);
}

/* A list: byte 2 of an entry has the index of the next one. */
bool mlx5_fetch_shared_receive(lab_srq *lab, struct lab_receive *receive) {
    struct mlx5_srq *srq = lab->model_data;
    if (!mlx5_shared_receives(lab)) return false;
    const size_t stride = (size_t)1 << srq->shift;
    const uint8_t *entry = srq->entries + srq->index * stride;
    receive->cookie = srq->index;
    receive->sges = pieces(entry + MLX5_UNIT, entry + stride, receive->sge);
    srq->index = (uint32_t)(entry[2] << 8 | entry[3]) & (srq->n - 1);
    srq->taken++;
    return true;
}

/* --------------------------------------------------------------------------------------------------------- completions
 */

static uint32_t consumed(const struct mlx5_cq *cq) {
    return mlx5_record(&cq->doorbell[0]) & 0xffffff;
}

uint32_t mlx5_cq_used(lab_cq *lab) {
    const struct mlx5_cq *cq = lab->model_data;
    return (cq->produced - consumed(cq)) & 0xffffff;
}

/* The last 64 bytes of an entry; byte 63, which hands it over, last of all. */
static void append(struct mlx5_cq *cq, const uint8_t *entry, uint8_t opcode_and_solicited) {
    uint8_t *at = cq->entries + (size_t)(cq->produced & (cq->n - 1)) * cq->size + (cq->size - 64);
    const uint8_t owner = cq->produced / cq->n & 1;
    memcpy(at, entry, 63);
    __atomic_store_n(&at[63], (uint8_t)(opcode_and_solicited | owner), __ATOMIC_RELEASE);
    cq->produced++;
}

/* nics.md A1; what its table lacks has none. */
static uint8_t vendor_error(vnic_status status) {
    switch (status) {
    case VNIC_REMOTE_ACCESS:
        return 0x88;
    case VNIC_RETRY_EXCEEDED:
    case VNIC_UNREACHABLE:
        return 0x81;
    default:
        return 0;
    }
}

static uint8_t receive_opcode(const struct lab_done *done) {
    if (done->is_write) return CQE_WRITE_IMM;
    return done->has_immediate ? CQE_SEND_IMM : CQE_SEND;
}

void mlx5_complete(lab_cq *lab, const struct lab_done *done) {
    struct mlx5_cq *cq = lab->model_data;
    const struct mlx5_qp *qp = done->qp->model_data;
    uint8_t entry[64] = {0};
    if (!done->receive && done->status == VNIC_OK && !done->signalled) return;
    put_be32(entry + 32, qp->index);
    put_be32(entry + 56, (done->receive ? 0 : done->cookie >> 16 << 24) | done->qp->number);
    put_be16(entry + 60, (uint16_t)done->cookie);
    uint8_t opcode;
    if (done->status != VNIC_OK) {
        /* A NIC that cannot be reached does not answer either. */
        const vnic_status status = done->status == VNIC_UNREACHABLE ? VNIC_RETRY_EXCEEDED : done->status;
        opcode = done->receive ? CQE_RESPONSE_ERROR : CQE_REQUEST_ERROR;
        entry[54] = vendor_error(status);
        entry[55] = (uint8_t)vnic_vendor_code(VNIC_NVIDIA, status);
    } else {
        opcode = done->receive ? receive_opcode(done) : CQE_REQUEST;
        memcpy(entry + 36, &done->immediate, sizeof done->immediate);
        put_be32(entry + 44, done->bytes);
        /* Datagrams of RoCE always have a global route header: bits 28 and 29. */
        if (done->receive)
            put_be32(entry + 24, (done->qp->type == LAB_UD ? 1u << 28 : 0) | (done->source_qpn & 0xffffff));
    }
    const bool solicited = done->receive && (done->solicited || done->status != VNIC_OK);
    append(cq, entry, (uint8_t)(opcode << 4 | (solicited ? 2 : 0)));
    if (solicited || (!done->receive && done->status != VNIC_OK)) cq->solicited = cq->produced;
}

void mlx5_move(struct mlx5_cq *cq, uint8_t *entries, uint32_t n) {
    static const uint8_t nothing[64];
    append(cq, nothing, CQE_RESIZE << 4);
    cq->entries = entries;
    cq->n = n;
}

/* The arming record: sequence number of 2 bits @28, "solicited only" @24, consumer index. An arming whose event has
 * come is used up: the program counts on before it arms again. Entries that it has not seen are an event at once. */
void mlx5_look(lab_cq *lab) {
    struct mlx5_cq *cq = lab->model_data;
    const uint32_t word = mlx5_record(&cq->doorbell[1]), number = word >> 28;
    if (word == MLX5_NEVER) return;
    if (!lab->armed && cq->arm != MLX5_NEVER) cq->fired = cq->arm >> 28;
    if (word == cq->arm && !lab->armed) return;
    if (word != cq->arm) {
        cq->arm = word;
        if (number == cq->fired) return;
        lab->armed = true;
        lab->solicited_only = word >> 24 & 1;
    }
    const uint32_t last = lab->solicited_only ? cq->solicited : cq->produced;
    if (((last - word) & 0xffffff) - 1 < 0x7fffff) lab_cq_notify(lab, true);
}

/* -------------------------------------------------------------------------------------------------------------- rings
 */

void mlx5_ring(const lab_qp *lab, enum lab_ring_kind kind, struct lab_ring *ring) {
    const struct mlx5_qp *qp = lab->model_data;
    const struct mlx5_srq *srq = lab->srq ? lab->srq->model_data : NULL;
    const uint32_t *record = kind == LAB_RING_SENDS ? &qp->doorbell[1] : srq ? srq->doorbell : &qp->doorbell[0];
    if (kind == LAB_RING_SENDS)
        *ring = (struct lab_ring){.entries = qp->sends, .bytes = qp->send_blocks * MLX5_BLOCK, .unit = MLX5_BLOCK};
    else if (srq)
        *ring = (struct lab_ring){.entries = srq->entries, .bytes = srq->n << srq->shift, .unit = 1u << srq->shift};
    else
        *ring = (struct lab_ring){
            .entries = qp->receives, .bytes = qp->receive_n << qp->receive_shift, .unit = 1u << qp->receive_shift};
    ring->posted = (uint16_t)mlx5_record(record);
    ring->number = lab->number;
    ring->doorbell_bytes = sizeof *record;
    memcpy(ring->doorbell, record, sizeof *record);
}
