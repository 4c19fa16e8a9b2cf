/* SPDX-License-Identifier: Apache-2.0
 *
 * test_virtual_nic_errors.c: what goes wrong on virtual NICs: accesses that are refused, queues in error, deaths;
 * every fault strikes.
 */
#include "nic_bench.h"
#include "virtual_nic/internal.h"

/* ------------------------------------------------------------------------------------------------------------- errors
 */

/* What went wrong: the first error that comes for this request. */
static uint32_t status_of_one(vnic_work w) {
    post(0, 1, w, 1);
    while (came(1) == NONE && step()) collect(0);
    CHECK(came(1) != NONE, "no completion came");
    return b.done[came(1)].status;
}

static void test_bounds(void) {
    static const char *const profiles[] = {"connectx", "efa", "thor2", "pollara", "cxi", "strawman-min"};
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        for (uint32_t what = 0; what < 8; what++) {
            open_bench(profiles[i], "drop_rate=0,completion_level=delivery", test_seed_value);
            fill(0, 0, BYTES, 1);
            vnic_work w = make_write(0, 1, 0, 1024, 64);
            uint32_t expected = VNIC_REMOTE_ACCESS;
            if (what == 0) w.remote_address = address(1, BYTES - 63);
            if (what == 1) w.remote_address = address(1, 0) - 8;
            if (what == 2) w.remote_address = UINT64_MAX - 8;
            if (what == 3) w.remote_key ^= 1ull << 20;
            if (what == 4) w.remote_key = b.side[2].region->key; /* of another rank */
            if (what == 5) w.sge[0].offset = BYTES - 63, expected = VNIC_LOCAL_ACCESS;
            if (what == 6) w.sge[0].region = b.side[2].region, expected = VNIC_LOCAL_ACCESS;
            if (what == 7) vnic_region_remove(b.fabric, b.side[1].region);
            CHECK_EQ(status_of_one(w), expected);
            CHECK_EQ(b.done[0].vendor_code, vnic_vendor_code((vnic_vendor)b.knobs.vendor, (vnic_status)expected));
            settle();
            for (uint32_t r = 1; r < RANKS; r++) CHECK_EQ(count(r, 0, BYTES, 0), BYTES);
            close_bench();
        }
    }
    open_bench("cxi", "completion_level=delivery", 1);
    CHECK_EQ(status_of_one(make_add(1, 1028, 1)), VNIC_REMOTE_INVALID);
    CHECK_EQ(b.done[0].vendor_code, 41);
    close_bench();
    /* Keys of 64 bits have their high bits set; a cut one opens nothing. */
    open_bench("cxi", "completion_level=delivery", 1);
    CHECK(b.side[1].region->key >> 63, "a key without its highest bit");
    vnic_work w = make_write(0, 1, 0, 1024, 64);
    w.remote_key &= UINT32_MAX;
    CHECK_EQ(status_of_one(w), VNIC_REMOTE_ACCESS);
    close_bench();
    open_bench("efa", "", 1);
    CHECK(b.side[1].region->key >> 32 == 0, "a key of more than 32 bits");
    close_bench();
}

static void test_error_scope(void) {
    for (uint32_t qp = 0; qp < 2; qp++) {
        for (uint32_t provider = 0; provider < 2; provider++) {
            FOR_SEEDS(seed) {
                open_bench(qp ? "pollara" : "strawman-min",
                           provider ? "flush_by=provider,drop_rate=0" : "flush_by=nic,drop_rate=0", seed);
                fill(0, 0, 64, 1);
                for (uint64_t k = 0; k < 5; k++) {
                    vnic_work w = make_write(0, 1, 0, k == 2 ? BYTES : 1024 + 64 * k, 64);
                    post(0, 1, w, k);
                }
                settle();
                CHECK_EQ(collect(0), 5);
                for (uint64_t k = 0; k < 5; k++) {
                    const uint32_t expected = k == 2 ? VNIC_REMOTE_ACCESS : qp && k > 2 ? VNIC_FLUSHED : VNIC_OK;
                    CHECK_EQ(b.done[came(k)].status, expected);
                    /* Behind an error that stops the queue nothing was executed. */
                    if (k != 2) CHECK_EQ(count(1, 1024 + 64 * (uint32_t)k, 64, 1), qp && k > 2 ? 0 : 64);
                }
                post(0, 1, make_write(0, 1, 0, 2048, 64), 9);
                post(0, 2, make_write(0, 2, 0, 2048, 64), 10);
                settle();
                collect(0);
                CHECK_EQ(b.done[came(9)].status, qp ? VNIC_FLUSHED : VNIC_OK);
                CHECK_EQ(b.done[came(10)].status, VNIC_OK); /* another peer */
                close_bench();
            }
        }
    }
}

