/* SPDX-License-Identifier: Apache-2.0
 *
 * model.c: the history, and the order of judgement.
 */
#include "model.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

uint64_t uccl_ep_model_stamp(uint32_t id, uint32_t index) {
    return (uint64_t)id << 32 | index;
}

uccl_ep_model *uccl_ep_model_new(uint32_t ranks, uint64_t heap_bytes, uint32_t signals) {
    if (!ranks || ranks > 4096) return NULL;
    uccl_ep_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->ranks = ranks;
    m->heap_bytes = heap_bytes;
    m->signals = signals;
    return m;
}

void uccl_ep_model_clear(uccl_ep_model *m) {
    for (uint32_t i = 0; i < m->n_events; i++) free(m->words[i]);
    m->n_events = 0;
    m->error[0] = 0;
}

void uccl_ep_model_free(uccl_ep_model *m) {
    if (!m) return;
    uccl_ep_model_clear(m);
    free(m->events);
    free(m->words);
    free(m);
}

const char *uccl_ep_model_error(const uccl_ep_model *m) {
    return m->error;
}

uint32_t uccl_ep_model_count(const uccl_ep_model *m) {
    return m->n_events;
}

static int refuse(uccl_ep_model *m, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(m->error, sizeof m->error, format, arguments);
    va_end(arguments);
    return -1;
}

static int check(uccl_ep_model *m, const uccl_ep_model_event *e, const uint64_t *words) {
    if (e->kind < UCCL_EP_MODEL_POST || e->kind > UCCL_EP_MODEL_BARRIER)
        return refuse(m, "event %u: kind %u is none", m->n_events, e->kind);
    if (e->rank >= m->ranks) return refuse(m, "event %u: rank %u of %u", m->n_events, e->rank, m->ranks);
    if (e->begin > e->end) return refuse(m, "event %u ends before it begins", m->n_events);
    const bool posts = e->kind == UCCL_EP_MODEL_POST, read = e->kind == UCCL_EP_MODEL_READ;
    if (posts && e->peer >= m->ranks) return refuse(m, "event %u: target %u of %u", m->n_events, e->peer, m->ranks);
    if (posts && (e->op < UCCL_EP_MODEL_PUT || e->op > UCCL_EP_MODEL_FLUSH))
        return refuse(m, "event %u: operation %u is none", m->n_events, e->op);
    if (posts && !e->status && e->ticket == UCCL_EP_MODEL_NO_TICKET)
        return refuse(m, "event %u was posted and has no ticket", m->n_events);
    if (((posts && has_add(e->op) && !e->status) || e->kind == UCCL_EP_MODEL_SIGNAL) && e->slot >= m->signals)
        return refuse(m, "event %u: slot %u of %u", m->n_events, e->slot, m->signals);
    if (read || e->kind == UCCL_EP_MODEL_STORE || (posts && has_bytes(e->op))) {
        if (!posts || !e->status)
            if ((e->local | e->bytes | (posts ? e->remote : 0)) % 8)
                return refuse(m, "event %u: offsets and lengths are multiples of 8", m->n_events);
        if (e->local + e->bytes < e->local || (posts && e->remote + e->bytes < e->remote))
            return refuse(m, "event %u: its end is beyond 2^64", m->n_events);
    }
    if (read && e->bytes && !words) return refuse(m, "event %u is a read without what it saw", m->n_events);
    if (m->n_events >= UCCL_EP_MODEL_MAX_EVENTS) return refuse(m, "%u events are the most", UCCL_EP_MODEL_MAX_EVENTS);
    return 0;
}

int uccl_ep_model_add(uccl_ep_model *m, const uccl_ep_model_event *event, const uint64_t *words) {
    if (check(m, event, words)) return -1;
    if (m->n_events == m->room) {
        const uint32_t room = m->room ? m->room * 2 : 256;
        uccl_ep_model_event *events = realloc(m->events, room * sizeof *events);
        if (events) m->events = events;
        uint64_t **all = realloc(m->words, room * sizeof *all);
        if (all) m->words = all;
        if (!events || !all) return refuse(m, "no memory for %u events", room);
        m->room = room;
    }
    uint64_t *copy = NULL;
    if (words && event->bytes && (event->kind == UCCL_EP_MODEL_READ || event->kind == UCCL_EP_MODEL_STORE)) {
        copy = malloc(event->bytes);
        if (!copy) return refuse(m, "no memory for %" PRIu64 " bytes", event->bytes);
        memcpy(copy, words, event->bytes);
    }
    m->events[m->n_events] = *event;
    m->words[m->n_events++] = copy;
    return 0;
}

