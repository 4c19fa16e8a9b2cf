/* SPDX-License-Identifier: Apache-2.0
 *
 * queues.c: posting, as lists and as calls, and polling.
 */
#include "internal.h"

/* ---------------------------------------------------------------------------------------------------------------
 * posting */

static int refusal(const fake_qp *qp, const fake_send *s, uint64_t waiting) {
    if (qp->srd) return fake_srd_refusal(qp, s, waiting);
    const enum ibv_qp_state state = qp->base.qp_base.state;
    if (state != IBV_QPS_RTS && state != IBV_QPS_SQD && state != IBV_QPS_ERR) return EINVAL;
    const uint32_t limit = qp->device->post_limit ? qp->device->post_limit : qp->cap.max_send_wr;
    if (qp->posted + waiting - qp->freed >= limit) return ENOMEM;
    const bool atomic = s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    if (!atomic && s->opcode != IBV_WR_RDMA_WRITE && s->opcode != IBV_WR_RDMA_WRITE_WITH_IMM &&
        s->opcode != IBV_WR_RDMA_READ)
        return EINVAL;
    if (s->sges > qp->cap.max_send_sge) return EINVAL;
    if (atomic && (s->sges != 1 || s->sge[0].length != 8 || s->inline_bytes)) return EINVAL;
    return s->inline_bytes && s->opcode == IBV_WR_RDMA_READ ? EINVAL : 0;
}

static void enqueue(fake_qp *qp, const fake_send *s, uint64_t in_batch) {
    fake_device *d = qp->device;
    fake_send *slot = qp->srd ? fake_srd_slot(qp) : &qp->ring[qp->posted % qp->cap.max_send_wr];
    qp->posted++;
    *slot = *s;
    slot->signalled = slot->signalled || qp->sig_all;
    d->inflight += s->length;
    slot->crowded = s->crowded || (d->max_post && in_batch > d->max_post);
    slot->flooding = d->inflight_limit && d->inflight > d->inflight_limit;
    if (d->inflight > fake_stats.inflight_peak) fake_stats.inflight_peak = d->inflight;
    if (s->inline_bytes) fake_stats.inlined++;
    fake_stats.posted++;
}

static void doorbell(fake_qp *qp, uint64_t requests) {
    if (!requests) return;
    fake_stats.doorbells++;
    if (requests > fake_stats.longest_batch) fake_stats.longest_batch = requests;
    if (!qp->device->lazy)
        while (fake_step(qp)) {
        }
}

static int set_data(const fake_qp *qp, fake_send *s, size_t n, const struct ibv_sge *sges, bool inlined) {
    if (n > FAKE_MAX_SGE) return EINVAL;
    uint64_t length = 0;
    for (size_t i = 0; i < n; i++) {
        if (inlined) {
            if (length + sges[i].length > qp->cap.max_inline_data) return ENOMEM;
            memcpy(s->data + length, (const void *)(uintptr_t)sges[i].addr, sges[i].length);
        } else {
            s->sge[i] = sges[i];
        }
        length += sges[i].length;
    }
    if (length > UINT32_MAX) return EINVAL;
    s->length = (uint32_t)length;
    s->inline_bytes = inlined ? s->length : 0;
    s->sges = inlined ? 0 : (uint32_t)n;
    return 0;
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    fake_qp *qp = (fake_qp *)(void *)base;
    static fake_send s; /* large; under the lock */
    uint64_t n = 0;
    int error = 0;
    LOCK();
    if (qp->srd) error = EINVAL; /* a list takes sends alone, which nobody here posts */
    for (; wr && !error; wr = wr->next) {
        memset(&s, 0, offsetof(fake_send, sge));
        s.wr_id = wr->wr_id;
        s.opcode = wr->opcode;
        s.imm = wr->imm_data;
        s.signalled = wr->send_flags & IBV_SEND_SIGNALED;
        if (wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
            s.remote = wr->wr.atomic.remote_addr;
            s.rkey = wr->wr.atomic.rkey;
            s.compare_add = wr->wr.atomic.compare_add;
            s.swap = wr->wr.atomic.swap;
        } else {
            s.remote = wr->wr.rdma.remote_addr;
            s.rkey = wr->wr.rdma.rkey;
        }
        error = wr->num_sge < 0 ? EINVAL
                                : set_data(qp, &s, (size_t)wr->num_sge, wr->sg_list, wr->send_flags & IBV_SEND_INLINE);
        if (!error) error = refusal(qp, &s, 0);
        if (error) break;
        enqueue(qp, &s, ++n);
    }
    doorbell(qp, n);
    if (error && bad && !qp->device->keeps_bad) *bad = wr;
    UNLOCK();
    return error;
}

