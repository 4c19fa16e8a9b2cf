/* SPDX-License-Identifier: Apache-2.0
 *
 * test_device_memory.c: heaps of the caller's, in host and in device memory, and signal words beside them.
 */
#include "device_ranks.h"

/* ------------------------------------------------------------------------------------------- heaps of the caller's own
 */

struct heap_case {
    const char *options;
    uint64_t offset; /* of the heap in its allocation */
    bool device;
};

static void heap_rank(thread_rank *r, void *argument) {
    const struct heap_case *h = argument;
    const uccl_ep_accelerator *emulation = &watched->table;
    uccl_ep_gpu *gpu = NULL;
    void *memory = NULL;
    OK(emulation->open(0, &gpu));
    if (h->device)
        OK(emulation->device_alloc(gpu, 2 * HEAP, &memory));
    else
        memory = calloc(2, HEAP);
    char *heap = (char *)memory + h->offset;
    uccl_ep_config config = base_config(h->options);
    config.heap = heap;
    config.heap_kind = h->device ? UCCL_EP_MEMORY_EMULATED : UCCL_EP_MEMORY_HOST;
    config.heap_bytes = HEAP - 160; /* no whole pages, and not a byte more is used */
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    CHECK(device.heap == heap, "%p and %p", device.heap, (void *)heap);
    CHECK_EQ(device.heap_bytes, HEAP - 160);
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK(info.heap == heap && info.heap_kind == config.heap_kind, "not the caller's heap");
    memset(heap, 40 + (int)r->rank, 64);
    thread_barrier(r);
    const uint32_t peer = 1 - r->rank;
    kernel_post(&device, 0, put_to(peer, 0, HEAP - 224, 64));
    kernel_post(&device, 0, signal_to(peer, 1, 1));
    kernel_wait_signal(&device, 1, 1);
    for (uint32_t i = 0; i < 64; i++) CHECK_EQ(heap[HEAP - 224 + i], 40 + peer);
    EXPECT(uccl_ep_put(comm, 2, peer, 0, HEAP - 208, 64, DEFAULT, NULL), UCCL_EP_E_RANGE);
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
    for (uint64_t i = 0; i < 64; i++) CHECK_EQ(heap[HEAP - 160 + i], 0);
    if (h->device)
        emulation->device_free(gpu, memory);
    else
        free(memory);
    emulation->close(gpu);
}

