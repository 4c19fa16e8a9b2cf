/* SPDX-License-Identifier: Apache-2.0
 *
 * test_virtual_nic.c: every knob of a virtual NIC shows the freedom that it stands for, and keeps what it rules out;
 * every fault strikes; every limit is met.
 *
 * Most tests run one small program over many seeds and look at the target's memory after each event. Where a knob
 * allows something, some seed must show it; where it does not, none may.
 */
#include <stdlib.h>

#include "testing.h"
#include "virtual_nic/virtual_nic.h"

#define RANKS 3u
#define BYTES 4096u
#define NONE UINT64_MAX

struct side {
    vnic_nic *nic[2];
    vnic_endpoint *endpoint[2];
    vnic_region *region;
    _Alignas(128) uint64_t memory[BYTES / 8]; /* blocks of NICs lie at multiples of 128 */
};

static struct bench {
    vnic_fabric *fabric;
    vnic_knobs knobs;
    struct side side[RANKS];
    vnic_completion done[1024]; /* polled, by endpoint 0 of rank 0 */
    uint32_t n_done;
} b;

static uint8_t *bytes_of(uint32_t rank) {
    return (uint8_t *)b.side[rank].memory;
}

static vnic_endpoint *endpoint(uint32_t rank) {
    return b.side[rank].endpoint[0];
}

static void open_bench_with(const char *profile, const char *knobs, uint64_t seed, bool by_choice,
                            const uint32_t *choices, uint32_t n_choices, uint32_t cq_entries, uint32_t receives) {
    char text[256] = "";
    memset(&b, 0, sizeof b);
    const vnic_profile *p = vnic_profile_named(profile);
    CHECK(p, "no profile %s", profile);
    b.knobs = p->knobs;
    CHECK(!vnic_knobs_parse(&b.knobs, knobs, NULL, NULL, text), "%s", text);
    const vnic_fabric_config config = {.seed = seed,
                                       .ranks = RANKS,
                                       .choice_schedule = by_choice,
                                       .choices = choices,
                                       .n_choices = n_choices,
                                       .first_later = by_choice,
                                       .trace_lines = 32};
    b.fabric = vnic_fabric_open(&config);
    CHECK(b.fabric, "no memory");
    const uint32_t nics = b.knobs.nics > 1 ? 2 : 1;
    for (uint32_t r = 0; r < RANKS; r++) {
        struct side *s = &b.side[r];
        s->region = vnic_region_add(b.fabric, &b.knobs, r, 0, s->memory, BYTES);
        for (uint32_t i = 0; i < nics; i++) {
            s->nic[i] = vnic_nic_open(b.fabric, &b.knobs);
            const vnic_endpoint_config e = {
                .rank = r, .self = r, .peers = RANKS, .cq_entries = cq_entries, .receives_peer = receives};
            s->endpoint[i] = vnic_endpoint_open(s->nic[i], &e, text);
            CHECK(s->endpoint[i], "%s", text);
        }
    }
    for (uint32_t i = 0; i < nics; i++)
        for (uint32_t r = 0; r < RANKS; r++)
            for (uint32_t peer = 0; peer < RANKS; peer++)
                vnic_connect(b.side[r].endpoint[i], peer, vnic_endpoint_id(b.side[peer].endpoint[i]));
}

static void open_bench(const char *profile, const char *knobs, uint64_t seed) {
    open_bench_with(profile, knobs, seed, false, NULL, 0, 512, 64);
}

static void close_bench(void) {
    vnic_fabric_close(b.fabric);
}

static uint64_t address(uint32_t rank, uint64_t offset) {
    return (b.side[rank].region->by_address ? (uintptr_t)b.side[rank].memory : 0) + offset;
}

static vnic_work make_write(uint32_t from, uint32_t to, uint64_t local, uint64_t remote, uint32_t length) {
    return (vnic_work){.kind = VNIC_WRITE,
                       .flags = VNIC_SIGNALLED,
                       .sges = 1,
                       .sge = {{b.side[from].region, local, length}},
                       .remote_address = address(to, remote),
                       .remote_key = b.side[to].region->key};
}

static vnic_work make_add(uint32_t to, uint64_t remote, uint64_t value) {
    return (vnic_work){.kind = VNIC_ADD,
                       .flags = VNIC_SIGNALLED,
                       .remote_address = address(to, remote),
                       .remote_key = b.side[to].region->key,
                       .value = value};
}

