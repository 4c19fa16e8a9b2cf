/* SPDX-License-Identifier: Apache-2.0
 *
 * balance.h: what balance_accelerator.c, the accelerator of the emulation with an eye on its callers, tells and is
 * told.
 */
#ifndef UCCL_EP_TEST_BALANCE_H
#define UCCL_EP_TEST_BALANCE_H

#include "uccl_ep/accelerator.h"

typedef struct balance {
    uccl_ep_accelerator table;    /* what the entry gives: a test may change it */
    uint64_t fail;                /* the call that is to fail, counted from the first one after `calls` was set to 0 */
    uint64_t calls;               /* that can fail */
    const char *failed;           /* name of the one that did */
    int64_t opened, memory, host; /* devices, allocations and registrations that nobody has given back */
    uint32_t clock_hz, unusable;  /* query: 1: no clock; 1: not usable */
    uint32_t memory_kind;         /* query: not 0: this one */
} balance;

/* The symbol "balance_state" of libbalance_accelerator.so. */
extern balance balance_state;

#endif
