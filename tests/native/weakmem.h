/* SPDX-License-Identifier: Apache-2.0
 *
 * weakmem.h: runs a small concurrent program under the C11 memory model in every way that the model allows.
 *
 * Purpose. A test on a strong machine meets few of the orders that the language allows. This explorer meets all of
 * them, for a program of bounded length: every interleaving, and for every load every store that it may read.
 *
 * The model is the usual operational form of release/acquire C11 with relaxed accesses, fences and plain memory:
 *   - An atomic location keeps its history, all stores in modification order. A thread's view says for each location
 *     how far along the history the thread is. A load may read any store that is not behind its view. A store goes
 *     anywhere after its view, not only at the end: two stores that no synchronisation orders stand in either order.
 *     A read-modify-write stands directly behind the store that it read, and nothing comes between the two.
 *   - A store carries a view. Release: all that its thread has seen. Relaxed: what the thread had seen at its last
 *     release fence. A read-modify-write carries on the view of the store that it read (release sequence). An acquire
 *     load joins the carried view to its thread's; a relaxed load keeps it until the next acquire fence.
 *   - Views also hold vector clocks of plain accesses. Two plain accesses to one location, one of them a write, that
 * the clocks do not order are a data race, which is an error. So a plain read has one possible value. What it cannot
 * show: a load that is overtaken by a later store of its own thread (load buffering; all of C11 that this leaves out
 * needs relaxed or weaker accesses on both sides), and sequentially consistent fences.
 *
 * A program is a list of calls for each thread. A call is a C function that reaches shared memory through wm_load and
 * its sisters only, and otherwise depends on nothing but its argument and the thread's registers. The explorer runs a
 * call from its start against the log of results that it got so far, up to the next operation, which it then decides;
 * code under test thus runs as it is, and a state is plain data that is copied, hashed and compared. A call that
 * returns 0 waits for a condition and is tried again. Such a try changes nothing but what it stored, so tries beyond
 * `retries` are not followed: the thread is then one that waits.
 *
 * States are remembered by a 128-bit hash (two different states that collide would hide one of them; with 10^7 states
 * the odds are 10^-25). Plain accesses and fences concern nobody else's next step and are not interleaved.
 *
 * Errors found: a data race, wm_fail (called by the program), a state in which somebody waits and nobody can go on.
 */
#ifndef UCCL_EP_WEAKMEM_H
#define UCCL_EP_WEAKMEM_H

#include "testing.h"
#include <setjmp.h>
#include <stddef.h>

enum {
    WM_THREADS = 4,
    WM_LOCATIONS = 12,
    WM_PLAINS = 8,
    WM_HISTORY = 12,
    WM_LOG = 8,
    WM_REGISTERS = 2,
    WM_DEPTH = 256
};

typedef struct wm_view {
    uint8_t seen[WM_LOCATIONS]; /* place in the location's history */
    uint8_t clock[WM_THREADS];  /* plain accesses of each thread that happened before */
} wm_view;

typedef struct wm_store_record {
    uint64_t value;
    uint64_t glued; /* a read-modify-write of the store before it */
    wm_view view;
} wm_store_record;

typedef struct wm_location {
    uint64_t count;
    wm_store_record history[WM_HISTORY];
} wm_location;

typedef struct wm_plain {
    uint64_t value, writer;
    uint8_t written, pad[3]; /* the writer's clock */
    uint8_t read[WM_THREADS];
} wm_plain;

typedef struct wm_thread {
    wm_view current, acquired, released; /* acquired: what an acquire fence would add */
    uint64_t reg[WM_REGISTERS];
    uint8_t call, tries, logged, pad[5];
    uint64_t log[WM_LOG]; /* results of the call so far */
} wm_thread;

typedef struct wm_state {
    wm_thread thread[WM_THREADS];
    wm_plain plain[WM_PLAINS];
    wm_location location[WM_LOCATIONS];
} wm_state;

