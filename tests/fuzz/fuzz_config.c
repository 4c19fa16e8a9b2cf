/* SPDX-License-Identifier: Apache-2.0
 *
 * A configuration with any field and any string, for one rank: a typed error, or a communicator that puts, signals and
 * is quiet. Pointers are NULL or good, and sizes are kept to what a machine has many of at once.
 */
#include "fuzz_backends.h"

#define MOST_BYTES (64u << 20)

static char strings[3][400];

static const char *maybe_string(fuzz_input *in, char *out, size_t room) {
    return fuzz_u8(in) % 4 ? NULL : fuzz_string(in, out, room);
}

static void use(uccl_ep_comm *comm, bool threads) {
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    FUZZ_CHECK(uccl_ep_comm_query(comm, &info) == UCCL_EP_OK, "%s", uccl_ep_last_error()->text);
    uint64_t ticket, word = 0;
    const uint64_t granularity = info.granularity, far = info.heap_bytes - granularity;
    const uint32_t channel = info.channels - 1, slot = info.signals - 1;
    uccl_ep_device_comm device;
    const bool kernels = info.accelerator[0];
    const uccl_ep_status given = uccl_ep_comm_device(comm, &device);
    FUZZ_CHECK((given == UCCL_EP_OK) == kernels, "%d", given);
    if (info.device_channels == info.channels) return; /* none is the host's */
    unsigned char *heap = info.heap;
    memset(heap, 0x5a, granularity);
    uccl_ep_status status = uccl_ep_put_signal(comm, channel, 0, 0, far, granularity, slot, 3, 0, &ticket);
    if (status == UCCL_EP_OK && threads) {
        status = uccl_ep_wait(comm, channel, ticket, 60000000000ull);
    } else if (status == UCCL_EP_OK) {
        /* Promises may be few, so it may take several operations and their answers; but not for ever. */
        uint32_t worked;
        for (int turn = 0; (status = uccl_ep_wait(comm, channel, ticket, 0)) == UCCL_EP_IN_PROGRESS; turn++) {
            FUZZ_CHECK(turn < 100000, "ticket %" PRIu64 " does not end", ticket);
            FUZZ_CHECK(uccl_ep_progress(comm, &worked) == UCCL_EP_OK, "%s", uccl_ep_last_error()->text);
            fuzz_around_turn();
        }
    }
    if (status != UCCL_EP_OK) {
        fuzz_check_error(status);
        /* After next to no time a peer may be given up, if that was asked for. */
        FUZZ_CHECK(status == UCCL_EP_E_PEER_LOST, "%s", uccl_ep_last_error()->text);
        return;
    }
    FUZZ_CHECK(heap[far] == 0x5a, "the byte at %" PRIu64 " is %u", far, heap[far]);
    FUZZ_CHECK(uccl_ep_read_signal(comm, slot, &word) == UCCL_EP_OK && word == 3, "the word is %" PRIu64, word);
    char text[512];
    FUZZ_CHECK(uccl_ep_report(comm, text, sizeof text) == UCCL_EP_OK && memchr(text, 0, sizeof text), "report");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    static _Alignas(4096) unsigned char memory[65536];
    fuzz_around_open(&in, 1);
    uccl_ep_config config = {
        .size = sizeof config, .backend = THIS_PROGRAM, .backend_options = fuzz_options(0), .heap_bytes = 4096};
    const uint64_t chosen = fuzz_u64(&in); /* which fields are not their default: few at a time, or all */
#define ANY(bit, field)                                                                                                \
    if (chosen >> (bit)&1) config.field = fuzz_number(&in)
#define ANY32(bit, field)                                                                                              \
    if (chosen >> (bit)&1) config.field = (uint32_t)fuzz_number(&in)
    ANY32(0, size);
    ANY32(1, flags);
    ANY(2, heap_bytes);
    ANY32(3, heap_kind);
    ANY32(4, signals);
    ANY32(5, channels);
    ANY32(6, ring_log2);
    ANY32(7, granularity);
    ANY32(8, proxies);
    ANY32(9, strategy);
    ANY32(10, progress);
    ANY32(11, max_inflight_peer);
    ANY32(12, max_inflight);
    ANY32(13, max_message_bytes);
    ANY(14, max_inflight_bytes);
    ANY(15, timeout_ns);
    ANY(16, peer_timeout_ns);
    ANY(17, bootstrap_timeout_ns);
    ANY(18, first_ticket);
    ANY32(19, spin);
    ANY32(20, idle_sleep_ns);
    ANY(21, first_sequence);
    if (chosen >> 22 & 1) config.refusal_status = (int32_t)fuzz_number(&in);
    if (chosen >> 23 & 1) config.heap_dmabuf_fd = -(int32_t)fuzz_below(&in, 8); /* no descriptor of this process */
    if (chosen >> 24 & 1) config.heap = memory;
    if (chosen >> 25 & 1) config.device = maybe_string(&in, strings[0], 100);
    if (chosen >> 26 & 1) config.backend_options = fuzz_string(&in, strings[1], 300);
    if (chosen >> 32 & 1) {
        const int used = snprintf(strings[1], sizeof strings[1], "%s,", fuzz_options(0));
        fuzz_string(&in, strings[1] + used, 300 - (size_t)used);
        config.backend_options = strings[1];
    }
    if (chosen >> 27 & 1) config.cpus = maybe_string(&in, strings[2], 300);
    if (chosen >> 28 & 1) config.backend = fuzz_u8(&in) % 2 ? NULL : "/nonexistent/library.so";
    if (chosen >> 33 & 1) config.accelerator = fuzz_u8(&in) % 8 ? FUZZ_ACCELERATOR : "/nonexistent/library.so";
    ANY32(34, accelerator_device);
    ANY32(35, device_channels);
    if (chosen >> 29 & 1) config.refusal = "this rank does not want to";
    fuzz_bootstrap b = {.size = 1, .in = &in};
    uccl_ep_bootstrap bootstrap = fuzz_bootstrap_of(&b);
    if (chosen >> 30 & 1) bootstrap.size = (uint32_t)fuzz_number(&in);
    if (chosen >> 31 & 1) bootstrap.rank = (uint32_t)fuzz_number(&in);
    if (bootstrap.size > 1) bootstrap.allgather = NULL; /* there is one rank */

    /* What is legal and large is asked for on real machines, and not a thousand times a second. */
    if (config.heap && config.heap_bytes > sizeof memory) config.heap_bytes = sizeof memory;
    if (config.heap_bytes > MOST_BYTES && config.heap_bytes <= UCCL_EP_MAX_HEAP_BYTES(16))
        config.heap_bytes %= MOST_BYTES;
    config.flags &= ~UCCL_EP_CONFIG_LOCK_MEMORY;
    if (config.signals > 1u << 20 && config.signals <= 1u << 24) config.signals %= 1u << 20;
    if (config.proxies <= 32 && config.channels <= 2048 && config.ring_log2 <= 16 && config.ring_log2 > 6 &&
        (uint64_t)config.channels << config.ring_log2 > 1u << 16)
        config.ring_log2 = 6;
    if (config.progress == UCCL_EP_PROGRESS_THREADS && config.proxies > 4) config.progress = UCCL_EP_PROGRESS_CALLER;
    if (config.idle_sleep_ns > 1000000) config.idle_sleep_ns %= 1000000;
    if (config.max_inflight > 1u << 16) config.max_inflight %= 1u << 16;
    if (config.max_inflight_peer > 1u << 16) config.max_inflight_peer %= 1u << 16;

    fuzz_around_configure(&config);
    uccl_ep_comm *comm = (uccl_ep_comm *)(uintptr_t)1;
    const uccl_ep_status status = uccl_ep_comm_create(&config, &bootstrap, &comm);
    if (status == UCCL_EP_OK) {
        use(comm, config.progress == UCCL_EP_PROGRESS_THREADS);
        uccl_ep_comm_destroy(comm);
    } else {
        FUZZ_CHECK(!comm, "an error and a communicator");
        fuzz_check_error(status);
    }
    fuzz_around_close();
    return 0;
}
