/* SPDX-License-Identifier: Apache-2.0
 *
 * flow.c: the initiator's side of a queue pair.
 *
 * Entries are taken in order, checked, and sent with their payload to the process of the target; each has a place in
 * the window until its completion is given. Reliable connections complete in order and stop at an error; a queue pair
 * of EFA completes as answers come, and an error is of one entry.
 *
 * An entry that may not go yet (window, credits of the link, fence, reads under way) is held, and with it all behind
 * it.
 */
#include "nic.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct flight {
    uint8_t opcode, status; /* enum lab_opcode, vnic_status */
    bool signalled, done, lost;
    uint32_t cookie, bytes, sges;
    uint64_t patience, deadline; /* deadline: of a lost one */
    struct wire_link *link;      /* NULL: nothing was sent, or it is gone */
    struct lab_sge first, *more; /* of what is read; more: all of them, if they are several */
};

struct lab_flow {
    lab_qp *qp;
    struct lab_flow *next, *previous;
    uint32_t incarnation;
    uint32_t head, tail; /* of the window; numbers modulo 2^32 */
    uint32_t reads;      /* and atomics under way */
    uint64_t bytes;
    bool stopped;  /* an error is in the window: nothing behind it is executed */
    bool flushing; /* the queue pair is in error */
    bool told;     /* and the library knows */
    bool last;     /* and the program knows that it takes no more of the shared receives */
    bool holding;
    struct lab_work held;
    struct flight flight[LAB_WINDOW];
};

/* What is under way on one link. */
struct credit {
    uint32_t requests;
    uint64_t bytes;
};

static struct lab_flow *flows;
static uint32_t incarnations;

static const vnic_knobs *knobs_of(const lab_qp *qp) {
    return &qp->pd->context->device->knobs;
}

static bool in_order(const lab_qp *qp) {
    return qp->type != LAB_SRD;
}

static bool reads(enum lab_opcode opcode) {
    return opcode == LAB_READ || opcode == LAB_ADD || opcode == LAB_SWAP;
}

static struct flight *flight_at(struct lab_flow *flow, uint32_t number) {
    return &flow->flight[number & (LAB_WINDOW - 1)];
}

/* ----------------------------------------------------------------------------------------------------------- windows
 */

static struct flight *add_flight(struct lab_flow *flow, const struct lab_work *work, uint32_t bytes) {
    struct flight *f = flight_at(flow, flow->tail++);
    *f = (struct flight){.opcode = (uint8_t)work->opcode,
                         .signalled = work->signalled || flow->qp->all_signalled,
                         .cookie = work->cookie,
                         .bytes = bytes};
    return f;
}

/* It is under way no more: answered, lost or given up. */
static void give_credit(struct lab_flow *flow, struct flight *f) {
    if (!f->patience) return;
    f->patience = 0;
    flow->bytes -= f->bytes;
    if (reads(f->opcode)) flow->reads--;
    struct credit *credit = f->link ? *wire_user(f->link) : NULL;
    if (!credit) return;
    credit->requests--;
    credit->bytes -= f->bytes;
}

static void report(struct lab_flow *flow, const struct flight *f) {
    const struct lab_done done = {.qp = flow->qp,
                                  .signalled = f->signalled,
                                  .opcode = (enum lab_opcode)f->opcode,
                                  .cookie = f->cookie,
                                  .bytes = f->bytes,
                                  .status = (vnic_status)f->status};
    lab_complete(flow->qp->send_cq, &done);
}

static void end_flight(struct lab_flow *flow, struct flight *f, vnic_status status) {
    give_credit(flow, f);
    f->done = true;
    f->lost = false;
    f->status = (uint8_t)status;
    free(f->more);
    f->more = NULL;
    if (in_order(flow->qp)) {
        flow->stopped |= status != VNIC_OK;
        return;
    }
    report(flow, f);
    f->opcode = 0; /* it is given: its place is free once those before it are */
    while (flow->head != flow->tail && !flight_at(flow, flow->head)->opcode) flow->head++;
}

/* Where they come in order: those whose turn it is. */
static uint32_t advance(struct lab_flow *flow) {
    uint32_t given = 0;
    while (flow->head != flow->tail && flight_at(flow, flow->head)->done && !flow->flushing) {
        struct flight *f = flight_at(flow, flow->head++);
        report(flow, f);
        given++;
        if (f->status != VNIC_OK) lab_qp_fail(flow->qp, LAB_NO_EVENT);
    }
    return given;
}

