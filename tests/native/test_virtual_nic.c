/* SPDX-License-Identifier: Apache-2.0
 *
 * test_virtual_nic.c: every knob of a virtual NIC shows the freedom that it stands for, and keeps what
 * it rules out; every limit is met.
 */
#include "nic_bench.h"

/* ----------------------------------------------------------------------------------------------------------- placing
 */

/* Sets of units that a reader may see of one message. */
static void place(const char *profile, const char *knobs, uint32_t unit, bool prefix_only) {
    bool disordered = false, partial = false;
    FOR_SEEDS(seed) {
        open_bench(profile, knobs, seed);
        fill(0, 0, 512, 1);
        post(0, 1, make_write(0, 1, 0, 1024, 512), 1);
        while (step()) {
            bool hole = false;
            uint32_t there = 0;
            for (uint32_t at = 1024; at < 1536; at += unit) {
                const uint32_t n = count(1, at, unit, 1);
                CHECK(n == 0 || n == unit, "%s %s: a unit of %u bytes was torn", profile, knobs, unit);
                if (n && hole) disordered = true;
                if (!n) hole = true;
                there += n;
            }
            partial |= there && there < 512;
        }
        CHECK_EQ(count(1, 1024, 512, 1), 512);
        CHECK_EQ(count(1, 0, 1024, 0) + count(1, 1536, 512, 0), 1536); /* and nothing else */
        close_bench();
    }
    CHECK(partial, "%s %s: a message of 512 bytes was never seen in part", profile, knobs);
    CHECK(disordered != prefix_only, "%s %s: %s", profile, knobs,
          prefix_only ? "a later byte was seen before an earlier one" : "bytes always came in order");
}

static void test_place_order(void) {
    place("strawman-min", "place_order=none", 8, false);
    place("strawman-min", "place_order=blocks", 128, false);
    place("strawman-min", "place_order=per_msg", 128, true);
    place("connectx", "", 128, true);
    place("efa", "", 128, false);
    place("efa3", "", 8, false);
    /* A record of 16 bytes may be torn, its words are not. */
    bool torn = false;
    FOR_SEEDS(seed) {
        open_bench("efa3", "", seed);
        fill(0, 0, 16, 7);
        post(0, 1, make_write(0, 1, 0, 1024, 16), 1);
        while (step()) {
            const uint32_t first = count(1, 1024, 8, 7), second = count(1, 1032, 8, 7);
            CHECK((first == 0 || first == 8) && (second == 0 || second == 8), "a word was torn");
            torn |= first != second;
        }
        close_bench();
    }
    CHECK(torn, "no record was ever torn");
}

/* ----------------------------------------------------------------------------------------------------- between
 * messages */

static uint32_t violations(const char *profile, const char *knobs, int second) {
    uint32_t seen = 0;
    FOR_SEEDS(seed) {
        open_bench(profile, knobs, seed);
        fill(0, 0, 256, 1);
        bool bad = false;
        post(0, 1, make_write(0, 1, 0, 1024, 256), 1);
        vnic_work w = second == VNIC_ADD ? make_add(1, 2048, 1) : make_write(0, 1, 0, 2048, 8);
        if (second == VNIC_WRITE_IMM) w.kind = VNIC_WRITE_IMM;
        post(0, 1, w, 2);
        while (step()) {
            bool arrived = b.side[1].memory[256] != 0;
            if (second == VNIC_WRITE_IMM) {
                vnic_completion immediate;
                arrived = vnic_poll(endpoint(1), &immediate, 1) == 1;
            }
            if (arrived && count(1, 1024, 256, 1) != 256) bad = true;
        }
        CHECK_EQ(count(1, 1024, 256, 1), 256);
        seen += bad;
        close_bench();
    }
    return seen;
}

