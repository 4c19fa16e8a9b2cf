/* SPDX-License-Identifier: Apache-2.0
 *
 * scale.c: as many ranks as a communicator holds, all in this process, that signal each other.
 *
 * Their creates take turns on small stacks (coop.h); then they are step functions. Memory is the growth of what the
 * process holds: the core's share is 64 bytes a peer and proxy, the rest is channels, the NICs' tables and heaps.
 */
#include "scale.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backends/sim/sim.h"
#include "coop.h"

#define SLOTS 16u
#define STACK_BYTES (128u << 10)
#define IDLE_PASSES 4096u

typedef struct scale_rank {
    struct scale_run *run;
    uccl_ep_comm *comm;
    uint32_t rank, posted, state;
} scale_rank;

typedef struct scale_run {
    const scale_options *o;
    const uccl_ep_sim *sim;
    uccl_ep_sim_world *world;
    coop *coop;
    scale_rank *ranks;
    uint32_t targets, done, failed;
    char why[320];
} scale_run;

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static uint64_t resident_bytes(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long size = 0, resident = 0;
    if (file) {
        if (fscanf(file, "%lu %lu", &size, &resident) != 2) resident = 0;
        fclose(file);
    }
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint32_t log2_of(uint32_t n) {
    uint32_t log = 0;
    while ((1u << (log + 1)) <= n) log++;
    return log;
}

/* Of the i-th signal of a rank. */
static uint32_t target_of(const scale_run *run, uint32_t rank, uint32_t i) {
    const uint32_t n = run->o->ranks;
    return run->o->full ? (rank + 1 + i) % n : (rank + (1u << i)) % n;
}

static uint32_t slot_of(uint32_t i) {
    return i % SLOTS;
}

static uint64_t expected(const scale_run *run, uint32_t slot) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < run->targets; i++) n += slot_of(i) == slot;
    return n * run->o->rounds;
}

static void idle(void *context) {
    scale_run *run = context;
    if (coop_inside(run->coop))
        coop_pass(run->coop);
    else
        run->sim->step(run->world);
}

static void between(void *context) {
    scale_run *run = context;
    run->sim->step(run->world);
}

static uccl_ep_status pass(void *context, uint32_t proxy, uint32_t *worked) {
    return uccl_ep_progress_proxy(context, proxy, worked);
}

static uccl_ep_config config_of(scale_run *run, char *options, size_t room, uint32_t rank) {
    snprintf(options, room, "world=%u,rank=%u", run->sim->world_number(run->world), rank);
    return (uccl_ep_config){.size = sizeof(uccl_ep_config),
                            .backend = run->o->backend,
                            .device = run->o->profile,
                            .backend_options = options,
                            .heap_bytes = 4096,
                            .signals = SLOTS,
                            .ring_log2 = 4,
                            .progress = UCCL_EP_PROGRESS_CALLER,
                            .clock = run->sim->now,
                            .clock_context = run->world,
                            .idle = idle,
                            .idle_context = run};
}

static void create(void *context, uint32_t rank) {
    scale_run *run = context;
    char options[64];
    const uccl_ep_config config = config_of(run, options, sizeof options, rank);
    const uccl_ep_bootstrap bootstrap = coop_bootstrap(run->coop, rank, run->o->ranks);
    if (uccl_ep_comm_create(&config, &bootstrap, &run->ranks[rank].comm) == UCCL_EP_OK) return;
    if (!run->failed++) snprintf(run->why, sizeof run->why, "rank %u: %s", rank, uccl_ep_last_error()->text);
}

static void fail(scale_rank *r, const char *what) {
    if (!r->run->failed++)
        snprintf(r->run->why, sizeof r->run->why, "rank %u, %s: %s", r->rank, what, uccl_ep_last_error()->text);
}

static uint32_t step(void *context) {
    scale_rank *r = context;
    scale_run *run = r->run;
    if (r->state == 0) {
        const uint32_t all = run->targets * run->o->rounds;
        uint32_t worked = 0;
        for (; r->posted < all; r->posted++, worked = 1) {
            const uint32_t i = r->posted % run->targets;
            const uccl_ep_status status =
                uccl_ep_signal(r->comm, 0, target_of(run, r->rank, i), slot_of(i), 1, 0, NULL);
            if (status == UCCL_EP_E_AGAIN) return worked;
            if (status != UCCL_EP_OK) fail(r, "posting");
        }
        r->state = 1;
        return 1;
    }
    if (r->state == 1) {
        const uccl_ep_status status = uccl_ep_quiet(r->comm, UCCL_EP_NO_CHANNEL, 0);
        if (status == UCCL_EP_IN_PROGRESS) return 0;
        if (status != UCCL_EP_OK) fail(r, "quiet");
        r->state = 2;
        return 1;
    }
    if (r->state == 2) {
        for (uint32_t s = 0; s < SLOTS; s++) {
            uint64_t value = 0;
            uccl_ep_read_signal(r->comm, s, &value);
            if (value < expected(run, s)) return 0;
        }
        r->state = 3;
        run->done++;
        return 1;
    }
    return 0;
}

/* One rank that is told that it is all of them: what an idle pass costs does not depend on who the others are. */
static int answer_for_all(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns, char *text) {
    const scale_run *run = context;
    (void)timeout_ns, (void)text;
    for (uint64_t i = 0; i < run->o->ranks; i++) memcpy((char *)all + i * bytes, mine, bytes);
    return 0;
}

