/* SPDX-License-Identifier: Apache-2.0
 *
 * thread_ranks.h: ranks as threads of one process, and the bootstrap that joins them.
 */
#ifndef UCCL_EP_THREAD_RANKS_H
#define UCCL_EP_THREAD_RANKS_H

#include <pthread.h>
#include <sched.h>

#include "calls.h"

#define MAX_THREAD_RANKS 8

typedef struct thread_group {
    uint32_t size;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t arrived, left;
    uint64_t round;
    char *all;
} thread_group;

typedef struct thread_rank {
    thread_group *group;
    uint32_t rank;
} thread_rank;

static int thread_allgather(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns,
                            char *text) {
    thread_rank *r = context;
    thread_group *g = r->group;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ns / 1000000000ull) + 1;
    int failed = 0;
    pthread_mutex_lock(&g->lock);
    while (g->left && !failed) failed = pthread_cond_timedwait(&g->changed, &g->lock, &until);
    if (!failed) {
        if (!g->all) g->all = calloc(g->size, bytes ? bytes : 1);
        memcpy(g->all + (size_t)r->rank * bytes, mine, bytes);
        const uint64_t round = g->round;
        if (++g->arrived == g->size) {
            g->left = g->size;
            g->arrived = 0;
            g->round++;
            pthread_cond_broadcast(&g->changed);
        }
        while (g->round == round && !failed) failed = pthread_cond_timedwait(&g->changed, &g->lock, &until);
        if (!failed) {
            memcpy(all, g->all, (size_t)g->size * bytes);
            if (!--g->left) {
                free(g->all);
                g->all = NULL;
                pthread_cond_broadcast(&g->changed);
            }
        }
    }
    pthread_mutex_unlock(&g->lock);
    if (failed) snprintf(text, 256, "not all of %u threads came", g->size);
    return failed;
}

static inline void thread_barrier(thread_rank *r) {
    char none = 0, all[MAX_THREAD_RANKS], text[256] = "";
    CHECK(!thread_allgather(r, &none, 1, all, 60000000000ull, text), "%s", text);
}

static inline uccl_ep_bootstrap thread_bootstrap(thread_rank *r) {
    return (uccl_ep_bootstrap){sizeof(uccl_ep_bootstrap), r->rank, r->group->size, r, thread_allgather};
}

typedef struct rank_start {
    thread_rank rank;
    void (*body)(thread_rank *rank, void *argument);
    void *argument;
} rank_start;

static void *rank_main(void *argument) {
    rank_start *s = argument;
    s->body(&s->rank, s->argument);
    return NULL;
}

/* Run `body` on `size` ranks and wait for all of them. */
static inline void run_ranks(uint32_t size, void (*body)(thread_rank *, void *), void *argument) {
    thread_group group = {.size = size, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    pthread_t threads[MAX_THREAD_RANKS];
    rank_start starts[MAX_THREAD_RANKS];
    for (uint32_t i = 0; i < size; i++) {
        starts[i] = (rank_start){{&group, i}, body, argument};
        CHECK_EQ(pthread_create(&threads[i], NULL, rank_main, &starts[i]), 0);
    }
    for (uint32_t i = 0; i < size; i++) pthread_join(threads[i], NULL);
}

#endif
