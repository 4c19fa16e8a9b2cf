/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_errors.c: what goes wrong with a NIC behind libibverbs: each call of create, each status of a completion,
 * a peer that is gone, one that stands still, the NIC itself. Each becomes an error with the vendor's code, the others
 * go on, and a reset gives a new connection to which nothing of the old one counts.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <sys/resource.h>

#include "verbs_ranks.h"

#define RANKS 3u

static const struct {
    const char *library, *machine, *device[3];
} nics[] = {
    {BACKEND("connectx"), "mlx5_0;mlx5_1;mlx5_2", {"mlx5_0", "mlx5_1", "mlx5_2"}},
    {BACKEND("thor"), "bnxt_re0,reuse=1;bnxt_re1,reuse=1;bnxt_re2", {"bnxt_re0", "bnxt_re1", "bnxt_re2"}},
    {BACKEND("pollara"), "ionic_0;ionic_1,reuse=1;ionic_2", {"ionic_0", "ionic_1", "ionic_2"}},
    {BACKEND("efa"), "efa0;efa1,reuse=1;efa2", {"efa0", "efa1", "efa2"}}, /* its statuses: test_verbs_efa.c */
};
#define NICS (sizeof nics / sizeof *nics)
#define WITH_CONNECTIONS 3u

/* --------------------------------------------------------------------------------------------------------- control */

struct create {
    size_t nic;
    uint32_t kth;
    bool struck;
    const char *options;
};

/* Every rank is told, nothing stays open, and the next create is as if nothing had been. */
static void create_rank(thread_rank *r, void *argument) {
    struct create *c = argument;
    uccl_ep_config config = verbs_config(nics[c->nic].library, nics[c->nic].device[r->rank], c->options);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    const uccl_ep_status status = uccl_ep_comm_create(&config, &bootstrap, &comm);
    static uccl_ep_status statuses[RANKS];
    statuses[r->rank] = status;
    thread_barrier(r);
    for (uint32_t i = 0; i < r->group->size; i++)
        CHECK((status == UCCL_EP_OK) == (statuses[i] == UCCL_EP_OK), "call %u: rank %u has %s, rank %u %s", c->kth,
              r->rank, uccl_ep_status_name(status), i, uccl_ep_status_name(statuses[i]));
    if (status == UCCL_EP_OK) {
        uccl_ep_comm_destroy(comm);
        return;
    }
    const uccl_ep_error *e = uccl_ep_last_error();
    /* An address that could not be read is none: another one is taken, and the ranks may not meet ("gid="). */
    CHECK(strstr(e->text, strerror(ENOMEM)) || strstr(e->text, "cannot be used") || strstr(e->text, "port") ||
              strstr(e->text, "gid="),
          "call %u: %s", c->kth, e->text);
    if (r->rank == 0) c->struck = true;
}

static void test_each_call(void) {
    for (size_t nic = 0; nic < NICS; nic++) {
        fake_machine(nics[nic].machine);
        struct create c = {.nic = nic, .options = ""};
        uint32_t kth = 1, step = test_scaled(1000) < 1000 ? 13 : 1;
        for (bool through = false; !through; kth += step) {
            c.kth = kth;
            c.struck = false;
            const uint64_t before = fake_stats().calls;
            FAKE(fake_ibverbs_fail)("any", kth, ENOMEM);
            run_ranks(2, create_rank, &c);
            /* Which call failed is no failure of create where that goes another way: another port, less inline. */
            through = fake_stats().calls - before < kth;
            FAKE(fake_ibverbs_fail)("any", 0, 0);
            check_nothing_left();
            if (kth % 20 == 1) {
                c.struck = false;
                run_ranks(2, create_rank, &c);
                CHECK(!c.struck, "create after call %u failed: %s", kth, uccl_ep_last_error()->text);
            }
        }
        printf("%s: each of %u calls failed once\n", nics[nic].device[0], kth - step);
    }
}

/* Without descriptors libibverbs finds no device, and never again: it is not asked. */
static void no_descriptors_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = verbs_config(nics[0].library, nics[0].device[r->rank], "");
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    struct rlimit was, few;
    uccl_ep_comm *comm;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &was), 0);
    few = was;
    few.rlim_cur = 3;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm)); /* the libraries are loaded */
    uccl_ep_comm_destroy(comm);
    const uint64_t before = fake_stats().calls;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    const uccl_ep_status status = uccl_ep_comm_create(&config, &bootstrap, &comm);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &was), 0);
    CHECK(status == UCCL_EP_E_SYSTEM && strstr(uccl_ep_last_error()->text, "ulimit -n"), "%s: %s",
          uccl_ep_status_name(status), uccl_ep_last_error()->text);
    CHECK_EQ(fake_stats().calls, before);
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_destroy(comm);
}

static void test_descriptors(void) {
    fake_machine(nics[0].machine);
    run_ranks(1, no_descriptors_rank, NULL);
    check_nothing_left();
}

