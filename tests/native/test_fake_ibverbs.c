/* SPDX-License-Identifier: Apache-2.0
 *
 * The fake libibverbs is what the verbs backends are judged by, so it is judged first: each case does what the
 * documentation of the verbs allows or forbids, and sees that it is told so.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake_ibverbs/fake_ibverbs.h"
#include "testing.h"
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <sys/mman.h>

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

/* The library, by the names that it exports. */
static struct {
    struct ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(struct ibv_device **);
    struct ibv_context *(*open_device)(struct ibv_device *);
    int (*close_device)(struct ibv_context *);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *);
    int (*dealloc_pd)(struct ibv_pd *);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
    int (*dereg_mr)(struct ibv_mr *);
    struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
    int (*destroy_cq)(struct ibv_cq *);
    struct ibv_srq *(*create_srq)(struct ibv_pd *, struct ibv_srq_init_attr *);
    int (*destroy_srq)(struct ibv_srq *);
    struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
    int (*destroy_qp)(struct ibv_qp *);
    int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
    int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
    struct ibv_qp_ex *(*qp_to_qp_ex)(struct ibv_qp *);
    int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
    void (*ack_async_event)(struct ibv_async_event *);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *);
    int (*destroy_comp_channel)(struct ibv_comp_channel *);
    int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
    void (*ack_cq_events)(struct ibv_cq *, unsigned);
    void (*get_stats)(fake_ibverbs_stats *);
    void (*fail)(const char *, uint32_t, int);
    void (*set_port)(const char *, uint32_t, int);
    void (*cut)(uint32_t);
    void (*break_)(uint32_t, int, uint32_t);
} v;

static void *find(void *library, const char *name) {
    void *p = dlsym(library, name);
    CHECK(p, "%s", dlerror());
    return p;
}

static void load(void) {
    void *library = dlopen(UCCL_EP_TEST_LIBRARY_DIR "/fake_verbs/libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
#define FIND(field, name) *(void **)(void *)&v.field = find(library, name)
#define VERB(field) FIND(field, "ibv_" #field)
    VERB(get_device_list);
    VERB(free_device_list);
    VERB(open_device);
    VERB(close_device);
    VERB(alloc_pd);
    VERB(dealloc_pd);
    VERB(reg_mr);
    VERB(reg_dmabuf_mr);
    VERB(dereg_mr);
    VERB(create_cq);
    VERB(destroy_cq);
    VERB(create_srq);
    VERB(destroy_srq);
    VERB(create_qp);
    VERB(destroy_qp);
    VERB(modify_qp);
    VERB(query_qp);
    VERB(qp_to_qp_ex);
    VERB(get_async_event);
    VERB(ack_async_event);
    VERB(create_comp_channel);
    VERB(destroy_comp_channel);
    VERB(get_cq_event);
    VERB(ack_cq_events);
    FIND(get_stats, "fake_ibverbs_get_stats");
    FIND(fail, "fake_ibverbs_fail");
    FIND(set_port, "fake_ibverbs_set_port");
    FIND(cut, "fake_ibverbs_cut");
    FIND(break_, "fake_ibverbs_break");
}

/* ---------------------------------------------------------------------------------------------------- two ends of a
 * wire */

#define BYTES 65536
#define ALL_RIGHTS                                                                                                     \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

typedef struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    unsigned char *memory;
} side;

typedef struct options {
    const char *devices;
    uint32_t depth, cqe, srq_wr, inline_bytes;
    int mr_access, qp_access;
} options;

static const options usual = {"mlx5_0;mlx5_1", 16, 64, 0, 64, ALL_RIGHTS, ALL_RIGHTS};

static void side_open(side *s, unsigned device, const options *o) {
    int n;
    struct ibv_device **list = v.get_device_list(&n);
    CHECK(list && n > (int)device, "%d devices", n);
    s->context = v.open_device(list[device]);
    v.free_device_list(list);
    CHECK(s->context, "%s", strerror(errno));
    s->pd = v.alloc_pd(s->context);
    s->send_cq = v.create_cq(s->context, (int)o->cqe, NULL, NULL, 0);
    s->recv_cq = v.create_cq(s->context, (int)o->cqe, NULL, NULL, 0);
    struct ibv_srq_init_attr srq = {.attr = {.max_wr = o->srq_wr, .max_sge = 1}};
    s->srq = o->srq_wr ? v.create_srq(s->pd, &srq) : NULL;
    struct ibv_qp_init_attr init = {.send_cq = s->send_cq,
                                    .recv_cq = s->recv_cq,
                                    .srq = s->srq,
                                    .cap = {o->depth, s->srq ? 0 : o->depth, 2, s->srq ? 0 : 1, o->inline_bytes},
                                    .qp_type = IBV_QPT_RC};
    s->qp = v.create_qp(s->pd, &init);
    CHECK(s->qp, "%s", strerror(errno));
    s->memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    s->mr = v.reg_mr(s->pd, s->memory, BYTES, o->mr_access);
    CHECK(s->mr, "%s", strerror(errno));
}

