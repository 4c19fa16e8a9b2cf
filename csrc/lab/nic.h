/* SPDX-License-Identifier: Apache-2.0
 *
 * nic.h: what the parts of the NIC's thread (nic.c, flow.c, ghost.c) know of each other, and what they say on the wire.
 *
 * Credits. An initiator has at most LAB_LINK_REQUESTS requests of LAB_LINK_BYTES of payload, to be written or read,
 * under way to one process (one request may be longer than that, alone). Answers are no more than requests: so neither
 * end keeps more than that, and none has to wait for the other one. A process that asks for more is cut off.
 *
 * All with lab_lock held.
 */
#ifndef UCCL_EP_LAB_NIC_H
#define UCCL_EP_LAB_NIC_H

#include "lab.h"
#include "wire.h"

#define LAB_WINDOW 256u               /* requests of a queue pair under way; a power of two */
#define LAB_WINDOW_BYTES (8ull << 20) /* of their payload; one request may be longer, alone */
#define LAB_LINK_REQUESTS 65536u
#define LAB_LINK_BYTES (64ull << 20)
#define LAB_MAX_MESSAGE (1u << 30)
#define LAB_FETCH_AT_ONCE 32u  /* entries of a queue pair in a round: the others come to theirs */
#define LAB_SRD_MAX_SEND 8928u /* EFA: a SEND is one packet */
#define LAB_GRH_BYTES 40u

/* ------------------------------------------------------------------------------------------------------------ frames
 */

enum lab_frame { LAB_FRAME_REQUEST = 1, LAB_FRAME_REPLY, LAB_FRAME_END };
#define LAB_PROTOCOL 1u

/* One machine, one version: numbers are as the CPU has them. */
struct lab_request { /* then `length` bytes, unless something is read */
    uint32_t frame;
    uint32_t id, incarnation; /* come back; incarnation: of the queue pair, which may have been reset */
    uint32_t source_qpn, dest_qpn;
    uint32_t length, immediate, rkey, qkey;
    uint8_t opcode, type; /* enum lab_opcode, enum lab_qp_type */
    uint8_t fence, solicited, rnr_retry, zero[3];
    uint64_t remote_address, value, compare;
    uint64_t patience_ns; /* with a target that does not answer; UINT64_MAX: for ever */
    struct in6_addr source_gid, dest_gid;
};
struct lab_reply { /* then `length` bytes that were read, or the old value */
    uint32_t frame;
    uint32_t id, incarnation, qpn;
    uint32_t status, length;
};
struct lab_end { /* the queue pair, as it was, is no more */
    uint32_t frame;
    uint32_t incarnation, qpn, zero;
};

/* -------------------------------------------------------------------------------------------------------------- nic.c
 */

extern struct wire *lab_wire;
extern vnic_fabric *lab_fabric;
uint64_t lab_now(void); /* ns; the fabric's time follows it */

/* Memory of this process under a local key, if the queue pair may use it so; NULL otherwise. */
char *lab_local(const lab_qp *qp, const struct lab_sge *sge, bool written);
/* An entry of the queue, or its overrun. */
void lab_complete(lab_cq *cq, const struct lab_done *done);
/* Has the program asked for an event, and is there something? Where it asks by memory. */
void lab_cq_look(lab_cq *cq);
/* Into the state of errors, with an asynchronous event unless `event` is LAB_NO_EVENT. */
#define LAB_NO_EVENT UINT32_MAX
void lab_qp_fail(lab_qp *qp, uint32_t event);

/* ------------------------------------------------------------------------------------------------------------- flow.c
 */

uint32_t lab_flows_turn(void); /* returns what was done */
bool lab_flows_awake(void);    /* is there a queue whose doorbell must be looked at? */
const char *lab_flow_reply(struct wire_link *link, const void *frame, uint32_t bytes);
void lab_flow_link_gone(struct wire_link *link);
void lab_flow_error(lab_qp *qp); /* the queue pair is in error: what is under way is flushed in the next turn */
void lab_flows_cq_error(const lab_cq *cq); /* it overran: its queue pairs fail */
void lab_flows_forget(void);               /* in a child after fork() */

/* ------------------------------------------------------------------------------------------------------------ ghost.c
 */

uint32_t lab_ghosts_turn(void);
uint64_t lab_ghosts_next(void); /* when something is to be done without an event of the fabric; UINT64_MAX: never */
const char *lab_ghost_request(struct wire_link *link, const void *frame, uint32_t bytes);
const char *lab_ghost_end(struct wire_link *link, const void *frame, uint32_t bytes);
void lab_ghost_link_gone(struct wire_link *link);
/* Requests of others do not reach it any more: it is destroyed, reset or in error. */
void lab_ghosts_leave(const lab_qp *qp);
/* Is something that has arrived at it (NULL: at any) with the fabric? Only that can take a receive. */
bool lab_ghosts_under_way(const lab_qp *qp);
/* What has arrived at it (NULL: at any) is carried out and answered now, as far as that needs no receive and a
 * millisecond of the fabric's: hardware has acknowledged before the program knows, and the program may end on what it
 * knows. */
void lab_ghosts_settle(const lab_qp *qp);
/* Receives that are posted to it end as flushed. */
uint32_t lab_receives_flush(lab_qp *qp);
void lab_ghosts_forget(void);
uint32_t lab_ghosts(void); /* how many there are */

#endif
