/* SPDX-License-Identifier: Apache-2.0
 *
 * golden.c: has a vendor's library write the operations of tests/native/golden.h on a NIC of the lab, and prints what
 * is then in its queues: tests/native/golden. Run by golden.py, in a lab.
 *
 *   golden VARIANT LIBRARY
 *
 * One queue pair that is connected to itself: every request is executed and has to end well. Once the table has been
 * gone through, the ring is filled up to its last place, and the table begins anew there.
 */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "golden.h"
#include "ring.h"

/* Of efadv.h: older headers lack what newer libraries have. */
struct golden_efa {
    uint64_t comp_mask;
    uint32_t driver_qp_type;
    uint16_t flags;
    uint8_t service_level, reserved;
};
typedef struct ibv_qp *(*efa_create)(struct ibv_context *, struct ibv_qp_init_attr_ex *, struct golden_efa *, uint32_t);

#define EFA_INLINE_WRITE 0x2u
#define WRS 16u
#define SECONDS 120.0

static const char *variant;
static bool is_efa, calls; /* calls: requests are written by ibv_wr_*() */
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *local, *remote;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_ah *ah;
static union ibv_gid gid;
static uint32_t gid_index;
static __typeof__(&uccl_ep_lab_ring) find_ring;
static struct lab_ring before[2];
static bool first_row = true;

__attribute__((format(printf, 1, 2), noreturn)) static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}
#define NEED(condition) ((condition) ? (void)0 : fail("golden.c:%d: %s", __LINE__, #condition))

static void *function(const char *library, const char *name) {
    void *handle = library ? dlopen(library, RTLD_NOW) : RTLD_DEFAULT;
    if (library && !handle) fail("%s", dlerror());
    void *found = dlsym(handle, name);
    if (!found) fail("no %s", name);
    return found;
}

/* ----------------------------------------------------------------------------------------------------------- what is
 * kept
 */

static const char *const ring_names[] = {"send", "receive"};

static void row(void) {
    printf("%s\n", first_row ? "" : ",");
    first_row = false;
}

static void hex(const char *name, const uint8_t *at, size_t bytes) {
    printf("\"%s\": \"", name);
    for (size_t i = 0; i < bytes; i++) printf("%02x", at[i]);
    putchar('"');
}

static void begin(const char *queue) {
    for (uint32_t kind = 0; kind < 2; kind++) {
        before[kind] = (struct lab_ring){0};
        if (srq && kind == LAB_RING_SENDS) continue;
        NEED(find_ring(qp->qp_num, kind, &before[kind]) == 0);
        row();
        printf("{\"queue\": \"%s\", \"ring\": \"%s\", \"queue_pair\": %u, \"number\": %u, \"bytes\": %u, \"unit\": %u}",
               queue, ring_names[kind], qp->qp_num, before[kind].number, before[kind].bytes, before[kind].unit);
    }
}

/* What has been posted since the last call. */
static void keep(const char *name, enum lab_ring_kind kind) {
    struct lab_ring now, *was = &before[kind];
    NEED(find_ring(qp->qp_num, kind, &now) == 0);
    const uint32_t units = now.bytes / now.unit, n = (now.posted - was->posted) & (units - 1);
    uint8_t entry[4096];
    if (!n || n * now.unit > sizeof entry) fail("%s: %u units of %u bytes were posted", name, n, now.unit);
    const uint32_t at = was->posted % units * now.unit;
    uint32_t used = 0; /* without the zeros at its end */
    for (uint32_t i = 0; i < n * now.unit; i++)
        if ((entry[i] = now.entries[(at + i) % now.bytes])) used = i + 1;
    row();
    printf("{\"operation\": \"%s\", \"ring\": \"%s\", \"at\": %u, \"length\": %u, ", name, ring_names[kind], at,
           n * now.unit);
    hex("doorbell", now.doorbell, now.doorbell_bytes);
    printf(", ");
    hex("entry", entry, used);
    putchar('}');
    *was = now;
}

/* ------------------------------------------------------------------------------------------------------------
 * operations
 */

