/* SPDX-License-Identifier: Apache-2.0
 *
 * test_exhaustive.c: all schedules of small programs; and that what is left out of them shows nothing else.
 */
#include <stdbool.h>

#include "explorer/explore.h"

#include "testing.h"

#define SIM UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_sim.so"
#define SLOW "schedule=choice,choose_run=1"
#define PROMPT "schedule=choice,choose_run=0"

static runner *r;
static program p;

static const exhaust_options REDUCED = {.most_runs = 20000, .reduce = true, .through_claims = true};
static const exhaust_options UNREDUCED = {.most_runs = 100000, .through_claims = true};

static void explore(const char *text, const char *profile, const char *knobs, const exhaust_options *options,
                    exhausted *out) {
    char error[256] = "";
    CHECK(!program_find(&p, text, error), "%s: %s", text, error);
    const run_options o = {.backend = SIM, .profile = profile, .knobs = knobs, .seed = 1};
    CHECK(!exhaust(r, &p, &o, options, out), "no memory");
}

static void is_complete(const exhausted *e, const char *text, const char *profile) {
    CHECK(e->bad.outcome == RUN_ALLOWED, "%s on %s: %s %s %s", text, profile, run_outcome_name(e->bad.outcome),
          e->bad.clause, e->bad.text);
    CHECK(e->complete, "%s on %s is not complete after %llu runs", text, profile, (unsigned long long)e->runs);
}

/* Whoever leaves nothing out sees what the reduced search sees, and nothing else. */
static void test_nothing_is_lost(void) {
    static const char signal[] = "ranks 2\nr0: signal 0 ->1 s0\nr1: see s0";
    static const char put_signal[] = "ranks 2\nr0: store a 16; put_signal 0 ->1 a 16 s0\nr1: see s0; read a 16";
    static const char self[] = "ranks 1\nr0: store x 16; put 0 ->0 a 16 from x; read a 16; quiet; read a 16";
    static const char self_signal[] = "ranks 1\nr0: signal 0 ->0 s0; see s0";
    /* Waits for what was posted: of a ticket, of its source, of one channel and of all. */
    static const char ticket[] = "ranks 1\nr0: store x 16; put 0 ->0 a 16 from x as d; free d; store x 16; complete d; "
                                 "read a 16; see s0";
    static const char channels[] = "ranks 1; channels 2; proxies 2\nr0: signal 0 ->0 s0; signal 1 ->0 s1; quiet 1; see "
                                   "s0; see s1";
    static const char third[] =
        "ranks 2\nr0: store a 16; put 0 ->1 a 16; quiet; signal 0 ->0 s0\nr1: read a 16; read a 16";
    static const char flag[] = "ranks 1\nwrong PUT-5 on efa\nr0: store x 16; store y 16; put 0 ->0 a 16 from x as one; "
                               "put 0 ->0 f 16 from y as two; until f two; claim a one";
    static const char twice[] =
        "ranks 1\nwrong PUT-7 on efa\nr0: store x 16; store y 16; put 0 ->0 a 16 from x as one; "
        "put 0 ->0 a 16 from y as two; quiet; claim a two";
    static const struct {
        const char *program, *profile, *knobs;
        uint32_t duplicates;
        uint64_t outcomes; /* at least, so that there is something to lose */
    } small[] = {
        {signal, "connectx", PROMPT, 0, 1},
        {signal, "efa", PROMPT, 0, 1},
        {signal, "pollara", PROMPT, 0, 1},
        {signal, "strawman-min", PROMPT, 0, 1},
        {put_signal, "connectx", PROMPT, 0, 1},
        {put_signal, "strawman-min", PROMPT ",pieces=1", 0, 1},
        {self, "connectx", SLOW, 0, 2},
        {self, "cxi", SLOW ",pieces=1", 0, 2},
        {self, "strawman-min", SLOW ",pieces=1", 0, 2},
        {self_signal, "connectx", SLOW, 0, 2},
        {self_signal, "cxi", SLOW, 0, 2},
        {ticket, "connectx", SLOW, 0, 1},
        {ticket, "efa3", PROMPT ",pieces=1,visible_delay=0", 1, 1},
        {ticket, "cxi", SLOW ",pieces=1", 0, 1},
        {channels, "connectx", PROMPT, 0, 1},
        {channels, "cxi", PROMPT, 0, 1},
        {third, "connectx", PROMPT, 0, 1},
        {third, "efa", PROMPT ",visible_delay=0", 0, 1},
        {third, "cxi", PROMPT ",pieces=1", 0, 1},
        {flag, "connectx", PROMPT, 0, 1},
        {flag, "efa", PROMPT ",visible_delay=0", 0, 2},
        {flag, "strawman-min", PROMPT ",pieces=1", 0, 2},
        {twice, "connectx", PROMPT, 0, 1},
        {twice, "efa", PROMPT ",visible_delay=0", 0, 2},
        {twice, "efa3", PROMPT ",pieces=1,visible_delay=0", 1, 2},
        {twice, "cxi", PROMPT ",pieces=1", 0, 2},
    };
    static exhausted all, some;
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        exhaust_options o = UNREDUCED, reduced = REDUCED;
        o.duplicates = reduced.duplicates = small[i].duplicates;
        explore(small[i].program, small[i].profile, small[i].knobs, &o, &all);
        is_complete(&all, small[i].program, small[i].profile);
        explore(small[i].program, small[i].profile, small[i].knobs, &reduced, &some);
        is_complete(&some, small[i].program, small[i].profile);
        printf("%s %zu: %llu runs, %llu without reduction, %llu outcomes\n", small[i].profile, i,
               (unsigned long long)some.runs, (unsigned long long)all.runs, (unsigned long long)all.seen.used);
        CHECK(all.seen.used >= small[i].outcomes, "%zu on %s: %llu outcomes", i, small[i].profile,
              (unsigned long long)all.seen.used);
        CHECK_EQ(some.seen.used, all.seen.used);
        CHECK_EQ(some.claims != 0, all.claims != 0);
        for (uint64_t k = 0; k < all.seen.size; k++)
            CHECK(!all.seen.table[k] || set_has(&some.seen, all.seen.table[k]), "%zu on %s: an outcome is lost", i,
                  small[i].profile);
        free(all.seen.table);
        free(some.seen.table);
    }
}

