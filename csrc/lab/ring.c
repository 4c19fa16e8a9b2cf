/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.c: a queue's memory, for tools that keep what a library has written there.
 */
#include "ring.h"

#include <errno.h>

#include "lab.h"

#pragma GCC visibility push(default)
int uccl_ep_lab_ring(uint32_t queue_pair, enum lab_ring_kind kind, struct lab_ring *ring) {
    *ring = (struct lab_ring){0};
    lab_enter();
    lab_trapped_all();
    lab_qp *qp = lab_qp_numbered(queue_pair);
    if (qp) qp->pd->context->device->model->ring(qp, kind, ring);
    lab_leave();
    return ring->bytes ? 0 : ENOENT;
}
#pragma GCC visibility pop
