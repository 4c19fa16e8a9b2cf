/* SPDX-License-Identifier: Apache-2.0
 *
 * The minimal backend, broken on purpose. Compiled with -DTABLE_..., it does not even load; otherwise the option
 * break=NAME says what is wrong with it on this rank.
 */
#define uccl_ep_backend_entry minimal_entry
const struct uccl_ep_backend *minimal_entry(void);
#include "minimal.c"
#include <signal.h>
#undef uccl_ep_backend_entry

static char broken[64];
static uint32_t calls;

static bool is(const char *name) {
    return strcmp(broken, name) == 0;
}

static uccl_ep_status bad_query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    const uccl_ep_status status = query(host, index, info);
    if (status == UCCL_EP_OK && is("unterminated")) {
        memset(info->vendor, 'v', sizeof info->vendor);
        memset(info->model, 'm', sizeof info->model);
        memset(info->firmware, 'f', sizeof info->firmware);
        memset(info->address, 'a', sizeof info->address);
        memset(info->unusable, 'u', sizeof info->unusable);
        memset(info->name, 'n', sizeof info->name);
    }
    return status;
}

static uccl_ep_status bad_device_open(const uccl_ep_host *host, const char *name, const char *options,
                                      uccl_ep_device **device, uccl_ep_caps *caps) {
    static const char option[] = "break=";
    broken[0] = 0;
    calls = 0;
    if (!strncmp(options, option, sizeof option - 1)) {
        snprintf(broken, sizeof broken, "%s", options + sizeof option - 1);
        options = "";
    }
    if (is("open_unknown")) return (uccl_ep_status)-1;
    if (is("open_positive")) return (uccl_ep_status)42;
    if (is("open_binary_text")) return host->fail(host->context, UCCL_EP_E_NIC, 77, "\xff\xfe%n%s\x80");
    if (is("open_null_text")) return host->fail(host->context, UCCL_EP_E_NIC, 77, NULL);
    if (is("device_null")) {
        *device = NULL;
        return UCCL_EP_OK;
    }
    const uccl_ep_status status = device_open(host, name, options, device, caps);
    if (is("coarse_alignment")) caps->write_alignment = 64;
    if (is("transmitted_only")) caps->completion_level = UCCL_EP_COMPLETION_TRANSMITTED;
    if (is("two_ranks_at_most")) caps->max_peers = 2;
    if (is("small_regions")) caps->max_region_bytes = 8192;
    return status;
}

static uccl_ep_status bad_alloc(uccl_ep_device *device, uint64_t bytes, uint32_t flags, void **base) {
    const uccl_ep_status status = memory_alloc(device, bytes, flags, base);
    if (is("memory_null")) *base = NULL;
    if (is("memory_misaligned")) *base = (char *)*base + 8;
    return status;
}

static void bad_device_close(uccl_ep_device *device) {
    for (memory *m = device->own; m < device->own + UCCL_EP_REGIONS; m++) /* the core never heard of it */
        if (m->base) memory_free(device, m->base, m->bytes);
    device_close(device);
}

static uccl_ep_status bad_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes) {
    const uccl_ep_status status = region_export(device, region, blob, bytes);
    if (is("region_too_long")) *bytes = UCCL_EP_MAX_BLOB_BYTES + 1;
    if (is("region_huge")) *bytes = UINT32_MAX;
    if (is("region_garbage")) memset(blob, 0x5a, *bytes);
    if (is("region_empty")) *bytes = 0;
    return status;
}

static uccl_ep_status bad_endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                        uccl_ep_endpoint **endpoint) {
    if (is("endpoint_null")) {
        *endpoint = NULL;
        return UCCL_EP_OK;
    }
    return endpoint_open(device, config, endpoint);
}

static uccl_ep_status bad_address(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes) {
    const uccl_ep_status status = endpoint_address(endpoint, blob, bytes);
    if (is("address_too_long")) *bytes = UCCL_EP_MAX_BLOB_BYTES + 1;
    return status;
}

/* An address for one peer alone, which the example does without. */
#define PAIR_BYTES 8u
static uccl_ep_status bad_peer_address(uccl_ep_endpoint *endpoint, uint32_t peer, void *blob, uint32_t *bytes) {
    (void)endpoint;
    if (is("pair_refused") && peer == 1) return UCCL_EP_E_NIC;
    memset(blob, 0x5a, *bytes);
    *bytes = is("pair_too_long") ? UCCL_EP_MAX_PEER_BLOB_BYTES + 1
             : is("pair_empty")  ? 0
             : is("pair_varies") ? 4 + peer
                                 : PAIR_BYTES;
    return UCCL_EP_OK;
}

static uccl_ep_status bad_connect(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes) {
    const uccl_ep_status status = start_connect(endpoint, peer, blob, bytes - PAIR_BYTES);
    return is("connect_in_progress") ? UCCL_EP_IN_PROGRESS : status;
}

static uccl_ep_status bad_connect_poll(uccl_ep_endpoint *endpoint, uint32_t peer) {
    if (is("connect_never") && peer == 2) return UCCL_EP_IN_PROGRESS;
    return connect_poll(endpoint, peer);
}

