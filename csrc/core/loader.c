/* SPDX-License-Identifier: Apache-2.0
 *
 * loader.c: opens a backend's library and decides whether it can be used.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "internal.h"

static uint64_t real_clock(void *context) {
    (void)context;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static uint64_t host_now(void *context) {
    return context ? comm_now(context) : real_clock(NULL);
}

static void host_log(void *context, uccl_ep_log_level level, const char *text) {
    const uccl_ep_comm *comm = context;
    if (comm && comm->config.log) comm->config.log(comm->config.log_context, (uint32_t)level, text);
}

void host_init(uccl_ep_host *host, void *context) {
    *host = (uccl_ep_host){.size = sizeof(uccl_ep_host),
                           .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                           .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                           .context = context,
                           .now_ns = host_now,
                           .log = host_log,
                           .fail = host_fail};
}

/* Every function that ABI 1.0 requires: X(name). */
#define REQUIRED(X)                                                                                                    \
    X(query)                                                                                                           \
    X(device_open)                                                                                                     \
    X(device_close)                                                                                                    \
    X(region_register)                                                                                                 \
    X(region_deregister)                                                                                               \
    X(region_export)                                                                                                   \
    X(region_import)                                                                                                   \
    X(endpoint_open)                                                                                                   \
    X(endpoint_close)                                                                                                  \
    X(endpoint_address)                                                                                                \
    X(connect)                                                                                                         \
    X(connect_poll)                                                                                                    \
    X(disconnect)                                                                                                      \
    X(submit)                                                                                                          \
    X(poll)                                                                                                            \
    X(describe)

uccl_ep_status backend_load(const char *path, const uccl_ep_backend **backend) {
    /* The library stays loaded: its table and its threads may outlive a communicator. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "cannot load the backend %s: %s", path, why ? why : "?");
    }
    /* A symbol's address as a function: ISO C has no cast for it. */
    union {
        void *symbol;
        const uccl_ep_backend *(*function)(void);
    } entry_point = {.symbol = dlsym(library, UCCL_EP_BACKEND_ENTRY)};
    if (!entry_point.symbol) {
        dlclose(library);
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1",
                          "%s is not a uccl_ep backend: it does not export " UCCL_EP_BACKEND_ENTRY, path);
    }
    const uccl_ep_backend *table = entry_point.function();
    if (!table) return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "%s gave no backend table", path);
    /* The version first: the rest of a table of another major may lie anywhere. */
    const bool newer = table->abi_major == UCCL_EP_BACKEND_ABI_MAJOR && table->abi_minor > UCCL_EP_BACKEND_ABI_MINOR;
    if ((table->abi_major != UCCL_EP_BACKEND_ABI_MAJOR || newer) && !FAULT(abi_not_checked))
        return fail_local(
            UCCL_EP_E_ABI, "ABI-1", "the backend %s needs backend ABI %u.%u and this library has %u.%u: %s", path,
            table->abi_major, table->abi_minor, UCCL_EP_BACKEND_ABI_MAJOR, UCCL_EP_BACKEND_ABI_MINOR,
            newer || table->abi_major > UCCL_EP_BACKEND_ABI_MAJOR ? "install a newer uccl_ep"
                                                                  : "rebuild the backend with this uccl_ep's headers");
    if (table->size < offsetof(uccl_ep_backend, replenish))
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1",
                          "the table of %s has %u bytes, ABI %u.%u needs at least %zu: rebuild it", path, table->size,
                          UCCL_EP_BACKEND_ABI_MAJOR, UCCL_EP_BACKEND_ABI_MINOR, offsetof(uccl_ep_backend, replenish));
#define CHECK(name)                                                                                                    \
    if (!table->name)                                                                                                  \
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the backend %s lacks the required function %s", path,     \
                          #name);
    REQUIRED(CHECK)
#undef CHECK
    if (!table->name || !table->name[0] || !table->version)
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the backend %s has no name or version", path);
    /* A shorter table is one of an older minor: what it lacks is NULL here. The copy lives as long as the library does.
     */
    uccl_ep_backend *copy = calloc(1, sizeof *copy);
    if (!copy) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the table of %s", path);
    memcpy(copy, table, table->size < sizeof *copy ? table->size : sizeof *copy);
    *backend = copy;
    return UCCL_EP_OK;
}

uccl_ep_status device_query(const uccl_ep_backend *backend, const uccl_ep_host *host, uint32_t index,
                            uccl_ep_device_info *info) {
    *info = (uccl_ep_device_info){.size = sizeof *info, .caps.size = sizeof info->caps};
    host_fail_clear();
    const uccl_ep_status status = backend->query(host, index, info);
    info->name[sizeof info->name - 1] = info->vendor[sizeof info->vendor - 1] = 0;
    info->model[sizeof info->model - 1] = info->firmware[sizeof info->firmware - 1] = 0;
    info->address[sizeof info->address - 1] = info->unusable[sizeof info->unusable - 1] = 0;
    return status == UCCL_EP_OK ? status : checked_status(status);
}

uccl_ep_status uccl_ep_backend_probe(const char *path, char *name, char *version, uccl_ep_device_info *devices,
                                     uint32_t *n) {
    if (!path || !n) return fail_local(UCCL_EP_E_INVALID, "", "path and n are required");
    const uccl_ep_backend *backend;
    const uccl_ep_status status = backend_load(path, &backend);
    if (status != UCCL_EP_OK) return status;
    if (name) snprintf(name, 64, "%s", backend->name);
    if (version) snprintf(version, 64, "%s", backend->version);
    uccl_ep_host host;
    host_init(&host, NULL);
    const uint32_t room = devices ? *n : 0;
    uint32_t found = 0;
    for (;;) {
        uccl_ep_device_info info;
        const uccl_ep_status got = device_query(backend, &host, found, &info);
        if (got == UCCL_EP_E_NO_DEVICE) break;
        if (got != UCCL_EP_OK) {
            const uccl_ep_status reported = fail_local(got, "", "%s cannot list its NICs: %s", path, host_fail_text());
            free((void *)backend);
            return reported;
        }
        if (found < room) devices[found] = info;
        if (++found == 1024) break; /* a query that never ends */
    }
    *n = found;
    free((void *)backend);
    return UCCL_EP_OK;
}
