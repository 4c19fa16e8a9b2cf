/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: the parts of a fabric, shared by the files of this folder alone.
 *
 * An op (one work request) lives through these steps, each made by an event where the knobs leave time between them:
 * posted -> rung (its doorbell was seen) -> launched -> its pieces placed at the target's NIC -> visible to readers,
 * and completed at some point between launch and the end, as the completion level says. Ops of one connection form a
 * list in posting order until they complete.
 */
#ifndef UCCL_EP_VIRTUAL_NIC_INTERNAL_H
#define UCCL_EP_VIRTUAL_NIC_INTERNAL_H

#include <string.h>

#include "virtual_nic.h"

struct op;
struct conn;
struct posted;

/* ----------------------------------------------------------------------------------------------------------- pools */

/* Things of one size; memory goes back with the fabric. */
struct pool {
    size_t size;
    void *free;
    struct pool_chunk *chunks;
};
void *pool_take(struct pool *pool); /* zeroed; NULL: no memory */
void pool_give(struct pool *pool, void *thing);
void pool_end(struct pool *pool);

/* ---------------------------------------------------------------------------------------------------------- events */

enum event_kind {
    EVENT_PLACE = 1, /* a piece is read at its source and reaches the target's NIC; an ADD or READ is executed */
    EVENT_VISIBLE,   /* bytes leave the target NIC's buffer for memory */
    EVENT_COMPLETE,
    EVENT_IMMEDIATE,
    EVENT_DUPLICATE, /* a piece is read and placed once more */
    EVENT_ADD_STORE, /* the second half of an add that is not atomic between NICs */
    EVENT_FAIL,      /* an op that was doomed fails */
    EVENT_GIVE_UP,   /* retries towards a silent peer are exhausted */
    EVENT_RNR_RETRY,
    EVENT_DRAINED, /* a disconnect is finished */
    EVENT_STRAY,   /* an old completion turns up */
    EVENT_CALL
};

struct event {
    uint64_t due, order;
    uint32_t index; /* in the heap or the list of alternatives */
    uint8_t kind, piece;
    bool timer; /* lies in the heap also where alternatives are chosen */
    struct op *op;
    struct conn *conn;
    struct posted *posted;
    void (*call)(void *context, uint64_t argument);
    void *context;
    uint64_t argument;
};

struct event_set {
    struct event **at;
    uint32_t n, room;
};

/* -------------------------------------------------------------------------------------------------------------- ops */

struct op {
    struct op *next, *previous; /* on the connection's list */
    struct op *next_waiting, *next_unblocked;
    struct conn *conn;
    struct vnic_endpoint *endpoint;
    vnic_sge sge[VNIC_MAX_SGES];
    uint64_t remote_address, remote_key, value, compare, cookie;
    uint64_t delay; /* that a fault adds */
    char *copy;     /* the payload, read before the source was given back */
    struct event *duplicate, *piece_event[VNIC_MAX_PIECES], *complete_event, *other_event; /* pending ones */
    uint64_t read_value; /* between the halves of an add */
    uint32_t length, seq, refs, copy_class;
    uint32_t waiting_entries;        /* in the target's buffer */
    uint32_t blockers, imm_blockers; /* earlier ops that hold the op, or its immediate, back */
    uint32_t cut[VNIC_MAX_PIECES + 1];
    uint32_t peer;
    int32_t vendor_code;
    uint32_t rnr_left;
    uint32_t turn; /* of an immediate, among those of its connection */
    uint8_t kind, flags, sges, pieces;
    uint8_t placed, visible; /* bit a piece */
    uint8_t status;          /* vnic_status it ends with */
    uint8_t doom;            /* vnic_status it will end with: decided at launch */
    uint8_t waits;           /* enum waits */
    bool launched, enabled, executed /* placed whole */, seen /* visible whole */, received /* its immediate */;
    bool waiting, failed, completing, completed, holds_resource, imm_enabled, lost;
};

