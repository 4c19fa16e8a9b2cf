/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.c: the accelerator's table over the calls of a driver. Linked into each of libuccl_ep_cuda and
 * libuccl_ep_hip.
 *
 * A copy queue is a stream of its own, non-blocking: it waits for no other stream, so copies go on while kernels spin.
 * Marks are events from a ring. Host memory that takes part must be registered: a driver copies other memory through
 * buffers of its own and makes the caller wait.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Numbers that both drivers share. */
enum {
    ERROR_INVALID = 1,
    ERROR_MEMORY = 2,
    ERROR_NO_DEVICE = 100,
    ERROR_INVALID_DEVICE = 101, /* of hipInit, where there is none */
    ERROR_NOT_READY = 600,
    ERROR_REGISTERED = 712,
    ERROR_NOT_SUPPORTED = 801,
    STREAM_NON_BLOCKING = 1,
    REGISTER_PORTABLE = 1,
    REGISTER_DEVICE_MAP = 2,
    IPC_LAZY_PEER_ACCESS = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_ADDRESS = 3,
    POINTER_DEVICE = 9,
    RANGE_DMABUF = 1,
    CAPTURE_RELAXED = 2,
};

/* -------------------------------------------------------------------------------------------------------- errors */

static _Thread_local char text[256] = "";

static const char *error_text(void) {
    return text;
}

__attribute__((format(printf, 2, 3))) static uccl_ep_status fail(uccl_ep_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return status;
}

/* What the driver's `error` of `call` becomes. */
static uccl_ep_status failed(const char *what, int error) {
    const char *said = driver.error_text(error);
    uccl_ep_status status = UCCL_EP_E_SYSTEM;
    if (error == ERROR_MEMORY) status = UCCL_EP_E_NO_MEMORY;
    if (error == ERROR_NOT_SUPPORTED) status = UCCL_EP_E_UNSUPPORTED;
    return fail(status, "%s: the %s driver says %d, %s", what, driver_name, error, said ? said : "unknown");
}

/* ------------------------------------------------------------------------------------------------- opening the driver
 */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uccl_ep_status opened = UCCL_EP_IN_PROGRESS;
static char why_not[256];
static int devices, version;
/* Tells handles of this process from those of others. */
static uint8_t process[16];

static void *load(int mode) {
    void *library = NULL;
    for (const char *const *name = driver.libraries; *name && !library; name++) library = dlopen(*name, mode);
    return library;
}