static void side_close(side *s) {
    CHECK_EQ(v.destroy_qp(s->qp), 0);
    if (s->srq) CHECK_EQ(v.destroy_srq(s->srq), 0);
    CHECK_EQ(v.destroy_cq(s->send_cq), 0);
    CHECK_EQ(v.destroy_cq(s->recv_cq), 0);
    CHECK_EQ(v.dereg_mr(s->mr), 0);
    CHECK_EQ(v.dealloc_pd(s->pd), 0);
    CHECK_EQ(v.close_device(s->context), 0);
    munmap(s->memory, BYTES);
}

#define INIT_MASK (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define RTR_MASK                                                                                                       \
    (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |        \
     IBV_QP_MIN_RNR_TIMER)
#define RTS_MASK                                                                                                       \
    (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

/* Attributes that take a queue pair of device `own` to one of device `other`. */
static struct ibv_qp_attr good_attr(const side *peer, unsigned other, int access) {
    struct ibv_qp_attr a = {.port_num = 1,
                            .qp_access_flags = (unsigned)access,
                            .path_mtu = IBV_MTU_1024,
                            .dest_qp_num = peer->qp->qp_num,
                            .rq_psn = 7,
                            .sq_psn = 7,
                            .max_rd_atomic = 1,
                            .max_dest_rd_atomic = 1,
                            .min_rnr_timer = 12,
                            .timeout = 14,
                            .retry_cnt = 6,
                            .rnr_retry = 2};
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = 3, .hop_limit = 64}};
    a.ah_attr.grh.dgid.raw[10] = a.ah_attr.grh.dgid.raw[11] = 0xff;
    a.ah_attr.grh.dgid.raw[12] = 10;
    a.ah_attr.grh.dgid.raw[15] = (uint8_t)(other + 1);
    return a;
}

static int to_state(side *s, struct ibv_qp_attr a, enum ibv_qp_state state, int mask) {
    a.qp_state = state;
    return v.modify_qp(s->qp, &a, mask);
}

static void side_connect(side *s, const side *peer, unsigned other, int access) {
    const struct ibv_qp_attr a = good_attr(peer, other, access);
    CHECK_EQ(to_state(s, a, IBV_QPS_INIT, INIT_MASK), 0);
    CHECK_EQ(to_state(s, a, IBV_QPS_RTR, RTR_MASK), 0);
    CHECK_EQ(to_state(s, a, IBV_QPS_RTS, RTS_MASK), 0);
}

static void pair_open(side *a, side *b, const options *o) {
    setenv("FAKE_IBVERBS", o->devices, 1);
    side_open(a, 0, o);
    side_open(b, 1, o);
    side_connect(a, b, 1, o->qp_access);
    side_connect(b, a, 0, o->qp_access);
}

static struct ibv_sge sge_of(const side *s, uint64_t offset, uint32_t bytes) {
    return (struct ibv_sge){(uintptr_t)s->memory + offset, bytes, s->mr->lkey};
}

static int post(side *s, const side *peer, enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t remote, uint64_t id,
                unsigned flags) {
    struct ibv_send_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags}, *bad;
    const uint64_t address = (uintptr_t)peer->memory + remote;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = address;
        wr.wr.atomic.rkey = peer->mr->rkey;
        wr.wr.atomic.compare_add = 5;
    } else {
        wr.wr.rdma.remote_addr = address;
        wr.wr.rdma.rkey = peer->mr->rkey;
        wr.imm_data = htobe32((uint32_t)id);
    }
    return ibv_post_send(s->qp, &wr, &bad);
}