static uccl_ep_status bad_disconnect(uccl_ep_endpoint *endpoint, uint32_t peer) {
    if (is("disconnect_never")) return UCCL_EP_IN_PROGRESS;
    if (is("disconnect_refused")) return (uccl_ep_status)-9;
    return disconnect(endpoint, peer);
}

static uccl_ep_status bad_submit(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations,
                                 uint32_t n, uint32_t flags, uint32_t *accepted) {
    const bool late = ++calls > 20;
    if (late && is("submit_unknown")) {
        *accepted = 0;
        return (uccl_ep_status)-3;
    }
    if (late && is("submit_positive")) {
        *accepted = 0;
        return (uccl_ep_status)7;
    }
    if (late && !strncmp(broken, "disconnect_", 11)) {
        *accepted = 0;
        return UCCL_EP_E_PEER_LOST;
    }
    const uccl_ep_status status = submit(endpoint, peer, operations, n, flags, accepted);
    if (late && is("accepted_too_many")) *accepted = n + 1;
    if (late && is("accepted_garbage")) *accepted = 0xdeadbeef;
    return status;
}

static int32_t bad_poll(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max) {
    static uint64_t random = 88172645463325252ull;
    const bool late = ++calls > 400;
    if (late && is("poll_too_many")) return (int32_t)max + 1;
    if (late && is("poll_far_too_many")) return INT32_MAX;
    if (late && is("poll_broken"))
        return endpoint->device->host->fail(endpoint->device->host->context, UCCL_EP_E_NIC, 5, "it is on fire");
    if (late && is("poll_unknown")) return -5;
    if (is("never_completes") && late) {
        endpoint->head = endpoint->tail;
        return 0;
    }
    if (is("completes_twice")) {
        int32_t n = poll_completions(endpoint, completions, max / 2);
        for (int32_t i = 0; i < n; i++) completions[n + i] = completions[i];
        return 2 * n;
    }
    int32_t n = poll_completions(endpoint, completions, max);
    for (; is("garbage_completions") && n < (int32_t)max; n++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        completions[n] = (uccl_ep_completion){.cookie = random,
                                              .kind = (uint32_t)(random >> 60),
                                              .status = (int32_t)(random >> 20) % 8000,
                                              .peer = (uint32_t)(random >> 11) % 5};
    }
    return n;
}

static int32_t bad_events(uccl_ep_endpoint *endpoint, uccl_ep_event *events, uint32_t max) {
    (void)endpoint;
    if (!is("garbage_events")) return 0;
    for (uint32_t i = 0; i < max; i++) {
        events[i] = (uccl_ep_event){.kind = i ? 1000 + i : UCCL_EP_EVENT_PEER_LOST, .peer = 1000 + i};
        memset(events[i].text, 'e', sizeof events[i].text);
    }
    return INT32_MAX;
}

#ifdef TABLE_CRASHES
__attribute__((constructor)) static void crash(void) {
    raise(SIGSEGV);
}
#endif
#ifdef TABLE_EXITS
__attribute__((constructor)) static void leave(void) {
    exit(3);
}
#endif
#ifdef TABLE_EXITS_WITH_0
__attribute__((constructor)) static void leave(void) {
    _exit(0);
}
#endif
#ifdef TABLE_HANGS
__attribute__((constructor)) static void hang(void) {
    for (;;) pause();
}
#endif
#ifdef TABLE_PRINTS
__attribute__((constructor)) static void print(void) {
    puts("{\"error\": \"Hello from a driver that likes to talk\"}");
    fflush(stdout);
}
#endif

#ifndef TABLE_NO_ENTRY
const uccl_ep_backend *uccl_ep_backend_entry(void) {
    static uccl_ep_backend bad;
    bad = table;
    bad.query = bad_query;
    bad.device_open = bad_device_open;
    bad.memory_alloc = bad_alloc;
    bad.device_close = bad_device_close;
    bad.region_export = bad_export;
    bad.endpoint_open = bad_endpoint_open;
    bad.endpoint_address = bad_address;
    bad.peer_address = bad_peer_address;
    bad.connect = bad_connect;
    bad.connect_poll = bad_connect_poll;
    bad.disconnect = bad_disconnect;
    bad.submit = bad_submit;
    bad.poll = bad_poll;
    bad.events = bad_events;
#ifdef TABLE_NEWER_MINOR
    bad.abi_minor = UCCL_EP_BACKEND_ABI_MINOR + 1;
#endif
#ifdef TABLE_NEWER_MAJOR
    bad.abi_major = UCCL_EP_BACKEND_ABI_MAJOR + 1;
#endif
#ifdef TABLE_OTHER_MINOR
    bad.abi_minor = UCCL_EP_BACKEND_ABI_MINOR;
#endif
#ifdef TABLE_OLDER_MAJOR
    bad.abi_major = UCCL_EP_BACKEND_ABI_MAJOR - 1;
#endif
#ifdef TABLE_LACKS_SUBMIT
    bad.submit = NULL;
#endif
#ifdef TABLE_LACKS_NAME
    bad.name = NULL;
#endif
#ifdef TABLE_SHORT
    bad.size = 64;
#endif
#ifdef TABLE_LONG /* a backend of a newer minor that needs no more than the host has */
    bad.size += 256;
#endif
#ifdef TABLE_NULL
    return NULL;
#endif
#ifdef TABLE_ENTRY_EXITS
    exit(4);
#endif
    return &bad;
}
#endif
