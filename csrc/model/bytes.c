/* SPDX-License-Identifier: Apache-2.0
 *
 * bytes.c: could this word have been there? PUT-1, PUT-5, PUT-7, SIG-2, SIG-3, QUI-0, QUI-1, QUI-5, ERR-3, ERR-6,
 * MEM-2, and whether the program kept PUT-3 and PUT-7 itself.
 *
 * Everybody who ever wrote a word is a *writer* of it: stores of its own rank, and puts to it. At the time of a read a
 * writer's bytes may be there if it had begun by the read's end, and unless somebody wrote for good after it: a writer
 * that is known to be visible before the read began and that began after the first one was settled (a store: its end; a
 * put: complete, or before a reset). A put's bytes are what its source may have held from its posting until its source
 * was free, by the same rule, so a program that changes a source too early widens what is allowed instead of causing a
 * false alarm; that it did is told apart (PUT-3, PUT-7 as duties).
 */
#include <inttypes.h>

#include "internal.h"

#define MAX_CANDIDATES 64u
#define MAX_DEPTH 6u
#define MAX_PAGES 4096u

typedef struct writer {
    uint64_t offset, end_offset; /* of its bytes at its rank */
    uint64_t begin, end;         /* of the event */
    uint64_t highest_end;        /* of all before it in the index, itself included */
    uint32_t event, post;        /* NOBODY: a store */
} writer;

/* A read that showed one writer's bytes for certain: they are placed from then on. */
typedef struct proof {
    uint64_t word, time;
    uint32_t rank, writer, event, next;
} proof;

typedef struct candidate {
    uint64_t value;
    uint32_t writer; /* index of its rank; NOBODY: never written */
} candidate;

typedef struct memory {
    uccl_ep_model *m;
    writer **of; /* per rank, by offset */
    uint32_t *n;
    /* The same by where they write: those of page p of rank r are index[r][pages[r][p] .. pages[r][p + 1]). What is
     * behind the heap is in the last page. */
    uint32_t **pages, **index;
    uint64_t n_pages;
    unsigned page_shift;
    proof *proofs;
    uint32_t n_proofs, room_proofs;
    uint32_t *buckets;
    uint32_t n_buckets;
    /* of the word at hand */
    candidate candidates[MAX_CANDIDATES];
    uint32_t n_candidates;
    bool anything; /* too deep or too many: nothing can be said */
} memory;

static int by_offset(const void *x, const void *y) {
    const writer *a = x, *b = y;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->event < b->event ? -1 : a->event > b->event;
}

static _Thread_local const uccl_ep_model_event *sorted_events;

