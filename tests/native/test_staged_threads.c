/* SPDX-License-Identifier: Apache-2.0
 *
 * test_staged_threads.c: staged heaps among ranks that run at the same time, each with proxies of its own: what a
 * signal shows, what a quiet says, and when a source is free, while records, copies and words come at any moment.
 */
#include <dlfcn.h>

#include "thread_ranks.h"

#define SHM UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_shm.so"
#define EMULATION UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so"
#define SECOND 1000000000ull
#define DEFAULT UCCL_EP_TIMEOUT_DEFAULT
#define HEAP ((uint64_t)1 << 20)
#define RANKS 2u
#define CHANNELS 3u
#define CELLS 16u /* of a channel */
#define CELL 1024u

static const uccl_ep_accelerator *emulation;

static uint32_t word_of(uint64_t round, uint32_t source, uint32_t channel, uint32_t cell) {
    return (uint32_t)(round * 2654435761u + source * 40503u + channel * 977u + cell * 31u + 1);
}

/* Word by word, as kernels and drivers do: ThreadSanitizer does not see what orders two mappings of shared memory. */
static void fill(char *at, uint32_t word, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes / sizeof word; i++)
        __atomic_store_n((uint32_t *)(void *)at + i, word, __ATOMIC_RELAXED);
}

static void cell_is(const char *at, uint32_t word, const char *when) {
    for (uint32_t i = 0; i < CELL / sizeof word; i++) {
        const uint32_t seen = __atomic_load_n((const uint32_t *)(const void *)at + i, __ATOMIC_RELAXED);
        CHECK(seen == word, "word %u of a cell holds %08x and not %08x %s", i, seen, word, when);
    }
}

static void rank_body(thread_rank *r, void *argument) {
    const uint64_t rounds = *(const uint64_t *)argument;
    uccl_ep_gpu *gpu;
    void *memory;
    OK(emulation->open(0, &gpu));
    OK(emulation->device_alloc(gpu, HEAP, &memory));
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = SHM,
                                   .heap = memory,
                                   .heap_bytes = HEAP,
                                   .heap_kind = UCCL_EP_MEMORY_EMULATED,
                                   .accelerator = EMULATION,
                                   .staging = UCCL_EP_STAGING_ON,
                                   .channels = CHANNELS,
                                   .proxies = 2,
                                   .ring_log2 = 4,
                                   .timeout_ns = 60 * SECOND,
                                   .peer_timeout_ns = 60 * SECOND,
                                   .bootstrap_timeout_ns = 60 * SECOND};
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK_EQ(info.staged, 1);
    thread_barrier(r);
    char *heap = memory;
    const uint32_t peer = 1 - r->rank;
    const uint64_t sent = HEAP / 2, cells = (uint64_t)CELLS * CELL;
    for (uint64_t round = 1; round <= rounds; round++) {
        for (uint32_t c = 0; c < CHANNELS; c++) {
            for (uint32_t k = 0; k < CELLS; k++) {
                const uint64_t to = c * cells + k * (uint64_t)CELL, from = sent + to;
                fill(heap + from, word_of(round, r->rank, c, k), CELL);
                OK(uccl_ep_put(comm, c, peer, from, to, CELL / 2, DEFAULT, NULL));
                OK(uccl_ep_put_signal(comm, c, peer, from + CELL / 2, to + CELL / 2, CELL / 2, c, 1, DEFAULT, NULL));
            }
        }
        /* Cell by cell, as each is signalled. */
        for (uint32_t k = 0; k < CELLS; k++) {
            for (uint32_t c = 0; c < CHANNELS; c++) {
                OK(uccl_ep_wait_signal(comm, c, (round - 1) * CELLS + k + 1, peer, DEFAULT, NULL));
                cell_is(heap + c * cells + k * (uint64_t)CELL, word_of(round, peer, c, k), "behind its signal (SIG-2)");
            }
        }
        OK(uccl_ep_quiet_source(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
        fill(heap + sent, 0xeeeeeeee, CHANNELS * cells); /* QUI-0 */
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
        thread_barrier(r);
    }
    uccl_ep_comm_destroy(comm);
    emulation->device_free(gpu, memory);
    emulation->close(gpu);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    void *library = dlopen(EMULATION, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    const union {
        void *symbol;
        const uccl_ep_accelerator *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY)};
    CHECK(entry.symbol, "dlsym: %s", dlerror());
    emulation = entry.function();
    uint64_t rounds = test_scaled(200);
    run_ranks(RANKS, rank_body, &rounds);
    setenv("UCCL_EP_EMULATION", "lazy=4", 1);
    rounds = test_scaled(50);
    run_ranks(RANKS, rank_body, &rounds);
    unsetenv("UCCL_EP_EMULATION");
    return test_end();
}