static void test_heaps(void) {
    static const struct heap_case cases[] = {
        {"seed=1", 32, false},
        {"device=1,seed=1", 0, true},
        {"device=1,seed=1", 4096 + 32, true},
        {"dmabuf=1,seed=1", 8192 + 48, true},
        {"device=1,dmabuf=1,seed=1", 16, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_ranks(2, heap_rank, (void *)(uintptr_t)&cases[i]);
        CHECK_EQ(watched->opened | watched->memory | watched->host, 0);
    }
    /* A driver that exports none, and a NIC that needs none. */
    setenv("UCCL_EP_EMULATION", "dmabuf=0", 1);
    run_ranks(2, heap_rank, (void *)(uintptr_t)&cases[4]);
    unsetenv("UCCL_EP_EMULATION");
}

/* ------------------------------------------------------------------------------------------- signals in device memory
 */

struct signals_case {
    const char *options;
    uint32_t asked, expected;
};

static void device_signals_rank(thread_rank *r, void *argument) {
    const struct signals_case *s = argument;
    const uccl_ep_accelerator *emulation = &watched->table;
    uccl_ep_gpu *gpu = NULL;
    void *heap = NULL, *base = NULL;
    uint64_t bytes = 0;
    OK(emulation->open(0, &gpu));
    OK(emulation->device_alloc(gpu, HEAP, &heap));
    uccl_ep_config config = base_config(s->options);
    config.heap = heap;
    config.heap_kind = config.signals_kind = UCCL_EP_MEMORY_EMULATED;
    config.strategy = s->asked;
    config.flags |= s->asked == UCCL_EP_STRATEGY_SENDER_HOLD_SUM ? UCCL_EP_CONFIG_SINGLE_WRITER : 0;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK_EQ(info.strategy, s->expected);
    CHECK(!info.signal_words, "words that the CPU does not read");
    OK(emulation->allocation(gpu, device.signal_words, &base, &bytes));
    CHECK(base == (const void *)device.signal_words && bytes >= info.signals * sizeof(uint64_t),
          "not in device memory");
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    const uint32_t peer = 1 - r->rank;
    for (uint64_t epoch = 1; epoch <= 3; epoch++) {
        memset(heap, 40 + (int)(r->rank + 2 * epoch), 64);
        for (int i = 0; i < 20; i++) {
            kernel_post(&device, 0, put_to(peer, 0, HEAP / 2, 64));
            kernel_post(&device, 0, signal_to(peer, 1, 1));
        }
        kernel_wait_signal(&device, 1, 20);
        for (uint32_t i = 0; i < 64; i++) CHECK_EQ(((char *)heap)[HEAP / 2 + i], 40 + peer + 2 * epoch);
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
        CHECK_EQ(kernel_signal(&device, 1), 20);
        /* The host says so, at once. */
        uint64_t value = 0;
        EXPECT(uccl_ep_read_signal(comm, 1, &value), UCCL_EP_E_UNSUPPORTED);
        CHECK_TEXT("have a kernel wait");
        EXPECT(uccl_ep_wait_signal(comm, 1, 1, UCCL_EP_ANY_RANK, DEFAULT, &value), UCCL_EP_E_UNSUPPORTED);
        CHECK_TEXT("signals in host memory");
        thread_barrier(r);
        OK(uccl_ep_reset(comm, &bootstrap));
        CHECK_EQ(kernel_signal(&device, 1), 0);
        thread_barrier(r);
    }
    uccl_ep_comm_destroy(comm);
    emulation->device_free(gpu, heap);
    emulation->close(gpu);
}

static void test_device_signals(void) {
    static const struct signals_case cases[] = {
        {"device=1,device_signals=1,atomic_order=1,lazy=3,seed=1", UCCL_EP_STRATEGY_AUTO,
         UCCL_EP_STRATEGY_ORDERED_ATOMIC},
        {"dmabuf=1,device_signals=1,any_order=1,lazy=3,seed=2", UCCL_EP_STRATEGY_AUTO, UCCL_EP_STRATEGY_SENDER_HOLD},
        {"device=1,device_signals=1,adds=0,lazy=3,seed=3", UCCL_EP_STRATEGY_SENDER_HOLD_SUM,
         UCCL_EP_STRATEGY_SENDER_HOLD_SUM},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_ranks(2, device_signals_rank, (void *)(uintptr_t)&cases[i]);
        CHECK_EQ(watched->opened | watched->memory | watched->host, 0);
    }
    /* What cannot be, and what to do. */
    const uccl_ep_accelerator *emulation = &watched->table;
    uccl_ep_gpu *gpu;
    void *heap;
    OK(emulation->open(0, &gpu));
    OK(emulation->device_alloc(gpu, HEAP, &heap));
    uccl_ep_config config = base_config("device=1,seed=1");
    config.signals_kind = UCCL_EP_MEMORY_EMULATED;
    refused(&config, UCCL_EP_E_INVALID, "lie beside a heap there");
    config.heap = heap;
    config.heap_kind = UCCL_EP_MEMORY_EMULATED;
    refused(&config, UCCL_EP_E_CAPABILITY, "take signals in host memory");
    config.backend_options = "device=1,device_signals=1,adds=0,seed=1";
    refused(&config, UCCL_EP_E_CAPABILITY, "it needs signals in host memory, since the target's CPU adds them");
    config.backend_options = "device=1,device_signals=1,seed=1";
    config.strategy = UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX;
    refused(&config, UCCL_EP_E_CAPABILITY, "it needs signals in host memory");
    config.strategy = UCCL_EP_STRATEGY_AUTO;
    config.staging = UCCL_EP_STAGING_ON;
    refused(&config, UCCL_EP_E_CAPABILITY, "where the CPU adds signals: take signals in host memory");
    config.staging = UCCL_EP_STAGING_AUTO;
    config.signals_kind = UCCL_EP_MEMORY_CUDA;
    refused(&config, UCCL_EP_E_INVALID, "of the same kind");
    emulation->device_free(gpu, heap);
    emulation->close(gpu);
    CHECK_EQ(watched->opened | watched->memory | watched->host, 0);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    watch_accelerator();
    test_heaps();
    test_device_signals();
    return test_end();
}