/* What keeps a launched op from being executed: earlier ones not yet executed; not yet visible; earlier reads and adds.
 */
enum waits { WAITS_NOT = 0, WAITS_EXECUTED, WAITS_SEEN, WAITS_ATOMICS };

/* ------------------------------------------------------------------------------------------------------ connections */

enum conn_state { CONN_UP = 0, CONN_ERROR, CONN_DRAINING, CONN_DOWN };

struct conn {
    struct vnic_endpoint *endpoint;
    uint32_t peer;
    uint32_t remote;        /* endpoint's id */
    struct op *head, *tail; /* not yet completed */
    struct op *launch;      /* next to be launched; all behind it are not, either */
    struct op *active;      /* strict order: the one that is being executed */
    struct op *waiting;     /* launched, and held back by others before them */
    uint32_t seq, rung;     /* of the last op posted; and seen */
    uint32_t outstanding;
    uint32_t unexecuted, unseen, atomics; /* launched ops that are not yet placed, visible; reads and adds */
    uint32_t adding;                      /* adds that hold a responder's resource, of this queue */
    uint32_t receives;                    /* posted for this peer less those it took, modulo 2^32 */
    uint32_t events;
    uint32_t posted;      /* entries in the buffer of `target`, the NIC that it places at */
    uint32_t turns, turn; /* immediates that were posted; that are received */
    struct vnic_nic *target;
    uint8_t state;
    bool fence_broken, unrung_listed;
    struct conn *next_unrung;
    struct op *for_resource; /* adds that wait for a responder's resource of this queue */
    uint64_t stray_cookie;
    bool stray;
};

/* Bytes in the target NIC's buffer, placed and not yet visible. */
struct posted {
    struct posted *next, *previous; /* in the NIC's order of arrival */
    struct vnic_nic *nic;
    struct vnic_region *region;
    struct op *op;
    struct event *event;
    char *data;
    uint64_t offset;
    uint32_t bytes, data_class;
    uint8_t piece;
    bool duplicate;
};

struct record { /* of a completion queue */
    struct record *next;
    uint64_t cookie;
    uint32_t peer, status;
    int32_t vendor_code;
    bool immediate, consumed, entry; /* entry: it takes an entry of the queue, rather than being covered by the next */
};

/* ------------------------------------------------------------------------------------------- endpoints, NICs, fabric
 */

struct conn_slot {
    uint32_t peer;
    struct conn *conn;
};

struct vnic_endpoint {
    struct vnic_nic *nic;
    struct vnic_fabric *fabric;
    uint32_t id, rank, self, peers;
    uint32_t *remote;        /* [peers]: id of the peer's endpoint; VNIC_NO_ENDPOINT: not connected */
    struct conn_slot *table; /* open addressing, a power of two */
    uint32_t table_size, table_used;
    struct record *first, *last;
    uint32_t cq_entries, cq_used;
    uint32_t receives_peer;
    uint64_t shared_receives; /* knob srq */
    uint32_t outstanding;     /* of a shared queue */
    uint64_t inflight_bytes;
    vnic_terms terms;
    bool in_turn;
    vnic_status (*receive)(void *context, uint64_t cookie);
    void *receive_context;
    struct conn *unrung;
    uint32_t events;
    const char *broken;
    bool dead; /* its rank died */
};

struct vnic_nic {
    struct vnic_fabric *fabric;
    vnic_knobs knobs;
    struct posted *first, *last;
    uint32_t of_completed; /* entries of ops that are complete */
    uint64_t queues;
    uint32_t adding;         /* adds that hold a responder's resource */
    struct op *for_resource; /* adds that wait for one */
    bool add_busy;           /* between the halves of an add */
    struct op *add_waiting;  /* adds behind it */
    bool lost;
};

struct fault {
    vnic_fault_id id;
    uint32_t rank, peer, percent;
    uint64_t nth, count, at_ns, parameter, seen;
    bool active, has_nth;
};
#define MAX_FAULTS 64u

