/* SPDX-License-Identifier: Apache-2.0
 *
 * run.h: one run of a litmus program on real communicators over virtual NICs, and what the model says of it.
 *
 * A run is a function of (program, profile, knobs, faults, seed, scripted choices). Ranks are step functions of the
 * simulator; what they do and see becomes a history, one moment an event.
 */
#ifndef UCCL_EP_EXPLORER_RUN_H
#define UCCL_EP_EXPLORER_RUN_H

#include "backends/sim/sim.h"
#include "model/model.h"
#include "program.h"
#include "uccl_ep/uccl_ep.h"

typedef enum run_outcome {
    RUN_ALLOWED = 0,
    RUN_FORBIDDEN, /* the model says so */
    RUN_STUCK,     /* nothing moves any more and a rank still waits (PRG-1, SIG-1) */
    RUN_ERROR,     /* a call failed though no fault was injected */
    RUN_CLAIM,     /* a claim of the program does not hold, which the contract does not promise */
    RUN_REFUSED,   /* the communicator does not come up */
    RUN_ENDLESS,   /* more steps than allowed */
    RUN_BROKEN     /* the explorer's own: a program that breaks its duty without saying so, a history that cannot be */
} run_outcome;
const char *run_outcome_name(uint32_t outcome);

typedef struct run_options {
    const char *backend; /* path of libuccl_ep_backend_sim.so */
    const char *profile;
    const char *knobs;  /* changes to the profile; NULL: none */
    const char *faults; /* NULL: none */
    bool gentle;        /* they may make nothing fail */
    bool calls_fail;    /* one of them may make a create or reset fail */
    uint64_t seed;
    const uint32_t *choices;
    uint32_t n_choices;
    bool first_later;
    uint32_t strategy; /* uccl_ep_strategy */
    uint32_t trace_lines;
    uint64_t max_steps; /* 0: a million */
} run_options;

#define RUN_HISTORY 32768u

typedef struct run_result {
    uint32_t outcome;
    char clause[8];
    char text[512];
    uint64_t hash;        /* over what the world did, what ranks saw, and all memory at the end */
    uint64_t memory_hash; /* of the last alone */
    uint64_t seen_hash;   /* of how it ended, what every rank did and saw in its own order, and all memory at the end */
    uint64_t steps, events, operations, now_ns;
    uint32_t strategy;
    uccl_ep_status refused_by;
    uint32_t start_choices; /* made before the ranks began */
    uint32_t end_choices;   /* and until all of them were done */
    uint32_t n_choices;     /* of runner->choices */
    bool program_breach;    /* the model: the program broke a duty */
    uint32_t failures;      /* records that ranks found */
    uint32_t resets;        /* with the program run once more behind it */
    uint32_t retries;       /* of a create that a fault made fail */
} run_result;

typedef struct runner runner;

/* What a step of the world met: parts of it, by bit, and payload, by address (from the lowest byte to behind the
 * highest; both 0: none). Two steps commute if no part and no byte that one of them writes is met by the other; adding
 * to a part is writing to it in a way in which order among those that add makes no difference.
 *
 * A wait for what was posted meets nothing: it ends once the last of what it waits for has happened, and whatever else
 * happens before or behind it is nothing to it. So it `needs` those steps, by their numbers. */
#define HISTORY (1ull << 56) /* the part in which what the model is told meets: a sight reads it, a wait adds to it */
#define MOST_NEEDS 16u
typedef struct footprint {
    uint64_t reads, adds, writes;
    uint32_t number; /* of the step, or of the last one of those that were joined */
    uint32_t n_needs, needs[MOST_NEEDS];
    uintptr_t read_from, read_to, written_from, written_to, stored_from, stored_to;
    uint64_t request; /* of a NIC's event; 0: none */
    bool idle;        /* a turn that found nothing to do: it changed nothing */
    bool time;        /* nothing could be done, and time passed */
} footprint;

/* Who decides, where the simulator has a choice: see uccl_ep_sim_config.choose. `watch` is called behind every step
 * once the ranks have begun; it returns false to end the run there (RUN_ALLOWED, nothing judged). `ended`: all ranks
 * are done, and what is left arrives. */
typedef struct run_guide {
    uint32_t (*choose)(void *context, uint32_t kind, const uint64_t *names, uint32_t n);
    bool (*watch)(void *context, const footprint *met, bool ended);
    void *context;
} run_guide;

runner *runner_new(const char *backend, char *text); /* NULL and why */
void runner_free(runner *r);
const uccl_ep_sim *runner_sim(const runner *r);
void runner_guide(runner *r, const run_guide *guide); /* NULL: none; it stays the caller's */

void run_program(runner *r, const program *p, const run_options *o, run_result *result);

/* Of the last run, until the next: choices; the history and, if traced, the NICs' events as text. */
const uccl_ep_sim_choice *run_choices(const runner *r, uint32_t *n);
const char *run_history(runner *r);
const char *run_trace(runner *r);
bool run_began(const runner *r); /* the communicators are up: choices are the program's from here on */

#endif
