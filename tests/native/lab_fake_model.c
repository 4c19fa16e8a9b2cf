/* SPDX-License-Identifier: Apache-2.0
 *
 * lab_fake_model.c: see lab_fake_model.h.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "lab_fake_model.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OBJECTS 4096u

struct ring {
    _Atomic uint32_t posted, taken;
};
struct fake_queue {
    struct ring sends, receives;
    struct lab_work work[FAKE_DEPTH];
    struct lab_receive receive[FAKE_DEPTH];
};
struct fake_shared {
    struct ring receives;
    struct lab_receive receive[FAKE_DEPTH];
};
struct fake_completions {
    struct ring entries;
    _Atomic uint32_t silent, notified, asked;
    uint32_t size;
    struct lab_done *done;
};

pthread_mutex_t lab_lock = PTHREAD_MUTEX_INITIALIZER;
static lab_device the_device;
static uint32_t devices;
static lab_context the_context;
static lab_qp *qps[OBJECTS];
static lab_mr *mrs[OBJECTS];
static lab_ah *ahs[OBJECTS];
static uint32_t n_qps = 1, n_mrs = 1, n_ahs = 1;
static _Atomic uint32_t events[FAKE_EVENTS];

/* ------------------------------------------------------------------------------------------------- what the lab gives
 */

static void say(const char *format, va_list arguments) {
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
}

void lab_say(const char *format, ...) {
    static uint32_t lines;
    va_list arguments;
    if (lines++ >= 3) return; /* those that nonsense brings are many */
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

int lab_unsupported(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return EOPNOTSUPP;
}

void lab_die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    abort();
}

lab_device *lab_devices(uint32_t *n) {
    *n = devices;
    return &the_device;
}

uint32_t lab_qp_bits(const lab_device *device) {
    return device->model->qpn_bits - 6;
}

lab_qp *lab_qp_numbered(uint32_t number) {
    const uint32_t bits = lab_qp_bits(&the_device), i = number & ((1u << bits) - 1);
    return i < OBJECTS && qps[i] && qps[i]->number == number ? qps[i] : NULL;
}

lab_mr *lab_mr_keyed(const lab_device *device, uint32_t key) {
    lab_mr *mr = key >> 8 < OBJECTS ? mrs[key >> 8] : NULL;
    return mr && mr->key == key && mr->pd->context->device == device ? mr : NULL;
}

lab_ah *lab_ah_numbered(const lab_device *device, uint32_t number) {
    lab_ah *ah = number < OBJECTS ? ahs[number] : NULL;
    return ah && ah->pd->context->device == device ? ah : NULL;
}

lab_ah *lab_ah_in(const lab_pd *pd, const struct in6_addr *gid) {
    for (uint32_t i = 0; i < OBJECTS; i++)
        if (ahs[i] && ahs[i]->pd == pd && !memcmp(&ahs[i]->gid, gid, sizeof *gid)) return ahs[i];
    return NULL;
}

lab_ah *lab_ah_of_gid(const lab_device *device, const struct in6_addr *gid) {
    for (uint32_t i = 0; i < n_ahs; i++)
        if (ahs[i] && ahs[i]->pd->context->device == device && !memcmp(&ahs[i]->gid, gid, sizeof *gid)) return ahs[i];
    return NULL;
}

void lab_async_event(lab_context *context, enum lab_event event, uint64_t element) {
    (void)context;
    (void)element;
    atomic_fetch_add(&events[event], 1);
}

void lab_cq_notify(lab_cq *cq, bool solicited) {
    if (!cq->armed || (cq->solicited_only && !solicited)) return;
    cq->armed = false;
    atomic_fetch_add(&((struct fake_completions *)cq->model_data)->notified, 1);
}

bool lab_trapped_next(void) {
    return false;
}

/* ------------------------------------------------------------------------------------------------------------- model
 */

static uint32_t used(const struct ring *ring) {
    return atomic_load_explicit(&ring->posted, memory_order_acquire) -
           atomic_load_explicit(&ring->taken, memory_order_acquire);
}

static void copy_work(struct lab_work *to, const struct lab_work *from) {
    memcpy(to, from, offsetof(struct lab_work, data) + from->inline_bytes);
}

static bool fetch(lab_qp *qp, struct lab_work *work) {
    struct fake_queue *q = qp->model_data;
    if (!used(&q->sends)) return false;
    copy_work(work, &q->work[q->sends.taken % FAKE_DEPTH]);
    atomic_fetch_add_explicit(&q->sends.taken, 1, memory_order_release);
    return true;
}

static bool fetch_from(struct ring *ring, const struct lab_receive *from, struct lab_receive *receive) {
    if (!used(ring)) return false;
    *receive = from[ring->taken % FAKE_DEPTH];
    atomic_fetch_add_explicit(&ring->taken, 1, memory_order_release);
    return true;
}