static void test_connections(void) {
    /* EFA: the target must have an address handle of the initiator. */
    open_bench("efa", "", 1);
    vnic_connect(endpoint(1), 0, VNIC_NO_ENDPOINT);
    CHECK_EQ(status_of_one(make_write(0, 1, 0, 1024, 8)), VNIC_UNKNOWN_PEER);
    CHECK_EQ(b.done[0].vendor_code, 14);
    close_bench();
    open_bench("cxi", "completion_level=delivery", 1);
    vnic_connect(endpoint(1), 0, VNIC_NO_ENDPOINT);
    CHECK_EQ(status_of_one(make_write(0, 1, 0, 1024, 8)), VNIC_OK);
    close_bench();
    open_bench("connectx", "", 1); /* a queue pair whose other end is gone */
    vnic_connect(endpoint(1), 0, VNIC_NO_ENDPOINT);
    CHECK_EQ(status_of_one(make_write(0, 1, 0, 1024, 8)), VNIC_RETRY_EXCEEDED);
    close_bench();

    /* After a disconnect nothing is read or written, and no completion comes; then a new one works. */
    static const char *const profiles[] = {"connectx", "efa3", "pollara", "cxi", "strawman-min"};
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        FOR_SEEDS(seed) {
            open_bench(profiles[i], "", seed);
            fill(0, 0, 256, 1);
            for (uint64_t k = 0; k < 6; k++) post(0, 1, make_write(0, 1, 0, 1024 + 256 * k, 256), k);
            for (uint64_t k = seed % 8; k; k--) step();
            while (!vnic_disconnect(endpoint(0), 1)) CHECK(step(), "the disconnect does not end");
            fill(0, 0, 256, 2);
            memset(b.side[1].memory, 0, BYTES);
            collect(0);
            CHECK_EQ(b.n_done, 0);
            char text[256];
            uint32_t taken;
            const vnic_work w = make_write(0, 1, 0, 0, 8);
            CHECK_EQ(vnic_post(endpoint(0), 1, &w, 1, false, &taken, text), VNIC_BROKEN);
            settle();
            CHECK_EQ(count(1, 0, BYTES, 0), BYTES);
            vnic_connect(endpoint(0), 1, vnic_endpoint_id(endpoint(1)));
            post(0, 1, make_write(0, 1, 0, 512, 64), 7);
            settle();
            vnic_ring(endpoint(0));
            settle();
            collect(0);
            CHECK_EQ(b.n_done, 1);
            CHECK_EQ(count(1, 512, 64, 2), 64);
            close_bench();
        }
    }
}

