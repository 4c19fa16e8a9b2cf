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

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    test_traffic();
    test_replay();
    return test_end();
}
