/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_ranks.h: ranks on virtual NICs, as fibers of a world, and the bootstrap that joins them.
 */
#ifndef UCCL_EP_SIM_RANKS_H
#define UCCL_EP_SIM_RANKS_H

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>

#include "backends/sim/sim.h"
#include "calls.h"

#define SIM_LIBRARY UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_sim.so"
#define SECOND 1000000000ull

/* The table of the very library that the core loads: another copy would have other worlds. */
static inline const uccl_ep_sim *sim_table_of_library(void) {
    static const uccl_ep_sim *table;
    if (table) return table;
    void *library = dlopen(SIM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    union {
        void *symbol;
        const uccl_ep_sim *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_SIM_ENTRY)};
    CHECK(entry.symbol, "no %s", UCCL_EP_SIM_ENTRY);
    table = entry.function();
    return table;
}
#define SIM (sim_table_of_library())

typedef struct sim_group {
    uccl_ep_sim_world *world;
    uint32_t size;
    uint32_t arrived, left;
    uint64_t round;
    char *all;
    void (*body)(uccl_ep_sim_world *world, struct sim_group *group, uint32_t rank, void *argument);
    void *argument;
} sim_group;

typedef struct sim_rank {
    sim_group *group;
    uint32_t rank;
} sim_rank;

/* By the baton alone: code between two yields is atomic. */
static inline int sim_allgather(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns,
                                char *text) {
    sim_rank *r = context;
    sim_group *g = r->group;
    const uint64_t until = SIM->now(g->world) + timeout_ns;
    int failed = 0;
    while (g->left && !failed) {
        SIM->yield(g->world);
        failed = SIM->now(g->world) > until;
    }
    if (!failed) {
        if (!g->all) g->all = calloc(g->size, bytes ? bytes : 1);
        CHECK(g->all, "no memory");
        if (bytes) memcpy(g->all + (size_t)r->rank * bytes, mine, bytes);
        const uint64_t round = g->round;
        if (++g->arrived == g->size) {
            g->left = g->size;
            g->arrived = 0;
            g->round++;
        }
        while (g->round == round && !failed) {
            SIM->yield(g->world);
            failed = SIM->now(g->world) > until;
        }
        if (!failed) {
            if (bytes) memcpy(all, g->all, (size_t)g->size * bytes);
            if (!--g->left) {
                free(g->all);
                g->all = NULL;
            }
        }
    }
    if (failed) snprintf(text, 256, "not all of %u ranks came", g->size);
    return failed;
}

static inline void sim_barrier(sim_rank *r) {
    char none = 0, all[UCCL_EP_SIM_MAX_RANKS], text[256] = "";
    CHECK(!sim_allgather(r, &none, 1, all, 600 * SECOND, text), "%s", text);
}

static inline uccl_ep_bootstrap sim_bootstrap(sim_rank *r) {
    return (uccl_ep_bootstrap){sizeof(uccl_ep_bootstrap), r->rank, r->group->size, r, sim_allgather};
}

/* A communicator's configuration, with room for its options. */
typedef struct sim_comm_config {
    uccl_ep_config config;
    char options[256];
} sim_comm_config;

static inline void sim_configure(sim_comm_config *c, uccl_ep_sim_world *world, uint32_t rank, const char *device,
                                 const char *more) {
    snprintf(c->options, sizeof c->options, "world=%u,rank=%u%s%s", SIM->world_number(world), rank,
             more && more[0] ? "," : "", more ? more : "");
    c->config = (uccl_ep_config){.size = sizeof(uccl_ep_config),
                                 .backend = SIM_LIBRARY,
                                 .device = device,
                                 .backend_options = c->options,
                                 .heap_bytes = 1 << 16,
                                 .signals = 64,
                                 .progress = UCCL_EP_PROGRESS_CALLER,
                                 .timeout_ns = 20 * SECOND,
                                 .peer_timeout_ns = 10 * SECOND,
                                 .bootstrap_timeout_ns = 60 * SECOND,
                                 .clock = SIM->now,
                                 .clock_context = world,
                                 .idle = SIM->yield,
                                 .idle_context = world};
}

static inline uccl_ep_status sim_pass(void *context, uint32_t proxy, uint32_t *worked) {
    return uccl_ep_progress_proxy(context, proxy, worked);
}

static inline void sim_proxies(uccl_ep_sim_world *world, uint32_t rank, uccl_ep_comm *comm, uint32_t proxies) {
    for (uint32_t i = 0; i < proxies; i++) SIM->proxy_add(world, rank, sim_pass, comm, i);
}

static inline void sim_destroy(uccl_ep_sim_world *world, uccl_ep_comm *comm, uint32_t proxies) {
    for (uint32_t i = 0; i < proxies; i++) SIM->proxy_remove(world, comm, i);
    uccl_ep_comm_destroy(comm);
}

typedef struct sim_start {
    sim_rank rank;
    void (*body)(sim_rank *rank, void *argument);
    void *argument;
} sim_start;

static void *sim_main(void *argument) {
    sim_start *s = argument;
    SIM->enter(s->rank.group->world, s->rank.rank);
    s->body(&s->rank, s->argument);
    SIM->leave(s->rank.group->world);
    return NULL;
}

/* Run `body` on every rank of the world, each a fiber. The threads of ranks in `killed` (a bit each) end when the world
 * is closed: with such, that is done here. */
static inline void sim_run_killing(uccl_ep_sim_world *world, uint32_t size, void (*body)(sim_rank *, void *),
                                   void *argument, uint64_t killed) {
    sim_group group = {.world = world, .size = size};
    pthread_t *threads = calloc(size, sizeof *threads);
    sim_start *starts = calloc(size, sizeof *starts);
    pthread_attr_t attributes;
    CHECK(threads && starts, "no memory");
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    for (uint32_t i = 0; i < size; i++) {
        starts[i] = (sim_start){{&group, i}, body, argument};
        CHECK_EQ(pthread_create(&threads[i], &attributes, sim_main, &starts[i]), 0);
    }
    for (uint32_t i = 0; i < size; i++)
        if (i >= 64 || !(killed >> i & 1)) pthread_join(threads[i], NULL);
    if (killed) SIM->world_close(world);
    for (uint32_t i = 0; i < size && i < 64; i++)
        if (killed >> i & 1) pthread_join(threads[i], NULL);
    pthread_attr_destroy(&attributes);
    free(threads);
    free(starts);
    free(group.all);
}

static inline void sim_run(uccl_ep_sim_world *world, uint32_t size, void (*body)(sim_rank *, void *), void *argument) {
    sim_run_killing(world, size, body, argument, 0);
}

static inline uccl_ep_sim_world *sim_open_with(const char *profile, const char *knobs, const char *faults,
                                               uint32_t ranks, uint64_t seed) {
    char text[256] = "";
    const uccl_ep_sim_config config = {.size = sizeof config,
                                       .ranks = ranks,
                                       .profile = profile,
                                       .knobs = knobs,
                                       .faults = faults,
                                       .seed = seed,
                                       .trace_lines = 64};
    uccl_ep_sim_world *world = SIM->world_open(&config, text);
    CHECK(world, "%s", text);
    return world;
}

static inline uccl_ep_sim_world *sim_open(const char *profile, const char *knobs, uint32_t ranks, uint64_t seed) {
    return sim_open_with(profile, knobs, NULL, ranks, seed);
}

#endif
