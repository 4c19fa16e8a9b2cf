/* SPDX-License-Identifier: Apache-2.0
 *
 * control.c: an EFA's part of commands, and its memory.
 *
 * Rings and doorbells are memory of the NIC's, as on hardware: the replies name it by keys, which the library maps.
 * Both have a mapping of their own, so that a program that unmaps its own takes nothing from the NIC.
 */
#include <errno.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "efa.h"

/* -------------------------------------------------------------------------------------------------------- generations
 */

/* efa1 reads, efa2 (p5) and later ones write; efa3 (p5en) places payloads twice and has requests of 128 bytes
 * (profiles.c). The PCI ids are those of rdma-core's match table. */
#define VARIANT_(generation, profile)                                                                                  \
    {                                                                                                                  \
        "efa" #generation, profile, 0x1d0f, 0xefa##generation, 0, "0.0.0.0",                                           \
            "pci:v00001D0Fd0000EFA" #generation "sv00001D0Fsd00000000bc02sc00i00"                                      \
    }
static const struct lab_variant variants[] = {
    VARIANT_(2, "efa"), VARIANT_(1, "efa"), VARIANT_(3, "efa3"), VARIANT_(4, "efa3"), {0}};

uint32_t efa_capabilities(const lab_device *device) {
    const vnic_knobs *k = &device->knobs;
    uint32_t can = EFA_CAN_NOTIFY;
    if (k->has_read) can |= EFA_CAN_READ;
    if (k->rnr == VNIC_RNR_RETRY) can |= EFA_CAN_RETRY_RNR;
    if (k->place_order >= VNIC_PLACE_BLOCKS) can |= EFA_CAN_POLL_128;
    if (device->variant->part_id >= 0xefa2) can |= EFA_CAN_WRITE;
    if (k->unsolicited && can & EFA_CAN_WRITE) can |= EFA_CAN_UNSOLICITED;
    return can;
}

static uint16_t inline_bytes(const lab_device *device) {
    return device->knobs.max_inline > EFA_INLINE_SHORT ? EFA_INLINE_LONG : EFA_INLINE_SHORT;
}

static uint32_t max_rq_wr(const lab_device *device) {
    return device->knobs.max_wr < EFA_MAX_WR / EFA_SGES ? (uint32_t)device->knobs.max_wr : EFA_MAX_WR / EFA_SGES;
}

static int query_device(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call) {
    const vnic_knobs *k = &device->knobs;
    core->base.max_qp_rd_atom = core->base.max_qp_init_rd_atom = core->base.max_res_rd_atom = 0;
    core->base.atomic_cap = 0;
    core->base.max_srq = core->base.max_srq_wr = core->base.max_srq_sge = 0;
    core->base.max_sge = EFA_SGES;
    core->base.max_sge_rd = 1;
    if (core->base.max_cqe > EFA_MAX_CQE) core->base.max_cqe = EFA_MAX_CQE;
    if (core->base.max_qp > EFA_MAX_QPS) core->base.max_qp = EFA_MAX_QPS;
    const struct efa_device_reply reply = {.max_sq_wr = (uint32_t)k->max_wr,
                                           .max_rq_wr = max_rq_wr(device),
                                           .max_sq_sge = EFA_SGES,
                                           .max_rq_sge = EFA_SGES,
                                           .max_rdma_bytes = (uint32_t)k->max_msg,
                                           .capabilities = efa_capabilities(device)};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void query_port(const lab_device *device, struct ib_uverbs_query_port_resp *core) {
    core->max_msg_sz = EFA_MTU;
    core->link_layer = 0; /* unspecified */
    core->port_cap_flags = 0;
    core->gid_tbl_len = device->gids;
}

/* -------------------------------------------------------------------------------------------------------------- memory
 */

static struct efa_memory *take_memory(lab_context *context, uint64_t bytes) {
    struct efa_context *of = context->model_data;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), all = ((size_t)bytes + page - 1) & ~(page - 1);
    struct efa_memory *m = malloc(sizeof *m);
    if (!m) return NULL;
    void *base = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        free(m);
        return NULL;
    }
    *m = (struct efa_memory){.next = of->memory, .key = of->next_key, .base = base, .bytes = all};
    of->next_key += all;
    of->memory = m;
    return m;
}

static void give_memory(lab_context *context, struct efa_memory *m) {
    struct efa_context *of = context->model_data;
    if (!m) return;
    for (struct efa_memory **at = &of->memory; *at; at = &(*at)->next) {
        if (*at != m) continue;
        *at = m->next;
        munmap(m->base, m->bytes);
        free(m);
        return;
    }
}

