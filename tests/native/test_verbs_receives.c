/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_receives.c: receives over the end of a connection: none is lost, and none of an old one is taken for one
 * of the new.
 */
#include "verbs_table.h"

static char heap[2][4096];

static void open_both(node *a, node *b, const char *name, const char *const device[2], const char *options) {
    node *both[2] = {a, b};
    for (uint32_t i = 0; i < 2; i++) {
        const uccl_ep_memory memory = host_memory(heap[i], sizeof(heap[i]));
        node_open(both[i], i, name, device[i], options);
        WORKS(both[i]->table->region_register(both[i]->device, UCCL_EP_REGION_HEAP, &memory));
        node_endpoint(both[i]);
    }
}

/* The queue pair of `n` to `peer`: from its address, behind that of the endpoint. */
static uint32_t number_of(const node *n, uint32_t peer) {
    uint32_t pair[2], bytes = sizeof(pair);
    WORKS(n->table->peer_address(n->endpoint, peer, pair, &bytes));
    return pair[0];
}

static uint32_t immediates(node *n) {
    uccl_ep_completion c[32];
    uint32_t count = 0;
    for (unsigned turn = 0; turn < 100; turn++) {
        const int32_t got = n->table->poll(n->endpoint, c, 32);
        CHECK(got >= 0, "%d: %s", got, said);
        for (int32_t i = 0; i < got; i++) count += c[i].kind == UCCL_EP_COMPLETION_IMMEDIATE;
    }
    return count;
}

/* A queue pair that breaks flushes a receive of the shared queue, sooner or later, or without a word: after any number
 * of connections as many are ready as after the first. */
static void none_is_lost(void) {
    static const struct {
        const char *name, *machine, *device[2];
        bool all;
    } cases[] = {
        {"connectx", "mlx5_0,srq_flush=1;mlx5_1,srq_flush=1", {"mlx5_0", "mlx5_1"}, true},
        {"thor", "bnxt_re0,srq_flush=1,clean=0,reuse=1;bnxt_re1", {"bnxt_re0", "bnxt_re1"}, true},
        /* Without the event it waits a bounded time, and by then all has come. */
        {"connectx", "mlx5_0,srq_flush=1,last_wqe=0;mlx5_1,last_wqe=0", {"mlx5_0", "mlx5_1"}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_machine(cases[i].machine);
        node a, b;
        open_both(&a, &b, cases[i].name, cases[i].device, "srq=1");
        for (uint32_t round = 0; round < 20; round++) {
            nodes_join(&a, &b);
            CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&a, 1)), 16);
            CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&b, 0)), 16);
            for (uint32_t k = 0; k < round % 5; k++) node_immediate(&b, 0, k);
            if (round % 2) CHECK_EQ(immediates(&a), round % 5);
            WORKS(node_disconnect(&a, 1));
            WORKS(node_disconnect(&b, 0));
        }
        node_close(&a);
        node_close(&b);
        check_nothing_left();
    }
}

/* An immediate of the old connection whose completion comes when the queue pair has gone. */
static void none_is_of_the_old_one(void) {
    static const struct {
        const char *name, *machine, *device[2], *options;
    } cases[] = {
        {"connectx", "mlx5_0,clean=0,reuse=1;mlx5_1", {"mlx5_0", "mlx5_1"}, "srq=1"},
        {"connectx", "mlx5_0,clean=0,reuse=1;mlx5_1", {"mlx5_0", "mlx5_1"}, "srq=0"},
        {"connectx", "mlx5_0,clean=0;mlx5_1", {"mlx5_0", "mlx5_1"}, "srq=0"},
        {"thor", "bnxt_re0,clean=0,reuse=1;bnxt_re1", {"bnxt_re0", "bnxt_re1"}, ""},
        {"pollara", "ionic_0,clean=0,reuse=1;ionic_1", {"ionic_0", "ionic_1"}, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_machine(cases[i].machine);
        node a, b;
        open_both(&a, &b, cases[i].name, cases[i].device, cases[i].options);
        for (uint32_t round = 0; round < 4; round++) {
            nodes_join(&a, &b);
            FAKE(fake_ibverbs_delay_receives)(number_of(&a, 1));
            node_immediate(&b, 0, 0x77);
            WORKS(node_disconnect(&a, 1));
            WORKS(node_disconnect(&b, 0));
            nodes_join(&a, &b);
            CHECK_EQ(immediates(&a), 0);
            CHECK_EQ(FAKE(fake_ibverbs_receives)(number_of(&a, 1)),
                     strstr(cases[i].options, "srq=0") || i == 4 ? 8 : 16);
            node_immediate(&b, 0, 0x78);
            CHECK_EQ(immediates(&a), 1);
            WORKS(a.table->replenish(a.endpoint, 1, 1));
            WORKS(node_disconnect(&a, 1));
            WORKS(node_disconnect(&b, 0));
        }
        node_close(&a);
        node_close(&b);
        check_nothing_left();
    }
}

/* A queue pair that cannot be destroyed may still write: that is an error, and the next try may work. */
static void not_let_go(void) {
    static const char *const device[2] = {"mlx5_0", "mlx5_1"};
    fake_machine("mlx5_0;mlx5_1");
    node a, b;
    open_both(&a, &b, "connectx", device, "");
    nodes_join(&a, &b);
    FAKE(fake_ibverbs_fail)("destroy_qp", 1, EBUSY);
    REFUSED(node_disconnect(&a, 1), UCCL_EP_E_NIC, "mlx5_0|rank 1|cannot be destroyed|errno 16");
    CHECK_EQ(said_code, EBUSY);
    WORKS(node_disconnect(&a, 1));
    WORKS(node_disconnect(&b, 0));
    nodes_join(&a, &b);
    CHECK_EQ(node_write(&a, 1, 0, 0, 64).status, UCCL_EP_OK);
    node_close(&a);
    node_close(&b);
    check_nothing_left();
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    none_is_lost();
    none_is_of_the_old_one();
    not_let_go();
    return test_end();
}