static bool fetch_receive(lab_qp *qp, struct lab_receive *receive) {
    struct fake_queue *q = qp->model_data;
    return fetch_from(&q->receives, q->receive, receive);
}

static bool fetch_shared(lab_srq *srq, struct lab_receive *receive) {
    struct fake_shared *q = srq->model_data;
    return fetch_from(&q->receives, q->receive, receive);
}

static uint32_t shared_receives(lab_srq *srq) {
    return used(&((struct fake_shared *)srq->model_data)->receives);
}

static uint32_t cq_used(lab_cq *cq) {
    return used(&((struct fake_completions *)cq->model_data)->entries);
}

static void complete(lab_cq *cq, const struct lab_done *done) {
    struct fake_completions *q = cq->model_data;
    if (!done->receive && !done->signalled && done->status == VNIC_OK) {
        atomic_fetch_add(&q->silent, 1);
        return;
    }
    q->done[q->entries.posted % q->size] = *done;
    atomic_fetch_add_explicit(&q->entries.posted, 1, memory_order_release);
}

static void look(lab_cq *cq) {
    if (atomic_exchange(&((struct fake_completions *)cq->model_data)->asked, 0)) cq->armed = true;
}

static const struct lab_model fake_model = {.name = "fake",
                                            .device_name = "fake_",
                                            .qpn_bits = 24,
                                            .fetch = fetch,
                                            .fetch_receive = fetch_receive,
                                            .fetch_shared_receive = fetch_shared,
                                            .shared_receives = shared_receives,
                                            .cq_used = cq_used,
                                            .complete = complete,
                                            .tells_rest = true,
                                            .look = look};

/* ----------------------------------------------------------------------------------------------------------- objects
 */

static void *must(void *memory) {
    if (!memory) lab_die("no memory");
    return memory;
}

lab_device *fake_device(const char *fabric, const char *profile, const char *knobs) {
    const vnic_profile *p = vnic_profile_named(profile);
    char text[256];
    if (!p) lab_die("no profile %s", profile);
    the_device =
        (lab_device){.model = &fake_model, .knobs = p->knobs, .name = "fake_0", .seed = 1, .gids = 1, .active_mtu = 5};
    if (vnic_knobs_parse(&the_device.knobs, knobs, NULL, NULL, text) || vnic_knobs_check(&the_device.knobs, text))
        lab_die("%s", text);
    snprintf(the_device.fabric, sizeof the_device.fabric, "%s", fabric);
    the_device.gid[0].s6_addr[0] = 0xfe;
    the_device.gid[0].s6_addr[15] = 1;
    devices = 1;
    the_context = (lab_context){.device = &the_device};
    lab_enter();
    const int error = lab_nic_open(&the_device);
    lab_leave();
    if (error) lab_die("lab_nic_open: %s", strerror(error));
    return &the_device;
}

lab_pd *fake_pd(lab_device *device) {
    lab_pd *pd = must(calloc(1, sizeof *pd));
    (void)device;
    pd->context = &the_context;
    return pd;
}

lab_mr *fake_mr(lab_pd *pd, void *start, uint64_t bytes, uint32_t access) {
    lab_mr *mr = must(calloc(1, sizeof *mr));
    *mr = (lab_mr){.pd = pd, .access = access, .start = (uintptr_t)start, .iova = (uintptr_t)start, .length = bytes};
    lab_enter();
    if (n_mrs == OBJECTS) lab_die("too many regions");
    mr->key = n_mrs << 8 | 0x42;
    const int error = lab_region_add(mr);
    if (error) lab_die("lab_region_add: %s", strerror(error));
    mrs[n_mrs++] = mr;
    lab_leave();
    return mr;
}

void fake_mr_end(lab_mr *mr) {
    lab_enter();
    lab_region_remove(mr);
    mrs[mr->key >> 8] = NULL;
    lab_leave();
    free(mr);
}

lab_cq *fake_cq(lab_pd *pd, uint32_t entries) {
    lab_cq *cq = must(calloc(1, sizeof *cq));
    struct fake_completions *q = must(calloc(1, sizeof *q));
    static lab_channel channel;
    q->size = entries;
    q->done = must(calloc(entries, sizeof *q->done));
    *cq = (lab_cq){.context = pd->context, .entries = entries, .channel = &channel, .model_data = q};
    return cq;
}

lab_srq *fake_srq(lab_pd *pd) {
    lab_srq *srq = must(calloc(1, sizeof *srq));
    srq->pd = pd;
    srq->model_data = must(calloc(1, sizeof(struct fake_shared)));
    return srq;
}

