/* SPDX-License-Identifier: Apache-2.0
 *
 * draw.c: what a seed means.
 *
 * Knobs are drawn within what the profile allows its NIC to do: longer delays, finer pieces, more duplicates where
 * there are any. What a NIC promises stays as it is.
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

static void draw_knobs(litmus_rng *r, const char *profile_knobs, char *out) {
    static const uint32_t delays[] = {0, 100, 1000, 1000, 5000, 20000};
    static const uint32_t visibles[] = {200, 2000, 10000, 50000};
    /* Events by times, or one by one in any order, where a completion may stay away for as long as it likes. */
    if (rng_chance(r, 30)) append(out, KNOBS_TEXT, "schedule=choice,choose_run=%u,", rng_chance(r, 70));
    append(out, KNOBS_TEXT, "delay=%u", delays[rng_below(r, 6)]);
    append(out, KNOBS_TEXT, ",pieces=%u", 1 + rng_below(r, 4));
    append(out, KNOBS_TEXT, ",step_ns=%u", 1u << rng_below(r, 10));
    if (knob(profile_knobs, "visible_delay")) append(out, KNOBS_TEXT, ",visible_delay=%u", visibles[rng_below(r, 4)]);
    if (knob(profile_knobs, "dup_write")) append(out, KNOBS_TEXT, ",dup_write=%u", 5 + rng_below(r, 90));
    if (knob(profile_knobs, "max_inline")) append(out, KNOBS_TEXT, ",inline_percent=%u", rng_below(r, 101));
}

/* Errors of operations, queues in error, and what only looks like one. */
static void draw_fault(litmus_rng *r, const program *p, char *out) {
    static const char *const kinds[] = {"drop", "error_in_batch", "queue_error", "delay", "duplicate_completion"};
    const char *kind = kinds[rng_below(r, 5)];
    append(out, KNOBS_TEXT, "%s rank=%u nth=%u", kind, rng_below(r, p->ranks), 1 + rng_below(r, 20));
    if (!strcmp(kind, "delay")) append(out, KNOBS_TEXT, " ns=%u", 1000u << rng_below(r, 12));
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

int draw(const uccl_ep_sim *sim, const char *profile, uint64_t seed, const program *only, bool with_faults, drawn *out,
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
    draw_knobs(&r, knobs, out->knobs);
    if (with_faults && rng_chance(&r, 25)) draw_fault(&r, &out->program, out->faults);
    free(knobs);
    return status;
}
