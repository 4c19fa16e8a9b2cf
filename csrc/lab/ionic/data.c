/* SPDX-License-Identifier: Apache-2.0
 *
 * data.c: a Pollara's doorbells, and entries of its queues.
 *
 * A doorbell says up to where a ring is filled, as an index in it. Colours, of entries and of completions, change with
 * each lap: an entry of another colour than its lap's has not been written since.
 *
 * Messages of a reliable connection have numbers, from 1 on. A completion names the last one that is done, and so all
 * before it: those that nobody wants to hear of need no entry. What takes no number (datagrams; what goes wrong before
 * anything is sent) is completed by its index in the ring.
 */
#include "../bytes.h"
#include "ionic.h"

/* ------------------------------------------------------------------------------------------------------------- sends
 */

/* Version 1, version 2; zero: no operation of a message's. */
static const uint8_t operations[2][256] = {{[0x00] = LAB_SEND,
                                            [0x02] = LAB_SEND_IMM,
                                            [0x03] = LAB_READ,
                                            [0x04] = LAB_WRITE,
                                            [0x05] = LAB_WRITE_IMM,
                                            [0x06] = LAB_SWAP,
                                            [0x07] = LAB_ADD},
                                           {[0x20] = LAB_SEND,
                                            [0x60] = LAB_SEND_IMM,
                                            [0x02] = LAB_READ,
                                            [0x21] = LAB_WRITE,
                                            [0x61] = LAB_WRITE_IMM,
                                            [0x04] = LAB_SWAP,
                                            [0x05] = LAB_ADD}};

/* Registration, invalidation and windows go nowhere, and take no number. */
static bool is_local(bool second, uint8_t operation) {
    const uint8_t first = second ? 6 : 8;
    return operation >= first && operation < first + 3;
}

/* The list of an entry of so many bytes; its sum is `length`. False: it makes no sense. */
static bool list(const uint8_t *entry, size_t bytes, struct lab_sge *sge, uint32_t n, uint64_t *length) {
    const uint32_t spec = be16_at(entry + 10) & IONIC_SPEC;
    const uint8_t *lengths = entry + IONIC_PAYLOAD, *at = lengths;
    if (spec) {
        if (spec != IONIC_SPEC32 && spec != IONIC_SPEC16) return false;
        if (n <= IONIC_SPEC_FIRST || n > (spec == IONIC_SPEC32 ? 8 : IONIC_MAX_SPEC)) return false;
        at += IONIC_SPEC_FIRST * IONIC_PIECE;
    }
    if (n > (bytes - (size_t)(at - entry)) / IONIC_PIECE || n > LAB_MAX_SGES) return false;
    *length = 0;
    for (uint32_t i = 0; i < n; i++, at += IONIC_PIECE) {
        sge[i] = (struct lab_sge){be64_at(at), be32_at(at + 8), be32_at(at + 12)};
        if (spec == IONIC_SPEC32 && be32_at(lengths + 4 * i) != sge[i].length) return false;
        if (spec == IONIC_SPEC16 && be16_at(lengths + 2 * i) != sge[i].length) return false;
        *length += sge[i].length;
    }
    return true;
}

static bool payload(const uint8_t *entry, size_t bytes, struct lab_work *work) {
    const uint32_t wanted = be32_at(entry + 28);
    if (be16_at(entry + 10) & IONIC_INLINE) {
        if (entry[9] || wanted > bytes - IONIC_PAYLOAD || work->opcode == LAB_READ) return false;
        memcpy(work->data, entry + IONIC_PAYLOAD, wanted);
        work->inline_bytes = wanted;
        return true;
    }
    uint64_t length;
    if (!list(entry, bytes, work->sge, entry[9], &length) || length != wanted) return false;
    work->sges = entry[9];
    return true;
}

