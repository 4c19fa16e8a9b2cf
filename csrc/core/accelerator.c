/* SPDX-License-Identifier: Apache-2.0
 *
 * accelerator.c: the GPU of a communicator: its driver's table, memory of the host that its kernels reach, and heaps
 * in its own memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

uccl_ep_status accelerator_failed(const uccl_ep_comm *comm, uccl_ep_status status, const char *clause,
                                  const char *what) {
    const uccl_ep_accelerator *a = comm->accelerator;
    const uccl_ep_status checked = checked_status(status);
    if (checked != status)
        return fail_local(checked, clause, "%s: %s gave %d (%s), which is no error: report it to its author", a->name,
                          what, status, uccl_ep_status_name(status));
    const char *why = a->error_text();
    return fail_local(status, clause, "%s: %s failed: %.180s", a->name, what,
                      why && why[0] ? why : uccl_ep_status_text(status));
}

uccl_ep_status accelerator_open(uccl_ep_comm *comm) {
    const uccl_ep_config *c = &comm->config;
    if (!c->accelerator) return UCCL_EP_OK;
    uccl_ep_status status = accelerator_load(c->accelerator, &comm->accelerator);
    if (status != UCCL_EP_OK) return status;
    uccl_ep_gpu_info *info = &comm->gpu_info;
    *info = (uccl_ep_gpu_info){.size = sizeof *info};
    status = comm->accelerator->query(c->accelerator_device, info);
    if (status != UCCL_EP_OK) return accelerator_failed(comm, status, "", "looking for the device");
    info->name[sizeof info->name - 1] = info->unusable[sizeof info->unusable - 1] = 0;
    if (info->unusable[0])
        return fail_local(UCCL_EP_E_NO_DEVICE, "", "%s: device %u (%s) cannot be used: %.150s", comm->accelerator->name,
                          c->accelerator_device, info->name, info->unusable);
    if (!info->clock_hz || info->memory_kind == UCCL_EP_MEMORY_HOST)
        return fail_local(UCCL_EP_E_BACKEND, "", "%s: device %u has no clock, or no memory of its own: report it",
                          comm->accelerator->name, c->accelerator_device);
    status = comm->accelerator->open(c->accelerator_device, &comm->gpu);
    if (status == UCCL_EP_OK && comm->gpu) return UCCL_EP_OK;
    comm->gpu = NULL;
    if (status == UCCL_EP_OK)
        return fail_local(UCCL_EP_E_BACKEND, "", "%s said OK and gave no device: report it", comm->accelerator->name);
    return accelerator_failed(comm, status, "", "opening the device");
}

void accelerator_close(uccl_ep_comm *comm) {
    if (comm->gpu) comm->accelerator->close(comm->gpu);
    comm->gpu = NULL;
    free((void *)comm->accelerator);
    comm->accelerator = NULL;
}

/* ------------------------------------------------------------------------------------- memory of the host for kernels
 */

uccl_ep_status reach_memory(uccl_ep_comm *comm, void *base, uint64_t bytes, struct reach *reach) {
    if (!comm->gpu) return UCCL_EP_OK;
    /* The pages it lies in: memory of the caller may begin anywhere. */
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)base / page * page;
    const uintptr_t end = ((uintptr_t)base + bytes + page - 1) / page * page;
    void *const first = (char *)base - ((uintptr_t)base - begin);
    void *address = NULL;
    const uccl_ep_status status = comm->accelerator->host_register(comm->gpu, first, end - begin, &address);
    if (status != UCCL_EP_OK)
        return accelerator_failed(comm, status, "MEM-1",
                                  first == base && !(bytes % page)
                                      ? "making host memory reachable for kernels"
                                      : "making the pages around the heap reachable for kernels (let it begin and end "
                                        "at pages)");
    *reach = (struct reach){first, (char *)address + ((uintptr_t)base - begin)};
    return UCCL_EP_OK;
}

