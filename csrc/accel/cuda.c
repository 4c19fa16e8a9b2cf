/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda.c: what the functions of the CUDA driver are called, and what only it has. Numbers are those of its public
 * documentation, which never change; symbols are those whose meaning a version suffix fixes.
 */
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "uccl_ep/backend.h" /* uccl_ep_memory_kind */

enum {
    WARP_SIZE = 10,
    MULTIPROCESSORS = 16,
    CAN_MAP_HOST = 19,
    COMPUTE_MODE = 20,
    UNIFIED_ADDRESSING = 41,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    HOST_ATOMICS = 86,
    FLUSH_OPTIONS = 117,
    WRITES_ORDERING = 118,
    DMABUF = 124,
    COMPUTE_PROHIBITED = 2,
    FLUSH_BY_HOST = 1,
    ORDERING_OWNER = 100,
    ORDERING_ALL = 200,
    FLUSH_CURRENT_CONTEXT = 0,
    FLUSH_TO_OWNER = 100,
    EVENT_WITHOUT_TIME = 2,
    MEMORY_DEVICE = 2,
    OLDEST = 70, /* sm_70: the first with the memory model that device.h is written for */
};

const char driver_name[] = "cuda";
struct driver_calls driver_calls;

static int (*context_retain)(void **context, int device);
static int (*context_release)(int device);
static int (*context_push)(void *context);
static int (*context_pop)(void **context);
static int (*memory_alloc)(void **address, size_t bytes);
static int (*memory_set)(void *address, unsigned char value, size_t bytes, void *stream);
static int (*memory_copy)(void *to, const void *from, size_t bytes, void *stream);
static int (*error_string)(int error, const char **text);
static int (*flush_writes)(int target, int scope);

static int cuda_enter(uccl_ep_gpu *gpu, void **before) {
    *before = NULL;
    return context_push(gpu->context);
}

static void cuda_leave(uccl_ep_gpu *gpu, void *before) {
    (void)gpu;
    (void)context_pop(&before);
}

/* The primary context: the one of the runtime library and of torch, so that their memory is ours to reach. */
static int cuda_open(uccl_ep_gpu *gpu) {
    return context_retain(&gpu->context, gpu->device);
}

static void cuda_close(uccl_ep_gpu *gpu) {
    (void)context_release(gpu->device);
}

static int cuda_clear(void *address, size_t bytes, void *stream) {
    return memory_set(address, 0, bytes, stream);
}

static int cuda_copy(void *to, const void *from, size_t bytes, void *stream) {
    return memory_copy(to, from, bytes, stream);
}

static int cuda_alloc(void **address, size_t bytes) {
    return memory_alloc(address, bytes);
}

static const char *cuda_error_text(int error) {
    const char *said = NULL;
    return error_string(error, &said) == 0 ? said : NULL;
}

static int cuda_flush(void) {
    return flush_writes(FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER);
}

static void cuda_describe(int device, int version, uccl_ep_gpu_info *info) {
    const int major = driver_attribute(CAPABILITY_MAJOR, device, 0);
    const int minor = driver_attribute(CAPABILITY_MINOR, device, 0);
    const int ordering = driver_attribute(WRITES_ORDERING, device, 0);
    snprintf(info->architecture, sizeof info->architecture, "sm_%d%d", major, minor);
    snprintf(info->driver, sizeof info->driver, "CUDA %d.%d", version / 1000, version % 1000 / 10);
    info->clock_hz = 1000000000u; /* %globaltimer */
    info->writes_ordering = UCCL_EP_WRITES_UNORDERED;
    if (ordering >= ORDERING_OWNER) info->writes_ordering = UCCL_EP_WRITES_ORDERED;
    if (ordering >= ORDERING_ALL) info->writes_ordering = UCCL_EP_WRITES_ORDERED_ALL;
    info->can_flush = flush_writes && (driver_attribute(FLUSH_OPTIONS, device, 0) & FLUSH_BY_HOST) != 0;
    info->dmabuf = driver_calls.range_handle && driver_attribute(DMABUF, device, 0) > 0;
    if (major * 10 + minor < OLDEST)
        snprintf(info->unusable, sizeof info->unusable, "architecture %s: sm_%d or newer is needed", info->architecture,
                 OLDEST);
    else if (driver_attribute(COMPUTE_MODE, device, 0) == COMPUTE_PROHIBITED)
        snprintf(info->unusable, sizeof info->unusable,
                 "its compute mode is prohibited: nvidia-smi --compute-mode 0 allows it");
}

