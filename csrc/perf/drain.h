/* SPDX-License-Identifier: Apache-2.0
 *
 * drain.h: threads that empty rings and check what they find: the CPU's side of `uccl-ep perf gpu`.
 *
 * Purpose. To measure how fast producers can hand commands over, against a consumer that does as little as possible:
 * it takes, checks and counts. Every command is a stamp of device/perf.h, and has to be the next one of its producer;
 * so one that is torn, lost, doubled or out of order is found, and named.
 *
 * A run: drain_expect() says what will come, the producers post, drain_finish() waits until it is there. Time counts
 * from the end of drain_expect() to the pass that took the last command. (From the first command on would be shorter,
 * and wrong where a thread comes late: it then finds full rings, and takes in no time what was long in coming.)
 *
 * Threads: one caller. Rings outlive the drain. Errors: status, and a text where there is room for one.
 */
#ifndef UCCL_EP_PERF_DRAIN_H
#define UCCL_EP_PERF_DRAIN_H

#include "device/perf.h"
#include "uccl_ep/ring.h"

#define DRAIN_MAX_RINGS 256u
#define DRAIN_MAX_THREADS 64u
#define DRAIN_MAX_PRODUCERS (1u << PERF_PRODUCER_BITS) /* of a ring */

#define DRAIN_API __attribute__((visibility("default")))

typedef struct drain drain;

/* The CPU's view of a ring. It takes the place of a proxy: nobody else writes its counters. */
typedef struct drain_ring {
    const uccl_ep_slot *slots;
    uccl_ep_ring_counters *counters;
    uint64_t *echo; /* may be NULL: gets the number of commands taken from this ring */
    uint32_t log2_slots, reserved;
} drain_ring;

typedef struct drain_config {
    uint32_t threads;
    uint32_t batch;     /* most commands of one ring before the next one's turn */
    uint32_t producers; /* of a ring, at most */
    uint32_t reserved;
    uint64_t pause_ns;   /* after each batch: a consumer that is too slow */
    const int32_t *cpus; /* [threads] one for each thread, or NULL */
} drain_config;

/* What can be wrong with a command. */
typedef enum drain_fault {
    DRAIN_MALFORMED, /* the codec refuses it */
    DRAIN_STRANGE,   /* a legal command that no producer of this ring posts */
    DRAIN_TORN,      /* its words belong to two commands */
    DRAIN_LOST,      /* earlier ones of its producer have not come: lost, or overtaken */
    DRAIN_DOUBLED,   /* its producer's commands of this number came before: doubled, or overtaken */
    DRAIN_TOO_MANY,  /* commands beyond what the run was to have */
    DRAIN_FAULTS
} drain_fault;

typedef struct drain_result {
    uint64_t commands; /* taken */
    uint64_t missing;  /* that did not come in time */
    uint64_t ns;
    uint64_t batches; /* non-empty ones */
    uint64_t faults[DRAIN_FAULTS];
    char text[256]; /* empty, or what is wrong, with the first faulty command */
} drain_result;

/* `cpus` a thread cannot run on are E_SYSTEM. `config` and `rings` are copied. */
DRAIN_API uccl_ep_status drain_open(const drain_config *config, const drain_ring *rings, uint32_t n, drain **out);
DRAIN_API void drain_close(drain *d);

/* Producer p of `producers` posts to ring p % n, as its producer p / n, `commands` numbered from `sequence` on. On
 * return the threads know. */
DRAIN_API uccl_ep_status drain_expect(drain *d, uint32_t producers, uint64_t sequence, uint64_t commands);
/* OK: all came, all was right. E_DEADLINE: not all came. E_MALFORMED: something was wrong. */
DRAIN_API uccl_ep_status drain_finish(drain *d, uint64_t timeout_ns, drain_result *result);

/*
 * The other way round: add 1 to `word`, `n` times, each time waiting until `answer` counts it. samples[i] is the time
 * from the add to the answer in ns. The words start equal. E_DEADLINE if one answer takes longer than timeout_ns.
 */
DRAIN_API uccl_ep_status drain_ping(uint64_t *word, const uint64_t *answer, uint64_t n, uint64_t timeout_ns,
                                    uint64_t *samples);

#endif
