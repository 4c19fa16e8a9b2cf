/* SPDX-License-Identifier: Apache-2.0
 *
 * emulation.c: the accelerator of the CPU emulation. Its kernels are threads of this process, so that everything can be
 * reached by everybody; it keeps the manners of a driver all the same: what was not allocated or registered is refused,
 * copies of a queue are carried out later than they are started, and a handle opens in another process alone.
 *
 * Device memory is a sealed memfd, mapped shared. A handle names the descriptor in the process that made it, which the
 * kernel opens for those who may trace that process (the same user); there is no name that others could find.
 *
 * Copies are carried out inside marks_done, queue_close, and copy_start once too many wait: so what relies on a copy
 * that it did not wait for fails in every run. With `lazy` one look at the marks carries out a random part of what
 * waits, down to a few bytes of a copy.
 *
 * The environment variable UCCL_EP_EMULATION, read when a device is opened or described, is for tests: devices=N,
 * warp_size=N, writes_ordering=unordered|ordered|ordered_all, can_flush=0, dmabuf=0, ipc=0, lazy=N (pieces at most that
 * one look moves), seed=N, fail=N (the N-th call of an opened device that can fail does, the opening being the first).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "uccl_ep/backend.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define WAITING_COPIES 1024u /* of a queue; one more carries the oldest out */
#define HANDLE_MAGIC 0x6d656c7565706575ull
#define FILE_NAME "uccl_ep_emulated"

/* ------------------------------------------------------------------------------------------------------------ errors
 */

static _Thread_local char last_text[256];

static const char *error_text(void) {
    return last_text;
}

__attribute__((format(printf, 2, 3))) static uccl_ep_status fail(uccl_ep_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_text, sizeof last_text, format, arguments);
    va_end(arguments);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------- knobs
 */

typedef struct knobs {
    uint64_t devices, warp_size, dmabuf, ipc, lazy, seed, fail, writes_ordering, can_flush;
} knobs;

static uccl_ep_status read_knobs(knobs *k) {
    *k = (knobs){.devices = 1,
                 .warp_size = 32,
                 .dmabuf = 1,
                 .ipc = 1,
                 .seed = 1,
                 .can_flush = 1,
                 .writes_ordering = UCCL_EP_WRITES_ORDERED_ALL};
    const struct {
        const char *name;
        uint64_t *value;
    } numbers[] = {{"devices", &k->devices}, {"warp_size", &k->warp_size}, {"dmabuf", &k->dmabuf},
                   {"ipc", &k->ipc},         {"lazy", &k->lazy},           {"seed", &k->seed},
                   {"fail", &k->fail},       {"can_flush", &k->can_flush}};
    static const char *const orderings[] = {"unordered", "ordered", "ordered_all"};
    const char *value = getenv("UCCL_EP_EMULATION");
    char copy[256];
    if (snprintf(copy, sizeof copy, "%s", value ? value : "") >= (int)sizeof copy)
        return fail(UCCL_EP_E_INVALID, "UCCL_EP_EMULATION is longer than %zu bytes", sizeof copy);
    char *rest = NULL;
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *is = strchr(word, '='), *end = NULL;
        bool known = false;
        if (is) *is++ = 0;
        for (size_t i = 0; is && i < sizeof numbers / sizeof *numbers; i++) {
            if (strcmp(word, numbers[i].name) != 0) continue;
            *numbers[i].value = strtoull(is, &end, 0);
            known = *is >= '0' && *is <= '9' && !*end;
        }
        for (uint64_t i = 0; is && !strcmp(word, "writes_ordering") && i < 3; i++)
            if (!strcmp(is, orderings[i])) k->writes_ordering = i, known = true;
        if (!known) return fail(UCCL_EP_E_INVALID, "UCCL_EP_EMULATION: '%.60s' is no knob of it with a value", word);
    }
    return UCCL_EP_OK;
}

/* ------------------------------------------------------------------------------------------------------- the device */

