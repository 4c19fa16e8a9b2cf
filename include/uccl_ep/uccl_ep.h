/* SPDX-License-Identifier: Apache-2.0
 *
 * uccl_ep.h: the embedder's API in C. The Python package is made of these calls.
 *
 * Purpose. A communicator joins ranks 0 .. size-1. Each has a symmetric heap, an array of 64-bit signal words and
 * channels. Posting to a channel is one-sided: put, signal, put_signal. docs/contract.md says what a caller may rely
 * on; clauses are cited here as PUT-1 and so on.
 *
 * Ordering. A signal on a channel to a target is visible after every put posted before it on that channel to that
 * target (SIG-2). Nothing else is ordered. Posting is a release, reading a signal word an acquire.
 *
 * Threads. Posting, waiting, reading, aborting: any number of threads. create, reset and destroy: one thread, with no
 * other call on the communicator in progress (abort excepted, which is what to call to get the others out).
 *
 * Waiting. Every wait takes a timeout in nanoseconds: 0 polls, UCCL_EP_TIMEOUT_DEFAULT takes the configured one. There
 * is no infinite wait (ERR-1). All waits end on abort.
 *
 * Ownership. What a function returns by pointer belongs to the communicator and lives until destroy.
 *
 * Errors. A uccl_ep_status; the last error of the calling thread, with its context, is at uccl_ep_last_error().
 * Failures of commands are found by the proxy later: they come out of the waits that cover them (ERR-2), and stay in
 * uccl_ep_errors() until the peer is excluded or reset.
 *
 * A process that forks keeps the communicator in the parent; in the child every call is E_FORKED.
 */
#ifndef UCCL_EP_UCCL_EP_H
#define UCCL_EP_UCCL_EP_H

#include <stddef.h>
#include <stdint.h>

#include "accelerator.h"
#include "backend.h"
#include "command.h"
#include "device_comm.h"
#include "ring.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_API __attribute__((visibility("default")))

#define UCCL_EP_VERSION_MAJOR 0
#define UCCL_EP_VERSION_MINOR 1
#define UCCL_EP_VERSION_PATCH 0

#define UCCL_EP_TIMEOUT_DEFAULT UINT64_MAX
#define UCCL_EP_NO_CHANNEL UINT32_MAX

typedef struct uccl_ep_comm uccl_ep_comm;

/* ------------------------------------------------------------------------------------------------------- the errors */

/* One failure, as ERR-2 wants it. */
typedef struct uccl_ep_error {
    uint32_t size;
    int32_t status;       /* uccl_ep_status */
    uint32_t rank;        /* who reports */
    uint32_t peer;        /* whom it concerns; UCCL_EP_ANY_RANK: nobody in particular */
    uint32_t channel;     /* UCCL_EP_NO_CHANNEL: no channel */
    uint32_t op;          /* uccl_ep_op, 0: no command */
    uint64_t ticket;      /* UCCL_EP_NO_TICKET: no command */
    uint64_t time_ns;     /* of the communicator's clock */
    uint32_t incarnation; /* of (channel, peer) when it failed */
    int32_t vendor_code;
    char clause[8]; /* of the contract, "ERR-4" */
    char nic[64];
    char text[256]; /* what happened, and what to do */
} uccl_ep_error;

/* The last error of the calling thread. Never NULL; status OK if there was none. Valid until the thread's next call. */
UCCL_EP_API const uccl_ep_error *uccl_ep_last_error(void);
/* "E_RANGE" and its one-line meaning, for any status. */
UCCL_EP_API const char *uccl_ep_status_name(int32_t status);
UCCL_EP_API const char *uccl_ep_status_text(int32_t status);
/* "0.1.0", and the version of the backend interface as major << 16 | minor. */
UCCL_EP_API const char *uccl_ep_version(void);
UCCL_EP_API uint32_t uccl_ep_backend_abi(void);

