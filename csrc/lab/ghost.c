/* SPDX-License-Identifier: Apache-2.0
 *
 * ghost.c: the target's side: requests of other processes' queue pairs, carried out on this one's memory.
 *
 * A ghost stands for one queue pair of an initiator towards one of this process: two endpoints of the fabric, connected
 * with each other. Requests wait in the ghost in the order in which they came until the queue pair can take them (a
 * reliable connection may be made here a little later than there) and the fabric has room; then the fabric has them,
 * and gives their completions in the order that the NIC's knobs say. Messages and immediates take receives at the
 * moment that the fabric delivers them.
 *
 * What the target's NIC does not answer, the initiator's gives up in time: such a request stays here until then, so
 * that it is answered at last, in its turn, with that error.
 */
#include "nic.h"

#include <stdlib.h>
#include <string.h>

#define ACCESS_LOCAL_WRITE 1u /* enum ibv_access_flags */
#define ACCESS_REMOTE_WRITE 2u
#define ACCESS_REMOTE_READ 4u
#define ACCESS_REMOTE_ATOMIC 8u
#define BUCKETS 1024u
#define SETTLE_NS 1000000ull
#define WHOLE_PROCESS 0u /* rank in the fabric: this process's memory; a ghost's is 1 and its slot */

struct wanted { /* a request */
    struct wanted *next, *previous;
    struct ghost *ghost;
    struct lab_request r;
    uint64_t deadline;
    bool lost;  /* it reached a queue pair that is no more: it is answered at its deadline, and not carried out */
    bool heard; /* a message or immediate took its receive */
    vnic_region staged; /* `data`, as the fabric has it */
    char *data;         /* the payload; what was read, or the old value */
};

struct list {
    struct wanted *first, *last;
};

struct ghost {
    struct ghost *next;                   /* of its bucket */
    struct ghost *next_busy, *prior_busy; /* of those that have requests */
    struct wire_link *link;
    uint32_t source_qpn, dest_qpn, incarnation;
    bool busy;
    lab_qp *qp; /* NULL: not connected to it */
    vnic_endpoint *initiator, *responder;
    struct list waiting, posted; /* not with the fabric yet; there */
    uint32_t reads;              /* and atomics there */
};

/* What a link has asked for, and not been answered. */
struct asked {
    uint32_t requests;
    uint64_t bytes;
};

static struct ghost *buckets[BUCKETS];
static struct ghost *busy;
static uint32_t ghosts;

/* ------------------------------------------------------------------------------------------------------------- lists
 */

static void append(struct list *l, struct wanted *w) {
    w->next = NULL;
    w->previous = l->last;
    if (l->last)
        l->last->next = w;
    else
        l->first = w;
    l->last = w;
}

static void drop(struct list *l, struct wanted *w) {
    if (w->previous)
        w->previous->next = w->next;
    else
        l->first = w->next;
    if (w->next)
        w->next->previous = w->previous;
    else
        l->last = w->previous;
}

static void make_busy(struct ghost *g) {
    if (g->busy) return;
    g->busy = true;
    g->prior_busy = NULL;
    g->next_busy = busy;
    if (busy) busy->prior_busy = g;
    busy = g;
}

static void make_idle(struct ghost *g) {
    if (!g->busy) return;
    g->busy = false;
    if (g->next_busy) g->next_busy->prior_busy = g->prior_busy;
    if (g->prior_busy)
        g->prior_busy->next_busy = g->next_busy;
    else
        busy = g->next_busy;
}

static struct ghost **bucket_of(const struct wire_link *link, uint32_t source_qpn, uint32_t dest_qpn) {
    const uint64_t mixed =
        ((uintptr_t)link >> 4) * 31 + source_qpn * 0x9e3779b97f4a7c15ull + dest_qpn * 0xd1342543de82ef95ull;
    return &buckets[mixed >> 40 & (BUCKETS - 1)];
}

static bool reads(uint8_t opcode) {
    return opcode == LAB_READ || opcode == LAB_ADD || opcode == LAB_SWAP;
}

static bool sends(uint8_t opcode) {
    return opcode == LAB_SEND || opcode == LAB_SEND_IMM;
}

/* ----------------------------------------------------------------------------------------------------------- answers
 */

static void forget(struct wanted *w) {
    struct asked *asked = *wire_user(w->ghost->link);
    asked->requests--;
    asked->bytes -= w->r.length;
    free(w->data);
    free(w);
}

