/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h: the contract as a program: given what ranks did and saw, is it allowed?
 *
 * Purpose. A history is a set of events, each with an interval of time. judge() says whether docs/contract.md allows
 * what was seen; if not, the clause, the events and one sentence. docs/model.md tells which clauses, by which rules,
 * and what is left undecided. The model knows the contract alone: no core, no NIC, no simulator.
 *
 * Time. `begin` and `end` are of one clock for all ranks (a simulator's step counter; CLOCK_MONOTONIC within a
 * machine). Event A precedes B only if A.end < B.begin; whatever overlaps may have happened in either order. Barriers,
 * where recorded, check that the clocks of ranks agree at all.
 *
 * Soundness. A rule fires only if no run that keeps the contract gives this history, whatever was not recorded: a wait
 * that nobody recorded proves nothing. So record everything that is *done* (posts, stores, resets), and as much as you
 * like of what is *seen*.
 *
 * Values. Bytes are judged in words of 8 at multiples of 8. A store of stamp `id` puts stamp(id, k) into its k-th word;
 * other contents are given word by word. Signals should be chosen so that the value of a word tells which adds it holds
 * (bit fields per source and channel); what cannot be told apart is bounded.
 *
 * Threads: a history is used by one thread at a time. Errors: add() returns not 0 and keeps the reason (error()).
 */
#ifndef UCCL_EP_MODEL_H
#define UCCL_EP_MODEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_MODEL_API __attribute__((visibility("default")))
#define UCCL_EP_MODEL_ALL UINT32_MAX       /* wait: all channels; failure: any channel or peer */
#define UCCL_EP_MODEL_NO_TICKET UINT64_MAX /* wait: all that was posted before it began */
#define UCCL_EP_MODEL_MAX_EVENTS (1u << 24)

typedef enum uccl_ep_model_kind {
    UCCL_EP_MODEL_POST = 1,    /* rank, channel, peer (target), op, ticket, status; puts: local, remote, bytes; signals:
                                  slot, value (the add) */
    UCCL_EP_MODEL_WAIT = 2,    /* rank, channel or ALL, ticket or NO_TICKET, source, status */
    UCCL_EP_MODEL_SIGNAL = 3,  /* rank saw `value` in its word `slot` */
    UCCL_EP_MODEL_READ = 4,    /* rank saw words from `local` on, `bytes` of them; bytes beyond the heap are guards */
    UCCL_EP_MODEL_STORE = 5,   /* rank itself wrote `bytes` at `local`: stamps of id `value`, or words */
    UCCL_EP_MODEL_FAILURE = 6, /* rank found a record of failure: channel or ALL, peer or ALL, ticket or NO_TICKET */
    UCCL_EP_MODEL_EXCLUDE = 7, /* rank goes on without peer */
    UCCL_EP_MODEL_RESET = 8,   /* rank took part in the collective reset number `value` (1, 2, ...) */
    UCCL_EP_MODEL_BARRIER = 9  /* rank took part in barrier number `value`: none left before all had come */
} uccl_ep_model_kind;

/* Operations as command.h numbers them. */
#define UCCL_EP_MODEL_PUT 1u
#define UCCL_EP_MODEL_ADD 2u
#define UCCL_EP_MODEL_PUT_ADD 3u
#define UCCL_EP_MODEL_FLUSH 4u

typedef struct uccl_ep_model_event {
    uint32_t kind; /* uccl_ep_model_kind */
    uint32_t rank;
    uint64_t begin, end;
    int32_t status; /* as status.h: 0 is success. A post that was refused with nothing posted has no effect; one that
                     * ended in E_DEADLINE may have one */
    uint32_t channel;
    uint32_t peer;
    uint32_t op;
    uint32_t slot;
    uint32_t source; /* wait: for sources only (QUI-0) */
    uint64_t ticket;
    uint64_t local, remote, bytes;
    uint64_t value;
} uccl_ep_model_event;

typedef enum uccl_ep_model_outcome {
    UCCL_EP_MODEL_ALLOWED = 0,
    UCCL_EP_MODEL_FORBIDDEN = 1, /* the library or the NIC broke `clause` */
    UCCL_EP_MODEL_PROGRAM = 2,   /* nothing forbidden was seen, but the program broke its own duty under `clause` */
    UCCL_EP_MODEL_INVALID = 3    /* the history cannot be: clocks that disagree, tickets given out twice */
} uccl_ep_model_outcome;

#define UCCL_EP_MODEL_VERDICT_EVENTS 8u

typedef struct uccl_ep_model_verdict {
    uint32_t outcome; /* uccl_ep_model_outcome */
    uint32_t n_events;
    uint32_t
        events[UCCL_EP_MODEL_VERDICT_EVENTS]; /* numbers of events, as add() counted them: cause first, sight last */
    char clause[8];
    char text[512];
    /* What the verdict rests on. */
    uint64_t words_judged, signals_judged;
    uint64_t undecided; /* signal reads that were only bounded */
} uccl_ep_model_verdict;

typedef struct uccl_ep_model uccl_ep_model;

/* NULL: no memory, or a size that is none (ranks 1 .. 4096). */
UCCL_EP_MODEL_API uccl_ep_model *uccl_ep_model_new(uint32_t ranks, uint64_t heap_bytes, uint32_t signals);
UCCL_EP_MODEL_API void uccl_ep_model_free(uccl_ep_model *model);
/* Forget all events. */
UCCL_EP_MODEL_API void uccl_ep_model_clear(uccl_ep_model *model);
/* `words`: bytes / 8 of them for READ (required) and STORE (NULL: stamps); copied. Returns 0, or not 0. */
UCCL_EP_MODEL_API int uccl_ep_model_add(uccl_ep_model *model, const uccl_ep_model_event *event, const uint64_t *words);
/* Many at once: the words of events[i] begin at words[first[i]]; UINT64_MAX: it has none. Stops at the first that is
 * refused. */
UCCL_EP_MODEL_API int uccl_ep_model_add_all(uccl_ep_model *model, const uccl_ep_model_event *events, uint32_t n,
                                            const uint64_t *words, const uint64_t *first);
UCCL_EP_MODEL_API const char *uccl_ep_model_error(const uccl_ep_model *model);
UCCL_EP_MODEL_API uint32_t uccl_ep_model_count(const uccl_ep_model *model);
/* The event `index` in words; returns the bytes needed. */
UCCL_EP_MODEL_API uint32_t uccl_ep_model_describe(const uccl_ep_model *model, uint32_t index, char *text,
                                                  uint32_t bytes);
/* Judge all events added so far. Returns the outcome, or -1 if memory ran out. */
UCCL_EP_MODEL_API int uccl_ep_model_judge(uccl_ep_model *model, uccl_ep_model_verdict *verdict);
UCCL_EP_MODEL_API uint64_t uccl_ep_model_stamp(uint32_t id, uint32_t index);

#ifdef __cplusplus
}
#endif
#endif
