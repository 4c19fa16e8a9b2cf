/* SPDX-License-Identifier: Apache-2.0
 *
 * The NIC of the lab, with the fake vendor, in one process: what each operation does, what each error says, and that
 * nothing is lost.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "lab/nic.h"
#include "lab_sides.h"

static struct side a, b;

static void two(const char *profile, const char *knobs) {
    lab_device *device = fake_device(side_fabric(profile), profile, knobs);
    a = side_new(device, LAB_RC);
    b = side_new(device, LAB_RC);
    fake_connect(a.qp, b.qp->number);
    fake_connect(b.qp, a.qp->number);
}

/* Another pair, after an error has ended the first. */
static void again(void) {
    fake_qp_end(a.qp);
    fake_qp_end(b.qp);
    a.qp = fake_qp(a.pd, LAB_RC, a.sends, a.receives, NULL);
    b.qp = fake_qp(b.pd, LAB_RC, b.sends, b.receives, NULL);
    fake_connect(a.qp, b.qp->number);
    fake_connect(b.qp, a.qp->number);
}

static uint32_t ghosts(void) {
    lab_enter();
    const uint32_t n = lab_ghosts();
    lab_leave();
    return n;
}

static uint64_t word(const struct side *s, uint64_t at) {
    return __atomic_load_n((uint64_t *)(void *)(s->memory + at), __ATOMIC_ACQUIRE);
}

static void fill(const struct side *s, uint64_t at, uint32_t bytes, test_rng *rng) {
    for (uint32_t i = 0; i < bytes; i++) s->memory[at + i] = (char)test_random(rng);
}

/* -------------------------------------------------------------------------------------------------------- operations
 */

static void case_operations(void) {
    two("connectx", "visible_delay=0");
    test_rng rng = test_rng_at(1);
    fill(&a, 0, 300000, &rng);

    struct lab_work w = side_work(&a, LAB_WRITE, 0, 300000, &b, 64);
    w.cookie = 7;
    struct lab_done d = side_do(&a, &w);
    CHECK(d.qp == a.qp && d.cookie == 7 && d.status == VNIC_OK && !d.receive, "status %d", d.status);
    CHECK(!memcmp(a.memory, b.memory + 64, 300000), "what was written");

    w = side_work(&a, LAB_READ, 400000, 5000, &b, 1000);
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK(!memcmp(a.memory + 400000, b.memory + 1000, 5000), "what was read");

    /* Several pieces, and the bytes in the entry. */
    w = side_work(&a, LAB_WRITE, 0, 10, &b, 0);
    w.sges = 3;
    w.sge[1] = (struct lab_sge){a.mr->start + 100, 0, 0xdead00};
    w.sge[2] = (struct lab_sge){a.mr->start + 200, 22, a.mr->key};
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK(!memcmp(b.memory, a.memory, 10) && !memcmp(b.memory + 10, a.memory + 200, 22), "gathered");
    w = side_work(&a, LAB_WRITE, 0, 0, &b, 500);
    w.sges = 0;
    w.inline_bytes = 5;
    memcpy(w.data, "hallo", 5);
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK(!memcmp(b.memory + 500, "hallo", 5), "inline");

    memset(b.memory + 800, 0, 8);
    w = side_work(&a, LAB_ADD, 600000, 8, &b, 800);
    w.add_or_swap = 5;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK_EQ(word(&a, 600000), 0);
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK_EQ(word(&a, 600000), 5);
    w.opcode = LAB_SWAP;
    w.compare = 9;
    w.add_or_swap = 77;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK_EQ(word(&a, 600000), 10);
    CHECK_EQ(word(&b, 800), 10);
    w.compare = 10;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK_EQ(word(&b, 800), 77);

    /* Nothing: no bytes, no place. */
    w = side_work(&a, LAB_WRITE, 0, 0, &b, 0);
    w.rkey = 0;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    w.opcode = LAB_NOTHING;
    w.cookie = 11;
    CHECK_EQ(side_do(&a, &w).cookie, 11);
}