static int give_receives(fake_rq *queue, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad, int error) {
    for (; wr && !error; wr = error ? wr : wr->next) {
        if (queue->posted - queue->freed == queue->capacity)
            error = ENOMEM;
        else if (wr->num_sge < 0 || (uint32_t)wr->num_sge > queue->max_sge)
            error = EINVAL;
        else
            queue->ring[queue->posted++ % queue->capacity].wr_id = wr->wr_id;
    }
    if (error && bad) *bad = wr;
    return error;
}

static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    fake_qp *qp = (fake_qp *)(void *)base;
    LOCK();
    const int refused = fake_fails_alone("post_recv") ? errno : base->srq || base->state == IBV_QPS_RESET ? EINVAL : 0;
    const int error = give_receives(&qp->queue, wr, bad, refused);
    if (base->state == IBV_QPS_ERR)
        while (fake_complete_receive(qp, fake_unbelievable(0, qp, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush))) {
        }
    UNLOCK();
    return error;
}

static int post_srq_recv(struct ibv_srq *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    const fake_device *d = fake_context_of(base->context)->device;
    int error = 0;
    LOCK();
    for (const struct ibv_recv_wr *one = wr; one && !error; one = one->next)
        if (d->srq_needs_sge && !one->num_sge) error = EINVAL;
    error = give_receives(&((fake_srq *)(void *)base)->queue, wr, bad, error);
    UNLOCK();
    return error;
}

/* --------------------------------------------------------------------------------------------------------------
 * ibv_wr_* */

static fake_qp *building(struct ibv_qp_ex *ex) {
    fake_qp *qp = (fake_qp *)(void *)ex;
    if (!qp->building) FAKE_DIE("outside ibv_wr_start and ibv_wr_complete");
    return qp;
}

static void wr_start(struct ibv_qp_ex *ex) {
    fake_qp *qp = (fake_qp *)(void *)ex;
    if (qp->building) FAKE_DIE("ibv_wr_start twice");
    qp->building = true;
    qp->batched = 0;
    qp->batch_error = 0;
}

/* The setter that follows fills in the data. */
static fake_send *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t remote) {
    fake_qp *qp = building(ex);
    if (qp->batched == qp->cap.max_send_wr) {
        qp->batch_error = ENOMEM;
        qp->batched--;
    }
    fake_send *s = &qp->batch[qp->batched++];
    memset(s, 0, offsetof(fake_send, sge));
    s->wr_id = ex->wr_id;
    s->opcode = opcode;
    s->rkey = rkey;
    s->remote = remote;
    s->signalled = ex->wr_flags & IBV_SEND_SIGNALED;
    s->foreign_flags = ex->wr_flags & ~(unsigned)(IBV_SEND_SIGNALED | IBV_SEND_INLINE);
    s->sges = UINT32_MAX; /* not set yet */
    s->crowded = qp->device->mixes && qp->batched > 1;
    return s;
}

static void wr_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote) {
    begin(ex, IBV_WR_RDMA_WRITE, rkey, remote);
}
static void wr_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote) {
    begin(ex, IBV_WR_RDMA_READ, rkey, remote);
}
static void wr_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote, __be32 imm) {
    begin(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, remote)->imm = imm;
}
static void wr_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote, uint64_t add) {
    begin(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, remote)->compare_add = add;
}
static void wr_swap(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote, uint64_t compare, uint64_t swap) {
    fake_send *s = begin(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, remote);
    s->compare_add = compare;
    s->swap = swap;
}

