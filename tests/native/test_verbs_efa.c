/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_efa.c: the backend efa through its table, and through the core where that is what matters, on a libibverbs
 * and a libefa of software: which devices are taken, address handles, completions in any order, errors of one
 * operation, queues at their limits, what is left of an earlier connection. And the backend with a fault in it: each of
 * these tests finds its own.
 */
#include <sys/wait.h>

#include "verbs_table.h"

#define MIB (1u << 20)
#define PAIR "efa0%s;efa1%s"

static char heap[3][MIB];
static const char *tested = "efa"; /* or with a fault */

static void open_node(node *n, uint32_t rank, const char *device, const char *options) {
    node_open(n, rank, tested, device, options);
    const uccl_ep_memory memory = host_memory(heap[rank], MIB);
    WORKS(n->table->region_register(n->device, UCCL_EP_REGION_HEAP, &memory));
}

/* Two ranks on two NICs whose keys are `keys`, opened and not joined. */
static void open_pair(node n[2], const char *keys, const char *options) {
    char machine[256];
    snprintf(machine, sizeof(machine), PAIR, keys, keys);
    fake_machine(machine);
    open_node(&n[0], 0, "efa0", options);
    open_node(&n[1], 1, "efa1", options);
    node_endpoint(&n[0]);
    node_endpoint(&n[1]);
}

static void close_pair(node n[2]) {
    node_close(&n[0]);
    node_close(&n[1]);
    check_nothing_left();
}

static void join_itself(node *n) {
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
    uint32_t bytes = sizeof(blob);
    node_connect(n, n);
    WORKS(n->table->region_export(n->device, UCCL_EP_REGION_HEAP, blob, &bytes));
    WORKS(n->table->region_import(n->device, n->rank, UCCL_EP_REGION_HEAP, blob, bytes));
}

static uint32_t number_of(const node *n) {
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
    address_for(n, 0, blob);
    uint32_t number;
    memcpy(&number, blob + 16, sizeof(number)); /* efa_address.qp_number */
    return number;
}

static uccl_ep_operation write_of(uint64_t cookie, uint64_t offset, uint32_t length) {
    return (uccl_ep_operation){.kind = UCCL_EP_OPERATION_WRITE,
                               .flags = UCCL_EP_OPERATION_SIGNALLED,
                               .length = length,
                               .local_offset = offset,
                               .remote_offset = offset,
                               .cookie = cookie};
}

/* The next completion of any kind; false: none came. */
static bool next(node *n, uccl_ep_completion *c, unsigned turns) {
    for (unsigned turn = 0; turn < turns; turn++) {
        const int32_t got = n->table->poll(n->endpoint, c, 1);
        CHECK(got >= 0, "%d: %s", got, said);
        if (got) return true;
    }
    return false;
}

/* ----------------------------------------------------------------------------------------------- devices, libraries */