static void test_fence(void) {
    /* Held back until what comes before is visible; cancelled behind a failure, until the connection is made anew. */
    FOR_SEEDS(seed) {
        open_bench("cxi", "fence_kind=delivered", seed);
        fill(0, 0, 256, 1);
        for (uint64_t k = 0; k < 4; k++) post(0, 1, make_write(0, 1, 0, 1024 + 256 * k, 256), k);
        vnic_work a = make_add(1, 0, 1);
        a.flags |= VNIC_FENCE;
        post(0, 1, a, 9);
        while (step())
            if (b.side[1].memory[0]) CHECK_EQ(count(1, 1024, 1024, 1), 1024);
        CHECK_EQ(b.side[1].memory[0], 1);
        post(0, 1, make_write(0, 1, 0, BYTES, 8), 10);
        post(0, 1, a, 11);
        post(0, 1, make_write(0, 1, 0, 1024, 8), 12);
        settle();
        post(0, 1, a, 13);
        settle();
        collect(0);
        CHECK_EQ(b.side[1].memory[0], 1);
        CHECK(b.done[came(11)].status && b.done[came(13)].status, "a fenced add went past a failure");
        CHECK_EQ(b.done[came(12)].status, VNIC_OK);
        while (!vnic_disconnect(endpoint(0), 1)) step();
        vnic_connect(endpoint(0), 1, vnic_endpoint_id(endpoint(1)));
        post(0, 1, a, 14);
        settle();
        CHECK_EQ(b.side[1].memory[0], 2);
        close_bench();
    }
    /* The verbs fence waits for reads and atomics only. */
    uint32_t passed = 0;
    FOR_SEEDS(seed) {
        open_bench("connectx-ro", "", seed);
        fill(0, 0, 256, 1);
        post(0, 1, make_write(0, 1, 0, 1024, 256), 1);
        vnic_work a = make_add(1, 0, 1);
        a.flags |= VNIC_FENCE;
        post(0, 1, a, 2);
        while (step()) passed += b.side[1].memory[0] && count(1, 1024, 256, 1) != 256;
        close_bench();
    }
    CHECK(passed > 0, "the verbs fence held an atomic back behind a write");
}

static void test_inflight(void) {
    open_bench("thor2", "drop_rate=0,retry_exc_inflight_bytes=2048", 1);
    for (uint64_t k = 0; k < 5; k++) post(0, 1, make_write(0, 1, 0, 1024, 512), k);
    settle();
    collect(0);
    CHECK_EQ(b.done[came(3)].status, VNIC_OK);
    CHECK_EQ(b.done[came(4)].status, VNIC_RETRY_EXCEEDED);
    CHECK_EQ(b.done[came(4)].vendor_code, 0xa);
    CHECK_EQ(vnic_fabric_stats(b.fabric)->inflight_bytes_peak, 5 * 512);
    close_bench();
}

static void test_doorbells(void) {
    open_bench("thor2", "drop_rate=100", 1);
    fill(0, 0, 8, 1);
    post(0, 1, make_write(0, 1, 0, 1024, 8), 1);
    settle();
    CHECK_EQ(count(1, 1024, 8, 1), 0); /* the NIC has not seen it */
    CHECK(vnic_ring(endpoint(0)), "nothing to ring for");
    settle();
    CHECK_EQ(count(1, 1024, 8, 1), 0);
    close_bench();
    uint32_t lost = 0;
    FOR_SEEDS(seed) {
        open_bench("thor2", "drop_rate=30", seed);
        fill(0, 0, 8, 1);
        post(0, 1, make_write(0, 1, 0, 1024, 8), 1);
        settle();
        lost += count(1, 1024, 8, 1) == 0;
        while (vnic_ring(endpoint(0))) settle();
        CHECK_EQ(count(1, 1024, 8, 1), 8);
        CHECK_EQ(collect(0), 1);
        close_bench();
    }
    CHECK(lost > SEEDS / 10, "%u doorbells were lost", lost);
}