static struct ibv_wc next(struct ibv_cq *cq) {
    struct ibv_wc wc;
    for (unsigned turn = 0; turn < 100000; turn++) {
        const int n = ibv_poll_cq(cq, 1, &wc);
        CHECK(n >= 0, "the queue is broken");
        if (n) return wc;
    }
    CHECK(false, "no completion came");
    return wc;
}

static void expect(struct ibv_cq *cq, uint64_t id, int status) {
    const struct ibv_wc wc = next(cq);
    CHECK_EQ(wc.wr_id, id);
    CHECK_EQ(wc.status, status);
}

static fake_ibverbs_stats stats(void) {
    fake_ibverbs_stats s;
    v.get_stats(&s);
    return s;
}

/* An event of this type is there; it is acknowledged. */
static void expect_event(struct ibv_context *context, enum ibv_event_type type) {
    struct ibv_async_event event;
    fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
    do CHECK_EQ(v.get_async_event(context, &event), 0);
    while (v.ack_async_event(&event), event.event_type != type);
}

/* -------------------------------------------------------------------------------------------------------------- cases
 */

static void moves_bytes(void) {
    side a, b;
    pair_open(&a, &b, &usual);
    for (unsigned i = 0; i < BYTES; i++) a.memory[i] = (unsigned char)(i * 7);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 3, 1001), 5, 1, IBV_SEND_SIGNALED), 0);
    expect(a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(memcmp(b.memory + 5, a.memory + 3, 1001) == 0 && !b.memory[4] && !b.memory[1006], "the bytes are not there");
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_READ, sge_of(&a, 8192, 64), 5, 2, IBV_SEND_SIGNALED), 0);
    expect(a.send_cq, 2, IBV_WC_SUCCESS);
    CHECK(memcmp(a.memory + 8192, b.memory + 5, 64) == 0, "the read brought something else");
    CHECK_EQ(post(&a, &b, IBV_WR_ATOMIC_FETCH_AND_ADD, sge_of(&a, 0, 8), 40000, 3, IBV_SEND_SIGNALED), 0);
    CHECK_EQ(post(&a, &b, IBV_WR_ATOMIC_FETCH_AND_ADD, sge_of(&a, 0, 8), 40000, 4, IBV_SEND_SIGNALED), 0);
    expect(a.send_cq, 3, IBV_WC_SUCCESS);
    expect(a.send_cq, 4, IBV_WC_SUCCESS);
    uint64_t word;
    memcpy(&word, b.memory + 40000, 8);
    CHECK_EQ(word, 10);
    memcpy(&word, a.memory, 8);
    CHECK_EQ(word, 5); /* what was there before */
    /* Unsignalled: no completion, and in order. */
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 3, 8), 0, 5, 0), 0);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 3, 8), 0, 6, IBV_SEND_SIGNALED | IBV_SEND_INLINE), 0);
    expect(a.send_cq, 6, IBV_WC_SUCCESS);
    side_close(&a);
    side_close(&b);
}

static void waits_until_polled(void) {
    side a, b;
    pair_open(&a, &b, &usual);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 64, 1, IBV_SEND_SIGNALED), 0);
    a.memory[0] = 9; /* the source is still the NIC's */
    expect(a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(b.memory[64], 9);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 72, 1, IBV_SEND_SIGNALED | IBV_SEND_INLINE), 0);
    a.memory[0] = 1; /* inlined: it is ours */
    expect(a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(b.memory[72], 9);
    side_close(&a);
    side_close(&b);
}

static void give(side *s, unsigned n, uint64_t first) {
    for (unsigned i = 0; i < n; i++) {
        struct ibv_recv_wr wr = {.wr_id = first + i}, *bad;
        CHECK_EQ(s->srq ? ibv_post_srq_recv(s->srq, &wr, &bad) : ibv_post_recv(s->qp, &wr, &bad), 0);
    }
}

