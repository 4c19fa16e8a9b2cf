/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_names.c: which NIC, which port, which address; and what is said when there is none.
 *
 * Each refusal has a status of its own kind and a text that says what would make it work.
 */
#include "verbs_table.h"

#include <sys/resource.h>

static uccl_ep_status open_status(const char *name, const char *device, const char *options) {
    uccl_ep_device *opened;
    uccl_ep_caps caps = {.size = sizeof(caps)};
    const uccl_ep_backend *table = backend(name);
    const uccl_ep_status status = table->device_open(&host, device, options, &opened, &caps);
    if (status == UCCL_EP_OK)
        table->device_close(opened);
    else
        CHECK(!opened, "a device, although it failed");
    return status;
}

/* F11: a whole name, whatever others begin or end alike; ports; no such name lists those that there are. */
static void names_are_whole_names(void) {
    /* All but mlx5_1 would say so if they were opened. */
    char devices[1024] = "";
    for (unsigned i = 0; i < 12; i++)
        snprintf(devices + strlen(devices), sizeof(devices) - strlen(devices), "mlx5_%u%s;", i,
                 i == 1 ? "" : ",open_errno=5");
    fake_machine(devices);
    WORKS(open_status("connectx", "mlx5_1", ""));
    WORKS(open_status("connectx", "mlx5_1:1", ""));
    WORKS(open_status("connectx", NULL, ""));
    REFUSED(open_status("connectx", "mlx5_10", ""), UCCL_EP_E_NO_DEVICE, "mlx5_10|cannot be opened");
    REFUSED(open_status("connectx", "mlx5_1:2", ""), UCCL_EP_E_NO_DEVICE, "port 2|it has 1");
    REFUSED(open_status("connectx", "mlx5_1:x", ""), UCCL_EP_E_INVALID, "a port is a number");
    REFUSED(open_status("connectx", "mlx5_99", ""), UCCL_EP_E_NO_DEVICE, "mlx5_99|mlx5_0|mlx5_1|mlx5_11");
    REFUSED(open_status("connectx", "mlx5_", ""), UCCL_EP_E_NO_DEVICE, "no RDMA device");
    REFUSED(open_status("connectx", "lx5_1", ""), UCCL_EP_E_NO_DEVICE, "no RDMA device");
    REFUSED(open_status("connectx", "mlx5_1+mlx5_2", ""), UCCL_EP_E_NO_DEVICE, "mlx5_2");
    check_nothing_left();
}

static void no_device(void) {
    fake_machine("");
    REFUSED(open_status("connectx", NULL, ""), UCCL_EP_E_NO_DEVICE, "no RDMA device|driver");
    REFUSED(open_status("thor", "bnxt_re0", ""), UCCL_EP_E_NO_DEVICE, "no RDMA device 'bnxt_re0'");
    FAKE(fake_ibverbs_fail)("get_device_list", 1, ENOSYS);
    REFUSED(open_status("pollara", NULL, ""), UCCL_EP_E_NO_DEVICE, "lists no devices");
    fake_machine("mlx5_0;odd0,vendor=0x1234");
    REFUSED(open_status("thor", "mlx5_0", ""), UCCL_EP_E_NO_DEVICE, "0x2c9|take the backend connectx");
    REFUSED(open_status("pollara", "odd0", ""), UCCL_EP_E_NO_DEVICE, "0x1234|does not know|limits_only=1");
    WORKS(open_status("pollara", "odd0", "limits_only=1"));
    fake_machine("mlx5_0,part=0x1007");
    REFUSED(open_status("connectx", "mlx5_0", ""), UCCL_EP_E_NO_DEVICE, "older|part 0x1007|ConnectX-4");
    WORKS(open_status("connectx", "mlx5_0", "limits_only=1"));
    fake_machine("mlx5_0,open_errno=13");
    REFUSED(open_status("connectx", "mlx5_0", ""), UCCL_EP_E_NO_DEVICE, "cannot be opened|errno 13|/dev/infiniband");
    REFUSED(open_status("connectx", NULL, ""), UCCL_EP_E_NO_DEVICE, "mlx5_0|errno 13");
    fake_machine("mlx5_0");
    FAKE(fake_ibverbs_fail)("query_device", 1, EIO);
    REFUSED(open_status("connectx", "mlx5_0", ""), UCCL_EP_E_NO_DEVICE, "does not answer");
    check_nothing_left();
}

