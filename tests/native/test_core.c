/* SPDX-License-Identifier: Apache-2.0
 *
 * test_core.c: the engine on a NIC with the manners we choose: every order of completions, short queues, errors,
 * silence.
 */
#include "thread_ranks.h"

#define LIBRARY UCCL_EP_TEST_LIBRARY_DIR "/libloop_backend.so"
#define SECOND 1000000000ull

static uccl_ep_config base_config(const char *options) {
    return (uccl_ep_config){.size = sizeof(uccl_ep_config),
                            .backend = LIBRARY,
                            .backend_options = options,
                            .heap_bytes = 1 << 20,
                            .signals = 64,
                            .timeout_ns = 20 * SECOND,
                            .peer_timeout_ns = 20 * SECOND,
                            .bootstrap_timeout_ns = 20 * SECOND};
}

/* -------------------------------------------------------------------------------------------- traffic, every manner */

struct traffic {
    const char *options;
    uint32_t strategy, channels, proxies, ring_log2;
    uint64_t first_ticket, rounds;
    uint32_t max_inflight_bytes;
    uint64_t first_sequence;
};

#define CELL 256u
#define CELLS 64u

/*
 * Every rank writes cells of every rank's heap, each followed by a signal of its own word; the target checks the cell
 * as soon as the word says so (SIG-2), and answers by a signal, so that the cell is not rewritten before.
 */
struct observer {
    uccl_ep_comm *comm;
    uint32_t channels, proxies;
    int stop;
};

/* Whoever looks at a running communicator sees whole words and disturbs nobody. */
static void *observe(void *argument) {
    struct observer *o = argument;
    static _Thread_local uccl_ep_trace_entry entries[1024];
    char text[4096];
    while (!__atomic_load_n(&o->stop, __ATOMIC_ACQUIRE)) {
        OK(uccl_ep_report(o->comm, text, sizeof text));
        CHECK(strstr(text, "backend loop"), "%s", text);
        for (uint32_t p = 0; p < o->proxies; p++) {
            uccl_ep_proxy_stats stats;
            uint32_t n = 1024;
            OK(uccl_ep_proxy_query(o->comm, p, &stats));
            OK(uccl_ep_trace(o->comm, p, entries, &n));
            for (uint32_t i = 0; i < n; i++) {
                uccl_ep_command command;
                CHECK_EQ(uccl_ep_decode(entries[i].words.word[0], entries[i].words.word[1], &command), UCCL_EP_OK);
                CHECK(entries[i].channel < o->channels, "channel %u", entries[i].channel);
            }
        }
        for (uint32_t c = 0; c < o->channels; c++) {
            uccl_ep_channel_stats stats;
            OK(uccl_ep_channel_query(o->comm, c, &stats));
        }
        sched_yield();
    }
    return NULL;
}

