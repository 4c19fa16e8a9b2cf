/* SPDX-License-Identifier: Apache-2.0
 *
 * exhaustive.c: all schedules of a small program, by running it again and again.
 *
 * A schedule is a sequence of steps: turns of ranks and proxies, events of NICs. Two schedules that differ only in the
 * order of neighbours that do not meet (footprint, run.h) end alike, for every rank, in memory, and for the model; they
 * are one. So a run is made, and then every pair of its steps that meet, with nothing between them that orders them
 * already, is a race: the other order is a run of its own, and is made later. This is dynamic partial-order reduction
 * with source sets and sleep sets (Abdulla, Aronis, Jonsson, Sagonas: Optimal dynamic partial order reduction, 2014).
 *
 * What is particular here:
 *   - An event that became possible by a step cannot come before it: an order, and no race.
 *   - Events of one request are ordered by that alone: what lands twice is the same bytes.
 *   - An event that a step took away (a completion ends the time in which bytes may land again) never has its turn, and
 *     so is in no pair: it is made to come before that step.
 *   - A turn that finds nothing to do changes nothing: its node has no other alternatives but those behind it.
 *   - What is left once all ranks are done arrives, in one order; that it could have come earlier counts.
 *   - Doorbells that are lost are no step but a choice within one: both ways are gone, up to the bound.
 *
 * `reduce` off: every alternative of every step but idle turns, for programs that are very small. Tests compare the
 * two.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "explore.h"

#define MOST_STEPS 1024u
#define MOST_NEXT 256u
#define MOST_INNER 8u
#define ALWAYS_TURNED 1u
#define SET_WORDS (MOST_STEPS / 64)

typedef struct step {
    uint32_t n, chosen, first;
    uint32_t twice, lost, turned; /* of the bounds: used so far, this step included */
    uint32_t inner;               /* choices within it */
    uint32_t inner_taken[MOST_INNER], inner_of[MOST_INNER];
    bool tail;                  /* all ranks are done */
    footprint met_now;          /* of the one that was chosen */
    uint64_t before[SET_WORDS]; /* steps that are ordered before this one */
    uint8_t flags[MOST_NEXT];
    uint64_t names[MOST_NEXT];
    uint32_t born[MOST_NEXT]; /* since behind step born - 1 it has been possible */
    footprint met[MOST_NEXT]; /* of those explored or asleep */
} step;
/* Of an alternative: it was gone; it is to be gone; all that begins with it is looked at elsewhere. */
enum { EXPLORED = 1, WANTED = 2, ASLEEP = 4 };

typedef struct search {
    runner *r;
    const exhaust_options *o;
    step *steps;
    uint32_t n;      /* of the run at hand */
    uint32_t prefix; /* so many are given */
    uint32_t inner_at;
    uint32_t most_turned; /* races that a run may have the other way round; UINT32_MAX: all */
    bool newest;          /* of the first run: what became possible last comes first */
    bool ended, blocked, too_large, diverged, out_of_memory;
    bool cut; /* something was left out that needs more of those */
} search;

static bool apart(uintptr_t from, uintptr_t to, uintptr_t other_from, uintptr_t other_to) {
    return from == to || other_from == other_to || to <= other_from || other_to <= from;
}

static bool meet(const footprint *a, const footprint *b) {
    if (a->idle || b->idle) return false;
    if (a->request && a->request == b->request) return false;
    if (a->writes & (b->reads | b->adds | b->writes) || b->writes & (a->reads | a->adds)) return true;
    if (a->adds & b->reads || b->adds & a->reads) return true;
    return !apart(a->written_from, a->written_to, b->written_from, b->written_to) ||
           !apart(a->written_from, a->written_to, b->read_from, b->read_to) ||
           !apart(a->read_from, a->read_to, b->written_from, b->written_to) ||
           !apart(a->stored_from, a->stored_to, b->stored_from, b->stored_to);
}

/* What either may meet. */
static void widen(uintptr_t *from, uintptr_t *to, uintptr_t other_from, uintptr_t other_to) {
    if (other_from == other_to) return;
    if (*from == *to || other_from < *from) *from = other_from;
    if (other_to > *to) *to = other_to;
}

