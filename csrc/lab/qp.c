/* SPDX-License-Identifier: Apache-2.0
 *
 * qp.c: queue pairs: made, led through their states, asked.
 *
 * What a change of state needs and may have is of the InfiniBand specification, volume 1, 10.3 and 11.2.5 (QP states),
 * as the kernel asks for it.
 */
#include <errno.h>
#include <string.h>

#include "uverbs.h"

/* enum ib_uverbs_qp_type, ib_qp_attr_mask */
enum { TYPE_RC = 2, TYPE_UC = 3, TYPE_UD = 4, TYPE_DRIVER = 0xff };
enum {
    STATE = 1,
    CUR_STATE = 1 << 1,
    SQD_NOTIFY = 1 << 2,
    ACCESS = 1 << 3,
    PKEY = 1 << 4,
    PORT = 1 << 5,
    QKEY = 1 << 6,
    AV = 1 << 7,
    PATH_MTU = 1 << 8,
    TIMEOUT = 1 << 9,
    RETRY = 1 << 10,
    RNR_RETRY = 1 << 11,
    RQ_PSN = 1 << 12,
    RD_ATOMIC = 1 << 13,
    ALT_PATH = 1 << 14,
    MIN_RNR = 1 << 15,
    SQ_PSN = 1 << 16,
    DEST_RD_ATOMIC = 1 << 17,
    PATH_MIG = 1 << 18,
    CAP = 1 << 19,
    DEST_QPN = 1 << 20,
    RATE_LIMIT = 1 << 25,
    ALL = (1 << 21) - 1
};

struct qp_wanted {
    uint64_t user_handle;
    uint32_t pd, send_cq, recv_cq, srq;
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline;
    uint8_t all_signalled, type, is_srq;
};

/* ---------------------------------------------------------------------------------------------------------- creation
 */

static int limits_check(const lab_device *device, const struct qp_wanted *w) {
    const vnic_knobs *k = &device->knobs;
    if (w->max_send_wr > k->max_wr || w->max_recv_wr > k->max_wr) return EINVAL;
    /* Of a vendor's own type the model knows the limit: EFA's messages have more pieces than its RDMA. */
    if (w->type != TYPE_DRIVER && (w->max_send_sge > k->max_sge || w->max_recv_sge > k->max_sge)) return EINVAL;
    if (w->type == TYPE_RC || w->type == TYPE_UC || w->type == TYPE_UD || w->type == TYPE_DRIVER) return 0;
    return lab_unsupported("a queue pair of type %u (RC 2, UC 3, UD 4 and the vendor's own are there)", w->type);
}

static int build(lab_context *context, lab_qp *qp, struct lab_call *call) {
    const struct lab_model *model = context->device->model;
    int error = model->create_qp ? model->create_qp(qp, call) : EOPNOTSUPP;
    if (error) return error;
    error = lab_flow_open(qp);
    if (error && model->destroy_qp) model->destroy_qp(qp);
    return error;
}

static int make(struct lab_command *c, const struct qp_wanted *w, struct ib_uverbs_create_qp_resp *out) {
    lab_context *context = c->context;
    lab_pd *pd = lab_find_pd(context, w->pd);
    lab_cq *send_cq = lab_find_cq(context, w->send_cq), *recv_cq = lab_find_cq(context, w->recv_cq);
    lab_srq *srq = w->is_srq ? lab_find_srq(context, w->srq) : NULL;
    if (!pd || !send_cq || !recv_cq || (w->is_srq && (!srq || srq->pd != pd))) return EINVAL;
    int error = limits_check(context->device, w);
    if (!error) error = lab_nic_ready(context);
    if (error) return error;
    lab_qp *qp = lab_new(context, LAB_QP);
    if (!qp) return ENOMEM;
    qp->pd = pd;
    qp->send_cq = send_cq;
    qp->recv_cq = recv_cq;
    qp->srq = srq;
    qp->user_handle = w->user_handle;
    qp->type = (enum lab_qp_type)w->type;
    qp->all_signalled = w->all_signalled;
    qp->max_send_wr = w->max_send_wr;
    qp->max_recv_wr = srq ? 0 : w->max_recv_wr;
    qp->max_send_sge = w->max_send_sge;
    qp->max_recv_sge = srq ? 0 : w->max_recv_sge;
    qp->max_inline = w->max_inline;
    error = build(context, qp, &c->call);
    if (error) {
        lab_free(context, LAB_QP, qp);
        return error;
    }
    lab_use(context, pd->handle, 1);
    lab_use(context, send_cq->handle, 1);
    lab_use(context, recv_cq->handle, 1);
    if (srq) lab_use(context, srq->handle, 1);
    lab_publish(context, LAB_QP, qp);
    *out = (struct ib_uverbs_create_qp_resp){.qp_handle = qp->handle,
                                             .qpn = qp->number,
                                             .max_send_wr = qp->max_send_wr,
                                             .max_recv_wr = qp->max_recv_wr,
                                             .max_send_sge = qp->max_send_sge,
                                             .max_recv_sge = qp->max_recv_sge,
                                             .max_inline_data = qp->max_inline};
    return 0;
}