static void immediates_take_receives(void) {
    for (unsigned shared = 0; shared < 2; shared++) {
        options o = usual;
        o.srq_wr = shared ? 4 : 0;
        side a, b;
        pair_open(&a, &b, &o);
        give(&b, 2, 70);
        const uint64_t before = stats().rnr_naks;
        for (uint64_t i = 0; i < 2; i++)
            CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE_WITH_IMM, sge_of(&a, 0, 16), 0, 11 + i, IBV_SEND_SIGNALED), 0);
        for (uint64_t i = 0; i < 2; i++) {
            const struct ibv_wc wc = next(b.recv_cq);
            CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM, "%d", wc.status);
            CHECK_EQ(wc.wr_id, 70 + i);
            CHECK_EQ(be32toh(wc.imm_data), 11 + i);
            CHECK_EQ(wc.qp_num, b.qp->qp_num);
            CHECK_EQ(wc.byte_len, 16);
            expect(a.send_cq, 11 + i, IBV_WC_SUCCESS);
        }
        CHECK_EQ(stats().rnr_naks, before);
        /* Without a receive it is tried again, `rnr_retry` times, and then the queue is done for. */
        CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE_WITH_IMM, sge_of(&a, 0, 16), 0, 13, 0), 0);
        expect(a.send_cq, 13, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK_EQ(stats().rnr_naks, before + 3);
        if (shared) {
            expect_event(a.context, IBV_EVENT_QP_LAST_WQE_REACHED);
            struct ibv_recv_wr wr = {0}, *bad;
            give(&b, 4, 0);
            CHECK_EQ(ibv_post_srq_recv(b.srq, &wr, &bad), ENOMEM);
        }
        side_close(&a);
        side_close(&b);
    }
}

static void errors_flush(void) {
    struct {
        const char *what;
        int status, mr_access, qp_access;
        uint64_t remote, local;
        uint32_t bytes;
        enum ibv_wr_opcode opcode;
        bool responder;
    } cases[] = {
        {"beyond the region", IBV_WC_REM_ACCESS_ERR, ALL_RIGHTS, ALL_RIGHTS, BYTES - 4, 0, 8, IBV_WR_RDMA_WRITE, true},
        {"no right to write", IBV_WC_REM_ACCESS_ERR, IBV_ACCESS_LOCAL_WRITE, ALL_RIGHTS, 0, 0, 8, IBV_WR_RDMA_WRITE,
         true},
        {"no right to read", IBV_WC_REM_ACCESS_ERR, IBV_ACCESS_LOCAL_WRITE, ALL_RIGHTS, 0, 0, 8, IBV_WR_RDMA_READ,
         true},
        {"a queue that takes no writes", IBV_WC_REM_INV_REQ_ERR, ALL_RIGHTS, 0, 0, 0, 8, IBV_WR_RDMA_WRITE, true},
        {"a crooked word", IBV_WC_REM_INV_REQ_ERR, ALL_RIGHTS, ALL_RIGHTS, 4, 0, 8, IBV_WR_ATOMIC_FETCH_AND_ADD, true},
        {"own memory beyond the region", IBV_WC_LOC_PROT_ERR, ALL_RIGHTS, ALL_RIGHTS, 0, BYTES - 4, 8,
         IBV_WR_RDMA_WRITE, false},
    };
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        options o = usual;
        o.mr_access = cases[i].mr_access;
        o.qp_access = cases[i].qp_access;
        side a, b;
        pair_open(&a, &b, &o);
        give(&b, 1, 50);
        memset(a.memory, 1, 64);
        CHECK_EQ(post(&a, &b, cases[i].opcode, sge_of(&a, cases[i].local, cases[i].bytes), cases[i].remote, 1, 0), 0);
        CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 128, 2, 0), 0);
        const struct ibv_wc wc = next(a.send_cq);
        CHECK(wc.wr_id == 1 && (int)wc.status == cases[i].status && wc.vendor_err, "%s: %d", cases[i].what, wc.status);
        expect(a.send_cq, 2, IBV_WC_WR_FLUSH_ERR); /* unsignalled, and told all the same */
        CHECK(!b.memory[128] && !b.memory[0] && !b.memory[BYTES - 4], "%s: something was written", cases[i].what);
        CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 128, 3, 0), 0);
        expect(a.send_cq, 3, IBV_WC_WR_FLUSH_ERR);
        if (cases[i].responder) {
            expect_event(b.context, IBV_EVENT_QP_ACCESS_ERR);
            expect(b.recv_cq, 50, IBV_WC_WR_FLUSH_ERR);
        }
        /* Reset and connected again it is as new. */
        if (!cases[i].responder) {
            CHECK_EQ(to_state(&a, (struct ibv_qp_attr){0}, IBV_QPS_RESET, IBV_QP_STATE), 0);
            CHECK_EQ(to_state(&b, (struct ibv_qp_attr){0}, IBV_QPS_RESET, IBV_QP_STATE), 0);
            side_connect(&a, &b, 1, ALL_RIGHTS);
            side_connect(&b, &a, 0, ALL_RIGHTS);
            CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 128, 4, IBV_SEND_SIGNALED), 0);
            expect(a.send_cq, 4, IBV_WC_SUCCESS);
        }
        side_close(&a);
        side_close(&b);
    }
}