static void set(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *sges, bool inlined) {
    fake_qp *qp = building(ex);
    if (!qp->batched || qp->batch[qp->batched - 1].sges != UINT32_MAX) FAKE_DIE("no request, or its data set twice");
    const int error = set_data(qp, &qp->batch[qp->batched - 1], n, sges, inlined);
    if (error && !qp->batch_error) qp->batch_error = error;
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length) {
    const struct ibv_sge sge = {address, length, lkey};
    set(ex, 1, &sge, false);
}
static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *sges) {
    set(ex, n, sges, false);
}
static void wr_set_inline(struct ibv_qp_ex *ex, void *address, size_t length) {
    const struct ibv_sge sge = {(uintptr_t)address, (uint32_t)length, 0};
    set(ex, 1, &sge, true);
}
static void wr_set_inline_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *buffers) {
    struct ibv_sge sges[FAKE_MAX_SGE];
    if (n > FAKE_MAX_SGE) FAKE_DIE("%zu buffers", n);
    for (size_t i = 0; i < n; i++)
        sges[i] = (struct ibv_sge){(uintptr_t)buffers[i].addr, (uint32_t)buffers[i].length, 0};
    set(ex, n, sges, true);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey) {
    fake_qp *qp = building(ex);
    if (!qp->batched) FAKE_DIE("an address without a request");
    fake_send *s = &qp->batch[qp->batched - 1];
    s->ah = (const fake_ah *)(void *)ah;
    s->remote_qpn = qpn;
    s->remote_qkey = qkey;
}

static int wr_complete(struct ibv_qp_ex *ex) {
    fake_qp *qp = building(ex);
    qp->building = false;
    LOCK();
    int error = qp->batch_error;
    for (uint32_t i = 0; i < qp->batched && !error; i++)
        error = qp->batch[i].sges == UINT32_MAX ? EINVAL : refusal(qp, &qp->batch[i], i);
    if (!error) {
        for (uint32_t i = 0; i < qp->batched; i++) enqueue(qp, &qp->batch[i], i + 1);
        doorbell(qp, qp->batched);
    }
    UNLOCK();
    return error;
}

static void wr_abort(struct ibv_qp_ex *ex) {
    building(ex)->building = false;
}

void fake_qp_ops(fake_qp *qp) {
    struct ibv_qp_ex *ex = &qp->base;
    ex->wr_start = wr_start;
    ex->wr_complete = wr_complete;
    ex->wr_abort = wr_abort;
    ex->wr_set_sge = wr_set_sge;
    ex->wr_set_sge_list = wr_set_sge_list;
    ex->wr_set_inline_data = wr_set_inline;
    ex->wr_set_inline_data_list = wr_set_inline_list;
    if (qp->srd) ex->wr_set_ud_addr = wr_set_ud_addr;
    /* What was not asked for is not there. */
    if (qp->ops & IBV_QP_EX_WITH_RDMA_WRITE) ex->wr_rdma_write = wr_write;
    if (qp->ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) ex->wr_rdma_write_imm = wr_write_imm;
    if (qp->ops & IBV_QP_EX_WITH_RDMA_READ) ex->wr_rdma_read = wr_read;
    if (qp->ops & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) ex->wr_atomic_fetch_add = wr_add;
    if (qp->ops & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP) ex->wr_atomic_cmp_swp = wr_swap;
}

/* ---------------------------------------------------------------------------------------------------------------
 * polling */

static bool pop(fake_cq *cq, fake_cqe *cqe) {
    if (cq->tail == cq->head) return false;
    *cqe = cq->ring[cq->tail++ % cq->capacity];
    if (cqe->srq) cqe->srq->queue.freed++;
    if (!cqe->qp)
        fake_stats.stale++;
    else if (cqe->srd && cqe->send)
        cqe->qp->freed++, cqe->qp->unused[cqe->qp->n_unused++] = cqe->slot;
    else if (cqe->send)
        cqe->qp->freed = cqe->frees;
    else if (!cqe->srq && !cqe->unsolicited)
        cqe->qp->queue.freed++;
    return true;
}

static uint32_t polls_to_fail;

void fake_ibverbs_fail_polls(uint32_t n) {
    LOCK();
    polls_to_fail = n;
    UNLOCK();
}

