/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_driver.h: what a test can make a fake GPU driver do. fake_cuda.c and fake_hip.c are libraries with the names and
 * functions of the real ones, over host memory: they look at what they are given as strictly as a driver may, and carry
 * copies out late.
 */
#ifndef UCCL_EP_FAKE_DRIVER_H
#define UCCL_EP_FAKE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef struct fake_driver {
    int devices;      /* 2 */
    int architecture; /* CUDA: 90 is 9.0 */
    int writes_ordering, flush_options;
    int capturing;    /* a graph is captured somewhere, in the mode that forbids other threads what is unsafe */
    int fail_at;      /* the n-th call from now, from 1; 0: none. Releasing calls are not counted */
    int fail_with;    /* its error */
    int stalled;      /* copies stand still */
    int break_copies; /* the next copy that is carried out ends its stream with this error */
    uint64_t seed;    /* how late copies are */
    /* What is there now: all 0 once everything is closed. */
    int contexts, allocations, registrations, streams, events, imports, current;
    /* What happened. */
    int calls;
    int disturbed; /* calls that would have ended the capture */
    int unpinned;  /* asynchronous copies of memory that is not registered */
    int flushes;
    int attributes_failed; /* by fail_at */
    /* The driver as the program itself uses it. */
    int (*register_host)(void *base, size_t bytes, unsigned flags);
    int (*unregister_host)(void *base);
} fake_driver;

/* Exported by the libraries. */
typedef fake_driver *fake_driver_control_function(void);
#define FAKE_DRIVER_CONTROL "fake_driver_control"

#endif