void unreach_memory(uccl_ep_comm *comm, struct reach *reach) {
    if (reach->base) comm->accelerator->host_unregister(comm->gpu, reach->base);
    *reach = (struct reach){0};
}

/* ------------------------------------------------------------------------------------------- a heap in device memory
 */

static const struct kind {
    const char *name;
    uint64_t promise;
} kinds[] = {[UCCL_EP_MEMORY_HOST] = {"host", UCCL_EP_CAP_HOST_MEMORY},
             [UCCL_EP_MEMORY_CUDA] = {"CUDA", UCCL_EP_CAP_CUDA_MEMORY},
             [UCCL_EP_MEMORY_ROCM] = {"ROCm", UCCL_EP_CAP_ROCM_MEMORY},
             [UCCL_EP_MEMORY_EMULATED] = {"emulated", UCCL_EP_CAP_EMULATED_MEMORY}};
#define KINDS (sizeof kinds / sizeof *kinds)

static const char *kind_name(uint32_t kind) {
    return kind < KINDS ? kinds[kind].name : "unknown";
}

static uccl_ep_status allocation_of(uccl_ep_comm *comm, void *memory, void **base, uint64_t *bytes) {
    const uccl_ep_status status = comm->accelerator->allocation(comm->gpu, memory, base, bytes);
    if (status == UCCL_EP_OK) return status;
    return accelerator_failed(comm, status, "MEM-1",
                              memory == comm->config.heap ? "looking at the heap" : "looking at the signal words");
}

/* Why the NIC cannot have the heap where it lies; empty: it can. */
static void out_of_reach(const uccl_ep_comm *comm, char *why, size_t bytes) {
    const uccl_ep_config *c = &comm->config;
    const uint64_t flags = comm->caps.flags;
    const char *nic = comm->device_info.name, *kind = kinds[c->heap_kind].name;
    why[0] = 0;
    if (flags & kinds[c->heap_kind].promise) return;
    if (!(flags & UCCL_EP_CAP_DMABUF))
        snprintf(why, bytes, "%.40s of the backend %.20s registers no %s memory, nor dmabuf", nic, comm->backend->name,
                 kind);
    else if (!c->heap_dmabuf_fd && !comm->gpu_info.dmabuf)
        snprintf(
            why, bytes,
            "%.40s takes %s memory as a dmabuf alone, and the driver of %.30s exports none (a newer one, or its open "
            "kernel modules, may; or give heap_dmabuf_fd)",
            nic, kind, comm->gpu_info.name);
}

/* Before it is registered: is it what the caller says, and can the NIC have it, or must it be staged? */
uccl_ep_status device_heap_check(uccl_ep_comm *comm) {
    const uccl_ep_config *c = &comm->config;
    if (c->heap_kind == UCCL_EP_MEMORY_HOST) return UCCL_EP_OK;
    if (comm->gpu_info.memory_kind != c->heap_kind)
        return fail_local(UCCL_EP_E_INVALID, "MEM-1", "a heap of %s memory, and the accelerator %s has %s memory",
                          kind_name(c->heap_kind), comm->accelerator->name, kind_name(comm->gpu_info.memory_kind));
    char why[sizeof comm->staged_reason];
    out_of_reach(comm, why, sizeof why);
    if (why[0] && c->staging == UCCL_EP_STAGING_OFF)
        return fail_local(UCCL_EP_E_CAPABILITY, "MEM-1",
                          "%s; and staging is off: let it be auto, or take a heap in host memory, or a NIC that does "
                          "(uccl-ep devices)",
                          why);
    if (c->staging == UCCL_EP_STAGING_ON && !why[0]) snprintf(why, sizeof why, "asked for");
    memcpy(comm->staged_reason, why, sizeof why); /* empty: this rank does not want it */
    void *base = NULL;
    uint64_t bytes = 0;
    const uccl_ep_status status = allocation_of(comm, c->heap, &base, &bytes);
    if (status != UCCL_EP_OK) return status;
    const uint64_t before = (uint64_t)((uintptr_t)c->heap - (uintptr_t)base);
    if (before > bytes || c->heap_bytes > bytes - before)
        return fail_local(UCCL_EP_E_REGISTRATION, "MEM-1",
                          "a heap of %llu bytes at %p, and the allocation of %llu bytes at %p ends before: a heap lies "
                          "in one allocation",
                          (unsigned long long)c->heap_bytes, c->heap, (unsigned long long)bytes, base);
    return UCCL_EP_OK;
}

