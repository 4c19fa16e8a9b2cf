/* SPDX-License-Identifier: Apache-2.0
 *
 * bnxt.c: what a Thor answers to commands, and what it has.
 *
 * Rings are the program's memory; how many entries they have follows from what the core structure asks for, by the same
 * rule on both sides. Queues are told from each other in doorbells by numbers of the replies: a queue pair's is that of
 * the wire, the others' are their handles.
 */
#include <errno.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bnxt.h"

/* nics.md A3: BCM57608 and BCM57508. The first is in no library's table of PCI ids: it is found by its driver. */
static const struct lab_variant variants[] = {
    {"thor2", "thor2", 0x14e4, 0x1760, 0, "235.2.86.0", "pci:v000014E4d00001760sv000014E4sd00000000bc02sc00i00"},
    {"thor", "thor2", 0x14e4, 0x1750, 0, "235.2.86.0", "pci:v000014E4d00001750sv000014E4sd00000000bc02sc00i00"},
    {0}};

enum { THOR2 = 0x1760, MAX_NUMBER = 0xfffff, RD_ATOMIC = 126 };

/* Four bytes, the first one lowest. */
static uint64_t firmware_number(const char *text) {
    unsigned part[4] = {0};
    sscanf(text, "%u.%u.%u.%u", &part[0], &part[1], &part[2], &part[3]);
    return (part[0] & 0xff) | (part[1] & 0xff) << 8 | (part[2] & 0xff) << 16 | (uint64_t)(part[3] & 0xff) << 24;
}

/* Entries have room for six pieces, and a library whose NIC says less cannot make a ring of receives: a lower limit
 * (knob max_sge) shows where a queue pair is made. */
static int query_device(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call) {
    (void)call;
    core->base.fw_ver = firmware_number(device->variant->firmware);
    if (core->base.max_qp > 1u << lab_qp_bits(device)) core->base.max_qp = 1u << lab_qp_bits(device);
    core->base.max_sge = core->base.max_sge_rd = BNXT_SGES;
    core->base.max_qp_rd_atom = core->base.max_qp_init_rd_atom = RD_ATOMIC;
    core->base.max_res_rd_atom = 0;
    if (core->base.max_srq) core->base.max_srq_sge = BNXT_SGES;
    return 0;
}

