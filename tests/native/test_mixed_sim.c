/* SPDX-License-Identifier: Apache-2.0
 *
 * test_mixed_sim.c: every virtual NIC beside every other one in one communicator. All ranks take one strategy, that of
 * the weaker promises, and do what either NIC makes a duty (receives for immediates), and the contract holds between
 * them (SIG-2, QUI-1, SIG-7); or all refuse, with one reason.
 */
#include <stdbool.h>

#include "sim_ranks.h"

#define RANKS 3u
#define CELL 512u
#define PUTS 6u
#define PROFILES 16u

struct mix {
    const char *profile[RANKS];
    uint64_t seed;
    uint32_t rounds;
    uint32_t strategy[RANKS];
    char reason[RANKS][256];
    char *heap[RANKS];
    uccl_ep_comm *comm[RANKS];
};

/* As auto tries them: the best first. */
static uint32_t place_of(uint32_t strategy) {
    static const uint32_t order[] = {UCCL_EP_STRATEGY_ORDERED_ATOMIC,      UCCL_EP_STRATEGY_FENCED_ATOMIC,
                                     UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, UCCL_EP_STRATEGY_SENDER_HOLD,
                                     UCCL_EP_STRATEGY_SENDER_HOLD_SUM,     UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX};
    uint32_t i = 0;
    while (order[i] != strategy) i++;
    return i;
}

static char stamp(uint64_t round, uint32_t source, uint32_t target, uint32_t put) {
    return (char)(round * 7 + source * 31 + target * 13 + put * 3 + 1);
}

static uint64_t landing(uint32_t source, uint32_t put) {
    return ((uint64_t)source * PUTS + put) * CELL;
}

static void check_landed(const struct mix *m, uint32_t source, uint32_t target, uint64_t round, const char *when) {
    for (uint32_t put = 0; put < PUTS; put++)
        for (uint32_t i = 0; i < CELL; i++)
            CHECK(m->heap[target][landing(source, put) + i] == stamp(round, source, target, put),
                  "%s, %s, %s, seed %" PRIu64 ": byte %u of put %u from %u to %u in round %" PRIu64 ", %s",
                  m->profile[0], m->profile[1], m->profile[2], m->seed, i, put, source, target, round, when);
}

static void mixed_rank(sim_rank *r, void *argument) {
    struct mix *m = argument;
    uccl_ep_sim_world *world = r->group->world;
    const uint32_t rank = r->rank;
    char options[64];
    snprintf(options, sizeof options, "profile=%s", m->profile[rank]);
    sim_comm_config c;
    sim_configure(&c, world, rank, NULL, options);
    c.config.channels = 2;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    const uccl_ep_status status = uccl_ep_comm_create(&c.config, &bootstrap, &comm);
    if (status != UCCL_EP_OK) {
        CHECK_EQ(status, UCCL_EP_E_CAPABILITY);
        memcpy(m->reason[rank], uccl_ep_last_error()->text, sizeof m->reason[rank]);
        return;
    }
    sim_proxies(world, rank, comm, 1);
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    m->strategy[rank] = info.strategy;
    memcpy(m->reason[rank], info.strategy_reason, sizeof m->reason[rank]);
    m->heap[rank] = info.heap;
    m->comm[rank] = comm;
    sim_barrier(r);
    const uint64_t sources = (uint64_t)RANKS * PUTS * CELL;
    for (uint64_t round = 1; round <= m->rounds; round++) {
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            for (uint32_t put = 0; put < PUTS; put++) {
                const uint64_t from = sources + landing(peer, put);
                memset(m->heap[rank] + from, stamp(round, rank, peer, put), CELL);
                OK(uccl_ep_put(comm, peer % 2, peer, from, landing(rank, put), CELL, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            }
            OK(uccl_ep_signal(comm, peer % 2, peer, rank, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        }
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            OK(uccl_ep_wait_signal(comm, peer, round, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            check_landed(m, peer, rank, round, "behind its signal");
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            uint64_t word;
            check_landed(m, rank, peer, round, "after quiet");
            OK(uccl_ep_read_signal(m->comm[peer], rank, &word));
            CHECK_EQ(word, round);
        }
        sim_barrier(r);
    }
    sim_barrier(r);
    sim_destroy(world, comm, 1);
}

static uint32_t run_mix(struct mix *m) {
    uccl_ep_sim_world *world = sim_open(m->profile[0], NULL, RANKS, m->seed);
    sim_run(world, RANKS, mixed_rank, m);
    SIM->world_close(world);
    for (uint32_t rank = 1; rank < RANKS; rank++) {
        CHECK_EQ(m->strategy[rank], m->strategy[0]);
        CHECK(m->reason[0][0] && !strcmp(m->reason[rank], m->reason[0]), "rank 0: %s; rank %u: %s", m->reason[0], rank,
              m->reason[rank]);
    }
    return m->strategy[0];
}

/* Ranks 0 and 2 have one NIC, rank 1 the other. */
static bool names_what_to_do(const char *text, const char *one, const char *other) {
    if (!strcmp(one, "connectx") && !strcmp(other, "cxi"))
        return strstr(text, "give all ranks NICs of one kind (device): completed writes become visible (MEM-3) by a "
                            "read behind them at rank 0 and on request at rank 1") != NULL;
    return strstr(text, "give all ranks NICs of one kind") || strstr(text, "give rank 0, and 1 more, another NIC") ||
           strstr(text, "give rank 1 another NIC");
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    const char *profiles[PROFILES], *line;
    uint32_t n = 0, alone[PROFILES];
    while (n < PROFILES && (profiles[n] = SIM->profile(n, &line))) n++;
    CHECK(n >= 9 && n < PROFILES, "%u profiles", n);
    for (uint32_t i = 0; i < n; i++) {
        struct mix m = {.profile = {profiles[i], profiles[i], profiles[i]}, .seed = test_seed_value, .rounds = 1};
        alone[i] = run_mix(&m);
    }
    uint32_t refused = 0;
    for (uint32_t i = 0; i < n; i++) {
        CHECK(alone[i], "%s", profiles[i]);
        for (uint32_t k = 0; k < n; k++) {
            if (i == k) continue;
            struct mix m = {.profile = {profiles[i], profiles[k], profiles[i]},
                            .seed = test_seed_value + i * n + k,
                            .rounds = 2 + (uint32_t)test_scaled(8)};
            const uint32_t together = run_mix(&m);
            if (!together) {
                /* What one does and the other does not, none may do, and what is left makes no strategy. */
                CHECK(strstr(m.reason[0], "no signal strategy works"), "%s", m.reason[0]);
                CHECK(names_what_to_do(m.reason[0], profiles[i], profiles[k]), "%s beside %s: %s", profiles[i],
                      profiles[k], m.reason[0]);
                printf("%s beside %s: %s\n", profiles[i], profiles[k], m.reason[0]);
                refused++;
                continue;
            }
            CHECK(place_of(together) >= place_of(alone[i]) && place_of(together) >= place_of(alone[k]),
                  "%s and %s: strategy %u, alone %u and %u", profiles[i], profiles[k], together, alone[i], alone[k]);
        }
    }
    printf("%u profiles, each beside each, %u of %u refused\n", n, refused, n * (n - 1));
    CHECK(refused < n * (n - 1) / 2, "%u", refused);
    return test_end();
}
