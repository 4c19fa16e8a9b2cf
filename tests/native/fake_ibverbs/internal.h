/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: the objects of the fake library. All of them are guarded by `fake_lock`.
 */
#ifndef FAKE_IBVERBS_INTERNAL_H
#define FAKE_IBVERBS_INTERNAL_H

#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_ibverbs.h"

#define FAKE_MAX_DEVICES 16
#define FAKE_MAX_PORTS 2
#define FAKE_MAX_GIDS 16
#define FAKE_MAX_PKEYS 8
#define FAKE_MAX_SGE 32
#define FAKE_MAX_INLINE 1024

/* efadv.h of rdma-core 65; efa_io_defs.h of the same: statuses of completions. */
#define EFADV_READ 1u
#define EFADV_RNR 2u
#define EFADV_WRITE 8u
#define EFADV_UNSOLICITED 16u
enum {
    SRD_FLUSHED = 1,
    SRD_BAD_LKEY = 5,
    SRD_BAD_LENGTH = 6,
    SRD_BAD_ADDRESS = 7,
    SRD_BAD_QPN = 9,
    SRD_RNR = 10,
    SRD_UNRESPONSIVE = 13,
    SRD_UNKNOWN_PEER = 14
};

/* What the documentation calls undefined ends the test here. */
#define FAKE_DIE(...)                                                                                                  \
    do {                                                                                                               \
        fprintf(stderr, "fake libibverbs: %s: ", __func__);                                                            \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
        fputc('\n', stderr);                                                                                           \
        abort();                                                                                                       \
    } while (0)

typedef struct fake_gid {
    union ibv_gid gid;
    uint32_t type; /* enum ibv_gid_type */
    uint32_t ifindex;
} fake_gid;

typedef struct fake_vendor_errors {
    uint32_t access, retry, rnr, flush, invalid, protection, operation, length, fatal;
} fake_vendor_errors;

typedef struct fake_device {
    struct ibv_device base;
    bool listed, dead;
    uint32_t index;
    uint64_t guid;
    const char *node_desc;
    struct ibv_device_attr attr;
    char firmware[64];
    fake_vendor_errors vendor;
    struct ibv_port_attr port[FAKE_MAX_PORTS];
    fake_gid gid[FAKE_MAX_GIDS];
    uint32_t gids;
    uint16_t pkey[FAKE_MAX_PKEYS];
    uint32_t pkeys;
    /* what a provider decides */
    uint32_t max_inline, inline_grant; /* UINT32_MAX: grant what is asked */
    uint32_t max_post;                 /* requests that one doorbell takes; more break the queue; 0: any */
    uint64_t inflight_limit, inflight; /* bytes; more and the fabric loses them; 0: no limit */
    uint64_t memlock, locked;
    uint32_t open_errno, reg_errno, dmabuf_errno, rd_atom_used;
    bool srq, wr_api, cq_ex, relaxed, cq_clean, routed, lazy, reuse_qpn, peermem, strict_atomic_flag;
    bool adds, mixes;      /* not: a fetch-and-add adds 0; of requests by calls the first of a batch alone is sound */
    uint32_t inline_errno; /* of a queue with more inline bytes than there are */
    uint32_t post_limit;   /* requests that a queue takes, whatever it granted; 0: all */
    bool keeps_bad;        /* a list that is refused does not say where */
    uint32_t gid_port;     /* the first port that has GIDs; 0: all have */
    uint32_t page;         /* of the kernel: what an address and an offset of a dmabuf share */
    bool srq_flush;        /* a queue pair that breaks keeps a receive of its shared queue for a while */
    bool last_wqe;         /* and tells when it is done with them */
    bool srq_needs_sge;    /* a receive of a shared queue without an element is refused */
    uint32_t max_send_wr_pad; /* requests of a queue beyond those asked for that the provider grants */
    uint32_t live_qps, live_cqs, live_mrs, live_srqs;
    /* of EFA */
    bool efa, inline_write, own_numbers;
    uint32_t caps, max_rdma, max_rq_wr, min_sq_wr, twice; /* twice: percent of writes that are placed twice */
} fake_device;

typedef struct fake_context {
    struct verbs_context verbs; /* ends with the struct ibv_context that users hold */
    fake_device *device;
    int event_write;
    uint32_t users; /* objects that live in it */
    struct fake_context *next;
} fake_context;

typedef struct fake_pd {
    struct ibv_pd base;
    uint32_t users;
} fake_pd;

typedef struct fake_mr {
    struct ibv_mr base;
    unsigned int access;
    uint64_t iova;
    char *memory; /* where the NIC reaches it */
    bool mapped;  /* by us, of a dmabuf */
    uint64_t map_bytes;
    char *map;
    struct fake_mr *next;
} fake_mr;

