/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that other processes can map, and regions in it.
 *
 * A memfd has no name: when the last process that holds or maps it is gone, killed or not, so is the memory. It is
 * sealed against growing and shrinking before anybody else sees it, and a peer's that is not is refused: a file that
 * shrinks under a mapping kills the one who touches it with SIGBUS.
 */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHM_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define SHM_ACCESS_ALL                                                                                                 \
    (UCCL_EP_ACCESS_LOCAL_READ | UCCL_EP_ACCESS_REMOTE_WRITE | UCCL_EP_ACCESS_REMOTE_ATOMIC |                          \
     UCCL_EP_ACCESS_REMOTE_READ)

static const char *const shm_region_names[UCCL_EP_REGIONS] = {"heap", "signal", "mailbox"};

int shm_memory_probe(const char **call) {
    *call = "memfd_create";
    int fd = memfd_create("uccl_ep", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return errno;
    *call = "fcntl(F_ADD_SEALS)";
    int error = fcntl(fd, F_ADD_SEALS, SHM_SEALS) == 0 ? 0 : errno;
    close(fd);
    return error;
}

/* ------------------------------------------------------------------------------------------------------- allocating */

typedef struct shm_huge {
    uint64_t page_bytes; /* of the machine's default huge page; 0: it has none */
    uint64_t spare;      /* free ones that nobody has reserved */
} shm_huge;

static uint64_t shm_read_number(const char *path) {
    uint64_t value = 0;
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    if (fscanf(file, "%" SCNu64, &value) != 1) value = 0;
    fclose(file);
    return value;
}

static shm_huge shm_huge_pages(void) {
    shm_huge huge = {0, 0};
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file) return huge;
    char line[128];
    uint64_t kib = 0;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "Hugepagesize: %" SCNu64 " kB", &kib) == 1) break;
    }
    fclose(file);
    if (kib == 0) return huge;
    huge.page_bytes = kib * 1024u;
    char path[128];
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/free_hugepages", kib);
    uint64_t unused = shm_read_number(path);
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/resv_hugepages", kib);
    uint64_t reserved = shm_read_number(path);
    huge.spare = unused > reserved ? unused - reserved : 0;
    return huge;
}

/* `bytes` of a new sealed memfd, mapped. On an error nothing remains; *call names what failed, the result is its errno.
 */
static int shm_make(uint64_t bytes, bool huge, shm_memory *memory, const char **call) {
    memory->bytes = bytes;
    *call = "memfd_create";
    memory->fd = memfd_create("uccl_ep", MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB : 0u));
    if (memory->fd < 0) return errno;
    *call = "ftruncate";
    void *base = MAP_FAILED;
    if (ftruncate(memory->fd, (off_t)bytes) == 0) {
        *call = "fcntl(F_ADD_SEALS)";
        if (fcntl(memory->fd, F_ADD_SEALS, SHM_SEALS) == 0) {
            *call = "mmap";
            /* Reserves the huge pages of a huge mapping, and touches nothing of a plain one: heaps may be sparse. */
            base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
        }
    }
    int error = errno;
    if (base != MAP_FAILED && huge) {
        /* A huge page that is reserved can still be refused by a cgroup when it is touched, with SIGBUS: take them now.
         */
        *call = "fallocate";
        if (fallocate(memory->fd, 0, 0, (off_t)bytes) != 0) {
            error = errno;
            munmap(base, bytes);
            base = MAP_FAILED;
        }
    }
    if (base == MAP_FAILED) {
        close(memory->fd);
        memory->fd = -1;
        return error;
    }
    memory->base = base;
    return 0;
}