typedef struct wm_step {
    int (*call)(uint64_t *reg, uint64_t argument); /* 1: done, 0: try again */
    uint64_t argument;
    unsigned retries;
} wm_step;

typedef enum wm_kind { WM_LOAD, WM_STORE, WM_ADD, WM_FENCE, WM_READ, WM_WRITE } wm_kind;

typedef struct wm_operation {
    wm_kind kind;
    int order;
    unsigned at; /* location or plain */
    uint64_t value;
} wm_operation;

typedef struct wm_move {
    wm_operation operation;
    unsigned thread, place; /* in the history */
    uint64_t result;
} wm_move;

typedef struct wm_known {
    uint64_t hash[2];
    double executions;
} wm_known;

/* The explorer. One at a time, one thread. */
static struct {
    /* the program */
    unsigned threads, locations, plains;
    const wm_step *steps[WM_THREADS];
    unsigned length[WM_THREADS];
    const void *location_address[WM_LOCATIONS], *plain_address[WM_PLAINS];
    const char *location_name[WM_LOCATIONS];
    wm_state start;
    void (*finish)(const wm_state *end); /* optional: looks at each end, may set wm.error */
    /* the call that is being replayed */
    jmp_buf escape;
    const wm_thread *replayed;
    unsigned replayed_to;
    wm_operation wanted;
    /* learned on the way: which locations a thread uses, and whether there are acquire fences */
    uint32_t uses[WM_THREADS];
    int acquire_fences, learned;
    /* results */
    wm_known *known;
    uint64_t room, states, steps_taken;
    wm_move trace[WM_DEPTH];
    unsigned depth;
    char error[160];
} wm;

/* -------------------------------------------------------------------------------------------- called by the program */

/* The program found that something is wrong. */
_Noreturn static inline void wm_fail(const char *text, uint64_t got, uint64_t expected) {
    snprintf(wm.error, sizeof(wm.error), "%s: 0x%" PRIx64 ", expected 0x%" PRIx64, text, got, expected);
    longjmp(wm.escape, 1);
}

static unsigned wm_find(const void *const *addresses, unsigned count, const void *address) {
    for (unsigned i = 0; i < count; i++) {
        if (addresses[i] == address) return i;
    }
    CHECK(0, "the program uses memory that it did not declare");
    return 0;
}

static uint64_t wm_perform(wm_kind kind, int order, unsigned at, uint64_t value) {
    if (wm.replayed_to < wm.replayed->logged) return wm.replayed->log[wm.replayed_to++];
    wm.wanted = (wm_operation){kind, order, at, value};
    longjmp(wm.escape, 1);
}

static inline uint64_t wm_load(const void *address, int order) {
    return wm_perform(WM_LOAD, order, wm_find(wm.location_address, wm.locations, address), 0);
}
static inline void wm_store(const void *address, uint64_t value, int order) {
    wm_perform(WM_STORE, order, wm_find(wm.location_address, wm.locations, address), value);
}
static inline uint64_t wm_fetch_add(const void *address, uint64_t value, int order) {
    return wm_perform(WM_ADD, order, wm_find(wm.location_address, wm.locations, address), value);
}
static inline void wm_fence(int order) {
    wm_perform(WM_FENCE, order, 0, 0);
}
static inline uint64_t wm_read(const void *address) {
    return wm_perform(WM_READ, 0, wm_find(wm.plain_address, wm.plains, address), 0);
}
static inline void wm_write(const void *address, uint64_t value) {
    wm_perform(WM_WRITE, 0, wm_find(wm.plain_address, wm.plains, address), value);
}

/* ----------------------------------------------------------------------------------------------- declares a program */

static void wm_begin(void) {
    free(wm.known);
    memset(&wm, 0, sizeof(wm));
}

static void wm_atomic(const void *address, uint64_t initial, const char *name) {
    CHECK(wm.locations < WM_LOCATIONS, "raise WM_LOCATIONS");
    wm.location_address[wm.locations] = address;
    wm.location_name[wm.locations] = name;
    wm.start.location[wm.locations].count = 1;
    wm.start.location[wm.locations++].history[0].value = initial;
}

