/* SPDX-License-Identifier: Apache-2.0
 *
 * wire.c: posting, what a pair of NICs does with what was posted, and polling.
 */
#include "internal.h"

/* ------------------------------------------------------------------------------------------------------ completions */

/* Fields that an error leaves undefined are filled with what nobody should believe. */
static struct ibv_wc unbelievable(uint64_t wr_id, const fake_qp *qp, enum ibv_wc_status status, uint32_t vendor_err) {
    return (struct ibv_wc){.wr_id = wr_id,
                           .status = status,
                           .vendor_err = vendor_err,
                           .qp_num = qp->base.qp_base.qp_num,
                           .opcode = IBV_WC_TM_RECV,
                           .byte_len = 0xbadbad,
                           .imm_data = 0xbadbadff,
                           .src_qp = 0xbadbad,
                           .wc_flags = IBV_WC_WITH_INV};
}

static void complete(struct ibv_cq *base, fake_cqe cqe) {
    fake_cq *cq = (fake_cq *)(void *)base;
    if (cq->overrun) return;
    if (cq->head - cq->tail == cq->capacity) {
        cq->overrun = true;
        fake_stats.cq_overruns++;
        fake_event(fake_context_of(base->context)->device, IBV_EVENT_CQ_ERR, base);
        return;
    }
    cq->ring[cq->head++ % cq->capacity] = cqe;
    if (cq->armed && base->channel) {
        cq->armed = false;
        cq->unacknowledged++;
        const ssize_t n = write(((fake_channel *)(void *)base->channel)->write, &base, sizeof(base));
        if (n != (ssize_t)sizeof(base)) FAKE_DIE("a channel is full");
    }
}