static uccl_ep_status shm_explain(const uccl_ep_device *device, uint64_t bytes, const char *call, int error) {
    const uccl_ep_host *host = device->host;
    if (error == EMFILE || error == ENFILE) {
        return shm_fail(host, UCCL_EP_E_SYSTEM, error,
                        "%s: %s; raise the limit of open files (ulimit -n, now %" PRIu64 ")", call, strerror(error),
                        shm_soft_limit(RLIMIT_NOFILE));
    }
    if (error != ENOMEM && error != EFBIG && error != ENOSPC && error != EOVERFLOW && error != EINVAL) {
        return shm_fail(host, UCCL_EP_E_SYSTEM, error, "%s for %" PRIu64 " bytes of shared memory: %s", call, bytes,
                        strerror(error));
    }
    uint64_t space = shm_soft_limit(RLIMIT_AS);
    if (space != UINT64_MAX) {
        return shm_fail(host, UCCL_EP_E_NO_MEMORY, error,
                        "%s: %s; %" PRIu64 " bytes are needed and the address space is limited to %" PRIu64
                        ": raise it (ulimit -v), or ask for a smaller heap",
                        call, strerror(error), bytes, space);
    }
    return shm_fail(host, UCCL_EP_E_NO_MEMORY, error,
                    "%s: %s; %" PRIu64 " bytes are more than this machine can map: ask for a smaller heap, or see "
                    "vm.overcommit_memory and vm.max_map_count",
                    call, strerror(error), bytes);
}

static uccl_ep_status shm_lock(const uccl_ep_device *device, const shm_memory *memory) {
    if (mlock(memory->base, memory->bytes) == 0) return UCCL_EP_OK;
    int error = errno;
    uint64_t limit = shm_soft_limit(RLIMIT_MEMLOCK);
    if (limit == UINT64_MAX) {
        return shm_fail(device->host, UCCL_EP_E_NO_MEMORY, error,
                        "mlock of %" PRIu64 " bytes: %s; the limit (ulimit -l) is none, so memory is short: ask for a "
                        "smaller heap or for none locked",
                        memory->bytes, strerror(error));
    }
    return shm_fail(device->host, UCCL_EP_E_NO_MEMORY, error,
                    "mlock of %" PRIu64 " bytes: %s; the limit of locked memory is %" PRIu64
                    " bytes: raise it (ulimit -l, memlock in limits.conf or the container's ulimits)",
                    memory->bytes, strerror(error), limit);
}

uccl_ep_status shm_memory_alloc(uccl_ep_device *device, uint64_t bytes, uint32_t flags, void **base) {
    *base = NULL;
    const uccl_ep_host *host = device->host;
    uint32_t mode = flags & 3u;
    if ((flags & ~(3u | UCCL_EP_ALLOC_LOCK)) != 0 || mode == 3u || bytes == 0) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "memory_alloc of %" PRIu64 " bytes with flags %#x: not defined",
                        bytes, flags);
    }
    if (bytes > (uint64_t)INT64_MAX / 2) {
        return shm_fail(host, UCCL_EP_E_NO_MEMORY, EFBIG, "%" PRIu64 " bytes are more than any machine can map", bytes);
    }
    uint64_t limit = shm_soft_limit(RLIMIT_FSIZE);
    if (bytes > limit) { /* and ftruncate would raise SIGXFSZ, which kills */
        return shm_fail(host, UCCL_EP_E_NO_MEMORY, EFBIG,
                        "%" PRIu64 " bytes are needed and files, shared memory among them, are limited to %" PRIu64
                        ": raise it (ulimit -f)",
                        bytes, limit);
    }
    shm_memory *memory = calloc(1, sizeof *memory);
    if (!memory) return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for an allocation");

    shm_huge huge = mode == UCCL_EP_ALLOC_HUGE_OFF ? (shm_huge){0, 0} : shm_huge_pages();
    uint64_t pages = huge.page_bytes ? (bytes + huge.page_bytes - 1) / huge.page_bytes : 0;
    bool made = false;
    const char *call = "";
    int error = 0;
    if (mode == UCCL_EP_ALLOC_HUGE_ON && pages == 0) {
        free(memory);
        return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOSYS,
                        "huge pages were asked for and this kernel has none (vm.nr_hugepages): ask for ordinary ones");
    }
    /* AUTO takes huge pages where at least half of the last one is used: a page of signals is not worth one. */
    if (mode == UCCL_EP_ALLOC_HUGE_ON || (pages && bytes >= huge.page_bytes / 2 && huge.spare >= pages)) {
        error = shm_make(pages * huge.page_bytes, true, memory, &call);
        made = error == 0;
        if (!made && mode == UCCL_EP_ALLOC_HUGE_ON) {
            free(memory);
            return shm_fail(host, UCCL_EP_E_NO_MEMORY, error,
                            "%s: %s; %" PRIu64 " huge pages of %" PRIu64 " KiB are needed and %" PRIu64
                            " are spare: raise vm.nr_hugepages (sysctl), or ask for ordinary pages",
                            call, strerror(error), pages, huge.page_bytes / 1024u, huge.spare);
        }
    }
    if (!made) {
        uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        error = shm_make((bytes + page - 1) / page * page, false, memory, &call);
        if (error) {
            free(memory);
            return shm_explain(device, bytes, call, error);
        }
    }
    uccl_ep_status status = flags & UCCL_EP_ALLOC_LOCK ? shm_lock(device, memory) : UCCL_EP_OK;
    if (status != UCCL_EP_OK) {
        munmap(memory->base, memory->bytes);
        close(memory->fd);
        free(memory);
        return status;
    }
    /* Our own memory stays mapped in a forked child: data loaders may read it. What is a peer's does not, see below. */
    memory->next = device->memories;
    device->memories = memory;
    *base = memory->base;
    return UCCL_EP_OK;
}

