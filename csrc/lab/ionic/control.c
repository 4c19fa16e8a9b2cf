/* SPDX-License-Identifier: Apache-2.0
 *
 * control.c: what a Pollara answers to commands, and what it has.
 *
 * All rings are the program's memory. Entries in the controller's memory (CMB) with express doorbells are not granted:
 * the library then goes on without, unless the program requires them. One pipeline of the hardware's two is there,
 * which the library takes as it is told.
 */
#include <errno.h>
#include <rdma/ib_user_verbs.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ionic.h"

_Static_assert(sizeof(struct ionic_context_reply) == 40 && sizeof(struct ionic_ring) == 16 &&
                   sizeof(struct ionic_cq_request) == 40 && sizeof(struct ionic_cq_reply) == 16 &&
                   sizeof(struct ionic_qp_request) == 40 && sizeof(struct ionic_qp_reply) == 24,
               "layouts of ionic-abi.h");

#define DRIVER_ID 21u /* RDMA_DRIVER_IONIC, which headers before Linux 6.18 lack */
#define MAX_PD 1024u  /* kernel ionic_rdma */
#define ATOMICS_AT_A_TIME 16u

/* Firmware has work queue entries of version 1 or 2; libionic takes either. */
enum { VERSION_1, VERSION_2 };
#define MODALIAS "pci:v00001DD8d00001002sv00001DD8sd00000000bc02sc00i00"
static const struct lab_variant variants[] = {
    [VERSION_1] = {"pollara", "pollara", 0x1dd8, 0x1002, 0, "1.117.5", MODALIAS},
    [VERSION_2] = {"pollara-v2", "pollara", 0x1dd8, 0x1002, 0, "1.117.5", MODALIAS},
    {0}};

static bool is_second(const lab_device *device) {
    return device->variant == &variants[VERSION_2];
}

static int query_device(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call) {
    (void)device, (void)call;
    core->base.max_pd = MAX_PD;
    core->base.max_qp_rd_atom = core->base.max_qp_init_rd_atom = core->base.max_res_rd_atom = ATOMICS_AT_A_TIME;
    if (core->base.max_cqe > IONIC_MAX_CQE) core->base.max_cqe = IONIC_MAX_CQE;
    return 0;
}

static uint32_t page_shift(void) {
    return (uint32_t)__builtin_ctzl((unsigned long)sysconf(_SC_PAGESIZE));
}