static vnic_refusal try_post(vnic_endpoint *e, uint32_t peer, vnic_work w, uint64_t cookie) {
    char text[256];
    uint32_t taken;
    w.cookie = cookie;
    const vnic_refusal refusal = vnic_post(e, peer, &w, 1, false, &taken, text);
    CHECK_EQ(taken, refusal == VNIC_TAKEN);
    return refusal;
}

static void post(uint32_t from, uint32_t to, vnic_work w, uint64_t cookie) {
    CHECK_EQ(try_post(endpoint(from), to, w, cookie), VNIC_TAKEN);
}

/* One event, at its time. False: nothing is left to come. */
static bool step(void) {
    if (!vnic_due(b.fabric)) {
        const uint64_t next = vnic_next(b.fabric);
        if (next == UINT64_MAX) return false;
        vnic_set_now(b.fabric, next);
    }
    vnic_run_due(b.fabric);
    return true;
}

static uint32_t collect(uint32_t rank) {
    const uint32_t n = vnic_poll(endpoint(rank), b.done + b.n_done, 1024 - b.n_done);
    b.n_done += n;
    return n;
}

static void settle(void) {
    while (step()) {
    }
}

/* Position of the completion with that cookie; NONE: it did not come. */
static uint64_t came(uint64_t cookie) {
    for (uint32_t i = 0; i < b.n_done; i++)
        if (!b.done[i].immediate && b.done[i].cookie == cookie) return i;
    return NONE;
}

#define SEEDS 120u
#define FOR_SEEDS(seed) for (uint64_t seed = test_seed_value * 1000, end_ = seed + SEEDS; seed < end_; seed++)

static void fill(uint32_t rank, uint32_t from, uint32_t n, uint8_t value) {
    memset(bytes_of(rank) + from, value, n);
}

static uint32_t count(uint32_t rank, uint32_t from, uint32_t n, uint8_t value) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++) found += bytes_of(rank)[from + i] == value;
    return found;
}

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

/* ------------------------------------------------------------------------------------------------------------- choices
 */

/* Two writes of two words, a reader that looks after every event: with schedule=choice all schedules are enumerated,
 * and a script brings each of them back. */
static uint32_t outcomes(const char *profile, const char *knobs, uint64_t *schedules) {
    uint32_t script[256] = {0}, n_script = 0, seen = 0;
    for (*schedules = 0;; ++*schedules) {
        open_bench_with(profile, knobs, 1, true, script, n_script, 64, 8);
        bytes_of(0)[0] = 1;
        post(0, 1, make_write(0, 1, 0, 1024, 8), 1);
        post(0, 1, make_write(0, 1, 0, 2048, 8), 2);
        uint32_t outcome = 0; /* bit i: state i was seen; a state is {first there} | {second there} << 1 */
        do outcome |= 1u << ((b.side[1].memory[128] != 0) | (b.side[1].memory[256] != 0) << 1);
        while (step());
        seen |= outcome;
        CHECK(outcome & 8, "both should be there at the end");
        uint32_t n;
        const vnic_choice *made = vnic_choices(b.fabric, &n);
        CHECK(n < 256, "%u choices", n);
        /* The next script: count up in the last choice that has an alternative left. */
        while (n && made[n - 1].taken + 1 == made[n - 1].alternatives) n--;
        for (uint32_t i = 0; i < n; i++) script[i] = made[i].taken;
        n_script = n;
        const bool last = !n;
        if (n) script[n - 1]++;
        close_bench();
        if (last) break;
        CHECK(*schedules < 200000, "too many schedules");
    }
    ++*schedules;
    return seen;
}

