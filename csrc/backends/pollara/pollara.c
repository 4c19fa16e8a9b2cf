/* SPDX-License-Identifier: Apache-2.0
 *
 * AMD Pensando Pollara 400 (ionic).
 *
 * Sources: rdma-core v61 providers/ionic and the kernel's ionic_rdma (queue depth, completions, elements, no shared
 * receive queue, statuses); mooncake pull request 3977 (16 responder resources of the whole device); mori issue 497
 * (atomic_cap NONE); UCCL_IB_MAX_INFLIGHT_BYTES of uccl (2 MiB). Packets take several paths at once and no source says
 * that writes become visible in order, so that is not promised: signals come as numbered immediates.
 */
#include "../verbs/verbs.h"

#define QUEUE_DEPTH 65535u
#define COMPLETIONS 65435u
#define ELEMENTS 8u
#define RESPONDERS 16u
#define INFLIGHT_BYTES 2097152u
#define WORTH_INLINE 32u
/* libionic 65 looks for the receives that it has to flush under another index than it has put them, and then gives
 * -EIO, once for a queue pair that has gone into error, while all else goes on. A queue that cannot be read fails each
 * time. */
#define POLL_FAILURES 64u

static const verbs_model models[] = {{0x1002, "Pollara 400"}, {0x1003, "Pollara 400 VF"}, {0, NULL}};

static void least(uint32_t *limit, uint32_t most) {
    if (*limit > most) *limit = most;
}

static void limit(const struct ibv_device_attr *attributes, verbs_limits *l) {
    (void)attributes;
    least(&l->max_qp_wr, QUEUE_DEPTH);
    least(&l->max_cqe, COMPLETIONS);
    least(&l->max_sge, ELEMENTS);
    least(&l->initiator_depth, RESPONDERS);
    least(&l->responder_depth, RESPONDERS);
    l->device_responders = RESPONDERS;
    l->max_srq_wr = 0;
    l->max_inflight_bytes = INFLIGHT_BYTES;
    l->inline_bytes = WORTH_INLINE;
    l->ordered = false;
}

static const char *describe(uint32_t vendor_error) {
    static const char *const texts[] = {
        NULL, "local length",   "local operation", "local protection", NULL,      NULL,         NULL,
        NULL, "remote invalid", "remote access",   "remote operation", "retries", "RNR retries"};
    return vendor_error < sizeof texts / sizeof *texts ? texts[vendor_error] : NULL;
}

const char verbs_backend_name[] = "pollara";

const verbs_vendor verbs_this_vendor = {
    .vendor = "AMD Pensando",
    .family = "Pollara",
    .ids = {0x1dd8, 0},
    .pci = 0x1dd8,
    .models = models,
    .limit = limit,
    .describe = describe,
    .poll_failures = POLL_FAILURES,
};
