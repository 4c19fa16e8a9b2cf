/* SPDX-License-Identifier: Apache-2.0
 *
 * wire.c: what a pair of NICs does with what was posted.
 */
#include "internal.h"

/* ------------------------------------------------------------------------------------------------------ completions */

/* Fields that an error leaves undefined are filled with what nobody should believe. */
struct ibv_wc fake_unbelievable(uint64_t wr_id, const fake_qp *qp, enum ibv_wc_status status, uint32_t vendor_err) {
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

void fake_complete(struct ibv_cq *base, fake_cqe cqe) {
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

void fake_complete_send(fake_qp *qp, const fake_send *s, enum ibv_wc_status status, uint32_t vendor_err) {
    if (!status && !s->signalled) return;
    struct ibv_wc wc = fake_unbelievable(s->wr_id, qp, status, vendor_err);
    if (!status) {
        static const enum ibv_wc_opcode opcodes[] = {[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
                                                     [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
                                                     [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
                                                     [IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
                                                     [IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD};
        wc.opcode = opcodes[s->opcode];
        if (qp->srd && s->opcode == IBV_WR_RDMA_READ) wc.opcode = IBV_WC_SEND; /* as libefa calls it */
        wc.wc_flags = 0;
    }
    fake_complete(
        qp->base.qp_base.send_cq,
        (fake_cqe){.wc = wc, .qp = qp, .send = true, .frees = qp->executed, .srd = qp->srd, .slot = qp->current});
}

/* Take a receive and give it this completion; false: there is none. */
bool fake_complete_receive(fake_qp *qp, struct ibv_wc wc) {
    fake_srq *srq = (fake_srq *)(void *)qp->base.qp_base.srq;
    fake_rq *queue = srq ? &srq->queue : &qp->queue;
    if (queue->taken == queue->posted) return false;
    wc.wr_id = queue->ring[queue->taken++ % queue->capacity].wr_id;
    if (qp->late) {
        if (qp->lates == sizeof(qp->late_wc) / sizeof(qp->late_wc[0])) FAKE_DIE("too many late completions");
        qp->late_wc[qp->lates++] = wc;
        return true;
    }
    fake_complete(qp->base.qp_base.recv_cq, (fake_cqe){.wc = wc, .qp = qp, .srq = srq, .srd = qp->srd});
    return true;
}

/* The end of its receives of the shared queue. */
void fake_flush_kept(fake_qp *qp) {
    if (!qp->flush_in || --qp->flush_in) return;
    struct ibv_wc wc = fake_unbelievable(qp->kept.wr_id, qp, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush);
    fake_complete(qp->base.qp_base.recv_cq,
                  (fake_cqe){.wc = wc, .qp = qp, .srq = (fake_srq *)(void *)qp->base.qp_base.srq});
    if (qp->device->last_wqe) fake_event(qp->device, IBV_EVENT_QP_LAST_WQE_REACHED, &qp->base.qp_base);
}

void fake_forget(fake_qp *qp, bool clean) {
    fake_srq *srq = (fake_srq *)(void *)qp->base.qp_base.srq;
    if (qp->flush_in) srq->queue.freed++; /* nobody ever hears of it */
    qp->flush_in = 0;
    for (uint32_t i = 0; i < qp->lates; i++)
        fake_complete(qp->base.qp_base.recv_cq, (fake_cqe){.wc = qp->late_wc[i], .qp = qp, .srq = srq});
    qp->lates = 0;
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

char *fake_reach_local(const fake_qp *qp, const struct ibv_sge *sge, bool write) {
    const fake_mr *mr = fake_find_mr(qp->device, sge->lkey);
    if (!mr || mr->base.lkey != sge->lkey || mr->base.pd != qp->base.qp_base.pd) return NULL;
    if (write && !(mr->access & IBV_ACCESS_LOCAL_WRITE)) return NULL;
    return reach(mr, sge->addr, sge->length);
}

char *fake_reach_remote(const fake_qp *target, uint32_t rkey, uint64_t address, uint64_t bytes, unsigned access) {
    const fake_mr *mr = fake_find_mr(target->device, rkey);
    if (!mr || mr->base.rkey != rkey || mr->base.pd != target->base.qp_base.pd || !(mr->access & access)) return NULL;
    return reach(mr, address, bytes);
}

/* Aligned words appear whole, and readers that acquire them see what was placed before. */
void fake_place(char *to, const char *from, uint64_t bytes) {
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

bool fake_up(const fake_qp *qp) {
    return !qp->device->dead && qp->attr.port_num && qp->device->port[qp->attr.port_num - 1].state == IBV_PORT_ACTIVE;
}

static bool has_gid(const fake_device *d, const union ibv_gid *gid, uint32_t type) {
    for (uint32_t i = 0; i < d->gids; i++)
        if (memcmp(&d->gid[i].gid, gid, sizeof(*gid)) == 0 && d->gid[i].type == type) return true;
    return false;
}

/* Whom this packet reaches; NULL: nobody takes it. */
static fake_qp *target_of(const fake_request *r) {
    fake_qp *target = fake_qps;
    while (target && target->base.qp_base.qp_num != r->to) target = target->next;
    if (!target || !fake_up(target)) return NULL;
    const enum ibv_qp_state state = target->base.qp_base.state;
    if (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD) return NULL;
    if (r->global ? !has_gid(target->device, &r->gid, r->gid_type)
                  : r->lid != target->device->port[target->attr.port_num - 1].lid)
        return NULL;
    const uint16_t own = target->device->pkey[target->attr.pkey_index];
    if ((own ^ r->pkey) & 0x7fff || !((own | r->pkey) & 0x8000)) return NULL; /* one partition, one full member */
    if (target->attr.dest_qp_num != r->from || target->attr.rq_psn != r->psn) return NULL;
    return target;
}

/* The responder's part, in the process that it lives in. */
static fake_answer carry_out(fake_qp *target, const fake_request *r) {
    const fake_answer done = {.status = IBV_WC_SUCCESS}, lost = {.lost = true};
    const fake_answer invalid = {.status = IBV_WC_REM_INV_REQ_ERR, .responder_fails = true};
    const bool reads = r->opcode == IBV_WR_RDMA_READ;
    const bool atomic = r->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || r->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    const uint32_t mtu = target->attr.path_mtu;
    if (r->mtu != mtu && r->length > 128u << (r->mtu < mtu ? r->mtu : mtu)) return invalid;
    const unsigned right = reads ? IBV_ACCESS_REMOTE_READ : atomic ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_WRITE;
    if (!(target->attr.qp_access_flags & right)) return invalid;
    if ((reads || atomic) && !target->attr.max_dest_rd_atomic) return invalid;
    if (atomic && (r->remote % 8 || target->device->attr.atomic_cap == IBV_ATOMIC_NONE)) return invalid;
    char *remote = NULL;
    if (r->length) {
        remote = fake_reach_remote(target, r->rkey, r->remote, r->length, right);
        if (!remote) return (fake_answer){.status = IBV_WC_REM_ACCESS_ERR, .responder_fails = true};
    }
    fake_answer answer = done;
    if (atomic) {
        uint64_t *word = (uint64_t *)(void *)remote;
        if (r->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            const uint64_t addend = target->device->adds ? r->compare_add : 0;
            answer.old = __atomic_fetch_add(word, addend, __ATOMIC_ACQ_REL);
        } else {
            answer.old = r->compare_add;
            __atomic_compare_exchange_n(word, &answer.old, r->swap, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        }
    } else if (!fake_transfer(r, remote, reads)) {
        return lost;
    }
    if (r->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        const struct ibv_wc wc = {.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                  .byte_len = r->length,
                                  .imm_data = r->imm,
                                  .qp_num = r->to,
                                  .src_qp = r->from,
                                  .wc_flags = IBV_WC_WITH_IMM};
        if (!fake_complete_receive(target, wc)) {
            fake_stats.rnr_naks++;
            return (fake_answer){.not_ready = true};
        }
        fake_stats.receives++;
    }
    return target->cut ? lost : answer; /* cut: it was done, and the acknowledgement is lost */
}

/* The bytes of a write or a read, here or in another process; false: that process is gone. */
bool fake_transfer(const fake_request *r, char *remote, bool reads) {
    if (r->inline_bytes) {
        fake_place(remote, (const char *)r->data, r->inline_bytes);
        return true;
    }
    uint64_t at = 0;
    for (uint32_t i = 0; i < r->sges; i++) {
        if (r->process && !fake_move(r, i, remote + at, reads)) return false;
        if (!r->process && reads) fake_place(r->local[i], remote + at, r->bytes[i]);
        if (!r->process && !reads) fake_place(remote + at, r->local[i], r->bytes[i]);
        at += r->bytes[i];
    }
    return true;
}

fake_answer fake_respond(const fake_request *r) {
    if (r->srd) return fake_srd_respond(r);
    fake_qp *target = target_of(r);
    if (!target) return (fake_answer){.lost = true};
    const fake_answer answer = carry_out(target, r);
    if (answer.responder_fails) {
        fake_qp_to_error(target);
        fake_event(target->device, IBV_EVENT_QP_ACCESS_ERR, &target->base.qp_base);
    }
    return answer;
}

static uint32_t vendor_error(const fake_device *d, enum ibv_wc_status status) {
    const fake_vendor_errors *v = &d->vendor;
    switch (status) {
    case IBV_WC_LOC_LEN_ERR:
        return v->length;
    case IBV_WC_LOC_QP_OP_ERR:
        return v->operation;
    case IBV_WC_LOC_PROT_ERR:
        return v->protection;
    case IBV_WC_WR_FLUSH_ERR:
        return v->flush;
    case IBV_WC_REM_INV_REQ_ERR:
        return v->invalid;
    case IBV_WC_REM_ACCESS_ERR:
        return v->access;
    case IBV_WC_RETRY_EXC_ERR:
        return v->retry;
    case IBV_WC_RNR_RETRY_EXC_ERR:
        return v->rnr;
    case IBV_WC_FATAL_ERR:
        return v->fatal;
    default:
        return 0;
    }
}

/* The requester's part: what it can judge itself, and the packet. */
static enum ibv_wc_status prepare(const fake_qp *qp, const fake_send *s, fake_request *r) {
    if (qp->device->dead) return IBV_WC_FATAL_ERR;
    if (s->crowded) return IBV_WC_LOC_QP_OP_ERR;
    if (s->flooding) return IBV_WC_RETRY_EXC_ERR;
    if (s->length > qp->device->port[qp->attr.port_num - 1].max_msg_sz) return IBV_WC_LOC_LEN_ERR;
    const bool returns = s->opcode == IBV_WR_RDMA_READ || s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ||
                         s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    if (returns && !qp->attr.max_rd_atomic) return IBV_WC_LOC_QP_OP_ERR;
    memset(r, 0, offsetof(fake_request, data));
    for (uint32_t i = 0; i < s->sges; i++) {
        r->bytes[i] = s->sge[i].length;
        r->local[i] = s->sge[i].length ? fake_reach_local(qp, &s->sge[i], returns) : NULL;
        if (s->sge[i].length && !r->local[i]) return IBV_WC_LOC_PROT_ERR;
    }
    const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
    if (qp->cut || !fake_up(qp) || (ah->is_global && qp->device->routed && ah->grh.hop_limit <= 1))
        return IBV_WC_RETRY_EXC_ERR;
    r->from = qp->base.qp_base.qp_num;
    r->to = qp->attr.dest_qp_num;
    r->psn = qp->attr.sq_psn;
    r->global = ah->is_global;
    r->lid = ah->dlid;
    r->gid = ah->grh.dgid;
    r->gid_type = ah->is_global ? qp->device->gid[ah->grh.sgid_index].type : 0;
    r->pkey = qp->device->pkey[qp->attr.pkey_index];
    r->mtu = qp->attr.path_mtu;
    r->opcode = s->opcode;
    r->imm = s->imm;
    r->rkey = s->rkey;
    r->remote = s->remote;
    r->compare_add = s->compare_add;
    r->swap = s->swap;
    r->length = s->length;
    r->inline_bytes = s->inline_bytes;
    r->sges = s->sges;
    memcpy(r->data, s->data, s->inline_bytes);
    return IBV_WC_SUCCESS;
}

static void one_done(fake_qp *qp, const fake_send *s, enum ibv_wc_status status, uint32_t vendor_err) {
    qp->executed++;
    qp->device->inflight -= s->length;
    fake_stats.executed++;
    fake_complete_send(qp, s, status, vendor_err);
    if (status && status != IBV_WC_WR_FLUSH_ERR) fake_qp_to_error(qp);
}

void fake_qp_to_error(fake_qp *qp) {
    struct ibv_qp *base = &qp->base.qp_base;
    if (base->state == IBV_QPS_ERR || base->state == IBV_QPS_RESET) return;
    base->state = IBV_QPS_ERR;
    if (base->srq) {
        fake_rq *queue = &((fake_srq *)(void *)base->srq)->queue;
        if (qp->device->srq_flush && queue->taken != queue->posted) {
            qp->kept = queue->ring[queue->taken++ % queue->capacity];
            qp->flush_in = 4;
        } else if (qp->device->last_wqe) {
            fake_event(qp->device, IBV_EVENT_QP_LAST_WQE_REACHED, base);
        }
    } else {
        while (fake_complete_receive(qp, fake_unbelievable(0, qp, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush))) {
        }
    }
}

/* What the responder says of the request that is next; false: it is to be tried again. */
bool fake_answered(fake_qp *qp, const fake_answer *answer) {
    if (qp->srd) return fake_srd_answered(qp, answer);
    const fake_send *s = &qp->ring[qp->executed % qp->cap.max_send_wr];
    if (answer->not_ready) {
        if (qp->attr.rnr_retry == 7) return false; /* for ever */
        if (qp->rnr_left) {
            qp->rnr_left--;
            return false;
        }
        one_done(qp, s, IBV_WC_RNR_RETRY_EXC_ERR, qp->device->vendor.rnr);
        return true;
    }
    const enum ibv_wc_status status = answer->lost ? IBV_WC_RETRY_EXC_ERR : answer->status;
    qp->rnr_left = qp->attr.rnr_retry;
    if (!status && (s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP)) {
        char *place = fake_reach_local(qp, &s->sge[0], true);
        if (place) fake_place(place, (const char *)&answer->old, 8);
    }
    one_done(qp, s, status, vendor_error(qp->device, status));
    return true;
}

/* The next request of a queue; false: it does not go on now. */
bool fake_step(fake_qp *qp) {
    static fake_request request; /* large; under the lock */
    const struct ibv_qp *base = &qp->base.qp_base;
    if (qp->executed == qp->posted || qp->held) return false;
    if (qp->away) return fake_still_away(qp);
    if (qp->srd) return fake_srd_step(qp);
    const fake_send *s = &qp->ring[qp->executed % qp->cap.max_send_wr];
    if (base->state == IBV_QPS_ERR) {
        one_done(qp, s, IBV_WC_WR_FLUSH_ERR, qp->device->vendor.flush);
        return true;
    }
    if (base->state != IBV_QPS_RTS) return false;
    if (qp->break_status >= 0) {
        one_done(qp, s, (enum ibv_wc_status)qp->break_status, qp->break_vendor);
        return true;
    }
    const enum ibv_wc_status status = prepare(qp, s, &request);
    if (status) {
        one_done(qp, s, status, vendor_error(qp->device, status));
        return true;
    }
    if (fake_is_elsewhere(request.to)) return fake_send_away(qp, &request);
    const fake_answer answer = fake_respond(&request);
    return fake_answered(qp, &answer);
}

uint64_t fake_draw(void) {
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
        fake_flush_kept(qp);
        if (qp->executed == qp->posted) continue;
        uint64_t n = all || !qp->device->lazy ? UINT64_MAX : fake_draw() % 4 ? 1 + fake_draw() % 16 : 0;
        while (n-- && fake_step(qp)) {
        }
    }
}
