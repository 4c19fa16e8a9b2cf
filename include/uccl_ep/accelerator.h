/* SPDX-License-Identifier: Apache-2.0
 *
 * accelerator.h: what the library asks of a GPU's driver. Pure C, one table an accelerator.
 *
 * Purpose. Rings of device channels need memory that a GPU reaches, and a NIC without access to GPU memory needs
 * somebody to copy. Both are the driver's business, and the library links to none: an accelerator is a shared library
 * (libuccl_ep_cuda.so, libuccl_ep_hip.so, libuccl_ep_emulation.so) that opens the driver at run time and exports one
 * symbol, uccl_ep_accelerator_entry. Compiling and launching kernels is not here: that is the application's, or
 * uccl_ep.accel's.
 *
 * Rules for every function. As in backend.h: `size` first and append-only; errors are return values with a text through
 * `fail`; nothing prints, exits or asserts on what a driver or a user did.
 *
 * Threads. Any, unless it says otherwise: each call makes the device current in the calling thread where the driver
 * wants that, and calls that may run while a graph is captured elsewhere do not disturb the capture.
 *
 * Blocking. "start": may wait for the driver and the GPU, also for kernels that run; only while no kernel of this
 * device waits for the library. The others return at once, also while kernels spin.
 */
#ifndef UCCL_EP_ACCELERATOR_H
#define UCCL_EP_ACCELERATOR_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_ACCELERATOR_ABI_MAJOR 1u
#define UCCL_EP_ACCELERATOR_ABI_MINOR 0u
#define UCCL_EP_ACCELERATOR_ENTRY "uccl_ep_accelerator_entry"

typedef struct uccl_ep_gpu uccl_ep_gpu;               /* an opened device */
typedef struct uccl_ep_copy_queue uccl_ep_copy_queue; /* copies in order: a stream of its own that waits for no other */

/* When writes of a NIC to device memory are visible to kernels of that device, without a flush. */
typedef enum uccl_ep_writes_ordering {
    UCCL_EP_WRITES_UNORDERED = 0, /* flush_writes() must come between data and signal (MEM-3) */
    UCCL_EP_WRITES_ORDERED = 1,   /* to kernels of the device that owns the memory */
    UCCL_EP_WRITES_ORDERED_ALL = 2
} uccl_ep_writes_ordering;

typedef struct uccl_ep_gpu_info {
    uint32_t size;
    uint32_t memory_kind; /* uccl_ep_memory_kind of its device memory */
    int32_t numa_node;    /* -1: unknown */
    uint32_t warp_size;
    uint32_t multiprocessors;
    uint32_t writes_ordering; /* uccl_ep_writes_ordering */
    uint32_t can_flush;       /* flush_writes() does something */
    uint32_t dmabuf;          /* device memory can be exported as dmabuf */
    uint32_t ipc;             /* device memory can be shared between processes */
    uint32_t host_atomics;    /* its atomics on host memory are atomic against the CPU's */
    uint64_t clock_hz;        /* ticks a second of the clock that device.h reads */
    uint64_t memory_bytes;
    char name[64];
    char architecture[32]; /* "sm_90", "gfx90a": what kernels are compiled for */
    char address[64];      /* PCI address or the like */
    char driver[64];       /* version */
    char unusable[256];    /* not empty: it is there and cannot be used, and why */
} uccl_ep_gpu_info;

#define UCCL_EP_GPU_IPC_BYTES 128u

typedef struct uccl_ep_accelerator {
    uint32_t size;
    uint16_t abi_major, abi_minor;
    const char *name; /* "cuda", "hip", "emulation" */

    /* Text of the error that the calling thread's last call returned; never NULL. */
    const char *(*error_text)(void);

    /* start. Describe device `index`; E_NO_DEVICE past the last one, or with a text that says which driver is missing
     * or too old. */
    uccl_ep_status (*query)(uint32_t index, uccl_ep_gpu_info *info);
    uccl_ep_status (*open)(uint32_t index, uccl_ep_gpu **gpu);
    void (*close)(uccl_ep_gpu *gpu);

    /* start. Device memory, zeroed. What a ring's producer block lies in. */
    uccl_ep_status (*device_alloc)(uccl_ep_gpu *gpu, uint64_t bytes, void **address);
    void (*device_free)(uccl_ep_gpu *gpu, void *address);
    /* start. Make host memory (whole pages) reachable by kernels at *device_address, with coherent loads and stores.
     * Memory that is reachable already, registered before or allocated so, stays as it is and gets its address again;
     * each host_unregister takes one host_register back. */
    uccl_ep_status (*host_register)(uccl_ep_gpu *gpu, void *base, uint64_t bytes, void **device_address);
    void (*host_unregister)(uccl_ep_gpu *gpu, void *base);
    /* start. Between any two of host and device memory; done on return. */
    uccl_ep_status (*copy)(uccl_ep_gpu *gpu, void *to, const void *from, uint64_t bytes);

    /* start. The base and length of the allocation that `address` lies in: NICs register and processes share those. */
    uccl_ep_status (*allocation)(uccl_ep_gpu *gpu, const void *address, void **base, uint64_t *bytes);
    /* start. A dmabuf descriptor of [address, address + bytes), page aligned; the caller closes it. */
    uccl_ep_status (*export_dmabuf)(uccl_ep_gpu *gpu, void *address, uint64_t bytes, int32_t *descriptor);
    /* start. Share the allocation that begins at `base` with another process, and take one from there. A handle opened
     * in the process that made it is E_UNSUPPORTED: that process has the address. Handles are untrusted. */
    uccl_ep_status (*ipc_export)(uccl_ep_gpu *gpu, void *base, uint8_t handle[UCCL_EP_GPU_IPC_BYTES]);
    uccl_ep_status (*ipc_open)(uccl_ep_gpu *gpu, const uint8_t handle[UCCL_EP_GPU_IPC_BYTES], void **address);
    void (*ipc_close)(uccl_ep_gpu *gpu, void *address);

    /* One thread a queue. Copies of a queue are carried out in order; copy_start returns at once. Progress never needs
     * a kernel to end: the queue waits for no other stream. Host memory that takes part is registered: other memory a
     * driver copies in the calling thread. */
    uccl_ep_status (*queue_open)(uccl_ep_gpu *gpu, uccl_ep_copy_queue **queue); /* start */
    void (*queue_close)(uccl_ep_copy_queue *queue);                             /* waits for its copies */
    uccl_ep_status (*copy_start)(uccl_ep_copy_queue *queue, void *to, const void *from, uint64_t bytes);
    /* Everything started before gets a number, 1 first, then one more each time. At most UCCL_EP_COPY_MARKS are
     * outstanding: beyond, E_AGAIN. */
    uccl_ep_status (*mark)(uccl_ep_copy_queue *queue, uint64_t *number);
    /* *done: all copies before this mark, and the earlier ones, have been carried out and are visible to kernels and
     * CPU. An error is final: the queue is broken. */
    uccl_ep_status (*marks_done)(uccl_ep_copy_queue *queue, uint64_t *done);

    /* Make what NICs have written to the device's memory visible to its kernels (MEM-3). */
    uccl_ep_status (*flush_writes)(uccl_ep_gpu *gpu);
} uccl_ep_accelerator;

#define UCCL_EP_COPY_MARKS 256u

/* The one symbol that an accelerator exports; the table lives as long as the library is loaded. No side effects. */
const uccl_ep_accelerator *uccl_ep_accelerator_entry(void);

#ifdef __cplusplus
}
#endif
#endif
