/* SPDX-License-Identifier: Apache-2.0
 *
 * processes.c: a wire between processes, where FAKE_IBVERBS_WIRE names one.
 *
 * Each process has a place on it, which is the upper part of its queue pairs' numbers and the name of its socket: one
 * in the abstract namespace, so that nothing is left behind. A thread takes what comes: requests, which it carries out
 * on this process's memory and answers, and answers. One request of a queue pair is under way at a time, and nobody
 * waits for an answer with the lock held.
 *
 * A process that is gone is noticed by the socket that is gone; what a stopped one was sent waits. Before a request is
 * carried out the requester's memory says whether it is still wanted.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>

#define PLACES 1024u
#define NUMBERS 16384u
#define WAITING 4096u
#define PROBE_NS 20000000ull
#define PIECE 65536u

typedef struct packet {
    enum { REQUEST, ANSWER, PROBE } kind;
    uint32_t place, qp; /* who sends it; ANSWER: of which queue pair of the receiver's */
    uint64_t ticket;
    union {
        fake_answer answer;
        fake_request request; /* last: see its data */
    };
} packet;

#define ANSWER_BYTES (offsetof(packet, answer) + sizeof(fake_answer))

static struct {
    bool joined;
    _Atomic bool ending;
    pid_t process;
    pthread_t thread;
    int socket;
    uint32_t place; /* from 1 on; 0: no wire */
} wire;
/* One word a queue pair number, never given back: others look there. */
static uint64_t tickets[NUMBERS];

static socklen_t address_of(uint32_t place, struct sockaddr_un *a) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int n =
        snprintf(a->sun_path + 1, sizeof(a->sun_path) - 1, "fake-ibverbs-%.64s-%u", getenv("FAKE_IBVERBS_WIRE"), place);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* 0, or an errno. EAGAIN: its socket is full. */
