/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: the core's data structures.
 *
 * A communicator owns channels and proxies. A proxy is one thread with one endpoint of the NIC and up to 64 channels. A
 * command that was taken from a ring lives in an *entry* until it is retired:
 *
 *   ring --take--> entry (window of its channel) --append--> order list of (proxy, peer) --issue--> NIC
 *                                                            head: oldest not retired; issue: next to be submitted
 *   NIC --completion--> the list's head is popped while it is complete --> window slot done --> counters advance in
 * order
 *
 * The list keeps all that a proxy has for one peer in posting order: it is the submission order, the order in which a
 * NIC with cumulative completions retires, and for sender hold the answer to "is everything before this signal
 * complete?". So the state of a peer is one cache line, whatever the number of channels. What lies before `issue` is
 * submitted; nothing else says so.
 */
#ifndef UCCL_EP_CORE_INTERNAL_H
#define UCCL_EP_CORE_INTERNAL_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "fault_point.h"
#include "uccl_ep/uccl_ep.h"

/* Assertions guard invariants of our own and stay on in every build. */
#define UCCL_EP_ASSERT(condition)                                                                                      \
    (__builtin_expect(!(condition), 0) ? uccl_ep_assert_failed(#condition, __FILE__, __LINE__) : (void)0)
_Noreturn void uccl_ep_assert_failed(const char *condition, const char *file, int line);

#if defined(__x86_64__) || defined(__i386__)
#define cpu_relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define cpu_relax() __asm__ volatile("yield" ::: "memory")
#else
#define cpu_relax() __asm__ volatile("" ::: "memory")
#endif

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define NONE UINT32_MAX /* no rank */
#define MAX_CHANNELS_PER_PROXY 64u
#define MAX_PROXIES 32u
#define MAX_RECORDS 256u
#define BATCH_OPERATIONS 256u              /* of one submit */
#define TAKE_COMMANDS 256u                 /* from one ring in one pass */
#define LARGE_BYTES 32768u                 /* of a put: it takes a NIC longer than its completion takes the proxy */
#define FIRST_SEQUENCE (UINT32_MAX - 100u) /* default of first_sequence: every run meets the wrap (LIM-1) */
#define GO_ALONG 64u /* entries that are looked at for signals that go along with the one that is due */
#define TRACE_ENTRIES 1024u
#define TICK_LOG2 16u /* 66 us: 32 bits of them wrap after 78 hours, and no peer may be silent for more than a day */
#define MAX_PEER_TIMEOUT_NS 86400000000000ull
#define MAX_INFLIGHT_BYTES (1ull << 31)
#define MAX_WAITERS 64u /* waits for signals that a report tells */
#define DEFAULT_BOOTSTRAP_TIMEOUT_NS 60000000000ull
#define HOUSEKEEPING_NS 2000000ull /* events, deadlines and abandoned tickets are looked at this often */

/* ---------------------------------------------------------------------------------------------------------- entries */

enum stage {
    STAGE_FREE = 0,   /* never used, or off the list: complete or failed */
    STAGE_TAKEN,      /* on the list; submitted if it lies before `issue` of its peer */
    STAGE_SKIPPED,    /* failed: what is not submitted of it will not be */
    STAGE_HELD,       /* sender hold: the put is submitted, the signal waits for all before it */
    STAGE_SIGNAL_DUE, /* sender hold: all before it is visible, the signal comes next */
    STAGE_APPLYING /* sender hold with a mailbox: the record is submitted, the target has not said that it added it */
};

/* What changes while an entry is on the list: one word, so that "taken, and nothing done yet" is one store and one
 * comparison. */
struct entry_state {
    uint8_t stage;
    uint8_t flags;         /* ENTRY_* */
    uint16_t outstanding;  /* other NICs: operations without completion */
    uint32_t bytes_issued; /* of the put: submitted */
};

struct entry {
    uint64_t local, remote, add;
    struct entry *next; /* behind it in the list of its peer, or NULL */
    uint32_t bytes;
    uint32_t slot;
    uint32_t last_seq; /* number of its last operation, or of the one before it if it has none */
    uint16_t target;
    uint8_t op;
    uint8_t channel; /* of the proxy; never changes */
    union {
        struct entry_state state;
        struct {
            uint8_t stage, flags;
            uint16_t outstanding;
            uint32_t bytes_issued;
        };
    };
    uint32_t group; /* other NICs: entries that an operation of this one carries, itself first */
};
_Static_assert(sizeof(struct entry) == 64, "an entry is one cache line");
#define ENTRY_SOURCE_DONE 1u
#define ENTRY_FAILED 2u
#define ENTRY_FOLLOWED 4u    /* the next one on the list writes right behind this one's target bytes */
#define ENTRY_RECORD_SENT 8u /* sender hold with a mailbox: the record went, what wakes the target has not */

/* ------------------------------------------------------------------------------------------------------------ peers */

enum peer_state {
    PEER_UP = 0,
    PEER_FAILING, /* given up: waits for the NIC to let go of its sources */
    PEER_DOWN     /* the NIC is disconnected; everything to it is refused */
};

struct peer {
    struct entry *head, *tail; /* order list; NULL: empty */
    struct entry *issue;       /* next to be submitted; NULL: nothing is */
    uint64_t open;             /* bit c: channel c of the proxy may send to it; a rank that does not exist has none */
    uint32_t progress;         /* when the head last moved, or the list last began: the proxy's tick */
    uint32_t inflight_bytes;   /* config.c keeps the limit below 2^31 */
    uint32_t seq_issued;       /* operations submitted */
    uint32_t seq_completed;    /* and completed; in-order NICs: all up to this one */
    uint32_t seq_read;         /* RAISE_READ: of the read under way, or of the last one */
    uint32_t seq_visible;      /* and all up to this one is visible */
    uint16_t failure;          /* record + 1 of why it is failing */
    uint16_t incarnation;
    uint8_t state;
    uint8_t active;     /* it is in the proxy's list of peers to be served */
    uint8_t limited;    /* our own limits kept it from submitting */
    bool uncovered : 1; /* no completion will tell of the operation submitted last, but of one to come */
    bool reading : 1;   /* a read is under way */
};
_Static_assert(sizeof(struct peer) == 64, "a peer is one cache line (contract: <= 64 bytes a peer and proxy)");

/*
 * What a strategy with a mailbox keeps of a peer besides: of what goes to it, and of what comes from it. Written by the
 * proxy alone.
 */
#define MAX_WINDOW 256u
#define MIN_WINDOW 16u
struct link {
    uint64_t returned; /* greatest return word seen: so far the peer has come with ours */
    uint64_t expected; /* next of its numbers (sequenced immediate), or count of the next record (sender hold) */
    union {
        uint64_t arrived[MAX_WINDOW / 64]; /* sequenced: bit (number % window) is here, ahead of `expected` */
        uint64_t records;                  /* sender hold: count of the record sent last */
    };
    uint32_t control_seq;   /* in-order NICs: sequence of the return word under way */
    uint16_t receives_used; /* by its immediates, and not given back yet */
    bool returning : 1;     /* a return word is under way: one at a time, for a later one may not land before it */
    bool return_due : 1;    /* it is in the proxy's list of those who are owed one */
    bool watched : 1;       /* it is in the proxy's list of those from whom something has come or will */
};
_Static_assert(sizeof(struct link) <= 64, "at most a cache line of a peer besides");

/* An operation in flight on a NIC whose completions come in any order. Its cookie is generation and place, so a
 * completion that comes twice, or late, is told from all others. */
struct flight {
    uint32_t entry;
    uint32_t generation;
    uint16_t peer;
    uint16_t kind; /* enum flight_kind */
};

/* --------------------------------------------------------------------------------------------------------- channels */

struct channel {
    uccl_ep_slot *slots;
    uccl_ep_ring_counters *counters;
    uccl_ep_ring_producer *producer; /* NULL: kernels post, and it lies in their memory */
    uint64_t *gave_up;               /* a line of its own */
    uint64_t taken;                  /* next ticket to be taken */
    uint64_t source;                 /* as published, or about to be */
    uint64_t complete;
    struct entry *window;
    uint64_t window_mask;
    uint32_t index; /* in the communicator */
    uint32_t granularity;
    bool closed;            /* not drained any more */
    uint64_t closed_ticket; /* lowest ticket that this failed, + 1; under failure_lock */
    uint32_t closed_record; /* + 1 */
    uint64_t bytes, signals;
    _Atomic uint64_t failures;
    _Atomic uint32_t nap_ns; /* how long who finds the ring full sleeps; 0: nobody has yet */
};

/* ------------------------------------------------------------------------------------------------------------ proxy */

/* Who adds to a signal word (SIG-6). */
enum adder {
    ADDER_NIC = 0, /* the target's NIC, by an atomic */
    ADDER_TARGET,  /* the target's proxy, from a record in its mailbox */
    ADDER_SOURCE   /* the word's only writer, which stores the new sum */
};

/* How a completion is raised to "visible" (MEM-3). */
enum raise {
    RAISE_NONE = 0, /* it says so itself */
    RAISE_REQUEST,  /* by asking for it with every operation */
    RAISE_READ,     /* by a read behind the writes */
    RAISE_RETURN    /* by the target's proxy, in its return word */
};

/* Places in the MAILBOX region; offsets in bytes. A peer writes into the inbox, our writes have their source in the
 * outbox, at the same place: what may be overwritten at the target may be overwritten here. Both are [size] of each. */
struct mailbox {
    char *base; /* of the region */
    uint64_t inbox, outbox;
    uint64_t returns; /* within a box: 8 bytes, how far the peer has come with what this rank sent */
    uint64_t records; /* [window] or one, 16 bytes each */
    uint64_t wakes;   /* 1 byte, or as much as the NIC writes at least: low bits of the count of the record sent last */
    uint64_t read;    /* of the outbox: what a read brings, which nobody looks at */
    uint64_t box_bytes;
    uint32_t slots; /* records of a peer */
    uint32_t record_bytes;
    uint32_t wake_bytes, return_bytes; /* as written */
};

/* Of the flight recorder: `n` commands from `ticket` on were taken at once. Their words end at position `end` of
 * trace_slots. */
struct trace_run {
    uint64_t time_ns, ticket, end;
    uint32_t n, channel;
};

struct proxy {
    struct uccl_ep_comm *comm;
    uccl_ep_endpoint *endpoint;
    uint32_t index;
    uint32_t channels;
    struct channel *channel; /* [channels] */
    struct entry *entries;   /* [channels << window_log2] */
    uint32_t window_log2;
    uint32_t ring_log2;
    struct peer *peers; /* [UCCL_EP_MAX_RANKS], so that any target can be looked up; touched up to `size` */
    uint16_t *active;   /* peers with something to submit */
    uint32_t active_count;
    uint32_t drain_first; /* channel that goes first in this pass */
    uint64_t *busy;       /* bitmap of peers with a list */
    bool moved;           /* something left a list in this pass: counters may follow */
    /* agreed limits */
    uint32_t max_inflight_peer, max_inflight, max_batch, max_message_bytes;
    uint64_t max_inflight_bytes;
    uint32_t signal_every; /* operations: for so many a completion, at least */
    uint64_t heap_bytes;
    uint32_t signals;
    uint32_t size;
    bool in_order, unsignalled, hold, merge, error_stops;
    /* of the strategy */
    bool sequenced;       /* writes carry numbers, the target's proxy adds */
    bool controls;        /* on in-order NICs: operations of the core's own have sequences among those of commands */
    bool source_early;    /* entries say themselves when their source is free, before they are complete */
    uint8_t raise;        /* enum raise */
    uint8_t put_flags;    /* UCCL_EP_OPERATION_*, of every operation */
    uint8_t signal_flags; /* of every add */
    bool dresses;         /* there are such flags, or a bank other than the first */
    uint8_t adder;        /* enum adder */
    uint64_t bank_offset; /* of signal words: adds of this proxy go there; bytes into the region */
    uint64_t immediate_mask;
    uint8_t return_flags; /* of a return word, beside put_flags */
    uint32_t window;      /* sequenced: numbers that may be under way to a peer */
    struct link *links;   /* [size]; NULL where the adder is not the target */
    struct mailbox mailbox;
    struct staging *staging; /* staging.h; NULL: the heap is the NIC's */
    uint64_t *sums;          /* running sums: [size][signals], of the words whose only writer this rank is */
    uint64_t *wakes_seen;    /* wake bytes as they were when last looked at */
    uint16_t *returns_due;   /* peers that are owed a return word */
    uint16_t *watched;       /* peers from whom something has come or will */
    uint32_t returns_count, watched_count;
    uint32_t wake_line;     /* of the wake bytes: looked at next */
    uint32_t busy_count;    /* bits in `busy` */
    struct flight *flights; /* any-order NICs: [max_inflight] */
    uint32_t *free_flights; /* ring of them */
    uint32_t free_mask, free_first, free_last;
    /* state */
    uint32_t inflight;
    uint64_t inflight_bytes;
    uint64_t now_ns, housekeeping_ns;
    uint32_t tick;    /* now_ns >> TICK_LOG2 */
    uint32_t failing; /* peers in PEER_FAILING */
    bool endpoint_broken;
    struct trace_run *trace;   /* [TRACE_ENTRIES] */
    uccl_ep_slot *trace_slots; /* [TRACE_ENTRIES] */
    uint64_t trace_end;        /* commands recorded so far */
    _Atomic uint64_t trace_runs;
    uccl_ep_proxy_stats stats;
    pthread_t thread;
    bool thread_runs;
    _Atomic bool stop;
    _Atomic bool idle; /* nothing of its own is outstanding; kept while the communicator comes to rest */
};

/* ----------------------------------------------------------------------------------------------------- communicator */

/* What all ranks' NICs and backends promise. */
#define HAS_FLUSH_LOCAL 1u
#define HAS_REPLENISH 2u
typedef struct promised {
    uccl_ep_caps caps;
    uint32_t functions; /* optional ones that are there: HAS_* */
} promised;

/* What is known of a closed (channel, target). Written under failure_lock; `closed` is read without it. */
typedef struct closure {
    uint64_t lowest;       /* lowest failed ticket + 1 that no exclude has acknowledged; 0: none */
    uint64_t acknowledged; /* tickets below it are known to have failed */
    uint32_t record;       /* + 1 */
    _Atomic uint32_t closed;
} closure;

/* A place in the table of those who wait for a signal: waiter.c. */
struct waiter {
    _Atomic uint64_t version;
    _Atomic uint64_t thread, what, value, begin_ns, end_ns;
    _Atomic uint64_t name[2];
};
struct waiting {
    char name[16];
    uint64_t thread, value, begin_ns;
    uint32_t slot, source;
};

/* Memory of the host that kernels reach. */
struct reach {
    void *base; /* as it was registered; NULL: it is not */
    void *device_address;
};

typedef struct uccl_ep_comm {
    uccl_ep_config config; /* with every default filled in; strings are copies below */
    char library[256], device_name[256], backend_options[256], cpus[256], accelerator_library[256];
    uint32_t rank, size;
    uint32_t fork_generation;
    const uccl_ep_backend *backend;
    uccl_ep_host host;
    uccl_ep_device *device;
    uccl_ep_device_info device_info;
    uccl_ep_caps caps;
    promised agreed;
    uint32_t strategy;
    char strategy_reason[256];
    bool heap_owned, registered[UCCL_EP_REGIONS];
    bool staged; /* heaps lie in device memory, and what the NIC has is the mirror; of all ranks */
    char staged_reason[224];
    void *mirror;           /* twice the heap: where peers write, where own puts are sent from */
    uint64_t *signal_words; /* [banks][signals]; NULL: they lie in device memory */
    void *device_signals;   /* there, or NULL */
    uint64_t signal_bytes;
    uint32_t banks, window;
    enum adder adder;
    bool hold;
    uint32_t raise;
    void *mailbox;
    uint64_t mailbox_bytes;
    uint32_t immediate_bits;
    bool replenish;      /* immediates take receives, which go back */
    bool flush_arrivals; /* bytes that an immediate tells of are visible after flush_local only */
    uint32_t channels, device_channels;
    uccl_ep_ring *rings;         /* [channels], as their producers see them */
    struct channel **channel_of; /* [channels] */
    /* What producers, proxies and kernels share, in pages of its own: one block (device_channel.c). */
    char *shared;
    uint64_t shared_bytes;
    uccl_ep_device_control *control;
    uint64_t *gone; /* bitmap: lost or departed, for kernels */
    uccl_ep_device_error *device_error;
    uccl_ep_ring_counters *counters; /* [channels], those of one proxy side by side */
    struct proxy *proxies;
    const uccl_ep_accelerator *accelerator; /* NULL: no device */
    uccl_ep_gpu *gpu;
    uccl_ep_gpu_info gpu_info;
    char *device_side; /* in device memory: device_channel.c */
    struct reach shared_reach, heap_reach, signals_reach;
    bool running;           /* proxies pass: not before the end of create, and not within a reset */
    _Atomic bool quiescing; /* before a reset: proxies say whether they are idle */
    _Atomic bool aborted;
    char abort_reason[160];
    /* failures: off the hot path, so a lock */
    pthread_mutex_t failure_lock;
    closure *closures; /* [channels * size]: pages are touched where something failed */
    uccl_ep_error *records;
    uint32_t record_count;
    uint64_t record_dropped;
    _Atomic uint64_t *lost;     /* bitmap */
    _Atomic uint64_t *departed; /* bitmap: closed their communicators; no failure until somebody waits for them */
    _Atomic uint64_t *excluded; /* bitmap */
    struct waiter waiters[MAX_WAITERS];
    _Atomic uint32_t waiters_untold; /* found no place */
} uccl_ep_comm;

/* The peer's link; only where there are links. */
static inline struct link *link_of(const struct proxy *p, const struct peer *q) {
    return &p->links[q - p->peers];
}

/* How long nothing of what is outstanding to the peer has come to an end. */
static inline uint64_t silence_ns(const struct proxy *p, const struct peer *q) {
    return (uint64_t)(p->tick - q->progress) << TICK_LOG2;
}

static inline uint32_t peer_inflight(const struct peer *q) {
    return q->seq_issued - q->seq_completed;
}

/* Sender hold: all before the held signal at the head is complete. */
static inline bool signal_due(const struct proxy *p, const struct peer *q) {
    return p->hold && q->head && q->head->stage == STAGE_SIGNAL_DUE;
}

/* An entry in use lies at most a window ahead of `complete`, so its place tells its ticket. */
static inline uint64_t ticket_of(const struct channel *c, const struct entry *e) {
    return c->complete + (((uint64_t)(e - c->window) - c->complete) & c->window_mask);
}

/* What an entry has: the bits of its operation say it. */
static inline bool has_put(const struct entry *e) {
    return e->op & 1;
}
static inline bool has_signal(const struct entry *e) {
    return e->op & 2;
}
_Static_assert((UCCL_EP_OP_PUT & 3) == 1 && (UCCL_EP_OP_SIGNAL & 3) == 2 && (UCCL_EP_OP_PUT_SIGNAL & 3) == 3 &&
                   (UCCL_EP_OP_FLUSH & 3) == 0,
               "the operation's bits tell what it has");

static inline bool bitmap_test(_Atomic uint64_t *map, uint32_t bit) {
    return atomic_load_explicit(&map[bit >> 6], memory_order_acquire) >> (bit & 63) & 1;
}

/* ---------------------------------------------------------------------------------------------------------- modules */

/* error.c: last errors of threads, records, fork detection */
uccl_ep_status fail_local(uccl_ep_status status, const char *clause, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void fail_with_record(const uccl_ep_error *record);
uccl_ep_error *last_error_slot(void);
uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t vendor_code, const char *text);
const char *host_fail_text(void);
int32_t host_fail_code(void);
/* The error that a backend returned, if it is one; E_BACKEND for any other number. */
uccl_ep_status checked_status(uccl_ep_status status);
void host_fail_clear(void);
uint32_t current_fork_generation(void);
uccl_ep_status check_usable(uccl_ep_comm *comm);

/* config.c */
uccl_ep_status config_fill(uccl_ep_comm *comm, const uccl_ep_config *config, const uccl_ep_bootstrap *bootstrap);
uccl_ep_status parse_cpus(const char *text, uint32_t index, int *cpu);
uint32_t whole_pieces(const uccl_ep_config *c, const uccl_ep_caps *caps, uint64_t largest);
void config_limits(uccl_ep_comm *comm);

/* loader.c */
uccl_ep_status backend_load(const char *path, const uccl_ep_backend **backend);
uccl_ep_status accelerator_load(const char *path, const uccl_ep_accelerator **accelerator);
void host_init(uccl_ep_host *host, void *context);
/* The opened device, or if that is NULL device `index`. What a backend wrote into the texts ends within them. */
uccl_ep_status device_describe(const uccl_ep_backend *backend, const uccl_ep_host *host, uccl_ep_device *opened,
                               uint32_t index, uccl_ep_device_info *info);

/* strategy.c */
/* `all`: what every rank's NIC promises; each: [size], what its own does. */
uccl_ep_status strategy_choose(uccl_ep_comm *comm, const promised *all, const promised *each);
const char *strategy_name(uint32_t strategy);

/* failure.c: called by proxies, off the hot path */
uint32_t record_failure(uccl_ep_comm *comm, const uccl_ep_error *error);
void close_target(struct proxy *p, uint32_t channel, uint32_t target, uint64_t ticket, uint32_t record);
void close_channel(struct proxy *p, struct channel *c, uint64_t ticket, uint32_t record);
void publish_closed(struct proxy *p, struct channel *c);
void publish_failed(uccl_ep_comm *comm, uint32_t channel);
void fill_error(const struct proxy *p, uccl_ep_error *error, int32_t status, const char *clause, uint32_t target);
void mark_lost(uccl_ep_comm *comm, uint32_t rank);
/* After a change of who is lost, has departed or is excluded: kernels that wait are told. */
void publish_lost(uccl_ep_comm *comm);
uccl_ep_status wait_failure(uccl_ep_comm *comm, uint32_t channel, uint64_t ticket);
void failures_clear(uccl_ep_comm *comm);

/* proxy.c: take, check, append, publish */
bool proxy_pass(struct proxy *p);
void *proxy_main(void *argument);
bool proxy_idle(const struct proxy *p);

/* trace.c: the flight recorder */
void trace_record(struct proxy *p, const struct channel *c, uint64_t ticket, uint32_t n);

/* issue.c: order lists to operations */
void issue_peer(struct proxy *p, uint32_t target);
bool submit_control(struct proxy *p, uint32_t target, const uccl_ep_operation *operation);
bool flush_due(const struct peer *q);
void endpoint_poll_failed(struct proxy *p, int32_t status);
void issue_refused(struct proxy *p, uint32_t target, uccl_ep_status status);
void control_refused(struct proxy *p, uint32_t target, uccl_ep_status status);
void activate(struct proxy *p, struct peer *q);

/* mailbox.c: what ranks tell each other besides commands */
uint64_t mailbox_bytes(const uccl_ep_comm *comm);
void mailbox_open(uccl_ep_comm *comm, struct proxy *p);
void mailbox_reset(struct proxy *p, uint32_t target);
void mailbox_numbered(const struct proxy *p, uint32_t target, const struct entry *e, uint64_t number,
                      uccl_ep_operation *o);
uint32_t mailbox_tagged(struct proxy *p, uint32_t target, const struct entry *e, uint64_t add, uccl_ep_operation *o);
uint32_t mailbox_wake(struct proxy *p, uint32_t target, uccl_ep_operation *o);
void mailbox_sum(struct proxy *p, uint32_t target, uint32_t slot, uint64_t add, uccl_ep_operation *o);
uint64_t mailbox_issued(const struct proxy *p, const struct peer *q);
bool mailbox_awaits(const struct proxy *p, uint32_t target);
uint32_t mailbox_window(const struct proxy *p, const struct peer *q);
void mailbox_immediate(struct proxy *p, uint32_t source, uint64_t immediate);
void mailbox_return_done(struct proxy *p, uint32_t target);
bool mailbox_extent(const struct proxy *p, uint32_t source, uint64_t number, uint64_t *offset, uint64_t *bytes);
bool mailbox_pass(struct proxy *p);

/* staging.c: heaps in device memory that the NIC does not reach; see staging.h for what is inline */
uccl_ep_status staging_open(uccl_ep_comm *comm, struct proxy *p);
void staging_close(struct proxy *p);
void staging_reset(struct proxy *p, uint32_t source);
bool staging_pass(struct proxy *p);
void staging_take(struct proxy *p, const struct channel *c, uint64_t ticket, uint32_t n);
bool staging_busy(const struct proxy *p, uint32_t target);
bool staging_lands(const struct proxy *p, uint32_t source);
bool staging_landed(struct proxy *p, uint32_t source, uint64_t *end);
uccl_ep_status staging_drain(uccl_ep_comm *comm);

/* flight.c: operations in flight on NICs whose completions come in any order */
enum flight_kind { FLIGHT_NONE = 0, FLIGHT_COMMAND, FLIGHT_RETURN };
uccl_ep_status flights_open(struct proxy *p);
uint64_t flight_take(struct proxy *p, enum flight_kind kind, uint32_t entry, uint32_t peer);
void flights_untake(struct proxy *p, uint32_t n);
void flights_drop(struct proxy *p, uint32_t peer);
struct flight *flight_end(struct proxy *p, uint64_t cookie, enum flight_kind *kind);

/* retire.c: completions to counters */
void retire_completion(struct proxy *p, const uccl_ep_completion *completion);
void retire_head(struct proxy *p, uint32_t target);
void window_advance(struct proxy *p, struct channel *c);
void endpoint_fail(struct proxy *p, uccl_ep_status status, const char *why);
void entry_failed(struct proxy *p, uint32_t target, struct entry *failed, const uccl_ep_error *error);
void peer_fail(struct proxy *p, uint32_t target, const uccl_ep_error *error);
void peer_let_go(struct proxy *p, uint32_t target);
void peer_failing_step(struct proxy *p, uint32_t target);

/* exchange.c: collective steps of create and reset */
uccl_ep_status exchange(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap, const char *step, uccl_ep_status mine,
                        const void *payload, uint32_t bytes, void *all);

/* connect.c: what ranks know of each other's endpoints and regions. */
struct contacts {
    size_t address_room, region_room; /* of one blob */
    size_t stride;                    /* of one rank: [proxies] addresses, [regions] */
    char *all;                        /* [size] */
    uint32_t pair_bytes;              /* of what an endpoint has for one peer alone; 0: nothing */
    char *pairs;                      /* [size][proxies]: for this rank */
};
uccl_ep_status contacts_gather(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap, const char *step,
                               uccl_ep_status status, struct contacts *c);
void contacts_free(struct contacts *c);
uccl_ep_status connect_peers(uccl_ep_comm *comm, const struct contacts *c, const bool *wanted);
uccl_ep_status import_peers(uccl_ep_comm *comm, const struct contacts *c, const bool *wanted);

/* comm.c */
uccl_ep_status backend_failed(uccl_ep_comm *comm, uccl_ep_status status, const char *clause, const char *what);
uccl_ep_status start_proxies(uccl_ep_comm *comm);
uccl_ep_status start_threads(uccl_ep_comm *comm); /* also where progress is the caller's */
void stop_proxies(uccl_ep_comm *comm);

/* accelerator.c: the device, and heaps in its memory */
uccl_ep_status accelerator_open(uccl_ep_comm *comm);
void accelerator_close(uccl_ep_comm *comm);
uccl_ep_status accelerator_failed(const uccl_ep_comm *comm, uccl_ep_status status, const char *clause,
                                  const char *what);
uccl_ep_status reach_memory(uccl_ep_comm *comm, void *base, uint64_t bytes, struct reach *reach);
void unreach_memory(uccl_ep_comm *comm, struct reach *reach);
uccl_ep_status device_heap_check(uccl_ep_comm *comm);
uccl_ep_status device_memory_describe(uccl_ep_comm *comm, uccl_ep_memory *memory);
uccl_ep_status device_signals_check(uccl_ep_comm *comm);
uccl_ep_status device_signals_open(uccl_ep_comm *comm);
uccl_ep_status device_signals_zero(uccl_ep_comm *comm);

/* device_channel.c: what producers, proxies and kernels share; channels that kernels post to */
uccl_ep_status shared_open(uccl_ep_comm *comm);
void shared_close(uccl_ep_comm *comm);
uccl_ep_slot *shared_slots(const uccl_ep_comm *comm, uint32_t channel, uint64_t **gave_up);
uccl_ep_status device_channels_open(uccl_ep_comm *comm);
void device_channels_close(uccl_ep_comm *comm);
uint64_t device_channel_posted(const uccl_ep_comm *comm, const struct channel *c);
uccl_ep_status channel_rebase(uccl_ep_comm *comm, const struct channel *c, uint64_t *next);

/* Tickets below it have been posted, or given out where the host posts. */
static inline uint64_t channel_posted(const uccl_ep_comm *comm, const struct channel *c) {
    return LIKELY(c->producer != NULL) ? __atomic_load_n(&c->producer->head, __ATOMIC_ACQUIRE)
                                       : device_channel_posted(comm, c);
}

/* waiter.c: a wait says that it lasts, and that it is over. */
uint32_t waiter_begin(uccl_ep_comm *comm, uint32_t slot, uint64_t value, uint32_t source);
void waiter_end(uccl_ep_comm *comm, uint32_t place);
bool waiter_read(const uccl_ep_comm *comm, uint32_t place, struct waiting *out);

/* wait.c */
#define WAIT_SPINS 200u
#define WAIT_NAP_NS 20000u
typedef struct backoff {
    uint32_t turns;
    uint32_t nap_ns; /* not 0: from spinning to sleeping so long, without yielding in between */
} backoff;
void backoff_wait(uccl_ep_comm *comm, backoff *b);
void backoff_pause(uccl_ep_comm *comm, backoff *b);
uint64_t deadline_of(const uccl_ep_comm *comm, uint64_t timeout_ns);
uint64_t comm_now(const uccl_ep_comm *comm);
uint32_t lost_rank(uccl_ep_comm *comm, uint32_t source);

#endif
