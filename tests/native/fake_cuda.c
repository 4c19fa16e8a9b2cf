/* SPDX-License-Identifier: Apache-2.0
 *
 * libcuda.so.1 for tests. FAKE_OLD 1 lacks what newer drivers added, 2 almost everything.
 */
#include "fake_driver_body.h"

#define MAX_DEPTH 8
static int retained[2];
static _Thread_local void *stack[MAX_DEPTH];
static _Thread_local int depth;

static int current_device(void) {
    if (!depth) return -1;
    const int device = (int)(intptr_t)stack[depth - 1] - 1;
    return retained[device] ? device : -1;
}

#define CALL(name, arguments, body)                                                                                    \
    EXPORT int name arguments;                                                                                         \
    EXPORT int name arguments {                                                                                        \
        return body;                                                                                                   \
    }

CALL(cuInit, (unsigned flags), fake_init(flags))
CALL(cuGetErrorString, (int error, const char **text),
     (*text = error == E_MEMORY ? "out of memory" : "an error of the fake", OK))
#if FAKE_OLD < 2
CALL(cuDriverGetVersion, (int *version), fake_version(version, FAKE_OLD ? 11020 : 13000))
CALL(cuDeviceGetCount, (int *count), fake_count(count))
CALL(cuDeviceGetName, (char *text, int n, int device), fake_text(text, n, device, "Fake GPU"))
CALL(cuDeviceGetPCIBusId, (char *text, int n, int device), fake_text(text, n, device, "FFFF:FF:1F.0"))
CALL(cuDeviceTotalMem_v2, (size_t * bytes, int device), fake_memory(bytes, device))

static int attribute(int *value, int which, int device) {
    int error = fake_device(device);
    fake.attributes_failed += error == fake.fail_with;
    if (error) return error;
    switch (which) {
    case 10:
        *value = 32;
        break;
    case 16:
        *value = 4;
        break;
    case 19:
        *value = 1;
        break;
    case 20:
        *value = 0;
        break;
    case 41:
        *value = 1;
        break;
    case 75:
        *value = fake.architecture / 10;
        break;
    case 76:
        *value = fake.architecture % 10;
        break;
    case 86:
        *value = 0;
        break;
    case 117:
        *value = fake.flush_options;
        break;
    case 118:
        *value = fake.writes_ordering;
        break;
    case 124:
        *value = 1;
        break;
    default:
        return end(E_INVALID);
    }
    return end(OK);
}
CALL(cuDeviceGetAttribute, (int *value, int which, int device), attribute(value, which, device))

static int retain(void **context, int device) {
    int error = fake_device(device);
    if (error) return error;
    retained[device]++;
    fake.contexts++;
    *context = (void *)(intptr_t)(device + 1);
    return end(OK);
}
static int release(int device) {
    pthread_mutex_lock(&big);
    if (!retained[device]) return end(E_CONTEXT);
    retained[device]--;
    fake.contexts--;
    return end(OK);
}
static int push(void *context) {
    int error = begin(false, false);
    if (error) return error;
    const intptr_t device = (intptr_t)context - 1;
    if (device < 0 || device > 1 || !retained[device] || depth == MAX_DEPTH) return end(E_CONTEXT);
    stack[depth++] = context;
    fake.current++;
    return end(OK);
}
static int pop(void **context) {
    pthread_mutex_lock(&big);
    if (!depth) return end(E_CONTEXT);
    *context = stack[--depth];
    fake.current--;
    return end(OK);
}
CALL(cuDevicePrimaryCtxRetain, (void **context, int device), retain(context, device))
CALL(cuDevicePrimaryCtxRelease_v2, (int device), release(device))
CALL(cuCtxPushCurrent_v2, (void *context), push(context))
CALL(cuCtxPopCurrent_v2, (void **context), pop(context))
CALL(cuMemAlloc_v2, (uint64_t * address, size_t bytes), fake_alloc((void **)(void *)address, bytes))
CALL(cuMemFree_v2, (uint64_t address), fake_free((void *)address))
CALL(cuMemsetD8Async, (uint64_t to, unsigned char value, size_t bytes, void *on),
     fake_set((void *)to, value, bytes, on))
CALL(cuMemcpyAsync, (uint64_t to, uint64_t from, size_t bytes, void *on),
     fake_copy((void *)to, (const void *)from, bytes, on))
CALL(cuMemGetAddressRange_v2, (uint64_t * base, size_t *bytes, uint64_t address),
     fake_range((void **)(void *)base, bytes, (void *)address))
CALL(cuPointerGetAttribute, (void *value, int which, uint64_t address), fake_pointer(value, which, (void *)address))
CALL(cuMemHostRegister_v2, (void *base, size_t bytes, unsigned flags), fake_host_register(base, bytes, flags))
CALL(cuMemHostUnregister, (void *base), fake_host_unregister(base))
CALL(cuStreamCreate, (void **on, unsigned flags), fake_stream_create(on, flags))
CALL(cuStreamDestroy_v2, (void *on), fake_stream_destroy(on))
CALL(cuStreamSynchronize, (void *on), fake_stream_synchronize(on))
CALL(cuEventCreate, (void **event, unsigned flags), flags == 2 ? fake_event_create(event) : E_INVALID)
CALL(cuEventDestroy_v2, (void *event), fake_event_destroy(event))
CALL(cuEventRecord, (void *event, void *on), fake_event_record(event, on))
CALL(cuEventQuery, (void *event), fake_event_query(event))
CALL(cuThreadExchangeStreamCaptureMode, (int *mode), fake_capture_mode(mode))
CALL(cuIpcGetMemHandle, (fake_handle * handle, uint64_t base), fake_ipc_export(handle, (void *)base))
CALL(cuIpcOpenMemHandle_v2, (uint64_t * address, fake_handle handle, unsigned flags),
     fake_ipc_open((void **)(void *)address, handle, flags))
CALL(cuIpcCloseMemHandle, (uint64_t address), fake_ipc_close((void *)address))
#endif
#if !FAKE_OLD
static int flush(int target, int scope) {
    int error = begin(true, false);
    if (error) return error;
    if (target != 0 || scope != 100) return end(E_INVALID);
    fake.flushes++;
    return end(OK);
}
CALL(cuMemGetHandleForAddressRange, (void *handle, uint64_t address, size_t bytes, int type, unsigned long long flags),
     fake_dmabuf(handle, (void *)address, bytes, type, flags))
CALL(cuFlushGPUDirectRDMAWrites, (int target, int scope), flush(target, scope))
#endif