typedef struct fake_ah {
    struct ibv_ah base;
    union ibv_gid gid;
    uint32_t number; /* the same for one GID in one domain */
    struct fake_ah *next;
} fake_ah;

typedef struct fake_channel {
    struct ibv_comp_channel base;
    int write;
} fake_channel;

typedef struct fake_cqe {
    struct ibv_wc wc;
    struct fake_qp *qp; /* NULL: it is gone */
    uint64_t frees;     /* the send queue up to here, where `send` */
    bool send;
    struct fake_srq *srq; /* whose slot it gives back */
    bool srd, unsolicited;
    uint32_t slot; /* of a datagram's request */
} fake_cqe;

typedef struct fake_cq {
    struct ibv_cq_ex base; /* begins as struct ibv_cq */
    fake_cqe *ring;
    uint32_t capacity, users, unacknowledged;
    uint64_t head, tail;
    bool overrun, armed, ex, polling;
    uint64_t wc_flags;
    fake_cqe current;
} fake_cq;

typedef struct fake_recv {
    uint64_t wr_id;
    uint32_t sges;
    struct ibv_sge sge[4];
} fake_recv;

/* Receives: `posted` given, `taken` used by the wire, `freed` polled: a slot is free again only then. */
typedef struct fake_rq {
    fake_recv *ring;
    uint32_t capacity, max_sge;
    uint64_t posted, taken, freed;
} fake_rq;

typedef struct fake_srq {
    struct ibv_srq base;
    fake_rq queue;
    uint32_t users, limit;
} fake_srq;

typedef struct fake_send {
    uint64_t wr_id, remote, compare_add, swap;
    uint32_t rkey, imm, sges, length, inline_bytes;
    enum ibv_wr_opcode opcode;
    /* of a datagram */
    bool placed, foreign_flags; /* placed: once; the second time is to come */
    uint64_t ticket, since;     /* since when it is at another process, and as what */
    const struct fake_ah *ah;
    uint32_t remote_qpn, remote_qkey;
    bool signalled, crowded, flooding; /* behind what one doorbell takes; beyond what may be in flight */
    struct ibv_sge sge[FAKE_MAX_SGE];
    unsigned char data[FAKE_MAX_INLINE];
} fake_send;

typedef struct fake_qp {
    struct ibv_qp_ex base; /* begins as struct ibv_qp */
    fake_device *device;
    struct ibv_qp_cap cap;
    bool sig_all, has_ops, cut, held;
    uint64_t ops;
    struct ibv_qp_attr attr; /* all that was set */
    struct ibv_qp_attr given[IBV_QPS_ERR + 1];
    int given_mask[IBV_QPS_ERR + 1];
    fake_send *ring;
    uint64_t posted, executed, freed;
    fake_rq queue;
    uint32_t rnr_left;
    bool away; /* the request that is next is at another process */
    uint64_t away_ticket, away_since;
    /* completions of receives that come late, at the end at latest */
    bool late;
    uint32_t lates, flush_in; /* looks until the receive that it keeps is flushed; 0: it keeps none */
    fake_recv kept;
    struct ibv_wc late_wc[64];
    int break_status; /* -1: none */
    uint32_t break_vendor, unacknowledged;
    uint32_t dest_rd_atomic; /* of the device's, while this queue holds them */
    /* a batch of ibv_wr_* */
    fake_send *batch;
    uint32_t batched;
    int batch_error;
    bool building;
    /* datagrams: requests lie in slots */
    bool srd, unsolicited, inline_write;
    /* numbers of slots: free ones, those that wait, those that are at another process; the one at hand */
    uint32_t *unused, *waiting, *away_slots, n_unused, n_waiting, n_away, current;
    struct fake_qp *next; /* of all, in order of creation */
} fake_qp;

/* What a NIC tells the other of one request, and what it hears. In one process, or as a datagram. */
typedef struct fake_request {
    uint32_t from, to, psn, lid, gid_type, pkey, mtu, process, opcode, imm, rkey, length, inline_bytes, sges;
    uint32_t global, srd, qkey;
    union ibv_gid gid, source; /* source: of a datagram, where it comes from */
    uint64_t remote, compare_add, swap, ticket;
    uint64_t *ticket_at;       /* in the requester's memory: it is still waiting while `ticket` stands there */
    char *local[FAKE_MAX_SGE]; /* in the requester's memory */
    uint32_t bytes[FAKE_MAX_SGE];
    unsigned char data[FAKE_MAX_INLINE]; /* last: only what is used of it travels */
} fake_request;

