/* SPDX-License-Identifier: Apache-2.0
 *
 * open.c: one NIC, or several that a rank uses together, and what they promise.
 *
 * Names: "mlx5_0", "mlx5_0:2" for its second port, "mlx5_0+mlx5_1" for two NICs. Endpoint i uses the i-th NIC, modulo
 * their number, at both ends, so that all of a (channel, target) stays on one.
 */
#include "verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define QP_NUMBERS (1u << 24)
#define SCRATCH_BYTES 4096u

uccl_ep_status verbs_fail(const uccl_ep_host *host, uccl_ep_status status, int32_t code, const char *format, ...) {
    char text[VERBS_TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return host->fail(host->context, status, code, text);
}

/* -------------------------------------------------------------------------------------------------------- promises */

static uint64_t smaller64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* The largest power of two within n: regions are registered in such pieces. */
static uint64_t power_below(uint64_t n) {
    return 1ull << (63 - __builtin_clzll(n));
}

/* Is the kernel's part there that lets a NIC reach device memory by its address? */
static bool peer_memory(uint32_t kind) {
    static const char *const cuda[] = {"/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem", NULL};
    static const char *const rocm[] = {"/sys/kernel/mm/memory_peers/amdkfd", "/sys/module/amdgpu_peermem", NULL};
    const char *const *paths = kind == UCCL_EP_MEMORY_CUDA ? cuda : rocm;
    for (; *paths; paths++)
        if (!access(*paths, F_OK)) return true;
    return false;
}

/* Will it write the GPU's memory? An older core does not say. */
static bool heap_in_gpu(const uccl_ep_host *host) {
    return host->size < offsetof(uccl_ep_host, heap_kind) + sizeof host->heap_kind ||
           host->heap_kind != UCCL_EP_MEMORY_HOST;
}

/* Promises about the memory of the GPU that the core has opened. Its kernels read what a NIC writes there, and signal
 * words and payload may then lie in different devices, between which PCIe has no order. A heap in host memory is none
 * of this. */
static uint64_t gpu_promises(const verbs_library *library, const verbs_options *options, const uccl_ep_host *host,
                             uint64_t flags) {
    const uccl_ep_gpu_info *gpu = host->gpu_info;
    switch (gpu->memory_kind) {
    case UCCL_EP_MEMORY_EMULATED: /* this process's own memory */
        flags |= UCCL_EP_CAP_EMULATED_MEMORY;
        break;
    case UCCL_EP_MEMORY_CUDA:
        if (peer_memory(gpu->memory_kind)) flags |= UCCL_EP_CAP_CUDA_MEMORY;
        break;
    case UCCL_EP_MEMORY_ROCM:
        if (peer_memory(gpu->memory_kind)) flags |= UCCL_EP_CAP_ROCM_MEMORY;
        break;
    default:
        break;
    }
    if (options->dmabuf && library->ibv_reg_dmabuf_mr) flags |= UCCL_EP_CAP_DMABUF;
    if (!heap_in_gpu(host)) return flags;
    if (flags & UCCL_EP_CAP_SIGNALS_STRICT && gpu->writes_ordering != UCCL_EP_WRITES_UNORDERED)
        flags |= UCCL_EP_CAP_DEVICE_SIGNALS; /* in one device they are in order again */
    if (gpu->memory_kind != UCCL_EP_MEMORY_EMULATED) flags &= ~(uint64_t)UCCL_EP_CAP_SIGNALS_STRICT;
    if (verbs_this_transport.flush_gpu && gpu->can_flush) {
        flags &= ~(uint64_t)UCCL_EP_CAP_IMM_VISIBLE;
        flags |= UCCL_EP_CAP_FLUSH_LOCAL;
    }
    if (gpu->writes_ordering == UCCL_EP_WRITES_UNORDERED) {
        /* A read by the NIC that wrote is the flush that MEM-3 names: READ_FLUSHES stays. */
        flags &= ~(uint64_t)(UCCL_EP_CAP_IMM_VISIBLE | UCCL_EP_CAP_SIGNALS_STRICT);
        if (gpu->can_flush) flags |= UCCL_EP_CAP_FLUSH_LOCAL;
    }
    return flags;
}

void verbs_capabilities(const verbs_library *library, const verbs_options *options, const verbs_found *found,
                        uint32_t nics, const uccl_ep_host *host, uccl_ep_caps *caps) {
    const verbs_limits *l = &found->limits;
    const uint64_t chunks = smaller64(verbs_this_transport.max_chunks, 96 / nics);
    const uint32_t half = l->max_cqe / 2;
    *caps = (uccl_ep_caps){
        .size = sizeof *caps,
        .completion_level = options->visible ? UCCL_EP_COMPLETION_VISIBLE : UCCL_EP_COMPLETION_DELIVERED,
        .flags = UCCL_EP_CAP_HOST_MEMORY,
        .max_message_bytes = smaller64(l->max_message ? l->max_message : 1ull << 31, 1ull << 31),
        .max_inflight_bytes = l->max_inflight_bytes,
        .max_region_bytes = l->max_region && l->max_region < 1ull << 48 ? power_below(l->max_region) * chunks : 0,
        .max_peers = VERBS_MAX_PEERS,
        .max_batch = l->max_batch,
        .max_inline_bytes = l->inline_bytes,
        .immediate_bits = 32,
        .adding_nics = nics,
        /* Half of a completion queue, less what the ends of connections take; and the receives themselves. */
        .max_receives = half > 256 ? half - 128 : half / 2,
    };
    verbs_this_transport.promise(options, found, nics, caps);
    if (host->size >= offsetof(uccl_ep_host, gpu_info) + sizeof host->gpu_info && host->gpu_info)
        caps->flags = gpu_promises(library, options, host, caps->flags);
}

/* The weakest of both, for NICs of one rank. */
static void weaken(uccl_ep_caps *w, const uccl_ep_caps *other) {
    w->flags &= other->flags;
#define LEAST(member)                                                                                                  \
    if (other->member && (!w->member || other->member < w->member)) w->member = other->member;
    LEAST(max_message_bytes)
    LEAST(max_inflight_bytes)
    LEAST(max_region_bytes)
    LEAST(max_inflight_peer)
    LEAST(max_inflight_endpoint)
    LEAST(max_batch)
    LEAST(max_endpoints)
    LEAST(max_peers)
    LEAST(responder_atomics)
    LEAST(max_receives)
#undef LEAST
    if (other->max_inline_bytes < w->max_inline_bytes) w->max_inline_bytes = other->max_inline_bytes;
}

/* --------------------------------------------------------------------------------------------------------- opening */

static uccl_ep_status prepare(uccl_ep_device *d, verbs_nic *nic) {
    const verbs_library *l = &d->library;
    const char *name = nic->found.name;
    pthread_mutex_init(&nic->handles_lock, NULL);
    errno = 0;
    nic->pd = l->ibv_alloc_pd(nic->context);
    if (!nic->pd)
        return verbs_fail(d->host, UCCL_EP_E_NIC, errno, "%s: no protection domain: %s (errno %d)", name,
                          strerror(errno), errno);
    void *memory = mmap(NULL, SCRATCH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, errno, "no memory for %s", name);
    nic->scratch = memory;
    nic->scratch_mr = l->ibv_reg_mr(nic->pd, memory, SCRATCH_BYTES, IBV_ACCESS_LOCAL_WRITE);
    if (!nic->scratch_mr) {
        const int error = errno;
        return verbs_fail(d->host, UCCL_EP_E_REGISTRATION, error, "%s: a page cannot be registered: %s (errno %d)%s",
                          name, strerror(error), error, verbs_registration_remedy(error, UCCL_EP_MEMORY_HOST));
    }
    if (verbs_this_transport.by_number) {
        memory = mmap(NULL, QP_NUMBERS * sizeof *nic->qp_peer, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            return verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, errno,
                              "no address space for the queue pairs of %s (32 MiB): raise ulimit -v", name);
        nic->qp_peer = memory;
    }
    /* events() must not wait for one. */
    const int flags = fcntl(nic->context->async_fd, F_GETFL);
    if (flags < 0 || fcntl(nic->context->async_fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return verbs_fail(d->host, UCCL_EP_E_SYSTEM, errno, "%s: fcntl of its events: %s", name, strerror(errno));
    char text[VERBS_TEXT];
    snprintf(text, sizeof text, "%s: port %u, %s", name, nic->found.port.number, nic->found.port.why);
    d->host->log(d->host->context, UCCL_EP_LOG_INFO, text);
    return UCCL_EP_OK;
}

static uccl_ep_status no_such(uccl_ep_device *d, struct ibv_device **list, int count, const char *name) {
    char text[VERBS_TEXT];
    size_t used = (size_t)snprintf(text, sizeof text, "no RDMA device '%.63s'; libibverbs sees", name);
    for (int i = 0; i < count && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, " %.63s", d->library.ibv_get_device_name(list[i]));
    if (!count) snprintf(text, sizeof text, "no RDMA device '%.63s': libibverbs sees none (rdma link)", name);
    return verbs_fail(d->host, UCCL_EP_E_NO_DEVICE, 0, "%s", text);
}

/* "NAME" or "NAME:PORT", whole names only. */
static uccl_ep_status open_named(uccl_ep_device *d, struct ibv_device **list, int count, char *word) {
    verbs_options options = d->options;
    char *colon = strchr(word, ':'), *end;
    if (colon) {
        *colon++ = 0;
        const unsigned long port = strtoul(colon, &end, 10);
        if (end == colon || *end || !port || port > 255)
            return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "'%.63s:%.20s': a port is a number from 1 on", word,
                              colon);
        options.port = (int32_t)port;
    }
    if (d->nics == VERBS_MAX_NICS)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "more than %u NICs", VERBS_MAX_NICS);
    for (int i = 0; i < count; i++) {
        if (strcmp(d->library.ibv_get_device_name(list[i]), word)) continue;
        verbs_nic *nic = &d->nic[d->nics];
        verbs_look(&d->library, &options, list[i], &nic->found, &nic->context);
        if (nic->found.unusable[0])
            return verbs_fail(d->host, UCCL_EP_E_NO_DEVICE, 0, "%.63s: %.180s", word, nic->found.unusable);
        d->nics++;
        return UCCL_EP_OK;
    }
    return no_such(d, list, count, word);
}

/* The nearest one that can be used. */
static uccl_ep_status open_nearest(uccl_ep_device *d, struct ibv_device **list, int count) {
    verbs_found found, first = {.unusable = ""};
    int best = -1;
    uint32_t best_distance = UINT32_MAX;
    for (int i = 0; i < count; i++) {
        verbs_look(&d->library, &d->options, list[i], &found, NULL);
        if (found.unusable[0]) {
            if (!first.unusable[0]) first = found;
            continue;
        }
        const uint32_t distance = verbs_distance(d->host, &found);
        if (distance >= best_distance) continue;
        best_distance = distance;
        best = i;
    }
    if (best < 0 && count > 0)
        return verbs_fail(d->host, UCCL_EP_E_NO_DEVICE, 0, "none of %d RDMA devices can be used; %.40s: %.160s", count,
                          first.name, first.unusable);
    if (best < 0)
        return verbs_fail(d->host, UCCL_EP_E_NO_DEVICE, 0,
                          "libibverbs sees no RDMA device: is the driver of the %s loaded (rdma link)?",
                          verbs_this_vendor.family);
    char name[64];
    snprintf(name, sizeof name, "%.63s", d->library.ibv_get_device_name(list[best]));
    return open_named(d, list, count, name);
}

static uccl_ep_status open_nics(uccl_ep_device *d, const char *name) {
    int count = 0;
    errno = 0;
    struct ibv_device **list = d->library.ibv_get_device_list(&count);
    if (!list)
        return verbs_fail(d->host, UCCL_EP_E_NO_DEVICE, errno, "libibverbs lists no devices: %s (errno %d)",
                          strerror(errno), errno);
    uccl_ep_status status = UCCL_EP_OK;
    if (!name || !name[0]) {
        status = open_nearest(d, list, count);
    } else {
        char copy[256], *rest = NULL;
        snprintf(copy, sizeof copy, "%s", name);
        for (char *word = strtok_r(copy, "+", &rest); word && status == UCCL_EP_OK; word = strtok_r(NULL, "+", &rest))
            status = open_named(d, list, count, word);
        if (status == UCCL_EP_OK && !d->nics) status = no_such(d, list, count, name);
    }
    /* What is open stays so when the list goes. */
    d->library.ibv_free_device_list(list);
    return status;
}

/* Older kernels move registered pages away from a process that forks, unless its children do not get them. */
static void survive_forks(const uccl_ep_device *d) {
    const verbs_library *l = &d->library;
    if (l->ibv_is_fork_initialized && l->ibv_is_fork_initialized() != IBV_FORK_DISABLED) return;
    const int error = l->ibv_fork_init ? l->ibv_fork_init() : ENOSYS;
    if (error)
        d->host->log(
            d->host->context, UCCL_EP_LOG_WARN,
            "ibv_fork_init failed: on this kernel a fork (subprocess, data loader) may break what is registered; "
            "set RDMAV_FORK_SAFE=1");
}

/* What all its NICs promise. */
static void promise(uccl_ep_device *d) {
    for (uint32_t i = 0; i < d->nics; i++) {
        uccl_ep_caps one;
        verbs_capabilities(&d->library, &d->options, &d->nic[i].found, d->nics, d->host, &one);
        if (i)
            weaken(&d->caps, &one);
        else
            d->caps = one;
    }
}

/* Promised adds are withdrawn where they do not add. */
static uccl_ep_status try_adds(uccl_ep_device *d) {
    char wrong[VERBS_TEXT], text[VERBS_TEXT];
    if (!verbs_this_vendor.adds || !verbs_this_transport.try_adds || !(d->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64))
        return UCCL_EP_OK;
    const uccl_ep_status status = verbs_this_transport.try_adds(d, wrong);
    if (status != UCCL_EP_OK || !wrong[0]) return status;
    if (d->options.atomics == 1)
        return verbs_fail(d->host, UCCL_EP_E_UNSUPPORTED, 0, "atomics=1, and an add did not work (%.150s): %s", wrong,
                          verbs_this_vendor.adds);
    snprintf(text, sizeof text, "no atomics, for an add did not work (%.150s): %s", wrong, verbs_this_vendor.adds);
    d->host->log(d->host->context, UCCL_EP_LOG_WARN, text);
    for (uint32_t i = 0; i < d->nics; i++) d->nic[i].found.limits.atomics = false;
    promise(d);
    return UCCL_EP_OK;
}

uccl_ep_status verbs_device_open(const uccl_ep_host *host, const char *name, const char *options,
                                 uccl_ep_device **device, uccl_ep_caps *caps) {
    *device = NULL;
    uccl_ep_device *d = calloc(1, sizeof *d);
    if (!d) return verbs_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for a device");
    d->host = host;
    uccl_ep_status status = verbs_options_parse(host, options, &d->options);
    if (status == UCCL_EP_OK) status = verbs_library_open(host, &d->options, &d->library);
    if (status == UCCL_EP_OK) {
        survive_forks(d);
        status = open_nics(d, name);
    }
    for (uint32_t i = 0; i < d->nics && status == UCCL_EP_OK; i++) status = prepare(d, &d->nic[i]);
    if (status == UCCL_EP_OK && d->options.relaxed && !d->library.ibv_reg_mr_iova2)
        status = verbs_fail(host, UCCL_EP_E_UNSUPPORTED, 0,
                            "relaxed=1: this libibverbs has no optional access rights; rdma-core 28 or newer has");
    if (status == UCCL_EP_OK) {
        promise(d);
        status = try_adds(d);
    }
    if (status != UCCL_EP_OK) {
        verbs_device_close(d);
        return status;
    }
    const uint32_t size = caps->size && caps->size < sizeof d->caps ? caps->size : (uint32_t)sizeof d->caps;
    memcpy(caps, &d->caps, size);
    caps->size = size;
    *device = d;
    return UCCL_EP_OK;
}

void verbs_regions_forget(uccl_ep_device *d) {
    for (uint32_t region = 0; region < UCCL_EP_REGIONS; region++) {
        verbs_region_deregister(d, (uccl_ep_region)region);
        for (uint32_t peer = 0; d->remote[region] && peer < d->peers; peer++) free(d->remote[region][peer].rkeys);
        free(d->remote[region]);
        d->remote[region] = NULL;
    }
    d->peers = 0;
}

void verbs_device_close(uccl_ep_device *d) {
    verbs_regions_forget(d);
    for (uint32_t i = 0; i < d->nics; i++) {
        verbs_nic *nic = &d->nic[i];
        if (nic->scratch_mr) d->library.ibv_dereg_mr(nic->scratch_mr);
        if (nic->scratch) munmap(nic->scratch, SCRATCH_BYTES);
        if (nic->qp_peer) munmap(nic->qp_peer, QP_NUMBERS * sizeof *nic->qp_peer);
        if (nic->pd) d->library.ibv_dealloc_pd(nic->pd);
        if (nic->context) d->library.ibv_close_device(nic->context);
    }
    free(d);
}