static uint32_t pieces_of(const struct golden *g, struct ibv_sge *sge) {
    const uint32_t n = golden_pieces(g);
    for (uint32_t i = 0; i < n; i++) sge[i] = (struct ibv_sge){golden_address(g, i), g->length[i], local->lkey};
    return n;
}

static const struct golden *named(const char *name) {
    for (size_t i = 0; i < GOLDEN_ROWS; i++)
        if (!strcmp(golden_table[i].name, name)) return &golden_table[i];
    fail("no operation %s", name);
}

static void await(uint32_t n) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    while (n) {
        struct ibv_wc wc;
        const int found = ibv_poll_cq(cq, 1, &wc);
        if (found < 0) fail("ibv_poll_cq: %d", found);
        if (found && wc.status) fail("request %llu ends in status %d", (unsigned long long)wc.wr_id, wc.status);
        n -= (uint32_t)found;
        if (!found) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); /* the NIC's thread needs a CPU, too */
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - start.tv_sec) > SECONDS) fail("%u completions have not come", n);
    }
}

static void receive(const char *name) {
    const struct golden *g = named(name);
    struct ibv_sge sge[GOLDEN_PIECES];
    struct ibv_recv_wr wr = {.wr_id = golden_number(g), .sg_list = sge, .num_sge = (int)pieces_of(g, sge)}, *bad;
    NEED((srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad)) == 0);
    keep(name, LAB_RING_RECEIVES);
}

static void post_list(const struct golden *g) {
    static const enum ibv_wr_opcode opcodes[] = {
        [GOLDEN_WRITE] = IBV_WR_RDMA_WRITE,        [GOLDEN_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
        [GOLDEN_READ] = IBV_WR_RDMA_READ,          [GOLDEN_ADD] = IBV_WR_ATOMIC_FETCH_AND_ADD,
        [GOLDEN_SWAP] = IBV_WR_ATOMIC_CMP_AND_SWP, [GOLDEN_SEND] = IBV_WR_SEND,
        [GOLDEN_SEND_IMM] = IBV_WR_SEND_WITH_IMM};
    struct ibv_sge sge[GOLDEN_PIECES];
    struct ibv_send_wr wr = {.wr_id = golden_number(g), .sg_list = sge, .opcode = opcodes[g->kind]}, *bad;
    wr.num_sge = (int)pieces_of(g, sge);
    wr.send_flags = (g->flags & GOLDEN_INLINE ? IBV_SEND_INLINE : 0) |
                    (g->flags & GOLDEN_QUIET ? 0 : IBV_SEND_SIGNALED) | (g->flags & GOLDEN_FENCE ? IBV_SEND_FENCE : 0) |
                    (g->flags & GOLDEN_SOLICITED ? IBV_SEND_SOLICITED : 0);
    if (g->kind == GOLDEN_WRITE_IMM || g->kind == GOLDEN_SEND_IMM) golden_immediate(g, (uint8_t *)&wr.imm_data);
    if (g->kind == GOLDEN_ADD || g->kind == GOLDEN_SWAP) {
        wr.wr.atomic.remote_addr = golden_remote(g);
        wr.wr.atomic.rkey = remote->rkey;
        wr.wr.atomic.compare_add = (g->kind == GOLDEN_ADD ? GOLDEN_ADDEND : GOLDEN_COMPARE) + golden_number(g);
        wr.wr.atomic.swap = GOLDEN_ADDEND + golden_number(g);
    } else {
        wr.wr.rdma.remote_addr = golden_remote(g);
        wr.wr.rdma.rkey = remote->rkey;
    }
    const int error = ibv_post_send(qp, &wr, &bad);
    if (error) fail("%s: ibv_post_send: %s", g->name, strerror(error));
}

static void post_calls(const struct golden *g) {
    struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);
    const uint64_t to = golden_remote(g), number = golden_number(g);
    const uint32_t key = remote->rkey;
    uint32_t immediate;
    struct ibv_sge sge[GOLDEN_PIECES];
    const uint32_t n = pieces_of(g, sge);
    golden_immediate(g, (uint8_t *)&immediate);
    ibv_wr_start(x);
    x->wr_id = number;
    x->wr_flags = (g->flags & GOLDEN_QUIET ? 0 : IBV_SEND_SIGNALED) | (g->flags & GOLDEN_FENCE ? IBV_SEND_FENCE : 0) |
                  (g->flags & GOLDEN_SOLICITED ? IBV_SEND_SOLICITED : 0) |
                  (g->flags & GOLDEN_INLINE ? IBV_SEND_INLINE : 0); /* libbnxt_re wants it said here, too */
    switch (g->kind) {
    case GOLDEN_WRITE:
        ibv_wr_rdma_write(x, key, to);
        break;
    case GOLDEN_WRITE_IMM:
        ibv_wr_rdma_write_imm(x, key, to, immediate);
        break;
    case GOLDEN_READ:
        ibv_wr_rdma_read(x, key, to);
        break;
    case GOLDEN_ADD:
        ibv_wr_atomic_fetch_add(x, key, to, GOLDEN_ADDEND + number);
        break;
    case GOLDEN_SWAP:
        ibv_wr_atomic_cmp_swp(x, key, to, GOLDEN_COMPARE + number, GOLDEN_ADDEND + number);
        break;
    case GOLDEN_SEND:
        ibv_wr_send(x);
        break;
    case GOLDEN_SEND_IMM:
        ibv_wr_send_imm(x, immediate);
        break;
    default:
        fail("%s is not sent", g->name);
    }
    if (ah) ibv_wr_set_ud_addr(x, ah, qp->qp_num, GOLDEN_QKEY);
    if (g->flags & GOLDEN_INLINE)
        ibv_wr_set_inline_data(x, (void *)(uintptr_t)sge[0].addr, sge[0].length);
    else if (n == 1)
        ibv_wr_set_sge(x, sge[0].lkey, sge[0].addr, sge[0].length);
    else
        ibv_wr_set_sge_list(x, n, sge);
    const int error = ibv_wr_complete(x);
    if (error) fail("%s: ibv_wr_complete: %s", g->name, strerror(error));
}