/* It must be in no list. */
static void answer(struct wanted *w, vnic_status status) {
    const bool has_data = status == VNIC_OK && reads(w->r.opcode);
    struct lab_reply reply = {.frame = LAB_FRAME_REPLY,
                              .id = w->r.id,
                              .incarnation = w->r.incarnation,
                              .qpn = w->r.source_qpn,
                              .status = (uint32_t)status,
                              .length = has_data ? w->r.length : 0};
    const struct iovec parts[2] = {{&reply, sizeof reply}, {w->data, reply.length}};
    wire_send(w->ghost->link, parts, reply.length ? 2 : 1);
    forget(w);
}

/* ---------------------------------------------------------------------------------------------------------- receives
 */

static bool fetch_receive(lab_qp *qp, struct lab_receive *receive) {
    const struct lab_model *model = qp->pd->context->device->model;
    if (!qp->srq) return model->fetch_receive(qp, receive);
    if (!model->fetch_shared_receive(qp->srq, receive)) return false;
    lab_srq_look(qp->srq);
    return true;
}

/* What went wrong at the receiver, and what the sender hears of it. */
static vnic_status scatter(const lab_qp *qp, const struct lab_receive *receive, const char *from, uint64_t bytes,
                           uint64_t skipped) {
    uint64_t room = 0;
    for (uint32_t i = 0; i < receive->sges && i < LAB_MAX_SGES; i++) room += receive->sge[i].length;
    if (room < skipped + bytes) return VNIC_LOCAL_LENGTH;
    for (uint32_t pass = 0; pass < 2; pass++) { /* all is checked before anything is written */
        const char *at = from;
        uint64_t left = bytes, skip = skipped;
        for (uint32_t i = 0; i < receive->sges && (left || skip); i++) {
            struct lab_sge sge = receive->sge[i];
            const uint64_t over = skip < sge.length ? skip : sge.length;
            const uint64_t n = left < sge.length - over ? left : sge.length - over;
            sge.length = (uint32_t)(over + n);
            char *to = sge.length ? lab_local(qp, &sge, true) : NULL;
            if (sge.length && !to) return VNIC_LOCAL_ACCESS;
            if (pass) memset(to, 0, over);
            if (pass && n) memcpy(to + over, at, n);
            at += n;
            left -= n;
            skip -= over;
        }
    }
    return VNIC_OK;
}

static void report_receive(lab_qp *qp, const struct lab_request *r, const struct lab_receive *receive, uint32_t bytes,
                           vnic_status status) {
    const lab_ah *ah = qp->type == LAB_RC ? NULL : lab_ah_in(qp->pd, &r->source_gid);
    const struct lab_done done = {.qp = qp,
                                  .receive = true,
                                  .signalled = true,
                                  .solicited = r->solicited,
                                  .has_immediate = r->opcode == LAB_SEND_IMM || r->opcode == LAB_WRITE_IMM,
                                  .unsolicited = !receive,
                                  .is_write = r->opcode == LAB_WRITE_IMM,
                                  .cookie = receive ? receive->cookie : 0,
                                  .bytes = bytes,
                                  .immediate = r->immediate,
                                  .source_qpn = r->source_qpn,
                                  .source_ah = ah ? ah->number : 0xffff,
                                  .status = status};
    lab_complete(qp->recv_cq, &done);
}

/* A responder that finds something wrong ends its reliable connection, too. */
static void responder_fails(lab_qp *qp, vnic_status told) {
    if (qp->type != LAB_RC) return;
    if (told == VNIC_REMOTE_ACCESS) lab_qp_fail(qp, LAB_EVENT_QP_ACCESS_ERR);
    if (told == VNIC_REMOTE_INVALID) lab_qp_fail(qp, LAB_EVENT_QP_REQ_ERR);
    if (told == VNIC_REMOTE_OPERATION) lab_qp_fail(qp, LAB_EVENT_QP_FATAL);
}

