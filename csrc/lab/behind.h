/* SPDX-License-Identifier: Apache-2.0
 *
 * behind.h: for the files whose functions stand before the C library's (preload.c, netlink.c): how they are seen, and
 * what comes behind them.
 */
#ifndef UCCL_EP_LAB_BEHIND_H
#define UCCL_EP_LAB_BEHIND_H

#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))

/* The next definition of a function, kept in *slot. Found when it is first needed, which may be before our constructor:
 * other libraries' come first. */
void *lab_behind(_Atomic(void *) *slot, const char *name);

/* real_NAME()(...) calls it. */
#define NEXT_(name)                                                                                                    \
    static _Atomic(void *) next_##name;                                                                                \
    static inline __typeof__(&name) real_##name(void) {                                                                \
        return (__typeof__(&name))lab_behind(&next_##name, #name);                                                     \
    }

/* netlink.c: forgets the descriptor. Not there: preload.c is tested without it. */
void lab_netlink_close(int fd) __attribute__((weak));

#endif