/* What can be reached in this process, whoever opened a device: allocations of it are known to all of them. */
typedef struct range {
    struct range *next;
    const uccl_ep_gpu *owner;
    char *base;
    uint64_t bytes;
    int fd; /* of an allocation; else -1 */
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *allocated, *opened, *registered;

struct uccl_ep_gpu {
    knobs knobs;
    _Atomic uint64_t calls;
};

static uint64_t page_up(uint64_t bytes) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* Every call that can fail begins here. */
static uccl_ep_status enter(uccl_ep_gpu *gpu, const char *call) {
    const uint64_t number = atomic_fetch_add(&gpu->calls, 1) + 1;
    if (number != gpu->knobs.fail) return UCCL_EP_OK;
    return fail(UCCL_EP_E_SYSTEM, "%s is call %llu, which UCCL_EP_EMULATION wants to fail", call,
                (unsigned long long)number);
}
#define ENTER(gpu)                                                                                                     \
    do {                                                                                                               \
        const uccl_ep_status entered_ = enter(gpu, __func__);                                                          \
        if (entered_ != UCCL_EP_OK) return entered_;                                                                   \
    } while (0)

/* The range that holds [address, address + bytes), or NULL. */
static const range *find(const range *list, const void *address, uint64_t bytes) {
    const uintptr_t at = (uintptr_t)address;
    for (; list; list = list->next) {
        const uintptr_t base = (uintptr_t)list->base;
        if (at >= base && at - base < list->bytes && bytes <= list->bytes - (at - base)) break;
    }
    return list;
}

static void drop(range **list, range **at) {
    range *r = *at;
    *at = r->next;
    if (list != &registered) munmap(r->base, r->bytes);
    if (r->fd >= 0) close(r->fd);
    free(r);
}

/* What `owner` has put on the list, at `base` or, if that is NULL, all of it. */
static void release(const uccl_ep_gpu *owner, range **list, const void *base) {
    pthread_mutex_lock(&lock);
    for (range **at = list; *at;) {
        if ((*at)->owner != owner || (base && (*at)->base != base)) {
            at = &(*at)->next;
            continue;
        }
        drop(list, at);
        if (base) break;
    }
    pthread_mutex_unlock(&lock);
}

static void add(range **list, range *r, range what) {
    *r = what;
    r->next = *list;
    *list = r;
}

static uccl_ep_status query(uint32_t index, uccl_ep_gpu_info *info) {
    knobs k;
    const uccl_ep_status status = read_knobs(&k);
    if (status != UCCL_EP_OK) return status;
    if (index >= k.devices)
        return fail(UCCL_EP_E_NO_DEVICE, "device %u of the emulation's %llu", index, (unsigned long long)k.devices);
    uccl_ep_gpu_info all = {.size = info->size,
                            .memory_kind = UCCL_EP_MEMORY_EMULATED,
                            .numa_node = -1,
                            .warp_size = (uint32_t)k.warp_size,
                            .multiprocessors = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN),
                            .writes_ordering = (uint32_t)k.writes_ordering,
                            .can_flush = k.can_flush && k.writes_ordering == UCCL_EP_WRITES_UNORDERED,
                            .dmabuf = k.dmabuf != 0,
                            .ipc = k.ipc != 0,
                            .host_atomics = 1,
                            .clock_hz = 1000000000,
                            .memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE),
                            .name = "CPU emulation",
                            .architecture = "cpu"};
    snprintf(all.address, sizeof all.address, "cpu%u", index);
    memcpy(info, &all, info->size < sizeof all ? info->size : sizeof all);
    return UCCL_EP_OK;
}

static void gpu_close(uccl_ep_gpu *gpu) {
    release(gpu, &allocated, NULL);
    release(gpu, &opened, NULL);
    release(gpu, &registered, NULL);
    free(gpu);
}

