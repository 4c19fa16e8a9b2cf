/* SPDX-License-Identifier: Apache-2.0
 *
 * test_explorer.c: litmus programs on real communicators over virtual NICs. A fixed part of what `uccl-ep explore` does
 * with as many seeds as one likes, and that it would notice if something were wrong.
 */
#include <stdbool.h>

#include "explorer/explore.h"

#include "testing.h"

#define SIM UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_sim.so"

static runner *r;
static drawn what;

static const char *profile_at(uint32_t i) {
    return runner_sim(r)->profile(i, NULL);
}

static run_options options_for(const char *profile, uint64_t seed) {
    return (run_options){.backend = SIM,
                         .profile = profile,
                         .knobs = what.knobs,
                         .faults = what.faults[0] ? what.faults : NULL,
                         .gentle = what.gentle,
                         .calls_fail = what.calls_fail,
                         .strategy = what.strategy,
                         .seed = seed};
}

static run_result run_seed(const char *profile, uint64_t seed, const program *only, uint32_t how) {
    char error[256] = "";
    CHECK(!draw(runner_sim(r), profile, seed, only, how, &what, error), "%s", error);
    run_options o = options_for(profile, seed);
    run_result result;
    run_drawn(r, &what, &o, &result);
    return result;
}

static void must_parse(const char *text, program *p) {
    char error[256] = "";
    CHECK(!program_find(p, text, error), "%s: %s", text, error);
}

/* ----------------------------------------------------------------------------------------------------------- programs
 */

static void test_programs_read_as_they_print(void) {
    static program p, again;
    static char text[PROGRAM_TEXT], second[PROGRAM_TEXT];
    const char *name, *source;
    uint32_t n = 0;
    for (; (source = builtin_text(n, &name, NULL)); n++) {
        must_parse(name, &p);
        program_print(&p, text, sizeof text);
        must_parse(text, &again);
        program_print(&again, second, sizeof second);
        CHECK(!strcmp(text, second), "%s: %s is read as %s", name, text, second);
        CHECK(program_operations(&p) > 0, "%s posts something", name);
    }
    CHECK(n > 25, "%u programs", n);
    for (uint64_t seed = 0; seed < 200; seed++) {
        program_generate(&p, seed);
        program_print(&p, text, sizeof text);
        must_parse(text, &again);
        program_print(&again, second, sizeof second);
        CHECK(!strcmp(text, second), "seed %llu: %s is read as %s", (unsigned long long)seed, text, second);
    }
}

static void test_what_is_no_program_is_refused(void) {
    static const char *const texts[] = {
        "ranks 9",
        "ranks 2; r0: jump",
        "ranks 2; r2: quiet",
        "r0: put 1 ->1 a 16",
        "r0: put 0 ->1 a 17",
        "r0: put 0 ->1 a 24",
        "r0: put 0 ->5 a 16",
        "r0: put 0 -> 1",
        "r0: signal 0 ->1 s99",
        "r0: complete nothing",
        "r0: put 0 ->1 a 16 as x; put 0 ->1 a 16 as x",
        "r0: wait s0",
        "r0: quiet 0 0",
        "channels 1; proxies 2; r0: quiet",
        "granularity 5; r0: quiet",
        "r0: store a 999999999",
        "!",
    };
    static program p;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char error[256] = "";
        CHECK(program_parse(&p, texts[i], error), "'%s' is taken for a program", texts[i]);
        CHECK(error[0], "'%s' is refused without a reason", texts[i]);
    }
}

/* ---------------------------------------------------------------------------------------------------------------- runs
 */

static void test_builtins(void) {
    static program p;
    const char *name;
    for (uint32_t k = 0; profile_at(k); k++)
        for (uint32_t i = 0; builtin_text(i, &name, NULL); i++) {
            must_parse(name, &p);
            if (p.wrong[0]) continue;
            const uint64_t seeds = test_scaled(6);
            for (uint64_t seed = 1; seed <= seeds; seed++) {
                const run_result result = run_seed(profile_at(k), test_seed_value * 1000 + seed, &p, 0);
                CHECK(result.outcome == RUN_ALLOWED, "%s on %s, seed %llu: %s %s %s\n%s", name, profile_at(k),
                      (unsigned long long)(test_seed_value * 1000 + seed), run_outcome_name(result.outcome),
                      result.clause, result.text, run_history(r));
            }
        }
}

