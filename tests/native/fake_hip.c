/* SPDX-License-Identifier: Apache-2.0
 *
 * libamdhip64.so.6 for tests.
 */
#include "fake_driver_body.h"

static _Thread_local int device_now;

static int current_device(void) {
    return device_now;
}

#define CALL(name, arguments, body)                                                                                    \
    EXPORT int name arguments;                                                                                         \
    EXPORT int name arguments {                                                                                        \
        return body;                                                                                                   \
    }

static int attribute(int *value, int which, int device) {
    int error = fake_device(device);
    fake.attributes_failed += error == fake.fail_with;
    if (error) return error;
    switch (which) {
    case 3:
        *value = 1;
        break;
    case 15:
        *value = 1;
        break;
    case 63:
        *value = 4;
        break;
    case 85:
        *value = 1;
        break;
    case 87:
        *value = 64;
        break;
    case 10017:
        *value = 100000;
        break;
    default:
        return end(E_INVALID);
    }
    return end(OK);
}

static int set_device(int device) {
    int error = fake_device(device);
    if (error) return error;
    device_now = device;
    return end(OK);
}

/* Somewhere in the structure; where, a version says. */
static int properties(char *p, int device) {
    int error = fake_device(device);
    if (error) return error;
    snprintf(p, 256, "gfx, says the name");
    snprintf(p + 1160, 256, "gfx90a:sramecc+:xnack-");
    return end(OK);
}

EXPORT const char *hipGetErrorString(int error);
EXPORT const char *hipGetErrorString(int error) {
    return error == E_MEMORY ? "out of memory" : "an error of the fake";
}

CALL(hipInit, (unsigned flags), fake_init(flags))
CALL(hipRuntimeGetVersion, (int *version), fake_version(version, 60342131))
CALL(hipGetDeviceCount, (int *count), fake_count(count))
CALL(hipDeviceGetName, (char *text, int n, int device), fake_text(text, n, device, "Fake GPU"))
CALL(hipDeviceGetPCIBusId, (char *text, int n, int device), fake_text(text, n, device, "ffff:ff:1f.0"))
CALL(hipDeviceTotalMem, (size_t * bytes, int device), fake_memory(bytes, device))
CALL(hipDeviceGetAttribute, (int *value, int which, int device), attribute(value, which, device))
CALL(hipSetDevice, (int device), set_device(device))
CALL(hipGetDevice, (int *device), (*device = device_now, OK))
CALL(hipGetDevicePropertiesR0600, (void *p, int device), properties(p, device))
CALL(hipExtMallocWithFlags, (void **address, size_t bytes, unsigned flags),
     flags == 1 ? fake_alloc(address, bytes) : E_INVALID)
CALL(hipFree, (void *address), fake_free(address))
CALL(hipMemsetAsync, (void *to, int value, size_t bytes, void *on), fake_set(to, (unsigned char)value, bytes, on))
CALL(hipMemcpyAsync, (void *to, const void *from, size_t bytes, int kind, void *on),
     kind == 4 ? fake_copy(to, from, bytes, on) : E_INVALID)
CALL(hipMemGetAddressRange, (void **base, size_t *bytes, void *address), fake_range(base, bytes, address))
CALL(hipPointerGetAttribute, (void *value, int which, void *address), fake_pointer(value, which, address))
CALL(hipHostRegister, (void *base, size_t bytes, unsigned flags), fake_host_register(base, bytes, flags))
CALL(hipHostUnregister, (void *base), fake_host_unregister(base))
CALL(hipStreamCreateWithFlags, (void **on, unsigned flags), fake_stream_create(on, flags))
CALL(hipStreamDestroy, (void *on), fake_stream_destroy(on))
CALL(hipStreamSynchronize, (void *on), fake_stream_synchronize(on))
CALL(hipEventCreateWithFlags, (void **event, unsigned flags),
     flags == 0x80000002u ? fake_event_create(event) : E_INVALID)
CALL(hipEventDestroy, (void *event), fake_event_destroy(event))
CALL(hipEventRecord, (void *event, void *on), fake_event_record(event, on))
CALL(hipEventQuery, (void *event), fake_event_query(event))
CALL(hipThreadExchangeStreamCaptureMode, (int *mode), fake_capture_mode(mode))
CALL(hipIpcGetMemHandle, (fake_handle * handle, void *base), fake_ipc_export(handle, base))
CALL(hipIpcOpenMemHandle, (void **address, fake_handle handle, unsigned flags), fake_ipc_open(address, handle, flags))
CALL(hipIpcCloseMemHandle, (void *address), fake_ipc_close(address))
CALL(hipMemGetHandleForAddressRange, (void *handle, void *address, size_t bytes, int type, unsigned long long flags),
     fake_dmabuf(handle, address, bytes, type, flags))