static bool atomic(const uint8_t *entry, bool second, struct lab_work *work) {
    if (entry[9] != 1 || be16_at(entry + 10) & IONIC_INLINE) return false;
    work->add_or_swap = be64_at(entry + 28);
    work->compare = be64_at(entry + 36);
    work->sges = 1;
    work->sge[0] = (struct lab_sge){be64_at(entry + 48), 8, be32_at(entry + (second ? 44 : 60))};
    return second || be32_at(entry + 56) == 8;
}

static bool decode(const lab_qp *lab, const uint8_t *entry, size_t bytes, struct lab_work *work) {
    const struct ionic_qp *qp = lab->model_data;
    const uint8_t opcode = operations[qp->second][entry[8]];
    if (!opcode) {
        lab_unsupported("operation 0x%x of a Pollara (version %d)", entry[8], qp->second ? 2 : 1);
        return false;
    }
    work->opcode = (enum lab_opcode)opcode;
    const bool send = opcode == LAB_SEND || opcode == LAB_SEND_IMM;
    if (lab->type == LAB_UD) {
        work->ah = be32_at(entry + 16);
        work->dest_qpn = be32_at(entry + 20) & 0xffffff;
        work->qkey = be32_at(entry + 24);
        return send && payload(entry, bytes, work);
    }
    if (!send) {
        work->remote_address = be64_at(entry + 16);
        work->rkey = be32_at(entry + 24);
    }
    if (opcode == LAB_ADD || opcode == LAB_SWAP) return atomic(entry, qp->second, work);
    return payload(entry, bytes, work);
}

/* Is it what the program has written for this place and this lap? */
static bool fresh(struct ionic_qp *qp, const uint8_t *entry) {
    const bool colour = be16_at(entry + 10) & IONIC_COLOUR;
    if (!qp->colour_known) {
        qp->colour_known = true;
        qp->colour = colour;
    }
    const bool good = colour == qp->colour && le64_at(entry) == qp->send.taken;
    if (qp->send.taken == qp->send.mask) qp->colour = !qp->colour;
    return good;
}

bool ionic_fetch(lab_qp *lab, struct lab_work *work) {
    struct ionic_qp *qp = lab->model_data;
    struct ionic_queue *q = &qp->send;
    uint8_t entry[1 << IONIC_MAX_STRIDE_SHIFT];
    const size_t bytes = (size_t)1 << q->shift;
    if (q->taken == q->posted) return false;
    memcpy(entry, q->entries + q->taken * bytes, bytes);
    const uint16_t flags = be16_at(entry + 10);
    const bool numbered = lab->type == LAB_RC && !is_local(qp->second, entry[8]);
    work->fence = flags & IONIC_FENCE;
    work->solicited = flags & IONIC_SOLICITED;
    /* Without a number each needs an entry of its own, or the library waits for it for ever. */
    work->signalled = flags & IONIC_SIGNALLED || !numbered;
    work->cookie = q->taken | (numbered ? IONIC_NUMBERED : 0);
    work->sges = work->inline_bytes = 0;
    memcpy(&work->immediate, entry + 12, sizeof work->immediate);
    const bool over = q->taken == q->over;
    if (over) q->over = q->mask + 1;
    if (!fresh(qp, entry) || over || !decode(lab, entry, bytes, work)) work->opcode = LAB_BAD;
    q->taken = (q->taken + 1) & q->mask;
    return true;
}

/* A list that makes no sense has no room for anything: the message that takes it fails. */
bool ionic_fetch_receive(lab_qp *lab, struct lab_receive *receive) {
    struct ionic_qp *qp = lab->model_data;
    struct ionic_queue *q = &qp->receive;
    uint8_t entry[1 << IONIC_MAX_STRIDE_SHIFT];
    const size_t bytes = (size_t)1 << q->shift;
    uint64_t length;
    if (q->taken == q->posted) return false;
    memcpy(entry, q->entries + q->taken * bytes, bytes);
    receive->cookie = le64_at(entry) & 0xffff; /* the library's name for it */
    receive->sges = list(entry, bytes, receive->sge, entry[9], &length) ? entry[9] : 0;
    q->taken = (q->taken + 1) & q->mask;
    return true;
}

