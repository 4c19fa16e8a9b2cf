/* SPDX-License-Identifier: Apache-2.0
 *
 * block.c: the lanes of a block take turns, part, and meet again.
 *
 * A lane runs until it waits for something; the scheduler, on the thread's own stack, decides who goes on once a whole
 * warp waits (emulation.h says in which order). That is reconvergence: lanes that took two ways through a branch are
 * together again at the next place where being together means something. A lane waits in its own words (lane.state), so
 * that a block in which nobody can go on says of each lane what it waits for.
 */
#define _GNU_SOURCE
#include "block.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fiber.h"

#define STACK_BYTES (256u << 10) /* address space; what is not used costs nothing */
#define CANARY 0x5ca1ab1e0ddba11ull
#define IDLE_YIELDS 100u
#define IDLE_NAP_NS 20000l

typedef enum lane_state { RUNS, SHUFFLE, BALLOT, SYNC_WARP, ACTIVE, SYNC_BLOCK, RELAX, RETURNED } lane_state;
static const char *const state_names[] = {"runs",   "shuffle",    "ballot", "sync_warp",
                                          "active", "sync_block", "relax",  "returned"};

typedef struct lane {
    uccl_ep_emulation_lane view;
    fiber fiber;
    struct block *block;
    lane_state state;
    uint32_t from;
    uint64_t mask, value, result;
    const void *where; /* the caller's next instruction: lanes that wait at one place came the same way */
} lane;

typedef struct warp {
    lane *lanes;
    uint32_t n; /* that it has */
    char order; /* an address: memory is ordered among lanes that meet here */
} warp;

typedef struct block {
    launch *launch;
    uint32_t index;
    lane *lanes;
    warp *warps;
    uint32_t n_warps;
    char *stacks;
    void *shared;
    fiber_home home;
    lane *current;
    uint64_t random; /* 0: none is wanted */
    bool failed;
    char order; /* addresses, as in a warp: of its barrier, */
    char ended; /* and of what lanes did before their thread takes their memory back */
} block;

static _Thread_local block *here;

/* ------------------------------------------------------------------------------------------------- seen from a lane */

uccl_ep_emulation_lane *uccl_ep_emulation_self(void) {
    return &here->current->view;
}

/* What a lane has fenced is over once it may have learnt something new: shuffle and ballot order no memory. */
static void wait_for(lane_state state, const void *where) {
    lane *me = here->current;
    me->state = state;
    me->where = where;
    if (state != SHUFFLE && state != BALLOT) me->view.fenced = 0;
    fiber_release(&here->ended); /* it may be its last turn */
    fiber_leave(&here->home, &me->fiber);
}

static void meet(lane_state state, uint64_t mask, const void *where) {
    here->current->mask = mask;
    wait_for(state, where);
}

uint64_t uccl_ep_emulation_active(void) {
    wait_for(ACTIVE, __builtin_return_address(0));
    return here->current->result;
}

uint64_t uccl_ep_emulation_shuffle(uint64_t mask, uint64_t value, uint32_t from) {
    here->current->value = value;
    here->current->from = from;
    meet(SHUFFLE, mask, __builtin_return_address(0));
    return here->current->result;
}

uint64_t uccl_ep_emulation_ballot(uint64_t mask, int predicate) {
    here->current->value = predicate != 0;
    meet(BALLOT, mask, __builtin_return_address(0));
    return here->current->result;
}

void uccl_ep_emulation_sync_warp(uint64_t mask) {
    lane *me = here->current;
    warp *w = &here->warps[me->view.thread / me->view.width];
    fiber_release(&w->order);
    meet(SYNC_WARP, mask, __builtin_return_address(0));
    fiber_acquire(&w->order);
}

void uccl_ep_emulation_sync_block(void) {
    fiber_release(&here->order);
    wait_for(SYNC_BLOCK, __builtin_return_address(0));
    fiber_acquire(&here->order);
}

void uccl_ep_emulation_relax(void) {
    wait_for(RELAX, __builtin_return_address(0));
}