static int map(lab_context *context, uint64_t offset, size_t bytes, int protection, void **address) {
    const struct efa_context *of = context->model_data;
    for (const struct efa_memory *m = of->memory; m; m = m->next) {
        if (m->key != offset) continue;
        if (!bytes || bytes > m->bytes) return EINVAL;
        /* Of a shared mapping, an old size of zero makes one more of the same pages (mremap(2)). */
        void *other = mremap(m->base, 0, bytes, MREMAP_MAYMOVE);
        if (other == MAP_FAILED) return errno;
        if (mprotect(other, bytes, protection)) {
            const int error = errno;
            munmap(other, bytes);
            return error;
        }
        *address = other;
        return 0;
    }
    return EINVAL;
}

/* ------------------------------------------------------------------------------------------------------------- objects
 */

static int open_context(lab_context *context, struct lab_call *call) {
    struct efa_context *of = calloc(1, sizeof *of);
    if (!of) return ENOMEM;
    of->next_key = 4096; /* key 0 is nobody's */
    context->model_data = of;
    const struct efa_context_reply reply = {.commands = EFA_REPLIES_QUERY_DEVICE | EFA_REPLIES_CREATE_AH,
                                            .sub_cqs = 1,
                                            .inline_bytes = EFA_INLINE_SHORT,
                                            .max_llq_bytes = EFA_LLQ_BYTES,
                                            .max_batch = 16,
                                            .min_sq_wr = 32,
                                            .inline_bytes_ex = inline_bytes(context->device)};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void close_context(lab_context *context) {
    struct efa_context *of = context->model_data;
    while (of->memory) give_memory(context, of->memory);
    free(of);
    context->model_data = NULL;
}

static int alloc_pd(lab_pd *pd, struct lab_call *call) {
    const struct efa_pd_reply reply = {.number = (uint16_t)pd->number};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* One number for a GID and a protection domain, however often it is asked for (Linux, drivers/infiniband/hw/efa:
 * efa_ah_cache.h has that key; libfabric pull request 11013). */
static int create_ah(lab_ah *ah, struct lab_call *call) {
    lab_ah_join(ah);
    if (ah->number >= EFA_NO_AH) return ENOMEM;
    const struct efa_ah_reply reply = {.number = (uint16_t)ah->number};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static uint32_t power_of_two(uint32_t n) {
    uint32_t p = 1;
    while (p < n) p <<= 1;
    return p;
}

static void destroy_cq(lab_cq *cq) {
    struct efa_cq *q = cq->model_data;
    if (!q) return;
    give_memory(cq->context, q->ring);
    give_memory(cq->context, q->doorbell);
    free(q);
    cq->model_data = NULL;
}

static int create_cq(lab_cq *cq, struct lab_call *call) {
    struct efa_cq_request request;
    lab_request(call, &request, sizeof request);
    if (request.comp_mask) return lab_unsupported("EFA: comp_mask 0x%x of a completion queue", request.comp_mask);
    if (request.flags & ~(EFA_CQ_WITH_CHANNEL | EFA_CQ_WITH_SGID))
        return lab_unsupported("EFA: flags 0x%x of a completion queue", request.flags);
    if (request.flags & EFA_CQ_WITH_SGID) return lab_unsupported("EFA: completions with the sender's GID");
    if (request.entry_bytes != 16 && request.entry_bytes != 32)
        return lab_unsupported("EFA: completions of %u bytes", request.entry_bytes);
    if (request.sub_cqs != 1 || cq->entries > EFA_MAX_CQE) return EINVAL;
    cq->entries = power_of_two(cq->entries);
    struct efa_cq *q = calloc(1, sizeof *q);
    if (!q) return ENOMEM;
    cq->model_data = q;
    q->entry_bytes = request.entry_bytes;
    q->ring = take_memory(cq->context, (uint64_t)cq->entries * q->entry_bytes);
    q->doorbell = take_memory(cq->context, sizeof(uint32_t));
    if (!q->ring || !q->doorbell) {
        destroy_cq(cq);
        return ENOMEM;
    }
    const struct efa_cq_reply reply = {.comp_mask = EFA_CQ_HAS_DOORBELL,
                                       .ring_key = q->ring->key,
                                       .ring_bytes = q->ring->bytes,
                                       .index = (uint16_t)cq->number,
                                       .doorbell_key = q->doorbell->key};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void destroy_qp(lab_qp *qp) {
    struct efa_qp *q = qp->model_data;
    if (!q) return;
    give_memory(qp->pd->context, q->requests);
    give_memory(qp->pd->context, q->sq_doorbell);
    give_memory(qp->pd->context, q->receives);
    give_memory(qp->pd->context, q->rq_doorbell);
    free(q);
    qp->model_data = NULL;
}

/* The request says how many bytes the rings have, and the core structure how many entries. */
static int shape(const lab_qp *qp, const struct efa_qp_request *request, struct efa_qp *q) {
    const lab_device *device = qp->pd->context->device;
    if (qp->max_send_sge > EFA_SGES || qp->max_recv_sge > EFA_SGES || qp->max_inline > inline_bytes(device))
        return EINVAL;
    if (request->sq_bytes > EFA_LLQ_BYTES || qp->max_recv_wr > max_rq_wr(device)) return EINVAL;
    if (qp->max_send_wr) {
        q->sq_entries = qp->max_send_wr;
        q->request_bytes = request->sq_bytes / q->sq_entries;
        if (q->sq_entries & (q->sq_entries - 1) || q->request_bytes * q->sq_entries != request->sq_bytes) return EINVAL;
        if (q->request_bytes != EFA_REQUEST_SHORT &&
            (q->request_bytes != EFA_REQUEST_LONG || inline_bytes(device) < EFA_INLINE_LONG))
            return EINVAL;
    }
    q->rq_entries = request->rq_bytes / (uint32_t)sizeof(struct efa_receive);
    if (q->rq_entries & (q->rq_entries - 1) || q->rq_entries < qp->max_recv_wr || q->rq_entries > EFA_MAX_WR)
        return EINVAL;
    return 0;
}

static int create_qp(lab_qp *qp, struct lab_call *call) {
    lab_context *context = qp->pd->context;
    struct efa_qp_request request;
    lab_request(call, &request, sizeof request);
    if (qp->type != LAB_SRD && qp->type != LAB_UD) return EOPNOTSUPP;
    if (qp->type == LAB_SRD && request.driver_type != EFA_TYPE_SRD) return EOPNOTSUPP;
    if (qp->srq) return EOPNOTSUPP;
    if (request.comp_mask) return lab_unsupported("EFA: comp_mask 0x%x of a queue pair", request.comp_mask);
    if (request.flags & ~EFA_QP_UNSOLICITED) return lab_unsupported("EFA: flags 0x%x of a queue pair", request.flags);
    if (request.flags & EFA_QP_UNSOLICITED && !(efa_capabilities(context->device) & EFA_CAN_UNSOLICITED))
        return EOPNOTSUPP;
    struct efa_qp *q = calloc(1, sizeof *q);
    if (!q) return ENOMEM;
    const int error = shape(qp, &request, q);
    if (error) {
        free(q);
        return error;
    }
    qp->model_data = q;
    qp->all_signalled = true;
    qp->unsolicited = request.flags & EFA_QP_UNSOLICITED;
    struct efa_qp_reply reply = {0};
    if (q->sq_entries) {
        q->requests = take_memory(context, request.sq_bytes);
        q->sq_doorbell = take_memory(context, sizeof(uint32_t));
        if (!q->requests || !q->sq_doorbell) goto no_memory;
        reply.llq_key = q->requests->key;
        reply.sq_doorbell_key = q->sq_doorbell->key;
    }
    if (q->rq_entries) {
        q->receives = take_memory(context, request.rq_bytes);
        q->rq_doorbell = take_memory(context, sizeof(uint32_t));
        if (!q->receives || !q->rq_doorbell) goto no_memory;
        reply.rq_key = q->receives->key;
        reply.rq_bytes = q->receives->bytes;
        reply.rq_doorbell_key = q->rq_doorbell->key;
    }
    lab_reply(call, &reply, sizeof reply);
    return 0;
no_memory:
    destroy_qp(qp);
    return ENOMEM;
}

/* Back in RESET a queue begins anew, as the library's counters do. */
static int modify_qp(lab_qp *qp, enum lab_qp_state from, struct lab_call *call) {
    (void)from, (void)call;
    struct efa_qp *q = qp->model_data;
    if (qp->state != LAB_RESET) return 0;
    q->sq_index = q->rq_index = 0;
    if (q->sq_doorbell) __atomic_store_n((uint32_t *)q->sq_doorbell->base, 0, __ATOMIC_RELAXED);
    if (q->rq_doorbell) __atomic_store_n((uint32_t *)q->rq_doorbell->base, 0, __ATOMIC_RELAXED);
    return 0;
}

const struct lab_model lab_efa = {.name = "efa",
                                  .device_name = "efa_",
                                  .driver_id = RDMA_DRIVER_EFA,
                                  .uverbs_abi = 1,
                                  .qpn_bits = 16,
                                  .variants = variants,
                                  .query_device = query_device,
                                  .query_port = query_port,
                                  .open = open_context,
                                  .close = close_context,
                                  .alloc_pd = alloc_pd,
                                  .create_cq = create_cq,
                                  .destroy_cq = destroy_cq,
                                  .create_qp = create_qp,
                                  .modify_qp = modify_qp,
                                  .destroy_qp = destroy_qp,
                                  .create_ah = create_ah,
                                  .map = map,
                                  .fetch = efa_fetch,
                                  .fetch_receive = efa_fetch_receive,
                                  .cq_used = efa_cq_used,
                                  .complete = efa_complete,
                                  .look = efa_look,
                                  .ring = efa_ring};