static void ports(void) {
    fake_machine("mlx5_0,state=1;mlx5_1,ports=2,state=14;mlx5_2,layer=ib,state=2");
    REFUSED(open_status("connectx", "mlx5_0", ""), UCCL_EP_E_NO_DEVICE, "port 1 is down|ip link");
    REFUSED(open_status("connectx", "mlx5_2", ""), UCCL_EP_E_NO_DEVICE, "subnet manager");
    WORKS(open_status("connectx", "mlx5_1", "")); /* its second port is up */
    WORKS(open_status("connectx", "mlx5_1:2", ""));
    WORKS(open_status("connectx", "mlx5_1", "port=2"));
    REFUSED(open_status("connectx", "mlx5_1:1", ""), UCCL_EP_E_NO_DEVICE, "port 1 is down");
    WORKS(open_status("connectx", NULL, "")); /* the first that can be used */
    /* Of a port that is up and will not do the next one is tried; if none will, the first one's reason is told. */
    fake_machine("mlx5_0,ports=2,gid_port=2");
    WORKS(open_status("connectx", "mlx5_0", ""));
    CHECK(strstr(logged, "port 2"), "%s", logged);
    REFUSED(open_status("connectx", "mlx5_0:1", ""), UCCL_EP_E_NO_DEVICE, "port 1 has no GID of RoCE version 2");
    fake_machine("mlx5_0,ports=2,gids=v1/fe80::1/2");
    REFUSED(open_status("connectx", "mlx5_0", ""), UCCL_EP_E_NO_DEVICE, "port 1 has no GID of RoCE version 2");
    fake_machine("mlx5_0,state=1;mlx5_1,ports=2,state=14;mlx5_2,layer=ib,state=2");
    WORKS(open_status("connectx", NULL, ""));
    CHECK(strstr(logged, "mlx5_1"), "%s", logged);
    check_nothing_left();
}

/* D1, L7: what cannot be used is listed with the reason, and hides nothing. */
static void query_lists_all(void) {
    fake_machine("bnxt_re0;mlx5_0,open_errno=1;mlx5_1,state=1;mlx5_2;odd0,vendor=0x77");
    const char *words[] = {"take the backend thor", "errno 1", "down", "", "0x77"};
    const uccl_ep_backend *table = backend("connectx");
    for (uint32_t i = 0; i < 5; i++) {
        uccl_ep_device_info info = {.size = sizeof(info)};
        WORKS(table->query(&host, i, &info));
        check_words(info.unusable, words[i], info.name);
        CHECK_EQ(info.unusable[0] == 0, i == 3);
        CHECK_EQ(info.caps.flags != 0, i == 3);
        if (i != 3) continue;
        CHECK(!strcmp(info.name, "mlx5_2") && !strcmp(info.vendor, "NVIDIA") && !strcmp(info.model, "ConnectX-7") &&
                  !strcmp(info.firmware, "28.43.1014"),
              "%s %s %s %s", info.name, info.vendor, info.model, info.firmware);
    }
    uccl_ep_device_info info = {.size = sizeof(info)};
    REFUSED(table->query(&host, 5, &info), UCCL_EP_E_NO_DEVICE, "");
    check_nothing_left();
}