/* ---------------------------------------------------------------------------------------------------- the bootstrap */

/*
 * How ranks find each other before there is a network: an allgather of small byte strings. The library uses it in
 * create and reset alone. Each call is collective and comes in the same order on all ranks. `timeout_ns` must be
 * obeyed; a rank that cannot take part must make the others' call fail. Returns 0, or not 0 with `text` (256 bytes)
 * filled.
 */
typedef struct uccl_ep_bootstrap {
    uint32_t size_of_struct;
    uint32_t rank, size;
    void *context;
    int (*allgather)(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns, char *text);
} uccl_ep_bootstrap;

/* ------------------------------------------------------------------------------------------------- the communicator */

typedef enum uccl_ep_strategy {
    UCCL_EP_STRATEGY_AUTO = 0,                /* the best one that all ranks' NICs promise */
    UCCL_EP_STRATEGY_ORDERED_ATOMIC = 1,      /* an add behind the puts on the same queue */
    UCCL_EP_STRATEGY_SENDER_HOLD = 2,         /* an add once the earlier puts are visible */
    UCCL_EP_STRATEGY_FENCED_ATOMIC = 3,       /* an add that the NIC holds back until they are */
    UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE = 4, /* writes are numbered; the target's proxy adds behind a gapless prefix */
    UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX = 5, /* as SENDER_HOLD, and the target's proxy adds: any NIC can do this */
    UCCL_EP_STRATEGY_SENDER_HOLD_SUM = 6      /* as SENDER_HOLD, and a write of the sum: words of one writer only */
} uccl_ep_strategy;

typedef enum uccl_ep_progress_mode {
    UCCL_EP_PROGRESS_THREADS = 0, /* the library's own proxy threads */
    UCCL_EP_PROGRESS_CALLER = 1   /* nothing moves but inside uccl_ep_progress and waits, or, with `idle`, inside
                                   * uccl_ep_progress_proxy alone: simulators, debuggers */
} uccl_ep_progress_mode;

/*
 * A heap in device memory, and a NIC that does not reach it: its bytes can go through a mirror in host memory, twice
 * the heap's size, by copies of the accelerator's driver at both ends. Needs a strategy in which the target's proxy
 * adds.
 */
typedef enum uccl_ep_staging {
    UCCL_EP_STAGING_AUTO = 0, /* where a rank's NIC needs it; all ranks then do it */
    UCCL_EP_STAGING_OFF = 1,  /* such a heap is refused */
    UCCL_EP_STAGING_ON = 2    /* every heap in device memory */
} uccl_ep_staging;

