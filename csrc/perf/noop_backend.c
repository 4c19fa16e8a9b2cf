/* SPDX-License-Identifier: Apache-2.0
 *
 * noop_backend.c: a NIC that does nothing, to measure what the proxy itself costs.
 *
 * It moves no bytes and adds to no word. It takes every operation, gives its completion at the next poll, and promises
 * all that this makes cheap: order, coverage by one completion, visibility. A real NIC adds the encoding of its work
 * queue entries, doorbells and completions to what is measured with it. It serves `uccl-ep perf` alone and is listed
 * nowhere: programs that communicate would wait for bytes that never come.
 *
 * Any number of peers is pretended: a peer's address and regions are empty blobs, which is what a bootstrap with one
 * rank that answers for all hands out.
 *
 * Option `complete=each`: no cumulative completions and no promise of order, the core's other way of keeping its books.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "uccl_ep/backend.h"

struct uccl_ep_device {
    const uccl_ep_host *host;
    uint64_t flags;
};

typedef struct done {
    uint64_t cookie;
    uint32_t peer;
} done;

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    /* Completions not polled yet: [head, tail) of a ring that holds all that may be in flight. */
    uint64_t head, tail, mask;
    done ring[];
};

#define MAX_INFLIGHT (1u << 16)
#define ALWAYS                                                                                                         \
    (UCCL_EP_CAP_ORDER_WRITE_WRITE | UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ATOMIC_ADD64 |                       \
     UCCL_EP_CAP_ATOMIC_COHERENT | UCCL_EP_CAP_NO_DUPLICATES | UCCL_EP_CAP_ERROR_STOPS | UCCL_EP_CAP_HOST_MEMORY |     \
     UCCL_EP_CAP_SIGNALS_STRICT)
#define CUMULATIVE (UCCL_EP_CAP_COMPLETES_IN_ORDER | UCCL_EP_CAP_UNSIGNALLED)

static uccl_ep_caps promises(uint64_t flags) {
    return (uccl_ep_caps){.size = sizeof(uccl_ep_caps),
                          .completion_level = UCCL_EP_COMPLETION_VISIBLE,
                          .flags = flags,
                          .max_inflight_endpoint = MAX_INFLIGHT};
}

static uccl_ep_status query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    if (index) return host->fail(host->context, UCCL_EP_E_NO_DEVICE, 0, "there is one no-op device");
    const uccl_ep_device_info mine = {.size = sizeof mine,
                                      .numa_node = -1,
                                      .name = "noop0",
                                      .vendor = "uccl_ep",
                                      .model = "no-op: moves no bytes",
                                      .caps = promises(ALWAYS | CUMULATIVE)};
    const uint32_t room = info->size;
    memcpy(info, &mine, room < sizeof mine ? room : sizeof mine);
    info->size = room;
    return UCCL_EP_OK;
}

static uccl_ep_status device_open(const uccl_ep_host *host, const char *name, const char *options,
                                  uccl_ep_device **device, uccl_ep_caps *caps) {
    const bool each = !strcmp(options, "complete=each");
    if (name && strcmp(name, "noop0")) return host->fail(host->context, UCCL_EP_E_NO_DEVICE, 0, "the device is noop0");
    if (*options && !each)
        return host->fail(host->context, UCCL_EP_E_INVALID, 0, "the one option of noop is complete=each");
    uccl_ep_device *made = malloc(sizeof *made);
    if (!made) return host->fail(host->context, UCCL_EP_E_NO_MEMORY, 0, "no memory for a device");
    *made = (uccl_ep_device){.host = host, .flags = each ? ALWAYS : ALWAYS | CUMULATIVE};
    const uint32_t room = caps->size;
    const uccl_ep_caps mine = promises(made->flags);
    memcpy(caps, &mine, room < sizeof mine ? room : sizeof mine);
    caps->size = room;
    *device = made;
    return UCCL_EP_OK;
}

static void device_close(uccl_ep_device *device) {
    free(device);
}

/* ------------------------------------------------------------------------------------------------- nothing to register
 */

static uccl_ep_status region_register(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory) {
    (void)region;
    if (memory->kind != UCCL_EP_MEMORY_HOST)
        return device->host->fail(device->host->context, UCCL_EP_E_REGISTRATION, 0, "noop takes host memory");
    return UCCL_EP_OK;
}

