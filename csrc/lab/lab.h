/* SPDX-License-Identifier: Apache-2.0
 *
 * lab.h: the parts of the lab and what they know of each other.
 *
 * A program, its libibverbs and a vendor's library run unmodified; what they say to the kernel and to the NIC is
 * answered in the same process:
 *
 *   program -> libibverbs -> vendor's library
 *      | open, write, ioctl, mmap of the device     -> preload.c -> uverbs.c, ioctl.c: objects.c; the vendor's part of
 * a |                                               request and its reply: the model (mlx5/, efa/, bnxt/, ionic/) |
 * work queue entries and doorbells in memory -> the model decodes -> nic.c (the NIC's thread), flow.c | -> wire.c ->
 * the target's process: ghost.c, virtual_nic | completion entries in memory               <- the model encodes <- what
 * came back
 *
 * Where an operation runs. The initiator's NIC reads the entry and the payload and sends both to the target's process.
 * There a ghost, an endpoint of csrc/virtual_nic that stands for the initiator's queue pair, posts it to the fabric of
 * that process: order, placement, visibility, faults and limits are those of the knobs, and stores and atomics are the
 * target CPU's own. The ghost's completion travels back and becomes an entry of the initiator's completion queue. A
 * target in the same process is reached in the same way, without a socket.
 *
 * Threads. One lock (lab_lock) guards all objects of a process; the NIC's thread takes it for each round, calls of the
 * program for each command. The queues themselves are memory that the program writes without a lock, as with hardware:
 * a model reads what its doorbell covers and nothing else. Stores to a trapped doorbell page come from a signal
 * handler: they only leave the value where the thread finds it.
 *
 * Ownership. uverbs.c makes and frees objects; `model_data` of an object is the model's, taken in its create call and
 * given back in its destroy call. After destroy returns, nothing touches the program's rings any more.
 *
 * Errors. 0 or a positive errno. What the lab does not implement ends in lab_unsupported(), which names it on stderr
 * and returns EOPNOTSUPP: never a silent success.
 */
#ifndef UCCL_EP_LAB_H
#define UCCL_EP_LAB_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ring.h"
#include "virtual_nic.h"

struct lab_model;
struct lab_flow;

/* ----------------------------------------------------------------------------------------------------------- limits */

#define LAB_MAX_DEVICES 8u    /* of a run; UCCL_EP_LAB_DEVICES */
#define LAB_MAX_PROCESSES 63u /* of one lab; the slot is the upper 6 bits of a queue pair's number */
#define LAB_MAX_SGES 32u      /* of a work request, before the NIC's own limit */
#define LAB_MAX_INLINE 1024u
#define LAB_MAX_GIDS 4u

/* ---------------------------------------------------------------------------------------------------------- devices */

/* What UCCL_EP_LAB says, read once:
 * "nic=connectx,count=2,variant=cx6,profile=connectx-ro,seed=7,fabric=NAME,knob=value,..."; NICs of several kinds are
 * several of these, with ';' between them. The first one's seed and fabric are everybody's. A variant is a generation
 * of a model: "cx7", "cx6", "efa1" ... "efa4", "thor", "thor2", "pollara". */
struct lab_variant {
    const char *name, *profile; /* profile: of virtual_nic, where the user names none */
    uint32_t vendor_id, part_id, hw_version;
    const char *firmware, *modalias; /* of the PCI device, for libibverbs' match table */
};

typedef struct lab_device {
    const struct lab_model *model;
    const struct lab_variant *variant;
    vnic_knobs knobs;
    char name[16]; /* "mlx5_0" */
    uint32_t index;
    uint64_t seed, guid;               /* the same NIC in every process has the same GUID and GIDs */
    char fabric[48];                   /* processes that name the same one reach each other */
    struct in6_addr gid[LAB_MAX_GIDS]; /* 0: link-local IPv6; 1: IPv4-mapped (RoCE v2); EFA: its one at 0 */
    uint32_t gids;
    uint32_t active_mtu;  /* enum ibv_mtu */
    uint32_t queue_pairs; /* of this process; by objects.c */
    vnic_nic *nic;        /* of this process's fabric; by nic.c */
} lab_device;

