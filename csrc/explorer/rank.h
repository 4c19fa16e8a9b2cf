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

/* Parts of the world, of every rank: itself; the core that serves it; memory of control messages; its NIC's buffer,
 * order of arrival and completion queues; its signal words, by the low bits of their numbers. And the history, for the
 * model's judgement. */
#define ACTOR(i) (1ull << (i))
#define CORE(i) (1ull << (MAX_RANKS + (i)))
#define CONTROL(i) (1ull << (2 * MAX_RANKS + (i)))
#define BUFFER(i) (1ull << (3 * MAX_RANKS + (i)))
#define ORDER(i) (1ull << (4 * MAX_RANKS + (i)))
#define QUEUE(i) (1ull << (5 * MAX_RANKS + (i)))
#define WORD(i, slot) (1ull << (6 * MAX_RANKS + 8 * (i) + ((slot)&7)))
#define ACTORS (ACTOR(MAX_RANKS) - 1)
#define EVERYTHING UINT64_MAX
_Static_assert(6 * MAX_RANKS + 8 * MAX_RANKS <= 56, "HISTORY is the first bit behind them");

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
    uint64_t seen_hash; /* over its events in the history, but their times */
    uint64_t posted[MAX_CHANNELS],
        waited[2][MAX_CHANNELS]; /* commands; so many of them are known to be complete, free */
    bool gave_up;                /* after a failure: waits for nobody any more */
} actor;

enum { ACTOR_RUNS = 0, ACTOR_QUIETS, ACTOR_DONE };

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
    const run_guide *guide;
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
    bool ended, began;                    /* began: the communicators are up */
    bool ran;                             /* a rank or a proxy had its turn in this step */
    footprint met;
    uint64_t events_seen;
    uint32_t slots[MAX_RANKS];           /* words of each rank that somebody adds to, by bit */
    uint64_t word[MAX_RANKS][MAX_SLOTS]; /* what they hold */
    uint32_t step;                       /* number of the one at hand */
    /* Would a wait end now, for completion or for sources, and since which step. */
    struct ends {
        bool now;
        uint32_t since;
    } channel_ends[MAX_RANKS][MAX_CHANNELS][2], label_ends[MAX_LABELS][2];
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
uint32_t actor_step(void *context); /* an actor's turn, as the simulator wants it */

#endif