static void shm_release(shm_memory *memory) {
    munmap(memory->base, memory->bytes);
    close(memory->fd);
    free(memory);
}

void shm_memory_free(uccl_ep_device *device, void *base, uint64_t bytes) {
    shm_memory **at = &device->memories;
    while (*at && (*at)->base != base) at = &(*at)->next;
    shm_memory *memory = *at;
    if (memory) {
        *at = memory->next;
        shm_release(memory);
    } else {
        shm_log(device->host, UCCL_EP_LOG_ERROR, "shm: memory_free of %" PRIu64 " bytes that memory_alloc never gave",
                bytes);
    }
}

void shm_memory_free_all(uccl_ep_device *device) {
    while (device->memories) {
        shm_memory *memory = device->memories;
        device->memories = memory->next;
        shm_release(memory);
    }
}

/* ---------------------------------------------------------------------------------------------------------- regions */

static uccl_ep_status shm_put_region(uccl_ep_device *device, uccl_ep_region region, shm_region *made) {
    while (made->record.id == 0) {
        uccl_ep_status status = shm_random(device->host, &made->record.id, sizeof made->record.id);
        if (status != UCCL_EP_OK) return status;
    }
    pthread_mutex_lock(&device->lock);
    device->regions[region] = *made;
    pthread_mutex_unlock(&device->lock);
    return UCCL_EP_OK;
}

/* A heap in device memory. Its allocation is what other processes can open; one that cannot be shared serves ranks of
 * this process. */
static uccl_ep_status shm_register_device(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory) {
    const uccl_ep_host *host = device->host;
    const uccl_ep_accelerator *accelerator = shm_accelerator(host);
    if (!accelerator) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the %s region is device memory, and the communicator has no accelerator to reach it with: "
                        "give one, or take host memory",
                        shm_region_names[region]);
    }
    if (region != UCCL_EP_REGION_HEAP) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the %s region is device memory: CPUs add and write there, so it has to be host memory",
                        shm_region_names[region]);
    }
    void *base = NULL;
    uint64_t bytes = 0;
    uccl_ep_status status = accelerator->allocation(host->gpu, memory->base, &base, &bytes);
    if (status != UCCL_EP_OK) return shm_accelerator_failed(host, UCCL_EP_E_REGISTRATION, "the heap's memory");
    const uint64_t offset = (uint64_t)((uintptr_t)memory->base - (uintptr_t)base);
    if (offset > bytes || memory->bytes > bytes - offset) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the heap (%" PRIu64 " bytes at %p) ends behind its allocation (%" PRIu64 " bytes at %p)",
                        memory->bytes, memory->base, bytes, base);
    }
    shm_device_blob *shared = calloc(1, sizeof *shared);
    if (!shared) return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for a region");
    shared->address = (uint64_t)(uintptr_t)memory->base;
    status = accelerator->ipc_export(host->gpu, base, shared->handle);
    shared->shareable = status == UCCL_EP_OK;
    if (status != UCCL_EP_OK) {
        shm_log(host, UCCL_EP_LOG_INFO, "shm: only ranks of this process reach the heap: %s",
                accelerator->error_text());
    }
    shm_region made = {
        .record = {.bytes = memory->bytes, .offset = offset, .access = memory->access, .kind = memory->kind},
        .base = memory->base,
        .fd = -1,
        .shared = shared};
    status = shm_put_region(device, region, &made);
    if (status != UCCL_EP_OK) free(shared);
    return status;
}