static void devices_and_libraries(void) {
    uccl_ep_device *device;
    uccl_ep_caps caps = {.size = sizeof(caps)};
    const uccl_ep_backend *t = backend("efa");
    fake_machine("efa0,gen=1;mlx5_0;efa1,state=1;efa2,gen=2");
    REFUSED(t->device_open(&host, "efa0", "", &device, &caps), UCCL_EP_E_NO_DEVICE,
            "efa0|RDMA write|efa2|rdma-core 46");
    REFUSED(t->device_open(&host, "mlx5_0", "", &device, &caps), UCCL_EP_E_NO_DEVICE, "mlx5_0|backend connectx");
    REFUSED(t->device_open(&host, "efa1", "", &device, &caps), UCCL_EP_E_NO_DEVICE, "efa1|port 1 is not active");
    REFUSED(t->device_open(&host, "efa2", "unsolicited=1", &device, &caps), UCCL_EP_E_NO_DEVICE,
            "unsolicited=1|rdma-core 52");
    /* Options of connections are none of its own. */
    REFUSED(t->device_open(&host, "efa2", "timeout=14", &device, &caps), UCCL_EP_E_INVALID,
            "no option 'timeout'|own_library|unsolicited");
    REFUSED(backend("connectx")->device_open(&host, "efa2", "", &device, &caps), UCCL_EP_E_NO_DEVICE, "backend efa");
    REFUSED(t->device_open(&host, "efa2", "own_library=/nowhere/libefa.so.1", &device, &caps), UCCL_EP_E_NO_DEVICE,
            "libefa.so.1 is missing|ibverbs-providers");
    REFUSED(t->device_open(&host, "efa2", "own_library=" UCCL_EP_TEST_LIBRARY_DIR "/fake_verbs_old/libefa.so.1",
                           &device, &caps),
            UCCL_EP_E_NO_DEVICE, "lacks efadv_query_ah|too old|rdma-core 46");
    /* The first that can be used; its generation and what follows. */
    WORKS(t->device_open(&host, NULL, "", &device, &caps));
    uccl_ep_device_info info = {.size = sizeof(info)};
    WORKS(t->opened(device, &info));
    CHECK(!strcmp(info.name, "efa2") && !strcmp(info.vendor, "Amazon") && !strcmp(info.model, "EFA efa2"), "%s, %s, %s",
          info.name, info.vendor, info.model);
    const uint64_t never = UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_UNSIGNALLED | UCCL_EP_CAP_COMPLETES_IN_ORDER |
                           UCCL_EP_CAP_ERROR_STOPS | UCCL_EP_CAP_NO_DUPLICATES | UCCL_EP_CAP_ORDER_WRITE_WRITE |
                           UCCL_EP_CAP_ORDER_WRITE_IMM | UCCL_EP_CAP_READ_FLUSHES | UCCL_EP_CAP_FENCE_DELIVERED;
    CHECK(!(caps.flags & never) && caps.flags & UCCL_EP_CAP_IMM_VISIBLE && caps.flags & UCCL_EP_CAP_IMM_NEEDS_RECEIVE,
          "%#" PRIx64, caps.flags);
    CHECK_EQ(caps.immediate_bits, 24);
    CHECK_EQ(caps.max_endpoints, 256);
    CHECK_EQ(caps.max_message_bytes, 1u << 30);
    t->device_close(device);
    fake_machine("efa0,gen=3,max_rdma=0x10000,max_qp_wr=512");
    WORKS(t->device_open(&host, "efa0", "", &device, &caps));
    CHECK(!(caps.flags & UCCL_EP_CAP_IMM_NEEDS_RECEIVE), "%#" PRIx64, caps.flags);
    CHECK_EQ(caps.max_message_bytes, 0x10000);
    CHECK_EQ(caps.max_inflight_endpoint, 512);
    t->device_close(device);
    WORKS(t->device_open(&host, "efa0", "unsolicited=0", &device, &caps));
    CHECK(caps.flags & UCCL_EP_CAP_IMM_NEEDS_RECEIVE, "%#" PRIx64, caps.flags);
    t->device_close(device);
    check_nothing_left();
}

