/* SPDX-License-Identifier: Apache-2.0
 *
 * status.c: completion codes as each vendor's NIC gives them.
 *
 * Sources: mlx5dv.h and providers/mlx5/cq.c (syndromes); efa_io_defs.h (efa_io_comp_status); bnxt_re-abi.h;
 * ionic_fw_types.h; fi_cxi return codes, of which public sources name few: those marked "chosen" are ours.
 */
#include <string.h>

#include "virtual_nic.h"

struct row {
    vnic_status status;
    int32_t code;
    const char *text;
};

static const struct row nvidia[] = {
    {VNIC_LOCAL_LENGTH, 0x01, "local length error"},
    {VNIC_LOCAL_OPERATION, 0x02, "local QP operation error"},
    {VNIC_LOCAL_ACCESS, 0x04, "local protection error"},
    {VNIC_FLUSHED, 0x05, "work request flushed error"},
    {VNIC_REMOTE_INVALID, 0x12, "remote invalid request error"},
    {VNIC_REMOTE_ACCESS, 0x13, "remote access error"},
    {VNIC_REMOTE_OPERATION, 0x14, "remote operation error"},
    {VNIC_RETRY_EXCEEDED, 0x15, "transport retry counter exceeded"},
    {VNIC_RNR_EXCEEDED, 0x16, "RNR retry counter exceeded"},
    {VNIC_ABORTED, 0x22, "aborted"},
    {VNIC_OK, 0, NULL},
};

static const struct row amazon[] = {
    {VNIC_FLUSHED, 1, "flushed during queue pair destroy"},
    {VNIC_LOCAL_OPERATION, 2, "internal QP error"},
    {VNIC_GENERAL, 3, "unsupported operation"},
    {VNIC_GENERAL, 4, "bad address handle"},
    {VNIC_LOCAL_ACCESS, 5, "local: invalid lkey"},
    {VNIC_LOCAL_LENGTH, 6, "local: message too long"},
    {VNIC_REMOTE_ACCESS, 7, "remote: bad address"},
    {VNIC_ABORTED, 8, "remote: connection was reset"},
    {VNIC_REMOTE_INVALID, 9, "remote: bad destination QP number"},
    {VNIC_RNR_EXCEEDED, 10, "remote: receiver not ready, retries exceeded"},
    {VNIC_REMOTE_OPERATION, 11, "remote: receive buffer too short"},
    {VNIC_GENERAL, 12, "remote: unexpected status"},
    {VNIC_RETRY_EXCEEDED, 13, "unresponsive remote"},
    {VNIC_UNKNOWN_PEER, 14, "unknown peer: the target has no address handle of the initiator"},
    {VNIC_UNREACHABLE, 15, "unreachable remote"},
    {VNIC_GENERAL, 18, "feature mismatch"},
    {VNIC_OK, 0, NULL},
};

static const struct row broadcom[] = {
    {VNIC_GENERAL, 0x1, "bad response"},
    {VNIC_LOCAL_LENGTH, 0x2, "local length error"},
    {VNIC_LOCAL_OPERATION, 0x3, "local QP operation error"},
    {VNIC_LOCAL_ACCESS, 0x4, "local protection error"},
    {VNIC_REMOTE_INVALID, 0x6, "remote invalid request"},
    {VNIC_REMOTE_ACCESS, 0x7, "remote access error"},
    {VNIC_REMOTE_OPERATION, 0x8, "remote operation error"},
    {VNIC_RNR_EXCEEDED, 0x9, "RNR NAK retry counter exceeded"},
    {VNIC_RETRY_EXCEEDED, 0xa, "transport retry counter exceeded"},
    {VNIC_FLUSHED, 0xb, "work request flushed"},
    {VNIC_OK, 0, NULL},
};

static const struct row pensando[] = {
    {VNIC_LOCAL_LENGTH, 1, "local length error"},
    {VNIC_LOCAL_OPERATION, 2, "local QP operation error"},
    {VNIC_LOCAL_ACCESS, 3, "local protection error"},
    {VNIC_FLUSHED, 4, "flushed"}, /* chosen: the provider flushes */
    {VNIC_REMOTE_INVALID, 8, "remote invalid request"},
    {VNIC_REMOTE_ACCESS, 9, "remote access error"},
    {VNIC_REMOTE_OPERATION, 10, "remote operation error"},
    {VNIC_RETRY_EXCEEDED, 11, "retries exceeded"},
    {VNIC_RNR_EXCEEDED, 12, "RNR retries exceeded"},
    {VNIC_OK, 0, NULL},
};

static const struct row hpe[] = {
    {VNIC_LOCAL_ACCESS, 2, "local memory not registered"},   /* chosen */
    {VNIC_LOCAL_LENGTH, 3, "message too long"},              /* chosen */
    {VNIC_LOCAL_OPERATION, 4, "bad command"},                /* chosen */
    {VNIC_FLUSHED, 5, "cancelled"},                          /* chosen */
    {VNIC_REMOTE_ACCESS, 6, "no matching memory region"},    /* chosen */
    {VNIC_REMOTE_OPERATION, 7, "target error"},              /* chosen */
    {VNIC_RETRY_EXCEEDED, 8, "no response from the target"}, /* chosen */
    {VNIC_REMOTE_INVALID, 41, "AMO alignment error"},
    {VNIC_OK, 0, NULL},
};

static const struct row nobody[] = {
    {VNIC_LOCAL_LENGTH, 1, "too long"},
    {VNIC_LOCAL_OPERATION, 2, "not understood"},
    {VNIC_LOCAL_ACCESS, 3, "no such local memory"},
    {VNIC_FLUSHED, 4, "flushed"},
    {VNIC_REMOTE_ACCESS, 5, "no such remote memory"},
    {VNIC_REMOTE_OPERATION, 6, "the target failed"},
    {VNIC_OK, 0, NULL},
};

static const struct row *const tables[] = {
    [VNIC_NVIDIA] = nvidia,     [VNIC_AMAZON] = amazon, [VNIC_BROADCOM] = broadcom,
    [VNIC_PENSANDO] = pensando, [VNIC_HPE] = hpe,       [VNIC_NOBODY] = nobody,
};

/* For what a vendor has no code of its own. */
#define GENERAL_CODE 0xff

int32_t vnic_vendor_code(vnic_vendor vendor, vnic_status status) {
    if (status == VNIC_OK) return 0;
    for (const struct row *row = tables[vendor]; row->text; row++)
        if (row->status == status) return row->code;
    return GENERAL_CODE;
}

const char *vnic_vendor_text(vnic_vendor vendor, int32_t code) {
    if (!code) return "no vendor code";
    for (const struct row *row = tables[vendor]; row->text; row++)
        if (row->code == code) return row->text;
    return code == GENERAL_CODE ? "general error" : "a code that the vendor does not document";
}

vnic_status vnic_status_of(vnic_vendor vendor, int32_t code) {
    if (!code) return VNIC_OK;
    for (const struct row *row = tables[vendor]; row->text; row++)
        if (row->code == code) return row->status;
    return VNIC_GENERAL;
}