uccl_ep_status shm_region_register(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory) {
    const uccl_ep_host *host = device->host;
    if ((unsigned)region >= UCCL_EP_REGIONS || (memory->access & ~SHM_ACCESS_ALL) != 0 || memory->bytes == 0) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "region %u of %" PRIu64 " bytes with access %#x: not defined",
                        (unsigned)region, memory->bytes, memory->access);
    }
    const char *name = shm_region_names[region];
    if (device->regions[region].record.id) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "the %s region is registered already: deregister it first", name);
    }
    if (memory->kind != UCCL_EP_MEMORY_HOST) return shm_register_device(device, region, memory);
    if (memory->dmabuf_fd >= 0) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the %s region came with a dmabuf, and is host memory: the shm backend takes its own", name);
    }
    /* Words are reached with CPU atomics. */
    if ((uintptr_t)memory->base % sizeof(uint64_t) != 0) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0, "the %s region starts at %p: align it to 8 bytes", name,
                        memory->base);
    }
    uintptr_t start = (uintptr_t)memory->base;
    const shm_memory *inside = device->memories;
    for (; inside; inside = inside->next) {
        uintptr_t first = (uintptr_t)inside->base;
        if (start >= first && start - first <= inside->bytes && memory->bytes <= inside->bytes - (start - first)) break;
    }
    if (!inside) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the %s region (%" PRIu64
                        " bytes at %p) is not shared memory of this device, so other processes "
                        "cannot map it: let the library allocate the heap",
                        name, memory->bytes, memory->base);
    }
    shm_region made = {
        .record = {.bytes = memory->bytes, .offset = start - (uintptr_t)inside->base, .access = memory->access},
        .base = memory->base,
        .fd = inside->fd};
    return shm_put_region(device, region, &made);
}

void shm_region_deregister(uccl_ep_device *device, uccl_ep_region region) {
    if ((unsigned)region >= UCCL_EP_REGIONS) return;
    pthread_mutex_lock(&device->lock);
    free(device->regions[region].shared);
    device->regions[region] = (shm_region){.fd = -1};
    pthread_mutex_unlock(&device->lock);
}

uccl_ep_status shm_region_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes) {
    if ((unsigned)region >= UCCL_EP_REGIONS || device->regions[region].record.id == 0) {
        return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "region %u is not registered", (unsigned)region);
    }
    const shm_region *mine = &device->regions[region];
    shm_device_blob out = {.reserved = 0};
    const uint32_t size = mine->shared ? sizeof out : sizeof out.region;
    if (*bytes < size) {
        return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "region_export: %u bytes of room, %u needed", *bytes, size);
    }
    if (mine->shared) out = *mine->shared;
    out.region = (shm_region_blob){
        .magic = SHM_REGION_MAGIC, .version = SHM_VERSION, .region = (uint16_t)region, .record = mine->record};
    memcpy(out.region.name, device->address.name, sizeof out.region.name);
    memcpy(blob, &out, size);
    *bytes = size;
    return UCCL_EP_OK;
}