static void test_message_order(void) {
    static const char *const all[] = {"connectx", "connectx-ro",      "efa", "efa3",        "thor2",
                                      "pollara",  "pollara-noatomic", "cxi", "strawman-min"};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const vnic_knobs *k = &vnic_profile_named(all[i])->knobs;
        const uint32_t writes = violations(all[i], "drop_rate=0", VNIC_WRITE);
        CHECK((writes == 0) == vnic_write_write(k), "%s: %u of %u seeds broke write-write order", all[i], writes,
              SEEDS);
        /* With no order the freedom is used often, not once in a while. */
        CHECK(vnic_write_write(k) || writes >= SEEDS / 10, "%s: only %u of %u seeds", all[i], writes, SEEDS);
        if (k->atomics) {
            const uint32_t adds = violations(all[i], "drop_rate=0", VNIC_ADD);
            CHECK((adds == 0) == vnic_write_atomic(k), "%s: %u of %u seeds broke write-atomic order", all[i], adds,
                  SEEDS);
        }
        if (k->imm_bits) {
            const uint32_t imms = violations(all[i], "drop_rate=0", VNIC_WRITE_IMM);
            CHECK((imms == 0) == vnic_write_imm(k), "%s: %u of %u seeds broke write-immediate order", all[i], imms,
                  SEEDS);
        }
    }
    CHECK_EQ(violations("connectx-ro", "ro_atomic_ordered=1", VNIC_ADD), 0);
    CHECK(violations("connectx", "order_write_atomic=0,place_order=per_msg,order_write_write=0", VNIC_ADD) > 0,
          "the freedom of atomics is not used");
}

static void test_immediates(void) {
    /* Visible with its immediate, or at the latest once the target flushes. */
    for (uint32_t visible = 0; visible < 2; visible++) {
        uint32_t late = 0;
        FOR_SEEDS(seed) {
            open_bench("efa", visible ? "imm_visible=1" : "", seed);
            fill(0, 0, 64, 1);
            vnic_work w = make_write(0, 1, 0, 1024, 64);
            w.kind = VNIC_WRITE_IMM;
            w.value = 0x1234567890abcdefull;
            post(0, 1, w, 1);
            vnic_completion immediate = {0};
            while (step()) {
                if (!vnic_poll(endpoint(1), &immediate, 1)) continue;
                CHECK(immediate.immediate && immediate.peer == 0 && immediate.consumed_receive, "not what was sent");
                CHECK_EQ(immediate.cookie, 0x90abcdefu); /* 32 bits */
                late += count(1, 1024, 64, 1) != 64;
                vnic_flush_local(endpoint(1), b.side[1].region);
                CHECK_EQ(count(1, 1024, 64, 1), 64);
            }
            CHECK(immediate.immediate, "no immediate came");
            close_bench();
        }
        CHECK((late == 0) == (visible == 1), "%u immediates came before their bytes were visible", late);
    }
    /* Without a payload. */
    open_bench("efa3", "", 1);
    vnic_work w = {.kind = VNIC_WRITE_IMM, .flags = VNIC_SIGNALLED, .value = 9};
    post(0, 1, w, 1);
    settle();
    vnic_completion immediate;
    CHECK_EQ(vnic_poll(endpoint(1), &immediate, 1), 1);
    CHECK_EQ(immediate.cookie, 9);
    CHECK(!immediate.consumed_receive, "an unsolicited immediate takes no receive");
    close_bench();
}

/* -------------------------------------------------------------------------------------------------------- completions
 */

static void test_completion_order(void) {
    for (uint32_t any = 0; any < 2; any++) {
        uint32_t swapped = 0;
        FOR_SEEDS(seed) {
            open_bench(any ? "strawman-min" : "pollara", "drop_rate=0", seed);
            for (uint64_t i = 0; i < 4; i++) post(0, 1, make_write(0, 1, 0, 1024 + 64 * i, 64), i);
            settle();
            CHECK_EQ(collect(0), 4);
            for (uint64_t i = 1; i < 4; i++) swapped += came(i) < came(i - 1);
            close_bench();
        }
        CHECK((swapped != 0) == (any == 1), "%u completions came out of order", swapped);
    }
}

/* What is not there yet when the completion comes: nothing left its source, or it is not visible. */
static void level(const char *profile, const char *knobs, uint8_t flags, bool may_be_late) {
    uint32_t late = 0;
    FOR_SEEDS(seed) {
        open_bench(profile, knobs, seed);
        fill(0, 0, 256, 1);
        vnic_work w = make_write(0, 1, 0, 1024, 256);
        w.flags |= flags;
        post(0, 1, w, 1);
        bool more = true;
        while (more) {
            more = step();
            if (!collect(0)) continue;
            late += count(1, 1024, 256, 1) != 256;
            fill(0, 0, 256, 2); /* the source is ours again */
        }
        CHECK_EQ(count(1, 1024, 256, 1), 256);
        CHECK_EQ(came(1), 0);
        close_bench();
    }
    CHECK((late != 0) == may_be_late, "%s %s: %u of %u completions came before the bytes were visible", profile, knobs,
          late, SEEDS);
}