static void case_messages(void) {
    two("connectx", "");
    test_rng rng = test_rng_at(2);
    fill(&a, 0, 4096, &rng);
    /* The message comes before the receive: it waits for it, and so does what is behind it. */
    struct lab_work w = side_work(&a, LAB_SEND_IMM, 0, 4096, NULL, 0);
    w.immediate = 0x01020304;
    w.solicited = true;
    CHECK(fake_post(a.qp, &w), "room");
    struct lab_work behind = side_work(&a, LAB_WRITE, 8, 8, &b, 0);
    CHECK(fake_post(a.qp, &behind), "room");
    const uint64_t until = test_now_ns() + 3000000;
    while (test_now_ns() < until) CHECK(word(&b, 0) == 0, "a write has overtaken a message");
    const struct lab_receive two_pieces = {
        .cookie = 3, .sges = 2, .sge = {{b.mr->start + 4096, 96, b.mr->key}, {b.mr->start + 8192, 5000, b.mr->key}}};
    fake_arm(b.receives);
    CHECK(fake_post_receive(b.qp, &two_pieces), "room");
    struct lab_done d = side_wait(b.receives);
    CHECK(d.receive && d.cookie == 3 && d.bytes == 4096 && d.has_immediate && d.immediate == 0x01020304 &&
              d.solicited && !d.is_write && d.source_qpn == a.qp->number,
          "bytes %u immediate %x", d.bytes, d.immediate);
    CHECK(!memcmp(b.memory + 4096, a.memory, 96) && !memcmp(b.memory + 8192, a.memory + 96, 4000), "the message");
    CHECK_EQ(side_wait(a.sends).opcode, LAB_SEND_IMM);
    CHECK_EQ(side_wait(a.sends).opcode, LAB_WRITE);
    while (!fake_notified(b.receives)) sched_yield();

    for (uint32_t i = 0; i < 100; i++) side_receive(&b, i, 16384 + 64 * i, 64);
    for (uint32_t i = 0; i < 100; i++) {
        w = side_work(&a, i % 3 ? LAB_SEND : LAB_WRITE_IMM, 0, 32, &b, 0);
        w.immediate = i;
        CHECK(fake_post(a.qp, &w), "room");
    }
    for (uint32_t i = 0; i < 100; i++) {
        d = side_wait(b.receives);
        CHECK_EQ(d.cookie, i);
        CHECK_EQ(d.is_write, i % 3 == 0);
        CHECK(d.has_immediate == (i % 3 == 0) && (i % 3 || d.immediate == i), "immediate %u", d.immediate);
        CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    }

    /* Who ends on a message that it has received has acknowledged it. */
    for (uint32_t i = 0; i < 20; i++) {
        side_receive(&b, i, 0, 64);
        w = side_work(&a, LAB_SEND, 0, 64, NULL, 0);
        CHECK(fake_post(a.qp, &w), "room");
        CHECK_EQ(side_wait(b.receives).cookie, i);
        fake_qp_end(b.qp);
        CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
        fake_qp_end(a.qp);
        a.qp = fake_qp(a.pd, LAB_RC, a.sends, a.receives, NULL);
        b.qp = fake_qp(b.pd, LAB_RC, b.sends, b.receives, NULL);
        fake_connect(a.qp, b.qp->number);
        fake_connect(b.qp, a.qp->number);
    }

    /* A shared queue of receives, for two queue pairs. */
    lab_srq *srq = fake_srq(b.pd);
    lab_qp *one = fake_qp(a.pd, LAB_RC, a.sends, a.receives, NULL);
    lab_qp *other = fake_qp(b.pd, LAB_RC, b.sends, b.receives, srq);
    fake_connect(one, other->number);
    fake_connect(other, one->number);
    const struct lab_receive shared = {.cookie = 99, .sges = 1, .sge = {{b.mr->start, 64, b.mr->key}}};
    CHECK(fake_post_shared(srq, &shared), "room");
    w = side_work(&a, LAB_SEND, 0, 64, NULL, 0);
    CHECK(fake_post(one, &w), "room");
    d = side_wait(b.receives);
    CHECK(d.cookie == 99 && d.qp == other, "cookie %u", d.cookie);
    CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    /* Fewer than its limit are left: an event, and one. */
    for (uint32_t i = 0; i < 4; i++) CHECK(fake_post_shared(srq, &shared), "room");
    lab_enter();
    srq->limit = 3;
    lab_leave();
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(fake_events(LAB_EVENT_SRQ_LIMIT), i > 1); /* it comes before the receive's completion */
        CHECK(fake_post(one, &w), "room");
        CHECK_EQ(side_wait(b.receives).cookie, 99);
        CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    }
    CHECK_EQ(fake_events(LAB_EVENT_SRQ_LIMIT), 1);
    /* A message waits for a receive. The queue pair ends, and says when it takes no more: one that is posted then is
     * another one's. */
    CHECK(fake_post(one, &w) && fake_post(one, &w), "room");
    CHECK_EQ(side_wait(b.receives).cookie, 99);
    CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    CHECK_EQ(fake_events(LAB_EVENT_QP_LAST_WQE), 0);
    fake_qp_state(other, LAB_ERR);
    while (!fake_events(LAB_EVENT_QP_LAST_WQE)) sched_yield();
    CHECK(fake_post_shared(srq, &shared), "room");
    CHECK_EQ(side_wait(a.sends).status, VNIC_RETRY_EXCEEDED);
    CHECK(!fake_poll(b.receives, &d), "a receive was taken after the last one");
    CHECK_EQ(fake_events(LAB_EVENT_QP_LAST_WQE), 1);
}