/* Called by the fabric: the message, or the immediate behind its bytes, has arrived. */
static vnic_status receive(void *context, uint64_t cookie) {
    struct ghost *g = context;
    struct wanted *w = (struct wanted *)(uintptr_t)cookie;
    lab_qp *qp = g->qp;
    struct lab_receive one;
    one.cookie = one.sges = 0;
    if (w->heard) return VNIC_OK;
    const bool takes = sends(w->r.opcode) || !qp->unsolicited;
    if (takes && !fetch_receive(qp, &one)) return VNIC_RNR_EXCEEDED;
    w->heard = true;
    vnic_status status = VNIC_OK;
    if (sends(w->r.opcode)) status = scatter(qp, &one, w->data, w->r.length, 0);
    report_receive(qp, &w->r, takes ? &one : NULL, w->r.length, status);
    if (status == VNIC_OK) return VNIC_OK;
    /* EFA has a status of its own for a buffer that is too short (efa_io_defs.h, 11); IB calls it an invalid request.
     */
    if (status == VNIC_LOCAL_LENGTH && qp->type == LAB_RC) return VNIC_REMOTE_INVALID;
    return VNIC_REMOTE_OPERATION;
}

uint32_t lab_receives_flush(lab_qp *qp) {
    static struct lab_receive one;
    uint32_t done = 0;
    static const struct lab_request nobody = {.opcode = LAB_SEND};
    for (; done < LAB_FETCH_AT_ONCE && fetch_receive(qp, &one); done++)
        report_receive(qp, &nobody, &one, 0, VNIC_FLUSHED);
    return done;
}

/* Datagrams: taken or lost, and nobody is told. 40 bytes lie before the message (GRH), of which nothing is said here.
 */
static void take_datagram(const struct lab_request *r, const char *data) {
    lab_qp *qp = lab_qp_numbered(r->dest_qpn);
    struct lab_receive one;
    if (!qp || qp->type != LAB_UD || qp->state < LAB_RTR || qp->state == LAB_ERR || qp->qkey != r->qkey) return;
    if (!fetch_receive(qp, &one)) return;
    const uint64_t head = qp->pd->context->device->knobs.vendor == VNIC_AMAZON ? 0 : LAB_GRH_BYTES;
    const vnic_status status = scatter(qp, &one, data, r->length, head);
    report_receive(qp, r, &one, r->length + (uint32_t)head, status);
    if (status != VNIC_OK) lab_qp_fail(qp, LAB_NO_EVENT);
}

/* ------------------------------------------------------------------------------------------------------ to the fabric
 */

static bool is_of(const lab_device *device, const struct in6_addr *gid) {
    for (uint32_t i = 0; i < device->gids; i++)
        if (!memcmp(&device->gid[i], gid, sizeof *gid)) return true;
    return false;
}

static bool answers(const lab_qp *qp) {
    return qp->state == LAB_RTR || qp->state == LAB_RTS || qp->state == LAB_SQD || qp->state == LAB_SQE;
}

/* The queue pair that the request is for, if it is ready for it. */
static lab_qp *target_of(const struct lab_request *r) {
    lab_qp *qp = lab_qp_numbered(r->dest_qpn);
    if (!qp || !answers(qp) || qp->type != r->type || !is_of(qp->pd->context->device, &r->dest_gid)) return NULL;
    if (qp->type == LAB_RC && qp->dest_qpn != r->source_qpn) return NULL;
    if (qp->type == LAB_SRD && qp->qkey != r->qkey) return NULL;
    return qp;
}