static void test_completion_level(void) {
    level("cxi", "", 0, true);
    level("cxi", "", VNIC_VISIBLE, false);
    level("efa", "", 0, true);
    level("efa", "visible_delay=0", 0, false);
    level("connectx", "", 0, true);
    level("connectx", "completion_level=delivery", 0, false);
    level("strawman-min", "", 0, false);
    level("strawman-min", "dup_write=100", 0, false);
}

static void test_flushes(void) {
    /* A read of the same connection, or the target's own flush, makes visible what was placed. */
    uint32_t late = 0;
    FOR_SEEDS(seed) {
        for (uint32_t local = 0; local < 2; local++) {
            open_bench("connectx", "", seed);
            fill(0, 0, 128, 1);
            post(0, 1, make_write(0, 1, 0, 1024, 128), 1);
            while (came(1) == NONE && step()) collect(0);
            late += count(1, 1024, 128, 1) != 128;
            if (local) {
                vnic_flush_local(endpoint(1), b.side[1].region);
            } else {
                vnic_work r = make_write(0, 1, 2048, 0, 8);
                r.kind = VNIC_READ;
                b.side[1].memory[0] = 77;
                post(0, 1, r, 2);
                while (came(2) == NONE && step()) collect(0);
                CHECK_EQ(b.side[0].memory[256], 77);
            }
            CHECK_EQ(count(1, 1024, 128, 1), 128);
            close_bench();
        }
    }
    CHECK(late > 0, "nothing was ever late");
    /* A read that does not flush overtakes writes. */
    uint32_t overtook = 0;
    FOR_SEEDS(seed) {
        open_bench("efa", "", seed);
        fill(0, 0, 128, 1);
        post(0, 1, make_write(0, 1, 0, 1024, 128), 1);
        vnic_work r = make_write(0, 1, 2048, 0, 8);
        r.kind = VNIC_READ;
        post(0, 1, r, 2);
        while (came(2) == NONE && step()) collect(0);
        overtook += count(1, 1024, 128, 1) != 128;
        close_bench();
    }
    CHECK(overtook > 0, "reads of efa never overtook a write");
}

/* The payload is read again, and lands again, until the completion is given and not after it. */
static void test_duplicates(void) {
    uint32_t changed = 0, rewritten = 0;
    FOR_SEEDS(seed) {
        open_bench("efa3", "inline_percent=0,visible_delay=0", seed);
        fill(0, 0, 64, 1);
        post(0, 1, make_write(0, 1, 0, 1024, 64), 1);
        while (count(1, 1024, 64, 1) != 64 && step()) {
        }
        fill(0, 0, 64, 2);    /* a source changed before quiet_source */
        fill(1, 1024, 64, 3); /* a target rewritten before the completion (PUT-7) */
        while (came(1) == NONE && step()) collect(0);
        changed += count(1, 1024, 64, 2) > 0;
        rewritten += count(1, 1024, 64, 3) != 64;
        fill(1, 1024, 64, 4);
        settle();
        CHECK_EQ(count(1, 1024, 64, 4), 64);
        close_bench();
    }
    CHECK(changed > 0 && rewritten > 0, "no second fetch in %u seeds", SEEDS);
    FOR_SEEDS(seed) { /* and never on a NIC that does not */
        open_bench("efa", "", seed);
        fill(0, 0, 64, 1);
        post(0, 1, make_write(0, 1, 0, 1024, 64), 1);
        settle();
        CHECK_EQ(vnic_fabric_stats(b.fabric)->duplicates, 0);
        close_bench();
    }
}

/* Two writes to one place, the second posted after the completion of the first, which is not visible yet. */
static void test_overwrites(void) {
    for (uint32_t what = 0; what < 3; what++) {
        uint32_t hidden = 0;
        FOR_SEEDS(seed) {
            open_bench("efa", what == 1 ? "late_overwrite=0" : "", seed);
            b.side[1].region->strict = what == 2;
            fill(0, 0, 8, 1);
            fill(0, 8, 8, 2);
            post(0, 1, make_write(0, 1, 0, 1024, 8), 1);
            while (came(1) == NONE && step()) collect(0);
            post(0, 1, make_write(0, 1, 8, 1024, 8), 2);
            settle();
            hidden += count(1, 1024, 8, 1) == 8;
            close_bench();
        }
        CHECK((hidden != 0) == (what == 0), "%u later writes were hidden", hidden);
    }
}

