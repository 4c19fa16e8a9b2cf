/* SPDX-License-Identifier: Apache-2.0
 *
 * signals.c: which adds does a signal word hold? SIG-1, SIG-4, SIG-5, QUI-1, QUI-2, ERR-6, and by when each signal was
 * applied, which bytes.c needs for SIG-2.
 *
 * Of every stream (rank, channel, target) the signals applied are a prefix of those posted (SIG-5). So a word's value
 * is a sum over streams of one prefix each. The prefix is at least what waits and earlier reads have shown, at most
 * what was posted before the read ended. All combinations that give the value are looked at, up to a budget; what they
 * have in common is known. Beyond the budget the word is bounded only: that is sound, and counted.
 */
#include <inttypes.h>

#include "internal.h"

#define BUDGET 20000u

/* What shows that a stream's first `place + 1` posts have their signals applied, from `time` on. */
typedef struct sight {
    uint64_t time;
    uint32_t stream, place, event;
} sight;

/* The signals of one stream to one word: by_word[first .. first + n). */
typedef struct lane {
    uint32_t stream;
    uint32_t first, n;
    uint32_t low, high;   /* of how many are applied */
    uint32_t least, most; /* over all solutions */
    uint32_t taken;
    unsigned shift; /* all adds of this lane and those behind it are multiples of 2^shift */
} lane;

typedef struct decoder {
    uccl_ep_model *m;
    uint32_t *by_word; /* posts with signals, by (target, slot, stream, place) */
    uint64_t *sum;     /* over its lane, up to and including it */
    uint32_t n;
    sight *heap; /* by time */
    uint32_t heap_n, heap_room;
    lane *lanes;
    uint32_t n_lanes, room_lanes;
    uint32_t budget;
    uint32_t solutions;
} decoder;

static _Thread_local const post *sorted_posts;
static _Thread_local const uccl_ep_model_event *sorted_events;

#define COMPARE(a, b)                                                                                                  \
    if ((a) != (b)) return (a) < (b) ? -1 : 1

static int by_word(const void *x, const void *y) {
    const post *a = &sorted_posts[*(const uint32_t *)x], *b = &sorted_posts[*(const uint32_t *)y];
    COMPARE(a->target, b->target);
    COMPARE(a->slot, b->slot);
    COMPARE(a->stream, b->stream);
    COMPARE(a->place, b->place);
    return 0;
}

static int by_begin(const void *x, const void *y) {
    const uccl_ep_model_event *a = &sorted_events[*(const uint32_t *)x], *b = &sorted_events[*(const uint32_t *)y];
    COMPARE(a->begin, b->begin);
    COMPARE(a->end, b->end);
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- what is known */

static void push(decoder *d, sight s) {
    if (d->heap_n == d->heap_room) {
        const uint32_t room = d->heap_room ? d->heap_room * 2 : 64;
        sight *heap = realloc(d->heap, room * sizeof *heap);
        if (!heap) {
            d->m->out_of_memory = true;
            return;
        }
        d->heap = heap;
        d->heap_room = room;
    }
    uint32_t i = d->heap_n++;
    for (; i && d->heap[(i - 1) / 2].time > s.time; i = (i - 1) / 2) d->heap[i] = d->heap[(i - 1) / 2];
    d->heap[i] = s;
}

static sight pop(decoder *d) {
    const sight top = d->heap[0], last = d->heap[--d->heap_n];
    uint32_t i = 0;
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= d->heap_n) break;
        if (child + 1 < d->heap_n && d->heap[child + 1].time < d->heap[child].time) child++;
        if (d->heap[child].time >= last.time) break;
        d->heap[i] = d->heap[child];
        i = child;
    }
    d->heap[i] = last;
    return top;
}

/* All sights before `time` count for streams' lower bounds from now on. */
static void learn_until(decoder *d, uint64_t time) {
    while (d->heap_n && d->heap[0].time < time) {
        const sight s = pop(d);
        stream *of = &d->m->streams[s.stream];
        if (s.place + 1 > of->applied) of->applied = s.place + 1, of->applied_event = s.event;
    }
}

/* The signal of `p` was seen to be applied: so is all of its stream before it. */
static void seen(decoder *d, post *p, const uccl_ep_model_event *read, uint32_t event) {
    push(d, (sight){read->end, p->stream, p->place, event});
    if (read->end < p->seen_by)
        p->seen_by = read->end, p->seen_event = event, p->seen_how = HOW_SIGNAL,
        p->seen_signal = (uint32_t)(p - d->m->posts);
}

/* --------------------------------------------------------------------------------------------------------- decoding */

static uint64_t lane_sum(const decoder *d, const lane *l, uint32_t count) {
    return count ? d->sum[l->first + count - 1] : 0;
}