static uccl_ep_status open_driver(void) {
    void *library = load(RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = load(RTLD_NOW);
    if (!library) {
        const char *why = dlerror();
        return fail(UCCL_EP_E_NO_DEVICE, "%s; %s", why ? why : driver.libraries[0], driver.remedy);
    }
    for (const driver_symbol *symbol = driver.symbols; symbol->name; symbol++) {
        void *function = dlsym(library, symbol->name);
        memcpy(symbol->function, &function, sizeof function);
        if (!function && !symbol->without)
            return fail(UCCL_EP_E_NO_DEVICE, "the %s driver has no %s: it is too old; %s", driver_name, symbol->name,
                        driver.remedy);
    }
    int error = driver_calls.init(0);
    if (error == 0) error = driver_calls.version(&version);
    if (error == 0) error = driver_calls.device_count(&devices);
    if (error == ERROR_NO_DEVICE || error == ERROR_INVALID_DEVICE || (error == 0 && devices == 0))
        return fail(UCCL_EP_E_NO_DEVICE, "the %s driver is there and sees no device; %s", driver_name, driver.remedy);
    if (error) {
        failed("starting", error);
        return UCCL_EP_E_NO_DEVICE;
    }
    for (size_t have = 0; have < sizeof process;) {
        const ssize_t got = getrandom(process + have, sizeof process - have, 0);
        if (got < 0 && errno != EINTR) return fail(UCCL_EP_E_SYSTEM, "getrandom: %s", strerror(errno));
        if (got > 0) have += (size_t)got;
    }
    return UCCL_EP_OK;
}

/* Once: a driver that could not be started stays so until the process ends. */
static uccl_ep_status ready(void) {
    pthread_mutex_lock(&lock);
    if (opened == UCCL_EP_IN_PROGRESS) {
        opened = open_driver();
        snprintf(why_not, sizeof why_not, "%s", text);
    }
    pthread_mutex_unlock(&lock);
    return opened == UCCL_EP_OK ? opened : fail(opened, "%s", why_not);
}

static uccl_ep_status has(const void *function, const char *without) {
    if (function) return UCCL_EP_OK;
    return fail(UCCL_EP_E_UNSUPPORTED, "this %s driver is too old: it has no %s", driver_name, without);
}

/* ------------------------------------------------------------------------------------------------- being in a device
 */

typedef struct visit {
    void *before;
    int capture_mode;
} visit;

/* The device is current, and what would be unsafe while a graph is captured elsewhere is allowed to this thread. */
static int enter(uccl_ep_gpu *gpu, visit *v) {
    const int error = driver.enter(gpu, &v->before);
    if (error) return error;
    v->capture_mode = CAPTURE_RELAXED;
    if (!driver_calls.capture_mode) return 0;
    const int refused = driver_calls.capture_mode(&v->capture_mode);
    if (refused) driver.leave(gpu, v->before);
    return refused;
}

static void leave(uccl_ep_gpu *gpu, visit *v) {
    if (driver_calls.capture_mode) (void)driver_calls.capture_mode(&v->capture_mode);
    driver.leave(gpu, v->before);
}

/* `call` in the device; its error is the value. */
#define IN_DEVICE(gpu, error, call)                                                                                    \
    do {                                                                                                               \
        visit v_;                                                                                                      \
        (error) = enter((gpu), &v_);                                                                                   \
        if ((error) == 0) {                                                                                            \
            (error) = (call);                                                                                          \
            leave((gpu), &v_);                                                                                         \
        }                                                                                                              \
    } while (0)

int driver_attribute(int attribute, int device, int otherwise) {
    int value = otherwise;
    if (attribute < 0 || driver_calls.device_attribute(&value, attribute, device) != 0) return otherwise;
    return value;
}

/* The kernel names PCI addresses in lower case and with a domain. */
static int32_t numa_node(const char *address) {
    char path[128], lower[64];
    size_t n = 0;
    for (; address[n] && n < sizeof lower - 1; n++) lower[n] = (char)tolower((unsigned char)address[n]);
    lower[n] = 0;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", lower);
    FILE *file = fopen(path, "re");
    int32_t node = -1;
    if (!file) return -1;
    if (fscanf(file, "%d", &node) != 1) node = -1;
    fclose(file);
    return node;
}

static uccl_ep_status describe(uint32_t index, uccl_ep_gpu_info *info) {
    *info = (uccl_ep_gpu_info){.size = sizeof *info, .memory_kind = driver.memory_kind, .numa_node = -1};
    const uccl_ep_status status = ready();
    if (status != UCCL_EP_OK) return status;
    if (index >= (uint32_t)devices)
        return fail(UCCL_EP_E_NO_DEVICE, "the %s driver sees %d devices: there is no number %u", driver_name, devices,
                    index);
    const int device = (int)index;
    size_t bytes = 0;
    int error = driver_calls.device_name(info->name, (int)sizeof info->name, device);
    if (error == 0) error = driver_calls.device_memory(&bytes, device);
    if (error == 0) error = driver_calls.device_address(info->address, (int)sizeof info->address, device);
    if (error) return failed("describing a device", error);
    const driver_attributes *a = &driver.attributes;
    info->memory_bytes = bytes;
    info->numa_node = numa_node(info->address);
    info->warp_size = (uint32_t)driver_attribute(a->warp_size, device, 0);
    info->multiprocessors = (uint32_t)driver_attribute(a->multiprocessors, device, 0);
    info->host_atomics = driver_attribute(a->host_atomics, device, 0) > 0;
    info->ipc = driver_calls.ipc_export && driver_calls.ipc_open && driver_calls.ipc_close;
    driver.describe(device, version, info);
    if (!info->unusable[0] && driver_attribute(a->can_map_host, device, 0) <= 0)
        snprintf(info->unusable, sizeof info->unusable, "it cannot reach host memory, where rings lie");
    if (!info->unusable[0] && driver_attribute(a->unified_addressing, device, 0) <= 0)
        snprintf(info->unusable, sizeof info->unusable, "it has no unified addresses, which copies need");
    return UCCL_EP_OK;
}

static uccl_ep_status driver_query(uint32_t index, uccl_ep_gpu_info *info) {
    uccl_ep_gpu_info mine;
    const uccl_ep_status status = describe(index, &mine);
    if (status != UCCL_EP_OK) return status;
    const uint32_t size = info->size && info->size < sizeof mine ? info->size : (uint32_t)sizeof mine;
    memcpy(info, &mine, size);
    info->size = size;
    return UCCL_EP_OK;
}

static void driver_close(uccl_ep_gpu *gpu) {
    visit v;
    if (gpu->stream && enter(gpu, &v) == 0) {
        (void)driver_calls.stream_destroy(gpu->stream);
        leave(gpu, &v);
    }
    driver.close(gpu);
    free(gpu);
}

static uccl_ep_status driver_open(uint32_t index, uccl_ep_gpu **out) {
    *out = NULL;
    uccl_ep_gpu_info info;
    const uccl_ep_status status = describe(index, &info);
    if (status != UCCL_EP_OK) return status;
    if (info.unusable[0])
        return fail(UCCL_EP_E_UNSUPPORTED, "%.60s (device %u) cannot be used: %.150s", info.name, index, info.unusable);
    uccl_ep_gpu *gpu = calloc(1, sizeof *gpu);
    if (!gpu) return fail(UCCL_EP_E_NO_MEMORY, "no memory for a device");
    gpu->device = (int)index;
    gpu->can_flush = info.can_flush != 0;
    int error = driver.open(gpu);
    if (error) {
        free(gpu);
        return failed("opening a device", error);
    }
    IN_DEVICE(gpu, error, driver_calls.stream_create(&gpu->stream, STREAM_NON_BLOCKING));
    if (error) {
        gpu->stream = NULL;
        driver_close(gpu);
        return failed("making a stream", error);
    }
    *out = gpu;
    return UCCL_EP_OK;
}

/* -------------------------------------------------------------------------------------------------------- memory */

static int make_cleared(uccl_ep_gpu *gpu, size_t bytes, void **address) {
    int error = driver.memory_alloc(address, bytes);
    if (error) return error;
    error = driver.clear(*address, bytes, gpu->stream);
    if (error == 0) error = driver_calls.stream_synchronize(gpu->stream);
    if (error) (void)driver_calls.memory_free(*address);
    return error;
}

static uccl_ep_status driver_device_alloc(uccl_ep_gpu *gpu, uint64_t bytes, void **address) {
    *address = NULL;
    if (bytes == 0) return fail(UCCL_EP_E_INVALID, "device_alloc of 0 bytes");
    void *made = NULL;
    int error;
    IN_DEVICE(gpu, error, make_cleared(gpu, (size_t)bytes, &made));
    if (error == ERROR_MEMORY)
        return fail(UCCL_EP_E_NO_MEMORY, "no room for %llu bytes in the memory of device %d", (unsigned long long)bytes,
                    gpu->device);
    if (error) return failed("allocating device memory", error);
    *address = made;
    return UCCL_EP_OK;
}

static void driver_device_free(uccl_ep_gpu *gpu, void *address) {
    int error;
    IN_DEVICE(gpu, error, driver_calls.memory_free(address));
    if (error) failed("freeing device memory", error);
}

/* Host memory that kernels reach: registered here, or before by somebody else, who then keeps it so. Registrations are
 * of the process and hold for all its devices: ranks that share a process may share memory. */
typedef struct registration {
    struct registration *next;
    char *base;
    size_t bytes;
    uint32_t count;
    bool ours;
} registration;
static pthread_mutex_t registrations_lock = PTHREAD_MUTEX_INITIALIZER;
static registration *registrations;

static registration **find_registration(const void *base, size_t bytes) {
    registration **at = &registrations;
    for (; *at; at = &(*at)->next) {
        const uintptr_t offset = (uintptr_t)base - (uintptr_t)(*at)->base;
        if (offset < (*at)->bytes && bytes <= (*at)->bytes - offset) break;
    }
    return at;
}

static int address_of(const void *base, void **device_address) {
    return driver_calls.pointer_attribute(device_address, POINTER_DEVICE_ADDRESS, (void *)(uintptr_t)base);
}

/* Under the lock. */
static int reach(void *base, size_t bytes, void **device_address) {
    registration *r = *find_registration(base, bytes);
    int error = 0;
    if (!r) {
        r = calloc(1, sizeof *r);
        if (!r) return ERROR_MEMORY;
        *r = (registration){.next = registrations, .base = base, .bytes = bytes, .ours = true};
        error = driver_calls.host_register(base, bytes, REGISTER_PORTABLE | REGISTER_DEVICE_MAP);
        void *end;
        if (error == ERROR_REGISTERED && address_of(base, &end) == 0 && address_of(r->base + bytes - 1, &end) == 0) {
            r->ours = false;
            error = 0;
        }
        if (error) {
            free(r);
            return error;
        }
        registrations = r;
    }
    error = address_of(base, device_address);
    if (error == 0) {
        r->count++;
    } else if (r->count == 0) {
        registrations = r->next;
        if (r->ours) (void)driver_calls.host_unregister(base);
        free(r);
    }
    return error;
}

static int unreach(const void *base) {
    registration **at = find_registration(base, 1), *r = *at;
    if (!r) return ERROR_INVALID;
    if (--r->count) return 0;
    *at = r->next;
    const int error = r->ours ? driver_calls.host_unregister(r->base) : 0;
    free(r);
    return error;
}

static uccl_ep_status driver_host_register(uccl_ep_gpu *gpu, void *base, uint64_t bytes, void **device_address) {
    *device_address = NULL;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0 || (uintptr_t)base % page || bytes % page)
        return fail(UCCL_EP_E_REGISTRATION, "host_register of %llu bytes at %p: whole pages of %zu bytes are needed",
                    (unsigned long long)bytes, base, (size_t)page);
    int error;
    pthread_mutex_lock(&registrations_lock);
    IN_DEVICE(gpu, error, reach(base, (size_t)bytes, device_address));
    pthread_mutex_unlock(&registrations_lock);
    if (error == 0) return UCCL_EP_OK;
    *device_address = NULL;
    failed("registering host memory", error);
    const size_t n = strlen(text);
    snprintf(text + n, sizeof text - n, "; it must be ordinary memory, not registered in part, within `ulimit -l`");
    return UCCL_EP_E_REGISTRATION;
}