static void test_queues_of_completions(void) {
    /* 16 signalled writes, unpolled: 4 entries overrun, unless one entry stands for several. */
    static const struct {
        const char *profile, *knobs;
        bool breaks;
        uint32_t least, most;
    } cases[] = {
        {"connectx", "cq_overrun=fatal", true, 4, 4},
        {"connectx", "cq_overrun=drop", false, 4, 4},
        {"connectx", "cqe_cumulative=1", false, 16, 16},
        {"thor2", "drop_rate=0", false, 16, 16},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_bench_with(cases[i].profile, cases[i].knobs, 3, false, NULL, 0, 4, 0);
        for (uint64_t k = 0; k < 16; k++) post(0, 1, make_write(0, 1, 0, 1024, 64), k);
        settle();
        CHECK((vnic_endpoint_broken(endpoint(0)) != NULL) == cases[i].breaks, "%s", cases[i].knobs);
        const uint32_t n = collect(0);
        CHECK(n >= cases[i].least && n <= cases[i].most, "%s %s: %u completions", cases[i].profile, cases[i].knobs, n);
        close_bench();
    }
    /* Unsignalled ones give none, and errors always do. */
    open_bench("connectx", "", 3);
    for (uint64_t k = 0; k < 8; k++) {
        vnic_work w = make_write(0, 1, 0, 1024, 64);
        if (k != 7) w.flags = 0;
        post(0, 1, w, k);
    }
    settle();
    CHECK_EQ(collect(0), 1);
    CHECK_EQ(b.done[0].cookie, 7);
    vnic_work bad = make_write(0, 1, 0, BYTES, 64);
    bad.flags = 0;
    post(0, 1, bad, 8);
    settle();
    CHECK_EQ(collect(0), 1);
    CHECK_EQ(b.done[1].status, VNIC_REMOTE_ACCESS);
    close_bench();
}

/* ------------------------------------------------------------------------------------------------------------- limits
 */

static void test_limits(void) {
    open_bench("efa", "max_wr=4", 1);
    vnic_work w = make_write(0, 1, 0, 1024, 8), many[8];
    for (uint32_t i = 0; i < 8; i++) many[i] = w;
    uint32_t taken;
    char text[256];
    CHECK_EQ(vnic_post(endpoint(0), 1, many, 8, false, &taken, text), VNIC_NO_ROOM);
    CHECK_EQ(taken, 4);
    CHECK_EQ(vnic_post(endpoint(0), 2, many, 1, false, &taken, text), VNIC_NO_ROOM); /* one queue for all peers */
    settle();
    CHECK_EQ(vnic_post(endpoint(0), 2, many, 1, false, &taken, text), VNIC_TAKEN);
    w.flags = 0;
    CHECK_EQ(try_post(endpoint(0), 1, w, 1), VNIC_UNSUPPORTED); /* every request must be signalled */
    w.flags = VNIC_SIGNALLED | VNIC_FENCE;
    CHECK_EQ(try_post(endpoint(0), 1, w, 1), VNIC_UNSUPPORTED);
    w.flags = VNIC_SIGNALLED | VNIC_VISIBLE;
    CHECK_EQ(try_post(endpoint(0), 1, w, 1), VNIC_UNSUPPORTED);
    CHECK_EQ(try_post(endpoint(0), 1, make_add(1, 0, 1), 1), VNIC_UNSUPPORTED);
    w = make_write(0, 1, 0, 1024, 8);
    w.sges = 2;
    w.sge[1] = w.sge[0];
    CHECK_EQ(try_post(endpoint(0), 1, w, 1), VNIC_UNSUPPORTED);
    close_bench();

    open_bench("connectx", "max_wr=4,max_msg=256,max_inline=32,max_batch=3", 1);
    for (uint32_t i = 0; i < 8; i++) many[i] = make_write(0, 1, 0, 1024, 8);
    CHECK_EQ(vnic_post(endpoint(0), 1, many, 8, false, &taken, text), VNIC_NO_ROOM);
    CHECK_EQ(taken, 3);
    CHECK_EQ(vnic_post(endpoint(0), 1, many, 3, false, &taken, text), VNIC_NO_ROOM);
    CHECK_EQ(taken, 1);
    CHECK_EQ(vnic_post(endpoint(0), 2, many, 3, false, &taken, text), VNIC_TAKEN); /* a queue for each peer */
    settle();
    CHECK_EQ(try_post(endpoint(0), 1, make_write(0, 1, 0, 1024, 257), 1), VNIC_TOO_LONG);
    w = make_write(0, 1, 0, 1024, 33);
    w.flags |= VNIC_INLINE;
    CHECK_EQ(try_post(endpoint(0), 1, w, 1), VNIC_TOO_LONG);
    /* What went inline is read at once; gathered from two places. */
    w = make_write(0, 1, 0, 1024, 16);
    w.flags |= VNIC_INLINE;
    w.sges = 2;
    w.sge[1] = (vnic_sge){b.side[0].region, 512, 8};
    fill(0, 0, 16, 5);
    fill(0, 512, 8, 6);
    post(0, 1, w, 1);
    fill(0, 0, 1024, 9);
    settle();
    CHECK_EQ(count(1, 1024, 16, 5), 16);
    CHECK_EQ(count(1, 1040, 8, 6), 8);
    close_bench();

    /* Queue pairs of a NIC: 256, one for each endpoint, or for each peer of one. */
    open_bench("efa", "", 1);
    const vnic_endpoint_config more = {.rank = 0, .self = 0, .peers = RANKS, .cq_entries = 8};
    for (uint32_t i = 1; i < 256; i++)
        CHECK(vnic_endpoint_open(b.side[0].nic[0], &more, text), "endpoint %u: %s", i, text);
    CHECK(!vnic_endpoint_open(b.side[0].nic[0], &more, text), "257 queue pairs on efa");
    CHECK(strstr(text, "256 queue pairs, 256 are taken") && strstr(text, "needs 1"), "%s", text);
    close_bench();
    open_bench("connectx", "max_qp=5", 1);
    CHECK(!vnic_endpoint_open(b.side[0].nic[0], &more, text) && strstr(text, "needs 3"), "%s", text);
    close_bench();
}