/* A region is registered as a whole, or refused. */
static void regions(void) {
    fake_machine("efa0,max_mr_size=0x80000;efa1,memlock=0x80000");
    node n;
    node_open(&n, 0, tested, "efa0", "");
    const uccl_ep_memory memory = host_memory(heap[0], MIB);
    REFUSED(n.table->region_register(n.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION,
            "heap|efa0|524288|register less");
    node_close(&n);
    node_open(&n, 0, tested, "efa1", "");
    REFUSED(n.table->region_register(n.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION,
            "heap|efa1|errno 12");
    node_close(&n);
    check_nothing_left();
}

/* Immediates that take no receives are not bounded by how many the NIC holds. */
static void receives_that_nobody_takes(void) {
    const uccl_ep_endpoint_config config = {
        .size = sizeof(config), .peers = 32, .inflight_peer = 16, .inflight = 32, .receives_peer = 8};
    for (unsigned generation = 2; generation < 4; generation++) {
        fake_machine(generation == 2 ? "efa0,gen=2,max_rq_wr=64" : "efa0,gen=3,max_rq_wr=64");
        node n;
        node_open(&n, 0, tested, "efa0", "");
        if (generation == 3)
            WORKS(n.table->endpoint_open(n.device, &config, &n.endpoint));
        else
            REFUSED(n.table->endpoint_open(n.device, &config, &n.endpoint), UCCL_EP_E_CAPABILITY,
                    "256 immediates|64 receives|fewer max_inflight, or ranks");
        node_close(&n);
        check_nothing_left();
    }
}

/* All processes of a NIC share its queue pairs. */
static void queue_pairs_run_out(void) {
    fake_machine("efa0,max_qp=2");
    node n[3];
    for (uint32_t i = 0; i < 3; i++) node_open(&n[i], 0, tested, "efa0", "");
    node_endpoint(&n[0]);
    node_endpoint(&n[1]);
    const uccl_ep_endpoint_config config = {
        .size = sizeof(config), .peers = 2, .inflight_peer = 16, .inflight = 32, .receives_peer = 8};
    REFUSED(n[2].table->endpoint_open(n[2].device, &config, &n[2].endpoint), UCCL_EP_E_NO_MEMORY,
            "efa0|2 queue pairs for all processes|fewer ranks or proxies");
    for (uint32_t i = 0; i < 3; i++) node_close(&n[i]);
    check_nothing_left();
}

/* ------------------------------------------------------------------------------------------------- address handles */

/* Whoever is written to must know the writer before: rank 1 connects, and sends nothing itself. */
static void target_knows_initiator(void) {
    node n[2];
    open_pair(n, "", "");
    nodes_join(&n[0], &n[1]);
    uccl_ep_completion c = node_write(&n[0], 1, 0, 0, 64);
    CHECK(c.status == UCCL_EP_OK, "%d, code %#x", c.status, (unsigned)c.vendor_code);
    /* It lets go: the writer is told, and goes on with others. */
    WORKS(node_disconnect(&n[1], 0));
    c = node_write(&n[0], 1, 0, 0, 64);
    CHECK_EQ(c.status, UCCL_EP_E_PEER_LOST);
    char text[200];
    n[0].table->describe(n[0].device, c.status, c.vendor_code, text, sizeof(text));
    check_words(text, "vendor error 0xe|no address handle", "describe");
    join_itself(&n[0]);
    CHECK_EQ(node_write(&n[0], 0, 0, 128, 64).status, UCCL_EP_OK);
    node_connect(&n[1], &n[0]);
    CHECK_EQ(node_write(&n[0], 1, 0, 0, 64).status, UCCL_EP_OK);
    close_pair(n);
}

/* Queue pairs of one number on two NICs, and two behind one handle: an immediate names its sender. */
static void senders_are_told_apart(void) {
    for (unsigned shared = 0; shared < 2; shared++) {
        fake_machine("efa0,own_numbers=1;efa1,own_numbers=1;efa2,own_numbers=1");
        const char *const devices[3] = {"efa0", "efa1", shared ? "efa1" : "efa2"};
        node n[3];
        for (uint32_t i = 0; i < 3; i++) {
            open_node(&n[i], i, devices[i], "");
            const uccl_ep_endpoint_config config = {
                .size = sizeof(config), .rank = i, .peers = 3, .inflight_peer = 16, .inflight = 32, .receives_peer = 8};
            WORKS(n[i].table->endpoint_open(n[i].device, &config, &n[i].endpoint));
        }
        if (!shared) CHECK_EQ(number_of(&n[1]), number_of(&n[2]));
        for (uint32_t i = 1; i < 3; i++) nodes_join(&n[0], &n[i]);
        for (uint32_t i = 1; i < 3; i++) {
            node_immediate(&n[i], 0, 0xabc00 + i);
            uccl_ep_completion c;
            CHECK(next(&n[0], &c, 1000), "no immediate");
            CHECK(c.kind == UCCL_EP_COMPLETION_IMMEDIATE && c.peer == i && c.cookie == 0xabc00 + i,
                  "%u of %u: %#" PRIx64, c.kind, c.peer, c.cookie);
        }
        for (uint32_t i = 0; i < 3; i++) node_close(&n[i]);
        check_nothing_left();
    }
}

/* An immediate of a queue pair that is no peer's, on a NIC that a peer is on, too: it is left out, and said so once;
 * the receive that it took is there again, or the endpoint says that it is not. */
static void strangers_are_told(void) {
    fake_machine("efa0;efa1");
    const char *const devices[3] = {"efa0", "efa1", "efa1"};
    node n[3];
    for (uint32_t i = 0; i < 3; i++) {
        open_node(&n[i], i, devices[i], "unsolicited=0");
        const uccl_ep_endpoint_config config = {
            .size = sizeof(config), .rank = i, .peers = 3, .inflight_peer = 16, .inflight = 32, .receives_peer = 8};
        WORKS(n[i].table->endpoint_open(n[i].device, &config, &n[i].endpoint));
    }
    nodes_join(&n[0], &n[1]);
    nodes_join(&n[0], &n[2]);
    WORKS(node_disconnect(&n[0], 2));
    const uint32_t receives = FAKE(fake_ibverbs_receives)(number_of(&n[0]));
    uccl_ep_completion c;
    for (uint32_t i = 0; i < 2; i++) {
        logged[0] = 0;
        node_immediate(&n[2], 0, 5);
        CHECK(!next(&n[0], &c, 100), "an immediate of nobody's: %#" PRIx64, c.cookie);
        CHECK(!i == !!strstr(logged, "no peer of endpoint 0"), "%u: %s", i, logged);
        CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&n[0])), receives);
    }
    node_immediate(&n[1], 0, 7);
    CHECK(next(&n[0], &c, 1000) && c.peer == 1 && c.cookie == 7, "the peer's own");
    FAKE(fake_ibverbs_fail)("post_recv", 1, ENOMEM);
    node_immediate(&n[2], 0, 5);
    int32_t got = 0;
    for (uint32_t i = 0; i < 100 && got >= 0; i++) got = n[0].table->poll(n[0].endpoint, &c, 1);
    CHECK(got == UCCL_EP_E_NIC && strstr(said, "could not be posted again"), "%d: %s", got, said);
    for (uint32_t i = 0; i < 3; i++) node_close(&n[i]);
    check_nothing_left();
}

