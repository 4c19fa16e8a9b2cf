/* SPDX-License-Identifier: Apache-2.0
 *
 * srd.c: scalable reliable datagrams: EFA's direct verbs, address handles, and what a pair of NICs does with a
 * datagram.
 *
 * Whatever of the queue is carried out next is drawn. A write of some generations is placed twice, the second time just
 * before its completion. Each request ends for itself, also by an error, and the queue pair goes on.
 */
#include "internal.h"

struct efadv_device_attr {
    uint64_t comp_mask;
    uint32_t max_sq_wr, max_rq_wr;
    uint16_t max_sq_sge, max_rq_sge, inline_buf_size, inline_buf_size_ex;
    uint32_t device_caps, max_rdma_size;
};
struct efadv_ah_attr {
    uint64_t comp_mask;
    uint16_t ahn;
    uint8_t reserved[6];
};

/* ------------------------------------------------------------------------------------------------------ direct verbs
 */

/* The names of libefa, which is a library of its own (libefa/libefa.c). */
int fake_efadv_query_device(struct ibv_context *context, struct efadv_device_attr *attr, uint32_t bytes);
struct ibv_qp *fake_efadv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *a,
                                       struct efadv_qp_init_attr *own, uint32_t bytes);
int fake_efadv_query_ah(struct ibv_ah *ah, struct efadv_ah_attr *attr, uint32_t bytes);

int fake_efadv_query_device(struct ibv_context *context, struct efadv_device_attr *attr, uint32_t bytes) {
    const fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("efadv_query_device")) return refuse_int(errno);
    if (!d->efa) return refuse_int(EOPNOTSUPP);
    const struct efadv_device_attr full = {.max_sq_wr = (uint32_t)d->attr.max_qp_wr,
                                           .max_rq_wr = d->max_rq_wr,
                                           .max_sq_sge = 2,
                                           .max_rq_sge = 2,
                                           .inline_buf_size = 32,
                                           .inline_buf_size_ex = (uint16_t)d->max_inline,
                                           .device_caps = d->caps,
                                           .max_rdma_size = d->max_rdma};
    if (bytes < offsetof(struct efadv_device_attr, device_caps)) return refuse_int(EINVAL);
    memset(attr, 0, bytes);
    memcpy(attr, &full, bytes < sizeof(full) ? bytes : sizeof(full));
    UNLOCK();
    return 0;
}

struct ibv_qp *fake_efadv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *a,
                                       struct efadv_qp_init_attr *own, uint32_t bytes) {
    if (bytes != sizeof(*own) || own->comp_mask || own->reserved || own->driver_qp_type) {
        errno = EINVAL;
        return NULL;
    }
    return fake_create_srd(context, a, own);
}

bool fake_srd_allows(const fake_device *d, const struct ibv_qp_init_attr_ex *a, const struct efadv_qp_init_attr *own) {
    uint64_t ops = 0;
    uint16_t flags = 0;
    if (d->caps & EFADV_READ) ops |= IBV_QP_EX_WITH_RDMA_READ;
    if (d->caps & EFADV_WRITE) ops |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    if (d->caps & EFADV_UNSOLICITED) flags |= 1;
    if (d->inline_write) flags |= 2;
    errno = EOPNOTSUPP;
    if (own->flags & ~flags || (uint64_t)a->send_ops_flags & ~ops) return false;
    errno = EINVAL;
    return !a->srq && a->cap.max_inline_data <= d->max_inline && a->cap.max_recv_wr <= d->max_rq_wr &&
           a->cap.max_send_sge <= 2 && a->cap.max_recv_sge <= 2;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
    const fake_device *d = fake_context_of(pd->context)->device;
    LOCK();
    if (fake_fails("create_ah")) return refuse(errno);
    static const union ibv_gid none;
    if (attr->port_num != 1 || !attr->is_global || attr->grh.sgid_index >= d->gids ||
        memcmp(&attr->grh.dgid, &none, sizeof(none)) == 0)
        return refuse(EINVAL);
    static uint32_t last;
    fake_ah *ah = make(sizeof(*ah));
    ah->base.context = pd->context;
    ah->base.pd = pd;
    ah->gid = attr->grh.dgid;
    for (const fake_ah *one = fake_ahs; one && !ah->number; one = one->next)
        if (one->base.pd == pd && memcmp(&one->gid, &ah->gid, sizeof(ah->gid)) == 0) ah->number = one->number;
    while (!ah->number) { /* of none that lives */
        ah->number = last = last % 0xfffe + 1;
        for (const fake_ah *one = fake_ahs; one; one = one->next)
            if (one->number == last) ah->number = 0;
    }
    ah->next = fake_ahs;
    fake_ahs = ah;
    ((fake_pd *)(void *)pd)->users++;
    fake_stats.handles++;
    UNLOCK();
    return &ah->base;
}