static void wm_nonatomic(const void *address) {
    CHECK(wm.plains < WM_PLAINS, "raise WM_PLAINS");
    wm.plain_address[wm.plains++] = address;
}

static void wm_spawn(const wm_step *steps, unsigned length) {
    CHECK(wm.threads < WM_THREADS, "raise WM_THREADS");
    wm.steps[wm.threads] = steps;
    wm.length[wm.threads++] = length;
}

/* ------------------------------------------------------------------------------------------------- the memory model */

static int wm_acquires(int order) {
    return order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL;
}
static int wm_releases(int order) {
    return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL;
}

static void wm_join(wm_view *view, const wm_view *with) {
    for (unsigned i = 0; i < wm.locations; i++) {
        if (with->seen[i] > view->seen[i]) view->seen[i] = with->seen[i];
    }
    for (unsigned i = 0; i < wm.threads; i++) {
        if (with->clock[i] > view->clock[i]) view->clock[i] = with->clock[i];
    }
}

static void wm_see(wm_thread *thread, unsigned location, uint64_t place) {
    if (thread->current.seen[location] < place) thread->current.seen[location] = (uint8_t)place;
    if (wm.acquire_fences) wm_join(&thread->acquired, &thread->current);
}

static void wm_take_in(wm_thread *thread, const wm_store_record *record, int order) {
    if (wm_acquires(order)) wm_join(&thread->current, &record->view);
    if (wm.acquire_fences) wm_join(&thread->acquired, &record->view);
}

/* Apply `change` to the place of `location` in every view there is. */
static void wm_renumber(wm_state *s, unsigned location, uint8_t (*change)(uint8_t place, uint64_t by), uint64_t by) {
    for (unsigned t = 0; t < wm.threads; t++) {
        wm_view *views[] = {&s->thread[t].current, &s->thread[t].acquired, &s->thread[t].released};
        for (unsigned i = 0; i < 3; i++) views[i]->seen[location] = change(views[i]->seen[location], by);
    }
    for (unsigned l = 0; l < wm.locations; l++) {
        for (uint64_t i = 0; i < s->location[l].count; i++) {
            uint8_t *place = &s->location[l].history[i].view.seen[location];
            *place = change(*place, by);
        }
    }
}
static uint8_t wm_make_room(uint8_t place, uint64_t at) {
    return (uint8_t)(place + (place >= at));
}
static uint8_t wm_drop(uint8_t place, uint64_t count) {
    return (uint8_t)(place > count ? place - count : 0);
}

/* Put a store of `thread` at `place`, carrying `view` too. */
static void wm_insert(wm_state *s, unsigned t, unsigned location, uint64_t place, uint64_t value, int order,
                      const wm_view *carried) {
    wm_location *l = &s->location[location];
    const wm_view inherited = carried ? *carried : (wm_view){{0}, {0}};
    CHECK(l->count < WM_HISTORY, "raise WM_HISTORY");
    if (place < l->count) wm_renumber(s, location, wm_make_room, place);
    memmove(&l->history[place + 1], &l->history[place], (l->count - place) * sizeof(l->history[0]));
    l->count++;
    wm_thread *thread = &s->thread[t];
    wm_see(thread, location, place);
    wm_store_record *record = &l->history[place];
    *record = (wm_store_record){value, carried != NULL, wm_releases(order) ? thread->current : thread->released};
    wm_join(&record->view, &inherited);
    if (record->view.seen[location] < place) record->view.seen[location] = (uint8_t)place;
}

