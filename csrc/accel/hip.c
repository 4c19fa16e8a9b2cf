/* SPDX-License-Identifier: Apache-2.0
 *
 * hip.c: what the functions of the HIP runtime are called, and what only it has.
 */
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "uccl_ep/backend.h" /* uccl_ep_memory_kind */

enum {
    CAN_MAP_HOST = 3,
    HOST_ATOMICS = 15,
    MULTIPROCESSORS = 63,
    UNIFIED_ADDRESSING = 85,
    WARP_SIZE = 87,
    WALL_CLOCK_KHZ = 10017,
    WALL_CLOCK_USUAL_KHZ = 100000, /* where the driver is too old to tell */
    COPY_ANY_TO_ANY = 4,
    MALLOC_FINE_GRAINED = 1,
    EVENT_WITHOUT_TIME = 2,
    NAME_BYTES = 256,
    PROPERTIES_BYTES = 16384, /* more than any version's structure has */
};
#define EVENT_RELEASE_TO_SYSTEM 0x80000000u

const char driver_name[] = "hip";
struct driver_calls driver_calls;

static int (*set_device)(int device);
static int (*get_device)(int *device);
static int (*memory_alloc)(void **address, size_t bytes, unsigned flags);
static int (*memory_set)(void *address, int value, size_t bytes, void *stream);
static int (*memory_copy)(void *to, const void *from, size_t bytes, int kind, void *stream);
static const char *(*error_string)(int error);
static int (*properties_6)(void *properties, int device);
static int (*properties_5)(void *properties, int device);

static int hip_enter(uccl_ep_gpu *gpu, void **before) {
    int device = 0;
    int error = get_device(&device);
    *before = (void *)(intptr_t)device;
    return error || device == gpu->device ? error : set_device(gpu->device);
}

static void hip_leave(uccl_ep_gpu *gpu, void *before) {
    const int device = (int)(intptr_t)before;
    if (device != gpu->device) (void)set_device(device);
}

static int hip_open(uccl_ep_gpu *gpu) {
    (void)gpu; /* contexts come and go by themselves */
    return 0;
}

static void hip_close(uccl_ep_gpu *gpu) {
    (void)gpu;
}

/* Fine-grained: what copies and NICs write is seen by kernels that are running. */
static int hip_alloc(void **address, size_t bytes) {
    return memory_alloc(address, bytes, MALLOC_FINE_GRAINED);
}

static int hip_clear(void *address, size_t bytes, void *stream) {
    return memory_set(address, 0, bytes, stream);
}

static int hip_copy(void *to, const void *from, size_t bytes, void *stream) {
    return memory_copy(to, from, bytes, COPY_ANY_TO_ANY, stream);
}

static const char *hip_error_text(int error) {
    return error_string(error);
}

/* The structure of properties differs from version to version. It begins with the name, and the architecture is the one
 * text behind that which begins with "gfx". */
static void read_architecture(int device, char *text, size_t room) {
    static _Thread_local char properties[PROPERTIES_BYTES];
    memset(properties, 0, sizeof properties);
    int (*const read)(void *, int) = properties_6 ? properties_6 : properties_5;
    if (!read || read(properties, device) != 0) return;
    for (size_t at = NAME_BYTES; at + room < sizeof properties; at++) {
        if (memcmp(properties + at, "gfx", 3) != 0) continue;
        const size_t length = strcspn(properties + at, ":"); /* features follow */
        snprintf(text, room, "%.*s", (int)(length < room ? length : room - 1), properties + at);
        return;
    }
}

static void hip_describe(int device, int version, uccl_ep_gpu_info *info) {
    read_architecture(device, info->architecture, sizeof info->architecture);
    snprintf(info->driver, sizeof info->driver, "HIP %d.%d", version / 10000000, version / 100000 % 100);
    info->clock_hz = (uint64_t)driver_attribute(WALL_CLOCK_KHZ, device, WALL_CLOCK_USUAL_KHZ) * 1000u;
    info->writes_ordering = UCCL_EP_WRITES_UNORDERED; /* nothing tells */
    info->dmabuf = driver_calls.range_handle != NULL;
    if (!info->architecture[0])
        snprintf(info->unusable, sizeof info->unusable, "the driver does not tell its architecture");
}

