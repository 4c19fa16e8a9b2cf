/* SPDX-License-Identifier: Apache-2.0
 *
 * bnxt.h: what Broadcom's library and its NIC (Thor, Thor2) say to each other: the parts of this model.
 *
 * Sources: rdma-core providers/bnxt_re (bnxt_re-abi.h: entries, completions, doorbells; verbs.c, main.h: sizes of
 * rings), Linux include/uapi/rdma/bnxt_re-abi.h (the vendor's part of commands). All is little-endian, and so are the
 * machines that this runs on.
 *
 * Offered: entries of one size ("static"), rings that are powers of two, stores to one doorbell register. Not offered,
 * and so not asked for by the library: entries of any size ("variable"), pages of toggles, doorbell pacing, entries
 * that are pushed into the doorbell page.
 */
#ifndef UCCL_EP_LAB_BNXT_H
#define UCCL_EP_LAB_BNXT_H

#include <string.h>

#include "lab.h"

/* --------------------------------------------------------------------------------------- commands: bnxt_re-abi.h */

enum { BNXT_HAS_CHIP = 0x1, BNXT_HAS_MODE = 0x2, BNXT_HAS_MSN_TABLE = 0x40 }; /* comp_mask */

struct bnxt_context_reply {
    uint32_t device_id, max_qp, page_bytes, completion_bytes, max_cqe, reserved;
    uint64_t comp_mask;
    uint32_t chip[2]; /* [0]: number in 16 bits, revision, metal */
    uint32_t mode;    /* of entries: 0 static */
    uint32_t reserved_2;
};

struct __attribute__((packed, aligned(4))) bnxt_pd_reply {
    uint32_t number, page;
    uint64_t doorbell; /* mmap offset */
};

struct bnxt_cq_request {
    uint64_t ring, handle, comp_mask; /* comp_mask: of newer libraries */
};

struct bnxt_cq_reply {
    uint32_t number, tail, phase, reserved;
    uint64_t comp_mask; /* a page of toggles */
};

struct bnxt_qp_request {
    uint64_t sends, receives, handle, comp_mask;
    uint32_t slots, psns; /* of variable entries */
};

struct bnxt_qp_reply {
    uint32_t number, reserved;
};

struct bnxt_srq_request {
    uint64_t ring, handle;
};

struct bnxt_srq_reply {
    uint32_t number, reserved;
    uint64_t comp_mask; /* a page of toggles */
};

/* Offsets for mmap(): a page that both sides see, with the number of the address handle that was made last; and the
 * doorbell's. */
#define BNXT_SHARED_PAGE 0u
#define BNXT_AH_AT 0x10u
#define BNXT_DOORBELL_PAGE 0x10000u

/* ----------------------------------------------------------------------------------------------------- entries */

#define BNXT_SLOT 16u
#define BNXT_ENTRY 128u /* a head of two slots and up to BNXT_SGES pieces, or as many inline bytes */
#define BNXT_SGES 6u
#define BNXT_INLINE 96u
#define BNXT_RESERVED 128u /* entries of a send ring that its library never fills */

enum bnxt_operation {
    BNXT_SEND = 0x00,
    BNXT_SEND_IMM = 0x01,
    BNXT_WRITE = 0x04,
    BNXT_WRITE_IMM = 0x05,
    BNXT_READ = 0x06,
    BNXT_COMPARE_SWAP = 0x08,
    BNXT_FETCH_ADD = 0x0b,
    BNXT_RECEIVE = 0x80
};
enum { BNXT_SIGNALLED = 0x01, BNXT_FENCES = 0x02 | 0x04, BNXT_SOLICITED = 0x08, BNXT_IS_INLINE = 0x10 };

struct bnxt_entry {
    uint8_t operation, flags, slots, reserved; /* slots: head and pieces */
    uint32_t immediate;                        /* a number; of an atomic: the key */
    union {
        uint64_t remote_address; /* of an atomic */
        struct {
            uint32_t length, qkey;
        };
    };
    union {
        struct {
            uint64_t remote_address;
            uint32_t rkey, reserved;
        } rdma;
        /* A fetch-and-add adds `swap` (rdma-core 61773a85f: earlier libraries, Debian 12's among them, put it into
         * `compare`, where no NIC looks). */
        struct {
            uint64_t swap, compare;
        } atomic;
        struct {
            uint32_t qpn, ah;
            uint64_t reserved;
        } datagram;
    } to;
};

