/* SPDX-License-Identifier: Apache-2.0
 *
 * library.c: libibverbs, opened at run time, so that one build serves machines with and without it.
 *
 * Structures are those of rdma-core 44, which later ones only append to; whether a function is there is looked up.
 */
#include "verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_LIBRARY "libibverbs.so.1"
#define DESCRIPTORS 8

/* libibverbs looks for its providers once. If it has no descriptors left for them, it finds no device, then or ever. */
static uccl_ep_status check_descriptors(const uccl_ep_host *host) {
    int held[DESCRIPTORS], n = 0, error = 0;
    while (n < DESCRIPTORS) {
        held[n] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (held[n] < 0) break;
        n++;
    }
    if (n < DESCRIPTORS) error = errno;
    while (n) close(held[--n]);
    if (error != EMFILE && error != ENFILE) return UCCL_EP_OK;
    return verbs_fail(host, UCCL_EP_E_SYSTEM, error,
                      "%s (errno %d): a NIC needs %d descriptors; raise the limit of open files (ulimit -n)",
                      strerror(error), error, DESCRIPTORS);
}

/* The vendor's own library: as asked for, else beside a libibverbs that was given by its path, else where the loader
 * looks. It links to libibverbs.so.1 itself, and has to find the one that is loaded. */
static uccl_ep_status open_own(const uccl_ep_host *host, const verbs_options *options, verbs_library *library) {
    const verbs_transport *t = &verbs_this_transport;
    char beside[sizeof library->path + 32];
    const char *path = options->own_library;
    if (!path[0]) path = getenv(t->environment);
    if (!path || !path[0]) {
        const char *slash = strrchr(library->path, '/');
        snprintf(beside, sizeof beside, "%.*s/%s", slash ? (int)(slash - library->path) : 0, library->path, t->library);
        path = slash && !access(beside, F_OK) ? beside : t->library;
    }
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        return verbs_fail(host, UCCL_EP_E_NO_DEVICE, 0, "%s is missing (%.110s): %s", t->library, why ? why : path,
                          t->remedy);
    }
    for (uint32_t i = 0; i < VERBS_OWN; i++) {
        *(void **)(void *)&library->own[i] = dlsym(handle, t->functions[i]);
        if (!library->own[i])
            return verbs_fail(host, UCCL_EP_E_NO_DEVICE, 0, "%.110s lacks %s, it is too old: %s", path, t->functions[i],
                              t->remedy);
    }
    return UCCL_EP_OK;
}

uccl_ep_status verbs_library_open(const uccl_ep_host *host, const verbs_options *options, verbs_library *library) {
    const char *path = options->library;
    memset(library, 0, sizeof *library);
    if (!path[0]) path = getenv("UCCL_EP_LIBIBVERBS");
    if (!path || !path[0]) path = DEFAULT_LIBRARY;
    if (strlen(path) >= sizeof library->path)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "library=: a path of %zu bytes at most",
                          sizeof library->path - 1);
    strcpy(library->path, path);
    const uccl_ep_status status = check_descriptors(host);
    if (status != UCCL_EP_OK) return status;
    /* Stays loaded: providers start threads and keep pointers of their own. */
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        return verbs_fail(host, UCCL_EP_E_NO_DEVICE, 0,
                          "libibverbs is missing (%.120s): install rdma-core (Debian: libibverbs1 ibverbs-providers)",
                          why ? why : path);
    }
    /* A symbol's address as a function: ISO C has no cast for it. */
#define TAKE(type, name, arguments, needed)                                                                            \
    *(void **)(void *)&library->name = dlsym(handle, #name);                                                           \
    if (!library->name && (needed))                                                                                    \
        return verbs_fail(host, UCCL_EP_E_NO_DEVICE, 0,                                                                \
                          "%.120s lacks %s: it is no libibverbs, or too old; rdma-core 32 or newer is needed", path,   \
                          #name);
    VERBS_FUNCTIONS(TAKE)
#undef TAKE
    return verbs_this_transport.library ? open_own(host, options, library) : UCCL_EP_OK;
}
