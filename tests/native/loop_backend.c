/* SPDX-License-Identifier: Apache-2.0
 *
 * loop_backend.c: a NIC whose ranks are threads of one process, with the manners that a test asks for.
 *
 * Options: any_order=1 (completions come in any order, every operation gives one, an error concerns one operation),
 * atomic_order=0 (adds are not ordered behind writes), lazy=N (an operation is executed N polls after it was taken at
 * the earliest), room=N (operations that fit a peer's queue), again=P (P % of submits take nothing), poison=OFFSET (a
 * write to this heap offset fails), stall=RANK (nothing to this rank is executed until it is disconnected), double=1
 * (completions of any_order come twice), max_message=N, seed=S, adds=0 (no ADD64),
 * imm=BITS (immediates, which take no receive), align=BYTES (of writes), device=1 (registers emulated device memory),
 * dmabuf=1 (as a dmabuf, too).
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "uccl_ep/backend.h"

#define QUEUE 8192u
#define RANKS 64u

struct pending {
    uccl_ep_operation operation;
    uint32_t peer;
    uint64_t due;
};

struct uccl_ep_device {
    const uccl_ep_host *host;
    struct {
        char *base;
        uint64_t bytes;
    } region[UCCL_EP_REGIONS], remote[RANKS][UCCL_EP_REGIONS];
    uint64_t any_order, atomic_order, lazy, room, again, poison, stall, twice, max_message, adds, imm, align, seed;
    uint64_t device, dmabuf, device_signals;
};

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    uint64_t polls, random;
    struct pending queue[QUEUE];
    uint32_t queued;
    uint32_t queued_peer[RANKS];
    uccl_ep_completion done[2 * QUEUE];
    uint32_t completed;
    bool failed[RANKS];
    uint32_t rank, index;
    uccl_ep_endpoint *peer[RANKS];
    pthread_mutex_t lock; /* of what arrives: peers put it there */
    uccl_ep_completion arrived[QUEUE];
    uint32_t arrivals;
};

static uint64_t next_random(uccl_ep_endpoint *e) {
    e->random ^= e->random << 13;
    e->random ^= e->random >> 7;
    return e->random ^= e->random << 17;
}

static void promises(const uccl_ep_device *d, uccl_ep_caps *caps) {
    memset(caps, 0, sizeof *caps);
    caps->size = sizeof *caps;
    caps->completion_level = UCCL_EP_COMPLETION_VISIBLE;
    caps->flags = UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_ATOMIC_COHERENT | UCCL_EP_CAP_HOST_MEMORY |
                  UCCL_EP_CAP_SIGNALS_STRICT | UCCL_EP_CAP_NO_DUPLICATES;
    if (d && !d->adds) caps->flags &= ~(uint64_t)UCCL_EP_CAP_ATOMIC_ADD64;
    if (d && d->device) caps->flags |= UCCL_EP_CAP_EMULATED_MEMORY;
    if (d && d->dmabuf) caps->flags |= UCCL_EP_CAP_DMABUF;
    if (d && d->device_signals)
        caps->flags = (caps->flags & ~(uint64_t)UCCL_EP_CAP_SIGNALS_STRICT) | UCCL_EP_CAP_DEVICE_SIGNALS;
    if (d && d->imm) caps->flags |= UCCL_EP_CAP_IMM_VISIBLE;
    caps->immediate_bits = d ? (uint32_t)d->imm : 0;
    caps->write_alignment = d ? (uint32_t)d->align : 0;
    if (d && !d->any_order)
        caps->flags |= UCCL_EP_CAP_COMPLETES_IN_ORDER | UCCL_EP_CAP_UNSIGNALLED | UCCL_EP_CAP_ERROR_STOPS;
    if (d && d->atomic_order) caps->flags |= UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ORDER_WRITE_WRITE;
    caps->max_inflight_peer = d ? (uint32_t)d->room : 0;
    caps->max_inflight_endpoint = QUEUE;
    caps->max_message_bytes = d ? d->max_message : 0;
    caps->max_peers = RANKS;
}