static void solve(decoder *d, uint32_t i, uint64_t rest) {
    if (!d->budget) return;
    d->budget--;
    if (i == d->n_lanes) {
        if (rest) return;
        for (uint32_t k = 0; k < d->n_lanes; k++) {
            lane *l = &d->lanes[k];
            if (!d->solutions || l->taken < l->least) l->least = l->taken;
            if (!d->solutions || l->taken > l->most) l->most = l->taken;
        }
        d->solutions++;
        return;
    }
    lane *l = &d->lanes[i];
    if (l->shift >= 64 ? rest != 0 : (rest & ((1ull << l->shift) - 1)) != 0) return;
    for (l->taken = l->low; l->taken <= l->high && d->budget; l->taken++)
        solve(d, i + 1, rest - lane_sum(d, l, l->taken));
}

/* All prefixes that give `value` within the lanes' bounds; false: the budget ended first. */
static bool decode(decoder *d, uint64_t value) {
    d->budget = BUDGET;
    d->solutions = 0;
    solve(d, 0, value);
    return d->budget != 0;
}

/* The lanes of one word, in an order in which low bits decide early. */
static bool find_lanes(decoder *d, uint32_t rank, uint32_t slot) {
    uint32_t low = 0, high = d->n;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        const post *p = &d->m->posts[d->by_word[middle]];
        if (p->target < rank || (p->target == rank && p->slot < slot))
            low = middle + 1;
        else
            high = middle;
    }
    d->n_lanes = 0;
    for (uint32_t i = low; i < d->n; i++) {
        const post *p = &d->m->posts[d->by_word[i]];
        if (p->target != rank || p->slot != slot) break;
        lane *last = d->n_lanes ? &d->lanes[d->n_lanes - 1] : NULL;
        if (last && last->stream == p->stream) {
            last->n++;
            continue;
        }
        if (d->n_lanes == d->room_lanes) {
            const uint32_t room = d->room_lanes ? 2 * d->room_lanes : 16;
            lane *lanes = realloc(d->lanes, room * sizeof *lanes);
            if (!lanes) {
                d->m->out_of_memory = true;
                return false;
            }
            d->lanes = lanes;
            d->room_lanes = room;
        }
        d->lanes[d->n_lanes++] = (lane){.stream = p->stream, .first = i, .n = 1};
    }
    return true;
}

static unsigned low_bit(const decoder *d, const lane *l) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < l->n; i++) bits |= d->m->posts[d->by_word[l->first + i]].add;
    return bits ? (unsigned)__builtin_ctzll(bits) : 64;
}

static void order_lanes(decoder *d) {
    for (uint32_t i = 0; i < d->n_lanes; i++) d->lanes[i].shift = low_bit(d, &d->lanes[i]);
    for (uint32_t i = 1; i < d->n_lanes; i++) {
        const lane l = d->lanes[i];
        uint32_t k = i;
        for (; k && d->lanes[k - 1].shift > l.shift; k--) d->lanes[k] = d->lanes[k - 1];
        d->lanes[k] = l;
    }
}

/* Bounds at a read: what is known before it began, and what was posted before it ended. */
static void bound_lanes(decoder *d, const uccl_ep_model_event *read, uint32_t epoch) {
    const uccl_ep_model *m = d->m;
    for (uint32_t i = 0; i < d->n_lanes; i++) {
        lane *l = &d->lanes[i];
        const stream *s = &m->streams[l->stream];
        l->low = l->high = 0;
        if (s->epoch != epoch) continue;
        for (uint32_t k = 0; k < l->n; k++) {
            const post *p = &m->posts[d->by_word[l->first + k]];
            if (p->place < s->applied) l->low = k + 1;
            if (l->high == k && p->begin <= read->end && !p->barred) l->high = k + 1;
        }
        if (l->low > l->high) l->low = l->high; /* a wait succeeded for what was refused: ERR-2 says so elsewhere */
    }
}

/* Where combinations are too many: no lane wraps, so sums are between those of the bounds. Returns false: impossible.
 */