static int by_begin(const void *x, const void *y) {
    const uccl_ep_model_event *a = &sorted_events[*(const uint32_t *)x], *b = &sorted_events[*(const uint32_t *)y];
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

/* ---------------------------------------------------------------------------------------------------------- writers */

static const post *put_of(const memory *y, const writer *w) {
    return w->post == NOBODY ? NULL : &y->m->posts[w->post];
}

/* Nothing of it is placed after this. */
static uint64_t settled(const memory *y, const writer *w) {
    const post *p = put_of(y, w);
    return p ? p->settled_by : w->end;
}

/* All of it is visible from then on; NEVER: nobody knows. */
static uint64_t placed(const memory *y, const writer *w) {
    const post *p = put_of(y, w);
    return p ? p->seen_by : w->end;
}

static uint64_t page_of(const memory *y, uint64_t offset) {
    const uint64_t page = offset >> y->page_shift;
    return page < y->n_pages ? page : y->n_pages - 1;
}

static bool build_pages(memory *y) {
    uccl_ep_model *m = y->m;
    for (y->page_shift = 9; m->heap_bytes >> y->page_shift >= MAX_PAGES;) y->page_shift++;
    y->n_pages = (m->heap_bytes >> y->page_shift) + 1;
    y->pages = model_room(m, m->ranks, sizeof *y->pages);
    y->index = model_room(m, m->ranks, sizeof *y->index);
    if (!y->pages || !y->index) return false;
    for (uint32_t r = 0; r < m->ranks; r++) {
        uint32_t *ends = y->pages[r] = model_room(m, y->n_pages + 1, sizeof *ends);
        if (!ends) return false;
        for (uint32_t i = 0; i < y->n[r]; i++)
            for (uint64_t p = page_of(y, y->of[r][i].offset); p <= page_of(y, y->of[r][i].end_offset - 1); p++)
                ends[p]++;
        for (uint64_t p = 1; p <= y->n_pages; p++) ends[p] += ends[p - 1];
        y->index[r] = model_room(m, ends[y->n_pages], sizeof **y->index);
        if (!y->index[r]) return false;
        for (uint32_t i = y->n[r]; i-- > 0;)
            for (uint64_t p = page_of(y, y->of[r][i].offset); p <= page_of(y, y->of[r][i].end_offset - 1); p++)
                y->index[r][--ends[p]] = i; /* what was the end of a page is its beginning in the end */
    }
    return true;
}

static bool build_index(memory *y) {
    uccl_ep_model *m = y->m;
    y->of = model_room(m, m->ranks, sizeof *y->of);
    y->n = model_room(m, m->ranks, sizeof *y->n);
    if (!y->of || !y->n) return false;
    for (int filling = 0; filling < 2; filling++) {
        for (uint32_t r = 0; r < m->ranks && filling; r++) {
            y->of[r] = model_room(m, y->n[r], sizeof **y->of);
            if (!y->of[r]) return false;
            y->n[r] = 0;
        }
        for (uint32_t i = 0; i < m->n_events; i++) {
            const uccl_ep_model_event *e = &m->events[i];
            if (e->kind != UCCL_EP_MODEL_STORE || !e->bytes) continue;
            if (filling)
                y->of[e->rank][y->n[e->rank]] = (writer){e->local, e->local + e->bytes, e->begin, e->end, 0, i, NOBODY};
            y->n[e->rank]++;
        }
        for (uint32_t i = 0; i < m->n_posts; i++) {
            const post *p = &m->posts[i];
            if (!p->bytes) continue;
            if (filling)
                y->of[p->target][y->n[p->target]] =
                    (writer){p->remote, p->remote + p->bytes, p->begin, p->end, 0, p->event, i};
            y->n[p->target]++;
        }
    }
    for (uint32_t r = 0; r < m->ranks; r++) {
        qsort(y->of[r], y->n[r], sizeof **y->of, by_offset);
        uint64_t highest = 0;
        for (uint32_t i = 0; i < y->n[r]; i++) {
            if (y->of[r][i].end_offset > highest) highest = y->of[r][i].end_offset;
            y->of[r][i].highest_end = highest;
        }
    }
    return build_pages(y);
}

/* The writers of rank that touch [from, to) are among those below the result, from the back, until one whose highest
 * end is at or below `from`. */
static uint32_t first_behind(const memory *y, uint32_t rank, uint64_t to) {
    uint32_t low = 0, high = y->n[rank];
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (y->of[rank][middle].offset < to)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

#define FOR_WRITERS(y, rank, from, to, w)                                                                              \
    for (uint32_t i_##w = first_behind(y, rank, to); i_##w-- > 0 && (y)->of[rank][i_##w].highest_end > (from);)        \
        for (const writer *w = &(y)->of[rank][i_##w]; w && w->end_offset > (from); w = NULL)

/* The writers of one word. */
#define FOR_WRITERS_OF(y, rank, word, w)                                                                               \
    for (uint32_t *pages_##w = &(y)->pages[rank][page_of(y, word)], i_##w = pages_##w[1]; i_##w-- > pages_##w[0];)     \
        for (const writer *w = &(y)->of[rank][(y)->index[rank][i_##w]];                                                \
             w && w->offset <= (word) && (word) < w->end_offset; w = NULL)

static uint64_t store_value(const memory *y, const writer *w, uint64_t word) {
    const uint64_t k = (word - w->offset) / 8;
    const uint64_t *words = y->m->words[w->event];
    return words ? words[k] : uccl_ep_model_stamp((uint32_t)y->m->events[w->event].value, (uint32_t)k);
}

/* ------------------------------------------------------------------------------------------------------- candidates */

static void add_candidate(memory *y, uint64_t value, uint32_t writer_index) {
    for (uint32_t i = 0; i < y->n_candidates; i++)
        if (y->candidates[i].value == value && y->candidates[i].writer == writer_index) return;
    if (y->n_candidates == MAX_CANDIDATES)
        y->anything = true;
    else
        y->candidates[y->n_candidates++] = (candidate){value, writer_index};
}

static uint32_t bucket_of(const memory *y, uint32_t rank, uint64_t word) {
    return (uint32_t)((word / 8 * 31 + rank) % y->n_buckets);
}

/* The latest begin of a writer that is placed for good before `time`: who was settled before that is overwritten. */
static uint64_t overwritten_before(const memory *y, uint32_t rank, uint64_t word, uint64_t time, uint32_t *by) {
    uint64_t latest = 0;
    *by = NOBODY;
    FOR_WRITERS_OF(y, rank, word, w) {
        if (placed(y, w) >= time || (*by != NOBODY && w->begin < latest)) continue;
        latest = w->begin;
        *by = (uint32_t)(w - y->of[rank]);
    }
    for (uint32_t i = y->buckets[bucket_of(y, rank, word)]; i != NOBODY; i = y->proofs[i].next) {
        const proof *k = &y->proofs[i];
        if (k->rank != rank || k->word != word || k->time >= time) continue;
        const uint64_t begin = y->of[rank][k->writer].begin;
        if (*by != NOBODY && begin <= latest) continue;
        latest = begin;
        *by = k->writer;
    }
    return latest;
}

/* The read before `time` that showed the bytes of writer `by` in this word. */
static uint32_t shown_before(const memory *y, uint32_t rank, uint64_t word, uint32_t by, uint64_t time) {
    for (uint32_t i = y->buckets[bucket_of(y, rank, word)]; i != NOBODY; i = y->proofs[i].next) {
        const proof *k = &y->proofs[i];
        if (k->rank == rank && k->word == word && k->writer == by && k->time < time) return k->event;
    }
    return NOBODY;
}

static void possible(memory *y, uint32_t rank, uint64_t word, uint64_t from, uint64_t to, uint32_t as, unsigned depth);

/* What writer `w` would put into `word`. `as`: whom to name; NOBODY: itself. */
static void values_of(memory *y, uint32_t rank, const writer *w, uint64_t word, uint64_t to, uint32_t as,
                      unsigned depth) {
    const post *p = put_of(y, w);
    const uint32_t name = as != NOBODY ? as : (uint32_t)(w - y->of[rank]);
    if (!p)
        add_candidate(y, store_value(y, w, word), name);
    else
        possible(y, p->rank, p->local + (word - p->remote), p->begin, p->free_by < to ? p->free_by : to, name,
                 depth + 1);
}

static void possible(memory *y, uint32_t rank, uint64_t word, uint64_t from, uint64_t to, uint32_t as, unsigned depth) {
    if (depth > MAX_DEPTH) {
        y->anything = true;
        return;
    }
    uint32_t by;
    const uint64_t latest = overwritten_before(y, rank, word, from, &by);
    if (by == NOBODY) add_candidate(y, 0, as);
    FOR_WRITERS_OF(y, rank, word, w) {
        const post *p = put_of(y, w);
        if (w->begin > to || (p && p->barred) || y->anything) continue;
        if (by != NOBODY && settled(y, w) < latest) continue;
        values_of(y, rank, w, word, to, as, depth);
    }
}

static bool among(const memory *y, uint64_t value, uint32_t *only) {
    uint32_t found = 0;
    *only = NOBODY;
    for (uint32_t i = 0; i < y->n_candidates; i++) {
        if (y->candidates[i].value != value) continue;
        found++;
        *only = y->candidates[i].writer;
    }
    if (found > 1) *only = NOBODY;
    if (found || y->anything) return true;
    /* Two writers at once: a word is not promised to be placed in one go. */
    if (y->n_candidates < 2) return false;
    for (unsigned byte = 0; byte < 64; byte += 8) {
        bool match = false;
        for (uint32_t i = 0; i < y->n_candidates && !match; i++)
            match = (y->candidates[i].value >> byte & 255) == (value >> byte & 255);
        if (!match) return false;
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------- explaining */

/* Could rank `to` have learned, through signals over somebody else, of what rank `from` knew at `time`? (QUI-5) */
static bool told_by_others(const memory *y, uint32_t from, uint64_t time, uint32_t to, uint64_t until) {
    const uccl_ep_model *m = y->m;
    uint64_t *known = model_room(y->m, 2 * (size_t)m->ranks, sizeof *known);
    if (!known) return false;
    uint64_t *others = known + m->ranks; /* by a way that does not come from `from` directly */
    for (uint32_t r = 0; r < m->ranks; r++) known[r] = others[r] = NEVER;
    known[from] = time;
    for (uint32_t round = 0; round < m->ranks; round++)
        for (uint32_t i = 0; i < m->n_posts; i++) {
            const post *p = &m->posts[i];
            if (!has_add(p->op) || p->seen_by >= until || p->rank == p->target) continue;
            if (p->begin <= known[p->rank]) continue;
            if (p->seen_by < known[p->target]) known[p->target] = p->seen_by;
            if (p->rank != from && p->seen_by < others[p->target]) others[p->target] = p->seen_by;
        }
    const bool told = others[to] < until;
    free(known);
    return told;
}

static bool word_differs(const memory *y, uint32_t rank, uint64_t word, uint64_t value, uint64_t after) {
    const uccl_ep_model *m = y->m;
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->kind == UCCL_EP_MODEL_READ && e->rank == rank && e->begin > after && e->local <= word &&
            word < e->local + e->bytes && m->words[i][(word - e->local) / 8] != value)
            return true;
    }
    return false;
}

/* `value` is what `old` wrote, or nobody yet, and writer `by` is known to have written after it. */
static void report_stale(memory *y, uint32_t event, uint64_t word, uint64_t value, const writer *old, uint32_t by) {
    uccl_ep_model *m = y->m;
    const uccl_ep_model_event *read = &m->events[event];
    const uint32_t proof_event = shown_before(y, read->rank, word, by, read->begin);
    const writer *w = &y->of[read->rank][by];
    const post *p = put_of(y, w), *q = old ? put_of(y, old) : NULL;
    const char *what = old ? "what was there before it" : "nothing";
    const uint32_t old_event = old ? old->event : w->event;
    const bool reset = q && q->settled_event != NOBODY && m->events[q->settled_event].kind == UCCL_EP_MODEL_RESET;
    const char *again = reset ? ": it is of before the reset" : q ? ": it was placed again after it was complete" : "";
    if (proof_event != NOBODY) {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin,
                     reset ? "ERR-6"
                     : q   ? "PUT-7"
                           : "PUT-1",
                     EVENTS(old_event, w->event, proof_event, event),
                     "offset %" PRIu64 " of rank %u showed newer bytes before, and shows 0x%016" PRIx64
                     " again, which %s wrote%s",
                     word, read->rank, value, q ? model_name(m, q) : "a store of its own", again);
        return;
    }
    if (!p) {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin,
                     reset ? "ERR-6"
                     : q   ? "PUT-7"
                           : "PUT-1",
                     EVENTS(old_event, w->event, event),
                     "rank %u stored to its offset %" PRIu64 " itself, and reads 0x%016" PRIx64 ", %s%s", read->rank,
                     word, value, what, again);
        return;
    }
    const uccl_ep_model_event *why = &m->events[p->seen_event];
    const bool comes = word_differs(y, read->rank, word, value, read->end);
    if (p->seen_how == HOW_WAIT) {
        const bool told = p->rank != read->rank && told_by_others(y, p->rank, p->seen_by, read->rank, read->begin);
        const char *clause = q && !comes                         ? "PUT-5"
                             : told                              ? "QUI-5"
                             : why->channel == UCCL_EP_MODEL_ALL ? "QUI-2"
                                                                 : "QUI-1";
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, clause, EVENTS(old_event, w->event, p->seen_event, event),
                     "%s was complete when a wait for it succeeded, and rank %u then reads %s (0x%016" PRIx64
                     ") at offset %" PRIu64 "%s",
                     model_name(m, p), read->rank, what, value, word,
                     told ? ", having heard of it by another rank" : "");
        return;
    }
    const post *s = &m->posts[p->seen_signal];
    const char *clause = p->failed || s->failed                    ? "ERR-3"
                         : q && !comes && q->settled_by < p->begin ? "PUT-5"
                         : s == p                                  ? "SIG-3"
                                                                   : "SIG-2";
    model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, clause,
                 EVENTS(old_event, p->event, s->event, p->seen_event, event),
                 "rank %u saw signal %u, which %s added to, and then reads %s (0x%016" PRIx64 ") at offset %" PRIu64
                 ": %s is not visible%s",
                 read->rank, s->slot, model_name(m, s), what, value, word, s == p ? "its own put" : model_name(m, p),
                 p->failed || s->failed ? ", though one of them failed" : "");
}

/* `value` is none that could be there. Whose is it? */
static void explain(memory *y, uint32_t event, uint64_t word, uint64_t value) {
    uccl_ep_model *m = y->m;
    const uccl_ep_model_event *read = &m->events[event];
    const uint32_t rank = read->rank;
    uint32_t by;
    overwritten_before(y, rank, word, read->begin, &by);
    bool put_covers = false;
    FOR_WRITERS_OF(y, rank, word, w) {
        const post *p = put_of(y, w);
        put_covers |= p != NULL;
        y->n_candidates = 0;
        y->anything = false;
        values_of(y, rank, w, word, NEVER, NOBODY, 0);
        bool match = false;
        for (uint32_t i = 0; i < y->n_candidates; i++) match |= y->candidates[i].value == value;
        if (!match) continue;
        if (p && p->barred) {
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, "ERR-6", EVENTS(p->closure, p->event, event),
                         "rank %u reads bytes of %s at offset %" PRIu64
                         ", which was posted after its (channel, target) was closed",
                         rank, model_name(m, p), word);
            return;
        }
        if (w->begin > read->end) {
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, "PUT-1", EVENTS(w->event, event),
                         "rank %u reads 0x%016" PRIx64 " at offset %" PRIu64 " before anybody wrote it", rank, value,
                         word);
            return;
        }
        if (by != NOBODY && settled(y, w) < y->of[rank][by].begin) {
            report_stale(y, event, word, value, w, by);
            return;
        }
    }
    /* A put took its source too late, or too early. */
    FOR_WRITERS_OF(y, rank, word, w) {
        const post *p = put_of(y, w);
        if (!p) continue;
        const uint64_t source = p->local + (word - p->remote);
        FOR_WRITERS_OF(y, p->rank, source, s) {
            if (s->post != NOBODY || store_value(y, s, source) != value) continue;
            const bool later = s->begin > p->begin;
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, later ? "QUI-0" : "PUB-1",
                         later && p->free_event != NOBODY ? EVENTS(p->event, p->free_event, s->event, event)
                                                          : EVENTS(s->event, p->event, event),
                         "rank %u reads 0x%016" PRIx64 " at offset %" PRIu64 ": %s took what rank %u stored %s", rank,
                         value, word, model_name(m, p), p->rank,
                         later ? "after the source had been reported free"
                               : "earlier, and not what was there at its post");
            return;
        }
    }
    if (value == 0 && by != NOBODY) {
        report_stale(y, event, word, value, NULL, by);
        return;
    }
    if (word >= m->heap_bytes) {
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, "MEM-2", EVENTS(event),
                     "0x%016" PRIx64 " stands %" PRIu64
                     " bytes behind the heap of rank %u: memory outside the region was "
                     "written",
                     value, word - m->heap_bytes, rank);
        return;
    }
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->kind != UCCL_EP_MODEL_STORE || m->words[i]) continue;
        if (value >> 32 != (uint32_t)e->value || (value & UINT32_MAX) >= e->bytes / 8) continue;
        model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, "PUT-1", EVENTS(i, event),
                     "rank %u reads at offset %" PRIu64 " what rank %u stored at its offset %" PRIu64
                     ", and no put carries it there",
                     rank, word, e->rank, e->local + (value & UINT32_MAX) * 8);
        return;
    }
    model_report(m, UCCL_EP_MODEL_FORBIDDEN, read->begin, put_covers ? "PUT-1" : "MEM-2", EVENTS(event),
                 "rank %u reads 0x%016" PRIx64 " at offset %" PRIu64 ", which nobody wrote%s", rank, value, word,
                 put_covers ? ": torn, or from elsewhere" : ", and no put goes there");
}

