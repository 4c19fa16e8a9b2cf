/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_gpu.c: with a GPU whose kernels do not see a NIC's writes in order, and that has no flush, as AMD's: which
 * strategy is left where the heap lies in its memory, in the host's, or is staged. The emulation is that GPU.
 */
#include <stdbool.h>

#include "verbs_ranks.h"

#include "uccl_ep/accelerator.h"

#define EMULATION UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so"
#define RANKS 2u
#define HEAP (1u << 16)

struct setting {
    const char *library, *machine, *device[2], *options;
    bool in_gpu;
    uint32_t staging, chosen;
};

static const uccl_ep_accelerator *emulation(void) {
    void *library = dlopen(EMULATION, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    const uccl_ep_accelerator *(*entry)(void);
    *(void **)(void *)&entry = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY);
    CHECK(entry, "no entry");
    return entry();
}

static void gpu_rank(thread_rank *r, void *argument) {
    const struct setting *s = argument;
    const uccl_ep_accelerator *accelerator = emulation();
    uccl_ep_gpu *gpu = NULL;
    void *memory = NULL;
    CHECK_EQ(accelerator->open(0, &gpu), UCCL_EP_OK);
    uccl_ep_config config = verbs_config(s->library, s->device[r->rank], s->options);
    config.accelerator = EMULATION;
    config.heap_bytes = HEAP;
    config.staging = s->staging;
    if (s->in_gpu) {
        CHECK_EQ(accelerator->device_alloc(gpu, HEAP, &memory), UCCL_EP_OK);
        config.heap = memory;
        config.heap_kind = UCCL_EP_MEMORY_EMULATED;
    }
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK(info.strategy == s->chosen, "strategy %u: %s", info.strategy, info.strategy_reason);
    CHECK_EQ(info.staged, s->staging == UCCL_EP_STAGING_ON);
    char *heap = s->in_gpu ? memory : info.heap;
    for (uint64_t round = 1; round <= 20; round++) {
        memset(heap, (int)(round * 2 + r->rank), 4096);
        for (uint32_t peer = 0; peer < RANKS; peer++)
            OK(uccl_ep_put_signal(comm, 0, peer, 0, 8192 + r->rank * 4096ull, 4096, r->rank, 1, UCCL_EP_TIMEOUT_DEFAULT,
                                  NULL));
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            OK(uccl_ep_wait_signal(comm, peer, round, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            for (uint32_t i = 0; i < 4096; i++)
                CHECK_EQ((uint8_t)heap[8192 + peer * 4096 + i], (uint8_t)(round * 2 + peer));
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        thread_barrier(r);
    }
    uccl_ep_comm_destroy(comm);
    if (memory) accelerator->device_free(gpu, memory);
    accelerator->close(gpu);
}

#define MLX                                                                                                            \
    "mlx5_0;mlx5_1", {                                                                                                 \
        "mlx5_0", "mlx5_1"                                                                                             \
    }
#define BNXT                                                                                                           \
    "bnxt_re0;bnxt_re1", {                                                                                             \
        "bnxt_re0", "bnxt_re1"                                                                                         \
    }
#define IONIC                                                                                                          \
    "ionic_0;ionic_1", {                                                                                               \
        "ionic_0", "ionic_1"                                                                                           \
    }
#define OFF UCCL_EP_STAGING_OFF
#define ON UCCL_EP_STAGING_ON

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    CHECK(!setenv("UCCL_EP_EMULATION", "writes_ordering=unordered,can_flush=0", 1), "setenv");
    static const struct setting settings[] = {
        {BACKEND("connectx"), MLX, "", false, 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC},
        {BACKEND("connectx"), MLX, "", true, OFF, UCCL_EP_STRATEGY_SENDER_HOLD},
        {BACKEND("connectx"), MLX, "", true, ON, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {BACKEND("thor"), BNXT, "", false, 0, UCCL_EP_STRATEGY_ORDERED_ATOMIC},
        {BACKEND("thor"), BNXT, "", true, OFF, UCCL_EP_STRATEGY_SENDER_HOLD},
        {BACKEND("thor"), BNXT, "", true, ON, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {BACKEND("pollara"), IONIC, "", false, 0, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
        {BACKEND("pollara"), IONIC, "", true, OFF, UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX},
        {BACKEND("pollara"), IONIC, "", true, ON, UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        fake_machine(settings[i].machine);
        run_ranks(RANKS, gpu_rank, (void *)&settings[i]);
        check_nothing_left();
    }
    return test_end();
}