/* ------------------------------------------------------------------------------------------------------------ checks
 */

/* What the NIC finds wrong with an entry before anything of it goes out. */
static vnic_status check(const lab_qp *qp, const struct lab_work *w, uint64_t length) {
    const vnic_knobs *k = knobs_of(qp);
    const bool atomic = w->opcode == LAB_ADD || w->opcode == LAB_SWAP;
    if (w->opcode == LAB_BAD || w->sges > LAB_MAX_SGES || w->inline_bytes > LAB_MAX_INLINE) return VNIC_LOCAL_OPERATION;
    if (qp->type == LAB_UD && w->opcode != LAB_SEND && w->opcode != LAB_SEND_IMM) return VNIC_LOCAL_OPERATION;
    if ((atomic && !k->atomics) || (w->opcode == LAB_READ && !k->has_read)) return VNIC_LOCAL_OPERATION;
    if (qp->type == LAB_RC && reads(w->opcode) && !qp->max_rd_atomic) return VNIC_LOCAL_OPERATION;
    if (reads(w->opcode) && w->inline_bytes) return VNIC_LOCAL_OPERATION;
    if (length > k->max_msg || length > LAB_MAX_MESSAGE || (atomic && length != 8)) return VNIC_LOCAL_LENGTH;
    if (qp->type == LAB_UD && length > 128u << qp->pd->context->device->active_mtu) return VNIC_LOCAL_LENGTH;
    if (qp->type == LAB_SRD && (w->opcode == LAB_SEND || w->opcode == LAB_SEND_IMM) && length > LAB_SRD_MAX_SEND)
        return VNIC_LOCAL_LENGTH;
    for (uint32_t i = 0; i < w->sges; i++)
        if (w->sge[i].length && !lab_local(qp, &w->sge[i], reads(w->opcode))) return VNIC_LOCAL_ACCESS;
    if (qp->type != LAB_RC && !lab_ah_numbered(qp->pd->context->device, w->ah)) return VNIC_GENERAL;
    return VNIC_OK;
}

/* IB: 4.096 us * 2^timeout, and as often as retry_count says, again; 0: for ever. */
static uint64_t patience_of(const lab_qp *qp) {
    if (knobs_of(qp)->dead_peer == VNIC_SILENCE_FOREVER) return UINT64_MAX;
    if (qp->type != LAB_RC) return knobs_of(qp)->retry_ns ? knobs_of(qp)->retry_ns : 1;
    if (!qp->timeout) return UINT64_MAX;
    return (4096ull << (qp->timeout & 31)) * (1 + (qp->retry_count & 7));
}

/* ------------------------------------------------------------------------------------------------------------ sending
 */

static uint64_t later(uint64_t ns) {
    const uint64_t now = lab_now();
    return ns > UINT64_MAX - now ? UINT64_MAX : now + ns;
}

static void lose(struct lab_flow *flow, struct flight *f) {
    const uint64_t patience = patience_of(flow->qp);
    give_credit(flow, f);
    f->link = NULL;
    f->lost = true;
    f->deadline = later(patience);
}

static struct credit *credit_of(struct wire_link *link) {
    void **user = wire_user(link);
    if (!*user) *user = calloc(1, sizeof(struct credit));
    if (!*user) lab_die("no memory for a link to another process");
    return *user;
}

static bool has_room(const struct credit *credit, uint64_t bytes) {
    return credit->requests < LAB_LINK_REQUESTS && (!credit->bytes || credit->bytes + bytes <= LAB_LINK_BYTES);
}

static void fill_request(const struct lab_flow *flow, const struct lab_work *w, struct lab_request *r) {
    const lab_qp *qp = flow->qp;
    const lab_device *device = qp->pd->context->device;
    const uint32_t gid = qp->sgid_index < device->gids ? qp->sgid_index : 0;
    *r = (struct lab_request){.frame = LAB_FRAME_REQUEST,
                              .incarnation = flow->incarnation,
                              .source_qpn = qp->number,
                              .dest_qpn = qp->type == LAB_RC ? qp->dest_qpn : w->dest_qpn,
                              .immediate = w->immediate,
                              .rkey = w->rkey,
                              .qkey = w->qkey,
                              .opcode = (uint8_t)w->opcode,
                              .type = (uint8_t)qp->type,
                              .fence = w->fence,
                              .solicited = w->solicited,
                              .rnr_retry = (uint8_t)qp->rnr_retry,
                              .remote_address = w->remote_address,
                              .value = w->add_or_swap,
                              .compare = w->compare,
                              .patience_ns = patience_of(qp),
                              .source_gid = device->gid[gid]};
    if (qp->type == LAB_RC)
        r->dest_gid = qp->dest_gid;
    else
        r->dest_gid = lab_ah_numbered(device, w->ah)->gid;
}

