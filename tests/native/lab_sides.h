/* SPDX-License-Identifier: Apache-2.0
 *
 * lab_sides.h: queue pairs of the fake vendor with memory and queues, and what their tests ask of them again and again.
 */
#ifndef UCCL_EP_LAB_SIDES_H
#define UCCL_EP_LAB_SIDES_H

#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "lab_fake_model.h"
#include "testing.h"

#define SIDE_BYTES (1u << 20)

struct side {
    lab_pd *pd;
    lab_cq *sends, *receives;
    lab_qp *qp;
    lab_mr *mr;
    char *memory;
};

static inline struct side side_on(lab_pd *pd, enum lab_qp_type type, uint32_t entries, void *memory) {
    struct side s = {.pd = pd, .sends = fake_cq(pd, entries), .receives = fake_cq(pd, entries), .memory = memory};
    CHECK(s.memory, "memory");
    s.mr = fake_mr(pd, s.memory, SIDE_BYTES, FAKE_REMOTE);
    s.qp = fake_qp(pd, type, s.sends, s.receives, NULL);
    return s;
}

static inline struct side side_new(lab_device *device, enum lab_qp_type type) {
    return side_on(fake_pd(device), type, FAKE_DEPTH, calloc(1, SIDE_BYTES));
}

/* One local piece at `from`, `bytes` long; remote at `to` of the other side. */
static inline struct lab_work side_work(const struct side *s, enum lab_opcode opcode, uint64_t from, uint32_t bytes,
                                        const struct side *other, uint64_t to) {
    return (struct lab_work){.opcode = opcode,
                             .signalled = true,
                             .sges = 1,
                             .sge = {{s->mr->start + from, bytes, s->mr->key}},
                             .remote_address = other ? other->mr->start + to : 0,
                             .rkey = other ? other->mr->key : 0,
                             .dest_qpn = other ? other->qp->number : 0};
}

static inline void side_receive(const struct side *s, uint32_t cookie, uint64_t at, uint32_t bytes) {
    const struct lab_receive r = {.cookie = cookie, .sges = 1, .sge = {{s->mr->start + at, bytes, s->mr->key}}};
    CHECK(fake_post_receive(s->qp, &r), "a full ring of receives");
}

static inline struct lab_done side_wait(lab_cq *cq) {
    struct lab_done done;
    while (!fake_poll(cq, &done)) sched_yield();
    return done;
}

/* Posts and waits for its end. */
static inline struct lab_done side_do(const struct side *s, const struct lab_work *work) {
    CHECK(fake_post(s->qp, work), "a full ring");
    return side_wait(s->sends);
}

/* A fabric of this test alone. */
static inline const char *side_fabric(const char *what) {
    static char name[40];
    snprintf(name, sizeof name, "test-%d-%.16s", (int)getpid(), what);
    return name;
}

/* Each case is a process of its own: a process has one NIC. */
static inline void side_case(const char *what, void (*run)(void)) {
    fflush(NULL);
    const pid_t parent = getpid(), child = fork();
    CHECK(child >= 0, "fork");
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        test_deadline(60);
        run();
        fflush(NULL);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "case %s ended with 0x%x", what, (unsigned)status);
}

#endif