static void test_random_programs(bool with_faults) {
    const uint64_t seeds = test_scaled(with_faults ? 100 : 200);
    uint64_t near_wrap = 0, operations = 0, resets = 0;
    for (uint32_t k = 0; profile_at(k); k++)
        for (uint64_t seed = 1; seed <= seeds; seed++) {
            const run_result result =
                run_seed(profile_at(k), test_seed_value * 1000000 + seed, NULL, with_faults ? DRAW_FAULTS : 0);
            CHECK(result.outcome == RUN_ALLOWED, "uccl-ep explore --profile %s --seed %llu%s: %s %s %s", profile_at(k),
                  (unsigned long long)(test_seed_value * 1000000 + seed), with_faults ? " --faults" : "",
                  run_outcome_name(result.outcome), result.clause, result.text);
            resets += result.resets;
            near_wrap += what.program.first_sequence != 0 || what.program.first_ticket != 0;
            operations += result.operations;
        }
    CHECK(near_wrap || seeds < 20, "no program began near a wrap");
    CHECK((resets > 0) == with_faults || seeds < 20, "%llu resets", (unsigned long long)resets);
    printf("%llu random programs a profile, %llu operations, %llu resets\n", (unsigned long long)seeds,
           (unsigned long long)operations, (unsigned long long)resets);
}

static void test_a_seed_is_a_run(void) {
    for (uint32_t k = 0; profile_at(k); k++) {
        const run_result first = run_seed(profile_at(k), 77, NULL, 0);
        const run_result other = run_seed(profile_at(k), 78, NULL, 0);
        const run_result again = run_seed(profile_at(k), 77, NULL, 0);
        CHECK_EQ(again.hash, first.hash);
        CHECK_EQ(again.memory_hash, first.memory_hash);
        CHECK_EQ(again.steps, first.steps);
        CHECK(other.hash != first.hash, "two seeds, one run");
    }
}

/* The choices of a run are a script that makes it again, whatever the seed. */
static void test_a_script_is_a_run(void) {
    static program p;
    must_parse("mp-two-channels", &p);
    run_options o = {.backend = SIM, .profile = "efa", .knobs = "schedule=choice,choose_run=1", .seed = 5};
    run_result first, again;
    run_program(r, &p, &o, &first);
    uint32_t n;
    const uccl_ep_sim_choice *made = run_choices(r, &n);
    CHECK(n > 10, "%u choices", n);
    uint32_t *script = malloc(n * sizeof *script);
    CHECK(script, "no memory");
    for (uint32_t i = 0; i < n; i++) script[i] = made[i].taken;
    o.choices = script;
    o.n_choices = n;
    o.seed = 6;
    run_program(r, &p, &o, &again);
    CHECK_EQ(again.hash, first.hash);
    free(script);
}

/* Faults of the core that drawn limits, faults and NICs of no vendor have brought to light, each with what showed it.
 */
