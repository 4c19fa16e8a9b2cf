/* SPDX-License-Identifier: Apache-2.0
 *
 * explore.h: the explorer's ways to look at many runs: random, exhaustive, wrong programs, replay and shrinking.
 */
#ifndef UCCL_EP_EXPLORER_EXPLORE_H
#define UCCL_EP_EXPLORER_EXPLORE_H

#include "run.h"

#define KNOBS_TEXT 1024u
#define MAX_SCRIPT (1u << 16)

/* draw.c: what a seed of random exploration means: a program, and how the NICs behave. A function of profile, seed and
 * `only` (a program to take instead; NULL: any). */
typedef struct drawn {
    program program;
    char knobs[KNOBS_TEXT];
    char faults[KNOBS_TEXT];
    bool gentle;       /* of the faults: none of them may make a command fail */
    bool calls_fail;   /* of the faults: one may make a create or reset fail */
    uint32_t strategy; /* uccl_ep_strategy; where the NIC does not do for it, auto */
} drawn;
#define DRAW_FAULTS (1u << 0) /* one seed in four gets faults */
#define DRAW_NIC (1u << 1)    /* the NIC is nobody's: every knob is drawn, and what it promises follows from them */
/* Not 0: error (256 bytes). */
int draw(const uccl_ep_sim *sim, const char *profile, uint64_t seed, const program *only, uint32_t how, drawn *out,
         char *error);
/* Is there such a NIC? If not: text (256 bytes). */
bool knobs_can_be(const uccl_ep_sim *sim, const char *profile, const char *knobs, char *text);
/* Run it, with the drawn strategy if the NIC does for it; *o then holds the one that was taken. */
void run_drawn(runner *r, const drawn *d, run_options *o, run_result *result);
/* A program by name of a builtin, or by text. Not 0: error (256 bytes). */
int program_find(program *p, const char *name, char *error);

static inline bool run_is_bad(const run_result *result) {
    return result->outcome != RUN_ALLOWED;
}

/* shrink.c: a smaller program, then a shorter schedule, that end as `result` did. Changes *what and *o, whose choices
 * point into `script` afterwards. Returns how many runs it took. */
typedef struct shrunk {
    uint32_t script[MAX_SCRIPT];
    uint32_t n_script, deviations; /* choices that are not the first alternative */
    uint32_t runs;
} shrunk;
void shrink(runner *r, drawn *what, run_options *o, run_result *result, shrunk *s, uint32_t most_runs);

/* exhaustive.c: bounds are of each run. */
typedef struct exhaust_options {
    uint64_t most_runs;
    uint32_t duplicates, lost_doorbells; /* at most so many */
    bool reduce;
    bool through_claims; /* a claim that fails ends only its run */
} exhaust_options;
typedef struct seen_set { /* outcomes, by hash: open addressing */
    uint64_t *table, size, used;
} seen_set;
typedef struct exhausted {
    uint64_t runs, blocked, steps_deepest;
    uint64_t claims;
    uint32_t turned; /* if not complete: so many races at most are the other way round than in two first runs */
    bool too_large;  /* more steps, or more alternatives of one, than there is room for */
    seen_set seen;   /* the caller frees its table */
    bool complete;   /* all schedules within the bounds, up to those that differ in the order of what does not meet */
    run_result bad;  /* the first one; outcome RUN_ALLOWED: none */
    uint32_t n_script;
    uint32_t script[MAX_SCRIPT];
} exhausted;
/* Not 0: no memory. */
int exhaust(runner *r, const program *p, const run_options *o, const exhaust_options *options, exhausted *out);
int set_add(seen_set *set, uint64_t hash); /* 1: new, 0: known, -1: no memory */
bool set_has(const seen_set *set, uint64_t hash);

#endif