/* The step of the connection that failed is in the error, and whose. */
static void connect_rank(thread_rank *r, void *argument) {
    const struct create *c = argument;
    uccl_ep_config config = verbs_config(nics[c->nic].library, nics[c->nic].device[r->rank], "");
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    static const char *const steps[] = {"the step to INIT", "the step to RTR", "the step to RTS"};
    uccl_ep_comm *comm;
    if (r->rank == 0) FAKE(fake_ibverbs_fail)("modify_qp", c->kth, ETIMEDOUT);
    thread_barrier(r);
    EXPECT(uccl_ep_comm_create(&config, &bootstrap, &comm), UCCL_EP_E_NIC);
    const uccl_ep_error *e = uccl_ep_last_error();
    CHECK(strstr(e->text, "queue pair to rank"), "%s", e->text);
    CHECK(strstr(e->text, steps[0]) || strstr(e->text, steps[1]) || strstr(e->text, steps[2]), "%s", e->text);
    if (r->group->size == 1) CHECK(strstr(e->text, steps[c->kth - 1]), "%u: %s", c->kth, e->text);
}

static void test_connect_steps(void) {
    fake_machine(nics[0].machine);
    for (uint32_t ranks = 1; ranks <= 2; ranks++)
        for (uint32_t kth = 1; kth <= 3; kth++) {
            struct create c = {.nic = 0, .kth = kth};
            run_ranks(ranks, connect_rank, &c);
            FAKE(fake_ibverbs_fail)("modify_qp", 0, 0);
            check_nothing_left();
        }
}

/* ------------------------------------------------------------------------------------------------------- operations */

/* Number of the queue pair of rank 0 that leads to rank 1: its device is the first one's, its target the second's. */
static uint32_t queue_to_rank_1(void) {
    uint32_t found = 0;
    for (uint32_t i = 0, qp; (qp = FAKE(fake_ibverbs_qp_num)(i)); i++) {
        struct ibv_qp_attr rtr;
        struct ibv_qp_attr back;
        int mask;
        if (FAKE(fake_ibverbs_last_attr)(qp, IBV_QPS_RTR, &rtr, &mask)) continue;
        if (FAKE(fake_ibverbs_last_attr)(rtr.dest_qp_num, IBV_QPS_RTR, &back, &mask)) continue;
        /* The default GIDs end in the device's number + 1. */
        if (rtr.ah_attr.grh.dgid.raw[15] == 2 && back.ah_attr.grh.dgid.raw[15] == 1) found = qp;
    }
    CHECK(found, "no queue pair from rank 0 to rank 1");
    return found;
}

enum how { BREAK, CUT, HOLD, KILL };

struct failure {
    size_t nic;
    enum how how;
    int wc_status;
    uccl_ep_status expected;
    const char *options;
    uint32_t strategy, inflight; /* 0: as the library has it */
};

/* All to all, and what is seen is right. `base`: what the words were. */
static void talk(thread_rank *r, uccl_ep_comm *comm, char *heap, uint64_t base, uint64_t rounds) {
    for (uint64_t round = base + 1; round <= base + rounds; round++) {
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            memset(heap + peer * 512, (int)(round * 3 + r->rank), 512);
            OK(uccl_ep_put_signal(comm, 0, peer, peer * 512, 8192 + r->rank * 512, 512, r->rank, 1,
                                  UCCL_EP_TIMEOUT_DEFAULT, NULL));
        }
        for (uint32_t peer = 0; peer < RANKS; peer++) {
            OK(uccl_ep_wait_signal(comm, peer, round, peer, UCCL_EP_TIMEOUT_DEFAULT, NULL));
            for (uint32_t i = 0; i < 512; i++)
                CHECK_EQ((uint8_t)heap[8192 + peer * 512 + i], (uint8_t)(round * 3 + peer));
        }
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, UCCL_EP_TIMEOUT_DEFAULT));
        thread_barrier(r);
    }
}