static void region_deregister(uccl_ep_device *device, uccl_ep_region region) {
    (void)device;
    (void)region;
}

static uccl_ep_status region_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes) {
    (void)device;
    (void)region;
    (void)blob;
    *bytes = 0;
    return UCCL_EP_OK;
}

static uccl_ep_status empty_blob(const uccl_ep_device *device, uint32_t bytes) {
    if (!bytes) return UCCL_EP_OK;
    return device->host->fail(device->host->context, UCCL_EP_E_INVALID, 0, "a peer that is not a no-op device");
}

static uccl_ep_status region_import(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                    uint32_t bytes) {
    (void)peer;
    (void)region;
    (void)blob;
    return empty_blob(device, bytes);
}

/* -------------------------------------------------------------------------------------------------------- endpoints */

static uccl_ep_status endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                    uccl_ep_endpoint **endpoint) {
    uint64_t slots = 1;
    while (slots < config->inflight) slots *= 2;
    uccl_ep_endpoint *made = NULL;
    if (slots <= MAX_INFLIGHT) made = calloc(1, sizeof *made + slots * sizeof made->ring[0]);
    if (!made) return device->host->fail(device->host->context, UCCL_EP_E_NO_MEMORY, 0, "no memory for an endpoint");
    made->device = device;
    made->mask = slots - 1;
    *endpoint = made;
    return UCCL_EP_OK;
}

static void endpoint_close(uccl_ep_endpoint *endpoint) {
    free(endpoint);
}

static uccl_ep_status endpoint_address(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes) {
    (void)endpoint;
    (void)blob;
    *bytes = 0;
    return UCCL_EP_OK;
}

static uccl_ep_status connect_peer(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes) {
    (void)peer;
    (void)blob;
    return empty_blob(endpoint->device, bytes);
}

static uccl_ep_status connect_poll(uccl_ep_endpoint *endpoint, uint32_t peer) {
    (void)endpoint;
    (void)peer;
    return UCCL_EP_OK;
}

/* No completion of `peer` may come any more: keep those of the others. */
static uccl_ep_status disconnect(uccl_ep_endpoint *endpoint, uint32_t peer) {
    uint64_t kept = endpoint->head;
    for (uint64_t i = endpoint->head; i != endpoint->tail; i++) {
        const done d = endpoint->ring[i & endpoint->mask];
        if (d.peer != peer) endpoint->ring[kept++ & endpoint->mask] = d;
    }
    endpoint->tail = kept;
    return UCCL_EP_OK;
}

static uccl_ep_status submit(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted) {
    (void)flags;
    const uccl_ep_operation *o = operations, *const end = operations + n;
    for (; o != end; o++) {
        if (!(o->flags & UCCL_EP_OPERATION_SIGNALLED)) continue;
        if (endpoint->tail - endpoint->head > endpoint->mask) break;
        endpoint->ring[endpoint->tail++ & endpoint->mask] = (done){o->cookie, peer};
    }
    *accepted = (uint32_t)(o - operations);
    return UCCL_EP_OK;
}

static int32_t poll(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max) {
    uint32_t n = 0;
    for (; n < max && endpoint->head != endpoint->tail; n++) {
        const done d = endpoint->ring[endpoint->head++ & endpoint->mask];
        completions[n] = (uccl_ep_completion){.cookie = d.cookie, .peer = d.peer};
    }
    return (int32_t)n;
}

static void describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)device;
    (void)status;
    (void)vendor_code;
    if (bytes) text[0] = 0;
}

__attribute__((visibility("default"))) const uccl_ep_backend *uccl_ep_backend_entry(void) {
    static const uccl_ep_backend table = {
        .size = sizeof table,
        .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
        .abi_minor = 0,
        .name = "noop",
        .version = "1",
        .query = query,
        .device_open = device_open,
        .device_close = device_close,
        .region_register = region_register,
        .region_deregister = region_deregister,
        .region_export = region_export,
        .region_import = region_import,
        .endpoint_open = endpoint_open,
        .endpoint_close = endpoint_close,
        .endpoint_address = endpoint_address,
        .connect = connect_peer,
        .connect_poll = connect_poll,
        .disconnect = disconnect,
        .submit = submit,
        .poll = poll,
        .describe = describe,
    };
    return &table;
}
