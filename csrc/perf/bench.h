/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.h: what the modes of uccl-ep-bench share.
 */
#ifndef UCCL_EP_PERF_BENCH_H
#define UCCL_EP_PERF_BENCH_H

#include <stdint.h>

#include "uccl_ep/uccl_ep.h"

#define SECOND 1000000000ull

extern struct options {
    uint64_t ranks, targets, channels, ring_log2, bytes, rounds, producers, batch, commands, passes, still;
    char mix[32], strategy[32], complete[32];
} options;

__attribute__((format(printf, 1, 2))) _Noreturn void die(const char *format, ...);
void must(uccl_ep_status status, const char *what);
uint64_t now_ns(void);
double median(double *values, uint64_t n);

/* pair.c */
void pair(const char *backend);

#endif