static void lost_peers(void) {
    for (unsigned kind = 0; kind < 6; kind++) {
        options o = usual;
        if (kind == 5) o.devices = "mlx5_0,routed=1;mlx5_1,routed=1";
        side a, b;
        pair_open(&a, &b, &o);
        unsigned char expected = 0;
        memset(a.memory, 3, 8);
        if (kind == 0) v.cut(a.qp->qp_num);
        if (kind == 1) CHECK_EQ(to_state(&b, (struct ibv_qp_attr){0}, IBV_QPS_RESET, IBV_QP_STATE), 0);
        if (kind == 2) v.set_port("mlx5_1", 1, IBV_PORT_DOWN);
        if (kind == 3) v.cut(b.qp->qp_num), expected = 3; /* the acknowledgement is lost: it was done */
        if (kind == 4 || kind == 5) {
            struct ibv_qp_attr attr = good_attr(&b, 1, ALL_RIGHTS);
            if (kind == 4)
                attr.sq_psn = 8;
            else
                attr.ah_attr.grh.hop_limit = 1;
            CHECK_EQ(to_state(&a, (struct ibv_qp_attr){0}, IBV_QPS_RESET, IBV_QP_STATE), 0);
            CHECK_EQ(to_state(&a, attr, IBV_QPS_INIT, INIT_MASK), 0);
            CHECK_EQ(to_state(&a, attr, IBV_QPS_RTR, RTR_MASK), 0);
            CHECK_EQ(to_state(&a, attr, IBV_QPS_RTS, RTS_MASK), 0);
        }
        CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 0, 1, 0), 0);
        expect(a.send_cq, 1, IBV_WC_RETRY_EXC_ERR);
        CHECK_EQ(b.memory[0], expected);
        if (kind == 2) {
            expect_event(b.context, IBV_EVENT_PORT_ERR);
            v.set_port("mlx5_1", 1, IBV_PORT_ACTIVE);
        }
        side_close(&a);
        side_close(&b);
    }
}

static void states_need_their_attributes(void) {
    options o = usual;
    setenv("FAKE_IBVERBS", o.devices, 1);
    side a, b;
    side_open(&a, 0, &o);
    side_open(&b, 1, &o);
    const struct ibv_qp_attr good = good_attr(&b, 1, ALL_RIGHTS);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 0, 1, 0), EINVAL);
    CHECK_EQ(to_state(&a, good, IBV_QPS_RTS, RTS_MASK), EINVAL);
    const struct {
        enum ibv_qp_state state;
        int mask;
    } steps[] = {{IBV_QPS_INIT, INIT_MASK}, {IBV_QPS_RTR, RTR_MASK}, {IBV_QPS_RTS, RTS_MASK}};
    for (unsigned i = 0; i < 3; i++) {
        for (int bit = 1; bit < 1 << 22; bit <<= 1) /* one too few, or one too many */
            if (bit != IBV_QP_STATE && bit != IBV_QP_CUR_STATE && bit != IBV_QP_ALT_PATH &&
                !(i && (bit == IBV_QP_ACCESS_FLAGS || bit == IBV_QP_PKEY_INDEX || bit == IBV_QP_PATH_MIG_STATE ||
                        bit == IBV_QP_MIN_RNR_TIMER)))
                CHECK_EQ(to_state(&a, good, steps[i].state, steps[i].mask ^ bit), EINVAL);
        struct ibv_qp_attr bad = good;
        if (i == 0) bad.port_num = 2;
        if (i == 1) bad.ah_attr.is_global = 0;
        if (i == 2) bad.max_rd_atomic = 17;
        CHECK_EQ(to_state(&a, bad, steps[i].state, steps[i].mask), EINVAL);
        CHECK_EQ(to_state(&a, good, steps[i].state, steps[i].mask), 0);
    }
    side_close(&a);
    side_close(&b);
}