/* ---------------------------------------------------------------------------------------------------------- objects */

typedef struct lab_context {
    lab_device *device;
    int fd; /* that open() gave */
    int async_read, async_write;
    void *model_data;
} lab_context;

typedef struct lab_pd {
    lab_context *context;
    uint32_t handle;
    uint32_t number; /* in vendors' replies; from 1 */
    void *model_data;
} lab_pd;

typedef struct lab_mr {
    lab_pd *pd;
    uint32_t handle;
    uint32_t access; /* IBV_ACCESS_* */
    /* `start` is where the bytes are in this process, `iova` the address that entries and peers use. */
    uint64_t start, iova, length;
    void *mapping; /* of a dmabuf: objects.c's, or NULL */
    size_t mapped;
    vnic_region *region;
    uint32_t key; /* lkey and rkey alike */
} lab_mr;

typedef struct lab_channel {
    lab_context *context;
    int read, write; /* the program has `read`: struct ib_uverbs_comp_event_desc come out */
    uint32_t queues; /* that name it */
} lab_channel;

typedef struct lab_cq {
    lab_context *context;
    uint32_t handle, number; /* number: in vendors' replies */
    uint64_t user_handle;    /* for events */
    uint32_t entries;        /* asked for; a model's ring may have more */
    lab_channel *channel;    /* or NULL */
    bool armed, solicited_only, overrun;
    uint32_t events; /* reported so far: destroy's reply */
    void *model_data;
} lab_cq;

/* Receives: of a queue pair, or shared. */
typedef struct lab_srq {
    lab_pd *pd;
    uint32_t handle, number;
    uint64_t user_handle;
    uint32_t max_wr, max_sge, limit;
    void *model_data;
} lab_srq;

enum lab_qp_type { LAB_RC = 2, LAB_UC = 3, LAB_UD = 4, LAB_SRD = 0xff }; /* the first are enum ib_qp_type's */
enum lab_qp_state { LAB_RESET, LAB_INIT, LAB_RTR, LAB_RTS, LAB_SQD, LAB_SQE, LAB_ERR };

typedef struct lab_qp {
    lab_pd *pd;
    lab_cq *send_cq, *recv_cq;
    lab_srq *srq; /* or NULL */
    uint32_t handle;
    uint32_t number; /* slot of the process << lab_qp_bits(device) | index; never that of a queue pair just destroyed */
    uint64_t user_handle;
    enum lab_qp_type type;
    enum lab_qp_state state;
    bool all_signalled;
    bool unsolicited; /* write immediates take no receive (EFA) */
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline;
    /* From modify: */
    uint32_t dest_qpn, sq_psn, rq_psn, qkey, path_mtu, access;
    uint32_t timeout, retry_count, rnr_retry, min_rnr_timer, max_rd_atomic, max_dest_rd_atomic, port, pkey_index;
    struct in6_addr dest_gid;
    uint32_t sgid_index, traffic_class, hop_limit, flow_label, service_level;
    void *model_data;
    struct lab_flow *flow; /* flow.c: what it has in flight */
} lab_qp;

typedef struct lab_ah {
    lab_pd *pd;
    uint32_t handle, number; /* number: in EFA's entries */
    struct in6_addr gid;
    struct lab_ah *next; /* with the same number: lab_ah_join() */
} lab_ah;

/* ------------------------------------------------------------------------------------------ work, receives and ends */

enum lab_opcode {
    LAB_SEND = 1,
    LAB_SEND_IMM,
    LAB_WRITE,
    LAB_WRITE_IMM,
    LAB_READ,
    LAB_ADD,     /* fetch-and-add, 64 bits */
    LAB_SWAP,    /* compare-and-swap, 64 bits */
    LAB_NOTHING, /* takes its place in order and completes */
    LAB_BAD      /* the NIC does not understand the entry: local operation error */
};

