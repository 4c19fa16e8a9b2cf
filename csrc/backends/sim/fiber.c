/* SPDX-License-Identifier: Apache-2.0
 *
 * fiber.c: threads of the caller's that run one at a time.
 *
 * One of them holds the baton. It runs the scheduler, and with it proxies, NICs and time, inside its own yield, and
 * hands the baton to the fiber whose turn comes next. The first is let go once all ranks have entered, so that the
 * order does not hang on the machine's scheduler.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "world.h"

#define CLOSING_STEP_NS 10000000ull

/* The fiber that this thread is, of one world at a time. */
static _Thread_local struct {
    world *w;
    struct runner *fiber;
} self;

/* With the lock. */
static void hand_over(world *w, struct runner *next) {
    w->baton = next;
    if (next) sem_post(&next->turn);
}

/* Without the lock: who hands over must not be waited for by who gets it. */
static void wait_for_baton(struct runner *me) {
    while (sem_wait(&me->turn) && errno == EINTR) {
    }
}

static uint32_t wanted(const world *w) {
    return w->knobs.fibers && w->knobs.fibers < w->ranks ? (uint32_t)w->knobs.fibers : w->ranks;
}

/* By rank, and within one by entry. */
static void insert(world *w, struct runner *me) {
    if (w->n_fibers == w->room_fibers) {
        const uint32_t room = w->room_fibers ? 2 * w->room_fibers : 64;
        struct runner **grown = realloc(w->fibers, room * sizeof(*grown));
        if (!grown) {
            fputs("sim: out of memory for a fiber\n", stderr);
            abort();
        }
        w->fibers = grown;
        w->room_fibers = room;
    }
    bool first = true;
    for (uint32_t i = 0; i < w->n_fibers; i++) first &= w->fibers[i]->rank != me->rank;
    w->ranks_entered += first;
    uint32_t at = w->n_fibers++;
    for (; at && w->fibers[at - 1]->rank > me->rank; at--) w->fibers[at] = w->fibers[at - 1];
    w->fibers[at] = me;
}

void fiber_enter(world *w, uint32_t rank) {
    pthread_mutex_lock(&w->lock);
    struct runner *me = runner_add(w, rank, RUNNER_FIBER);
    if (!me) {
        fputs("sim: out of memory for a fiber\n", stderr);
        abort();
    }
    sem_init(&me->turn, 0, 0);
    me->entered = w->entries++;
    w->uses++;
    insert(w, me);
    self.w = w;
    self.fiber = me;
    if (!w->started && w->ranks_entered >= wanted(w)) {
        w->started = true;
        for (uint32_t i = 0; i < w->n_fibers; i++) make_ready(w, w->fibers[i]);
        bool idle;
        struct runner *first = schedule(w, false, &idle);
        not_ready(w, first);
        hand_over(w, first);
    } else if (w->started && !w->baton) {
        hand_over(w, me);
    } else if (w->started) {
        make_ready(w, me); /* by a thread that another fiber started, and waits for */
    }
    pthread_mutex_unlock(&w->lock);
    wait_for_baton(me);
}

/* The next fiber that may run. Called with the baton, and with the lock. */
static struct runner *next_fiber(world *w) {
    if (w->closing) return w->n_fibers ? w->fibers[0] : NULL;
    bool any = false;
    for (uint32_t i = 0; i < w->n_fibers; i++) {
        const struct rank *rank = &w->rank[w->fibers[i]->rank];
        any |= !w->fibers[i]->dead && (!rank->paused || rank->paused_until != UINT64_MAX);
    }
    if (!any) return NULL; /* those that are left are dead, or stopped until somebody resumes them */
    bool idle;
    /* Proxies and events run here. Nobody else holds the baton, and who enters or counts waits a little. */
    struct runner *next = schedule(w, false, &idle);
    not_ready(w, next);
    return next;
}

void fiber_yield(void *context) {
    world *w = context;
    if (self.w != w || !self.fiber) {
        /* Not a fiber: the thread that steps the world waits for something. */
        bool idle;
        schedule(w, true, &idle);
        return;
    }
    pthread_mutex_lock(&w->lock);
    struct runner *me = self.fiber;
    if (w->closing) {
        /* Whatever it waits for meets its deadline. */
        vnic_set_now(w->fabric, vnic_now(w->fabric) + CLOSING_STEP_NS);
        pthread_mutex_unlock(&w->lock);
        return;
    }
    w->fibers_moved = true;
    /* It may have posted something. */
    for (struct runner *r = w->rank[me->rank].runners; r; r = r->next_of_rank)
        if (r->kind == RUNNER_PROXY) make_ready(w, r);
    struct runner *next = next_fiber(w);
    if (next == me) {
        pthread_mutex_unlock(&w->lock);
        return;
    }
    w->baton = next;
    pthread_mutex_unlock(&w->lock);
    if (next) sem_post(&next->turn);
    wait_for_baton(me);
}

void fiber_leave(world *w) {
    if (self.w != w || !self.fiber) return;
    pthread_mutex_lock(&w->lock);
    struct runner *me = self.fiber;
    self.w = NULL;
    self.fiber = NULL;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w->n_fibers; i++)
        if (w->fibers[i] != me) w->fibers[kept++] = w->fibers[i];
    w->n_fibers = kept;
    sem_destroy(&me->turn);
    runner_remove(w, me);
    w->fibers_moved = true;
    hand_over(w, next_fiber(w));
    pthread_mutex_unlock(&w->lock);
    world_release(w);
}

uint32_t fiber_count(const world *w) {
    world *counted = (world *)(uintptr_t)w;
    pthread_mutex_lock(&counted->lock);
    const uint32_t n = counted->n_fibers;
    pthread_mutex_unlock(&counted->lock);
    return n;
}

void fibers_go_on(world *w) {
    if (!w->started || w->baton || !w->n_fibers) return;
    pthread_mutex_lock(&w->lock);
    if (!w->baton) hand_over(w, next_fiber(w));
    pthread_mutex_unlock(&w->lock);
}

/* Fibers of dead ranks still sit in their yield: one after the other they may end. */
void fibers_close(world *w) {
    pthread_mutex_lock(&w->lock);
    w->closing = true;
    w->started = true;
    if (!w->baton) hand_over(w, w->n_fibers ? w->fibers[0] : NULL);
    pthread_mutex_unlock(&w->lock);
}