typedef struct fake_answer {
    enum ibv_wc_status status;
    uint32_t srd;                          /* of a datagram: the vendor's status */
    bool lost, not_ready, responder_fails; /* not_ready: no receive was posted */
    uint64_t old;
} fake_answer;

extern pthread_mutex_t fake_lock;
extern fake_device *fake_devices[FAKE_MAX_DEVICES];
extern fake_context *fake_contexts;
extern fake_qp *fake_qps;
extern fake_mr *fake_mrs;
extern fake_ah *fake_ahs;
extern fake_ibverbs_stats fake_stats;

#define LOCK() pthread_mutex_lock(&fake_lock)
#define UNLOCK() pthread_mutex_unlock(&fake_lock)

static inline void *make(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) FAKE_DIE("no memory");
    return p;
}

static inline void *refuse(int error) {
    errno = error;
    UNLOCK();
    return NULL;
}

static inline int refuse_int(int error) {
    errno = error;
    UNLOCK();
    return error;
}

static inline fake_context *fake_context_of(struct ibv_context *context) {
    return (fake_context *)(void *)((char *)context - offsetof(fake_context, verbs) -
                                    offsetof(struct verbs_context, context));
}

/* config.c: the devices that the environment names. Fewer than 0: an errno. */
int fake_configure(void);
/* verbs.c: true: this call is the one that was to fail; errno says with what. */
bool fake_fails(const char *call);
bool fake_fails_alone(const char *call); /* the same, if it was named */
void fake_event(fake_device *device, enum ibv_event_type type, void *element);
/* wire.c */
void fake_qp_to_error(fake_qp *qp);
bool fake_step(fake_qp *qp);
bool fake_answered(fake_qp *qp, const fake_answer *answer);
fake_answer fake_respond(const fake_request *r);
void fake_flush_kept(fake_qp *qp);
bool fake_complete_receive(fake_qp *qp, struct ibv_wc wc);
struct ibv_wc fake_unbelievable(uint64_t wr_id, const fake_qp *qp, enum ibv_wc_status status, uint32_t vendor_err);
void fake_place(char *to, const char *from, uint64_t bytes);
fake_send *fake_current(fake_qp *qp);
uint64_t fake_draw(void);
char *fake_reach_remote(const fake_qp *target, uint32_t rkey, uint64_t address, uint64_t bytes, unsigned access);
char *fake_reach_local(const fake_qp *qp, const struct ibv_sge *sge, bool write);
bool fake_up(const fake_qp *qp);
void fake_complete(struct ibv_cq *cq, fake_cqe cqe);
void fake_complete_send(fake_qp *qp, const fake_send *s, enum ibv_wc_status status, uint32_t vendor_err);
/* srd.c */
struct efadv_qp_init_attr {
    uint64_t comp_mask;
    uint32_t driver_qp_type;
    uint16_t flags;
    uint8_t sl, reserved;
};
bool fake_srd_allows(const fake_device *d, const struct ibv_qp_init_attr_ex *a, const struct efadv_qp_init_attr *own);
struct ibv_qp *fake_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *a,
                               const struct efadv_qp_init_attr *own);
bool fake_srd_step(fake_qp *qp);
bool fake_srd_answered(fake_qp *qp, const fake_answer *answer);
fake_answer fake_srd_respond(const fake_request *r);
int fake_srd_refusal(const fake_qp *qp, const fake_send *s, uint64_t waiting);
fake_send *fake_srd_slot(fake_qp *qp);
/* queues.c */
void fake_wire_ops(struct ibv_context *context);
void fake_qp_ops(fake_qp *qp);
void fake_cq_ops(fake_cq *cq);
/* processes.c */
int fake_join(void);   /* the wire, if there is one: before the first queue pair. 0, or -1 and errno */
void fake_leave(void); /* without the lock: once nothing lives */
uint32_t fake_qp_numbers(uint32_t *last);
bool fake_is_elsewhere(uint32_t qp_num);
bool fake_send_away(fake_qp *qp, fake_request *r);
bool fake_still_away(fake_qp *qp);
void fake_probe(fake_qp *qp);     /* datagrams that are at another process: is it still there? */
void fake_call_back(fake_qp *qp); /* nothing of it is carried out from now on */
bool fake_move(const fake_request *r, uint32_t element, char *remote, bool reads);
bool fake_transfer(const fake_request *r, char *remote, bool reads);
void fake_forget(fake_qp *qp, bool clean); /* its completions, in every queue */
void fake_run(bool all);
fake_mr *fake_find_mr(const fake_device *device, uint32_t key);

#endif
