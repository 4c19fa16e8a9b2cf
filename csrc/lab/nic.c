/* SPDX-License-Identifier: Apache-2.0
 *
 * nic.c: the NIC's thread, and what it has one of: the wire, the fabric, the rounds.
 *
 * Doorbells of mlx5 and EFA are memory: nobody says when one was rung, so the thread looks at all of them. With nothing
 * to do it looks again at once for a while, then lets others run in between, then sleeps, up to a millisecond at a
 * time, and shorter while little time has passed: four processes of two CPUs get on like that.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "nic.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

#define ACCESS_LOCAL_WRITE 1u /* IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING */
#define ACCESS_RELAXED (1u << 20)

#define STORES_AT_ONCE 256u
#define EVENTS_AT_ONCE 4096u
#define LOOKS_AT_ONCE 64u     /* idle rounds without a pause */
#define YIELDING_NS 200000ull /* then with others in between */
#define LONG_YIELD_NS 100000ull
#define CROWDED_NS 20000000ull
#define SHORTEST_SLEEP_NS 50000ull
#define LONGEST_SLEEP_NS 1000000ull
#define NOTHING_TO_SEE_NS 100000000ull /* no doorbell is in use: what comes wakes */

struct wire *lab_wire;
vnic_fabric *lab_fabric;
uint32_t lab_wanted;

static struct {
    bool open;
    int wake; /* eventfd */
    uint64_t began;
    _Atomic uint32_t sleeping;
} nic;

uint64_t lab_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* ------------------------------------------------------------------------------------------------------------ rounds
 */

/* The fabric's clock stops at each event, so that what follows from it is timed from there, however late we are. */
static uint32_t run_fabric(void) {
    const uint64_t now = lab_now() - nic.began;
    uint32_t done = 0;
    while (done < EVENTS_AT_ONCE && vnic_next(lab_fabric) <= now) {
        vnic_set_now(lab_fabric, vnic_next(lab_fabric));
        while (vnic_due(lab_fabric) && done < EVENTS_AT_ONCE) {
            vnic_run_due(lab_fabric);
            done++;
        }
    }
    if (done < EVENTS_AT_ONCE) vnic_set_now(lab_fabric, now);
    return done;
}

static uint32_t turn(void) {
    uint32_t done = 0;
    for (uint32_t i = 0; i < STORES_AT_ONCE && lab_trapped_next(); i++) done++;
    done += wire_turn(lab_wire);
    done += lab_flows_turn();
    done += run_fabric();
    done += lab_ghosts_turn();
    return done;
}

static uint64_t until_next(void) {
    const uint64_t now = lab_now() - nic.began, event = vnic_next(lab_fabric), other = lab_ghosts_next();
    const uint64_t next = event < other ? event : other;
    return next <= now ? 0 : next - now;
}

static void sleep_for(uint64_t ns) {
    struct pollfd fds[WIRE_MAX_LINKS + 2];
    fds[0] = (struct pollfd){.fd = nic.wake, .events = POLLIN};
    pthread_mutex_lock(&lab_lock);
    const uint32_t n = 1 + wire_waits(lab_wire, fds + 1);
    const uint64_t next = until_next();
    pthread_mutex_unlock(&lab_lock);
    if (next < ns) ns = next;
    const struct timespec t = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
    if (ppoll(fds, n, &t, NULL) > 0 && fds[0].revents) {
        uint64_t count;
        while (read(nic.wake, &count, sizeof count) > 0) continue;
    }
}

/* A mutex goes to whoever comes first, and that is who has just given it back. */
static void step_back(void) {
    for (uint32_t i = 0; i < 1000 && __atomic_load_n(&lab_wanted, __ATOMIC_RELAXED); i++) sched_yield();
}

