/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.h: where a library writes its entries, for tools that keep them (tests/system/golden.c).
 */
#ifndef UCCL_EP_LAB_RING_H
#define UCCL_EP_LAB_RING_H

#include <stdint.h>

enum lab_ring_kind { LAB_RING_SENDS, LAB_RING_RECEIVES /* the shared ones, where the queue pair has those */ };

struct lab_ring {
    const uint8_t *entries;
    uint32_t bytes, unit; /* of the ring, and of what `posted` counts; a power of two of units */
    uint32_t posted;      /* as the doorbell has it: modulo the units of the ring, or a multiple of that */
    uint32_t number;      /* of the queue, in its doorbells */
    uint32_t doorbell_bytes;
    uint8_t doorbell[8]; /* the record in memory, or the last store to the register */
};

/* Of the queue pair with this number, with all that has been rung. Returns 0; ENOENT: there is none, or its NIC has no
 * such ring. */
int uccl_ep_lab_ring(uint32_t queue_pair, enum lab_ring_kind kind, struct lab_ring *ring);

#endif
