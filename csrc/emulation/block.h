/* SPDX-License-Identifier: Apache-2.0
 *
 * block.h: one block of a launch, and what its launch shares.
 */
#ifndef UCCL_EP_EMULATION_BLOCK_H
#define UCCL_EP_EMULATION_BLOCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "uccl_ep/emulation.h"

typedef struct launch {
    const uccl_ep_emulation_launch_params *asked;
    uint32_t blocks, threads; /* of the grid, of a block */
    atomic_uint next_block;
    atomic_bool over; /* a block failed: the others end at their next turn */
    pthread_mutex_t lock;
    uccl_ep_status status; /* of the first failure, with its text */
    char *text;
    uint64_t text_bytes;
} launch;

/* The first failure is the one that is told. */
void launch_fail(launch *l, uccl_ep_status status, const char *text);

/* Run the blocks that nobody has taken, one after the other. */
void blocks_run(launch *l);

#endif