static void post(const struct golden *g) {
    if (calls)
        post_calls(g);
    else
        post_list(g);
    keep(g->name, LAB_RING_SENDS);
}

static void operation(const struct golden *g) {
    static uint32_t receives;
    if (golden_takes_receive(g)) receive(receives++ % 2 ? "receive" : is_efa ? "receive-pieces-2" : "receive-pieces-4");
    post(g);
    await((g->flags & GOLDEN_QUIET ? 0u : 1u) + (golden_takes_receive(g) ? 1u : 0u));
}

/* What is done quietly is over when what comes behind it is. */
static void table(void) {
    for (size_t i = 0; i < GOLDEN_ROWS; i++)
        if (golden_table[i].kind != GOLDEN_RECEIVE && golden_applies(&golden_table[i], variant))
            operation(&golden_table[i]);
}

/* --------------------------------------------------------------------------------------------------------------
 * objects
 */

static struct ibv_qp *make_qp(void) {
    struct ibv_qp_cap cap = {.max_send_wr = WRS,
                             .max_recv_wr = srq ? 0 : WRS,
                             .max_send_sge = GOLDEN_PIECES,
                             .max_recv_sge = srq ? 0 : 4,
                             .max_inline_data = 96};
    if (!is_efa && !calls) {
        struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .srq = srq, .cap = cap, .qp_type = IBV_QPT_RC};
        return ibv_create_qp(pd, &attr);
    }
    struct ibv_qp_init_attr_ex attr = {.send_cq = cq, .recv_cq = cq, .cap = cap, .qp_type = IBV_QPT_RC, .pd = pd};
    attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                          IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    if (!is_efa) {
        attr.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
        return ibv_create_qp_ex(context, &attr);
    }
    struct golden_efa own = {.flags = variant[3] >= '3' ? EFA_INLINE_WRITE : 0};
    attr.qp_type = IBV_QPT_DRIVER;
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 2;
    attr.cap.max_inline_data = variant[3] >= '3' ? 80 : 32;
    return ((efa_create)function("libefa.so.1", "efadv_create_qp_ex"))(context, &attr, &own, sizeof own);
}