int ibv_destroy_ah(struct ibv_ah *base) {
    fake_ah *ah = (fake_ah *)(void *)base;
    LOCK();
    fake_ah **at = &fake_ahs;
    while (*at && *at != ah) at = &(*at)->next;
    if (!*at) FAKE_DIE("not an address handle");
    for (const fake_qp *qp = fake_qps; qp; qp = qp->next)
        for (uint32_t i = 0; i < qp->n_waiting + qp->n_away; i++)
            if (qp->ring[i < qp->n_waiting ? qp->waiting[i] : qp->away_slots[i - qp->n_waiting]].ah == ah)
                FAKE_DIE("a request that waits has this address handle");
    for (const fake_ah *one = fake_ahs; one; one = one->next)
        if (one != ah && one->number == ah->number)
            FAKE_DIE("another handle has its number: the NIC ends both, and aborts what was posted through the other");
    *at = ah->next;
    ((fake_pd *)(void *)base->pd)->users--;
    fake_stats.handles--;
    free(ah);
    UNLOCK();
    return 0;
}

int fake_efadv_query_ah(struct ibv_ah *base, struct efadv_ah_attr *attr, uint32_t bytes) {
    LOCK();
    if (fake_fails("efadv_query_ah")) return refuse_int(errno);
    if (bytes < sizeof(*attr)) return refuse_int(EINVAL);
    *attr = (struct efadv_ah_attr){.ahn = (uint16_t)((fake_ah *)(void *)base)->number};
    UNLOCK();
    return 0;
}

/* ---------------------------------------------------------------------------------------------------------- posting */

int fake_srd_refusal(const fake_qp *qp, const fake_send *s, uint64_t waiting) {
    const enum ibv_qp_state state = qp->base.qp_base.state;
    if (state != IBV_QPS_RTS && state != IBV_QPS_SQD) return EINVAL;
    if ((!s->signalled && !qp->sig_all) || s->foreign_flags) return EINVAL;
    const uint32_t limit = qp->device->post_limit ? qp->device->post_limit : qp->cap.max_send_wr;
    if (qp->posted + waiting - qp->freed >= limit) return ENOMEM;
    if (s->sges > 1 || !s->ah) return EINVAL;
    return s->inline_bytes && (s->opcode == IBV_WR_RDMA_READ || !qp->inline_write) ? EINVAL : 0;
}

fake_send *fake_srd_slot(fake_qp *qp) {
    if (!qp->n_unused) FAKE_DIE("no slot is free");
    const uint32_t slot = qp->unused[--qp->n_unused];
    qp->waiting[qp->n_waiting++] = slot;
    return &qp->ring[slot];
}

/* --------------------------------------------------------------------------------------------------------- the wire */

static const struct {
    enum ibv_wc_status status;
} statuses[] = {
    [0] = {IBV_WC_SUCCESS},
    [SRD_FLUSHED] = {IBV_WC_WR_FLUSH_ERR},
    [2] = {IBV_WC_LOC_QP_OP_ERR},
    [3] = {IBV_WC_LOC_QP_OP_ERR},
    [4] = {IBV_WC_LOC_QP_OP_ERR},
    [SRD_BAD_LKEY] = {IBV_WC_LOC_PROT_ERR},
    [SRD_BAD_LENGTH] = {IBV_WC_LOC_LEN_ERR},
    [SRD_BAD_ADDRESS] = {IBV_WC_REM_ACCESS_ERR},
    [8] = {IBV_WC_REM_ABORT_ERR},
    [SRD_BAD_QPN] = {IBV_WC_REM_INV_RD_REQ_ERR},
    [SRD_RNR] = {IBV_WC_RNR_RETRY_EXC_ERR},
    [11] = {IBV_WC_REM_INV_REQ_ERR},
    [12] = {IBV_WC_BAD_RESP_ERR},
    [SRD_UNRESPONSIVE] = {IBV_WC_RESP_TIMEOUT_ERR},
    [SRD_UNKNOWN_PEER] = {IBV_WC_REM_OP_ERR},
    [15] = {IBV_WC_RESP_TIMEOUT_ERR},
};

static void done(fake_qp *qp, uint32_t srd) {
    fake_send *s = &qp->ring[qp->current];
    qp->executed++;
    qp->device->inflight -= s->length;
    fake_stats.executed++;
    fake_complete_send(qp, s, statuses[srd].status, srd);
}

/* The requester's part: what it can judge itself, and the packet. 0, or the status. */
static uint32_t prepare(fake_qp *qp, const fake_send *s, fake_request *r) {
    if (qp->device->dead || qp->cut || !fake_up(qp)) return SRD_UNRESPONSIVE;
    if (s->length > qp->device->max_rdma) return SRD_BAD_LENGTH;
    memset(r, 0, offsetof(fake_request, data));
    for (uint32_t i = 0; i < s->sges; i++) {
        r->bytes[i] = s->sge[i].length;
        r->local[i] = s->sge[i].length ? fake_reach_local(qp, &s->sge[i], s->opcode == IBV_WR_RDMA_READ) : NULL;
        if (s->sge[i].length && !r->local[i]) return SRD_BAD_LKEY;
    }
    r->srd = 1;
    r->from = qp->base.qp_base.qp_num;
    r->to = s->remote_qpn;
    r->qkey = s->remote_qkey;
    r->gid = s->ah->gid;
    r->source = qp->device->gid[0].gid;
    /* The second time it is a plain write. */
    r->opcode = s->placed ? IBV_WR_RDMA_WRITE : s->opcode;
    r->imm = s->imm;
    r->rkey = s->rkey;
    r->remote = s->remote;
    r->length = s->length;
    r->inline_bytes = s->inline_bytes;
    r->sges = s->sges;
    memcpy(r->data, s->data, s->inline_bytes);
    return 0;
}

