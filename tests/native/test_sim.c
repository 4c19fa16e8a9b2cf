/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sim.c: the core on virtual NICs, in worlds: as fibers and as step functions, replayed, killed, broken.
 */
#include <malloc.h>
#include <sched.h>
#include <stdbool.h>

#include "sim_ranks.h"

#define CELL 256u
#define CELLS 8u

static const char *const all_profiles[] = {"connectx", "connectx-ro",      "efa", "efa3",        "thor2",
                                           "pollara",  "pollara-noatomic", "cxi", "strawman-min"};
#define PROFILES (sizeof all_profiles / sizeof *all_profiles)

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

static uccl_ep_sim_stats run_traffic(const char *profile, const char *knobs, const char *faults, struct traffic *t,
                                     uint32_t ranks, uint64_t seed) {
    uccl_ep_sim_world *world = sim_open_with(profile, knobs, faults, ranks, seed);
    t->device = profile;
    sim_run(world, ranks, traffic_rank, t);
    uccl_ep_sim_stats stats;
    SIM->stats(world, &stats);
    SIM->world_close(world);
    return stats;
}

static void test_traffic(void) {
    for (size_t i = 0; i < PROFILES; i++) {
        struct traffic t = {.rounds = 4, .proxies = 2, .channels = 3};
        const uccl_ep_sim_stats stats = run_traffic(all_profiles[i], "", NULL, &t, 3, test_seed_value + i);
        CHECK(stats.operations > 100, "%llu operations", (unsigned long long)stats.operations);
        printf("%s: %llu operations, %llu events, %llu steps, %llu ns\n", all_profiles[i],
               (unsigned long long)stats.operations, (unsigned long long)stats.events, (unsigned long long)stats.steps,
               (unsigned long long)stats.now_ns);
    }
}

/* A run is a function of profile, knobs, seed and program. */
static void test_replay(void) {
    for (size_t i = 0; i < PROFILES; i++) {
        struct traffic t[3];
        uccl_ep_sim_stats stats[3];
        for (uint32_t k = 0; k < 3; k++) {
            t[k] = (struct traffic){.rounds = 3, .proxies = 1, .channels = 2};
            stats[k] =
                run_traffic(all_profiles[i], "", "delay percent=5 ns=20000", &t[k], 3, test_seed_value + (k == 2));
        }
        CHECK(!memcmp(&stats[0], &stats[1], sizeof stats[0]), "%s: the same seed gave another run", all_profiles[i]);
        CHECK(!memcmp(t[0].memory, t[1].memory, sizeof t[0].memory), "%s: other memory", all_profiles[i]);
        CHECK(stats[0].hash != stats[2].hash, "%s: another seed gave the same run", all_profiles[i]);
    }
}