static void test_deaths(void) {
    static const struct {
        const char *profile;
        uint32_t status;
        int32_t code;
    } cases[] = {{"connectx", VNIC_RETRY_EXCEEDED, 0x15}, {"efa", VNIC_RETRY_EXCEEDED, 13},
                 {"thor2", VNIC_RETRY_EXCEEDED, 0xa},     {"pollara", VNIC_RETRY_EXCEEDED, 11},
                 {"cxi", VNIC_RETRY_EXCEEDED, 8},         {"strawman-min", UINT32_MAX, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_bench(cases[i].profile, "drop_rate=0,completion_level=delivery", test_seed_value);
        vnic_rank_dies(b.fabric, 1);
        for (uint64_t k = 0; k < 3; k++) post(0, 1, make_write(0, 1, 0, 1024, 8), k);
        post(0, 2, make_write(0, 2, 0, 1024, 8), 3);
        settle();
        collect(0);
        CHECK_EQ(b.done[came(3)].status, VNIC_OK);
        if (cases[i].status == UINT32_MAX) {
            CHECK_EQ(b.n_done, 1); /* silence */
        } else {
            CHECK_EQ(b.done[came(0)].status, cases[i].status);
            CHECK_EQ(b.done[came(0)].vendor_code, cases[i].code);
            CHECK(vnic_now(b.fabric) >= b.knobs.retry_ns, "before the retries ran out");
            CHECK_EQ(b.n_done, 4);
        }
        CHECK_EQ(count(1, 0, BYTES, 0), BYTES);
        close_bench();
    }
}

/* ------------------------------------------------------------------------------------------------------------- faults
 */

static uint32_t with_fault(const char *profile, const char *fault, uint32_t writes) {
    char text[256] = "";
    open_bench(profile, "drop_rate=0", test_seed_value);
    CHECK(!vnic_fault_add(b.fabric, fault, text), "%s", text);
    uint32_t taken = 0;
    for (uint64_t k = 0; k < writes; k++) {
        vnic_work w = make_write(0, 1, 0, 1024 + 8 * k, 8);
        w.cookie = k;
        uint32_t one;
        vnic_post(endpoint(0), 1, &w, 1, false, &one, text);
        taken += one;
    }
    settle();
    collect(0);
    return taken;
}

static uint32_t failures(void) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < b.n_done; i++) n += b.done[i].status != VNIC_OK;
    return n;
}

