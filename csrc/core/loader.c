/* SPDX-License-Identifier: Apache-2.0
 *
 * loader.c: opens the library of a backend or an accelerator and decides whether it can be used.
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

/* The library stays loaded: its table and its threads may outlive a communicator. */
static void *library_entry(const char *path, const char *name, const char *what) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "cannot load the %s %s: %s", what, path, why ? why : "?");
        return NULL;
    }
    void *symbol = dlsym(library, name);
    if (symbol) return symbol;
    dlclose(library);
    fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "%s is not a uccl_ep %s: it does not export %s", path, what, name);
    return NULL;
}

/* The version first: the rest of a table of another major may lie anywhere. */
static uccl_ep_status check_version(const char *path, const char *what, uint32_t major, uint32_t minor,
                                    uint32_t our_major, uint32_t our_minor) {
    const bool newer = major == our_major && minor > our_minor;
    if ((major == our_major && !newer) || FAULT(abi_not_checked)) return UCCL_EP_OK;
    if (newer || major > our_major)
        return fail_local(UCCL_EP_E_ABI, "ABI-1",
                          "the %s %s needs %s ABI %u.%u and this library has %u.%u: install a newer uccl_ep", what,
                          path, what, major, minor, our_major, our_minor);
    return fail_local(
        UCCL_EP_E_ABI, "ABI-1",
        "the %s %s needs %s ABI %u.%u and this library has %u.%u: rebuild the %s with this uccl_ep's headers", what,
        path, what, major, minor, our_major, our_minor, what);
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

static uccl_ep_status check_size(const char *path, uint32_t bytes, size_t least) {
    if (bytes >= least) return UCCL_EP_OK;
    return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the table of %s has %u bytes, and %zu are needed: rebuild it",
                      path, bytes, least);
}

/* A shorter table is one of an older minor: what it lacks is NULL in the copy, which lives as long as the library does.
 */
static void *copy_table(const char *path, const void *table, size_t has, size_t size) {
    void *copy = calloc(1, size);
    if (copy)
        memcpy(copy, table, has < size ? has : size);
    else
        fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the table of %s", path);
    return copy;
}

uccl_ep_status backend_load(const char *path, const uccl_ep_backend **backend) {
    /* A symbol's address as a function: ISO C has no cast for it. */
    const union {
        void *symbol;
        const uccl_ep_backend *(*function)(void);
    } entry = {.symbol = library_entry(path, UCCL_EP_BACKEND_ENTRY, "backend")};
    if (!entry.symbol) return UCCL_EP_E_NOT_A_BACKEND;
    const uccl_ep_backend *table = entry.function();
    if (!table) return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "%s gave no backend table", path);
    uccl_ep_status status = check_version(path, "backend", table->abi_major, table->abi_minor,
                                          UCCL_EP_BACKEND_ABI_MAJOR, UCCL_EP_BACKEND_ABI_MINOR);
    if (status == UCCL_EP_OK) status = check_size(path, table->size, offsetof(uccl_ep_backend, replenish));
    if (status != UCCL_EP_OK) return status;
#define CHECK(name)                                                                                                    \
    if (!table->name)                                                                                                  \
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the backend %s lacks the required function %s", path,     \
                          #name);
    REQUIRED(CHECK)
#undef CHECK
    if (!table->name || !table->name[0] || !table->version)
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the backend %s has no name or version", path);
    *backend = copy_table(path, table, table->size, sizeof *table);
    return *backend ? UCCL_EP_OK : UCCL_EP_E_NO_MEMORY;
}

/* Every function that accelerators of 1.0 have: all of them. */
#define ACCELERATOR_REQUIRED(X)                                                                                        \
    X(error_text)                                                                                                      \
    X(query)                                                                                                           \
    X(open)                                                                                                            \
    X(close)                                                                                                           \
    X(device_alloc)                                                                                                    \
    X(device_free)                                                                                                     \
    X(host_register)                                                                                                   \
    X(host_unregister)                                                                                                 \
    X(copy)                                                                                                            \
    X(allocation)                                                                                                      \
    X(export_dmabuf)                                                                                                   \
    X(ipc_export)                                                                                                      \
    X(ipc_open)                                                                                                        \
    X(ipc_close)                                                                                                       \
    X(queue_open)                                                                                                      \
    X(queue_close)                                                                                                     \
    X(copy_start)                                                                                                      \
    X(mark)                                                                                                            \
    X(marks_done)                                                                                                      \
    X(flush_writes)

uccl_ep_status accelerator_load(const char *path, const uccl_ep_accelerator **accelerator) {
    const union {
        void *symbol;
        const uccl_ep_accelerator *(*function)(void);
    } entry = {.symbol = library_entry(path, UCCL_EP_ACCELERATOR_ENTRY, "accelerator")};
    if (!entry.symbol) return UCCL_EP_E_NOT_A_BACKEND;
    const uccl_ep_accelerator *table = entry.function();
    if (!table) return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "%s gave no accelerator table", path);
    uccl_ep_status status = check_version(path, "accelerator", table->abi_major, table->abi_minor,
                                          UCCL_EP_ACCELERATOR_ABI_MAJOR, UCCL_EP_ACCELERATOR_ABI_MINOR);
    const size_t least = offsetof(uccl_ep_accelerator, flush_writes) + sizeof table->flush_writes;
    if (status == UCCL_EP_OK) status = check_size(path, table->size, least);
    if (status != UCCL_EP_OK) return status;
#define CHECK(name)                                                                                                    \
    if (!table->name)                                                                                                  \
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the accelerator %s lacks the required function %s", path, \
                          #name);
    ACCELERATOR_REQUIRED(CHECK)
#undef CHECK
    if (!table->name || !table->name[0])
        return fail_local(UCCL_EP_E_NOT_A_BACKEND, "ABI-1", "the accelerator %s has no name", path);
    *accelerator = copy_table(path, table, table->size, sizeof *table);
    return *accelerator ? UCCL_EP_OK : UCCL_EP_E_NO_MEMORY;
}

uccl_ep_status device_describe(const uccl_ep_backend *backend, const uccl_ep_host *host, uccl_ep_device *opened,
                               uint32_t index, uccl_ep_device_info *info) {
    *info = (uccl_ep_device_info){.size = sizeof *info, .caps.size = sizeof info->caps};
    host_fail_clear();
    const uccl_ep_status status = opened ? backend->opened(opened, info) : backend->query(host, index, info);
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
        const uccl_ep_status got = device_describe(backend, &host, NULL, found, &info);
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