/* Times of min_rnr_timer in units of 10 us (InfiniBand specification, volume 1, table 45). */
static const uint32_t rnr_timers[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                        48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                        2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

static void disconnect(struct ghost *g) {
    if (!g->qp) return;
    vnic_endpoint_close(g->initiator);
    vnic_endpoint_close(g->responder);
    g->initiator = g->responder = NULL;
    g->qp = NULL;
    g->reads = 0;
    /* What the fabric had comes before what waits, and is not carried out any more. */
    const uint64_t now = lab_now();
    for (struct wanted *w = g->posted.last, *before; w; w = before) {
        before = w->previous;
        drop(&g->posted, w);
        w->lost = true;
        w->deadline = w->r.patience_ns > UINT64_MAX - now ? UINT64_MAX : now + w->r.patience_ns;
        w->previous = NULL;
        w->next = g->waiting.first;
        if (w->next)
            w->next->previous = w;
        else
            g->waiting.last = w;
        g->waiting.first = w;
    }
}

static void connect_to(struct ghost *g, lab_qp *qp, const struct lab_request *r) {
    const lab_device *device = qp->pd->context->device;
    const vnic_terms terms = {.rnr_retries = r->rnr_retry == 7 ? VNIC_ANY : r->rnr_retry,
                              .rnr_ns = 10000ull * rnr_timers[qp->min_rnr_timer & 31],
                              .retry_ns = r->patience_ns};
    vnic_endpoint_config config = {.rank = 1 + wire_peer(g->link),
                                   .peers = 1,
                                   .cq_entries = UINT32_MAX,
                                   .terms = &terms,
                                   .in_turn = qp->type == LAB_RC};
    char text[256];
    g->initiator = vnic_endpoint_open(device->nic, &config, text);
    config = (vnic_endpoint_config){
        .rank = WHOLE_PROCESS, .peers = 1, .cq_entries = UINT32_MAX, .receive = receive, .receive_context = g};
    g->responder = g->initiator ? vnic_endpoint_open(device->nic, &config, text) : NULL;
    if (!g->responder) lab_die("%s", text);
    vnic_connect(g->initiator, 0, vnic_endpoint_id(g->responder));
    vnic_connect(g->responder, 0, vnic_endpoint_id(g->initiator));
    g->qp = qp;
}

/* What the target's NIC holds against the request, before the fabric looks at bounds and order. */
static vnic_status refusal(const struct ghost *g, const struct lab_request *r, const lab_mr *mr) {
    const lab_qp *qp = g->qp;
    const lab_device *device = qp->pd->context->device;
    if (device->knobs.needs_target_ah && !lab_ah_of_gid(device, &r->source_gid)) return VNIC_UNKNOWN_PEER;
    if (sends(r->opcode) || (!r->length && r->opcode == LAB_WRITE_IMM)) return VNIC_OK;
    const uint32_t needed = r->opcode == LAB_READ                           ? ACCESS_REMOTE_READ
                            : r->opcode == LAB_ADD || r->opcode == LAB_SWAP ? ACCESS_REMOTE_ATOMIC
                                                                            : ACCESS_REMOTE_WRITE;
    if (qp->type == LAB_RC && !(qp->access & needed)) return VNIC_REMOTE_INVALID;
    if (qp->type == LAB_RC && reads(r->opcode) && g->reads >= qp->max_dest_rd_atomic) return VNIC_REMOTE_INVALID;
    if (!r->length && !reads(r->opcode))
        return VNIC_OK; /* nothing of the memory is touched: the key is not looked at */
    if (!mr || mr->pd != qp->pd || !(mr->access & needed)) return VNIC_REMOTE_ACCESS;
    return VNIC_OK;
}

static vnic_refusal post(struct ghost *g, struct wanted *w) {
    const struct lab_request *r = &w->r;
    const lab_device *device = g->qp->pd->context->device;
    const lab_mr *mr = sends(r->opcode) ? NULL : lab_mr_keyed(device, r->rkey);
    struct vnic_work work = {.cookie = (uintptr_t)w, .flags = VNIC_SIGNALLED, .fails = (uint8_t)refusal(g, r, mr)};
    switch ((enum lab_opcode)r->opcode) {
    case LAB_READ:
        work.kind = VNIC_READ;
        break;
    case LAB_ADD:
        work.kind = VNIC_ADD;
        break;
    case LAB_SWAP:
        work.kind = VNIC_SWAP;
        break;
    case LAB_WRITE:
        work.kind = VNIC_WRITE;
        break;
    default:
        work.kind = VNIC_WRITE_IMM;
        break;
    }
    if (r->fence && device->knobs.fence_kind != VNIC_FENCE_NONE) work.flags |= VNIC_FENCE;
    work.value = r->value;
    work.compare = r->compare;
    if (!sends(r->opcode)) {
        if (r->length || reads(r->opcode)) {
            w->staged =
                (vnic_region){.base = w->data, .bytes = r->length, .rank = 1 + wire_peer(g->link), .alive = true};
            work.sges = 1;
            work.sge[0] = (vnic_sge){&w->staged, 0, r->length};
        }
        if (mr) {
            work.remote_key = mr->region->key;
            work.remote_address = r->remote_address - mr->iova + mr->start;
        }
    }
    /* A write of no bytes touches nothing: the fabric is given a place that there is. */
    if (r->opcode == LAB_WRITE && !r->length) work.kind = VNIC_WRITE_IMM, w->heard = true, work.sges = 0;
    uint32_t taken = 0;
    char text[256];
    const vnic_refusal refused = vnic_post(g->initiator, 0, &work, 1, false, &taken, text);
    return taken ? VNIC_TAKEN : refused;
}

/* Requests that can go to the fabric do; those that nobody will answer end in time. Returns how many moved. */
static uint32_t push(struct ghost *g) {
    uint32_t moved = 0;
    uint64_t now = 0;
    while (g->waiting.first) {
        struct wanted *w = g->waiting.first;
        lab_qp *qp = w->lost ? NULL : target_of(&w->r);
        if (g->qp && qp != g->qp) disconnect(g), w = g->waiting.first, qp = NULL;
        if (!qp || w->lost) {
            /* EFA answers for queue pairs that are not there or in error (libfabric prov/efa, efa_errno.h, 9); other
             * NICs are silent. */
            const lab_qp *any = lab_qp_numbered(w->r.dest_qpn);
            if (!now) now = lab_now();
            const bool bad_number = w->r.type == LAB_SRD && !w->lost && (!any || any->state == LAB_ERR);
            if (!bad_number && w->deadline > now) return moved;
            drop(&g->waiting, w);
            answer(w, bad_number ? VNIC_REMOTE_INVALID : VNIC_RETRY_EXCEEDED);
            moved++;
            continue;
        }
        if (!g->qp) connect_to(g, qp, &w->r);
        const vnic_refusal refused = post(g, w);
        if (refused == VNIC_NO_ROOM) return moved;
        drop(&g->waiting, w);
        moved++;
        if (refused != VNIC_TAKEN) {
            answer(w, refused == VNIC_TOO_LONG ? VNIC_REMOTE_INVALID : VNIC_REMOTE_OPERATION);
            continue;
        }
        append(&g->posted, w);
        if (reads(w->r.opcode)) g->reads++;
    }
    return moved;
}

static uint32_t collect(struct ghost *g) {
    vnic_completion done[32];
    uint32_t all = 0;
    for (uint32_t n = 1; n && g->qp; all += n) {
        n = vnic_poll(g->initiator, done, 32);
        for (uint32_t i = 0; i < n; i++) {
            struct wanted *w = (struct wanted *)(uintptr_t)done[i].cookie;
            const vnic_status status = (vnic_status)done[i].status;
            drop(&g->posted, w);
            if (reads(w->r.opcode)) g->reads--;
            answer(w, status);
            responder_fails(g->qp, status);
        }
    }
    return all;
}

/* One that stands for nothing: without requests and without a connection. */
static void free_idle(struct ghost *g) {
    if (g->busy || g->qp) return;
    struct ghost **at = bucket_of(g->link, g->source_qpn, g->dest_qpn);
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    free(g);
    ghosts--;
}

uint32_t lab_ghosts_turn(void) {
    uint32_t done = 0;
    for (struct ghost *g = busy, *next; g; g = next) {
        next = g->next_busy;
        done += collect(g);
        if (g->qp && !answers(g->qp)) disconnect(g); /* it went into error */
        done += push(g);
        if (g->waiting.first || g->posted.first) continue;
        make_idle(g);
        free_idle(g);
    }
    return done;
}

bool lab_ghosts_under_way(const lab_qp *qp) {
    for (const struct ghost *g = busy; g; g = g->next_busy)
        if (g->posted.first && (!qp || g->qp == qp)) return true;
    return false;
}

void lab_ghosts_settle(const lab_qp *qp) {
    const uint64_t until = vnic_now(lab_fabric) + SETTLE_NS;
    while (lab_ghosts_under_way(qp) && vnic_next(lab_fabric) <= until) {
        vnic_set_now(lab_fabric, vnic_next(lab_fabric));
        while (vnic_due(lab_fabric)) vnic_run_due(lab_fabric);
        for (struct ghost *g = busy; g; g = g->next_busy) collect(g);
    }
    wire_push(lab_wire);
}

uint64_t lab_ghosts_next(void) {
    /* Whoever waits for a queue pair or a deadline is looked at again within a millisecond. */
    for (const struct ghost *g = busy; g; g = g->next_busy)
        if (g->waiting.first) return vnic_now(lab_fabric) + 1000000;
    return UINT64_MAX;
}

/* ------------------------------------------------------------------------------------------------------- from the wire
 */

static struct ghost *ghost_of(struct wire_link *link, const struct lab_request *r) {
    struct ghost **bucket = bucket_of(link, r->source_qpn, r->dest_qpn);
    struct ghost *g = *bucket;
    while (g && !(g->link == link && g->source_qpn == r->source_qpn && g->dest_qpn == r->dest_qpn)) g = g->next;
    if (g) return g;
    g = calloc(1, sizeof *g);
    if (!g) return NULL;
    ghosts++;
    g->link = link;
    g->source_qpn = r->source_qpn;
    g->dest_qpn = r->dest_qpn;
    g->incarnation = r->incarnation;
    g->next = *bucket;
    *bucket = g;
    return g;
}

static void forget_all(struct list *l) {
    while (l->first) {
        struct wanted *w = l->first;
        drop(l, w);
        forget(w);
    }
}

/* What it has asked for is not wanted any more. */
static void empty(struct ghost *g) {
    disconnect(g);
    forget_all(&g->waiting);
    make_idle(g);
}

static void end_ghosts(const struct wire_link *link, uint32_t source_qpn, bool all) {
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct ghost **at = &buckets[i]; *at;) {
            struct ghost *g = *at;
            if (g->link != link || (!all && g->source_qpn != source_qpn)) {
                at = &g->next;
                continue;
            }
            empty(g);
            *at = g->next;
            free(g);
            ghosts--;
        }
}