int uccl_ep_model_add_all(uccl_ep_model *m, const uccl_ep_model_event *events, uint32_t n, const uint64_t *words,
                          const uint64_t *first) {
    for (uint32_t i = 0; i < n; i++)
        if (uccl_ep_model_add(m, &events[i], first[i] == UINT64_MAX ? NULL : words + first[i])) return -1;
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------ words */

static const char *op_name(uint32_t op) {
    static const char *const names[] = {"nothing", "put", "signal", "put_signal", "flush"};
    return names[op <= 4 ? op : 0];
}

const char *model_name(const uccl_ep_model *m, const post *p) {
    static _Thread_local char names[4][96];
    static _Thread_local unsigned turn;
    char *name = names[turn++ % 4];
    const uccl_ep_model_event *e = event_of(m, p);
    snprintf(name, sizeof names[0], "the %s of rank %u on channel %u (ticket %" PRIu64 ") to rank %u", op_name(e->op),
             e->rank, e->channel, e->ticket, e->peer);
    return name;
}

uint32_t uccl_ep_model_describe(const uccl_ep_model *m, uint32_t index, char *text, uint32_t bytes) {
    if (index >= m->n_events) return 0;
    const uccl_ep_model_event *e = &m->events[index];
    char where[64] = "", what[192] = "";
    if (e->channel == UCCL_EP_MODEL_ALL)
        snprintf(where, sizeof where, "all channels");
    else
        snprintf(where, sizeof where, "channel %u", e->channel);
    switch (e->kind) {
    case UCCL_EP_MODEL_POST:
        if (has_bytes(e->op))
            snprintf(what, sizeof what,
                     "%s ch%u ->%u %" PRIu64 " bytes from %" PRIu64 " to %" PRIu64 "%s, ticket %" PRIu64 ", status %d",
                     op_name(e->op), e->channel, e->peer, e->bytes, e->local, e->remote,
                     has_add(e->op) ? " and a signal" : "", e->ticket, e->status);
        else
            snprintf(what, sizeof what, "%s ch%u ->%u slot %u, add %" PRIu64 ", ticket %" PRIu64 ", status %d",
                     op_name(e->op), e->channel, e->peer, e->slot, e->value, e->ticket, e->status);
        break;
    case UCCL_EP_MODEL_WAIT:
        snprintf(what, sizeof what, "waited for %s of %s up to ticket %lld, status %d",
                 e->source ? "sources" : "completion", where, (long long)e->ticket, e->status);
        break;
    case UCCL_EP_MODEL_SIGNAL:
        snprintf(what, sizeof what, "saw %" PRIu64 " (0x%" PRIx64 ") in signal %u", e->value, e->value, e->slot);
        break;
    case UCCL_EP_MODEL_READ:
        snprintf(what, sizeof what, "read %" PRIu64 " bytes at %" PRIu64 ": 0x%016" PRIx64 "%s", e->bytes, e->local,
                 e->bytes ? m->words[index][0] : 0, e->bytes > 8 ? " ..." : "");
        break;
    case UCCL_EP_MODEL_STORE:
        snprintf(what, sizeof what, "stored %" PRIu64 " bytes at %" PRIu64 "%s 0x%" PRIx64, e->bytes, e->local,
                 m->words[index] ? ":" : ": stamp", m->words[index] ? m->words[index][0] : e->value);
        break;
    case UCCL_EP_MODEL_FAILURE:
        snprintf(what, sizeof what, "found a failure of %s towards rank %d, ticket %lld, status %d", where,
                 (int)e->peer, (long long)e->ticket, e->status);
        break;
    case UCCL_EP_MODEL_EXCLUDE:
        snprintf(what, sizeof what, "excluded rank %u", e->peer);
        break;
    case UCCL_EP_MODEL_RESET:
        snprintf(what, sizeof what, "reset %" PRIu64 ", status %d", e->value, e->status);
        break;
    default:
        snprintf(what, sizeof what, "barrier %" PRIu64, e->value);
    }
    return (uint32_t)snprintf(text, bytes, "[%" PRIu64 ", %" PRIu64 "] rank %u %s", e->begin, e->end, e->rank, what) +
           1;
}

/* -------------------------------------------------------------------------------------------------------- judgement */

void *model_room(uccl_ep_model *m, size_t n, size_t bytes) {
    void *room = calloc(n ? n : 1, bytes);
    if (!room) m->out_of_memory = true;
    return room;
}

void model_report(uccl_ep_model *m, uint32_t outcome, uint64_t at, const char *clause, const uint32_t *events,
                  const char *format, ...) {
    /* Forbidden beats a breach of the program's own, and what was seen first beats what followed from it. */
    uccl_ep_model_verdict *v = m->verdict;
    if (v->outcome == UCCL_EP_MODEL_FORBIDDEN && outcome == UCCL_EP_MODEL_PROGRAM) return;
    if (m->found && v->outcome == outcome && m->found_at <= at) return;
    m->found = true;
    m->found_at = at;
    v->outcome = outcome;
    snprintf(v->clause, sizeof v->clause, "%s", clause);
    v->n_events = 0;
    for (; *events != NOBODY && v->n_events < UCCL_EP_MODEL_VERDICT_EVENTS; events++)
        v->events[v->n_events++] = *events;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(v->text, sizeof v->text, format, arguments);
    va_end(arguments);
}

int uccl_ep_model_judge(uccl_ep_model *m, uccl_ep_model_verdict *verdict) {
    memset(verdict, 0, sizeof *verdict);
    m->verdict = verdict;
    m->found = m->out_of_memory = false;
    if (timeline_build(m)) {
        timeline_judge(m);
        signals_judge(m);
        bytes_judge(m);
    }
    timeline_free(m);
    m->verdict = NULL;
    if (m->out_of_memory) {
        refuse(m, "no memory to judge %u events", m->n_events);
        return -1;
    }
    if (verdict->outcome == UCCL_EP_MODEL_ALLOWED)
        snprintf(verdict->text, sizeof verdict->text,
                 "allowed: %" PRIu64 " words and %" PRIu64 " signal reads, %" PRIu64 " of them only bounded",
                 verdict->words_judged, verdict->signals_judged, verdict->undecided);
    return (int)verdict->outcome;
}