static void test_faults(void) {
    char text[256] = "";
    with_fault("efa", "drop nth=3 count=2", 6);
    CHECK_EQ(failures(), 2);
    CHECK(b.done[came(2)].status && b.done[came(3)].status, "others than the third and fourth failed");
    close_bench();
    static const int32_t codes[] = {1, 7, 8, 9, 10, 13, 14, 15}; /* D7: each with its own number and text */
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        snprintf(text, sizeof text, "drop nth=1 code=%d", codes[i]);
        char fault[64];
        snprintf(fault, sizeof fault, "%s", text);
        with_fault("efa", fault, 1);
        CHECK_EQ(b.done[0].vendor_code, codes[i]);
        CHECK(b.done[0].status &&
                  strcmp(vnic_vendor_text(VNIC_AMAZON, codes[i]), "a code that the vendor does not document"),
              "code %d", codes[i]);
        close_bench();
    }
    with_fault("efa", "drop percent=30", 100);
    CHECK(failures() > 10 && failures() < 60, "%u of 100 with 30 %%", failures());
    close_bench();
    with_fault("connectx", "drop nth=3", 6);
    CHECK_EQ(failures(), 4); /* the queue stops */
    close_bench();
    with_fault("efa", "drop rank=2", 6);
    CHECK_EQ(failures(), 0);
    close_bench();
    with_fault("efa", "delay nth=1 ns=1000000", 2);
    CHECK(vnic_now(b.fabric) >= 1000000 && came(0) > came(1), "nothing was delayed");
    close_bench();
    with_fault("efa", "slow_peer peer=1 ns=1000000", 2);
    CHECK(vnic_now(b.fabric) >= 1000000, "the peer is not slow");
    close_bench();
    with_fault("efa", "duplicate_completion nth=2", 3);
    CHECK_EQ(b.n_done, 4);
    close_bench();
    with_fault("efa", "lost_doorbell nth=2", 2);
    CHECK_EQ(b.n_done, 1);
    vnic_ring(endpoint(0));
    settle();
    CHECK_EQ(collect(0), 1);
    close_bench();
    CHECK_EQ(with_fault("efa", "again nth=2 count=3", 8), 5);
    close_bench();
    with_fault("pollara", "queue_error nth=2", 4);
    CHECK_EQ(failures(), 3);
    close_bench();
    with_fault("connectx", "queue_error rank=0 peer=1 at_ns=0", 4);
    CHECK_EQ(failures(), 4);
    close_bench();

    /* Batches. */
    for (uint32_t partial = 0; partial < 2; partial++) {
        open_bench("efa", "", test_seed_value);
        CHECK(!vnic_fault_add(b.fabric, partial ? "partial nth=1" : "error_in_batch nth=1", text), "%s", text);
        vnic_work many[8];
        for (uint32_t k = 0; k < 8; k++) {
            many[k] = make_write(0, 1, 0, 1024, 8);
            many[k].cookie = k;
        }
        uint32_t taken;
        vnic_post(endpoint(0), 1, many, 8, false, &taken, text);
        settle();
        collect(0);
        CHECK(partial ? taken < 8 && taken > 0 && !failures() : taken == 8 && failures() == 1 && b.done[came(4)].status,
              "%u taken, %u failed", taken, failures());
        close_bench();
    }
    /* An old completion after the connection was made anew. */
    with_fault("efa", "stray_completion nth=1", 2);
    while (!vnic_disconnect(endpoint(0), 1)) step();
    vnic_connect(endpoint(0), 1, vnic_endpoint_id(endpoint(1)));
    settle();
    CHECK_EQ(collect(0), 1);
    close_bench();
    /* A receiver that is not ready. */
    open_bench("connectx", "", test_seed_value);
    CHECK(!vnic_fault_add(b.fabric, "rnr rank=1 count=2", text), "%s", text);
    vnic_work w = make_write(0, 1, 0, 1024, 8);
    w.kind = VNIC_WRITE_IMM;
    CHECK_EQ(status_of_one(w), VNIC_OK);
    CHECK_EQ(vnic_fabric_stats(b.fabric)->rnr, 2);
    close_bench();

    /* What is wrong is refused, with what is valid. */
    open_bench("efa", "", 1);
    static const struct {
        const char *fault, *says;
    } wrong[] = {{"dropp", "there are: drop"},       {"", "there are"},
                 {"drop nht=1", "it takes: rank"},   {"drop nth", "it takes"},
                 {"drop nth=x", "no number"},        {"drop percent=101", "0 to 100"},
                 {"drop nth=0", "counts from 1"},    {"peer_death", "rank= is needed"},
                 {"peer_death rank=3", "rank= is"},  {"delay nth=1", "ns= is needed"},
                 {"queue_error rank=0", "peer= is"}, {"clock_jump", "ns= is needed"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(vnic_fault_add(b.fabric, wrong[i].fault, text), "'%s' was taken", wrong[i].fault);
        CHECK(strstr(text, wrong[i].says), "'%s': %s", wrong[i].fault, text);
    }
    close_bench();
}

/* -------------------------------------------------------------------------------------------------------------- ids */

