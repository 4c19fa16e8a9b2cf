/* SPDX-License-Identifier: Apache-2.0
 *
 * test_strategies.c: every signal strategy on every virtual NIC: which of them work there, and that they do; and the
 * same with heaps in emulated device memory, which no virtual NIC reaches, so that they are staged.
 *
 * All ranks' memory is in this process, so what a completion or a signal promises is looked at directly: after a quiet
 * the sender reads its peer's heap and words, and a reader looks at the payload the moment its word moves.
 */
#include <stdbool.h>

#include "sim_ranks.h"

#define RANKS 3u
#define CELLS 8u
#define CELL 192u
#define STRATEGIES 7u
#define SLOTS (RANKS * CELLS)
#define EMULATION UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so"
#define HEAP (1u << 16)
#define BIG 8192u
#define BIG_FROM 16384u
#define BIG_TO 32768u

struct run {
    const char *profile, *knobs, *options;
    uint32_t strategy; /* asked for */
    uint32_t proxies, channels, rounds, max_message;
    uint64_t first_sequence, first_ticket;
    bool staged;
    /* out */
    uccl_ep_status created;
    uint32_t chosen, window;
    uccl_ep_proxy_stats stats;
    char reason[256];
    /* of the ranks */
    char *heap[RANKS];
    uccl_ep_comm *comm[RANKS];
};

static const char *const names[STRATEGIES] = {"auto",           "ordered_atomic",      "sender_hold",
                                              "fenced_atomic",  "sequenced_immediate", "sender_hold_mailbox",
                                              "sender_hold_sum"};

static uint8_t stamp(uint64_t round, uint32_t source, uint32_t target, uint32_t cell) {
    return (uint8_t)(round * 7 + source * 31 + target * 13 + cell * 3 + 1);
}

static void cell_is(const struct run *t, uint32_t target, uint32_t source, uint32_t cell, uint64_t round,
                    const char *when) {
    const uint8_t *at = (const uint8_t *)t->heap[target] + ((uint64_t)source * CELLS + cell) * CELL;
    for (uint32_t i = 0; i < CELL; i++)
        CHECK(at[i] == stamp(round, source, target, cell),
              "%s %s, strategy %s, seed %" PRIu64 ": round %" PRIu64 ", byte %u of cell %u of rank %u at rank %u is %u "
              "and not %u %s",
              t->profile, t->knobs, names[t->chosen], test_seed_value, round, i, cell, source, target, at[i],
              stamp(round, source, target, cell), when);
}

/* A wait that fails is told with what everybody was at. */
static void wait_ok(const struct run *t, sim_rank *r, uccl_ep_status status) {
    if (status == UCCL_EP_OK) return;
    static char text[1 << 16];
    fprintf(stderr, "rank %u: %s: %s\n", r->rank, uccl_ep_status_name(status), uccl_ep_last_error()->text);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        uccl_ep_report(t->comm[rank], text, sizeof text);
        fputs(text, stderr);
    }
    SIM->trace(r->group->world, text, sizeof text);
    fputs(text, stderr);
    OK(status);
}

/* The emulation's device memory can be reached by its address. */
static const uccl_ep_accelerator *emulation(void) {
    static const uccl_ep_accelerator *table;
    if (table) return table;
    void *library = dlopen(EMULATION, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    union {
        void *symbol;
        const uccl_ep_accelerator *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY)};
    CHECK(entry.symbol, "no accelerator");
    table = entry.function();
    return table;
}