static uccl_ep_status query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    (void)host;
    if (index) return UCCL_EP_E_NO_DEVICE;
    snprintf(info->name, sizeof info->name, "loop0");
    promises(NULL, &info->caps);
    return UCCL_EP_OK;
}

static uccl_ep_status device_open(const uccl_ep_host *host, const char *name, const char *options, uccl_ep_device **out,
                                  uccl_ep_caps *caps) {
    (void)name;
    uccl_ep_device *d = calloc(1, sizeof *d);
    if (!d) return UCCL_EP_E_NO_MEMORY;
    d->host = host;
    d->atomic_order = d->adds = 1;
    d->room = 256;
    d->poison = d->stall = UINT64_MAX;
    d->seed = 1;
    const struct {
        const char *key;
        uint64_t *value;
    } keys[] = {{"any_order", &d->any_order},
                {"atomic_order", &d->atomic_order},
                {"lazy", &d->lazy},
                {"room", &d->room},
                {"again", &d->again},
                {"poison", &d->poison},
                {"stall", &d->stall},
                {"double", &d->twice},
                {"max_message", &d->max_message},
                {"adds", &d->adds},
                {"imm", &d->imm},
                {"align", &d->align},
                {"device", &d->device},
                {"dmabuf", &d->dmabuf},
                {"device_signals", &d->device_signals},
                {"seed", &d->seed}};
    char copy[256];
    snprintf(copy, sizeof copy, "%s", options);
    char *rest = NULL;
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        bool known = false;
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
            const size_t n = strlen(keys[i].key);
            if (strncmp(word, keys[i].key, n) || word[n] != '=') continue;
            *keys[i].value = strtoull(word + n + 1, NULL, 0);
            known = true;
        }
        if (!known) {
            free(d);
            return host->fail(host->context, UCCL_EP_E_INVALID, 0, "no such option");
        }
    }
    promises(d, caps);
    *out = d;
    return UCCL_EP_OK;
}

static void device_close(uccl_ep_device *d) {
    free(d);
}

/* The descriptor and the offset name the bytes at `base`. */
static void check_dmabuf(const uccl_ep_memory *memory) {
    const size_t bytes = memory->dmabuf_offset + memory->bytes;
    char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->dmabuf_fd, 0);
    if (mapped == MAP_FAILED) abort();
    volatile char *there = mapped + memory->dmabuf_offset, *here = memory->base;
    const char was = *there;
    *there = (char)(was + 1);
    if (*here != (char)(was + 1)) abort();
    *there = was;
    munmap(mapped, bytes);
}

static uccl_ep_status region_register(uccl_ep_device *d, uccl_ep_region region, const uccl_ep_memory *memory) {
    /* What is not promised is not asked for. */
    const bool device = memory->kind != UCCL_EP_MEMORY_HOST;
    if (device && !(memory->kind == UCCL_EP_MEMORY_EMULATED && (d->device || (d->dmabuf && memory->dmabuf_fd >= 0))))
        abort();
    if (device && !(d->host->accelerator && d->host->gpu)) abort();
    if (memory->dmabuf_fd >= 0) check_dmabuf(memory);
    d->region[region].base = memory->base;
    d->region[region].bytes = memory->bytes;
    return UCCL_EP_OK;
}
static void region_deregister(uccl_ep_device *d, uccl_ep_region region) {
    d->region[region].base = NULL;
}
static uccl_ep_status region_export(uccl_ep_device *d, uccl_ep_region region, void *blob, uint32_t *bytes) {
    memcpy(blob, &d->region[region], sizeof d->region[region]);
    *bytes = sizeof d->region[region];
    return UCCL_EP_OK;
}
static uccl_ep_status region_import(uccl_ep_device *d, uint32_t peer, uccl_ep_region region, const void *blob,
                                    uint32_t bytes) {
    if (bytes != sizeof d->remote[peer][region]) return UCCL_EP_E_INVALID;
    memcpy(&d->remote[peer][region], blob, bytes);
    return UCCL_EP_OK;
}

