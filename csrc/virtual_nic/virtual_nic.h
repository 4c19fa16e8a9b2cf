/* SPDX-License-Identifier: Apache-2.0
 *
 * virtual_nic.h: NICs made of software, with the freedoms of real ones.
 *
 * Purpose. A fabric is one virtual clock, one seed and any number of NICs. A NIC does everything that its knobs let it
 * do (knobs.h): it reorders, splits, delays, places twice, makes visible late, drops, refuses. What a knob rules out
 * never happens. It speaks the language of NICs: endpoints with a completion queue, connections, regions with keys,
 * work requests, vendor status codes. It knows no backend interface: the sim backend is one front end, and a vendor's
 * own library over emulated queues can be another.
 *
 * Time. Nothing moves but in vnic_run_due and vnic_advance, which the owner of the fabric calls. With schedule=random
 * every event has a time, drawn when it becomes possible; with schedule=choice there are no delays, and each event that
 * may come next is an alternative of a choice.
 *
 * Threads. A fabric is used by one thread at a time. Fabrics share nothing: there is no global state.
 *
 * Ownership. The fabric owns NICs, endpoints and regions; it ends with everything in it. Regions stay known by their id
 * after deregistration, until their owner forgets them. A stale key is refused and not followed.
 *
 * Errors. Refusals are returned at once as vnic_refusal with a text; what fails later comes as a completion.
 */
#ifndef UCCL_EP_VIRTUAL_NIC_H
#define UCCL_EP_VIRTUAL_NIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "knobs.h"

typedef struct vnic_fabric vnic_fabric;
typedef struct vnic_nic vnic_nic;
typedef struct vnic_endpoint vnic_endpoint;

#define VNIC_MAX_SGES 4u   /* of a work request here, whatever the NIC promises */
#define VNIC_MAX_PIECES 4u /* that a payload is placed in */
#define VNIC_NO_ENDPOINT 0u
#define VNIC_MAX_REGIONS 65535u /* of one fabric, with id 0, which names none: an id has 16 bits */
#define VNIC_ANY UINT32_MAX
#define VNIC_CHOICES_KEPT (1u << 20)

/* ---------------------------------------------------------------------------------------------------------- choices */

/* Same numbers as uccl_ep_sim_choice_kind. */
typedef enum vnic_choice_kind {
    VNIC_CHOICE_RUN = 1,
    VNIC_CHOICE_EVENT = 2,
    VNIC_CHOICE_FAULT = 3,
    VNIC_CHOICE_NIC = 4
} vnic_choice_kind;

typedef struct vnic_choice {
    uint32_t taken, alternatives, kind, rank;
} vnic_choice;

/* One of n; where n < 2 no choice is made. */
uint32_t vnic_choose(vnic_fabric *f, vnic_choice_kind kind, uint32_t rank, uint32_t n);
/* Yes with so many percent: two alternatives, 1 is yes. 0 and 100 are no choice. */
bool vnic_chance(vnic_fabric *f, vnic_choice_kind kind, uint32_t rank, uint32_t percent);
const vnic_choice *vnic_choices(const vnic_fabric *f, uint32_t *n);

/* ----------------------------------------------------------------------------------------------------------- fabric */

typedef struct vnic_stats {
    uint64_t events, operations, completions, duplicates, immediates, flushes;
    uint64_t backpressure, rnr, faults, errors;
    uint64_t inflight_bytes_peak;
} vnic_stats;

typedef struct vnic_fabric_config {
    uint64_t seed;
    const uint32_t *choices; /* copied */
    uint32_t n_choices;
    bool first_later;
    bool choice_schedule; /* knob schedule=choice */
    uint32_t trace_lines;
    uint32_t ranks;
    /* NULL: what is left to chance is drawn. Otherwise it is asked. */
    uint32_t (*decide)(void *context, uint32_t kind, uint32_t alternatives);
    /* Something that rank's code may look at has changed: memory, or a completion queue. */
    void (*wake)(void *context, uint32_t rank);
    void *context;
} vnic_fabric_config;

vnic_fabric *vnic_fabric_open(const vnic_fabric_config *config); /* NULL: no memory */
void vnic_fabric_close(vnic_fabric *f);