struct lab_sge {
    uint64_t address;
    uint32_t length, lkey;
};

/* A work queue entry, decoded. */
struct lab_work {
    enum lab_opcode opcode;
    bool signalled, fence, solicited;
    uint32_t cookie;             /* the model's: comes back in lab_done */
    uint32_t sges, inline_bytes; /* inline: bytes are in `data`, sges is 0 */
    struct lab_sge sge[LAB_MAX_SGES];
    uint64_t remote_address;
    uint32_t rkey;
    uint64_t add_or_swap, compare;
    uint32_t immediate;          /* as the entry has it, byte for byte */
    uint32_t ah, dest_qpn, qkey; /* UD and SRD */
    uint8_t data[LAB_MAX_INLINE];
};

struct lab_receive {
    uint32_t cookie;
    uint32_t sges;
    struct lab_sge sge[LAB_MAX_SGES];
};

/* What a completion entry says. */
struct lab_done {
    lab_qp *qp;
    bool receive;
    bool signalled; /* false: a model whose entries are cumulative may count it and write none */
    bool solicited, has_immediate, unsolicited, is_write; /* of a receive; is_write: a write immediate, not a send */
    enum lab_opcode opcode;                               /* of a send */
    uint32_t cookie, bytes, immediate, source_qpn, source_ah; /* source_ah: 0xffff if the target has none */
    vnic_status status; /* VNIC_OK, or an error; vendors' numbers: vnic_vendor_code */
    /* lab_model.tells_rest: the queue pair is in error, and the library flushes what is left of this queue; `cookie`
     * and `opcode` are of nothing. */
    bool rest;
};

/* ----------------------------------------------------------------------------------------------------------- models */

/* The vendor's part of a command: behind the core structure of the request, and of the reply. */
struct lab_call {
    const uint8_t *in;
    size_t in_bytes;
    uint8_t *out;
    size_t out_room;  /* may be less than the model has to say: what an older library knows */
    size_t out_bytes; /* set by lab_reply */
};
/* Cut to the room. Once per call. */
void lab_reply(struct lab_call *call, const void *reply, size_t bytes);
/* Copies what there is and zeroes the rest. */
void lab_request(const struct lab_call *call, void *request, size_t bytes);

struct ib_uverbs_ex_query_device_resp;
struct ib_uverbs_query_port_resp;

/* All calls with the lab's lock held, but `store`. NULL: the vendor has no part in that command. */
struct lab_model {
    const char *name;                   /* "connectx": as --nic has it */
    const char *device_name;            /* "mlx5_" */
    uint32_t driver_id;                 /* enum rdma_driver_id, for discovery by netlink */
    uint32_t uverbs_abi;                /* sysfs abi_version */
    uint32_t qpn_bits;                  /* 24; EFA 16; Thor 20 */
    const struct lab_variant *variants; /* the first is the default; ends with name NULL */

    /* Control. Core fields are filled in before the call; a model changes what its NIC has different. */
    int (*query_device)(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call);
    void (*query_port)(const lab_device *device, struct ib_uverbs_query_port_resp *core);
    int (*open)(lab_context *context, struct lab_call *call); /* GET_CONTEXT */
    void (*close)(lab_context *context);
    int (*alloc_pd)(lab_pd *pd, struct lab_call *call);
    int (*reg_mr)(lab_mr *mr, struct lab_call *call);
    int (*create_cq)(lab_cq *cq, struct lab_call *call);
    int (*resize_cq)(lab_cq *cq, uint32_t entries, struct lab_call *call);
    void (*destroy_cq)(lab_cq *cq);
    int (*create_srq)(lab_srq *srq, struct lab_call *call);
    void (*destroy_srq)(lab_srq *srq);
    int (*create_qp)(lab_qp *qp, struct lab_call *call);
    int (*modify_qp)(lab_qp *qp, enum lab_qp_state from, struct lab_call *call); /* qp->state is the new one */
    void (*destroy_qp)(lab_qp *qp);
    int (*create_ah)(lab_ah *ah, struct lab_call *call);
    /* Memory of the NIC's. Trapped pages: lab_trap. */
    int (*map)(lab_context *context, uint64_t offset, size_t bytes, int protection, void **address);
    /* A method of the attribute ioctl that the core does not know; attributes by lab_attribute(). */
    int (*method)(lab_context *context, uint16_t object, uint16_t method, void *attributes);