/* ------------------------------------------------------------------------------------------------------------- errors
 */

/* The entry fails with that status, and one behind it is flushed; then a new pair of queue pairs. */
static void fails(const char *what, const struct lab_work *bad, vnic_status expected, enum lab_event at_responder) {
    const uint32_t before = at_responder ? fake_events(at_responder) : 0;
    struct lab_work behind = side_work(&a, LAB_WRITE, 0, 8, &b, 8);
    behind.signalled = false;
    CHECK(fake_post(a.qp, bad) && fake_post(a.qp, &behind), "room");
    struct lab_done d = side_wait(a.sends);
    CHECK(d.status == expected, "%s: status %d", what, d.status);
    CHECK_EQ(side_wait(a.sends).status, VNIC_FLUSHED);
    CHECK_EQ(fake_qp_state_now(a.qp), LAB_ERR);
    while (at_responder && fake_events(at_responder) == before) sched_yield();
    again();
}

static void case_errors(void) {
    two("connectx", "");
    lab_pd *foreign = fake_pd(NULL);
    lab_mr *theirs = fake_mr(foreign, calloc(1, 4096), 4096, FAKE_REMOTE);
    lab_mr *bare = fake_mr(b.pd, calloc(1, 4096), 4096, 0);
    struct lab_work w;
#define FAILS(opcode, change, status, event)                                                                           \
    do {                                                                                                               \
        w = side_work(&a, opcode, 0, 8, &b, 0);                                                                        \
        change;                                                                                                        \
        fails(#opcode " " #change, &w, status, event);                                                                 \
    } while (0)
    FAILS(LAB_WRITE, w.sge[0].lkey += 1, VNIC_LOCAL_ACCESS, 0);
    FAILS(LAB_WRITE, w.sge[0].lkey = theirs->key, VNIC_LOCAL_ACCESS, 0);
    FAILS(LAB_WRITE, w.sge[0].address += SIDE_BYTES - 7, VNIC_LOCAL_ACCESS, 0);
    FAILS(LAB_WRITE, w.sge[0].address -= 1, VNIC_LOCAL_ACCESS, 0);
    FAILS(LAB_READ, (w.sge[0].lkey = bare->key, w.sge[0].address = bare->start), VNIC_LOCAL_ACCESS, 0);
    FAILS(LAB_ADD, w.sge[0].length = 4, VNIC_LOCAL_LENGTH, 0);
    FAILS(LAB_BAD, (void)0, VNIC_LOCAL_OPERATION, 0);
    FAILS(LAB_WRITE, w.rkey += 1, VNIC_REMOTE_ACCESS, LAB_EVENT_QP_ACCESS_ERR);
    FAILS(LAB_WRITE, w.remote_address += SIDE_BYTES - 7, VNIC_REMOTE_ACCESS, LAB_EVENT_QP_ACCESS_ERR);
    FAILS(LAB_READ, w.remote_address -= 1, VNIC_REMOTE_ACCESS, LAB_EVENT_QP_ACCESS_ERR);
    FAILS(LAB_WRITE, (w.rkey = theirs->key, w.remote_address = theirs->start), VNIC_REMOTE_ACCESS,
          LAB_EVENT_QP_ACCESS_ERR);
    FAILS(LAB_READ, (w.rkey = bare->key, w.remote_address = bare->start), VNIC_REMOTE_ACCESS, LAB_EVENT_QP_ACCESS_ERR);
    FAILS(LAB_ADD, w.remote_address += 4, VNIC_REMOTE_INVALID, LAB_EVENT_QP_REQ_ERR);
    lab_enter();
    b.qp->access &= ~2u; /* no remote writes */
    lab_leave();
    FAILS(LAB_WRITE, (void)0, VNIC_REMOTE_INVALID, LAB_EVENT_QP_REQ_ERR);
    /* More reads at a time than the responder has said it takes. */
    lab_enter();
    b.qp->max_dest_rd_atomic = 0;
    lab_leave();
    FAILS(LAB_READ, (void)0, VNIC_REMOTE_INVALID, LAB_EVENT_QP_REQ_ERR);
    /* A region that is given back: its key is nobody's. */
    lab_mr *gone = fake_mr(b.pd, calloc(1, 4096), 4096, FAKE_REMOTE);
    const uint32_t key = gone->key;
    const uint64_t start = gone->start;
    fake_mr_end(gone);
    FAILS(LAB_WRITE, (w.rkey = key, w.remote_address = start), VNIC_REMOTE_ACCESS, LAB_EVENT_QP_ACCESS_ERR);
    /* Too short a receive, and one whose memory is not ours: both ends hear of it. */
    side_receive(&b, 1, 0, 4);
    FAILS(LAB_SEND, (void)0, VNIC_REMOTE_INVALID, LAB_EVENT_QP_REQ_ERR);
    CHECK_EQ(side_wait(b.receives).status, VNIC_LOCAL_LENGTH);
    const struct lab_receive wrong = {.cookie = 2, .sges = 1, .sge = {{theirs->start, 64, theirs->key}}};
    CHECK(fake_post_receive(b.qp, &wrong), "room");
    FAILS(LAB_SEND, (void)0, VNIC_REMOTE_OPERATION, LAB_EVENT_QP_FATAL);
    CHECK_EQ(side_wait(b.receives).status, VNIC_LOCAL_ACCESS);
    /* No receive, and no patience. */
    lab_enter();
    a.qp->rnr_retry = 2;
    lab_leave();
    FAILS(LAB_SEND, (void)0, VNIC_RNR_EXCEEDED, 0);
    /* Nobody answers: a number that there is not, one of another connection, one in error, a process that is not. */
    const uint64_t began = test_now_ns();
    lab_enter();
    a.qp->dest_qpn = b.qp->number + 1000;
    lab_leave();
    FAILS(LAB_WRITE, (void)0, VNIC_RETRY_EXCEEDED, 0);
    CHECK(test_now_ns() - began >= 4ull * 4096 * 4096, "retries have run out before their time");
    lab_enter();
    b.qp->dest_qpn = 77;
    lab_leave();
    FAILS(LAB_WRITE, (void)0, VNIC_RETRY_EXCEEDED, 0);
    fake_qp_state(b.qp, LAB_ERR);
    FAILS(LAB_WRITE, (void)0, VNIC_RETRY_EXCEEDED, 0);
    lab_enter();
    a.qp->dest_qpn = 50u << lab_qp_bits(lab_devices(&(uint32_t){0})) | 1;
    lab_leave();
    FAILS(LAB_WRITE, (void)0, VNIC_RETRY_EXCEEDED, 0);
    /* It is made ready a little later. */
    fake_qp_state(b.qp, LAB_RESET);
    w = side_work(&a, LAB_WRITE, 0, 8, &b, 0);
    lab_enter();
    a.qp->timeout = 20;
    lab_leave();
    CHECK(fake_post(a.qp, &w), "room");
    fake_connect(b.qp, a.qp->number);
    CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    /* Receives of a queue pair in error are flushed, posts to it too. */
    side_receive(&a, 5, 0, 64);
    fake_qp_state(a.qp, LAB_ERR);
    CHECK_EQ(side_wait(a.receives).status, VNIC_FLUSHED);
    CHECK_EQ(side_do(&a, &w).status, VNIC_FLUSHED);
}

static void case_overrun(void) {
    lab_device *device = fake_device(side_fabric("overrun"), "connectx", "");
    lab_pd *pd = fake_pd(device);
    a = side_on(pd, LAB_RC, 4, calloc(1, SIDE_BYTES));
    b = side_on(pd, LAB_RC, FAKE_DEPTH, calloc(1, SIDE_BYTES));
    fake_connect(a.qp, b.qp->number);
    fake_connect(b.qp, a.qp->number);
    const struct lab_work w = side_work(&a, LAB_WRITE, 0, 8, &b, 0);
    for (uint32_t i = 0; i < 5; i++) CHECK(fake_post(a.qp, &w), "room");
    while (!fake_events(LAB_EVENT_CQ_ERR)) sched_yield();
    while (!fake_events(LAB_EVENT_QP_FATAL)) sched_yield();
    CHECK_EQ(fake_qp_state_now(a.qp), LAB_ERR);
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
}

static void case_provider_flushes(void) {
    two("thor2", "retry_exc_inflight_bytes=0");
    struct lab_work bad = side_work(&a, LAB_WRITE, 0, 8, &b, 0), good = bad;
    bad.rkey++;
    for (uint32_t i = 0; i < 10; i++) CHECK(fake_post(a.qp, i == 3 ? &bad : &good), "room");
    for (uint32_t i = 0; i < 3; i++) CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    CHECK_EQ(side_wait(a.sends).status, VNIC_REMOTE_ACCESS);
    CHECK_EQ(fake_qp_state_now(a.qp), LAB_ERR);
    /* The rest is the library's: it is told so for each queue, at both ends, and once. A pair of its own shows that the
     * NIC goes on. */
    lab_cq *const told[] = {a.sends, a.receives, b.sends, b.receives};
    struct lab_done d;
    for (uint32_t i = 0; i < 4; i++) {
        d = side_wait(told[i]);
        CHECK(d.rest && d.status == VNIC_FLUSHED && d.receive == i % 2 && d.qp == (i < 2 ? a : b).qp, "queue %u", i);
    }
    again();
    CHECK_EQ(side_do(&a, &(struct lab_work){.opcode = LAB_NOTHING, .signalled = true, .cookie = 5}).cookie, 5);
    for (uint32_t i = 0; i < 4; i++) CHECK(!fake_poll(told[i], &d), "queue %u: status %d", i, d.status);
}

/* ---------------------------------------------------------------------------------------------------------------- EFA
 */

static void case_efa(void) {
    lab_device *device = fake_device(side_fabric("efa"), "efa3", "");
    a = side_new(device, LAB_SRD);
    b = side_new(device, LAB_SRD);
    a.qp->qkey = b.qp->qkey = 0x111;
    b.qp->unsolicited = true;
    for (uint32_t i = 0; i < 2; i++) {
        fake_qp_state(i ? a.qp : b.qp, LAB_INIT);
        fake_qp_state(i ? a.qp : b.qp, LAB_RTR);
        fake_qp_state(i ? a.qp : b.qp, LAB_RTS);
    }
    struct in6_addr other = device->gid[0];
    struct lab_work w = side_work(&a, LAB_WRITE, 0, 64, &b, 0);
    w.qkey = 0x111;
    w.ah = 12;
    CHECK_EQ(side_do(&a, &w).status, VNIC_GENERAL); /* no such address handle */
    lab_ah *ah = fake_ah(a.pd, &other);
    w.ah = ah->number;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK); /* the two are one process: the target knows it, too */
    /* The initiator speaks from another address than the target has a handle of. */
    other.s6_addr[15] = 9;
    lab_ah *stranger = fake_ah(a.pd, &other);
    w.ah = stranger->number;
    CHECK_EQ(side_do(&a, &w).status, VNIC_RETRY_EXCEEDED); /* nobody has that address */
    lab_enter();
    device->gid[1] = other;
    device->gids = 2;
    a.qp->sgid_index = 1;
    lab_leave();
    fake_ah_end(stranger);
    w.ah = ah->number;
    CHECK_EQ(side_do(&a, &w).status, VNIC_UNKNOWN_PEER);
    fake_ah(b.pd, &other);
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    /* An error is of its entry alone. */
    struct lab_work bad = w;
    bad.rkey++;
    CHECK_EQ(side_do(&a, &bad).status, VNIC_REMOTE_ACCESS);
    bad = w;
    bad.dest_qpn += 500;
    CHECK_EQ(side_do(&a, &bad).status, VNIC_REMOTE_INVALID);
    bad = w;
    bad.opcode = LAB_ADD;
    CHECK_EQ(side_do(&a, &bad).status, VNIC_LOCAL_OPERATION);
    CHECK_EQ(fake_qp_state_now(a.qp), LAB_RTS);
    /* Immediates need no receive; messages do. */
    w.opcode = LAB_WRITE_IMM;
    w.immediate = 0xabcd;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    struct lab_done d = side_wait(b.receives);
    CHECK(d.unsolicited && d.is_write && d.immediate == 0xabcd && d.bytes == 64 && d.source_ah != 0xffff, "ah %u",
          d.source_ah);
    w.opcode = LAB_SEND;
    side_receive(&b, 4, 0, 32);
    CHECK_EQ(side_do(&a, &w).status, VNIC_REMOTE_OPERATION);
    CHECK_EQ(side_wait(b.receives).status, VNIC_LOCAL_LENGTH);
    CHECK_EQ(side_do(&a, &w).status, VNIC_RNR_EXCEEDED);
    side_receive(&b, 5, 0, 64);
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    CHECK_EQ(side_wait(b.receives).cookie, 5);
    /* Completions come in any order: all of them. */
    bool seen[256] = {false};
    uint32_t turned = 0, last = 0;
    w.opcode = LAB_WRITE;
    for (w.cookie = 0; w.cookie < 256; w.cookie++) CHECK(fake_post(a.qp, &w), "room");
    for (uint32_t i = 0; i < 256; i++) {
        d = side_wait(a.sends);
        CHECK(d.cookie < 256 && !seen[d.cookie] && d.status == VNIC_OK, "cookie %u", d.cookie);
        seen[d.cookie] = true;
        turned += d.cookie < last;
        last = d.cookie;
    }
    CHECK(turned, "256 completions came in posting order");
    fake_qp_state(b.qp, LAB_ERR);
    CHECK_EQ(side_do(&a, &w).status, VNIC_REMOTE_INVALID);
}