static const driver_symbol cuda_symbols[] = {
    {"cuInit", &driver_calls.init, NULL},
    {"cuDriverGetVersion", &driver_calls.version, NULL},
    {"cuDeviceGetCount", &driver_calls.device_count, NULL},
    {"cuDeviceGetName", &driver_calls.device_name, NULL},
    {"cuDeviceGetPCIBusId", &driver_calls.device_address, NULL},
    {"cuDeviceTotalMem_v2", &driver_calls.device_memory, NULL},
    {"cuDeviceGetAttribute", &driver_calls.device_attribute, NULL},
    {"cuDevicePrimaryCtxRetain", &context_retain, NULL},
    {"cuDevicePrimaryCtxRelease_v2", &context_release, NULL},
    {"cuCtxPushCurrent_v2", &context_push, NULL},
    {"cuCtxPopCurrent_v2", &context_pop, NULL},
    {"cuMemAlloc_v2", &memory_alloc, NULL},
    {"cuMemFree_v2", &driver_calls.memory_free, NULL},
    {"cuMemsetD8Async", &memory_set, NULL},
    {"cuMemcpyAsync", &memory_copy, NULL},
    {"cuMemGetAddressRange_v2", &driver_calls.memory_range, NULL},
    {"cuPointerGetAttribute", &driver_calls.pointer_attribute, NULL},
    {"cuMemHostRegister_v2", &driver_calls.host_register, NULL},
    {"cuMemHostUnregister", &driver_calls.host_unregister, NULL},
    {"cuStreamCreate", &driver_calls.stream_create, NULL},
    {"cuStreamDestroy_v2", &driver_calls.stream_destroy, NULL},
    {"cuStreamSynchronize", &driver_calls.stream_synchronize, NULL},
    {"cuEventCreate", &driver_calls.event_create, NULL},
    {"cuEventDestroy_v2", &driver_calls.event_destroy, NULL},
    {"cuEventRecord", &driver_calls.event_record, NULL},
    {"cuEventQuery", &driver_calls.event_query, NULL},
    {"cuGetErrorString", &error_string, NULL},
    {"cuThreadExchangeStreamCaptureMode", &driver_calls.capture_mode, NULL},
    {"cuIpcGetMemHandle", &driver_calls.ipc_export, "sharing between processes"},
    {"cuIpcOpenMemHandle_v2", &driver_calls.ipc_open, "sharing between processes"},
    {"cuIpcCloseMemHandle", &driver_calls.ipc_close, "sharing between processes"},
    {"cuMemGetHandleForAddressRange", &driver_calls.range_handle, "export as dmabuf (CUDA 11.7)"},
    {"cuFlushGPUDirectRDMAWrites", &flush_writes, "flush of what NICs wrote (CUDA 11.3)"},
    {NULL, NULL, NULL},
};

const struct driver driver = {
    .libraries = {"libcuda.so.1"},
    .remedy = "install an NVIDIA driver of CUDA 11 or newer (in a container: run it with the GPU, --gpus all)",
    .symbols = cuda_symbols,
    .attributes = {.warp_size = WARP_SIZE,
                   .multiprocessors = MULTIPROCESSORS,
                   .can_map_host = CAN_MAP_HOST,
                   .host_atomics = HOST_ATOMICS,
                   .unified_addressing = UNIFIED_ADDRESSING},
    .memory_kind = UCCL_EP_MEMORY_CUDA,
    .device_memory_type = MEMORY_DEVICE,
    .event_flags = EVENT_WITHOUT_TIME,
    .ipc_remedy = "memory of cuMemAlloc or cudaMalloc can be shared, that of pools and mappings cannot (torch: without "
                  "expandable_segments)",
    .dmabuf_remedy = "the driver's open kernel modules and Linux 5.12 export memory of cuMemAlloc",
    .enter = cuda_enter,
    .leave = cuda_leave,
    .open = cuda_open,
    .close = cuda_close,
    .memory_alloc = cuda_alloc,
    .clear = cuda_clear,
    .copy = cuda_copy,
    .error_text = cuda_error_text,
    .describe = cuda_describe,
    .flush = cuda_flush,
};