uccl_ep_status shm_map_target(const shm_region_record *record, int fd, shm_target *target, int *error, char *text,
                              size_t n) {
    *error = 0;
    /* Seals come only from the kernel and only with memory files, so they also say what kind of file this is. */
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat file;
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) {
        snprintf(text, n, "a region's file is no sealed memory");
        return UCCL_EP_E_REGISTRATION;
    }
    uint64_t bytes = (uint64_t)file.st_size, page = (uint64_t)file.st_blksize;
    if (record->bytes == 0 || record->offset > bytes || record->bytes > bytes - record->offset ||
        record->offset % sizeof(uint64_t) != 0 || (record->access & ~SHM_ACCESS_ALL) != 0) {
        snprintf(text, n, "a region does not lie in its file");
        return UCCL_EP_E_REGISTRATION;
    }
    /* A huge file's page is its block size. */
    if (page < (uint64_t)sysconf(_SC_PAGESIZE) || (page & (page - 1)) != 0) page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t first = record->offset & ~(page - 1), end = record->offset + record->bytes;
    end = end > bytes - bytes % page ? bytes : (end + page - 1) & ~(page - 1);
    void *map = mmap(NULL, end - first, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)first);
    if (map == MAP_FAILED) {
        *error = errno;
        uint64_t limit = shm_soft_limit(RLIMIT_AS);
        if (*error != ENOMEM)
            snprintf(text, n, "mmap of its memory: %s", strerror(*error));
        else if (limit == UINT64_MAX)
            snprintf(text, n, "no room to map %" PRIu64 " bytes (vm.max_map_count?)", end - first);
        else
            snprintf(text, n, "no room to map %" PRIu64 " bytes: ulimit -v is %" PRIu64, end - first, limit);
        return *error == ENOMEM ? UCCL_EP_E_NO_MEMORY : UCCL_EP_E_SYSTEM;
    }
    /* A child of fork() must not reach other ranks' memory: it is no rank. (A failure leaves that door open, no more.)
     */
    (void)madvise(map, end - first, MADV_DONTFORK);
    *target = (shm_target){.base = (unsigned char *)map + (record->offset - first),
                           .bytes = record->bytes,
                           .access = record->access,
                           .map = map,
                           .map_bytes = end - first};
    return UCCL_EP_OK;
}

/* The peer's heap, in device memory. */
static uccl_ep_status shm_reach_device(const uccl_ep_device *device, const shm_link *link, uint32_t peer,
                                       const shm_device_blob *in, shm_target *target) {
    const uccl_ep_host *host = device->host;
    const uccl_ep_accelerator *accelerator = shm_accelerator(host);
    const shm_region_record *record = &in->region.record;
    if (!accelerator) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the heap of rank %u is device memory, and this rank has no accelerator to reach it with: give "
                        "every rank one",
                        peer);
    }
    shm_target made = {.bytes = record->bytes, .access = record->access, .device = true};
    /* The kernel says who is at the other end of the link: of ourselves we take an address. */
    if (link == &device->self || (link->pid > 0 && link->pid == device->pid)) {
        made.base = (unsigned char *)(uintptr_t)in->address;
        *target = made;
        return UCCL_EP_OK;
    }
    if (!in->shareable) {
        return shm_fail(host, UCCL_EP_E_REGISTRATION, 0,
                        "the heap of rank %u is device memory that its driver does not share with other processes: "
                        "allocate it another way (uccl-ep doctor), or take host memory",
                        peer);
    }
    void *base = NULL, *address = NULL;
    uint64_t bytes = 0;
    uccl_ep_status status = accelerator->ipc_open(host->gpu, in->handle, &address);
    if (status != UCCL_EP_OK) return shm_accelerator_failed(host, UCCL_EP_E_REGISTRATION, "the peer's heap");
    status = accelerator->allocation(host->gpu, address, &base, &bytes);
    const uint64_t before = (uint64_t)((uintptr_t)address - (uintptr_t)base);
    if (status != UCCL_EP_OK) {
        status = shm_accelerator_failed(host, UCCL_EP_E_REGISTRATION, "the peer's heap");
    } else if (before > bytes || record->offset > bytes - before || record->bytes > bytes - before - record->offset) {
        status = shm_fail(host, UCCL_EP_E_REGISTRATION, 0, "the heap of rank %u does not lie in its allocation", peer);
    }
    if (status != UCCL_EP_OK) {
        accelerator->ipc_close(host->gpu, address);
        return status;
    }
    made.opened = address;
    made.base = (unsigned char *)address + record->offset;
    *target = made;
    return UCCL_EP_OK;
}

