/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_queues.c: queues of an endpoint at their limits: what is asked of them, what one doorbell takes, what
 * becomes of a list that is refused, and whose end it is when one fails.
 */
#include "verbs_table.h"

#define MIB (1u << 20)

static char heap[2][MIB];

typedef struct pair {
    node a, b;
} pair;

static void register_heaps(pair *t, uint64_t bytes) {
    node *both[2] = {&t->a, &t->b};
    for (unsigned k = 0; k < 2; k++) {
        const uccl_ep_memory memory = host_memory(heap[k], bytes);
        WORKS(both[k]->table->region_register(both[k]->device, UCCL_EP_REGION_HEAP, &memory));
    }
}

static uccl_ep_endpoint *open_endpoint(const node *n, uint32_t index, uint32_t inflight_peer, uint32_t inflight,
                                       uint32_t receives) {
    const uccl_ep_endpoint_config config = {.size = sizeof(config),
                                            .index = index,
                                            .rank = n->rank,
                                            .peers = 2,
                                            .inflight_peer = inflight_peer,
                                            .inflight = inflight,
                                            .receives_peer = receives};
    uccl_ep_endpoint *endpoint;
    WORKS(n->table->endpoint_open(n->device, &config, &endpoint));
    return endpoint;
}

/* Both opened and joined. */
static void open_pair(pair *t, const char *name, const char *machine, const char *const device[2], const char *options,
                      uint32_t inflight_peer, uint32_t inflight, uint32_t receives) {
    fake_machine(machine);
    node_open(&t->a, 0, name, device[0], options);
    node_open(&t->b, 1, name, device[1], options);
    register_heaps(t, 65536);
    t->a.endpoint = open_endpoint(&t->a, 0, inflight_peer, inflight, receives);
    t->b.endpoint = open_endpoint(&t->b, 0, inflight_peer, inflight, receives);
    nodes_join(&t->a, &t->b);
}

static void close_pair(pair *t) {
    node_close(&t->a);
    node_close(&t->b);
    check_nothing_left();
}

static uint32_t number_of(const node *n, uint32_t peer) {
    uint32_t both[2], bytes = sizeof(both);
    WORKS(n->table->peer_address(n->endpoint, peer, both, &bytes));
    return both[0];
}

/* Turns of polling until `n` operations have completed well, in order. */
static void complete(node *n, uint32_t count) {
    uccl_ep_completion c[64];
    uint32_t done = 0;
    for (unsigned turn = 0; turn < 100000 && done < count; turn++) {
        const int32_t got = n->table->poll(n->endpoint, c, 64);
        CHECK(got >= 0, "%d: %s", got, said);
        for (int32_t i = 0; i < got; i++) {
            CHECK(c[i].status == UCCL_EP_OK, "operation %u: %d, %#x", done, c[i].status, (unsigned)c[i].vendor_code);
            CHECK_EQ(c[i].cookie, done++);
        }
    }
    CHECK_EQ(done, count);
}

static const char *const mlx5[2] = {"mlx5_0", "mlx5_1"}, *const bnxt[2] = {"bnxt_re0", "bnxt_re1"};
/* The second one's regions are in pieces of 8192 bytes. */
#define PIECES "mlx5_0%s;mlx5_1,max_mr_size=0x2000"

/* Fewer bytes inline than asked for, and no queue at all: whatever the errno, less is tried. */
static void inline_is_given_up(void) {
    static const char *const machines[] = {"mlx5_0,inline=64;mlx5_1,inline=0",
                                           "mlx5_0,inline=64,inline_errno=12;mlx5_1,inline=0,inline_errno=12"};
    for (unsigned i = 0; i < 2; i++) {
        pair t;
        open_pair(&t, "connectx", machines[i], mlx5, "", 16, 32, 8);
        CHECK_EQ(node_write(&t.a, 1, 0, 0, 48).status, UCCL_EP_OK);
        CHECK_EQ(node_write(&t.b, 0, 0, 64, 200).status, UCCL_EP_OK);
        close_pair(&t);
    }
}

static void writes(uccl_ep_operation *operations, uint32_t n, uint32_t length, uint64_t border) {
    for (uint32_t i = 0; i < n; i++)
        operations[i] = (uccl_ep_operation){.kind = UCCL_EP_OPERATION_WRITE,
                                            .flags = UCCL_EP_OPERATION_SIGNALLED,
                                            .length = length,
                                            .local_offset = border - length / 2,
                                            .remote_offset = border - length / 2,
                                            .cookie = i};
}

/* The limit of a doorbell is one of requests: operations that cross a border are two or three. */
static void lists_count_requests(void) {
    pair t;
    open_pair(&t, "thor", "bnxt_re0,max_post=64,max_mr_size=0x2000;bnxt_re1,max_mr_size=0x2000", bnxt, "", 256, 256, 8);
    uccl_ep_operation operations[64];
    uint32_t accepted;
    writes(operations, 64, 256, 8192);
    memset(heap[0], 0x5c, 65536);
    WORKS(t.a.table->submit(t.a.endpoint, 1, operations, 64, 0, &accepted));
    CHECK_EQ(accepted, 64);
    complete(&t.a, 64);
    CHECK(fake_stats().longest_batch <= 64, "%" PRIu64 " requests of a doorbell", fake_stats().longest_batch);
    close_pair(&t);
}

