/* SPDX-License-Identifier: Apache-2.0
 *
 * What a front end with queue pairs of its own needs of a virtual NIC: the old value of an atomic, compare and swap,
 * receives that are the owner's, connections that keep messages in turn, and requests that are known to fail.
 */
#include "nic_bench.h"

/* Between ranks 0 and 1, instead of the bench's own: a reliable connection that carries messages. */
static struct {
    vnic_endpoint *from, *to;
    uint32_t ready; /* receives that there are */
    uint64_t got[256];
    uint32_t n;
    vnic_status refuse;
} m;

static vnic_status receive(void *context, uint64_t cookie) {
    CHECK(context == &m, "a context");
    if (!m.ready) return VNIC_RNR_EXCEEDED;
    m.ready--;
    if (m.refuse) return m.refuse;
    m.got[m.n++] = cookie;
    return VNIC_OK;
}

static void open_pair(const char *profile, const char *knobs, uint64_t seed, const vnic_terms *terms) {
    char text[256];
    open_bench(profile, knobs, seed);
    memset(&m, 0, sizeof m);
    const vnic_endpoint_config from = {.rank = 0, .peers = 1, .cq_entries = 512, .terms = terms, .in_turn = true};
    const vnic_endpoint_config to = {
        .rank = 1, .peers = 1, .cq_entries = 512, .receive = receive, .receive_context = &m};
    m.from = vnic_endpoint_open(b.side[0].nic[0], &from, text);
    m.to = vnic_endpoint_open(b.side[1].nic[0], &to, text);
    CHECK(m.from && m.to, "%s", text);
    vnic_connect(m.from, 0, vnic_endpoint_id(m.to));
    vnic_connect(m.to, 0, vnic_endpoint_id(m.from));
}

static uint32_t poll_pair(void) {
    const uint32_t n = vnic_poll(m.from, b.done + b.n_done, 1024 - b.n_done);
    b.n_done += n;
    return n;
}

static void post_pair(vnic_work w, uint64_t cookie) {
    CHECK_EQ(try_post(m.from, 0, w, cookie), VNIC_TAKEN);
}

static void test_old_values(void) {
    FOR_SEEDS(seed) {
        open_bench(seed % 2 ? "connectx" : "cxi", seed % 3 ? "" : "nics=2", seed);
        vnic_work w = make_add(1, 1024, 3);
        for (uint64_t k = 0; k < 8; k++) {
            w.sges = 1;
            w.sge[0] = (vnic_sge){b.side[0].region, 8 * k, 8};
            post(0, 1, w, k);
            while (came(k) == NONE) CHECK(collect(0) || step(), "it ends");
            CHECK_EQ(b.side[0].memory[k], 3 * k); /* there, once it is complete, also where a completion means little */
        }
        w.kind = VNIC_SWAP;
        w.compare = 5;
        w.value = 100;
        post(0, 1, w, 20);
        settle();
        CHECK_EQ(b.side[0].memory[7], 24);
        CHECK_EQ(b.side[1].memory[128], 24);
        w.compare = 24;
        post(0, 1, w, 21);
        settle();
        CHECK_EQ(b.side[0].memory[7], 24);
        CHECK_EQ(b.side[1].memory[128], 100);
        w.sge[0].length = 4;
        CHECK_EQ(try_post(endpoint(0), 1, w, 22), VNIC_UNSUPPORTED);
        close_bench();
    }
}