static void test_choices(void) {
    uint64_t schedules;
    /* Nothing, first, both. */
    CHECK_EQ(outcomes("connectx", "visible_delay=0,pieces=1", &schedules), 1 | 2 | 8);
    printf("connectx: %llu schedules\n", (unsigned long long)schedules);
    /* And second before first. */
    CHECK_EQ(outcomes("strawman-min", "visible_delay=0,pieces=1", &schedules), 1 | 2 | 4 | 8);
    printf("strawman-min: %llu schedules\n", (unsigned long long)schedules);
    CHECK_EQ(outcomes("efa", "pieces=1", &schedules), 1 | 2 | 4 | 8);
    printf("efa: %llu schedules\n", (unsigned long long)schedules);

    /* A random run, replayed from its seed, and from its choices under another seed. */
    FOR_SEEDS(seed) {
        uint64_t hash[3];
        uint32_t taken[2048], n = 0;
        for (uint32_t k = 0; k < 3; k++) {
            open_bench_with("efa3", "", k == 2 ? seed + 77 : seed, false, taken, k == 2 ? n : 0, 64, 8);
            for (uint64_t i = 0; i < 8; i++) post(0, 1, make_write(0, 1, 0, 1024 + 64 * i, 64), i);
            settle();
            hash[k] = vnic_hash(b.fabric);
            uint32_t made;
            const vnic_choice *choices = vnic_choices(b.fabric, &made);
            CHECK(made < 2048, "%u choices", made);
            if (k == 1)
                for (n = 0; n < made; n++) taken[n] = choices[n].taken;
            close_bench();
        }
        CHECK_EQ(hash[0], hash[1]);
        CHECK_EQ(hash[0], hash[2]);
    }
}

/* --------------------------------------------------------------------------------------------------------- anything */

/*
 * Anything in any order, over knobs drawn at random: right and wrong requests, flushes, disconnects in the middle of
 * traffic, regions and endpoints that go away, deaths. Nothing is written outside of what is registered, no request
 * completes twice, and one to a peer that stays completes once; the sanitizers say the rest.
 */
