/* SPDX-License-Identifier: Apache-2.0
 *
 * create, with a peer whose part of every step is damaged: what it wants and promises, its addresses, its regions. Real
 * backend, real core. The peer does not exist: create ends with an error that says why, and nothing of it remains, or
 * what is sent to nobody ends.
 */
#include "fuzz_backends.h"

static void others(fuzz_bootstrap *b, uint8_t *block, uint32_t bytes, uint32_t rank) {
    (void)rank;
    fuzz_damage(b->in, block, bytes);
}

/* To those who are there and those who are not: it ends, or goes on until the deadline. */
static void send_to_all(uccl_ep_comm *comm, uint32_t size) {
    for (uint32_t target = 0; target < size; target++) {
        uint32_t worked;
        uccl_ep_status status = uccl_ep_put_signal(comm, 1, target, 0, 2048, 2048, 7, 1, 0, NULL);
        if (status != UCCL_EP_OK) fuzz_check_error(status);
        for (int turn = 0; turn < 100; turn++) {
            uccl_ep_progress(comm, &worked);
            fuzz_around_turn();
        }
        status = uccl_ep_quiet(comm, 1, 0);
        if (status < 0) fuzz_check_error(status);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    fuzz_bootstrap b = {.size = 1 + fuzz_below(&in, 3), .in = &in, .others = others};
    b.rank = fuzz_below(&in, b.size);
    const uccl_ep_bootstrap bootstrap = fuzz_bootstrap_of(&b);
    fuzz_clock clock = {.step_ns = 1000};
    fuzz_around_open(&in, b.size);
    uccl_ep_config config = {.size = sizeof config,
                             .backend = THIS_PROGRAM,
                             .backend_options = fuzz_options(b.rank),
                             .heap_bytes = 4096,
                             .signals = 8,
                             .ring_log2 = 3,
                             .channels = 2,
                             .proxies = 1 + fuzz_below(&in, 2),
                             .strategy = fuzz_below(&in, 7),
                             .progress = UCCL_EP_PROGRESS_CALLER,
                             .timeout_ns = 100000,
                             .peer_timeout_ns = 100000,
                             .bootstrap_timeout_ns = 100000,
                             .clock = fuzz_now,
                             .clock_context = &clock};
    fuzz_around_configure(&config);
    uccl_ep_comm *comm;
    const uccl_ep_status status = uccl_ep_comm_create(&config, &bootstrap, &comm);
    if (status == UCCL_EP_OK) {
        FUZZ_CHECK(comm && (FUZZ_CONNECTS_TO_NOBODY || b.size == 1), "%u ranks, of which one exists", b.size);
        send_to_all(comm, b.size);
        uccl_ep_comm_destroy(comm);
    } else {
        FUZZ_CHECK(!comm, "an error and a communicator");
        fuzz_check_error(status);
    }
    fuzz_around_close();
    return 0;
}