uint64_t uccl_ep_emulation_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* --------------------------------------------------------------------------------------------------------- failures */

static bool has_mask(const lane *l) {
    return l->state == SHUFFLE || l->state == BALLOT || l->state == SYNC_WARP;
}

static bool alike(const lane *a, const lane *b) {
    if (a->state != b->state || (has_mask(a) && a->mask != b->mask)) return false;
    return a->state == RETURNED || a->where == b->where;
}

/* A text that grows as long as it fits. */
typedef struct text {
    size_t used;
    char at[4096];
} text;

__attribute__((format(printf, 2, 3))) static void say(text *t, const char *form, ...) {
    va_list arguments;
    va_start(arguments, form);
    const int n = vsnprintf(t->at + t->used, sizeof t->at - t->used, form, arguments);
    va_end(arguments);
    const size_t left = sizeof t->at - 1 - t->used;
    t->used += (size_t)n < left ? (size_t)n : left;
}

static void say_place(text *t, const void *where) {
    Dl_info info;
    if (!dladdr(where, &info)) return;
    const char *name = info.dli_sname ? info.dli_sname : info.dli_fname;
    const void *start = info.dli_sname ? info.dli_saddr : info.dli_fbase;
    say(t, " at %s+0x%zx", name, (size_t)((const char *)where - (const char *)start));
}

static void say_lanes(text *t, const lane *first, uint32_t n) {
    if (n > 1)
        say(t, "lanes %u-%u: ", first->view.lane, first->view.lane + n - 1);
    else
        say(t, "lane %u: ", first->view.lane);
    say(t, "%s", state_names[first->state]);
    if (has_mask(first)) say(t, "(mask 0x%llx)", (unsigned long long)first->mask);
    if (first->state != RETURNED) say_place(t, first->where);
}

static void fail(block *b, const text *t) {
    b->failed = true;
    launch_fail(b->launch, UCCL_EP_E_INVALID, t->at);
}

/* "block 0: lanes that can never meet: warp 0: lanes 0-3: sync_warp(mask 0xff) at k+0x12, lanes 4-31: returned; warp 1"
 */
static void fail_apart(block *b) {
    text t = {0};
    say(&t, "block %u: lanes that can never meet: ", b->index);
    for (uint32_t i = 0; i < b->n_warps; i++) {
        const warp *w = &b->warps[i];
        say(&t, "%swarp %u: ", i ? "; " : "", i);
        for (uint32_t k = 0, n; k < w->n; k += n) {
            for (n = 1; k + n < w->n && alike(&w->lanes[k], &w->lanes[k + n]);) n++;
            if (k) say(&t, ", ");
            say_lanes(&t, &w->lanes[k], n);
        }
    }
    fail(b, &t);
}

static void fail_lane(block *b, const lane *l, const char *what) {
    text t = {0};
    say(&t, "block %u, thread %u (lane %u) %s", b->index, l->view.thread, l->view.lane, what);
    if (l->state != RETURNED) say_place(&t, l->where);
    fail(b, &t);
}

void uccl_ep_emulation_unfenced(void) {
    lane *me = here->current;
    me->where = __builtin_return_address(0);
    fail_lane(here, me, "stores a command without a fence since it last waited or met others (PUB-1)");
    /* Nobody comes back to a lane of a block that failed. */
    for (;;) wait_for(RELAX, me->where);
}

/* ----------------------------------------------------------------------------------------------------- the scheduler
 */