/* -------------------------------------------------------------------------------------------------------- completions
 */

/* The library makes the ring longer than was asked for, and tells what it has consumed only when that could run short:
 * what is beyond the surplus counts. Two entries are the most that one completion takes. */
uint32_t ionic_cq_used(lab_cq *lab) {
    const struct ionic_cq *cq = lab->model_data;
    const uint32_t used = cq->produced - cq->consumed, surplus = cq->mask - 1 - lab->entries;
    return used > surplus ? used - surplus : 0;
}

/* The first 24 bytes of `entry` are the caller's. The word with the colour hands it over. */
static void append(struct ionic_cq *cq, uint8_t *entry, uint32_t status_or_length, uint32_t word) {
    uint8_t *at = cq->entries + ((size_t)(cq->produced & cq->mask) << IONIC_COMPLETION_SHIFT);
    const bool colour = !(cq->produced / (cq->mask + 1) & 1);
    put_be32(entry + 24, status_or_length);
    memcpy(at, entry, 28);
    __atomic_store_n((uint32_t *)(void *)(at + 28), htobe32(word | (colour ? IONIC_COMPLETION_COLOUR : 0)),
                     __ATOMIC_RELEASE);
    cq->produced++;
}

static uint32_t word_of(const lab_qp *qp, enum ionic_completion type, bool error) {
    return qp->number << 8 | (uint32_t)type << IONIC_COMPLETION_TYPE_SHIFT | (error ? IONIC_COMPLETION_ERROR : 0);
}

/* A NIC that cannot be reached does not answer either. */
static uint32_t code_of(vnic_status status) {
    return (uint32_t)vnic_vendor_code(VNIC_PENSANDO, status == VNIC_UNREACHABLE ? VNIC_RETRY_EXCEEDED : status);
}

static void received(struct ionic_cq *cq, const struct lab_done *done) {
    uint8_t entry[32] = {0};
    const bool error = done->status != VNIC_OK;
    const uint32_t what = done->is_write        ? IONIC_RECEIVED_WRITE_IMMEDIATE
                          : done->has_immediate ? IONIC_RECEIVED_SEND_IMMEDIATE
                                                : IONIC_RECEIVED_SEND;
    put_le64(entry, done->cookie & 0xffff);
    put_be32(entry + 8, what << 24 | (done->source_qpn & 0xffffff));
    memcpy(entry + 20, &done->immediate, sizeof done->immediate);
    append(cq, entry, error ? code_of(done->status) : done->bytes, word_of(done->qp, IONIC_RECEIVED, error));
}

static void sent_up_to(struct ionic_cq *cq, const lab_qp *lab, uint32_t message, vnic_status status) {
    uint8_t entry[32] = {0};
    put_be32(entry + 4, message);
    append(cq, entry, code_of(status), word_of(lab, IONIC_SENT, status != VNIC_OK));
}

static void sent_locally(struct ionic_cq *cq, const lab_qp *lab, uint32_t index, vnic_status status) {
    uint8_t entry[32] = {0};
    put_le64(entry + 16, index);
    append(cq, entry, code_of(status), word_of(lab, IONIC_SENT_LOCALLY, status != VNIC_OK));
}

/* Nothing of it has gone out. */
static bool is_of_here(vnic_status status) {
    return status == VNIC_LOCAL_LENGTH || status == VNIC_LOCAL_OPERATION || status == VNIC_LOCAL_ACCESS;
}

static void sent(struct ionic_cq *cq, const struct lab_done *done) {
    struct ionic_qp *qp = done->qp->model_data;
    if (!(done->cookie & IONIC_NUMBERED) || is_of_here(done->status)) {
        /* The library looks at them in order: those before it must be done. */
        if (qp->untold) sent_up_to(cq, done->qp, qp->messages, VNIC_OK);
        qp->untold = false;
        sent_locally(cq, done->qp, done->cookie & 0xffff, done->status);
        return;
    }
    qp->messages++;
    qp->untold = done->status == VNIC_OK && !done->signalled;
    if (!qp->untold) sent_up_to(cq, done->qp, qp->messages, done->status);
}

