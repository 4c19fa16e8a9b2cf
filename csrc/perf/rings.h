/* SPDX-License-Identifier: Apache-2.0
 *
 * rings.h: what kernels of `uccl-ep perf gpu` are given in place of a communicator: rings without proxies, laid out as
 * the core's are (csrc/core/device_channel.c), and emptied by the threads of drain.h.
 *
 * One block of host memory, registered with the device, holds what both sides look at; what is the producers' alone
 * lies in device memory, and so does the payload, which is the heap.
 *
 * Threads: one. No kernel runs when rings are opened or closed, nor when rings_reserved() is asked.
 */
#ifndef UCCL_EP_PERF_RINGS_H
#define UCCL_EP_PERF_RINGS_H

#include "drain.h"
#include "uccl_ep/device_comm.h"

#define RINGS_SIGNALS 16u /* words of the signal array */

typedef struct rings rings;

typedef struct rings_config {
    const char *accelerator; /* path of its library */
    uint32_t device;
    uint32_t rings, log2_slots;
    uint32_t reserved;
    uint64_t heap_bytes; /* of device memory */
    uint64_t timeout_ns; /* of every wait of a kernel */
} rings_config;

/* The words in host memory that both sides reach. */
typedef struct rings_words {
    uint64_t *signal, *answer, *echo;    /* of the CPU: signal word 0; written by a kernel; by the drain, for ring 0 */
    uint64_t *answer_there, *echo_there; /* the last two as kernels see them */
} rings_words;

/* An error's text goes to `text`. */
DRAIN_API uccl_ep_status rings_open(const rings_config *config, rings **out, char *text, uint64_t text_bytes);
DRAIN_API void rings_close(rings *r);
DRAIN_API void rings_comm(const rings *r, uccl_ep_device_comm *out);
DRAIN_API void rings_host(const rings *r, drain_ring *out); /* [rings] */
DRAIN_API void rings_get_words(const rings *r, rings_words *out);
/* E_BACKEND if tickets were given out that nobody took: their commands were never stored. */
DRAIN_API uccl_ep_status rings_check_taken(const rings *r, char *text, uint64_t text_bytes);
/* What a kernel left in the error record; OK: nothing. */
DRAIN_API uccl_ep_status rings_error(const rings *r, char *text, uint64_t text_bytes);

#endif