/* Faults that a NIC and its queue recover from change nothing for the caller. */
static void test_disturbed_traffic(void) {
    static const char *const faults[] = {
        "again percent=50",
        "partial percent=50",
        "lost_doorbell percent=30",
        "duplicate_completion percent=30",
        "rnr percent=20",
        "slow_peer peer=1 ns=50000",
        "clock_jump ns=50000000 at_ns=100000",
        "again percent=20;partial percent=20;lost_doorbell percent=10;delay percent=10 ns=30000",
    };
    for (size_t i = 0; i < PROFILES; i++) {
        for (size_t k = 0; k < sizeof faults / sizeof *faults; k++) {
            struct traffic t = {.rounds = 2, .proxies = 2, .channels = 2};
            run_traffic(all_profiles[i], k % 2 ? "" : "max_wr=4", faults[k], &t, 3, test_seed_value + i);
        }
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

/* Thousands of ranks come up and signal a few others each. UCCL_EP_TEST_SCALE=8 makes it 4096, which takes minutes: the
 * core's exchanges grow with the square of the ranks. */
static void test_scale(const char *profile, uint32_t ranks, uint32_t reach, uint64_t wanted) {
    /* Tables of all ranks that few pages of are touched stay mappings of their own, whatever was freed before. */
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    if (reach > ranks) reach = ranks;
    const uint64_t begin = cpu_ns();
    uccl_ep_sim_world *world = sim_open(profile, "", ranks, test_seed_value);
    const uccl_ep_config change = {.ring_log2 = 4};
    struct actor *actors = open_actors(world, ranks, reach, wanted, profile, &change);
    const uint64_t up = cpu_ns();
    while (SIM->step(world)) {
    }
    uint64_t total = 0;
    for (uint32_t i = 0; i < ranks; i++) total += total_of(&actors[i]);
    CHECK_EQ(total, (uint64_t)ranks * wanted);
    uccl_ep_sim_stats stats;
    SIM->stats(world, &stats);
    const uint64_t done = cpu_ns();
    close_actors(actors, ranks);
    SIM->world_close(world);
    free(actors);
    printf("%s, %u ranks: up in %.2f s, %llu operations in %.2f s, closed in %.2f s of CPU\n", profile, ranks,
           (double)(up - begin) / 1e9, (unsigned long long)stats.operations, (double)(done - up) / 1e9,
           (double)(cpu_ns() - done) / 1e9);
}

/* -------------------------------------------------------------------------------------------------- deaths,
 * incarnations */

struct death {
    const char *profile;
    uint32_t heard;    /* ranks that got something of rank 2 */
    uint32_t returned; /* ranks that were told of the loss */
};

/* Rank 2 is killed in the middle of its traffic; the others hear of it, go on without it, and agree. */
static void death_rank(sim_rank *r, void *argument) {
    struct death *d = argument;
    uccl_ep_sim_world *world = r->group->world;
    sim_comm_config c;
    sim_configure(&c, world, r->rank, d->profile, "");
    c.config.peer_timeout_ns = 3 * SECOND;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &comm));
    sim_proxies(world, r->rank, comm, 1);
    if (r->rank == 2) {
        for (uint32_t i = 0;; i++) { /* until it dies, and then until the world ends */
            int status = uccl_ep_put_signal(comm, 0, i % 2, 0, 4096, 256, 5, 1, SECOND, NULL);
            if (!status) status = uccl_ep_quiet(comm, 0, SECOND);
            if (status) break;
        }
        sim_destroy(world, comm, 1);
        return;
    }
    OK(uccl_ep_wait_signal(comm, 5, 2, 2, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    d->heard++;
    while (d->heard < 2) SIM->yield(world);
    if (r->rank == 0) SIM->kill(world, 2);
    /* Whoever sends to it is told; nobody else needs to be. */
    int status = UCCL_EP_OK;
    for (uint32_t i = 0; i < 100 && !status; i++) {
        status = uccl_ep_put_signal(comm, 0, 2, 0, 4096, 256, 6, 1, 5 * SECOND, NULL);
        if (!status) status = uccl_ep_quiet(comm, 0, 20 * SECOND);
    }
    CHECK(status == UCCL_EP_E_PEER_LOST, "%s: %s: %s", d->profile, uccl_ep_status_name(status),
          uccl_ep_last_error()->text);
    OK(uccl_ep_exclude(comm, 2));
    d->returned++;
    for (uint32_t i = 1; i <= 20; i++) {
        OK(uccl_ep_put_signal(comm, 0, 1 - r->rank, 0, 8192, 256, 7, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        OK(uccl_ep_wait_signal(comm, 7, i, 1 - r->rank, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    }
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    /* A barrier of the two. */
    const uint64_t until = SIM->now(world) + 20 * SECOND;
    d->returned += 16;
    while (d->returned < 34 && SIM->now(world) < until) SIM->yield(world);
    sim_destroy(world, comm, 1);
}

static void test_death(void) {
    for (size_t i = 0; i < PROFILES; i++) {
        struct death d = {.profile = all_profiles[i]};
        uccl_ep_sim_world *world = sim_open(all_profiles[i], "", 3, test_seed_value + i);
        sim_run_killing(world, 3, death_rank, &d, 1 << 2);
        CHECK_EQ(d.returned, 34);
    }
}

/* Rank 1 dies and comes back: its old threads stay where they are, and a new communicator of all ranks knows nothing of
 * what the old one had in flight. */
struct homecoming {
    const char *profile;
    sim_group group;
    pthread_t thread;
};

static void second_life(sim_rank *r, struct homecoming *h) {
    uccl_ep_sim_world *world = r->group->world;
    sim_comm_config c;
    sim_configure(&c, world, r->rank, h->profile, "");
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &comm));
    sim_proxies(world, r->rank, comm, 1);
    for (uint32_t i = 1; i <= 10; i++) {
        OK(uccl_ep_put_signal(comm, 0, 1 - r->rank, 0, 8192, 256, 7, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        OK(uccl_ep_wait_signal(comm, 7, i, 1 - r->rank, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    }
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    sim_barrier(r);
    for (uint32_t slot = 0; slot < 64; slot++) {
        uint64_t value;
        OK(uccl_ep_read_signal(comm, slot, &value));
        CHECK_EQ(value, slot == 7 ? 10 : 0);
    }
    sim_barrier(r);
    sim_destroy(world, comm, 1);
}

static void *returning_thread(void *argument) {
    struct homecoming *h = argument;
    sim_rank r = {&h->group, 1};
    SIM->enter(h->group.world, 1);
    second_life(&r, h);
    SIM->leave(h->group.world);
    return NULL;
}

static void homecoming_rank(sim_rank *r, void *argument) {
    struct homecoming *h = argument;
    uccl_ep_sim_world *world = r->group->world;
    sim_comm_config c;
    sim_configure(&c, world, r->rank, h->profile, "");
    c.config.peer_timeout_ns = 3 * SECOND;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &comm));
    sim_proxies(world, r->rank, comm, 1);
    if (r->rank == 1) {
        while (!uccl_ep_put_signal(comm, 0, 0, 0, 4096, 256, 5, 1, SECOND, NULL)) {
        }
        sim_destroy(world, comm, 1);
        return;
    }
    OK(uccl_ep_wait_signal(comm, 5, 3, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    char text[256];
    CHECK(!SIM->inject(world, "peer_death rank=1", text), "%s", text);
    CHECK(!SIM->alive(world, 1), "still alive");
    OK(uccl_ep_put_signal(comm, 0, 1, 0, 4096, 256, 6, 1, SECOND, NULL));
    EXPECT(uccl_ep_quiet(comm, 0, 20 * SECOND), UCCL_EP_E_PEER_LOST);
    sim_destroy(world, comm, 1);
    CHECK(!SIM->inject(world, "peer_return rank=1", text), "%s", text);
    h->group = (sim_group){.world = world, .size = 2};
    /* Who starts a thread goes on once it is in line. */
    const uint32_t before = SIM->fibers(world);
    CHECK_EQ(pthread_create(&h->thread, NULL, returning_thread, h), 0);
    while (SIM->fibers(world) == before) sched_yield();
    sim_rank again = {&h->group, 0};
    second_life(&again, h);
    CHECK(SIM->alive(world, 1), "still dead");
    while (SIM->fibers(world) > before) SIM->yield(world);
}

static void test_return(void) {
    for (size_t i = 0; i < PROFILES; i++) {
        struct homecoming h = {.profile = all_profiles[i]};
        uccl_ep_sim_world *world = sim_open(all_profiles[i], "", 2, test_seed_value + i);
        sim_run_killing(world, 2, homecoming_rank, &h, 1 << 1);
        pthread_join(h.thread, NULL);
    }
}

/* A rank that is stopped for a while delays others, and nothing is lost. */
static void pause_rank(sim_rank *r, void *argument) {
    uccl_ep_sim_world *world = r->group->world;
    sim_comm_config c;
    sim_configure(&c, world, r->rank, argument, "");
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &comm));
    sim_proxies(world, r->rank, comm, 1);
    sim_barrier(r);
    for (uint32_t way = 0; way < 2; way++) {
        const uint64_t begin = SIM->now(world);
        if (r->rank == 0) {
            SIM->pause(world, 1, way ? UINT64_MAX : SECOND);
            OK(uccl_ep_put_signal(comm, 0, 1, 0, 4096, 256, 5, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            const uint64_t until = begin + SECOND;
            while (way && SIM->now(world) < until) SIM->yield(world);
            if (way) SIM->resume(world, 1);
            OK(uccl_ep_wait_signal(comm, 6, way + 1, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            CHECK(SIM->now(world) - begin >= SECOND, "answered after %llu ns",
                  (unsigned long long)(SIM->now(world) - begin));
        } else {
            OK(uccl_ep_wait_signal(comm, 5, way + 1, 0, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            OK(uccl_ep_put_signal(comm, 0, 0, 0, 4096, 256, 6, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        sim_barrier(r);
    }
    sim_destroy(world, comm, 1);
}

static void test_pause(void) {
    static const char *const profiles[] = {"connectx", "efa", "strawman-min"};
    for (size_t i = 0; i < 3; i++) {
        uccl_ep_sim_world *world = sim_open(profiles[i], "", 2, test_seed_value);
        sim_run(world, 2, pause_rank, (void *)(uintptr_t)profiles[i]);
        SIM->world_close(world);
    }
}

/* ------------------------------------------------------------------------------------------------ failures as records
 */

struct failing {
    const char *profile, *fault;
    bool lost; /* told as the loss of the peer, and not as the NIC's error */
    const char *says;
};

static void failing_rank(sim_rank *r, void *argument) {
    const struct failing *t = argument;
    uccl_ep_sim_world *world = r->group->world;
    sim_comm_config c;
    sim_configure(&c, world, r->rank, t->profile, "");
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &comm));
    sim_proxies(world, r->rank, comm, 1);
    if (r->rank == 0) {
        /* After create: it is the first operation that is meant. */
        char text[256];
        CHECK(!t->fault[0] || !SIM->inject(world, t->fault, text), "%s", text);
        int status = uccl_ep_put(comm, 0, 1, 0, 4096, 256, UCCL_EP_TIMEOUT_DEFAULT, NULL);
        if (!status) status = uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT);
        CHECK(status == (t->lost ? UCCL_EP_E_PEER_LOST : UCCL_EP_E_NIC) && strstr(uccl_ep_last_error()->text, t->says),
              "%s %s: %s: %s", t->profile, t->fault, uccl_ep_status_name(status), uccl_ep_last_error()->text);
    }
    sim_barrier(r);
    sim_destroy(world, comm, 1);
}

static void test_failures(void) {
    static const struct failing cases[] = {
        {"connectx", "drop rank=0 nth=1", false, "remote operation error"},
        {"efa", "drop rank=0 nth=1 code=7", false, "remote: bad address"},
        {"efa", "drop rank=0 nth=1 code=15", true, "unreachable remote"},
        {"cxi", "drop rank=0 nth=1", false, "target error"},
        {"pollara", "queue_error rank=0 nth=1", false, "local QP operation error"},
        {"thor2", "queue_error rank=0 nth=1", false, "local QP operation error"},
        {"efa3", "device_lost rank=0", false, "the NIC is gone"},
        {"cxi", "", false, "no matching memory region"}, /* a key cut to 32 bits: knob broken */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct failing t = cases[i];
        uccl_ep_sim_world *world = sim_open(t.profile, t.fault[0] ? "" : "broken=key32", 2, test_seed_value);
        sim_run(world, 2, failing_rank, &t);
        SIM->world_close(world);
    }
}

/* ---------------------------------------------------------------------------------------------------------- by choice
 */

/* With schedule=choice a script of choices is a run: what was chosen brings it back, other choices give another. */
static void test_choices(void) {
    static uint32_t script[1 << 16];
    for (size_t i = 0; i < PROFILES; i++) {
        uint64_t hash[3];
        test_rng rng = test_rng_at(i);
        uint32_t n = 64;
        for (uint32_t k = 0; k < n; k++) script[k] = (uint32_t)test_below(&rng, 8);
        for (uint32_t run = 0; run < 3; run++) {
            struct traffic t = {.device = all_profiles[i], .rounds = 1, .proxies = 1, .channels = 1};
            char text[256] = "";
            const uccl_ep_sim_config config = {.size = sizeof config,
                                               .ranks = 2,
                                               .profile = all_profiles[i],
                                               .knobs = "schedule=choice,pieces=2",
                                               .seed = run,
                                               .choices = script,
                                               .n_choices = run == 2 ? 0 : n,
                                               .first_later = 1};
            uccl_ep_sim_world *world = SIM->world_open(&config, text);
            CHECK(world, "%s", text);
            sim_run(world, 2, traffic_rank, &t);
            uccl_ep_sim_stats stats;
            SIM->stats(world, &stats);
            hash[run] = stats.hash;
            const uccl_ep_sim_choice *made = SIM->choices(world, &n);
            CHECK(n > 0 && n < sizeof script / sizeof *script, "%u choices", n);
            for (uint32_t k = 0; k < n; k++) {
                CHECK(made[k].taken < made[k].alternatives && made[k].alternatives >= 2, "choice %u", k);
                script[k] = made[k].taken;
            }
            SIM->world_close(world);
        }
        CHECK_EQ(hash[0], hash[1]);
        CHECK(hash[0] != hash[2], "%s: other choices gave the same run", all_profiles[i]);
    }
}

static void test_lists(void) {
    for (uint32_t i = 0; i < PROFILES; i++) {
        const char *text;
        CHECK(!strcmp(SIM->profile(i, &text), all_profiles[i]) && text[0], "profile %u", i);
        char knobs[16];
        CHECK(SIM->knobs(all_profiles[i], knobs, sizeof knobs) > 1000 && !knobs[15], "%s", all_profiles[i]);
    }
    CHECK(!SIM->profile(PROFILES, NULL) && !SIM->knobs("no", NULL, 0), "more profiles than there are");
    const char *name, *keys, *text;
    uint32_t n = 0;
    for (; SIM->fault(n, &name, &keys, &text); n++) CHECK(name[0] && keys[0] && text[0], "fault %u", n);
    CHECK_EQ(n, 18);
    /* What happened last, as text. */
    struct traffic t = {.rounds = 1, .proxies = 1, .channels = 1, .device = "efa"};
    uccl_ep_sim_world *world = sim_open("efa", "", 2, 1);
    sim_run(world, 2, traffic_rank, &t);
    char trace[16384];
    const uint32_t needed = SIM->trace(world, trace, sizeof trace);
    CHECK(needed == strlen(trace) + 1 && strstr(trace, "rank 0 -> 1") && strstr(trace, "visible"), "%s", trace);
    SIM->world_close(world);
}

/* ----------------------------------------------------------------------------------------------------- start-up fails
 */

struct startup {
    const char *profile;
    int status[3];
    char text[3][256];
};

static void startup_rank(sim_rank *r, void *argument) {
    struct startup *s = argument;
    sim_comm_config c;
    sim_configure(&c, r->group->world, r->rank, s->profile, "");
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm = NULL;
    s->status[r->rank] = uccl_ep_comm_create(&c.config, &bootstrap, &comm);
    snprintf(s->text[r->rank], sizeof s->text[0], "%s", uccl_ep_last_error()->text);
    if (comm) uccl_ep_comm_destroy(comm);
    sim_barrier(r);
}

/* Every control call of one rank in turn: no rank gets a communicator, all are told why, nothing is left. */
static void test_startup(void) {
    static const char *const profiles[] = {"connectx", "efa", "strawman-min"};
    for (size_t p = 0; p < 3; p++) {
        uint32_t k = 1;
        for (;; k++) {
            char fault[64];
            snprintf(fault, sizeof fault, "call_fail rank=1 nth=%u", k);
            struct startup s = {.profile = profiles[p]};
            uccl_ep_sim_world *world = sim_open_with(profiles[p], "", fault, 3, test_seed_value);
            sim_run(world, 3, startup_rank, &s);
            uccl_ep_sim_stats stats;
            SIM->stats(world, &stats);
            SIM->world_close(world);
            if (!stats.faults) { /* there are fewer calls */
                for (uint32_t r = 0; r < 3; r++) CHECK_EQ(s.status[r], UCCL_EP_OK);
                break;
            }
            for (uint32_t r = 0; r < 3; r++)
                CHECK(s.status[r] == UCCL_EP_E_NIC && strstr(s.text[r], "call_fail"), "call %u, rank %u: %s: %s", k, r,
                      uccl_ep_status_name(s.status[r]), s.text[r]);
        }
        CHECK(k > 10, "%s: only %u calls", profiles[p], k);
        printf("%s: %u calls of start-up failed in turn\n", profiles[p], k - 1);
    }
    /* Queue pairs of a NIC that four ranks share. */
    for (uint32_t enough = 0; enough < 2; enough++) {
        struct startup s = {.profile = "efa"};
        uccl_ep_sim_world *world =
            sim_open("efa", enough ? "ranks_per_nic=4,max_qp=3" : "ranks_per_nic=4,max_qp=2", 3, test_seed_value);
        sim_run(world, 3, startup_rank, &s);
        SIM->world_close(world);
        for (uint32_t r = 0; r < 3; r++)
            CHECK(enough ? !s.status[r]
                         : s.status[r] == UCCL_EP_E_CAPABILITY && strstr(s.text[r], "2 queue pairs, 2 are taken"),
                  "%s: %s", uccl_ep_status_name(s.status[r]), s.text[r]);
    }
    static const struct {
        const char *fault;
        int status;
        const char *says;
    } cases[] = {{"register_fail rank=2", UCCL_EP_E_REGISTRATION, "pages"},
                 {"memory_pressure rank=0 nth=1", UCCL_EP_E_NO_MEMORY, "memory"},
                 {"memory_pressure rank=0 nth=2", UCCL_EP_E_NO_MEMORY, "not to be had"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct startup s = {.profile = "efa"};
        uccl_ep_sim_world *world = sim_open_with("efa", "", cases[i].fault, 3, test_seed_value);
        sim_run(world, 3, startup_rank, &s);
        SIM->world_close(world);
        for (uint32_t r = 0; r < 3; r++)
            CHECK(s.status[r] == cases[i].status && strstr(s.text[r], cases[i].says), "%s: %s: %s", cases[i].fault,
                  uccl_ep_status_name(s.status[r]), s.text[r]);
    }
}

struct many {
    uint32_t proxies;
    uccl_ep_status *status;
    char (*why)[256];
};

static void many_rank(sim_rank *r, void *argument) {
    const struct many *m = argument;
    sim_comm_config c;
    sim_configure(&c, r->group->world, r->rank, "efa", "");
    c.config.channels = 4;
    c.config.proxies = m->proxies;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm = NULL;
    m->status[r->rank] = uccl_ep_comm_create(&c.config, &bootstrap, &comm);
    snprintf(m->why[r->rank], sizeof m->why[0], "%s", uccl_ep_last_error()->text);
    if (comm) {
        sim_proxies(r->group->world, r->rank, comm, m->proxies);
        const uint32_t size = r->group->size;
        for (uint32_t channel = 0; channel < 4; channel++)
            OK(uccl_ep_put_signal(comm, channel, (r->rank + 1) % size, 64 * channel, 4096 + 64 * channel, 64, 0, 1,
                                  UCCL_EP_TIMEOUT_DEFAULT, NULL));
        OK(uccl_ep_wait_signal(comm, 0, 4, (r->rank + size - 1) % size, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    }
    sim_barrier(r);
    if (comm) sim_destroy(r->group->world, comm, m->proxies);
}

/* More ranks on one NIC than a table of theirs holds (libfabric issue 9356 met it with 192): 200 ranks with 4 channels
 * each share EFA's 256 queues as long as a proxy serves all four; with a proxy for each, all are told why not. */
static void test_many_ranks_of_one_nic(void) {
    enum { RANKS = 200 };
    static char why[RANKS][256];
    static uccl_ep_status status[RANKS];
    for (uint32_t proxies = 1; proxies <= 4; proxies += 3) {
        uccl_ep_sim_world *world = sim_open("efa", "ranks_per_nic=200", RANKS, test_seed_value);
        struct many many = {proxies, status, why};
        sim_run(world, RANKS, many_rank, &many);
        SIM->world_close(world);
        for (uint32_t r = 0; r < RANKS; r++)
            CHECK(proxies == 1 ? !status[r]
                               : status[r] == UCCL_EP_E_CAPABILITY && strstr(why[r], "4 proxies") &&
                                     strstr(why[r], "1 endpoints"),
                  "rank %u, %u proxies: %s: %s", r, proxies, uccl_ep_status_name(status[r]), why[r]);
    }
}

/* Alone: what device_open refuses. */
static int none(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns, char *text) {
    (void)context;
    (void)timeout_ns;
    (void)text;
    if (bytes) memcpy(all, mine, bytes);
    return 0;
}

static void test_options(void) {
    uccl_ep_sim_world *world = sim_open("efa", "pieces=2", 2, 1);
    const uint32_t number = SIM->world_number(world);
    const struct {
        const char *options;
        int status;
        const char *says;
    } cases[] = {{"", UCCL_EP_E_UNSUPPORTED, "world_open"},
                 {"pieces=1", UCCL_EP_E_UNSUPPORTED, "one process"},
                 {"world=0,rank=0", UCCL_EP_E_INVALID, "no such world"},
                 {"world=x,rank=0", UCCL_EP_E_INVALID, "no number"},
                 {"world=%u", UCCL_EP_E_INVALID, "0 to 1"},
                 {"world=%u,rank=2", UCCL_EP_E_INVALID, "0 to 1"},
                 {"world=%u,rank=0,profile=efa9", UCCL_EP_E_INVALID, "there are: connectx"},
                 {"world=%u,rank=0,peices=1", UCCL_EP_E_INVALID, "did you mean pieces"},
                 {"world=%u,rank=0,step_ns=1", UCCL_EP_E_INVALID, "the world's"},
                 {"world=%u,rank=0,pieces=9", UCCL_EP_E_INVALID, "1 to 4"},
                 {"world=%u,rank=0,max_qp=1", UCCL_EP_OK, ""},
                 {"world=%u,rank=0,max_cqe=16", UCCL_EP_E_CAPABILITY, "16 are available"},
                 {"world=%u,rank=0,profile=connectx,max_qp=0", UCCL_EP_OK, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sim_comm_config c;
        sim_configure(&c, world, 0, NULL, NULL);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(c.options, sizeof c.options, cases[i].options, number);
#pragma GCC diagnostic pop
        const uccl_ep_bootstrap alone = {sizeof alone, 0, 1, NULL, none};
        uccl_ep_comm *comm = NULL;
        const int status = uccl_ep_comm_create(&c.config, &alone, &comm);
        CHECK(status == cases[i].status && (!status || strstr(uccl_ep_last_error()->text, cases[i].says)),
              "'%s': %s: %s", cases[i].options, uccl_ep_status_name(status), uccl_ep_last_error()->text);
        if (comm) uccl_ep_comm_destroy(comm);
    }
    SIM->world_close(world);

    char text[256];
    const struct {
        uccl_ep_sim_config config;
        const char *says;
    } wrong[] = {
        {{.size = sizeof(uccl_ep_sim_config), .ranks = 2, .profile = "efa9"}, "there are: connectx"},
        {{.size = sizeof(uccl_ep_sim_config), .ranks = 2}, "there are: connectx"},
        {{.size = sizeof(uccl_ep_sim_config), .profile = "efa"}, "1 to 4096"},
        {{.size = sizeof(uccl_ep_sim_config), .ranks = 4097, .profile = "efa"}, "1 to 4096"},
        {{.size = sizeof(uccl_ep_sim_config), .ranks = 2, .profile = "efa", .knobs = "x=1"},
         "no knob 'x'; uccl_ep.simulator.knobs"},
        {{.size = sizeof(uccl_ep_sim_config), .ranks = 2, .profile = "efa", .faults = "drop;nothing"},
         "there are: drop"},
        {{.size = sizeof(uccl_ep_sim_config), .ranks = 2, .profile = "efa", .n_choices = 1}, "choices"},
        {{.size = 8}, "sizeof"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(!SIM->world_open(&wrong[i].config, text), "configuration %zu was taken", i);
        CHECK(strstr(text, wrong[i].says), "configuration %zu: %s", i, text);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    test_traffic();
    test_replay();
    test_disturbed_traffic();
    test_death();
    test_return();
    test_pause();
    test_failures();
    test_choices();
    test_lists();
    test_startup();
    test_many_ranks_of_one_nic();
    test_options();
    test_actors();
    test_scale("connectx", (uint32_t)(test_scaled(512) < 4096 ? test_scaled(512) : 4096), 8, 16);
    return test_end();
}