    /* The NIC's thread. */
    /* The next entry that a doorbell covers; false: none. The entry counts as taken: its place in the ring is free once
     * the completion says so. */
    bool (*fetch)(lab_qp *qp, struct lab_work *work);
    bool (*fetch_receive)(lab_qp *qp, struct lab_receive *receive);
    bool (*fetch_shared_receive)(lab_srq *srq, struct lab_receive *receive);
    uint32_t (*shared_receives)(lab_srq *srq); /* posted and not fetched */
    /* Entries that the program has not yet consumed, by the consumer index that it wrote. */
    uint32_t (*cq_used)(lab_cq *cq);
    void (*complete)(lab_cq *cq, const struct lab_done *done);
    /* Where the library flushes (flush_by=provider): it is told by an entry in the queue of sends and one in that of
     * receives, once, when the queue pair has gone into error. */
    bool tells_rest;
    /* Has the program asked for an event, by memory that the NIC reads? Sets cq->armed. May be NULL. */
    void (*look)(lab_cq *cq);

    /* Where the program's entries are; left as it is if there is no such queue. */
    void (*ring)(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring);

    /* A store of `width` bytes to a page of lab_trap, in the order of the program's stores. In the NIC's thread. */
    void (*store)(lab_context *context, uint32_t page, uint32_t offset, uint64_t value, uint32_t width);
};

extern const struct lab_model lab_mlx5, lab_efa, lab_bnxt, lab_ionic;

/* ------------------------------------------------------------------------------------------------- what the lab gives
 */

extern pthread_mutex_t lab_lock;
/* The program's side takes the lock like this: the NIC's thread, which holds it most of the time, then steps back. */
extern uint32_t lab_wanted;
static inline void lab_enter(void) {
    __atomic_fetch_add(&lab_wanted, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&lab_lock);
    __atomic_fetch_sub(&lab_wanted, 1, __ATOMIC_RELAXED);
}
static inline void lab_leave(void) {
    pthread_mutex_unlock(&lab_lock);
}