/* Regions that are whole here and in pieces there: an operation is two requests where a queue was for one, and all of
 * them complete when it breaks. */
static void pieces_of_the_peer(void) {
    pair t;
    char machine[128];
    snprintf(machine, sizeof(machine), PIECES, "");
    open_pair(&t, "connectx", machine, mlx5, "inline=0", 1, 2, 0);
    const uint64_t overruns = fake_stats().cq_overruns;
    uccl_ep_operation operations[2];
    uint32_t accepted;
    writes(operations, 2, 8192 + 512, 8192); /* three pieces */
    operations[0].remote_offset = operations[1].remote_offset = 8192 - 100;
    WORKS(t.a.table->submit(t.a.endpoint, 1, operations, 1, 0, &accepted));
    CHECK_EQ(accepted, 1);
    complete(&t.a, 1);
    close_pair(&t);
    /* Two under way, each of three requests, in a completion queue for two. */
    open_pair(&t, "connectx", machine, mlx5, "inline=0", 16, 2, 0);
    const uint32_t qp = number_of(&t.a, 1);
    FAKE(fake_ibverbs_hold)(qp, 1);
    WORKS(t.a.table->submit(t.a.endpoint, 1, operations, 2, 0, &accepted));
    CHECK_EQ(accepted, 2);
    FAKE(fake_ibverbs_break)(qp, IBV_WC_RETRY_EXC_ERR, 0x81);
    FAKE(fake_ibverbs_hold)(qp, 0);
    /* Its completions pile up while nobody reads: another endpoint lets the wire work. */
    for (unsigned turn = 0; turn < 200; turn++) {
        uccl_ep_completion c;
        CHECK_EQ(t.b.table->poll(t.b.endpoint, &c, 1), 0);
    }
    CHECK_EQ(fake_stats().cq_overruns, overruns);
    WORKS(node_disconnect(&t.a, 1));
    close_pair(&t);
}

/* A list of which some was taken. */
static void refused_lists(void) {
    pair t;
    char machine[128];
    uccl_ep_operation operations[8];
    uint32_t accepted;
    /* Between two operations: what was taken goes on, the rest comes later. */
    open_pair(&t, "connectx", "mlx5_0,post_limit=5;mlx5_1", mlx5, "calls=0,inline=0", 16, 32, 8);
    writes(operations, 8, 64, 8192);
    WORKS(t.a.table->submit(t.a.endpoint, 1, operations, 8, 0, &accepted));
    CHECK_EQ(accepted, 5);
    complete(&t.a, 5);
    close_pair(&t);
    /* Within one: to begin it again would place its bytes twice. */
    snprintf(machine, sizeof(machine), PIECES, ",post_limit=3");
    open_pair(&t, "connectx", machine, mlx5, "calls=0,inline=0", 16, 32, 8);
    writes(operations, 8, 256, 8192); /* two requests each */
    REFUSED(t.a.table->submit(t.a.endpoint, 1, operations, 2, 0, &accepted), UCCL_EP_E_NIC, "rank 1|errno 12");
    CHECK_EQ(accepted, 1);
    REFUSED(t.a.table->submit(t.a.endpoint, 1, operations, 2, 0, &accepted), UCCL_EP_E_NIC, "failed before|errno 12");
    CHECK(!accepted && said_code == ENOMEM, "%u, %d", accepted, said_code);
    WORKS(node_disconnect(&t.a, 1));
    WORKS(node_disconnect(&t.b, 0));
    nodes_join(&t.a, &t.b);
    CHECK_EQ(node_write(&t.a, 1, 0, 0, 64).status, UCCL_EP_OK);
    close_pair(&t);
    /* A provider that does not say where: nobody knows what is under way, so the connection has to end. */
    open_pair(&t, "connectx", "mlx5_0,post_limit=5,keeps_bad=1;mlx5_1", mlx5, "calls=0,inline=0", 16, 32, 8);
    writes(operations, 8, 64, 8192);
    REFUSED(t.a.table->submit(t.a.endpoint, 1, operations, 8, 0, &accepted), UCCL_EP_E_NIC, "rank 1|errno 12");
    CHECK_EQ(accepted, 0);
    WORKS(node_disconnect(&t.a, 1));
    WORKS(node_disconnect(&t.b, 0));
    nodes_join(&t.a, &t.b);
    CHECK_EQ(node_write(&t.a, 1, 0, 0, 64).status, UCCL_EP_OK);
    close_pair(&t);
}