static void *serve(void *none) {
    uint32_t idle = 0;
    uint64_t since = lab_now(), sleep = SHORTEST_SLEEP_NS, crowded_until = 0;
    for (;;) {
        pthread_mutex_lock(&lab_lock);
        const uint32_t done = turn();
        const bool awake = lab_flows_awake();
        pthread_mutex_unlock(&lab_lock);
        step_back();
        if (done) {
            atomic_store(&nic.sleeping, 0);
            idle = 0;
            sleep = SHORTEST_SLEEP_NS;
            continue;
        }
        if (!idle++) since = lab_now();
        if (awake && idle < LOOKS_AT_ONCE) continue;
        const uint64_t now = lab_now();
        if (awake && now - since < YIELDING_NS && now >= crowded_until) {
            sched_yield();
            /* Who yields among others that spin comes last; who sleeps is woken before them. */
            if (lab_now() - now > LONG_YIELD_NS) crowded_until = lab_now() + CROWDED_NS;
            continue;
        }
        /* Said first, then looked once more: whoever leaves something after that look wakes us. */
        if (!atomic_exchange(&nic.sleeping, 1)) continue;
        sleep_for(awake ? sleep : NOTHING_TO_SEE_NS);
        atomic_store(&nic.sleeping, 0);
        if (sleep < LONGEST_SLEEP_NS) sleep *= 2;
        if (sleep > LONGEST_SLEEP_NS) sleep = LONGEST_SLEEP_NS;
    }
    return none;
}

void lab_nic_wake(void) {
    const int error = errno; /* a signal handler's caller does not see it change */
    const uint64_t one = 1;
    /* An exchange, not a load, which could come before the caller's store of what is left: each side does both, and one
     * of them sees what the other did. */
    if (atomic_fetch_add(&nic.sleeping, 0) && raw_write(nic.wake, &one, sizeof one) < 0 && errno != EAGAIN) abort();
    errno = error;
}

/* -------------------------------------------------------------------------------------------------------------- open
 */

static const char *take_frame(void *context, struct wire_link *link, const void *frame, uint32_t bytes) {
    (void)context;
    uint32_t kind = 0;
    if (bytes >= sizeof kind) memcpy(&kind, frame, sizeof kind);
    if (wire_is_ours(link) && kind == LAB_FRAME_REPLY) return lab_flow_reply(link, frame, bytes);
    if (!wire_is_ours(link) && kind == LAB_FRAME_REQUEST) return lab_ghost_request(link, frame, bytes);
    if (!wire_is_ours(link) && kind == LAB_FRAME_END) return lab_ghost_end(link, frame, bytes);
    return "a frame of no kind that there is";
}

static void link_gone(void *context, struct wire_link *link) {
    (void)context;
    if (wire_is_ours(link))
        lab_flow_link_gone(link);
    else
        lab_ghost_link_gone(link);
}

static void say(void *context, const char *text) {
    (void)context;
    lab_say("%s", text);
}

/* At the end of a program that destroys nothing. Somebody may end it while the lock is held: then it ends like that. */
__attribute__((destructor)) static void settle(void) {
    for (uint32_t i = 0; nic.open && i < 1000; i++) {
        if (pthread_mutex_trylock(&lab_lock)) {
            sched_yield();
            continue;
        }
        lab_ghosts_settle(NULL);
        pthread_mutex_unlock(&lab_lock);
        return;
    }
}

/* What a child of fork() has of its parent's NIC is a copy: the parent goes on, the child begins anew. */
static void before_fork(void) {
    lab_enter();
}

static void after_fork(void) {
    lab_leave();
}

static void in_child(void) {
    pthread_mutex_init(&lab_lock, NULL);
    lab_wanted = 0;
    if (!nic.open) return;
    wire_close(lab_wire);
    raw_close(nic.wake);
    lab_wire = NULL;
    lab_fabric = NULL; /* the parent's queue pairs and regions refer to it; nothing of them is used */
    lab_flows_forget();
    lab_ghosts_forget();
    uint32_t n;
    lab_device *devices = lab_devices(&n);
    for (uint32_t i = 0; i < n; i++) devices[i].nic = NULL;
    nic.open = false;
}