static uccl_ep_status endpoint_open(uccl_ep_device *d, const uccl_ep_endpoint_config *config, uccl_ep_endpoint **out) {
    uccl_ep_endpoint *e = calloc(1, sizeof *e);
    if (!e) return UCCL_EP_E_NO_MEMORY;
    e->device = d;
    e->random = (d->seed * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)config->rank << 32) ^ (config->index + 1);
    e->rank = config->rank;
    e->index = config->index;
    pthread_mutex_init(&e->lock, NULL);
    *out = e;
    return UCCL_EP_OK;
}
static void endpoint_close(uccl_ep_endpoint *e) {
    pthread_mutex_destroy(&e->lock);
    free(e);
}
static uccl_ep_status endpoint_address(uccl_ep_endpoint *e, void *blob, uint32_t *bytes) {
    memcpy(blob, &e, sizeof e);
    *bytes = sizeof e;
    return UCCL_EP_OK;
}
/* For one peer alone: from whom, to whom. What connect() gets of this has to come from the right end of the right pair.
 */
static uccl_ep_status peer_address(uccl_ep_endpoint *e, uint32_t peer, void *blob, uint32_t *bytes) {
    const uint32_t pair[3] = {e->rank, peer, e->index};
    if (*bytes < sizeof pair) return UCCL_EP_E_INVALID;
    memcpy(blob, pair, sizeof pair);
    *bytes = sizeof pair;
    return UCCL_EP_OK;
}
static uccl_ep_status connect_start(uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes) {
    uint32_t pair[3];
    if (bytes != sizeof e->peer[peer] + sizeof pair) return UCCL_EP_E_INVALID;
    memcpy(&e->peer[peer], blob, sizeof e->peer[peer]);
    memcpy(pair, (const char *)blob + sizeof e->peer[peer], sizeof pair);
    if (pair[0] != peer || pair[1] != e->rank || pair[2] != e->index) return UCCL_EP_E_INVALID;
    e->failed[peer] = false;
    return UCCL_EP_OK;
}
static uccl_ep_status connect_poll(uccl_ep_endpoint *e, uint32_t peer) {
    (void)peer;
    /* Some turns of patience, so that the core's polling is real. */
    return e->polls++ % 4 == 3 ? UCCL_EP_OK : UCCL_EP_IN_PROGRESS;
}

static uccl_ep_status disconnect(uccl_ep_endpoint *e, uint32_t peer) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < e->queued; i++)
        if (e->queue[i].peer != peer) e->queue[kept++] = e->queue[i];
    e->queued = kept;
    e->queued_peer[peer] = 0;
    kept = 0;
    for (uint32_t i = 0; i < e->completed; i++)
        if (e->done[i].peer != peer) e->done[kept++] = e->done[i];
    e->completed = kept;
    return UCCL_EP_OK;
}

static uccl_ep_status submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted) {
    (void)flags;
    const uccl_ep_device *d = e->device;
    *accepted = 0;
    if (next_random(e) % 100 < d->again) return UCCL_EP_OK;
    for (uint32_t i = 0; i < n; i++) {
        if (e->queued == QUEUE || e->queued_peer[peer] >= d->room) break;
        e->queue[e->queued++] =
            (struct pending){operations[i], peer, e->polls + d->lazy + (d->any_order ? next_random(e) % 8 : 0)};
        e->queued_peer[peer]++;
        ++*accepted;
    }
    return UCCL_EP_OK;
}

static void complete(uccl_ep_endpoint *e, const struct pending *p, int32_t status) {
    if (status == UCCL_EP_OK && !(p->operation.flags & UCCL_EP_OPERATION_SIGNALLED)) return;
    const uccl_ep_completion record = {
        .cookie = p->operation.cookie, .status = status, .peer = p->peer, .vendor_code = status ? 42 : 0};
    for (uint64_t k = 0; k <= (e->device->twice && e->device->any_order); k++)
        if (e->completed < 2 * QUEUE) e->done[e->completed++] = record;
}

/* Words that others poll appear whole, as a NIC's do, and after what came before. */
static void place(char *to, const char *from, uint32_t length) {
    for (; length >= 8; to += 8, from += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, from, sizeof word);
        __atomic_store_n((uint64_t *)(void *)to, word, __ATOMIC_RELEASE);
    }
    for (; length; length--) __atomic_store_n(to++, *from++, __ATOMIC_RELEASE);
}