/* Peers on one NIC, and endpoints of one device, have one handle: it goes with the last that uses it. */
static void one_handle_for_a_nic(void) {
    fake_machine("efa0;efa1");
    node n[3];
    for (uint32_t i = 0; i < 3; i++) {
        open_node(&n[i], i, i ? "efa1" : "efa0", "");
        const uccl_ep_endpoint_config config = {
            .size = sizeof(config), .rank = i, .peers = 3, .inflight_peer = 16, .inflight = 32, .receives_peer = 8};
        WORKS(n[i].table->endpoint_open(n[i].device, &config, &n[i].endpoint));
    }
    for (uint32_t i = 1; i < 3; i++) nodes_join(&n[0], &n[i]);
    CHECK_EQ(fake_stats().handles, 3); /* one of each device */
    const uccl_ep_endpoint_config config = {.size = sizeof(config),
                                            .rank = 0,
                                            .peers = 3,
                                            .index = 1,
                                            .inflight_peer = 16,
                                            .inflight = 32,
                                            .receives_peer = 8};
    node second = n[0];
    WORKS(n[0].table->endpoint_open(n[0].device, &config, &second.endpoint));
    node other = n[1];
    uccl_ep_endpoint_config of_other = config;
    of_other.rank = 1;
    WORKS(n[1].table->endpoint_open(n[1].device, &of_other, &other.endpoint));
    node_connect(&other, &second);
    node_connect(&second, &other);
    CHECK_EQ(fake_stats().handles, 3);
    /* One lets go; the others go on. */
    WORKS(node_disconnect(&n[0], 1));
    uccl_ep_completion c;
    node_immediate(&n[0], 2, 0x71);
    CHECK(next(&n[2], &c, 1000) && c.cookie == 0x71, "no immediate");
    node_immediate(&second, 1, 0x72);
    CHECK(next(&other, &c, 1000) && c.cookie == 0x72, "no immediate");
    WORKS(node_disconnect(&n[0], 2));
    CHECK_EQ(fake_stats().handles, 3);
    n[0].table->endpoint_close(second.endpoint);
    CHECK_EQ(fake_stats().handles, 2);
    n[1].table->endpoint_close(other.endpoint);
    for (uint32_t i = 0; i < 3; i++) node_close(&n[i]);
    check_nothing_left();
}