/* Messages are received in turn whatever the order of writes; with strict order, nothing behind one lands before it. */
static void turns(const char *profile) {
    const vnic_terms terms = {.rnr_retries = VNIC_ANY, .rnr_ns = 5000, .retry_ns = 1000000};
    FOR_SEEDS(seed) {
        open_pair(profile, "drop_rate=0", seed, &terms);
        const bool strict = vnic_write_write(&b.knobs);
        fill(0, 0, 64, 1);
        for (uint64_t k = 0; k < 16; k++) {
            vnic_work w = make_write(0, 1, 0, 64 * k, 64);
            if (k % 2 == 0) w.kind = VNIC_WRITE_IMM;
            if (k % 4 == 0) w.sges = 0;
            post_pair(w, k);
        }
        for (uint32_t i = 0; i < 500; i++) {
            CHECK(step(), "it waits for a receive, and looks again");
            if (strict && !m.n) CHECK_EQ(count(1, 64, 64, 1), 0);
            poll_pair();
        }
        CHECK_EQ(m.n, 0);
        for (m.ready = 8; b.n_done < 16;) {
            poll_pair();
            CHECK(step() || b.n_done == 16, "it ends");
        }
        settle();
        CHECK_EQ(m.n, 8);
        for (uint64_t k = 0; k < 8; k++) CHECK_EQ(m.got[k], 2 * k);
        for (uint64_t k = 0; k < 16; k++) CHECK(b.done[k].cookie == k && !b.done[k].status, "request %" PRIu64, k);
        CHECK(!vnic_poll(m.to, b.done, 1), "an entry of the target's queue");
        close_bench();
    }
}

static void test_terms(void) {
    FOR_SEEDS(seed) {
        const vnic_terms terms = {.rnr_retries = (uint32_t)(seed % 4), .rnr_ns = 1000000, .retry_ns = 7000000};
        open_pair("connectx", "", seed, &terms);
        vnic_work message = {.kind = VNIC_WRITE_IMM, .flags = VNIC_SIGNALLED};
        post_pair(message, 1);
        post_pair(make_write(0, 1, 0, 1024, 8), 2);
        fill(0, 0, 8, 9);
        const uint64_t began = vnic_now(b.fabric);
        settle();
        CHECK_EQ(poll_pair(), 2);
        CHECK(b.done[0].status == VNIC_RNR_EXCEEDED && b.done[1].status == VNIC_FLUSHED, "%u", b.done[0].status);
        CHECK_EQ((vnic_now(b.fabric) - began) / 1000000, terms.rnr_retries);
        CHECK_EQ(count(1, 1024, 8, 9), 0);
        close_bench();
        /* What the owner says of a message is what its sender hears. */
        open_pair("connectx", "", seed, &terms);
        m.ready = 1;
        m.refuse = VNIC_REMOTE_INVALID;
        post_pair(message, 1);
        settle();
        CHECK_EQ(poll_pair(), 1);
        CHECK_EQ(b.done[0].status, VNIC_REMOTE_INVALID);
        close_bench();
        /* A silent peer is given up when the terms say so. */
        open_pair("connectx", "", seed, &terms);
        vnic_endpoint_close(m.to);
        post_pair(make_write(0, 1, 0, 1024, 8), 1);
        settle();
        CHECK_EQ(poll_pair(), 1);
        CHECK_EQ(b.done[0].status, VNIC_RETRY_EXCEEDED);
        CHECK_EQ(vnic_now(b.fabric) / 1000000, 7);
        close_bench();
    }
}

/* It fails in its turn: what is before it is carried out, what is behind it is not, or is where errors are of one. */
static void test_known_to_fail(void) {
    static const char *const profiles[] = {"connectx", "efa"};
    for (uint32_t i = 0; i < 2; i++) FOR_SEEDS(seed) {
            open_bench(profiles[i], "dup_write=0", seed);
            fill(0, 0, 8, 1);
            for (uint64_t k = 0; k < 3; k++) {
                vnic_work w = make_write(0, 1, 0, 1024 + 8 * k, 8);
                if (k == 1) w.fails = VNIC_UNKNOWN_PEER;
                post(0, 1, w, k);
            }
            settle();
            CHECK_EQ(collect(0), 3);
            CHECK_EQ(b.done[came(0)].status, VNIC_OK);
            CHECK_EQ(b.done[came(1)].status, VNIC_UNKNOWN_PEER);
            CHECK_EQ(b.done[came(2)].status, i ? VNIC_OK : VNIC_FLUSHED);
            CHECK_EQ(count(1, 1024, 24, 1), i ? 16 : 8);
            close_bench();
        }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    test_old_values();
    turns("connectx");
    turns("connectx-ro");
    turns("pollara");
    turns("thor2");
    test_terms();
    test_known_to_fail();
    return test_end();
}
