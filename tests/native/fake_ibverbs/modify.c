/* SPDX-License-Identifier: Apache-2.0
 *
 * modify.c: the states of a reliable connection and the attributes that each change needs (ibv_modify_qp(3)).
 */
#include "internal.h"

#define AT_INIT (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define AT_RTR                                                                                                         \
    (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define AT_RTS (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

typedef struct change {
    int from, to, required, optional;
} change;

static const change changes[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, AT_INIT, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, AT_INIT},
    {IBV_QPS_INIT, IBV_QPS_RTR, AT_RTR, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH},
    {IBV_QPS_RTR, IBV_QPS_RTS, AT_RTS,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

/* Of datagrams: as those of IBV_QPT_UD, and how often a receiver is asked that is not ready. */
static const change srd_changes[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_RNR_RETRY | IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

static bool values(const fake_qp *qp, const struct ibv_qp_attr *a, int mask) {
    const fake_device *d = qp->device;
    if (mask & IBV_QP_PORT && (!a->port_num || a->port_num > d->attr.phys_port_cnt)) return false;
    if (mask & IBV_QP_PKEY_INDEX && a->pkey_index >= d->pkeys) return false;
    if (mask & IBV_QP_ACCESS_FLAGS) {
        const unsigned known =
            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        if (a->qp_access_flags & ~known) return false;
        if (a->qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC && d->attr.atomic_cap == IBV_ATOMIC_NONE &&
            d->strict_atomic_flag)
            return false;
    }
    if (mask & IBV_QP_AV) {
        const struct ibv_port_attr *port = &d->port[qp->attr.port_num - 1];
        const struct ibv_ah_attr *ah = &a->ah_attr;
        if (!ah->port_num || ah->port_num > d->attr.phys_port_cnt || ah->sl > 15) return false;
        if (port->link_layer == IBV_LINK_LAYER_ETHERNET && !ah->is_global) return false;
        if (ah->is_global) {
            if (ah->grh.sgid_index >= d->gids || ah->grh.flow_label >> 20) return false;
            const union ibv_gid *own = &d->gid[ah->grh.sgid_index].gid, *other = &ah->grh.dgid;
            if (!own->global.interface_id && !own->global.subnet_prefix) return false;
            if (!other->global.interface_id && !other->global.subnet_prefix) return false;
        } else if (!ah->dlid) {
            return false;
        }
    }
    if (mask & IBV_QP_PATH_MTU &&
        (a->path_mtu < IBV_MTU_256 || a->path_mtu > d->port[qp->attr.port_num - 1].active_mtu))
        return false;
    if (mask & IBV_QP_DEST_QPN && a->dest_qp_num >> 24) return false;
    if (mask & IBV_QP_RQ_PSN && a->rq_psn >> 24) return false;
    if (mask & IBV_QP_SQ_PSN && a->sq_psn >> 24) return false;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) {
        if (a->max_dest_rd_atomic > d->attr.max_qp_rd_atom) return false;
        if (d->attr.max_res_rd_atom &&
            d->rd_atom_used - qp->dest_rd_atomic + a->max_dest_rd_atomic > (uint32_t)d->attr.max_res_rd_atom)
            return false;
    }
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC && a->max_rd_atomic > d->attr.max_qp_init_rd_atom) return false;
    if (mask & IBV_QP_MIN_RNR_TIMER && a->min_rnr_timer > 31) return false;
    if (mask & IBV_QP_TIMEOUT && a->timeout > 31) return false;
    if (mask & IBV_QP_RETRY_CNT && a->retry_cnt > 7) return false;
    if (mask & IBV_QP_RNR_RETRY && qp->srd && !(d->caps & EFADV_RNR)) return false;
    return !(mask & IBV_QP_RNR_RETRY) || a->rnr_retry <= 7;
}

static void keep(fake_qp *qp, const struct ibv_qp_attr *a, int mask) {
    struct ibv_qp_attr *k = &qp->attr;
    if (mask & IBV_QP_PORT) k->port_num = a->port_num;
    if (mask & IBV_QP_PKEY_INDEX) k->pkey_index = a->pkey_index;
    if (mask & IBV_QP_ACCESS_FLAGS) k->qp_access_flags = a->qp_access_flags;
    if (mask & IBV_QP_AV) k->ah_attr = a->ah_attr;
    if (mask & IBV_QP_PATH_MTU) k->path_mtu = a->path_mtu;
    if (mask & IBV_QP_DEST_QPN) k->dest_qp_num = a->dest_qp_num;
    if (mask & IBV_QP_RQ_PSN) k->rq_psn = a->rq_psn;
    if (mask & IBV_QP_SQ_PSN) k->sq_psn = a->sq_psn;
    if (mask & IBV_QP_MIN_RNR_TIMER) k->min_rnr_timer = a->min_rnr_timer;
    if (mask & IBV_QP_QKEY) k->qkey = a->qkey;
    if (mask & IBV_QP_TIMEOUT) k->timeout = a->timeout;
    if (mask & IBV_QP_RETRY_CNT) k->retry_cnt = a->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY) k->rnr_retry = a->rnr_retry;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC) k->max_rd_atomic = a->max_rd_atomic;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) {
        k->max_dest_rd_atomic = a->max_dest_rd_atomic;
        qp->device->rd_atom_used += a->max_dest_rd_atomic - qp->dest_rd_atomic;
        qp->dest_rd_atomic = a->max_dest_rd_atomic;
    }
}

static void reset(fake_qp *qp) {
    fake_device *d = qp->device;
    fake_call_back(qp);
    fake_forget(qp, d->cq_clean);
    d->rd_atom_used -= qp->dest_rd_atomic;
    qp->dest_rd_atomic = 0;
    for (uint64_t i = qp->executed; i < qp->posted; i++) d->inflight -= qp->ring[i % qp->cap.max_send_wr].length;
    qp->posted = qp->executed = qp->freed = 0;
    qp->queue.posted = qp->queue.taken = qp->queue.freed = 0;
    memset(&qp->attr, 0, sizeof(qp->attr));
    qp->cut = false;
    qp->break_status = -1;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *a, int mask) {
    fake_qp *qp = (fake_qp *)(void *)base;
    pthread_mutex_lock(&fake_lock);
    int error = fake_fails("modify_qp") ? errno : 0;
    const int to = mask & IBV_QP_STATE ? (int)a->qp_state : (int)base->state;
    const int rest = mask & ~IBV_QP_STATE;
    if (!error && (to == IBV_QPS_RESET || to == IBV_QPS_ERR)) {
        if (rest) error = EINVAL;
        if (!error && to == IBV_QPS_RESET) reset(qp);
        if (!error && to == IBV_QPS_ERR) fake_qp_to_error(qp);
        if (!error) base->state = (enum ibv_qp_state)to;
    } else if (!error) {
        error = EINVAL;
        const change *all = qp->srd ? srd_changes : changes;
        const unsigned n = qp->srd ? sizeof(srd_changes) / sizeof(change) : sizeof(changes) / sizeof(change);
        for (unsigned i = 0; i < n; i++)
            if (all[i].from == (int)base->state && all[i].to == to) {
                const bool complete =
                    (rest & all[i].required) == all[i].required && !(rest & ~(all[i].required | all[i].optional));
                if (complete && values(qp, a, rest)) error = 0;
            }
        if (qp->device->dead) error = EIO;
        if (!error) {
            keep(qp, a, rest);
            qp->rnr_left = qp->attr.rnr_retry;
            base->state = (enum ibv_qp_state)to;
            qp->given[to] = *a;
            qp->given_mask[to] = mask;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    if (error) errno = error;
    return error;
}
