/* SPDX-License-Identifier: Apache-2.0
 *
 * main.c: uccl-ep-explore, the program behind `uccl-ep explore`.
 *
 *   uccl-ep-explore SIM.so MODE [key=value ...]      prints JSON, one object a line
 *
 *   random       profile= seeds= seed= [program= faults=1 nic=1 shrink=N]  seeds in a row; ends at the first finding
 *   replay       profile= seed= [program= faults=1 nic=1 choices=0,1,..]    one run, with its history
 *   exhaustive   profile= program= [runs=N choose_run=0]                    all schedules of one program, of each
 *                [duplicates=N lost=N reduce=0]                 run within bounds; or without leaving anything out
 *   wrong        profile= program= [seeds=N]                    how often a program that breaks its duty is caught
 *   scale        profile= ranks= [pattern=sparse|full|idle]                 many ranks in one process
 *   list                                                                    programs and profiles
 *
 * knobs=NAME=VALUE,... is added to whatever the run has.
 *
 * Exit status: 0 nothing found, 1 a finding, 2 the command line is wrong.
 */
#include <inttypes.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "explore.h"
#include "scale.h"

static struct {
    const char *profile, *program, *knobs, *choices, *pattern, *faults_text;
    uint64_t seeds, seed, faults, shrink, runs, choose_run, ranks, rounds, strategy, trace, nic, duplicates, lost,
        reduce;
} options = {.profile = "connectx",
             .seeds = 1000,
             .seed = 1,
             .shrink = 400,
             .runs = 20000,
             .choose_run = 1,
             .reduce = 1,
             .ranks = 4096,
             .rounds = 1,
             .pattern = "sparse"};

_Noreturn static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("uccl-ep-explore: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(2);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void parse(int count, char **arguments) {
    const struct {
        const char *name;
        uint64_t *number;
        const char **text;
    } known[] = {{"profile", NULL, &options.profile},   {"program", NULL, &options.program},
                 {"knobs", NULL, &options.knobs},       {"choices", NULL, &options.choices},
                 {"pattern", NULL, &options.pattern},   {"fault", NULL, &options.faults_text},
                 {"seeds", &options.seeds, NULL},       {"seed", &options.seed, NULL},
                 {"faults", &options.faults, NULL},     {"shrink", &options.shrink, NULL},
                 {"runs", &options.runs, NULL},         {"choose_run", &options.choose_run, NULL},
                 {"ranks", &options.ranks, NULL},       {"rounds", &options.rounds, NULL},
                 {"strategy", &options.strategy, NULL}, {"trace", &options.trace, NULL},
                 {"nic", &options.nic, NULL},           {"duplicates", &options.duplicates, NULL},
                 {"lost", &options.lost, NULL},         {"reduce", &options.reduce, NULL}};
    for (int i = 0; i < count; i++) {
        char *equals = strchr(arguments[i], '=');
        if (!equals) die("'%s' is not key=value", arguments[i]);
        *equals = 0;
        bool found = false;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
            if (strcmp(known[k].name, arguments[i])) continue;
            found = true;
            if (known[k].text) {
                *known[k].text = equals + 1;
                continue;
            }
            char *end;
            *known[k].number = strtoull(equals + 1, &end, 10);
            if (*end || end == equals + 1) die("%s takes a number", arguments[i]);
        }
        if (!found) die("no option '%s'", arguments[i]);
    }
}

/* ------------------------------------------------------------------------------------------------------------- JSON */

static void json_string(const char *text) {
    putchar('"');
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\')
            printf("\\%c", *c);
        else if (*c == '\n')
            fputs("\\n", stdout);
        else if (*c < 32 || *c > 126)
            printf("\\u%04x", *c);
        else
            putchar(*c);
    }
    putchar('"');
}

static void json_field(const char *name, const char *text) {
    printf(", \"%s\": ", name);
    json_string(text);
}

static void json_program(const char *name, const program *p) {
    char *text = malloc(PROGRAM_TEXT);
    if (!text) return;
    program_print(p, text, PROGRAM_TEXT);
    json_field(name, text);
    free(text);
}

static void json_script(const uint32_t *script, uint32_t n) {
    fputs(", \"choices\": [", stdout);
    for (uint32_t i = 0; i < n; i++) printf("%s%u", i ? "," : "", script[i]);
    putchar(']');
}

static void json_result(const run_result *r) {
    json_field("outcome", run_outcome_name(r->outcome));
    json_field("clause", r->clause);
    json_field("text", r->text);
    printf(", \"hash\": \"%016" PRIx64 "\", \"memory_hash\": \"%016" PRIx64 "\", \"steps\": %" PRIu64
           ", \"events\": %" PRIu64 ", \"operations\": %" PRIu64 ", \"virtual_ns\": %" PRIu64 ", \"strategy\": %u, "
           "\"program_breach\": %s, \"failures\": %u",
           r->hash, r->memory_hash, r->steps, r->events, r->operations, r->now_ns, r->strategy,
           r->program_breach ? "true" : "false", r->failures);
}