/* C1, C3: which of a port's GIDs, and what becomes of it. */
static void gids(void) {
    const struct {
        const char *gids, *options, *chosen, *refused;
    } cases[] = {
        {"v1/fe80::1/2|v2/fe80::1/2|v1/::ffff:10.0.0.1/2|v2/::ffff:10.0.0.1/2", "", "GID 3,", NULL},
        {"v1/fe80::1/2|v2/fe80::1/2|v2/fd93::2/2", "", "GID 2,", NULL},
        {"v1/fe80::1/2|v2/fe80::1/2|v2/fd93::2/2", "gid=1", "GID 1,", NULL},
        {"v1/fe80::1/2|v2/fe80::1/2|-|v2/2001:db8::1/3|v2/::ffff:10.0.0.9/2", "", "GID 4,", NULL},
        {"v1/fe80::1/2|v2/::ffff:10.0.0.1/2|v2/::ffff:10.0.0.2/3", "", "GID 1,", NULL},
        {"v2/::ffff:10.0.0.1/2|v2/fd93::2/2", "", "GID 1,", NULL}, /* index 0 only if it is asked for */
        {"v2/::ffff:10.0.0.1/2|v2/fd93::2/2", "gid=0", "GID 0,", NULL},
        {"v2/::ffff:10.0.0.1/2|v1/fd93::2/2", "", NULL, "gid=0 takes that"},
        {"v1/fe80::1/2|v1/::ffff:10.0.0.1/2", "", NULL, "no GID of RoCE version 2|ip addr"},
        {"v1/fe80::1/2|v1/::ffff:10.0.0.1/2", "gid=1", NULL, "gid=1|version 1"},
        {"v1/fe80::1/2|-", "gid=1", NULL, "gid=1|no such GID"},
        {"v1/fe80::1/2|v2/fe80::1/2", "gid=9", NULL, "gid=9|no such GID"},
    };
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char devices[256];
        snprintf(devices, sizeof(devices), "mlx5_0,gids=%s", cases[i].gids);
        fake_machine(devices);
        logged[0] = 0;
        if (cases[i].chosen) {
            WORKS(open_status("connectx", "mlx5_0", cases[i].options));
            check_words(logged, cases[i].chosen, cases[i].gids);
        } else {
            REFUSED(open_status("connectx", "mlx5_0", cases[i].options), UCCL_EP_E_NO_DEVICE, cases[i].refused);
        }
    }
    check_nothing_left();
}

/* C15: which partition key. */
static void partitions(void) {
    const struct {
        const char *keys, *options, *refused;
        uint16_t index;
    } cases[] = {
        {"0xffff", "", NULL, 0},
        {"0x7fff|0xffff", "", NULL, 1},
        {"0x7fff|0x8001", "", NULL, 1},
        {"0xffff|0x8001", "pkey=0x8001", NULL, 1},
        {"0x8002|0x8001", "pkey=1", NULL, 1},
        {"0x7fff", "", "full member of no partition|subnet manager", 0},
        {"0xffff", "pkey=0x8009", "not in this partition", 0},
    };
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char devices[256];
        snprintf(devices, sizeof(devices), "mlx5_0,pkeys=%s", cases[i].keys);
        fake_machine(devices);
        if (cases[i].refused) {
            REFUSED(open_status("connectx", "mlx5_0", cases[i].options), UCCL_EP_E_NO_DEVICE, cases[i].refused);
            continue;
        }
        static char heap[2][4096];
        node a, b;
        node_open(&a, 0, "connectx", "mlx5_0", cases[i].options);
        node_open(&b, 1, "connectx", "mlx5_0", cases[i].options);
        node *both[2] = {&a, &b};
        for (unsigned k = 0; k < 2; k++) {
            const uccl_ep_memory memory = host_memory(heap[k], sizeof(heap[k]));
            WORKS(both[k]->table->region_register(both[k]->device, UCCL_EP_REGION_HEAP, &memory));
            node_endpoint(both[k]);
        }
        nodes_join(&a, &b);
        CHECK_EQ(attr_of(1, IBV_QPS_INIT).pkey_index, cases[i].index);
        CHECK_EQ(node_write(&a, 1, 0, 64, 100).status, UCCL_EP_OK);
        node_close(&a);
        node_close(&b);
    }
    check_nothing_left();
}