static uccl_ep_status gpu_open(uint32_t index, uccl_ep_gpu **out) {
    uccl_ep_gpu_info info = {.size = sizeof info};
    uccl_ep_status status = query(index, &info);
    if (status != UCCL_EP_OK) return status;
    uccl_ep_gpu *gpu = calloc(1, sizeof *gpu);
    if (!gpu) return fail(UCCL_EP_E_NO_MEMORY, "no memory for a device");
    status = read_knobs(&gpu->knobs);
    if (status == UCCL_EP_OK) status = enter(gpu, "open");
    if (status != UCCL_EP_OK) {
        gpu_close(gpu);
        return status;
    }
    *out = gpu;
    return UCCL_EP_OK;
}

/* ------------------------------------------------------------------------------------------------------------ memory
 */

/* `fd` mapped and put on the list; it stays the caller's when this fails. */
static uccl_ep_status map(uccl_ep_gpu *gpu, range **list, int fd, uint64_t bytes, void **address) {
    range *r = calloc(1, sizeof *r);
    if (!r) return fail(UCCL_EP_E_NO_MEMORY, "no memory for an allocation");
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        free(r);
        return fail(UCCL_EP_E_NO_MEMORY, "%llu bytes of device memory cannot be mapped: %s", (unsigned long long)bytes,
                    strerror(errno));
    }
    pthread_mutex_lock(&lock);
    add(list, r, (range){.owner = gpu, .base = base, .bytes = bytes, .fd = list == &allocated ? fd : -1});
    pthread_mutex_unlock(&lock);
    *address = base;
    return UCCL_EP_OK;
}

