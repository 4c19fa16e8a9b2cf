/* SPDX-License-Identifier: Apache-2.0
 *
 * ionic.h: what AMD's libionic and a Pollara say to each other: the parts of this model.
 *
 * Sources: Linux include/uapi/rdma/ionic-abi.h (the vendor's part of commands, native byte order); rdma-core
 * providers/ionic: ionic_fw_types.h (entries, big-endian but for their index), ionic_queue.h (doorbells).
 */
#ifndef UCCL_EP_LAB_IONIC_H
#define UCCL_EP_LAB_IONIC_H

#include "lab.h"

/* ---------------------------------------------------------------------------------------- commands: ionic-abi.h */

struct ionic_context_reply {
    uint32_t reserved, page_shift;
    uint64_t doorbell_offset;
    uint16_t version; /* of work queue entries: 1 or 2 */
    uint8_t operations, admin_operations;
    uint8_t send_type, receive_type, completion_type, admin_type; /* indices in the doorbell page */
    uint8_t max_stride_shift, max_spec, pipelines, express_strides, express_queues;
    uint8_t reserved_1d[3];
    uint64_t clock_offset; /* 0: no clock to map */
};

/* A ring in the program's memory. */
struct ionic_ring {
    uint64_t address;
    uint32_t bytes;
    uint16_t mask;
    uint8_t depth_shift, stride_shift;
};

struct ionic_ah_reply {
    uint32_t number, reserved;
};

struct ionic_cq_request {
    struct ionic_ring ring[2]; /* of each pipeline */
    uint8_t pipeline_mask, reserved[7];
};

struct ionic_cq_reply {
    uint32_t number[2];
    uint8_t pipeline_mask, reserved[7];
};

struct ionic_qp_request {
    struct ionic_ring send, receive;
    uint8_t send_spec, receive_spec;
    uint8_t send_cmb, receive_cmb; /* IONIC_CMB_*: entries in the controller's memory, with express doorbells */
    uint8_t pipeline_mask, reserved[3];
};

struct ionic_qp_reply {
    uint32_t number;
    uint8_t send_cmb, receive_cmb, pipeline, reserved;
    uint64_t send_cmb_offset, receive_cmb_offset;
};

enum { IONIC_CMB_REQUIRE = 2 };

/* ------------------------------------------------------------------------------------ doorbells: ionic_queue.h */

/* A store of 8 bytes, little-endian, to the place of the queue's type: index @0, arming @16, number of the queue @24.
 */
enum { IONIC_TYPE_COMPLETION = 2, IONIC_TYPE_SEND = 3, IONIC_TYPE_RECEIVE = 4 }; /* chosen */
#define IONIC_DOORBELL_OFFSET 0x1000000u /* what the reply names and mmap() gets; chosen */
#define IONIC_DOORBELL_ARM (1ull << 16)
#define IONIC_DOORBELL_ARM_SOLICITED (1ull << 17)

/* ------------------------------------------------------------------------------------- entries: ionic_fw_types.h */

#define IONIC_STRIDE_SHIFT 6u /* 64 bytes: the shortest work queue entry */
#define IONIC_MAX_STRIDE_SHIFT 9u
#define IONIC_PAYLOAD 32u /* where pieces or inline bytes begin */
#define IONIC_PIECE 16u
#define IONIC_SPEC_FIRST 2u /* lists with lengths in front begin this many pieces later */
#define IONIC_MAX_SPEC 16u

enum ionic_flags {
    IONIC_FENCE = 1,
    IONIC_SOLICITED = 2,
    IONIC_INLINE = 4,
    IONIC_SIGNALLED = 8,
    IONIC_COLOUR = 0x10,
    IONIC_SPEC32 = 0x1000, /* lengths of 32, of 16 bits in front */
    IONIC_SPEC16 = 0x2000,
    IONIC_SPEC = 0xf000
};

#define IONIC_COMPLETION_SHIFT 5u /* 32 bytes */
enum ionic_completion { IONIC_RECEIVED = 1, IONIC_SENT = 2 /* up to a message's number */, IONIC_SENT_LOCALLY = 3 };
enum { IONIC_COMPLETION_COLOUR = 1, IONIC_COMPLETION_ERROR = 2, IONIC_COMPLETION_TYPE_SHIFT = 5 };
enum ionic_received { IONIC_RECEIVED_SEND = 0, IONIC_RECEIVED_SEND_IMMEDIATE = 2, IONIC_RECEIVED_WRITE_IMMEDIATE = 3 };

/* --------------------------------------------------------------------------------------------------------- the model
 */

#define IONIC_MAX_CQE 65435u /* 65535 less the grace that the library adds */

struct ionic_cq {
    uint8_t *entries;
    uint32_t mask;
    uint32_t produced, consumed; /* consumed: as the program has last said, which is seldom */
    uint32_t solicited;          /* `produced` behind the last entry that is solicited or an error */
};

struct ionic_queue {
    const uint8_t *entries;
    uint32_t mask, shift;
    uint32_t posted, taken; /* indices in the ring */
    uint64_t rung;          /* the last store that moved `posted`, as it was */
    uint32_t over;          /* of the entry that its doorbell should not have covered any more; mask + 1: none */
};

struct ionic_qp {
    struct ionic_queue send, receive;
    bool second;         /* entries of version 2 */
    uint32_t messages;   /* completed: the number of the last one */
    bool untold;         /* of which the last ones are in no completion entry */
    bool colour_known;   /* that of the first entry says which one laps begin with */
    bool colour;         /* of the next entry */
    uint32_t responders; /* resources of the device that it holds */
};

/* In lab_work.cookie: index of the entry in 16 bits; and does it have a message's number? */
#define IONIC_NUMBERED 0x10000u

/* data.c */
bool ionic_fetch(lab_qp *qp, struct lab_work *work);
bool ionic_fetch_receive(lab_qp *qp, struct lab_receive *receive);
uint32_t ionic_cq_used(lab_cq *cq);
void ionic_complete(lab_cq *cq, const struct lab_done *done);
void ionic_ring(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring);
void ionic_store(lab_context *context, uint32_t page, uint32_t offset, uint64_t value, uint32_t width);

#endif
