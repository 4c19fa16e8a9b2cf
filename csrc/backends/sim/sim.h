/* SPDX-License-Identifier: Apache-2.0
 *
 * sim.h: the world in which virtual NICs live: one scheduler, one virtual clock, one seed.
 *
 * Purpose. All ranks of a communicator are in this process, and everything that moves (a rank's own code, its proxies,
 * its NIC, faults, time) is a step that the scheduler chooses. So a run is a function of the profile, the seed and the
 * program, and can be replayed bit for bit. libuccl_ep_backend_sim.so exports two symbols: the backend's entry, and
 * uccl_ep_sim_entry, which gives this table.
 *
 * How it is used.
 *   world = sim->world_open(&config, text);            once
 *   in the uccl_ep_config of every rank:
 *     device = the profile's name, backend_options = "world=<world_number>,rank=<rank>[,profile=...][,knob=value...]",
 *     progress = UCCL_EP_PROGRESS_CALLER, clock = sim->now, clock_context = world, idle = sim->yield,
 *     idle_context = world
 *   after create: sim->proxy_add(world, rank, uccl_ep_progress_proxy, comm, i) for every proxy
 *   before destroy: proxy_remove
 *
 * Two ways to be a rank:
 *   - a *fiber*: a thread of the caller's between enter() and leave(). Only the one that holds the baton runs; every
 *     blocking call (a wait, a barrier) must come down to yield(), which lets others run and returns when it is this
 *     fiber's turn again. Code between two yields is atomic.
 *   - a step function (actor_add): called by the scheduler, returns whether it did something. No threads; a million
 *     operations take seconds.
 * One way at a time: communicators come up in fibers, since create waits, and once all fibers have left, step functions
 * may drive them.
 *
 * Time. now() moves only inside step()/yield(): to the next event, once nothing can be done at this moment. A wait that
 * nothing will ever end therefore meets its deadline after a few thousand steps, not after seconds.
 *
 * Threads. A world is used by one thread at a time (the baton's holder). Different worlds may run in parallel.
 *
 * Errors: functions with `text` (256 bytes) return NULL or not 0 and say what is wrong and what is valid.
 */
#ifndef UCCL_EP_SIM_H
#define UCCL_EP_SIM_H

#include <stddef.h>
#include <stdint.h>

#include "uccl_ep/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_SIM_VERSION 2u
#define UCCL_EP_SIM_ENTRY "uccl_ep_sim_entry"
#define UCCL_EP_SIM_MAX_RANKS 4096u

typedef struct uccl_ep_sim_world uccl_ep_sim_world;

typedef struct uccl_ep_sim_config {
    uint32_t size;
    uint32_t ranks;      /* at most UCCL_EP_SIM_MAX_RANKS */
    const char *profile; /* "efa": required; the NIC of every rank unless its options say another */
    const char *knobs;   /* "reorder=100,visible_delay=20": changes to the profile [none]; see knobs() */
    const char *faults;  /* as inject(), ';' between several [none] */
    uint64_t seed;
    /* Scripted choices: the first n_choices choices are taken from here (modulo the number of alternatives), later ones
     * from the seed, or always 0 if `first_later`. What an explorer replays and shrinks. */
    const uint32_t *choices;
    uint32_t n_choices;
    uint32_t first_later;
    uint32_t trace_lines; /* keep so many of the last events as text [0] */
    /* Asked instead of script and seed, with schedule=choice [none]. kind CHOICE_RUN: which of n >= 1 comes next,
     * whoever or whatever it is: equal names are the same rank, proxy or event, in whatever order. Other kinds: n
     * alternatives, without names. Returns a number below n. */
    uint32_t (*choose)(void *context, uint32_t kind, const uint64_t *names, uint32_t n);
    void *choose_context;
} uccl_ep_sim_config;

/* One choice that was made: `taken` of `alternatives` (>= 2; where there is one only, no choice is made). `kind` names
 * what was chosen: who runs next, which event of several at one time, a delay, a fault. */
typedef struct uccl_ep_sim_choice {
    uint32_t taken, alternatives;
    uint32_t kind; /* uccl_ep_sim_choice_kind */
    uint32_t rank; /* whom it concerned */
} uccl_ep_sim_choice;

typedef enum uccl_ep_sim_choice_kind {
    UCCL_EP_SIM_CHOICE_RUN = 1,   /* which fiber, actor or proxy runs */
    UCCL_EP_SIM_CHOICE_EVENT = 2, /* which of the NIC events that may come next comes */
    UCCL_EP_SIM_CHOICE_FAULT = 3, /* whether a random fault strikes */
    UCCL_EP_SIM_CHOICE_NIC = 4    /* anything else a NIC decides: how a payload is cut, how much a poll gives */
} uccl_ep_sim_choice_kind;

/* What a NIC did, in numbers: for tests, and for what docs/performance.md says of 4096 ranks. */
typedef struct uccl_ep_sim_stats {
    uint64_t now_ns, steps, events;
    uint64_t operations, completions, duplicates, immediates, flushes;
    uint64_t backpressure, rnr, faults, errors;
    uint64_t inflight_bytes_peak; /* of one endpoint */
    uint64_t hash;                /* over every event and choice so far: equal hashes, equal runs */
} uccl_ep_sim_stats;

