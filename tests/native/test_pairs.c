/* SPDX-License-Identifier: Apache-2.0
 *
 * test_pairs.c: what endpoints have for one peer alone gets to that peer, in create and in a reset, however many steps
 * it takes. Here a step holds a few bytes: connect.c is a part of this program, and its other self stays in the
 * library.
 */
#define STEP_BYTES 96u
#include "core/connect.c"

/* Its own. */
#include "thread_ranks.h"

#define LOOP UCCL_EP_TEST_LIBRARY_DIR "/libloop_backend.so" /* checks that it is connected to the right end */
#define SECOND 1000000000ull

struct shape {
    uint32_t ranks, proxies;
};

static void signal_all(thread_rank *r, uccl_ep_comm *comm, const struct shape *s, uint64_t value) {
    for (uint32_t channel = 0; channel < s->proxies; channel++)
        for (uint32_t peer = 0; peer < s->ranks; peer++)
            OK(uccl_ep_signal(comm, channel, peer, r->rank, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    for (uint32_t peer = 0; peer < s->ranks; peer++)
        OK(uccl_ep_wait_signal(comm, peer, value * s->proxies, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
    thread_barrier(r);
}

static void rank_body(thread_rank *r, void *argument) {
    const struct shape *s = argument;
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = LOOP,
                                   .backend_options = "poison=4096",
                                   .heap_bytes = 65536,
                                   .signals = 16,
                                   .channels = s->proxies,
                                   .proxies = s->proxies,
                                   .timeout_ns = 20 * SECOND,
                                   .peer_timeout_ns = 20 * SECOND,
                                   .bootstrap_timeout_ns = 20 * SECOND};
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    signal_all(r, comm, s, 1);
    signal_all(r, comm, s, 2);
    if (r->rank == 0) {
        OK(uccl_ep_put(comm, 0, s->ranks - 1, 0, 4096, 64, UCCL_EP_TIMEOUT_DEFAULT, NULL));
        EXPECT(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT), UCCL_EP_E_NIC);
    }
    thread_barrier(r);
    OK(uccl_ep_reset(comm, &bootstrap));
    thread_barrier(r);
    signal_all(r, comm, s, 1);
    uccl_ep_comm_destroy(comm);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    /* 12 bytes a pair: from a step for each peer to one for all. */
    for (uint32_t ranks = 1; ranks <= MAX_THREAD_RANKS; ranks++)
        for (uint32_t proxies = 1; proxies <= 3; proxies++) {
            struct shape s = {ranks, proxies};
            run_ranks(ranks, rank_body, &s);
        }
    return test_end();
}