static void test_receives(void) {
    static const struct {
        const char *knobs;
        uint32_t arrive, errors;
    } cases[] = {
        {"rnr=retry,rnr_retries=1000", 4, 0},    /* once receives are there again */
        {"rnr=fail", 2, 1},                      /* the queue stops */
        {"rnr=none", 2, 1},                      /* the same: there is no retry */
        {"rnr=retry,rnr_retries=2,srq=0", 2, 1}, /* they run out */
        {"imm_consumes_rq=0,rnr=fail", 4, 0},    /* none is needed */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_bench_with("connectx", cases[i].knobs, 5, false, NULL, 0, 512, 0);
        vnic_replenish(endpoint(1), 0, 2);
        for (uint64_t k = 0; k < 4; k++) {
            vnic_work w = make_write(0, 1, 0, 1024 + 8 * k, 8);
            w.kind = VNIC_WRITE_IMM;
            post(0, 1, w, k);
        }
        for (uint32_t n = 0; n < 200 && step(); n++) {
        }
        if (i == 0) {
            CHECK(vnic_fabric_stats(b.fabric)->rnr > 0, "no receiver was ever not ready");
            vnic_replenish(endpoint(1), 0, 2);
        }
        settle();
        vnic_completion got[8];
        CHECK_EQ(vnic_poll(endpoint(1), got, 8), cases[i].arrive);
        uint32_t errors = 0;
        collect(0);
        for (uint32_t k = 0; k < b.n_done; k++) errors += b.done[k].status == VNIC_RNR_EXCEEDED;
        CHECK_EQ(errors, cases[i].errors);
        close_bench();
    }
}

