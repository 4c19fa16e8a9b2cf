/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs.c: the backends connectx, thor, pollara and efa through the core, on a libibverbs made of software.
 *
 * The contract holds on each (SIG-2, SIG-7, PUT-6), with every strategy that it can have; receivers are always ready;
 * limits of the vendors are kept; nothing is left behind.
 */
#include "core/internal.h"
#include "verbs_ranks.h"

#define RANKS 3u
#define CELL 4096u
#define FIRST_CELL 65536u

struct setting {
    const char *library, *devices; /* the machine */
    const char *device[2];         /* of even and odd ranks */
    const char *options;
    uint32_t asked, chosen; /* strategy */
    uint32_t proxies;
};

/* Every rank to every rank, itself too: puts, then a signal; whoever sees the signal sees the puts. */
static void exchange_messages(thread_rank *r, uccl_ep_comm *comm, char *heap, uint64_t first, uint64_t rounds) {
    for (uint64_t round = first; round < first + rounds; round++) {
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            const uint64_t source = (uint64_t)peer * CELL, target = FIRST_CELL + (uint64_t)r->rank * CELL;
            const uint32_t channel = (uint32_t)(round + peer) % 2;
            memset(heap + source, (int)(round * 5 + r->rank * 17 + peer), CELL);
            OK(uccl_ep_put(comm, channel, peer, source, target, CELL - 64, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            OK(uccl_ep_put_signal(comm, channel, peer, source + CELL - 64, target + CELL - 64, 64, r->rank, 1,
                                  UCCL_EP_TIMEOUT_DEFAULT, NULL));
        }
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            OK(uccl_ep_wait_signal(comm, peer, round, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            const char *at = heap + FIRST_CELL + (size_t)peer * CELL;
            for (uint32_t i = 0; i < CELL; i++)
                CHECK(at[i] == (char)(round * 5 + peer * 17 + r->rank), "round %" PRIu64 " peer %u byte %u", round,
                      peer, i);
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        thread_barrier(r);
    }
}

static void setting_rank(thread_rank *r, void *argument) {
    const struct setting *s = argument;
    uccl_ep_config config = verbs_config(s->library, s->device[r->rank % 2], s->options);
    config.strategy = s->asked;
    config.proxies = s->proxies ? s->proxies : 1;
    config.flags = UCCL_EP_CONFIG_SINGLE_WRITER;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK(info.strategy == s->chosen, "strategy %u: %s", info.strategy, info.strategy_reason);
    /* Records name what was opened. */
    CHECK(!strcmp(info.device.name, s->device[r->rank % 2] ? s->device[r->rank % 2] : "mlx5_0"), "%s",
          info.device.name);
    exchange_messages(r, comm, info.heap, 1, 1 + test_scaled(40));
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

#define MLX "mlx5_0;mlx5_1"
#define BNXT "bnxt_re0,reuse=1;bnxt_re1"
#define IONIC "ionic_0;ionic_1"
/* What is placed twice may be read meanwhile, and is the same (PUT-7): to ThreadSanitizer a race, and no fault. */
#ifdef __SANITIZE_THREAD__
#define TWICE ",twice=0"
#else
#define TWICE
#endif
#define EFA(generation) "efa0,gen=" #generation TWICE ";efa1,gen=" #generation TWICE

static void test_settings(void) {
    static const struct setting settings[] = {
        {BACKEND("connectx"), MLX, {"mlx5_0", "mlx5_1"}, "", 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, 1},
        {BACKEND("connectx"), MLX, {"mlx5_0", "mlx5_1"}, "ack=visible", 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, 2},
        {BACKEND("connectx"), MLX, {"mlx5_0", "mlx5_1"}, "calls=0", 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, 2},
        {BACKEND("connectx"), MLX, {"mlx5_0", "mlx5_1"}, "relaxed=1", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 1},
        {BACKEND("connectx"), MLX, {"mlx5_1", "mlx5_0"}, "relaxed=1,srq=0", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 2},
        {BACKEND("connectx"), MLX, {"mlx5_0", "mlx5_0"}, "atomics=0", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 1},
        {BACKEND("connectx"),
         MLX,
         {"mlx5_0", "mlx5_1"},
         "",
         UCCL_EP_STRATEGY_SENDER_HOLD,
         UCCL_EP_STRATEGY_SENDER_HOLD,
         1},
        {BACKEND("connectx"),
         MLX,
         {"mlx5_0", "mlx5_1"},
         "",
         UCCL_EP_STRATEGY_SENDER_HOLD_SUM,
         UCCL_EP_STRATEGY_SENDER_HOLD_SUM,
         1},
        {BACKEND("connectx"),
         MLX,
         {"mlx5_0", "mlx5_1"},
         "",
         UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX,
         UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX,
         1},
        /* The first one that can be used. */
        {BACKEND("connectx"),
         "bnxt_re0;mlx5_9,state=1;mlx5_0",
         {NULL, NULL},
         "",
         0,
         UCCL_EP_STRATEGY_ORDERED_ATOMIC,
         1},
        /* Two NICs a rank: each adds, in words of its own. */
        {BACKEND("connectx"), MLX, {"mlx5_0+mlx5_1", "mlx5_1+mlx5_0"}, "", 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, 2},
        /* Regions in pieces. */
        {BACKEND("connectx"),
         "mlx5_0,max_mr_size=0x10000;mlx5_1,max_mr_size=0x18000",
         {"mlx5_0", "mlx5_1"},
         "",
         0,
         UCCL_EP_STRATEGY_ORDERED_ATOMIC,
         1},
        {BACKEND("connectx"),
         "mlx5_0,layer=ib,lid=3;mlx5_1,layer=ib,lid=4",
         {"mlx5_0", "mlx5_1"},
         "inline=0",
         0,
         UCCL_EP_STRATEGY_ORDERED_ATOMIC,
         1},
        {BACKEND("thor"), BNXT, {"bnxt_re0", "bnxt_re1"}, "", 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, 1},
        {BACKEND("thor"),
         BNXT,
         {"bnxt_re0", "bnxt_re1"},
         "",
         UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
         UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
         2},
        /* A library that does not add, and one that mixes up requests by calls. */
        {BACKEND("thor"),
         "bnxt_re0,adds=0;bnxt_re1,wr=1,mixes=1",
         {"bnxt_re0", "bnxt_re1"},
         "",
         0,
         UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
         1},
        {BACKEND("pollara"), IONIC, {"ionic_0", "ionic_1"}, "", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 1},
        {BACKEND("pollara"), IONIC, {"ionic_1", "ionic_1"}, "", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 2},
        {BACKEND("pollara"),
         "rxe0;rxe1",
         {"rxe0", "rxe1"},
         "limits_only=1",
         0,
         UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
         1},
        {BACKEND("connectx"), "rxe0;rxe1", {"rxe0", "rxe1"}, "limits_only=1", 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, 1},
        /* Datagrams: receives posted and not, placed twice, inline, one NIC of all, two of each, held by the sender. */
        {BACKEND("efa"), EFA(2), {"efa0", "efa1"}, "", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 1},
        {BACKEND("efa"), EFA(3), {"efa0", "efa1"}, "", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 2},
        {BACKEND("efa"), EFA(3), {"efa0", "efa0"}, "unsolicited=0", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 1},
        {BACKEND("efa"), EFA(4), {"efa0", "efa1"}, "inline=64", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 1},
        {BACKEND("efa"), EFA(4), {"efa0+efa1", "efa1+efa0"}, "", 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, 2},
        {BACKEND("efa"),
         EFA(3),
         {"efa0", "efa1"},
         "ack=visible",
         UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX,
         UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX,
         1},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        fake_machine(settings[i].devices);
        const fake_ibverbs_stats before = fake_stats();
        run_ranks(RANKS, setting_rank, (void *)&settings[i]);
        const fake_ibverbs_stats after = fake_stats();
        CHECK_EQ(after.rnr_naks, before.rnr_naks);
        CHECK_EQ(after.cq_overruns, before.cq_overruns);
        check_nothing_left();
        printf("%s on %s (%s): %" PRIu64 " requests, %" PRIu64 " doorbells, %" PRIu64 " inline\n",
               strrchr(settings[i].library, '_') + 1, settings[i].device[0] ? settings[i].device[0] : "any",
               settings[i].options, after.posted - before.posted, after.doorbells - before.doorbells,
               after.inlined - before.inlined);
    }
}

/* Many bytes under way, in long lists, where the NIC fails retries and lists above its limits; and adds of any value.
 */
static void limits_rank(thread_rank *r, void *argument) {
    const struct setting *s = argument;
    uccl_ep_config config = verbs_config(s->library, s->device[r->rank % 2], s->options);
    config.heap_bytes = 16 << 20;
    config.proxies = s->proxies;
    config.channels = s->proxies > 2 ? s->proxies : 2;
    const uint32_t ranks = r->group->size, channels = config.channels;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    /* What all proxies of the NIC may have under way: bytes dealt out, a piece on top, and what is not counted. */
    const uint64_t limit = comm->caps.max_inflight_bytes;
    const uccl_ep_config *c = &comm->config;
    const uint64_t under_way = c->max_inflight_bytes + c->max_message_bytes + c->max_inflight * 16ull;
    CHECK(!limit || s->proxies * under_way <= limit,
          "%u proxies with %" PRIu64 " bytes each, and the NIC takes %" PRIu64, s->proxies, under_way, limit);
    char *heap = info.heap;
    memset(heap, (int)(0x40 + r->rank), 1 << 20);
    thread_barrier(r); /* the others' flushes read a heap's first word */
    /* All to rank 0 (incast), large ones and then as many small ones. */
    for (uint32_t k = 0; k < 8; k++)
        OK(uccl_ep_put(comm, k % channels, 0, 0, (2 + r->rank * 4ull) << 20, 1 << 20, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    for (uint32_t k = 0; k < 600; k++)
        OK(uccl_ep_put_signal(comm, k % channels, 0, 0, ((2 + r->rank * 4ull) << 20) + k % 50 * 64, 48, r->rank, 1,
                              UCCL_EP_TIMEOUT_DEFAULT, NULL));
    static const uint64_t adds[] = {0x0102030405060708, 1ull << 63, UINT64_MAX, 1};
    for (size_t k = 0; k < 4; k++) OK(uccl_ep_signal(comm, 0, 0, 9, adds[k], UCCL_EP_TIMEOUT_DEFAULT, NULL));
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    thread_barrier(r);
    if (r->rank == 0) {
        uint64_t word;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            OK(uccl_ep_read_signal(comm, rank, &word));
            CHECK_EQ(word, 600);
            for (uint32_t i = 0; i < 1 << 20; i += 61)
                CHECK_EQ(heap[((2 + rank * 4ull) << 20) + i], (char)(0x40 + rank));
        }
        OK(uccl_ep_read_signal(comm, 9, &word));
        CHECK_EQ(word, ranks * (adds[0] + adds[1] + adds[2] + adds[3]));
    }
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

static void test_limits(void) {
    static const struct setting settings[] = {
        {BACKEND("thor"),
         "bnxt_re0,inflight=1572864,max_post=64;bnxt_re1,inflight=1572864,max_post=64",
         {"bnxt_re0", "bnxt_re1"},
         "",
         0,
         0,
         1},
        {BACKEND("pollara"), "ionic_0,inflight=2097152;ionic_1,inflight=2097152", {"ionic_0", "ionic_1"}, "", 0, 0, 1},
        {BACKEND("connectx"), MLX, {"mlx5_0", "mlx5_1"}, "", 0, 0, 2},
        {BACKEND("efa"), EFA(2), {"efa0", "efa1"}, "", 0, 0, 2},
        {BACKEND("efa"), EFA(3), {"efa0", "efa1"}, "", 0, 0, 2},
        /* The limit is the NIC's, and its proxies share it. */
        {BACKEND("thor"),
         "bnxt_re0,inflight=1572864,max_post=64;bnxt_re1,inflight=1572864,max_post=64",
         {"bnxt_re0", "bnxt_re1"},
         "",
         0,
         0,
         4},
        {BACKEND("pollara"), "ionic_0,inflight=2097152;ionic_1,inflight=2097152", {"ionic_0", "ionic_1"}, "", 0, 0, 4},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        fake_machine(settings[i].devices);
        run_ranks(settings[i].proxies > 2 ? 2 : RANKS, limits_rank, (void *)&settings[i]);
        const fake_ibverbs_stats s = fake_stats();
        check_nothing_left();
        CHECK_EQ(s.rnr_naks, 0);
        CHECK_EQ(s.cq_overruns, 0);
        printf("%s: at most %" PRIu64 " bytes in flight on a NIC, %" PRIu64 " requests of a doorbell\n",
               settings[i].device[0], s.inflight_peak, s.longest_batch);
    }
}

/* Eight NICs of long names, as a rank names them. */
static void many_rank(thread_rank *r, void *argument) {
    uccl_ep_config config = verbs_config(BACKEND("connectx"), argument, "");
    config.channels = config.proxies = 8;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    CHECK_EQ(fake_stats().contexts, 8);
    OK(uccl_ep_put_signal(comm, 7, 0, 0, 4096, 64, 3, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    OK(uccl_ep_wait_signal(comm, 3, 1, 0, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    uccl_ep_comm_destroy(comm);
}

static void test_many(void) {
    char machine[512] = "", device[256] = "";
    for (unsigned i = 0; i < 8; i++) {
        snprintf(machine + strlen(machine), sizeof machine - strlen(machine), "%smlx5_rocep%us0f0np0", i ? ";" : "",
                 100 + i);
        snprintf(device + strlen(device), sizeof device - strlen(device), "%smlx5_rocep%us0f0np0", i ? "+" : "",
                 100 + i);
    }
    fake_machine(machine);
    run_ranks(1, many_rank, device);
    check_nothing_left();
}

/* Queue pairs for all ranks of the largest communicator: what their requests take of a proxy's memory, of 256 bytes
 * each and rounded up to a power of two as NICs do. */
static void test_queue_memory(void) {
    for (uint32_t ranks = 1; ranks <= UCCL_EP_MAX_RANKS; ranks = ranks < 4 ? ranks + 1 : ranks * 2) {
        uccl_ep_comm *comm = calloc(1, sizeof *comm);
        CHECK(comm, "no memory");
        comm->size = ranks;
        comm->config.proxies = 1;
        comm->config.granularity = UCCL_EP_GRANULARITY_COARSE;
        config_limits(comm);
        uint64_t depth = 1;
        while (depth < comm->config.max_inflight_peer + 1) depth *= 2;
        CHECK_EQ(depth, comm->config.max_inflight_peer + 1);
        CHECK(ranks * depth * 256 <= 32 << 20, "%u ranks: %" PRIu64 " bytes", ranks, ranks * depth * 256);
        free(comm);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    test_settings();
    test_limits();
    test_many();
    test_queue_memory();
    return test_end();
}