static void driver_host_unregister(uccl_ep_gpu *gpu, void *base) {
    int error;
    pthread_mutex_lock(&registrations_lock);
    IN_DEVICE(gpu, error, unreach(base));
    pthread_mutex_unlock(&registrations_lock);
    if (error) failed("unregistering host memory", error);
}

static int copy_whole(uccl_ep_gpu *gpu, void *to, const void *from, size_t bytes) {
    const int error = driver.copy(to, from, bytes, gpu->stream);
    return error ? error : driver_calls.stream_synchronize(gpu->stream);
}

static uccl_ep_status driver_copy(uccl_ep_gpu *gpu, void *to, const void *from, uint64_t bytes) {
    if (bytes == 0) return UCCL_EP_OK;
    int error;
    IN_DEVICE(gpu, error, copy_whole(gpu, to, from, (size_t)bytes));
    return error ? failed("copying", error) : UCCL_EP_OK;
}

static int find_range(void *address, void **base, size_t *bytes, int *type, int *device) {
    int error = driver_calls.pointer_attribute(device, POINTER_DEVICE, address);
    if (error == 0 && driver.device_memory_type)
        error = driver_calls.pointer_attribute(type, POINTER_MEMORY_TYPE, address);
    return error ? error : driver_calls.memory_range(base, bytes, address);
}