static int open_context(lab_context *context, struct lab_call *call) {
    lab_device *device = context->device;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct bnxt_context *of = calloc(1, sizeof *of);
    if (!of) return ENOMEM;
    of->bytes = page;
    of->shared = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (of->shared == MAP_FAILED) {
        free(of);
        return ENOMEM;
    }
    /* Its library flushes by itself, whatever the profile of somebody else's NIC says. */
    device->knobs.flush_by = VNIC_FLUSH_PROVIDER;
    context->model_data = of;
    const bool thor2 = device->variant->part_id == THOR2;
    const struct bnxt_context_reply reply = {.device_id = device->variant->part_id,
                                             .max_qp = 1u << lab_qp_bits(device),
                                             .page_bytes = (uint32_t)page,
                                             .completion_bytes = sizeof(struct bnxt_completion),
                                             .max_cqe = (uint32_t)device->knobs.max_cqe,
                                             .comp_mask =
                                                 BNXT_HAS_CHIP | BNXT_HAS_MODE | (thor2 ? BNXT_HAS_MSN_TABLE : 0),
                                             .chip = {device->variant->part_id}};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void close_context(lab_context *context) {
    struct bnxt_context *of = context->model_data;
    munmap(of->shared, of->bytes);
    free(of);
    context->model_data = NULL;
}

static int alloc_pd(lab_pd *pd, struct lab_call *call) {
    const struct bnxt_pd_reply reply = {.number = pd->number, .page = 1, .doorbell = BNXT_DOORBELL_PAGE};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* The reply has no part for it: the library reads the number from the shared page, with a lock of its own around both.
 */
static int create_ah(lab_ah *ah, struct lab_call *call) {
    const struct bnxt_context *of = ah->pd->context->model_data;
    (void)call;
    memcpy(of->shared + BNXT_AH_AT, &ah->number, sizeof ah->number);
    return 0;
}

static int map(lab_context *context, uint64_t offset, size_t bytes, int protection, void **address) {
    const struct bnxt_context *of = context->model_data;
    if (!of || bytes != of->bytes) return EINVAL;
    if (offset == BNXT_DOORBELL_PAGE) return lab_trap(context, 0, bytes, address);
    if (offset != BNXT_SHARED_PAGE) return EINVAL;
    /* Of a shared mapping, an old size of zero makes one more of the same pages (mremap(2)). */
    *address = mremap(of->shared, 0, bytes, MREMAP_MAYMOVE);
    if (*address == MAP_FAILED) return errno;
    if (mprotect(*address, bytes, protection) == 0) return 0;
    const int error = errno;
    munmap(*address, bytes);
    return error;
}

/* ---------------------------------------------------------------------------------------------------------- queues */

static uint32_t power_of_two(uint32_t at_least) {
    uint32_t n = 1;
    while (n < at_least) n <<= 1;
    return n;
}

static int ring_check(uint64_t address, uint64_t bytes) {
    return address % BNXT_SLOT ? EFAULT : lab_memory_check(address, bytes, true);
}

static const uint8_t *pointer(uint64_t address) {
    return (const uint8_t *)(uintptr_t)address;
}

/* The library tells what it has taken when half of the ring is: the queue is full when all of it is, not what the
 * program has asked for. */
static int create_cq(lab_cq *cq, struct lab_call *call) {
    const uint32_t max = (uint32_t)cq->context->device->knobs.max_cqe + 1;
    struct bnxt_cq_request request;
    lab_request(call, &request, sizeof request);
    const struct bnxt_cq_reply reply = {.number = cq->handle, .phase = 1};
    const uint32_t wanted = power_of_two(cq->entries + 1), n = wanted < max ? wanted : max;
    if (request.comp_mask)
        return lab_unsupported("comp_mask 0x%llx of a completion queue of a Thor",
                               (unsigned long long)request.comp_mask);
    if (ring_check(request.ring, (uint64_t)n * sizeof(struct bnxt_completion))) return EFAULT;
    if (cq->handle > MAX_NUMBER) return ENOMEM;
    struct bnxt_cq *of = malloc(sizeof *of);
    if (!of) return ENOMEM;
    *of = (struct bnxt_cq){.ring = (uint8_t *)(uintptr_t)request.ring, .n = n, .phase = true};
    cq->entries = n;
    cq->model_data = of;
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void destroy_cq(lab_cq *cq) {
    free(cq->model_data);
    cq->model_data = NULL;
}

static int create_srq(lab_srq *srq, struct lab_call *call) {
    struct bnxt_srq_request request;
    lab_request(call, &request, sizeof request);
    const struct bnxt_srq_reply reply = {.number = srq->handle};
    const uint32_t n = power_of_two(srq->max_wr + 1);
    if (ring_check(request.ring, (uint64_t)n * BNXT_ENTRY)) return EFAULT;
    if (srq->handle > MAX_NUMBER || srq->max_sge > BNXT_SGES) return EINVAL;
    struct bnxt_srq *of = malloc(sizeof *of);
    if (!of) return ENOMEM;
    *of = (struct bnxt_srq){.ring = {.entries = pointer(request.ring), .n = n}};
    srq->model_data = of;
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void destroy_srq(lab_srq *srq) {
    free(srq->model_data);
    srq->model_data = NULL;
}

static int create_qp(lab_qp *qp, struct lab_call *call) {
    const vnic_knobs *knobs = &qp->pd->context->device->knobs;
    struct bnxt_qp_request request;
    lab_request(call, &request, sizeof request);
    const struct bnxt_qp_reply reply = {.number = qp->number};
    if (qp->type != LAB_RC && qp->type != LAB_UD) return EOPNOTSUPP;
    if (request.comp_mask || request.slots)
        return lab_unsupported("a queue pair of a Thor with entries of any size (comp_mask 0x%llx, %u slots)",
                               (unsigned long long)request.comp_mask, request.slots);
    if (qp->max_inline > BNXT_INLINE || qp->max_inline > knobs->max_inline) return EINVAL;
    if (qp->max_send_sge > BNXT_SGES || qp->max_recv_sge > BNXT_SGES) return EINVAL;
    const uint32_t sends = power_of_two(qp->max_send_wr + 1 + BNXT_RESERVED);
    const uint32_t receives = qp->max_recv_wr ? power_of_two(qp->max_recv_wr + 1) : 0;
    if (ring_check(request.sends, (uint64_t)sends * BNXT_ENTRY)) return EFAULT;
    if (receives && ring_check(request.receives, (uint64_t)receives * BNXT_ENTRY)) return EFAULT;
    struct bnxt_qp *of = malloc(sizeof *of);
    if (!of) return ENOMEM;
    *of = (struct bnxt_qp){.sends = {.entries = pointer(request.sends), .n = sends, .over = sends},
                           .receives = {.entries = pointer(request.receives), .n = receives},
                           .handle = request.handle};
    qp->model_data = of;
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* Both sides begin again at zero. */
static int modify_qp(lab_qp *qp, enum lab_qp_state from, struct lab_call *call) {
    struct bnxt_qp *of = qp->model_data;
    (void)from, (void)call;
    if (qp->state != LAB_RESET) return 0;
    of->sends.posted = of->sends.taken = of->receives.posted = of->receives.taken = 0;
    of->sends.over = of->sends.n;
    of->done = of->told = 0;
    return 0;
}

static void destroy_qp(lab_qp *qp) {
    free(qp->model_data);
    qp->model_data = NULL;
}

/* Pages of toggles, pacing, pushed entries and doorbell regions are objects of the vendor's: none is offered. */
static int method(lab_context *context, uint16_t object, uint16_t number, void *attributes) {
    (void)context, (void)attributes;
    return lab_unsupported("method 0x%x of object 0x%x of a Thor", number, object);
}

const struct lab_model lab_bnxt = {.name = "thor",
                                   .device_name = "bnxt_re",
                                   .driver_id = RDMA_DRIVER_BNXT_RE,
                                   .uverbs_abi = 1,
                                   .qpn_bits = 20,
                                   .variants = variants,
                                   .query_device = query_device,
                                   .open = open_context,
                                   .close = close_context,
                                   .alloc_pd = alloc_pd,
                                   .create_cq = create_cq,
                                   .destroy_cq = destroy_cq,
                                   .create_srq = create_srq,
                                   .destroy_srq = destroy_srq,
                                   .create_qp = create_qp,
                                   .modify_qp = modify_qp,
                                   .destroy_qp = destroy_qp,
                                   .create_ah = create_ah,
                                   .map = map,
                                   .method = method,
                                   .fetch = bnxt_fetch,
                                   .fetch_receive = bnxt_fetch_receive,
                                   .fetch_shared_receive = bnxt_fetch_shared_receive,
                                   .shared_receives = bnxt_shared_receives,
                                   .cq_used = bnxt_cq_used,
                                   .complete = bnxt_complete,
                                   .tells_rest = true,
                                   .ring = bnxt_ring,
                                   .store = bnxt_store};