static void test_atomics(void) {
    /* Beyond the responder's resources an add waits, or fails (pollara: 16 for the whole device). */
    for (uint32_t fails = 0; fails < 2; fails++) {
        open_bench("pollara", fails ? "drop_rate=0" : "drop_rate=0,responder_over=wait", 3);
        for (uint64_t k = 0; k < 32; k++) post(k % 2 ? 0 : 2, 1, make_add(1, 1024, 1), k);
        settle();
        collect(0);
        uint32_t failed = 0;
        for (uint32_t i = 0; i < b.n_done; i++) failed += b.done[i].status == VNIC_REMOTE_INVALID;
        CHECK((failed > 0) == fails, "%u adds failed", failed);
        if (!fails) CHECK_EQ(b.side[1].memory[128], 32);
        close_bench();
    }
    open_bench("connectx", "", 3); /* 16 of each queue: they wait for each other, none is lost */
    for (uint64_t k = 0; k < 64; k++) post(0, 1, make_add(1, 1024, k), k);
    settle();
    CHECK_EQ(b.side[1].memory[128], 63 * 64 / 2);
    close_bench();
    /* Two NICs behind one device: adds to one word get lost, unless they come through one. */
    uint32_t lost = 0;
    FOR_SEEDS(seed) {
        open_bench("cxi", "nics=2", seed);
        for (uint64_t k = 0; k < 8; k++)
            CHECK_EQ(try_post(b.side[k < 4 ? 0 : 2].endpoint[k % 2], 1, make_add(1, 1024, 1), k), VNIC_TAKEN);
        for (uint64_t k = 0; k < 8; k++)
            CHECK_EQ(try_post(b.side[k < 4 ? 0 : 2].endpoint[0], 1, make_add(1, 2048, 1), k), VNIC_TAKEN);
        settle();
        lost += b.side[1].memory[128] != 8;
        CHECK_EQ(b.side[1].memory[256], 8);
        close_bench();
    }
    CHECK(lost > 0, "no add of two NICs was lost");
}

/* ------------------------------------------------------------------------------------------------- knobs and profiles
 */

static void test_knobs(void) {
    char text[4096];
    static const struct {
        const char *knobs, *says;
    } wrong[] = {{"plcae_order=none", "place_order"},
                 {"place_order=never", "none|blocks|per_msg|strict"},
                 {"max_wr=x", "a number (count)"},
                 {"max_wr=-1", "a number"},
                 {"max_wr", "key=value"},
                 {"max_wr=0", "max_wr: 1"},
                 {"dup_write=101", "0 to 100"},
                 {"has_read=2", "0 and 1"},
                 {"key_bits=33", "32 and 64"},
                 {"order_write_write=1,place_order=none", "needs place_order=strict"},
                 {"completion_order=any", "and completion_order=in_order"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        vnic_knobs k = vnic_profile_named("connectx")->knobs;
        CHECK(vnic_knobs_parse(&k, wrong[i].knobs, NULL, NULL, text), "'%s' was taken", wrong[i].knobs);
        CHECK(strstr(text, wrong[i].says), "'%s': %s", wrong[i].knobs, text);
    }
    for (uint32_t i = 0; vnic_profile_at(i); i++) {
        const vnic_profile *p = vnic_profile_at(i);
        CHECK(!vnic_knobs_check(&p->knobs, text), "%s: %s", p->name, text);
        CHECK(vnic_profile_named(p->name) == p, "%s", p->name);
        /* As text, and back. */
        const uint32_t needed = vnic_knobs_text(&p->knobs, NULL, 0);
        char *all = malloc(needed);
        CHECK(all && vnic_knobs_text(&p->knobs, all, needed) == needed && strlen(all) == needed - 1, "%s", p->name);
        vnic_knobs back = {0};
        /* Every knob in turn, in any order of dependence: parse twice. */
        for (uint32_t pass = 0; pass < 2; pass++) {
            char *rest = NULL, *copy = malloc(needed);
            CHECK(copy, "no memory");
            memcpy(copy, all, needed);
            for (char *line = strtok_r(copy, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
                line[strcspn(line, " ")] = 0;
                vnic_knobs_parse(&back, line, NULL, NULL, text);
            }
            free(copy);
        }
        CHECK(!memcmp(&back, &p->knobs, sizeof back), "%s does not survive being written and read", p->name);
        free(all);
        for (vnic_status s = VNIC_OK; s < VNIC_STATUSES; s++) {
            const int32_t code = vnic_vendor_code((vnic_vendor)p->knobs.vendor, s);
            CHECK((code == 0) == (s == VNIC_OK) && vnic_vendor_text((vnic_vendor)p->knobs.vendor, code)[0], "%s",
                  p->name);
        }
    }
    CHECK(!vnic_profile_named("connectx-9") && !vnic_profile_named(NULL), "a profile that is not there");
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    test_knobs();
    test_place_order();
    test_message_order();
    test_immediates();
    test_completion_order();
    test_completion_level();
    test_flushes();
    test_duplicates();
    test_overwrites();
    test_queues_of_completions();
    test_limits();
    test_receives();
    test_atomics();
    return test_end();
}
