/* SPDX-License-Identifier: Apache-2.0
 *
 * test_mixed.c: ranks whose NICs promise different things. What one of them lacks, none of them may use: the strategy,
 * its reason, and how commands retire are the same on all, and the contract holds (SIG-2, SIG-7). What cannot go
 * together is refused on all of them, with both named.
 */
#include "thread_ranks.h"

#define LOOP UCCL_EP_TEST_LIBRARY_DIR "/libloop_backend.so"
#define SHM UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_shm.so"
#define SECOND 1000000000ull
#define RANKS 3u
#define CELL 4096u
#define FIRST_CELL 65536u

struct mixture {
    const char *options[RANKS]; /* of each rank's NIC */
    uint32_t asked;             /* strategy */
    uint32_t chosen;            /* 0: refused */
    const char *said;           /* in the refusal */
};

static uccl_ep_config config_of(const char *library, const char *options) {
    return (uccl_ep_config){.size = sizeof(uccl_ep_config),
                            .backend = library,
                            .backend_options = options,
                            .heap_bytes = 1 << 20,
                            .signals = 64,
                            .channels = 2,
                            .timeout_ns = 20 * SECOND,
                            .peer_timeout_ns = 20 * SECOND,
                            .bootstrap_timeout_ns = 20 * SECOND};
}

/* Every rank to every rank: puts, then a signal; whoever sees the signal sees the puts. */
static void exchange_messages(thread_rank *r, uccl_ep_comm *comm, char *heap) {
    const uint64_t rounds = 1 + test_scaled(60);
    for (uint64_t round = 1; round <= rounds; round++) {
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            const uint64_t source = (uint64_t)peer * CELL, target = FIRST_CELL + (uint64_t)r->rank * CELL;
            const uint32_t channel = (uint32_t)(round + peer) % 2;
            memset(heap + source, (int)(round * 5 + r->rank * 17 + peer), CELL);
            OK(uccl_ep_put(comm, channel, peer, source, target, CELL / 2, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            OK(uccl_ep_put_signal(comm, channel, peer, source + CELL / 2, target + CELL / 2, CELL / 2, r->rank, 1,
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

static void mixture_rank(thread_rank *r, void *argument) {
    const struct mixture *m = argument;
    uccl_ep_config config = config_of(LOOP, m->options[r->rank]);
    config.strategy = m->asked;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    if (!m->chosen) {
        EXPECT(uccl_ep_comm_create(&config, &bootstrap, &comm), UCCL_EP_E_CAPABILITY);
        CHECK(strstr(uccl_ep_last_error()->text, m->said), "%s", uccl_ep_last_error()->text);
        return;
    }
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK_EQ(info.strategy, m->chosen);
    static char reasons[RANKS][sizeof info.strategy_reason];
    memcpy(reasons[r->rank], info.strategy_reason, sizeof info.strategy_reason);
    thread_barrier(r);
    CHECK(reasons[0][0] && !strcmp(reasons[0], reasons[r->rank]), "rank 0: %s; rank %u: %s", reasons[0], r->rank,
          reasons[r->rank]);
    exchange_messages(r, comm, info.heap);
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

static void test_mixtures(void) {
    static const struct mixture mixtures[] = {
        {{"seed=1", "seed=2", "seed=3"}, 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC, ""},
        /* One rank's NIC does not order adds behind writes: nobody relies on it. */
        {{"seed=1", "atomic_order=0,seed=2", "seed=3"}, 0, UCCL_EP_STRATEGY_SENDER_HOLD, ""},
        {{"seed=1", "seed=2", "atomic_order=0,lazy=2,seed=3"}, 0, UCCL_EP_STRATEGY_SENDER_HOLD, ""},
        /* One rank's completions come in any order and do not stop at an error: every rank counts each of its own. */
        {{"any_order=1,seed=1", "seed=2", "lazy=2,seed=3"}, 0, UCCL_EP_STRATEGY_SENDER_HOLD, ""},
        /* Each rank lacks something else. */
        {{"any_order=1,double=1,seed=1", "atomic_order=0,room=3,seed=2", "max_message=48,again=30,seed=3"},
         0,
         UCCL_EP_STRATEGY_SENDER_HOLD,
         ""},
        {{"atomic_order=0,seed=1", "seed=2", "seed=3"}, UCCL_EP_STRATEGY_SENDER_HOLD, UCCL_EP_STRATEGY_SENDER_HOLD, ""},
        /* Numbers are as wide as the narrowest immediates; where one rank has none, nobody uses them. */
        {{"adds=0,imm=32,seed=1", "adds=0,imm=24,seed=2", "imm=64,seed=3"},
         0,
         UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
         ""},
        {{"adds=0,imm=32,seed=1", "adds=0,seed=2", "imm=32,any_order=1,seed=3"},
         0,
         UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX,
         ""},
        /* One NIC writes 16 bytes at least: a duty, so all lay out their mailboxes for it. */
        {{"adds=0,seed=1", "adds=0,align=16,lazy=1,seed=2", "adds=0,any_order=1,seed=3"},
         0,
         UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX,
         ""},
        {{"adds=0,imm=32,align=16,seed=1", "adds=0,imm=32,seed=2", "adds=0,imm=32,any_order=1,seed=3"},
         0,
         UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
         ""},
        /* Asked for, and one NIC cannot: no rank, not even one whose own NIC can, begins. */
        {{"seed=1", "seed=2", "atomic_order=0,seed=3"},
         UCCL_EP_STRATEGY_ORDERED_ATOMIC,
         0,
         "give rank 2 another NIC (device): unlike others' its own lacks adds in order"},
        {{"any_order=1,seed=1", "seed=2", "seed=3"},
         UCCL_EP_STRATEGY_ORDERED_ATOMIC,
         0,
         "give rank 0 another NIC (device): unlike others' its own lacks that an error stops"},
    };
    for (size_t i = 0; i < sizeof mixtures / sizeof *mixtures; i++) {
        printf("%s | %s | %s\n", mixtures[i].options[0], mixtures[i].options[1], mixtures[i].options[2]);
        run_ranks(RANKS, mixture_rank, (void *)(uintptr_t)&mixtures[i]);
    }
}

/* Other backends cannot meet (L9). */
static void backends_rank(thread_rank *r, void *argument) {
    (void)argument;
    const uccl_ep_config config = config_of(r->rank == 1 ? SHM : LOOP, NULL);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    EXPECT(uccl_ep_comm_create(&config, &bootstrap, &comm), UCCL_EP_E_BOOTSTRAP);
    const char *text = uccl_ep_last_error()->text;
    CHECK(strstr(text, "backend loop") || strstr(text, "backend shm"), "%s", text);
    /* Rank 1 meets a difference with rank 0 first, the others with rank 1. */
    CHECK(strstr(text, "rank 1") && strstr(text, "loop") && strstr(text, "shm"), "rank %u: %s", r->rank, text);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    test_mixtures();
    run_ranks(RANKS, backends_rank, NULL);
    return test_end();
}