static void join(footprint *a, const footprint *b) {
    a->reads |= b->reads;
    a->adds |= b->adds;
    a->writes |= b->writes;
    widen(&a->read_from, &a->read_to, b->read_from, b->read_to);
    widen(&a->written_from, &a->written_to, b->written_from, b->written_to);
    widen(&a->stored_from, &a->stored_to, b->stored_from, b->stored_to);
    a->idle &= b->idle;
    a->time |= b->time;
    a->number = b->number;
    for (uint32_t i = 0; i < b->n_needs && a->n_needs < MOST_NEEDS; i++) a->needs[a->n_needs++] = b->needs[i];
    if (a->n_needs == MOST_NEEDS) a->writes = UINT64_MAX; /* whatever it is */
    if (a->request != b->request) a->request = 0;
}

static bool has(const uint64_t *set, uint32_t i) {
    return set[i / 64] >> (i % 64) & 1;
}
static void put(uint64_t *set, uint32_t i) {
    set[i / 64] |= 1ull << (i % 64);
}

/* A wait, and then a sight: had the sight been first, the model would know less of what it must show. */
static bool wait_then_sight(const footprint *a, const footprint *b) {
    if (!(a->adds & HISTORY && b->reads & HISTORY)) return false;
    footprint rest = *a;
    rest.adds &= ~HISTORY;
    return !meet(&rest, b);
}

static uint32_t find(const step *s, uint64_t name) {
    for (uint32_t i = 0; i < s->n; i++)
        if (s->names[i] == name) return i;
    return UINT32_MAX;
}

static void want(step *at, uint32_t i) {
    at->flags[i] |= WANTED;
}

static bool is_turn(const step *s) {
    return s->names[s->chosen] & UCCL_EP_SIM_NAME_TURN;
}

static bool is_twice(const step *s) {
    return !is_turn(s) && s->names[s->chosen] & UCCL_EP_SIM_NAME_TWICE;
}

/* -------------------------------------------------------------------------------------------------------------
 * outcomes
 */

static uint64_t slot_of(const seen_set *set, uint64_t hash) {
    uint64_t at = hash & (set->size - 1);
    while (set->table[at] && set->table[at] != hash) at = (at + 1) & (set->size - 1);
    return at;
}

bool set_has(const seen_set *set, uint64_t hash) {
    return set->size && set->table[slot_of(set, hash + !hash)];
}

int set_add(seen_set *set, uint64_t hash) {
    hash += !hash; /* 0 is a free place */
    if (2 * (set->used + 1) > set->size) {
        seen_set grown = {.size = set->size ? 2 * set->size : 1024, .used = set->used};
        grown.table = calloc(grown.size, sizeof *grown.table);
        if (!grown.table) return -1;
        for (uint64_t i = 0; i < set->size; i++)
            if (set->table[i]) grown.table[slot_of(&grown, set->table[i])] = set->table[i];
        free(set->table);
        *set = grown;
    }
    uint64_t *at = &set->table[slot_of(set, hash)];
    if (*at) return 0;
    *at = hash;
    set->used++;
    return 1;
}

/* ------------------------------------------------------------------------------------------------------- the run at
 * hand
 */

/* A step nobody has been at yet: what is possible, since when, and what would be in vain. */
static void arrive(search *s, const uint64_t *names, uint32_t n) {
    step *now = &s->steps[s->n];
    const step *last = s->n ? now - 1 : NULL;
    now->n = n;
    now->inner = 0;
    now->tail = s->ended;
    memset(now->flags, 0, n);
    memcpy(now->names, names, n * sizeof *names);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t was = last ? find(last, names[i]) : UINT32_MAX;
        now->born[i] = was == UINT32_MAX || was == last->chosen ? s->n : last->born[was];
        if (was == UINT32_MAX || was == last->chosen || !(last->flags[was] & (ASLEEP | EXPLORED))) continue;
        /* What is asleep was looked at from there; with a bound perhaps not as far as it would be from here. */
        if (!s->o->reduce || s->most_turned != UINT32_MAX || meet(&last->met[was], &last->met_now)) continue;
        now->flags[i] = ASLEEP;
        now->met[i] = last->met[was];
    }
}