uint64_t vnic_now(const vnic_fabric *f);
void vnic_set_now(vnic_fabric *f, uint64_t now_ns); /* forward only */
/* Events that may come at this moment: due ones, or with schedule=choice all alternatives. */
uint32_t vnic_due(const vnic_fabric *f);
/* The time of the next event; UINT64_MAX: none. */
uint64_t vnic_next(const vnic_fabric *f);
/* Let one of the due events happen. */
void vnic_run_due(vnic_fabric *f);
/* The names of those that may come at this moment, in the order of vnic_run_due's choice (equal names: the same event
 * of the same request, in whatever order); returns how many there are. */
#define VNIC_NAME_TWICE 1ull /* in a name: bytes that land once more */
uint32_t vnic_names(const vnic_fabric *f, uint64_t *names, uint32_t room);
/* The choice that comes next takes this alternative, whatever script and seed say. */
void vnic_choose_next(vnic_fabric *f, uint32_t taken);
/* What was met since `met` was cleared, so that two steps may be compared: those that do not meet commute. Masks are of
 * ranks, by bit, modulo 64. */
typedef struct vnic_met {
    uint64_t control;             /* memory that the library looks at has changed */
    uint64_t buffer;              /* bytes came into the buffer of its NIC, or left it */
    uint64_t emptied;             /* all that waited there left it, for some region or connection */
    uint64_t order;               /* a NIC that keeps the order of arrival took more, or was emptied */
    uint64_t queue;               /* a completion or an immediate came */
    uintptr_t read_from, read_to; /* sources, and memory of the application that has changed: from the lowest byte... */
    uintptr_t written_from, written_to; /* ... to the highest; both 0: none */
    uintptr_t stored_from, stored_to;   /* the same of control messages that were written, rather than added to */
    uint64_t request;                   /* whose event it was; 0: none */
    uint32_t rung;                      /* doorbells of before that were not seen yet */
    uint32_t anything;                  /* errors, connections, time: no rule is known */
} vnic_met;
vnic_met *vnic_met_since(vnic_fabric *f);
/* A call back at that time, through the event queue: `call(context, argument)`. */
void vnic_call_at(vnic_fabric *f, uint64_t at_ns, void (*call)(void *context, uint64_t argument), void *context,
                  uint64_t argument);

const vnic_stats *vnic_fabric_stats(const vnic_fabric *f);
uint64_t vnic_hash(const vnic_fabric *f);
void vnic_hash_mix(vnic_fabric *f, uint64_t what);
/* The last events as text, oldest first; returns the bytes needed. */
uint32_t vnic_trace(const vnic_fabric *f, char *text, uint32_t bytes);

/* ------------------------------------------------------------------------------------------------------------- NICs */

/* `knobs` is copied. A NIC may be shared by several ranks (knob ranks_per_nic). NULL: no memory. */
vnic_nic *vnic_nic_open(vnic_fabric *f, const vnic_knobs *knobs);
void vnic_nic_close(vnic_nic *nic); /* once nothing of it is open */
const vnic_knobs *vnic_nic_knobs(const vnic_nic *nic);
uint32_t vnic_nic_queues(const vnic_nic *nic); /* queue pairs in use */

/* The rank's process, and with it its endpoints and regions, is gone: nothing of it moves any more. */
void vnic_rank_dies(vnic_fabric *f, uint32_t rank);

/* ---------------------------------------------------------------------------------------------------------- regions */

typedef struct vnic_region {
    char *base;
    uint64_t bytes;
    uint64_t key;
    uint32_t id, rank;
    uint32_t tag;    /* the owner's own name for it */
    bool by_address; /* remote addresses are the target's, not offsets */
    bool strict;     /* registered without relaxed ordering: late_overwrite does not concern it; the owner sets it */
    bool polled;     /* strict, and the library looks at it on its own; the owner sets it */
    bool alive;
    uint32_t turn;       /* how often the id was used before */
    uint32_t next_spare; /* forgotten: the id that is used again after this one's */
} vnic_region;

/* NULL: no memory, or no id is left. */
vnic_region *vnic_region_add(vnic_fabric *f, const vnic_knobs *knobs, uint32_t rank, uint32_t tag, void *base,
                             uint64_t bytes);
