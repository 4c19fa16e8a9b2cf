/* SPDX-License-Identifier: Apache-2.0
 *
 * internal.h: what the model's parts share.
 *
 * judge() works in three steps: timeline.c puts posts in order and finds out by when each was free, complete, failed or
 * settled; signals.c decodes the signal words, which tells by when each signal was applied; bytes.c compares every word
 * that was read with what could be there. Each reports what it finds through report(); the earliest sight wins.
 */
#ifndef UCCL_EP_MODEL_INTERNAL_H
#define UCCL_EP_MODEL_INTERNAL_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#define NEVER UINT64_MAX
#define NOBODY UINT32_MAX

/* How the model knows that a post had taken effect. */
enum how { HOW_UNKNOWN = 0, HOW_WAIT, HOW_SIGNAL };

typedef struct post {
    uint32_t event;
    uint32_t rank, channel, target, op, slot;
    uint32_t epoch;  /* resets of its rank before it */
    uint32_t stream; /* its (rank, channel, target, epoch); signals: and place there */
    uint32_t place;
    uint64_t ticket, local, remote, bytes, add, begin, end;
    bool maybe;       /* the call failed late: it may have been posted */
    bool barred;      /* posted although (channel, target) was known to be closed: may have no effect (ERR-6) */
    uint32_t closure; /* the failure that barred it */
    bool failed;      /* a record says so: may have taken effect or not */
    uint64_t free_by; /* the earliest end of a wait that says so; NEVER: nobody knows */
    uint64_t complete_by;
    uint64_t settled_by; /* complete, or of an older incarnation: nothing of it is placed after this */
    uint64_t seen_by;    /* bytes visible or add applied, as waits and signals tell */
    uint32_t free_event, complete_event, settled_event, seen_event;
    uint32_t seen_signal; /* HOW_SIGNAL: the post whose signal tells */
    enum how seen_how;
} post;

typedef struct wait {
    uint32_t event, rank, channel;
    uint64_t ticket, begin, end;
    bool source;
} wait;

/* Posts of one (rank, channel, target, epoch), by ticket: posts[first .. first + n) of the model's order. */
typedef struct stream {
    uint32_t rank, channel, target, epoch;
    uint32_t first, n;
    uint32_t applied; /* signals.c: so many posts from the front have their signals applied, at the time it looks at */
    uint32_t applied_event;
} stream;

struct uccl_ep_model {
    uint32_t ranks, signals;
    uint64_t heap_bytes;
    char error[256];
    uccl_ep_model_event *events;
    uint64_t **words; /* of events that have them */
    uint32_t n_events, room;
    /* of the judgement at hand */
    post *posts;
    uint32_t *order; /* posts by (rank, channel, target, epoch, ticket) */
    uint32_t n_posts;
    stream *streams;
    uint32_t n_streams;
    wait *waits; /* those that succeeded, one channel each */
    uint32_t n_waits;
    uint32_t *resets; /* events, by rank and begin */
    uint32_t n_resets;
    bool out_of_memory;
    bool found;
    uint64_t found_at;
    uccl_ep_model_verdict *verdict;
};

/* Remember this unless something earlier is known. `events` ends with NOBODY. */
void model_report(uccl_ep_model *m, uint32_t outcome, uint64_t at, const char *clause, const uint32_t *events,
                  const char *format, ...) __attribute__((format(printf, 6, 7)));
#define EVENTS(...)                                                                                                    \
    (const uint32_t[]) {                                                                                               \
        __VA_ARGS__, NOBODY                                                                                            \
    }
/* calloc that is remembered when it fails. */
void *model_room(uccl_ep_model *m, size_t n, size_t bytes);

static inline const uccl_ep_model_event *event_of(const uccl_ep_model *m, const post *p) {
    return &m->events[p->event];
}
static inline bool has_bytes(uint32_t op) {
    return op == UCCL_EP_MODEL_PUT || op == UCCL_EP_MODEL_PUT_ADD;
}
static inline bool has_add(uint32_t op) {
    return op == UCCL_EP_MODEL_ADD || op == UCCL_EP_MODEL_PUT_ADD;
}

/* "put 5 of rank 0 (channel 1, ticket 7, to rank 2)" into a buffer of its own: one of four, in turn. */
const char *model_name(const uccl_ep_model *m, const post *p);

/* The epoch in which all of [begin, end] lies at `rank`; false: a reset is in between, or one failed before it. */
bool model_epoch(const uccl_ep_model *m, uint32_t rank, uint64_t begin, uint64_t end, uint32_t *epoch);

bool timeline_build(uccl_ep_model *m);
void timeline_judge(uccl_ep_model *m);
void signals_judge(uccl_ep_model *m);
void bytes_judge(uccl_ep_model *m);
void timeline_free(uccl_ep_model *m);

#endif