/* A plain access; 0 if it races. */
static int wm_touch(wm_state *s, unsigned t, const wm_operation *o, uint64_t *result) {
    wm_plain *p = &s->plain[o->at];
    wm_view *view = &s->thread[t].current;
    int ordered = !p->written || p->written <= view->clock[p->writer];
    const uint8_t now = ++view->clock[t];
    if (wm.acquire_fences) s->thread[t].acquired.clock[t] = now;
    if (o->kind == WM_WRITE) {
        for (unsigned i = 0; i < wm.threads; i++) ordered &= p->read[i] <= view->clock[i];
        p->value = o->value;
        p->writer = t;
        p->written = now;
        memset(p->read, 0, sizeof(p->read)); /* this write stands for them: who is after it is after them */
    } else {
        p->read[t] = now;
    }
    *result = p->value;
    return ordered;
}

/* How many places of the history the operation has to choose from, from `*first` on. */
static uint64_t wm_choices(const wm_state *s, unsigned t, const wm_operation *o, uint64_t *first) {
    *first = 0;
    if (o->kind > WM_ADD) return 1;
    const uint64_t seen = s->thread[t].current.seen[o->at];
    *first = seen + (o->kind == WM_STORE);
    return s->location[o->at].count - seen;
}

/* Perform the operation of thread t at `place`. 0: not possible there, or an error was found. */
static int wm_apply(wm_state *s, unsigned t, const wm_operation *o, uint64_t place) {
    wm_thread *thread = &s->thread[t];
    wm_location *l = &s->location[o->at];
    uint64_t result = 0;
    if (o->kind <= WM_ADD && !(wm.uses[t] >> o->at & 1)) wm.uses[t] |= 1u << o->at, wm.learned = 1;
    switch (o->kind) {
    case WM_LOAD:
        result = l->history[place].value;
        wm_see(thread, o->at, place);
        wm_take_in(thread, &l->history[place], o->order);
        break;
    case WM_STORE:
        if (place < l->count && l->history[place].glued) return 0;
        wm_insert(s, t, o->at, place, o->value, o->order, NULL);
        break;
    case WM_ADD:
        if (place + 1 < l->count && l->history[place + 1].glued) return 0;
        result = l->history[place].value;
        wm_take_in(thread, &l->history[place], o->order);
        wm_insert(s, t, o->at, place + 1, result + o->value, o->order, &l->history[place].view);
        break;
    case WM_FENCE:
        if (wm_acquires(o->order)) {
            if (!wm.acquire_fences) wm.acquire_fences = wm.learned = 1;
            thread->current = thread->acquired;
        }
        if (wm_releases(o->order)) thread->released = thread->current;
        break;
    case WM_READ:
    case WM_WRITE:
        if (!wm_touch(s, t, o, &result)) {
            snprintf(wm.error, sizeof(wm.error), "data race: plain %s of location %u by thread %u",
                     o->kind == WM_READ ? "read" : "write", o->at, t);
        }
        break;
    }
    CHECK(thread->logged < WM_LOG, "raise WM_LOG");
    thread->log[thread->logged++] = result;
    wm.trace[wm.depth - 1] = (wm_move){*o, t, (unsigned)place, result};
    return !wm.error[0];
}

/* Forget stores that nobody can read or stand before any more; states that differ in them only are then the same. */
static void wm_forget(wm_state *s) {
    for (unsigned at = 0; at < wm.locations; at++) {
        wm_location *l = &s->location[at];
        uint64_t dead = l->count - 1;
        for (unsigned t = 0; t < wm.threads; t++) {
            const wm_thread *thread = &s->thread[t];
            if (thread->call == wm.length[t] || !(wm.uses[t] >> at & 1)) continue;
            if (thread->current.seen[at] < dead) dead = thread->current.seen[at];
        }
        l->history[dead].glued = 0;
        if (!dead) continue;
        memmove(l->history, l->history + dead, (l->count - dead) * sizeof(l->history[0]));
        l->count -= dead;
        wm_renumber(s, at, wm_drop, dead);
    }
}

/* -------------------------------------------------------------------------------------------------- the exploration */

typedef enum wm_outcome { WM_WANTS, WM_DONE, WM_AGAIN } wm_outcome;

