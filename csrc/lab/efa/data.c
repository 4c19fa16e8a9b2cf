/* SPDX-License-Identifier: Apache-2.0
 *
 * data.c: an EFA's rings, read and written as the NIC does.
 *
 * Requests and receives are those that their doorbell, a count modulo 2^16, covers. A completion's first byte that the
 * program looks at is that with the phase, which is 1 on the first lap and changes with each: it is written last.
 */
#include <errno.h>
#include <string.h>

#include "efa.h"

_Static_assert(sizeof(struct efa_request_head) == 32 && sizeof(struct efa_buffer) == 16 &&
                   sizeof(struct efa_rdma) == 16 && sizeof(struct efa_receive) == 16 &&
                   sizeof(struct efa_completion) == 32,
               "layouts of efa_io_defs.h");

static uint16_t rung(const struct efa_memory *doorbell) {
    return (uint16_t)__atomic_load_n((const uint32_t *)doorbell->base, __ATOMIC_ACQUIRE);
}

/* ------------------------------------------------------------------------------------------------------------ requests
 */

static bool take_buffers(struct lab_work *work, const uint8_t *at, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        struct efa_buffer buffer;
        memcpy(&buffer, at + i * sizeof buffer, sizeof buffer);
        work->sge[i] = (struct lab_sge){buffer.address, buffer.bytes, buffer.lkey & EFA_LKEY};
    }
    work->sges = n;
    return true;
}

static bool take_inline(struct lab_work *work, const uint8_t *at, size_t room, uint32_t n) {
    if (n > room) return false;
    memcpy(work->data, at, n);
    work->inline_bytes = n;
    return true;
}

/* False: the NIC does not understand it. */
static bool decode(const lab_qp *qp, const uint8_t *entry, uint32_t bytes, struct lab_work *work) {
    struct efa_request_head head;
    memcpy(&head, entry, sizeof head);
    const uint8_t *body = entry + sizeof head;
    const uint32_t limit = bytes == EFA_REQUEST_LONG ? EFA_INLINE_LONG : EFA_INLINE_SHORT;
    const bool is_inline = head.control1 & EFA_CONTROL1_INLINE, immediate = head.control1 & EFA_CONTROL1_IMMEDIATE;
    const uint32_t can = efa_capabilities(qp->pd->context->device);
    *work = (struct lab_work){.cookie = head.id,
                              .signalled = true, /* a request that asks for no completion is none of this NIC's */
                              .immediate = head.immediate,
                              .ah = head.ah,
                              .dest_qpn = head.dest_qpn,
                              .qkey = head.qkey};
    const uint8_t needed = EFA_CONTROL2_FIRST | EFA_CONTROL2_LAST | EFA_CONTROL2_COMPLETION;
    if (!(head.control1 & EFA_CONTROL1_HEAD) || (head.control2 & needed) != needed) return false;
    if ((head.control1 & 0xf) == EFA_SEND) {
        work->opcode = immediate ? LAB_SEND_IMM : LAB_SEND;
        if (is_inline) return take_inline(work, body, limit, head.length);
        return head.length <= EFA_SGES && take_buffers(work, body, head.length);
    }
    struct efa_rdma remote;
    memcpy(&remote, body, sizeof remote);
    body += sizeof remote;
    work->remote_address = remote.address;
    work->rkey = remote.rkey;
    if ((head.control1 & 0xf) == EFA_READ) {
        work->opcode = LAB_READ;
        return can & EFA_CAN_READ && !immediate && !is_inline && head.length <= 1 &&
               take_buffers(work, body, head.length);
    }
    if ((head.control1 & 0xf) != EFA_WRITE || !(can & EFA_CAN_WRITE)) return false;
    work->opcode = immediate ? LAB_WRITE_IMM : LAB_WRITE;
    if (is_inline) return bytes == EFA_REQUEST_LONG && take_inline(work, body, limit, head.length);
    return head.length <= 1 && take_buffers(work, body, head.length);
}

bool efa_fetch(lab_qp *qp, struct lab_work *work) {
    struct efa_qp *q = qp->model_data;
    if (!q->sq_entries || rung(q->sq_doorbell) == q->sq_index) return false;
    const uint32_t slot = q->sq_index++ & (q->sq_entries - 1);
    const uint8_t *entry = (const uint8_t *)q->requests->base + (size_t)slot * q->request_bytes;
    if (!decode(qp, entry, q->request_bytes, work)) work->opcode = LAB_BAD;
    return true;
}

