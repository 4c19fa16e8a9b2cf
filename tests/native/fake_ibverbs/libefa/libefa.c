/* SPDX-License-Identifier: Apache-2.0
 *
 * libefa.c: a libefa.so.1 for tests alone: the direct verbs of the fake libibverbs that lies beside it (../srd.c), by
 * the names that a program looks up.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_OLD
#define FAKE_OLD 0 /* 1: before rdma-core 26, without queries of address handles */
#endif

struct ibv_context;
struct ibv_qp_init_attr_ex;
struct ibv_ah;
int efadv_query_device(struct ibv_context *context, void *attr, uint32_t bytes);
void *efadv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr, void *own, uint32_t bytes);
int efadv_query_ah(struct ibv_ah *ah, void *attr, uint32_t bytes);

static void *verbs;

/* By its path, so that it is the one that was opened before, if one was. By who loads this, since the loader's names
 * are made under a lock of its own, which ThreadSanitizer does not see. */
__attribute__((constructor)) static void find_verbs(void) {
    Dl_info here;
    char path[4096];
    if (!dladdr((void *)(uintptr_t)&efadv_query_device, &here)) abort();
    const char *slash = strrchr(here.dli_fname, '/');
    snprintf(path, sizeof(path), "%.*s/libibverbs.so.1", slash ? (int)(slash - here.dli_fname) : 1,
             slash ? here.dli_fname : ".");
    __atomic_store_n(&verbs, dlopen(path, RTLD_NOW | RTLD_LOCAL), __ATOMIC_RELEASE);
}

static void *beside(const char *name) {
    void *library = __atomic_load_n(&verbs, __ATOMIC_ACQUIRE), *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "fake libefa: no %s in the libibverbs beside it\n", name);
        abort();
    }
    return function;
}

int efadv_query_device(struct ibv_context *context, void *attr, uint32_t bytes) {
    int (*function)(struct ibv_context *, void *, uint32_t);
    *(void **)(void *)&function = beside("fake_efadv_query_device");
    return function(context, attr, bytes);
}

void *efadv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr, void *own, uint32_t bytes) {
    void *(*function)(struct ibv_context *, struct ibv_qp_init_attr_ex *, void *, uint32_t);
    *(void **)(void *)&function = beside("fake_efadv_create_qp_ex");
    return function(context, attr, own, bytes);
}

#if FAKE_OLD < 1
int efadv_query_ah(struct ibv_ah *ah, void *attr, uint32_t bytes) {
    int (*function)(struct ibv_ah *, void *, uint32_t);
    *(void **)(void *)&function = beside("fake_efadv_query_ah");
    return function(ah, attr, bytes);
}
#endif
