/* SPDX-License-Identifier: Apache-2.0
 *
 * lane.h: what the conformance suite's lane `gpu` (uccl_ep/conformance/gpu.py) and its kernels (lane.cu) agree on.
 * C++14, CUDA, HIP and run-time compilers. Written from Python, too.
 */
#ifndef UCCL_EP_DEVICE_LANE_H
#define UCCL_EP_DEVICE_LANE_H

#include "uccl_ep/device_comm.h"

typedef enum lane_op {
    LANE_NOTHING = 0,
    LANE_PUT = 1,
    LANE_SIGNAL = 2,
    LANE_PUT_SIGNAL = 3,
    LANE_COMMANDS = 4, /* uccl_ep_command [count], together */
    LANE_WORDS = 5,    /* uccl_ep_words [count], together and unchecked */
    LANE_QUIET = 6,    /* of the ticket; UCCL_EP_NO_TICKET: of the channel; channel ~0: of all */
    LANE_QUIET_SOURCE = 7,
    LANE_TEST = 8,
    LANE_WAIT_SIGNAL = 9,
    LANE_READ_SIGNAL = 10
} lane_op;

typedef enum lane_scope { LANE_THREAD = 0, LANE_WARP = 1, LANE_BLOCK = 2, LANE_POSTER = 3 } lane_scope;

/* One call of the API. */
typedef struct lane_job {
    uccl_ep_u32 op, scope;
    uccl_ep_u32 caller;                /* which thread, or warp, of the block */
    uccl_ep_u32 channel, target, slot; /* of a wait for a signal: target is its source */
    uccl_ep_u64 count;
    uccl_ep_u64 local, remote, bytes, add;
    uccl_ep_u64 ticket, value;
    const void *commands;
    struct lane_result *results; /* of each thread of the block that called */
} lane_job;
UCCL_EP_STATIC_ASSERT_(sizeof(lane_job) == 96, "written from Python, too");

typedef struct lane_result {
    uccl_ep_u64 called; /* 1 */
    uccl_ep_u64 status; /* uccl_ep_status as 64 bits */
    uccl_ep_u64 ticket;
    uccl_ep_u64 seen;
} lane_result;

#endif