static void fork_handlers(void) {
    if (pthread_atfork(before_fork, after_fork, in_child)) lab_die("no memory for what fork() must do");
}

static int start_thread(void) {
    pthread_t thread;
    sigset_t most, before;
    sigfillset(&most); /* the program's signals are for its own threads; faults are not sent elsewhere */
    sigdelset(&most, SIGSEGV);
    sigdelset(&most, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &most, &before);
    const int error = pthread_create(&thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) pthread_detach(thread);
    return error;
}

static int open_process(const lab_device *device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fork_handlers);
    const uint32_t hello[4] = {LAB_PROTOCOL, sizeof(struct lab_request), sizeof(struct lab_reply), LAB_WINDOW};
    const struct wire_config config = {.name = "uccl_ep-lab",
                                       .fabric = device->fabric,
                                       .slots = LAB_MAX_PROCESSES,
                                       .max_frame = LAB_MAX_MESSAGE + 4096,
                                       .max_waiting = LAB_LINK_BYTES + 2ull * LAB_MAX_MESSAGE,
                                       .hello = hello,
                                       .hello_bytes = sizeof hello,
                                       .frame = take_frame,
                                       .gone = link_gone,
                                       .say = say};
    int error = wire_open(&lab_wire, &config);
    if (error == ENOSPC)
        lab_say("the fabric %s has %u processes, and takes no more", device->fabric, LAB_MAX_PROCESSES);
    if (error) return error;
    nic.began = lab_now();
    nic.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    /* Each process draws from numbers of its own. */
    const vnic_fabric_config fabric = {.seed = device->seed * 64 + wire_slot(lab_wire), .ranks = 1 + LAB_MAX_PROCESSES};
    lab_fabric = vnic_fabric_open(&fabric);
    if (nic.wake < 0 || !lab_fabric)
        error = ENOMEM;
    else
        error = start_thread();
    if (!error) {
        nic.open = true;
        return 0;
    }
    if (lab_fabric) vnic_fabric_close(lab_fabric);
    if (nic.wake >= 0) raw_close(nic.wake);
    wire_close(lab_wire);
    lab_fabric = NULL;
    lab_wire = NULL;
    return error;
}

int lab_nic_open(lab_device *device) {
    if (!nic.open) {
        const int error = open_process(device);
        if (error) return error;
    }
    if (device->nic) return 0;
    vnic_knobs knobs = device->knobs;
    /* A ghost is no queue pair of the program's, nor are its queues of the length that the program asked for: those
     * limits are kept where the program's own queue pairs are made (objects.c, qp.c) and their doorbells rung (the
     * model). Addresses are the target's. A doorbell that is lost is rung
     * again by the vendor's library, on registers that the lab takes store by store: none is lost here. */
    knobs.max_qp = 0;
    knobs.max_wr = UINT32_MAX;
    knobs.max_batch = 0;
    knobs.drop_rate = 0;
    knobs.addr_mode = VNIC_ADDRESS_VIRTUAL;
    knobs.key_bits = 32;
    /* Memory is the host's here: who has a receive's completion finds the bytes of that message there, with verbs of
     * any vendor. Profiles leave it open, since in a GPU's memory it needs a flush. */
    knobs.imm_visible = 1;
    /* Where bytes become visible one after the other, times add up over all that goes on: a fraction each, so that what
     * waits in the NIC does not grow for as long as somebody writes. */
    if (knobs.place_order == VNIC_PLACE_STRICT && !knobs.relaxed) knobs.visible_delay /= 16;
    device->nic = vnic_nic_open(lab_fabric, &knobs);
    return device->nic ? 0 : ENOMEM;
}

uint32_t lab_slot(void) {
    return nic.open ? wire_slot(lab_wire) : 0;
}