/* Zero is the default of every field, given in brackets. */
typedef struct uccl_ep_config {
    uint32_t size;                    /* sizeof(uccl_ep_config) */
    uint32_t flags;                   /* UCCL_EP_CONFIG_* */
    const char *backend;              /* path of the backend's shared library: required */
    const char *device;               /* NIC by name [the first usable] */
    const char *backend_options;      /* "key=value,..." [none] */
    uint64_t heap_bytes;              /* required; the same on all ranks; what is allocated is rounded up to pages */
    void *heap;                       /* memory of the caller, also device memory [allocated, zeroed] */
    uint32_t heap_kind;               /* uccl_ep_memory_kind; that of the accelerator, or host [host] */
    int32_t heap_dmabuf_fd;           /* [0: none]; otherwise the descriptor + 1 */
    uint32_t signals;                 /* words of the signal array [1024] */
    uint32_t channels;                /* [1] at most 64 a proxy */
    uint32_t ring_log2;               /* slots of a ring, log2 [11] 1..16 */
    uint32_t granularity;             /* 16 or 4 [16] */
    uint32_t proxies;                 /* threads; channels are dealt out among them [1] */
    uint32_t strategy;                /* uccl_ep_strategy [auto] */
    uint32_t progress;                /* uccl_ep_progress_mode [threads] */
    uint32_t max_inflight_peer;       /* operations [the NIC's limit, at most 1023; fewer for more than 64 ranks] */
    uint32_t max_inflight;            /* operations a proxy [the NIC's limit, at most 8192] */
    uint32_t max_message_bytes;       /* longest operation [the NIC's limit] */
    uint64_t max_inflight_bytes;      /* a proxy [the NIC's limit, at most 64 MiB]; at most 2 GiB */
    uint64_t timeout_ns;              /* of waits [30 s] */
    uint64_t peer_timeout_ns;         /* no completion for so long: the peer is lost [10 s]; at most a day */
    uint64_t bootstrap_timeout_ns;    /* each collective step of create and reset [60 s] */
    uint64_t first_ticket;            /* of every channel [0]; tests of wrap-arounds start near one */
    const char *cpus;                 /* "2,5-7": proxy i runs on the i-th; must lie in the allowed set [not pinned] */
    uint32_t spin;                    /* idle passes before a proxy yields [256] */
    uint32_t idle_sleep_ns;           /* longest sleep of an idle proxy, below 1 s [100 us]; see docs/performance.md */
    uint64_t (*clock)(void *context); /* monotonic nanoseconds [CLOCK_MONOTONIC] */
    void *clock_context;
    void (*log)(void *context, uint32_t level, const char *text); /* [none] */
    void *log_context;
    const char *refusal;    /* this rank cannot take part, and why: create fails on all ranks with this text [none] */
    int32_t refusal_status; /* as which error [E_INVALID] */
    /* PROGRESS_CALLER: every turn of every wait is a call of this, and waits move nothing themselves [none] */
    void (*idle)(void *context);
    void *idle_context;
    /* Of the operations to each peer, 64 bits; the default lies just below 2^32. Tests start near another wrap. */
    uint64_t first_sequence;
    const char *accelerator;     /* path of its library: what kernels post and read with [none] */
    uint32_t accelerator_device; /* its index [0] */
    /* Channels 0 .. device_channels - 1 are posted to by kernels (uccl_ep_comm_device), the others by the host [0] */
    uint32_t device_channels;
    /* uccl_ep_memory_kind of the signal words: of a heap in device memory (MEM-3), where kernels alone read them, and
     * no CPU adds to them; or host [host] */
    uint32_t signals_kind;
    uint32_t staging; /* uccl_ep_staging; the same on all ranks [auto] */
} uccl_ep_config;

#define UCCL_EP_CONFIG_HUGE_PAGES_ON (1u << 0) /* or fail [where the machine has them to spare] */
#define UCCL_EP_CONFIG_HUGE_PAGES_OFF (1u << 1)
#define UCCL_EP_CONFIG_LOCK_MEMORY (1u << 2) /* keep the heap resident, or fail */
#define UCCL_EP_CONFIG_NO_MERGE (1u << 3)    /* never join adjacent puts into one operation */
/* Every signal word has one rank that adds to it (any of its channels): what SENDER_HOLD_SUM needs. */
#define UCCL_EP_CONFIG_SINGLE_WRITER (1u << 4)

/* Collective. On an error *comm is NULL and nothing remains; a rank's failure fails all of them, each told which rank
 * and why. */
UCCL_EP_API uccl_ep_status uccl_ep_comm_create(const uccl_ep_config *config, const uccl_ep_bootstrap *bootstrap,
                                               uccl_ep_comm **comm);
/* Local. Ends waits (E_ABORTED), on the device too, stops the proxies, closes endpoints, then frees memory. Peers that
 * still put to this rank see it as lost: a program calls quiet and a barrier first (MEM-2). Kernels that use the
 * communicator must have ended: what they read goes. NULL is allowed. */
UCCL_EP_API void uccl_ep_comm_destroy(uccl_ep_comm *comm);
/* Any thread, any time; final. All waits of this rank end with E_ABORTED within milliseconds (ABT-1). */
UCCL_EP_API uccl_ep_status uccl_ep_abort(uccl_ep_comm *comm, const char *reason);