/* ------------------------------------------------------------------------------------------------------- operations */

/* Each has a completion of its own, in whatever order they come; a finished read is one, whatever it calls itself. */
static void any_order(void) {
    node n[2];
    open_pair(n, ",gen=3,twice=100", "");
    nodes_join(&n[0], &n[1]);
    uccl_ep_operation operations[32];
    for (uint32_t i = 0; i < 32; i++) operations[i] = write_of(100 + i, i * 64, 64);
    operations[7].kind = UCCL_EP_OPERATION_READ;
    memset(heap[0], 0x31, 64 * 32);
    memset(heap[1], 0x77, 64 * 32);
    uint32_t accepted, seen[32] = {0}, turned = 0, last = 0;
    const uint64_t twice = fake_stats().twice;
    WORKS(n[0].table->submit(n[0].endpoint, 1, operations, 32, 0, &accepted));
    CHECK_EQ(accepted, 32);
    for (uint32_t i = 0; i < 32; i++) {
        uccl_ep_completion c;
        CHECK(next(&n[0], &c, 10000), "%u of 32 completions", i);
        CHECK(!c.status && c.kind == UCCL_EP_COMPLETION_OPERATION && c.cookie >= 100 && c.cookie < 132, "%d", c.status);
        CHECK(!seen[c.cookie - 100]++, "%" PRIu64 " twice", c.cookie);
        /* Its bytes stay: it is not placed again. */
        const uint32_t at = (uint32_t)(c.cookie - 100) * 64;
        if (at != 7 * 64) {
            for (uint32_t k = 0; k < 64; k++) CHECK_EQ(heap[1][at + k], 0x31);
            memset(heap[1] + at, 0x55, 64);
        }
        turned += c.cookie < last;
        last = (uint32_t)c.cookie;
    }
    CHECK(turned, "32 completions in the order of their requests");
    CHECK_EQ(fake_stats().twice - twice, 31);
    for (uint32_t k = 0; k < 64 * 32; k++) CHECK_EQ(heap[1][k], k / 64 == 7 ? 0x77 : 0x55);
    for (uint32_t k = 0; k < 64; k++) CHECK_EQ(heap[0][7 * 64 + k], 0x77);
    close_pair(n);
}

