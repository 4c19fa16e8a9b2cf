/* SPDX-License-Identifier: Apache-2.0
 *
 * draw.c: what a seed means.
 *
 * Knobs are drawn within what the profile allows its NIC to do: longer delays, finer pieces, more duplicates where
 * there are any, limits that are met at once. What a NIC promises stays as it is, unless NICs of no vendor are asked
 * for. Then any set of promises may come, and the core finds a strategy for it or refuses it.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "explore.h"

static void append(char *text, size_t room, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void append(char *text, size_t room, const char *format, ...) {
    const size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, room - used, format, arguments);
    va_end(arguments);
}

/* The number that a profile gives a knob. */
static uint64_t knob(const char *knobs, const char *name) {
    const size_t n = strlen(name);
    for (const char *line = knobs; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
        if (!strncmp(line, name, n) && line[n] == '=') return strtoull(line + n + 1, NULL, 0);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------- knobs
 */

/* Events by times, or one by one in any order, where a completion may stay away for as long as it likes. */
static void draw_times(litmus_rng *r, const char *profile_knobs, char *out) {
    static const uint32_t delays[] = {0, 100, 1000, 1000, 5000, 20000};
    static const uint32_t visibles[] = {200, 2000, 10000, 50000};
    if (rng_chance(r, 30)) append(out, KNOBS_TEXT, "schedule=choice,choose_run=%u,", rng_chance(r, 70));
    append(out, KNOBS_TEXT, "delay=%u", delays[rng_below(r, 6)]);
    append(out, KNOBS_TEXT, ",pieces=%u", 1 + rng_below(r, 4));
    append(out, KNOBS_TEXT, ",step_ns=%u", 1u << rng_below(r, 10));
    if (knob(profile_knobs, "visible_delay")) append(out, KNOBS_TEXT, ",visible_delay=%u", visibles[rng_below(r, 4)]);
    if (knob(profile_knobs, "dup_write")) append(out, KNOBS_TEXT, ",dup_write=%u", 5 + rng_below(r, 90));
    if (knob(profile_knobs, "max_inline")) append(out, KNOBS_TEXT, ",inline_percent=%u", rng_below(r, 101));
}

static const struct choice_of {
    const char *name, *values; /* ' ' between */
} limits[] =
    {
        /* Smaller ones than the profile's. They change how much the NIC takes, and nothing that it promises. */
        {"max_inline", "0 16 40"},
        {"max_sge", "1 2"},
        {"max_msg", "16 32 100 1024"},
        {"max_wr", "1 1 2 3 8"},
        {"max_cqe", "140 200 500"},
        {"max_batch", "1 2 3"},
        {"retry_exc_inflight_bytes", "256 300 512 4096"},
        {"responder_atomics", "1 2 4 16"},
        {"backpressure", "partial again"},
        {"drop_rate", "1 5 20"},
        {"rnr_retries", "0 1"},
        {"delay", "3000000"},
},
  freedoms[] = {
      /* What makes a NIC. Drawn all together they are often one that cannot be, and then drawn again. */
      {"place_order", "none blocks per_msg strict"},
      {"order_write_write", "0 1"},
      {"order_write_atomic", "0 1"},
      {"order_write_imm", "0 1"},
      {"relaxed", "0 0 1"},
      {"ro_atomic_ordered", "0 1"},
      {"signals_strict", "0 1"},
      {"completion_order", "any in_order in_order"},
      {"completion_level", "tx ack delivery"},
      {"cqe_cumulative", "0 1"},
      {"unsignalled_ok", "0 1"},
      {"visible_on_request", "0 1"},
      {"visible_delay", "0 500 5000 50000"},
      {"late_overwrite", "0 1"},
      {"has_read", "0 1"},
      {"read_flushes", "0 1"},
      {"flush_local", "0 1"},
      {"imm_visible", "0 1"},
      {"dup_write", "0 0 50"},
      {"fence_kind", "none atomics delivered"},
      {"per_peer_qp", "0 1"},
      {"srq", "0 1"},
      {"imm_bits", "0 2 23 24 25 32 32 40 64"},
      {"imm_consumes_rq", "0 1"},
      {"unsolicited", "0 1"},
      {"rnr", "none retry fail"},
      {"atomics", "none nic nic coherent"},
      {"responder_scope", "queue device"},
      {"responder_over", "wait fail"},
      {"needs_target_ah", "0 1"},
      {"addr_mode", "offset virtual"},
      {"key_bits", "32 64"},
      {"error_scope", "wr qp"},
      {"flush_by", "nic provider"},
      {"dead_peer", "silent timeout"},
      {"own_memory", "0 1"},
};

static void draw_choice(litmus_rng *r, const struct choice_of *c, char *out) {
    uint32_t n = 1;
    for (const char *at = c->values; *at; at++) n += *at == ' ';
    const char *at = c->values;
    for (uint32_t skip = rng_below(r, n); skip; skip--) at = strchr(at, ' ') + 1;
    append(out, KNOBS_TEXT, ",%s=%.*s", c->name, (int)strcspn(at, " "), at);
}

static void draw_limits(litmus_rng *r, char *out) {
    if (!rng_chance(r, 50)) return;
    const uint32_t percent = rng_chance(r, 20) ? 60 : 15;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (rng_chance(r, percent)) draw_choice(r, &limits[i], out);
    if (rng_chance(r, percent))
        append(out, KNOBS_TEXT, rng_chance(r, 50) ? ",nics=%u" : ",ranks_per_nic=%u", 2 + rng_below(r, 3));
}

bool knobs_can_be(const uccl_ep_sim *sim, const char *profile, const char *knobs, char *text) {
    const uccl_ep_sim_config config = {.size = sizeof config, .ranks = 1, .profile = profile, .knobs = knobs};
    uccl_ep_sim_world *world = sim->world_open(&config, text);
    if (world) sim->world_close(world);
    return world != NULL;
}

/* Most knobs as the profile has them, or hardly any. */
static void draw_nic(litmus_rng *r, const uccl_ep_sim *sim, const char *profile, char *out) {
    const size_t before = strlen(out);
    char text[256];
    for (uint32_t tries = 0; tries < 100; tries++) {
        const uint32_t percent = rng_chance(r, 50) ? 10 : 60;
        for (size_t i = 0; i < sizeof freedoms / sizeof *freedoms; i++)
            if (rng_chance(r, percent)) draw_choice(r, &freedoms[i], out);
        if (knobs_can_be(sim, profile, out, text)) return;
        out[before] = 0;
    }
}

/* ------------------------------------------------------------------------------------------------------------ faults
 */

/* What nobody may notice but by the time it takes. */
static void draw_gentle_fault(litmus_rng *r, const program *p, char *out) {
    static const char *const kinds[] = {"delay",     "duplicate_completion", "lost_doorbell", "again", "partial",
                                        "slow_peer", "stray_completion"};
    const char *kind = kinds[rng_below(r, 7)];
    append(out, KNOBS_TEXT, "%s", kind);
    if (rng_chance(r, 70)) append(out, KNOBS_TEXT, " rank=%u", rng_below(r, p->ranks));
    if (rng_chance(r, 30)) append(out, KNOBS_TEXT, " peer=%u", rng_below(r, p->ranks));
    if (!strcmp(kind, "slow_peer") || rng_chance(r, 50))
        append(out, KNOBS_TEXT, " percent=%u", 1 + rng_below(r, 60));
    else
        append(out, KNOBS_TEXT, " nth=%u count=%u", 1 + rng_below(r, 20), 1 + rng_below(r, 10));
    if (!strcmp(kind, "delay") || !strcmp(kind, "slow_peer"))
        append(out, KNOBS_TEXT, " ns=%u", 1000u << rng_below(r, 12));
}

/* One that costs somebody something, once. */
static void draw_rough_fault(litmus_rng *r, const program *p, drawn *out) {
    static const char *const kinds[] = {"drop",      "error_in_batch",  "queue_error",  "drop",
                                        "call_fail", "memory_pressure", "register_fail"};
    const uint32_t kind = rng_below(r, 7);
    out->calls_fail = kind > 3;
    append(out->faults, KNOBS_TEXT, "%s rank=%u nth=%u", kinds[kind], rng_below(r, p->ranks), 1 + rng_below(r, 20));
}

static void draw_faults(litmus_rng *r, const program *p, drawn *out) {
    out->gentle = rng_chance(r, 40);
    if (!out->gentle) draw_rough_fault(r, p, out);
    for (uint32_t n = out->gentle + rng_below(r, 3); n; n--) {
        if (out->faults[0]) append(out->faults, KNOBS_TEXT, ";");
        draw_gentle_fault(r, p, out->faults);
    }
}

int program_find(program *p, const char *name, char *error) {
    const char *found, *text;
    for (uint32_t i = 0; (text = builtin_text(i, &found, NULL)); i++) {
        if (strcmp(found, name)) continue;
        const int status = program_parse(p, text, error);
        snprintf(p->name, sizeof p->name, "%s", name);
        return status;
    }
    return program_parse(p, name, error);
}

int draw(const uccl_ep_sim *sim, const char *profile, uint64_t seed, const program *only, uint32_t how, drawn *out,
         char *error) {
    uint32_t right = 0; /* programs that keep their duties come first */
    for (const char *name, *text; (text = builtin_text(right, &name, NULL)) && !strstr(text, "\nwrong "); right++) {
    }
    char *knobs = malloc(32768);
    if (!knobs) {
        snprintf(error, 256, "no memory");
        return -1;
    }
    knobs[0] = 0;
    if (sim->knobs(profile, knobs, 32768) > 32768) knobs[32767] = 0;
    memset(out, 0, sizeof *out);
    out->gentle = true;
    litmus_rng r = {seed ^ 0x5851f42d4c957f2dull};
    int status = 0;
    if (only) {
        out->program = *only;
    } else if (rng_chance(&r, 80)) {
        program_generate(&out->program, seed);
    } else {
        const char *name;
        const uint32_t which = rng_below(&r, right);
        const char *text = builtin_text(which, &name, NULL);
        status = program_parse(&out->program, text, error);
        snprintf(out->program.name, sizeof out->program.name, "%s", name);
    }
    draw_times(&r, knobs, out->knobs);
    if (how & DRAW_FAULTS && rng_chance(&r, 25)) draw_faults(&r, &out->program, out);
    if (how & DRAW_NIC) draw_nic(&r, sim, profile, out->knobs);
    if (!out->program.wrong[0]) draw_limits(&r, out->knobs);
    if (!out->program.wrong[0] && rng_chance(&r, 40))
        out->strategy = 1 + rng_below(&r, UCCL_EP_STRATEGY_SENDER_HOLD_SUM);
    if (out->strategy == UCCL_EP_STRATEGY_SENDER_HOLD_SUM)
        out->program.single_writer = program_has_single_writers(&out->program);
    free(knobs);
    return status;
}

void run_drawn(runner *r, const drawn *d, run_options *o, run_result *result) {
    run_program(r, &d->program, o, result);
    if (result->outcome != RUN_REFUSED || result->refused_by != UCCL_EP_E_CAPABILITY || !o->strategy) return;
    o->strategy = UCCL_EP_STRATEGY_AUTO;
    run_program(r, &d->program, o, result);
}
