/* SPDX-License-Identifier: Apache-2.0
 *
 * operation.c: why an operation is not carried out.
 */
#include "operation.h"

#include <inttypes.h>

__attribute__((cold)) uccl_ep_status verbs_refusal(const uccl_ep_device *d, const verbs_nic *nic, uint32_t peer,
                                                   const uccl_ep_operation *o, const verbs_remote *remote) {
    const uccl_ep_host *host = d->host;
    const uint64_t length = verbs_length_of(o);
    if (o->kind < UCCL_EP_OPERATION_WRITE || o->kind > UCCL_EP_OPERATION_READ || o->flags & ~VERBS_KNOWN_FLAGS)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "an operation of kind %u with flags %#x: not promised", o->kind,
                          o->flags);
    if (o->kind == UCCL_EP_OPERATION_ADD64 && !(d->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64))
        return verbs_fail(host, UCCL_EP_E_UNSUPPORTED, 0, "an add, and the NIC has no atomics");
    if (o->kind == UCCL_EP_OPERATION_READ && !nic->found.limits.initiator_depth)
        return verbs_fail(host, UCCL_EP_E_UNSUPPORTED, 0, "a read, and the NIC has none (max_qp_init_rd_atom 0)");
    if (!remote || !remote->bytes)
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "region %u of rank %u was not imported", o->remote_region, peer);
    if (!verbs_inside(remote->bytes, o->remote_offset, length))
        return verbs_fail(host, UCCL_EP_E_RANGE, 0,
                          "%" PRIu64 " bytes at offset %" PRIu64 " of a region of %" PRIu64 " bytes of rank %u", length,
                          o->remote_offset, remote->bytes, peer);
    if (o->kind == UCCL_EP_OPERATION_ADD64)
        return verbs_fail(host, UCCL_EP_E_ALIGNMENT, 0, "an add at offset %" PRIu64 ": words are aligned to 8 bytes",
                          o->remote_offset);
    if (o->kind == UCCL_EP_OPERATION_WRITE_IMM && o->value >> d->caps.immediate_bits)
        return verbs_fail(host, UCCL_EP_E_RANGE, 0, "an immediate of more than %u bits", d->caps.immediate_bits);
    if (length > d->caps.max_message_bytes)
        return verbs_fail(host, UCCL_EP_E_RANGE, 0, "an operation of %" PRIu64 " bytes: at most %" PRIu64, length,
                          d->caps.max_message_bytes);
    return verbs_fail(host, UCCL_EP_E_RANGE, 0, "%" PRIu64 " bytes at offset %" PRIu64 " of the own region %u", length,
                      o->local_offset, o->local_region);
}
