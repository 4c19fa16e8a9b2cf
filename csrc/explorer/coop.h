/* SPDX-License-Identifier: Apache-2.0
 *
 * coop.h: blocking calls of several ranks, taking turns on one thread.
 *
 * Creating and resetting a communicator is collective and blocks. Here every rank's call runs on a stack of its own and
 * gives its turn away where it would block: in the allgather, and in the communicator's `idle`. Turns go round in the
 * order of ranks, so that a run stays a function of its seed; and there are no threads, so 4096 ranks are no burden.
 */
#ifndef UCCL_EP_EXPLORER_COOP_H
#define UCCL_EP_EXPLORER_COOP_H

#include <stdbool.h>
#include <stdint.h>

#include "uccl_ep/uccl_ep.h"

typedef struct coop coop;

/* NULL: no memory. */
coop *coop_new(uint32_t most, size_t stack_bytes);
void coop_free(coop *c);
/* Call body(context, rank) for n ranks until all have returned. Whenever all of them have had a turn, between() runs on
 * the caller's stack: what moves the world while they wait. */
void coop_run(coop *c, uint32_t n, void (*body)(void *context, uint32_t rank), void (*between)(void *context),
              void *context);
bool coop_inside(const coop *c);
/* Within a body: let the others run. */
void coop_pass(coop *c);
/* The bootstrap of one rank. */
uccl_ep_bootstrap coop_bootstrap(coop *c, uint32_t rank, uint32_t size);

#endif
