/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_adds.c: a NIC, or its library, whose adds do not add, and one that mixes up what is posted by calls:
 * Thor's, as libbnxt_re 44 and 65 are.
 */
#include "verbs_table.h"

#define ATOMICS (UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_ATOMIC_COHERENT)

/* What is promised, after opening with success. */
static uint64_t promised(const char *name, const char *device, const char *options) {
    node n;
    logged[0] = 0;
    node_open(&n, 0, name, device, options);
    n.table->device_close(n.device);
    check_nothing_left();
    return n.caps.flags & ATOMICS;
}

static void refused(const char *device, const char *options, const char *words) {
    uccl_ep_device *opened;
    uccl_ep_caps caps = {.size = sizeof(caps)};
    REFUSED(backend("thor")->device_open(&host, device, options, &opened, &caps), UCCL_EP_E_UNSUPPORTED, words);
    CHECK(!opened, "a device, although it failed");
    check_nothing_left();
}

static uint64_t queried(uint32_t index) {
    uccl_ep_device_info info = {.size = sizeof(info), .caps.size = sizeof(info.caps)};
    WORKS(backend("thor")->query(&host, index, &info));
    CHECK(!info.unusable[0], "%s", info.unusable);
    check_nothing_left();
    return info.caps.flags & ATOMICS;
}

/* Adds are tried before they are promised, by each NIC, and whoever asks is told the same. */
static void tried_before_promised(void) {
    fake_machine("bnxt_re0,adds=0;bnxt_re1");
    CHECK_EQ(promised("thor", "bnxt_re1", ""), ATOMICS);
    CHECK(!strstr(logged, "no atomics"), "%s", logged);
    CHECK_EQ(promised("thor", "bnxt_re0", ""), 0);
    check_words(logged, "no atomics|bnxt_re0|rdma-core 47", "a log");
    CHECK_EQ(promised("thor", "bnxt_re1+bnxt_re0", ""), 0);
    check_words(logged, "no atomics|bnxt_re0", "a log");
    refused("bnxt_re0", "atomics=1", "atomics=1|bnxt_re0|rdma-core 47");
    WORKS(backend("thor")->query(&host, 1, &(uccl_ep_device_info){.size = sizeof(uccl_ep_device_info)}));
    CHECK_EQ(queried(0), 0);
    CHECK_EQ(queried(1), ATOMICS);
    CHECK_EQ(promised("thor", "bnxt_re1", "atomics=1"), ATOMICS);
    fake_machine("bnxt_re0;bnxt_re1");
    CHECK_EQ(promised("thor", "bnxt_re0+bnxt_re1", ""), UCCL_EP_CAP_ATOMIC_ADD64);
}

/* Where there is nothing to be tried, nothing is. */
static void only_where_it_matters(void) {
    fake_machine("bnxt_re0,adds=0;mlx5_0;bnxt_re1,atomic=0");
    const uint64_t before = fake_stats().posted;
    CHECK_EQ(promised("thor", "bnxt_re0", "atomics=0"), 0);
    CHECK_EQ(promised("thor", "bnxt_re1", ""), 0);
    CHECK_EQ(promised("connectx", "mlx5_0", ""), UCCL_EP_CAP_ATOMIC_ADD64);
    CHECK_EQ(fake_stats().posted, before);
    promised("thor", "bnxt_re0", "");
    CHECK_EQ(fake_stats().posted, before + 2);
}

static uccl_ep_host stopped; /* as `host`, with a clock that ends every wait */
static uint32_t looks;

static uint64_t stopping_now(void *context) {
    (void)context;
    if (!looks) FAKE(fake_ibverbs_hold)(FAKE(fake_ibverbs_qp_num)(0), 1);
    return test_now_ns() + 6 * SECOND * looks++;
}

/* A trial that does not come to an end, or to a bad one, promises nothing; what cannot be opened for it is an error. */
static void trials_that_fail(void) {
    fake_machine("bnxt_re0,routed=1");
    CHECK_EQ(promised("thor", "bnxt_re0", "hop_limit=1"), 0);
    check_words(logged, "no atomics|retries", "a log");
    refused("bnxt_re0", "hop_limit=1,atomics=1", "atomics=1|retries");
    CHECK_EQ(promised("thor", "bnxt_re0", ""), ATOMICS);

    stopped = host;
    stopped.now_ns = stopping_now;
    uccl_ep_device *device;
    uccl_ep_caps caps = {.size = sizeof(caps)};
    WORKS(backend("thor")->device_open(&stopped, "bnxt_re0", "", &device, &caps));
    CHECK_EQ(caps.flags & ATOMICS, 0);
    check_words(logged, "no atomics|no completion in 10 s", "a log");
    backend("thor")->device_close(device);
    check_nothing_left();

    fake_machine("bnxt_re0,max_qp=0");
    node n = {.table = backend("thor"), .caps = {.size = sizeof(uccl_ep_caps)}};
    REFUSED(n.table->device_open(&host, "bnxt_re0", "", &n.device, &n.caps), UCCL_EP_E_NO_MEMORY, "no queue pair");
    CHECK_EQ(queried(0), 0);
}

static char heap[2][4096];

/* How many of four writes of one list complete well, before one does not. */
static uint32_t sound(const char *options) {
    node n[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        node_open(&n[rank], rank, "thor", "bnxt_re0", options);
        const uccl_ep_memory memory = host_memory(heap[rank], sizeof(heap[rank]));
        WORKS(n[rank].table->region_register(n[rank].device, UCCL_EP_REGION_HEAP, &memory));
        node_endpoint(&n[rank]);
    }
    nodes_join(&n[0], &n[1]);
    uccl_ep_operation operations[4];
    for (uint32_t i = 0; i < 4; i++)
        operations[i] = (uccl_ep_operation){
            .kind = UCCL_EP_OPERATION_WRITE, .flags = UCCL_EP_OPERATION_SIGNALLED, .length = 64, .cookie = i};
    uint32_t accepted, well = 0;
    bool failed = false;
    WORKS(n[0].table->submit(n[0].endpoint, 1, operations, 4, 0, &accepted));
    CHECK_EQ(accepted, 4);
    for (unsigned turn = 0; turn < 100000 && well < 4 && !failed; turn++) {
        uccl_ep_completion c;
        const int32_t got = n[0].table->poll(n[0].endpoint, &c, 1);
        CHECK(got >= 0, "%d: %s", got, said);
        if (got) CHECK_EQ(c.cookie, well);
        failed = got && c.status != UCCL_EP_OK;
        well += got && !failed;
    }
    CHECK(failed || well == 4, "%u completions came", well);
    node_close(&n[0]);
    node_close(&n[1]);
    check_nothing_left();
    return well;
}

static void lists_unless_calls_are_asked_for(void) {
    fake_machine("bnxt_re0,wr=1,mixes=1");
    CHECK_EQ(sound(""), 4);
    CHECK_EQ(sound("calls=0"), 4);
    CHECK_EQ(sound("calls=1"), 1);
    fake_machine("bnxt_re0,wr=1");
    CHECK_EQ(sound("calls=1"), 4);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    tried_before_promised();
    only_where_it_matters();
    trials_that_fail();
    lists_unless_calls_are_asked_for();
    return test_end();
}