static bool allowed(const search *s, const step *now, uint32_t i) {
    return !(now->names[i] & UCCL_EP_SIM_NAME_TWICE) || now->names[i] & UCCL_EP_SIM_NAME_TURN ||
           (s->n ? now[-1].twice : 0) < s->o->duplicates;
}

/* Whose turn it is where nothing else is asked for: ranks and proxies, in turn; then the oldest event, or the newest.
 */
static uint32_t first_of(const search *s, const step *now) {
    uint32_t found = UINT32_MAX;
    for (uint32_t i = 0; i < now->n; i++) {
        if (now->flags[i] & ASLEEP || !allowed(s, now, i)) continue;
        found = i;
        if (!s->newest || now->names[i] & UCCL_EP_SIM_NAME_TURN) break;
    }
    return found;
}

static uint32_t choose(void *context, uint32_t kind, const uint64_t *names, uint32_t n) {
    search *s = context;
    if (!run_began(s->r) || s->blocked || s->too_large || s->diverged) return 0;
    if (kind != UCCL_EP_SIM_CHOICE_RUN) {
        const uint64_t begin = UCCL_EP_SIM_NAME_TURN;
        if (!s->n) choose(s, UCCL_EP_SIM_CHOICE_RUN, &begin, 1); /* turns before the first event that is chosen */
        step *now = &s->steps[s->n - 1];
        if (s->inner_at == MOST_INNER) {
            s->too_large = true;
            return 0;
        }
        if (s->inner_at == now->inner) {
            now->inner_taken[now->inner] = 0;
            now->inner_of[now->inner++] = n;
        }
        return now->inner_taken[s->inner_at++];
    }
    if (n > MOST_NEXT || s->n == MOST_STEPS) {
        s->too_large = true;
        return 0;
    }
    step *now = &s->steps[s->n];
    s->inner_at = 0;
    if (s->n < s->prefix) {
        if (now->n != n || memcmp(now->names, names, n * sizeof *names)) {
            s->diverged = true;
            return 0;
        }
    } else {
        arrive(s, names, n);
        const uint32_t first = first_of(s, now);
        if (first == UINT32_MAX) {
            s->blocked = true;
            return 0;
        }
        now->chosen = now->first = first;
        for (uint32_t i = 0; i < n; i++)
            if (i == first || !s->o->reduce) want(now, i);
    }
    now->met_now = (footprint){.idle = true};
    now->lost = s->n ? now[-1].lost : 0;
    now->turned = (s->n ? now[-1].turned : 0) + (now->chosen != now->first);
    now->twice = (s->n ? now[-1].twice : 0) + is_twice(now);
    s->n++;
    return now->chosen;
}

static bool watch(void *context, const footprint *met, bool ended) {
    search *s = context;
    s->ended = ended;
    if (s->blocked || s->too_large || s->diverged) return false;
    if (!s->n) return true;
    /* Time is a step of its own: nothing else was possible, and it meets everything. */
    if (met->time) {
        const uint64_t name = UCCL_EP_SIM_NAME_TURN;
        choose(s, UCCL_EP_SIM_CHOICE_RUN, &name, 1);
        if (s->blocked || s->too_large || s->diverged) return false;
    }
    step *now = &s->steps[s->n - 1];
    if (now->met_now.idle)
        now->met_now = *met;
    else
        join(&now->met_now, met);
    for (uint32_t i = 0; i < now->inner; i++) now->met_now.idle = false, now->lost += now->inner_taken[i] != 0;
    return true;
}

/* -------------------------------------------------------------------------------------------------- what else to look
 * at
 */

/* Steps i and j meet, and nothing between orders them: something of what follows i without needing it is to come first.
 * Which: any step that can be the first of those. */