static int send_to(uint32_t place, const packet *p, size_t bytes) {
    struct sockaddr_un a;
    const socklen_t length = address_of(place, &a);
    if (sendto(wire.socket, p, bytes, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&a, length) >= 0) return 0;
    return errno;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* ------------------------------------------------------------------------------------------------- what comes in */

/* Answers that found the requester's socket full. */
static packet waiting[WAITING];
static uint32_t waiting_n;

static void answer(const packet *p) {
    if (send_to(p->place, p, ANSWER_BYTES) != EAGAIN) return;
    if (waiting_n == WAITING) FAKE_DIE("%u answers wait for sockets that nobody reads", waiting_n);
    waiting[waiting_n++] = *p;
}

static void take_request(packet *p) {
    uint64_t wanted = 0;
    const struct iovec here = {&wanted, sizeof(wanted)}, there = {p->request.ticket_at, sizeof(wanted)};
    packet back = {.kind = ANSWER, .place = p->place, .qp = p->request.from, .ticket = p->request.ticket};
    pthread_mutex_lock(&fake_lock);
    if (process_vm_readv((pid_t)p->request.process, &here, 1, &there, 1, 0) == (ssize_t)sizeof(wanted) &&
        wanted == p->request.ticket) {
        back.answer = fake_respond(&p->request);
        answer(&back);
    }
    pthread_mutex_unlock(&fake_lock);
}

/* A datagram. */
static void come_back(fake_qp *qp, uint32_t nth) {
    qp->current = qp->away_slots[nth];
    qp->away_slots[nth] = qp->away_slots[--qp->n_away];
    qp->ring[qp->current].ticket = 0;
}

static void take_answer(const packet *p) {
    pthread_mutex_lock(&fake_lock);
    for (fake_qp *qp = fake_qps; qp; qp = qp->next) {
        if (qp->base.qp_base.qp_num != p->qp) continue;
        if (qp->srd) {
            uint32_t i = 0;
            while (i < qp->n_away && qp->ring[qp->away_slots[i]].ticket != p->ticket) i++;
            if (i == qp->n_away) continue;
            come_back(qp, i);
        } else if (!qp->away || qp->away_ticket != p->ticket) {
            continue;
        } else {
            fake_call_back(qp);
        }
        if (fake_answered(qp, &p->answer)) fake_step(qp);
        break;
    }
    pthread_mutex_unlock(&fake_lock);
}

static void *serve(void *none) {
    static packet p;
    while (!wire.ending) {
        struct pollfd ready = {wire.socket, POLLIN, 0};
        poll(&ready, 1, waiting_n ? 1 : -1);
        uint32_t left = 0;
        for (uint32_t i = 0; i < waiting_n; i++)
            if (send_to(waiting[i].place, &waiting[i], ANSWER_BYTES) == EAGAIN) waiting[left++] = waiting[i];
        waiting_n = left;
        const ssize_t n = recv(wire.socket, &p, sizeof(p), MSG_DONTWAIT);
        if (n < (ssize_t)offsetof(packet, answer)) continue;
        if (p.kind == REQUEST) take_request(&p);
        if (p.kind == ANSWER) take_answer(&p);
    }
    return none;
}

/* --------------------------------------------------------------------------------------------------- what goes out */

int fake_join(void) {
    const char *name = getenv("FAKE_IBVERBS_WIRE");
    if (!name || (wire.joined && wire.process == getpid())) return 0;
    if (wire.joined) close(wire.socket); /* of a parent that forked: its place is its own */
    wire.joined = false;
    wire.socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (wire.socket < 0) return -1;
    struct sockaddr_un a;
    for (wire.place = 1; wire.place < PLACES; wire.place++) {
        const socklen_t length = address_of(wire.place, &a);
        if (bind(wire.socket, (struct sockaddr *)&a, length) == 0) break;
        if (errno != EADDRINUSE) FAKE_DIE("bind: %s", strerror(errno));
    }
    if (wire.place == PLACES) FAKE_DIE("the wire is full");
    wire.joined = true;
    wire.process = getpid();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* the others read and write this process's memory */
    wire.ending = false;
    waiting_n = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    if (pthread_create(&wire.thread, NULL, serve, NULL)) FAKE_DIE("no thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return 0;
}

void fake_leave(void) {
    static const packet wake = {.kind = PROBE};
    if (!wire.joined || wire.process != getpid()) return;
    wire.ending = true;
    send_to(wire.place, &wake, offsetof(packet, answer)); /* full: it is awake */
    pthread_join(wire.thread, NULL);
    close(wire.socket);
    wire.joined = false;
    wire.place = 0;
}

uint32_t fake_qp_numbers(uint32_t *last) {
    *last = (*last + 1) % NUMBERS;
    if (*last < 2) *last = 2; /* 0 and 1 are special */
    return wire.place * NUMBERS + *last;
}

bool fake_is_elsewhere(uint32_t qp_num) {
    return wire.place && qp_num / NUMBERS != wire.place;
}

static size_t request_bytes(const fake_request *r) {
    return offsetof(packet, request) + offsetof(fake_request, data) + r->inline_bytes;
}

static const fake_answer lost = {.lost = true};

bool fake_send_away(fake_qp *qp, fake_request *r) {
    static packet p;
    static uint64_t last;
    p.kind = REQUEST;
    p.place = wire.place;
    p.request = *r;
    p.request.process = (uint32_t)getpid();
    p.request.ticket = ++last;
    fake_send *s = &qp->ring[qp->current]; /* of a datagram */
    p.request.ticket_at = qp->srd ? &s->ticket : &tickets[r->from % NUMBERS];
    *p.request.ticket_at = last;
    const int error = send_to(r->to / NUMBERS, &p, request_bytes(r));
    if (error == EAGAIN) {
        if (qp->srd) qp->waiting[qp->n_waiting++] = qp->current;
        return false;
    }
    if (error) return fake_answered(qp, &lost);
    if (qp->srd) {
        qp->away_slots[qp->n_away++] = qp->current;
        s->since = now_ns();
        return true; /* the next one may go, perhaps to another */
    }
    qp->away = true;
    qp->away_ticket = last;
    qp->away_since = now_ns();
    return false;
}

bool fake_still_away(fake_qp *qp) {
    static const packet probe = {.kind = PROBE};
    const uint64_t now = now_ns();
    if (now - qp->away_since < PROBE_NS) return false;
    qp->away_since = now;
    const int error = send_to(qp->attr.dest_qp_num / NUMBERS, &probe, offsetof(packet, answer));
    if (!error || error == EAGAIN) return false;
    fake_call_back(qp);
    return fake_answered(qp, &lost);
}

void fake_probe(fake_qp *qp) {
    static const packet probe = {.kind = PROBE};
    const uint64_t now = qp->n_away ? now_ns() : 0;
    for (uint32_t i = 0; i < qp->n_away; i++) {
        fake_send *s = &qp->ring[qp->away_slots[i]];
        if (now - s->since < PROBE_NS) continue;
        s->since = now;
        const int error = send_to(s->remote_qpn / NUMBERS, &probe, offsetof(packet, answer));
        if (!error || error == EAGAIN) continue;
        come_back(qp, i--);
        fake_answered(qp, &lost);
    }
}

void fake_call_back(fake_qp *qp) {
    for (uint32_t i = 0; i < qp->n_away; i++) qp->ring[qp->away_slots[i]].ticket = 0; /* others may look there yet */
    if (qp->away) tickets[qp->base.qp_base.qp_num % NUMBERS] = 0;
    qp->away = false;
}

/* One element of a request of another process: to or from `remote`, which is here. */
bool fake_move(const fake_request *r, uint32_t element, char *remote, bool reads) {
    static char piece[PIECE] __attribute__((aligned(64)));
    for (uint64_t at = 0; at < r->bytes[element]; at += PIECE) {
        const uint64_t left = r->bytes[element] - at, n = left < PIECE ? left : PIECE;
        const struct iovec here = {piece, n}, there = {r->local[element] + at, n};
        if (reads) fake_place(piece, remote + at, n);
        const ssize_t moved = reads ? process_vm_writev((pid_t)r->process, &here, 1, &there, 1, 0)
                                    : process_vm_readv((pid_t)r->process, &here, 1, &there, 1, 0);
        if (moved != (ssize_t)n) return false;
        if (!reads) fake_place(remote + at, piece, n);
    }
    return true;
}
