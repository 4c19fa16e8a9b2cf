/* SPDX-License-Identifier: Apache-2.0
 *
 * timeline.c: posts in order, and by when each was free, complete, failed or settled; what can be judged of that alone:
 * PUB-1, ERR-2, and clocks that disagree.
 */
#include <inttypes.h>

#include "internal.h"
#include "uccl_ep/status.h"

/* qsort has no context; histories of other threads must not get in the way. */
static _Thread_local const post *sorted_posts;
static _Thread_local const uccl_ep_model_event *sorted_events;

#define COMPARE(a, b)                                                                                                  \
    if ((a) != (b)) return (a) < (b) ? -1 : 1

static int by_ticket(const void *x, const void *y) {
    const post *a = &sorted_posts[*(const uint32_t *)x], *b = &sorted_posts[*(const uint32_t *)y];
    COMPARE(a->rank, b->rank);
    COMPARE(a->channel, b->channel);
    COMPARE(a->ticket, b->ticket);
    COMPARE(a->event, b->event);
    return 0;
}

static int by_stream(const void *x, const void *y) {
    const post *a = &sorted_posts[*(const uint32_t *)x], *b = &sorted_posts[*(const uint32_t *)y];
    COMPARE(a->rank, b->rank);
    COMPARE(a->channel, b->channel);
    COMPARE(a->target, b->target);
    COMPARE(a->epoch, b->epoch);
    COMPARE(a->ticket, b->ticket);
    COMPARE(a->event, b->event);
    return 0;
}

static int by_rank_and_begin(const void *x, const void *y) {
    const uccl_ep_model_event *a = &sorted_events[*(const uint32_t *)x], *b = &sorted_events[*(const uint32_t *)y];
    COMPARE(a->rank, b->rank);
    COMPARE(a->begin, b->begin);
    return 0;
}

static uint32_t count_kind(const uccl_ep_model *m, uint32_t kind) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_events; i++) n += m->events[i].kind == kind;
    return n;
}

/* ------------------------------------------------------------------------------------------------- resets, barriers */

bool model_epoch(const uccl_ep_model *m, uint32_t rank, uint64_t begin, uint64_t end, uint32_t *epoch) {
    *epoch = 0;
    for (uint32_t i = 0; i < m->n_resets; i++) {
        const uccl_ep_model_event *reset = &m->events[m->resets[i]];
        if (reset->rank != rank || reset->begin > end) continue;
        /* What a reset that failed left behind is anybody's guess. */
        if (reset->status || reset->end >= begin) return false;
        ++*epoch;
    }
    return true;
}

/* When the reset that ends `epoch` had settled everything: before the first rank left it. NEVER: there was none. */
static uint64_t settle_time(const uccl_ep_model *m, uint32_t epoch, uint32_t *event) {
    uint64_t first = NEVER;
    uint32_t rank = NOBODY, nth = 0;
    for (uint32_t i = 0; i < m->n_resets; i++) {
        const uccl_ep_model_event *reset = &m->events[m->resets[i]];
        if (reset->rank != rank) rank = reset->rank, nth = 0;
        if (reset->status) continue;
        if (nth++ == epoch && reset->end < first) first = reset->end, *event = m->resets[i];
    }
    return first;
}