/* What was agreed. */
typedef struct uccl_ep_comm_info {
    uint32_t size_of_struct;
    uint32_t rank, size;
    uint32_t channels, proxies, signals, granularity, ring_log2;
    uint32_t strategy;    /* uccl_ep_strategy, never AUTO */
    uint32_t backend_abi; /* major << 16 | minor that the backend needs */
    uint64_t heap_bytes;
    void *heap;                   /* CPU pointer, or device pointer */
    const uint64_t *signal_words; /* see signal_banks; read with acquire; NULL: in device memory */
    char backend[64], backend_version[64];
    char strategy_reason[256];  /* why this one */
    char library[256];          /* path of the backend */
    uccl_ep_device_info device; /* with the promises of the opened device */
    uint32_t signal_banks;      /* signal_words is [signal_banks][signals]: a signal's value is the sum over them */
    uint32_t window;            /* strategies with a mailbox: operations outstanding to a peer at most; others: 0 */
    uint32_t heap_kind;         /* uccl_ep_memory_kind */
    uint32_t device_channels;   /* channels 0 .. device_channels - 1 are the device's */
    char accelerator[64];       /* "cuda", "hip", "emulation", or empty */
    uint32_t staged;            /* not 0: the heap in device memory is staged through host memory */
    char staged_reason[224];    /* and why */
} uccl_ep_comm_info;
UCCL_EP_API uccl_ep_status uccl_ep_comm_query(uccl_ep_comm *comm, uccl_ep_comm_info *info);

/* ------------------------------------------------------------------------------------------------------- the device */

/* What kernels are given, by value: see device.h. Current until destroy. */
UCCL_EP_API uccl_ep_status uccl_ep_comm_device(uccl_ep_comm *comm, uccl_ep_device_comm *out);
/*
 * Take the first failure that a kernel met. OK: there was none. Otherwise its status, with channel, ticket and a text
 * in uccl_ep_last_error(); where the failed command left a record (uccl_ep_errors), that is the error, and its status.
 * `out` (may be NULL) is what the kernel wrote. Then the next failure can be kept. A look costs little; taking one may
 * wait for kernels that run. Any thread, also after an abort.
 */
UCCL_EP_API uccl_ep_status uccl_ep_comm_device_error(uccl_ep_comm *comm, uccl_ep_device_error *out);

/* ---------------------------------------------------------------------------------------------------------- posting */

/*
 * Each takes the channel, posts, and gives the ticket (of the last command if one was not enough; `ticket` may be
 * NULL). They wait for space in the ring until the timeout; who gives up after tickets were reserved closes the channel
 * (PRG-3). Refused at once, with nothing posted: E_RANGE, E_ALIGNMENT, E_INVALID, E_CLOSED, E_ABORTED, E_PEER_LOST
 * (target closed on this channel, ERR-6). Lengths are any size_t up to the heap: commands that hold at most 8 MiB
 * (granularity 16) or 2 MiB (4) are made of them.
 */
UCCL_EP_API uccl_ep_status uccl_ep_put(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint64_t local,
                                       uint64_t remote, uint64_t bytes, uint64_t timeout_ns, uint64_t *ticket);
UCCL_EP_API uccl_ep_status uccl_ep_signal(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint32_t slot,
                                          uint64_t add, uint64_t timeout_ns, uint64_t *ticket);
UCCL_EP_API uccl_ep_status uccl_ep_put_signal(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint64_t local,
                                              uint64_t remote, uint64_t bytes, uint32_t slot, uint64_t add,
                                              uint64_t timeout_ns, uint64_t *ticket);
/* n commands on consecutive tickets, all or none (PUB-2). n <= slots of the ring. Every command must fit as it is. */
UCCL_EP_API uccl_ep_status uccl_ep_post_many(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_command *commands,
                                             uint32_t n, uint64_t timeout_ns, uint64_t *ticket);