lab_qp *fake_qp(lab_pd *pd, enum lab_qp_type type, lab_cq *send_cq, lab_cq *recv_cq, lab_srq *srq) {
    lab_qp *qp = must(calloc(1, sizeof *qp));
    *qp = (lab_qp){.pd = pd, .send_cq = send_cq, .recv_cq = recv_cq, .srq = srq, .type = type};
    qp->model_data = must(calloc(1, sizeof(struct fake_queue)));
    lab_enter();
    if (n_qps == OBJECTS) lab_die("too many queue pairs");
    qp->number = lab_slot() << lab_qp_bits(&the_device) | n_qps;
    qps[n_qps++] = qp;
    const int error = lab_flow_open(qp);
    if (error) lab_die("lab_flow_open: %s", strerror(error));
    lab_leave();
    return qp;
}

void fake_qp_end(lab_qp *qp) {
    lab_enter();
    lab_flow_close(qp);
    qps[qp->number & ((1u << lab_qp_bits(&the_device)) - 1)] = NULL;
    lab_leave();
    free(qp->model_data);
    free(qp);
}

void fake_qp_state(lab_qp *qp, enum lab_qp_state state) {
    lab_enter();
    const enum lab_qp_state from = qp->state;
    qp->state = state;
    if (state == LAB_RESET) {
        struct fake_queue *q = qp->model_data;
        q->sends.taken = q->sends.posted;
        q->receives.taken = q->receives.posted;
    }
    if (lab_flow_modify(qp, from)) lab_die("lab_flow_modify");
    lab_leave();
}

enum lab_qp_state fake_qp_state_now(lab_qp *qp) {
    lab_enter();
    const enum lab_qp_state state = qp->state;
    lab_leave();
    return state;
}

void fake_connect(lab_qp *qp, uint32_t dest_qpn) {
    lab_enter();
    qp->dest_qpn = dest_qpn;
    qp->dest_gid = the_device.gid[0];
    qp->access = FAKE_REMOTE;
    qp->max_rd_atomic = qp->max_dest_rd_atomic = 16;
    qp->timeout = 12;
    qp->retry_count = 3;
    qp->rnr_retry = 7;
    qp->min_rnr_timer = 1;
    lab_leave();
    fake_qp_state(qp, LAB_INIT);
    fake_qp_state(qp, LAB_RTR);
    fake_qp_state(qp, LAB_RTS);
}

lab_ah *fake_ah(lab_pd *pd, const struct in6_addr *gid) {
    lab_ah *ah = must(calloc(1, sizeof *ah));
    lab_enter();
    if (n_ahs == OBJECTS) lab_die("too many address handles");
    *ah = (lab_ah){.pd = pd, .number = n_ahs, .gid = *gid};
    ahs[n_ahs++] = ah;
    lab_leave();
    return ah;
}

void fake_ah_end(lab_ah *ah) {
    lab_enter();
    ahs[ah->number] = NULL;
    lab_leave();
    free(ah);
}

/* --------------------------------------------------------------------------------------------------------- data path
 */

bool fake_post(lab_qp *qp, const struct lab_work *work) {
    struct fake_queue *q = qp->model_data;
    if (used(&q->sends) == FAKE_DEPTH) return false;
    copy_work(&q->work[q->sends.posted % FAKE_DEPTH], work);
    atomic_fetch_add_explicit(&q->sends.posted, 1, memory_order_release);
    return true;
}

static bool post_to(struct ring *ring, struct lab_receive *to, const struct lab_receive *receive) {
    if (used(ring) == FAKE_DEPTH) return false;
    to[ring->posted % FAKE_DEPTH] = *receive;
    atomic_fetch_add_explicit(&ring->posted, 1, memory_order_release);
    return true;
}

bool fake_post_receive(lab_qp *qp, const struct lab_receive *receive) {
    struct fake_queue *q = qp->model_data;
    return post_to(&q->receives, q->receive, receive);
}

bool fake_post_shared(lab_srq *srq, const struct lab_receive *receive) {
    struct fake_shared *q = srq->model_data;
    return post_to(&q->receives, q->receive, receive);
}

bool fake_poll(lab_cq *cq, struct lab_done *done) {
    struct fake_completions *q = cq->model_data;
    if (!used(&q->entries)) return false;
    *done = q->done[q->entries.taken % q->size];
    atomic_fetch_add_explicit(&q->entries.taken, 1, memory_order_release);
    return true;
}

uint32_t fake_silent(lab_cq *cq) {
    return atomic_load(&((struct fake_completions *)cq->model_data)->silent);
}

void fake_arm(lab_cq *cq) {
    atomic_store(&((struct fake_completions *)cq->model_data)->asked, 1);
}

uint32_t fake_notified(lab_cq *cq) {
    return atomic_load(&((struct fake_completions *)cq->model_data)->notified);
}

uint32_t fake_events(enum lab_event event) {
    return atomic_load(&events[event]);
}
