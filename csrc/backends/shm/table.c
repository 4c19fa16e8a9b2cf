/* SPDX-License-Identifier: Apache-2.0
 *
 * Who we are: the one device of the machine, what it promises, and the table.
 */
#include "shm.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHM_DEVICE_NAME "shm0"

uccl_ep_status shm_fail(const uccl_ep_host *host, uccl_ep_status status, int error, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return host->fail(host->context, status, error, text);
}

void shm_log(const uccl_ep_host *host, uccl_ep_log_level level, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    host->log(host->context, level, text);
}

const uccl_ep_accelerator *shm_accelerator(const uccl_ep_host *host) {
    /* A host of an older interface ends before. */
    if (host->size < offsetof(uccl_ep_host, gpu) + sizeof host->gpu || !host->gpu) return NULL;
    return host->accelerator;
}

uccl_ep_status shm_accelerator_failed(const uccl_ep_host *host, uccl_ep_status status, const char *what) {
    return shm_fail(host, status, 0, "%s: %s", what, host->accelerator->error_text());
}

uccl_ep_status shm_random(const uccl_ep_host *host, void *bytes, size_t n) {
    /* Up to 256 bytes come whole; GRND_NONBLOCK, since no call here may block: early in boot it fails instead. */
    if (getrandom(bytes, n, GRND_NONBLOCK) == (ssize_t)n) return UCCL_EP_OK;
    return shm_fail(host, UCCL_EP_E_SYSTEM, errno, "getrandom: %s; it is needed to tell peers from strangers",
                    strerror(errno));
}

uint64_t shm_soft_limit(int resource) {
    struct rlimit limit;
    if (getrlimit((__rlimit_resource_t)resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    return limit.rlim_cur;
}

/* --------------------------------------------------------------------------------------------------------- identity */

static const uccl_ep_caps shm_caps = {
    .size = sizeof(uccl_ep_caps),
    .completion_level = UCCL_EP_COMPLETION_VISIBLE,
    .flags = UCCL_EP_CAP_ORDER_WRITE_WRITE | UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ATOMIC_ADD64 |
             UCCL_EP_CAP_ATOMIC_COHERENT | UCCL_EP_CAP_COMPLETES_IN_ORDER | UCCL_EP_CAP_UNSIGNALLED |
             UCCL_EP_CAP_NO_DUPLICATES | UCCL_EP_CAP_ERROR_STOPS | UCCL_EP_CAP_OWN_MEMORY | UCCL_EP_CAP_PEER_EVENTS |
             UCCL_EP_CAP_SIGNALS_STRICT,
    .max_message_bytes = SHM_MAX_MESSAGE,
    .max_peers = SHM_MAX_PEERS,
};

/* Of device memory: that of the accelerator, where the core has opened one. */
static uint64_t shm_memory_flags(const uccl_ep_host *host) {
    const uccl_ep_accelerator *accelerator = shm_accelerator(host);
    uccl_ep_gpu_info info = {.size = sizeof info};
    if (!accelerator || accelerator->query(0, &info) != UCCL_EP_OK) return 0;
    switch (info.memory_kind) {
    case UCCL_EP_MEMORY_CUDA:
        return UCCL_EP_CAP_CUDA_MEMORY;
    case UCCL_EP_MEMORY_ROCM:
        return UCCL_EP_CAP_ROCM_MEMORY;
    case UCCL_EP_MEMORY_EMULATED:
        return UCCL_EP_CAP_EMULATED_MEMORY;
    default:
        return 0;
    }
}

/* Empty, or why memory cannot be shared here; the errno. */
static int shm_unusable(char *text, size_t n) {
    const char *call;
    int error = shm_memory_probe(&call);
    const char *remedy = "a kernel or sandbox (seccomp, container profile) without it: allow this system call, or take "
                         "another backend";
    if (error == EMFILE || error == ENFILE) remedy = "raise the limit of open files (ulimit -n)";
    if (error) snprintf(text, n, "%s: %s; %s", call, strerror(error), remedy);
    return error;
}

static uccl_ep_status shm_query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    if (index != 0) {
        return shm_fail(host, UCCL_EP_E_NO_DEVICE, 0, "shared memory is one device, %s; there is no number %u",
                        SHM_DEVICE_NAME, index);
    }
    uccl_ep_device_info mine = {.size = sizeof mine, .numa_node = -1, .caps = shm_caps};
    snprintf(mine.name, sizeof mine.name, "%s", SHM_DEVICE_NAME);
    snprintf(mine.vendor, sizeof mine.vendor, "uccl_ep");
    snprintf(mine.model, sizeof mine.model, "shared memory");
    (void)shm_unusable(mine.unusable, sizeof mine.unusable);
    uint32_t size = info->size < sizeof mine ? info->size : (uint32_t)sizeof mine;
    memcpy(info, &mine, size);
    info->size = size;
    return UCCL_EP_OK;
}

/* --------------------------------------------------------------------------------------------------- open and close */

static uccl_ep_status shm_parse_options(const uccl_ep_host *host, const char *options, uccl_ep_caps *caps) {
    while (options && *options) {
        size_t length = strcspn(options, ",");
        if (length == strlen("promise=unordered") && memcmp(options, "promise=unordered", length) == 0) {
            /* The same memory, promising less: makes the core take the way of NICs without order. */
            caps->flags &= ~(UCCL_EP_CAP_ORDER_WRITE_WRITE | UCCL_EP_CAP_ORDER_WRITE_ATOMIC);
        } else if (length == strlen("promise=ordered") && memcmp(options, "promise=ordered", length) == 0) {
            caps->flags |= shm_caps.flags;
        } else {
            return shm_fail(host, UCCL_EP_E_INVALID, 0,
                            "no such option of the shm backend: '%.*s'; there are promise=ordered (the default) and "
                            "promise=unordered",
                            (int)(length > 80 ? 80 : length), options);
        }
        options += length + (options[length] == ',');
    }
    return UCCL_EP_OK;
}

/* 128 bits that all processes of this machine share since its start; zero where /proc does not tell. */
static void shm_boot_id(uint8_t boot[SHM_ID_BYTES]) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file) return;
    unsigned digits = 0;
    for (int c; digits < 2 * SHM_ID_BYTES && (c = fgetc(file)) != EOF;) {
        unsigned value;
        if (c >= '0' && c <= '9')
            value = (unsigned)c - '0';
        else if (c >= 'a' && c <= 'f')
            value = (unsigned)c - 'a' + 10u;
        else
            continue;
        boot[digits / 2] = (uint8_t)((unsigned)boot[digits / 2] << 4 | value);
        digits++;
    }
    fclose(file);
}