static bool send_request(const struct lab_flow *flow, struct wire_link *link, const struct lab_work *w,
                         struct lab_request *r) {
    struct iovec parts[1 + LAB_MAX_SGES] = {{r, sizeof *r}};
    uint32_t n = 1;
    if (w->inline_bytes) parts[n++] = (struct iovec){(void *)(uintptr_t)w->data, w->inline_bytes};
    for (uint32_t i = 0; i < w->sges && !reads(w->opcode); i++)
        if (w->sge[i].length) parts[n++] = (struct iovec){lab_local(flow->qp, &w->sge[i], false), w->sge[i].length};
    return wire_send(link, parts, n);
}

static void remember_destination(struct flight *f, const struct lab_work *w) {
    f->sges = w->sges;
    if (w->sges == 1) f->first = w->sge[0];
    if (w->sges < 2) return;
    f->more = malloc(w->sges * sizeof *f->more);
    if (!f->more) lab_die("no memory for a request's list of %u pieces", w->sges);
    memcpy(f->more, w->sge, w->sges * sizeof *f->more);
}

/* False: not yet. */
static bool submit(struct lab_flow *flow, const struct lab_work *w) {
    lab_qp *qp = flow->qp;
    uint64_t length = w->inline_bytes;
    for (uint32_t i = 0; i < w->sges && i < LAB_MAX_SGES; i++) length += w->sge[i].length;
    if (w->fence && flow->reads) return false;
    const vnic_status wrong = w->opcode == LAB_NOTHING ? VNIC_OK : check(qp, w, length);
    if (w->opcode == LAB_NOTHING || wrong != VNIC_OK) {
        end_flight(flow, add_flight(flow, w, (uint32_t)(length < UINT32_MAX ? length : 0)), wrong);
        return true;
    }
    if (flow->bytes && flow->bytes + length > LAB_WINDOW_BYTES) return false;
    if (qp->type == LAB_RC && reads(w->opcode) && flow->reads >= qp->max_rd_atomic) return false;
    struct lab_request r;
    fill_request(flow, w, &r);
    struct wire_link *link = NULL;
    const int error = wire_reach(lab_wire, r.dest_qpn >> lab_qp_bits(qp->pd->context->device), &link);
    if (error == EAGAIN) return false;
    static bool said;
    if (error && error != ECONNREFUSED && !said) {
        said = true;
        lab_say("no link to another process of the lab: %s; requests to it run out of retries", strerror(error));
    }
    if (!error && !has_room(credit_of(link), length)) return false;
    struct flight *f = add_flight(flow, w, (uint32_t)length);
    r.id = flow->tail - 1;
    r.length = (uint32_t)length;
    const bool sent = !error && send_request(flow, link, w, &r);
    if (qp->type == LAB_UD) { /* nobody says whether it came */
        end_flight(flow, f, VNIC_OK);
        return true;
    }
    if (!sent) {
        lose(flow, f);
        return true;
    }
    f->link = link;
    f->patience = r.patience_ns;
    flow->bytes += length;
    struct credit *credit = credit_of(link);
    credit->requests++;
    credit->bytes += length;
    if (reads(w->opcode)) {
        flow->reads++;
        remember_destination(f, w);
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------------ answers
 */

static bool scatter(const struct lab_flow *flow, const struct flight *f, const char *from) {
    const struct lab_sge *sge = f->more ? f->more : &f->first;
    for (uint32_t i = 0; i < f->sges; i++)
        if (sge[i].length && !lab_local(flow->qp, &sge[i], true)) return false;
    for (uint32_t i = 0; i < f->sges; i++) {
        if (!sge[i].length) continue;
        memcpy(lab_local(flow->qp, &sge[i], true), from, sge[i].length);
        from += sge[i].length;
    }
    return true;
}

const char *lab_flow_reply(struct wire_link *link, const void *frame, uint32_t bytes) {
    struct lab_reply r;
    if (bytes < sizeof r) return "an answer that is too short";
    memcpy(&r, frame, sizeof r);
    if (r.length != bytes - sizeof r || r.status >= VNIC_STATUSES) return "an answer that does not fit itself";
    lab_qp *qp = lab_qp_numbered(r.qpn);
    struct lab_flow *flow = qp ? qp->flow : NULL;
    /* The answer may be to a queue pair that is no more, or to what was flushed. */
    if (!flow || flow->incarnation != r.incarnation || r.id - flow->head >= flow->tail - flow->head) return NULL;
    struct flight *f = flight_at(flow, r.id);
    if (f->done || f->link != link) return NULL;
    vnic_status status = (vnic_status)r.status;
    if (status == VNIC_OK && reads(f->opcode)) {
        if (r.length != f->bytes) return "an answer of another length than was asked for";
        if (!scatter(flow, f, (const char *)frame + sizeof r)) status = VNIC_LOCAL_ACCESS;
    }
    end_flight(flow, f, status);
    return NULL;
}

void lab_flow_link_gone(struct wire_link *link) {
    for (struct lab_flow *flow = flows; flow; flow = flow->next)
        for (uint32_t n = flow->head; n != flow->tail; n++) {
            struct flight *f = flight_at(flow, n);
            if (f->link == link && !f->done) lose(flow, f);
            if (f->link == link) f->link = NULL;
        }
    free(*wire_user(link));
    *wire_user(link) = NULL;
}

/* ------------------------------------------------------------------------------------------------------------- errors
 */

void lab_flow_error(lab_qp *qp) {
    if (qp->flow) qp->flow->flushing = true;
}

void lab_flows_cq_error(const lab_cq *cq) {
    for (struct lab_flow *flow = flows; flow; flow = flow->next)
        if (flow->qp->send_cq == cq || flow->qp->recv_cq == cq) lab_qp_fail(flow->qp, LAB_EVENT_QP_FATAL);
}

static void tell_end(const struct lab_flow *flow) {
    const struct lab_end end = {.frame = LAB_FRAME_END, .incarnation = flow->incarnation, .qpn = flow->qp->number};
    for (uint32_t slot = 0; slot < LAB_MAX_PROCESSES; slot++) {
        struct wire_link *link = wire_known(lab_wire, slot);
        if (link) wire_send(link, &(struct iovec){(void *)(uintptr_t)&end, sizeof end}, 1);
    }
    lab_nic_wake(); /* it goes out in the next round */
}

/* The window is empty afterwards. Answers to what was in it meet another incarnation. */
static void abandon(struct lab_flow *flow) {
    for (; flow->head != flow->tail; flow->head++) {
        struct flight *f = flight_at(flow, flow->head);
        give_credit(flow, f);
        free(f->more);
        f->more = NULL;
    }
    flow->incarnation = ++incarnations;
    flow->holding = flow->stopped = false;
}

/* The rest is the library's to flush. */
static uint32_t tell(struct lab_flow *flow) {
    lab_qp *qp = flow->qp;
    if (flow->told || !qp->pd->context->device->model->tells_rest) return 0;
    flow->told = true;
    struct lab_done done = {.qp = qp, .rest = true, .status = VNIC_FLUSHED};
    lab_complete(qp->send_cq, &done);
    done.receive = true;
    if (!qp->srq) lab_complete(qp->recv_cq, &done);
    return 1;
}

static uint32_t flush(struct lab_flow *flow) {
    lab_qp *qp = flow->qp;
    uint32_t done = 0;
    const bool by_nic = knobs_of(qp)->flush_by == VNIC_FLUSH_NIC;
    if (flow->head != flow->tail || flow->holding) {
        if (flow->head != flow->tail) tell_end(flow);
        const uint32_t from = flow->head, to = flow->tail;
        for (uint32_t n = from; by_nic && n != to; n++) {
            struct flight *f = flight_at(flow, n);
            if (f->opcode == 0) continue;
            f->status = VNIC_FLUSHED; /* also what went wrong behind the first error */
            report(flow, f);
        }
        const struct flight held = {
            .opcode = (uint8_t)flow->held.opcode, .cookie = flow->held.cookie, .status = VNIC_FLUSHED};
        if (by_nic && flow->holding) report(flow, &held);
        abandon(flow);
        done++;
    }
    if (!by_nic) return done + tell(flow);
    static struct lab_work work;
    for (uint32_t i = 0; i < LAB_FETCH_AT_ONCE && qp->pd->context->device->model->fetch(qp, &work); i++, done++) {
        const struct flight f = {.opcode = (uint8_t)work.opcode, .cookie = work.cookie, .status = VNIC_FLUSHED};
        report(flow, &f);
    }
    if (!qp->srq) done += lab_receives_flush(qp);
    return done;
}

/* Last WQE Reached: of the shared receives it has taken what it will, and all of those have their completions. */
static uint32_t tell_last(struct lab_flow *flow) {
    const lab_qp *qp = flow->qp;
    if (!qp->srq || flow->last || lab_ghosts_under_way(qp)) return 0;
    flow->last = true;
    lab_async_event(qp->pd->context, LAB_EVENT_QP_LAST_WQE, qp->user_handle);
    return 1;
}

/* ------------------------------------------------------------------------------------------------------------- turns
 */

static uint32_t take_in(struct lab_flow *flow) {
    lab_qp *qp = flow->qp;
    const struct lab_model *model = qp->pd->context->device->model;
    uint32_t done = 0;
    for (uint32_t i = 0; i < LAB_FETCH_AT_ONCE && flow->tail - flow->head < LAB_WINDOW && !flow->stopped; i++) {
        if (!flow->holding) {
            if (!model->fetch(qp, &flow->held)) break;
            done++;
        }
        flow->holding = !submit(flow, &flow->held);
        if (flow->holding) break;
    }
    return done;
}

/* What was sent to a process that is gone: retries run out. */
static uint32_t give_up(struct lab_flow *flow, uint64_t now) {
    uint32_t done = 0;
    for (uint32_t n = flow->head; n != flow->tail; n++) {
        struct flight *f = flight_at(flow, n);
        if (!f->lost || f->done || f->deadline > now) continue;
        end_flight(flow, f, VNIC_RETRY_EXCEEDED);
        done++;
        if (in_order(flow->qp)) break;
    }
    return done;
}

uint32_t lab_flows_turn(void) {
    uint32_t done = 0;
    uint64_t now = 0;
    for (struct lab_flow *flow = flows; flow; flow = flow->next) {
        lab_qp *qp = flow->qp;
        const struct lab_model *model = qp->pd->context->device->model;
        if (qp->state == LAB_RTS) done += take_in(flow);
        if (flow->head != flow->tail) {
            if (!now) now = lab_now();
            done += give_up(flow, now);
            done += advance(flow);
        }
        if (flow->flushing) done += flush(flow) + tell_last(flow);
        if (!model->look) continue;
        if (qp->send_cq->channel) lab_cq_look(qp->send_cq);
        if (qp->recv_cq != qp->send_cq && qp->recv_cq->channel) lab_cq_look(qp->recv_cq);
    }
    return done;
}

bool lab_flows_awake(void) {
    for (const struct lab_flow *flow = flows; flow; flow = flow->next)
        if (flow->qp->state >= LAB_RTR) return true;
    return false;
}

/* ----------------------------------------------------------------------------------------------------------- control
 */

int lab_flow_open(lab_qp *qp) {
    if (qp->type == LAB_UC) return lab_unsupported("unreliable connections (UC queue pairs)");
    const int error = lab_nic_open(qp->pd->context->device);
    if (error) return error;
    struct lab_flow *flow = calloc(1, sizeof *flow);
    if (!flow) return ENOMEM;
    flow->qp = qp;
    flow->incarnation = ++incarnations;
    flow->next = flows;
    if (flows) flows->previous = flow;
    flows = flow;
    qp->flow = flow;
    lab_nic_wake();
    return 0;
}

int lab_flow_modify(lab_qp *qp, enum lab_qp_state from) {
    struct lab_flow *flow = qp->flow;
    if (qp->state == LAB_ERR && from != LAB_ERR) flow->flushing = true;
    if (qp->state == LAB_RESET) {
        if (from >= LAB_RTR) tell_end(flow);
        lab_ghosts_leave(qp);
        abandon(flow);
        flow->flushing = flow->told = flow->last = false;
    }
    lab_nic_wake();
    return 0;
}

void lab_flow_close(lab_qp *qp) {
    struct lab_flow *flow = qp->flow;
    if (!flow) return;
    lab_ghosts_settle(qp);
    if (qp->state >= LAB_RTR) tell_end(flow);
    lab_ghosts_leave(qp);
    abandon(flow);
    if (flow->next) flow->next->previous = flow->previous;
    if (flow->previous)
        flow->previous->next = flow->next;
    else
        flows = flow->next;
    free(flow);
    qp->flow = NULL;
}

void lab_flows_forget(void) {
    flows = NULL;
}