static uccl_ep_status driver_allocation(uccl_ep_gpu *gpu, const void *address, void **base, uint64_t *bytes) {
    size_t n = 0;
    int error, type = driver.device_memory_type, device = -1;
    *base = NULL;
    *bytes = 0;
    IN_DEVICE(gpu, error, find_range((void *)(uintptr_t)address, base, &n, &type, &device));
    if (error == ERROR_INVALID || (error == 0 && type != driver.device_memory_type))
        return fail(UCCL_EP_E_REGISTRATION, "%p is no device memory of %s", address, driver_name);
    if (error) return failed("looking for an allocation", error);
    if (device != gpu->device)
        return fail(UCCL_EP_E_REGISTRATION, "%p is memory of device %d and this is device %d", address, device,
                    gpu->device);
    *bytes = n;
    return UCCL_EP_OK;
}

static uccl_ep_status driver_export_dmabuf(uccl_ep_gpu *gpu, void *address, uint64_t bytes, int32_t *descriptor) {
    *descriptor = -1;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0 || (uintptr_t)address % page || bytes % page)
        return fail(UCCL_EP_E_INVALID, "export_dmabuf of %llu bytes at %p: whole pages of %zu bytes are needed",
                    (unsigned long long)bytes, address, (size_t)page);
    const uccl_ep_status status = has((const void *)(uintptr_t)driver_calls.range_handle, "export as dmabuf");
    if (status != UCCL_EP_OK) return status;
    int error, fd = -1;
    IN_DEVICE(gpu, error, driver_calls.range_handle(&fd, address, (size_t)bytes, RANGE_DMABUF, 0));
    if (error == 0) {
        *descriptor = fd;
        return UCCL_EP_OK;
    }
    const uccl_ep_status refused = failed("exporting as dmabuf", error);
    const size_t n = strlen(text);
    snprintf(text + n, sizeof text - n, "; %s", driver.dmabuf_remedy);
    return refused;
}