static uint64_t draw(block *b) {
    uint64_t z = (b->random += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static void lane_main(void *argument) {
    lane *me = argument;
    me->block->launch->asked->kernel(me->block->launch->asked->args);
    me->state = RETURNED;
}

static void run_lane(block *b, lane *l) {
    b->current = l;
    fiber_enter(&b->home, &l->fiber);
    b->current = NULL;
    if (*(volatile uint64_t *)(void *)l->fiber.stack != CANARY && !b->failed) fail_lane(b, l, "ran over its stack");
}

static uint64_t bit(const lane *l) {
    return 1ull << l->view.lane;
}

/* Lanes of `mask` that have not returned; false if one of them waits for something else than `l`, or with another
 * mask. */
static bool all_here(const warp *w, const lane *l, uint64_t *who) {
    *who = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        const lane *mate = &w->lanes[i];
        if (!(l->mask & bit(mate)) || mate->state == RETURNED) continue;
        if (mate->state != l->state || mate->mask != l->mask) return false;
        *who |= bit(mate);
    }
    return true;
}

/* Let go those whose mates have all come, with what each of them gets. */
static bool release_meetings(block *b, warp *w) {
    bool any = false;
    for (uint32_t i = 0; i < w->n; i++) {
        lane *l = &w->lanes[i];
        uint64_t who, votes = 0;
        if (!has_mask(l)) continue;
        if (!(l->mask & bit(l))) {
            fail_lane(b, l, "is not in the mask that it waits with");
            return true;
        }
        if (!all_here(w, l, &who)) continue;
        for (uint32_t k = 0; k < w->n; k++)
            if (who >> k & w->lanes[k].value & 1) votes |= 1ull << k;
        for (uint32_t k = 0; k < w->n; k++) {
            lane *mate = &w->lanes[k];
            if (!(who >> k & 1)) continue;
            if (mate->state == SHUFFLE) {
                if (mate->from >= w->n || !(who >> mate->from & 1)) {
                    fail_lane(b, mate, "shuffles from a lane that takes no part");
                    return true;
                }
                mate->result = w->lanes[mate->from].value;
            } else {
                mate->result = votes;
            }
        }
        for (uint32_t k = 0; k < w->n; k++)
            if (who >> k & 1) w->lanes[k].state = RUNS;
        any = true;
    }
    return any;
}

/* Lanes at one active() go on together: all of them, or, drawn, two parts of them. */
static bool release_active(block *b, warp *w) {
    bool any = false;
    for (uint32_t i = 0; i < w->n; i++) {
        const void *where = w->lanes[i].where;
        if (w->lanes[i].state != ACTIVE) continue;
        uint64_t together = 0;
        for (uint32_t k = i; k < w->n; k++)
            if (w->lanes[k].state == ACTIVE && w->lanes[k].where == where) together |= 1ull << k;
        if (b->random && draw(b) % 4 == 0) {
            const uint64_t part = together & draw(b);
            if (part) together = part;
        }
        for (uint32_t k = i; k < w->n; k++) {
            if (!(together >> k & 1)) continue;
            w->lanes[k].result = together;
            w->lanes[k].state = RUNS;
            any = true;
        }
    }
    return any;
}

static bool release_all(warp *w, lane_state state) {
    bool any = false;
    for (uint32_t i = 0; i < w->n; i++) {
        if (w->lanes[i].state != state) continue;
        w->lanes[i].state = RUNS;
        any = true;
    }
    return any;
}

typedef enum turn_result { STUCK, IDLE, MOVED } turn_result;

/* All lanes of a warp until each waits; then those that can go on may. Lanes that relax are the last: what they wait
 * for may be a mate's doing. */
static turn_result run_warp(block *b, warp *w) {
    const uint32_t first = b->random ? (uint32_t)(draw(b) % w->n) : 0;
    for (uint32_t i = 0; i < w->n && !b->failed; i++) {
        lane *l = &w->lanes[(first + i) % w->n];
        if (l->state == RUNS) run_lane(b, l);
    }
    if (b->failed || release_meetings(b, w) || release_active(b, w)) return MOVED;
    return release_all(w, RELAX) ? IDLE : STUCK;
}

static bool at_barrier(const block *b, uint32_t *alive) {
    bool all = true;
    *alive = 0;
    for (uint32_t i = 0; i < b->launch->threads; i++) {
        *alive += b->lanes[i].state != RETURNED;
        all &= b->lanes[i].state == RETURNED || b->lanes[i].state == SYNC_BLOCK;
    }
    return all && *alive;
}

static void schedule(block *b) {
    for (uint32_t idle = 0; !b->failed && !atomic_load_explicit(&b->launch->over, memory_order_relaxed);) {
        turn_result best = STUCK;
        const uint32_t first = b->random ? (uint32_t)(draw(b) % b->n_warps) : 0;
        for (uint32_t i = 0; i < b->n_warps && !b->failed; i++) {
            const turn_result result = run_warp(b, &b->warps[(first + i) % b->n_warps]);
            if (result > best) best = result;
        }
        if (best == STUCK && !b->failed) {
            uint32_t alive;
            if (at_barrier(b, &alive)) {
                for (uint32_t i = 0; i < b->n_warps; i++) release_all(&b->warps[i], SYNC_BLOCK);
                best = MOVED;
            } else if (!alive) {
                return;
            } else {
                fail_apart(b);
            }
        }
        /* All that is left waits for other blocks, or for the host: those need the processor. */
        idle = best == IDLE ? idle + 1 : 0;
        if (idle > IDLE_YIELDS)
            nanosleep(&(struct timespec){0, IDLE_NAP_NS}, NULL);
        else if (idle)
            sched_yield();
    }
}

/* ------------------------------------------------------------------------------------------------------- its memory */

static bool block_open(block *b, launch *l) {
    const uint32_t width = l->asked->warp_size;
    *b = (block){.launch = l, .n_warps = (l->threads + width - 1) / width};
    b->lanes = calloc(l->threads, sizeof *b->lanes);
    b->warps = calloc(b->n_warps, sizeof *b->warps);
    b->shared = aligned_alloc(64, (l->asked->shared_bytes + 127) & ~(uint64_t)63);
    void *stacks = mmap(NULL, (size_t)l->threads * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    b->stacks = stacks == MAP_FAILED ? NULL : stacks;
    return b->lanes && b->warps && b->shared && b->stacks;
}

static void block_close(block *b) {
    if (b->stacks) munmap(b->stacks, (size_t)b->launch->threads * STACK_BYTES);
    free(b->shared);
    free(b->warps);
    free(b->lanes);
}

static bool block_start(block *b, uint32_t index) {
    const launch *l = b->launch;
    const uint32_t width = l->asked->warp_size;
    b->index = index;
    b->random = l->asked->seed ? l->asked->seed * 0xd1342543de82ef95ull + index + 1 : 0;
    bool ok = true;
    for (uint32_t i = 0; i < l->threads; i++) {
        lane *me = &b->lanes[i];
        warp *w = &b->warps[i / width];
        const uint32_t left = l->threads - i / width * width;
        w->lanes = &b->lanes[i / width * width];
        w->n = left < width ? left : width;
        *me = (lane){.block = b,
                     .view = {.lane = i % width,
                              .width = width,
                              .thread = i,
                              .threads = l->threads,
                              .block = index,
                              .blocks = l->blocks,
                              .present = ~0ull >> (64 - w->n),
                              .shared = b->shared}};
        char *stack = b->stacks + (size_t)i * STACK_BYTES;
        *(uint64_t *)(void *)stack = CANARY;
        ok &= fiber_prepare(&me->fiber, stack, STACK_BYTES, lane_main, me);
    }
    return ok;
}

void blocks_run(launch *l) {
    block b;
    if (!block_open(&b, l)) {
        launch_fail(l, UCCL_EP_E_NO_MEMORY, "no memory for the lanes of a block");
        block_close(&b);
        return;
    }
    here = &b;
    while (!atomic_load(&l->over)) {
        const uint32_t index = atomic_fetch_add(&l->next_block, 1);
        if (index >= l->blocks) break;
        if (block_start(&b, index))
            schedule(&b);
        else
            launch_fail(l, UCCL_EP_E_NO_MEMORY, "no memory for the lanes of a block");
        fiber_acquire(&b.ended);
        for (uint32_t i = 0; i < l->threads; i++) fiber_forget(&b.lanes[i].fiber);
    }
    here = NULL;
    block_close(&b);
}