/* A receive of several pieces has an entry for each. */
bool efa_fetch_receive(lab_qp *qp, struct lab_receive *receive) {
    struct efa_qp *q = qp->model_data;
    if (!q->rq_entries) return false;
    const uint16_t end = rung(q->rq_doorbell);
    *receive = (struct lab_receive){0};
    for (uint16_t at = q->rq_index; at != end;) {
        struct efa_receive entry;
        memcpy(&entry, (const uint8_t *)q->receives->base + (at++ & (q->rq_entries - 1)) * sizeof entry, sizeof entry);
        if (entry.lkey & EFA_RECEIVE_FIRST) receive->cookie = entry.id;
        if (receive->sges < EFA_SGES)
            receive->sge[receive->sges++] = (struct lab_sge){entry.address, entry.bytes, entry.lkey & EFA_LKEY};
        if (!(entry.lkey & EFA_RECEIVE_LAST)) continue;
        q->rq_index = at;
        return true;
    }
    return false;
}

/* --------------------------------------------------------------------------------------------------------- completions
 */

uint32_t efa_cq_used(lab_cq *cq) {
    const struct efa_cq *q = cq->model_data;
    return (uint16_t)(q->produced - rung(q->doorbell));
}

static uint8_t operation(enum lab_opcode opcode) {
    return opcode == LAB_READ ? EFA_READ : opcode == LAB_WRITE || opcode == LAB_WRITE_IMM ? EFA_WRITE : EFA_SEND;
}

void efa_complete(lab_cq *cq, const struct lab_done *done) {
    struct efa_cq *q = cq->model_data;
    struct efa_completion entry = {.id = (uint16_t)done->cookie,
                                   .status = (uint8_t)vnic_vendor_code(VNIC_AMAZON, done->status),
                                   .qpn = (uint16_t)done->qp->number};
    if (done->receive) {
        entry.flags = (uint8_t)(EFA_QUEUE_RECEIVE << 1 | done->has_immediate << 3 | done->unsolicited << 7 |
                                (done->is_write ? EFA_WRITE : EFA_SEND) << 4);
        entry.bytes = (uint16_t)done->bytes;
        entry.bytes_high = (uint16_t)(done->bytes >> 16);
        entry.ah = (uint16_t)done->source_ah;
        entry.source_qpn = (uint16_t)done->source_qpn;
        entry.immediate = done->immediate;
    } else {
        entry.flags = (uint8_t)(EFA_QUEUE_SEND << 1 | operation(done->opcode) << 4);
    }
    const uint32_t slot = q->produced & (cq->entries - 1);
    const uint8_t phase = !(q->produced / cq->entries & 1);
    uint8_t *at = (uint8_t *)q->ring->base + (size_t)slot * q->entry_bytes;
    const size_t flags = offsetof(struct efa_completion, flags);
    memcpy(at, &entry, flags);
    memcpy(at + flags + 1, (const uint8_t *)&entry + flags + 1, q->entry_bytes - flags - 1);
    __atomic_store_n(at + flags, (uint8_t)(entry.flags | phase), __ATOMIC_RELEASE);
    q->produced++;
}

/* The library gives each asking for an event a number of two bits, a new one when the event has come. */
void efa_look(lab_cq *cq) {
    struct efa_cq *q = cq->model_data;
    const uint32_t value = __atomic_load_n((const uint32_t *)q->doorbell->base, __ATOMIC_ACQUIRE);
    if (!(value & EFA_DOORBELL_ARM) || EFA_DOORBELL_NUMBER(value) + 1 == q->asked) return;
    q->asked = EFA_DOORBELL_NUMBER(value) + 1;
    cq->armed = true;
    cq->solicited_only = false;
}

void efa_ring(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring) {
    const struct efa_qp *q = qp->model_data;
    const bool sends = kind == LAB_RING_SENDS;
    const struct efa_memory *doorbell = sends ? q->sq_doorbell : q->rq_doorbell;
    if (!doorbell) return;
    const uint32_t unit = sends ? q->request_bytes : (uint32_t)sizeof(struct efa_receive);
    *ring = (struct lab_ring){.entries = (sends ? q->requests : q->receives)->base,
                              .bytes = unit * (sends ? q->sq_entries : q->rq_entries),
                              .unit = unit,
                              .posted = rung(doorbell),
                              .number = qp->number,
                              .doorbell_bytes = sizeof(uint32_t)};
    memcpy(ring->doorbell, doorbell->base, sizeof(uint32_t));
}