struct trace_line {
    uint64_t now, cookie;
    uint32_t rank, peer, a, b;
    uint8_t what;
};

#define DATA_CLASSES 16u /* buffers of 64 bytes << class */

struct vnic_fabric {
    vnic_fabric_config config;
    uint64_t now, order, rng, hash;
    struct event_set heap, alternatives;
    struct pool events, ops, conns, posted, records;
    struct pool data[DATA_CLASSES];
    uint32_t *script;
    vnic_choice *log;
    uint32_t choices, log_room;
    uint64_t made;
    struct vnic_endpoint **endpoints; /* by id modulo the room, which is a power of two */
    uint32_t n_endpoints, room_endpoints, last_endpoint;
    struct vnic_region **regions; /* by id */
    uint32_t n_regions, room_regions;
    uint32_t n_spare, first_spare, last_spare; /* regions whose ids wait to be used again */
    struct vnic_nic **nics;
    uint32_t n_nics, room_nics;
    struct fault faults[MAX_FAULTS];
    uint32_t n_faults, fault_mask;
    void (*on_fault)(void *context, vnic_fault_id id, uint32_t rank, uint64_t parameter);
    void *on_fault_context;
    struct trace_line *trace;
    uint64_t traced;
    vnic_stats stats;
    vnic_met met;
    uint32_t next_taken; /* of the next choice; NO_CHOICE: it is free */
    bool out_of_memory;
};

/* fabric.c */
void *must(void *memory); /* the fabric cannot go on without it: says so and aborts */
struct event *event_add(struct vnic_fabric *f, enum event_kind kind, uint64_t delay, struct op *op, struct conn *conn);
struct event *event_timer(struct vnic_fabric *f, enum event_kind kind, uint64_t delay, struct op *op,
                          struct conn *conn);
void event_remove(struct vnic_fabric *f, struct event *e);
void events_remove_of(struct vnic_fabric *f, const struct conn *conn);
void note(struct vnic_fabric *f, uint8_t what, uint32_t rank, uint32_t peer, uint32_t a, uint32_t b, uint64_t cookie);
char *data_take(struct vnic_fabric *f, uint32_t bytes, uint32_t *class_out);
void data_give(struct vnic_fabric *f, char *data, uint32_t data_class);
/* A delay of up to four times `longest`, quantised. */
uint64_t draw_delay(struct vnic_fabric *f, uint32_t rank, uint64_t longest);

#define NO_CHOICE UINT32_MAX

/* The application's memory, or where the library has its words: who reads there is told apart. */
void met_memory(struct vnic_fabric *f, const struct vnic_region *region, uint64_t offset, uint32_t bytes, bool add);
void met_flush(struct vnic_nic *nic, uint32_t rank);
void met_source(struct op *op, uint32_t at, uint32_t bytes);
static inline uint64_t rank_bit(uint32_t rank) {
    return 1ull << (rank & 63);
}

enum note_kind { /* the first are event kinds */
                 NOTE_POST = 32,
                 NOTE_RING,
                 NOTE_DOORBELL_LOST,
                 NOTE_LAUNCH,
                 NOTE_CONNECT,
                 NOTE_DISCONNECT,
                 NOTE_CLOSE,
                 NOTE_DEAD,
                 NOTE_FLUSH,
                 NOTE_FAULT,
                 NOTE_ERROR,
                 NOTE_CHOICE
};

/* memory.c */
/* The region that a key names, if all `bytes` at `address` lie in it; NULL otherwise. */
struct vnic_region *region_find(const struct vnic_fabric *f, uint64_t key, uint64_t address, uint64_t bytes,
                                uint64_t *offset);
void posted_add(struct vnic_nic *nic, struct op *op, uint8_t piece, struct vnic_region *region, uint64_t offset,
                uint32_t bytes, bool duplicate);
