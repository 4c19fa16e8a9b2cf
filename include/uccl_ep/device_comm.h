/* SPDX-License-Identifier: Apache-2.0
 *
 * device_comm.h: what a kernel is given of a communicator. Plain data: filled on the host (uccl_ep_comm_device), passed
 * to kernels by value, read by device.h. C11, C++17, CUDA, HIP and run-time compilers.
 *
 * Every pointer is an address that the device reaches. Ownership: the communicator's; valid until destroy, and what it
 * points to is current also after a reset.
 */
#ifndef UCCL_EP_DEVICE_COMM_H
#define UCCL_EP_DEVICE_COMM_H

#include "ring.h"

/* Raised when any structure of this header or of ring.h changes its meaning; kernels compare it. */
#define UCCL_EP_DEVICE_VERSION 2u

/* No rank in particular. */
#define UCCL_EP_ANY_RANK 0xffffffffu

/* What the host tells kernels that wait. Host memory, written by the CPU only. */
typedef struct uccl_ep_device_control {
    uccl_ep_u64 aborted; /* not zero: every wait ends with E_ABORTED (ABT-1) */
    uccl_ep_u64 lost;    /* ranks that are lost or have closed, and that nobody excluded: waits for a signal of any rank
                          * end */
    uccl_ep_u64 pad[6];
} uccl_ep_device_control;

/* The first failure that a device met since it was taken (uccl_ep_comm_device_error). Host memory, written by the one
 * producer that claimed it; `status` last, with release. Who takes it clears `status` and then gives the claim back:
 * between the two nobody else writes. */
typedef struct uccl_ep_device_error {
    uccl_ep_u64 status;  /* uccl_ep_status as 64 bits; zero: none */
    uccl_ep_u64 what;    /* uccl_ep_device_what */
    uccl_ep_u64 channel; /* or ~0 */
    uccl_ep_u64 ticket;  /* UCCL_EP_NO_TICKET: none was given out */
    uccl_ep_u64 slot;    /* of a signal word, or ~0 */
    uccl_ep_u64 wanted;  /* value waited for */
    uccl_ep_u64 seen;    /* value, or counter, at the end */
    uccl_ep_u64 thread;  /* block << 32 | thread of the block */
    uccl_ep_u64 source;  /* of the signal waited for: a rank, or UCCL_EP_ANY_RANK */
} uccl_ep_device_error;

typedef enum uccl_ep_device_what {
    UCCL_EP_DEVICE_POST = 1,         /* waiting for space, or an argument */
    UCCL_EP_DEVICE_QUIET = 2,        /* for completion */
    UCCL_EP_DEVICE_QUIET_SOURCE = 3, /* for sources */
    UCCL_EP_DEVICE_WAIT_SIGNAL = 4
} uccl_ep_device_what;

typedef struct uccl_ep_device_comm {
    uccl_ep_u32 version; /* UCCL_EP_DEVICE_VERSION */
    uccl_ep_u32 rank, size;
    uccl_ep_u32 channels; /* that a device may post to: 0 .. channels - 1 */
    uccl_ep_u32 signals;
    uccl_ep_u32 signal_banks;
    uccl_ep_u32 granularity;
    uccl_ep_u32 reserved;
    uccl_ep_u64 heap_bytes;
    void *heap;                      /* the own heap; 0: kernels cannot reach it */
    const uccl_ep_u64 *signal_words; /* [signal_banks][signals]: a signal's value is the sum over the banks */
    const uccl_ep_ring *rings;       /* [channels] */
    const uccl_ep_device_control *control;
    const uccl_ep_u64 *gone; /* host memory, a bit a rank: it is lost or has closed, excluded or not */
    uccl_ep_device_error *error;
    uccl_ep_u32 *error_claim;  /* device memory: 0 until a producer claims `error` */
    uccl_ep_u64 timeout_ticks; /* of every wait, in ticks of the device's clock */
} uccl_ep_device_comm;

#endif
