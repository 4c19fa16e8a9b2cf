/* SPDX-License-Identifier: Apache-2.0
 *
 * Broadcom Thor and Thor2 (bnxt_re).
 *
 * Sources: rdma-core providers/bnxt_re (statuses, inline); uccl issues 250, 360, 617 and 799 (queue depth 4351; retries
 * run out above 1.5 MB in flight) and 972 (long lists of requests fail with vendor error 3). Writes are seen in order:
 * the provider has no mode in which requests of a reliable connection are placed otherwise.
 *
 * Seen with the library itself (docs/lab.md): libbnxt_re 65 mixes up requests that are posted by calls together (the
 * second fails with vendor error 3, the others are flushed); 44 adds 0, whatever a fetch-and-add is to add (repaired
 * by rdma-core 61773a85f).
 */
#include "../verbs/verbs.h"

#define QUEUE_DEPTH 4351u
#define INFLIGHT_BYTES 1572864u
#define WORTH_INLINE 96u
#define LIST 64u
#define ELEMENTS 6u

static const verbs_model models[] = {
    {0x1750, "BCM57508 Thor"},  {0x1751, "BCM57504 Thor"}, {0x1752, "BCM57502 Thor"},
    {0x1760, "BCM57608 Thor2"}, {0x1806, "Thor VF"},       {0x1807, "Thor VF"},
    {0x1808, "Thor VF"},        {0x1809, "Thor VF"},       {0, NULL},
};

static void least(uint32_t *limit, uint32_t most) {
    if (*limit > most) *limit = most;
}

static void limit(const struct ibv_device_attr *attributes, verbs_limits *l) {
    (void)attributes;
    least(&l->max_qp_wr, QUEUE_DEPTH);
    least(&l->max_sge, ELEMENTS);
    l->max_batch = LIST;
    l->max_inflight_bytes = INFLIGHT_BYTES;
    l->inline_bytes = WORTH_INLINE;
    l->ordered = true;
}

static const char *describe(uint32_t vendor_error) {
    static const char *const texts[] = {NULL,
                                        "bad response",
                                        "local length",
                                        "local operation",
                                        "local protection",
                                        NULL,
                                        "remote invalid",
                                        "remote access",
                                        "remote operation",
                                        "RNR retries",
                                        "transport retries",
                                        "flushed"};
    return vendor_error < sizeof texts / sizeof *texts ? texts[vendor_error] : NULL;
}

const char verbs_backend_name[] = "thor";

const verbs_vendor verbs_this_vendor = {
    .vendor = "Broadcom",
    .family = "Thor",
    .ids = {0x14e4, 0},
    .pci = 0x14e4,
    .models = models,
    .limit = limit,
    .describe = describe,
    .lists = true,
    .adds = "install rdma-core 47 or newer (libbnxt_re 44 adds 0)",
};
