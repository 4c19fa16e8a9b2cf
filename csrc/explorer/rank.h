/* SPDX-License-Identifier: Apache-2.0
 *
 * rank.h: what run.c and rank.c share: a run in the making, and its ranks.
 */
#ifndef UCCL_EP_EXPLORER_RANK_H
#define UCCL_EP_EXPLORER_RANK_H

#include "coop.h"
#include "run.h"

#define GUARD 4096u /* bytes before and behind every heap, which nothing may touch (MEM-2) */
#define SAMPLE_WORDS 64u
#define ARENA_BYTES (MAX_BYTES + 2 * GUARD)

/* Parts of the world in runner.state: ranks, their NICs, the history and its sights, their bytes. */
#define RANK(i) (1u << (i))
#define NIC(i) (1u << (MAX_RANKS + (i)))
#define EVERYTHING ((1u << (2 * MAX_RANKS)) - 1) /* but bytes and history */
#define HISTORY (3u << (2 * MAX_RANKS))
#define SIGHTS (2 * MAX_RANKS + 1)
#define BYTES_AT(i) (2 * MAX_RANKS + 2 + (i))

typedef struct actor {
    runner *r;
    uint32_t rank;
    uccl_ep_comm *comm;
    uccl_ep_status created;
    char why[256];
    uint64_t *heap;
    uint32_t at;              /* next operation */
    uint32_t seen_errors;     /* records taken into the history */
    uint64_t seen[MAX_SLOTS]; /* last recorded value of a word */
    bool seen_any[MAX_SLOTS];
    uint32_t barriers, state;
    uint64_t barrier_began;
    bool gave_up; /* after a failure: waits for nobody any more */
} actor;

enum { ACTOR_RUNS = 0, ACTOR_QUIETS, ACTOR_MEETS, ACTOR_DONE };

typedef struct label_state {
    bool posted;
    uint32_t rank, channel;
    uint64_t ticket;
    uint32_t bytes;
    uint64_t sample[SAMPLE_WORDS]; /* the first words of its source when it was posted */
} label_state;

struct runner {
    void *library;
    const uccl_ep_sim *sim;
    char backend[512];
    coop *coop;
    uccl_ep_model *model;
    char *arenas;
    run_watch watch;
    void *watch_context;
    /* of the run at hand */
    const program *p;
    const run_options *o;
    run_result *result;
    uccl_ep_sim_world *world;
    uint32_t number;
    uint32_t heap_bytes;
    actor actors[MAX_RANKS];
    label_state labels[MAX_LABELS];
    uint64_t now; /* of the history */
    uint32_t stamps;
    uint64_t history_hash;
    bool signalled[MAX_RANKS][MAX_SLOTS]; /* somebody added to that word, or may have */
    bool ended;
    uint64_t state[RUN_PARTS]; /* what touched each rank, its NIC and the history: see exhaustive.c */
    uint64_t flushes_seen;
    bool ran; /* a rank or a proxy had its turn in this step */
    uint64_t events_seen;
    uint64_t progress; /* turns in which something was done */
    /* kept of the last one */
    uccl_ep_sim_choice *choices;
    uint32_t n_choices, room_choices;
    char history[RUN_HISTORY], trace[RUN_HISTORY];
    uccl_ep_model_verdict verdict;
};

void finish(runner *r, run_outcome outcome, const char *clause, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
uint64_t mix(uint64_t h, uint64_t what);
void record(runner *r, uccl_ep_model_event e, const uint64_t *words);
void record_read(actor *a, uint32_t offset, uint32_t bytes);
void record_signal(actor *a, uint32_t slot, uint64_t value);
void record_failures(actor *a);
void touch(runner *r, uint64_t label, uint32_t parts);
void bytes_seen(runner *r, uint32_t rank);
uint32_t actor_step(void *context); /* an actor's turn, as the simulator wants it */

#endif
