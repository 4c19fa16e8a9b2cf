/* SPDX-License-Identifier: Apache-2.0
 *
 * cases.h: what the conformance suite's own cases for kernels (tests/conformance/device.py) and their kernels
 * (cases.cu) agree on. Written from Python, too.
 */
#ifndef UCCL_EP_DEVICE_CASES_H
#define UCCL_EP_DEVICE_CASES_H

#include "uccl_ep/device_comm.h"

/* How a message is posted. */
typedef enum case_form {
    CASE_LANE = 0,          /* a warp's lanes write it, and meet; one posts */
    CASE_WARP = 1,          /* they write it, and all call the warp's form */
    CASE_BLOCK = 2,         /* the same of a block */
    CASE_GRID = 3,          /* another block writes it, and hands it over through device memory */
    CASE_APART = 4,         /* each thread its own, at its own time */
    CASE_MANY = 5,          /* each lane its own, posted together */
    CASE_POSTER = 6,        /* each warp its own, through the block's poster */
    CASE_POSTER_TICKETS = 7 /* the same, each with a ticket that it then waits for */
} case_form;

#define CASE_WORDS 32u /* uint64_t of a message */

typedef struct case_job {
    uccl_ep_u32 form, target, source, reserved;
    uccl_ep_u32 first_channel, channels; /* producer p posts to first_channel + p % channels */
    uccl_ep_u32 slot, rounds;
    uccl_ep_u64 local, remote; /* of message 0; message m lies CASE_WORDS words further each */
    uccl_ep_u64 seed;
    uccl_ep_u64 *shared; /* device memory, zero: one word a block */
    uccl_ep_u64 *out;    /* of each thread of the grid: CASE_OUT words */
} case_job;
UCCL_EP_STATIC_ASSERT_(sizeof(case_job) == 72, "written from Python, too");

/* out: what went wrong, zero if nothing; what of it; how many messages this thread posted, or looked at. */
#define CASE_OUT 3u

#endif