/* C3: what both ends have in common; a packet outlives routers; nothing is for ever. */
static void path_of_a_connection(void) {
    fake_machine("mlx5_0,mtu=4096,routed=1;mlx5_1,mtu=1024,routed=1");
    for (unsigned kind = 0; kind < 2; kind++) {
        const char *options =
            kind ? "hop_limit=200,traffic_class=106,service_level=3,flow_label=0x1234,timeout=9,retry=2,rnr_retry=1,"
                   "rnr_timer=5,mtu=512,rd_atomic=2"
                 : "";
        static char heap[2][4096];
        node a, b;
        node_open(&a, 0, "connectx", "mlx5_0", options);
        node_open(&b, 1, "connectx", "mlx5_1", options);
        node *both[2] = {&a, &b};
        for (unsigned k = 0; k < 2; k++) {
            uccl_ep_memory memory = host_memory(heap[k], sizeof(heap[k]));
            WORKS(both[k]->table->region_register(both[k]->device, UCCL_EP_REGION_HEAP, &memory));
            node_endpoint(both[k]);
        }
        nodes_join(&a, &b);
        for (uint32_t qp = 1; qp < 3; qp++) { /* a's to b, b's to a */
            const struct ibv_qp_attr rtr = attr_of(qp, IBV_QPS_RTR), rts = attr_of(qp, IBV_QPS_RTS);
            CHECK_EQ(rtr.path_mtu, kind ? IBV_MTU_512 : IBV_MTU_1024);
            CHECK_EQ(rtr.ah_attr.grh.hop_limit, kind ? 200 : 64);
            CHECK_EQ(rtr.ah_attr.grh.sgid_index, 3);
            CHECK_EQ(rtr.ah_attr.grh.traffic_class, kind ? 106 : 0);
            CHECK_EQ(rtr.ah_attr.grh.flow_label, kind ? 0x1234 : 0);
            CHECK_EQ(rtr.ah_attr.sl, kind ? 3 : 0);
            CHECK_EQ(rtr.min_rnr_timer, kind ? 5 : 12);
            CHECK_EQ(rts.timeout, kind ? 9 : 14);
            CHECK_EQ(rts.retry_cnt, kind ? 2 : 6);
            CHECK_EQ(rts.rnr_retry, kind ? 1 : 6);
            CHECK(rts.max_rd_atomic == rtr.max_dest_rd_atomic && rts.max_rd_atomic >= 1, "%u", rts.max_rd_atomic);
        }
        memset(heap[0], 5, sizeof(heap[0]));
        CHECK_EQ(node_write(&a, 1, 0, 100, 3000).status, UCCL_EP_OK); /* longer than the smaller MTU */
        CHECK(heap[1][100] == 5 && heap[1][3099] == 5 && !heap[1][99] && !heap[1][3100], "the bytes");
        node_close(&a);
        node_close(&b);
    }
    check_nothing_left();
}

/* Two endpoints that cannot reach each other: said when they connect, and not by retries that run out. */
static void no_path(void) {
    const struct {
        const char *devices, *refused;
    } cases[] = {
        {"mlx5_0;mlx5_1,gids=v1/fe80::2/2|v2/fe80::2/2|v2/fd93::2/2", "rank 1|fd93::2|::ffff:10.0.0.1|gid="},
        {"mlx5_0;mlx5_1,pkeys=0x8001", "rank 1|0x8001|0xffff|pkey="},
        {"mlx5_0,layer=ib,pkeys=0x8001;mlx5_1,layer=ib", "rank 1|0x8001|0xffff|pkey="},
        {"mlx5_0;mlx5_1", NULL},
        {"mlx5_0,gids=-|v2/fd93::1/2;mlx5_1,gids=-|v2/fe80::2/2", NULL},
    };
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        node a, b;
        fake_machine(cases[i].devices);
        node_open(&a, 0, "connectx", "mlx5_0", "");
        node_open(&b, 1, "connectx", "mlx5_1", "");
        node_endpoint(&a);
        node_endpoint(&b);
        unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
        const uint32_t bytes = address_for(&b, 0, blob);
        if (cases[i].refused)
            REFUSED(a.table->connect(a.endpoint, 1, blob, bytes), UCCL_EP_E_BOOTSTRAP, cases[i].refused);
        else
            WORKS(a.table->connect(a.endpoint, 1, blob, bytes));
        node_close(&a);
        node_close(&b);
    }
    check_nothing_left();
}

/* The address of a port was replaced after it was opened: peers are told the new one. */
static void address_changes(void) {
    static const unsigned char other[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 9, 9}, none[16];
    fake_machine("mlx5_0");
    node n;
    node_open(&n, 0, "connectx", "mlx5_0", "");
    node_endpoint(&n);
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
    FAKE(fake_ibverbs_set_gid)("mlx5_0", 3, other);
    CHECK_EQ(address_for(&n, 0, blob), 48);
    CHECK(!memcmp(blob + 24, other, 16), "an address that is no longer there");
    FAKE(fake_ibverbs_set_gid)("mlx5_0", 3, none);
    uint32_t bytes = sizeof(blob);
    REFUSED(n.table->endpoint_address(n.endpoint, blob, &bytes), UCCL_EP_E_NIC, "mlx5_0|GID 3|is gone");
    node_close(&n);
    check_nothing_left();
}