static void execute(uccl_ep_endpoint *e, const struct pending *p) {
    const uccl_ep_device *d = e->device;
    const uccl_ep_operation *o = &p->operation;
    if (e->failed[p->peer] && !d->any_order) {
        complete(e, p, UCCL_EP_E_CLOSED); /* flushed behind an error */
        return;
    }
    const uint64_t align = d->align ? d->align : 1;
    if ((o->remote_offset | o->local_offset | o->length) % align && o->kind != UCCL_EP_OPERATION_ADD64)
        abort(); /* nor for that */
    char *to = d->remote[p->peer][o->remote_region].base + o->remote_offset;
    if (o->remote_offset + o->length > d->remote[p->peer][o->remote_region].bytes)
        abort(); /* the core must not ask for it */
    const bool writes = o->kind == UCCL_EP_OPERATION_WRITE || o->kind == UCCL_EP_OPERATION_WRITE_IMM;
    if (writes && o->remote_region == UCCL_EP_REGION_HEAP && o->remote_offset == d->poison) {
        e->failed[p->peer] = true;
        complete(e, p, UCCL_EP_E_NIC);
        return;
    }
    if (writes && o->remote_region == UCCL_EP_REGION_HEAP)
        memcpy(to, d->region[o->local_region].base + o->local_offset, o->length);
    else if (writes)
        place(to, d->region[o->local_region].base + o->local_offset, o->length);
    else
        __atomic_fetch_add((uint64_t *)(void *)to, o->value, __ATOMIC_ACQ_REL);
    if (o->kind == UCCL_EP_OPERATION_WRITE_IMM) {
        uccl_ep_endpoint *target = e->peer[p->peer];
        pthread_mutex_lock(&target->lock);
        if (target->arrivals == QUEUE) abort();
        target->arrived[target->arrivals++] =
            (uccl_ep_completion){.cookie = o->value, .kind = UCCL_EP_COMPLETION_IMMEDIATE, .peer = e->rank};
        pthread_mutex_unlock(&target->lock);
    }
    complete(e, p, UCCL_EP_OK);
}

static int32_t poll_completions(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max) {
    const uccl_ep_device *d = e->device;
    e->polls++;
    uint32_t kept = 0;
    bool blocked[RANKS] = {false};
    for (uint32_t i = 0; i < e->queued; i++) {
        const struct pending p = e->queue[i];
        const bool wait = p.due > e->polls || p.peer == d->stall || blocked[p.peer];
        if (wait) {
            if (!d->any_order) blocked[p.peer] = true;
            e->queue[kept++] = p;
            continue;
        }
        e->queued_peer[p.peer]--;
        execute(e, &p);
    }
    e->queued = kept;
    uint32_t n = 0;
    pthread_mutex_lock(&e->lock);
    while (n < max && e->arrivals) completions[n++] = e->arrived[--e->arrivals];
    pthread_mutex_unlock(&e->lock);
    while (n < max && e->completed) {
        /* In any order: from anywhere in the list; else the oldest. */
        const uint32_t at = d->any_order ? (uint32_t)(next_random(e) % e->completed) : 0;
        completions[n++] = e->done[at];
        memmove(&e->done[at], &e->done[at + 1], (e->completed - at - 1) * sizeof *e->done);
        e->completed--;
    }
    return (int32_t)n;
}

static void describe(uccl_ep_device *d, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)d;
    snprintf(text, bytes, "loop error %d/%d", status, vendor_code);
}

const uccl_ep_backend *uccl_ep_backend_entry(void) {
    static const uccl_ep_backend table = {.size = sizeof(uccl_ep_backend),
                                          .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                                          .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                                          .name = "loop",
                                          .version = "test",
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
                                          .connect = connect_start,
                                          .connect_poll = connect_poll,
                                          .disconnect = disconnect,
                                          .submit = submit,
                                          .poll = poll_completions,
                                          .describe = describe,
                                          .peer_address = peer_address};
    return &table;
}