#define WANTED_(in)                                                                                                    \
    {                                                                                                                  \
        (in)->user_handle, (in)->pd_handle, (in)->send_cq_handle, (in)->recv_cq_handle, (in)->srq_handle,              \
            (in)->max_send_wr, (in)->max_recv_wr, (in)->max_send_sge, (in)->max_recv_sge, (in)->max_inline_data,       \
            (in)->sq_sig_all, (in)->qp_type, (in)->is_srq                                                              \
    }

int lab_create_qp(struct lab_command *c) {
    const struct ib_uverbs_create_qp *in = (const void *)c->in;
    const struct qp_wanted wanted = WANTED_(in);
    return make(c, &wanted, (void *)c->out);
}

int lab_ex_create_qp(struct lab_command *c) {
    const struct ib_uverbs_ex_create_qp *in = (const void *)c->in;
    struct ib_uverbs_ex_create_qp_resp *out = (void *)c->out;
    const struct qp_wanted wanted = WANTED_(in);
    if (in->comp_mask) return lab_unsupported("a queue pair with an indirection table");
    if (in->create_flags) return lab_unsupported("flags 0x%x of a queue pair", in->create_flags);
    out->response_length = sizeof *out;
    return make(c, &wanted, &out->base);
}

int lab_destroy_qp(struct lab_command *c) {
    const struct ib_uverbs_destroy_qp *in = (const void *)c->in;
    struct ib_uverbs_destroy_qp_resp *out = (void *)c->out;
    if (!lab_find_qp(c->context, in->qp_handle)) return EINVAL;
    out->events_reported = lab_events(c->context, in->qp_handle);
    return lab_destroy(c->context, LAB_QP, in->qp_handle);
}

/* ------------------------------------------------------------------------------------------------------------ states
 */

static const struct step {
    uint8_t from, to;
    uint8_t types; /* bits: 1 connected, reliable; 2 connected, not; 4 datagrams (UD, SRD) */
    uint32_t needs, may;
} steps[] = {
    {LAB_RESET, LAB_INIT, 3, PKEY | PORT | ACCESS, 0},
    {LAB_RESET, LAB_INIT, 4, PKEY | PORT | QKEY, 0},
    {LAB_INIT, LAB_INIT, 3, 0, PKEY | PORT | ACCESS},
    {LAB_INIT, LAB_INIT, 4, 0, PKEY | PORT | QKEY},
    {LAB_INIT, LAB_RTR, 1, AV | PATH_MTU | DEST_QPN | RQ_PSN | DEST_RD_ATOMIC | MIN_RNR, ACCESS | PKEY},
    {LAB_INIT, LAB_RTR, 2, AV | PATH_MTU | DEST_QPN | RQ_PSN, ACCESS | PKEY},
    {LAB_INIT, LAB_RTR, 4, 0, PKEY | QKEY},
    {LAB_RTR, LAB_RTS, 1, TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD_ATOMIC, CUR_STATE | ACCESS | MIN_RNR},
    {LAB_RTR, LAB_RTS, 2, SQ_PSN, CUR_STATE | ACCESS},
    {LAB_RTR, LAB_RTS, 4, SQ_PSN, CUR_STATE | QKEY | RNR_RETRY},
    {LAB_RTS, LAB_RTS, 1, 0, CUR_STATE | ACCESS | MIN_RNR},
    {LAB_RTS, LAB_RTS, 2, 0, CUR_STATE | ACCESS},
    {LAB_RTS, LAB_RTS, 4, 0, CUR_STATE | QKEY},
};

