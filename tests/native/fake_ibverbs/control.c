/* SPDX-License-Identifier: Apache-2.0
 *
 * control.c: what tests ask for (fake_ibverbs.h), and texts.
 */
#include "internal.h"

static char failing[32];
static uint32_t failing_in;
static int failing_errno;

static void fail_from_environment(void) {
    static bool looked;
    const char *text = getenv("FAKE_IBVERBS_FAIL");
    if (looked || !text) return;
    looked = true;
    char call[32];
    if (sscanf(text, "%31[a-z_]:%u:%d", call, &failing_in, &failing_errno) != 3) FAKE_DIE("FAKE_IBVERBS_FAIL=%s", text);
    snprintf(failing, sizeof(failing), "%s", call);
}

bool fake_fails(const char *call) {
    fake_stats.calls++;
    fail_from_environment();
    if (!failing_in || (strcmp(failing, "any") != 0 && strcmp(failing, call) != 0) || --failing_in) return false;
    errno = failing_errno;
    return true;
}

bool fake_fails_alone(const char *call) {
    if (!failing_in || strcmp(failing, call) != 0 || --failing_in) return false;
    errno = failing_errno;
    return true;
}

void fake_ibverbs_fail(const char *call, uint32_t kth, int error) {
    LOCK();
    snprintf(failing, sizeof(failing), "%s", call);
    failing_in = kth;
    failing_errno = error;
    UNLOCK();
}

void fake_ibverbs_get_stats(fake_ibverbs_stats *stats) {
    LOCK();
    *stats = fake_stats;
    UNLOCK();
}

static fake_device *by_name(const char *name) {
    for (unsigned i = 0; i < FAKE_MAX_DEVICES; i++)
        if (fake_devices[i] && fake_devices[i]->listed && strcmp(fake_devices[i]->base.name, name) == 0)
            return fake_devices[i];
    FAKE_DIE("no device %s", name);
}

void fake_ibverbs_set_port(const char *device, uint32_t port, int state) {
    LOCK();
    fake_device *d = by_name(device);
    if (!port || port > d->attr.phys_port_cnt) FAKE_DIE("%s has no port %u", device, port);
    d->port[port - 1].state = (enum ibv_port_state)state;
    int number = (int)port;
    fake_event(d, state == IBV_PORT_ACTIVE ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, &number);
    UNLOCK();
}

void fake_ibverbs_set_gid(const char *device, uint32_t index, const void *gid) {
    LOCK();
    fake_device *d = by_name(device);
    if (index >= d->gids) FAKE_DIE("%s has no GID %u", device, index);
    memcpy(d->gid[index].gid.raw, gid, sizeof(d->gid[index].gid));
    UNLOCK();
}

void fake_ibverbs_kill_device(const char *device) {
    LOCK();
    fake_device *d = by_name(device);
    d->dead = true;
    fake_event(d, IBV_EVENT_DEVICE_FATAL, NULL);
    UNLOCK();
}

static fake_qp *by_number(uint32_t number) {
    for (fake_qp *qp = fake_qps; qp; qp = qp->next)
        if (qp->base.qp_base.qp_num == number) return qp;
    FAKE_DIE("no queue pair %u", number);
}

void fake_ibverbs_cut(uint32_t qp_num) {
    LOCK();
    by_number(qp_num)->cut = true;
    UNLOCK();
}

void fake_ibverbs_break(uint32_t qp_num, int status, uint32_t vendor_err) {
    LOCK();
    fake_qp *qp = by_number(qp_num);
    qp->break_status = status;
    qp->break_vendor = vendor_err;
    UNLOCK();
}

void fake_ibverbs_hold(uint32_t qp_num, int held) {
    LOCK();
    by_number(qp_num)->held = held;
    UNLOCK();
}

void fake_ibverbs_delay_receives(uint32_t qp_num) {
    LOCK();
    by_number(qp_num)->late = true;
    UNLOCK();
}

void fake_ibverbs_fail_queue(uint32_t qp_num, int receives) {
    LOCK();
    const fake_qp *qp = by_number(qp_num);
    const struct ibv_qp *base = &qp->base.qp_base;
    if (receives)
        fake_event(qp->device, IBV_EVENT_SRQ_ERR, base->srq);
    else
        fake_event(qp->device, IBV_EVENT_CQ_ERR, base->send_cq);
    UNLOCK();
}

uint32_t fake_ibverbs_receives(uint32_t qp_num) {
    LOCK();
    const fake_qp *qp = by_number(qp_num);
    const fake_srq *srq = (const fake_srq *)(const void *)qp->base.qp_base.srq;
    const fake_rq *queue = srq ? &srq->queue : &qp->queue;
    const uint32_t n = (uint32_t)(queue->posted - queue->taken);
    UNLOCK();
    return n;
}

uint32_t fake_ibverbs_qp_num(uint32_t index) {
    LOCK();
    const fake_qp *qp = fake_qps;
    while (qp && index--) qp = qp->next;
    const uint32_t number = qp ? qp->base.qp_base.qp_num : 0;
    UNLOCK();
    return number;
}

int fake_ibverbs_last_attr(uint32_t qp_num, int state, void *attr, int *mask) {
    LOCK();
    const fake_qp *qp = by_number(qp_num);
    memcpy(attr, &qp->given[state], sizeof(qp->given[state]));
    *mask = qp->given_mask[state];
    UNLOCK();
    return *mask ? 0 : -1;
}

/* -------------------------------------------------------------------------------------------------------------- texts
 */

const char *ibv_wc_status_str(enum ibv_wc_status status) {
    static const char *const texts[] = {"success",
                                        "local length error",
                                        "local QP operation error",
                                        "local EE context operation error",
                                        "local protection error",
                                        "Work Request Flushed Error",
                                        "memory management operation error",
                                        "bad response error",
                                        "local access error",
                                        "remote invalid request error",
                                        "remote access error",
                                        "remote operation error",
                                        "transport retry counter exceeded",
                                        "RNR retry counter exceeded",
                                        "local RDD violation error",
                                        "remote invalid RD request",
                                        "aborted error",
                                        "invalid EE context number",
                                        "invalid EE context state",
                                        "fatal error",
                                        "response timeout error",
                                        "general error"};
    return (unsigned)status < sizeof(texts) / sizeof(texts[0]) ? texts[status] : "unknown";
}
const char *ibv_port_state_str(enum ibv_port_state state) {
    static const char *const texts[] = {"no state change (NOP)", "down", "init", "armed", "active", "active defer"};
    return (unsigned)state < sizeof(texts) / sizeof(texts[0]) ? texts[state] : "invalid state";
}
const char *ibv_node_type_str(enum ibv_node_type type) {
    return type == IBV_NODE_CA ? "InfiniBand channel adapter" : "unknown";
}
const char *ibv_event_type_str(enum ibv_event_type type) {
    switch (type) {
    case IBV_EVENT_CQ_ERR:
        return "CQ error";
    case IBV_EVENT_QP_FATAL:
        return "local work queue catastrophic error";
    case IBV_EVENT_QP_REQ_ERR:
        return "invalid request local work queue error";
    case IBV_EVENT_QP_ACCESS_ERR:
        return "local access violation work queue error";
    case IBV_EVENT_DEVICE_FATAL:
        return "local catastrophic error";
    case IBV_EVENT_PORT_ACTIVE:
        return "port active";
    case IBV_EVENT_PORT_ERR:
        return "port error";
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        return "last WQE reached";
    default:
        return "another event";
    }
}