/* Run the thread's call against its log. WM_WANTS: wm.wanted comes next (or wm.error is set). */
static wm_outcome wm_replay(const wm_thread *thread, const wm_step *step, uint64_t *reg) {
    memcpy(reg, thread->reg, sizeof(thread->reg));
    wm.replayed = thread;
    wm.replayed_to = 0;
    if (setjmp(wm.escape)) return WM_WANTS;
    return step->call(reg, step->argument) ? WM_DONE : WM_AGAIN;
}

/* After an operation: finish the call if that was its last. 0: the thread only waits on this way, or there is an error.
 */
static int wm_settle(wm_state *s, unsigned t) {
    wm_thread *thread = &s->thread[t];
    const wm_step *step = &wm.steps[t][thread->call];
    uint64_t reg[WM_REGISTERS];
    const wm_outcome outcome = wm_replay(thread, step, reg);
    if (outcome == WM_WANTS) return !wm.error[0];
    thread->logged = 0;
    if (outcome == WM_AGAIN) return thread->tries++ < step->retries;
    memcpy(thread->reg, reg, sizeof(reg));
    thread->tries = 0;
    thread->call++;
    return 1;
}

/* Two words a step, each step a bijection of both halves. */
static void wm_mix(uint64_t hash[2], const void *data, size_t words) {
    const char *from = data;
    uint64_t a = hash[0], b = hash[1];
    for (size_t i = 0; i < words; i += 2) {
        uint64_t word[2] = {0, 0};
        memcpy(word, from + 8 * i, i + 1 < words ? 16 : 8);
        a = (a ^ word[0]) * 0x9fb21c651e98df25ull;
        b = (b ^ word[1]) * 0xd6e8feb86659fd93ull;
        a ^= b >> 32 | b << 32;
        b += a >> 29 | a << 35;
    }
    hash[0] = a;
    hash[1] = b;
}

static void wm_hash(const wm_state *s, uint64_t hash[2]) {
    hash[0] = 1;
    hash[1] = 2;
    for (unsigned t = 0; t < wm.threads; t++)
        wm_mix(hash, &s->thread[t], offsetof(wm_thread, log) / 8 + s->thread[t].logged);
    wm_mix(hash, s->plain, wm.plains * sizeof(s->plain[0]) / 8);
    for (unsigned i = 0; i < wm.locations; i++)
        wm_mix(hash, &s->location[i], 1 + s->location[i].count * sizeof(wm_store_record) / 8);
}

/* The entry of a state, or the free one where it belongs (both words zero). */
static wm_known *wm_lookup(wm_known *table, uint64_t room, const uint64_t hash[2]) {
    uint64_t i = hash[0] & (room - 1);
    while ((table[i].hash[0] | table[i].hash[1]) && (table[i].hash[0] != hash[0] || table[i].hash[1] != hash[1]))
        i = (i + 1) & (room - 1);
    return &table[i];
}

static void wm_remember(const uint64_t hash[2], double executions) {
    if (2 * ++wm.states > wm.room) {
        const uint64_t room = 2 * wm.room;
        wm_known *table = calloc(room, sizeof(*table));
        CHECK(table, "out of memory for %" PRIu64 " states", wm.states);
        for (uint64_t i = 0; i < wm.room; i++) {
            if (wm.known[i].hash[0] | wm.known[i].hash[1]) *wm_lookup(table, room, wm.known[i].hash) = wm.known[i];
        }
        free(wm.known);
        wm.known = table;
        wm.room = room;
    }
    *wm_lookup(wm.known, wm.room, hash) = (wm_known){{hash[0], hash[1]}, executions};
}

/* The parts of a state that mean something: most histories are short. */
static void wm_copy(wm_state *to, const wm_state *from) {
    memcpy(to->thread, from->thread, wm.threads * sizeof(from->thread[0]));
    memcpy(to->plain, from->plain, wm.plains * sizeof(from->plain[0]));
    for (unsigned i = 0; i < wm.locations; i++) {
        to->location[i].count = from->location[i].count;
        memcpy(to->location[i].history, from->location[i].history, from->location[i].count * sizeof(wm_store_record));
    }
}