void ionic_complete(lab_cq *lab, const struct lab_done *done) {
    struct ionic_cq *cq = lab->model_data;
    if (done->receive)
        received(cq, done);
    else if (done->rest)
        sent_locally(cq, done->qp, 0, done->status);
    else
        sent(cq, done);
    if (done->status != VNIC_OK || (done->receive && done->solicited)) cq->solicited = cq->produced;
}

/* ---------------------------------------------------------------------------------------------------------- doorbells
 */

static void rung(lab_context *context, struct ionic_queue *q, uint64_t value, uint32_t batch) {
    const uint32_t index = (uint32_t)value & 0xffff;
    if (index <= q->mask) {
        q->rung = htole64(value);
        if (batch && ((index - q->posted) & q->mask) > batch) q->over = (q->posted + batch) & q->mask;
        q->posted = index;
    } else {
        lab_say("%s: a doorbell with index %u of a queue of %u", context->device->name, index, q->mask + 1);
    }
}

/* The program says how far it has consumed before it arms: what it has not seen then is an event at once. */
static void rung_completions(lab_cq *lab, uint64_t value) {
    struct ionic_cq *cq = lab->model_data;
    const bool any = value & IONIC_DOORBELL_ARM, solicited = value & IONIC_DOORBELL_ARM_SOLICITED;
    if (!any && !solicited) {
        const uint32_t more = ((uint32_t)value - cq->consumed) & cq->mask;
        if (more <= cq->produced - cq->consumed) cq->consumed += more;
        return;
    }
    lab->solicited_only = !any && (!lab->armed || lab->solicited_only); /* one that is armed for all stays so */
    lab->armed = true;
    const uint32_t last = lab->solicited_only ? cq->solicited : cq->produced;
    if ((int32_t)(last - cq->consumed) > 0) lab_cq_notify(lab, true);
}

void ionic_store(lab_context *context, uint32_t page, uint32_t offset, uint64_t value, uint32_t width) {
    (void)page;
    value = le64toh(value);
    const uint32_t number = (uint32_t)(value >> 24) & 0xffffff;
    const uint32_t type = offset / (uint32_t)sizeof value;
    if (offset % sizeof value || width != sizeof value) {
        lab_unsupported("a store of %u bytes at 0x%x of a Pollara's doorbell page", width, offset);
        return;
    }
    /* What is late for a queue that is no more goes nowhere. */
    if (type == IONIC_TYPE_COMPLETION) {
        lab_cq *cq = lab_find_cq(context, number);
        if (cq) rung_completions(cq, value);
        return;
    }
    lab_qp *lab = lab_qp_numbered(number);
    if (type != IONIC_TYPE_SEND && type != IONIC_TYPE_RECEIVE) {
        lab_unsupported("doorbell %u of a Pollara", type);
    } else if (lab && lab->pd->context == context) {
        struct ionic_qp *qp = lab->model_data;
        const bool send = type == IONIC_TYPE_SEND;
        rung(context, send ? &qp->send : &qp->receive, value, send ? (uint32_t)context->device->knobs.max_batch : 0);
    }
}

void ionic_ring(const lab_qp *lab, enum lab_ring_kind kind, struct lab_ring *ring) {
    const struct ionic_qp *qp = lab->model_data;
    const struct ionic_queue *q = kind == LAB_RING_SENDS ? &qp->send : &qp->receive;
    *ring = (struct lab_ring){.entries = q->entries,
                              .bytes = (q->mask + 1) << q->shift,
                              .unit = 1u << q->shift,
                              .posted = q->posted,
                              .number = lab->number,
                              .doorbell_bytes = sizeof q->rung};
    memcpy(ring->doorbell, &q->rung, sizeof q->rung);
}