static uint8_t type_bit(enum lab_qp_type type) {
    return type == LAB_RC ? 1 : type == LAB_UC ? 2 : 4;
}

static int step_check(const lab_qp *qp, const struct ib_uverbs_modify_qp *in, enum lab_qp_state to) {
    const uint32_t mask = in->attr_mask & ~(uint32_t)STATE;
    if (in->attr_mask & ~(uint32_t)(ALL | RATE_LIMIT)) return EINVAL;
    if (mask & RATE_LIMIT) return lab_unsupported("a rate limit of a queue pair");
    if (mask & (ALT_PATH | PATH_MIG)) return lab_unsupported("a second path of a queue pair (migration)");
    if (mask & CAP) return lab_unsupported("resizing a queue pair");
    if (to == LAB_SQD || to == LAB_SQE || mask & SQD_NOTIFY) return lab_unsupported("state SQD of a queue pair");
    if (mask & CUR_STATE && in->cur_qp_state != qp->state) return EINVAL;
    if (to == LAB_ERR || to == LAB_RESET) return mask & ~(uint32_t)CUR_STATE ? EINVAL : 0;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        const struct step *s = &steps[i];
        if (s->from != qp->state || s->to != to || !(s->types & type_bit(qp->type))) continue;
        return (mask & s->needs) == s->needs && !(mask & ~(s->needs | s->may)) ? 0 : EINVAL;
    }
    return EINVAL;
}

/* Values that the NIC refuses. RoCE addresses by GID alone: a route is a must. */
static int values_check(const lab_qp *qp, const struct ib_uverbs_modify_qp *in) {
    lab_device *device = qp->pd->context->device;
    const uint32_t mask = in->attr_mask;
    if (mask & PORT && in->port_num != 1) return EINVAL;
    if (mask & PKEY && in->pkey_index) return EINVAL;
    if (mask & AV && (!in->dest.is_global || in->dest.sgid_index >= device->gids || in->dest.port_num != 1))
        return EINVAL;
    if (mask & PATH_MTU && (!in->path_mtu || in->path_mtu > device->active_mtu)) return EINVAL;
    if (mask & DEST_QPN && in->dest_qp_num >> 24) return EINVAL;
    if ((mask & TIMEOUT && in->timeout > 31) || (mask & RETRY && in->retry_cnt > 7) ||
        (mask & RNR_RETRY && in->rnr_retry > 7) || (mask & MIN_RNR && in->min_rnr_timer > 31))
        return EINVAL;
    if (mask & (RD_ATOMIC | DEST_RD_ATOMIC)) {
        struct ib_uverbs_ex_query_device_resp core;
        struct lab_call nobody = {0};
        const int error = lab_query_device(device, &core, &nobody);
        if (error) return error;
        if (mask & RD_ATOMIC && in->max_rd_atomic > core.base.max_qp_init_rd_atom) return EINVAL;
        if (mask & DEST_RD_ATOMIC && in->max_dest_rd_atomic > core.base.max_qp_rd_atom) return EINVAL;
    }
    return 0;
}

static void take_path(lab_qp *qp, const struct ib_uverbs_qp_dest *path) {
    memcpy(&qp->dest_gid, path->dgid, sizeof qp->dest_gid);
    qp->sgid_index = path->sgid_index;
    qp->traffic_class = path->traffic_class;
    qp->hop_limit = path->hop_limit;
    qp->flow_label = path->flow_label;
    qp->service_level = path->sl;
}