static void failure_rank(thread_rank *r, void *argument) {
    const struct failure *f = argument;
    uccl_ep_config config = verbs_config(nics[f->nic].library, nics[f->nic].device[r->rank], f->options);
    config.strategy = f->strategy;
    config.max_inflight = config.max_inflight_peer = f->inflight;
    if (f->how == HOLD) config.peer_timeout_ns = 2 * SECOND;
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    char *heap = info.heap;
    talk(r, comm, heap, 0, 3);
    thread_barrier(r);
    if (r->rank == 0) {
        const uint32_t qp = queue_to_rank_1();
        switch (f->how) {
        case BREAK:
            FAKE(fake_ibverbs_break)(qp, f->wc_status, 0x5a);
            break;
        case CUT:
            FAKE(fake_ibverbs_cut)(qp);
            break;
        case HOLD:
            FAKE(fake_ibverbs_hold)(qp, 1);
            break;
        case KILL:
            FAKE(fake_ibverbs_kill_device)(nics[f->nic].device[0]);
            break;
        }
        /* Several are outstanding when the first one fails; none of those behind is executed (ERR-3). */
        memset(heap, 0xee, 4096);
        for (uint32_t k = 0; k < 5; k++)
            uccl_ep_put_signal(comm, 0, 1, 0, 65536 + k * 512, 512, 40, 1, UCCL_EP_TIMEOUT_DEFAULT, NULL);
        const uccl_ep_status got = uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT);
        const uccl_ep_error e = *uccl_ep_last_error();
        /* Of a dead NIC the event or a completion tells first. */
        CHECK(got == f->expected || (f->how == KILL && got == UCCL_EP_E_NIC), "%s: %s", uccl_ep_status_name(got),
              e.text);
        if (f->how != KILL) CHECK_EQ(e.peer, 1);
        if (f->how == BREAK) {
            CHECK_EQ(e.vendor_code, 0x5a << 8 | f->wc_status);
            char number[40];
            snprintf(number, sizeof number, "status %d, vendor error 0x5a", f->wc_status);
            CHECK(strstr(e.text, number), "%s", e.text);
        }
        /* Another peer is served all the same (ERR-5). */
        uint64_t ticket;
        if (f->how != KILL) {
            OK(uccl_ep_put_signal(comm, 1, 2, 0, 65536, 512, 41, 1, UCCL_EP_TIMEOUT_DEFAULT, &ticket));
            OK(uccl_ep_wait(comm, 1, ticket, UCCL_EP_TIMEOUT_DEFAULT));
        }
    }
    thread_barrier(r);
    if (r->rank == 1) {
        uint64_t word;
        OK(uccl_ep_read_signal(comm, 40, &word));
        CHECK_EQ(word, 0);
        for (uint32_t i = 0; i < 5 * 512; i++) CHECK_EQ((uint8_t)heap[65536 + i], 0);
    }
    if (f->how != KILL) {
        if (f->how == HOLD && r->rank == 0) {
            for (uint32_t i = 0, qp; (qp = FAKE(fake_ibverbs_qp_num)(i)); i++) FAKE(fake_ibverbs_hold)(qp, 0);
        }
        thread_barrier(r);
        OK(uccl_ep_reset(comm, &bootstrap));
        thread_barrier(r);
        talk(r, comm, heap, 0, 5);
        if (r->rank == 1) {
            uint64_t word;
            OK(uccl_ep_read_signal(comm, 40, &word));
            CHECK_EQ(word, 0);
            for (uint32_t i = 0; i < 5 * 512; i++) CHECK_EQ((uint8_t)heap[65536 + i], 0);
        }
    }
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

static void run_failure(const struct failure *f) {
    fake_machine(nics[f->nic].machine);
    run_ranks(RANKS, failure_rank, (void *)f);
    check_nothing_left();
    CHECK_EQ(fake_stats().rnr_naks, 0);
    CHECK_EQ(fake_stats().cq_overruns, 0);
}

static uccl_ep_status expected_of(int wc_status) {
    switch (wc_status) {
    case IBV_WC_LOC_LEN_ERR:
        return UCCL_EP_E_RANGE;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_REM_ACCESS_ERR:
        return UCCL_EP_E_REGISTRATION;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
        return UCCL_EP_E_PEER_LOST;
    default:
        return UCCL_EP_E_NIC;
    }
}

static void test_statuses(void) {
    for (int status = IBV_WC_LOC_LEN_ERR; status <= IBV_WC_GENERAL_ERR; status++) {
        if (test_scaled(100) < 100 && status % 5 != 2) continue;
        const struct failure f = {.nic = (size_t)status % WITH_CONNECTIONS,
                                  .how = BREAK,
                                  .wc_status = status,
                                  .expected = expected_of(status),
                                  .options = "",
                                  .strategy = 0};
        run_failure(&f);
    }
}

static void test_losses(void) {
    static const struct failure failures[] = {
        {.nic = 0, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = ""},
        {.nic = 0, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = "relaxed=1"},
        {.nic = 0, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = "relaxed=1,srq=0"},
        {.nic = 1, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = ""},
        {.nic = 2, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = ""},
        {.nic = 0, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = "", .inflight = 2},
        {.nic = 2, .how = CUT, .expected = UCCL_EP_E_PEER_LOST, .options = "", .inflight = 4},
        {.nic = 0, .how = HOLD, .expected = UCCL_EP_E_PEER_LOST, .options = ""},
        {.nic = 2, .how = HOLD, .expected = UCCL_EP_E_PEER_LOST, .options = ""},
        {.nic = 0, .how = KILL, .expected = UCCL_EP_E_PEER_LOST, .options = ""},
    };
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        run_failure(&failures[i]);
        printf("loss %zu of %zu\n", i + 1, sizeof failures / sizeof *failures);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 240);
    test_descriptors();
    test_connect_steps();
    test_statuses();
    test_each_call();
    test_losses(); /* its last NIC stays dead */
    return test_end();
}