static void complete_send(fake_qp *qp, const fake_send *s, enum ibv_wc_status status, uint32_t vendor_err) {
    if (!status && !s->signalled) return;
    struct ibv_wc wc = unbelievable(s->wr_id, qp, status, vendor_err);
    if (!status) {
        static const enum ibv_wc_opcode opcodes[] = {[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
                                                     [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
                                                     [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
                                                     [IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
                                                     [IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD};
        wc.opcode = opcodes[s->opcode];
        wc.wc_flags = 0;
    }
    complete(qp->base.qp_base.send_cq, (fake_cqe){.wc = wc, .qp = qp, .send = true, .frees = qp->executed});
}

/* Take a receive and give it this completion; false: there is none. */
static bool complete_receive(fake_qp *qp, struct ibv_wc wc) {
    fake_srq *srq = (fake_srq *)(void *)qp->base.qp_base.srq;
    fake_rq *queue = srq ? &srq->queue : &qp->queue;
    if (queue->taken == queue->posted) return false;
    wc.wr_id = queue->ring[queue->taken++ % queue->capacity].wr_id;
    complete(qp->base.qp_base.recv_cq, (fake_cqe){.wc = wc, .qp = qp, .srq = srq});
    return true;
}

void fake_forget(fake_qp *qp, bool clean) {
    struct ibv_cq *cqs[2] = {qp->base.qp_base.send_cq, qp->base.qp_base.recv_cq};
    for (unsigned i = 0; i < (cqs[0] == cqs[1] ? 1u : 2u); i++) {
        fake_cq *cq = (fake_cq *)(void *)cqs[i];
        uint64_t kept = cq->tail;
        for (uint64_t at = cq->tail; at != cq->head; at++) {
            fake_cqe *cqe = &cq->ring[at % cq->capacity];
            if (cqe->qp == qp) {
                cqe->qp = NULL;
                if (clean) {
                    if (cqe->srq) cqe->srq->queue.freed++;
                    continue;
                }
            }
            cq->ring[kept++ % cq->capacity] = *cqe;
        }
        cq->head = kept;
    }
}

/* -------------------------------------------------------------------------------------------------------------- memory
 */

fake_mr *fake_find_mr(const fake_device *device, uint32_t key) {
    for (fake_mr *mr = fake_mrs; mr; mr = mr->next)
        if (fake_context_of(mr->base.context)->device == device && (mr->base.lkey == key || mr->base.rkey == key))
            return mr;
    return NULL;
}

static char *reach(const fake_mr *mr, uint64_t address, uint64_t bytes) {
    if (address < mr->iova || address - mr->iova > mr->base.length || mr->base.length - (address - mr->iova) < bytes)
        return NULL;
    return mr->memory + (address - mr->iova);
}

static char *reach_local(const fake_qp *qp, const struct ibv_sge *sge, bool write) {
    const fake_mr *mr = fake_find_mr(qp->device, sge->lkey);
    if (!mr || mr->base.lkey != sge->lkey || mr->base.pd != qp->base.qp_base.pd) return NULL;
    if (write && !(mr->access & IBV_ACCESS_LOCAL_WRITE)) return NULL;
    return reach(mr, sge->addr, sge->length);
}

static char *reach_remote(const fake_qp *target, uint32_t rkey, uint64_t address, uint64_t bytes, unsigned access) {
    const fake_mr *mr = fake_find_mr(target->device, rkey);
    if (!mr || mr->base.rkey != rkey || mr->base.pd != target->base.qp_base.pd || !(mr->access & access)) return NULL;
    return reach(mr, address, bytes);
}

/* Aligned words appear whole, and readers that acquire them see what was placed before. */
static void place(char *to, const char *from, uint64_t bytes) {
    uint64_t i = 0;
    while (i < bytes) {
        if ((uintptr_t)(to + i) % 8 == 0 && bytes - i >= 8) {
            uint64_t word;
            if ((uintptr_t)(from + i) % 8 == 0)
                word = __atomic_load_n((const uint64_t *)(const void *)(from + i), __ATOMIC_ACQUIRE);
            else
                memcpy(&word, from + i, 8);
            __atomic_store_n((uint64_t *)(void *)(to + i), word, __ATOMIC_RELEASE);
            i += 8;
        } else {
            __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
            i++;
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- the wire
 */

typedef struct outcome {
    enum ibv_wc_status status;
    uint32_t vendor_err;
    bool wait;            /* not now: no receive is posted */
    bool responder_fails; /* and its queue goes down with an event */
} outcome;

static bool up(const fake_qp *qp) {
    return !qp->device->dead && qp->attr.port_num && qp->device->port[qp->attr.port_num - 1].state == IBV_PORT_ACTIVE;
}

static const fake_gid *gid_of(const fake_device *d, const union ibv_gid *gid, uint32_t type) {
    for (uint32_t i = 0; i < d->gids; i++)
        if (memcmp(&d->gid[i].gid, gid, sizeof(*gid)) == 0 && d->gid[i].type == type) return &d->gid[i];
    return NULL;
}

/* Whom packets of this queue reach; NULL: nobody takes them. */
static fake_qp *target_of(const fake_qp *qp) {
    const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
    fake_qp *target = fake_qps;
    while (target && target->base.qp_base.qp_num != qp->attr.dest_qp_num) target = target->next;
    if (!target || qp->cut || !up(qp) || !up(target)) return NULL;
    const enum ibv_qp_state state = target->base.qp_base.state;
    if (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD) return NULL;
    if (ah->is_global) {
        if (qp->device->routed && ah->grh.hop_limit <= 1) return NULL;
        if (!gid_of(target->device, &ah->grh.dgid, qp->device->gid[ah->grh.sgid_index].type)) return NULL;
    } else if (ah->dlid != target->device->port[target->attr.port_num - 1].lid) {
        return NULL;
    }
    const uint16_t own = qp->device->pkey[qp->attr.pkey_index], other = target->device->pkey[target->attr.pkey_index];
    if ((own ^ other) & 0x7fff || !((own | other) & 0x8000)) return NULL; /* same partition, one full member */
    if (target->attr.dest_qp_num != qp->base.qp_base.qp_num || target->attr.rq_psn != qp->attr.sq_psn) return NULL;
    return target;
}

static outcome failed(enum ibv_wc_status status, uint32_t vendor_err) {
    return (outcome){status, vendor_err, false, false};
}

static outcome carry_out(fake_qp *qp, const fake_send *s) {
    const fake_vendor_errors *v = &qp->device->vendor;
    if (qp->device->dead) return failed(IBV_WC_FATAL_ERR, v->fatal);
    if (qp->break_status >= 0) return failed((enum ibv_wc_status)qp->break_status, qp->break_vendor);
    if (s->crowded) return failed(IBV_WC_LOC_QP_OP_ERR, v->operation);
    if (s->flooding) return failed(IBV_WC_RETRY_EXC_ERR, v->retry);
    if (s->length > qp->device->port[qp->attr.port_num - 1].max_msg_sz) return failed(IBV_WC_LOC_LEN_ERR, v->length);
    const bool reads = s->opcode == IBV_WR_RDMA_READ;
    const bool atomic = s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    if ((reads || atomic) && !qp->attr.max_rd_atomic) return failed(IBV_WC_LOC_QP_OP_ERR, v->operation);
    char *local[FAKE_MAX_SGE];
    for (uint32_t i = 0; i < s->sges; i++) {
        local[i] = s->sge[i].length ? reach_local(qp, &s->sge[i], reads || atomic) : NULL;
        if (s->sge[i].length && !local[i]) return failed(IBV_WC_LOC_PROT_ERR, v->protection);
    }
    fake_qp *target = target_of(qp);
    if (!target) return failed(IBV_WC_RETRY_EXC_ERR, v->retry);
    const uint32_t smaller =
        128u << (qp->attr.path_mtu < target->attr.path_mtu ? qp->attr.path_mtu : target->attr.path_mtu);
    if (qp->attr.path_mtu != target->attr.path_mtu && s->length > smaller)
        return (outcome){IBV_WC_REM_INV_REQ_ERR, v->invalid, false, true};
    const unsigned right = reads ? IBV_ACCESS_REMOTE_READ : atomic ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_WRITE;
    const outcome invalid = {IBV_WC_REM_INV_REQ_ERR, v->invalid, false, true};
    if (!(target->attr.qp_access_flags & right)) return invalid;
    if ((reads || atomic) && !target->attr.max_dest_rd_atomic) return invalid;
    if (atomic && (s->remote % 8 || target->device->attr.atomic_cap == IBV_ATOMIC_NONE)) return invalid;
    char *remote = NULL;
    if (s->length) {
        remote = reach_remote(target, s->rkey, s->remote, s->length, right);
        if (!remote) return (outcome){IBV_WC_REM_ACCESS_ERR, v->access, false, true};
    }
    if (atomic) {
        uint64_t *word = (uint64_t *)(void *)remote, old;
        if (s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            old = __atomic_fetch_add(word, s->compare_add, __ATOMIC_ACQ_REL);
        } else {
            old = s->compare_add;
            __atomic_compare_exchange_n(word, &old, s->swap, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        }
        place(local[0], (const char *)&old, 8);
    } else if (s->inline_bytes) {
        place(remote, (const char *)s->data, s->inline_bytes);
    } else {
        uint64_t at = 0;
        for (uint32_t i = 0; i < s->sges; i++) {
            if (reads)
                place(local[i], remote + at, s->sge[i].length);
            else
                place(remote + at, local[i], s->sge[i].length);
            at += s->sge[i].length;
        }
    }
    if (s->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        struct ibv_wc wc = {.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                            .byte_len = s->length,
                            .imm_data = s->imm,
                            .qp_num = target->base.qp_base.qp_num,
                            .src_qp = qp->base.qp_base.qp_num,
                            .wc_flags = IBV_WC_WITH_IMM};
        if (!complete_receive(target, wc)) {
            fake_stats.rnr_naks++;
            if (qp->attr.rnr_retry == 7) return (outcome){.wait = true};
            if (qp->rnr_left) {
                qp->rnr_left--;
                return (outcome){.wait = true};
            }
            return failed(IBV_WC_RNR_RETRY_EXC_ERR, v->rnr);
        }
        fake_stats.receives++;
    }
    qp->rnr_left = qp->attr.rnr_retry;
    if (target->cut) return failed(IBV_WC_RETRY_EXC_ERR, v->retry); /* it was done; the acknowledgement is lost */
    return (outcome){0};
}

static void one_done(fake_qp *qp, const fake_send *s) {
    qp->executed++;
    qp->device->inflight -= s->length;
    fake_stats.executed++;
}

void fake_qp_to_error(fake_qp *qp) {
    struct ibv_qp *base = &qp->base.qp_base;
    if (base->state == IBV_QPS_ERR || base->state == IBV_QPS_RESET) return;
    base->state = IBV_QPS_ERR;
    if (base->srq)
        fake_event(qp->device, IBV_EVENT_QP_LAST_WQE_REACHED, base);
    else
        while (complete_receive(qp, unbelievable(0, qp, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush))) {
        }
}

/* The next request of a queue; false: it does not go on now. */
static bool step(fake_qp *qp) {
    const struct ibv_qp *base = &qp->base.qp_base;
    if (qp->executed == qp->posted || qp->held) return false;
    const fake_send *s = &qp->ring[qp->executed % qp->cap.max_send_wr];
    if (base->state == IBV_QPS_ERR) {
        one_done(qp, s);
        complete_send(qp, s, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush);
        return true;
    }
    if (base->state != IBV_QPS_RTS) return false;
    const outcome o = carry_out(qp, s);
    if (o.wait) return false;
    one_done(qp, s);
    complete_send(qp, s, o.status, o.vendor_err);
    if (!o.status) return true;
    if (o.responder_fails) {
        fake_qp *target = target_of(qp);
        if (target) {
            fake_qp_to_error(target);
            fake_event(target->device, IBV_EVENT_QP_ACCESS_ERR, &target->base.qp_base);
        }
    }
    fake_qp_to_error(qp);
    return true;
}

static uint64_t draw(void) {
    static uint64_t state;
    if (!state) {
        const char *text = getenv("FAKE_IBVERBS_SEED");
        state = (text ? strtoull(text, NULL, 0) : 1) * 2 + 1;
    }
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
}

void fake_run(bool all) {
    for (fake_qp *qp = fake_qps; qp; qp = qp->next) {
        if (qp->executed == qp->posted) continue;
        uint64_t n = all || !qp->device->lazy ? UINT64_MAX : draw() % 4 ? 1 + draw() % 16 : 0;
        while (n-- && step(qp)) {
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------------
 * posting */

static int refusal(const fake_qp *qp, const fake_send *s, uint64_t waiting) {
    const enum ibv_qp_state state = qp->base.qp_base.state;
    if (state != IBV_QPS_RTS && state != IBV_QPS_SQD && state != IBV_QPS_ERR) return EINVAL;
    if (qp->posted + waiting - qp->freed >= qp->cap.max_send_wr) return ENOMEM;
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
    fake_send *slot = &qp->ring[qp->posted++ % qp->cap.max_send_wr];
    *slot = *s;
    slot->signalled = slot->signalled || qp->sig_all;
    d->inflight += s->length;
    slot->crowded = d->max_post && in_batch > d->max_post;
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
        while (step(qp)) {
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
    for (; wr; wr = wr->next) {
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
    if (error && bad) *bad = wr;
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
    const int error = give_receives(&qp->queue, wr, bad, base->srq || base->state == IBV_QPS_RESET ? EINVAL : 0);
    if (base->state == IBV_QPS_ERR)
        while (complete_receive(qp, unbelievable(0, qp, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush))) {
        }
    UNLOCK();
    return error;
}

static int post_srq_recv(struct ibv_srq *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    LOCK();
    const int error = give_receives(&((fake_srq *)(void *)base)->queue, wr, bad, 0);
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
    s->sges = UINT32_MAX; /* not set yet */
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
    else if (cqe->send)
        cqe->qp->freed = cqe->frees;
    else if (!cqe->srq)
        cqe->qp->queue.freed++;
    return true;
}

static int poll_cq(struct ibv_cq *base, int max, struct ibv_wc *wc) {
    fake_cq *cq = (fake_cq *)(void *)base;
    fake_cqe cqe;
    int n = 0;
    LOCK();
    fake_run(false);
    while (n < max && pop(cq, &cqe)) wc[n++] = cqe.wc;
    if (!n && cq->overrun) n = -1;
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
