/* SPDX-License-Identifier: Apache-2.0
 *
 * Options, the real library, and everything but operations, which goes through.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mutant.h"

#define DEFAULT_REAL "shm"
#define MAX_ROOM (1u << 16)

static uccl_ep_status fail(const uccl_ep_host *host, uccl_ep_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static uccl_ep_status fail(const uccl_ep_host *host, uccl_ep_status status, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return host->fail(host->context, status, 0, text);
}

/* ------------------------------------------------------------------------------------------------- the real library */

/* A name without a slash is a backend that lies beside this library. */
static uccl_ep_status real_path(const uccl_ep_host *host, const char *real, char *path, size_t bytes) {
    if (strchr(real, '/')) {
        snprintf(path, bytes, "%s", real);
        return UCCL_EP_OK;
    }
    static const char here;
    Dl_info info;
    if (!dladdr(&here, &info) || !info.dli_fname)
        return fail(host, UCCL_EP_E_SYSTEM, "this library cannot find itself: give real=PATH");
    const char *slash = strrchr(info.dli_fname, '/');
    const int folder = slash ? (int)(slash + 1 - info.dli_fname) : 0;
    snprintf(path, bytes, "%.*slibuccl_ep_backend_%s.so", folder, info.dli_fname, real);
    return UCCL_EP_OK;
}

static uccl_ep_status load(const uccl_ep_host *host, const char *real, const uccl_ep_backend **table) {
    char path[512];
    uccl_ep_status status = real_path(host, real, path, sizeof path);
    if (status != UCCL_EP_OK) return status;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* stays loaded, as the core's does */
    if (!library) return fail(host, UCCL_EP_E_NOT_A_BACKEND, "real=%s: %s", real, dlerror());
    union {
        void *symbol;
        const uccl_ep_backend *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_BACKEND_ENTRY)};
    if (!entry.symbol) return fail(host, UCCL_EP_E_NOT_A_BACKEND, "real=%s exports no " UCCL_EP_BACKEND_ENTRY, real);
    *table = entry.function();
    if ((*table)->abi_major != UCCL_EP_BACKEND_ABI_MAJOR || (*table)->abi_minor > UCCL_EP_BACKEND_ABI_MINOR ||
        (*table)->size < sizeof **table)
        return fail(host, UCCL_EP_E_ABI, "real=%s has backend ABI %u.%u, this library %u.%u", real, (*table)->abi_major,
                    (*table)->abi_minor, UCCL_EP_BACKEND_ABI_MAJOR, UCCL_EP_BACKEND_ABI_MINOR);
    if ((*table)->peer_address)
        return fail(host, UCCL_EP_E_UNSUPPORTED, "real=%s has addresses for one peer alone, which are not passed on",
                    real);
    return UCCL_EP_OK;
}

/* ---------------------------------------------------------------------------------------------------------- options */

struct parsed {
    struct knobs knobs;
    char real[256];
    char others[256]; /* of the real backend */
};

static uccl_ep_status number(const uccl_ep_host *host, const char *key, const char *text, uint64_t most,
                             uint64_t *value) {
    char *rest = NULL;
    *value = strtoull(text, &rest, 0);
    if (rest == text || *rest || *value > most)
        return fail(host, UCCL_EP_E_INVALID, "%s=%s: a number up to %llu", key, text, (unsigned long long)most);
    return UCCL_EP_OK;
}

static uccl_ep_status parse_fault(const uccl_ep_host *host, const char *value, enum fault *fault) {
    *fault = fault_by_name(value, strlen(value));
    if (*fault != FAULT_COUNT) return UCCL_EP_OK;
    char valid[400];
    fault_names(value, valid, sizeof valid);
    return fail(host, UCCL_EP_E_INVALID, "fault=%s: there is none of that name, but %s", value, valid);
}