/* In a name that choose() is given: */
#define UCCL_EP_SIM_NAME_TWICE 1ull /* bytes that land a second time */
#define UCCL_EP_SIM_NAME_TURN 2ull  /* a turn of a rank or a proxy; otherwise an event of a NIC */

/* What the NICs met since it was last asked for: steps that do not meet commute. Masks are of ranks, by bit. */
typedef struct uccl_ep_sim_met {
    uint64_t control;             /* memory that the core looks at, which is not that of signals, has changed */
    uint64_t buffer;              /* bytes came into the buffer of its NIC, or left it */
    uint64_t emptied;             /* all that waited there left it, for some region or connection */
    uint64_t order;               /* a NIC that keeps the order of arrival took more, or was emptied */
    uint64_t queue;               /* a completion or an immediate came */
    uintptr_t read_from, read_to; /* addresses of payload that was read, from the lowest to behind the highest */
    uintptr_t written_from, written_to;
    uintptr_t stored_from, stored_to; /* of control messages that were written, rather than added to */
    uint64_t request;                 /* whose event it was; 0: none */
    uint32_t rung;                    /* doorbells of before that had not been seen */
    uint32_t anything;                /* errors, connections: no rule is known */
} uccl_ep_sim_met;

typedef struct uccl_ep_sim {
    uint32_t size, version;
    /* Name and one-line text of profile i; NULL past the last. */
    const char *(*profile)(uint32_t index, const char **text);
    /* Every knob of a profile as "name=value  what it means" lines, into text[bytes]; returns the bytes needed. */
    uint32_t (*knobs)(const char *profile, char *text, uint32_t bytes);

    uccl_ep_sim_world *(*world_open)(const uccl_ep_sim_config *config, char *text);
    void (*world_close)(uccl_ep_sim_world *world); /* after every device of it is closed */
    uint32_t (*world_number)(const uccl_ep_sim_world *world);

    uint64_t (*now)(void *world); /* for uccl_ep_config.clock */
    void (*yield)(void *world);   /* for uccl_ep_config.idle */

    /* Fibers. enter() returns once this thread holds the baton; spawned threads of a rank are fibers, too. The first
     * one gets it when every rank has entered (knob fibers: so many), in the order of ranks. */
    void (*enter)(uccl_ep_sim_world *world, uint32_t rank);
    void (*leave)(uccl_ep_sim_world *world);

    /* A proxy of a rank: pass(context, proxy, &worked), which is uccl_ep_progress_proxy's shape. */
    void (*proxy_add)(uccl_ep_sim_world *world, uint32_t rank,
                      uccl_ep_status (*pass)(void *context, uint32_t proxy, uint32_t *worked), void *context,
                      uint32_t proxy);
    void (*proxy_remove)(uccl_ep_sim_world *world, void *context, uint32_t proxy);
    /* A rank as a step function; returns not 0 if it did something. */
    void (*actor_add)(uccl_ep_sim_world *world, uint32_t rank, uint32_t (*step)(void *context), void *context);
    void (*actor_remove)(uccl_ep_sim_world *world, void *context);

    /* One step of the scheduler: an actor, a proxy, an event, or time. Returns 0 once nothing but deadlines is left to
     * come. Not for worlds with fibers, whose yields do it. */
    uint32_t (*step)(uccl_ep_sim_world *world);

    /* Faults: "name key=value ...", see docs/simulator.md. */
    int (*inject)(uccl_ep_sim_world *world, const char *fault, char *text);
    /* The rank's process and NIC are gone from now on: its fibers, actors and proxies do not run any more. Its fibers'
     * threads stay blocked in yield until world_close: then time runs away, their waits end, and they leave one by one;
     * the world is freed with the last of them and of the devices. The fault peer_return lets a new incarnation in. */
    void (*kill)(uccl_ep_sim_world *world, uint32_t rank);
    void (*pause)(uccl_ep_sim_world *world, uint32_t rank,
                  uint64_t ns); /* SIGSTOP for so long; UINT64_MAX: until resume */
    void (*resume)(uccl_ep_sim_world *world, uint32_t rank);
    int (*alive)(const uccl_ep_sim_world *world, uint32_t rank);

    void (*stats)(const uccl_ep_sim_world *world, uccl_ep_sim_stats *stats);
    /* Choices made so far, the first 2^20 of a run; valid until the next step. */
    const uccl_ep_sim_choice *(*choices)(const uccl_ep_sim_world *world, uint32_t *n);
    /* The last trace_lines events, oldest first, as text; returns the bytes needed. */
    uint32_t (*trace)(const uccl_ep_sim_world *world, char *text, uint32_t bytes);

    /* Any thread: how many threads have called enter() and not yet leave(), those that wait for the baton among them.
     * Who starts a thread goes on once it is counted; otherwise the order of fibers, and with it the run, would hang on
     * the machine's scheduler. */
    uint32_t (*fibers)(const uccl_ep_sim_world *world);
    /* Fault i: its name, the keys that it takes, what it does. Returns 0 past the last. */
    uint32_t (*fault)(uint32_t index, const char **name, const char **keys, const char **text);

    void (*met)(uccl_ep_sim_world *world, uccl_ep_sim_met *met);
} uccl_ep_sim;

const uccl_ep_sim *uccl_ep_sim_entry(void);

#ifdef __cplusplus
}
#endif
#endif
