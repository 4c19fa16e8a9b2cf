/* SPDX-License-Identifier: Apache-2.0
 *
 * shrink.c: from a run that went wrong to a short one that goes wrong in the same way.
 *
 * First operations are taken out of the program, many at a time and then one by one. Another program draws other
 * choices, so each candidate is tried with a few seeds. A candidate must also be a program that comes to its end where
 * NICs are gentle, or leaving out a signal would make every wait for it a finding. Then the choices that were made
 * become a script: as short as possible, and with as few deviations from the first alternative as possible.
 */
#include <stdlib.h>
#include <string.h>

#include "explore.h"

#define SEEDS_A_CANDIDATE 8u

typedef struct target {
    uint32_t outcome;
    char clause[8];
} target;

static bool same(const run_result *result, const target *t) {
    return result->outcome == t->outcome && !strcmp(result->clause, t->clause);
}

static bool gentle(runner *r, const program *p, const run_options *o, const target *t) {
    run_options calm = *o;
    calm.knobs = "schedule=choice";
    calm.faults = NULL;
    calm.choices = NULL;
    calm.n_choices = 0;
    calm.first_later = true;
    run_result result;
    run_program(r, p, &calm, &result);
    return result.outcome == RUN_ALLOWED || (t->outcome != RUN_STUCK && same(&result, t));
}

static bool try_program(runner *r, const program *p, run_options *o, const target *t, shrunk *s) {
    run_result result;
    const uint64_t seed = o->seed;
    s->runs++;
    if (!gentle(r, p, o, t)) return false;
    for (uint32_t i = 0; i < SEEDS_A_CANDIDATE; i++) {
        o->seed = seed + i;
        s->runs++;
        run_program(r, p, o, &result);
        if (same(&result, t)) return true;
    }
    o->seed = seed;
    return false;
}

static void remove_ops(program *p, uint32_t rank, uint32_t first, uint32_t n) {
    memmove(&p->ops[rank][first], &p->ops[rank][first + n], (p->n[rank] - first - n) * sizeof p->ops[0][0]);
    p->n[rank] -= n;
}

/* Laid out anew: buffers and fields may have become fewer. Offsets stay, so that what lies where does not change. */
static bool lay_out_again(program *p) {
    char error[256];
    return !program_lay_out(p, error);
}

static void shrink_program(runner *r, drawn *what, run_options *o, const target *t, shrunk *s, uint32_t most_runs) {
    program *candidate = malloc(sizeof *candidate);
    if (!candidate) return;
    for (uint32_t chunk = 16; chunk; chunk /= 2) {
        bool again = true;
        while (again && s->runs < most_runs) {
            again = false;
            for (uint32_t rank = 0; rank < what->program.ranks; rank++) {
                for (uint32_t at = 0; at + chunk <= what->program.n[rank] && s->runs < most_runs;) {
                    *candidate = what->program;
                    remove_ops(candidate, rank, at, chunk);
                    if (lay_out_again(candidate) && try_program(r, candidate, o, t, s)) {
                        what->program = *candidate;
                        again = true;
                    } else {
                        at += chunk;
                    }
                }
            }
        }
    }
    free(candidate);
}

static bool try_script(runner *r, const program *p, run_options *o, const target *t, shrunk *s, uint32_t n,
                       run_result *result) {
    o->choices = s->script;
    o->n_choices = n;
    o->first_later = true;
    s->runs++;
    run_program(r, p, o, result);
    return same(result, t);
}

static void shrink_schedule(runner *r, drawn *what, run_options *o, const target *t, shrunk *s, uint32_t most_runs) {
    run_result result;
    const program *p = &what->program;
    run_program(r, p, o, &result);
    uint32_t n;
    const uccl_ep_sim_choice *made = run_choices(r, &n);
    if (!same(&result, t) || n > MAX_SCRIPT) return;
    for (uint32_t i = 0; i < n; i++) s->script[i] = made[i].taken;
    if (!try_script(r, p, o, t, s, n, &result)) {
        o->choices = NULL;
        o->n_choices = 0;
        o->first_later = false;
        return;
    }
    /* The shortest prefix: doubling steps down, since shorter need not be worse in order. */
    for (uint32_t cut = n / 2; cut && s->runs < most_runs;) {
        if (cut <= n && try_script(r, p, o, t, s, n - cut, &result))
            n -= cut;
        else
            cut /= 2;
    }
    /* First alternatives wherever that changes nothing, in runs and then singly. */
    for (uint32_t chunk = n; chunk; chunk /= 2)
        for (uint32_t at = 0; at < n && s->runs < most_runs; at += chunk) {
            uint32_t kept[64];
            const uint32_t end = at + chunk < n ? at + chunk : n;
            uint32_t *saved = end - at <= 64 ? kept : malloc((end - at) * sizeof *saved);
            if (!saved) return;
            bool any = false;
            for (uint32_t i = at; i < end; i++) {
                saved[i - at] = s->script[i];
                any |= s->script[i] != 0;
                s->script[i] = 0;
            }
            if (any && !try_script(r, p, o, t, s, n, &result))
                memcpy(&s->script[at], saved, (end - at) * sizeof *saved);
            if (saved != kept) free(saved);
        }
    while (n && !s->script[n - 1] && try_script(r, p, o, t, s, n - 1, &result)) n--;
    s->n_script = n;
    for (uint32_t i = 0; i < n; i++) s->deviations += s->script[i] != 0;
    o->choices = s->script;
    o->n_choices = n;
    o->first_later = true;
}

void shrink(runner *r, drawn *what, run_options *o, run_result *result, shrunk *s, uint32_t most_runs) {
    target t = {.outcome = result->outcome};
    memcpy(t.clause, result->clause, sizeof t.clause);
    s->n_script = s->deviations = s->runs = 0;
    shrink_program(r, what, o, &t, s, most_runs);
    shrink_schedule(r, what, o, &t, s, 2 * most_runs);
    run_program(r, &what->program, o, result);
}