static int open_context(lab_context *context, struct lab_call *call) {
    const struct ionic_context_reply reply = {.page_shift = page_shift(),
                                              .doorbell_offset = IONIC_DOORBELL_OFFSET,
                                              .version = is_second(context->device) ? 2 : 1,
                                              .operations = 11, /* up to BIND_MW: less is refused */
                                              .send_type = IONIC_TYPE_SEND,
                                              .receive_type = IONIC_TYPE_RECEIVE,
                                              .completion_type = IONIC_TYPE_COMPLETION,
                                              .admin_type = 1,
                                              .max_stride_shift = IONIC_MAX_STRIDE_SHIFT,
                                              .max_spec = IONIC_MAX_SPEC,
                                              .pipelines = 1};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static int map(lab_context *context, uint64_t offset, size_t bytes, int protection, void **address) {
    (void)protection;
    if (offset != IONIC_DOORBELL_OFFSET || bytes != (size_t)1 << page_shift()) return EINVAL;
    return lab_trap(context, 0, bytes, address);
}

static int create_ah(lab_ah *ah, struct lab_call *call) {
    const struct ionic_ah_reply reply = {.number = ah->number};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------- queues
 */

static int ring_check(const struct ionic_ring *r, uint32_t least_shift, uint32_t most_shift) {
    if (r->depth_shift > 16 || r->stride_shift < least_shift || r->stride_shift > most_shift) return EINVAL;
    if (r->mask != (1u << r->depth_shift) - 1 || r->bytes != 1u << (r->depth_shift + r->stride_shift)) return EINVAL;
    if (r->address & (((uint64_t)1 << page_shift()) - 1)) return EINVAL;
    return lab_memory_check(r->address, r->bytes, true);
}

/* Doorbells name a queue by its handle: there is a page for each context, and so are handles. */
static int create_cq(lab_cq *lab, struct lab_call *call) {
    struct ionic_cq_request request;
    lab_request(call, &request, sizeof request);
    if (request.pipeline_mask != 1) return EINVAL;
    const int error = ring_check(&request.ring[0], IONIC_COMPLETION_SHIFT, IONIC_COMPLETION_SHIFT);
    if (error) return error;
    if (lab->entries + 2 > request.ring[0].mask) return EINVAL;
    struct ionic_cq *cq = malloc(sizeof *cq);
    if (!cq) return ENOMEM;
    *cq = (struct ionic_cq){.entries = (uint8_t *)(uintptr_t)request.ring[0].address, .mask = request.ring[0].mask};
    lab->model_data = cq;
    const struct ionic_cq_reply reply = {.number = {lab->handle}, .pipeline_mask = 1};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* A command meets what was rung before it: stores that the NIC's thread has not seen are not for what comes after. */
static void take_stores(void) {
    while (lab_trapped_next()) continue;
}

static void destroy_cq(lab_cq *cq) {
    take_stores();
    free(cq->model_data);
}

static struct ionic_queue queue_of(const struct ionic_ring *r) {
    return (struct ionic_queue){.entries = (const uint8_t *)(uintptr_t)r->address,
                                .mask = r->mask,
                                .shift = r->stride_shift,
                                .over = r->mask + 1u};
}

static int create_qp(lab_qp *lab, struct lab_call *call) {
    struct ionic_qp_request request;
    lab_request(call, &request, sizeof request);
    if ((lab->type != LAB_RC && lab->type != LAB_UD) || lab->srq) return EOPNOTSUPP;
    if ((request.send_cmb | request.receive_cmb) & IONIC_CMB_REQUIRE)
        return lab_unsupported("queues in the memory of a Pollara (ionic_dv_pd_set_sqcmb, _rqcmb with require)");
    if (!(request.pipeline_mask & 1)) return EINVAL;
    int error = ring_check(&request.send, IONIC_STRIDE_SHIFT, IONIC_MAX_STRIDE_SHIFT);
    if (!error) error = ring_check(&request.receive, IONIC_STRIDE_SHIFT, IONIC_MAX_STRIDE_SHIFT);
    if (error) return error;
    if (lab->max_send_wr > request.send.mask || lab->max_recv_wr > request.receive.mask) return EINVAL;
    struct ionic_qp *qp = malloc(sizeof *qp);
    if (!qp) return ENOMEM;
    *qp = (struct ionic_qp){.send = queue_of(&request.send),
                            .receive = queue_of(&request.receive),
                            .second = is_second(lab->pd->context->device)};
    lab->model_data = qp;
    const struct ionic_qp_reply reply = {.number = lab->number};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* ----------------------------------------------------------------------------------------- resources of the responder
 */

/* Held by queue pairs of this process; the lab's processes do not share them, though they name the same NIC. A child
 * after fork() has none. */
static uint32_t *responders_of(const lab_device *device) {
    static uint32_t held[LAB_MAX_DEVICES];
    static pid_t process;
    if (process != getpid()) memset(held, 0, sizeof held);
    process = getpid();
    return &held[device->index];
}

static void give_responders(lab_qp *lab) {
    struct ionic_qp *qp = lab->model_data;
    if (qp->responders) *responders_of(lab->pd->context->device) -= qp->responders;
    qp->responders = 0;
}

/* mooncake PR 3977: 16 for the whole device, and RTR fails for whoever comes later. */
static int take_responders(lab_qp *lab) {
    struct ionic_qp *qp = lab->model_data;
    const lab_device *device = lab->pd->context->device;
    const uint64_t all = device->knobs.responder_atomics;
    uint32_t *held = responders_of(device);
    if (device->knobs.responder_scope != VNIC_SCOPE_DEVICE || !all) return 0;
    if (*held + lab->max_dest_rd_atomic > all) {
        lab_say("%s: %u of %llu responder resources of the whole device are in use, %u more are asked for: queue pairs "
                "have to ask for fewer (max_dest_rd_atomic)",
                device->name, *held, (unsigned long long)all, lab->max_dest_rd_atomic);
        return EINVAL;
    }
    qp->responders = lab->max_dest_rd_atomic;
    *held += qp->responders;
    return 0;
}

/* In RESET both sides begin again at zero. Whether laps begin with the colour of before is the library's matter. */
static int modify_qp(lab_qp *lab, enum lab_qp_state from, struct lab_call *call) {
    struct ionic_qp *qp = lab->model_data;
    (void)call;
    take_stores();
    if (lab->state == LAB_RTR && from == LAB_INIT && lab->type == LAB_RC) return take_responders(lab);
    if (lab->state != LAB_RESET) return 0;
    give_responders(lab);
    qp->send.posted = qp->send.taken = qp->receive.posted = qp->receive.taken = qp->messages = 0;
    qp->untold = qp->colour_known = false;
    qp->send.over = qp->send.mask + 1;
    return 0;
}

static void destroy_qp(lab_qp *qp) {
    take_stores();
    give_responders(qp);
    free(qp->model_data);
}

const struct lab_model lab_ionic = {.name = "pollara",
                                    .device_name = "ionic_",
                                    .driver_id = DRIVER_ID,
                                    .uverbs_abi = 1,
                                    .qpn_bits = 24,
                                    .variants = variants,
                                    .query_device = query_device,
                                    .open = open_context,
                                    .create_cq = create_cq,
                                    .destroy_cq = destroy_cq,
                                    .create_qp = create_qp,
                                    .modify_qp = modify_qp,
                                    .destroy_qp = destroy_qp,
                                    .create_ah = create_ah,
                                    .map = map,
                                    .fetch = ionic_fetch,
                                    .fetch_receive = ionic_fetch_receive,
                                    .cq_used = ionic_cq_used,
                                    .complete = ionic_complete,
                                    .tells_rest = true,
                                    .ring = ionic_ring,
                                    .store = ionic_store};