/* Bytes wait in the NIC for a while: those of an immediate's own write are in memory before it is told of. */
static void case_immediates_show_their_bytes(void) {
    two("pollara", "visible_delay=2000000");
    test_rng rng = test_rng_at(2);
    for (uint32_t i = 0; i < 20; i++) {
        fill(&a, 0, 256, &rng);
        side_receive(&b, i, 0, 0);
        struct lab_work w = side_work(&a, LAB_WRITE_IMM, 0, 256, &b, 1024);
        w.immediate = i;
        CHECK(fake_post(a.qp, &w), "a full ring");
        CHECK_EQ(side_wait(b.receives).immediate, i);
        CHECK(!memcmp(a.memory, b.memory + 1024, 256), "immediate %u came before its bytes", i);
        CHECK_EQ(side_wait(a.sends).status, VNIC_OK);
    }
}

/* What stands for the queue pairs of others goes when it stands for nothing any more, whoever ends first. */
static void case_nothing_is_kept(void) {
    lab_device *device = fake_device(side_fabric("kept"), "efa3", "");
    a = side_new(device, LAB_SRD);
    b = side_new(device, LAB_SRD);
    fake_connect(a.qp, 0);
    fake_connect(b.qp, 0);
    struct lab_work w = side_work(&a, LAB_WRITE, 0, 64, &b, 0);
    w.ah = fake_ah(a.pd, &device->gid[0])->number;
    for (uint32_t i = 0; i < 300; i++) {
        struct lab_work nowhere = w;
        nowhere.dest_qpn += 100 + i;
        CHECK_EQ(side_do(&a, &nowhere).status, VNIC_REMOTE_INVALID);
    }
    while (ghosts()) sched_yield();
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
        CHECK_EQ(ghosts(), 1); /* connected: the next one finds it */
        if (i % 2) {
            fake_qp_end(b.qp);
            b.qp = fake_qp(b.pd, LAB_SRD, b.sends, b.receives, NULL);
            fake_connect(b.qp, 0);
            w.dest_qpn = b.qp->number;
        } else {
            fake_qp_end(a.qp);
            a.qp = fake_qp(a.pd, LAB_SRD, a.sends, a.receives, NULL);
            fake_connect(a.qp, 0);
        }
        while (ghosts()) sched_yield();
    }
}