/* What was placed in it is made visible; nothing is written to it afterwards. */
void vnic_region_remove(vnic_fabric *f, vnic_region *region);
/* Removes it, if it was not, and lets its id be used again, some time later: for an owner who keeps no ids. */
void vnic_region_forget(vnic_fabric *f, vnic_region *region);
vnic_region *vnic_region_of(const vnic_fabric *f, uint32_t id); /* NULL: there never was one */

/* -------------------------------------------------------------------------------------------------------- endpoints */

typedef enum vnic_status {
    VNIC_OK = 0,
    VNIC_LOCAL_LENGTH,
    VNIC_LOCAL_OPERATION,
    VNIC_LOCAL_ACCESS,
    VNIC_FLUSHED,
    VNIC_REMOTE_INVALID,
    VNIC_REMOTE_ACCESS,
    VNIC_REMOTE_OPERATION,
    VNIC_RETRY_EXCEEDED,
    VNIC_RNR_EXCEEDED,
    VNIC_UNKNOWN_PEER,
    VNIC_UNREACHABLE,
    VNIC_ABORTED,
    VNIC_GENERAL,
    VNIC_STATUSES
} vnic_status;

/* What a connection may have agreed on, where the NIC lets it. */
typedef struct vnic_terms {
    uint32_t rnr_retries; /* where knob rnr is retry; VNIC_ANY: for ever */
    uint64_t rnr_ns;      /* between them */
    uint64_t retry_ns;    /* towards a silent peer; UINT64_MAX: for ever */
} vnic_terms;

typedef struct vnic_endpoint_config {
    uint32_t rank; /* of the fabric: whom to wake, who dies */
    uint32_t self; /* own number among the peers */
    uint32_t peers;
    uint32_t cq_entries;
    uint32_t receives_peer;  /* receives that are posted for each peer at connect */
    const vnic_terms *terms; /* copied; NULL: what the knobs say */
    /* Immediates of a connection are received in posting order, one after the other, and where writes are ordered
     * nothing overtakes one that waits for its receive: reliable connections that carry messages. Of the initiator's
     * endpoint. */
    bool in_turn;
    /* The target's receives are the owner's own: called where an immediate would enter the completion queue, which it
     * then does not. VNIC_OK: taken; VNIC_RNR_EXCEEDED: there is none; anything else is what the request ends with. */
    vnic_status (*receive)(void *context, uint64_t cookie /* of the request */);
    void *receive_context;
} vnic_endpoint_config;

/* NULL and text (256 bytes): no queue pairs left, or no memory. */
vnic_endpoint *vnic_endpoint_open(vnic_nic *nic, const vnic_endpoint_config *config, char *text);
/* Its DMA stops: no source is read, nothing is written any more. */
void vnic_endpoint_close(vnic_endpoint *e);
uint32_t vnic_endpoint_id(const vnic_endpoint *e);
bool vnic_endpoint_exists(const vnic_fabric *f, uint32_t id);
/* Why it does not work any more: NULL if it does. */
const char *vnic_endpoint_broken(const vnic_endpoint *e);

void vnic_connect(vnic_endpoint *e, uint32_t peer, uint32_t remote_endpoint);
/* True once nothing of the connection is in flight; until then ask again. */
bool vnic_disconnect(vnic_endpoint *e, uint32_t peer);
void vnic_replenish(vnic_endpoint *e, uint32_t peer, uint32_t n);

typedef enum vnic_op_kind {
    VNIC_WRITE = 1,
    VNIC_ADD = 2,
    VNIC_WRITE_IMM = 3,
    VNIC_READ = 4,
    VNIC_SWAP = 5 /* compare and swap */
} vnic_op_kind;

#define VNIC_SIGNALLED (1u << 0)
#define VNIC_FENCE (1u << 1)
#define VNIC_VISIBLE (1u << 2)
#define VNIC_INLINE (1u << 3)

typedef struct vnic_sge {
    const vnic_region *region;
    uint64_t offset;
    uint32_t length;
} vnic_sge;

/* Length: the sum over the SGEs. A READ has one, which is where to; an ADD or SWAP none, or one of 8 bytes, where the
 * old value goes. */