static uccl_ep_status parse(const uccl_ep_host *host, const char *options, struct parsed *out) {
    *out = (struct parsed){.knobs = {.room = 256, .seed = 1}, .real = DEFAULT_REAL};
    uint64_t lazy = 0, partial = 0, again = 0, room = 256, disorder = 0, step = 0, fails = 0;
    const struct {
        const char *key;
        uint64_t *value, most;
    } numbers[] = {{"lazy", &lazy, 1000000},   {"partial", &partial, 100},
                   {"again", &again, 95},      {"room", &room, MAX_ROOM},
                   {"disorder", &disorder, 1}, {"step", &step, 1},
                   {"fail", &fails, 1000},     {"seed", &out->knobs.seed, UINT64_MAX}};
    char copy[256];
    snprintf(copy, sizeof copy, "%s", options);
    char *rest = NULL;
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *equals = strchr(word, '=');
        const size_t length = equals ? (size_t)(equals - word) : strlen(word);
        const char *value = equals ? equals + 1 : "";
        uccl_ep_status status = UCCL_EP_OK;
        bool ours = false;
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers && !ours; i++) {
            ours = strlen(numbers[i].key) == length && !strncmp(word, numbers[i].key, length);
            if (ours) status = number(host, numbers[i].key, value, numbers[i].most, numbers[i].value);
        }
        if (ours) {
        } else if (length == 4 && !strncmp(word, "real", 4)) {
            snprintf(out->real, sizeof out->real, "%s", value);
        } else if (length == 5 && !strncmp(word, "fault", 5)) {
            status = parse_fault(host, value, &out->knobs.fault);
        } else {
            const size_t used = strlen(out->others);
            snprintf(out->others + used, sizeof out->others - used, "%s%s", used ? "," : "", word);
        }
        if (status != UCCL_EP_OK) return status;
    }
    out->knobs.lazy_ns = lazy * 1000;
    out->knobs.partial = (uint32_t)partial;
    out->knobs.again = (uint32_t)again;
    out->knobs.room = room ? (uint32_t)room : 1;
    out->knobs.disorder = disorder;
    out->knobs.step = step;
    out->knobs.fail = (uint32_t)fails;
    return UCCL_EP_OK;
}

/* ---------------------------------------------------------------------------------------------------------- control */

/* `query` comes without options, so it describes the real device that was opened last, or the default one. */
static const uccl_ep_backend *_Atomic last_real;

static uccl_ep_status query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    const uccl_ep_backend *real = last_real;
    const uccl_ep_status status = real ? UCCL_EP_OK : load(host, DEFAULT_REAL, &real);
    return status == UCCL_EP_OK ? real->query(host, index, info) : status;
}

/* What is promised once operations pass through our queue. */
static void promise(const struct knobs *knobs, uccl_ep_caps *caps) {
    if (!caps->max_inflight_peer || caps->max_inflight_peer > knobs->room) caps->max_inflight_peer = knobs->room;
    caps->flags &= ~UCCL_EP_CAP_DEFERRED_DOORBELL;
    if (knobs->disorder)
        caps->flags &= ~(UCCL_EP_CAP_ORDER_WRITE_WRITE | UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ORDER_WRITE_IMM |
                         UCCL_EP_CAP_COMPLETES_IN_ORDER | UCCL_EP_CAP_UNSIGNALLED | UCCL_EP_CAP_ERROR_STOPS |
                         UCCL_EP_CAP_SIGNALS_STRICT | UCCL_EP_CAP_FENCE_DELIVERED);
}

static uccl_ep_status device_open(const uccl_ep_host *host, const char *name, const char *options,
                                  uccl_ep_device **device, uccl_ep_caps *caps) {
    struct parsed parsed;
    const uccl_ep_backend *real = NULL;
    uccl_ep_status status = parse(host, options, &parsed);
    if (status == UCCL_EP_OK) status = load(host, parsed.real, &real);
    if (status != UCCL_EP_OK) return status;
    uccl_ep_device *made = calloc(1, sizeof *made);
    if (!made) return fail(host, UCCL_EP_E_NO_MEMORY, "no memory for a device");
    made->host = host;
    made->real = real;
    made->knobs = parsed.knobs;
    status = real->device_open(host, name, parsed.others, &made->inner, caps);
    if (status != UCCL_EP_OK) {
        free(made);
        return status;
    }
    promise(&made->knobs, caps);
    last_real = real;
    fault_device_opened(made);
    *device = made;
    return UCCL_EP_OK;
}