static void storm(uint64_t seed, bool gentle) {
    static const char *const turns[] = {
        "",
        "place_order=per_msg,order_write_write=0",
        "visible_delay=0",
        "completion_level=delivery",
        "atomics=coherent,responder_atomics=2,responder_over=wait",
        "fence_kind=delivered",
        "drop_rate=20",
        "dup_write=50",
        "max_wr=8",
        "imm_visible=1",
        "rnr=fail",
        "late_overwrite=1",
        "nics=2,atomics=nic",
        "inline_percent=50,max_inline=64",
        "flush_by=provider",
        "srq=0",
        "needs_target_ah=1",
    };
    test_rng rng = test_rng_at(seed);
    uint32_t profiles = 0;
    while (vnic_profile_at(profiles)) profiles++;
    const vnic_profile *p = vnic_profile_at((uint32_t)test_below(&rng, profiles));
    char knobs[256] = "", text[256];
    for (uint32_t i = 0; i < 3; i++) {
        char more[256];
        const char *turn = turns[test_below(&rng, sizeof turns / sizeof *turns)];
        snprintf(more, sizeof more, "%s%s%s", knobs, knobs[0] && turn[0] ? "," : "", turn);
        vnic_knobs k = p->knobs;
        if (!vnic_knobs_parse(&k, more, NULL, NULL, text)) memcpy(knobs, more, sizeof knobs);
    }
    const bool by_choice = !test_below(&rng, 4);
    open_bench_with(p->name, knobs, seed, by_choice, NULL, 0, 4096, 512);
    /* The last 64 bytes are not registered any more. */
    for (uint32_t r = 0; r < RANKS; r++) {
        memset(bytes_of(r) + BYTES - 64, 0xab, 64);
        b.side[r].region->bytes = BYTES - 64;
    }
    static uint8_t completed[4096];
    memset(completed, 0, sizeof completed);
    uint64_t posted[4096] = {0}; /* 1: signalled, to a peer that may not go away */
    uint64_t cookie = 0;
    bool dead[RANKS] = {false}, removed[RANKS] = {false};
    for (uint32_t n = 0; n < 400; n++) {
        const uint32_t from = (uint32_t)test_below(&rng, RANKS), to = (uint32_t)test_below(&rng, RANKS);
        vnic_endpoint *e = b.side[from].endpoint[b.side[from].endpoint[1] ? test_below(&rng, 2) : 0];
        const uint32_t what = (uint32_t)test_below(&rng, 100);
        if (!e) continue;
        if (what < 50) {
            const bool wrong = !gentle && !test_below(&rng, 16);
            const uint32_t length = (uint32_t)test_below(&rng, 300);
            vnic_work w = make_write(from, to, test_below(&rng, BYTES - 64 - 300),
                                     test_below(&rng, BYTES - 64 - 300) + (wrong ? BYTES : 0), length);
            const uint32_t kind = (uint32_t)test_below(&rng, 8);
            if (kind == 0 && b.knobs.atomics) w = make_add(to, 8 * test_below(&rng, (BYTES - 64) / 8), 1);
            if (kind == 1 && b.knobs.imm_bits) w.kind = VNIC_WRITE_IMM;
            if (kind == 2 && b.knobs.has_read) w.kind = VNIC_READ;
            if (b.knobs.unsignalled_ok && b.knobs.completion_order == VNIC_COMPLETES_IN_ORDER && test_below(&rng, 2))
                w.flags = 0;
            if (b.knobs.fence_kind && !test_below(&rng, 8)) w.flags |= VNIC_FENCE;
            if (b.knobs.visible_on_request && !test_below(&rng, 4)) w.flags |= VNIC_VISIBLE;
            w.cookie = cookie;
            uint32_t taken = 0;
            vnic_post(e, to, &w, 1, !test_below(&rng, 8), &taken, text);
            if (taken) posted[cookie++] = w.flags & VNIC_SIGNALLED;
        } else if (what < 80) {
            for (uint64_t k = test_below(&rng, 12); k && step(); k--) {
            }
        } else if (what < 90) {
            vnic_completion done[64];
            vnic_ring(e);
            const uint32_t got = vnic_poll(e, done, 64);
            for (uint32_t i = 0; i < got; i++) {
                if (done[i].immediate) {
                    if (done[i].consumed_receive) vnic_replenish(e, done[i].peer, 1);
                    continue;
                }
                CHECK(done[i].cookie < cookie && !completed[done[i].cookie]++, "seed %llu: %llu completed again",
                      (unsigned long long)seed, (unsigned long long)done[i].cookie);
            }
        } else if (what < 93) {
            vnic_flush_local(e, b.side[from].region);
        } else if (!gentle && what < 96) {
            while (!vnic_disconnect(e, to) && step()) {
            }
            if (test_below(&rng, 2)) vnic_connect(e, to, vnic_endpoint_id(endpoint(to) ? endpoint(to) : e));
        } else if (!gentle && what == 96) {
            vnic_region_remove(b.fabric, b.side[from].region);
            removed[from] = true;
            memset(bytes_of(from), 0x5c, BYTES); /* and so it stays */
        } else if (!gentle && what == 97 && !dead[from]) {
            dead[from] = true;
            vnic_rank_dies(b.fabric, from);
        } else if (!gentle && what == 98) {
            vnic_queue_error(b.fabric, from, to);
        } else if (!gentle && what == 99 && !test_below(&rng, 4)) {
            const uint32_t i = b.side[from].endpoint[1] == e;
            vnic_endpoint_close(e);
            b.side[from].endpoint[i] = NULL;
        }
    }
    for (uint32_t round = 0; round < 200; round++) {
        for (uint32_t r = 0; r < RANKS; r++)
            for (uint32_t i = 0; i < 2; i++)
                if (b.side[r].endpoint[i]) vnic_ring(b.side[r].endpoint[i]);
        settle();
    }
    for (uint32_t r = 0; r < RANKS; r++) {
        for (uint32_t i = 0; i < 2; i++) {
            vnic_completion done[64];
            uint32_t got;
            while (b.side[r].endpoint[i] && (got = vnic_poll(b.side[r].endpoint[i], done, 64)))
                for (uint32_t k = 0; k < got; k++)
                    if (!done[k].immediate)
                        CHECK(!completed[done[k].cookie]++, "seed %llu: %llu completed again", (unsigned long long)seed,
                              (unsigned long long)done[k].cookie);
        }
        if (removed[r])
            CHECK_EQ(count(r, 0, BYTES, 0x5c), BYTES);
        else
            CHECK_EQ(count(r, BYTES - 64, 64, 0xab), 64);
    }
    for (uint64_t c = 0; gentle && c < cookie; c++)
        CHECK(!posted[c] || completed[c], "seed %llu, %s %s: request %llu of %llu never completed",
              (unsigned long long)seed, p->name, knobs, (unsigned long long)c, (unsigned long long)cookie);
    close_bench();
}

static void test_anything(void) {
    const uint64_t storms = test_scaled(2000) < 100 ? 100 : test_scaled(2000);
    for (uint64_t i = 0; i < storms; i++) storm(test_seed_value * 100000 + i, i % 2);
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
    test_bounds();
    test_error_scope();
    test_connections();
    test_fence();
    test_inflight();
    test_doorbells();
    test_deaths();
    test_faults();
    test_choices();
    test_anything();
    return test_end();
}