static bool clocks_agree(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *a = &m->events[i];
        if (a->kind != UCCL_EP_MODEL_BARRIER) continue;
        for (uint32_t k = i + 1; k < m->n_events; k++) {
            const uccl_ep_model_event *b = &m->events[k];
            if (b->kind != UCCL_EP_MODEL_BARRIER || b->value != a->value) continue;
            if (a->end >= b->begin && b->end >= a->begin) continue;
            model_report(m, UCCL_EP_MODEL_INVALID, 0, "", EVENTS(i, k),
                         "ranks %u and %u were at barrier %" PRIu64
                         " and their intervals do not meet: their clocks are not one clock, or somebody left early",
                         a->rank, b->rank, a->value);
            return false;
        }
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------------ posts */

/* Refused at once, with nothing posted. What failed later may have been posted in part. */
static bool refused(int32_t status) {
    return status == UCCL_EP_E_INVALID || status == UCCL_EP_E_RANGE || status == UCCL_EP_E_ALIGNMENT ||
           status == UCCL_EP_E_PEER_LOST || status == UCCL_EP_E_AGAIN || status == UCCL_EP_E_FORKED;
}

/* Resets of the rank that had ended when something began. */
static uint32_t epoch_at(const uccl_ep_model *m, uint32_t rank, uint64_t begin) {
    uint32_t epoch = 0;
    for (uint32_t k = 0; k < m->n_resets; k++) {
        const uccl_ep_model_event *reset = &m->events[m->resets[k]];
        epoch += reset->rank == rank && !reset->status && reset->end < begin;
    }
    return epoch;
}

static bool collect_posts(uccl_ep_model *m) {
    const uint32_t room = count_kind(m, UCCL_EP_MODEL_POST);
    m->posts = model_room(m, room, sizeof *m->posts);
    m->order = model_room(m, room, sizeof *m->order);
    if (!m->posts || !m->order) return false;
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->kind != UCCL_EP_MODEL_POST || refused(e->status)) continue;
        post *p = &m->posts[m->n_posts];
        *p = (post){.event = i,
                    .rank = e->rank,
                    .channel = e->channel,
                    .target = e->peer,
                    .op = e->op,
                    .slot = e->slot,
                    .ticket = e->status ? UCCL_EP_MODEL_NO_TICKET : e->ticket,
                    .local = e->local,
                    .remote = e->remote,
                    .bytes = has_bytes(e->op) ? e->bytes : 0,
                    .add = has_add(e->op) ? e->value : 0,
                    .begin = e->begin,
                    .end = e->end,
                    .maybe = e->status != 0,
                    .free_by = NEVER,
                    .complete_by = NEVER,
                    .settled_by = NEVER,
                    .seen_by = NEVER,
                    .free_event = NOBODY,
                    .complete_event = NOBODY,
                    .settled_event = NOBODY,
                    .seen_event = NOBODY,
                    .seen_signal = NOBODY};
        p->epoch = epoch_at(m, p->rank, p->begin);
        m->order[m->n_posts] = m->n_posts;
        m->n_posts++;
    }
    return true;
}

/* Of one channel and epoch, by ticket: which waits cover which posts. A wait behind a reset says nothing of what was
 * before it. A quiet without ticket covers all tickets that were given
 * out before it began, hence all up to the highest of them. */
static bool cover_channel(uccl_ep_model *m, const uint32_t *group, uint32_t n, wait *waits, uint32_t *n_waits) {
    const post *first = &m->posts[group[0]];
    const uint32_t rank = first->rank, channel = first->channel;
    while (n && m->posts[group[n - 1]].ticket == UCCL_EP_MODEL_NO_TICKET) n--;
    if (!n) return true;
    uint64_t *ends = model_room(m, n, sizeof *ends);
    if (!ends) return false;
    for (uint32_t i = n; i-- > 0;) {
        ends[i] = m->posts[group[i]].end;
        if (i + 1 < n && ends[i + 1] < ends[i]) ends[i] = ends[i + 1];
    }
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->kind != UCCL_EP_MODEL_WAIT || e->rank != rank || e->status) continue;
        if (e->channel != channel && e->channel != UCCL_EP_MODEL_ALL) continue;
        if (m->n_resets && epoch_at(m, rank, e->begin) != first->epoch) continue;
        uint32_t low = 0, high = n; /* how many posts it covers */
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            const bool covered = e->ticket == UCCL_EP_MODEL_NO_TICKET ? ends[middle] < e->begin
                                                                      : m->posts[group[middle]].ticket <= e->ticket;
            if (covered)
                low = middle + 1;
            else
                high = middle;
        }
        const uint64_t ticket = e->ticket != UCCL_EP_MODEL_NO_TICKET ? e->ticket
                                : low                                ? m->posts[group[low - 1]].ticket
                                                                     : 0;
        if (!low && e->ticket == UCCL_EP_MODEL_NO_TICKET) continue;
        waits[(*n_waits)++] = (wait){i, rank, channel, ticket, e->begin, e->end, e->source != 0};
        if (!low) continue;
        post *p = &m->posts[group[low - 1]];
        if (e->end < p->free_by) p->free_by = e->end, p->free_event = i;
        if (!e->source && e->end < p->complete_by) p->complete_by = e->end, p->complete_event = i;
    }
    for (uint32_t i = n - 1; i-- > 0;) {
        post *p = &m->posts[group[i]];
        const post *next = &m->posts[group[i + 1]];
        if (next->free_by < p->free_by) p->free_by = next->free_by, p->free_event = next->free_event;
        if (next->complete_by < p->complete_by)
            p->complete_by = next->complete_by, p->complete_event = next->complete_event;
    }
    free(ends);
    return true;
}