/* ------------------------------------------------------------------------------------------- sharing with processes */

typedef struct shared_handle {
    uint32_t magic;
    int32_t pid;
    uint8_t process[16];
    driver_ipc_handle driver;
} shared_handle;
#define SHARED_MAGIC 0x67706375u /* "ucpg" */
_Static_assert(sizeof(shared_handle) <= UCCL_EP_GPU_IPC_BYTES, "fits the interface's room");

static uccl_ep_status has_ipc(void) {
    uccl_ep_status status = has((const void *)(uintptr_t)driver_calls.ipc_export, "sharing between processes");
    if (status == UCCL_EP_OK) status = has((const void *)(uintptr_t)driver_calls.ipc_open, "sharing between processes");
    if (status == UCCL_EP_OK)
        status = has((const void *)(uintptr_t)driver_calls.ipc_close, "sharing between processes");
    return status;
}

static uccl_ep_status driver_ipc_export(uccl_ep_gpu *gpu, void *base, uint8_t handle[UCCL_EP_GPU_IPC_BYTES]) {
    memset(handle, 0, UCCL_EP_GPU_IPC_BYTES);
    const uccl_ep_status status = has_ipc();
    if (status != UCCL_EP_OK) return status;
    shared_handle out = {.magic = SHARED_MAGIC, .pid = getpid()};
    memcpy(out.process, process, sizeof out.process);
    int error;
    IN_DEVICE(gpu, error, driver_calls.ipc_export(&out.driver, base));
    if (error) {
        failed("sharing device memory", error);
        const size_t n = strlen(text);
        snprintf(text + n, sizeof text - n, "; %s", driver.ipc_remedy);
        return UCCL_EP_E_UNSUPPORTED;
    }
    memcpy(handle, &out, sizeof out);
    return UCCL_EP_OK;
}