static void connect_to_itself(void) {
    const int port_and_key = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = GOLDEN_QKEY};
    init.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    NEED(!ibv_modify_qp(qp, &init, port_and_key | (is_efa ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
    struct ibv_ah_attr to = {
        .grh = {.dgid = gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64}, .is_global = 1, .port_num = 1};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = qp->qp_num,
                              .ah_attr = to,
                              .max_dest_rd_atomic = 4,
                              .min_rnr_timer = 12};
    NEED(!ibv_modify_qp(qp, &rtr,
                        is_efa ? IBV_QP_STATE
                               : IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 0, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    NEED(!ibv_modify_qp(
        qp, &rts,
        IBV_QP_STATE | IBV_QP_SQ_PSN |
            (is_efa ? 0 : IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)));
    if (is_efa) NEED(ah = ibv_create_ah(pd, &to));
}

/* A queue of requests, from an empty ring to one that has been gone round. False: the library has none of that kind. */
static bool sends(bool by_calls) {
    calls = by_calls;
    if (!(qp = make_qp())) return false;
    connect_to_itself();
    begin(calls ? "calls" : "list");
    table();
    const struct lab_ring *ring = &before[LAB_RING_SENDS];
    const struct golden *filler = named("write-8");
    while ((ring->posted + 1) % (ring->bytes / ring->unit)) {
        /* Several at a time, since each wait is a turn of the scheduler's; EFA's come back in any order, and with them
         * the numbers of requests. */
        uint32_t n = 0;
        do {
            post(filler);
            n++;
        } while (!is_efa && n < WRS / 2 && (ring->posted + 1) % (ring->bytes / ring->unit));
        await(n);
    }
    if (!is_efa) operation(named("write-pieces-6"));
    table();
    NEED(!ibv_destroy_qp(qp));
    return true;
}

static void shared_receives(void) {
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = WRS, .max_sge = 4}};
    if (!(srq = ibv_create_srq(pd, &attr))) return;
    calls = false;
    NEED(qp = make_qp());
    begin("shared");
    for (size_t i = 0; i < GOLDEN_ROWS; i++)
        if (golden_table[i].kind == GOLDEN_RECEIVE) receive(golden_table[i].name);
    NEED(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq));
    srq = NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) fail("golden VARIANT LIBRARY");
    variant = argv[1];
    is_efa = !strncmp(variant, "efa", 3);
    gid_index = is_efa ? 0 : 1;
    find_ring = (__typeof__(find_ring))function(NULL, "uccl_ep_lab_ring");
    int devices = 0;
    struct ibv_device **list = ibv_get_device_list(&devices);
    if (devices != 1) fail("%d devices", devices);
    NEED(context = ibv_open_device(*list));
    NEED(pd = ibv_alloc_pd(context));
    NEED(!ibv_query_gid(context, 1, (int)gid_index, &gid));
    NEED(cq = ibv_create_cq(context, 4 * WRS, NULL, NULL, 0));
    uint8_t *memory = mmap((void *)(uintptr_t)GOLDEN_MEMORY, GOLDEN_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if ((uintptr_t)memory != GOLDEN_MEMORY) fail("no memory at 0x%llx", GOLDEN_MEMORY);
    for (uint64_t at = GOLDEN_MEMORY; at < GOLDEN_SINK; at++) memory[at - GOLDEN_MEMORY] = golden_byte(at);
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    NEED(local = ibv_reg_mr(pd, memory, GOLDEN_REMOTE - GOLDEN_MEMORY, access));
    NEED(remote = ibv_reg_mr(pd, (void *)(uintptr_t)GOLDEN_REMOTE, GOLDEN_MEMORY + GOLDEN_BYTES - GOLDEN_REMOTE,
                             access | (is_efa ? 0 : IBV_ACCESS_REMOTE_ATOMIC)));
    printf("{\"variant\": \"%s\", \"library\": \"%s\", \"lkey\": %u, \"rkey\": %u, \"rows\": [", variant, argv[2],
           local->lkey, remote->rkey);
    if (!is_efa && !sends(false)) fail("no queue pair");
    const bool has_calls = sends(true);
    if (is_efa && !has_calls) fail("no queue pair");
    if (!is_efa) shared_receives();
    printf("\n]}\n");
    return fflush(stdout) ? 1 : 0;
}