struct bnxt_piece {
    uint64_t address;
    uint32_t lkey, length;
};

struct bnxt_receive {
    uint8_t operation, flags, slots, reserved;
    uint32_t reserved_4, tag, reserved_c;
    uint64_t reserved_10[2];
};

/* ------------------------------------------------------------------------------------------------- completions */

enum bnxt_completion_type {
    BNXT_OF_REQUEST = 0,
    BNXT_OF_RECEIVE_RC = 1,
    BNXT_OF_RECEIVE_UD = 2,
    BNXT_TERMINAL = 14 /* the queue pair is in error: its library flushes what is in its rings */
};
enum { BNXT_FROM_SRQ = 0x1, BNXT_HAS_IMMEDIATE = 0x2, BNXT_IS_WRITE = 0x8 }; /* flags, of a receive */

struct bnxt_completion {
    union {
        struct {
            uint64_t handle;
            uint32_t next; /* index behind the last request that is done: all before it are, too */
            uint32_t reserved[3];
        } request;
        struct {
            uint32_t length, immediate;
            uint64_t handle;
            uint64_t source; /* of a datagram: 48 bits of MAC address, the lower 16 of the queue pair */
        } receive;
        struct {
            uint64_t handle;
            uint16_t next_send, next_receive;
            uint32_t reserved[3];
        } terminal;
    };
    uint32_t head; /* phase, type << 1, status << 8, flags << 16 */
    uint32_t tag;  /* of a shared receive; from bit 24 the upper 8 of the queue pair that sent */
};

/* --------------------------------------------------------------------------------------------------- doorbells */

enum bnxt_doorbell {
    BNXT_RING_SENDS = 0,
    BNXT_RING_RECEIVES = 1,
    BNXT_RING_SHARED = 2,
    BNXT_ARM_SHARED = 3, /* index: the limit */
    BNXT_CONSUMED = 4,
    BNXT_ARM_SOLICITED = 5,
    BNXT_ARM_ALL = 6
};
/* 64 bits. Above the index newer libraries have an epoch and a toggle; what an index means is known without. */
#define BNXT_DOORBELL_INDEX(value) ((uint32_t)(value)&0xffffff)
#define BNXT_DOORBELL_NUMBER(value) ((uint32_t)((value) >> 32) & 0xfffff)
#define BNXT_DOORBELL_TYPE(value) ((uint32_t)((value) >> 60))

/* ----------------------------------------------------------------------------------------------------- the NIC */

struct bnxt_context {
    uint8_t *shared;
    size_t bytes;
    uint32_t said; /* bits of what has been refused, each once */
};

struct bnxt_cq {
    uint8_t *ring;
    uint32_t n, produced, consumed; /* the counters run on modulo 2^32 */
    uint32_t index;                 /* produced modulo n, and the phase there */
    bool phase;
    uint32_t solicited; /* produced, when the last entry that is an event for those who ask for little was written */
};

struct bnxt_ring {
    const uint8_t *entries;
    uint32_t n, posted, taken; /* indices of the ring */
    uint32_t over;             /* of the entry that its doorbell should not have covered any more; n: none */
    uint64_t rung;             /* the last store that moved `posted` */
};

struct bnxt_srq {
    struct bnxt_ring ring;
};

struct bnxt_qp {
    struct bnxt_ring sends, receives;
    uint64_t handle;
    uint32_t done, told; /* index behind the last request that is done; that a completion has told */
};

/* queue.c */
bool bnxt_fetch(lab_qp *qp, struct lab_work *work);
bool bnxt_fetch_receive(lab_qp *qp, struct lab_receive *receive);
bool bnxt_fetch_shared_receive(lab_srq *srq, struct lab_receive *receive);
uint32_t bnxt_shared_receives(lab_srq *srq);
uint32_t bnxt_cq_used(lab_cq *cq);
void bnxt_complete(lab_cq *cq, const struct lab_done *done);

/* doorbell.c */
void bnxt_ring(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring);
void bnxt_store(lab_context *context, uint32_t page, uint32_t offset, uint64_t value, uint32_t width);

#endif