void posted_drain(struct vnic_nic *nic, struct posted *p);
void posted_flush_conn(struct vnic_nic *nic, const struct conn *conn);
void posted_flush_region(struct vnic_nic *nic, const struct vnic_region *region);
/* What landed again of an op whose completion is given comes to light now. */
void posted_end_duplicates(struct vnic_nic *nic, const struct op *op);
/* Completed writes to these bytes that are not visible yet become so now: they are not to hide later ones. */
void posted_settle(struct vnic_nic *nic, const struct vnic_region *region, uint64_t offset, uint32_t bytes);
void posted_drop_rank(struct vnic_nic *nic, uint32_t rank);
bool nic_is_fifo(const struct vnic_nic *nic);
void read_source(const struct op *op, uint32_t at, uint32_t bytes, char *to);

/* endpoint.c */
struct conn *conn_find(const struct vnic_endpoint *e, uint32_t peer);
struct conn *conn_get(struct vnic_endpoint *e, uint32_t peer);
struct vnic_endpoint *endpoint_of(const struct vnic_fabric *f, uint32_t id);
void cq_push(struct vnic_endpoint *e, const struct record *r, bool may_cover);
void wake(struct vnic_fabric *f, uint32_t rank);

/* op.c */
void op_release(struct op *op);
struct vnic_endpoint *op_target(const struct op *op); /* NULL: it is not there, or its NIC does not work */
bool op_local_ok(const struct op *op);
struct vnic_region *op_remote_region(const struct op *op, const struct vnic_endpoint *target, uint64_t *offset);
void op_read_ahead(struct op *op); /* its source is not needed any more afterwards */
void conn_detach(struct conn *conn);

/* order.c */
void kick(struct conn *conn); /* launch what may be launched */
void op_enable(struct op *op);
void op_queue(struct op **list, struct op *op);
void op_give_resource(struct op *op);
void op_executed(struct op *op);
void op_seen(struct op *op);
void op_piece_visible(struct op *op, uint8_t piece);
void conn_unblock(struct conn *conn, const struct op *done, enum waits what, bool atomic);

/* place.c */
void op_enable_piece(struct op *op, uint8_t piece);
void op_place(struct op *op, uint8_t piece);
void op_place_again(struct op *op, uint8_t piece);
void op_store_add(struct op *op);
void next_add(struct vnic_nic *nic);
void op_check_immediate(struct op *op);
void op_deliver_immediate(struct op *op);

/* complete.c */
void op_check_ready(struct op *op);
void op_fail(struct op *op, vnic_status status, int32_t vendor_code);
void op_lost(struct op *op);        /* its target went away while its bytes were on the way */
void conn_error(struct conn *conn); /* what is outstanding is flushed */
void conn_drop(struct conn *conn);  /* everything of the connection ends here, without completions */
void run_event(struct vnic_fabric *f, struct event *e);

static inline const vnic_knobs *op_knobs(const struct op *op) {
    return &op->endpoint->nic->knobs;
}
static inline bool op_is_write(const struct op *op) {
    return op->kind == VNIC_WRITE || op->kind == VNIC_WRITE_IMM;
}
static inline bool op_is_atomic(const struct op *op) {
    return op->kind == VNIC_ADD || op->kind == VNIC_SWAP;
}
/* Nothing behind it is to be executed before it is received. */
static inline bool op_awaits_turn(const struct op *op) {
    return op->kind == VNIC_WRITE_IMM && op->endpoint->in_turn && !op->received && !op->failed;
}
static inline uint8_t op_all_pieces(const struct op *op) {
    return (uint8_t)((1u << op->pieces) - 1);
}

static inline const vnic_knobs *knobs_of(const struct conn *conn) {
    return &conn->endpoint->nic->knobs;
}

/* fault.c */
bool fault_strikes(struct vnic_fabric *f, vnic_fault_id id, uint32_t rank, uint32_t peer, uint64_t *parameter);
static inline bool fault(struct vnic_fabric *f, vnic_fault_id id, uint32_t rank, uint32_t peer, uint64_t *parameter) {
    return f->fault_mask >> id & 1 && fault_strikes(f, id, rank, peer, parameter);
}

#endif