/* The peer's heap in host memory, the own one in device memory: a driver copies at once what is registered with it. */
static uccl_ep_status shm_reach_host(const uccl_ep_device *device, shm_target *target) {
    const uccl_ep_host *host = device->host;
    if (!device->regions[UCCL_EP_REGION_HEAP].shared || target->registered || !target->map) return UCCL_EP_OK;
    void *address;
    const uccl_ep_status status =
        shm_accelerator(host)->host_register(host->gpu, target->map, target->map_bytes, &address);
    if (status != UCCL_EP_OK) return shm_accelerator_failed(host, UCCL_EP_E_REGISTRATION, "the peer's heap");
    target->registered = true;
    return UCCL_EP_OK;
}

void shm_target_close(const uccl_ep_device *device, shm_target *target) {
    const uccl_ep_host *host = device->host;
    if (target->opened) shm_accelerator(host)->ipc_close(host->gpu, target->opened);
    if (target->registered) shm_accelerator(host)->host_unregister(host->gpu, target->map);
    if (target->map) munmap(target->map, target->map_bytes);
    *target = (shm_target){0};
}

uccl_ep_status shm_region_import(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                 uint32_t bytes) {
    const uccl_ep_host *host = device->host;
    if ((unsigned)region >= UCCL_EP_REGIONS || peer >= device->peers) {
        return shm_fail(host, UCCL_EP_E_RANGE, 0, "region %u of rank %u: there are %u and %u", (unsigned)region, peer,
                        (unsigned)UCCL_EP_REGIONS, device->peers);
    }
    shm_device_blob whole = {.reserved = 0};
    const shm_region_blob *in = &whole.region;
    if (bytes == sizeof whole || bytes == sizeof *in) memcpy(&whole, blob, bytes);
    const bool on_device = region == UCCL_EP_REGION_HEAP && in->record.kind != UCCL_EP_MEMORY_HOST;
    if (bytes != (on_device ? sizeof whole : sizeof *in) || in->magic != SHM_REGION_MAGIC ||
        in->version != SHM_VERSION || in->region != (uint16_t)region) {
        return shm_fail(
            host, UCCL_EP_E_INVALID, 0,
            "rank %u sent %u bytes that do not describe its %s region: do all ranks run one version with the "
            "shm backend?",
            peer, bytes, shm_region_names[region]);
    }
    pthread_mutex_lock(&device->lock);
    uccl_ep_status status = UCCL_EP_OK;
    bool own = peer == device->rank;
    shm_link *link = own ? &device->self : device->slots[peer].current;
    uint32_t state = link ? atomic_load_explicit(&link->state, memory_order_acquire) : (uint32_t)SHM_LINK_LISTEN;
    const uint8_t *name = own ? device->address.name : link ? link->name : NULL;
    const shm_region_record *record = own ? &device->regions[region].record : link ? &link->records[region] : NULL;
    if (state == SHM_LINK_LOST || state == SHM_LINK_DEPARTED) {
        status = shm_fail(host, UCCL_EP_E_PEER_LOST, 0, "rank %u is gone: its memory cannot be imported", peer);
    } else if (state != SHM_LINK_UP) {
        status =
            shm_fail(host, UCCL_EP_E_INVALID, 0, "rank %u is not connected yet: import its regions after that", peer);
    } else if (memcmp(name, in->name, sizeof in->name) != 0 || record->id == 0 ||
               memcmp(record, &in->record, sizeof in->record) != 0) {
        status = shm_fail(host, UCCL_EP_E_INVALID, 0,
                          "rank %u describes another %s region than the one that it sent when it connected", peer,
                          shm_region_names[region]);
    } else if (own || (atomic_load_explicit(&link->imported, memory_order_relaxed) >> region & 1u) == 0) {
        shm_target *target = &link->targets[region];
        if (on_device) {
            status = shm_reach_device(device, link, peer, &whole, target);
        } else if (own) {
            *target =
                (shm_target){.base = device->regions[region].base, .bytes = record->bytes, .access = record->access};
        } else if (region == UCCL_EP_REGION_HEAP) {
            status = shm_reach_host(device, target);
        }
        if (status == UCCL_EP_OK) atomic_fetch_or_explicit(&link->imported, 1u << region, memory_order_release);
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}