static void rank_main_of(sim_rank *r, void *argument) {
    struct run *t = argument;
    uccl_ep_gpu *gpu = NULL;
    void *memory = NULL;
    uccl_ep_sim_world *world = r->group->world;
    const uint32_t rank = r->rank;
    sim_comm_config c;
    sim_configure(&c, world, rank, t->profile, t->options);
    c.config.proxies = t->proxies;
    c.config.channels = t->channels;
    c.config.strategy = t->strategy;
    c.config.flags = t->strategy == UCCL_EP_STRATEGY_SENDER_HOLD_SUM ? UCCL_EP_CONFIG_SINGLE_WRITER : 0;
    c.config.first_sequence = t->first_sequence;
    c.config.first_ticket = t->first_ticket;
    c.config.max_message_bytes = t->max_message;
    c.config.ring_log2 = 5;
    if (t->staged) {
        OK(emulation()->open(0, &gpu));
        OK(emulation()->device_alloc(gpu, HEAP, &memory));
        c.config.heap = memory;
        c.config.heap_bytes = HEAP;
        c.config.heap_kind = UCCL_EP_MEMORY_EMULATED;
        c.config.accelerator = EMULATION;
    }
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_comm *comm;
    const uccl_ep_status created = uccl_ep_comm_create(&c.config, &bootstrap, &comm);
    if (created != UCCL_EP_OK) {
        CHECK_EQ(created, UCCL_EP_E_CAPABILITY);
        t->created = created;
        snprintf(t->reason, sizeof t->reason, "%s", uccl_ep_last_error()->text);
        if (gpu) emulation()->close(gpu);
        return;
    }
    sim_proxies(world, rank, comm, t->proxies);
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    t->chosen = info.strategy;
    t->window = info.window;
    CHECK_EQ(info.staged, t->staged);
    snprintf(t->reason, sizeof t->reason, "%s", info.strategy_reason);
    char *heap = t->heap[rank] = info.heap;
    t->comm[rank] = comm;
    sim_barrier(r);
    const uint64_t sources = (uint64_t)RANKS * CELLS * CELL;
    for (uint64_t round = 1; round <= t->rounds; round++) {
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                const uint64_t from = sources + ((uint64_t)peer * CELLS + cell) * CELL;
                memset(heap + from, stamp(round, rank, peer, cell), CELL);
                const uint64_t to = ((uint64_t)rank * CELLS + cell) * CELL;
                const uint32_t channel = cell % t->channels, slot = rank * CELLS + cell;
                if (cell % 3) { /* a put and its signal apart */
                    OK(uccl_ep_put(comm, channel, peer, from, to, CELL, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                    OK(uccl_ep_signal(comm, channel, peer, slot, 1ull << 40, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                } else {
                    OK(uccl_ep_put(comm, channel, peer, from, to, CELL / 2, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                    OK(uccl_ep_put_signal(comm, channel, peer, from + CELL / 2, to + CELL / 2, CELL / 2, slot,
                                          1ull << 40, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                }
                if (cell == 5) OK(uccl_ep_put(comm, channel, peer, from, to, 0, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            }
        }
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                uint64_t seen = 0;
                wait_ok(
                    t, r,
                    uccl_ep_wait_signal(comm, peer * CELLS + cell, round << 40, peer, UCCL_EP_TIMEOUT_DEFAULT, &seen));
                CHECK_EQ(seen, round << 40);
                cell_is(t, rank, peer, cell, round, "behind its signal (SIG-2)");
            }
        }
        /* QUI-0: then the sources may be anything. */
        wait_ok(t, r, uccl_ep_quiet_source(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        memset(heap + sources, 0xee, sources);
        wait_ok(t, r, uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                uint64_t word = 0;
                cell_is(t, peer, rank, cell, round, "after quiet (QUI-1)");
                OK(uccl_ep_read_signal(t->comm[peer], rank * CELLS + cell, &word));
                CHECK_EQ(word, round << 40);
            }
        }
        /* A put larger than what may be in flight on some of them, and its signal. */
        const uint32_t next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS;
        memset(heap + BIG_FROM, stamp(round, rank, next, 77), BIG);
        OK(uccl_ep_put_signal(comm, 0, next, BIG_FROM, BIG_TO, BIG, SLOTS, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        wait_ok(t, r, uccl_ep_wait_signal(comm, SLOTS, round, before, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        for (uint32_t i = 0; i < BIG; i++) CHECK_EQ((uint8_t)heap[BIG_TO + i], stamp(round, before, rank, 77));
        wait_ok(t, r, uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        sim_barrier(r); /* all have seen the cells, which may be written again */
    }
    for (uint32_t i = 0; i < t->proxies; i++) {
        uccl_ep_proxy_stats stats;
        OK(uccl_ep_proxy_query(comm, i, &stats));
        t->stats.applied += stats.applied;
        t->stats.returns += stats.returns;
        t->stats.flushes += stats.flushes;
        t->stats.operations += stats.operations;
        t->stats.holds += stats.holds;
        t->stats.staged_out += stats.staged_out;
        t->stats.staged_in += stats.staged_in;
    }
    sim_barrier(r);
    sim_destroy(world, comm, t->proxies);
    if (gpu) emulation()->close(gpu);
}

static void go(struct run *t, uint64_t seed) {
    uccl_ep_sim_world *world = sim_open(t->profile, t->knobs, RANKS, seed);
    sim_run(world, RANKS, rank_main_of, t);
    SIM->world_close(world);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    static const struct {
        const char *profile;
        uint32_t automatic;
        const char *refused; /* of the strategies by their number */
        const char *knobs;
    } rows[] = {
        {"connectx", UCCL_EP_STRATEGY_ORDERED_ATOMIC, "3", ""},
        {"connectx-ro", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", ""},
        {"efa", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", ""},
        {"efa3", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", ""},
        {"thor2", UCCL_EP_STRATEGY_ORDERED_ATOMIC, "3", ""},
        {"pollara", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", ""},
        {"pollara-noatomic", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", ""},
        {"cxi", UCCL_EP_STRATEGY_SENDER_HOLD, "134", ""},
        {"strawman-min", UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX, "1234", ""},
        /* What some of them may do: a fence that waits and cancels, two NICs behind one device, no read that flushes.
         */
        {"cxi", UCCL_EP_STRATEGY_FENCED_ATOMIC, "14", "fence_kind=delivered"},
        {"connectx", UCCL_EP_STRATEGY_ORDERED_ATOMIC, "3", "nics=2"},
        {"cxi", UCCL_EP_STRATEGY_SENDER_HOLD, "134", "nics=3"},
        {"thor2", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", "read_flushes=0"},
        {"connectx", UCCL_EP_STRATEGY_ORDERED_ATOMIC, "3", "visible_delay=0"},
        {"thor2", UCCL_EP_STRATEGY_ORDERED_ATOMIC, "3", "retry_exc_inflight_bytes=1024"},
        {"pollara", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "12356", "retry_exc_inflight_bytes=1024"},
        {"strawman-min", UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX, "1234", "max_wr=2"},
    };
    static const uint64_t firsts[] = {
        0, (1ull << 24) - 40, (1ull << 40) - 40, UINT64_MAX - 40, (1ull << 20) - 2, (1ull << 20) - 1};
    const uint64_t seeds = test_scaled(6);
    for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++) {
        const bool staged = i & 1;
        const char *const refuses = rows[i / 2].refused;
        const uint32_t automatic = !staged                ? rows[i / 2].automatic
                                   : strchr(refuses, '4') ? UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX
                                                          : UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE;
        for (uint32_t strategy = 0; strategy < STRATEGIES; strategy++) {
            for (uint64_t k = 0; k < seeds; k++) {
                /* A copy is carried out in pieces, and at any time. */
                char lazy[64];
                snprintf(lazy, sizeof lazy, "lazy=%u,seed=%" PRIu64, 1 + (uint32_t)(k % 4) * 5, test_seed_value + k);
                if (k % 3) setenv("UCCL_EP_EMULATION", lazy, 1);
                struct run t = {.staged = staged,
                                .profile = rows[i / 2].profile,
                                .knobs = rows[i / 2].knobs,
                                .strategy = strategy,
                                .proxies = 1 + (uint32_t)(k % 3),
                                .channels = 3,
                                .rounds = 4,
                                .max_message = k & 1 ? 64 : 0,
                                .first_sequence = firsts[k % (sizeof firsts / sizeof *firsts)],
                                .first_ticket = k & 2 ? (1ull << 32) - 20 : 0};
                /* The last line tells what failed. */
                if (getenv("UCCL_EP_TEST_VERBOSE"))
                    fprintf(stderr, "%s %s %s%s k %" PRIu64 ": %u proxies, pieces of %u, first %" PRIu64 "\n",
                            t.profile, t.knobs, names[strategy], staged ? " staged" : "", k, t.proxies, t.max_message,
                            t.first_sequence);
                go(&t, test_seed_value + k);
                unsetenv("UCCL_EP_EMULATION");
                const char number = (char)('0' + strategy);
                const bool refused = strategy && (strchr(refuses, number) || (staged && strchr("1236", number)));
                CHECK((t.created != UCCL_EP_OK) == refused, "%s, %s: %s: %s", t.profile, names[strategy],
                      t.created ? "refused" : "taken", t.reason);
                if (!refused && !strategy) CHECK_EQ(t.chosen, automatic);
                if (staged && !refused) CHECK_EQ(t.stats.staged_out, t.stats.staged_in);
                CHECK_EQ(t.stats.staged_out != 0, staged && !refused);
                if (!k)
                    printf("%-17s %-20s %s%s%s: %s; %llu applied, %llu returns, %llu flushes, %llu held\n", t.profile,
                           names[strategy], staged ? "staged, " : "", refused ? "refused" : "",
                           refused ? "" : names[t.chosen], t.reason, (unsigned long long)t.stats.applied,
                           (unsigned long long)t.stats.returns, (unsigned long long)t.stats.flushes,
                           (unsigned long long)t.stats.holds);
                if (refused) break;
            }
        }
    }
    return test_end();
}
