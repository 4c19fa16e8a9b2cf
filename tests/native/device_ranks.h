/* SPDX-License-Identifier: Apache-2.0
 *
 * device_ranks.h: for tests of what kernels are given, with the accelerator of the emulation. Its addresses are this
 * process's, so threads with ring.h stand in for kernels.
 */
#ifndef UCCL_EP_TESTS_DEVICE_RANKS_H
#define UCCL_EP_TESTS_DEVICE_RANKS_H

#include <dlfcn.h>
#include <pthread.h>

#include "balance.h"
#include "core/internal.h"
#include "thread_ranks.h"

#define LOOP UCCL_EP_TEST_LIBRARY_DIR "/libloop_backend.so"
#define SHM UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_shm.so"
#define EMULATION UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so"
#define BALANCE UCCL_EP_TEST_LIBRARY_DIR "/libbalance_accelerator.so"
#define SECOND 1000000000ull
#define DEFAULT UCCL_EP_TIMEOUT_DEFAULT
#define HEAP ((uint64_t)1 << 16)

static balance *watched;

static inline uccl_ep_config base_config(const char *options) {
    return (uccl_ep_config){.size = sizeof(uccl_ep_config),
                            .backend = LOOP,
                            .backend_options = options,
                            .heap_bytes = HEAP,
                            .signals = 64,
                            .channels = 3,
                            .ring_log2 = 4,
                            .accelerator = BALANCE,
                            .device_channels = 2,
                            .timeout_ns = 20 * SECOND,
                            .peer_timeout_ns = 20 * SECOND,
                            .bootstrap_timeout_ns = 20 * SECOND};
}

static inline uccl_ep_comm *open_comm(thread_rank *r, const uccl_ep_config *config, uccl_ep_device_comm *device) {
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(config, &bootstrap, &comm));
    OK(uccl_ep_comm_device(comm, device));
    return comm;
}

#define CHECK_TEXT(part) CHECK(strstr(uccl_ep_last_error()->text, part), "%s", uccl_ep_last_error()->text)

/* ------------------------------------------------------------------------------------------------- what a kernel does
 */

static inline uccl_ep_words encoded(const uccl_ep_command *command) {
    uccl_ep_words words;
    CHECK_EQ(uccl_ep_encode(command, &words), UCCL_EP_OK);
    return words;
}

static inline uccl_ep_command signal_to(uint32_t target, uint32_t slot, uint64_t add) {
    return (uccl_ep_command){.op = UCCL_EP_OP_SIGNAL, .target = target, .slot = slot, .add = add};
}

static inline uccl_ep_command put_to(uint32_t target, uint64_t local, uint64_t remote, uint32_t bytes) {
    return (uccl_ep_command){.op = UCCL_EP_OP_PUT,
                             .target = target,
                             .local = local,
                             .remote = remote,
                             .bytes = bytes,
                             .granularity = UCCL_EP_GRANULARITY_COARSE};
}

static inline uint64_t kernel_post(const uccl_ep_device_comm *device, uint32_t channel, uccl_ep_command command) {
    const uccl_ep_ring *ring = &device->rings[channel];
    const uint64_t ticket = uccl_ep_ring_reserve(ring, 1);
    const uint64_t until = test_now_ns() + 60 * SECOND;
    while (!uccl_ep_ring_has_space(ring, ticket, 1)) {
        CHECK(test_now_ns() < until, "no space for ticket %" PRIu64, ticket);
        sched_yield();
    }
    uccl_ep_ring_store(ring, ticket, encoded(&command));
    return ticket;
}

static inline uint64_t kernel_signal(const uccl_ep_device_comm *device, uint32_t slot) {
    uint64_t sum = 0;
    for (uint32_t bank = 0; bank < device->signal_banks; bank++)
        sum += __atomic_load_n(&device->signal_words[bank * device->signals + slot], __ATOMIC_ACQUIRE);
    return sum;
}

static inline void kernel_wait_signal(const uccl_ep_device_comm *device, uint32_t slot, uint64_t value) {
    const uint64_t until = test_now_ns() + 60 * SECOND;
    while ((int64_t)(kernel_signal(device, slot) - value) < 0) {
        CHECK(test_now_ns() < until, "signal %u is at %" PRIu64, slot, kernel_signal(device, slot));
        sched_yield();
    }
}

/* As device.h does: whoever gets the claim writes the record, `status` last. */
static inline bool kernel_error(const uccl_ep_device_comm *device, uccl_ep_device_error error) {
    uint32_t unclaimed = 0;
    if (!__atomic_compare_exchange_n(device->error_claim, &unclaimed, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return false;
    const uint64_t status = error.status;
    error.status = 0;
    device->error->what = error.what;
    device->error->channel = error.channel;
    device->error->ticket = error.ticket;
    device->error->slot = error.slot;
    device->error->wanted = error.wanted;
    device->error->seen = error.seen;
    device->error->thread = error.thread;
    device->error->source = error.source;
    __atomic_store_n(&device->error->status, status, __ATOMIC_RELEASE);
    return true;
}

/* ----------------------------------------------------------------------------------------------------- communicators
 */

static inline uccl_ep_status create_alone(const uccl_ep_config *config, uccl_ep_comm **comm) {
    thread_group group = {.size = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    thread_rank rank = {&group, 0};
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(&rank);
    const uccl_ep_status status = uccl_ep_comm_create(config, &bootstrap, comm);
    if (status != UCCL_EP_OK) CHECK(!*comm, "an error, and a communicator");
    return status;
}

static inline void refused(const uccl_ep_config *config, uccl_ep_status status, const char *said) {
    uccl_ep_comm *comm;
    EXPECT(create_alone(config, &comm), status);
    CHECK_TEXT(said);
    CHECK_EQ(watched->host, 0);
}

/* Every call of the accelerator is watched from here on. */
static inline void watch_accelerator(void) {
    void *library = dlopen(BALANCE, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    watched = dlsym(library, "balance_state");
    const union {
        void *symbol;
        const uccl_ep_accelerator *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY)};
    CHECK(watched && entry.symbol, "dlsym: %s", dlerror());
    CHECK(entry.function() == &watched->table, "another table");
}

#endif