static bool again(fake_qp *qp) {
    qp->waiting[qp->n_waiting++] = qp->current;
    return false;
}

bool fake_srd_step(fake_qp *qp) {
    static fake_request request; /* large; under the lock */
    if (qp->base.qp_base.state != IBV_QPS_RTS) return false;
    fake_probe(qp);
    if (!qp->n_waiting) return false;
    /* Any of those that wait. */
    const uint32_t nth = (uint32_t)(fake_draw() % qp->n_waiting);
    qp->current = qp->waiting[nth];
    qp->waiting[nth] = qp->waiting[--qp->n_waiting];
    const fake_send *s = &qp->ring[qp->current];
    if (qp->break_status >= 0) { /* this one alone */
        const uint32_t srd = qp->break_vendor;
        qp->break_status = -1;
        done(qp, srd);
        return true;
    }
    const uint32_t srd = prepare(qp, s, &request);
    if (srd) {
        done(qp, srd);
        return true;
    }
    if (fake_is_elsewhere(request.to)) return fake_send_away(qp, &request);
    const fake_answer answer = fake_respond(&request);
    return fake_answered(qp, &answer);
}

bool fake_srd_answered(fake_qp *qp, const fake_answer *answer) {
    fake_send *s = &qp->ring[qp->current];
    if (answer->not_ready) {
        if (qp->attr.rnr_retry == 7) return again(qp); /* for ever */
        if (qp->rnr_left) {
            qp->rnr_left--;
            return again(qp);
        }
        qp->rnr_left = qp->attr.rnr_retry;
        done(qp, SRD_RNR);
        return true;
    }
    qp->rnr_left = qp->attr.rnr_retry;
    if (answer->lost || answer->srd) {
        done(qp, answer->lost ? SRD_UNRESPONSIVE : answer->srd);
        return true;
    }
    /* Later, and then once more. */
    if (!s->placed && s->length && s->opcode != IBV_WR_RDMA_READ && fake_draw() % 100 < qp->device->twice) {
        s->placed = true;
        fake_stats.twice++;
        again(qp);
        return true;
    }
    done(qp, 0);
    return true;
}

/* The responder's part, in the process that it lives in. */
fake_answer fake_srd_respond(const fake_request *r) {
    const fake_answer lost = {.lost = true};
    fake_qp *target = fake_qps;
    while (target && !(target->srd && target->base.qp_base.qp_num == r->to &&
                       memcmp(&target->device->gid[0].gid, &r->gid, sizeof(r->gid)) == 0))
        target = target->next;
    if (!target) return (fake_answer){.srd = SRD_BAD_QPN};
    if (!fake_up(target) || target->cut) return lost;
    const enum ibv_qp_state state = target->base.qp_base.state;
    if ((state != IBV_QPS_RTR && state != IBV_QPS_RTS) || target->attr.qkey != r->qkey)
        return (fake_answer){.srd = SRD_BAD_QPN};
    const fake_ah *known = fake_ahs;
    while (known &&
           !(known->base.pd == target->base.qp_base.pd && memcmp(&known->gid, &r->source, sizeof(r->source)) == 0))
        known = known->next;
    if (!known) {
        fake_stats.strangers++;
        return (fake_answer){.srd = SRD_UNKNOWN_PEER};
    }
    const bool reads = r->opcode == IBV_WR_RDMA_READ, immediate = r->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    char *remote = NULL;
    if (r->length) {
        remote = fake_reach_remote(target, r->rkey, r->remote, r->length,
                                   reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);
        if (!remote) return (fake_answer){.srd = SRD_BAD_ADDRESS};
    }
    if (immediate && !target->unsolicited && target->queue.taken == target->queue.posted) {
        fake_stats.rnr_naks++;
        return (fake_answer){.not_ready = true};
    }
    if (!fake_transfer(r, remote, reads)) return lost;
    if (immediate) {
        const struct ibv_wc wc = {.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                  .byte_len = r->length,
                                  .imm_data = r->imm,
                                  .qp_num = r->to,
                                  .src_qp = r->from,
                                  .slid = (uint16_t)known->number,
                                  .wc_flags = IBV_WC_WITH_IMM};
        if (target->unsolicited) {
            fake_stats.unsolicited++;
            fake_complete(target->base.qp_base.recv_cq,
                          (fake_cqe){.wc = wc, .qp = target, .srd = true, .unsolicited = true});
        } else {
            fake_complete_receive(target, wc);
            fake_stats.receives++;
        }
    }
    return (fake_answer){.srd = 0};
}