/* ------------------------------------------------------------------------------------------------------------ modes */

static void check_knobs(const runner *r) {
    char text[256] = "";
    if (!options.knobs) return;
    if (!knobs_can_be(runner_sim(r), options.profile, options.knobs, text)) die("knobs: %s", text);
}

static const program *chosen(program *p) {
    if (!options.program) return NULL;
    char error[256] = "";
    if (program_find(p, options.program, error)) die("the program: %s", error);
    return p;
}

/* A NIC of no vendor need not be one that does. */
static bool no_strategy(const run_result *result) {
    return options.nic && result->outcome == RUN_REFUSED && result->refused_by == UCCL_EP_E_CAPABILITY;
}

static uint32_t how(void) {
    return (options.faults ? DRAW_FAULTS : 0) | (options.nic ? DRAW_NIC : 0);
}

static run_options run_of(const char *backend, drawn *d, uint64_t seed) {
    const size_t used = strlen(d->knobs);
    if (options.knobs)
        snprintf(d->knobs + used, sizeof d->knobs - used, ",%s", options.knobs); /* the last one counts */
    return (run_options){.backend = backend,
                         .profile = options.profile,
                         .knobs = d->knobs,
                         .faults = options.faults_text ? options.faults_text
                                   : d->faults[0]      ? d->faults
                                                       : NULL,
                         .gentle = d->gentle && !options.faults_text,
                         .calls_fail = d->calls_fail || options.faults_text,
                         .seed = seed,
                         .strategy = options.strategy ? (uint32_t)options.strategy : d->strategy,
                         .trace_lines = (uint32_t)options.trace};
}

static int report_finding(runner *r, drawn *d, run_options *o, run_result *result) {
    static shrunk s;
    const run_result first = *result;
    fputs("{\"type\": \"finding\"", stdout);
    printf(", \"seed\": %" PRIu64, o->seed);
    json_field("profile", options.profile);
    json_field("knobs", o->knobs ? o->knobs : "");
    json_field("faults", o->faults ? o->faults : "");
    json_program("program", &d->program);
    json_result(&first);
    if (options.shrink) {
        o->trace_lines = 0;
        shrink(r, d, o, result, &s, (uint32_t)options.shrink);
        fputs(", \"shrunk\": {\"shrunk\": true", stdout);
        printf(", \"seed\": %" PRIu64 ", \"deviations\": %u, \"runs\": %u", o->seed, s.deviations, s.runs);
        json_program("program", &d->program);
        json_result(result);
        json_script(o->choices ? o->choices : s.script, o->n_choices);
        json_field("history", run_history(r));
        putchar('}');
    } else {
        json_field("history", run_history(r));
    }
    puts("}");
    return 1;
}

static int random_mode(runner *r, const char *backend) {
    static drawn d;
    static program only;
    const program *p = chosen(&only);
    const double began = seconds_now();
    double told = began;
    uint64_t steps = 0, operations = 0, runs = 0, strategies[8] = {0}, failures = 0, resets = 0, near_wrap = 0,
             faulted = 0, all = 0, refused = 0;
    char error[256];
    for (uint64_t i = 0; i < options.seeds; i++) {
        const uint64_t seed = options.seed + i;
        if (draw(runner_sim(r), options.profile, seed, p, how(), &d, error)) die("%s", error);
        run_options o = run_of(backend, &d, seed);
        run_result result;
        run_drawn(r, &d, &o, &result);
        runs++;
        if (no_strategy(&result)) {
            refused++;
            continue;
        }
        if (run_is_bad(&result)) return report_finding(r, &d, &o, &result);
        steps += result.steps;
        operations += result.operations;
        strategies[result.strategy & 7]++;
        failures += result.failures;
        resets += result.resets;
        near_wrap += d.program.first_ticket || d.program.first_sequence;
        faulted += o.faults != NULL;
        all = (all ^ result.hash) * 0x9fb21c651e98df25ull;
        if (seconds_now() - told > 1) {
            told = seconds_now();
            printf("{\"type\": \"progress\", \"done\": %" PRIu64 ", \"of\": %" PRIu64 "}\n", i + 1, options.seeds);
            fflush(stdout);
        }
    }
    fputs("{\"type\": \"result\"", stdout);
    json_field("profile", options.profile);
    printf(", \"seed\": %" PRIu64 ", \"seeds\": %" PRIu64 ", \"steps\": %" PRIu64 ", \"operations\": %" PRIu64
           ", \"near_wrap\": %" PRIu64 ", \"faulted\": %" PRIu64 ", \"failures\": %" PRIu64 ", \"resets\": %" PRIu64
           ", \"refused\": %" PRIu64 ", \"hash\": \"%016" PRIx64 "\", \"seconds\": %.3f, \"strategies\": [",
           options.seed, runs, steps, operations, near_wrap, faulted, failures, resets, refused, all,
           seconds_now() - began);
    for (uint32_t i = 0; i < 8; i++) printf("%s%" PRIu64, i ? ", " : "", strategies[i]);
    puts("]}");
    return 0;
}