/* One operation fails, as itself, and the queue goes on. */
static void errors_of_one_operation(void) {
    static const struct {
        uint32_t vendor;
        int wc;
        uccl_ep_status status;
        const char *words;
    } rows[] = {
        {1, IBV_WC_WR_FLUSH_ERR, UCCL_EP_E_NIC, "flushed"},
        {5, IBV_WC_LOC_PROT_ERR, UCCL_EP_E_REGISTRATION, "local key"},
        {6, IBV_WC_LOC_LEN_ERR, UCCL_EP_E_RANGE, "length"},
        {7, IBV_WC_REM_ACCESS_ERR, UCCL_EP_E_REGISTRATION, "address or key"},
        {8, IBV_WC_REM_ABORT_ERR, UCCL_EP_E_PEER_LOST, "reset the connection"},
        {9, IBV_WC_REM_INV_RD_REQ_ERR, UCCL_EP_E_PEER_LOST, "no such queue pair"},
        {10, IBV_WC_RNR_RETRY_EXC_ERR, UCCL_EP_E_NIC, "no receive posted"},
        {12, IBV_WC_BAD_RESP_ERR, UCCL_EP_E_NIC, "unexpected status"},
        {13, IBV_WC_RESP_TIMEOUT_ERR, UCCL_EP_E_PEER_LOST, "does not respond"},
        {14, IBV_WC_REM_OP_ERR, UCCL_EP_E_PEER_LOST, "no address handle"},
        {15, IBV_WC_RESP_TIMEOUT_ERR, UCCL_EP_E_PEER_LOST, "cannot be reached"},
    };
    node n[2];
    open_pair(n, "", "");
    nodes_join(&n[0], &n[1]);
    const uint32_t qp = number_of(&n[0]);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        FAKE(fake_ibverbs_break)(qp, rows[i].wc, rows[i].vendor);
        const uccl_ep_completion c = node_write(&n[0], 1, 0, 0, 64);
        CHECK(c.status == (int32_t)rows[i].status &&
                  c.vendor_code == (int32_t)(rows[i].vendor << 8 | (uint32_t)rows[i].wc),
              "status %u: %d, code %#x", rows[i].vendor, c.status, (unsigned)c.vendor_code);
        char text[200];
        n[0].table->describe(n[0].device, c.status, c.vendor_code, text, sizeof(text));
        check_words(text, rows[i].words, "describe");
        CHECK_EQ(node_write(&n[0], 1, 0, 0, 64).status, UCCL_EP_OK);
    }
    /* What it cannot carry out at all is refused, and said. */
    uint32_t accepted;
    uccl_ep_operation o = write_of(1, 0, 64);
    o.kind = UCCL_EP_OPERATION_ADD64;
    REFUSED(n[0].table->submit(n[0].endpoint, 1, &o, 1, 0, &accepted), UCCL_EP_E_UNSUPPORTED, "no atomics");
    o = write_of(1, 0, 64);
    o.kind = UCCL_EP_OPERATION_WRITE_IMM;
    o.value = 1u << 24;
    REFUSED(n[0].table->submit(n[0].endpoint, 1, &o, 1, 0, &accepted), UCCL_EP_E_RANGE, "24 bits");
    o = write_of(1, 0, 64);
    o.flags |= UCCL_EP_OPERATION_FENCE;
    REFUSED(n[0].table->submit(n[0].endpoint, 1, &o, 1, 0, &accepted), UCCL_EP_E_INVALID, "not promised");
    close_pair(n);
}

/* As many as it was opened for, and the rest once there is room. */
static void queue_is_not_overfilled(void) {
    node n[2];
    open_pair(n, ",min_sq_wr=1", "");
    nodes_join(&n[0], &n[1]);
    uccl_ep_operation operations[80];
    for (uint32_t i = 0; i < 80; i++) operations[i] = write_of(i, 0, 64);
    uint32_t accepted, done = 0;
    WORKS(n[0].table->submit(n[0].endpoint, 1, operations, 80, 0, &accepted));
    CHECK_EQ(accepted, 32);
    uccl_ep_completion c;
    for (uint32_t from = accepted; done < 80; done++) {
        CHECK(next(&n[0], &c, 10000) && !c.status, "completion %u", done);
        if (from == 80) continue;
        WORKS(n[0].table->submit(n[0].endpoint, 1, operations + from, 80 - from, 0, &accepted));
        from += accepted;
    }
    close_pair(n);
}

/* ------------------------------------------------------------------------------------------------------- immediates */

