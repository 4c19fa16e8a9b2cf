/* SPDX-License-Identifier: Apache-2.0
 *
 * balance_accelerator.c: the accelerator of the emulation, with an eye on its callers: what they take they give back,
 * to the device they have it of, and host memory is still there when it is unregistered. One call can be made to fail.
 */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "balance.h"

balance balance_state;

static const uccl_ep_accelerator *emulation;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local const char *own_text;

#define MAX_HELD 256u
static struct held {
    const uccl_ep_gpu *gpu;
    const void *address;
    const int64_t *kind;
} held[MAX_HELD];

static const char *error_text(void) {
    return own_text ? own_text : emulation->error_text();
}

static uccl_ep_status enter(const char *call) {
    pthread_mutex_lock(&lock);
    const int fails = ++balance_state.calls == balance_state.fail;
    if (fails) balance_state.failed = call;
    pthread_mutex_unlock(&lock);
    own_text = fails ? "the test wants it so" : NULL;
    return fails ? UCCL_EP_E_SYSTEM : UCCL_EP_OK;
}
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        const uccl_ep_status entered_ = enter(__func__);                                                               \
        if (entered_ != UCCL_EP_OK) return entered_;                                                                   \
    } while (0)

static uccl_ep_status hold(uccl_ep_status status, const uccl_ep_gpu *gpu, const void *address, int64_t *kind) {
    if (status != UCCL_EP_OK) return status;
    pthread_mutex_lock(&lock);
    ++*kind;
    struct held *h = held;
    while (h < held + MAX_HELD && h->gpu) h++;
    if (h == held + MAX_HELD) abort();
    *h = (struct held){gpu, address, kind};
    pthread_mutex_unlock(&lock);
    return status;
}

static void give_back(const uccl_ep_gpu *gpu, const void *address, int64_t *kind) {
    pthread_mutex_lock(&lock);
    struct held *h = held;
    while (h < held + MAX_HELD && !(h->gpu == gpu && h->address == address && h->kind == kind)) h++;
    if (h == held + MAX_HELD) {
        fprintf(stderr, "balance: %p was never taken of this device, or was given back before\n", address);
        abort();
    }
    h->gpu = NULL;
    --*kind;
    pthread_mutex_unlock(&lock);
}

static uccl_ep_status query(uint32_t index, uccl_ep_gpu_info *info) {
    ENTER();
    const uccl_ep_status status = emulation->query(index, info);
    if (balance_state.clock_hz) info->clock_hz = 0;
    if (balance_state.unusable) snprintf(info->unusable, sizeof info->unusable, "its driver is too old");
    if (balance_state.memory_kind) info->memory_kind = balance_state.memory_kind;
    return status;
}

static uccl_ep_status gpu_open(uint32_t index, uccl_ep_gpu **gpu) {
    ENTER();
    const uccl_ep_status status = emulation->open(index, gpu);
    return hold(status, status == UCCL_EP_OK ? *gpu : NULL, NULL, &balance_state.opened);
}

static void gpu_close(uccl_ep_gpu *gpu) {
    give_back(gpu, NULL, &balance_state.opened);
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < MAX_HELD; i++) {
        if (held[i].gpu != gpu) continue;
        fprintf(stderr, "balance: a device is closed, and %p of it is still held\n", held[i].address);
        abort();
    }
    pthread_mutex_unlock(&lock);
    emulation->close(gpu);
}

static uccl_ep_status device_alloc(uccl_ep_gpu *gpu, uint64_t bytes, void **address) {
    ENTER();
    const uccl_ep_status status = emulation->device_alloc(gpu, bytes, address);
    return hold(status, gpu, status == UCCL_EP_OK ? *address : NULL, &balance_state.memory);
}
static void device_free(uccl_ep_gpu *gpu, void *address) {
    give_back(gpu, address, &balance_state.memory);
    emulation->device_free(gpu, address);
}

static uccl_ep_status host_register(uccl_ep_gpu *gpu, void *base, uint64_t bytes, void **device_address) {
    ENTER();
    return hold(emulation->host_register(gpu, base, bytes, device_address), gpu, base, &balance_state.host);
}
static void host_unregister(uccl_ep_gpu *gpu, void *base) {
    unsigned char resident;
    if (mincore(base, 1, &resident)) {
        fprintf(stderr, "balance: %p is unregistered, and was unmapped before\n", base);
        abort();
    }
    give_back(gpu, base, &balance_state.host);
    emulation->host_unregister(gpu, base);
}

static uccl_ep_status copy(uccl_ep_gpu *gpu, void *to, const void *from, uint64_t bytes) {
    ENTER();
    return emulation->copy(gpu, to, from, bytes);
}
static uccl_ep_status allocation(uccl_ep_gpu *gpu, const void *address, void **base, uint64_t *bytes) {
    ENTER();
    return emulation->allocation(gpu, address, base, bytes);
}
static uccl_ep_status export_dmabuf(uccl_ep_gpu *gpu, void *address, uint64_t bytes, int32_t *descriptor) {
    ENTER();
    return emulation->export_dmabuf(gpu, address, bytes, descriptor);
}

const uccl_ep_accelerator *uccl_ep_accelerator_entry(void) {
    pthread_mutex_lock(&lock);
    if (!emulation) {
        void *library = dlopen(UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so", RTLD_NOW | RTLD_LOCAL);
        const union {
            void *symbol;
            const uccl_ep_accelerator *(*function)(void);
        } entry = {.symbol = library ? dlsym(library, UCCL_EP_ACCELERATOR_ENTRY) : NULL};
        if (!entry.symbol) abort();
        emulation = entry.function();
        uccl_ep_accelerator *t = &balance_state.table;
        *t = *emulation;
        t->error_text = error_text;
        t->query = query;
        t->open = gpu_open;
        t->close = gpu_close;
        t->device_alloc = device_alloc;
        t->device_free = device_free;
        t->host_register = host_register;
        t->host_unregister = host_unregister;
        t->copy = copy;
        t->allocation = allocation;
        t->export_dmabuf = export_dmabuf;
    }
    pthread_mutex_unlock(&lock);
    return &balance_state.table;
}