typedef struct vnic_work {
    uint8_t kind, flags, sges;
    vnic_sge sge[VNIC_MAX_SGES];
    uint64_t remote_address; /* virtual or offset, as addr_mode says */
    uint64_t remote_key;
    uint64_t value; /* to add; to store; the immediate */
    uint64_t compare;
    uint64_t cookie;
    uint8_t fails; /* vnic_status that the owner knows it will end with, once its turn comes; VNIC_OK: none */
} vnic_work;

typedef enum vnic_refusal {
    VNIC_TAKEN = 0,
    VNIC_NO_ROOM,     /* later */
    VNIC_UNSUPPORTED, /* this NIC never does that */
    VNIC_TOO_LONG,
    VNIC_BROKEN
} vnic_refusal;

/* Take up to n requests; *taken always says how many. `more`: the doorbell may wait. */
vnic_refusal vnic_post(vnic_endpoint *e, uint32_t peer, const vnic_work *work, uint32_t n, bool more, uint32_t *taken,
                       char *text);
/* Ring the doorbells of what was posted and not seen yet (lost doorbells). Returns whether there was any. */
bool vnic_ring(vnic_endpoint *e);

typedef struct vnic_completion {
    uint64_t cookie; /* of the work; an immediate: the value */
    uint32_t peer;
    uint32_t status; /* vnic_status */
    int32_t vendor_code;
    bool immediate, consumed_receive;
} vnic_completion;

/* Returns how many, at most max. A cumulative completion gives one for each signalled request that it covers. */
uint32_t vnic_poll(vnic_endpoint *e, vnic_completion *completions, uint32_t max);

/* Make bytes that this endpoint's NIC placed in the region visible (a read of the NIC's by the target itself). */
void vnic_flush_local(vnic_endpoint *e, const vnic_region *region);

/* ----------------------------------------------------------------------------------------------------------- status */

/* status.c: the number that the vendor's NIC gives, and its text. */
int32_t vnic_vendor_code(vnic_vendor vendor, vnic_status status);
const char *vnic_vendor_text(vnic_vendor vendor, int32_t code);
/* What a vendor's code means; VNIC_GENERAL if the table has none. */
vnic_status vnic_status_of(vnic_vendor vendor, int32_t code);

/* ----------------------------------------------------------------------------------------------------------- faults */

typedef enum vnic_fault_id {
    VNIC_FAULT_DROP = 0,
    VNIC_FAULT_DELAY,
    VNIC_FAULT_DUPLICATE_COMPLETION,
    VNIC_FAULT_STRAY_COMPLETION,
    VNIC_FAULT_LOST_DOORBELL,
    VNIC_FAULT_ERROR_IN_BATCH,
    VNIC_FAULT_QUEUE_ERROR,
    VNIC_FAULT_RNR,
    VNIC_FAULT_AGAIN,
    VNIC_FAULT_PARTIAL,
    VNIC_FAULT_SLOW_PEER,
    VNIC_FAULT_PEER_DEATH,
    VNIC_FAULT_PEER_RETURN,
    VNIC_FAULT_DEVICE_LOST,
    VNIC_FAULT_REGISTER_FAIL,
    VNIC_FAULT_CALL_FAIL,
    VNIC_FAULT_MEMORY_PRESSURE,
    VNIC_FAULT_CLOCK_JUMP,
    VNIC_FAULTS
} vnic_fault_id;

/* Name, one-line text and the keys that fault i takes; NULL past the last. */
const char *vnic_fault_name(uint32_t i, const char **text, const char **keys);
/* "name key=value ...". Not 0: text (256 bytes) says what is wrong and what is valid. */
int vnic_fault_add(vnic_fabric *f, const char *fault, char *text);
/* Does a fault of this kind strike here? `n` of it so far is counted by the fault. *parameter: its ns= or code=. */
bool vnic_fault_strikes(vnic_fabric *f, vnic_fault_id id, uint32_t rank, uint32_t peer, uint64_t *parameter);
/* Faults that strike a rank as a whole, or the world, at a time: the owner carries them out. */
void vnic_on_fault(vnic_fabric *f, void (*call)(void *context, vnic_fault_id id, uint32_t rank, uint64_t parameter),
                   void *context);
void vnic_device_lost(vnic_fabric *f, uint32_t rank);
void vnic_queue_error(vnic_fabric *f, uint32_t rank, uint32_t peer);

#endif