static void take(lab_qp *qp, const struct ib_uverbs_modify_qp *in) {
    const uint32_t mask = in->attr_mask;
    if (mask & ACCESS) qp->access = in->qp_access_flags;
    if (mask & PKEY) qp->pkey_index = in->pkey_index;
    if (mask & PORT) qp->port = in->port_num;
    if (mask & QKEY) qp->qkey = in->qkey;
    if (mask & AV) take_path(qp, &in->dest);
    if (mask & PATH_MTU) qp->path_mtu = in->path_mtu;
    if (mask & TIMEOUT) qp->timeout = in->timeout;
    if (mask & RETRY) qp->retry_count = in->retry_cnt;
    if (mask & RNR_RETRY) qp->rnr_retry = in->rnr_retry;
    if (mask & RQ_PSN) qp->rq_psn = in->rq_psn;
    if (mask & RD_ATOMIC) qp->max_rd_atomic = in->max_rd_atomic;
    if (mask & MIN_RNR) qp->min_rnr_timer = in->min_rnr_timer;
    if (mask & SQ_PSN) qp->sq_psn = in->sq_psn;
    if (mask & DEST_RD_ATOMIC) qp->max_dest_rd_atomic = in->max_dest_rd_atomic;
    if (mask & DEST_QPN) qp->dest_qpn = in->dest_qp_num;
}

static int modify(struct lab_command *c, const struct ib_uverbs_modify_qp *in) {
    lab_qp *qp = lab_find_qp(c->context, in->qp_handle);
    if (!qp) return EINVAL;
    if (in->attr_mask & STATE && in->qp_state > LAB_ERR) return EINVAL;
    const enum lab_qp_state from = qp->state, to = in->attr_mask & STATE ? (enum lab_qp_state)in->qp_state : from;
    int error = step_check(qp, in, to);
    if (!error) error = values_check(qp, in);
    if (error) return error;
    const lab_qp before = *qp;
    take(qp, in);
    qp->state = to;
    const struct lab_model *model = c->context->device->model;
    error = model->modify_qp ? model->modify_qp(qp, from, &c->call) : 0;
    if (!error) error = lab_flow_modify(qp, from);
    if (error) *qp = before;
    return error;
}

int lab_modify_qp(struct lab_command *c) {
    return modify(c, (const void *)c->in);
}

int lab_ex_modify_qp(struct lab_command *c) {
    const struct ib_uverbs_ex_modify_qp *in = (const void *)c->in;
    struct ib_uverbs_ex_modify_qp_resp *out = (void *)c->out;
    out->response_length = sizeof *out;
    return modify(c, &in->base);
}

int lab_query_qp(struct lab_command *c) {
    const struct ib_uverbs_query_qp *in = (const void *)c->in;
    const lab_qp *qp = lab_find_qp(c->context, in->qp_handle);
    if (!qp) return EINVAL;
    struct ib_uverbs_query_qp_resp out = {.dest = {.flow_label = qp->flow_label,
                                                   .sgid_index = (uint8_t)qp->sgid_index,
                                                   .hop_limit = (uint8_t)qp->hop_limit,
                                                   .traffic_class = (uint8_t)qp->traffic_class,
                                                   .sl = (uint8_t)qp->service_level,
                                                   .is_global = qp->state >= LAB_RTR,
                                                   .port_num = (uint8_t)qp->port},
                                          .max_send_wr = qp->max_send_wr,
                                          .max_recv_wr = qp->max_recv_wr,
                                          .max_send_sge = qp->max_send_sge,
                                          .max_recv_sge = qp->max_recv_sge,
                                          .max_inline_data = qp->max_inline,
                                          .qkey = qp->qkey,
                                          .rq_psn = qp->rq_psn,
                                          .sq_psn = qp->sq_psn,
                                          .dest_qp_num = qp->dest_qpn,
                                          .qp_access_flags = qp->access,
                                          .pkey_index = (uint16_t)qp->pkey_index,
                                          .qp_state = (uint8_t)qp->state,
                                          .cur_qp_state = (uint8_t)qp->state,
                                          .path_mtu = (uint8_t)qp->path_mtu,
                                          .max_rd_atomic = (uint8_t)qp->max_rd_atomic,
                                          .max_dest_rd_atomic = (uint8_t)qp->max_dest_rd_atomic,
                                          .min_rnr_timer = (uint8_t)qp->min_rnr_timer,
                                          .port_num = (uint8_t)qp->port,
                                          .timeout = (uint8_t)qp->timeout,
                                          .retry_cnt = (uint8_t)qp->retry_count,
                                          .rnr_retry = (uint8_t)qp->rnr_retry,
                                          .sq_sig_all = qp->all_signalled};
    memcpy(out.dest.dgid, &qp->dest_gid, sizeof out.dest.dgid);
    memcpy(c->out, &out, sizeof out);
    return 0;
}