static bool bound_sums(decoder *d, uint64_t value) {
    unsigned __int128 least = 0, most = 0;
    for (uint32_t i = 0; i < d->n_lanes; i++) {
        lane *l = &d->lanes[i];
        unsigned __int128 sum = 0;
        for (uint32_t k = 0; k < l->high; k++) sum += d->m->posts[d->by_word[l->first + k]].add;
        most += sum;
        least += lane_sum(d, l, l->low);
        l->least = l->low;
    }
    if (most > UINT64_MAX) return true;
    if (value < least || value > most) return false;
    const uint64_t slack = (uint64_t)most - value;
    for (uint32_t i = 0; i < d->n_lanes; i++) {
        lane *l = &d->lanes[i];
        /* Even with all others at their most, this much must be here. */
        while (l->least < l->high && lane_sum(d, l, l->high) - lane_sum(d, l, l->least) > slack) l->least++;
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------- explaining */

/* Any set of single signals, in whatever order, that gives `value`. */
static bool subset(decoder *d, uint32_t i, uint32_t k, uint64_t rest) {
    if (!d->budget) return false;
    d->budget--;
    while (i < d->n_lanes && k >= d->lanes[i].high) i++, k = 0;
    if (i == d->n_lanes) return !rest;
    return subset(d, i, k + 1, rest - d->m->posts[d->by_word[d->lanes[i].first + k]].add) || subset(d, i, k + 1, rest);
}

static bool read_later_differs(const uccl_ep_model *m, const uccl_ep_model_event *read) {
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->kind == UCCL_EP_MODEL_SIGNAL && e->rank == read->rank && e->slot == read->slot && e->begin > read->end &&
            e->value != read->value)
            return true;
    }
    return false;
}

/* Too little: signals that must be there are not. */
static void report_missing(decoder *d, uint32_t event, const lane *l) {
    uccl_ep_model *m = d->m;
    const uccl_ep_model_event *read = &m->events[event];
    const stream *s = &m->streams[l->stream];
    const post *p = &m->posts[d->by_word[l->first + l->least]];
    const uccl_ep_model_event *why = &m->events[s->applied_event];
    if (why->kind == UCCL_EP_MODEL_WAIT) {
        const bool late = read_later_differs(m, read);
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin,
                     late ? (why->channel == UCCL_EP_MODEL_ALL ? "QUI-2" : "QUI-1")
                          : (d->n_lanes > 1 ? "SIG-4" : "SIG-1"),
                     EVENTS(p->event, s->applied_event, event),
                     "%s was complete when a wait for it succeeded, and rank %u then sees %" PRIu64
                     " in signal %u, which is without its %" PRIu64 "%s",
                     model_name(m, p), read->rank, read->value, read->slot, p->add,
                     late ? ": it came later" : ": it never comes");
    } else if (why->slot == read->slot) {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, "SIG-1", EVENTS(p->event, s->applied_event, event),
                     "signal %u of rank %u goes back from %" PRIu64 " to %" PRIu64 ": %s was applied and is no longer",
                     read->slot, read->rank, why->value, read->value, model_name(m, p));
    } else {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, "SIG-5", EVENTS(p->event, s->applied_event, event),
                     "rank %u sees a later signal of rank %u on channel %u in word %u, and then %" PRIu64
                     " in word %u, which is without the earlier %s",
                     read->rank, s->rank, s->channel, why->slot, read->value, read->slot, model_name(m, p));
    }
}

static void explain(decoder *d, uint32_t event, uint32_t epoch) {
    uccl_ep_model *m = d->m;
    const uccl_ep_model_event *read = &m->events[event];
    const uint64_t value = read->value, at = read->begin;
    /* Without what is known: then something is missing. */
    uint32_t lows[64];
    for (uint32_t i = 0; i < d->n_lanes; i++) {
        if (i < 64) lows[i] = d->lanes[i].low;
        d->lanes[i].low = 0;
    }
    decode(d, value);
    if (d->solutions) {
        for (uint32_t i = 0; i < d->n_lanes && i < 64; i++)
            if (d->lanes[i].least < lows[i]) {
                report_missing(d, event, &d->lanes[i]);
                return;
            }
    }
    d->budget = BUDGET;
    if (subset(d, 0, 0, value)) {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, at, "SIG-5", EVENTS(event),
                     "rank %u sees %" PRIu64
                     " in signal %u: a later signal of a channel is in it and an earlier one of "
                     "the same channel is not",
                     read->rank, value, read->slot);
        return;
    }
    /* Not posted yet, refused, or of an older incarnation. */
    bool barred = false, old = false;
    for (uint32_t i = 0; i < d->n_lanes; i++) {
        lane *l = &d->lanes[i];
        l->high = l->n;
        old |= m->streams[l->stream].epoch < epoch;
        for (uint32_t k = 0; k < l->n; k++) barred |= m->posts[d->by_word[l->first + k]].barred;
    }
    d->budget = BUDGET;
    if (subset(d, 0, 0, value)) {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, at, barred || old ? "ERR-6" : "SIG-1", EVENTS(event),
                     "rank %u sees %" PRIu64 " in signal %u, which no signal of this time gives: %s", read->rank, value,
                     read->slot,
                     old      ? "one of before the reset was applied after it"
                     : barred ? "one was applied although its (channel, target) was closed"
                              : "one was applied before it was posted");
        return;
    }
    for (uint32_t i = 0; i < d->n_lanes; i++)
        for (uint32_t k = 0; k < d->lanes[i].n; k++) {
            const post *p = &m->posts[d->by_word[d->lanes[i].first + k]];
            d->budget = BUDGET;
            if (!p->add || !subset(d, 0, 0, value - p->add)) continue;
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, at, "SIG-1", EVENTS(p->event, event),
                         "rank %u sees %" PRIu64 " in signal %u: %s was applied more than once", read->rank, value,
                         read->slot, model_name(m, p));
            return;
        }
    model_report(m, UCCL_EP_MODEL_FORBIDDEN, at, "SIG-1", EVENTS(event),
                 "rank %u sees %" PRIu64 " (0x%" PRIx64
                 ") in signal %u, which no set of the signals posted to it gives",
                 read->rank, value, value, read->slot);
}