/* All queue pairs of a NIC share its responder resources, other processes' too. */
static void shared_responders(void) {
    static char memory[4096];
    fake_machine("ionic_0,res_rd_atom=1");
    node n;
    node_open(&n, 0, "pollara", "ionic_0", "");
    const uccl_ep_memory region = host_memory(memory, sizeof(memory));
    WORKS(n.table->region_register(n.device, UCCL_EP_REGION_HEAP, &region));
    node_endpoint(&n);
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
    const uint32_t bytes = address_for(&n, 0, blob);
    REFUSED(n.table->connect(n.endpoint, 0, blob, bytes), UCCL_EP_E_NIC,
            "step to RTR|errno 22|responder resources|atomics=0");
    node_close(&n);
    check_nothing_left();
}

static void options(void) {
    fake_machine("mlx5_0");
    const char *endless[] = {"timeout=0", "retry=7", "rnr_retry=7"};
    for (unsigned i = 0; i < 3; i++) REFUSED(open_status("connectx", NULL, endless[i]), UCCL_EP_E_INVALID, "for ever");
    const char *wrong[] = {"nonsense=1",  "gid",       "gid=x",  "gid=-1", "mtu=1000",
                           "hop_limit=0", "ack=maybe", "port=0", "pkey=0", "inline=99999999999999999999",
                           "srq=2"};
    for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        REFUSED(open_status("connectx", NULL, wrong[i]), UCCL_EP_E_INVALID, "");
    REFUSED(open_status("connectx", NULL, "ack=visible,relaxed=1"), UCCL_EP_E_INVALID, "ack=visible|relaxed=1");
    REFUSED(open_status("connectx", NULL, "nonsense=1"), UCCL_EP_E_INVALID, "nonsense|traffic_class|gid");
    fake_machine("ionic_0");
    REFUSED(open_status("pollara", NULL, "srq=1"), UCCL_EP_E_NO_DEVICE, "shared receive queue");
    REFUSED(open_status("pollara", NULL, "atomics=1"), UCCL_EP_E_NO_DEVICE, "atomic_cap NONE");
    check_nothing_left();
}

/* J5: no library, something else, an old one. Last: the environment stays changed. */
static void libraries(void) {
    REFUSED(open_status("connectx", NULL, "library=/nonexistent/libibverbs.so.1"), UCCL_EP_E_NO_DEVICE,
            "missing|install rdma-core");
    REFUSED(open_status("connectx", NULL, "library=libc.so.6"), UCCL_EP_E_NO_DEVICE, "no libibverbs, or too old");
    setenv("UCCL_EP_LIBIBVERBS", "/nonexistent/libibverbs.so.1", 1);
    uccl_ep_device_info info = {.size = sizeof(info)};
    REFUSED(backend("connectx")->query(&host, 0, &info), UCCL_EP_E_NO_DEVICE, "missing|install rdma-core");
    setenv("FAKE_IBVERBS", "mlx5_0", 1);
    setenv("UCCL_EP_LIBIBVERBS", UCCL_EP_TEST_LIBRARY_DIR "/fake_verbs_ancient/libibverbs.so.1", 1);
    REFUSED(open_status("connectx", NULL, ""), UCCL_EP_E_NO_DEVICE, "rdma-core 32");
    setenv("FAKE_IBVERBS", "mlx5_0,layer=ib", 1); /* where no GID is needed it serves, without what is newer */
    WORKS(open_status("connectx", NULL, ""));
    REFUSED(open_status("connectx", NULL, "relaxed=1"), UCCL_EP_E_UNSUPPORTED, "rdma-core 28");
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    names_are_whole_names();
    no_device();
    ports();
    query_lists_all();
    gids();
    partitions();
    path_of_a_connection();
    no_path();
    address_changes();
    shared_responders();
    options();
    libraries();
    return test_end();
}