/* Posts of one channel in the order of tickets: the order must not contradict time (PUB-1). */
static void judge_order(uccl_ep_model *m, const uint32_t *group, uint32_t n) {
    const post *latest = NULL;
    for (uint32_t i = 0; i < n; i++) {
        const post *p = &m->posts[group[i]];
        if (p->ticket == UCCL_EP_MODEL_NO_TICKET) return;
        if (i && m->posts[group[i - 1]].ticket == p->ticket)
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, p->end, "PUB-1", EVENTS(m->posts[group[i - 1]].event, p->event),
                         "rank %u got ticket %" PRIu64 " of channel %u twice", p->rank, p->ticket, p->channel);
        if (latest && p->end < latest->begin)
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, latest->end, "PUB-1", EVENTS(p->event, latest->event),
                         "ticket %" PRIu64 " was given out after ticket %" PRIu64
                         " of channel %u of rank %u: a smaller ticket is earlier",
                         latest->ticket, p->ticket, p->channel, p->rank);
        if (!latest || p->begin > latest->begin) latest = p;
    }
}

static bool cover(uccl_ep_model *m) {
    uint32_t waits = 0, channels = 0;
    for (uint32_t i = 0; i < m->n_posts; i++) {
        const post *p = &m->posts[m->order[i]];
        if (i && m->posts[m->order[i - 1]].rank == p->rank && m->posts[m->order[i - 1]].channel == p->channel) continue;
        channels++;
    }
    waits = count_kind(m, UCCL_EP_MODEL_WAIT);
    m->waits = model_room(m, (size_t)waits * (channels ? channels : 1), sizeof *m->waits);
    if (!m->waits) return false;
    for (uint32_t i = 0, n; i < m->n_posts; i += n) {
        const post *p = &m->posts[m->order[i]];
        for (n = 1; i + n < m->n_posts; n++) {
            const post *q = &m->posts[m->order[i + n]];
            if (q->rank != p->rank || q->channel != p->channel) break;
        }
        judge_order(m, &m->order[i], n);
        for (uint32_t k = 0, some; k < n; k += some) {
            const uint32_t epoch = m->posts[m->order[i + k]].epoch;
            for (some = 1; k + some < n && m->posts[m->order[i + k + some]].epoch == epoch; some++) {
            }
            if (!cover_channel(m, &m->order[i + k], some, m->waits, &m->n_waits)) return false;
        }
    }
    return true;
}

/* Failures: what may have taken effect or not, and what came too late to take any. */
static void apply_failures(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *f = &m->events[i];
        if (f->kind != UCCL_EP_MODEL_FAILURE) continue;
        uint32_t epoch;
        if (!model_epoch(m, f->rank, f->begin, f->end, &epoch)) continue;
        for (uint32_t k = 0; k < m->n_posts; k++) {
            post *p = &m->posts[k];
            if (p->rank != f->rank || p->epoch != epoch) continue;
            if (f->channel != UCCL_EP_MODEL_ALL && p->channel != f->channel) continue;
            if (f->peer != UCCL_EP_MODEL_ALL && p->target != f->peer) continue;
            /* Without a ticket it is not known whether this one is among them: a later wait may still tell. */
            const bool whole = f->ticket == UCCL_EP_MODEL_NO_TICKET;
            if (whole ? p->complete_by >= f->begin : p->ticket >= f->ticket) p->failed = true;
            if (!whole && p->failed) p->complete_by = NEVER, p->complete_event = NOBODY;
            /* A rank that is lost to one proxy is not yet closed to another: only what names a channel bars. */
            if (f->channel != UCCL_EP_MODEL_ALL && p->begin > f->end && !p->maybe) p->barred = true, p->closure = i;
        }
    }
}

/* A wait that succeeds because the peer was given up says nothing of what was posted to it. */
static void apply_excludes(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->kind != UCCL_EP_MODEL_EXCLUDE) continue;
        for (uint32_t k = 0; k < m->n_posts; k++) {
            post *p = &m->posts[k];
            if (p->rank != e->rank || p->target != e->peer) continue;
            if (p->complete_by != NEVER && m->events[p->complete_event].end >= e->begin)
                p->complete_by = NEVER, p->complete_event = NOBODY;
            if (p->free_by != NEVER && m->events[p->free_event].end >= e->begin)
                p->free_by = NEVER, p->free_event = NOBODY;
        }
    }
}