static void shm_device_close(uccl_ep_device *device) {
    shm_links_close(device);
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) free(device->regions[i].shared);
    shm_memory_free_all(device);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static uccl_ep_status shm_device_open(const uccl_ep_host *host, const char *name, const char *options,
                                      uccl_ep_device **out, uccl_ep_caps *caps) {
    *out = NULL;
    if (name && strcmp(name, SHM_DEVICE_NAME) != 0) {
        return shm_fail(host, UCCL_EP_E_NO_DEVICE, 0, "shared memory has no device '%.64s': it is called %s", name,
                        SHM_DEVICE_NAME);
    }
    uccl_ep_caps mine = shm_caps;
    mine.flags |= shm_memory_flags(host);
    uccl_ep_status status = shm_parse_options(host, options, &mine);
    if (status != UCCL_EP_OK) return status;

    char text[256];
    int error = shm_unusable(text, sizeof text);
    if (error) return shm_fail(host, UCCL_EP_E_SYSTEM, error, "%s", text);
    uccl_ep_device *device = calloc(1, sizeof *device);
    if (!device) return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for a device");
    device->host = host;
    device->caps = mine;
    device->pid = getpid();
    device->listener = device->epoll = -1;
    device->self.fd = device->self.pidfd = -1;
    pthread_mutex_init(&device->lock, NULL);
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) device->regions[i].fd = -1;

    shm_address *address = &device->address;
    address->magic = SHM_ADDRESS_MAGIC;
    address->version = SHM_VERSION;
    address->bytes = sizeof *address;
    address->uid = geteuid();
    struct stat netns;
    if (stat("/proc/self/ns/net", &netns) == 0) {
        address->netns_device = netns.st_dev;
        address->netns_inode = netns.st_ino;
    }
    shm_boot_id(address->boot);
    status = shm_random(host, address->name, sizeof address->name);
    if (status == UCCL_EP_OK) status = shm_random(host, address->token, sizeof address->token);
    if (status != UCCL_EP_OK) {
        shm_device_close(device);
        return status;
    }
    uint32_t size = caps->size && caps->size < sizeof mine ? caps->size : (uint32_t)sizeof mine;
    memcpy(caps, &mine, size);
    caps->size = size;
    *out = device;
    return UCCL_EP_OK;
}

static void shm_describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)device;
    (void)status;
    if (bytes == 0) return;
    char buffer[96];
    /* Our vendor codes are errnos. The GNU strerror_r may return a string of its own. */
    snprintf(text, bytes, "%s", vendor_code ? strerror_r(vendor_code, buffer, sizeof buffer) : "no errno");
}

static const uccl_ep_backend shm_table = {
    .size = sizeof(uccl_ep_backend),
    .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
    .abi_minor = 0,
    .name = "shm",
    .version = "0.1.0",
    .query = shm_query,
    .device_open = shm_device_open,
    .device_close = shm_device_close,
    .memory_alloc = shm_memory_alloc,
    .memory_free = shm_memory_free,
    .region_register = shm_region_register,
    .region_deregister = shm_region_deregister,
    .region_export = shm_region_export,
    .region_import = shm_region_import,
    .endpoint_open = shm_endpoint_open,
    .endpoint_close = shm_endpoint_close,
    .endpoint_address = shm_endpoint_address,
    .connect = shm_connect,
    .connect_poll = shm_connect_poll,
    .disconnect = shm_disconnect,
    .submit = shm_submit,
    .poll = shm_poll,
    .describe = shm_describe,
    .events = shm_events,
};

__attribute__((visibility("default"))) const uccl_ep_backend *uccl_ep_backend_entry(void) {
    return &shm_table;
}
