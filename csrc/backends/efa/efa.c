/* SPDX-License-Identifier: Apache-2.0
 *
 * efa.c: the vendor: devices, generations, statuses.
 *
 * Sources: rdma-core providers/efa (efadv.h, efa_io_defs.h, verbs.c), the kernel's efa driver, fi_efa(7). What a
 * generation can is asked of the device, never told from its number.
 */
#include "efa.h"

static const verbs_model models[] = {
    {0xefa0, "EFA (first generation)"},
    {0xefa1, "EFA efa1"},
    {0xefa2, "EFA efa2"},
    {0xefa3, "EFA efa3"},
    {0xefa4, "EFA efa4"},
    {0, NULL},
};

static void limit(const struct ibv_device_attr *attributes, verbs_limits *l) {
    (void)attributes;
    l->atomics = false;
    l->max_srq_wr = 0;
    l->ordered = false;
}

/* efa_io_defs.h, enum efa_io_comp_status. The peer's queue pair has gone, the peer has let go of this NIC (it makes a
 * handle before anything is sent to it), or nothing comes back. */
int32_t efa_status_of(const struct ibv_wc *wc) {
    const uint32_t own = wc->vendor_err;
    return own == 8 || own == 9 || (own >= 13 && own <= 15) ? UCCL_EP_E_PEER_LOST : verbs_status_of(wc->status);
}

static const char *describe(uint32_t vendor_error) {
    static const char *const texts[] = {
        [1] = "flushed: the queue pair was destroyed or broke",
        [2] = "internal error of the queue pair",
        [3] = "the device does not know this operation",
        [4] = "the address handle is not valid",
        [5] = "the local key is not valid",
        [6] = "the length is not valid",
        [7] = "the peer's address or key is not valid",
        [8] = "the peer's NIC has reset the connection",
        [9] = "the peer has no such queue pair, or another queue key: did its process end?",
        [10] = "the peer had no receive posted for an immediate",
        [11] = "the peer's receive is too short",
        [12] = "an unexpected status from the peer",
        [13] = "the peer does not respond: its process or host is gone, or its security group lets nothing pass",
        [14] = "the peer does not know this NIC: it has no address handle for it",
        [15] = "the peer cannot be reached: see to routes and security groups",
        [18] = "the peer's NIC lacks a feature that this one used",
    };
    return vendor_error < sizeof texts / sizeof *texts ? texts[vendor_error] : NULL;
}

const char verbs_backend_name[] = "efa";

const verbs_vendor verbs_this_vendor = {
    .vendor = "Amazon",
    .family = "EFA",
    .ids = {0x1d0f, 0},
    .pci = 0x1d0f,
    .models = models,
    .limit = limit,
    .describe = describe,
};
