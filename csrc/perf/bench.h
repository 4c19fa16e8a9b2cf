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
    uint64_t latencies;           /* measured of each kind: 1 to 2000 */
    uint64_t window;              /* operations under way at most; 0: the default */
    uint64_t spin;                /* of rank 0: idle passes before its proxy yields; 0: the default */
    uint64_t other_idle_sleep_ns; /* of rank 1, which has nothing to do in puts; 0: the default */
    char mix[32], strategy[32], complete[32];
    char device[32], other_device[32], nic_options[128]; /* of rank 0, of rank 1; of both */
    char cpus[64], other_cpus[64]; /* that all threads of rank 0, of rank 1 may use: 0+2; empty: those of the caller */
} options;

__attribute__((format(printf, 1, 2))) _Noreturn void die(const char *format, ...);
void must(uccl_ep_status status, const char *what);
uint64_t now_ns(void);
double median(double *values, uint64_t n);

/* pair.c */
void pair(const char *backend);
void rdma(const char *backend);

#endif