static void depths_are_kept(void) {
    options o = usual;
    o.depth = 4;
    side a, b;
    pair_open(&a, &b, &o);
    const struct ibv_sge sge = sge_of(&a, 0, 8);
    for (uint64_t i = 0; i < 4; i++)
        CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge, 0, i, i == 2 ? IBV_SEND_SIGNALED : 0), 0);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge, 0, 9, 0), ENOMEM);
    expect(a.send_cq, 2, IBV_WC_SUCCESS); /* covers 0, 1 and 2: 3 is still there */
    for (uint64_t i = 0; i < 3; i++) CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge, 0, i, 0), 0);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge, 0, 9, 0), ENOMEM);
    side_close(&a);
    side_close(&b);
    /* A completion queue that overruns is lost. */
    o.depth = 16;
    o.cqe = 3;
    pair_open(&a, &b, &o);
    for (uint64_t i = 0; i < 4; i++)
        CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 0, i, IBV_SEND_SIGNALED), 0);
    struct ibv_wc wc[4];
    for (unsigned i = 0; i < 200; i++) CHECK_EQ(ibv_poll_cq(b.send_cq, 1, wc), 0); /* only lets the wire run */
    expect_event(a.context, IBV_EVENT_CQ_ERR);
    CHECK_EQ(ibv_poll_cq(a.send_cq, 4, wc), 3);
    CHECK_EQ(ibv_poll_cq(a.send_cq, 1, wc), -1);
    side_close(&a);
    side_close(&b);
}

static void registration(void) {
    setenv("FAKE_IBVERBS", "mlx5_0,max_mr_size=0x100000;ionic_0", 1);
    side s[2];
    for (unsigned i = 0; i < 2; i++) {
        options o = usual;
        if (i) o.mr_access &= ~IBV_ACCESS_REMOTE_ATOMIC;
        side_open(&s[i], i, &o);
    }
    CHECK(!v.reg_mr(s[0].pd, s[0].memory, 0, 0) && errno == EINVAL, "length 0");
    CHECK(!v.reg_mr(s[0].pd, s[0].memory, 64, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL,
          "remote without local write");
    CHECK(!v.reg_mr(s[0].pd, s[0].memory, 1ull << 40, ALL_RIGHTS) && errno == EINVAL, "too large");
    CHECK(!v.reg_mr(s[1].pd, s[1].memory, 64, ALL_RIGHTS) && errno == EINVAL, "atomics that there are not");
    unsigned char *hole = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ibv_mr *mr = v.reg_mr(s[0].pd, hole + 4095, 2, ALL_RIGHTS);
    CHECK(mr && v.dereg_mr(mr) == 0, "across a page");
    mprotect(hole + 4096, 4096, PROT_NONE);
    CHECK(!v.reg_mr(s[0].pd, hole, 3 * 4096, ALL_RIGHTS) && errno == EFAULT, "a hole");
    mprotect(hole + 4096, 4096, PROT_READ);
    CHECK(!v.reg_mr(s[0].pd, hole, 3 * 4096, ALL_RIGHTS) && errno == EFAULT, "read-only memory to be written");
    mr = v.reg_mr(s[0].pd, hole, 3 * 4096, 0);
    CHECK(mr && v.dereg_mr(mr) == 0, "read-only memory to be read");
    munmap(hole, 3 * 4096);
    const int fd = memfd_create("dmabuf", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, 8192), 0);
    CHECK(!v.reg_dmabuf_mr(s[0].pd, 4096, 100, 0x7000000010, fd, ALL_RIGHTS) && errno == EINVAL, "another page offset");
    CHECK(!v.reg_dmabuf_mr(s[0].pd, 4096, 8192, 0x7000000000, fd, ALL_RIGHTS) && errno == EINVAL, "beyond the dmabuf");
    mr = v.reg_dmabuf_mr(s[0].pd, 4096 + 0x10, 100, 0x7000000010, fd, ALL_RIGHTS);
    CHECK(mr && v.dereg_mr(mr) == 0, "a dmabuf");
    close(fd);
    CHECK_EQ(v.dealloc_pd(s[0].pd), EBUSY);
    v.fail("reg_mr", 2, ENOMEM);
    mr = v.reg_mr(s[0].pd, s[0].memory, 64, 0);
    CHECK(mr && v.dereg_mr(mr) == 0, "the first is not the one to fail");
    CHECK(!v.reg_mr(s[0].pd, s[0].memory, 64, 0) && errno == ENOMEM, "the second is");
    side_close(&s[0]);
    side_close(&s[1]);
    setenv("FAKE_IBVERBS", "mlx5_0,open_errno=13", 1);
    int n;
    struct ibv_device **list = v.get_device_list(&n);
    CHECK(n == 1 && !v.open_device(list[0]) && errno == EACCES, "no permission");
    v.free_device_list(list);
    unsetenv("FAKE_IBVERBS");
    list = v.get_device_list(&n);
    CHECK(list && !n && !list[0], "without a name there is no device");
    v.free_device_list(list);
}

