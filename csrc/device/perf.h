/* SPDX-License-Identifier: Apache-2.0
 *
 * perf.h: what the kernels of `uccl-ep perf gpu` (perf.cu) and the threads that drain their rings (csrc/perf/drain.c)
 * agree on. C11, C++14, CUDA, HIP and run-time compilers.
 *
 * A stamped command is a put that nobody carries out. It is legal, so that it takes the way of any other, and it says
 * where it belongs: ring, producer, and which of its producer's commands it is, the low bits of that in both words.
 */
#ifndef UCCL_EP_DEVICE_PERF_H
#define UCCL_EP_DEVICE_PERF_H

#include "uccl_ep/device_comm.h"

#define PERF_PAYLOAD 128u /* bytes that a producer writes before it posts a command for them */
#define PERF_PRODUCER_BITS 12u
#define PERF_SEQUENCE_BITS (UCCL_EP_REMOTE_WIDTH - PERF_PRODUCER_BITS) /* of it in word 1; word 0 has 32 */
#define PERF_SEQUENCE_MASK ((1ull << PERF_SEQUENCE_BITS) - 1)

/* What one launch does. */
typedef struct perf_job {
    uccl_ep_u64 *payload;  /* PERF_PAYLOAD bytes for each of `batch` commands of each producer */
    uccl_ep_u64 *result;   /* perf_result, and samples behind it */
    uccl_ep_u64 sequence;  /* number of each producer's first command */
    uccl_ep_u64 commands;  /* of each producer; a multiple of batch */
    uccl_ep_u64 *word;     /* host memory: what a round trip over a plain word waits for, or answers with */
    uccl_ep_u32 producers; /* warps, or what the kernel says */
    uccl_ep_u32 rings;     /* producer p posts to ring p % rings */
    uccl_ep_u32 batch;     /* commands that a warp posts together */
    uccl_ep_u32 stamped;   /* 0: puts of the payload, whose place in the heap is `heap_offset` */
    uccl_ep_u64 heap_offset;
} perf_job;
UCCL_EP_STATIC_ASSERT_(sizeof(perf_job) == 64, "written from Python, too");

/* Of kernels that time single operations. */
typedef struct perf_result {
    uccl_ep_u64 status;        /* uccl_ep_status as 64 bits */
    uccl_ep_u64 clock, cycles; /* of the whole loop: the one has a known rate, the other fine steps */
    uccl_ep_u64 samples;       /* cycles of one operation each, behind this structure */
} perf_result;

UCCL_EP_FN uccl_ep_words perf_stamp(uccl_ep_u32 ring, uccl_ep_u32 producer_of_ring, uccl_ep_u64 sequence) {
    const uccl_ep_u64 low = sequence & PERF_SEQUENCE_MASK;
    const uccl_ep_u64 remote = (uccl_ep_u64)producer_of_ring << PERF_SEQUENCE_BITS | low;
    uccl_ep_words words;
    words.word[0] = (uccl_ep_u64)UCCL_EP_OP_PUT << UCCL_EP_OP_SHIFT | (sequence & UCCL_EP_FIELD_MAX(LOCAL))
                                                                          << UCCL_EP_LOCAL_SHIFT;
    words.word[1] = remote << UCCL_EP_REMOTE_SHIFT |
                    (uccl_ep_u64)(PERF_PAYLOAD / UCCL_EP_GRANULARITY_COARSE) << UCCL_EP_LENGTH_SHIFT |
                    (uccl_ep_u64)ring << UCCL_EP_TARGET_SHIFT;
    return words;
}

/* A put of PERF_PAYLOAD bytes from `offset` to the same place at rank 0. */
UCCL_EP_FN uccl_ep_words perf_put(uccl_ep_u64 offset) {
    const uccl_ep_u64 granule = offset / UCCL_EP_GRANULARITY_COARSE;
    uccl_ep_words words;
    words.word[0] = (uccl_ep_u64)UCCL_EP_OP_PUT << UCCL_EP_OP_SHIFT | granule << UCCL_EP_LOCAL_SHIFT;
    words.word[1] = granule << UCCL_EP_REMOTE_SHIFT | (uccl_ep_u64)(PERF_PAYLOAD / UCCL_EP_GRANULARITY_COARSE)
                                                          << UCCL_EP_LENGTH_SHIFT;
    return words;
}

#endif