/* Who registers and gives back, again and again, never runs out, and no key of before opens what has its id now. */
static void test_region_ids(void) {
    static const char *const profiles[] = {"efa", "cxi"}; /* keys of 32 and of 64 bits */
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        open_bench(profiles[i], "completion_level=delivery", test_seed_value);
        const uint64_t kept = b.side[1].region->key;
        static uint64_t last[VNIC_MAX_REGIONS];
        static char memory[64];
        memset(last, 0, sizeof last);
        uint32_t again = 0, turned = 0;
        for (uint32_t n = 0; n < 100000; n++) {
            vnic_region *r = vnic_region_add(b.fabric, &b.knobs, 1, 0, memory, sizeof memory);
            CHECK(r && r->id < VNIC_MAX_REGIONS && r->key != last[r->id], "registration %u", n);
            again += last[r->id] != 0;
            /* Among the last thousand keys none has its id. */
            turned += last[r->id] && vnic_region_of(b.fabric, r->id) == r;
            last[r->id] = r->key;
            vnic_region_forget(b.fabric, r);
        }
        CHECK(again > 90000 && turned == again, "%u of 100000 had an id of before", again);
        CHECK(b.fabric->n_regions < 2000, "%u regions are kept", b.fabric->n_regions);
        CHECK(b.side[1].region->alive && b.side[1].region->key == kept, "a region that was kept");
        /* All that there are at once; then one of them again. */
        vnic_region *one = NULL;
        uint32_t n = RANKS + 1; /* and the id of none */
        for (vnic_region *r; (r = vnic_region_add(b.fabric, &b.knobs, 1, 0, memory, sizeof memory)); n++) one = r;
        CHECK_EQ(n, VNIC_MAX_REGIONS);
        vnic_work w = make_write(0, 1, 0, 0, 8);
        w.remote_key = one->key;
        w.remote_address = one->by_address ? (uintptr_t)memory : 0;
        const uint32_t id = one->id;
        vnic_region_forget(b.fabric, one);
        one = vnic_region_add(b.fabric, &b.knobs, 1, 0, memory, sizeof memory);
        CHECK(one && one->id == id, "the only id that is free");
        CHECK_EQ(status_of_one(w), VNIC_REMOTE_ACCESS);
        w.remote_key = one->key;
        b.n_done = 0;
        CHECK_EQ(status_of_one(w), VNIC_OK);
        close_bench();
    }
}

/* Endpoints come and go, and one that is told of an old number finds nobody. */
static void test_endpoint_ids(void) {
    open_bench("connectx", "dead_peer=timeout,retry_ns=1000000", test_seed_value);
    char text[256];
    const vnic_endpoint_config config = {.rank = 1, .self = 1, .peers = RANKS, .cq_entries = 16};
    const uint32_t first = vnic_endpoint_id(endpoint(2));
    uint32_t before = first, gone = 0;
    for (uint32_t n = 0; n < 10000; n++) {
        vnic_endpoint *e = vnic_endpoint_open(b.side[1].nic[0], &config, text);
        CHECK(e, "%s", text);
        CHECK(vnic_endpoint_id(e) > before && vnic_endpoint_exists(b.fabric, vnic_endpoint_id(e)), "endpoint %u", n);
        before = vnic_endpoint_id(e);
        if (n == 5) gone = before;
        vnic_endpoint_close(e);
        CHECK(!vnic_endpoint_exists(b.fabric, before), "it is closed");
    }
    CHECK_EQ(b.fabric->room_endpoints, 64);
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK(vnic_endpoint_exists(b.fabric, vnic_endpoint_id(endpoint(r))), "those that stayed");
    /* One that has the old one's place, and is connected back, is not who was meant. */
    vnic_endpoint *other = NULL;
    do other = vnic_endpoint_open(b.side[1].nic[0], &config, text);
    while (other && (vnic_endpoint_id(other) & 63) != (gone & 63));
    CHECK(other, "%s", text);
    vnic_connect(other, 0, vnic_endpoint_id(endpoint(0)));
    vnic_connect(endpoint(0), 1, gone);
    fill(0, 0, 64, 1);
    CHECK_EQ(status_of_one(make_write(0, 1, 0, 1024, 64)), VNIC_RETRY_EXCEEDED);
    CHECK_EQ(count(1, 0, BYTES, 0), BYTES);
    close_bench();
    /* Many at once. */
    open_bench("connectx", "max_qp=0", test_seed_value);
    static uint32_t id[1000];
    for (uint32_t n = 0; n < 1000; n++) {
        const vnic_endpoint *e = vnic_endpoint_open(b.side[1].nic[0], &config, text);
        CHECK(e, "%s", text);
        id[n] = vnic_endpoint_id(e);
    }
    for (uint32_t n = 0; n < 1000; n++) CHECK(vnic_endpoint_exists(b.fabric, id[n]), "endpoint %u", n);
    close_bench();
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    test_bounds();
    test_error_scope();
    test_connections();
    test_fence();
    test_inflight();
    test_doorbells();
    test_deaths();
    test_faults();
    test_region_ids();
    test_endpoint_ids();
    return test_end();
}