/* Whoever submits behind a failure is told what it was. */
static void failure_is_told_again(void) {
    pair t;
    open_pair(&t, "connectx", "mlx5_0;mlx5_1", mlx5, "", 16, 32, 8);
    FAKE(fake_ibverbs_break)(number_of(&t.a, 1), IBV_WC_REM_ACCESS_ERR, 0x88);
    const uccl_ep_completion c = node_write(&t.a, 1, 0, 0, 64);
    CHECK_EQ(c.status, UCCL_EP_E_REGISTRATION);
    uccl_ep_operation operation;
    uint32_t accepted;
    writes(&operation, 1, 64, 8192);
    REFUSED(t.a.table->submit(t.a.endpoint, 1, &operation, 1, 0, &accepted), UCCL_EP_E_REGISTRATION,
            "rank 1|failed before|remote access error|0x88");
    CHECK_EQ(said_code, c.vendor_code);
    close_pair(&t);
}

/* A NIC, or a peer, that takes no reads and adds: neither is promised, nor tried. */
static void no_reads(void) {
    static const char *const machines[] = {"mlx5_0,init_rd_atom=0;mlx5_1", "mlx5_0,rd_atom=0;mlx5_1"};
    for (unsigned i = 0; i < 2; i++) {
        fake_machine(machines[i]);
        node n;
        node_open(&n, 0, "connectx", "mlx5_0", "");
        CHECK(!(n.caps.flags & (UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_READ_FLUSHES | UCCL_EP_CAP_ATOMIC_COHERENT)),
              "%s: %#" PRIx64, machines[i], n.caps.flags);
        node_close(&n);
    }
    fake_machine("mlx5_0,init_rd_atom=0;mlx5_1");
    pair t;
    open_pair(&t, "connectx", "mlx5_0,init_rd_atom=0;mlx5_1", mlx5, "", 16, 32, 8);
    const uccl_ep_operation read = {.kind = UCCL_EP_OPERATION_READ, .length = 8};
    uint32_t accepted;
    REFUSED(t.a.table->submit(t.a.endpoint, 1, &read, 1, 0, &accepted), UCCL_EP_E_UNSUPPORTED, "a read|init_rd_atom 0");
    CHECK_EQ(node_write(&t.a, 1, 0, 0, 64).status, UCCL_EP_OK);
    WORKS(node_disconnect(&t.b, 0));
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
    const uint32_t bytes = address_for(&t.a, 1, blob);
    blob[22] = 0; /* verbs_address.responder_depth: untrusted */
    REFUSED(t.b.table->connect(t.b.endpoint, 0, blob, bytes), UCCL_EP_E_BOOTSTRAP, "rank 0|no reads|rd_atomic=");
    close_pair(&t);
}

/* A queue that fails is the end of its endpoint, and of no other on the NIC. */
static void one_endpoint_ends(void) {
    for (int receives = 0; receives < 2; receives++) {
        pair t;
        open_pair(&t, "connectx", "mlx5_0;mlx5_1", mlx5, "", 16, 32, 8);
        uccl_ep_endpoint *other = open_endpoint(&t.a, 1, 16, 32, 8);
        FAKE(fake_ibverbs_fail_queue)(number_of(&t.a, 1), receives);
        uccl_ep_event event;
        uccl_ep_completion c;
        CHECK_EQ(t.a.table->events(other, &event, 1), 0);
        CHECK_EQ(t.a.table->poll(other, &c, 1), 0);
        REFUSED(t.a.table->poll(t.a.endpoint, &c, 1), UCCL_EP_E_NIC,
                receives ? "mlx5_0|shared receive queue failed" : "mlx5_0|completion queue overran");
        t.a.table->endpoint_close(other);
        close_pair(&t);
    }
}

/* A poll that fails is the end of an endpoint, but with a library that is known to fail without a reason; and with
 * that, too, if it goes on. */
static void polls_that_fail(void) {
    static const char *const ionic[2] = {"ionic_0", "ionic_1"};
    pair t;
    uccl_ep_completion c;
    open_pair(&t, "connectx", "mlx5_0;mlx5_1", mlx5, "", 16, 32, 8);
    FAKE(fake_ibverbs_fail_polls)(1);
    REFUSED(t.a.table->poll(t.a.endpoint, &c, 1), UCCL_EP_E_NIC, "mlx5_0|completion queue cannot be read (-5)");
    close_pair(&t);

    open_pair(&t, "pollara", "ionic_0;ionic_1", ionic, "", 16, 32, 8);
    for (uint32_t round = 0; round < 3; round++) { /* each counts anew */
        FAKE(fake_ibverbs_fail_polls)(40);
        CHECK_EQ(node_write(&t.a, 1, 0, 0, 64).status, UCCL_EP_OK);
    }
    FAKE(fake_ibverbs_fail_polls)(65);
    for (uint32_t i = 0; i < 64; i++) CHECK_EQ(t.a.table->poll(t.a.endpoint, &c, 1), 0);
    REFUSED(t.a.table->poll(t.a.endpoint, &c, 1), UCCL_EP_E_NIC, "ionic_0|completion queue cannot be read (-5)");
    close_pair(&t);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    inline_is_given_up();
    lists_count_requests();
    pieces_of_the_peer();
    refused_lists();
    failure_is_told_again();
    no_reads();
    one_endpoint_ends();
    polls_that_fail();
    return test_end();
}