static uint32_t parse_choices(const char *text, uint32_t *script) {
    uint32_t n = 0;
    while (text && *text && n < MAX_SCRIPT) {
        char *end;
        script[n++] = (uint32_t)strtoul(text, &end, 10);
        if (end == text) die("choices are numbers with ',' between");
        text = *end ? end + 1 : end;
    }
    return n;
}

static int replay(runner *r, const char *backend) {
    static drawn d;
    static program only;
    static uint32_t script[MAX_SCRIPT];
    char error[256];
    const program *p = chosen(&only);
    if (draw(runner_sim(r), options.profile, options.seed, p, how(), &d, error)) die("%s", error);
    run_options o = run_of(backend, &d, options.seed);
    if (options.choices) {
        o.n_choices = parse_choices(options.choices, script);
        o.choices = script;
        o.first_later = true;
    }
    if (!o.trace_lines) o.trace_lines = 400;
    run_result result;
    run_drawn(r, &d, &o, &result);
    fputs("{\"type\": \"run\"", stdout);
    printf(", \"seed\": %" PRIu64, options.seed);
    json_field("profile", options.profile);
    json_field("knobs", o.knobs);
    json_field("faults", o.faults ? o.faults : "");
    json_program("program", &d.program);
    json_result(&result);
    json_field("history", run_history(r));
    json_field("trace", run_trace(r));
    printf(", \"no_strategy\": %s", no_strategy(&result) ? "true" : "false");
    puts("}");
    return run_is_bad(&result) && !no_strategy(&result);
}

static int exhaustive_mode(runner *r, const char *backend) {
    static program only;
    static exhausted e;
    static drawn d;
    const program *p = chosen(&only);
    if (!p) die("exhaustive needs program=");
    char knobs[KNOBS_TEXT];
    /* Two pieces are enough to be torn, and each doubles what there is to see. */
    snprintf(knobs, sizeof knobs, "schedule=choice,choose_run=%d,pieces=2%s%s", options.choose_run != 0,
             options.knobs ? "," : "", options.knobs ? options.knobs : "");
    run_options o = {.backend = backend,
                     .profile = options.profile,
                     .knobs = knobs,
                     .seed = options.seed,
                     .strategy = (uint32_t)options.strategy};
    const double began = seconds_now();
    const exhaust_options bounds = {.most_runs = options.runs,
                                    .duplicates = (uint32_t)options.duplicates,
                                    .lost_doorbells = (uint32_t)options.lost,
                                    .reduce = options.reduce != 0};
    if (exhaust(r, p, &o, &bounds, &e)) die("no memory for the schedules of this program");
    fputs("{\"type\": \"exhaustive\"", stdout);
    json_field("profile", options.profile);
    json_field("name", p->name);
    json_field("knobs", knobs);
    printf(", \"operations\": %u, \"runs\": %" PRIu64 ", \"blocked\": %" PRIu64 ", \"outcomes\": %" PRIu64
           ", \"deepest\": %" PRIu64 ", \"duplicates\": %u, \"lost_doorbells\": %u, \"complete\": %s, \"reversed\": "
           "%u, \"too_large\": %s, \"seconds\": %.3f",
           program_operations(p), e.runs, e.blocked, e.seen.used, e.steps_deepest, bounds.duplicates,
           bounds.lost_doorbells, e.complete ? "true" : "false", e.turned, e.too_large ? "true" : "false",
           seconds_now() - began);
    const bool bad = run_is_bad(&e.bad);
    if (bad) {
        /* Once more, for its history; then as short as it gets. */
        static shrunk s;
        o.choices = e.script;
        o.n_choices = e.n_script;
        o.first_later = true;
        d.program = *p;
        run_result result = e.bad;
        if (options.shrink) {
            shrink(r, &d, &o, &result, &s, (uint32_t)options.shrink);
        } else {
            run_program(r, p, &o, &result);
        }
        fputs(", \"finding\": {\"seed\": 0", stdout);
        json_program("program", &d.program);
        json_result(&result);
        json_script(o.choices, o.n_choices);
        json_field("history", run_history(r));
        putchar('}');
    }
    puts("}");
    return bad;
}

