/* SPDX-License-Identifier: Apache-2.0
 *
 * operation.h: which operations are carried out, whatever the transport.
 */
#ifndef UCCL_EP_VERBS_OPERATION_H
#define UCCL_EP_VERBS_OPERATION_H

#include "verbs.h"

#define VERBS_KNOWN_FLAGS UCCL_EP_OPERATION_SIGNALLED

static inline bool verbs_inside(uint64_t bytes, uint64_t offset, uint64_t length) {
    return offset <= bytes && length <= bytes - offset;
}

static inline uint64_t verbs_length_of(const uccl_ep_operation *o) {
    return o->kind == UCCL_EP_OPERATION_ADD64 ? sizeof(uint64_t) : o->length;
}

static inline const verbs_remote *verbs_remote_of(const uccl_ep_device *d, uint32_t peer, const uccl_ep_operation *o) {
    return o->remote_region < UCCL_EP_REGIONS && d->remote[o->remote_region] ? &d->remote[o->remote_region][peer]
                                                                             : NULL;
}

/* Can it be carried out? verbs_refusal() says why not. */
static inline bool verbs_valid(const uccl_ep_device *d, const verbs_nic *nic, const uccl_ep_operation *o,
                               const verbs_remote *remote) {
    const uint64_t length = verbs_length_of(o);
    if (!remote || !verbs_inside(remote->bytes, o->remote_offset, length)) return false;
    if (o->flags & ~VERBS_KNOWN_FLAGS) return false;
    if (o->kind == UCCL_EP_OPERATION_ADD64)
        return o->remote_offset % sizeof(uint64_t) == 0 && d->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64;
    if (o->kind < UCCL_EP_OPERATION_WRITE || o->kind > UCCL_EP_OPERATION_READ) return false;
    if (o->kind == UCCL_EP_OPERATION_WRITE_IMM && o->value >> d->caps.immediate_bits) return false;
    if (o->kind == UCCL_EP_OPERATION_READ && !nic->found.limits.initiator_depth) return false;
    return o->local_region < UCCL_EP_REGIONS && length <= d->caps.max_message_bytes &&
           verbs_inside(d->region[o->local_region].bytes, o->local_offset, length);
}

/* The error for one that cannot. */
uccl_ep_status verbs_refusal(const uccl_ep_device *device, const verbs_nic *nic, uint32_t peer,
                             const uccl_ep_operation *operation, const verbs_remote *remote);

#endif