/* For who counts what a program leaves behind: of this process's threads and descriptors, those that are the NIC's and
 * stay. Returns the number of descriptors; those that fit are in `fds`. */
__attribute__((visibility("default"))) uint32_t uccl_ep_lab_held(int *fds, uint32_t room, uint32_t *threads);
uint32_t uccl_ep_lab_held(int *fds, uint32_t room, uint32_t *threads) {
    struct pollfd held[WIRE_MAX_LINKS + 2];
    uint32_t n = 0;
    lab_enter();
    if (nic.open) {
        held[n++].fd = nic.wake;
        n += wire_waits(lab_wire, held + n);
    }
    lab_leave();
    *threads = n ? 1 : 0;
    for (uint32_t i = 0; i < n && i < room; i++) fds[i] = held[i].fd;
    return n;
}

/* ----------------------------------------------------------------------------------------------------------- regions
 */

int lab_region_add(lab_mr *mr) {
    lab_device *device = mr->pd->context->device;
    const int error = lab_nic_open(device);
    if (error) return error;
    const vnic_knobs *knobs = vnic_nic_knobs(device->nic);
    mr->region = vnic_region_add(lab_fabric, knobs, 0, mr->key, (void *)(uintptr_t)mr->start, mr->length);
    if (!mr->region) return ENOMEM;
    mr->region->strict = knobs->relaxed && !(mr->access & ACCESS_RELAXED);
    return 0;
}

void lab_region_remove(lab_mr *mr) {
    if (mr->region) vnic_region_forget(lab_fabric, mr->region);
    mr->region = NULL;
}

char *lab_local(const lab_qp *qp, const struct lab_sge *sge, bool written) {
    const lab_mr *mr = lab_mr_keyed(qp->pd->context->device, sge->lkey);
    if (!mr || mr->pd != qp->pd || (written && !(mr->access & ACCESS_LOCAL_WRITE))) return NULL;
    const uint64_t at = sge->address - mr->iova;
    if (at > mr->length || sge->length > mr->length - at) return NULL;
    return (char *)(uintptr_t)mr->start + at;
}

/* ------------------------------------------------------------------------------------------------------- completions
 */

static void overrun(lab_cq *cq) {
    const vnic_knobs *knobs = &cq->context->device->knobs;
    if (knobs->cq_overrun == VNIC_OVERRUN_DROP || cq->overrun) return;
    cq->overrun = true;
    lab_async_event(cq->context, LAB_EVENT_CQ_ERR, cq->user_handle);
    lab_flows_cq_error(cq);
}

void lab_complete(lab_cq *cq, const struct lab_done *done) {
    const struct lab_model *model = cq->context->device->model;
    const bool entry = done->receive || done->signalled || done->status != VNIC_OK;
    if (cq->overrun) return;
    if (entry && model->cq_used(cq) >= cq->entries) {
        overrun(cq);
        return;
    }
    model->complete(cq, done);
    if (!entry) return;
    if (model->look) model->look(cq);
    if (cq->armed && (!cq->solicited_only || done->solicited || done->status != VNIC_OK))
        lab_cq_notify(cq, done->solicited || done->status != VNIC_OK);
}

/* NICs compare the consumer's index of the asking with their own: what came before it is reported at once. */
void lab_cq_look(lab_cq *cq) {
    const struct lab_model *model = cq->context->device->model;
    if (!cq->armed) model->look(cq);
    if (cq->armed && !cq->solicited_only && model->cq_used(cq)) lab_cq_notify(cq, false);
}

void lab_qp_fail(lab_qp *qp, uint32_t event) {
    if (qp->state == LAB_ERR || qp->state == LAB_RESET) return;
    qp->state = LAB_ERR;
    if (event != LAB_NO_EVENT) lab_async_event(qp->pd->context, (enum lab_event)event, qp->user_handle);
    lab_flow_error(qp);
}