static void case_datagrams(void) {
    lab_device *device = fake_device(side_fabric("ud"), "connectx", "");
    a = side_new(device, LAB_UD);
    b = side_new(device, LAB_UD);
    lab_ah *ah = fake_ah(a.pd, &device->gid[0]);
    for (uint32_t i = 0; i < 2; i++) {
        struct side *s = i ? &a : &b;
        s->qp->qkey = 0x22;
        fake_qp_state(s->qp, LAB_INIT);
        fake_qp_state(s->qp, LAB_RTR);
        fake_qp_state(s->qp, LAB_RTS);
    }
    memcpy(a.memory, "datagram", 8);
    struct lab_work w = side_work(&a, LAB_SEND, 0, 8, &b, 0);
    w.ah = ah->number;
    w.qkey = 0x22;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK); /* lost: there is no receive */
    w.qkey = 0x23;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK); /* lost: another key */
    side_receive(&b, 1, 0, 100);
    w.qkey = 0x22;
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
    const struct lab_done d = side_wait(b.receives);
    CHECK(d.bytes == 48 && d.cookie == 1 && !memcmp(b.memory + 40, "datagram", 8), "%u bytes", d.bytes);
    w.sge[0].length = 8192;
    CHECK_EQ(side_do(&a, &w).status, VNIC_LOCAL_LENGTH);
}