/* --------------------------------------------------------------------------------------------------------- judgement
 */

static void judge_read(decoder *d, uint32_t event) {
    uccl_ep_model *m = d->m;
    const uccl_ep_model_event *read = &m->events[event];
    uint32_t epoch;
    if (!model_epoch(m, read->rank, read->begin, read->end, &epoch)) return;
    learn_until(d, read->begin);
    if (!find_lanes(d, read->rank, read->slot)) return;
    order_lanes(d);
    bound_lanes(d, read, epoch);
    m->verdict->signals_judged++;
    if (!decode(d, read->value)) {
        m->verdict->undecided++;
        if (!bound_sums(d, read->value)) {
            explain(d, event, epoch);
            return;
        }
    } else if (!d->solutions) {
        explain(d, event, epoch);
        return;
    }
    for (uint32_t i = 0; i < d->n_lanes; i++) {
        const lane *l = &d->lanes[i];
        if (l->least > l->low) seen(d, &m->posts[d->by_word[l->first + l->least - 1]], read, event);
    }
}

static bool collect_signals(decoder *d) {
    uccl_ep_model *m = d->m;
    d->by_word = model_room(m, m->n_posts, sizeof *d->by_word);
    d->sum = model_room(m, m->n_posts, sizeof *d->sum);
    if (!d->by_word || !d->sum) return false;
    for (uint32_t i = 0; i < m->n_posts; i++)
        if (has_add(m->posts[i].op) && m->posts[i].slot < m->signals) d->by_word[d->n++] = i;
    sorted_posts = m->posts;
    qsort(d->by_word, d->n, sizeof *d->by_word, by_word);
    for (uint32_t i = 0; i < d->n; i++) {
        const post *p = &m->posts[d->by_word[i]], *before = i ? &m->posts[d->by_word[i - 1]] : NULL;
        const bool same = before && before->stream == p->stream && before->slot == p->slot;
        d->sum[i] = p->add + (same ? d->sum[i - 1] : 0);
        if (p->complete_by != NEVER && !p->barred)
            push(d, (sight){p->complete_by, p->stream, p->place, p->complete_event});
    }
    return true;
}

/* A signal that is applied says so of its stream before it: signals (SIG-5) and puts (SIG-2). */
static void spread(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_streams; i++) {
        const stream *s = &m->streams[i];
        const post *later = NULL;
        for (uint32_t k = s->n; k-- > 0;) {
            post *p = &m->posts[m->order[s->first + k]];
            if (later && later->seen_by < p->seen_by && !p->barred)
                p->seen_by = later->seen_by, p->seen_event = later->seen_event, p->seen_how = later->seen_how,
                p->seen_signal = later->seen_signal;
            if (p->seen_how == HOW_SIGNAL && (!later || p->seen_by < later->seen_by)) later = p;
        }
    }
}

void signals_judge(uccl_ep_model *m) {
    decoder d = {.m = m};
    uint32_t n = 0;
    uint32_t *reads = NULL;
    if (!collect_signals(&d)) goto out;
    for (uint32_t i = 0; i < m->n_events; i++) n += m->events[i].kind == UCCL_EP_MODEL_SIGNAL;
    reads = model_room(m, n, sizeof *reads);
    if (!reads) goto out;
    n = 0;
    for (uint32_t i = 0; i < m->n_events; i++)
        if (m->events[i].kind == UCCL_EP_MODEL_SIGNAL) reads[n++] = i;
    sorted_events = m->events;
    qsort(reads, n, sizeof *reads, by_begin);
    for (uint32_t i = 0; i < n && !m->out_of_memory; i++) judge_read(&d, reads[i]);
    spread(m);
out:
    free(reads);
    free(d.by_word);
    free(d.sum);
    free(d.heap);
    free(d.lanes);
}