static void device_close(uccl_ep_device *device) {
    fault_device_closed(device);
    device->real->device_close(device->inner);
    free(device);
}

static uccl_ep_status memory_alloc(uccl_ep_device *device, uint64_t bytes, uint32_t flags, void **base) {
    if (!device->real->memory_alloc)
        return fail(device->host, UCCL_EP_E_UNSUPPORTED, "the real backend gives no memory");
    return device->real->memory_alloc(device->inner, bytes, flags, base);
}

static void memory_free(uccl_ep_device *device, void *base, uint64_t bytes) {
    device->real->memory_free(device->inner, base, bytes);
}

static uccl_ep_status scratch_open(uccl_ep_device *device) {
    const uint64_t bytes = (uint64_t)SCRATCH_BYTES * SCRATCH_PEERS;
    void *base = NULL;
    uccl_ep_status status = memory_alloc(device, bytes, UCCL_EP_ALLOC_HUGE_OFF, &base);
    if (status != UCCL_EP_OK) return status;
    device->scratch = base;
    const uccl_ep_memory memory = {
        .size = sizeof memory, .base = base, .bytes = bytes, .dmabuf_fd = -1, .access = UCCL_EP_ACCESS_LOCAL_READ};
    return device->real->region_register(device->inner, UCCL_EP_REGION_MAILBOX, &memory);
}

static void scratch_close(uccl_ep_device *device) {
    if (!device->scratch) return;
    device->real->region_deregister(device->inner, UCCL_EP_REGION_MAILBOX);
    memory_free(device, device->scratch, (uint64_t)SCRATCH_BYTES * SCRATCH_PEERS);
    device->scratch = NULL;
}

static uccl_ep_status region_register(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory) {
    if (region == UCCL_EP_REGION_MAILBOX && device->scratch)
        return device->host->fail(
            device->host->context, UCCL_EP_E_UNSUPPORTED, 0,
            "this fault keeps its bytes where the strategy has its mailbox: take another strategy");
    const uccl_ep_status status = device->real->region_register(device->inner, region, memory);
    if (status != UCCL_EP_OK || region != UCCL_EP_REGION_HEAP) return status;
    device->heap = memory->base;
    device->heap_bytes = memory->bytes;
    return fault_needs_scratch(device->knobs.fault) ? scratch_open(device) : UCCL_EP_OK;
}

static void region_deregister(uccl_ep_device *device, uccl_ep_region region) {
    if (region == UCCL_EP_REGION_HEAP) scratch_close(device);
    device->real->region_deregister(device->inner, region);
}

static uccl_ep_status region_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes) {
    return device->real->region_export(device->inner, region, blob, bytes);
}

static uccl_ep_status region_import(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                    uint32_t bytes) {
    return device->real->region_import(device->inner, peer, region, blob, bytes);
}

static uccl_ep_status endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                    uccl_ep_endpoint **endpoint) {
    uccl_ep_endpoint *made = calloc(1, sizeof *made + config->peers * sizeof made->queues[0]);
    if (!made) return fail(device->host, UCCL_EP_E_NO_MEMORY, "no memory for an endpoint");
    made->device = device;
    made->rank = config->rank;
    made->peers = config->peers;
    made->index = config->index;
    /* Each endpoint its own numbers, the same in each run of a seed. */
    made->random =
        (device->knobs.seed * 1000003u + config->rank * 1009u + config->index + 1) * 0x9e3779b97f4a7c15ull | 1;
    const uccl_ep_status status = device->real->endpoint_open(device->inner, config, &made->inner);
    if (status != UCCL_EP_OK) {
        free(made);
        return status;
    }
    fault_endpoint_opened(made);
    *endpoint = made;
    return UCCL_EP_OK;
}

static void endpoint_close(uccl_ep_endpoint *e) {
    fault_endpoint_closed(e);
    e->device->real->endpoint_close(e->inner);
    queues_close(e);
    free(e);
}

