/* SPDX-License-Identifier: Apache-2.0
 *
 * efa.h: what AWS's library and its NIC say to each other: the parts of this model.
 *
 * Sources: rdma-core providers/efa (efa_io_defs.h: requests, receives, completions; efa_io_regs_defs.h: doorbells),
 * Linux include/uapi/rdma/efa-abi.h (the vendor's part of commands). All is little-endian, and so are the machines that
 * this runs on.
 */
#ifndef UCCL_EP_LAB_EFA_H
#define UCCL_EP_LAB_EFA_H

#include "lab.h"

/* ------------------------------------------------------------------------------------------ commands: efa-abi.h */

struct efa_context_reply {
    uint32_t comp_mask, commands; /* commands: whose replies have a vendor's part */
    uint16_t sub_cqs, inline_bytes;
    uint32_t max_llq_bytes;
    uint16_t max_batch /* of 64 bytes */, min_sq_wr, inline_bytes_ex;
    uint8_t reserved[2];
};

struct efa_pd_reply {
    uint32_t comp_mask;
    uint16_t number;
    uint8_t reserved[2];
};

struct efa_cq_request {
    uint32_t comp_mask, entry_bytes;
    uint16_t sub_cqs;
    uint8_t flags, reserved[5];
};

struct efa_cq_reply {
    uint32_t comp_mask; /* EFA_CQ_HAS_DOORBELL */
    uint8_t reserved[4];
    uint64_t ring_key, ring_bytes;
    uint16_t index;
    uint8_t reserved_d0[2];
    uint32_t doorbell_offset;
    uint64_t doorbell_key;
};

struct efa_qp_request {
    uint32_t comp_mask, rq_bytes, sq_bytes, driver_type;
    uint16_t flags; /* EFA_QP_UNSOLICITED */
    uint8_t service_level, reserved[5];
};

struct efa_qp_reply {
    uint32_t comp_mask, rq_doorbell_offset, sq_doorbell_offset, llq_offset;
    uint64_t rq_key, rq_bytes, rq_doorbell_key, sq_doorbell_key, llq_key;
    uint16_t send_sub_cq, recv_sub_cq;
    uint8_t reserved[4];
};

struct efa_ah_reply {
    uint32_t comp_mask;
    uint16_t number;
    uint8_t reserved[2];
};

struct efa_device_reply {
    uint32_t comp_mask, max_sq_wr, max_rq_wr;
    uint16_t max_sq_sge, max_rq_sge;
    uint32_t max_rdma_bytes, capabilities;
};

enum { EFA_REPLIES_QUERY_DEVICE = 1, EFA_REPLIES_CREATE_AH = 2 };
enum { EFA_CQ_WITH_CHANNEL = 1, EFA_CQ_WITH_SGID = 2, EFA_CQ_HAS_DOORBELL = 1 };
enum { EFA_QP_UNSOLICITED = 1, EFA_TYPE_SRD = 0 };
enum {
    EFA_CAN_READ = 1,
    EFA_CAN_RETRY_RNR = 2,
    EFA_CAN_NOTIFY = 4,
    EFA_CAN_SGID = 8,
    EFA_CAN_POLL_128 = 0x10,
    EFA_CAN_WRITE = 0x20,
    EFA_CAN_UNSOLICITED = 0x40
};

/* --------------------------------------------------------------------------------------------- rings: efa_io_defs.h */

enum efa_operation { EFA_SEND = 0, EFA_READ = 1, EFA_WRITE = 2 };

struct efa_buffer {
    uint32_t bytes, lkey; /* the key has 24 bits */
    uint64_t address;
};

struct efa_request_head {
    uint16_t id;
    uint8_t control1; /* operation, 4 bits; immediate; inline; -; is this a head? */
    uint8_t control2; /* phase; -; first; last; completion wanted */
    uint16_t dest_qpn;
    uint16_t length; /* bytes inline, or buffers */
    uint32_t immediate;
    uint16_t ah;
    uint8_t reserved_e[2];
    uint32_t qkey;
    uint8_t reserved_14[12];
};

struct efa_rdma {
    uint32_t bytes, rkey;
    uint64_t address;
};

#define EFA_CONTROL1_IMMEDIATE 0x10u
#define EFA_CONTROL1_INLINE 0x20u
#define EFA_CONTROL1_HEAD 0x80u
#define EFA_CONTROL2_FIRST 0x04u
#define EFA_CONTROL2_LAST 0x08u
#define EFA_CONTROL2_COMPLETION 0x10u
#define EFA_LKEY 0xffffffu

struct efa_receive {
    uint64_t address;
    uint16_t id, bytes;
    uint32_t lkey; /* and EFA_RECEIVE_FIRST, _LAST */
};

#define EFA_RECEIVE_FIRST (1u << 30)
#define EFA_RECEIVE_LAST (1u << 31)

struct efa_completion {
    uint16_t id;
    uint8_t status, flags; /* flags: phase; 1 send, 2 receive; immediate; operation, 3 bits; unsolicited */
    uint16_t qpn;
    uint16_t bytes, ah, source_qpn; /* these and what follows: of receives */
    uint32_t immediate;
    uint16_t bytes_high; /* of entries of 32 bytes */
    uint8_t reserved[14];
};

enum { EFA_QUEUE_SEND = 1, EFA_QUEUE_RECEIVE = 2, EFA_NO_AH = 0xffff };

/* Of a completion queue: efa_io_regs_defs.h. */
#define EFA_DOORBELL_INDEX 0xffffu
#define EFA_DOORBELL_NUMBER(value) (((value) >> 29) & 3u)
#define EFA_DOORBELL_ARM (1u << 31)

/* --------------------------------------------------------------------------------------------------------- the model
 */

#define EFA_MAX_CQE 32768u /* the index that a doorbell tells has 16 bits */
#define EFA_MAX_WR 32768u  /* likewise */
#define EFA_LLQ_BYTES (512u * 1024)
#define EFA_MAX_QPS 256u
#define EFA_SGES 2u /* of a message; RDMA has one */
#define EFA_INLINE_SHORT 32u
#define EFA_INLINE_LONG 80u
#define EFA_REQUEST_SHORT 64u
#define EFA_REQUEST_LONG 128u
#define EFA_MTU 8928u

/* Memory of the NIC's, which the program maps by its key. */
struct efa_memory {
    struct efa_memory *next;
    uint64_t key;
    void *base;
    size_t bytes;
};

struct efa_context {
    struct efa_memory *memory;
    uint64_t next_key;
};

struct efa_cq {
    struct efa_memory *ring, *doorbell;
    uint32_t entry_bytes, produced;
    uint32_t asked; /* number of the last asking for an event, and one; 0: none yet */
};

struct efa_qp {
    struct efa_memory *requests, *sq_doorbell, *receives, *rq_doorbell;
    uint32_t request_bytes, sq_entries, rq_entries; /* powers of two */
    uint16_t sq_index, rq_index;                    /* the next to be fetched, modulo 2^16 */
};

/* control.c */
uint32_t efa_capabilities(const lab_device *device);

/* data.c */
bool efa_fetch(lab_qp *qp, struct lab_work *work);
bool efa_fetch_receive(lab_qp *qp, struct lab_receive *receive);
uint32_t efa_cq_used(lab_cq *cq);
void efa_complete(lab_cq *cq, const struct lab_done *done);
void efa_look(lab_cq *cq);
void efa_ring(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring);

#endif
