/* SPDX-License-Identifier: Apache-2.0
 *
 * exhaustive.c: all schedules of a small program, by running it again and again.
 *
 * Depth first over the choices of the simulator (who runs, which event of the NICs comes): a run takes a script of
 * choices and then first alternatives; the next script differs in the last choice that has an alternative left.
 *
 * Reduction. Two schedules that differ only in the order of steps that do not meet end in the same state with the same
 * history. So a state is named by what happened before what: every rank has a running hash of the steps that touched
 * it (its own and its proxies' turns; events of NICs that show in its completion queues, words and mailboxes), and a
 * step's own name is mixed with the hashes of the ranks that it touches. Time, and turns that look at other ranks,
 * touch all. What needs no order is summed up: pieces of payload at a NIC that keeps none, until the rank looks at its
 * heap or its NIC is flushed; and what ranks see, until some rank's wait succeeds, since the model judges by the order
 * of the two. A NIC's own state is what was submitted and which events have come. This counts on programs that keep
 * their duties; for others every event touches both ranks and all that is told is kept in order. A state that was named
 * before is not gone on with: all that follows from it is looked at where it was first met.
 *
 * A turn that finds nothing to do changes nothing: all that may come next may also come after it. So once a choice has
 * turned out to be such a turn, its other alternatives are left to the choices behind it.
 *
 * With the knob choose_run=0, events of NICs are the only choices: ranks and proxies go round until none of them finds
 * anything to do, which loses no order of events, but leaves out that a rank is slow.
 */
#include <stdlib.h>
#include <string.h>

#include "explore.h"

#define FIRST_TABLE (1u << 16)

typedef struct search {
    uint64_t *table; /* open addressing; 0: free */
    uint64_t size, used;
    uint32_t prefix; /* choices of the script: states on the way there are known */
    uint32_t made;   /* choices before the step at hand */
    uint64_t state;  /* before it */
    uint64_t merged;
    uint8_t *idle; /* by choice: it gave a turn to somebody who found nothing to do */
    bool out_of_memory, merge;
} search;

static uint64_t mix(uint64_t h, uint64_t what) {
    h = (h ^ what) * 0x9fb21c651e98df25ull;
    h ^= h >> 28;
    h *= 0xbf58476d1ce4e5b9ull;
    return h ^ h >> 31;
}

static bool grow(search *s) {
    const uint64_t size = s->size ? 2 * s->size : FIRST_TABLE;
    uint64_t *table = calloc(size, sizeof *table);
    if (!table) return false;
    for (uint64_t i = 0; i < s->size; i++) {
        if (!s->table[i]) continue;
        uint64_t at = s->table[i] & (size - 1);
        while (table[at]) at = (at + 1) & (size - 1);
        table[at] = s->table[i];
    }
    free(s->table);
    s->table = table;
    s->size = size;
    return true;
}

/* Returns whether the state is new. */
static bool remember(search *s, uint64_t state) {
    if (!state) state = 1;
    if (2 * (s->used + 1) > s->size && !grow(s)) {
        s->out_of_memory = true;
        return true;
    }
    uint64_t at = state & (s->size - 1);
    while (s->table[at]) {
        if (s->table[at] == state) return false;
        at = (at + 1) & (s->size - 1);
    }
    s->table[at] = state;
    s->used++;
    return true;
}

static bool watch(void *context, runner *r) {
    search *s = context;
    uint32_t made;
    run_choices_now(r, &made);
    uint64_t state = 0;
    const uint64_t *hashes;
    const uint32_t n = run_state(r, &hashes);
    for (uint32_t i = 0; i < n; i++) state = mix(state, hashes[i]);
    const bool changed = state != s->state;
    const uint32_t first = s->made == UINT32_MAX ? made : s->made;
    for (uint32_t i = first; i < made && i < MAX_SCRIPT; i++) s->idle[i] = i == first && !changed;
    s->made = made;
    s->state = state;
    if (!s->merge || !changed || made < s->prefix) return true;
    if (remember(s, state)) return true;
    s->merged++;
    return false;
}

int exhaust(runner *r, const program *p, const run_options *given, uint64_t most_runs, exhausted *out) {
    search s = {0};
    memset(out, 0, sizeof *out);
    run_options o = *given;
    o.first_later = true;
    o.choices = out->script;
    o.n_choices = 0;
    s.merge = true;
    s.idle = calloc(MAX_SCRIPT, 1);
    if (!s.idle || !grow(&s)) {
        free(s.idle);
        return -1;
    }
    runner_watch(r, watch, &s);
    for (;;) {
        run_result result;
        s.prefix = o.n_choices;
        s.made = UINT32_MAX; /* until the ranks begin */
        run_program(r, p, &o, &result);
        out->runs++;
        uint32_t n;
        const uccl_ep_sim_choice *made = run_choices(r, &n);
        /* Behind the end of all ranks what is left arrives, in any order: that is none of the program's choices. */
        if (result.outcome == RUN_ALLOWED && n > result.end_choices) n = result.end_choices;
        if (n > out->choices_deepest) out->choices_deepest = n;
        if (result.outcome != RUN_ALLOWED || s.out_of_memory || n > MAX_SCRIPT) {
            out->bad = result;
            for (uint32_t i = 0; i < n && i < MAX_SCRIPT; i++) out->script[i] = made[i].taken;
            out->n_script = n < MAX_SCRIPT ? n : MAX_SCRIPT;
            break;
        }
        /* The last choice that has an alternative left. Those of the start are not the program's. */
        while (n > result.start_choices &&
               (made[n - 1].taken + 1 >= made[n - 1].alternatives || (s.merge && s.idle[n - 1])))
            n--;
        if (n <= result.start_choices) {
            out->complete = true;
            break;
        }
        if (out->runs >= most_runs) break;
        for (uint32_t i = 0; i < n; i++) out->script[i] = made[i].taken;
        out->script[n - 1]++;
        o.n_choices = n;
    }
    runner_watch(r, NULL, NULL);
    out->states = s.used;
    out->merged = s.merged;
    free(s.table);
    free(s.idle);
    return s.out_of_memory ? -1 : 0;
}