/* A program may register for each transfer. */
static void case_regions_again(void) {
    two("connectx", "");
    lab_mr mr = *a.mr;
    lab_enter();
    for (uint32_t i = 0; i < VNIC_MAX_REGIONS + 1000; i++) {
        CHECK_EQ(lab_region_add(&mr), 0);
        lab_region_remove(&mr);
    }
    lab_leave();
    const struct lab_work w = side_work(&a, LAB_WRITE, 0, 8, &b, 64);
    CHECK_EQ(side_do(&a, &w).status, VNIC_OK);
}

/* -------------------------------------------------------------------------------------------------------------- chance
 */

/* Any mixture, on any NIC that keeps connections: every request ends once, in order, and memory is what it must be. */
static void mixture(const char *profile, const char *knobs) {
    two(profile, knobs);
    test_rng rng = test_rng_at(3);
    const vnic_knobs *k = &lab_devices(&(uint32_t){0})->knobs;
    const uint32_t rounds = (uint32_t)test_scaled(20000);
    uint32_t posted = 0, done = 0, receives = 0, received = 0, signalled = 0, adds = 0;
    static uint8_t kinds[FAKE_DEPTH];
    uint64_t sum = 0;
    memset(b.memory, 0, SIDE_BYTES);
    while (done < rounds) {
        struct lab_done d;
        while (receives - received < 64) side_receive(&b, receives++, 900000, 4096);
        if (posted < rounds && posted - done < 200) {
            const uint32_t which = (uint32_t)test_below(&rng, 6);
            const bool atomic = which == 2 && k->atomics;
            struct lab_work w = side_work(&a, LAB_WRITE, 0, 0, &b, 0);
            const uint64_t at = 64 + 8 * test_below(&rng, 1000);
            w.sge[0] = (struct lab_sge){a.mr->start + at, 8 * (1 + (uint32_t)test_below(&rng, 40)), a.mr->key};
            w.remote_address = b.mr->start + at;
            if (which == 1) w.opcode = LAB_READ, w.sge[0].address += 500000;
            if (atomic) {
                w = side_work(&a, LAB_ADD, 700000, 8, &b, 0);
                w.add_or_swap = test_below(&rng, 1000);
                sum += w.add_or_swap;
                adds++;
            }
            if (which == 3) w.opcode = LAB_SEND;
            if (which == 4) w.opcode = LAB_WRITE_IMM;
            w.fence = test_below(&rng, 8) == 0;
            w.cookie = posted;
            w.signalled = posted + 1 == rounds || test_below(&rng, 4) == 0;
            kinds[posted % FAKE_DEPTH] = w.signalled;
            if (fake_post(a.qp, &w)) posted++, signalled += w.signalled;
        }
        while (fake_poll(b.receives, &d)) {
            CHECK(d.status == VNIC_OK && d.cookie == received, "receive %u: status %d", d.cookie, d.status);
            received++;
        }
        while (fake_poll(a.sends, &d)) {
            CHECK(d.status == VNIC_OK, "request %u: status %d", d.cookie, d.status);
            while (done < d.cookie) CHECK(!kinds[done++ % FAKE_DEPTH], "request %u was left out", done - 1);
            CHECK_EQ(d.cookie, done);
            done++;
            signalled--;
        }
    }
    CHECK_EQ(signalled, 0);
    CHECK(!adds || word(&b, 0) == sum, "the sum of %u adds", adds);
}