/* A program that breaks its duty is caught if a claim fails; what the model says beside that must be nothing worse. */
static int wrong_mode(runner *r, const char *backend) {
    static program only;
    static drawn d;
    const program *p = chosen(&only);
    if (!p) die("wrong needs program=");
    const double began = seconds_now();
    uint64_t caught = 0, breaches = 0, first = 0, ran = 0;
    run_result kept = {0}, result;
    char error[256], knobs[KNOBS_TEXT] = "";
    uint32_t strategy = 0;
    /* Where it must be caught, it may take longer to meet the schedule that does. */
    const uint64_t most = program_breaks_on(p, options.profile) ? 20 * options.seeds : options.seeds;
    for (uint64_t i = 0; i < most && (i < options.seeds || !caught); i++) {
        const uint64_t seed = options.seed + i;
        if (draw(runner_sim(r), options.profile, seed, p, 0, &d, error)) die("%s", error);
        run_options o = run_of(backend, &d, seed);
        run_drawn(r, &d, &o, &result);
        ran++;
        strategy = result.strategy;
        if (result.outcome == RUN_CLAIM) {
            if (!caught++) kept = result, first = seed, memcpy(knobs, d.knobs, sizeof knobs);
        } else if (run_is_bad(&result)) {
            kept = result, first = seed;
            break;
        }
        breaches += result.program_breach;
    }
    fputs("{\"type\": \"wrong\"", stdout);
    json_field("profile", options.profile);
    json_field("name", p->name);
    json_field("duty", p->wrong);
    json_field("breaks_on", p->breaks);
    printf(", \"seeds\": %" PRIu64 ", \"caught\": %" PRIu64 ", \"breaches\": %" PRIu64 ", \"first_seed\": %" PRIu64
           ", \"strategy\": %u, \"seconds\": %.3f",
           ran, caught, breaches, first, strategy, seconds_now() - began);
    json_field("outcome", run_outcome_name(kept.outcome));
    json_field("clause", kept.clause);
    json_field("text", kept.text);
    puts("}");
    return kept.outcome != RUN_ALLOWED && kept.outcome != RUN_CLAIM;
}

static int list(const runner *r) {
    const char *name, *text;
    fputs("{\"type\": \"list\", \"programs\": [", stdout);
    const char *source;
    for (uint32_t i = 0; (source = builtin_text(i, &name, &text)); i++) {
        static program p;
        char error[256] = "";
        if (program_parse(&p, source, error)) die("program %s: %s", name, error);
        printf("%s{\"name\": ", i ? ", " : "");
        json_string(name);
        json_field("about", text);
        json_field("text", source);
        json_field("wrong", p.wrong);
        json_field("breaks_on", p.breaks);
        printf(", \"ranks\": %u, \"operations\": %u}", p.ranks, program_operations(&p));
    }
    fputs("], \"profiles\": [", stdout);
    for (uint32_t i = 0; (name = runner_sim(r)->profile(i, &text)); i++) {
        printf("%s{\"name\": ", i ? ", " : "");
        json_string(name);
        json_field("about", text);
        putchar('}');
    }
    puts("]}");
    return 0;
}

int main(int count, char **arguments) {
#ifdef __GLIBC__
    /* A run takes and gives back a megabyte: pages that go to the system and come again cost as much as the run. */
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    mallopt(M_MMAP_THRESHOLD, 64 << 20);
#endif
    if (count < 3) die("usage: uccl-ep-explore SIM.so random|replay|exhaustive|wrong|scale|list [key=value ...]");
    parse(count - 3, arguments + 3);
    const char *backend = arguments[1], *mode = arguments[2];
    const scale_options scaled = {.backend = backend,
                                  .profile = options.profile,
                                  .ranks = (uint32_t)options.ranks,
                                  .rounds = (uint32_t)options.rounds,
                                  .full = !strcmp(options.pattern, "full"),
                                  .seed = options.seed};
    if (!strcmp(mode, "scale")) return strcmp(options.pattern, "idle") ? scale(&scaled) : scale_idle(&scaled);
    char text[256] = "";
    runner *r = runner_new(backend, text);
    if (!r) die("%s", text);
    check_knobs(r);
    int status = 2;
    if (!strcmp(mode, "random"))
        status = random_mode(r, backend);
    else if (!strcmp(mode, "replay"))
        status = replay(r, backend);
    else if (!strcmp(mode, "exhaustive"))
        status = exhaustive_mode(r, backend);
    else if (!strcmp(mode, "wrong"))
        status = wrong_mode(r, backend);
    else if (!strcmp(mode, "list"))
        status = list(r);
    else
        die("no mode '%s': random, replay, exhaustive, wrong, scale or list", mode);
    runner_free(r);
    return status;
}