static void limits_of_vendors(void) {
    side a, b;
    options o = usual;
    o.devices = "bnxt_re0,max_post=3,inflight=100;bnxt_re1";
    o.inline_bytes = 0;
    for (unsigned flood = 0; flood < 2; flood++) {
        pair_open(&a, &b, &o);
        struct ibv_sge sge = sge_of(&a, 0, flood ? 40 : 8);
        struct ibv_send_wr wr[4], *bad;
        memset(wr, 0, sizeof(wr));
        for (unsigned i = 0; i < 4; i++) {
            wr[i] = (struct ibv_send_wr){.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
            wr[i].wr.rdma.remote_addr = (uintptr_t)b.memory;
            wr[i].wr.rdma.rkey = b.mr->rkey;
            wr[i].next = i < 3 && !flood ? &wr[i + 1] : NULL;
        }
        for (unsigned i = 0; i < (flood ? 4u : 1u); i++) CHECK_EQ(ibv_post_send(a.qp, &wr[i], &bad), 0);
        const struct ibv_wc wc = next(a.send_cq);
        CHECK_EQ(wc.wr_id, flood ? 2 : 3);
        CHECK_EQ(wc.status, flood ? IBV_WC_RETRY_EXC_ERR : IBV_WC_LOC_QP_OP_ERR);
        CHECK_EQ(wc.vendor_err, flood ? 10 : 3);
        side_close(&a);
        side_close(&b);
    }
}

static void extended_forms(void) {
    setenv("FAKE_IBVERBS", usual.devices, 1);
    side a, b;
    side_open(&a, 0, &usual);
    side_open(&b, 1, &usual);
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 8, .wc_flags = IBV_WC_EX_WITH_IMM};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(a.context, &cq_attr);
    CHECK(cq, "%s", strerror(errno));
    struct ibv_qp_init_attr_ex init = {.send_cq = ibv_cq_ex_to_cq(cq),
                                       .recv_cq = ibv_cq_ex_to_cq(cq),
                                       .cap = {4, 4, 2, 1, 64},
                                       .qp_type = IBV_QPT_RC,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = a.pd,
                                       .send_ops_flags =
                                           IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD};
    CHECK_EQ(v.destroy_qp(a.qp), 0);
    a.qp = verbs_get_ctx(a.context)->create_qp_ex(a.context, &init); /* the inline form would link the library */
    CHECK(a.qp, "%s", strerror(errno));
    side_connect(&a, &b, 1, ALL_RIGHTS);
    side_connect(&b, &a, 0, ALL_RIGHTS);
    struct ibv_qp_ex *ex = v.qp_to_qp_ex(a.qp);
    CHECK(ex && ex->wr_rdma_write && !ex->wr_rdma_read && !v.qp_to_qp_ex(b.qp), "what was asked for");
    for (unsigned lap = 0; lap < 100; lap++) {
        struct ibv_poll_cq_attr none = {0};
        CHECK_EQ(ibv_start_poll(cq, &none), ENOENT);
        ibv_wr_start(ex);
        ex->wr_flags = 0;
        ex->wr_id = 1;
        ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory);
        uint64_t value = lap;
        ibv_wr_set_inline_data(ex, &value, 8);
        ex->wr_flags = IBV_SEND_SIGNALED;
        ex->wr_id = 2;
        ibv_wr_atomic_fetch_add(ex, b.mr->rkey, (uintptr_t)b.memory + 8, 3);
        ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
        value = 1234; /* it was taken */
        CHECK_EQ(ibv_wr_complete(ex), 0);
        int error;
        for (unsigned turn = 0; (error = ibv_start_poll(cq, &none)) == ENOENT && turn < 10000; turn++) {
        }
        CHECK_EQ(error, 0);
        CHECK(cq->wr_id == 2 && !cq->status && ibv_wc_read_opcode(cq) == IBV_WC_FETCH_ADD, "another completion");
        CHECK_EQ(ibv_next_poll(cq), ENOENT);
        ibv_end_poll(cq);
        memcpy(&value, b.memory, 8);
        CHECK_EQ(value, lap);
        memcpy(&value, b.memory + 8, 8);
        CHECK_EQ(value, 3 * (lap + 1));
    }
    /* A batch that has no room is refused as a whole. */
    ibv_wr_start(ex);
    for (unsigned i = 0; i < 5; i++) {
        ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory);
        ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
    }
    CHECK_EQ(ibv_wr_complete(ex), ENOMEM);
    CHECK_EQ(v.destroy_qp(a.qp), 0);
    CHECK_EQ(v.destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
    struct ibv_qp_init_attr plain = {
        .send_cq = a.send_cq, .recv_cq = a.recv_cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    a.qp = v.create_qp(a.pd, &plain);
    side_close(&a);
    side_close(&b);
}

static void channels_wake(void) {
    side a, b;
    pair_open(&a, &b, &usual);
    struct ibv_comp_channel *channel = v.create_comp_channel(a.context);
    struct ibv_cq *cq = v.create_cq(a.context, 8, &a, channel, 0), *which;
    CHECK_EQ(v.destroy_qp(a.qp), 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    a.qp = v.create_qp(a.pd, &init);
    CHECK_EQ(to_state(&b, (struct ibv_qp_attr){0}, IBV_QPS_RESET, IBV_QP_STATE), 0);
    side_connect(&a, &b, 1, ALL_RIGHTS);
    side_connect(&b, &a, 0, ALL_RIGHTS);
    CHECK_EQ(ibv_req_notify_cq(cq, 0), 0);
    CHECK_EQ(post(&a, &b, IBV_WR_RDMA_WRITE, sge_of(&a, 0, 8), 0, 1, IBV_SEND_SIGNALED), 0);
    struct ibv_wc wc;
    for (unsigned i = 0; i < 200; i++) CHECK_EQ(ibv_poll_cq(b.send_cq, 1, &wc), 0);
    void *context;
    CHECK_EQ(v.get_cq_event(channel, &which, &context), 0);
    CHECK(which == cq && context == &a, "another queue");
    v.ack_cq_events(cq, 1);
    expect(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(v.destroy_cq(cq), EBUSY);
    CHECK_EQ(v.destroy_qp(a.qp), 0);
    CHECK_EQ(v.destroy_comp_channel(channel), EBUSY);
    CHECK_EQ(v.destroy_cq(cq), 0);
    CHECK_EQ(v.destroy_comp_channel(channel), 0);
    init.send_cq = init.recv_cq = a.send_cq;
    a.qp = v.create_qp(a.pd, &init);
    side_close(&a);
    side_close(&b);
}

/* Atomics of one device and many queues at the same time: none is lost, and nothing here waits for anything. */
static void many_requests(void) {
    side a, b;
    pair_open(&a, &b, &usual);
    test_rng rng = test_rng_at(1);
    const uint64_t n = test_scaled(20000);
    uint64_t posted = 0, done = 0;
    while (done < n) {
        if (posted < n && test_below(&rng, 2) &&
            !post(&a, &b, IBV_WR_ATOMIC_FETCH_AND_ADD, sge_of(&a, 0, 8), 8, posted, IBV_SEND_SIGNALED))
            posted++;
        struct ibv_wc wc[4];
        const int got = ibv_poll_cq(a.send_cq, 4, wc);
        for (int i = 0; i < got; i++) {
            CHECK_EQ(wc[i].status, IBV_WC_SUCCESS);
            CHECK_EQ(wc[i].wr_id, done++);
        }
    }
    uint64_t word;
    memcpy(&word, b.memory + 8, 8);
    CHECK_EQ(word, 5 * n);
    side_close(&a);
    side_close(&b);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    load();
    moves_bytes();
    waits_until_polled();
    immediates_take_receives();
    errors_flush();
    lost_peers();
    states_need_their_attributes();
    depths_are_kept();
    registration();
    limits_of_vendors();
    extended_forms();
    channels_wake();
    many_requests();
    const fake_ibverbs_stats s = stats();
    CHECK(!s.contexts && !s.pds && !s.mrs && !s.cqs && !s.srqs && !s.qps && !s.channels, "something lives on");
    CHECK_EQ(s.stale, 0);
    return test_end();
}