static const driver_symbol hip_symbols[] = {
    {"hipInit", &driver_calls.init, NULL},
    {"hipRuntimeGetVersion", &driver_calls.version, NULL},
    {"hipGetDeviceCount", &driver_calls.device_count, NULL},
    {"hipDeviceGetName", &driver_calls.device_name, NULL},
    {"hipDeviceGetPCIBusId", &driver_calls.device_address, NULL},
    {"hipDeviceTotalMem", &driver_calls.device_memory, NULL},
    {"hipDeviceGetAttribute", &driver_calls.device_attribute, NULL},
    {"hipSetDevice", &set_device, NULL},
    {"hipGetDevice", &get_device, NULL},
    {"hipExtMallocWithFlags", &memory_alloc, NULL},
    {"hipFree", &driver_calls.memory_free, NULL},
    {"hipMemsetAsync", &memory_set, NULL},
    {"hipMemcpyAsync", &memory_copy, NULL},
    {"hipMemGetAddressRange", &driver_calls.memory_range, NULL},
    {"hipPointerGetAttribute", &driver_calls.pointer_attribute, NULL},
    {"hipHostRegister", &driver_calls.host_register, NULL},
    {"hipHostUnregister", &driver_calls.host_unregister, NULL},
    {"hipStreamCreateWithFlags", &driver_calls.stream_create, NULL},
    {"hipStreamDestroy", &driver_calls.stream_destroy, NULL},
    {"hipStreamSynchronize", &driver_calls.stream_synchronize, NULL},
    {"hipEventCreateWithFlags", &driver_calls.event_create, NULL},
    {"hipEventDestroy", &driver_calls.event_destroy, NULL},
    {"hipEventRecord", &driver_calls.event_record, NULL},
    {"hipEventQuery", &driver_calls.event_query, NULL},
    {"hipGetErrorString", &error_string, NULL},
    {"hipThreadExchangeStreamCaptureMode", &driver_calls.capture_mode, "captures of other threads"},
    {"hipIpcGetMemHandle", &driver_calls.ipc_export, "sharing between processes"},
    {"hipIpcOpenMemHandle", &driver_calls.ipc_open, "sharing between processes"},
    {"hipIpcCloseMemHandle", &driver_calls.ipc_close, "sharing between processes"},
    {"hipMemGetHandleForAddressRange", &driver_calls.range_handle, "export as dmabuf (ROCm 7)"},
    {"hipGetDevicePropertiesR0600", &properties_6, "properties of ROCm 6"},
    {"hipGetDeviceProperties", &properties_5, "properties of ROCm 5"},
    {NULL, NULL, NULL},
};

const struct driver driver = {
    .libraries = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"},
    .remedy = "install ROCm 5 or newer, and see that /dev/kfd and /dev/dri are there and may be opened",
    .symbols = hip_symbols,
    .attributes = {.warp_size = WARP_SIZE,
                   .multiprocessors = MULTIPROCESSORS,
                   .can_map_host = CAN_MAP_HOST,
                   .host_atomics = HOST_ATOMICS,
                   .unified_addressing = UNIFIED_ADDRESSING},
    .memory_kind = UCCL_EP_MEMORY_ROCM,
    .event_flags = EVENT_WITHOUT_TIME | EVENT_RELEASE_TO_SYSTEM,
    .ipc_remedy = "memory of hipMalloc or hipExtMallocWithFlags can be shared, that of pools and mappings cannot",
    .dmabuf_remedy = "the amdgpu kernel driver has to support the export (CONFIG_DMABUF_MOVE_NOTIFY, PCI peer to peer)",
    .enter = hip_enter,
    .leave = hip_leave,
    .open = hip_open,
    .close = hip_close,
    .memory_alloc = hip_alloc,
    .clear = hip_clear,
    .copy = hip_copy,
    .error_text = hip_error_text,
    .describe = hip_describe,
};