static int open_world(scale_run *run, void **library) {
    char text[256] = "";
    *library = dlopen(run->o->backend, RTLD_NOW | RTLD_LOCAL);
    const uccl_ep_sim *(*entry)(void) = NULL;
    void *symbol = *library ? dlsym(*library, UCCL_EP_SIM_ENTRY) : NULL;
    memcpy(&entry, &symbol, sizeof entry);
    if (!entry) {
        fprintf(stderr, "uccl-ep-explore: %s is not the simulator\n", run->o->backend);
        return 2;
    }
    run->sim = entry();
    const uccl_ep_sim_config config = {
        .size = sizeof config, .ranks = run->o->ranks, .profile = run->o->profile, .seed = run->o->seed};
    run->world = run->sim->world_open(&config, text);
    if (run->world) return 0;
    fprintf(stderr, "uccl-ep-explore: %s\n", text);
    return 2;
}

int scale_idle(const scale_options *o) {
    scale_run run = {.o = o};
    void *library;
    if (open_world(&run, &library)) return 2;
    run.coop = coop_new(1, STACK_BYTES);
    char options[64];
    const uccl_ep_config config = config_of(&run, options, sizeof options, 0);
    const uccl_ep_bootstrap bootstrap = {sizeof bootstrap, 0, o->ranks, &run, answer_for_all};
    uccl_ep_comm *comm = NULL;
    if (!run.coop || uccl_ep_comm_create(&config, &bootstrap, &comm) != UCCL_EP_OK) {
        fprintf(stderr, "uccl-ep-explore: %s\n", uccl_ep_last_error()->text);
        return 2;
    }
    for (uint32_t i = 0; i < IDLE_PASSES; i++) uccl_ep_progress_proxy(comm, 0, NULL);
    printf("{\"type\": \"idle\", \"profile\": \"%s\", \"ranks\": %u, \"passes\": %u}\n", o->profile, o->ranks,
           IDLE_PASSES);
    uccl_ep_comm_destroy(comm);
    run.sim->world_close(run.world);
    coop_free(run.coop);
    dlclose(library);
    return 0;
}

int scale(const scale_options *o) {
    scale_run run = {.o = o};
    void *library;
    if (open_world(&run, &library)) return 2;
    run.targets = o->full ? o->ranks - 1 : log2_of(o->ranks);
    run.ranks = calloc(o->ranks, sizeof *run.ranks);
    run.coop = coop_new(o->ranks, STACK_BYTES);
    if (!run.ranks || !run.coop) {
        fprintf(stderr, "uccl-ep-explore: no memory for %u ranks\n", o->ranks);
        return 2;
    }
    /* What ranks exchange while they come up goes back to the system, or it would be taken for what they hold. */
    mallopt(M_MMAP_THRESHOLD, 256 << 10);
    const uint64_t resident_before = resident_bytes();
    const double began = seconds_now();
    for (uint32_t i = 0; i < o->ranks; i++) run.ranks[i] = (scale_rank){.run = &run, .rank = i};
    coop_run(run.coop, o->ranks, create, between, &run);
    const double created = seconds_now();
    malloc_trim(0);
    const uint64_t resident = resident_bytes();
    uccl_ep_sim_stats stats = {0};
    uint64_t wrong = 0;
    uint32_t strategy = 0;
    if (!run.failed) {
        uccl_ep_comm_info info = {.size_of_struct = sizeof info};
        uccl_ep_comm_query(run.ranks[0].comm, &info);
        strategy = info.strategy;
        for (uint32_t i = 0; i < o->ranks; i++) {
            run.sim->actor_add(run.world, i, step, &run.ranks[i]);
            run.sim->proxy_add(run.world, i, pass, run.ranks[i].comm, 0);
        }
        while (run.done < o->ranks && !run.failed && run.sim->step(run.world)) {
        }
        for (uint32_t i = 0; i < o->ranks; i++)
            for (uint32_t s = 0; s < SLOTS; s++) {
                uint64_t value = 0;
                uccl_ep_read_signal(run.ranks[i].comm, s, &value);
                wrong += value != expected(&run, s);
            }
        run.sim->stats(run.world, &stats);
    }
    const double ended = seconds_now();
    printf("{\"type\": \"scale\", \"profile\": \"%s\", \"ranks\": %u, \"pattern\": \"%s\", \"signals\": %" PRIu64
           ", \"wrong_words\": %" PRIu64 ", \"ranks_done\": %u, \"strategy\": %u, \"create_seconds\": %.3f, "
           "\"run_seconds\": %.3f, \"steps\": %" PRIu64 ", \"operations\": %" PRIu64 ", \"virtual_ns\": %" PRIu64
           ", \"resident_bytes\": %" PRIu64 ", \"bytes_a_peer_and_proxy\": %.1f, \"bytes_a_rank\": %.0f, \"why\": \"",
           o->profile, o->ranks, o->full ? "full" : "sparse", (uint64_t)o->ranks * run.targets * o->rounds, wrong,
           run.done, strategy, created - began, ended - created, stats.steps, stats.operations, stats.now_ns,
           resident - resident_before, (double)(resident - resident_before) / ((double)o->ranks * (double)o->ranks),
           (double)(resident - resident_before) / (double)o->ranks);
    for (const char *c = run.why; *c; c++) putchar(*c == '"' || *c == '\\' || *c < 32 ? '\'' : *c);
    puts("\"}");
    const bool good = !run.failed && !wrong && run.done == o->ranks;
    for (uint32_t i = 0; i < o->ranks; i++) {
        if (!run.ranks[i].comm) continue;
        run.sim->actor_remove(run.world, &run.ranks[i]);
        run.sim->proxy_remove(run.world, run.ranks[i].comm, 0);
    }
    for (uint32_t i = 0; i < o->ranks; i++) uccl_ep_comm_destroy(run.ranks[i].comm);
    run.sim->world_close(run.world);
    coop_free(run.coop);
    free(run.ranks);
    dlclose(library);
    return good ? 0 : 1;
}