/* --------------------------------------------------------------------------------------------------------- judgement
 */

static void prove(memory *y, uint32_t rank, uint64_t word, uint64_t time, uint32_t writer_index, uint32_t event) {
    if (y->n_proofs == y->room_proofs) {
        const uint32_t room = y->room_proofs ? 2 * y->room_proofs : 256;
        proof *proofs = realloc(y->proofs, room * sizeof *proofs);
        if (!proofs) {
            y->m->out_of_memory = true;
            return;
        }
        y->proofs = proofs;
        y->room_proofs = room;
    }
    uint32_t *bucket = &y->buckets[bucket_of(y, rank, word)];
    y->proofs[y->n_proofs] = (proof){word, time, rank, writer_index, event, *bucket};
    *bucket = y->n_proofs++;
}

static void judge_read(memory *y, uint32_t event) {
    uccl_ep_model *m = y->m;
    const uccl_ep_model_event *read = &m->events[event];
    for (uint64_t k = 0; k < read->bytes / 8 && !m->out_of_memory; k++) {
        const uint64_t word = read->local + 8 * k, value = m->words[event][k];
        y->n_candidates = 0;
        y->anything = false;
        possible(y, read->rank, word, read->begin, read->end, NOBODY, 0);
        m->verdict->words_judged++;
        uint32_t only;
        if (!among(y, value, &only)) {
            explain(y, event, word, value);
            continue;
        }
        if (only != NOBODY && !y->anything && y->of[read->rank][only].post != NOBODY)
            prove(y, read->rank, word, read->end, only, event);
    }
}