/* Where the NIC takes a dmabuf and the caller gave none: one of the whole allocation, and where the memory lies in it.
 */
uccl_ep_status device_memory_describe(uccl_ep_comm *comm, uccl_ep_memory *memory) {
    if (memory->kind == UCCL_EP_MEMORY_HOST || memory->dmabuf_fd >= 0 || !(comm->caps.flags & UCCL_EP_CAP_DMABUF) ||
        !comm->gpu_info.dmabuf)
        return UCCL_EP_OK;
    void *base = NULL;
    uint64_t bytes = 0;
    uccl_ep_status status = allocation_of(comm, memory->base, &base, &bytes);
    if (status != UCCL_EP_OK) return status;
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    int32_t descriptor = -1;
    status = comm->accelerator->export_dmabuf(comm->gpu, base, (bytes + page - 1) / page * page, &descriptor);
    if (status == UCCL_EP_OK && descriptor >= 0) {
        memory->dmabuf_fd = descriptor;
        memory->dmabuf_offset = (uint64_t)((uintptr_t)memory->base - (uintptr_t)base);
        return UCCL_EP_OK;
    }
    /* A NIC that knows the memory by its address does not need one. */
    if (comm->caps.flags & kinds[memory->kind].promise) return UCCL_EP_OK;
    if (status == UCCL_EP_OK) status = UCCL_EP_E_BACKEND;
    return accelerator_failed(comm, status, "MEM-1",
                              memory->base == comm->config.heap ? "exporting the heap as a dmabuf"
                                                                : "exporting the signal words as a dmabuf");
}

/* ----------------------------------------------------------------------------------------- signals in device memory
 */

/* Words and payload then lie in one device's memory, and the NIC promises their order there (MEM-3). */
uccl_ep_status device_signals_check(uccl_ep_comm *comm) {
    if (comm->config.signals_kind == UCCL_EP_MEMORY_HOST) return UCCL_EP_OK;
    if (!(comm->caps.flags & UCCL_EP_CAP_DEVICE_SIGNALS))
        return fail_local(UCCL_EP_E_CAPABILITY, "MEM-3",
                          "%s of the backend %s does not add to signal words in device memory, in order behind what it "
                          "writes there: take signals in host memory",
                          comm->device_info.name, comm->backend->name);
    comm->caps.flags |= UCCL_EP_CAP_SIGNALS_STRICT;
    return UCCL_EP_OK;
}

/* Zero. */
uccl_ep_status device_signals_open(uccl_ep_comm *comm) {
    const uccl_ep_status status = comm->accelerator->device_alloc(comm->gpu, comm->signal_bytes, &comm->device_signals);
    if (status == UCCL_EP_OK) return status;
    comm->device_signals = NULL;
    return accelerator_failed(comm, status, "MEM-1", "allocating the signal words");
}

/* Again, in a reset. No proxy runs, and no kernel. */
uccl_ep_status device_signals_zero(uccl_ep_comm *comm) {
    void *zeros = calloc(1, comm->signal_bytes);
    if (!zeros) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to clear the signal words");
    const uccl_ep_status status = comm->accelerator->copy(comm->gpu, comm->device_signals, zeros, comm->signal_bytes);
    free(zeros);
    return status == UCCL_EP_OK ? status : accelerator_failed(comm, status, "ERR-6", "clearing the signal words");
}