static uccl_ep_status driver_ipc_open(uccl_ep_gpu *gpu, const uint8_t handle[UCCL_EP_GPU_IPC_BYTES], void **address) {
    *address = NULL;
    const uccl_ep_status status = has_ipc();
    if (status != UCCL_EP_OK) return status;
    shared_handle in;
    memcpy(&in, handle, sizeof in);
    if (in.magic != SHARED_MAGIC)
        return fail(UCCL_EP_E_INVALID, "this is no handle of device memory of %s", driver_name);
    if (in.pid == getpid() && memcmp(in.process, process, sizeof in.process) == 0)
        return fail(UCCL_EP_E_UNSUPPORTED, "this process made the handle: it has the memory's address");
    int error;
    IN_DEVICE(gpu, error, driver_calls.ipc_open(address, in.driver, IPC_LAZY_PEER_ACCESS));
    if (error == 0) return UCCL_EP_OK;
    *address = NULL;
    failed("opening another process's device memory", error);
    return error == ERROR_INVALID ? UCCL_EP_E_INVALID : UCCL_EP_E_REGISTRATION;
}

static void driver_ipc_close(uccl_ep_gpu *gpu, void *address) {
    int error;
    IN_DEVICE(gpu, error, driver_calls.ipc_close(address));
    if (error) failed("closing another process's device memory", error);
}

/* --------------------------------------------------------------------------------------------------------- copying */

struct uccl_ep_copy_queue {
    uccl_ep_gpu *gpu;
    void *stream;
    uint64_t marked, done;
    uccl_ep_status broken; /* the first error stays */
    char why[sizeof text];
    void *events[UCCL_EP_COPY_MARKS];
};

static uccl_ep_status breaks(uccl_ep_copy_queue *queue, const char *what, int error) {
    queue->broken = failed(what, error);
    memcpy(queue->why, text, sizeof text);
    return queue->broken;
}

static uccl_ep_status still_broken(const uccl_ep_copy_queue *queue) {
    return fail(queue->broken, "%s", queue->why);
}

static void destroy_parts(uccl_ep_copy_queue *queue) {
    for (unsigned i = 0; i < UCCL_EP_COPY_MARKS && queue->events[i]; i++)
        (void)driver_calls.event_destroy(queue->events[i]);
    if (queue->stream) (void)driver_calls.stream_destroy(queue->stream);
}

static int make_parts(uccl_ep_copy_queue *queue) {
    int error = driver_calls.stream_create(&queue->stream, STREAM_NON_BLOCKING);
    if (error) queue->stream = NULL;
    for (unsigned i = 0; i < UCCL_EP_COPY_MARKS && error == 0; i++) {
        error = driver_calls.event_create(&queue->events[i], driver.event_flags);
        if (error) queue->events[i] = NULL;
    }
    if (error) destroy_parts(queue);
    return error;
}

static uccl_ep_status driver_queue_open(uccl_ep_gpu *gpu, uccl_ep_copy_queue **out) {
    *out = NULL;
    uccl_ep_copy_queue *queue = calloc(1, sizeof *queue);
    if (!queue) return fail(UCCL_EP_E_NO_MEMORY, "no memory for a copy queue");
    queue->gpu = gpu;
    int error;
    IN_DEVICE(gpu, error, make_parts(queue));
    if (error) {
        free(queue);
        return failed("making a copy queue", error);
    }
    *out = queue;
    return UCCL_EP_OK;
}

