/* SPDX-License-Identifier: Apache-2.0
 *
 * emulation.h: kernels on the CPU. C; implemented by libuccl_ep_emulation_device.so.
 *
 * Purpose. What a GPU's warps do to code, without a GPU: lanes that go apart and meet again, masks, barriers, blocks
 * that run at the same time. A kernel is compiled by the host's C++ compiler and launched with warps of 1, 32 or 64
 * lanes. It is for correctness: nothing about it is fast.
 *
 * How it runs. A block is a thread, a lane is a fiber of it. A lane runs until it waits: at a shuffle, a ballot, a
 * barrier, at active(), or in relax(). Once all lanes of its warp wait or have returned, those that can go on do, in
 * this order: lanes whose mates of the mask have all come; lanes that stand together at one active(); lanes that relax.
 * As on hardware, lanes of a mask that have returned are not waited for.
 *
 * What it finds, and ends the launch for: lanes that can never meet (with who waits where), a shuffle that reads a lane
 * which is not taking part, a mask without its caller, a command stored without a fence, a lane that ran over its
 * stack. Under ThreadSanitizer lanes are threads of their own, ordered only by what orders them on hardware.
 *
 * Threads. Any number may launch at the same time.
 */
#ifndef UCCL_EP_EMULATION_H
#define UCCL_EP_EMULATION_H

#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_EMULATION_MAX_THREADS 1024u     /* of a block */
#define UCCL_EP_EMULATION_MAX_RESIDENT 512u     /* blocks that run at the same time */
#define UCCL_EP_EMULATION_MAX_SHARED (1u << 20) /* bytes that a launch may ask for */

typedef struct uccl_ep_emulation_launch_params {
    uint32_t size;
    uint32_t warp_size; /* 1, 32 or 64 */
    uint32_t grid[3], block[3];
    uint64_t shared_bytes;
    uint32_t cooperative; /* not zero: all blocks run at the same time, or E_UNSUPPORTED */
    uint32_t reserved;
    void (*kernel)(void **args); /* uccl_ep_call_NAME of UCCL_EP_EMULATION_ENTRY */
    void **args;                 /* addresses of the arguments */
    uint64_t seed; /* 0: lanes take turns in their order. Else turns, and how lanes at active() fall apart, are drawn
                    * from it. */
} uccl_ep_emulation_launch_params;

/* Run a kernel; returns when all its blocks have ended. An error ends all blocks and is told in `text`: E_INVALID: the
 * launch, or what a lane did; E_UNSUPPORTED, E_NO_MEMORY, E_SYSTEM. */
__attribute__((visibility("default"))) uccl_ep_status
uccl_ep_emulation_launch(const uccl_ep_emulation_launch_params *launch, char *text, uint64_t text_bytes);

/* ------------------------------------------------------------------------------ what device_emulation.h calls in lanes
 */

/* A lane as it sees itself. */
typedef struct uccl_ep_emulation_lane {
    uint32_t lane, width;
    uint32_t thread, threads;
    uint32_t block, blocks;
    uint64_t present;
    void *shared;    /* the launch's dynamic shared memory */
    uint32_t fenced; /* a system fence since it last met other lanes or waited */
} uccl_ep_emulation_lane;

#define UCCL_EP_EMULATION_API __attribute__((visibility("default")))
UCCL_EP_EMULATION_API uccl_ep_emulation_lane *uccl_ep_emulation_self(void);
UCCL_EP_EMULATION_API uint64_t uccl_ep_emulation_active(void);
UCCL_EP_EMULATION_API uint64_t uccl_ep_emulation_shuffle(uint64_t mask, uint64_t value, uint32_t from);
UCCL_EP_EMULATION_API uint64_t uccl_ep_emulation_ballot(uint64_t mask, int predicate);
UCCL_EP_EMULATION_API void uccl_ep_emulation_sync_warp(uint64_t mask);
UCCL_EP_EMULATION_API void uccl_ep_emulation_sync_block(void);
UCCL_EP_EMULATION_API void uccl_ep_emulation_relax(void);
UCCL_EP_EMULATION_API uint64_t uccl_ep_emulation_clock(void);
UCCL_EP_EMULATION_API void uccl_ep_emulation_unfenced(void); /* does not return */

#ifdef __cplusplus
}
#endif
#endif