/* Nobody reads the target's completion queue, and all send what they may: nothing overruns, nothing is lost. */
static void target_does_not_poll(void) {
    static const char *const options[] = {"unsolicited=1", "unsolicited=0"};
    for (unsigned k = 0; k < 2; k++) {
        node n[2];
        open_pair(n, "", options[k]);
        nodes_join(&n[0], &n[1]);
        join_itself(&n[1]);
        uint32_t accepted;
        const fake_ibverbs_stats before = fake_stats();
        uccl_ep_operation operations[32];
        for (uint32_t i = 0; i < 32; i++) {
            operations[i] = write_of(i, i * 64, 64);
            operations[i].kind = UCCL_EP_OPERATION_WRITE_IMM;
            operations[i].value = i;
        }
        /* 32 operations and 8 immediates of its own, 8 of the other: as its queue was opened for. */
        for (uint32_t i = 8; i < 32; i++) operations[i].kind = UCCL_EP_OPERATION_WRITE;
        WORKS(n[1].table->submit(n[1].endpoint, 1, operations, 32, 0, &accepted));
        CHECK_EQ(accepted, 32);
        WORKS(n[0].table->submit(n[0].endpoint, 1, operations, 8, 0, &accepted));
        uccl_ep_completion c;
        for (uint32_t i = 0; i < 8; i++)
            CHECK(next(&n[0], &c, 10000) && !c.status, "completion %u: status %d, code %#x", i, c.status,
                  (unsigned)c.vendor_code);
        for (unsigned turn = 0; turn < 1000 && fake_stats().executed - before.executed < 40; turn++)
            CHECK_EQ(n[0].table->poll(n[0].endpoint, &c, 1), 0);
        CHECK_EQ(fake_stats().executed - before.executed, 40);
        CHECK_EQ(fake_stats().cq_overruns, before.cq_overruns);
        CHECK_EQ(fake_stats().rnr_naks, before.rnr_naks);
        CHECK_EQ(fake_stats().unsolicited - before.unsolicited, k ? 0 : 16);
        CHECK_EQ(fake_stats().receives - before.receives, k ? 16 : 0);
        uint32_t own = 0, of[2] = {0, 0};
        for (uint32_t i = 0; i < 48; i++) {
            CHECK(next(&n[1], &c, 1000) && !c.status, "only %u came", i);
            if (c.kind == UCCL_EP_COMPLETION_OPERATION)
                own++;
            else
                of[c.peer]++;
        }
        CHECK(own == 32 && of[0] == 8 && of[1] == 8, "%u, %u, %u", own, of[0], of[1]);
        /* Receives come back by replenish alone, and not more than were taken. */
        if (k) {
            CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&n[1])), 0);
            WORKS(n[1].table->replenish(n[1].endpoint, 0, 8));
            CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&n[1])), 8);
            REFUSED(n[1].table->replenish(n[1].endpoint, 0, 1), UCCL_EP_E_INVALID, "given back");
        }
        close_pair(n);
    }
}

/* An end waits for what is under way; an immediate that comes after the target's own end is none of the next
 * connection, and takes no receive from it. */
static void earlier_connections(void) {
    for (unsigned k = 0; k < 2; k++) {
        node n[2];
        open_pair(n, "", k ? "unsolicited=0" : "");
        nodes_join(&n[0], &n[1]);
        uccl_ep_operation o = write_of(1, 0, 64);
        o.kind = UCCL_EP_OPERATION_WRITE_IMM;
        o.value = 77;
        uint32_t accepted;
        const uint32_t qp = number_of(&n[0]);
        FAKE(fake_ibverbs_hold)(qp, 1);
        WORKS(n[0].table->submit(n[0].endpoint, 1, &o, 1, 0, &accepted));
        CHECK_EQ(n[0].table->disconnect(n[0].endpoint, 1), UCCL_EP_IN_PROGRESS);
        WORKS(node_disconnect(&n[1], 0));
        node_connect(&n[1], &n[0]);
        FAKE(fake_ibverbs_hold)(qp, 0);
        WORKS(node_disconnect(&n[0], 1));
        uccl_ep_completion c;
        CHECK(!next(&n[1], &c, 100), "an immediate of an earlier connection: %#" PRIx64, c.cookie);
        CHECK(!next(&n[0], &c, 100), "a completion of an earlier connection");
        if (k) CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&n[1])), 16);
        node_connect(&n[0], &n[1]);
        node_immediate(&n[0], 1, 78);
        CHECK(next(&n[1], &c, 1000) && c.cookie == 78, "%#" PRIx64, c.cookie);
        close_pair(n);
    }
}