/* Post two words as they are: for producers with an encoder of their own. Nothing is checked here; the proxy does
 * (ERR-4). */
UCCL_EP_API uccl_ep_status uccl_ep_post_raw(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_words *words,
                                            uint32_t n, uint64_t timeout_ns, uint64_t *ticket);
/* The ring itself, for producers that post by ring.h. That of a device channel has addresses of the device. */
UCCL_EP_API uccl_ep_status uccl_ep_channel_ring(uccl_ep_comm *comm, uint32_t channel, uccl_ep_ring *ring);

/* ---------------------------------------------------------------------------------------------------------- waiting */

/* Until `ticket` and all before it on the channel are complete (QUI-1), or their sources free (QUI-0). */
UCCL_EP_API uccl_ep_status uccl_ep_wait(uccl_ep_comm *comm, uint32_t channel, uint64_t ticket, uint64_t timeout_ns);
UCCL_EP_API uccl_ep_status uccl_ep_wait_source(uccl_ep_comm *comm, uint32_t channel, uint64_t ticket,
                                               uint64_t timeout_ns);
/* The same for all that was posted to the channel, or to all channels (UCCL_EP_NO_CHANNEL), before the call. */
UCCL_EP_API uccl_ep_status uccl_ep_quiet(uccl_ep_comm *comm, uint32_t channel, uint64_t timeout_ns);
UCCL_EP_API uccl_ep_status uccl_ep_quiet_source(uccl_ep_comm *comm, uint32_t channel, uint64_t timeout_ns);
/* Until the signal word is at or past `value` (as a distance: (int64_t)(word - value) >= 0). `source`: the rank whose
 * loss ends the wait with E_PEER_LOST; UCCL_EP_ANY_RANK: the loss of any rank that was not excluded does. A rank that
 * closed its communicator sends nothing more: to a wait it is lost (MEM-2: barrier before closing). `seen` (may be
 * NULL): the word. */
UCCL_EP_API uccl_ep_status uccl_ep_wait_signal(uccl_ep_comm *comm, uint32_t slot, uint64_t value, uint32_t source,
                                               uint64_t timeout_ns, uint64_t *seen);
/* Acquire load of a signal word: the sum over the banks of its adding agents (SIG-6). */
UCCL_EP_API uccl_ep_status uccl_ep_read_signal(uccl_ep_comm *comm, uint32_t slot, uint64_t *value);
/* UCCL_EP_PROGRESS_CALLER: one pass of every proxy. *worked: not zero if something moved. */
UCCL_EP_API uccl_ep_status uccl_ep_progress(uccl_ep_comm *comm, uint32_t *worked);
/* UCCL_EP_PROGRESS_CALLER: one pass of one proxy. Nothing while a reset holds the proxies still. One thread at a time,
 * and not while another call of the communicator runs outside `idle`. */
UCCL_EP_API uccl_ep_status uccl_ep_progress_proxy(uccl_ep_comm *comm, uint32_t proxy, uint32_t *worked);

/* --------------------------------------------------------------------------------------------------------- failures */

/* Copies up to `max` records, oldest first, into errors; *total: how many there are. Records are kept until their peer
 * is excluded or reset, 256 at most; later ones are counted in uccl_ep_stats.errors. */
UCCL_EP_API uccl_ep_status uccl_ep_errors(uccl_ep_comm *comm, uccl_ep_error *errors, uint32_t max, uint32_t *total);
/* bitmap[(size + 63) / 64]: ranks that are lost. */
UCCL_EP_API uccl_ep_status uccl_ep_lost(uccl_ep_comm *comm, uint64_t *bitmap, uint32_t words);
/* Go on without `rank` (ERR-5): its errors no longer end waits, nothing is sent to it any more, also if it was healthy.
 */