static void driver_queue_close(uccl_ep_copy_queue *queue) {
    visit v;
    if (enter(queue->gpu, &v) == 0) {
        (void)driver_calls.stream_synchronize(queue->stream);
        destroy_parts(queue);
        leave(queue->gpu, &v);
    }
    free(queue);
}

static uccl_ep_status driver_copy_start(uccl_ep_copy_queue *queue, void *to, const void *from, uint64_t bytes) {
    if (queue->broken) return still_broken(queue);
    if (bytes == 0) return UCCL_EP_OK;
    int error;
    IN_DEVICE(queue->gpu, error, driver.copy(to, from, (size_t)bytes, queue->stream));
    return error ? breaks(queue, "starting a copy", error) : UCCL_EP_OK;
}

static uccl_ep_status driver_mark(uccl_ep_copy_queue *queue, uint64_t *number) {
    if (queue->broken) return still_broken(queue);
    if (queue->marked - queue->done == UCCL_EP_COPY_MARKS)
        return fail(UCCL_EP_E_AGAIN, "%u marks are outstanding", UCCL_EP_COPY_MARKS);
    int error;
    IN_DEVICE(queue->gpu, error,
              driver_calls.event_record(queue->events[queue->marked % UCCL_EP_COPY_MARKS], queue->stream));
    if (error) return breaks(queue, "marking copies", error);
    *number = ++queue->marked;
    return UCCL_EP_OK;
}

static int find_done(uccl_ep_copy_queue *queue) {
    int error = 0;
    while (queue->done != queue->marked &&
           (error = driver_calls.event_query(queue->events[queue->done % UCCL_EP_COPY_MARKS])) == 0)
        queue->done++;
    return error == ERROR_NOT_READY ? 0 : error;
}

static uccl_ep_status driver_marks_done(uccl_ep_copy_queue *queue, uint64_t *done) {
    if (queue->broken) return still_broken(queue);
    int error = 0;
    if (queue->done != queue->marked) IN_DEVICE(queue->gpu, error, find_done(queue));
    *done = queue->done;
    return error ? breaks(queue, "copying", error) : UCCL_EP_OK;
}

static uccl_ep_status driver_flush_writes(uccl_ep_gpu *gpu) {
    if (!driver.flush || !gpu->can_flush)
        return fail(UCCL_EP_E_UNSUPPORTED, "device %d of %s has no flush of what NICs wrote", gpu->device, driver_name);
    int error;
    IN_DEVICE(gpu, error, driver.flush());
    return error ? failed("flushing what NICs wrote", error) : UCCL_EP_OK;
}

static const uccl_ep_accelerator table = {
    .size = sizeof(uccl_ep_accelerator),
    .abi_major = UCCL_EP_ACCELERATOR_ABI_MAJOR,
    .abi_minor = 0,
    .name = driver_name,
    .error_text = error_text,
    .query = driver_query,
    .open = driver_open,
    .close = driver_close,
    .device_alloc = driver_device_alloc,
    .device_free = driver_device_free,
    .host_register = driver_host_register,
    .host_unregister = driver_host_unregister,
    .copy = driver_copy,
    .allocation = driver_allocation,
    .export_dmabuf = driver_export_dmabuf,
    .ipc_export = driver_ipc_export,
    .ipc_open = driver_ipc_open,
    .ipc_close = driver_ipc_close,
    .queue_open = driver_queue_open,
    .queue_close = driver_queue_close,
    .copy_start = driver_copy_start,
    .mark = driver_mark,
    .marks_done = driver_marks_done,
    .flush_writes = driver_flush_writes,
};

const uccl_ep_accelerator *uccl_ep_accelerator_entry(void) {
    return &table;
}