/* What was for a queue pair that is gone does not reach the next one of its number. */
static void numbers_come_again(void) {
    node n[2];
    open_pair(n, ",reuse=1", "");
    nodes_join(&n[0], &n[1]);
    const uint32_t number = number_of(&n[1]);
    uccl_ep_operation o = write_of(1, 0, 64);
    uint32_t accepted;
    memset(heap[0], 0x44, 64);
    memset(heap[1], 0, 64);
    /* Its own operations are under way when it closes: nobody hears of them again. */
    FAKE(fake_ibverbs_hold)(number, 1);
    WORKS(n[1].table->submit(n[1].endpoint, 0, &o, 1, 0, &accepted));
    n[1].table->endpoint_close(n[1].endpoint);
    node_endpoint(&n[1]);
    CHECK_EQ(number_of(&n[1]), number);
    node_connect(&n[1], &n[0]);
    const uccl_ep_completion c = node_write(&n[0], 1, 0, 0, 64);
    CHECK(c.status == UCCL_EP_E_PEER_LOST && c.vendor_code >> 8 == 9, "%d, %#x", c.status, (unsigned)c.vendor_code);
    for (uint32_t i = 0; i < 64; i++) CHECK_EQ(heap[1][i], 0);
    uccl_ep_completion none;
    CHECK(!next(&n[1], &none, 100), "a completion of a queue pair that is gone");
    close_pair(n);
}

/* A peer's words are any bytes. */
static void addresses_are_checked(void) {
    node n[2];
    open_pair(n, "", "");
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES], good[UCCL_EP_MAX_BLOB_BYTES];
    const uint32_t bytes = address_for(&n[1], 0, good);
    const uccl_ep_backend *t = n[0].table;
    REFUSED(t->connect(n[0].endpoint, 1, good, bytes - 1), UCCL_EP_E_INVALID, "rank 1|no address");
    REFUSED(t->connect(n[0].endpoint, 7, good, bytes), UCCL_EP_E_RANGE, "rank 7");
    for (uint32_t at = 0; at < bytes; at++) {
        memcpy(blob, good, bytes);
        blob[at] ^= 0xff;
        const uccl_ep_status status = t->connect(n[0].endpoint, 1, blob, bytes);
        if (status == UCCL_EP_OK) WORKS(t->disconnect(n[0].endpoint, 1));
    }
    memcpy(blob, good, bytes);
    blob[25] ^= 1; /* efa_address.unsolicited */
    REFUSED(t->connect(n[0].endpoint, 1, blob, bytes), UCCL_EP_E_BOOTSTRAP, "rank 1|unsolicited=0");
    close_pair(n);
}

/* ----------------------------------------------------------------------------------------------------------- faults */

/* Each in a process of its own, whose test has to fail. */
static void faults_are_found(void) {
    static const struct {
        const char *name;
        void (*test)(void);
    } faults[] = {
        {"no_receives", target_does_not_poll},   {"small_queue", target_does_not_poll},
        {"late_handle", target_knows_initiator}, {"unsignalled", queue_is_not_overfilled},
        {"past_queue", queue_is_not_overfilled}, {"old_immediates", earlier_connections},
    };
    for (size_t i = 0; i <= sizeof(faults) / sizeof(*faults); i++) {
        const bool whole = i == sizeof(faults) / sizeof(*faults); /* the same library, and no fault */
        fflush(NULL);
        const pid_t child = fork();
        CHECK(child >= 0, "fork");
        if (!child) {
            tested = "efa_faults";
            if (!whole && !freopen("/dev/null", "w", stderr)) _exit(2);
            if (!whole) setenv("UCCL_EP_BACKEND_FAULT", faults[i].name, 1);
            for (size_t k = 0; k < sizeof(faults) / sizeof(*faults); k++)
                if (whole || k == i) faults[k].test();
            _exit(0);
        }
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status), "%s: signal %d", whole ? "no fault" : faults[i].name, WTERMSIG(status));
        CHECK(WEXITSTATUS(status) == (whole ? 0 : 1), "%s: %s", whole ? "no fault" : faults[i].name,
              whole ? "a test failed" : "its test did not notice");
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    devices_and_libraries();
    regions();
    receives_that_nobody_takes();
    queue_pairs_run_out();
    target_knows_initiator();
    senders_are_told_apart();
    strangers_are_told();
    one_handle_for_a_nic();
    any_order();
    errors_of_one_operation();
    queue_is_not_overfilled();
    target_does_not_poll();
    earlier_connections();
    numbers_come_again();
    addresses_are_checked();
    faults_are_found();
    return test_end();
}