static void test_what_was_found(void) {
    static const struct found {
        const char *what, *profile, *knobs, *faults, *program;
        bool gentle;
    } all[] = {
        {"a batch of which the NIC took a part is planned by the limits by which it was planned first", "connectx",
         NULL, "partial percent=50",
         "ranks 2; message 64; inflight_bytes 256\n"
         "r0: store x 64; put 0 ->1 a 64 from x; put 0 ->1 b 64 from x; put 0 ->1 c 64 from x; put 0 ->1 d 64 from x; "
         "put 0 ->1 e 64 from x; put 0 ->1 f 64 from x; put 0 ->1 g 64 from x; put 0 ->1 h 64 from x\n"
         "r1: quiet",
         true},
        {"what is not counted in bytes in flight has its room below the NIC's limit, too", "pollara",
         "retry_exc_inflight_bytes=512", NULL,
         "ranks 4\n"
         "r0: signal 0 ->0 s0; signal 0 ->1 s0; signal 0 ->2 s0; signal 0 ->3 s0; signal 0 ->0 s1; signal 0 ->1 s1; "
         "signal 0 ->2 s1; signal 0 ->3 s1; signal 0 ->0 s2; signal 0 ->1 s2; signal 0 ->2 s2; signal 0 ->3 s2; "
         "signal 0 ->0 s3; signal 0 ->1 s3; signal 0 ->2 s3; signal 0 ->3 s3; signal 0 ->0 s4; signal 0 ->1 s4; "
         "signal 0 ->2 s4; signal 0 ->3 s4; signal 0 ->0 s5; signal 0 ->1 s5; signal 0 ->2 s5; signal 0 ->3 s5; "
         "signal 0 ->0 s6; signal 0 ->1 s6; signal 0 ->2 s6; signal 0 ->3 s6; signal 0 ->0 s7; signal 0 ->1 s7; "
         "signal 0 ->2 s7; signal 0 ->3 s7; signal 0 ->0 s8; signal 0 ->1 s8; signal 0 ->2 s8; signal 0 ->3 s8\n",
         true},
        {"a peer that owes a return word is silent, also while our own limits hold back the rest", "strawman-min", NULL,
         "queue_error rank=0 peer=1 nth=1",
         "ranks 2; inflight_bytes 16\n"
         "r0: signal 0 ->1 s1\n"
         "r1: store x 64; put_signal 0 ->0 a 64 s0 from x; put 0 ->0 b 64 from x",
         false},
        {"the next return word goes when the one before has landed", "efa", "completion_level=tx,visible_on_request=1",
         NULL,
         "ranks 2\n"
         "r0: signal 0 ->1 s0; signal 0 ->1 s1; signal 0 ->1 s2; signal 0 ->1 s3; signal 0 ->1 s4; signal 0 ->1 s5; "
         "signal 0 ->1 s6; signal 0 ->1 s7; signal 0 ->1 s8\nr1: wait s8 1",
         true},
        {"what lands twice does not come to light behind a read that flushed the first copy", "thor2",
         "dup_write=100,visible_delay=20000,late_overwrite=0", NULL,
         "ranks 2\n"
         "r0: store x 64; put 0 ->1 a 64 from x as p; put 0 ->1 b 64 from x as q; complete p; complete q; barrier; "
         "signal 0 ->1 s0; quiet; signal 0 ->1 s0; quiet; signal 0 ->1 s0; quiet\n"
         "r1: barrier; store a 64; store b 64; wait s0 1; read a 64; read b 64; wait s0 2; read a 64; read b 64; wait "
         "s0 3; "
         "read a 64; read b 64",
         true},
        {"the window shrinks to what a completion queue holds", "pollara", "max_cqe=131", NULL,
         "ranks 2\nr0: signal 0 ->1 s0; signal 0 ->1 s1; signal 0 ->1 s2; signal 0 ->1 s3\nr1: wait s3 1; "
         "signal 0 ->0 s4",
         true},
    };
    static program p;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        must_parse(all[i].program, &p);
        for (uint64_t seed = 1; seed <= 300; seed++) {
            const run_options o = {.backend = SIM,
                                   .profile = all[i].profile,
                                   .knobs = all[i].knobs,
                                   .faults = all[i].faults,
                                   .gentle = all[i].gentle,
                                   .seed = seed};
            run_result result;
            run_program(r, &p, &o, &result);
            CHECK(result.outcome == RUN_ALLOWED, "%s: seed %llu: %s %s %s", all[i].what, (unsigned long long)seed,
                  run_outcome_name(result.outcome), result.clause, result.text);
        }
    }
}

/* What no strategy can do with is refused with what is missing, before anything is sent. */
static void test_nics_that_do_not_do(void) {
    static const struct {
        const char *profile, *knobs, *text;
    } all[] = {
        {"efa", "completion_level=tx", "say that a write has arrived"},
        {"efa", "flush_local=0", "what an immediate tells of is visible"},
        {"pollara", "max_cqe=129", "an immediate of each of 2 ranks at a time"},
        {"efa", "imm_bits=23", "24 bits"},
    };
    static program p;
    must_parse("mp", &p);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const run_options o = {.backend = SIM,
                               .profile = all[i].profile,
                               .knobs = all[i].knobs,
                               .strategy = UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE,
                               .seed = 1};
        run_result result;
        run_program(r, &p, &o, &result);
        CHECK(result.outcome == RUN_REFUSED && result.refused_by == UCCL_EP_E_CAPABILITY, "%s: %s %s", all[i].knobs,
              run_outcome_name(result.outcome), result.text);
        CHECK(strstr(result.text, all[i].text), "%s: %s", all[i].knobs, result.text);
    }
}

/* NICs of no vendor: most are used, some are refused, and none does what the contract forbids. */
static void test_any_nic(void) {
    const uint64_t seeds = test_scaled(150);
    uint64_t refused = 0, used = 0, strategies = 0;
    for (uint32_t k = 0; profile_at(k); k++)
        for (uint64_t seed = 1; seed <= seeds; seed++) {
            const run_result result =
                run_seed(profile_at(k), test_seed_value * 1000000 + seed, NULL, DRAW_NIC | DRAW_FAULTS);
            if (result.outcome == RUN_REFUSED && result.refused_by == UCCL_EP_E_CAPABILITY) {
                refused++;
                continue;
            }
            CHECK(result.outcome == RUN_ALLOWED,
                  "uccl-ep explore --any-nic --faults --profile %s --seed %llu: %s %s %s", profile_at(k),
                  (unsigned long long)(test_seed_value * 1000000 + seed), run_outcome_name(result.outcome),
                  result.clause, result.text);
            used++;
            strategies |= 1ull << result.strategy;
        }
    CHECK((refused && used > refused && strategies == 0x7e) || seeds < 100, "%llu used, %llu refused, strategies %llx",
          (unsigned long long)used, (unsigned long long)refused, (unsigned long long)strategies);
}