static uccl_ep_status device_alloc(uccl_ep_gpu *gpu, uint64_t bytes, void **address) {
    ENTER(gpu);
    if (!bytes || bytes > (uint64_t)INT64_MAX / 2)
        return fail(UCCL_EP_E_NO_MEMORY, "%llu bytes of device memory cannot be had", (unsigned long long)bytes);
    bytes = page_up(bytes);
    const int fd = memfd_create(FILE_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return fail(UCCL_EP_E_SYSTEM, "memfd_create: %s", strerror(errno));
    uccl_ep_status status;
    if (fchmod(fd, 0600) || ftruncate(fd, (off_t)bytes) || fcntl(fd, F_ADD_SEALS, SEALS))
        status = fail(UCCL_EP_E_NO_MEMORY, "%llu bytes of device memory cannot be had: %s", (unsigned long long)bytes,
                      strerror(errno));
    else
        status = map(gpu, &allocated, fd, bytes, address);
    if (status != UCCL_EP_OK) close(fd);
    return status;
}

static void device_free(uccl_ep_gpu *gpu, void *address) {
    release(gpu, &allocated, address);
}

static uccl_ep_status host_register(uccl_ep_gpu *gpu, void *base, uint64_t bytes, void **device_address) {
    ENTER(gpu);
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (!bytes || (uintptr_t)base % page || bytes % page)
        return fail(UCCL_EP_E_REGISTRATION, "%llu bytes at %p are no whole pages", (unsigned long long)bytes, base);
    range *made = calloc(1, sizeof *made);
    if (!made) return fail(UCCL_EP_E_NO_MEMORY, "no memory for a registration");
    pthread_mutex_lock(&lock);
    bool part = false;
    if (!find(registered, base, bytes))
        for (const range *r = registered; r && !part; r = r->next)
            part = r->base < (char *)base + bytes && (char *)base < r->base + r->bytes;
    if (!part) add(&registered, made, (range){.owner = gpu, .base = base, .bytes = bytes, .fd = -1});
    pthread_mutex_unlock(&lock);
    if (part) {
        free(made);
        return fail(UCCL_EP_E_REGISTRATION, "a part of the %llu bytes at %p is registered already, and not all of them",
                    (unsigned long long)bytes, base);
    }
    *device_address = base;
    return UCCL_EP_OK;
}

static void host_unregister(uccl_ep_gpu *gpu, void *base) {
    release(gpu, &registered, base);
}

/* As a DMA engine does: aligned words appear whole, whoever looks meanwhile. */
static void move(char *to, const char *from, uint64_t bytes) {
    if (((uintptr_t)to | (uintptr_t)from) % sizeof(uint32_t) == 0) {
        if (((uintptr_t)to | (uintptr_t)from) % sizeof(uint64_t) == 0)
            for (; bytes >= sizeof(uint64_t); to += 8, from += 8, bytes -= 8)
                __atomic_store_n((uint64_t *)(void *)to,
                                 __atomic_load_n((const uint64_t *)(const void *)from, __ATOMIC_RELAXED),
                                 __ATOMIC_RELAXED);
        for (; bytes >= sizeof(uint32_t); to += 4, from += 4, bytes -= 4)
            __atomic_store_n((uint32_t *)(void *)to,
                             __atomic_load_n((const uint32_t *)(const void *)from, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    }
    for (; bytes; bytes--) __atomic_store_n(to++, __atomic_load_n(from++, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

static uccl_ep_status copy(uccl_ep_gpu *gpu, void *to, const void *from, uint64_t bytes) {
    ENTER(gpu);
    atomic_thread_fence(memory_order_acquire);
    move(to, from, bytes);
    atomic_thread_fence(memory_order_release);
    return UCCL_EP_OK;
}

static uccl_ep_status not_ours(const void *address) {
    return fail(UCCL_EP_E_INVALID, "%p lies in no device memory of the emulation", address);
}

static uccl_ep_status allocation(uccl_ep_gpu *gpu, const void *address, void **base, uint64_t *bytes) {
    ENTER(gpu);
    pthread_mutex_lock(&lock);
    const range *r = find(allocated, address, 1);
    if (!r) r = find(opened, address, 1);
    if (r) *base = r->base, *bytes = r->bytes;
    pthread_mutex_unlock(&lock);
    return r ? UCCL_EP_OK : not_ours(address);
}

static uccl_ep_status export_dmabuf(uccl_ep_gpu *gpu, void *address, uint64_t bytes, int32_t *descriptor) {
    ENTER(gpu);
    if (!gpu->knobs.dmabuf) return fail(UCCL_EP_E_UNSUPPORTED, "this emulated device exports no dmabuf");
    pthread_mutex_lock(&lock);
    const range *r = find(allocated, address, bytes);
    /* A descriptor of a memfd begins where the file does. */
    const int fd = r && r->base == address ? fcntl(r->fd, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&lock);
    if (!r) return not_ours(address);
    if (fd < 0)
        return fail(UCCL_EP_E_UNSUPPORTED, "the emulation exports what begins at an allocation's base, and descriptors "
                                           "must be left (ulimit -n)");
    *descriptor = fd;
    return UCCL_EP_OK;
}

/* -------------------------------------------------------------------------------------------------------- processes */

/* Of another process: anything may be written here. */
typedef struct handle {
    uint64_t magic;
    int64_t process;
    int64_t fd;
    uint64_t device, inode, bytes;
} handle;
_Static_assert(sizeof(handle) <= UCCL_EP_GPU_IPC_BYTES, "a handle fits");

static uccl_ep_status ipc_export(uccl_ep_gpu *gpu, void *base, uint8_t out[UCCL_EP_GPU_IPC_BYTES]) {
    ENTER(gpu);
    if (!gpu->knobs.ipc) return fail(UCCL_EP_E_UNSUPPORTED, "this emulated device shares nothing between processes");
    handle h = {.magic = HANDLE_MAGIC, .process = getpid()};
    struct stat file;
    pthread_mutex_lock(&lock);
    const range *r = find(allocated, base, 1);
    const bool begins = r && r->base == base;
    if (begins) h.fd = r->fd, h.bytes = r->bytes;
    const bool known = begins && fstat(r->fd, &file) == 0;
    pthread_mutex_unlock(&lock);
    if (!known) return fail(UCCL_EP_E_INVALID, "no device memory of the emulation begins at %p", base);
    h.device = file.st_dev;
    h.inode = file.st_ino;
    memset(out, 0, UCCL_EP_GPU_IPC_BYTES);
    memcpy(out, &h, sizeof h);
    return UCCL_EP_OK;
}

static bool same_file(int fd, const handle *h) {
    struct stat file;
    return fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_dev == h->device && file.st_ino == h->inode &&
           (uint64_t)file.st_size == h->bytes;
}

static uccl_ep_status ipc_open(uccl_ep_gpu *gpu, const uint8_t in[UCCL_EP_GPU_IPC_BYTES], void **address) {
    ENTER(gpu);
    handle h;
    memcpy(&h, in, sizeof h);
    if (h.magic != HANDLE_MAGIC || h.process <= 0 || h.process > INT32_MAX || h.fd < 0 || h.fd > INT32_MAX || !h.bytes)
        return fail(UCCL_EP_E_INVALID, "this is no handle of the emulation");
    pthread_mutex_lock(&lock);
    bool own = false;
    for (const range *r = allocated; r && !own; r = r->next) own = same_file(r->fd, &h);
    pthread_mutex_unlock(&lock);
    if (own) return fail(UCCL_EP_E_UNSUPPORTED, "the handle is of this process, which has the address");
    /* Look what it is before it is opened: to open a device or a pipe would do something. */
    char path[64], target[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)h.process, (long long)h.fd);
    const ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0)
        return fail(UCCL_EP_E_SYSTEM, "%s: %s; both processes must be of one user and see each other in /proc", path,
                    strerror(errno));
    target[n] = 0;
    if (strncmp(target, "/memfd:" FILE_NAME, sizeof "/memfd:" FILE_NAME - 1) != 0)
        return fail(UCCL_EP_E_INVALID, "the handle names no device memory of the emulation");
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return fail(UCCL_EP_E_SYSTEM, "%s: %s; both processes must be of one user", path, strerror(errno));
    const int seals = fcntl(fd, F_GET_SEALS);
    uccl_ep_status status;
    /* A file that can shrink under a mapping would kill the one who touches it. */
    if (seals < 0 || (seals & SEALS) != SEALS || !same_file(fd, &h))
        status = fail(UCCL_EP_E_INVALID, "the handle's memory is gone, or it is not what the handle says");
    else
        status = map(gpu, &opened, fd, h.bytes, address);
    close(fd);
    return status;
}

static void ipc_close(uccl_ep_gpu *gpu, void *address) {
    release(gpu, &opened, address);
}

/* ------------------------------------------------------------------------------------------------------------ copies
 */

typedef struct step {
    char *to;
    const char *from;
    uint64_t bytes;
    uint64_t mark; /* not 0: no copy, but this mark */
} step;

struct uccl_ep_copy_queue {
    uccl_ep_gpu *gpu;
    step waiting[WAITING_COPIES + UCCL_EP_COPY_MARKS];
    uint32_t first, n;
    uint64_t given, done;
    uint64_t random;
    bool broken;
};

/* An error is final. */
static uccl_ep_status enter_queue(uccl_ep_copy_queue *q, const char *call) {
    if (q->broken) return fail(UCCL_EP_E_SYSTEM, "the copy queue has failed before");
    const uccl_ep_status status = enter(q->gpu, call);
    q->broken = status != UCCL_EP_OK;
    return status;
}
#define ENTER_QUEUE(q)                                                                                                 \
    do {                                                                                                               \
        const uccl_ep_status entered_ = enter_queue(q, __func__);                                                      \
        if (entered_ != UCCL_EP_OK) return entered_;                                                                   \
    } while (0)

static uint64_t next_random(uccl_ep_copy_queue *q) {
    q->random ^= q->random << 13;
    q->random ^= q->random >> 7;
    return q->random ^= q->random << 17;
}

#define PLACES (sizeof((uccl_ep_copy_queue *)0)->waiting / sizeof(step))

/* The oldest, or its first `most` bytes. */
static void carry_out(uccl_ep_copy_queue *q, uint64_t most) {
    step *s = &q->waiting[q->first];
    const uint64_t bytes = s->bytes < most ? s->bytes : most;
    if (bytes) {
        move(s->to, s->from, bytes);
        s->to += bytes, s->from += bytes, s->bytes -= bytes;
    }
    if (s->bytes) return;
    if (s->mark) q->done = s->mark;
    q->first = (q->first + 1) % (uint32_t)PLACES;
    q->n--;
}

static void append(uccl_ep_copy_queue *q, step s) {
    while (q->n == PLACES) carry_out(q, UINT64_MAX);
    q->waiting[(q->first + q->n++) % PLACES] = s;
}

static uccl_ep_status queue_open(uccl_ep_gpu *gpu, uccl_ep_copy_queue **out) {
    ENTER(gpu);
    uccl_ep_copy_queue *q = calloc(1, sizeof *q);
    if (!q) return fail(UCCL_EP_E_NO_MEMORY, "no memory for a copy queue");
    q->gpu = gpu;
    q->random = (gpu->knobs.seed + 1) * 0x9e3779b97f4a7c15ull;
    *out = q;
    return UCCL_EP_OK;
}

static void queue_close(uccl_ep_copy_queue *q) {
    while (q->n) carry_out(q, UINT64_MAX);
    free(q);
}

static uccl_ep_status copy_start(uccl_ep_copy_queue *q, void *to, const void *from, uint64_t bytes) {
    ENTER_QUEUE(q);
    append(q, (step){.to = to, .from = from, .bytes = bytes});
    return UCCL_EP_OK;
}

static uccl_ep_status mark(uccl_ep_copy_queue *q, uint64_t *number) {
    ENTER_QUEUE(q);
    if (q->given - q->done >= UCCL_EP_COPY_MARKS)
        return fail(UCCL_EP_E_AGAIN, "%u marks are outstanding", UCCL_EP_COPY_MARKS);
    append(q, (step){.mark = ++q->given});
    *number = q->given;
    return UCCL_EP_OK;
}

static uccl_ep_status marks_done(uccl_ep_copy_queue *q, uint64_t *done) {
    ENTER_QUEUE(q);
    const uint64_t lazy = q->gpu->knobs.lazy;
    if (lazy)
        for (uint64_t pieces = next_random(q) % (lazy + 1); pieces && q->n; pieces--)
            carry_out(q, next_random(q) % 4 ? UINT64_MAX : next_random(q) % 512 * sizeof(uint64_t) + 8);
    while (!lazy && q->n) carry_out(q, UINT64_MAX);
    atomic_thread_fence(memory_order_release);
    *done = q->done;
    return UCCL_EP_OK;
}

static uccl_ep_status flush_writes(uccl_ep_gpu *gpu) {
    ENTER(gpu);
    atomic_thread_fence(memory_order_seq_cst);
    return UCCL_EP_OK;
}

static const uccl_ep_accelerator table = {.size = sizeof table,
                                          .abi_major = UCCL_EP_ACCELERATOR_ABI_MAJOR,
                                          .abi_minor = 0,
                                          .name = "emulation",
                                          .error_text = error_text,
                                          .query = query,
                                          .open = gpu_open,
                                          .close = gpu_close,
                                          .device_alloc = device_alloc,
                                          .device_free = device_free,
                                          .host_register = host_register,
                                          .host_unregister = host_unregister,
                                          .copy = copy,
                                          .allocation = allocation,
                                          .export_dmabuf = export_dmabuf,
                                          .ipc_export = ipc_export,
                                          .ipc_open = ipc_open,
                                          .ipc_close = ipc_close,
                                          .queue_open = queue_open,
                                          .queue_close = queue_close,
                                          .copy_start = copy_start,
                                          .mark = mark,
                                          .marks_done = marks_done,
                                          .flush_writes = flush_writes};

const uccl_ep_accelerator *uccl_ep_accelerator_entry(void) {
    return &table;
}