static void traffic_rank(thread_rank *r, void *argument) {
    const struct traffic *t = argument;
    uccl_ep_config config = base_config(t->options);
    config.strategy = t->strategy;
    config.channels = t->channels;
    config.proxies = t->proxies;
    config.ring_log2 = t->ring_log2;
    config.first_ticket = t->first_ticket;
    config.max_inflight_bytes = t->max_inflight_bytes;
    config.first_sequence = t->first_sequence;
    config.flags = UCCL_EP_CONFIG_SINGLE_WRITER;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    if (t->strategy) CHECK_EQ(info.strategy, t->strategy);
    const uint32_t size = r->group->size;
    char *heap = info.heap;
    test_rng rng = test_rng_at(r->rank + 1);
    struct observer observer = {comm, t->channels, t->proxies, 0};
    pthread_t observing;
    CHECK_EQ(pthread_create(&observing, NULL, observe, &observer), 0);
    const uint64_t sources = (uint64_t)size * CELLS * CELL; /* own sources lie behind the cells that others write */

    for (uint64_t round = 1; round <= t->rounds; round++) {
        for (uint32_t peer = 0; peer < size; peer++) {
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                const uint64_t source = sources + ((uint64_t)peer * CELLS + cell) * CELL;
                memset(heap + source, (int)(round * 7 + r->rank * 31 + cell), CELL);
                const uint32_t channel = (uint32_t)test_below(&rng, t->channels);
                const uint64_t target = ((uint64_t)r->rank * CELLS + cell) * CELL;
                const uint32_t split = (uint32_t)test_below(&rng, 4);
                uint64_t done = 0;
                if (split == 0) { /* puts, then a signal */
                    for (; done < CELL; done += CELL / 4)
                        OK(uccl_ep_put(comm, channel, peer, source + done, target + done, CELL / 4,
                                       UCCL_EP_TIMEOUT_DEFAULT, NULL));
                    OK(uccl_ep_signal(comm, channel, peer, r->rank, 1ull << 32, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                } else {
                    if (split == 1) {
                        OK(uccl_ep_put(comm, channel, peer, source, target, CELL / 2, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                        done = CELL / 2;
                    }
                    OK(uccl_ep_put_signal(comm, channel, peer, source + done, target + done, CELL - done, r->rank,
                                          1ull << 32, UCCL_EP_TIMEOUT_DEFAULT, NULL));
                }
            }
        }
        for (uint32_t peer = 0; peer < size; peer++) {
            uint64_t seen = 0;
            OK(uccl_ep_wait_signal(comm, peer, (round * CELLS) << 32, peer, UCCL_EP_TIMEOUT_DEFAULT, &seen));
            CHECK_EQ(seen, (round * CELLS) << 32);
            for (uint32_t cell = 0; cell < CELLS; cell++) {
                const char expected = (char)(round * 7 + peer * 31 + cell);
                const char *at = heap + ((uint64_t)peer * CELLS + cell) * CELL;
                for (uint32_t i = 0; i < CELL; i++)
                    CHECK(at[i] == expected, "round %" PRIu64 " peer %u cell %u byte %u", round, peer, cell, i);
            }
            OK(uccl_ep_signal(comm, 0, peer, 32 + r->rank, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        for (uint32_t peer = 0; peer < size; peer++)
            OK(uccl_ep_wait_signal(comm, 32 + peer, round, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    }
    __atomic_store_n(&observer.stop, 1, __ATOMIC_RELEASE);
    pthread_join(observing, NULL);
    uint64_t failed = 0, posted = 0;
    for (uint32_t c = 0; c < t->channels; c++) {
        uccl_ep_channel_stats stats;
        OK(uccl_ep_channel_query(comm, c, &stats));
        failed += stats.failed;
        posted += stats.posted;
        CHECK_EQ(stats.complete, stats.posted);
        CHECK_EQ(stats.source, stats.posted);
    }
    CHECK_EQ(failed, 0);
    CHECK(posted >= t->rounds * CELLS * size, "posted %" PRIu64, posted);
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

static void traffic(uint32_t size, struct traffic t) {
    printf("traffic of %u ranks: %s, strategy %u, %u channels, %u proxies, ring 2^%u, first ticket 2^63-ish %d\n", size,
           t.options, t.strategy, t.channels, t.proxies, t.ring_log2, t.first_ticket != 0);
    run_ranks(size, traffic_rank, &t);
}

static void test_traffic(void) {
    static const char *const manners[] = {
        "seed=1",
        "any_order=1,seed=2",
        "any_order=1,atomic_order=0,double=1,seed=3",
        "lazy=3,room=5,again=50,seed=4",
        "any_order=1,atomic_order=0,lazy=2,room=4,again=50,seed=5",
        "room=1,seed=6",
        "max_message=48,lazy=1,seed=7",
        "any_order=1,max_message=48,room=7,again=20,seed=8",
    };
    const uint64_t rounds = test_scaled(20);
    for (size_t i = 0; i < sizeof manners / sizeof *manners; i++) {
        traffic(3, (struct traffic){manners[i], UCCL_EP_STRATEGY_AUTO, 3, 2, 6, 0, rounds, 0, 0});
        traffic(2,
                (struct traffic){manners[i], UCCL_EP_STRATEGY_SENDER_HOLD, 2, 1, 3, INT64_MAX - 100, rounds, 4096, 0});
    }
    /* Strategies that the target's proxy takes part in, or that do without adds: numbers, counts and tags wrap. */
    static const uint64_t firsts[] = {0, (1ull << 24) - 300, (1ull << 40) - 300, UINT64_MAX - 300};
    static const struct {
        const char *options;
        uint32_t strategy;
    } others[] = {
        {"imm=32,adds=0,seed=11", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {"imm=24,adds=0,any_order=1,double=1,lazy=2,seed=12", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {"imm=32,adds=0,any_order=1,room=4,again=50,max_message=48,seed=13", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {"adds=0,any_order=1,lazy=1,seed=14", UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX},
        {"adds=0,align=16,any_order=1,lazy=1,seed=19", UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX},
        {"adds=0,imm=32,align=16,any_order=1,seed=20", UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {"adds=0,room=1,again=50,seed=15", UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX},
        {"adds=0,imm=8,any_order=1,double=1,seed=16", UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX},
        {"adds=0,any_order=1,lazy=1,seed=17", UCCL_EP_STRATEGY_SENDER_HOLD_SUM},
        {"adds=0,room=3,again=30,max_message=48,seed=18", UCCL_EP_STRATEGY_SENDER_HOLD_SUM},
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        traffic(3, (struct traffic){others[i].options, others[i].strategy, 3, 2, 6, 0, rounds, 0,
                                    firsts[i % (sizeof firsts / sizeof *firsts)]});
    traffic(4, (struct traffic){"seed=9", UCCL_EP_STRATEGY_ORDERED_ATOMIC, 4, 4, 11, (1ull << 32) - 50, rounds, 0, 0});
    traffic(1, (struct traffic){"seed=9", UCCL_EP_STRATEGY_AUTO, 1, 1, 1, (1ull << 16) - 3, rounds, 0, 0});
}

/* --------------------------------------------------------------------------------------------------------- failures */

static uccl_ep_comm *open_comm(thread_rank *r, const uccl_ep_config *config, uccl_ep_comm_info *info) {
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(config, &bootstrap, &comm));
    *info = (uccl_ep_comm_info){.size_of_struct = sizeof *info};
    OK(uccl_ep_comm_query(comm, info));
    return comm;
}

/* A write fails: the waits that cover it say so, nothing later to that target is seen, others go on, reset heals. */
static void poison_rank(thread_rank *r, void *argument) {
    uccl_ep_config config = base_config(argument);
    config.channels = 2;
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_comm(r, &config, &info);
    uint64_t bad = 0, word = 0;
    if (r->rank == 0) {
        OK(uccl_ep_put(comm, 0, 1, 0, 4096, 64, UCCL_EP_TIMEOUT_DEFAULT, NULL)); /* poisoned */
        OK(uccl_ep_signal(comm, 0, 2, 5, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        EXPECT(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_NIC);
        const uccl_ep_error *e = uccl_ep_last_error();
        CHECK_EQ(e->peer, 1);
        CHECK_EQ(e->channel, 0);
        CHECK_EQ(e->ticket, 0);
        CHECK_EQ(e->vendor_code, 42);
        CHECK(strstr(e->text, "loop error"), "%s", e->text);
        EXPECT(uccl_ep_signal(comm, 0, 1, 6, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL), UCCL_EP_E_CLOSED);
        /* Also when the command is in the ring already (ERR-6). */
        const uccl_ep_command command = {.op = UCCL_EP_OP_SIGNAL, .target = 1, .slot = 6, .add = 1};
        uccl_ep_words words;
        OK(uccl_ep_encode(&command, &words));
        OK(uccl_ep_post_raw(comm, 0, &words, 1, UCCL_EP_TIMEOUT_DEFAULT, &bad));
        EXPECT(uccl_ep_wait(comm, 0, bad, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_NIC);
        /* The other target is served all the same (ERR-5); its wait on the channel reports the failure it covers. */
        OK(uccl_ep_signal(comm, 0, 2, 5, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    }
    if (r->rank == 2) OK(uccl_ep_wait_signal(comm, 5, 2, 0, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    thread_barrier(r);
    if (r->rank == 1) {
        OK(uccl_ep_read_signal(comm, 6, &word));
        CHECK_EQ(word, 0); /* ERR-3 */
    }
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    OK(uccl_ep_reset(comm, &bootstrap));
    uint32_t total = 1;
    OK(uccl_ep_errors(comm, NULL, 0, &total));
    CHECK_EQ(total, 0);
    OK(uccl_ep_read_signal(comm, 5, &word));
    CHECK_EQ(word, 0);
    thread_barrier(r); /* signals are compared exactly below */
    if (r->rank == 0) {
        OK(uccl_ep_put_signal(comm, 0, 1, 0, 8192, 64, 6, 3, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    }
    if (r->rank == 1) OK(uccl_ep_wait_signal(comm, 6, 3, 0, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    /* Pairs that were made anew and pairs that were not. */
    for (uint32_t peer = 0; peer < 3; peer++) OK(uccl_ep_signal(comm, 0, peer, 9, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    OK(uccl_ep_wait_signal(comm, 9, 3, UCCL_EP_ANY_RANK, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    thread_barrier(r);
    /* Counts begin anew with an incarnation: here the same one comes again, first thing after the reset. */
    for (uint32_t again = 0; again < 20; again++) {
        uint64_t ticket;
        if (r->rank == 0) {
            OK(uccl_ep_put(comm, 0, 1, 0, 4096, 64, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            EXPECT(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_NIC);
        }
        thread_barrier(r);
        OK(uccl_ep_reset(comm, &bootstrap));
        if (r->rank != 0) continue;
        OK(uccl_ep_signal(comm, 0, 1, 7, 1, UCCL_EP_TIMEOUT_DEFAULT, &ticket));
        OK(uccl_ep_wait(comm, 0, ticket, UCCL_EP_TIMEOUT_DEFAULT));
    }
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

/* A peer to whom nothing is outstanding is given up: the return words of the others are looked at as before. */
static void exclude_idle_rank(thread_rank *r, void *argument) {
    uccl_ep_config config = base_config(argument);
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_comm(r, &config, &info);
    if (r->rank == 0) {
        OK(uccl_ep_exclude(comm, 1));
        for (uint64_t k = 1; k <= 3; k++) {
            OK(uccl_ep_put_signal(comm, 0, 2, 0, 8192, 64, 6, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        }
    }
    thread_barrier(r);
    uint64_t word = 0;
    OK(uccl_ep_read_signal(comm, 6, &word));
    CHECK_EQ(word, r->rank == 2 ? 3 : 0);
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

/* A silent target: its commands fail at the deadline, all others complete long before, exclude lets the rest go on. */
static void stall_rank(thread_rank *r, void *argument) {
    uccl_ep_config config = base_config(argument);
    config.peer_timeout_ns = SECOND / 2;
    config.ring_log2 = 6;
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_comm(r, &config, &info);
    if (r->rank == 0) {
        uint64_t last = 0;
        for (int i = 0; i < 40; i++) OK(uccl_ep_put(comm, 0, 1, 0, 4096, 64, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        for (int i = 0; i < 500; i++)
            OK(uccl_ep_put_signal(comm, 0, 2, 0, 4096, 64, 3, 1, UCCL_EP_TIMEOUT_DEFAULT, &last));
    }
    if (r->rank == 2) OK(uccl_ep_wait_signal(comm, 3, 500, 0, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    if (r->rank == 0) {
        EXPECT(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_PEER_LOST);
        CHECK_EQ(uccl_ep_last_error()->peer, 1);
        EXPECT(uccl_ep_wait_signal(comm, 9, 1, UCCL_EP_ANY_RANK, UCCL_EP_TIMEOUT_DEFAULT, NULL), UCCL_EP_E_PEER_LOST);
        uint64_t lost = 0;
        OK(uccl_ep_lost(comm, &lost, 1));
        CHECK_EQ(lost, 2);
        OK(uccl_ep_exclude(comm, 1));
        OK(uccl_ep_put_signal(comm, 0, 2, 0, 4096, 64, 3, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        OK(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT));
        EXPECT(uccl_ep_wait_signal(comm, 9, 1, UCCL_EP_ANY_RANK, SECOND / 100, NULL), UCCL_EP_E_DEADLINE);
        EXPECT(uccl_ep_put(comm, 0, 1, 0, 0, 16, UCCL_EP_TIMEOUT_DEFAULT, NULL), UCCL_EP_E_PEER_LOST);
    }
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

/* -------------------------------------------------------------------------------- one rank that turns its own crank */

static uccl_ep_comm *open_single(const char *options, uint32_t ring_log2, uccl_ep_comm_info *info, thread_rank *r) {
    uccl_ep_config config = base_config(options);
    config.progress = UCCL_EP_PROGRESS_CALLER;
    config.ring_log2 = ring_log2;
    return open_comm(r, &config, info);
}

/* One batch of 64 puts: the NIC is asked for a completion every 32, of large ones for each. */
static void completions_rank(thread_rank *r, void *argument) {
    (void)argument;
    static const struct { uint64_t bytes, completions; } rows[] = {{16, 2}, {16384, 2}, {32768, 64}, {524288, 64}};
    uccl_ep_comm_info info;
    uccl_ep_config config = base_config("");
    config.progress = UCCL_EP_PROGRESS_CALLER;
    config.ring_log2 = 7;
    config.first_sequence = 1; /* a batch would end where they wrap */
    uccl_ep_comm *comm = open_comm(r, &config, &info);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uccl_ep_proxy_stats before, after;
        OK(uccl_ep_proxy_query(comm, 0, &before));
        for (uint32_t k = 0; k < 64; k++) OK(uccl_ep_put(comm, 0, 0, 0, 524288, rows[i].bytes, 0, NULL));
        OK(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT));
        OK(uccl_ep_proxy_query(comm, 0, &after));
        CHECK_EQ(after.submits - before.submits, 1);
        CHECK_EQ(after.completions - before.completions, rows[i].completions);
    }
    uccl_ep_comm_destroy(comm);
}

static void full_ring_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_single("stall=0", 3, &info, r);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    /* The window is 64: so many can be taken from a ring of 8 while none completes. */
    uint64_t ticket = 0, n = 0;
    uccl_ep_status status;
    while ((status = uccl_ep_put(comm, 0, 0, 0, 4096, 16, 0, &ticket)) == UCCL_EP_OK || n < 72) {
        if (status == UCCL_EP_OK) CHECK_EQ(ticket, n++);
        OK(uccl_ep_progress(comm, NULL));
        CHECK(n <= 72, "more than window and ring were taken");
    }
    CHECK_EQ(status, UCCL_EP_E_AGAIN);
    EXPECT(uccl_ep_wait(comm, 0, 5, 0), UCCL_EP_IN_PROGRESS);
    EXPECT(uccl_ep_wait(comm, 0, 5, SECOND / 100), UCCL_EP_E_DEADLINE);
    EXPECT(uccl_ep_wait(comm, 0, 72, 0), UCCL_EP_E_RANGE);
    /* A producer that gives up closes the channel (PRG-3). */
    EXPECT(uccl_ep_put(comm, 0, 0, 0, 4096, 16, SECOND / 100, NULL), UCCL_EP_E_DEADLINE);
    const uint64_t until = test_now_ns() + 10 * SECOND;
    do {
        OK(uccl_ep_progress(comm, NULL));
        status = uccl_ep_put(comm, 0, 0, 0, 4096, 16, 0, NULL);
    } while (status == UCCL_EP_E_AGAIN && test_now_ns() < until);
    CHECK_EQ(status, UCCL_EP_E_CLOSED);
    uccl_ep_comm_destroy(comm);
    /* The same hole, healed by a reset. */
    uccl_ep_config config = base_config("lazy=0");
    config.progress = UCCL_EP_PROGRESS_CALLER;
    config.ring_log2 = 3;
    comm = open_comm(r, &config, &info);
    uccl_ep_ring ring;
    OK(uccl_ep_channel_ring(comm, 0, &ring));
    uccl_ep_ring_reserve(&ring, 3);
    __atomic_store_n(ring.gave_up, 1, __ATOMIC_RELEASE);
    OK(uccl_ep_reset(comm, &bootstrap));
    memset(info.heap, 7, 64);
    for (int i = 0; i < 100; i++)
        OK(uccl_ep_put_signal(comm, 0, 0, 0, 4096, 64, 1, 1, UCCL_EP_TIMEOUT_DEFAULT, &ticket));
    OK(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT));
    CHECK_EQ(ticket, 102);
    CHECK_EQ(((char *)info.heap)[4096 + 63], 7);
    uccl_ep_comm_destroy(comm);
}

/* Random words in the ring: refused, or what they say; never a byte or a word elsewhere. */
static void fuzz_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_single("seed=1", 10, &info, r);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    test_rng rng = test_rng_at(77);
    const uint64_t total = test_scaled(10000000);
    uint64_t posted = 0, closed = 0, resets = 0, executed = 0;
    uccl_ep_words words[256];
    while (posted < total) {
        for (int i = 0; i < 256; i++) {
            words[i].word[0] = test_random(&rng) & ~UCCL_EP_PARITY_BIT;
            words[i].word[1] = test_random(&rng) & ~UCCL_EP_PARITY_BIT;
            /* Uniform bits name no rank and close the channel: let few do so, and some be nearly or wholly right. */
            if (test_below(&rng, 4096)) words[i].word[1] &= ~UCCL_EP_FIELD_MASK(TARGET);
            if (i % 4 != 1) continue;
            words[i].word[0] &=
                UCCL_EP_FIELD_MASK(OP) | 0x1ffffull << UCCL_EP_LOCAL_SHIFT | 0x7full << UCCL_EP_SLOT_SHIFT;
            words[i].word[1] &= 0x1ffffull << UCCL_EP_REMOTE_SHIFT | 0xffull << UCCL_EP_LENGTH_SHIFT;
        }
        /* A failure closes the target for the rest of the incarnation: short ones let what is right be executed. */
        const uint32_t n = 1 + (uint32_t)test_below(&rng, 256);
        const uccl_ep_status status = uccl_ep_post_raw(comm, 0, words, n, UCCL_EP_TIMEOUT_DEFAULT, NULL);
        closed += status == UCCL_EP_E_CLOSED;
        if (status != UCCL_EP_E_CLOSED) {
            OK(status);
            posted += n;
            OK(uccl_ep_progress(comm, NULL));
        }
        if (status == UCCL_EP_E_CLOSED || !test_below(&rng, 4)) {
            OK(uccl_ep_reset(comm, &bootstrap));
            resets++;
        }
    }
    uccl_ep_channel_stats stats;
    OK(uccl_ep_channel_query(comm, 0, &stats));
    executed = stats.posted - stats.failed;
    CHECK(stats.failed && closed && executed > posted / 1000, "%" PRIu64 " executed of %" PRIu64, executed, posted);
    printf("fuzz: %" PRIu64 " random commands, %" PRIu64 " refused, %" PRIu64 " times the channel closed, %" PRIu64
           " resets\n",
           posted, (uint64_t)stats.failed, closed, resets);
    uccl_ep_comm_destroy(comm);
}

/* What was taken before the command that closed the channel ends well, and that one's wait tells of it, whenever they
 * look. */
static void closing_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("lazy=1");
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_comm(r, &config, &info);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    for (uint64_t round = test_scaled(2000); round; round--) {
        const uccl_ep_command good = {.op = UCCL_EP_OP_PUT, .remote = 4096, .bytes = 64, .granularity = 16};
        const uccl_ep_command bad = {.op = UCCL_EP_OP_SIGNAL, .target = 7, .add = 1};
        uccl_ep_words words[2];
        uint64_t last = 0;
        OK(uccl_ep_encode(&good, &words[0]));
        OK(uccl_ep_encode(&bad, &words[1]));
        OK(uccl_ep_post_raw(comm, 0, words, 2, UCCL_EP_TIMEOUT_DEFAULT, &last));
        OK(uccl_ep_wait(comm, 0, last - 1, UCCL_EP_TIMEOUT_DEFAULT));
        EXPECT(uccl_ep_wait(comm, 0, last, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_MALFORMED);
        OK(uccl_ep_reset(comm, &bootstrap));
        /* The wait that begins at once meets every moment of the closing. */
        OK(uccl_ep_post_raw(comm, 0, words + 1, 1, UCCL_EP_TIMEOUT_DEFAULT, &last));
        EXPECT(uccl_ep_wait(comm, 0, last, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_MALFORMED);
        OK(uccl_ep_reset(comm, &bootstrap));
    }
    uccl_ep_comm_destroy(comm);
}

static void *abort_soon(void *argument) {
    while (!test_now_ns()) sched_yield();
    uccl_ep_abort(argument, "the test says so");
    return NULL;
}

static void abort_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("stall=0");
    uccl_ep_comm_info info;
    uccl_ep_comm *comm = open_comm(r, &config, &info);
    OK(uccl_ep_put(comm, 0, 0, 0, 4096, 64, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, abort_soon, comm), 0);
    EXPECT(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_ABORTED);
    CHECK(strstr(uccl_ep_last_error()->text, "the test says so"), "%s", uccl_ep_last_error()->text);
    EXPECT(uccl_ep_put(comm, 0, 0, 0, 4096, 64, UCCL_EP_TIMEOUT_DEFAULT, NULL), UCCL_EP_E_ABORTED);
    EXPECT(uccl_ep_wait_signal(comm, 0, 1, UCCL_EP_ANY_RANK, UCCL_EP_TIMEOUT_DEFAULT, NULL), UCCL_EP_E_ABORTED);
    pthread_join(thread, NULL);
    uccl_ep_comm_destroy(comm);
}

/* --------------------------------------------------------------------------------------------------------- refusals */

static void refusals_rank(thread_rank *r, void *argument) {
    (void)argument;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    struct {
        const char *what;
        uccl_ep_config config;
        uccl_ep_status expected;
    } rows[] = {
        {"no heap", base_config(""), UCCL_EP_E_RANGE},
        {"heap beyond 16 GiB at granularity 4", base_config(""), UCCL_EP_E_RANGE},
        {"granularity 8", base_config(""), UCCL_EP_E_INVALID},
        {"ring of one slot", base_config(""), UCCL_EP_E_RANGE},
        {"more proxies than channels", base_config(""), UCCL_EP_E_RANGE},
        {"unknown option", base_config("colour=red"), UCCL_EP_E_INVALID},
        {"no library", base_config(""), UCCL_EP_E_NOT_A_BACKEND},
        {"library that is none", base_config(""), UCCL_EP_E_NOT_A_BACKEND},
        {"strategy without its needs", base_config("any_order=1"), UCCL_EP_E_CAPABILITY},
        {"cpus outside the set", base_config(""), UCCL_EP_E_INVALID},
        {"cpus that are none", base_config(""), UCCL_EP_E_INVALID},
    };
    rows[0].config.heap_bytes = 0;
    rows[1].config.heap_bytes = (16ull << 30) + 4, rows[1].config.granularity = 4;
    rows[2].config.granularity = 8;
    rows[3].config.ring_log2 = 17;
    rows[4].config.proxies = 2;
    rows[6].config.backend = "/nonexistent/libnic.so";
    rows[7].config.backend = "libm.so.6";
    rows[8].config.strategy = UCCL_EP_STRATEGY_ORDERED_ATOMIC;
    rows[9].config.cpus = "1023";
    rows[10].config.cpus = "1-";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const uccl_ep_status status = uccl_ep_comm_create(&rows[i].config, &bootstrap, &comm);
        CHECK(status == rows[i].expected, "%s: %s: %s", rows[i].what, uccl_ep_status_name(status),
              uccl_ep_last_error()->text);
        CHECK(!comm && uccl_ep_last_error()->text[0], "%s", rows[i].what);
        printf("refused, %s: %s\n", rows[i].what, uccl_ep_last_error()->text);
    }
}

/* One rank cannot: all of them learn which and why. */
static void disagree_rank(thread_rank *r, void *argument) {
    (void)argument;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    uccl_ep_config config = base_config(r->rank == 2 ? "colour=red" : "");
    EXPECT(uccl_ep_comm_create(&config, &bootstrap, &comm), UCCL_EP_E_INVALID);
    if (r->rank != 2) CHECK(strstr(uccl_ep_last_error()->text, "rank 2"), "%s", uccl_ep_last_error()->text);
    config = base_config("");
    config.signals = r->rank == 1 ? 128 : 64;
    EXPECT(uccl_ep_comm_create(&config, &bootstrap, &comm), UCCL_EP_E_BOOTSTRAP);
    CHECK(strstr(uccl_ep_last_error()->text, "signals"), "%s", uccl_ep_last_error()->text);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    test_traffic();
    run_ranks(3, poison_rank, (void *)(uintptr_t) "poison=4096,seed=1");
    run_ranks(3, poison_rank, (void *)(uintptr_t) "poison=4096,any_order=1,seed=2");
    run_ranks(3, poison_rank, (void *)(uintptr_t) "poison=4096,any_order=1,atomic_order=0,lazy=2,seed=3");
    run_ranks(3, poison_rank, (void *)(uintptr_t) "poison=4096,any_order=1,imm=32,adds=0,seed=4");
    run_ranks(3, poison_rank, (void *)(uintptr_t) "poison=4096,any_order=1,adds=0,seed=5");
    run_ranks(3, poison_rank, (void *)(uintptr_t) "poison=4096,adds=0,seed=6");
    run_ranks(3, exclude_idle_rank, (void *)(uintptr_t) "any_order=1,imm=32,adds=0,seed=1");
    run_ranks(3, exclude_idle_rank, (void *)(uintptr_t) "adds=0,seed=2");
    run_ranks(3, stall_rank, (void *)(uintptr_t) "stall=1,room=16,seed=1");
    run_ranks(3, stall_rank, (void *)(uintptr_t) "stall=1,any_order=1,atomic_order=0,seed=2");
    run_ranks(1, completions_rank, NULL);
    run_ranks(1, full_ring_rank, NULL);
    run_ranks(1, closing_rank, NULL);
    run_ranks(1, abort_rank, NULL);
    run_ranks(1, refusals_rank, NULL);
    run_ranks(3, disagree_rank, NULL);
    run_ranks(1, fuzz_rank, NULL);
    return test_end();
}