void lab_say(const char *format, ...) __attribute__((format(printf, 1, 2))); /* a line on stderr */
int lab_unsupported(const char *format, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void lab_die(const char *format, ...) __attribute__((format(printf, 1, 2))); /* a fault of the lab's own */

/* device.c */
lab_device *lab_devices(uint32_t *n); /* NULL and 0: the environment asks for none */
/* The same of a text; the caller frees it. NULL: text (256 bytes) says what is wrong and what is valid. */
lab_device *lab_devices_parse(const char *spec, uint32_t *n, char *text);
/* The device number of /dev/infiniband/uverbsN, as sysfs has it. */
#define LAB_DEVICE_MAJOR 231u
#define LAB_DEVICE_MINOR 192u                   /* of N = 0 */
uint32_t lab_qp_bits(const lab_device *device); /* bits of the index in a queue pair's number */

/* ioctl.c: an attribute of the method that is being answered; NULL: it is not there. Values of up to 8 bytes are in
 * `data`, longer ones at that address. */
struct ib_uverbs_attr;
const struct ib_uverbs_attr *lab_attribute(const void *attributes, uint16_t id);

/* objects.c. Handles are of a context; numbers and keys of the process. NULL: there is none of that context. */
lab_context *lab_context_of_fd(int fd);
lab_pd *lab_find_pd(lab_context *context, uint32_t handle);
lab_cq *lab_find_cq(lab_context *context, uint32_t handle);
lab_srq *lab_find_srq(lab_context *context, uint32_t handle);
lab_qp *lab_find_qp(lab_context *context, uint32_t handle);
lab_qp *lab_qp_numbered(uint32_t number);
lab_mr *lab_mr_keyed(const lab_device *device, uint32_t key);
lab_ah *lab_ah_numbered(const lab_device *device, uint32_t number);
/* Does the device know the peer with this GID (an address handle made by anybody in this process)? */
lab_ah *lab_ah_of_gid(const lab_device *device, const struct in6_addr *gid);
/* The same, of that protection domain: it is what a completion names. */
lab_ah *lab_ah_in(const lab_pd *pd, const struct in6_addr *gid);
/* For a model whose NIC has one number for a GID and a protection domain: `ah` gets that of those that are there. It
 * stays until the last of them is gone. */
void lab_ah_join(lab_ah *ah);

/* Is the memory mapped in this process, and writable where that is asked? EFAULT if not. Rings and regions are looked
 * at when the program names them, as the kernel pins them then. */
int lab_memory_check(uint64_t start, uint64_t length, bool writable);

/* events.c */
enum lab_event {
    LAB_EVENT_CQ_ERR = 0,
    LAB_EVENT_QP_FATAL = 1,
    LAB_EVENT_QP_REQ_ERR = 2,
    LAB_EVENT_QP_ACCESS_ERR = 3,
    LAB_EVENT_COMM_EST = 4,
    LAB_EVENT_DEVICE_FATAL = 8,
    LAB_EVENT_SRQ_LIMIT = 15,
    LAB_EVENT_QP_LAST_WQE = 16
}; /* enum ibv_event_type */
void lab_async_event(lab_context *context, enum lab_event event, uint64_t element /* user handle */);
/* Are there fewer receives than its limit? It is told once; then the limit is zero, until the program sets it anew
 * (ibv_modify_srq(3)). */
static inline void lab_srq_look(lab_srq *srq) {
    if (!srq->limit || srq->pd->context->device->model->shared_receives(srq) >= srq->limit) return;
    srq->limit = 0;
    lab_async_event(srq->pd->context, LAB_EVENT_SRQ_LIMIT, srq->user_handle);
}
/* Writes an event to the channel if the queue is armed. */
void lab_cq_notify(lab_cq *cq, bool solicited);

/* trap.c: pages whose stores are taken one by one. x86-64 and aarch64; elsewhere ENOTSUP. `page` is the model's name
 * for it in `store`. Up to 256 stores may wait for the NIC's thread; one more waits in the handler until there is room.
 */
int lab_trap(lab_context *context, uint32_t page, size_t bytes, void **address);
void lab_untrap(lab_context *context);
/* With lab_lock held. Hand the oldest store to its model; false: none waits. And all of them: what was rung before a
 * command is before it, as with hardware. */
bool lab_trapped_next(void);
void lab_trapped_all(void);

/* nic.c. The thread starts with the first lab_nic_open, which any queue pair or region needs, and ends with the
 * process. All but lab_nic_wake with lab_lock held. */
int lab_nic_open(lab_device *device);
void lab_nic_wake(void); /* from any thread, and from a signal handler */
uint32_t lab_slot(void); /* of this process; the first lab_nic_open takes it */
int lab_region_add(lab_mr *mr);
void lab_region_remove(lab_mr *mr);
int lab_flow_open(lab_qp *qp);
/* The state has changed: to RTR (who may write to it), RTS (fetching begins), ERR (all that waits is flushed), RESET.
 */
int lab_flow_modify(lab_qp *qp, enum lab_qp_state from);
void lab_flow_close(lab_qp *qp);

#endif