/* Where nobody can look at everything: what any schedule shows, drawn from seeds, the reduced search has seen. */
static void test_what_is_drawn_was_seen(void) {
    static const char *const programs[] = {
        "mp", "put-signal",
        "ranks 2\nr0: store a 16; put_signal 0 ->1 a 16 s0\nr1: see s0; read a 16; see s0; read a 16",
        "ranks 2\nr0: store a 16; put 0 ->1 a 16; quiet; signal 0 ->1 s0\nr1: read a 16; see s0; read a 16"};
    static const char *const profiles[] = {"connectx", "thor2", "cxi", "strawman-min"};
    static exhausted e;
    const uint64_t seeds = test_scaled(200);
    for (size_t k = 0; k < sizeof profiles / sizeof *profiles; k++)
        for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
            explore(programs[i], profiles[k], SLOW, &REDUCED, &e);
            is_complete(&e, programs[i], profiles[k]);
            for (uint64_t seed = 1; seed <= seeds; seed++) {
                const run_options o = {
                    .backend = SIM, .profile = profiles[k], .knobs = SLOW, .seed = test_seed_value * 1000 + seed};
                run_result result;
                run_program(r, &p, &o, &result);
                CHECK(set_has(&e.seen, result.seen_hash), "%s on %s, seed %llu: not among %llu outcomes\n%s",
                      programs[i], profiles[k], (unsigned long long)o.seed, (unsigned long long)e.seen.used,
                      run_history(r));
            }
            free(e.seen.table);
        }
}

/* Every small program that is wrong is found wrong, on every profile that it names. */
static void test_wrong_programs(void) {
    const char *name, *source;
    static exhausted e;
    for (uint32_t i = 0; (source = builtin_text(i, &name, NULL)); i++) {
        char error[256] = "";
        CHECK(!program_find(&p, name, error), "%s", error);
        if (!p.wrong[0] || program_operations(&p) > 4) continue;
        const char *profile;
        for (uint32_t k = 0; (profile = runner_sim(r)->profile(k, NULL)); k++) {
            if (!program_breaks_on(&p, profile)) continue;
            const exhaust_options o = {.most_runs = test_scaled(20000), .duplicates = 1, .reduce = true};
            explore(name, profile, SLOW, &o, &e);
            const bool enough = o.most_runs == 20000; /* not under sanitizers */
            CHECK(e.bad.outcome == RUN_CLAIM || (!enough && e.bad.outcome == RUN_ALLOWED),
                  "%s on %s: %s after %llu runs", name, profile, run_outcome_name(e.bad.outcome),
                  (unsigned long long)e.runs);
            printf("%s on %s: run %llu\n", name, profile, (unsigned long long)e.runs);
            free(e.seen.table);
        }
    }
}

/* A finding is a script that shows it again. */
static void test_a_finding_is_a_script(void) {
    static exhausted e;
    const exhaust_options o = {.most_runs = 20000, .reduce = true};
    explore("wrong-flag", "efa", SLOW, &o, &e);
    CHECK_EQ(e.bad.outcome, RUN_CLAIM);
    free(e.seen.table);
    const run_options again = {.backend = SIM,
                               .profile = "efa",
                               .knobs = SLOW,
                               .seed = 99,
                               .choices = e.script,
                               .n_choices = e.n_script,
                               .first_later = true};
    run_result result;
    run_program(r, &p, &again, &result);
    CHECK_EQ(result.outcome, RUN_CLAIM);
    CHECK_EQ(result.seen_hash, e.bad.seen_hash);
}

/* Doorbells that are lost, bytes that land twice: as many as the bound says. */
static void test_bounds(void) {
    static exhausted none, one;
    exhaust_options o = {.most_runs = 20000, .reduce = true};
    static const char signal[] = "ranks 2\nr0: signal 0 ->1 s0\nr1: wait s0 1";
    explore(signal, "thor2", SLOW, &o, &none);
    is_complete(&none, signal, "thor2");
    o.lost_doorbells = 1;
    explore(signal, "thor2", SLOW, &o, &one);
    is_complete(&one, signal, "thor2");
    CHECK(one.runs > none.runs, "%llu and %llu runs", (unsigned long long)one.runs, (unsigned long long)none.runs);
    CHECK_EQ(one.seen.used, none.seen.used);
    free(none.seen.table);
    free(one.seen.table);
    /* Too few runs for all: what lies near the first one. */
    o = (exhaust_options){.most_runs = 400, .reduce = true};
    explore("mp-both-ways", "efa", SLOW, &o, &one);
    CHECK(!one.complete && one.runs <= 400, "%llu runs, %u reversed", (unsigned long long)one.runs, one.turned);
    free(one.seen.table);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    char text[256] = "";
    r = runner_new(SIM, text);
    CHECK(r, "%s", text);
    test_nothing_is_lost();
    test_what_is_drawn_was_seen();
    test_a_finding_is_a_script();
    test_bounds();
    test_wrong_programs();
    runner_free(r);
    return test_end();
}