static void case_mixture_connectx(void) {
    mixture("connectx", "");
}
static void case_mixture_relaxed(void) {
    mixture("connectx-ro", "");
}
static void case_mixture_thor(void) {
    mixture("thor2", "retry_exc_inflight_bytes=0");
}
static void case_mixture_pollara(void) {
    mixture("pollara", "retry_exc_inflight_bytes=0,responder_over=wait");
}

/* ------------------------------------------------------------------------------------------------------------- amount
 */

static void many(enum lab_qp_type type, const char *profile, const char *knobs) {
    lab_device *device = fake_device(side_fabric("many"), profile, knobs);
    a = side_new(device, type);
    b = side_new(device, type);
    lab_ah *ah = fake_ah(a.pd, &device->gid[0]);
    fake_connect(a.qp, b.qp->number);
    fake_connect(b.qp, a.qp->number);
    struct lab_work w = side_work(&a, LAB_WRITE, 0, 64, &b, 0);
    w.ah = ah->number;
    const uint64_t amount = test_scaled(500000), began = test_now_ns();
    uint64_t posted = 0, done = 0, sum = 0;
    struct lab_done d;
    while (done < amount) {
        for (; posted < amount && posted - done < 400; posted++) {
            w.cookie = (uint32_t)posted;
            if (!fake_post(a.qp, &w)) break;
        }
        bool any = false;
        for (; fake_poll(a.sends, &d); done++, any = true) {
            CHECK(d.status == VNIC_OK, "status %d", d.status);
            sum += d.cookie;
        }
        if (!any) sched_yield();
    }
    CHECK_EQ(sum, amount * (amount - 1) / 2);
    CHECK(!fake_poll(a.sends, &d), "one more");
    printf("%s: %.0f thousand operations/s\n", profile,
           (double)amount / ((double)(test_now_ns() - began) * 1e-9) / 1e3);
}

static void case_many_connectx(void) {
    many(LAB_RC, "connectx", "");
}
static void case_many_efa(void) {
    many(LAB_SRD, "efa", "");
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 240);
    side_case("operations", case_operations);
    side_case("messages", case_messages);
    side_case("errors", case_errors);
    side_case("overrun", case_overrun);
    side_case("provider flushes", case_provider_flushes);
    side_case("efa", case_efa);
    side_case("immediates show their bytes", case_immediates_show_their_bytes);
    side_case("nothing is kept", case_nothing_is_kept);
    side_case("datagrams", case_datagrams);
    side_case("regions again", case_regions_again);
    side_case("mixture connectx", case_mixture_connectx);
    side_case("mixture connectx-ro", case_mixture_relaxed);
    side_case("mixture thor2", case_mixture_thor);
    side_case("mixture pollara", case_mixture_pollara);
    side_case("many connectx", case_many_connectx);
    side_case("many efa", case_many_efa);
    return test_end();
}