/* ---------------------------------------------------------------------------------------------------- would it notice?
 */

static void test_a_rank_that_waits_for_ever(void) {
    static program p;
    must_parse("ranks 2\nr0: quiet\nr1: wait s0 1", &p);
    const run_options o = {.backend = SIM, .profile = "connectx", .seed = 1};
    run_result result;
    run_program(r, &p, &o, &result);
    CHECK_EQ(result.outcome, RUN_STUCK);
    CHECK(strstr(result.text, "rank 1 at operation 1"), "%s", result.text);
}

static void test_a_program_that_breaks_its_duty(void) {
    static program p;
    must_parse("ranks 2\nr0: store x 64; put 0 ->1 a 64 from x; store x 64", &p);
    const run_options o = {.backend = SIM, .profile = "connectx", .seed = 1};
    run_result result;
    run_program(r, &p, &o, &result);
    CHECK(result.outcome == RUN_BROKEN && !strcmp(result.clause, "PUT-3"), "%s %s", run_outcome_name(result.outcome),
          result.clause);
}

static void test_wrong_programs(void) {
    static program p;
    const char *name;
    for (uint32_t i = 0; builtin_text(i, &name, NULL); i++) {
        must_parse(name, &p);
        if (!p.wrong[0]) continue;
        for (uint32_t k = 0; profile_at(k); k++) {
            const bool must = program_breaks_on(&p, profile_at(k));
            const uint64_t most = must ? 4000 : test_scaled(20);
            uint64_t caught = 0;
            for (uint64_t seed = 1; seed <= most && !(caught && must); seed++) {
                const run_result result = run_seed(profile_at(k), seed, &p, 0);
                CHECK(result.outcome == RUN_ALLOWED || result.outcome == RUN_CLAIM, "%s on %s: %s %s %s", name,
                      profile_at(k), run_outcome_name(result.outcome), result.clause, result.text);
                caught += result.outcome == RUN_CLAIM;
            }
            CHECK(caught || !must, "%s is not caught on %s", name, profile_at(k));
        }
    }
}

static void test_shrinking(void) {
    static program p;
    static shrunk s;
    must_parse("ranks 2; channels 2\n"
               "wrong PUT-5 on efa\n"
               "r0: store x 64; store y 16; signal 1 ->1 s3; store z 32; put 1 ->1 c 32 from z; put 0 ->1 a 64 from x "
               "as data; signal 1 ->1 s3; put 0 ->1 f 16 from y as flag; quiet\n"
               "r1: see s3; read c 32; until f flag; see s3; claim a data; see s3",
               &p);
    for (uint64_t seed = 1;; seed++) {
        run_result result = run_seed("efa", seed, &p, 0);
        if (result.outcome != RUN_CLAIM) continue;
        run_options o = options_for("efa", seed);
        shrink(r, &what, &o, &result, &s, 400);
        CHECK_EQ(result.outcome, RUN_CLAIM);
        CHECK(what.program.n[0] + what.program.n[1] <= 6, "%u and %u operations are left", what.program.n[0],
              what.program.n[1]);
        CHECK(s.n_script < 200 && s.deviations < 20, "%u choices, %u of them not the first", s.n_script, s.deviations);
        const uint64_t hash = result.hash;
        run_program(r, &what.program, &o, &result);
        CHECK_EQ(result.hash, hash);
        return;
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    char text[256] = "";
    r = runner_new(SIM, text);
    CHECK(r, "%s", text);
    test_programs_read_as_they_print();
    test_what_is_no_program_is_refused();
    test_a_rank_that_waits_for_ever();
    test_a_program_that_breaks_its_duty();
    test_a_seed_is_a_run();
    test_a_script_is_a_run();
    test_shrinking();
    test_wrong_programs();
    test_builtins();
    test_random_programs(false);
    test_random_programs(true);
    test_what_was_found();
    test_nics_that_do_not_do();
    test_any_nic();
    runner_free(r);
    return test_end();
}