/* Numbers of queue pairs begin with the slot of their process, with as many bits as the NIC's kind has: so a peer has
 * no more of them than its NICs. */
static bool is_its_own(const struct wire_link *link, uint32_t qpn) {
    uint32_t n;
    const lab_device *devices = lab_devices(&n);
    for (uint32_t i = 0; i < n; i++)
        if (qpn >> lab_qp_bits(&devices[i]) == wire_peer(link)) return true;
    return false;
}

const char *lab_ghost_request(struct wire_link *link, const void *frame, uint32_t bytes) {
    struct lab_request r;
    if (bytes < sizeof r) return "a request that is too short";
    memcpy(&r, frame, sizeof r);
    const uint64_t payload = reads(r.opcode) ? 0 : r.length;
    if (r.opcode < LAB_SEND || r.opcode > LAB_SWAP || payload != bytes - sizeof r || r.length > LAB_MAX_MESSAGE ||
        ((r.opcode == LAB_ADD || r.opcode == LAB_SWAP) && r.length != 8) ||
        (r.type != LAB_RC && r.type != LAB_UD && r.type != LAB_SRD))
        return "a request that does not fit itself";
    if (!is_its_own(link, r.source_qpn)) return "a request of a queue pair that is not its own";
    const char *data = (const char *)frame + sizeof r;
    if (r.type == LAB_UD) {
        if (!sends(r.opcode)) return "a datagram that is no message";
        take_datagram(&r, data);
        return NULL;
    }
    if (!*wire_user(link)) *wire_user(link) = calloc(1, sizeof(struct asked));
    struct asked *asked = *wire_user(link);
    if (!asked) return "no memory for its requests";
    if (asked->requests >= LAB_LINK_REQUESTS || (asked->bytes && asked->bytes + r.length > LAB_LINK_BYTES))
        return "it asks for more than it may have under way";
    struct ghost *g = ghost_of(link, &r);
    struct wanted *w = g ? calloc(1, sizeof *w) : NULL;
    if (w && r.length) w->data = malloc(r.length);
    if (!w || (r.length && !w->data)) {
        free(w);
        return "no memory for its request";
    }
    if (g->incarnation != r.incarnation) empty(g);
    g->incarnation = r.incarnation;
    if (payload) memcpy(w->data, data, payload);
    w->ghost = g;
    w->r = r;
    const uint64_t now = lab_now();
    w->deadline = r.patience_ns > UINT64_MAX - now ? UINT64_MAX : now + r.patience_ns;
    asked->requests++;
    asked->bytes += r.length;
    append(&g->waiting, w);
    make_busy(g);
    push(g);
    return NULL;
}

const char *lab_ghost_end(struct wire_link *link, const void *frame, uint32_t bytes) {
    struct lab_end end;
    if (bytes != sizeof end) return "an end that does not fit itself";
    memcpy(&end, frame, sizeof end);
    end_ghosts(link, end.qpn, false);
    return NULL;
}

void lab_ghost_link_gone(struct wire_link *link) {
    end_ghosts(link, 0, true);
    free(*wire_user(link));
    *wire_user(link) = NULL;
}

void lab_ghosts_leave(const lab_qp *qp) {
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct ghost *g = buckets[i], *next; g; g = next) {
            next = g->next;
            if (g->qp != qp) continue;
            disconnect(g);
            free_idle(g);
        }
}

uint32_t lab_ghosts(void) {
    return ghosts;
}

void lab_ghosts_forget(void) {
    memset(buckets, 0, sizeof buckets);
    busy = NULL;
    ghosts = 0;
}