static void race(search *s, uint32_t i, uint32_t j) {
    step *at = &s->steps[i];
    uint32_t first = UINT32_MAX;
    for (uint32_t k = i + 1; k <= j; k++) {
        const step *other = &s->steps[k];
        if (other->met_now.idle || (k < j && has(other->before, i))) continue;
        bool is_first = true;
        for (uint32_t l = i + 1; l < k && is_first; l++)
            is_first = !has(other->before, l) || (has(s->steps[l].before, i));
        if (!is_first) continue;
        const uint32_t which = find(at, other->names[other->chosen]);
        if (which == UINT32_MAX) continue;
        if (at->flags[which]) return;
        if (first == UINT32_MAX || k == j) first = which;
    }
    if (first != UINT32_MAX) want(at, first);
}

/* Steps whose work a wait in this one waited for. */
static void needed(const search *s, uint32_t j, uint64_t *set) {
    const footprint *met = &s->steps[j].met_now;
    memset(set, 0, SET_WORDS * sizeof *set);
    for (uint32_t k = 0; k < met->n_needs; k++) {
        uint32_t i = 0;
        while (i < j && s->steps[i].met_now.number < met->needs[k]) i++;
        if (met->needs[k] && i < j) put(set, i);
    }
}

static void order(search *s, uint32_t j) {
    step *now = &s->steps[j];
    memset(now->before, 0, sizeof now->before);
    if (now->met_now.idle) return;
    uint64_t needs[SET_WORDS];
    needed(s, j, needs);
    const uint64_t name = now->names[now->chosen];
    const bool turn = is_turn(now);
    const uint32_t born = turn ? 0 : now->born[now->chosen];
    for (uint32_t i = j; i-- > 0;) {
        const step *earlier = &s->steps[i];
        if (earlier->met_now.idle || has(now->before, i)) continue;
        bool ordered = false;
        if (turn && earlier->names[earlier->chosen] == name) {
            ordered = true;
        } else if (born == i + 1 || has(needs, i)) {
            ordered = true;
        } else if (earlier->met_now.request && earlier->met_now.request == now->met_now.request) {
            /* A completion ends the time in which bytes may land again: behind that it is another schedule. */
            ordered = born > i || (is_twice(earlier) && now->met_now.writes);
        } else if (meet(&earlier->met_now, &now->met_now) && !wait_then_sight(&earlier->met_now, &now->met_now)) {
            ordered = true;
            if (!earlier->tail && !earlier->met_now.time && !now->met_now.time) race(s, i, j);
        }
        if (!ordered) continue;
        put(now->before, i);
        for (uint32_t w = 0; w <= i / 64; w++) now->before[w] |= earlier->before[w];
    }
}

/* Events that were possible and are not any more. */
static void look_for_lost(search *s, uint32_t k) {
    step *at = &s->steps[k];
    if (at->tail || k + 1 >= s->n) return;
    for (uint32_t i = 0; i < at->n; i++)
        if (i != at->chosen && !(at->names[i] & UCCL_EP_SIM_NAME_TURN) &&
            find(&s->steps[k + 1], at->names[i]) == UINT32_MAX)
            want(at, i);
}

/* The next alternative: the last choice within a step, or the last step, that has one left. Returns false if none has.
 */
static bool next(search *s) {
    while (s->n) {
        step *at = &s->steps[s->n - 1];
        if (!at->tail) {
            for (; at->inner; at->inner--) {
                const uint32_t i = at->inner - 1;
                if (at->lost >= s->o->lost_doorbells && !at->inner_taken[i]) continue;
                if (at->inner_taken[i] + 1 >= at->inner_of[i]) continue;
                at->inner_taken[i]++;
                s->prefix = s->n;
                return true;
            }
            if (at->flags[at->chosen] & EXPLORED)
                join(&at->met[at->chosen], &at->met_now);
            else
                at->met[at->chosen] = at->met_now;
            at->flags[at->chosen] |= EXPLORED;
            const bool whole = at->met_now.idle;
            s->n--;
            for (uint32_t i = 0; i < at->n && !whole; i++) {
                if (at->flags[i] != WANTED || !allowed(s, at, i)) continue;
                if ((s->n ? at[-1].turned : 0) >= s->most_turned) {
                    s->cut = true;
                    break;
                }
                at->chosen = i;
                s->prefix = s->n + 1;
                return true;
            }
        } else {
            s->n--;
        }
    }
    return false;
}