static int poll_cq(struct ibv_cq *base, int max, struct ibv_wc *wc) {
    fake_cq *cq = (fake_cq *)(void *)base;
    fake_cqe cqe;
    int n = 0;
    LOCK();
    fake_run(false);
    const bool fails = polls_to_fail != 0;
    if (fails) {
        polls_to_fail--;
        max = 0;
    }
    while (n < max && pop(cq, &cqe)) {
        if (cqe.srd && !cqe.qp) { /* libefa: of no queue pair that there is */
            if (!n) n = -EINVAL;
            break;
        }
        wc[n++] = cqe.wc;
    }
    if (!n && cq->overrun) n = -1;
    if (fails) n = -EIO;
    UNLOCK();
    return n;
}

static int req_notify_cq(struct ibv_cq *base, int solicited_only) {
    (void)solicited_only;
    LOCK();
    ((fake_cq *)(void *)base)->armed = true;
    UNLOCK();
    return 0;
}

static int next_poll(struct ibv_cq_ex *base) {
    fake_cq *cq = (fake_cq *)(void *)base;
    if (!cq->polling) FAKE_DIE("ibv_next_poll outside ibv_start_poll and ibv_end_poll");
    LOCK();
    const bool got = pop(cq, &cq->current);
    const bool broken = cq->overrun;
    UNLOCK();
    if (!got) return broken ? EIO : ENOENT;
    base->wr_id = cq->current.wc.wr_id;
    base->status = cq->current.wc.status;
    return 0;
}

static int start_poll(struct ibv_cq_ex *base, struct ibv_poll_cq_attr *attr) {
    fake_cq *cq = (fake_cq *)(void *)base;
    if (attr->comp_mask) return EINVAL;
    if (cq->polling) FAKE_DIE("ibv_start_poll twice: after one that succeeded comes ibv_end_poll");
    LOCK();
    fake_run(false);
    UNLOCK();
    cq->polling = true;
    const int error = next_poll(base);
    if (error) cq->polling = false; /* there is nothing to end */
    return error;
}

static void end_poll(struct ibv_cq_ex *base) {
    fake_cq *cq = (fake_cq *)(void *)base;
    if (!cq->polling) FAKE_DIE("ibv_end_poll without ibv_start_poll");
    cq->polling = false;
}

static const struct ibv_wc *current(struct ibv_cq_ex *base) {
    const fake_cq *cq = (fake_cq *)(void *)base;
    if (!cq->polling) FAKE_DIE("a completion is read outside ibv_start_poll and ibv_end_poll");
    return &cq->current.wc;
}
static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *cq) {
    return current(cq)->opcode;
}
static uint32_t read_vendor_err(struct ibv_cq_ex *cq) {
    return current(cq)->vendor_err;
}
static unsigned int read_wc_flags(struct ibv_cq_ex *cq) {
    return current(cq)->wc_flags;
}
static uint32_t read_byte_len(struct ibv_cq_ex *cq) {
    return current(cq)->byte_len;
}
static __be32 read_imm_data(struct ibv_cq_ex *cq) {
    return current(cq)->imm_data;
}
static uint32_t read_qp_num(struct ibv_cq_ex *cq) {
    return current(cq)->qp_num;
}
static uint32_t read_src_qp(struct ibv_cq_ex *cq) {
    return current(cq)->src_qp;
}

void fake_cq_ops(fake_cq *cq) {
    if (!cq->ex) return;
    struct ibv_cq_ex *ex = &cq->base;
    ex->start_poll = start_poll;
    ex->next_poll = next_poll;
    ex->end_poll = end_poll;
    ex->read_opcode = read_opcode;
    ex->read_vendor_err = read_vendor_err;
    ex->read_wc_flags = read_wc_flags;
    /* What was not asked for is not there. */
    if (cq->wc_flags & IBV_WC_EX_WITH_BYTE_LEN) ex->read_byte_len = read_byte_len;
    if (cq->wc_flags & IBV_WC_EX_WITH_IMM) ex->read_imm_data = read_imm_data;
    if (cq->wc_flags & IBV_WC_EX_WITH_QP_NUM) ex->read_qp_num = read_qp_num;
    if (cq->wc_flags & IBV_WC_EX_WITH_SRC_QP) ex->read_src_qp = read_src_qp;
}

void fake_wire_ops(struct ibv_context *context) {
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    context->ops.post_srq_recv = post_srq_recv;
}
