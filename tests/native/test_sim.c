/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sim.c: the core on virtual NICs, in worlds: as fibers and as step functions, replayed, killed, broken.
 */
#include "sim_ranks.h"

#define CELL 256u
#define CELLS 8u

/* ---------------------------------------------------------------------------------------------------------- traffic */

struct traffic {
    const char *device, *options;
    uint32_t rounds, proxies, channels;
    uint64_t memory[8]; /* of each rank's heap at the end, as a hash */
};

static uint64_t hash_bytes(const void *bytes, size_t n) {
    uint64_t h = 14695981039346656037ull;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)bytes)[i]) * 1099511628211ull;
    return h;
}

/* Every rank writes cells of every rank's heap, each followed by a signal; the target looks at the cell as soon as its
 * word says so (SIG-2), and at all of it after a quiet and a barrier (QUI-1). */
static void traffic_rank(sim_rank *r, void *argument) {
    struct traffic *t = argument;
    uccl_ep_sim_world *world = r->group->world;
    sim_comm_config c;
    sim_configure(&c, world, r->rank, t->device, t->options);
    c.config.proxies = t->proxies;
    c.config.channels = t->channels;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &comm));
    sim_proxies(world, r->rank, comm, t->proxies);
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    char *heap = info.heap;
    const uint32_t size = r->group->size;
    const uint64_t sources = (uint64_t)size * CELLS * CELL;
    for (uint64_t round = 1; round <= t->rounds; round++) {
        for (uint32_t peer = 0; peer < size; peer++) {
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                const uint64_t from = sources + ((uint64_t)peer * CELLS + cell) * CELL;
                memset(heap + from, (int)(round * 7 + r->rank * 31 + cell), CELL);
                const uint64_t to = ((uint64_t)r->rank * CELLS + cell) * CELL;
                const uint32_t channel = cell % t->channels;
                OK(uccl_ep_put(comm, channel, peer, from, to, CELL / 2, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                OK(uccl_ep_put_signal(comm, channel, peer, from + CELL / 2, to + CELL / 2, CELL / 2,
                                      r->rank * CELLS + cell, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            }
        }
        for (uint32_t peer = 0; peer < size; peer++) {
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                OK(uccl_ep_wait_signal(comm, peer * CELLS + cell, round, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                const char *at = heap + ((uint64_t)peer * CELLS + cell) * CELL;
                for (uint32_t i = 0; i < CELL; i++) CHECK_EQ((uint8_t)at[i], (uint8_t)(round * 7 + peer * 31 + cell));
            }
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        sim_barrier(r);
    }
    t->memory[r->rank] = hash_bytes(heap, sources);
    sim_barrier(r);
    sim_destroy(world, comm, t->proxies);
}

static uccl_ep_sim_stats run_traffic(const char *profile, const char *knobs, struct traffic *t, uint32_t ranks,
                                     uint64_t seed) {
    uccl_ep_sim_world *world = sim_open(profile, knobs, ranks, seed);
    t->device = profile;
    sim_run(world, ranks, traffic_rank, t);
    uccl_ep_sim_stats stats;
    SIM->stats(world, &stats);
    SIM->world_close(world);
    return stats;
}

static void test_traffic(void) {
    static const struct {
        const char *profile, *knobs;
    } runs[] = {
        {"connectx", ""}, {"connectx-ro", ""},      {"efa", ""}, {"efa3", ""},         {"thor2", ""},
        {"pollara", ""},  {"pollara-noatomic", ""}, {"cxi", ""}, {"strawman-min", ""},
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        struct traffic t = {.rounds = 4, .proxies = 2, .channels = 3};
        const uccl_ep_sim_stats stats = run_traffic(runs[i].profile, runs[i].knobs, &t, 3, test_seed_value + i);
        CHECK(stats.operations > 100, "%llu operations", (unsigned long long)stats.operations);
        printf("%s: %llu operations, %llu events, %llu steps, %llu ns\n", runs[i].profile,
               (unsigned long long)stats.operations, (unsigned long long)stats.events, (unsigned long long)stats.steps,
               (unsigned long long)stats.now_ns);
    }
}

/* A run is a function of profile, knobs, seed and program. */
static void test_replay(void) {
    static const char *const profiles[] = {"connectx", "thor2", "cxi"};
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        struct traffic t[3];
        uccl_ep_sim_stats stats[3];
        for (uint32_t k = 0; k < 3; k++) {
            t[k] = (struct traffic){.rounds = 3, .proxies = 1, .channels = 2};
            stats[k] = run_traffic(profiles[i], "completion_level=delivery", &t[k], 3, test_seed_value + (k == 2));
        }
        CHECK(!memcmp(&stats[0], &stats[1], sizeof stats[0]), "%s: the same seed gave another run", profiles[i]);
        CHECK(!memcmp(t[0].memory, t[1].memory, sizeof t[0].memory), "%s: other memory", profiles[i]);
        CHECK(stats[0].hash != stats[2].hash, "%s: another seed gave the same run", profiles[i]);
    }
}

/* --------------------------------------------------------------------------------------------------- step functions */

struct actor {
    uccl_ep_sim_world *world;
    uccl_ep_comm *comm;
    uint32_t rank, size, reach;
    uint64_t posted, wanted, seen;
    uint32_t next;
    const char *device, *options;
    uccl_ep_config change;
};

/* Communicators come up as fibers do; then the fibers leave, and step functions take over. */
static void actor_rank(sim_rank *r, void *argument) {
    struct actor *a = (struct actor *)argument + r->rank;
    sim_comm_config c;
    sim_configure(&c, r->group->world, r->rank, a->device, a->options);
    c.config.heap_bytes = 1 << 12;
    c.config.ring_log2 = a->change.ring_log2;
    c.config.strategy = a->change.strategy;
    c.config.max_inflight = a->change.max_inflight;
    c.config.max_inflight_peer = a->change.max_inflight_peer;
    c.config.bootstrap_timeout_ns = 600 * SECOND;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &a->comm));
}

/* Posts to `reach` ranks after its own in turn, a put of 64 bytes and a signal each time, as long as there is room. */
static uint32_t actor_step(void *context) {
    struct actor *a = context;
    uint32_t did = 0;
    while (a->posted < a->wanted && did < 16) {
        const uint32_t target = (a->rank + 1 + a->next) % a->size;
        const int status = uccl_ep_put_signal(a->comm, 0, target, 64 * (a->posted % 16), 1024 + 64 * (a->posted % 16),
                                              64, a->next % 64, 1, 0, NULL);
        if (status == UCCL_EP_E_AGAIN) break;
        OK(status);
        a->posted++;
        a->next = (a->next + 1) % a->reach;
        did++;
    }
    return did;
}

static void close_actors(struct actor *actors, uint32_t ranks) {
    for (uint32_t i = 0; i < ranks; i++) {
        SIM->actor_remove(actors[i].world, &actors[i]);
        sim_destroy(actors[i].world, actors[i].comm, 1);
    }
}

static uint64_t total_of(const struct actor *a) {
    uint64_t sum = 0;
    for (uint32_t slot = 0; slot < 64; slot++) {
        uint64_t value;
        OK(uccl_ep_read_signal(a->comm, slot, &value));
        sum += value;
    }
    return sum;
}

static struct actor *open_actors(uccl_ep_sim_world *world, uint32_t ranks, uint32_t reach, uint64_t wanted,
                                 const char *device, const uccl_ep_config *change) {
    struct actor *actors = calloc(ranks, sizeof *actors);
    CHECK(actors, "no memory");
    for (uint32_t i = 0; i < ranks; i++)
        actors[i] = (struct actor){.world = world,
                                   .rank = i,
                                   .size = ranks,
                                   .reach = reach,
                                   .wanted = wanted,
                                   .device = device,
                                   .change = *change};
    sim_run(world, ranks, actor_rank, actors);
    for (uint32_t i = 0; i < ranks; i++) {
        SIM->actor_add(world, i, actor_step, &actors[i]);
        sim_proxies(world, i, actors[i].comm, 1);
    }
    return actors;
}

/* Of this process: others may keep the machine busy. */
static uint64_t cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void test_actors(void) {
    static const char *const profiles[] = {"connectx", "efa3"};
    for (size_t p = 0; p < 2; p++) {
        const uint64_t wanted = test_scaled(50000);
        uint64_t hash[2];
        for (uint32_t k = 0; k < 2; k++) {
            uccl_ep_sim_world *world = sim_open(profiles[p], "", 2, test_seed_value);
            const uccl_ep_config change = {.ring_log2 = 8};
            struct actor *actors = open_actors(world, 2, 1, wanted, profiles[p], &change);
            const uint64_t begin = cpu_ns();
            while (SIM->step(world)) {
            }
            const uint64_t took = cpu_ns() - begin;
            uccl_ep_sim_stats stats;
            SIM->stats(world, &stats);
            for (uint32_t i = 0; i < 2; i++) CHECK_EQ(total_of(&actors[i]), wanted);
            hash[k] = stats.hash;
            close_actors(actors, 2);
            SIM->world_close(world);
            free(actors);
            printf("%s, step functions: %llu operations, %llu events, %llu steps, %.2f us an operation\n", profiles[p],
                   (unsigned long long)stats.operations, (unsigned long long)stats.events,
                   (unsigned long long)stats.steps, (double)took / 1e3 / (double)stats.operations);
        }
        CHECK_EQ(hash[0], hash[1]);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    test_traffic();
    test_replay();
    test_actors();
    return test_end();
}