/* Behind the real backend's address, where the fault wants to know it: the process. */
static bool address_with_process(const uccl_ep_endpoint *e) {
    return e->device->knobs.fault == FAULT_target_must_run;
}

static uccl_ep_status endpoint_address(uccl_ep_endpoint *e, void *blob, uint32_t *bytes) {
    const int32_t process = (int32_t)getpid();
    const uint32_t room = *bytes;
    const uccl_ep_status status = e->device->real->endpoint_address(e->inner, blob, bytes);
    if (status != UCCL_EP_OK || !address_with_process(e)) return status;
    if (room - *bytes < sizeof process)
        return fail(e->device->host, UCCL_EP_E_INVALID, "no room for a process behind an address of %u bytes", *bytes);
    memcpy((char *)blob + *bytes, &process, sizeof process);
    *bytes += (uint32_t)sizeof process;
    return UCCL_EP_OK;
}

static uccl_ep_status connect_peer(uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes) {
    int32_t process = 0;
    if (address_with_process(e)) {
        if (bytes < sizeof process) return fail(e->device->host, UCCL_EP_E_INVALID, "an address without a process");
        bytes -= (uint32_t)sizeof process;
        memcpy(&process, (const char *)blob + bytes, sizeof process);
    }
    uccl_ep_status status = e->device->real->connect(e->inner, peer, blob, bytes);
    if (status == UCCL_EP_OK) status = queue_open(e, peer);
    if (status == UCCL_EP_OK) e->queues[peer].process = process;
    return status;
}

static uccl_ep_status connect_poll(uccl_ep_endpoint *e, uint32_t peer) {
    return e->device->real->connect_poll(e->inner, peer);
}

static void describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    if (vendor_code == FAILED_ON_PURPOSE && bytes)
        snprintf(text, bytes, "the mutant backend let it fail (fail=)");
    else
        device->real->describe(device->inner, status, vendor_code, text, bytes);
}

static uccl_ep_status replenish(uccl_ep_endpoint *e, uint32_t peer, uint32_t n) {
    if (!e->device->real->replenish)
        return fail(e->device->host, UCCL_EP_E_UNSUPPORTED, "the real backend has no receives");
    return e->device->real->replenish(e->inner, peer, n);
}

static int32_t events(uccl_ep_endpoint *e, uccl_ep_event *out, uint32_t max) {
    if (!e->device->real->events) return 0;
    int32_t n = e->device->real->events(e->inner, out, max);
    const enum fault fault = e->device->knobs.fault;
    if (fault == FAULT_loss_hidden) return 0;
    if (fault == FAULT_loss_spreads && n > 0)
        for (uint32_t peer = 0; peer < e->peers && (uint32_t)n < max; peer++)
            if (peer != e->rank && peer != out[0].peer) {
                out[n] = out[0];
                out[n++].peer = peer;
            }
    return n;
}

static uccl_ep_status flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    /* A real backend without it has nothing to flush. */
    return e->device->real->flush_local ? e->device->real->flush_local(e->inner, region) : UCCL_EP_OK;
}

__attribute__((visibility("default"))) const uccl_ep_backend *uccl_ep_backend_entry(void) {
    static const uccl_ep_backend table = {
        .size = sizeof table,
        .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
        .abi_minor = 0,
        .name = "mutant",
        .version = "1",
        .query = query,
        .device_open = device_open,
        .device_close = device_close,
        .memory_alloc = memory_alloc,
        .memory_free = memory_free,
        .region_register = region_register,
        .region_deregister = region_deregister,
        .region_export = region_export,
        .region_import = region_import,
        .endpoint_open = endpoint_open,
        .endpoint_close = endpoint_close,
        .endpoint_address = endpoint_address,
        .connect = connect_peer,
        .connect_poll = connect_poll,
        .disconnect = mutant_disconnect,
        .submit = mutant_submit,
        .poll = mutant_poll,
        .describe = describe,
        .replenish = replenish,
        .events = events,
        .flush_local = flush_local,
    };
    return &table;
}
