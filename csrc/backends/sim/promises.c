/* SPDX-License-Identifier: Apache-2.0
 *
 * promises.c: from knobs to promises: the only place where a virtual NIC promises anything.
 *
 * A promise follows from the freedoms that the knobs take away, so no knob can be turned and the promise forgotten.
 */
#include <string.h>

#include "world.h"

/* A rule: the promise is given where the condition holds. */
static void promise(uccl_ep_caps *caps, uint64_t flag, bool condition) {
    if (condition) caps->flags |= flag;
}

void promises_of(const vnic_knobs *k, uccl_ep_caps *caps) {
    memset(caps, 0, sizeof *caps);
    caps->size = sizeof *caps;
    caps->completion_level = k->completion_level == VNIC_LEVEL_TX ? UCCL_EP_COMPLETION_TRANSMITTED
                             : k->completion_level == VNIC_LEVEL_ACK && k->visible_delay ? UCCL_EP_COMPLETION_DELIVERED
                                                                                         : UCCL_EP_COMPLETION_VISIBLE;
    const bool in_order = k->completion_order == VNIC_COMPLETES_IN_ORDER;
    promise(caps, UCCL_EP_CAP_ORDER_WRITE_WRITE, vnic_write_write(k));
    promise(caps, UCCL_EP_CAP_ORDER_WRITE_ATOMIC, vnic_write_atomic(k));
    promise(caps, UCCL_EP_CAP_ORDER_WRITE_IMM, k->imm_bits && vnic_write_imm(k));
    promise(caps, UCCL_EP_CAP_ATOMIC_ADD64, k->atomics != VNIC_ATOMICS_NONE);
    promise(caps, UCCL_EP_CAP_ATOMIC_COHERENT, k->atomics == VNIC_ATOMICS_COHERENT && k->nics <= 1);
    promise(caps, UCCL_EP_CAP_COMPLETES_IN_ORDER, in_order);
    /* backend.h: the next completion covers it, which needs order. */
    promise(caps, UCCL_EP_CAP_UNSIGNALLED, k->unsignalled_ok && in_order);
    promise(caps, UCCL_EP_CAP_NO_DUPLICATES, !k->dup_write);
    promise(caps, UCCL_EP_CAP_ERROR_STOPS, k->error_scope == VNIC_ERROR_QP);
    promise(caps, UCCL_EP_CAP_IMM_NEEDS_RECEIVE, vnic_imm_consumes(k));
    promise(caps, UCCL_EP_CAP_HOST_MEMORY, true);
    promise(caps, UCCL_EP_CAP_OWN_MEMORY, k->own_memory);
    promise(caps, UCCL_EP_CAP_SIGNALS_STRICT, k->signals_strict && !k->relaxed);
    promise(caps, UCCL_EP_CAP_FENCE_DELIVERED, k->fence_kind == VNIC_FENCE_DELIVERED);
    promise(caps, UCCL_EP_CAP_READ_FLUSHES, k->read_flushes);
    promise(caps, UCCL_EP_CAP_VISIBLE_ON_REQUEST,
            k->visible_on_request || caps->completion_level == UCCL_EP_COMPLETION_VISIBLE);
    promise(caps, UCCL_EP_CAP_IMM_VISIBLE, k->imm_bits && (k->imm_visible || vnic_write_imm(k) || !k->visible_delay));
    promise(caps, UCCL_EP_CAP_FLUSH_LOCAL, k->flush_local);
    caps->immediate_bits = (uint32_t)k->imm_bits;
    caps->max_message_bytes = k->max_msg > 1ull << 31 ? 1ull << 31 : k->max_msg;
    caps->max_inflight_bytes = k->retry_exc_inflight_bytes;
    /* One message must never be more than may be in flight, and several should fit. */
    if (k->retry_exc_inflight_bytes && caps->max_message_bytes > k->retry_exc_inflight_bytes / 4)
        caps->max_message_bytes = k->retry_exc_inflight_bytes / 4;
    caps->max_inflight_peer = (uint32_t)k->max_wr;
    /* Half of a completion queue is for operations, the other for immediates and what comes twice. */
    const uint64_t half = k->max_cqe > 1 ? k->max_cqe / 2 : 1, other = k->max_cqe - k->max_cqe / 2;
    caps->max_inflight_endpoint = (uint32_t)(k->per_peer_qp || half < k->max_wr ? half : k->max_wr);
    caps->max_receives = !k->imm_bits ? 0 : other > SPARE_ENTRIES ? (uint32_t)(other - SPARE_ENTRIES) : 1;
    caps->max_batch = (uint32_t)k->max_batch;
    const uint64_t share = k->ranks_per_nic > 1 ? k->ranks_per_nic : 1;
    caps->max_endpoints = k->per_peer_qp || k->broken == VNIC_BROKEN_QUEUES ? 0 : (uint32_t)(k->max_qp / share);
    caps->max_inline_bytes = (uint32_t)k->max_inline;
    /* Adds beyond it that wait are no limit to be minded; those of one queue are the initiator's own. */
    caps->responder_atomics =
        k->atomics && k->responder_scope == VNIC_SCOPE_DEVICE ? (uint32_t)k->responder_atomics : 0;
    caps->adding_nics = k->nics > 1 ? (uint32_t)k->nics : 0;
}