/* All runs with at most most_turned races the other way round than the first run has them. Returns false if it had to
 * stop before. */
static bool explore(search *s, const program *p, const run_options *given, exhausted *out, uint64_t most_runs) {
    run_options o = *given;
    o.first_later = true;
    s->n = s->prefix = 0;
    s->cut = false;
    for (uint64_t runs = 0;;) {
        run_result result;
        const uint32_t given_steps = s->prefix;
        s->n = s->inner_at = 0;
        s->ended = s->blocked = false;
        run_program(s->r, p, &o, &result);
        runs++;
        out->runs++;
        out->blocked += s->blocked;
        if (s->n > out->steps_deepest) out->steps_deepest = s->n;
        if (s->diverged && result.outcome == RUN_ALLOWED) {
            result.outcome = RUN_BROKEN;
            snprintf(result.text, sizeof result.text, "the same schedule went another way");
        }
        if (!s->blocked && set_add(&out->seen, result.seen_hash) < 0) s->out_of_memory = true;
        if (s->too_large || s->out_of_memory) return false;
        out->claims += result.outcome == RUN_CLAIM;
        if (result.outcome != RUN_ALLOWED && !(result.outcome == RUN_CLAIM && s->o->through_claims)) {
            out->bad = result;
            uint32_t n;
            const uccl_ep_sim_choice *made = run_choices(s->r, &n);
            out->n_script = n < MAX_SCRIPT ? n : MAX_SCRIPT;
            for (uint32_t i = 0; i < out->n_script; i++) out->script[i] = made[i].taken;
            return false;
        }
        for (uint32_t j = given_steps ? given_steps - 1 : 0; j < s->n && s->o->reduce; j++) {
            order(s, j);
            look_for_lost(s, j);
        }
        if (!next(s)) return true;
        if (runs >= most_runs) return false;
    }
}

/* All runs with at most so many races the other way round than two runs have them. */
static bool explore_near(search *s, const program *p, const run_options *o, exhausted *out, uint32_t turned) {
    s->most_turned = turned;
    for (int newest = 0; newest < 2 && !out->complete; newest++) {
        s->newest = newest;
        if (out->runs >= s->o->most_runs || !explore(s, p, o, out, s->o->most_runs - out->runs)) return false;
        out->complete = !s->cut;
    }
    return true;
}

int exhaust(runner *r, const program *p, const run_options *o, const exhaust_options *options, exhausted *out) {
    search s = {.r = r, .o = options, .most_turned = UINT32_MAX};
    memset(out, 0, sizeof *out);
    s.steps = malloc(MOST_STEPS * sizeof *s.steps);
    if (!s.steps) return -1;
    const run_guide guide = {choose, watch, &s};
    runner_guide(r, &guide);
    /* First two runs that are far from each other and what lies next to them, then all there are, with half of what may
     * be spent; if that is not enough, what lies near those two, as far as it goes. */
    uint32_t near = 0;
    bool whole = true;
    while (options->reduce && whole && !out->complete && near <= ALWAYS_TURNED) {
        whole = explore_near(&s, p, o, out, near);
        if (whole) out->turned = near++;
    }
    s.newest = false;
    s.most_turned = UINT32_MAX;
    if (whole && !out->complete) {
        const uint64_t share = options->reduce ? (options->most_runs + 1) / 2 : options->most_runs;
        out->complete = explore(&s, p, o, out, share);
    }
    while (whole && !out->complete && options->reduce && out->bad.outcome == RUN_ALLOWED) {
        whole = explore_near(&s, p, o, out, near);
        if (whole) out->turned = near++;
    }
    out->too_large = s.too_large;
    runner_guide(r, NULL);
    free(s.steps);
    return s.out_of_memory ? -1 : 0;
}
