/* SPDX-License-Identifier: Apache-2.0
 *
 * scale.h: thousands of ranks in one process.
 */
#ifndef UCCL_EP_EXPLORER_SCALE_H
#define UCCL_EP_EXPLORER_SCALE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct scale_options {
    const char *backend, *profile;
    uint32_t ranks, rounds;
    bool full; /* every rank signals every other; otherwise log2(ranks) others */
    uint64_t seed;
} scale_options;

/* Prints one JSON object. Exit status: 0; 1 if a signal was lost or added twice. */
int scale(const scale_options *options);
/* Idle passes of one rank of so many, for who counts instructions. */
int scale_idle(const scale_options *options);

#endif