UCCL_EP_API uccl_ep_status uccl_ep_exclude(uccl_ep_comm *comm, uint32_t rank);
/*
 * Collective over all ranks of the communicator, all of them alive (ERR-6). Every (channel, target) that was closed on
 * any rank gets a new incarnation: what was queued or in flight is given up, connections are made anew, nothing of the
 * old incarnation is applied afterwards. Signal words of all ranks then start again at zero, as after create. Errors
 * are cleared. No kernel that uses the communicator runs meanwhile. Where progress is the caller's (without `idle`),
 * threads of the library's own stand in from when this rank is done until all are.
 */
UCCL_EP_API uccl_ep_status uccl_ep_reset(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap);

/* -------------------------------------------------------------------------------------------------------- observing */

typedef struct uccl_ep_channel_stats {
    uint64_t posted, taken, source, complete; /* tickets, counted from first_ticket; of a device channel `posted` is
                                               * what can be seen in its slots */
    uint64_t failed;                          /* commands that failed or were refused */
    uint64_t bytes;                           /* of puts taken */
    uint64_t signals;                         /* taken */
    uint64_t state;                           /* uccl_ep_channel_state */
} uccl_ep_channel_stats;

typedef struct uccl_ep_proxy_stats {
    uint64_t passes, idle_passes, sleeps;  /* of the loop */
    uint64_t commands, operations, merged; /* taken; submitted to the NIC for them; puts that went along with a
                                            * neighbour */
    uint64_t submits, completions;
    uint64_t backpressure;   /* submits that the NIC did not take whole */
    uint64_t flow_stops;     /* batches cut by our own limits */
    uint64_t holds;          /* signals that waited for earlier puts */
    uint64_t stale;          /* completions of nothing outstanding: duplicates, or of an older incarnation */
    uint64_t longest_gap_ns; /* between two passes: a descheduled or blocked proxy */
    uint64_t inflight_peak;  /* operations */
    uint64_t inflight_bytes_peak;
    uint64_t cpu;                   /* that it ran on last */
    uint64_t applied;               /* signals that this proxy added for others: strategies with a mailbox */
    uint64_t returns;               /* return words written to sources */
    uint64_t flushes;               /* reads, or local flushes, that made bytes visible (MEM-3) */
    uint64_t staged_out, staged_in; /* bytes copied from and to a heap that is staged */
} uccl_ep_proxy_stats;

UCCL_EP_API uccl_ep_status uccl_ep_channel_query(uccl_ep_comm *comm, uint32_t channel, uccl_ep_channel_stats *stats);
UCCL_EP_API uccl_ep_status uccl_ep_proxy_query(uccl_ep_comm *comm, uint32_t proxy, uccl_ep_proxy_stats *stats);

/* What a flight recorder holds of one command. */
typedef struct uccl_ep_trace_entry {
    uint64_t time_ns;
    uint64_t ticket;
    uccl_ep_words words;
    uint32_t channel;
    uint32_t reserved;
} uccl_ep_trace_entry;
/* The last commands that a proxy took, oldest first; *n in: room, out: written. A moving target: entries taken while it
 * is read may be missing. */
UCCL_EP_API uccl_ep_status uccl_ep_trace(uccl_ep_comm *comm, uint32_t proxy, uccl_ep_trace_entry *entries, uint32_t *n);

/* What waits on whom, as text for a person: one line per channel and peer with something outstanding, and one per
 * thread that waits for a signal. */
UCCL_EP_API uccl_ep_status uccl_ep_report(uccl_ep_comm *comm, char *text, uint32_t bytes);

/* Open a backend library far enough to learn who it is and list its NICs: *n in: room, out: there are. `name`: 64
 * bytes. */
UCCL_EP_API uccl_ep_status uccl_ep_backend_probe(const char *path, char *name, char *version,
                                                 uccl_ep_device_info *devices, uint32_t *n);

#ifdef __cplusplus
}
#endif
#endif