static void settle(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_posts; i++) {
        post *p = &m->posts[i];
        uint32_t event = NOBODY;
        const uint64_t reset = m->n_resets ? settle_time(m, p->epoch, &event) : NEVER;
        p->settled_by = p->complete_by, p->settled_event = p->complete_event;
        if (reset < p->settled_by) p->settled_by = reset, p->settled_event = event;
        if (reset < p->free_by) p->free_by = reset, p->free_event = event;
        if (p->complete_by != NEVER && !p->barred)
            p->seen_by = p->complete_by, p->seen_event = p->complete_event, p->seen_how = HOW_WAIT;
    }
}

static bool make_streams(uccl_ep_model *m) {
    sorted_posts = m->posts;
    qsort(m->order, m->n_posts, sizeof *m->order, by_stream);
    m->streams = model_room(m, m->n_posts, sizeof *m->streams);
    if (!m->streams) return false;
    for (uint32_t i = 0; i < m->n_posts; i++) {
        post *p = &m->posts[m->order[i]];
        stream *s = m->n_streams ? &m->streams[m->n_streams - 1] : NULL;
        if (!s || s->rank != p->rank || s->channel != p->channel || s->target != p->target || s->epoch != p->epoch) {
            s = &m->streams[m->n_streams++];
            *s = (stream){.rank = p->rank, .channel = p->channel, .target = p->target, .epoch = p->epoch, .first = i};
        }
        p->stream = m->n_streams - 1;
        p->place = s->n++;
    }
    return true;
}

bool timeline_build(uccl_ep_model *m) {
    m->n_posts = m->n_streams = m->n_waits = m->n_resets = 0;
    m->resets = model_room(m, count_kind(m, UCCL_EP_MODEL_RESET), sizeof *m->resets);
    if (!m->resets) return false;
    for (uint32_t i = 0; i < m->n_events; i++)
        if (m->events[i].kind == UCCL_EP_MODEL_RESET) m->resets[m->n_resets++] = i;
    sorted_events = m->events;
    qsort(m->resets, m->n_resets, sizeof *m->resets, by_rank_and_begin);
    if (!clocks_agree(m) || !collect_posts(m)) return false;
    sorted_posts = m->posts;
    qsort(m->order, m->n_posts, sizeof *m->order, by_ticket);
    if (!cover(m)) return false;
    apply_failures(m);
    apply_excludes(m);
    settle(m);
    return make_streams(m);
}

void timeline_free(uccl_ep_model *m) {
    free(m->posts);
    free(m->order);
    free(m->streams);
    free(m->waits);
    free(m->resets);
    m->posts = NULL;
    m->order = m->resets = NULL;
    m->streams = NULL;
    m->waits = NULL;
}

/* -------------------------------------------------------------------------------------------------------- judgement */

/* Whether rank had gone on without the peer, or had reset, by the end of the wait. */
static bool acknowledged(const uccl_ep_model *m, const uccl_ep_model_event *failure, const wait *w) {
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *e = &m->events[i];
        if (e->rank != w->rank || e->begin > w->end) continue;
        if (e->kind == UCCL_EP_MODEL_EXCLUDE && e->peer == failure->peer) return true;
        if (e->kind == UCCL_EP_MODEL_RESET && e->end >= failure->begin) return true;
    }
    return false;
}

void timeline_judge(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_events; i++) {
        const uccl_ep_model_event *f = &m->events[i];
        if (f->kind != UCCL_EP_MODEL_FAILURE || f->ticket == UCCL_EP_MODEL_NO_TICKET) continue;
        for (uint32_t k = 0; k < m->n_waits; k++) {
            const wait *w = &m->waits[k];
            if (w->rank != f->rank || w->channel != f->channel || w->ticket < f->ticket) continue;
            /* A source may have been free before its command failed; complete it cannot have been. */
            if (w->source && w->begin <= f->end) continue;
            if (acknowledged(m, f, w)) continue;
            model_report(m, UCCL_EP_MODEL_FORBIDDEN, w->end, "ERR-2", EVENTS(i, w->event),
                         "a wait of rank %u that covers ticket %" PRIu64
                         " of channel %u succeeded, and that ticket failed (status %d): every wait that covers it "
                         "must fail with it",
                         w->rank, f->ticket, f->channel, f->status);
        }
    }
}
