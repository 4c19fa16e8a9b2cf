/* SPDX-License-Identifier: Apache-2.0
 *
 * demo.h: what `uccl-ep demo --accel` (uccl_ep/demo/kernels.py) and its kernel (demo.cu) agree on. Written from Python,
 * too.
 */
#ifndef UCCL_EP_DEVICE_DEMO_H
#define UCCL_EP_DEVICE_DEMO_H

#include "uccl_ep/device_comm.h"

/* Commands of one channel: `rows` in any order, then those behind them. */
typedef struct demo_batch {
    uccl_ep_u64 begin, rows_end, end; /* indices into demo_job.commands */
} demo_batch;

typedef struct demo_wait {
    uccl_ep_u64 value;
    uccl_ep_u32 slot, source;
} demo_wait;

/* Ticks of the device's clock. */
typedef struct demo_times {
    uccl_ep_u64 begin, posted, end;
} demo_times;

/* One direction of an exchange. A block a channel. */
typedef struct demo_job {
    const uccl_ep_command *commands;
    const demo_batch *batches; /* of each channel */
    const demo_wait *waits;
    uccl_ep_u64 *seen; /* of each wait: what the signal was */
    demo_times *times; /* of each block */
    uccl_ep_u64 n_waits;
    uccl_ep_u64 together; /* commands that a warp posts at a time: a lane each, and no more than a ring holds */
} demo_job;
UCCL_EP_STATIC_ASSERT_(sizeof(demo_job) == 56 && sizeof(demo_batch) == 24 && sizeof(demo_wait) == 16,
                       "written from Python, too");

#endif
