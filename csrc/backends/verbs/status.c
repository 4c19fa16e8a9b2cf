/* SPDX-License-Identifier: Apache-2.0
 *
 * status.c: what the statuses of completions mean, whatever the transport.
 */
#include "verbs.h"

#include <stdio.h>

/* One row an ibv_wc_status. */
static const struct row {
    uccl_ep_status status;
    const char *text;
} rows[] = {
    [IBV_WC_SUCCESS] = {UCCL_EP_OK, "success"},
    [IBV_WC_LOC_LEN_ERR] = {UCCL_EP_E_RANGE, "local length error: longer than the port or the queue pair takes"},
    [IBV_WC_LOC_QP_OP_ERR] = {UCCL_EP_E_NIC,
                              "local queue pair operation error: the NIC does not understand the request"},
    [IBV_WC_LOC_EEC_OP_ERR] = {UCCL_EP_E_NIC, "local EE context operation error"},
    [IBV_WC_LOC_PROT_ERR] = {UCCL_EP_E_REGISTRATION, "local protection error: the source is not registered (any more)"},
    [IBV_WC_WR_FLUSH_ERR] = {UCCL_EP_E_NIC, "flushed: the connection was broken, from the other end or by an event"},
    [IBV_WC_MW_BIND_ERR] = {UCCL_EP_E_NIC, "memory window bind error"},
    [IBV_WC_BAD_RESP_ERR] = {UCCL_EP_E_NIC, "bad response: an unexpected packet from the peer"},
    [IBV_WC_LOC_ACCESS_ERR] = {UCCL_EP_E_REGISTRATION, "local access error: a right is missing on the own region"},
    [IBV_WC_REM_INV_REQ_ERR] = {UCCL_EP_E_NIC, "remote invalid request: the peer's NIC refuses this operation"},
    [IBV_WC_REM_ACCESS_ERR] = {UCCL_EP_E_REGISTRATION,
                               "remote access error: the peer's region is gone, shorter, or lacks the right"},
    [IBV_WC_REM_OP_ERR] = {UCCL_EP_E_NIC, "remote operation error: the peer's NIC could not carry it out"},
    [IBV_WC_RETRY_EXC_ERR] =
        {UCCL_EP_E_PEER_LOST,
         "transport retries exceeded: the peer is gone, or packets are lost (PFC, MTU, GID, route)"},
    [IBV_WC_RNR_RETRY_EXC_ERR] = {UCCL_EP_E_NIC, "receiver-not-ready retries exceeded: the peer had no receive posted"},
    [IBV_WC_LOC_RDD_VIOL_ERR] = {UCCL_EP_E_NIC, "local RDD violation"},
    [IBV_WC_REM_INV_RD_REQ_ERR] = {UCCL_EP_E_NIC, "remote invalid RD request"},
    [IBV_WC_REM_ABORT_ERR] = {UCCL_EP_E_NIC, "aborted by the peer"},
    [IBV_WC_INV_EECN_ERR] = {UCCL_EP_E_NIC, "invalid EE context number"},
    [IBV_WC_INV_EEC_STATE_ERR] = {UCCL_EP_E_NIC, "invalid EE context state"},
    [IBV_WC_FATAL_ERR] = {UCCL_EP_E_NIC, "fatal error of the NIC"},
    [IBV_WC_RESP_TIMEOUT_ERR] = {UCCL_EP_E_PEER_LOST, "response timeout"},
    [IBV_WC_GENERAL_ERR] = {UCCL_EP_E_NIC, "general error"},
};
#define ROWS (sizeof rows / sizeof *rows)

/* Both numbers in one: the status of libibverbs, and above it what the vendor adds. */
int32_t verbs_code_of(const struct ibv_wc *wc) {
    return (int32_t)((wc->vendor_err & 0x7fffff) << 8 | ((uint32_t)wc->status & 0xff));
}

int32_t verbs_status_of(uint32_t wc_status) {
    return wc_status < ROWS && rows[wc_status].text ? rows[wc_status].status : UCCL_EP_E_NIC;
}

void verbs_describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)device;
    (void)status;
    if (!bytes) return;
    const uint32_t wc = (uint32_t)vendor_code & 0xff, vendor = (uint32_t)vendor_code >> 8;
    const char *what = wc < ROWS && rows[wc].text ? rows[wc].text : "a status that libibverbs did not have";
    const char *more = vendor ? verbs_this_vendor.describe(vendor) : NULL;
    if (vendor)
        snprintf(text, bytes, "%s (status %u, vendor error %#x%s%s)", what, wc, vendor, more ? ": " : "",
                 more ? more : "");
    else
        snprintf(text, bytes, "%s (status %u)", what, wc);
}
