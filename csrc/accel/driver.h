/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.h: an accelerator over a GPU driver that is opened at run time.
 *
 * The driver interfaces of CUDA and HIP do the same things with the same arguments under other names. driver.c is
 * written once against `struct driver_calls`; cuda.c and hip.c say what the functions are called, and what differs.
 *
 * No vendor header is used, so that one build runs with any driver or none: the types below are ours. A device address
 * is a pointer here where CUDA's declarations have an integer of the same size, which every ABI that we build for
 * passes alike.
 */
#ifndef UCCL_EP_DRIVER_H
#define UCCL_EP_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "uccl_ep/accelerator.h"

#define DRIVER_IPC_BYTES 64u

typedef struct driver_ipc_handle {
    unsigned char bytes[DRIVER_IPC_BYTES];
} driver_ipc_handle;

/* X(name, type of the arguments) for each function that is the same in both. All return 0 or an error code. */
#define DRIVER_CALLS(X)                                                                                                \
    X(init, (unsigned flags))                                                                                          \
    X(version, (int *version))                                                                                         \
    X(device_count, (int *count))                                                                                      \
    X(device_name, (char *name, int bytes, int device))                                                                \
    X(device_address, (char *address, int bytes, int device))                                                          \
    X(device_memory, (size_t * bytes, int device))                                                                     \
    X(device_attribute, (int *value, int attribute, int device))                                                       \
    X(memory_free, (void *address))                                                                                    \
    X(memory_range, (void **base, size_t *bytes, void *address))                                                       \
    X(pointer_attribute, (void *value, int attribute, void *address))                                                  \
    X(host_register, (void *base, size_t bytes, unsigned flags))                                                       \
    X(host_unregister, (void *base))                                                                                   \
    X(stream_create, (void **stream, unsigned flags))                                                                  \
    X(stream_destroy, (void *stream))                                                                                  \
    X(stream_synchronize, (void *stream))                                                                              \
    X(event_create, (void **event, unsigned flags))                                                                    \
    X(event_destroy, (void *event))                                                                                    \
    X(event_record, (void *event, void *stream))                                                                       \
    X(event_query, (void *event))                                                                                      \
    X(ipc_export, (driver_ipc_handle * handle, void *base))                                                            \
    X(ipc_open, (void **address, driver_ipc_handle handle, unsigned flags))                                            \
    X(ipc_close, (void *address))                                                                                      \
    X(capture_mode, (int *mode))                                                                                       \
    X(range_handle, (void *handle, void *address, size_t bytes, int type, unsigned long long flags))

struct driver_calls {
#define DECLARE(name, arguments) int(*name) arguments;
    DRIVER_CALLS(DECLARE)
#undef DECLARE
};

/* What a symbol is called, where its address goes, and what lacks without it (NULL: nothing works without it). */
typedef struct driver_symbol {
    const char *name;
    void *function; /* of type `pointer to the function's type`, as dlsym gives it */
    const char *without;
} driver_symbol;

/* Attributes' numbers; -1: this driver has no such thing. */
typedef struct driver_attributes {
    int warp_size, multiprocessors, can_map_host, host_atomics, unified_addressing;
} driver_attributes;

struct driver {
    const char *libraries[5];     /* as dlopen takes them; one that the process has loaded comes first */
    const char *remedy;           /* when none can be opened */
    const driver_symbol *symbols; /* ended by a NULL name */
    driver_attributes attributes;
    uint32_t memory_kind;
    int device_memory_type; /* what the pointer attribute says of device memory; 0: not asked */
    unsigned event_flags;
    const char *ipc_remedy;
    const char *dmabuf_remedy;

    /* Make the device current; `before` takes what is needed to undo it. */
    int (*enter)(uccl_ep_gpu *gpu, void **before);
    void (*leave)(uccl_ep_gpu *gpu, void *before);
    int (*open)(uccl_ep_gpu *gpu);
    void (*close)(uccl_ep_gpu *gpu);
    int (*memory_alloc)(void **address, size_t bytes);
    int (*clear)(void *address, size_t bytes, void *stream);
    int (*copy)(void *to, const void *from, size_t bytes, void *stream);
    const char *(*error_text)(int error);
    /* Version as text; architecture, ordering, clock, and `unusable`. */
    void (*describe)(int device, int version, uccl_ep_gpu_info *info);
    int (*flush)(void); /* NULL: there is none */
};

struct uccl_ep_gpu {
    int device;
    bool can_flush;
    void *context; /* of CUDA */
    void *stream;  /* of copy(): not the default one, which waits for kernels of all others */
};

/* Defined by cuda.c or hip.c. */
extern const struct driver driver;
extern struct driver_calls driver_calls;

extern const char driver_name[];

/* driver.c, for those two. */
int driver_attribute(int attribute, int device, int otherwise);

#endif