/* What may have had no effect breaks no duty. */
static bool surely(const post *p) {
    return !p->barred && !p->maybe;
}

/* The program's own duties: sources are left alone until free (PUT-3), targets until complete (PUT-7). */
static void judge_duties(memory *y) {
    uccl_ep_model *m = y->m;
    for (uint32_t i = 0; i < m->n_posts; i++) {
        const post *p = &m->posts[i];
        if (!p->bytes || !surely(p)) continue;
        FOR_WRITERS(y, p->rank, p->local, p->local + p->bytes, w) {
            const post *q = put_of(y, w);
            if (q && !surely(q)) continue;
            const uint64_t there = q ? q->seen_by : w->end;
            if (there < p->begin || p->free_by < w->begin) continue;
            if (q == p && (p->local >= p->remote + p->bytes || p->remote >= p->local + p->bytes)) continue;
            model_report(m, UCCL_EP_MODEL_PROGRAM, w->begin, "PUT-3", EVENTS(p->event, w->event),
                         "the program changes the source of %s, at offset %" PRIu64
                         " of rank %u, before a wait has told that it is free",
                         model_name(m, p), w->offset > p->local ? w->offset : p->local, p->rank);
        }
        FOR_WRITERS(y, p->target, p->remote, p->remote + p->bytes, w) {
            const post *q = put_of(y, w);
            if (q == p || (q && !surely(q))) continue;
            if (settled(y, w) < p->begin || p->settled_by < w->begin) continue;
            model_report(m, UCCL_EP_MODEL_PROGRAM, w->begin > p->begin ? w->begin : p->begin, "PUT-7",
                         EVENTS(p->event, w->event),
                         "the program writes offset %" PRIu64 " of rank %u, a target of %s, which is not known to be "
                         "complete",
                         w->offset > p->remote ? w->offset : p->remote, p->target, model_name(m, p));
        }
    }
}

