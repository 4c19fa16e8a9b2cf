/* SPDX-License-Identifier: Apache-2.0
 *
 * test_virtual_nic_anything.c: all schedules of small programs on virtual NICs, and storms of anything at all.
 */
#include "nic_bench.h"

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
    test_choices();
    test_anything();
    return test_end();
}