/* How many executions lead from `s` to the end of all threads. Stops at the first error, with wm.trace leading to it.
 */
static double wm_explore(const wm_state *s) {
    uint64_t hash[2];
    wm_hash(s, hash);
    const wm_known *known = wm_lookup(wm.known, wm.room, hash);
    if (known->hash[0] | known->hash[1]) return known->executions;
    CHECK(wm.depth < WM_DEPTH, "raise WM_DEPTH");

    wm_operation next[WM_THREADS];
    uint32_t runnable = 0, between_calls = 0; /* threads */
    for (unsigned t = 0; t < wm.threads; t++) {
        const wm_thread *thread = &s->thread[t];
        if (thread->call == wm.length[t]) continue;
        uint64_t reg[WM_REGISTERS];
        const wm_outcome outcome = wm_replay(thread, &wm.steps[t][thread->call], reg);
        CHECK(outcome == WM_WANTS && !wm.error[0], "call %u of thread %u ends before its first operation", thread->call,
              t);
        next[t] = wm.wanted;
        runnable |= 1u << t;
        if (!thread->logged) between_calls |= 1u << t;
        if (next[t].kind > WM_ADD) { /* concerns nobody else's next step: it alone is followed */
            runnable = 1u << t;
            between_calls = 0;
            break;
        }
    }
    double executions = runnable ? 0 : 1;
    if (!runnable && wm.finish) wm.finish(s);
    wm.depth++;
    for (unsigned t = 0; t < wm.threads && !wm.learned; t++) {
        if (!(runnable >> t & 1)) continue;
        uint64_t first;
        const uint64_t choices = wm_choices(s, t, &next[t], &first);
        for (uint64_t i = 0; i < choices && !wm.learned; i++) {
            wm_state child;
            wm_copy(&child, s);
            wm.steps_taken++;
            if (wm_apply(&child, t, &next[t], first + i) && wm_settle(&child, t)) {
                wm_forget(&child);
                executions += wm_explore(&child);
            }
            if (wm.error[0]) return 0;
        }
    }
    wm.depth--;
    if (wm.learned) return 0;
    /* Nobody is inside a call, and none that is tried succeeds. (Inside one, only this try of it may be lost.) */
    if (executions == 0 && runnable == between_calls && runnable) {
        snprintf(wm.error, sizeof(wm.error), "stuck: threads 0x%x wait for ever", runnable);
        return 0;
    }
    wm_remember(hash, executions);
    return executions;
}

/* Explore the declared program. The number of executions, or 0 and wm.error. */
static double wm_run(void) {
    double executions;
    do { /* again with what was learned; that happens on the first ways down, or not at all */
        free(wm.known);
        wm.room = 1u << 12;
        wm.known = calloc(wm.room, sizeof(*wm.known));
        CHECK(wm.known, "out of memory");
        wm.learned = 0;
        wm.states = 0;
        wm.depth = 0;
        executions = wm_explore(&wm.start);
    } while (wm.learned && !wm.error[0]);
    return executions;
}

static inline void wm_print_trace(void) {
    static const char *kinds[] = {"load", "store", "add", "fence", "read", "write"};
    for (unsigned i = 0; i < wm.depth; i++) {
        const wm_move *m = &wm.trace[i];
        const wm_operation *o = &m->operation;
        printf("  thread %u: %-5s %-8s value 0x%" PRIx64 " result 0x%" PRIx64 " place %u order %d\n", m->thread,
               kinds[o->kind],
               o->kind <= WM_ADD     ? wm.location_name[o->at]
               : o->kind == WM_FENCE ? ""
                                     : "plain",
               o->value, m->result, m->place, o->order);
    }
}

#endif