void bytes_judge(uccl_ep_model *m) {
    memory y = {.m = m};
    uint32_t n = 0;
    uint64_t words = 0;
    uint32_t *reads = NULL;
    if (!build_index(&y)) goto out;
    for (uint32_t i = 0; i < m->n_events; i++)
        if (m->events[i].kind == UCCL_EP_MODEL_READ) n++, words += m->events[i].bytes / 8;
    reads = model_room(m, n, sizeof *reads);
    y.n_buckets = words < 64 ? 64 : words > (1u << 20) ? 1u << 20 : (uint32_t)words;
    y.buckets = model_room(m, y.n_buckets, sizeof *y.buckets);
    if (!reads || !y.buckets) goto out;
    memset(y.buckets, 0xff, y.n_buckets * sizeof *y.buckets);
    n = 0;
    for (uint32_t i = 0; i < m->n_events; i++)
        if (m->events[i].kind == UCCL_EP_MODEL_READ) reads[n++] = i;
    sorted_events = m->events;
    qsort(reads, n, sizeof *reads, by_begin);
    for (uint32_t i = 0; i < n && !m->out_of_memory; i++) judge_read(&y, reads[i]);
    if (!m->out_of_memory) judge_duties(&y);
out:
    for (uint32_t r = 0; y.of && r < m->ranks; r++) free(y.of[r]);
    for (uint32_t r = 0; y.pages && r < m->ranks; r++) free(y.pages[r]);
    for (uint32_t r = 0; y.index && r < m->ranks; r++) free(y.index[r]);
    free(y.pages);
    free(y.index);
    free(y.of);
    free(y.n);
    free(y.proofs);
    free(y.buckets);
    free(reads);
}
